//! Which sequence sits in which of the model's slots.

use crate::model::SlotIndex;
use crate::request::RequestId;

/// The seats of the model's state. A slot belongs to one request or to none.
#[derive(Debug)]
pub struct Slots {
    owners: Vec<Option<RequestId>>,
}

impl Slots {
    pub fn new(count: u32) -> Self {
        Slots { owners: vec![None; count as usize] }
    }

    pub fn count(&self) -> usize {
        self.owners.len()
    }

    pub fn free_count(&self) -> usize {
        self.owners.iter().filter(|owner| owner.is_none()).count()
    }

    pub fn owner(&self, slot: SlotIndex) -> Option<RequestId> {
        self.owners[slot.0 as usize]
    }

    /// The lowest free slot, now owned by `request`.
    pub fn take(&mut self, request: RequestId) -> Option<SlotIndex> {
        let index = self.owners.iter().position(Option::is_none)?;
        self.owners[index] = Some(request);
        Some(SlotIndex(index as u32))
    }

    /// Frees `slot`, which `request` must own.
    pub fn free(&mut self, slot: SlotIndex, request: RequestId) {
        let owner = self.owners[slot.0 as usize].take();
        assert_eq!(owner, Some(request), "slot {} freed by a request that doesn't own it", slot.0);
    }
}
