//! A snapshot and its pages as bytes that outlive the process.
//!
//! Little endian: position, token tail, `held_from`, ring records and pair rows, each list with its length. Bytes are read
//! as from a stranger: every length is compared with what this model's layout says before anything is made of it.

use std::ops::Range;
use std::sync::Arc;

use tf_device::{Buffer, LaunchError, Queue};
use tf_engine::model::DecodeError;

use super::cache::{Cache, CacheLayout};
use super::pages::{PAGE_POSITIONS, PageRef};
use super::snapshot::{Data, Snapshot, ring_rows};

/// Appends everything of `snapshot` but its pages.
pub(super) fn encode(snapshot: &Snapshot, bytes: &mut Vec<u8>) {
    let Data { position, tail, held_from, rings, pairs, pages: _ } = &*snapshot.data;
    let number = |bytes: &mut Vec<u8>, value: u32| bytes.extend(value.to_le_bytes());
    number(bytes, *position);
    for list in [tail, held_from] {
        number(bytes, list.len() as u32);
        list.iter().for_each(|value| number(bytes, *value));
    }
    bytes.extend((rings.len() as u64).to_le_bytes());
    bytes.extend_from_slice(rings);
    number(bytes, pairs.len() as u32);
    pairs.iter().for_each(|value| number(bytes, value.to_bits()));
}

/// What is still to be read. `None` once it is too short.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn list(&mut self) -> Option<Vec<u32>> {
        let count = self.number()? as usize;
        let bytes = self.take(count.checked_mul(4)?)?;
        Some(bytes.as_chunks().0.iter().map(|four| u32::from_le_bytes(*four)).collect())
    }
}

fn parse(layout: &CacheLayout, vocab_size: usize, tail_max: usize, bytes: &[u8]) -> Option<Data> {
    let mut rest = Rest(bytes);
    let position = rest.number()?;
    let tail = rest.list()?;
    let held_from = rest.list()?;
    let ring_bytes = u64::from_le_bytes(rest.take(8)?.try_into().ok()?);
    let rings = rest.take(usize::try_from(ring_bytes).ok()?)?.to_vec();
    let pairs: Vec<f32> = rest.list()?.into_iter().map(f32::from_bits).collect();
    let is_known = rest.0.is_empty()
        && (1..=layout.context).contains(&position)
        && tail.len() == tail_max.min(position as usize)
        && tail.iter().all(|token| (*token as usize) < vocab_size)
        && held_from.len() == layout.layer_count + 1
        && held_from.iter().all(|held| *held <= position);
    if !is_known {
        return None;
    }
    let records: usize = ring_rows(layout, position, &held_from).map(|rows| rows.len()).sum();
    let pair_sources = layout.source_ratios.iter().filter(|ratio| **ratio > 1).count();
    let pair_rows = if position % 2 == 1 { pair_sources } else { 0 };
    let fits = rings.len() == records * layout.window_record_bytes && pairs.len() == pair_rows * layout.pair_row;
    fits.then_some(Data { position, tail, pages: Vec::new(), held_from, rings, pairs })
}

/// A snapshot from its bytes, with the first pages of `base` and free ones after these.
///
/// # Errors
/// [`DecodeError::Malformed`] when the bytes don't fit this model, [`DecodeError::Pages`] when pages are missing.
pub(super) fn decode(
    cache: &Cache,
    vocab_size: usize,
    tail_max: usize,
    bytes: &[u8],
    base: Option<(&Snapshot, u32)>,
) -> Result<Snapshot, DecodeError> {
    let mut data = parse(cache.layout(), vocab_size, tail_max, bytes).ok_or(DecodeError::Malformed)?;
    let page_count = data.position.div_ceil(PAGE_POSITIONS);
    let shared = base.map(|(base, count)| base.data.pages.get(..count.min(page_count) as usize));
    data.pages = shared.unwrap_or(Some(&[])).ok_or(DecodeError::Malformed)?.to_vec();
    while (data.pages.len() as u32) < page_count {
        data.pages.push(cache.take_page().ok_or(DecodeError::Pages)?);
    }
    Ok(Snapshot { data: Arc::new(data) })
}

