//! `POST /v1/completions`: text in, text out; no reasoning, no calls.

use std::sync::Arc;

use axum::response::Response;
use serde_json::{Map, Value, json};
use tf_text::TokenId;
use tf_text::chat::Marker;
use tf_text::detokenizer::Detokenizer;
use tf_text::fields::{BodyError, Code, Field, Fields};
use tf_text::json::Value as Json;
use tf_text::reply::Delta;
use tf_text::tokenizer::Tokenizer;

use crate::body::Body;
use crate::connections::Arrival;
use crate::error::ApiError;
use crate::generate::{self, Asked, Choice, LogprobRow, PromptInput, Step};
use crate::http::{Server, json_response};
use crate::ids;
use crate::openai::blocks::{Facts, logprob};
use crate::openai::chat::plain_reading;
use crate::openai::models;
use crate::openai::sampling::{self, Generation, TOP_LOGPROBS_MAX};
use crate::session::{Session, Shape};

/// Reply limit of bodies without one.
const MAX_TOKENS_DEFAULT: u32 = 16;
/// Most choices of one body, over all prompts.
const CHOICES_MAX: usize = 2048;

/// Answers a completions body.
///
/// # Errors
/// A mistake of the body, or a reply that was broken off before the first byte.
pub async fn answer(server: Arc<Server>, body: Body, arrival: Arrival) -> Result<Response, ApiError> {
    let reader = server.clone();
    let prepared = body.read_by(move |body| prepare(&reader, body)).await?;
    let Prepared { generation, facts, prompts, shape, logprobs } = prepared;
    let asked = Asked {
        generation: &generation,
        what: "prompt",
        max_tokens_default: Some(MAX_TOKENS_DEFAULT),
        logprobs,
        score_prompt: shape.echo && logprobs.is_some(),
        arrived: arrival.at,
    };
    let choices = generate::submit(&server, asked, prompts)?;
    let shape = CompletionShape { texts: choices.iter().map(|_| TextState::default()).collect(), ..shape };
    let session = Session {
        server,
        facts,
        choices,
        shape,
        extra: Map::new(),
        include_usage: generation.include_usage,
        continuous_usage: generation.continuous_usage,
        peer: arrival.peer,
    };
    if generation.stream { session.stream().await } else { Ok(json_response(&session.whole().await?)) }
}

struct Prepared {
    generation: Generation,
    facts: Facts,
    prompts: Vec<PromptInput>,
    shape: CompletionShape,
    logprobs: Option<u32>,
}

fn prepare(server: &Server, body: &Json) -> Result<Prepared, ApiError> {
    let config = &server.config;
    let fields = Fields::of_body(body)?;
    let model = models::check_name(config, sampling::model(&fields)?)?.to_string();
    if fields.get("messages").is_some() {
        let message = "messages belong to POST /v1/chat/completions; this route takes prompt";
        return Err(ApiError::invalid("unsupported_parameter", "messages", message));
    }
    let generation = sampling::generation(&fields, &server.rules())?;
    if let Some(field) = fields.get("response_format")
        && field.object()?.get("type").map(|kind| kind.string()).transpose()? != Some("text")
    {
        let message = "response_format is not built yet for JSON; leave it out or send {\"type\": \"text\"}";
        return Err(ApiError::invalid("unsupported_parameter", "response_format", message));
    }
    let boolean = |key: &str| -> Result<bool, BodyError> {
        Ok(fields.get(key).map(|field| field.boolean()).transpose()?.unwrap_or(false))
    };
    let echo = boolean("echo")?;
    let adds_begin = boolean("add_special_tokens")?;
    let logprobs = fields.get("logprobs").map(|field| field.integer(0..=i128::from(TOP_LOGPROBS_MAX))).transpose()?;
    let logprobs = logprobs.map(|count| count as u32);
    if generation.max_tokens == Some(0) && !echo {
        let message = "max_tokens must be 1 or more, or echo true: otherwise there is nothing to answer";
        return Err(ApiError::invalid("invalid_value", "max_tokens", message));
    }

    let mut prompts = prompts(&fields, server)?;
    if adds_begin {
        let begin = config.tokenizer.markers().id(Marker::BeginOfSentence);
        prompts.iter_mut().for_each(|prompt| prompt.insert(0, begin));
    }
    let choice_count = prompts.len() * generation.choice_count as usize;
    if choice_count > CHOICES_MAX {
        let message = format!("{choice_count} choices are asked for, one body may have {CHOICES_MAX}");
        return Err(ApiError::invalid("invalid_value", "prompt", message));
    }
    if let Some(index) = prompts.iter().position(Vec::is_empty) {
        let param = if prompts.len() == 1 { "prompt".to_string() } else { format!("prompt[{index}]") };
        return Err(ApiError::invalid("invalid_value", param, "the prompt is empty; a model needs at least one token"));
    }
    let facts = Facts {
        id: ids::id("cmpl-", 20),
        object: "text_completion",
        chunk_object: "text_completion",
        created: server.unix_seconds(),
        model,
        sampling: generation.sampling.clone(),
        is_seed_derived: generation.seed.is_none(),
        thinking: None,
        prompt_count: prompts.len(),
    };
    let reading = |tokens: Vec<TokenId>| PromptInput {
        snapshot_at: generate::text_end(tokens.len()).to_vec(),
        tokens: tokens.into(),
        reading: plain_reading(&generation),
        forcing: None,
    };
    let prompts = prompts.into_iter().map(reading).collect();
    let shape = CompletionShape {
        tokenizer: config.tokenizer.clone(),
        echo,
        logprobs: logprobs.is_some(),
        token_ids: generation.return_token_ids,
        texts: Vec::new(),
    };
    Ok(Prepared { generation, facts, prompts, shape, logprobs })
}

