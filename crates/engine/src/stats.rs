//! What the engine has done, as numbers that only grow, and what it is doing now.

use std::time::Duration;

use crate::clock::Time;
use crate::disk::DiskStats;
use crate::request::DraftCounts;

/// Upper bounds of `EngineStats::round_rows`; its last count is of rounds with more.
pub const ROUND_ROW_BOUNDS: [u32; 13] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384];

/// A copy of the engine's counters, taken after a round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    pub rounds: u64,
    /// Rounds by their rows: one count a bound, then those above all bounds.
    pub round_rows: [u64; ROUND_ROW_BOUNDS.len() + 1],
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
    /// The last round failed for something that it could not read.
    pub is_unreadable: bool,
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
    /// Pages of the model's state, those that nothing holds, positions of one.
    pub pages: u32,
    pub pages_free: u32,
    pub page_positions: u32,
    /// Times that a sequence waited a round for pages.
    pub page_waits: u64,
    /// Times that a sequence in the background gave its slot away.
    pub pauses: u64,
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

impl EngineStats {
    /// Counts a round of `rows` rows.
    pub fn count_round(&mut self, rows: usize) {
        self.rounds += 1;
        let place = ROUND_ROW_BOUNDS.iter().position(|bound| rows <= *bound as usize);
        self.round_rows[place.unwrap_or(ROUND_ROW_BOUNDS.len())] += 1;
    }
}