/// Appends the contents of pages, page after page: of each source its compressed records, then its index keys.
///
/// # Errors
/// [`LaunchError::Device`] when the device fails.
pub(super) fn read_pages(
    cache: &Cache,
    queue: &mut Queue,
    snapshot: &Snapshot,
    pages: Range<u32>,
    bytes: &mut Vec<u8>,
) -> Result<(), LaunchError> {
    let first = bytes.len();
    let page_bytes = cache.layout().page_bytes();
    bytes.resize(first + pages.len() * page_bytes, 0);
    let held = &snapshot.data.pages[pages.start as usize..pages.end as usize];
    for (page, contents) in held.iter().zip(bytes[first..].chunks_exact_mut(page_bytes)) {
        let mut contents = contents;
        for (buffer, bytes) in parts(&cache.compressed, &cache.index_keys, cache.layout()) {
            let (now, later) = contents.split_at_mut(bytes);
            queue.read(buffer, page.index() as usize * bytes, now)?;
            contents = later;
        }
    }
    Ok(())
}

/// Writes whole pages from the snapshot's page `first` on; false where it doesn't hold them alone.
///
/// # Errors
/// [`LaunchError::Device`] when the device fails.
pub(super) fn write_pages(
    cache: &mut Cache,
    queue: &mut Queue,
    snapshot: &Snapshot,
    first: u32,
    bytes: &[u8],
) -> Result<bool, LaunchError> {
    let layout = cache.layout().clone();
    let page_bytes = layout.page_bytes();
    let end = first as usize + bytes.len() / page_bytes;
    let held = snapshot.data.pages.get(first as usize..end);
    let Some(held) = held.filter(|held| held.iter().all(PageRef::is_unique) && bytes.len().is_multiple_of(page_bytes))
    else {
        return Ok(false);
    };
    for (page, contents) in held.iter().zip(bytes.chunks_exact(page_bytes)) {
        let mut contents = contents;
        let index = page.index() as usize;
        for source in 0..layout.source_ratios.len() {
            let entries = layout.entries_per_page(source) as usize;
            let of_source = [
                (&mut cache.compressed[source], layout.compressed_record_bytes),
                (&mut cache.index_keys[source], layout.index_record_bytes),
            ];
            for (buffer, record) in of_source {
                let (now, later) = contents.split_at(entries * record);
                queue.write(buffer, index * now.len(), now)?;
                contents = later;
            }
        }
    }
    Ok(true)
}

/// The parts of a page in their order: the buffer that holds them, and their bytes.
fn parts<'a>(
    compressed: &'a [Buffer],
    index_keys: &'a [Buffer],
    layout: &'a CacheLayout,
) -> impl Iterator<Item = (&'a Buffer, usize)> {
    compressed.iter().zip(index_keys).enumerate().flat_map(|(source, (compressed, keys))| {
        let entries = layout.entries_per_page(source) as usize;
        [(compressed, entries * layout.compressed_record_bytes), (keys, entries * layout.index_record_bytes)]
    })
}

impl CacheLayout {
    /// What must be equal for bytes of one process to be read by another: how records look, not how many there is room for.
    pub fn identity(&self, has_draft: bool) -> String {
        let CacheLayout { window, window_record_bytes, compressed_record_bytes, index_record_bytes, pair_row, .. } =
            self;
        format!(
            "1 page {PAGE_POSITIONS} window {window} x {window_record_bytes} compressed {compressed_record_bytes} keys \
             {index_record_bytes} pair {pair_row} layers {} draft {} {has_draft} ratios {:?}",
            self.layer_count, self.draft_count, self.source_ratios
        )
    }
}
