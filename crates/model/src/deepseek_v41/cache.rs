//! What a sequence leaves behind in the model: window rings, paged compressed rows and index keys, raw pair rows, draft
//! rings and token ids. Everything is addressed by absolute position, so a rejected row is overwritten by the next one.
//!
//! A ring keeps a window and everything that one verify window can reject beyond it. Compressed rows and index keys of
//! the source layers live in pages that slots and snapshots share; a slot writes only into pages that it alone holds.
//! Buffers are reserved for the worst case and take memory where they are written.
//!
//! Knows which positions of which layer are there, and refuses a window that would read others.

use std::ops::Range;

use tf_device::{Buffer, Device, LaunchError, Queue};
use tf_engine::request::Position;
use tf_kernels::{index_key, kv_compress, kv_store};

use super::fault::Fault;
use super::pages::{PAGE_POSITIONS, PagePool, PageRef};
use super::rows::{RoundRows, RowSet, WindowRows};
use super::shape::Shape;

/// Why a window cannot run. The slot is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    #[error(transparent)]
    Device(#[from] LaunchError),
    #[error("slot {slot} does not exist; the model has {slot_count}")]
    Slot { slot: u32, slot_count: u32 },
    #[error("a window of slot {slot} starts at position {start}, but the slot holds {length} positions")]
    Start { slot: u32, start: Position, length: Position },
    #[error("a window of slot {slot} ends at position {end}, beyond the context of {context}")]
    Context { slot: u32, end: Position, context: u32 },
    #[error("slot {slot} appears in two windows of one round")]
    Twice { slot: u32 },
    #[error("no free page for position {position} of slot {slot}: all {page_count} are held; drop snapshots")]
    Pages { slot: u32, position: Position, page_count: u32 },
    #[error(
        "layer {layer} of slot {slot} needs window keys from position {needed} on and has them from {held} on: the \
         rows between were skipped or overwritten; resume from a snapshot at or before position {needed}"
    )]
    Missing { slot: u32, layer: usize, needed: Position, held: Position },
}

/// Sizes of the caches: records, rings and pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    pub slots: u32,
    pub context: u32,
    /// Records of a window ring.
    pub ring_len: u32,
    pub window: u32,
    pub window_record_bytes: usize,
    pub compressed_record_bytes: usize,
    pub index_record_bytes: usize,
    /// Rows of a pair ring.
    pub pair_ring_len: u32,
    /// Floats of a raw pair row: kv, then score.
    pub pair_row: usize,
    pub layer_count: usize,
    pub draft_count: usize,
    /// For each kv source its ratio.
    pub source_ratios: Vec<u32>,
    pub pages_per_slot: u32,
    pub page_count: u32,
}

impl CacheLayout {
    pub fn new(shape: &Shape, slots: u32, context: u32, page_count: Option<u32>) -> CacheLayout {
        let pages_per_slot = context.div_ceil(PAGE_POSITIONS);
        let verify_rows = shape.window_rows_max() as u32;
        let source_ratios = shape.kv_source_layer_ids.iter().map(|layer| shape.ratio(*layer) as u32).collect();
        CacheLayout {
            slots,
            context,
            ring_len: shape.sliding_window as u32 + verify_rows + 1,
            window: shape.sliding_window as u32,
            window_record_bytes: kv_store::record_bytes(shape.head_dim),
            compressed_record_bytes: kv_compress::record_bytes(shape.head_dim),
            index_record_bytes: index_key::record_bytes(shape.index_head_dim),
            // What a window ring lets a caller take back, and the row before that.
            pair_ring_len: verify_rows + 4,
            pair_row: 2 * shape.head_dim,
            layer_count: shape.num_hidden_layers,
            draft_count: shape.num_nextn_predict_layers,
            source_ratios,
            pages_per_slot,
            // By default every slot can be full while as much again is held by snapshots.
            page_count: page_count.unwrap_or(2 * slots * pages_per_slot).max(pages_per_slot),
        }
    }

    /// How far before a slot's length a state can still be read: what the rings hold beyond a window.
    pub fn snapshot_reach(&self) -> u32 {
        (self.ring_len - self.window).min(self.pair_ring_len - 1)
    }

    pub fn entries_per_page(&self, source: usize) -> u32 {
        PAGE_POSITIONS / self.source_ratios[source]
    }

