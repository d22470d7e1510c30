//! Named limits: what the engine refuses beyond, and the times it allows.

use std::time::Duration;

use crate::model::ModelLimits;

/// Most drafts of one window; statistics count positions up to here.
pub const DRAFTS_MAX: usize = 16;
/// A prompt passed over this often gets the next prompt rows.
pub const PASSED_OVER_MAX: u32 = 8;
/// Prompt rows a round carries however slow they are, so that a prompt always moves on.
pub const PROMPT_ROWS_MIN: u32 = 8;
/// Prompt rows beside running replies before any prompt row was timed.
pub const PROMPT_ROWS_UNTIMED: u32 = 64;
/// Rows that a snapshot inside a prompt must save before a round ends early for it, or a prompt waits for another's.
pub const SNAPSHOT_ROWS_MIN: u32 = 16;

/// A prompt waits at most this long for news of a prefix on disk, then it is computed.
pub const LOAD_PATIENCE: Duration = Duration::from_secs(5);
/// Pieces that a round makes for the disk beside running sequences.
pub const DISK_PIECES_A_ROUND: u32 = 1;

/// How drafts are used. Speed only; no choice here can change a reply.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftPolicy {
    /// Most drafts of a window; 0 switches drafting off.
    pub max: u32,
    /// Drafts of the model's own draft head.
    pub head: bool,
    /// Continuations copied from the context.
    pub copy: bool,
    /// Leaves drafts out where measured costs say that they don't pay.
    pub adaptive: bool,
    /// A window ends before the draft whose running product of confidences is below this; 0 is no limit.
    pub confidence_min: f32,
}

impl Default for DraftPolicy {
    fn default() -> Self {
        DraftPolicy { max: DRAFTS_MAX as u32, head: true, copy: true, adaptive: true, confidence_min: 0.0 }
    }
}

/// What one engine allows. Plain data; `checked` compares it with the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineLimits {
    /// Sequences served at once; at most the model's slots.
    pub slots: u32,
    /// Most rows of a round; at most the model's.
    pub round_rows: u32,
    /// Most prompt rows of one sequence in a round. Bits don't depend on it.
    pub prompt_chunk: u32,
    /// Prompt rows are limited so that a round with running replies stays below this; `None` is no limit.
    pub decode_gap: Option<Duration>,
    /// Requests that may wait for a slot.
    pub queue: u32,
    /// Longest wait for a slot.
    pub queue_timeout: Duration,
    /// Positions of one sequence; at most the model's.
    pub context: u32,
    pub draft: DraftPolicy,
    /// Bytes that kept prefixes may take, pages included; 0 keeps none. Changes no bit.
    pub prefix_cache_bytes: u64,
    /// Prompt positions between snapshots, besides those that a request names.
    pub snapshot_every: u32,
    /// A reader with more unread tokens than this is cancelled.
    pub unread_tokens: u32,
    /// A reader whose oldest unread token is older than this is cancelled.
    pub unread_time: Duration,
}

impl EngineLimits {
    /// All that `model` can hold, with the published defaults.
    pub fn for_model(model: &ModelLimits) -> Self {
        EngineLimits {
            slots: model.slots,
            round_rows: model.round_rows,
            prompt_chunk: model.round_rows,
            decode_gap: Some(Duration::from_millis(200)),
            queue: 128,
            queue_timeout: Duration::from_secs(120),
            context: model.context,
            draft: DraftPolicy { max: model.draft_block, ..DraftPolicy::default() },
            prefix_cache_bytes: 0,
            snapshot_every: 4096,
            unread_tokens: 4096,
            unread_time: Duration::from_secs(60),
        }
    }

    /// These limits, if `model` can serve them.
    ///
    /// # Errors
    /// Every limit that doesn't fit, in one text.
    pub fn checked(self, model: &ModelLimits) -> Result<Self, LimitsError> {
        let mut mistakes = Vec::new();
        let mut need = |holds: bool, text: String| {
            if !holds {
                mistakes.push(text);
            }
        };
        let most = [
            ("slots", self.slots, model.slots),
            ("round rows", self.round_rows, model.round_rows),
            ("context positions", self.context, model.context),
        ];
        for (name, found, max) in most {
            need(found >= 1, format!("{name} must be 1 or more"));
            need(found <= max, format!("{found} {name} are more than this model's {max}"));
        }
        need(self.snapshot_every >= 1, "snapshots must be 1 position or more apart".to_string());
        need(self.prompt_chunk >= 1, "a prompt chunk must have 1 row or more".to_string());
        need(
            self.round_rows > self.slots || (self.slots == 1 && self.round_rows == 1),
            format!(
                "{} rows a round leave no room for prompts beside {} replies: use more rows than slots",
                self.round_rows, self.slots
            ),
        );
        need(
            model.draft_block as usize <= DRAFTS_MAX,
            format!("the model drafts {} tokens at once, {DRAFTS_MAX} are supported", model.draft_block),
        );
        need(self.draft.confidence_min >= 0.0, "the draft confidence must be 0 or more".to_string());
        if mistakes.is_empty() { Ok(self) } else { Err(LimitsError { mistakes }) }
    }
}

/// The limits that a model can't serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", mistakes.join("; "))]
pub struct LimitsError {
    pub mistakes: Vec<String>,
}
