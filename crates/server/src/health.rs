//! Whether the server works, and what it is doing.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use serde_json::{Value, json};
use tf_engine::{EngineHandle, EngineStats, Lifecycle, StopReason};

use crate::http::Server;

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
    /// Files of the checkpoint aren't what they were when they were opened.
    Changed,
    /// The last round could not read what it needs.
    Unreadable,
}

impl Condition {
    /// What the engine and the files show now; a round older than `watchdog` is a stall.
    pub fn of(engine: &EngineHandle, watchdog: Duration, files: &Files) -> Self {
        match engine.lifecycle() {
            Lifecycle::Draining | Lifecycle::Stopped(StopReason::Drained | StopReason::Asked) => {
                return Condition::Draining;
            }
            Lifecycle::Stopped(StopReason::DeviceLost(_) | StopReason::BrokenDown) => return Condition::Failed,
            Lifecycle::Running => {}
        }
        let (now, stats) = (engine.now(), engine.stats());
        if stats.round_since.is_some_and(|since| now.since(since) > watchdog) {
            Condition::Stalled
        } else if files.fault().is_some() {
            Condition::Changed
        } else if stats.is_unreadable {
            Condition::Unreadable
        } else {
            Condition::Ok
        }
    }

    /// 200 while requests are served, else 503.
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
            Condition::Failed | Condition::Changed | Condition::Unreadable => "failed",
        }
    }

    /// The body of a refusal, in llama-server's form. `fault`: of the files, for who may know it.
    pub fn refusal(self, fault: Option<String>) -> Value {
        let message = match self {
            Condition::Ok => "ok",
            Condition::Loading => "Loading model",
            Condition::Full => "the queue is full",
            Condition::Draining => "draining",
            Condition::Stalled => "stalled",
            Condition::Failed => "failed",
            Condition::Changed => "failed: the checkpoint has changed",
            Condition::Unreadable => "failed: the checkpoint could not be read",
        };
        let message = fault.map_or_else(|| message.to_owned(), |fault| format!("failed: {fault}"));
        json!({"error": {"code": 503, "message": message, "type": "unavailable_error"}})
    }
}

/// What was last found of the files that are read while the model runs.
#[derive(Debug, Default)]
pub struct Files(Mutex<Option<String>>);

impl Files {
    /// What is wrong with them.
    pub fn fault(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, found: Result<(), String>) {
        let mut fault = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let (None, Err(found)) = (&*fault, &found) {
            tracing::error!("{found}: nothing is computed from it any more, restart the server");
        }
        *fault = found.err();
    }
}

/// How often the files are looked at.
const FILES_EVERY: Duration = Duration::from_secs(1);

/// Looks at the files that the model reads while it runs, for as long as the server lives.
pub async fn watch_files(server: Arc<Server>) {
    loop {
        let check = server.config.files.clone();
        // A drive may take its time to answer.
        if let Ok(found) = tokio::task::spawn_blocking(move || check()).await {
            server.files.note(found);
        }
        tokio::time::sleep(FILES_EVERY).await;
    }
}

/// How often rates look at the engine's counters.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Rates are over the last looks of so much time.
const RATES_OVER: Duration = Duration::from_secs(2);

/// Tokens a second of the last two seconds.
#[derive(Debug, Default)]
pub struct Rates(Mutex<VecDeque<Look>>);

#[derive(Clone, Copy, Debug)]
struct Look {
    at: Instant,
    reply_tokens: u64,
    prompt_rows: u64,
}

impl Rates {
    fn look(&self, at: Instant, stats: &EngineStats) {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        looks.push_back(Look { at, reply_tokens: stats.reply_tokens, prompt_rows: stats.prompt_rows });
        while looks.len() > 2 && at.duration_since(looks[1].at) >= RATES_OVER {
            looks.pop_front();
        }
    }

    /// Reply tokens and prompt tokens a second.
    fn per_second(&self) -> (f64, f64) {
        let looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(first), Some(last)) = (looks.front(), looks.back()) else { return (0.0, 0.0) };
        let seconds = last.at.duration_since(first.at).as_secs_f64();
        let rate = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        (rate(last.reply_tokens - first.reply_tokens), rate(last.prompt_rows - first.prompt_rows))
    }
}

/// Looks at the engine for its rates, for as long as it lives.
pub async fn watch(server: Arc<Server>) {
    loop {
        server.rates.look(Instant::now(), &server.engine.stats());
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The body of `/health` while all is well. `is_shown`: to a client that may see figures.
pub fn report(server: &Server, is_shown: bool) -> Value {
    if !is_shown {
        return json!({"status": "ok"});
    }
    let (config, engine) = (&server.config, &server.engine);
    let stats = engine.stats();
    let (decode, prefill) = server.rates.per_second();
    let mut report = json!({
        "status": "ok", "model": config.names[0], "exact": true, "fingerprint": config.identity.fingerprint,
        "uptime_seconds": server.started.elapsed().as_secs_f64(),
        "requests_running": stats.prefilling + stats.decoding, "requests_waiting": stats.waiting,
        "requests_total": stats.requests,
        "prompt_tokens_total": stats.prompt_tokens, "cached_tokens_total": stats.cached_tokens,
        "completion_tokens_total": stats.reply_tokens,
        "prefill_seconds_total": stats.prefill_time.as_secs_f64(),
        "decode_seconds_total": stats.decode_time.as_secs_f64(),
        "rounds_total": stats.rounds, "drafted_total": stats.drafted, "accepted_total": stats.accepted,
        "slots": {"decoding": stats.decoding, "prefilling": stats.prefilling, "max": stats.slots},
        "context_length": engine.limits().context,
        "live": {
            "decode_tokens_per_second": decode, "prefill_tokens_per_second": prefill,
            "connections": server.connections.load(Ordering::Relaxed)
        }
    });
    if let Some(last_round) = stats.last_round {
        report["last_step_age_seconds"] = json!(engine.now().since(last_round).as_secs_f64());
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_last_two_seconds() {
        let (rates, start) = (Rates::default(), Instant::now());
        assert_eq!(rates.per_second(), (0.0, 0.0));
        for step in 0..40u64 {
            // A burst in the first second, then 10 and 100 tokens a step of a tenth of a second.
            let burst = if step < 10 { 0 } else { 5000 };
            let stats =
                EngineStats { reply_tokens: burst + 10 * step, prompt_rows: 100 * step, ..EngineStats::default() };
            rates.look(start + Duration::from_millis(100 * step), &stats);
        }
        let (decode, prefill) = rates.per_second();
        assert!((decode - 100.0).abs() < 1e-6 && (prefill - 1000.0).abs() < 1e-6, "{decode} {prefill}");
    }
}
