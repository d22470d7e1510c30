//! One request while it is served: what is computed, what is committed, what is guessed.

use std::sync::Arc;

use tf_text::TokenId;

use crate::channel::Sender;
use crate::clock::Time;
use crate::copy::CopyIndex;
use crate::depth::Acceptance;
use crate::disk::worker::LoadId;
use crate::forcing::Forced;
use crate::limits::DRAFTS_MAX;
use crate::model::{SequenceView, SlotIndex};
use crate::request::{DraftSource, Position, Priority, ReplyStats, Request, RequestId};
use crate::state::Waiting;

/// A request with a slot.
pub struct Sequence {
    pub id: RequestId,
    pub slot: SlotIndex,
    pub request: Request,
    /// Committed reply tokens. The last one is pending: the model hasn't run it yet.
    pub reply: Vec<TokenId>,
    // [0, computed) is held by the model; [computed, prompt + reply) is known and not yet run.
    pub computed: Position,
    /// What is computed before the reply begins or goes on: the prompt, or all that a paused sequence knew but its
    /// pending token.
    pub fill: Arc<[TokenId]>,
    /// Reply tokens that were there when the sequence was paused.
    pub resumed_reply: u32,
    /// The sequence gave its slot away and has another one.
    pub was_paused: bool,
    /// Whether the kept prefixes were searched for this prompt.
    pub is_placed: bool,
    /// Positions inside the prompt where a state is wanted, ascending, all beyond `computed`.
    pub snapshot_at: Vec<Position>,
    /// The newest position of this sequence whose state is kept.
    pub kept_to: Position,
    /// The kept prefix that this sequence resumed from.
    pub source: Option<Arc<[TokenId]>>,
    /// Waits for another prompt to reach a position that both share.
    pub follows: Option<(RequestId, Position)>,
    /// Waits for a prefix that is being read from disk.
    pub load: Option<LoadId>,
    /// The disk was asked once; what it couldn't give is computed.
    pub asked_disk: bool,
    /// Has no rows in this round for want of pages; its state stays.
    pub waits: bool,
    /// How far the reply has come in the tokens that are given to it.
    pub forced: Forced,
    /// The given tokens that follow the reply so far.
    pub given: Vec<TokenId>,
    /// Proposals for what follows the pending token. Never committed without the target's own draw.
    pub drafts: Vec<TokenId>,
    pub draft_source: DraftSource,
    /// What the draft head expects of each draft; empty for a copy.
    pub confidence: Vec<f32>,
    pub copies: CopyIndex,
    /// What a copy proposes, used or not, and the class of its occurrence.
    pub copied: Vec<TokenId>,
    pub copy_class: usize,
    pub copy_acceptance: Acceptance,
    /// Rounds that gave prompt rows to others and none to this prompt.
    pub passed_over: u32,
    pub acceptance: Acceptance,
    pub started: Time,
    pub first_token: Option<Time>,
    pub stats: ReplyStats,
    pub sender: Sender,
}

impl Sequence {
    /// A request that was just given a slot.
    pub fn new(waiting: Waiting, slot: SlotIndex, now: Time) -> Self {
        let Waiting { id, request, sender, submitted } = waiting;
        let forced = Forced::new(request.forcing.as_deref());
        let mut given = Vec::new();
        request.forcing.iter().for_each(|forcing| forced.given(forcing, &mut given));
        let (prompt_tokens, queue) = (request.prompt.len() as u32, now.since(submitted));
        Sequence {
            id,
            slot,
            reply: Vec::with_capacity(request.max_tokens.min(4096) as usize),
            computed: 0,
            fill: request.prompt.clone(),
            request,
            resumed_reply: 0,
            was_paused: false,
            is_placed: false,
            snapshot_at: Vec::new(),
            kept_to: 0,
            source: None,
            follows: None,
            load: None,
            asked_disk: false,
            waits: false,
            forced,
            given,
            drafts: Vec::with_capacity(DRAFTS_MAX),
            draft_source: DraftSource::Head,
            confidence: Vec::with_capacity(DRAFTS_MAX),
            copies: CopyIndex::default(),
            copied: Vec::new(),
            copy_class: 0,
            copy_acceptance: Acceptance::default(),
            passed_over: 0,
            acceptance: Acceptance::default(),
            started: now,
            first_token: None,
            stats: ReplyStats { prompt_tokens, queue, ..ReplyStats::default() },
            sender,
        }
    }

