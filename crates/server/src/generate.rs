//! From prompt ids to replies: length rules, seeds, submission, and what each choice has said so far.
//!
//! Stop strings end a reply here, in the request's own task: the reply is cut after the first token that completes one,
//! the engine is told to stop, and what it committed beyond the cut is dropped. The cut depends on the tokens alone.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use sha2::{Digest, Sha256};
use tf_engine::{Batch, FinishReason, Forcing, Reasoning, Reply, ReplyStats, Request, SubmitError, Time};
use tf_text::TokenId;
use tf_text::chat::{Marker, ParseStart, Prompt};
use tf_text::reply::{Delta, End, Finish, ReplyOptions, ReplyStream};
use tf_text::tokenizer::{Tokenizer, TokenizerError};

use crate::error::{ApiError, Window};
use crate::http::Server;
use crate::metrics::Metrics;
use crate::openai::sampling::Generation;

/// Log-probabilities of one token.
#[derive(Clone, Debug, PartialEq)]
pub struct LogprobRow {
    pub token: TokenId,
    pub logprob: f32,
    pub top: Vec<(TokenId, f32)>,
}

/// A prompt and how its replies are read.
pub struct PromptInput {
    pub tokens: Arc<[TokenId]>,
    pub reading: ReplyOptions,
    /// Positions whose state later prompts may want.
    pub snapshot_at: Vec<u32>,
    /// Tokens of the replies that are given and not drawn.
    pub forcing: Option<Arc<Forcing>>,
}

/// What may end a reasoning from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReasoningLimits {
    /// Most tokens of a reasoning.
    pub budget: Option<u32>,
    /// Ends a reasoning that has become an exact cycle.
    pub loop_guard: bool,
}

/// What is given in a reply to `prompt`: the end of a reasoning that has reached its limits, then a newline before and a
/// blank line after the closing mark; the opening of a call that is asked for.
///
/// # Errors
/// A text that the tokenizer can't encode.
pub fn forcing(
    prompt: &Prompt,
    limits: ReasoningLimits,
    tokenizer: &Tokenizer,
) -> Result<Option<Forcing>, TokenizerError> {
    let opening = prompt.opening_ids(tokenizer)?;
    let is_limited = limits.budget.is_some() || limits.loop_guard || !opening.is_empty();
    let reasoning = match prompt.start {
        ParseStart::Reasoning | ParseStart::ReasoningContinued if is_limited => {
            let close = tokenizer.markers().id(Marker::ThinkEnd);
            let mut closing = tokenizer.encode_plain("\n")?;
            closing.push(close);
            if opening.is_empty() {
                closing.extend(tokenizer.encode_plain("\n\n")?);
            }
            Some(Reasoning { close, budget: limits.budget, loop_guard: limits.loop_guard, closing })
        }
        ParseStart::Reasoning
        | ParseStart::ReasoningContinued
        | ParseStart::Content
        | ParseStart::ContentContinued
        | ParseStart::Calls => None,
    };
    let is_free = reasoning.is_none() && opening.is_empty();
    Ok((!is_free).then_some(Forcing { reasoning, opening }))
}

/// Tokens at the end of a text that may be others once the text has grown.
const TEXT_END_TOKENS: usize = 4;

/// Where a text that ends at `end` is resumed when it has grown.
pub fn text_end(end: usize) -> [u32; 2] {
    [end as u32, end.saturating_sub(TEXT_END_TOKENS) as u32]
}

/// Where later requests resume a conversation: at the end of its last message's text, whose header may change in the next
/// turn, and at the start of its last user message. Markers never come from text, so they tell where.
pub fn conversation_positions(tokens: &[TokenId], tokenizer: &Tokenizer) -> Vec<u32> {
    let last = |marker| tokens.iter().rposition(|&token| token == tokenizer.markers().id(marker));
    let user = last(Marker::User);
    let header = last(Marker::Assistant).filter(|&header| user.is_none_or(|user| header > user));
    let mut positions: Vec<u32> = user.into_iter().map(|user| user as u32).collect();
    positions.extend(text_end(header.unwrap_or(tokens.len())));
    positions
}

/// What the replies to one body share.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    pub generation: &'a Generation,
    /// The field of the body that holds the prompt.
    pub what: &'static str,
    /// Reply limit of a body without one.
    pub max_tokens_default: Option<u32>,
    pub logprobs: Option<u32>,
    pub score_prompt: bool,
    /// When the request came in: its time runs from there.
    pub arrived: Time,
}

/// A choice that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    pub finish: Finish,
    pub reason: FinishReason,
    pub stats: ReplyStats,
}

