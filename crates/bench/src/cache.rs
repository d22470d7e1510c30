//! One prompt again and again: was it computed, was it resumed, and is the reply the same?

use std::time::{Duration, Instant};

use crate::client::Client;
use crate::load::{self, Reply};
use crate::record::{CacheState, Check, Record, ReplyRow};
use crate::workload::Request;

/// What is sent and what must be seen.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub request: Request,
    /// Repetitions after the first, one by one.
    pub repeats: usize,
    /// Then so many at once.
    pub streams: usize,
    pub expected_prompt_tokens: Option<u64>,
    /// The first row must have been cold.
    pub require_cold: bool,
    /// All later rows must have been reused.
    pub require_reuse: bool,
}

/// Measures, and adds replies and checks to `record`.
pub async fn run(client: &Client, plan: &Plan, record: &mut Record) {
    let ask = || load::ask(client, &plan.request, Instant::now());
    let first = ask().await;
    let mut later = Vec::new();
    for repeat in 1..=plan.repeats {
        later.push((format!("repeated {repeat}"), ask().await));
    }
    let together = vec![plan.request.clone(); plan.streams];
    let replies = load::together(client, &together, Duration::ZERO).await;
    later.extend(replies.into_iter().enumerate().map(|(index, reply)| (format!("concurrent {}", index + 1), reply)));

    let mut equal = Check::new("equal to the first");
    let mut measured = Check::new("measured");
    let mut states = Check::new("cache state as required");
    let mut lengths = Check::new("prompt length as expected");
    let mut judge = |name: &str, reply: &Reply, required: Option<CacheState>| {
        measured.measured(name, reply);
        if let Some(required) = required {
            let state = CacheState::of(reply);
            let is_right = (state != CacheState::Unverified).then_some(state == required);
            states.count(name, is_right, || format!("{} instead of {}", state.as_str(), required.as_str()));
        }
        if let Some(expected) = plan.expected_prompt_tokens {
            let is_right = reply.prompt_tokens.map(|tokens| tokens == expected);
            let found = reply.prompt_tokens.unwrap_or(0);
            lengths.count(name, is_right, || format!("{found} prompt tokens instead of {expected}"));
        }
    };
    judge("first", &first, plan.require_cold.then_some(CacheState::Cold));
    for (name, reply) in &later {
        judge(name, reply, plan.require_reuse.then_some(CacheState::Reused));
    }
    record.replies.push(ReplyRow::new("first", &first));
    for (name, reply) in &later {
        equal.compare(name, &first, reply);
        let same = reply.token_sha.as_ref().zip(first.token_sha.as_ref()).map(|(one, other)| one == other);
        record.replies.push(ReplyRow { equal: same, ..ReplyRow::new(name, reply) });
    }
    record.checks.extend([measured, equal]);
    if plan.require_cold || plan.require_reuse {
        record.checks.push(states);
    }
    if plan.expected_prompt_tokens.is_some() {
        record.checks.push(lengths);
    }
}
