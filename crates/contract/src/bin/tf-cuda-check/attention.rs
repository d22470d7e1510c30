//! Attention of the release by itself, as the model launches it: its times, and what it would gain if a row's keys were split.

use anyhow::Result;
use tf_device::{Buffer, Device, Queue};
use tf_kernels::attention::{self, Args, Compressed, Shape, Span};
use tf_kernels::rows::{Pages, RowInfo, WindowInfo};
use tf_kernels::{kv_compress, kv_store, rope};

use crate::random::Random;
use crate::speed::{Timer, random_rows};

const HEADS: usize = 64;
const HEAD_DIM: usize = 512;
const ROPE_DIM: usize = 64;
const WINDOW: usize = 128;
const SELECTED: usize = 512;
/// Positions before the rows; an entry is two of them.
const CONTEXT: usize = 4096;
const PAGE: usize = 64;
/// Sequences with a cache of their own; more share these.
const CACHES: usize = 16;
/// Rows whose scores lie side by side, as in the model.
const TILE_ROWS: usize = 128;
/// From as many rows on they are one sequence's prompt.
const PROMPT_ROWS: usize = 512;

/// What a launch reads and writes.
pub(crate) struct Attention {
    shape: Shape,
    rows: Vec<RowInfo>,
    windows: Vec<WindowInfo>,
    table: Vec<u32>,
    pages_per_slot: usize,
    frequencies: Vec<f32>,
    q: Buffer,
    records: Buffer,
    ring: Buffer,
    cache: Buffer,
    selected: Buffer,
    counts: Buffer,
    sinks: Buffer,
    scratch: Buffer,
    out: Buffer,
}

/// E4M3 values and E8M0 scales of `count` records.
fn key_records(random: &mut Random, count: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * kv_store::record_bytes(HEAD_DIM));
    for _ in 0..count {
        bytes.extend((0..HEAD_DIM).map(|_| random.e4m3()));
        bytes.extend((0..HEAD_DIM / 32).map(|_| 117 + random.below(5) as u8));
    }
    bytes
}

/// E2M1 values and E4M3 scales of `count` entries.
fn entry_records(random: &mut Random, count: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * kv_compress::record_bytes(HEAD_DIM));
    for _ in 0..count {
        bytes.extend((0..HEAD_DIM / 2).map(|_| random.next() as u8));
        bytes.extend((0..HEAD_DIM / 16).map(|_| 0x28 + random.below(5) as u8));
    }
    bytes
}

impl Attention {
    /// `rows` rows of the release, each in `parts` rows of a part of its keys.
    pub(crate) fn random(device: &Device, rows: usize, parts: usize) -> Result<Attention> {
        let mut random = Random(10);
        let rows = rows * parts;
        let (window, selected_max) = (WINDOW / parts, SELECTED / parts);
        let slots = if rows >= PROMPT_ROWS { 1 } else { rows };
        let of_slot = rows / slots;
        let ring_len = window + of_slot.min(8) + 1;
        let shape = Shape { heads: HEADS, head_dim: HEAD_DIM, window, ring_len, selected_max, block_rows: 0 };
        let windows: Vec<WindowInfo> = (0..slots)
            .map(|slot| WindowInfo {
                slot: slot as u32,
                start: CONTEXT as u32,
                first_row: (slot * of_slot) as u32,
                row_count: of_slot as u32,
            })
            .collect();
        let row_of = |row: usize| {
            let (window, position) = ((row / of_slot) as u32, (CONTEXT + row % of_slot) as u32);
            RowInfo { slot: window, position, window }
        };
        let pages_per_slot = (CONTEXT + of_slot).div_ceil(2 * PAGE);
        let caches = slots.min(CACHES);
        let table = (0..slots * pages_per_slot).map(|page| (page % (caches * pages_per_slot)) as u32).collect();
        let selected: Vec<u32> = (0..rows * selected_max)
            .map(|at| (at % selected_max * (CONTEXT / 2) / selected_max + at / selected_max % 3) as u32)
            .collect();
        let sinks: Vec<f32> = (0..HEADS).map(|head| head as f32 / 16.0 - 2.0).collect();
        let (keys, ring) = (key_records(&mut random, rows), key_records(&mut random, slots * ring_len));
        let cache = entry_records(&mut random, caches * pages_per_slot * PAGE);
        let scratch = attention::gpu_scratch_floats(shape, rows.min(TILE_ROWS));
        Ok(Attention {
            shape,
            rows: (0..rows).map(row_of).collect(),
            windows,
            table,
            pages_per_slot,
            frequencies: rope::reference::frequencies(1e4, ROPE_DIM, None),
            q: random_rows(device, rows, HEADS * HEAD_DIM)?,
            records: Buffer::from_slice(device, &keys)?,
            ring: Buffer::from_slice(device, &ring)?,
            cache: Buffer::from_slice(device, &cache)?,
            selected: Buffer::from_slice(device, &selected)?,
            counts: Buffer::from_slice(device, &vec![selected_max as u32; rows])?,
            sinks: Buffer::from_slice(device, &sinks)?,
            scratch: Buffer::zeroed_of::<f32>(device, scratch)?,
            out: Buffer::zeroed_of::<f32>(device, rows * HEADS * HEAD_DIM)?,
        })
    }

    pub(crate) fn launch(&mut self, queue: &mut Queue) -> Result<()> {
        let pages = Pages { table: &self.table, pages_per_slot: self.pages_per_slot, entries_per_page: PAGE };
        let (cache, selected, counts) = (&self.cache, &self.selected, &self.counts);
        let args = Args {
            shape: self.shape,
            span: Span::Causal,
            q: &self.q,
            rows: &self.rows,
            windows: &self.windows,
            records: &self.records,
            ring: &self.ring,
            compressed: Some(Compressed { cache, pages, selected, counts }),
            sinks: &self.sinks,
            frequencies: &self.frequencies,
            scratch: &mut self.scratch,
            out: &mut self.out,
        };
        Ok(attention::launch(queue, args)?)
    }
}

impl Timer<'_> {
    /// Every key once, queries and outputs; keys stand in the second-level cache.
    pub(crate) fn attention(&mut self, row_counts: &[usize]) -> Result<()> {
        let (entry, key) = (kv_compress::record_bytes(HEAD_DIM), kv_store::record_bytes(HEAD_DIM));
        let bytes = SELECTED * entry + WINDOW * key + 8 * HEADS * HEAD_DIM;
        for &rows in row_counts {
            let mut attention = Attention::random(self.device, rows, 1)?;
            let calls = if rows > 64 { 4 } else { 16 };
            let measured = self.time(calls, |queue, _| attention.launch(queue))?;
            let operations = 4 * rows * HEADS * (SELECTED + WINDOW) * HEAD_DIM;
            self.report("attention", rows, (rows * bytes) as f64, operations as f64, measured);
        }
        Ok(())
    }
}
