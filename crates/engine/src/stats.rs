//! What the engine has done, as numbers that only grow, and what it is doing now.

use std::time::Duration;

use crate::clock::Time;
use crate::disk::DiskStats;
use crate::request::DraftCounts;

/// A copy of the engine's counters, taken after a round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    pub rounds: u64,
    pub prompt_rows: u64,
    pub reply_rows: u64,
    pub reply_tokens: u64,
    /// Windows that held drafts.
    pub draft_windows: u64,
    pub drafted: u64,
    pub accepted: u64,
    /// Drafts by source, in the order of `DraftSource::ALL`.
    pub drafts: [DraftCounts; 2],
    /// Given tokens that ran as known rows of a window.
    pub known_rows: u64,
    /// Calls of the drafter that failed; the rounds went on without drafts.
    pub draft_failures: u64,
    pub forward_failures: u64,
    pub requests: u64,
    /// Requests that ended with their whole reply.
    pub completed: u64,
    /// Requests that ended otherwise.
    pub broken_off: u64,
    pub prompt_tokens: u64,
    /// Prompt tokens that were restored and not computed.
    pub cached_tokens: u64,
    /// Prefixes kept now, what they take, and how many were let go so far.
    pub prefixes: u64,
    pub prefix_bytes: u64,
    pub prefix_evictions: u64,
    /// The disk tier; all zero where there is none.
    pub disk: DiskStats,
    /// Times that a sequence waited a round for pages.
    pub page_waits: u64,
    pub queue_time: Duration,
    pub prefill_time: Duration,
    pub decode_time: Duration,
    pub waiting: u32,
    pub prefilling: u32,
    pub decoding: u32,
    pub slots: u32,
    /// When the round under way began.
    pub round_since: Option<Time>,
    pub last_round: Option<Time>,
    /// Mean time between endings, for telling a refused client when to come again; zero when unknown.
    pub ending_interval: Duration,
    pub last_ending: Option<Time>,
}
