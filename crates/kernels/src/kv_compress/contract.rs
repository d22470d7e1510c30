//! What must hold of the compressed entries, their latents and the raw ring.

use super::{Args, launch, raw_columns, record_bytes, reference};
use crate::contract::*;
use crate::numerics_policy::Numerics;
use crate::reference_formats::{bf16, e2m1_decode, e4m3_decode};
use crate::rms_norm::contract::{norm_spans, spread, weights_on_edges};
use crate::rope::reference::frequencies;
use crate::rows::{Pages, WindowInfo, completed_entries};
use std::ops::Range;

pub const RATIO1: Contract = Contract {
    name: "kv_compress/ratio1",
    formula: "latent = RMSNorm(raw; norm); record = QDQ4(16, E4M3)(RoPE(latent, entry))",
    shapes: "raw [rows, head_dim] f32, bf16 values; latents [entries, head_dim] f32; record head_dim / 2 + \
        head_dim / 16 bytes in its page",
    order: "sum of squares as rms_norm; the rotation fuses nothing",
    bound: "the norm's interval; the rotation as kv_store; bf16 twice, E2M1 under an E4M3 scale that is one or two \
        values",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("head_dim", 128), ("rope_dim", 64), ("ratio", 1)] },
        Case { name: "small", rows: 10, sizes: &[("head_dim", 64), ("rope_dim", 16), ("ratio", 1)] },
        Case { name: "width of the release", rows: 4, sizes: &[("head_dim", 512), ("rope_dim", 64), ("ratio", 1)] },
        Case {
            name: "on the edges of bf16",
            rows: 16,
            sizes: &[("head_dim", 512), ("rope_dim", 64), ("ratio", 1), ("edges", 1)],
        },
    ],
    make,
    limits: &[],
    controls: CONTROLS,
    edits: &[
        metal("swaps the nibbles (Metal)", "uchar(code | high << 4)", "uchar(high | code << 4)"),
        metal("turns by the entry's number (Metal)", "entry * shape.ratio, frequencies", "entry + 1u, frequencies"),
        metal(
            "takes the other scale (Metal)",
            "2u * b + lane / 16u] = uchar(scale)",
            "2u * b + 1u - lane / 16u] = uchar(scale)",
        ),
        metal("takes the maximum of eight (Metal)", "ushort step = 8; step > 0", "ushort step = 4; step > 0"),
        metal(
            "looks no page up (Metal)",
            "const uint page = table[slot * shape.pages_per_slot + entry / shape.entries_per_page];",
            "const uint page = slot * shape.pages_per_slot + entry / shape.entries_per_page;",
        ),
        metal(
            "drops a block (Metal)",
            "for (uint b = 0u; b < blocks; b += 2u)",
            "for (uint b = 0u; b + 2u < blocks; b += 2u)",
        ),
        metal("adds the halves before the lanes (Metal)", "fold_four(even, odd)", "fold_four(even + odd, 0.0f)"),
    ],
    standard: STANDARD_CONTROLS,
};

