//! Whether the server works, and what it is doing.

use std::time::Duration;

use axum::http::StatusCode;
use serde_json::{Value, json};
use tf_engine::{EngineHandle, Lifecycle, StopReason};

use crate::config::ServerConfig;

/// How the engine is, from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    Ok,
    /// The weights aren't there yet.
    Loading,
    Draining,
    /// No place in the queue; what runs makes progress.
    Full,
    /// A round is older than the watchdog allows.
    Stalled,
    Failed,
}

impl Condition {
    pub fn of(engine: &EngineHandle, watchdog: Duration) -> Self {
        match engine.lifecycle() {
            Lifecycle::Draining | Lifecycle::Stopped(StopReason::Drained | StopReason::Asked) => {
                return Condition::Draining;
            }
            Lifecycle::Stopped(StopReason::DeviceLost(_) | StopReason::BrokenDown) => return Condition::Failed,
            Lifecycle::Running => {}
        }
        let now = engine.now();
        let is_stalled = engine.stats().round_since.is_some_and(|since| now.since(since) > watchdog);
        if is_stalled { Condition::Stalled } else { Condition::Ok }
    }

    pub fn status(self) -> StatusCode {
        if self == Condition::Ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
    }

    /// The state as `/metrics` names it.
    pub fn name(self) -> &'static str {
        match self {
            Condition::Ok | Condition::Full => "ready",
            Condition::Loading => "loading",
            Condition::Draining => "draining",
            Condition::Stalled => "stalled",
            Condition::Failed => "failed",
        }
    }

    /// The body of a refusal, in llama-server's form.
    pub fn refusal(self) -> Value {
        let message = match self {
            Condition::Ok => "ok",
            Condition::Loading => "Loading model",
            Condition::Full => "the queue is full",
            Condition::Draining => "draining",
            Condition::Stalled => "stalled",
            Condition::Failed => "failed",
        };
        json!({"error": {"code": 503, "message": message, "type": "unavailable_error"}})
    }
}

/// The body of `/health` while all is well. `is_shown`: to a client that may see figures.
pub fn report(config: &ServerConfig, engine: &EngineHandle, uptime: Duration, is_shown: bool) -> Value {
    if !is_shown {
        return json!({"status": "ok"});
    }
    let stats = engine.stats();
    let mut report = json!({
        "status": "ok", "model": config.names[0], "exact": true, "fingerprint": config.identity.fingerprint,
        "uptime_seconds": uptime.as_secs_f64(),
        "requests_running": stats.prefilling + stats.decoding, "requests_waiting": stats.waiting,
        "requests_total": stats.requests,
        "prompt_tokens_total": stats.prompt_tokens, "cached_tokens_total": stats.cached_tokens,
        "completion_tokens_total": stats.reply_tokens,
        "prefill_seconds_total": stats.prefill_time.as_secs_f64(),
        "decode_seconds_total": stats.decode_time.as_secs_f64(),
        "rounds_total": stats.rounds, "drafted_total": stats.drafted, "accepted_total": stats.accepted,
        "slots": {"decoding": stats.decoding, "prefilling": stats.prefilling, "max": stats.slots},
        "context_length": engine.limits().context
    });
    if let Some(last_round) = stats.last_round {
        report["last_step_age_seconds"] = json!(engine.now().since(last_round).as_secs_f64());
    }
    report
}