    /// Positions to compute before the reply begins or goes on.
    pub fn fill_length(&self) -> Position {
        self.fill.len() as Position
    }

    pub fn is_prefilling(&self) -> bool {
        self.computed < self.fill_length()
    }

    pub fn prompt_rows_left(&self) -> u32 {
        self.fill_length().saturating_sub(self.computed)
    }

    /// Whether the row before the reply's next token is the last row of the fill.
    pub fn begins_reply(&self) -> bool {
        self.reply.is_empty()
    }

    /// Whether the prompt's rows are scored: once, and not again after a pause.
    pub fn is_scored(&self) -> bool {
        self.request.score_prompt && self.begins_reply()
    }

    /// Whether another slot can be found for this sequence later. Scored rows that were sent can't be taken back.
    pub fn can_pause(&self) -> bool {
        let is_half_scored = self.is_scored() && self.computed > 0;
        self.request.priority == Priority::Background && !is_half_scored
    }

    /// Who yields: the greatest rank first.
    pub fn rank(&self) -> (Priority, RequestId) {
        (self.request.priority, self.id)
    }

    /// Forgets what the model holds, so that any slot can take the sequence up again.
    pub fn pause(&mut self) {
        self.resumed_reply = self.reply.len() as u32;
        let known = self.request.prompt.iter().chain(&self.reply[..self.reply.len().saturating_sub(1)]);
        self.fill = known.copied().collect();
        self.computed = 0;
        self.was_paused = true;
        self.is_placed = false;
        self.snapshot_at.clear();
        self.kept_to = 0;
        self.source = None;
        self.follows = None;
        self.load = None;
        self.asked_disk = false;
        self.waits = false;
        self.drafts.clear();
        self.confidence.clear();
        self.copied.clear();
        self.passed_over = 0;
    }

    /// Reply tokens that may still come.
    pub fn remaining(&self) -> u32 {
        self.request.max_tokens - self.reply.len() as u32
    }

    /// Most drafts or known rows of the next window: the last token wanted is drawn by the row before it.
    pub fn window_room(&self, most: u32) -> u32 {
        most.min(self.request.draft_max.unwrap_or(u32::MAX)).min(self.remaining().saturating_sub(1))
    }

    /// Whether this sequence has no part in the next round.
    pub fn is_held(&self) -> bool {
        self.waits || self.follows.is_some() || self.load.is_some()
    }

    /// The tokens of the computed positions.
    pub fn computed_tokens(&self) -> Vec<TokenId> {
        let tokens = self.request.prompt.iter().chain(&self.reply);
        tokens.take(self.computed as usize).copied().collect()
    }

    pub fn view(&self) -> SequenceView<'_> {
        SequenceView {
            sampling: &self.request.sampling,
            prompt: &self.request.prompt,
            reply: &self.reply,
            given: &self.given,
        }
    }

    /// What must hold between rounds.
    pub fn check(&self) {
        let prompt = self.request.prompt.len() as Position;
        let reply = self.reply.len() as u32;
        assert!(reply <= self.request.max_tokens, "more tokens than asked for");
        if self.is_prefilling() {
            assert_eq!(reply, self.resumed_reply, "a reply before its prompt is computed");
            assert!(self.drafts.is_empty(), "drafts before the prompt is computed");
            assert!(self.snapshot_at.first().is_none_or(|&at| at > self.computed), "a snapshot was missed");
        } else {
            assert!(reply > 0, "a computed prompt without its first token");
            assert_eq!(self.computed, prompt + reply - 1, "every token but the pending one is computed");
            assert!(reply < self.request.max_tokens, "a full reply is still served");
            assert!((self.drafts.len() as u32) < self.remaining(), "drafts beyond the reply's end");
            assert!(self.drafts.is_empty() || self.given.is_empty(), "drafts where a token is given");
            assert_eq!(
                reply,
                1 + self.stats.windows + self.stats.accepted + self.stats.known_rows,
                "a window commits its known rows, its drafts and one token"
            );
        }
        assert_eq!(self.forced.is_given(), !self.given.is_empty(), "given tokens that don't follow the reply");
        assert!(self.stats.accepted <= self.stats.drafted, "more accepted than drafted");
    }
}