pub const RATIO2: Contract = Contract {
    name: "kv_compress/ratio2",
    formula: "pooled = bf16(softmax over the pair's scores, column by column, times its values); then as ratio1 at \
        position 2 entry",
    shapes: "raw [rows, 2 head_dim] f32: values, then scores; raw ring [slots, raw_len, 2 head_dim] f32; otherwise \
        as ratio1",
    bound: "pooling: (12 + |s0 - s1|) U times the sum of absolute terms; then as ratio1",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("head_dim", 128), ("rope_dim", 64), ("ratio", 2)] },
        Case { name: "small", rows: 10, sizes: &[("head_dim", 64), ("rope_dim", 16), ("ratio", 2)] },
        Case { name: "width of the release", rows: 4, sizes: &[("head_dim", 512), ("rope_dim", 64), ("ratio", 2)] },
        Case {
            name: "pairs that cancel",
            rows: 16,
            sizes: &[("head_dim", 128), ("rope_dim", 64), ("ratio", 2), ("cancelling", 1)],
        },
    ],
    controls: &[
        CONTROLS[0].copy(),
        CONTROLS[1].copy(),
        CONTROLS[2].copy(),
        CONTROLS[3].copy(),
        Control::value("swaps the scores of a pair"),
        Control::value("pools by the mean"),
        Control::geometry("reads a stale slot of the raw ring"),
    ],
    edits: &[
        Control::metal(
            "reads the ring's slot of this row (Metal)",
            Gate::Geometry,
            include_str!("kernel.metal"),
            "slot * shape.raw_len + (position - 1u) % shape.raw_len",
            "slot * shape.raw_len + position % shape.raw_len",
        ),
        metal(
            "swaps the weights of the pair (Metal)",
            "first[c] * (e0 / sum) + second[c] * (e1 / sum)",
            "first[c] * (e1 / sum) + second[c] * (e0 / sum)",
        ),
        metal("turns by the entry's number (Metal)", "entry * shape.ratio, frequencies", "entry, frequencies"),
        metal(
            "divides a pair's sum (Metal)",
            "first[c] * (e0 / sum) + second[c] * (e1 / sum)",
            "(first[c] * e0 + second[c] * e1) / sum",
        ),
        metal("lets the oldest row of a ring go (Metal)", "left > shape.raw_len", "left >= shape.raw_len"),
        metal("keeps the odd rows (Metal)", "position % 2u != 0u ||", "position % 2u == 0u ||"),
    ],
    ..RATIO1
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

const CONTROLS: &[Control] = &[
    Control::value("turns by another base"),
    Control::value("turns too far"),
    Control::value("eps in bf16"),
    Control::value("takes the weight of the column before"),
];

const EPS: f32 = 1e-6;
const BASE: f64 = 1.6e5;
/// Rows of one sequence, its first position, and the sizes of its caches.
const SEQUENCE: usize = 16;
const START: usize = 6;
/// Even, so that the oldest row of a full window that a ring keeps is one that it holds.
const RAW_LEN: usize = 10;
const ENTRIES_PER_PAGE: usize = 8;
const PAGES_PER_SLOT: usize = 3;

struct Compressor {
    head_dim: usize,
    ratio: u32,
    raw: Vec<f32>,
    norm: Vec<f32>,
    frequencies: Vec<f32>,
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let (head_dim, ratio) = (case.size("head_dim"), case.size("ratio") as u32);
    let row = |row: usize| {
        // Rows so small that eps matters show nothing of their sums.
        let scale = if case.size("edges") == 1 { 2.0 } else { [2.0, 2e-3][row / 2 % 2] };
        if ratio == 1 {
            return values.bf16(head_dim, scale);
        }
        let mut raw = values.floats(head_dim, scale);
        // Some scores are beyond what an exponential holds without its maximum.
        raw.extend(values.floats(head_dim, if row % 6 < 2 { 300.0 } else { 6.0 }));
        raw
    };
    let mut raw: Vec<f32> = (0..case.rows).flat_map(row).collect();
    let mut norm = values.bf16(head_dim, 2.0);
    if case.size("edges") == 1 {
        spread(&mut raw, head_dim);
        norm = weights_on_edges(&raw.chunks(head_dim).map(wide).collect::<Vec<_>>(), f64::from(EPS));
    }
    if case.size("cancelling") == 1 {
        raw.chunks_mut(4 * head_dim).for_each(|pair| cancel(pair, head_dim));
    }
    Box::new(Compressor { head_dim, ratio, raw, norm, frequencies: frequencies(BASE, case.size("rope_dim"), None) })
}

/// Makes every fourth column of a pair's two rows one whose weighted values cancel: what is left are roundings, which
/// another order changes.
fn cancel(pair: &mut [f32], head_dim: usize) {
    let (first, second) = pair.split_at_mut(2 * head_dim);
    for column in (0..head_dim).step_by(4) {
        let score = head_dim + column;
        second[score] = first[score] + second[column];
        let apart = f64::from(first[score]) - f64::from(second[score]);
        second[column] = (-f64::from(first[column]) * apart.exp()) as f32;
    }
}

