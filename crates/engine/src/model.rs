//! The seam between decisions and mathematics: what the engine asks of a model.
//!
//! The engine decides which rows run; a model computes them and decides nothing. State is addressed by absolute
//! position, so a rejected row is simply overwritten by the next row at its position. Two implementations exist: the
//! real model and the scripted history model of the tests.

use std::ops::Range;

use tf_text::TokenId;

use crate::request::{Position, Sampling};

/// A sequence's seat in the model's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotIndex(pub u32);

/// What a model can hold. Fixed for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelLimits {
    pub vocab_size: u32,
    /// Positions of one sequence; draft rows live outside it.
    pub context: u32,
    pub slots: u32,
    /// Most rows of one round.
    pub round_rows: u32,
    /// Most drafts that one call of `draft` returns for a sequence; 0 without a draft head.
    pub draft_block: u32,
}

/// One forward: the rows of all windows, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoundPlan {
    pub tokens: Vec<TokenId>,
    pub windows: Vec<Window>,
}

/// Consecutive rows of one sequence: a piece of its prompt, or the pending token and its drafts.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    pub slot: SlotIndex,
    /// Position of the first row. Every earlier position of the slot has been computed and kept.
    pub start: Position,
    /// Which of `RoundPlan::tokens` are this window's rows.
    pub rows: Range<usize>,
    /// Where the prompt ends (exclusive). For rows of a reply: `start`. A model may skip work for rows that no
    /// position from `prompt_end - 1` on can see (the exact halo), unless `whole` is set.
    pub prompt_end: Position,
    /// Every row's logits may be asked for: no halo.
    pub whole: bool,
    /// Which rows are drawn, as indices into the window. Empty for a prompt piece that isn't the last, unless the
    /// prompt is scored.
    pub draw: Range<usize>,
    /// `Some(n)`: log-probabilities of the drawn token and of the `n` likeliest, for each drawn row.
    pub logprobs: Option<u32>,
    /// Index of this window's settings and history in `sequences`.
    pub sequence: usize,
}

/// What a draw needs besides the row: settings and the tokens before it. Borrowed, so that a round copies no history.
#[derive(Clone, Copy, Debug)]
pub struct SequenceView<'a> {
    pub sampling: &'a Sampling,
    pub prompt: &'a [TokenId],
    /// Committed reply tokens. In a verify window the rows' own tokens follow these.
    pub reply: &'a [TokenId],
    /// Tokens that are given to follow `reply`, whatever is drawn.
    pub given: &'a [TokenId],
}

impl SequenceView<'_> {
    /// The token at `position` where the draw for it decides nothing: the prompt's, or a given one.
    pub fn known_at(&self, position: Position) -> Option<TokenId> {
        let position = position as usize;
        match position.checked_sub(self.prompt.len()) {
            None => self.prompt.get(position).copied(),
            Some(index) => self.given.get(index.checked_sub(self.reply.len())?).copied(),
        }
    }
}

/// One drawn row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrawnRow {
    pub token: TokenId,
    /// Log-probability of `token` from the raw row at temperature 1; 0 where none was asked for.
    pub logprob: f32,
    /// Log-probability of the token that is known to stand at the next position ([`SequenceView::known_at`]), from the
    /// raw row at temperature 1; 0 where none is known or none was asked for. It is not read from the window, so that
    /// scoring doesn't depend on where a prompt is cut.
    pub next_logprob: f32,
    /// Range in `Drawn::top`.
    pub top_start: u32,
    pub top_count: u32,
}

/// All drawn rows of a round, window by window. Reused from round to round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drawn {
    pub rows: Vec<DrawnRow>,
    /// For each window, its range of `rows`.
    pub windows: Vec<Range<usize>>,
    pub top: Vec<(TokenId, f32)>,
}

impl Drawn {
    /// Empties all lists and keeps their memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.windows.clear();
        self.top.clear();
    }
}

/// Asks the draft head for what may follow `anchor`.
#[derive(Clone, Copy, Debug)]
pub struct DraftRequest<'a> {
    pub slot: SlotIndex,
    /// The committed token at `position`, which hasn't been run through the model yet.
    pub anchor: TokenId,
    /// Kept length of the slot: the anchor's position.
    pub position: Position,
    pub count_max: u32,
    /// The same key as the target's draw, so that a good drafter lands often.
    pub sampling: &'a Sampling,
}

/// Proposals for each request, in order. Reused.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drafts {
    pub tokens: Vec<TokenId>,
    /// Acceptance probability the drafter itself expects, one a token.
    pub confidence: Vec<f32>,
    /// For each request, its range of the two lists.
    pub ranges: Vec<Range<usize>>,
}

