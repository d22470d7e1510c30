//! What a client hears when something is wrong: one shape, one table from causes to statuses.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tf_engine::{FinishReason, StopReason, SubmitError};
use tf_text::fields::BodyError;

use crate::ids;

const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";
const RATE: &str = "rate_limit_error";

/// How long a request may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Tokens of prompt and reply together.
    pub tokens: u32,
    /// Tokens that the model was made for.
    pub most: u32,
}

impl Window {
    /// What to do with a prompt that doesn't fit. `it`: the prompt in the sentence.
    fn advice(self, it: &str) -> String {
        let Window { tokens, most } = self;
        match tokens < most {
            true => format!("Shorten {it}, or start the server with a larger --context, up to {most}."),
            false => format!("Shorten {it}: this is the most that the model was made for."),
        }
    }
}

/// A refusal or a failure, as it goes to the client.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    /// `error.type`.
    pub kind: &'static str,
    pub code: &'static str,
    pub param: Option<String>,
    pub message: String,
    pub retry_after: Option<Duration>,
    /// Methods that the path does have.
    pub allow: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        ApiError { status, kind, code, param: None, message: message.into(), retry_after: None, allow: None }
    }

    /// A field of the body that can't be as it is, by its path.
    pub fn invalid(code: &'static str, param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = ApiError::new(StatusCode::BAD_REQUEST, INVALID, code, message);
        ApiError { param: Some(param.into()), ..error }
    }

    /// A body that is no JSON.
    pub fn invalid_json(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, INVALID, "invalid_json", message)
    }

    /// `what`: the field that holds the prompt.
    pub fn context_length(what: &str, prompt: usize, window: Window) -> Self {
        ApiError::too_long(what, &prompt.to_string(), window)
    }

    /// Refuses a prompt whose length alone says that it can't fit, before it is encoded.
    ///
    /// # Errors
    /// As [`ApiError::context_length`], with what it has at the least.
    pub fn hopeless(what: &str, least: usize, window: Window) -> Result<(), Self> {
        if least <= window.tokens as usize {
            Ok(())
        } else {
            Err(ApiError::too_long(what, &format!("at least {least}"), window))
        }
    }

    fn too_long(what: &str, found: &str, window: Window) -> Self {
        let (place, it) = if what == "messages" { ("messages", "them") } else { ("prompt", "it") };
        let message = format!(
            "This model's maximum context length is {} tokens, but the request has {found} tokens in the {place}. {}",
            window.tokens,
            window.advice(it)
        );
        ApiError::invalid("context_length_exceeded", what, message)
    }

    /// The prompt fills the context, so that no token of a reply would fit.
    pub fn no_room(what: &str, window: Window) -> Self {
        let tokens = window.tokens;
        let message = format!(
            "This model's maximum context length is {tokens} tokens, but the request has {tokens} tokens in the {what} \
             and asks for a reply. {}",
            window.advice("it")
        );
        ApiError::invalid("context_length_exceeded", what, message)
    }

    /// No key, or none of the server's.
    pub fn invalid_key() -> Self {
        let message = "The API key is missing or wrong. Send one of the server's keys as `Authorization: Bearer KEY`.";
        ApiError::new(StatusCode::UNAUTHORIZED, INVALID, "invalid_api_key", message)
    }

    /// A name under which the server may not be called.
    pub fn host_not_allowed(host: &str) -> Self {
        let message = format!(
            "The host {host:?} is not one of this server's names. Add it with --allowed-hosts if requests shall come \
             in under that name."
        );
        ApiError::new(StatusCode::FORBIDDEN, "permission_error", "host_not_allowed", message)
    }

    /// A name that none of `served` is.
    pub fn model_not_found(model: &str, served: &[String]) -> Self {
        let message = format!(
            "The model {model:?} is not served here; {} is. Start the server with --name or --any-model to accept \
             other names.",
            served.join(", ")
        );
        let error = ApiError::new(StatusCode::NOT_FOUND, INVALID, "model_not_found", message);
        ApiError { param: Some("model".to_string()), ..error }
    }

    /// A path that means nothing.
    pub fn unknown_route(path: &str) -> Self {
        let message =
            format!("There is no route {path:?}. GET /v1/models and POST /v1/chat/completions are two of them.");
        ApiError::new(StatusCode::NOT_FOUND, INVALID, "unknown_route", message)
    }

    /// A path that other servers have.
    pub fn unsupported_route(reason: &str) -> Self {
        ApiError::new(StatusCode::NOT_FOUND, INVALID, "unsupported_route", reason)
    }

    /// A method that the path doesn't have; `allow` lists those that it has.
    pub fn method_not_allowed(method: &str, path: &str, allow: &'static str) -> Self {
        let message = format!("{path} takes {allow}, not {method}.");
        let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, "method_not_allowed", message);
        ApiError { allow: Some(allow), ..error }
    }

    /// A body beyond its limit.
    pub fn too_large(limit_bytes: usize) -> Self {
        let message = format!(
            "The body is larger than {limit_bytes} bytes. Shorten it, or start the server with a larger --max-body."
        );
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, "request_too_large", message)
    }

    /// Nothing is wrong with this one: others are on their way.
    pub fn too_many_bodies() -> Self {
        let message = "The memory for request bodies is taken by others that are on their way. Send the request again, \
                       or start the server with a larger --max-body.";
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, RATE, "too_many_bodies", message);
        ApiError { retry_after: Some(Duration::from_secs(1)), ..error }
    }

    pub fn unsupported_media_type(found: &str) -> Self {
        let message = format!(
            "The body must be application/json, got {found:?}. Send the header `content-type: application/json`."
        );
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, "unsupported_media_type", message)
    }

    pub fn unsupported_encoding(found: &str) -> Self {
        let message = format!(
            "Content-Encoding {found:?} can't be read. Send the body as it is, or with Content-Encoding: gzip."
        );
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, "unsupported_media_type", message)
    }

    /// The weights are still being read.
    pub fn loading() -> Self {
        let message = "The model is still being loaded. Send the request again in a moment; GET /ready says when.";
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, "model_loading", message);
        ApiError { retry_after: Some(Duration::from_secs(5)), ..error }
    }

    /// The server is about to end.
    pub fn draining() -> Self {
        let message = "The server is shutting down and takes no new requests. Send the request again in a moment.";
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, "draining", message);
        ApiError { retry_after: Some(Duration::from_secs(5)), ..error }
    }

    fn stopped() -> Self {
        let message = "The server shut down before the reply was finished. Send the request again.";
        ApiError { message: message.to_string(), ..ApiError::draining() }
    }

    pub fn device_lost() -> Self {
        let message = "The device is lost, nothing can be computed any more. Restart the server.";
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, "device_lost", message);
        ApiError { retry_after: Some(Duration::from_secs(30)), ..error }
    }

    pub fn stalled() -> Self {
        let message =
            "The engine makes no progress (see --watchdog). Send the request again later, or restart the server.";
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, "engine_stalled", message);
        ApiError { retry_after: Some(Duration::from_secs(10)), ..error }
    }

    /// `fault`: which file, and what is wrong with it.
    pub fn checkpoint_changed(fault: &str) -> Self {
        let message = format!("{fault}. Nothing is computed from it any more; restart the server.");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, "checkpoint_changed", message)
    }

    fn queue_timeout() -> Self {
        let message = "No slot became free in time. Send the request again later, or start the server with a larger \
                       --parallel or --queue-timeout.";
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, RATE, "queue_timeout", message);
        ApiError { retry_after: Some(Duration::from_secs(5)), ..error }
    }

    /// Sent again it would need as long: clients shall not do so by themselves.
    fn deadline() -> Self {
        let message = "The reply was not finished within the request's timeout and has been cancelled. Ask for fewer \
                       tokens, or send a larger timeout.";
        let error = ApiError::new(StatusCode::GATEWAY_TIMEOUT, SERVER, "deadline_exceeded", message);
        ApiError { param: Some("timeout".to_string()), ..error }
    }

    /// A bug or a failed computation. The log has the details under the report's id; the client gets the id alone.
    pub fn engine(details: &str) -> Self {
        let report = ids::id("report_", 12);
        tracing::error!(report, details, "a request failed in the engine");
        let message = format!("The engine could not finish this reply. The server's log has it as {report}.");
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "engine_error", message)
    }

    /// A bug of the server's own.
    pub fn internal(details: &str) -> Self {
        let report = ids::id("report_", 12);
        tracing::error!(report, details, "a request failed in the server");
        let message = format!("The server could not answer this request. Its log has it as {report}.");
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "internal_error", message)
    }

    /// What an ending that left a reply incomplete means to its client; `None` for complete replies.
    pub fn of_ending(reason: &FinishReason) -> Option<Self> {
        Some(match reason {
            FinishReason::Stop(_) | FinishReason::Length => return None,
            FinishReason::Cancelled => ApiError::internal("a reply was cancelled that somebody waits for"),
            FinishReason::SlowReader => {
                let message = "The reply was read too slowly and has been cancelled.";
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "engine_error", message)
            }
            FinishReason::Deadline => ApiError::deadline(),
            FinishReason::QueueTimeout => ApiError::queue_timeout(),
            FinishReason::Stopped => ApiError::stopped(),
            FinishReason::OutOfMemory => ApiError::engine(
                "the memory for running requests is taken by older ones; try again, or start the server with a smaller \
                 --parallel or --context",
            ),
            FinishReason::Failed(details) => ApiError::engine(details),
            FinishReason::DeviceLost(details) => {
                tracing::error!(details, "the device is lost");
                ApiError::device_lost()
            }
        })
    }

    /// `what`: the field that holds the prompt.
    pub fn of_submit(error: SubmitError, what: &str, window: Window) -> Self {
        match error {
            SubmitError::EmptyPrompt => {
                ApiError::invalid("invalid_value", what, "The prompt is empty; a model needs at least one token.")
            }
            SubmitError::TooLong { prompt, .. } => ApiError::context_length(what, prompt, window),
            SubmitError::UnknownToken { token, vocab_size } => ApiError::invalid(
                "invalid_value",
                what,
                format!("token {token} is outside the vocabulary, whose largest id is {}", vocab_size - 1),
            ),
            SubmitError::QueueFull { waiting, retry_after } => {
                let message = format!("All {waiting} places of the queue are taken. Send the request again later.");
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, RATE, "queue_full", message);
                ApiError { retry_after: Some(retry_after), ..error }
            }
            SubmitError::Draining => ApiError::draining(),
            SubmitError::Stopped(StopReason::DeviceLost(_)) => ApiError::device_lost(),
            SubmitError::Stopped(StopReason::BrokenDown) => ApiError::stalled(),
            SubmitError::Stopped(StopReason::Drained | StopReason::Asked) => ApiError::draining(),
        }
    }

    /// The body, also of an error event inside a stream.
    pub fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl From<BodyError> for ApiError {
    fn from(error: BodyError) -> Self {
        let invalid = ApiError::new(StatusCode::BAD_REQUEST, INVALID, error.code.as_str(), error.message);
        ApiError { param: error.param, ..invalid }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.to_json().to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(retry_after) = self.retry_after {
            let seconds = retry_after.as_secs_f64().ceil().clamp(1.0, 60.0) as u64;
            let milliseconds = retry_after.as_millis().clamp(1, 60_000) as u64;
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
            headers.insert(HeaderName::from_static("retry-after-ms"), HeaderValue::from(milliseconds));
        } else if self.status.is_server_error() {
            headers.insert(HeaderName::from_static("x-should-retry"), HeaderValue::from_static("false"));
        }
        if let Some(allow) = self.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
