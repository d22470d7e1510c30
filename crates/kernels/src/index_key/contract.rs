//! What must hold of the index keys.

use super::{Args, BLOCK, launch, page_bytes, record_bytes, reference};
use crate::contract::*;
use crate::numerics_policy::Numerics;
use crate::reference_formats::{bf16, e2m1_decode, e8m0_decode};
use crate::rms_norm::contract::norm_spans;
use crate::rope::reference::frequencies;
use crate::rows::{EntryInfo, Pages};

pub const INDEX_KEY: Contract = Contract {
    name: "index_key",
    formula: "key[e] = QDQ4(32, E8M0)(RoPE(RMSNorm(x[e]; norm), entry * ratio)), stored in blocks of 16 entries",
    shapes: "x [entries, head_dim] f32, bf16 values; pages of [entries_per_page / 16] blocks: codes [head_dim / \
        8][16][4], scales [head_dim / 32][16]",
    order: "sum of squares as rms_norm; the rotation fuses nothing",
    bound: "the norm's interval; the rotation as kv_store; bf16 twice, E2M1 under a power of two",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("head_dim", 128), ("rope_dim", 64)] },
        Case { name: "small", rows: 9, sizes: &[("head_dim", 32), ("rope_dim", 16)] },
    ],
    make,
    limits: &[],
    controls: &[
        Control::value("turns by another base"),
        Control::value("eps in bf16"),
        Control::value("writes the entry before"),
        Control::value("swaps the nibbles"),
        Control::geometry("takes the entry of the first row of the launch"),
    ],
    edits: &[
        metal("swaps the nibbles (Metal)", "uchar(code | high << 4)", "uchar(high | code << 4)"),
        metal("takes the next place (Metal)", "place = inside % 16u", "place = (inside + 1u) % 16u"),
        metal(
            "takes the scale a step too small (Metal)",
            "(bits >> 23) + ((bits & 0x7fffffu) != 0u ? 1u : 0u)",
            "(bits >> 23)",
        ),
        metal(
            "takes the pages of the first sequence (Metal)",
            "table[slot * shape.pages_per_slot",
            "table[0u * shape.pages_per_slot",
        ),
    ],
    standard: STANDARD_CONTROLS,
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

const EPS: f32 = 1e-6;
const BASE: f64 = 1.6e5;
const RATIO: u32 = 2;
const ENTRIES_PER_PAGE: usize = 32;
const PAGES_PER_SLOT: usize = 2;

struct Keys {
    head_dim: usize,
    x: Vec<f32>,
    norm: Vec<f32>,
    frequencies: Vec<f32>,
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let head_dim = case.size("head_dim");
    let x = (0..case.rows).flat_map(|row| values.bf16(head_dim, [3.0, 2e-3][row % 2])).collect();
    let norm = values.bf16(head_dim, 2.0);
    Box::new(Keys { head_dim, x, norm, frequencies: frequencies(BASE, case.size("rope_dim"), None) })
}

/// The entry of a row; a row's sequence is its own.
fn entry_of(row: usize) -> u32 {
    (1 + row * 5 % (ENTRIES_PER_PAGE * PAGES_PER_SLOT - 1)) as u32
}

/// The bytes of an entry in a cache, as the layout's text gives them: its codes by groups of 8 columns, then its scales.
fn places(pages: &Pages<'_>, slot: u32, entry: usize, head_dim: usize) -> Vec<std::ops::Range<usize>> {
    let page = pages.table[slot as usize * pages.pages_per_slot + entry / ENTRIES_PER_PAGE] as usize;
    let (block, lane) = (entry % ENTRIES_PER_PAGE / BLOCK, entry % BLOCK);
    let start = page * page_bytes(head_dim, ENTRIES_PER_PAGE) + block * BLOCK * record_bytes(head_dim);
    let codes = (0..head_dim / 8).map(|group| start + (group * BLOCK + lane) * 4).map(|at| at..at + 4);
    let scales = start + head_dim / 2 * BLOCK;
    codes.chain((0..head_dim / 32).map(|group| scales + group * BLOCK + lane).map(|at| at..at + 1)).collect()
}

