//! Everything the engine knows between rounds. Written by `commit` and by commands, read by all.

use std::collections::VecDeque;

use crate::channel::Sender;
use crate::clock::Time;
use crate::depth::Pace;
use crate::limits::EngineLimits;
use crate::model::{ModelLimits, SlotIndex};
use crate::request::{FinishReason, Request, RequestId};
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

/// The engine's whole state; owned by its thread, behind no lock.
pub struct State {
    pub limits: EngineLimits,
    pub vocab_size: u32,
    pub draft_block: u32,
    /// In the order of admission.
    pub sequences: Vec<Sequence>,
    /// First come, first served; nothing overtakes.
    pub queue: VecDeque<Waiting>,
    pub slots: Slots,
    pub pace: Pace,
    pub stats: EngineStats,
    /// Slots whose sequence has ended and that the model still has to empty.
    pub released: Vec<SlotIndex>,
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
            slots: Slots::new(limits.slots),
            pace: Pace::default(),
            stats: EngineStats { slots: limits.slots, ..EngineStats::default() },
            released: Vec::with_capacity(limits.slots as usize),
            endings: Vec::with_capacity(limits.slots as usize),
        }
    }

    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.queue.is_empty()
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
        assert!(self.queue.is_empty() || self.slots.free_count() == 0, "a request waits beside a free slot");
        let stats = &self.stats;
        assert_eq!(
            stats.requests,
            stats.completed + stats.broken_off + (self.sequences.len() + self.queue.len()) as u64,
            "a request was lost or ended twice"
        );
        assert!(stats.accepted <= stats.drafted, "more accepted than drafted");
    }
}