/// One reply while it is read.
pub struct Choice {
    pub prompt: Arc<[TokenId]>,
    pub max_tokens: u32,
    pub seed: u64,
    /// Tokens of the reply, those after a stop string excluded once it is found.
    pub tokens: Vec<TokenId>,
    /// One for each token, where log-probabilities were asked for.
    pub rows: Vec<LogprobRow>,
    /// The prompt's scored tokens, from its second on.
    pub prompt_rows: Vec<LogprobRow>,
    pub has_started: bool,
    pub ended: Option<Ended>,
    reply: Reply,
    batch: Batch,
    /// Taken at the end.
    text: Option<ReplyStream>,
    is_cut: bool,
    logprobs: bool,
    stop_ids: Vec<TokenId>,
    include_stop: bool,
    metrics: Arc<Metrics>,
    /// When the last batch with tokens came.
    last_tokens: Option<Instant>,
}

/// Submits `n` choices for each prompt, all or none.
///
/// # Errors
/// A prompt that doesn't fit, or no room in the queue; nothing was computed then.
pub fn submit(server: &Server, asked: Asked<'_>, prompts: Vec<PromptInput>) -> Result<Vec<Choice>, ApiError> {
    let (config, engine) = (&server.config, &server.engine);
    let generation = asked.generation;
    let end_token = config.tokenizer.markers().id(Marker::EndOfSentence);
    let mut end_ids = generation.stop_ids.clone();
    if !generation.ignore_eos {
        end_ids.push(end_token);
    }
    let deadline = generation.timeout.map(|timeout| asked.arrived.after(timeout));
    let mut requests = Vec::new();
    let mut readings = Vec::new();
    for prompt in prompts {
        let max_tokens = reply_limit(server.window(), prompt.tokens.len(), &asked)?;
        let seed = generation.seed.unwrap_or_else(|| (config.seeds.of_prompt)(&prompt.tokens));
        for choice in 0..generation.choice_count {
            let mut sampling = generation.sampling.clone();
            sampling.seed = (config.seeds.of_choice)(seed, choice);
            if generation.min_tokens > 0 {
                sampling.masked_before = generation.min_tokens;
                sampling.masked.clone_from(&end_ids);
            }
            requests.push(Request {
                prompt: prompt.tokens.clone(),
                sampling,
                max_tokens,
                end_ids: end_ids.clone(),
                draft_max: if generation.draft { None } else { Some(0) },
                logprobs: asked.logprobs,
                score_prompt: asked.score_prompt,
                deadline,
                snapshot_at: prompt.snapshot_at.clone(),
                forcing: prompt.forcing.clone(),
                priority: generation.priority,
            });
            let mut reading = prompt.reading.clone();
            reading.call_ids = reading.call_ids.of_choice(choice);
            readings.push((reading, seed));
        }
    }
    let submitted = requests.clone();
    let replies = engine.submit_all(requests).map_err(|error| {
        if matches!(error, SubmitError::QueueFull { .. }) {
            server.metrics.refused("queue_full");
        }
        ApiError::of_submit(error, asked.what, server.window())
    })?;
    let choices = replies.into_iter().zip(submitted).zip(readings).map(|((reply, request), (reading, seed))| Choice {
        prompt: request.prompt,
        max_tokens: request.max_tokens,
        seed,
        tokens: Vec::new(),
        rows: Vec::new(),
        prompt_rows: Vec::new(),
        has_started: false,
        ended: None,
        reply,
        batch: Batch::default(),
        text: Some(ReplyStream::new(reading)),
        is_cut: false,
        logprobs: asked.logprobs.is_some(),
        stop_ids: generation.stop_ids.clone(),
        include_stop: generation.include_stop,
        metrics: server.metrics.clone(),
        last_tokens: None,
    });
    Ok(choices.collect())
}

/// How many tokens a reply may have: what was asked for, as far as there is room.
fn reply_limit(window: Window, prompt: usize, asked: &Asked<'_>) -> Result<u32, ApiError> {
    let room = match u32::try_from(prompt) {
        Ok(prompt) if prompt <= window.tokens => window.tokens - prompt,
        Ok(_) | Err(_) => return Err(ApiError::context_length(asked.what, prompt, window)),
    };
    let generation = asked.generation;
    let wanted = generation.max_tokens.or(asked.max_tokens_default).unwrap_or(u32::MAX);
    if generation.min_tokens > wanted {
        let message = format!(
            "min_tokens {} is more than the {wanted} tokens that a reply has here without max_tokens: send max_tokens too",
            generation.min_tokens
        );
        return Err(ApiError::invalid("conflicting_values", "min_tokens", message));
    }
    if room == 0 && wanted > 0 {
        return Err(ApiError::no_room(asked.what, window));
    }
    Ok(wanted.min(room))
}

