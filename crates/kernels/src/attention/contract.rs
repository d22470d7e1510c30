//! What must hold of the attention over window, selection and draft block.

use super::{Args, Compressed, Shape, Span as Keys, gpu_scratch_floats, launch, reference, scratch_floats, steps};
use crate::contract::*;
use crate::numerics_policy::Numerics;
use crate::reference_formats::{bf16, e2m1_decode, e4m3_decode, e8m0_decode};
use crate::rope::reference::{frequencies, rotate as turn};
use crate::rows::{Pages, WindowInfo};
use crate::{kv_compress, kv_store};

pub const CAUSAL: Contract = Contract {
    name: "attention/causal",
    formula: "out[h] = RoPE^-1(sum_j bf16(e_j) k_j / (sum_j e_j + exp(sink[h] - M))), e_j = exp(q . k_j / \
        sqrt(head_dim) - M); keys: selected entries, then the window",
    shapes: "q, out [rows, heads, head_dim] f32; window records and compressed records as kv_store and \
        kv_compress; sinks [heads] f32",
    order: "a dot product is one fused chain over the columns; the sums one chain over the keys: entries \
        ascending, window ascending, sink last; on CUDA chains of sixteen products a step, and thirty-two \
        partial denominators of quads of places, folded by halves, sink last",
    bound: "scores: head_dim + 4 roundings of the absolute products; exp 2.2 U and the score's radius; keys + 24 \
        roundings of the sums; bf16 of q, e, o and out as intervals",
    cases: &[
        Case {
            name: "wide",
            rows: 128,
            sizes: &[("heads", 8), ("head_dim", 64), ("rope_dim", 16), ("window", 12), ("selected", 6)],
        },
        Case {
            name: "two head blocks",
            rows: 17,
            sizes: &[("heads", 20), ("head_dim", 96), ("rope_dim", 32), ("window", 21), ("selected", 9)],
        },
        Case {
            name: "window only",
            rows: 33,
            sizes: &[("heads", 3), ("head_dim", 32), ("rope_dim", 32), ("window", 8), ("selected", 0)],
        },
        Case {
            name: "keys of the release",
            rows: 2,
            sizes: &[
                ("heads", 2),
                ("head_dim", 512),
                ("rope_dim", 64),
                ("window", 128),
                ("selected", 512),
                ("positions", 1100),
            ],
        },
        Case {
            name: "widest",
            rows: 2,
            sizes: &[
                ("heads", 1),
                ("head_dim", 1024),
                ("rope_dim", 64),
                ("window", 8),
                ("selected", 4),
                ("positions", 40),
            ],
        },
        Case {
            name: "terms that cancel",
            rows: 43,
            sizes: &[
                ("heads", 4),
                ("head_dim", 64),
                ("rope_dim", 16),
                ("window", 12),
                ("selected", 12),
                ("cancelling", 1),
            ],
        },
        // Keys of both halves of a row's places, and entries that end inside a quarter.
        Case {
            name: "far into a text",
            rows: 34,
            sizes: &[
                ("heads", 3),
                ("head_dim", 512),
                ("rope_dim", 64),
                ("window", 128),
                ("selected", 300),
                ("positions", 640),
            ],
        },
    ],
    make,
    limits: &[],
    controls: CONTROLS,
    edits: &[
        metal(
            "reads the next slot of the ring (Metal)",
            "position % shape.ring_len",
            "(position + 1u) % shape.ring_len",
        ),
        metal(
            "leaves the sink out (Metal)",
            "denominator[0] = sum + exp_own(sinks[head] - most);",
            "denominator[0] = sum;",
        ),
        metal(
            "adds the sink first (Metal)",
            "denominator[0] = sum + exp_own(sinks[head] - most);",
            "sum = exp_own(sinks[head] - most); for (uint j = 0u; j < keys; j++) sum = sum + scores[j]; \
                denominator[0] = sum;",
        ),
        metal(
            "has room for queries of 512 columns (Metal)",
            "threadgroup float query[1024];",
            "threadgroup float query[512];",
        ),
        metal(
            "has room for mixes of 512 columns (Metal)",
            "threadgroup float mixed[1024];",
            "threadgroup float mixed[512];",
        ),
        metal("leaves the probabilities unrounded (Metal)", "fma(bf16_round(scores[j]),", "fma(scores[j],"),
        metal("turns the output the other way (Metal)", "shape.rope_dim, -1.0f)", "shape.rope_dim, 1.0f)"),
        metal(
            "drops the barrier before the scores (Metal)",
            "1.0f);\n    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n\n    for (uint j",
            "1.0f);\n    }\n    for (uint j",
        ),
        metal(
            "looks one further back (Metal)",
            "reach > shape.window ? reach - shape.window : 0u",
            "reach > shape.window ? reach - shape.window - 1u : 0u",
        ),
        metal(
            "swaps the nibbles (Metal)",
            "c % 32u < 16u ? byte & 15u : byte >> 4",
            "c % 32u >= 16u ? byte & 15u : byte >> 4",
        ),
        metal(
            "sees the rows behind (Metal)",
            "shape.is_block != 0u ? start + windows[window].row_count : position + 1u",
            "start + windows[window].row_count",
        ),
        metal(
            "takes the scale of another block (Metal)",
            "record[head_dim / 2u + c / 16u]",
            "record[head_dim / 2u + c / 32u]",
        ),
        Control::crowded(),
        Control::metal(
            "declares 16 bytes too many of threadgroup memory (Metal)",
            Gate::Limits,
            include_str!("kernel.metal"),
            "threadgroup float scores[1024];",
            "threadgroup float scores[6144];",
        ),
        metal(
            "has room for the scores of 512 keys (Metal)",
            "threadgroup float scores[1024];",
            "threadgroup float scores[512];",
        ),
        shared(
            "reads the next slot of the ring (CUDA)",
            "position % shape.ring_len) * bytes",
            "(position + 1) % shape.ring_len) * bytes",
        ),
        cuda("leaves the sink out (CUDA)", "both.y + exp_own(sinks[head + lane] - both.x)", "both.y"),
        shared("turns the output the other way (CUDA)", "phase.x = -phase.x;", "phase.x = 0.0f + phase.x;"),
        cuda(
            "weighs places without a key (CUDA)",
            "if (!has_key(keys, place)) instead = -infinite();",
            "if (place >= keys.places) instead = -infinite();",
        ),
        cuda(
            "truncates the weights (CUDA)",
            "put(h, quad, bf16_pair(a, b), bf16_pair(c, d));",
            "put(h, quad, to_bits(a) >> 16 | (to_bits(b) & 0xffff0000u), to_bits(c) >> 16 | (to_bits(d) & 0xffff0000u));",
        ),
        cuda(
            "mixes the window before the entries (CUDA)",
            "    run(0, keys.entry_places / TILE, true);\n    run(keys.entry_places / TILE, tiles, false);\n",
            "    run(keys.entry_places / TILE, tiles, false);\n    run(0, keys.entry_places / TILE, true);\n",
        ),
        cuda(
            "takes the queries' columns backwards (CUDA)",
            "(query + n * 8 * pitch + block * 64);\n#pragma unroll",
            "(query + n * 8 * pitch + (blocks - 1 - block) * 64);\n#pragma unroll",
        ),
        cuda(
            "swaps the nibbles (CUDA)",
            "pairs[2] = high_nibbles(front, second);",
            "pairs[2] = low_nibbles(front, second);",
        ),
        shared(
            "looks one further back (CUDA)",
            "reach > shape.window ? reach - shape.window : 0;",
            "reach > shape.window ? reach - shape.window - 1 : 0;",
        ),
        whole(
            "leaves the sink out of a row in one block (CUDA)",
            "own + exp_own(sink - ((const float*)(shared + MOST))[head]);",
            "own;",
        ),
        whole(
            "weighs places without a key of a row in one block (CUDA)",
            "instead = is_key ? not_a_number() : -infinite();",
            "instead = is_key ? not_a_number() : 0.0f;",
        ),
        whole(
            "puts the weights of a row in one block elsewhere (CUDA)",
            "(piece ^ low) * 16",
            "(piece ^ 1 ^ low) * 16",
        ),
        whole(
            "forgets the first half of a row in one block (CUDA)",
            "if (head < heads_here) sums[h] = partials[head];",
            "if (head < heads_here) sums[h] = 0.0f;",
        ),
        Control::cuda(
            "multiplies with the queries of another step (CUDA)",
            Gate::Value,
            include_str!("../shared/attend.cuh"),
            "multiply_64(dots, a[1], queries, columns, 2, true);",
            "multiply_64(dots, a[1], queries, columns, 3, true);",
        ),
        few(
            "leaves the sink out of few rows (CUDA)",
            "both[0].y + exp_own(sinks[first_head + head] - both[0].x)",
            "both[0].y",
        ),
        few(
            "gives few rows the columns of a neighbour (CUDA)",
            "i / 2 * 16 + g % 4 * 4 + i % 2 * 2;",
            "i / 2 * 16 + g % 4 * 4 + (i % 2 ^ 1) * 2;",
        ),
    ],
    standard: STANDARD_CONTROLS,
};