impl Compressor {
    fn position(row: usize) -> u32 {
        (START + row % SEQUENCE) as u32
    }

    fn raw_row(&self, row: usize) -> &[f32] {
        let columns = raw_columns(self.head_dim, self.ratio);
        &self.raw[row * columns..][..columns]
    }

    /// Each slot's ring with the raw row in front of its window, which is all that a launch may need of it.
    fn raw_ring(&self, seats: &Seats, is_stale: bool) -> Vec<f32> {
        let columns = raw_columns(self.head_dim, self.ratio);
        let mut ring = vec![f32::NAN; seats.slots * RAW_LEN * 2 * self.head_dim];
        for (window, sequence) in seats.windows.iter().zip(&seats.sequences) {
            let (Some(sequence), true) = (sequence, window.start % 2 == 1 && self.ratio == 2) else { continue };
            let before = window.start as usize - 1;
            let stale = if is_stale { 2.min(before - START) } else { 0 };
            let place = window.slot as usize * RAW_LEN + before % RAW_LEN;
            let row = sequence * SEQUENCE + before - START - stale;
            ring[place * columns..][..columns].copy_from_slice(self.raw_row(row));
        }
        ring
    }

    /// Whether a row completes an entry; the others are kept in the raw ring.
    fn completes(&self, row: usize) -> bool {
        (Self::position(row) + 1).is_multiple_of(self.ratio)
    }
}

/// Rows that a launch keeps in the raw rings of its slots, and where.
fn kept_in_ring(windows: &[WindowInfo], columns: usize) -> Vec<(usize, Range<usize>)> {
    let mut kept = Vec::new();
    for window in windows {
        let count = window.row_count as usize;
        for i in count.saturating_sub(RAW_LEN)..count {
            let position = window.start as usize + i;
            if position.is_multiple_of(2) {
                let place = window.slot as usize * RAW_LEN + position % RAW_LEN;
                kept.push((window.first_row as usize + i, place * columns..(place + 1) * columns));
            }
        }
    }
    kept
}

