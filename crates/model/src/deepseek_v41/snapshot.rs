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

use tf_device::{Buffer, Element, LaunchError, Queue};
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
    /// Stands for a state that a failed device did not give; its model runs no further round.
    pub(super) fn lost(position: Position) -> Snapshot {
        let (tail, pages, held_from) = (Vec::new(), Vec::new(), Vec::new());
        Snapshot { data: Arc::new(Data { position, tail, pages, held_from, rings: Vec::new(), pairs: Vec::new() }) }
    }

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

/// Runs of the ring records of `rows`, in their order: byte ranges in any window or draft ring.
fn ring_runs(cache: &Cache, slot: u32, rows: &Range<Position>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for record in rows.clone().map(|row| cache.ring_record(slot, row)) {
        match runs.last_mut() {
            Some(run) if run.end == record.start => run.end = record.end,
            _ => runs.push(record),
        }
    }
    runs
}

/// The state of `slot` at `position`, which its rings still reach. `tail` is how many token ids the n-gram history reads.
///
/// # Errors
/// [`LaunchError::Device`] when the device fails.
pub(super) fn take(
    cache: &Cache,
    queue: &mut Queue,
    slot: u32,
    position: Position,
    tail: usize,
    fault: Fault,
) -> Result<Snapshot, LaunchError> {
    let layout = cache.layout();
    let window = kept_rows(position, layout.window - 1);
    let draft = kept_rows(position, layout.window);
    let mut rings = Vec::new();
    for (buffers, rows) in [(&cache.windows, &window), (&cache.drafts, &draft)] {
        let runs = ring_runs(cache, slot, rows);
        for buffer in buffers {
            let first = rings.len();
            for run in &runs {
                read_more(queue, buffer, run, &mut rings)?;
            }
            if fault == Fault::SnapshotShort && !rows.is_empty() {
                rings[first..first + layout.window_record_bytes].fill(0);
            }
        }
    }
    let mut pairs = Vec::new();
    if position % 2 == 1 {
        let range = cache.pair_record(slot, position - 1);
        for buffer in cache.pairs.iter().filter(|buffer| buffer.len_bytes() > 0) {
            read_more(queue, buffer, &range, &mut pairs)?;
        }
    }
    let tokens = &cache.tokens(slot)[..position as usize];
    let pages = cache.pages(slot)[..position.div_ceil(PAGE_POSITIONS) as usize].to_vec();
    Ok(Snapshot {
        data: Arc::new(Data {
            position,
            tail: tokens[tokens.len().saturating_sub(tail)..].to_vec(),
            pages,
            // Where a skip ended beyond the snapshot, what follows the snapshot is computed.
            held_from: cache.held_from(slot).iter().map(|held| position.min(*held)).collect(),
            rings,
            pairs,
        }),
    })
}

/// Appends elements of `buffer` to `values`.
fn read_more<T: Element + Default>(
    queue: &mut Queue,
    buffer: &Buffer,
    range: &Range<usize>,
    values: &mut Vec<T>,
) -> Result<(), LaunchError> {
    let first = values.len();
    values.resize(first + range.len(), T::default());
    queue.read(buffer, range.start, &mut values[first..])
}

/// Puts `snapshot` into the empty `slot`.
///
/// # Errors
/// [`LaunchError::Device`] when the device fails.
pub(super) fn restore(cache: &mut Cache, queue: &mut Queue, slot: u32, snapshot: &Snapshot) -> Result<(), LaunchError> {
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
    let mut records = &data.rings[..];
    let runs = [window, draft].map(|rows| ring_runs(cache, slot, &rows));
    let rings = cache.windows.iter_mut().map(|ring| (ring, &runs[0]));
    for (ring, runs) in rings.chain(cache.drafts.iter_mut().map(|ring| (ring, &runs[1]))) {
        for run in runs {
            let (now, later) = records.split_at(run.len());
            queue.write(ring, run.start, now)?;
            records = later;
        }
    }
    if !data.pairs.is_empty() {
        let range = cache.pair_record(slot, data.position - 1);
        let rows = data.pairs.chunks_exact(range.len());
        for (buffer, row) in cache.pairs.iter_mut().filter(|buffer| buffer.len_bytes() > 0).zip(rows) {
            queue.write(buffer, range.start, row)?;
        }
    }
    Ok(())
}
