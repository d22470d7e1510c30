//! What a client asks of the engine and what it hears back.

use std::sync::Arc;
use std::time::Duration;

use tf_text::TokenId;

use crate::clock::Time;
use crate::forcing::Forcing;
use crate::limits::DRAFTS_MAX;

/// Absolute index of a token in its sequence.
pub type Position = u32;

/// How one token is chosen from a row of logits. The draw itself is a pure function of the row, these settings, the
/// seed and the position; it runs in the model, which owns the logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is argmax.
    pub temperature: f32,
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    pub min_p: f32,
    pub seed: u64,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    pub repetition_penalty: f32,
    /// Added first, before the penalties.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Tokens that may not be drawn before this many reply tokens exist (`min_tokens`): the end tokens.
    pub masked_before: u32,
    pub masked: Vec<TokenId>,
}

impl Sampling {
    /// Greedy decoding without any rule.
    pub fn greedy() -> Self {
        Sampling {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            masked_before: 0,
            masked: Vec::new(),
        }
    }

    /// Whether the draw needs the tokens before it.
    pub fn needs_history(&self) -> bool {
        self.frequency_penalty != 0.0 || self.presence_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}

/// Names a request for as long as the engine lives. Given out in the order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Who goes first. Speed only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    #[default]
    Foreground,
    /// Waits behind every other request, yields its slot to one that would wait, and resumes where it stopped.
    Background,
}

/// One reply that a client wants. Several choices are several requests that differ in their seed.
///
/// Stop strings are not here: text is the business of the request's own task. It reads committed tokens, cuts the reply
/// after the first token that completes a stop string and cancels the rest. That cut depends on the tokens alone, so
/// the reply is the same however many tokens a round committed beyond it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// At least one token. Shared by the choices of one prompt.
    pub prompt: Arc<[TokenId]>,
    pub sampling: Sampling,
    /// Reply tokens at most; the prompt and these fit the context together. 0 computes the prompt only.
    pub max_tokens: u32,
    /// The reply ends with the first of these: end tokens (unless they are ignored) and stop ids.
    pub end_ids: Vec<TokenId>,
    /// At most this many drafts a window; `Some(0)` is one row a round, the serial reference.
    pub draft_max: Option<u32>,
    /// `Some(n)`: log-probabilities of each reply token and of the `n` likeliest beside it.
    pub logprobs: Option<u32>,
    /// Log-probabilities of the prompt's tokens too; needs `logprobs`.
    pub score_prompt: bool,
    /// The reply ends here, finished or not.
    pub deadline: Option<Time>,
    /// Prompt positions whose state later requests may want: the end of the last message's text, the start of the last
    /// user message. Any order. Speed only.
    pub snapshot_at: Vec<Position>,
    /// Tokens of the reply that are given and not drawn.
    pub forcing: Option<Arc<Forcing>>,
    pub priority: Priority,
}

impl Request {
    /// A greedy request without any rule.
    pub fn greedy(prompt: &[TokenId], max_tokens: u32) -> Self {
        Request {
            prompt: prompt.into(),
            sampling: Sampling::greedy(),
            max_tokens,
            end_ids: Vec::new(),
            draft_max: None,
            logprobs: None,
            score_prompt: false,
            deadline: None,
            snapshot_at: Vec::new(),
            forcing: None,
            priority: Priority::Foreground,
        }
    }
}

/// Where the drafts of a window come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftSource {
    /// The checkpoint's own draft head.
    Head,
    /// A continuation copied from the context.
    Copy,
}

impl DraftSource {
    /// In the order of their numbers.
    pub const ALL: [DraftSource; 2] = [DraftSource::Head, DraftSource::Copy];

    pub fn as_str(self) -> &'static str {
        match self {
            DraftSource::Head => "draft_head",
            DraftSource::Copy => "copy",
        }
    }
}

/// Drafts of one source, and those of them that were accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Windows that held drafts.
    pub windows: u64,
    pub drafted: u64,
    pub accepted: u64,
    pub drafted_per_position: [u64; DRAFTS_MAX],
    pub accepted_per_position: [u64; DRAFTS_MAX],
}

impl DraftCounts {
    /// Counts a window of `drafted` drafts whose first `accepted` were accepted.
    pub fn record(&mut self, drafted: usize, accepted: usize) {
        self.windows += u64::from(drafted > 0);
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        self.drafted_per_position[..drafted].iter_mut().for_each(|count| *count += 1);
        self.accepted_per_position[..accepted].iter_mut().for_each(|count| *count += 1);
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &DraftCounts) {
        self.windows += other.windows;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        let sums = self.drafted_per_position.iter_mut().zip(&other.drafted_per_position);
        sums.for_each(|(sum, count)| *sum += count);
        let sums = self.accepted_per_position.iter_mut().zip(&other.accepted_per_position);
        sums.for_each(|(sum, count)| *sum += count);
    }
}