/// A string, a list of strings, a list of ids, or a list of such lists.
fn prompts(fields: &Fields<'_>, server: &Server) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let (tokenizer, vocab_size) = (&*server.config.tokenizer, server.rules().vocab_size);
    let window = server.window();
    let field = fields.required("prompt")?;
    let text = |field: &Field<'_>| {
        let text = field.string()?;
        ApiError::hopeless("prompt", tokenizer.least_tokens(text), window)?;
        tokenizer.encode_with_markers(text).map_err(|error| ApiError::internal(&error.to_string()))
    };
    match field.value() {
        Json::String(_) => Ok(vec![text(&field)?]),
        Json::Array(items) => match items.first() {
            None => {
                Err(field.error(Code::InvalidValue, "prompt is an empty list; a model needs at least one token").into())
            }
            Some(Json::Number(_)) => Ok(vec![sampling::token_ids(&field, vocab_size)?]),
            Some(Json::String(_)) => field.array()?.iter().map(text).collect(),
            Some(Json::Array(_)) => {
                field.array()?.iter().map(|ids| Ok(sampling::token_ids(ids, vocab_size)?)).collect()
            }
            Some(_) => {
                Err(field.wrong_type("a string, a list of strings, a list of ids, or a list of id lists").into())
            }
        },
        _ => Err(field.wrong_type("a string, a list of strings, a list of ids, or a list of id lists").into()),
    }
}

/// Where the text of one choice has come to, for `text_offset`.
#[derive(Default)]
struct TextState {
    detokenizer: Detokenizer,
    characters: usize,
    has_echoed: bool,
}

/// Writes completion choices.
struct CompletionShape {
    tokenizer: Arc<Tokenizer>,
    echo: bool,
    logprobs: bool,
    token_ids: bool,
    texts: Vec<TextState>,
}

/// The four lists of a completion's log-probabilities.
#[derive(Default)]
struct Lists {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<Value>,
}

