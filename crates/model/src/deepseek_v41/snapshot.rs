//! The state of a sequence at a position, enough to continue from there with equal bits.
//!
//! After `p` tokens that is: the window rows of every layer for the last `window - 1` positions, the draft rings' last
//! `window` rows, the raw pair row of `p - 1` where `p` is odd, the compressed rows and index keys up to `p / ratio`
//! (held as shares of pages, not copied), and the token ids that the n-gram history still reads.
//!
//! A snapshot taken where late layers were skipped remembers so: rows that would read them are refused, never computed
//! from something else.

use std::ops::Range;
use std::sync::Arc;

use tf_engine::request::Position;

use super::cache::Cache;
use super::fault::Fault;
use super::pages::{PAGE_POSITIONS, PageRef};

/// A sequence's state at [`Snapshot::position`]. Cheap to clone, and may be dropped on any thread.
#[derive(Clone, Debug)]
pub struct Snapshot {
    data: Arc<Data>,
}

#[derive(Debug)]
struct Data {
    position: Position,
    tail: Vec<u32>,
    pages: Vec<PageRef>,
    held_from: Vec<Position>,
    /// Ring records of the positions before `position`, ring after ring; the draft rings come last.
    rings: Vec<u8>,
    /// The pair row of `position - 1`, source after source; empty where `position` is even.
    pairs: Vec<f32>,
}

impl Snapshot {
    /// Positions that a slot holds after a restore.
    pub fn position(&self) -> Position {
        self.data.position
    }

    /// Bytes of its own, without the pages.
    pub fn bytes(&self) -> usize {
        self.data.rings.len() + size_of_val(&self.data.pairs[..]) + size_of_val(&self.data.tail[..])
    }

    /// Pages that this snapshot shares.
    pub fn page_count(&self) -> u32 {
        self.data.pages.len() as u32
    }

    /// The pages that this snapshot shares, by number.
    pub fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.data.pages.iter().map(PageRef::index)
    }

    /// For each layer the first position from which its window rows are there; draft rings last.
    pub fn held_from(&self) -> &[Position] {
        &self.data.held_from
    }
}

/// Positions whose ring records a snapshot at `position` holds.
fn kept_rows(position: Position, count: u32) -> Range<Position> {
    position.saturating_sub(count)..position
}

/// The state of `slot` at `position`, which its rings still reach. `tail` is how many token ids the n-gram history reads.
pub(super) fn take(cache: &Cache, slot: u32, position: Position, tail: usize, fault: Fault) -> Snapshot {
    let layout = cache.layout();
    let window = kept_rows(position, layout.window - 1);
    let draft = kept_rows(position, layout.window);
    let mut rings = Vec::new();
    let short = u32::from(fault == Fault::SnapshotShort);
    for (buffers, rows) in [(&cache.windows, &window), (&cache.drafts, &draft)] {
        for buffer in buffers {
            for row in rows.clone() {
                let record = &buffer.u8()[cache.ring_record(slot, row)];
                match row - rows.start < short {
                    true => rings.extend(std::iter::repeat_n(0, record.len())),
                    false => rings.extend_from_slice(record),
                }
            }
        }
    }
    let mut pairs = Vec::new();
    if position % 2 == 1 {
        for buffer in cache.pairs.iter().filter(|buffer| buffer.len_bytes() > 0) {
            pairs.extend_from_slice(&buffer.f32()[cache.pair_record(slot, position - 1)]);
        }
    }
    let tokens = &cache.tokens(slot)[..position as usize];
    let pages = cache.pages(slot)[..position.div_ceil(PAGE_POSITIONS) as usize].to_vec();
    Snapshot {
        data: Arc::new(Data {
            position,
            tail: tokens[tokens.len().saturating_sub(tail)..].to_vec(),
            pages,
            // Where a skip ended beyond the snapshot, what follows the snapshot is computed.
            held_from: cache.held_from(slot).iter().map(|held| position.min(*held)).collect(),
            rings,
            pairs,
        }),
    }
}

/// Puts `snapshot` into the empty `slot`.
pub(super) fn restore(cache: &mut Cache, slot: u32, snapshot: &Snapshot) {
    let data = &*snapshot.data;
    let window = kept_rows(data.position, cache.layout().window - 1);
    let draft = kept_rows(data.position, cache.layout().window);
    let held: Vec<Position> = data
        .held_from
        .iter()
        .enumerate()
        .map(|(layer, held)| match layer < cache.layout().layer_count {
            true => window.start.max(*held),
            false => draft.start.max(*held),
        })
        .collect();
    cache.adopt(slot, data.position, &data.tail, &data.pages, &held);
    let record_bytes = cache.layout().window_record_bytes;
    let mut records = data.rings.chunks_exact(record_bytes);
    for (index, rows) in [(0, window), (1, draft)] {
        let count = if index == 0 { cache.windows.len() } else { cache.drafts.len() };
        for ring in 0..count {
            for row in rows.clone() {
                let range = cache.ring_record(slot, row);
                let buffer = if index == 0 { &mut cache.windows[ring] } else { &mut cache.drafts[ring] };
                let record = records.next().expect("a snapshot of this model holds a record for each kept row");
                buffer.u8_mut()[range].copy_from_slice(record);
            }
        }
    }
    if !data.pairs.is_empty() {
        let range = cache.pair_record(slot, data.position - 1);
        let rows = data.pairs.chunks_exact(range.len());
        for (buffer, row) in cache.pairs.iter_mut().filter(|buffer| buffer.len_bytes() > 0).zip(rows) {
            buffer.f32_mut()[range.clone()].copy_from_slice(row);
        }
    }
}