    /// Bytes of one page over all sources.
    pub fn page_bytes(&self) -> usize {
        let entries = |source| self.entries_per_page(source) as usize;
        let record = self.compressed_record_bytes + self.index_record_bytes;
        (0..self.source_ratios.len()).map(|source| entries(source) * record).sum()
    }

    /// Bytes that each further position of a sequence takes: its share of a page, and its token id.
    pub fn position_bytes(&self) -> usize {
        self.page_bytes().div_ceil(PAGE_POSITIONS as usize) + size_of::<u32>()
    }

    /// Bytes of a slot whatever its length: rings and pair rows.
    pub fn slot_bytes(&self) -> usize {
        let rings = (self.layer_count + self.draft_count) * self.ring_len as usize * self.window_record_bytes;
        let pairs = self.source_ratios.iter().filter(|ratio| **ratio > 1).count();
        rings + pairs * self.pair_ring_len as usize * self.pair_row * size_of::<f32>()
    }
}

/// One sequence's state, as far as the host knows it.
#[derive(Debug)]
struct Slot {
    length: Position,
    /// Highest position ever written plus one since the slot was emptied.
    written: Position,
    tokens: Vec<u32>,
    pages: Vec<PageRef>,
    /// For each layer the first position from which its ring is complete up to `length`; draft rings last.
    held_from: Vec<Position>,
}

/// The caches of all slots.
#[derive(Debug)]
pub struct Cache {
    layout: CacheLayout,
    /// For each backbone layer `[slots, ring_len, window record]`.
    pub windows: Vec<Buffer>,
    /// For each draft block, as `windows`.
    pub drafts: Vec<Buffer>,
    /// For each kv source `[pages, entries of a page, compressed record]`.
    pub compressed: Vec<Buffer>,
    /// For each kv source `[pages, entries of a page, index key record]`.
    pub index_keys: Vec<Buffer>,
    /// For each kv source of ratio 2 `[slots, pair_ring_len, pair_row]` f32; empty at ratio 1.
    pub pairs: Vec<Buffer>,
    /// `[slots, pages_per_slot]`, on the host: a launch takes it along.
    pub page_table: Vec<u32>,
    pool: PagePool,
    slots: Vec<Slot>,
}

impl Cache {
    /// # Errors
    /// [`LaunchError::Memory`] when the system refuses the address space.
    pub fn new(device: &Device, layout: CacheLayout) -> Result<Cache, LaunchError> {
        let slots = layout.slots as usize;
        let ring = slots * layout.ring_len as usize * layout.window_record_bytes;
        let rings = |count: usize| (0..count).map(|_| Buffer::zeroed(device, ring)).collect::<Result<Vec<_>, _>>();
        let pages = |record: usize| {
            let entries = |source| layout.page_count as usize * layout.entries_per_page(source) as usize;
            let bytes = (0..layout.source_ratios.len()).map(|source| entries(source) * record);
            bytes.map(|bytes| Buffer::zeroed(device, bytes)).collect::<Result<Vec<_>, _>>()
        };
        let pair = |ratio: &u32| match ratio {
            1 => Buffer::zeroed(device, 0),
            _ => Buffer::zeroed_of::<f32>(device, slots * layout.pair_ring_len as usize * layout.pair_row),
        };
        Ok(Cache {
            windows: rings(layout.layer_count)?,
            drafts: rings(layout.draft_count)?,
            compressed: pages(layout.compressed_record_bytes)?,
            index_keys: pages(layout.index_record_bytes)?,
            pairs: layout.source_ratios.iter().map(pair).collect::<Result<Vec<_>, _>>()?,
            page_table: vec![0; slots * layout.pages_per_slot as usize],
            pool: PagePool::new(layout.page_count),
            slots: (0..slots)
                .map(|_| Slot {
                    length: 0,
                    written: 0,
                    tokens: vec![0; layout.context as usize],
                    pages: Vec::with_capacity(layout.pages_per_slot as usize),
                    held_from: vec![0; layout.layer_count + 1],
                })
                .collect(),
            layout,
        })
    }

    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    pub fn pages_free(&self) -> u32 {
        self.pool.free_count()
    }

    /// A page that nobody holds, or `None` when all are held.
    pub(super) fn take_page(&self) -> Option<PageRef> {
        self.pool.take()
    }