impl Drafts {
    /// Empties all lists and keeps their memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.confidence.clear();
        self.ranges.clear();
    }
}

/// The paged part of a model's state. Slots and snapshots share pages; a slot writes only into pages of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCounts {
    pub total: u32,
    /// Pages that neither a slot nor a snapshot holds.
    pub free: u32,
    /// Positions of one page.
    pub positions: u32,
    /// Bytes of one page.
    pub bytes: u64,
}

/// Why a forward gave nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForwardError {
    /// The sequences of this plan end; the others go on.
    #[error("the forward failed: {0}")]
    Failed(String),
    /// The same, because something that is read while the model runs can't be read.
    #[error("the forward failed: {0}")]
    Unreadable(String),
    /// Nothing can run any more.
    #[error("the device is lost: {0}")]
    DeviceLost(String),
}

/// Why bytes give no snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the bytes are no state of this model")]
    Malformed,
    #[error("there are not enough free pages")]
    Pages,
}

/// A model that the engine can drive.
pub trait Model {
    /// The state at a position, enough to continue from there (`exactness.md` section 5).
    type Snapshot: Clone + Send;

    fn limits(&self) -> ModelLimits;

    /// Computes every row of `plan` and draws the rows that it names. `sequences[window.sequence]` belongs to a window.
    fn forward(
        &mut self,
        plan: &RoundPlan,
        sequences: &[SequenceView<'_>],
        drawn: &mut Drawn,
    ) -> Result<(), ForwardError>;

    /// Declares that `slot` now holds exactly `length` positions; later rows are overwritten by the next window.
    fn keep(&mut self, slot: SlotIndex, length: Position);

    /// Proposes tokens after each anchor. Never changes what `forward` computes.
    fn draft(&mut self, wanted: &[DraftRequest<'_>], drafts: &mut Drafts) -> Result<(), ForwardError>;

    /// The state of `slot` at `position`: its kept length, or up to `snapshot_reach` positions before that.
    fn snapshot(&mut self, slot: SlotIndex, position: Position) -> Self::Snapshot;

    /// How many positions before a slot's kept length a snapshot may lie.
    fn snapshot_reach(&self) -> u32;

    /// Whether windows with this `prompt_end` or a later one may follow the restored snapshot. False where rows that
    /// they would read were skipped.
    fn can_resume(&self, snapshot: &Self::Snapshot, prompt_end: Position) -> bool;

    /// The same for what `slot` holds now.
    fn can_continue(&self, slot: SlotIndex, prompt_end: Position) -> bool;

    /// Bytes that a snapshot takes, without its pages.
    fn snapshot_bytes(&self, snapshot: &Self::Snapshot) -> u64;

    /// Appends the numbers of the pages that a snapshot shares.
    fn snapshot_pages(&self, snapshot: &Self::Snapshot, pages: &mut Vec<u32>);

    fn pages(&self) -> PageCounts;

    /// Free pages that `slot` takes when it grows to `end` positions.
    fn pages_needed(&self, slot: SlotIndex, end: Position) -> u32;

    /// Appends the bytes of a snapshot without its pages, for [`Model::decode`] of a model of the same identity.
    fn encode(&mut self, snapshot: &Self::Snapshot, bytes: &mut Vec<u8>);

    /// Appends the contents of some of a snapshot's pages, counted from its first, `pages().bytes` each. False where they
    /// can't be read.
    fn read_pages(&mut self, snapshot: &Self::Snapshot, pages: Range<u32>, bytes: &mut Vec<u8>) -> bool;

    /// A snapshot from its bytes. It shares the first pages of `base`, as many as are named, and has free pages after
    /// these, whose contents are to be written before anything resumes from it.
    ///
    /// # Errors
    /// [`DecodeError`]; no page is held then.
    fn decode(&mut self, bytes: &[u8], base: Option<(&Self::Snapshot, u32)>) -> Result<Self::Snapshot, DecodeError>;

    /// Writes whole pages of a decoded snapshot from its page `first` on; false, and nothing is written, where it has no
    /// such pages of its own.
    fn write_pages(&mut self, snapshot: &Self::Snapshot, first: u32, bytes: &[u8]) -> bool;

    /// Puts a snapshot into an empty slot.
    fn restore(&mut self, slot: SlotIndex, snapshot: &Self::Snapshot);

    /// Empties the slot.
    fn release(&mut self, slot: SlotIndex);
}
