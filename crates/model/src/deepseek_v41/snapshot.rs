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

use super::cache::{Cache, CacheLayout};
use super::fault::Fault;
use super::pages::{PAGE_POSITIONS, PageRef};

/// A sequence's state at [`Snapshot::position`]. Cheap to clone, and may be dropped on any thread.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub(super) data: Arc<Data>,
}

#[derive(Debug)]
pub(super) struct Data {
    pub position: Position,
    pub tail: Vec<u32>,
    pub pages: Vec<PageRef>,
    pub held_from: Vec<Position>,
    /// Ring records of the positions of [`ring_rows`], ring after ring; the draft rings come last.
    pub rings: Vec<u8>,
    /// The pair row of `position - 1`, source after source; empty where `position` is even.
    pub pairs: Vec<f32>,
}

impl Snapshot {
    /// Stands for a state that a failed device did not give; its model runs no further round.
    pub(super) fn lost(position: Position, layout: &CacheLayout) -> Snapshot {
        let (tail, pages, held_from) = (Vec::new(), Vec::new(), vec![Position::MAX; layout.layer_count + 1]);
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

/// Positions whose records a snapshot at `position` holds of each ring: the window before it as far as the layer computed
/// it. Of layers that skipped these rows there is nothing, so a snapshot inside a prompt is small.
pub(super) fn ring_rows<'a>(
    layout: &'a CacheLayout,
    position: Position,
    held_from: &'a [Position],
) -> impl Iterator<Item = Range<Position>> + use<'a> {
    let rows = move |count: u32, held: Position| position.saturating_sub(count).max(held.min(position))..position;
    let windows = held_from[..layout.layer_count].iter().map(move |held| rows(layout.window - 1, *held));
    let drafts = std::iter::repeat_n(rows(layout.window, held_from[layout.layer_count]), layout.draft_count);
    windows.chain(drafts)
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
    // Where a skip ended beyond the snapshot, what follows the snapshot is computed.
    let held_from: Vec<Position> = cache.held_from(slot).iter().map(|held| position.min(*held)).collect();
    let mut rings = Vec::new();
    for (buffer, rows) in cache.windows.iter().chain(&cache.drafts).zip(ring_rows(layout, position, &held_from)) {
        let first = rings.len();
        for run in &ring_runs(cache, slot, &rows) {
            read_more(queue, buffer, run, &mut rings)?;
        }
        if fault == Fault::SnapshotShort && !rows.is_empty() {
            rings[first..first + layout.window_record_bytes].fill(0);
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
            held_from,
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
    let rows: Vec<Range<Position>> = ring_rows(cache.layout(), data.position, &data.held_from).collect();
    let runs: Vec<Vec<Range<usize>>> = rows.iter().map(|rows| ring_runs(cache, slot, rows)).collect();
    let layers = cache.layout().layer_count;
    // Without draft rings the last entry stands for nothing.
    let drafts = rows.get(layers).map_or(data.position, |rows| rows.start);
    let held: Vec<Position> = rows[..layers].iter().map(|rows| rows.start).chain([drafts]).collect();
    cache.adopt(slot, data.position, &data.tail, &data.pages, &held);
    let mut records = &data.rings[..];
    for (ring, runs) in cache.windows.iter_mut().chain(&mut cache.drafts).zip(&runs) {
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