impl World for Compressor {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let (head_dim, ratio) = (self.head_dim, self.ratio);
        let columns = raw_columns(head_dim, ratio);
        let seats = Seats::of(picks, |row| (row / SEQUENCE, Self::position(row)));
        let mut entries = Vec::new();
        completed_entries(&seats.rows, ratio, &mut entries);
        let mut norm = self.norm.clone();
        let (mut turning, mut eps) = (self.frequencies.clone(), EPS);
        if fault.is("turns by another base") {
            turning = frequencies(1e4, 2 * turning.len(), None);
        }
        if fault.is("turns too far") {
            turning.iter_mut().for_each(|frequency| *frequency *= 1.125);
        }
        if fault.is("eps in bf16") {
            eps = bf16(f64::from(eps)) as f32;
        }
        if fault.is("takes the weight of the column before") {
            norm.rotate_right(1);
        }
        let mut rows = gather(picks, &self.raw, columns);
        let mut ring = self.raw_ring(&seats, fault.is("reads a stale slot of the raw ring"));
        if ratio == 2 && (fault.is("swaps the scores of a pair") || fault.is("pools by the mean")) {
            let scale = if fault.is("pools by the mean") { 0.0 } else { -1.0 };
            let rows = rows.chunks_mut(columns).chain(ring.chunks_mut(columns));
            rows.for_each(|row| row[head_dim..].iter_mut().for_each(|score| *score *= scale));
        }
        let pages = PAGES_PER_SLOT * seats.slots;
        let table: Vec<u32> = (0..pages).map(|page| ((page * 7 + 3) % pages) as u32).collect();
        let table = if pages.is_multiple_of(7) { (0..pages as u32).rev().collect() } else { table };
        let pages_view = Pages { table: &table, pages_per_slot: PAGES_PER_SLOT, entries_per_page: ENTRIES_PER_PAGE };
        let bytes = record_bytes(head_dim);
        let (raw, norm) = (stage.rows_in("raw", &rows), stage.input("norm", &norm));
        let mut cache = stage.poisoned::<u8>("cache", pages * ENTRIES_PER_PAGE * bytes);
        let mut latents = stage.output::<f32>("latents", entries.len() * head_dim);
        let mut ring_out = stage.cache("raw ring", &ring);
        let args = Args {
            raw: &raw.buffer,
            rows: &seats.rows,
            windows: &seats.windows,
            entries: &entries,
            ratio,
            norm: &norm.buffer,
            eps,
            frequencies: &turning,
            head_dim,
            raw_ring: (ratio == 2).then_some(&mut ring_out.buffer),
            raw_len: RAW_LEN,
            cache: &mut cache.buffer,
            pages: pages_view,
            latents: &mut latents.buffer,
        };
        stage.run(|queue| launch(queue, args))?;
        stage.read(raw);
        stage.read(norm);
        let of_entries = |width: usize, place: &dyn Fn(usize) -> usize| {
            let ranges = entries.iter().enumerate().map(|(e, entry)| {
                let at = place(e) * width;
                (entry.row as usize, at..at + width)
            });
            ranges.collect::<Vec<_>>()
        };
        let latent_ranges = of_entries(head_dim, &|e| e);
        let record_ranges = of_entries(bytes, &|e| pages_view.index(entries[e].slot, entries[e].entry as usize));
        stage.ranges::<f32>(latents, latent_ranges);
        stage.ranges::<u8>(cache, record_ranges);
        stage.ranges::<f32>(ring_out, if ratio == 2 { kept_in_ring(&seats.windows, columns) } else { Vec::new() });
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let head_dim = self.head_dim;
        if !self.completes(row) {
            return wide(self.raw_row(row)).into_iter().map(Expected::exactly).collect();
        }
        let release = Numerics::Release;
        let (norm, eps) = (wide(&self.norm), f64::from(EPS));
        let own = wide(self.raw_row(row));
        let (pooled, pooled_spans) = if self.ratio == 1 {
            (own.clone(), Span::all(&own))
        } else {
            let first = wide(self.raw_row(row - 1));
            let values: Vec<f64> = first[..head_dim].iter().chain(&own[..head_dim]).copied().collect();
            let scores: Vec<f64> = first[head_dim..].iter().chain(&own[head_dim..]).copied().collect();
            let exact = reference::pool(&values, &scores, head_dim, Numerics::Exact);
            let spans = exact.iter().enumerate().map(|(c, exact)| {
                let apart = (scores[c] - scores[head_dim + c]).abs();
                let terms = values[c].abs().max(values[head_dim + c].abs());
                Span::around(*exact, terms * (12.0 + apart) * U).bf16()
            });
            (reference::pool(&values, &scores, head_dim, release), spans.collect())
        };
        let mut values = reference::latent(&pooled, &norm, eps, release);
        let mut spans = norm_spans(&pooled_spans, &norm, eps);
        let first_position = Self::position(row) / self.ratio * self.ratio;
        let entry = reference::entry(&values, first_position, &self.frequencies, release);
        let mut turned = spans.clone();
        rotate(&mut turned, first_position, &self.frequencies, true);
        values.extend(entry);
        spans.extend(qdq_fine(&turned));
        Expected::zip(&values, &spans)
    }

    fn decode(&self, row: usize, words: &[u32]) -> Vec<f64> {
        let head_dim = self.head_dim;
        let float = |word: &u32| f64::from(f32::from_bits(*word));
        if !self.completes(row) {
            return words.iter().map(float).collect();
        }
        let mut values: Vec<f64> = words[..head_dim].iter().map(float).collect();
        let (codes, scales) = words[head_dim..].split_at(head_dim / 2);
        for c in 0..head_dim {
            // Byte 16 g + l: element 32 g + l low, 32 g + 16 + l high.
            let byte = codes[c / 32 * 16 + c % 16] as u8;
            let code = if c % 32 < 16 { byte & 15 } else { byte >> 4 };
            values.push(e2m1_decode(code) * e4m3_decode(scales[c / 16] as u8));
        }
        values
    }

    fn work(&self) -> Work {
        Work { bytes: self.raw.len() * 6, multiply_adds: self.raw.len() * 16 }
    }
}
