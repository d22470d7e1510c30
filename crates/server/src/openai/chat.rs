//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use serde_json::{Map, Value, json};
use tf_text::chat::openai::{ChatBody, chat_body};
use tf_text::chat::{self, ParseStart, ResponseFormat, Thinking, ToolMode};
use tf_text::fields::{BodyError, Code, Fields};
use tf_text::json::Value as Json;
use tf_text::message::Message;
use tf_text::reply::{CallIds, Delta, ReplyOptions};

use crate::body::Body;
use crate::config::ReasoningField;
use crate::connections::Arrival;
use crate::error::ApiError;
use crate::generate::{self, Asked, Choice, PromptInput, ReasoningLimits, Step};
use crate::http::{Server, json_response};
use crate::ids;
use crate::openai::blocks::{Facts, logprob_row};
use crate::openai::models;
use crate::openai::sampling::{self, Generation, TOP_LOGPROBS_MAX};
use crate::session::{Session, Shape};

/// Answers a chat body.
///
/// # Errors
/// A mistake of the body, or a reply that was broken off before the first byte.
pub async fn answer(server: Arc<Server>, body: Body, arrival: Arrival) -> Result<Response, ApiError> {
    let reader = server.clone();
    let prepared = body.read_by(move |body| prepare(&reader, body)).await?;
    let Prepared { generation, facts, prompt, shape, logprobs } = prepared;
    let thinking = facts.thinking;
    let mut extra = Map::new();
    if generation.return_token_ids {
        extra.insert("prompt_token_ids".into(), json!(&*prompt.tokens));
    }
    let asked = Asked {
        generation: &generation,
        what: "messages",
        max_tokens_default: server.config.max_tokens,
        logprobs,
        score_prompt: false,
        arrived: arrival.at,
    };
    let choices = generate::submit(&server, asked, vec![prompt])?;
    let session = Session {
        server,
        facts,
        choices,
        shape,
        extra,
        include_usage: generation.include_usage,
        continuous_usage: generation.continuous_usage,
        peer: arrival.peer,
    };
    let mut response = if generation.stream { session.stream().await? } else { json_response(&session.whole().await?) };
    if let Some(Thinking::On(effort)) = thinking
        && let Ok(value) = HeaderValue::from_str(&format!("{} {}", effort.name(), effort.value()))
    {
        let headers = response.headers_mut();
        headers.insert(HeaderName::from_static("x-tensorfold-effort"), value);
        headers.append(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-tensorfold-effort"));
    }
    Ok(response)
}

struct Prepared {
    generation: Generation,
    facts: Facts,
    prompt: PromptInput,
    shape: ChatShape,
    logprobs: Option<u32>,
}

fn prepare(server: &Server, body: &Json) -> Result<Prepared, ApiError> {
    let config = &server.config;
    let fields = Fields::of_body(body)?;
    let model = models::check_name(config, sampling::model(&fields)?)?.to_string();
    let generation = sampling::generation(&fields, &server.rules())?;
    let logprobs = logprobs(&fields)?;
    let chat = chat_body(&fields, config.chat)?;
    refuse_unbuilt(&chat)?;
    let prompt = chat::encode(&chat.request).map_err(|error| ApiError::internal(&error.to_string()))?;
    ApiError::hopeless("messages", prompt.least_tokens(&config.tokenizer), server.window())?;
    let tokens = prompt.token_ids(&config.tokenizer).map_err(|error| ApiError::internal(&error.to_string()))?;
    let reading = ReplyOptions {
        stops: generation.stops.clone(),
        include_stop: generation.include_stop,
        ignore_end: generation.ignore_eos,
        calls: chat.request.tool_choice.mode != ToolMode::None,
        call_ids: CallIds::new(ids::number()),
        ..ReplyOptions::new(prompt.start)
    };
    let facts = Facts {
        id: ids::id("chatcmpl-", 20),
        object: "chat.completion",
        chunk_object: "chat.completion.chunk",
        created: server.unix_seconds(),
        model,
        sampling: generation.sampling.clone(),
        is_seed_derived: generation.seed.is_none(),
        thinking: Some(chat.request.thinking),
        prompt_count: 1,
    };
    let shape = ChatShape {
        tokenizer: config.tokenizer.clone(),
        reasoning_field: config.reasoning_field,
        shows_reasoning: chat.include_reasoning,
        logprobs: logprobs.is_some(),
        token_ids: generation.return_token_ids,
    };
    let snapshot_at = generate::conversation_positions(&tokens, &config.tokenizer);
    let budget = chat.thinking_budget.map(|tokens| tokens.try_into().unwrap_or(u32::MAX));
    let limits = ReasoningLimits { budget: budget.or(config.reasoning.budget), ..config.reasoning };
    let forcing = generate::forcing(&prompt, limits, &config.tokenizer);
    let forcing = forcing.map_err(|error| ApiError::internal(&error.to_string()))?.map(Arc::new);
    let prompt = PromptInput { tokens: tokens.into(), reading, snapshot_at, forcing };
    Ok(Prepared { generation, facts, prompt, shape, logprobs })
}

/// `logprobs` and `top_logprobs`: how many alternatives each row shows.
fn logprobs(fields: &Fields<'_>) -> Result<Option<u32>, BodyError> {
    let wanted = fields.get("logprobs").map(|field| field.boolean()).transpose()?.unwrap_or(false);
    let Some(field) = fields.get("top_logprobs") else { return Ok(wanted.then_some(0)) };
    let count = field.integer(0..=i128::from(TOP_LOGPROBS_MAX))? as u32;
    if count > 0 && !wanted {
        let message = "top_logprobs needs logprobs: true; add it, or leave top_logprobs out";
        return Err(field.error(Code::ConflictingValues, message));
    }
    Ok(wanted.then_some(count))
}

/// Refuses by name what would change the reply and isn't built yet.
fn refuse_unbuilt(body: &ChatBody) -> Result<(), ApiError> {
    let refuse = |code: &'static str, param: &str, message: &str| Err(ApiError::invalid(code, param, message));
    if body.request.response_format != ResponseFormat::Text {
        let message = "response_format is not built yet for JSON; leave it out or send {\"type\": \"text\"}";
        return refuse("unsupported_parameter", "response_format", message);
    }
    if let Some(index) = body.request.shown_tools().iter().position(|tool| tool.strict) {
        let message = "strict is not built yet: argument values aren't held to the schema; leave it out";
        return refuse("unsupported_parameter", &format!("tools[{index}].function.strict"), message);
    }
    if !body.request.shown_tools().is_empty() {
        if !body.request.parallel_tool_calls {
            let message = "parallel_tool_calls: false is not built yet; leave it out";
            return refuse("unsupported_parameter", "parallel_tool_calls", message);
        }
        if body.request.tool_choice.allowed.is_some() && body.request.forced_tool().is_none() {
            let message = "a choice between some of the tools is not built yet: offer only those, or name one";
            return refuse("unsupported_value", "tool_choice", message);
        }
    }
    Ok(())
}

/// Writes chat choices.
struct ChatShape {
    tokenizer: Arc<tf_text::tokenizer::Tokenizer>,
    reasoning_field: ReasoningField,
    shows_reasoning: bool,
    logprobs: bool,
    token_ids: bool,
}

impl ChatShape {
    fn reasoning_keys(&self) -> &'static [&'static str] {
        match self.reasoning_field {
            ReasoningField::ReasoningContent => &["reasoning_content"],
            ReasoningField::Reasoning => &["reasoning"],
            ReasoningField::Both => &["reasoning_content", "reasoning"],
        }
    }

    fn rows(&self, choice: &Choice, places: &[u32]) -> Vec<Value> {
        let rows = places.iter().filter_map(|&place| choice.rows.get(place as usize));
        rows.map(|row| logprob_row(&self.tokenizer, row)).collect()
    }

    fn logprobs(&self, content: Vec<Value>, reasoning: Vec<Value>) -> Value {
        if self.logprobs {
            json!({"content": content, "reasoning_content": reasoning, "refusal": null})
        } else {
            Value::Null
        }
    }

    fn delta_chunk(&self, step: &Step, delta: &Delta, choice: &Choice) -> Option<Value> {
        let (change, logprobs) = match delta {
            Delta::Reasoning { .. } if !self.shows_reasoning => return None,
            Delta::Reasoning { text, tokens } => {
                let keys = self.reasoning_keys().iter();
                let change: Map<String, Value> = keys.map(|&key| (key.to_string(), text.clone().into())).collect();
                (Value::Object(change), self.logprobs(Vec::new(), self.rows(choice, tokens)))
            }
            Delta::Content { text, tokens } => {
                (json!({"content": text}), self.logprobs(self.rows(choice, tokens), Vec::new()))
            }
            Delta::CallStart { index, id, name } => {
                let function = json!({"name": name, "arguments": ""});
                let call = json!({"index": index, "id": id, "type": "function", "function": function});
                (json!({"tool_calls": [call]}), Value::Null)
            }
            Delta::CallArguments { index, text } => {
                (json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]}), Value::Null)
            }
        };
        Some(json!({"index": step.choice, "delta": change, "logprobs": logprobs, "finish_reason": null}))
    }
}