impl World for Keys {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let head_dim = self.head_dim;
        let seats = Seats::windows_of(picks, |row| (row, entry_of(row)), false);
        let mut turning = self.frequencies.clone();
        let mut eps = EPS;
        if fault.is("turns by another base") {
            turning = frequencies(1e4, 2 * turning.len(), None);
        }
        if fault.is("eps in bf16") {
            eps = bf16(f64::from(eps)) as f32;
        }
        let mut x = gather(picks, &self.x, head_dim);
        if fault.is("writes the entry before") {
            x.rotate_right(head_dim);
        }
        let first = seats.rows[0].position;
        let entries = seats.rows.iter().enumerate().map(|(row, info)| EntryInfo {
            slot: info.slot,
            entry: info.position,
            row: row as u32,
        });
        let entries: Vec<EntryInfo> = entries.collect();
        if fault.is("takes the entry of the first row of the launch") {
            turning.iter_mut().for_each(|frequency| *frequency *= 1.0 + first as f32 / 8.0);
        }
        let pages = PAGES_PER_SLOT * seats.slots;
        let table: Vec<u32> = (0..pages as u32).rev().collect();
        let pages_view = Pages { table: &table, pages_per_slot: PAGES_PER_SLOT, entries_per_page: ENTRIES_PER_PAGE };
        let (x, norm) = (stage.rows_in("x", &x), stage.input("norm", &self.norm));
        let mut cache = stage.poisoned::<u8>("cache", pages * page_bytes(head_dim, ENTRIES_PER_PAGE));
        let args = Args {
            x: &x.buffer,
            norm: &norm.buffer,
            eps,
            entries: &entries,
            ratio: RATIO,
            frequencies: &turning,
            head_dim,
            cache: &mut cache.buffer,
            pages: pages_view,
        };
        stage.run(|queue| launch(queue, args))?;
        let mut ranges = Vec::new();
        for (row, entry) in entries.iter().enumerate() {
            let places = places(&pages_view, entry.slot, entry.entry as usize, head_dim);
            if fault.is("swaps the nibbles") {
                let codes = places[..head_dim / 8].iter().flat_map(|place| place.clone());
                cache.edit::<u8>(|cache| codes.for_each(|at| cache[at] = cache[at].rotate_left(4)));
            }
            ranges.extend(places.into_iter().map(|place| (row, place)));
        }
        stage.read(x);
        stage.read(norm);
        stage.ranges::<u8>(cache, ranges);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let x = wide(&self.x[row * self.head_dim..][..self.head_dim]);
        let (norm, eps, position) = (wide(&self.norm), f64::from(EPS), entry_of(row) * RATIO);
        // The projection of the definition is another kernel's: here it is the identity.
        let identity: Vec<f64> =
            (0..x.len() * x.len()).map(|i| f64::from(u8::from(i / x.len() == i % x.len()))).collect();
        let release = Numerics::Release;
        let values = reference::index_key(&x, &identity, &norm, eps, position, &self.frequencies, release);
        let mut spans = norm_spans(&Span::all(&x), &norm, eps);
        rotate(&mut spans, position, &self.frequencies, true);
        Expected::zip(&values, &qdq_fp4(&spans))
    }

    fn decode(&self, _row: usize, words: &[u32]) -> Vec<f64> {
        let (codes, scales) = words.split_at(self.head_dim / 2);
        let value = |c: usize| {
            let byte = codes[c / 2] as u8;
            e2m1_decode(if c.is_multiple_of(2) { byte & 15 } else { byte >> 4 }) * e8m0_decode(scales[c / 32] as u8)
        };
        (0..self.head_dim).map(value).collect()
    }

    fn work(&self) -> Work {
        Work { bytes: self.x.len() * 5, multiply_adds: self.x.len() * 8 }
    }
}
