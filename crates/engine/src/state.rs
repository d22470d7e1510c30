//! Everything the engine knows between rounds. Written by `commit` and by commands, read by all.

use std::collections::VecDeque;

use tf_text::TokenId;

use crate::channel::Sender;
use crate::clock::Time;
use crate::depth::Pace;
use crate::limits::EngineLimits;
use crate::model::{ModelLimits, SlotIndex};
use crate::request::{FinishReason, Position, Priority, Request, RequestId};
use crate::sequence::Sequence;
use crate::slots::Slots;
use crate::stats::EngineStats;

/// A request without a slot.
pub struct Waiting {
    pub id: RequestId,
    pub request: Request,
    pub sender: Sender,
    pub submitted: Time,
}

/// Who gets the next free slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextUp {
    Nobody,
    /// The head of the queue.
    Waiting,
    /// The oldest paused sequence.
    Paused,
}

/// A slot whose sequence has ended and that the model still has to empty.
pub struct Released {
    pub slot: SlotIndex,
    /// The computed tokens, where the state after them is worth keeping.
    pub tokens: Option<Vec<TokenId>>,
}

/// When states are kept, and how many pages there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeepRules {
    pub is_on: bool,
    pub every: Position,
    /// How far before a sequence's end its state may be taken.
    pub reach: u32,
    pub page_positions: u32,
    pub page_count: u32,
}

impl KeepRules {
    /// Pages of a sequence of this length, one more for the copy of a shared page.
    fn pages_for(&self, length: Position) -> u64 {
        u64::from(length.div_ceil(self.page_positions.max(1))) + 1
    }
}

/// The engine's whole state; owned by its thread, behind no lock.
pub struct State {
    pub limits: EngineLimits,
    pub vocab_size: u32,
    pub draft_block: u32,
    /// In the order of admission.
    pub sequences: Vec<Sequence>,
    /// First come, first served; nothing overtakes, but the foreground is before the background.
    pub queue: VecDeque<Waiting>,
    /// Sequences in the background that gave their slots away, the oldest first.
    pub paused: VecDeque<Sequence>,
    pub slots: Slots,
    pub pace: Pace,
    pub stats: EngineStats,
    pub released: Vec<Released>,
    pub keeping: KeepRules,
    /// Scratch of `commit`: sequences that end in this round.
    pub(crate) endings: Vec<(usize, FinishReason)>,
}

impl State {
    pub fn new(limits: EngineLimits, model: &ModelLimits) -> Self {
        State {
            limits,
            vocab_size: model.vocab_size,
            draft_block: model.draft_block,
            sequences: Vec::with_capacity(limits.slots as usize),
            queue: VecDeque::new(),
            paused: VecDeque::new(),
            slots: Slots::new(limits.slots),
            pace: Pace::default(),
            stats: EngineStats { slots: limits.slots, ..EngineStats::default() },
            released: Vec::with_capacity(limits.slots as usize),
            keeping: KeepRules::default(),
            endings: Vec::with_capacity(limits.slots as usize),
        }
    }

    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.queue.is_empty() && self.paused.is_empty()
    }

    /// Whether something runs and all of it waits for a prefix from disk, or for another that does.
    pub fn is_waiting_for_disk(&self) -> bool {
        let is_held = |sequence: &Sequence| sequence.load.is_some() || sequence.follows.is_some();
        self.sequences.iter().any(|sequence| sequence.load.is_some()) && self.sequences.iter().all(is_held)
    }

    /// Who gets the next free slot: the foreground, then what was paused, then the rest of the background.
    pub fn next_up(&self) -> NextUp {
        match (self.queue.front(), self.paused.is_empty()) {
            (Some(head), _) if head.request.priority == Priority::Foreground => NextUp::Waiting,
            (_, false) => NextUp::Paused,
            (Some(_), true) => NextUp::Waiting,
            (None, true) => NextUp::Nobody,
        }
    }

    /// Whether the next in line must wait for memory: what the running sequences need next and its own rows don't fit
    /// together. Beside nothing it always fits.
    pub fn is_head_short_of_pages(&self) -> bool {
        let length = match self.next_up() {
            NextUp::Nobody => return false,
            NextUp::Waiting => self.queue[0].request.prompt.len() as Position,
            NextUp::Paused => self.paused[0].fill_length(),
        };
        if self.sequences.is_empty() || self.keeping.page_count == 0 {
            return false;
        }
        let next = |length: Position| self.keeping.pages_for(length + 1 + self.draft_block);
        let running: u64 =
            self.sequences.iter().map(|sequence| next(sequence.computed.max(sequence.fill_length()))).sum();
        running + next(length) > u64::from(self.keeping.page_count)
    }

    /// The conservation laws. Cheap beside a forward, so they stay on.
    ///
    /// # Panics
    /// When one is broken: the state can't be trusted any more.
    pub fn check(&self) {
        assert!(self.released.is_empty(), "an ended sequence's slot was not emptied");
        let owned = self.slots.count() - self.slots.free_count();
        assert_eq!(owned, self.sequences.len(), "a slot was lost or given twice");
        for sequence in &self.sequences {
            assert_eq!(self.slots.owner(sequence.slot), Some(sequence.id), "a sequence without its slot");
            sequence.check();
        }
        let is_served = self.slots.free_count() == 0 || self.is_head_short_of_pages();
        let is_waited = self.next_up() != NextUp::Nobody;
        assert!(!is_waited || is_served, "a request waits beside a free slot and enough memory");
        for sequence in &self.paused {
            assert_eq!(sequence.computed, 0, "a paused sequence holds rows");
            sequence.check();
        }
        let stats = &self.stats;
        assert_eq!(
            stats.requests,
            stats.completed + stats.broken_off + (self.sequences.len() + self.paused.len() + self.queue.len()) as u64,
            "a request was lost or ended twice"
        );
        assert!(stats.accepted <= stats.drafted, "more accepted than drafted");
    }
}