pub const BLOCK: Contract = Contract {
    name: "attention/block",
    formula: "as causal, every row of a draft block over the window before the block, then all rows of the block \
        in both directions",
    shapes: "as causal; a window is one draft block",
    cases: &[
        Case {
            name: "blocks of five",
            rows: 16,
            sizes: &[("heads", 8), ("head_dim", 64), ("rope_dim", 16), ("window", 12), ("block", 5)],
        },
        Case {
            name: "blocks of eight",
            rows: 9,
            sizes: &[("heads", 5), ("head_dim", 32), ("rope_dim", 16), ("window", 7), ("block", 8)],
        },
    ],
    controls: &[
        CONTROLS[0].copy(),
        CONTROLS[1].copy(),
        CONTROLS[2].copy(),
        CONTROLS[3].copy(),
        CONTROLS[4].copy(),
        Control::value("sees only the block's rows up to its own"),
    ],
    edits: &[
        metal(
            "reads the next slot of the ring (Metal)",
            "position % shape.ring_len",
            "(position + 1u) % shape.ring_len",
        ),
        metal(
            "leaves the sink out (Metal)",
            "denominator[0] = sum + exp_own(sinks[head] - most);",
            "denominator[0] = sum;",
        ),
        metal("turns the output the other way (Metal)", "shape.rope_dim, -1.0f)", "shape.rope_dim, 1.0f)"),
        metal(
            "sees no row behind (Metal)",
            "shape.is_block != 0u ? start + windows[window].row_count : position + 1u",
            "position + 1u",
        ),
        shared(
            "reads the next slot of the ring (CUDA)",
            "position % shape.ring_len) * bytes",
            "(position + 1) % shape.ring_len) * bytes",
        ),
        cuda("leaves the sink out (CUDA)", "both.y + exp_own(sinks[head + lane] - both.x)", "both.y"),
        shared(
            "sees no row behind (CUDA)",
            "shape.is_block != 0 ? keys.window.start + keys.window.row_count : keys.position + 1;",
            "keys.position + 1;",
        ),
    ],
    ..CAUSAL
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

/// The same of its CUDA source.
const fn cuda(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::cuda(name, Gate::Value, include_str!("kernel.cu"), find, replace)
}

/// An edit of what the CUDA sources share.
const fn shared(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::cuda(name, Gate::Value, include_str!("../shared/attention.cuh"), find, replace)
}

/// An edit of the kernel that computes a row in one block.
const fn whole(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::cuda(name, Gate::Value, include_str!("whole.cu"), find, replace)
}

/// An edit of the kernels of few rows, which gate 2 must notice beside those of many.
const fn few(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::cuda(name, Gate::Geometry, include_str!("kernel.cu"), find, replace)
}

const CONTROLS: &[Control] = &[
    Control::value("leaves the sink out"),
    Control::value("turns by another base"),
    Control::value("reads a stale slot of the ring"),
    Control::value("scales the scores twice"),
    Control::value("takes the window one key short"),
    Control::value("drops the last selected entry"),
    Control::geometry("reads the ring of the first slot"),
];

const BASE: f64 = 1e4;
/// The first head's sink, beside which a key of a score near 0 is less than a rounding, and all of them are more.
const SINK: f32 = 17.5;
const ENTRIES_PER_PAGE: usize = 8;
const RATIO: usize = 2;
/// Consecutive rows of a sequence: more than a thread decodes keys for at once.
const SEQUENCE: usize = 43;

/// Sequences of stored keys, and rows (or whole draft blocks) that attend over them. A world's row is one causal row, or one
/// draft block.
struct Attention {
    shape: Shape,
    /// Rows of a world's row: 1, or those of a block.
    block: usize,
    /// Positions of each sequence, entries included.
    length: usize,
    /// `[sequences, length]` window records, `[sequences, length / RATIO]` compressed records.
    records: Vec<u8>,
    entries: Vec<u8>,
    q: Vec<f32>,
    sinks: Vec<f32>,
    frequencies: Vec<f32>,
    /// `[rows]`: sequence, position of the first row, selected entries.
    rows: Vec<(usize, u32, Vec<u32>)>,
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut world = attention(case, seed);
    if case.size("cancelling") == 1 {
        world.cancel(&mut Values::new(seed ^ 1));
    }
    Box::new(world)
}

/// Keys of a kind: positions and entries of equal remainders.
const KINDS: usize = 4;

fn attention(case: &Case, seed: u64) -> Attention {
    let mut values = Values::new(seed);
    let (heads, head_dim, window) = (case.size("heads"), case.size("head_dim"), case.size("window"));
    let (block, selected) = (case.size("block").max(1), case.size("selected"));
    let positions = case.size("positions");
    let (sequences, length) = (case.rows.div_ceil(SEQUENCE), positions.max(80) + block);
    let mut records = Vec::new();
    for _ in 0..sequences * length {
        records.extend(values.e4m3(head_dim));
        records.extend(values.e8m0(head_dim / 32, -8));
    }
    let mut entries = Vec::new();
    for _ in 0..sequences * (length / RATIO) {
        entries.extend(values.bytes(head_dim / 2));
        // E4M3 scales from 2^-3 on, positive.
        entries.extend((0..head_dim / 16).map(|_| 0x20 + values.below(24) as u8));
    }
    let row = |row: usize| {
        // Consecutive rows of a sequence, from its start or from its middle; blocks stand alone.
        let (sequence, place) = (row / SEQUENCE, row % SEQUENCE);
        let position = if block > 1 {
            1 + (row * 11 % 60)
        } else if positions > 0 {
            positions - case.rows + row
        } else if sequence % 2 == 0 {
            place
        } else {
            30 + place
        };
        let visible = (position + 1) / RATIO;
        let mut chosen = values.distinct(selected.min(visible), visible.max(1));
        chosen.sort_unstable();
        (sequence, position as u32, chosen)
    };
    let rows = (0..case.rows).map(row).collect();
    let shape = Shape {
        heads,
        head_dim,
        window,
        ring_len: window + block + 2,
        selected_max: selected,
        block_rows: if block > 1 { block } else { 0 },
    };
    // Some scores and one sink are beyond what an exponential holds without the maximum.
    let scale = |row: usize| if row % 5 == 4 { 2000.0 } else { 3.0 };
    let mut q: Vec<f32> = (0..case.rows).flat_map(|row| values.bf16(block * heads * head_dim, scale(row))).collect();
    let mut sinks = values.floats(heads, 2.0);
    sinks[heads - 1] = -110.0;
    if heads > 1 && case.size("cancelling") == 0 {
        sinks[0] = SINK;
        let of_row = q.chunks_mut(block * heads * head_dim).skip(1).step_by(5);
        of_row
            .flat_map(|q| q.chunks_mut(heads * head_dim))
            .for_each(|q| q[..head_dim].iter_mut().for_each(|q| *q /= 256.0));
    }
    Attention {
        shape,
        block,
        length,
        records,
        entries,
        q,
        sinks,
        frequencies: frequencies(BASE, case.size("rope_dim"), None),
        rows,
    }
}

impl Attention {
    /// Makes the window take away what the entries give: keys of a kind have equal first halves, which alone are asked for, and
    /// opposite second halves. Kinds lie many binades apart, so that what is left are roundings, which another order changes.
    fn cancel(&mut self, values: &mut Values) {
        // 0, 1/2, 1, 3/2, 2, 3, 4 and 6, negative from 8 on.
        const E4M3: [u8; 8] = [0x00, 0x30, 0x38, 0x3c, 0x40, 0x44, 0x48, 0x4c];
        const ONE: (u8, u8) = (0x38, 127);
        let head_dim = self.shape.head_dim;
        let kinds: Vec<Vec<u8>> = (0..KINDS).map(|_| (0..head_dim).map(|_| values.below(16) as u8).collect()).collect();
        let (bytes, entry_bytes) = (kv_store::record_bytes(head_dim), kv_compress::record_bytes(head_dim));
        for (index, record) in self.records.chunks_mut(bytes).enumerate() {
            let kind = &kinds[index % self.length % KINDS];
            for (c, code) in kind.iter().enumerate() {
                let code = if c < head_dim / 2 { *code } else { code ^ 8 };
                record[c] = E4M3[usize::from(code & 7)] | (code & 8) << 4;
            }
            record[head_dim..].fill(ONE.1);
        }
        let per_sequence = self.length / RATIO;
        for (index, record) in self.entries.chunks_mut(entry_bytes).enumerate() {
            let kind = &kinds[index % per_sequence % KINDS];
            record[..head_dim / 2].fill(0);
            for (c, code) in kind.iter().enumerate() {
                record[c / 32 * 16 + c % 16] |= code << (4 * (c % 32 / 16));
            }
            record[head_dim / 2..].fill(ONE.0);
        }
        self.q = values.bf16(self.q.len(), 6.0);
        self.q.chunks_mut(head_dim).for_each(|q| q[head_dim / 2..].fill(0.0));
        for (_, _, chosen) in &mut self.rows {
            (0..).zip(chosen).for_each(|(entry, chosen)| *chosen = entry);
        }
    }

    fn record(&self, sequence: usize, position: usize) -> &[u8] {
        let bytes = kv_store::record_bytes(self.shape.head_dim);
        &self.records[(sequence * self.length + position) * bytes..][..bytes]
    }

    fn key(&self, sequence: usize, position: usize) -> Vec<f64> {
        let (codes, scales) = self.record(sequence, position).split_at(self.shape.head_dim);
        codes.iter().enumerate().map(|(c, code)| e4m3_decode(*code) * e8m0_decode(scales[c / 32])).collect()
    }

    fn entry(&self, sequence: usize, entry: usize) -> Vec<f64> {
        let head_dim = self.shape.head_dim;
        let bytes = kv_compress::record_bytes(head_dim);
        let record = &self.entries[(sequence * (self.length / RATIO) + entry) * bytes..][..bytes];
        let (codes, scales) = record.split_at(head_dim / 2);
        let code =
            |c: usize| if c % 32 < 16 { codes[c / 32 * 16 + c % 16] & 15 } else { codes[c / 32 * 16 + c % 16] >> 4 };
        (0..head_dim).map(|c| e2m1_decode(code(c)) * e4m3_decode(scales[c / 16])).collect()
    }

    /// The keys of one row in the canonical order.
    fn keys(&self, row: usize, position: usize) -> Vec<Vec<f64>> {
        let (sequence, first, ref chosen) = self.rows[row];
        let mut keys: Vec<Vec<f64>> = chosen.iter().map(|&entry| self.entry(sequence, entry as usize)).collect();
        let first = first as usize;
        let range = if self.block > 1 {
            first.saturating_sub(self.shape.window)..first + self.block
        } else {
            (position + 1).saturating_sub(self.shape.window)..position + 1
        };
        keys.extend(range.map(|position| self.key(sequence, position)));
        keys
    }

    /// The same keys as the steps take them: entries, and the window.
    fn lists(&self, row: usize, position: u32) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
        let narrow = |key: Vec<f64>| key.into_iter().map(|value| value as f32).collect::<Vec<f32>>();
        let mut entries: Vec<Vec<f32>> = self.keys(row, position as usize).into_iter().map(narrow).collect();
        let window = entries.split_off(self.rows[row].2.len());
        (entries, window)
    }

    /// The interval of one head's output before it is turned back.
    fn head_spans(&self, query: &[Span], keys: &[Vec<f64>], sink: f64) -> Vec<Span> {
        let head_dim = query.len();
        let scale = 1.0 / (head_dim as f64).sqrt();
        let roundings = head_dim as f64 + 4.0;
        let scores: Vec<Span> = keys.iter().map(|key| dot_span(query, key, roundings).scaled(scale)).collect();
        let most = |end: fn(&Span) -> f64| scores.iter().map(end).fold(f64::NEG_INFINITY, f64::max);
        let max = Span { low: most(|span| span.low), high: most(|span| span.high) };
        let exp = |score: Span| {
            let apart = Span { low: score.low - max.high, high: score.high - max.low }.rounded(1.0);
            let e = apart.map(f64::exp).rounded(2.3);
            Span { low: e.low.max(0.0), high: e.high }
        };
        let e: Vec<Span> = scores.iter().map(|score| exp(*score)).collect();
        // A step of sixteen drops up to 17 of 2^-25 and truncates once: less than 11 U, and two steps may not be full.
        let sums = keys.len() as f64 + 24.0;
        let total = e.iter().fold(Span::exact(0.0), |sum, e| sum.plus(*e)).plus(exp(Span::exact(sink))).rounded(sums);
        let weights: Vec<Span> = e.iter().map(|e| e.bf16()).collect();
        let column = |c: usize| {
            let values: Vec<f64> = keys.iter().map(|key| key[c]).collect();
            let sum = dot_span(&weights, &values, sums);
            sum.times(Span { low: 1.0 / total.high, high: 1.0 / total.low }).rounded(2.0).bf16()
        };
        (0..head_dim).map(column).collect()
    }

    /// The window records of a launch. A late layer makes more keys than it has queries, so some windows begin before their
    /// first query row.
    fn launch_records(&self, seats: &Seats, windows: &mut [WindowInfo]) -> Vec<u8> {
        let bytes = kv_store::record_bytes(self.shape.head_dim);
        let mut records = Vec::new();
        for (index, window) in windows.iter_mut().enumerate() {
            let sequence = seats.sequences[index];
            let lead =
                if self.block == 1 && sequence.is_some() { (seats.rows.len() as u32 + index as u32) % 3 } else { 0 };
            window.start -= lead.min(window.start);
            window.row_count += seats.windows[index].start - window.start;
            window.first_row = (records.len() / bytes) as u32;
            for position in window.start..window.start + window.row_count {
                match sequence {
                    Some(sequence) => records.extend(self.record(sequence, position as usize)),
                    None => records.extend(vec![0x7f + (position % 2) as u8; bytes]),
                }
            }
        }
        records
    }

    /// Rings that hold what lies in front of their windows, and NaN elsewhere.
    fn rings(&self, seats: &Seats, windows: &[WindowInfo], fault: Fault) -> Vec<u8> {
        let (shape, bytes) = (self.shape, kv_store::record_bytes(self.shape.head_dim));
        let mut ring = vec![0x7f; seats.slots * shape.ring_len * bytes];
        for (window, sequence) in windows.iter().zip(&seats.sequences) {
            let Some(sequence) = sequence else { continue };
            for position in (window.start as usize).saturating_sub(shape.window)..window.start as usize {
                let stale = if fault.is("reads a stale slot of the ring") && position > 0 { 1 } else { 0 };
                let place = window.slot as usize * shape.ring_len + position % shape.ring_len;
                ring[place * bytes..][..bytes].copy_from_slice(self.record(*sequence, position - stale));
            }
        }
        if fault.is("reads the ring of the first slot") {
            let slot = windows[0].slot as usize * shape.ring_len * bytes;
            let first = ring[slot..][..shape.ring_len * bytes].to_vec();
            ring.chunks_mut(first.len()).for_each(|ring| ring.copy_from_slice(&first));
        }
        ring
    }

    /// The selected entries of each row, and how many they are.
    fn selections(&self, picks: &[Pick], rows: usize, fault: Fault) -> (Vec<u32>, Vec<u32>) {
        let shape = self.shape;
        let mut selected = vec![0u32; rows * shape.selected_max];
        let mut counts = vec![0u32; rows];
        for (place, pick) in picks.iter().enumerate().filter(|_| shape.selected_max > 0) {
            let chosen: &[u32] = pick.row().map_or(&[0], |row| &self.rows[row].2);
            let count = chosen.len() - usize::from(fault.is("drops the last selected entry")).min(chosen.len());
            selected[place * shape.selected_max..][..count].copy_from_slice(&chosen[..count]);
            counts[place] = count as u32;
        }
        (selected, counts)
    }

    /// The compressed cache, the page table of a launch's slots, and the pages of a slot.
    fn pages(&self, seats: &Seats) -> (Vec<u8>, Vec<u32>, usize) {
        let bytes = kv_store::record_bytes(self.shape.head_dim);
        let entry_bytes = kv_compress::record_bytes(self.shape.head_dim);
        let per_slot = (self.length / RATIO).div_ceil(ENTRIES_PER_PAGE);
        let sequences = self.records.len() / bytes / self.length;
        // The page behind the sequences' own belongs to poison rows.
        let mut cache = vec![0x7f; (sequences * per_slot + 1) * ENTRIES_PER_PAGE * entry_bytes];
        for sequence in 0..sequences {
            let count = self.length / RATIO;
            let own = &self.entries[sequence * count * entry_bytes..][..count * entry_bytes];
            cache[sequence * per_slot * ENTRIES_PER_PAGE * entry_bytes..][..own.len()].copy_from_slice(own);
        }
        let mut table = vec![(sequences * per_slot) as u32; seats.slots * per_slot];
        for (window, sequence) in seats.windows.iter().zip(&seats.sequences) {
            let Some(sequence) = sequence else { continue };
            let slot = &mut table[window.slot as usize * per_slot..][..per_slot];
            slot.iter_mut().enumerate().for_each(|(page, place)| *place = (sequence * per_slot + page) as u32);
        }
        (cache, table, per_slot)
    }
}