    pub fn length(&self, slot: u32) -> Position {
        self.slots[slot as usize].length
    }

    /// The token ids at the slot's positions; meaningful below its length, and for a restored slot from
    /// `ngram - 1` positions before the restored length on.
    pub fn tokens(&self, slot: u32) -> &[u32] {
        &self.slots[slot as usize].tokens
    }

    /// Checks that every window continues its slot and that each layer holds what its rows will read.
    ///
    /// # Errors
    /// [`CacheError`]; nothing has changed.
    pub fn check(&self, windows: &[WindowRows], rows: &RoundRows) -> Result<(), CacheError> {
        for (index, window) in windows.iter().enumerate() {
            let slot_index = window.slot;
            let slot = self
                .slots
                .get(slot_index as usize)
                .ok_or(CacheError::Slot { slot: slot_index, slot_count: self.layout.slots })?;
            if window.start != slot.length {
                return Err(CacheError::Start { slot: slot_index, start: window.start, length: slot.length });
            }
            if window.end > self.layout.context {
                let context = self.layout.context;
                return Err(CacheError::Context { slot: slot_index, end: window.end, context });
            }
            if windows[..index].iter().any(|other| other.slot == slot_index) {
                return Err(CacheError::Twice { slot: slot_index });
            }
            for layer in 0..self.layout.layer_count {
                let out = rows.set(rows.out(layer)).windows[index];
                let needed = out.start.saturating_sub(self.layout.window - 1);
                let held = slot.held_from[layer];
                if out.row_count > 0 && needed < window.start && held > needed {
                    return Err(CacheError::Missing { slot: slot_index, layer, needed, held });
                }
            }
        }
        Ok(())
    }

    /// Makes the pages of `[start, end)` writable and records the window's token ids. Call after [`Cache::check`].
    ///
    /// # Errors
    /// [`CacheError::Pages`] when no page is free; the slot keeps its length. [`CacheError::Device`].
    pub fn begin(
        &mut self,
        queue: &mut Queue,
        window: &WindowRows,
        tokens: &[u32],
        fault: Fault,
    ) -> Result<(), CacheError> {
        let slot_index = window.slot as usize;
        for page in (window.start / PAGE_POSITIONS) as usize..window.end.div_ceil(PAGE_POSITIONS) as usize {
            self.make_writable(queue, slot_index, page, window.start, fault)?;
        }
        let slot = &mut self.slots[slot_index];
        let rows = window.start as usize..window.end as usize;
        match fault {
            Fault::StaleTokens => {
                let stale = (slot.written.max(window.start) as usize).min(rows.end);
                slot.tokens[stale..rows.end].copy_from_slice(&tokens[stale - rows.start..]);
            }
            _ => slot.tokens[rows].copy_from_slice(tokens),
        }
        Ok(())
    }

    /// Free pages that a slot takes to grow to `end` positions: new ones, and a copy of one that it shares.
    pub fn pages_needed(&self, slot: u32, end: Position) -> u32 {
        let slot = &self.slots[slot as usize];
        let pages = (slot.length / PAGE_POSITIONS) as usize..end.div_ceil(PAGE_POSITIONS) as usize;
        pages.filter(|page| slot.pages.get(*page).is_none_or(|held| !held.is_unique())).count() as u32
    }

    fn make_writable(
        &mut self,
        queue: &mut Queue,
        slot_index: usize,
        page: usize,
        start: Position,
        fault: Fault,
    ) -> Result<(), CacheError> {
        let held = self.slots[slot_index].pages.get(page);
        if held.is_some_and(|held| held.is_unique() || fault == Fault::SharedPage) {
            return Ok(());
        }
        let error = CacheError::Pages {
            slot: slot_index as u32,
            position: start.max(page as u32 * PAGE_POSITIONS),
            page_count: self.layout.page_count,
        };
        let fresh = self.pool.take().ok_or(error)?;
        let index = fresh.index();
        match self.slots[slot_index].pages.get(page).map(PageRef::index) {
            Some(shared) => {
                self.copy_page(queue, shared, index)?;
                self.slots[slot_index].pages[page] = fresh;
            }
            None => {
                assert_eq!(self.slots[slot_index].pages.len(), page, "a sequence's pages have no gap");
                self.slots[slot_index].pages.push(fresh);
            }
        }
        self.page_table[slot_index * self.layout.pages_per_slot as usize + page] = index;
        Ok(())
    }