impl CompletionShape {
    /// A token as text; bytes that are no character are spelled out, so that different tokens stay different.
    fn name(&self, token: TokenId) -> String {
        let bytes = self.tokenizer.token_bytes(token).unwrap_or_default();
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_string(),
            Err(_) => bytes.iter().fold("bytes:".to_string(), |name, byte| format!("{name}\\x{byte:02x}")),
        }
    }

    fn push_row(&mut self, index: usize, token: TokenId, row: Option<&LogprobRow>, lists: &mut Lists) {
        let state = &mut self.texts[index];
        lists.text_offset.push(state.characters.into());
        let mut text = String::new();
        state.detokenizer.push(self.tokenizer.token_bytes(token).unwrap_or_default(), &mut text);
        state.characters += text.chars().count();
        lists.tokens.push(self.name(token).into());
        let Some(row) = row else {
            lists.token_logprobs.push(Value::Null);
            lists.top_logprobs.push(Value::Null);
            return;
        };
        lists.token_logprobs.push(logprob(row.logprob));
        // The token itself is always there, beside the likeliest.
        let mut top: Map<String, Value> =
            row.top.iter().map(|&(token, value)| (self.name(token), logprob(value))).collect();
        top.entry(self.name(token)).or_insert_with(|| logprob(row.logprob));
        lists.top_logprobs.push(Value::Object(top));
    }

    /// The prompt's text and its rows, once, in front of the reply.
    fn echoed(&mut self, index: usize, choice: &Choice, lists: &mut Lists) -> String {
        if !self.echo || self.texts[index].has_echoed {
            return String::new();
        }
        self.texts[index].has_echoed = true;
        if self.logprobs {
            for (place, &token) in choice.prompt.iter().enumerate() {
                let row = place.checked_sub(1).and_then(|row| choice.prompt_rows.get(row));
                self.push_row(index, token, row, lists);
            }
        }
        self.tokenizer.decode(&choice.prompt, false).unwrap_or_default()
    }

    fn push_delta(&mut self, index: usize, delta: &Delta, choice: &Choice, text: &mut String, lists: &mut Lists) {
        // Without parsing everything is content.
        let Delta::Content { text: piece, tokens } = delta else { return };
        text.push_str(piece);
        if self.logprobs {
            for &place in tokens {
                if let Some(row) = choice.rows.get(place as usize) {
                    self.push_row(index, row.token, Some(row), lists);
                }
            }
        }
    }

    fn entry(&self, index: usize, text: String, lists: Lists, choice: &Choice, is_end: bool) -> Value {
        let logprobs = if self.logprobs {
            let Lists { tokens, token_logprobs, top_logprobs, text_offset } = lists;
            json!({
                "tokens": tokens, "token_logprobs": token_logprobs, "top_logprobs": top_logprobs,
                "text_offset": text_offset
            })
        } else {
            Value::Null
        };
        let (finish, stop) = match &choice.ended {
            Some(ended) if is_end => (ended.finish.reason.as_str().into(), choice.stop_reason()),
            Some(_) | None => (Value::Null, Value::Null),
        };
        let mut entry =
            json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop});
        if self.token_ids && is_end {
            entry["prompt_token_ids"] = json!(&*choice.prompt);
            entry["token_ids"] = json!(choice.tokens);
        }
        entry
    }
}

impl Shape for CompletionShape {
    fn opening(&mut self, _: &[Choice]) -> Vec<Value> {
        Vec::new()
    }

    fn chunks(&mut self, step: &Step, choices: &[Choice]) -> Vec<Value> {
        let choice = &choices[step.choice];
        let is_prompt_done = !choice.tokens.is_empty() || step.is_end;
        let mut text = String::new();
        let mut lists = Lists::default();
        if is_prompt_done {
            text = self.echoed(step.choice, choice, &mut lists);
        }
        for delta in &step.deltas {
            self.push_delta(step.choice, delta, choice, &mut text, &mut lists);
        }
        let mut chunks = Vec::new();
        if !text.is_empty() || !lists.tokens.is_empty() {
            chunks.push(self.entry(step.choice, text, lists, choice, false));
        }
        if step.is_end {
            chunks.push(self.entry(step.choice, String::new(), Lists::default(), choice, true));
        }
        chunks
    }

    fn whole(&mut self, steps: Vec<Step>, choices: &[Choice]) -> Vec<Value> {
        let mut parts: Vec<(String, Lists)> = Vec::with_capacity(choices.len());
        for (index, choice) in choices.iter().enumerate() {
            let mut lists = Lists::default();
            let text = self.echoed(index, choice, &mut lists);
            parts.push((text, lists));
        }
        for step in &steps {
            let (text, lists) = &mut parts[step.choice];
            for delta in &step.deltas {
                self.push_delta(step.choice, delta, &choices[step.choice], text, lists);
            }
        }
        let parts = parts.into_iter().enumerate();
        parts.map(|(index, (text, lists))| self.entry(index, text, lists, &choices[index], true)).collect()
    }
}
