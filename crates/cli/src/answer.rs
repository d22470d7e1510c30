//! Answers conversations in this process: what `run` and `bench evaluate` share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tf_engine::{Batch, EngineHandle, FinishReason, ReplyStats, Request, Sampling, WallClock};
use tf_numerics::draw;
use tf_server::{ReasoningLimits, SamplingDefaults};
use tf_text::TokenId;
use tf_text::chat::{self, Marker};
use tf_text::message::Message;
use tf_text::reply::{CallIds, Delta, End, Finish, ReplyOptions, ReplyStream};
use tf_text::tokenizer::Tokenizer;

use crate::arguments::Arguments;
use crate::failure::Failure;
use crate::load::Checked;
use crate::resolve;

/// A model that runs in this process, and how it is asked.
pub struct Asker {
    engine: EngineHandle,
    tokenizer: Arc<Tokenizer>,
    pub sampling: SamplingDefaults,
    pub seed: Option<u64>,
    pub salt: Vec<u8>,
    pub max_tokens: Option<u32>,
    pub draft_max: Option<u32>,
    pub reasoning: ReasoningLimits,
}

/// A whole reply.
pub struct Answer {
    pub message: Message,
    pub finish: Finish,
    /// Every committed token, the end token included.
    pub tokens: Vec<TokenId>,
    pub stats: ReplyStats,
    /// It was stopped before its end.
    pub is_interrupted: bool,
}

impl Asker {
    /// Loads the model and starts its engine.
    ///
    /// # Errors
    /// As loading; and limits that the model can't serve.
    pub fn start(checked: &Checked, arguments: &Arguments) -> Result<Asker, Failure> {
        let model = checked.model(checked.loading.options.clone())?;
        let limits = resolve::engine_limits(arguments, &tf_engine::model::Model::limits(&model), &checked.loading);
        let (engine, _) = tf_engine::spawn(model, limits, Arc::new(WallClock::new()))
            .map_err(|error| Failure::run_time(error.to_string()))?;
        Ok(Asker {
            engine,
            tokenizer: Arc::clone(&checked.tokenizer),
            sampling: SamplingDefaults { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0 },
            seed: None,
            salt: Vec::new(),
            max_tokens: None,
            draft_max: None,
            reasoning: ReasoningLimits::default(),
        })
    }

    /// Answers one conversation; `show` hears the reply as it comes. Setting `stop` ends it early.
    ///
    /// # Errors
    /// A conversation that the format can't express, one that doesn't fit, a failed forward.
    pub fn ask(
        &self,
        request: &chat::Request,
        stop: &AtomicBool,
        show: &mut dyn FnMut(&Delta) -> std::io::Result<()>,
    ) -> Result<Answer, Failure> {
        let failed = |text: String| Failure::run_time(text);
        let prompt = chat::encode(request).map_err(|error| failed(error.to_string()))?;
        let ids = prompt.token_ids(&self.tokenizer).map_err(|error| failed(error.to_string()))?;
        let context = self.engine.limits().context as usize;
        let room = context.saturating_sub(ids.len());
        if room == 0 {
            return Err(failed(format!(
                "this model's window is {context} tokens and the conversation has {}. Shorten it (/clear), or raise --context",
                ids.len()
            )));
        }
        let forcing = tf_server::forcing(&prompt, self.reasoning, &self.tokenizer);
        let forcing = forcing.map_err(|error| failed(error.to_string()))?.map(Arc::new);
        let end = self.tokenizer.markers().id(Marker::EndOfSentence);
        let seed = self.seed.unwrap_or_else(|| draw::seed_from_prompt(&ids, &self.salt));
        let sampling = Sampling {
            temperature: self.sampling.temperature,
            top_p: self.sampling.top_p,
            top_k: self.sampling.top_k,
            min_p: self.sampling.min_p,
            seed,
            ..Sampling::greedy()
        };
        let mut reply = self
            .engine
            .submit(Request {
                sampling,
                max_tokens: self.max_tokens.map_or(room, |most| room.min(most as usize)) as u32,
                end_ids: vec![end],
                draft_max: self.draft_max,
                snapshot_at: tf_server::conversation_positions(&ids, &self.tokenizer),
                forcing,
                ..Request::greedy(&ids, 0)
            })
            .map_err(|error| failed(error.to_string()))?;

        let mut stream =
            ReplyStream::new(ReplyOptions { call_ids: CallIds::new(seed), ..ReplyOptions::new(prompt.start) });
        let mut deltas = Vec::new();
        let mut tokens = Vec::new();
        let mut batch = Batch::default();
        let finished = loop {
            batch.clear();
            reply.receive_blocking(&mut batch);
            for row in &batch.tokens {
                tokens.push(row.token);
                for delta in stream.push_token(&self.tokenizer, row.token) {
                    show(&delta)?;
                    deltas.push(delta);
                }
            }
            if let Some(finished) = batch.finished.take() {
                break finished;
            }
            if stop.load(Ordering::Relaxed) {
                reply.cancel();
            }
        };
        let is_interrupted = match finished.reason {
            FinishReason::Stop(_) | FinishReason::Length => false,
            FinishReason::Cancelled => true,
            FinishReason::Failed(reason) | FinishReason::DeviceLost(reason) => return Err(failed(reason)),
            other => return Err(failed(format!("the reply ended early: {other:?}"))),
        };
        let how = if matches!(finished.reason, FinishReason::Length) { End::Length } else { End::Stop };
        let (rest, finish) = stream.finish(how);
        for delta in rest {
            show(&delta)?;
            deltas.push(delta);
        }
        let message = Message::fold(&deltas);
        Ok(Answer { message, finish, tokens, stats: finished.stats, is_interrupted })
    }
}