fn finish_reason(choice: &Choice) -> &'static str {
    choice.ended.as_ref().map_or("stop", |ended| ended.finish.reason.as_str())
}

impl Shape for ChatShape {
    fn opening(&mut self, choices: &[Choice]) -> Vec<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        let entry = |index| json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        (0..choices.len()).map(entry).collect()
    }

    fn chunks(&mut self, step: &Step, choices: &[Choice]) -> Vec<Value> {
        let choice = &choices[step.choice];
        let mut chunks: Vec<Value> =
            step.deltas.iter().filter_map(|delta| self.delta_chunk(step, delta, choice)).collect();
        if step.is_end {
            let mut finish = json!({
                "index": step.choice, "delta": {}, "logprobs": null, "finish_reason": finish_reason(choice),
                "stop_reason": choice.stop_reason()
            });
            if self.token_ids {
                finish["token_ids"] = json!(choice.tokens);
            }
            chunks.push(finish);
        }
        chunks
    }

    fn whole(&mut self, steps: Vec<Step>, choices: &[Choice]) -> Vec<Value> {
        let mut deltas: Vec<Vec<Delta>> = choices.iter().map(|_| Vec::new()).collect();
        for step in steps {
            deltas[step.choice].extend(step.deltas);
        }
        let mut entries = Vec::with_capacity(choices.len());
        for (index, (choice, deltas)) in choices.iter().zip(&deltas).enumerate() {
            let folded = Message::fold(deltas);
            let mut message = Map::new();
            message.insert("role".into(), "assistant".into());
            message.insert("content".into(), folded.content.clone().into());
            if let Some(reasoning) = folded.reasoning.as_ref().filter(|_| self.shows_reasoning) {
                for key in self.reasoning_keys() {
                    message.insert((*key).into(), reasoning.clone().into());
                }
            }
            message.insert("refusal".into(), Value::Null);
            if !folded.tool_calls.is_empty() {
                message.insert("tool_calls".into(), json!(folded.tool_calls));
            }
            let mut rows = (Vec::new(), Vec::new());
            for delta in deltas {
                match delta {
                    Delta::Content { tokens, .. } => rows.0.extend(self.rows(choice, tokens)),
                    Delta::Reasoning { tokens, .. } if self.shows_reasoning => rows.1.extend(self.rows(choice, tokens)),
                    Delta::Reasoning { .. } | Delta::CallStart { .. } | Delta::CallArguments { .. } => {}
                }
            }
            let mut entry = json!({
                "index": index, "message": message, "logprobs": self.logprobs(rows.0, rows.1),
                "finish_reason": finish_reason(choice), "stop_reason": choice.stop_reason()
            });
            if self.token_ids {
                entry["token_ids"] = json!(choice.tokens);
            }
            entries.push(entry);
        }
        entries
    }
}

/// How a reply to plain text is read.
pub fn plain_reading(generation: &Generation) -> ReplyOptions {
    ReplyOptions {
        parse: false,
        stops: generation.stops.clone(),
        include_stop: generation.include_stop,
        ignore_end: generation.ignore_eos,
        ..ReplyOptions::new(ParseStart::ContentContinued)
    }
}
