//! One request of a soak: read to its end, left on the way, cut by a restart, or stuck.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::traffic::{Leave, Wanted};
use crate::client::{Client, ClientError};
use crate::load::{self, Reply};

/// Longest time without a token while the server runs, the time in the queue included: beyond the server's own limit for
/// that, so that a request that is refused in time is not taken for one that is stuck.
pub const STUCK_AFTER: Duration = Duration::from_secs(180);

/// How a request ended, as its client saw it.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    Whole,
    /// The client went away.
    Left,
    /// The server was killed or not yet back.
    Down,
    /// No room, or not ready: to be asked again.
    Busy(u16),
    /// No token for too long.
    Stuck,
    Failed(String),
}

/// What the client heard.
#[derive(Clone, Debug)]
pub struct Heard {
    pub reply: Reply,
    pub end: End,
    /// Reasoning and content as they came.
    pub text: String,
    /// Ids of a whole reply, where they were asked for.
    pub ids: Vec<u32>,
    /// The server had been restarted when it was sent.
    pub after_restart: bool,
}

/// When the server was killed, as all clients see it.
#[derive(Debug, Default)]
pub struct Outage {
    is_down: AtomicBool,
    kills: AtomicU64,
}

impl Outage {
    /// The server is killed now.
    pub fn begins(&self) {
        self.is_down.store(true, Ordering::SeqCst);
        self.kills.fetch_add(1, Ordering::SeqCst);
    }

    /// The server is back.
    pub fn ends(&self) {
        self.is_down.store(false, Ordering::SeqCst);
    }

    /// Whether the server lies dead or is starting.
    pub fn is_down(&self) -> bool {
        self.is_down.load(Ordering::SeqCst)
    }

    /// How often it was killed so far.
    pub fn kills(&self) -> u64 {
        self.kills.load(Ordering::SeqCst)
    }
}

/// Sends `wanted` and reads as far as it says.
pub async fn ask(client: &Client, wanted: &Wanted, outage: &Outage, start: Instant) -> Heard {
    let mut body = wanted.request.body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
    let (kills, was_down) = (outage.kills(), outage.is_down.load(Ordering::SeqCst));
    let mut heard = Heard {
        reply: Reply { sent: start.elapsed(), ..Reply::default() },
        end: End::Whole,
        text: String::new(),
        ids: Vec::new(),
        after_restart: kills > 0,
    };
    let moved = Arc::new(AtomicU64::new(start.elapsed().as_millis() as u64));
    let mut has_left = false;
    let leave_at = match wanted.leave {
        Some(Leave::Time(time)) => time,
        // Longer than anything; the clock can't count to the end of time.
        _ => Duration::from_secs(1 << 20),
    };
    let leave_after = match wanted.leave {
        Some(Leave::Tokens(tokens)) => tokens,
        _ => u64::MAX,
    };
    let stream = client.stream(wanted.request.path, &body, |event| {
        let tokens = heard.reply.progress.len();
        load::take(&mut heard.reply, &event, start.elapsed());
        if heard.reply.progress.len() > tokens {
            moved.store(start.elapsed().as_millis() as u64, Ordering::Relaxed);
        }
        take_text(&mut heard.text, &mut heard.ids, &event);
        if let error @ Value::Object(_) = &event["error"] {
            return Err(ClientError::Broken { path: wanted.request.path.to_owned(), cause: error.to_string() });
        }
        if heard.reply.progress.last().is_some_and(|(_, tokens)| *tokens >= leave_after) && heard.reply.finish.is_none()
        {
            has_left = true;
            return Err(ClientError::Broken { path: wanted.request.path.to_owned(), cause: "left".to_owned() });
        }
        Ok(())
    });
    let ended = tokio::select! {
        ended = stream => Ok(ended),
        () = tokio::time::sleep(leave_at) => Err(End::Left),
        () = stuck(&moved, start) => Err(End::Stuck),
    };
    heard.reply.ended = start.elapsed();
    let is_excused = was_down || outage.kills() != kills || outage.is_down.load(Ordering::SeqCst);
    heard.end = match ended {
        Err(end) => end,
        Ok(Ok(())) if heard.reply.finish.is_none() => End::Failed("the stream has no finish_reason".to_owned()),
        Ok(Ok(())) => End::Whole,
        Ok(Err(_)) if has_left => End::Left,
        Ok(Err(_)) if is_excused => End::Down,
        Ok(Err(ClientError::Refused { status: status @ (429 | 503), .. })) => End::Busy(status),
        Ok(Err(error)) => End::Failed(error.to_string()),
    };
    heard
}

/// Ready when no token has come for too long.
async fn stuck(moved: &AtomicU64, start: Instant) {
    loop {
        let since = Duration::from_millis(moved.load(Ordering::Relaxed));
        let due = since + STUCK_AFTER;
        let now = start.elapsed();
        if now >= due {
            return;
        }
        tokio::time::sleep(due - now).await;
    }
}

fn take_text(text: &mut String, ids: &mut Vec<u32>, event: &Value) {
    let choice = &event["choices"][0];
    let pieces = [&choice["delta"]["reasoning_content"], &choice["delta"]["content"], &choice["text"]];
    for piece in pieces.into_iter().filter_map(Value::as_str) {
        text.push_str(piece);
    }
    if let Some(found) = choice["token_ids"].as_array() {
        ids.extend(found.iter().filter_map(Value::as_u64).map(|id| id as u32));
    }
}