    fn copy_page(&mut self, queue: &mut Queue, from: u32, to: u32) -> Result<(), LaunchError> {
        let layout = &self.layout;
        let pools =
            [(&mut self.compressed, layout.compressed_record_bytes), (&mut self.index_keys, layout.index_record_bytes)];
        for (buffers, record) in pools {
            for (source, buffer) in buffers.iter_mut().enumerate() {
                let bytes = layout.entries_per_page(source) as usize * record;
                queue.move_within(buffer, from as usize * bytes, to as usize * bytes, bytes)?;
            }
        }
        Ok(())
    }

    /// Records that the round's rows are written: every window's slot now ends where the window does.
    /// `context` is the set of rows that entered the draft rings.
    pub fn commit(&mut self, rows: &RoundRows, context: &RowSet) {
        let layout = &self.layout;
        for (index, window) in rows.full().windows.iter().enumerate() {
            let slot = &mut self.slots[window.slot as usize];
            let end = window.start + window.row_count;
            slot.length = end;
            slot.written = slot.written.max(end);
            let kept = slot.written.saturating_sub(layout.ring_len);
            for layer in 0..=layout.layer_count {
                let keys = match layer < layout.layer_count {
                    true => rows.set(rows.keys(layer)).windows[index],
                    false => context.windows[index],
                };
                let held = &mut slot.held_from[layer];
                if keys.start > window.start {
                    *held = keys.start;
                }
                *held = (*held).max(kept);
            }
        }
    }

    /// Declares that the slot holds exactly `length` positions.
    pub fn keep(&mut self, slot: u32, length: Position) {
        let slot = &mut self.slots[slot as usize];
        assert!(length <= slot.length, "a slot cannot keep more positions than were computed");
        slot.length = length;
    }

    /// The first position from which the draft rings of a slot are complete.
    pub fn drafts_held_from(&self, slot: u32) -> Position {
        self.slots[slot as usize].held_from[self.layout.layer_count]
    }

    /// Highest position ever written plus one; rows from the slot's length to here were rejected.
    pub fn written(&self, slot: u32) -> Position {
        self.slots[slot as usize].written
    }

    /// Empties the slot and lets its pages go.
    pub fn release(&mut self, slot: u32) {
        let slot = &mut self.slots[slot as usize];
        slot.length = 0;
        slot.written = 0;
        slot.pages.clear();
        slot.held_from.fill(0);
    }

    pub(super) fn pages(&self, slot: u32) -> &[PageRef] {
        &self.slots[slot as usize].pages
    }

    pub(super) fn held_from(&self, slot: u32) -> &[Position] {
        &self.slots[slot as usize].held_from
    }

    /// Makes an empty slot hold `length` positions with these pages; `tail` are the last token ids.
    pub(super) fn adopt(
        &mut self,
        slot_index: u32,
        length: Position,
        tail: &[u32],
        pages: &[PageRef],
        held: &[Position],
    ) {
        let base = slot_index as usize * self.layout.pages_per_slot as usize;
        let slot = &mut self.slots[slot_index as usize];
        assert_eq!(slot.length, 0, "a snapshot goes into an empty slot");
        assert!(slot.pages.is_empty(), "a snapshot goes into an empty slot");
        slot.length = length;
        slot.written = length;
        slot.tokens[length as usize - tail.len()..length as usize].copy_from_slice(tail);
        slot.held_from.copy_from_slice(held);
        for (index, page) in pages.iter().enumerate() {
            self.page_table[base + index] = page.index();
            slot.pages.push(page.clone());
        }
    }

    /// Byte range of the ring record of `position`, in any window or draft ring.
    pub(super) fn ring_record(&self, slot: u32, position: Position) -> Range<usize> {
        let index = slot as usize * self.layout.ring_len as usize + (position % self.layout.ring_len) as usize;
        index * self.layout.window_record_bytes..(index + 1) * self.layout.window_record_bytes
    }

    /// Float range of the pair row of `position`, in the pair ring of any ratio-2 source.
    pub(super) fn pair_record(&self, slot: u32, position: Position) -> Range<usize> {
        let index =
            slot as usize * self.layout.pair_ring_len as usize + (position % self.layout.pair_ring_len) as usize;
        index * self.layout.pair_row..(index + 1) * self.layout.pair_row
    }
}