impl World for Attention {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let (shape, block) = (self.shape, self.block);
        // A block is one window of `block` rows; causal rows share a window where they follow each other.
        let seats = Seats::windows_of(picks, |row| (self.rows[row].0, self.rows[row].1), block == 1);
        let mut windows = seats.windows.clone();
        let mut rows = seats.rows.clone();
        if block > 1 {
            rows = seats
                .rows
                .iter()
                .flat_map(|row| (0..block).map(|i| crate::rows::RowInfo { position: row.position + i as u32, ..*row }))
                .collect();
            windows.iter_mut().for_each(|window| window.row_count = block as u32);
        }
        let records = self.launch_records(&seats, &mut windows);
        let ring = self.rings(&seats, &windows, fault);
        let (selected, counts) = self.selections(picks, rows.len(), fault);
        let (cache, table, per_slot) = self.pages(&seats);
        let mut turning = self.frequencies.clone();
        if fault.is("turns by another base") {
            turning = frequencies(1.6e5, 2 * turning.len(), None);
        }
        let mut queries = gather(picks, &self.q, block * shape.heads * shape.head_dim);
        if fault.is("scales the scores twice") {
            let scale = 1.0 / (shape.head_dim as f32).sqrt();
            queries.iter_mut().for_each(|q| *q = bf16(f64::from(*q * scale)) as f32);
        }
        let mut sinks = self.sinks.clone();
        if fault.is("leaves the sink out") {
            sinks.fill(-1e30);
        }
        let mut launched = shape;
        if fault.is("takes the window one key short") {
            launched.window -= 1;
        }
        if fault.is("sees only the block's rows up to its own") {
            launched.block_rows = 0;
        }
        let causal = block == 1 || launched.block_rows != shape.block_rows;
        let span = if causal { Keys::Causal } else { Keys::Block };
        let (q, sinks) = (stage.rows_in("q", &queries), stage.input("sinks", &sinks));
        let (records, ring) = (stage.rows_in("records", &records), stage.input("ring", &ring));
        let (selected, counts) = (stage.rows_in("selected", &selected), stage.rows_in("counts", &counts));
        let cache = stage.input("cache", &cache);
        let floats = scratch_floats(launched, stage.threads()).max(gpu_scratch_floats(launched, rows.len()));
        let mut scratch = stage.poisoned::<f32>("scratch", floats);
        let width = shape.heads * shape.head_dim;
        let mut out = stage.output::<f32>("out", rows.len() * width);
        let compressed = (shape.selected_max > 0).then_some(Compressed {
            cache: &cache.buffer,
            pages: Pages { table: &table, pages_per_slot: per_slot, entries_per_page: ENTRIES_PER_PAGE },
            selected: &selected.buffer,
            counts: &counts.buffer,
        });
        let args = Args {
            shape: launched,
            span,
            q: &q.buffer,
            rows: &rows,
            windows: &windows,
            records: &records.buffer,
            ring: &ring.buffer,
            compressed,
            sinks: &sinks.buffer,
            frequencies: &turning,
            scratch: &mut scratch.buffer,
            out: &mut out.buffer,
        };
        stage.run(|queue| launch(queue, args))?;
        for input in [q, sinks, records, ring, selected, counts, cache] {
            stage.read(input);
        }
        stage.discard(scratch);
        stage.rows::<f32>(out, block * width);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let Shape { heads, head_dim, .. } = self.shape;
        let release = Numerics::Release;
        let mut expected = Vec::new();
        for i in 0..self.block {
            let position = self.rows[row].1 + i as u32;
            let keys = self.keys(row, position as usize);
            let views: Vec<&[f64]> = keys.iter().map(Vec::as_slice).collect();
            let q = wide(&self.q[(row * self.block + i) * heads * head_dim..][..heads * head_dim]);
            let (mut turned, mut spans) = (q.clone(), Span::all(&q));
            for head in 0..heads {
                let at = head * head_dim..(head + 1) * head_dim;
                turn(&mut turned[at.clone()], position, &self.frequencies, release);
                rotate(&mut spans[at], position, &self.frequencies, true);
            }
            let sinks = wide(&self.sinks);
            let values = reference::attention(&turned, &views, &sinks, position, &self.frequencies, release);
            for head in 0..heads {
                let at = head * head_dim..(head + 1) * head_dim;
                let mut out = self.head_spans(&spans[at.clone()], &keys, sinks[head]);
                rotate(&mut out, position, &self.frequencies, false);
                expected.extend(Expected::zip(&values[at], &out));
            }
        }
        expected
    }

    fn stepped(&self, row: usize) -> Option<Vec<u32>> {
        let Shape { heads, head_dim, .. } = self.shape;
        let mut words = Vec::new();
        for i in 0..self.block {
            let position = self.rows[row].1 + i as u32;
            let (entries, window) = self.lists(row, position);
            let q = &self.q[(row * self.block + i) * heads * head_dim..][..heads * head_dim];
            let out = steps::row(q, &entries, &window, &self.sinks, position, &self.frequencies);
            words.extend(out.into_iter().map(f32::to_bits));
        }
        Some(words)
    }

    fn work(&self) -> Work {
        let keys: usize =
            self.rows.iter().map(|row| row.2.len() + self.shape.window + self.block).sum::<usize>() * self.block;
        let width = self.shape.heads * self.shape.head_dim;
        Work { bytes: self.q.len() * 8 + keys * self.shape.head_dim, multiply_adds: 2 * keys * width }
    }
}

/// What the mirror takes of one row.
#[cfg(test)]
pub(super) struct CancelRow {
    pub q: Vec<f32>,
    pub entries: Vec<Vec<f32>>,
    pub window: Vec<Vec<f32>>,
    pub sinks: Vec<f32>,
    pub position: u32,
    pub frequencies: Vec<f32>,
}

/// The rows of a causal case that cancels.
#[cfg(test)]
pub(super) fn cancelling_rows(case: &Case, seed: u64) -> Vec<CancelRow> {
    let mut world = attention(case, seed);
    world.cancel(&mut Values::new(seed ^ 1));
    let width = world.shape.heads * world.shape.head_dim;
    let row = |row: usize| {
        let position = world.rows[row].1;
        let (entries, window) = world.lists(row, position);
        let (q, sinks) = (world.q[row * width..][..width].to_vec(), world.sinks.clone());
        CancelRow { q, entries, window, sinks, position, frequencies: world.frequencies.clone() }
    };
    (0..case.rows).map(row).collect()
}