impl Choice {
    /// Takes over what the engine has sent and returns what can be shown of it.
    fn take(&mut self, tokenizer: &Tokenizer) -> Vec<Delta> {
        self.has_started |= self.batch.started;
        let row_of = |batch: &Batch, row: &tf_engine::TokenRow| LogprobRow {
            token: row.token,
            logprob: row.logprob,
            top: batch.top_of(row).to_vec(),
        };
        self.prompt_rows.extend(self.batch.prompt.iter().map(|row| row_of(&self.batch, row)));
        if !self.batch.tokens.is_empty() {
            let now = Instant::now();
            if let Some(before) = self.last_tokens.replace(now) {
                self.metrics.between_tokens(now.duration_since(before));
            }
        }
        let mut deltas = Vec::new();
        for row in &self.batch.tokens {
            let Some(text) = self.text.as_mut().filter(|_| !self.is_cut) else { break };
            self.tokens.push(row.token);
            if self.logprobs {
                self.rows.push(row_of(&self.batch, row));
            }
            // A stop id ends the reply like a stop string does: its own text isn't shown unless it is asked for.
            if self.stop_ids.contains(&row.token) && !self.include_stop {
                continue;
            }
            deltas.extend(text.push_token(tokenizer, row.token));
            if text.stop().is_some() {
                self.is_cut = true;
                self.reply.cancel();
            }
        }
        if let Some(finished) = self.batch.finished.take() {
            deltas.extend(self.end(finished.reason, finished.stats));
        }
        deltas
    }

    fn end(&mut self, reason: FinishReason, stats: ReplyStats) -> Vec<Delta> {
        let Some(text) = self.text.take() else { return Vec::new() };
        let end = if reason == FinishReason::Length { End::Length } else { End::Stop };
        let (deltas, finish) = text.finish(end);
        let reason = if finish.stop.is_some() {
            // Found before or at the end; either way the reply is complete up to the cut.
            self.tokens.truncate(finish.token_count as usize);
            self.rows.truncate(finish.token_count as usize);
            FinishReason::Stop(self.tokens.last().copied().unwrap_or_default())
        } else {
            reason
        };
        if reason == FinishReason::QueueTimeout {
            self.metrics.refused("queue_timeout");
        }
        self.metrics.ended(&reason, &stats);
        self.ended = Some(Ended { finish, reason, stats });
        deltas
    }

    /// The stop string or stop id that ended the reply.
    pub fn stop_reason(&self) -> serde_json::Value {
        let Some(ended) = &self.ended else { return serde_json::Value::Null };
        if let Some(stop) = &ended.finish.stop {
            return stop.clone().into();
        }
        match ended.reason {
            FinishReason::Stop(token) if self.stop_ids.contains(&token) => token.into(),
            _ => serde_json::Value::Null,
        }
    }

    /// The digest by which a client can compare replies.
    pub fn token_sha(&self) -> String {
        token_sha(&self.tokens)
    }
}

/// First 16 hexadecimal digits of SHA-256 over the ids, each as 4 little-endian bytes.
pub fn token_sha(tokens: &[TokenId]) -> String {
    let mut digest = Sha256::new();
    for token in tokens {
        digest.update(token.to_le_bytes());
    }
    let digest = digest.finalize();
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// What one choice has to show.
#[derive(Debug)]
pub struct Step {
    pub choice: usize,
    pub deltas: Vec<Delta>,
    /// The choice has just ended.
    pub is_end: bool,
}

/// Waits until one of the choices has something new; `None` when all have ended.
///
/// Dropping the future loses nothing.
pub async fn next_step(choices: &mut [Choice], tokenizer: &Tokenizer) -> Option<Step> {
    poll_fn(|context| {
        let mut is_open = false;
        for (index, choice) in choices.iter_mut().enumerate() {
            if choice.ended.is_some() {
                continue;
            }
            is_open = true;
            if choice.reply.poll_receive(context, &mut choice.batch).is_ready() {
                let deltas = choice.take(tokenizer);
                return Poll::Ready(Some(Step { choice: index, deltas, is_end: choice.ended.is_some() }));
            }
        }
        if is_open { Poll::Pending } else { Poll::Ready(None) }
    })
    .await
}

/// The first choice that was broken off, as its client hears it.
pub fn failure(choices: &[Choice]) -> Option<ApiError> {
    choices.iter().filter_map(|choice| choice.ended.as_ref()).find_map(|ended| ApiError::of_ending(&ended.reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_sha_is_over_little_endian_ids() {
        // sha256 of nothing, and of 01 00 00 00 02 01 00 00.
        assert_eq!(token_sha(&[]), "e3b0c44298fc1c14");
        assert_ne!(token_sha(&[1, 258]), token_sha(&[258, 1]));
    }
}