/// Why a reply ended. Each request gets exactly one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// One of `end_ids` was drawn; it is the reply's last token.
    Stop(TokenId),
    /// `max_tokens` reply tokens exist.
    Length,
    /// The client asked for it, or is gone.
    Cancelled,
    /// The reader was too far behind.
    SlowReader,
    /// The request's own deadline passed.
    Deadline,
    /// No slot became free in time.
    QueueTimeout,
    /// The engine stopped before the reply was finished.
    Stopped,
    /// The memory for states is taken by older requests.
    OutOfMemory,
    /// The forward that computed this reply failed.
    Failed(String),
    /// Nothing can be computed any more.
    DeviceLost(String),
}

impl FinishReason {
    /// Whether the reply is complete, as opposed to broken off.
    pub fn is_complete(&self) -> bool {
        match self {
            FinishReason::Stop(_) | FinishReason::Length => true,
            FinishReason::Cancelled
            | FinishReason::SlowReader
            | FinishReason::Deadline
            | FinishReason::QueueTimeout
            | FinishReason::Stopped
            | FinishReason::OutOfMemory
            | FinishReason::Failed(_)
            | FinishReason::DeviceLost(_) => false,
        }
    }
}

/// Where a prompt's restored rows came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheSource {
    #[default]
    None,
    Ram,
    Disk,
}

/// Why fewer rows were restored than something kept has in common with the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheReason {
    /// No prefixes are kept.
    Off,
    /// The prompt's log-probabilities need every row.
    ScoredPrompt,
    /// No state was kept nearer to the end of the common prefix.
    NoSnapshot,
    /// A nearer state lacks rows that were never computed.
    Incomplete,
}

impl CacheReason {
    pub fn as_str(self) -> &'static str {
        match self {
            CacheReason::Off => "off",
            CacheReason::ScoredPrompt => "scored_prompt",
            CacheReason::NoSnapshot => "no_snapshot",
            CacheReason::Incomplete => "incomplete_snapshot",
        }
    }
}

/// What the kept prefixes did for one prompt. The rows not computed again are `ReplyStats::cached_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUse {
    /// Leading tokens that something kept has in common with the prompt.
    pub matched: Position,
    pub source: CacheSource,
    /// Set where `cached_tokens` is well below `matched`, or nothing was looked up.
    pub reason: Option<CacheReason>,
}

/// What one reply took. Counts of drafts and rounds may differ from run to run; tokens may not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplyStats {
    pub prompt_tokens: u32,
    pub reply_tokens: u32,
    /// Prompt positions that were restored and not computed.
    pub cached_tokens: u32,
    pub cache: CacheUse,
    /// From submission to a slot.
    pub queue: Duration,
    /// From the slot to the end of the prompt.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Rounds that held a verify window of this reply.
    pub windows: u32,
    pub drafted: u32,
    pub accepted: u32,
    /// The same by source, in the order of [`DraftSource::ALL`].
    pub drafts: [DraftCounts; 2],
    /// Given tokens that ran as known rows of a window.
    pub known_rows: u32,
    /// The period of the cycle at which the loop guard ended the reasoning.
    pub looped: Option<u32>,
}

impl ReplyStats {
    /// The counts of one source.
    pub fn drafts_of(&self, source: DraftSource) -> &DraftCounts {
        &self.drafts[source as usize]
    }
}

/// The last thing a request hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    pub reason: FinishReason,
    pub stats: ReplyStats,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    #[error("the prompt is empty; a model needs at least one token")]
    EmptyPrompt,
    #[error("the prompt has {prompt} tokens and {max_tokens} more are asked for, the context has {context}")]
    TooLong { prompt: usize, max_tokens: u32, context: u32 },
    #[error("token {token} is outside the vocabulary of {vocab_size}")]
    UnknownToken { token: TokenId, vocab_size: u32 },
    #[error("all {waiting} places of the queue are taken")]
    QueueFull { waiting: u32, retry_after: Duration },
    #[error("the engine is draining and takes no new requests")]
    Draining,
    #[error("the engine has stopped: {0}")]
    Stopped(StopReason),
}

/// Why an engine's life is over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopReason {
    #[error("it finished what was there when it was asked to")]
    Drained,
    #[error("it was told to stop")]
    Asked,
    #[error("the device is lost: {0}")]
    DeviceLost(String),
    #[error("its thread broke down")]
    BrokenDown,
}
