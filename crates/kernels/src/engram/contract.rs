//! What must hold of the n-gram memory: its rows, and its gate into the streams.

use super::{GateArgs, GatherArgs, launch_gate, launch_gather, reference};
use crate::contract::*;
use crate::hyper::STREAMS;
use crate::numerics_policy::Numerics;
use crate::reference_formats::{bf16, e4m3_decode, e8m0_decode};

pub const GATHER: Contract = Contract {
    name: "engram/gather",
    formula: "out[r][c] = dequantise(table[ids[r][c]]), then QDQ8 where asked for",
    shapes: "codes [table rows, head_dim] E4M3, scales [table rows, head_dim / 32] E8M0, ids [rows, columns] u32, \
        out [rows, columns * head_dim] f32",
    order: "no sums",
    bound: "exact",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("columns", 8), ("head_dim", 64), ("quantise", 1)] },
        Case { name: "unquantised", rows: 9, sizes: &[("columns", 3), ("head_dim", 32), ("quantise", 0)] },
    ],
    make: make_gather,
    limits: &[],
    controls: &[
        Control::value("takes the scale of the row before"),
        Control::value("swaps two columns"),
        Control::value("reads the row after"),
    ],
    edits: &[metal(
        "takes the first scale (Metal)",
        "scales[row * (shape.columns / 32u) + block]",
        "scales[row * (shape.columns / 32u)]",
    )],
    standard: STANDARD_CONTROLS,
};

pub const GATE: Contract = Contract {
    name: "engram/gate",
    formula: "X_i = bf16(X_i + sigmoid(copysign(sqrt(max(|d|, 1e-6)), d)) * V), d = sum(X_i q_i k_i key_i) / \
        (rms(X_i) rms(key_i) sqrt(hidden))",
    shapes: "streams [rows, 4, hidden] f32 in place; kv [rows, 5, hidden] f32: four keys, then the value; \
        q_weight, k_weight [4, hidden] f32",
    order: "sums of products and of squares: 16 lanes, 4 accumulators, fused; lanes fold by halves",
    bound: "d: (hidden / 64 + 9) U of the absolute products, two norms, 4 U; the gate is monotone in d; 5 U of \
        sigmoid; product and sum 1 U each; bf16",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("hidden", 256)] },
        Case { name: "small", rows: 7, sizes: &[("hidden", 96)] },
    ],
    make: make_gate,
    limits: &[],
    controls: &[
        Control::value("eps in bf16"),
        Control::value("takes the key of the next stream"),
        Control::value("leaves the q weight out"),
        Control::value("gates rows of an image"),
    ],
    edits: &[
        metal(
            "takes the next stream's key (Metal)",
            "kv + (row * 5u + i) * hidden",
            "kv + (row * 5u + (i + 1u) % 4u) * hidden",
        ),
        metal("takes a key for the value (Metal)", "kv + (row * 5u + 4u) * hidden", "kv + (row * 5u + 3u) * hidden"),
        metal(
            "leaves the last column out (Metal)",
            "c += 64u) {\n        even",
            "c += 64u) {\n        if (c + 1u < hidden) even",
        ),
        metal("changes rows of images (Metal)", "    if (shape.has_images != 0u && image[row] != 0) return;\n", ""),
        metal("leaves the root of the width out (Metal)", " / sqrt(float(hidden));", ";"),
        metal("loses the sign (Metal)", "| (to_bits(d) & 0x80000000u)", "| 0u"),
    ],
    standard: IN_PLACE_CONTROLS,
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, crate::contract::Gate::Value, include_str!("kernel.metal"), find, replace)
}

const TABLE_ROWS: usize = 300;

struct Table {
    columns: usize,
    head_dim: usize,
    quantise: bool,
    codes: Vec<u8>,
    scales: Vec<u8>,
    ids: Vec<u32>,
}

fn make_gather(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let (columns, head_dim) = (case.size("columns"), case.size("head_dim"));
    Box::new(Table {
        columns,
        head_dim,
        quantise: case.size("quantise") == 1,
        codes: values.e4m3(TABLE_ROWS * head_dim),
        scales: values.e8m0(TABLE_ROWS * head_dim / 32, -7),
        // The first row is left to poison picks.
        ids: (0..case.rows * columns).map(|_| 1 + values.below(TABLE_ROWS - 1) as u32).collect(),
    })
}

impl World for Table {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let Table { columns, head_dim, quantise, .. } = *self;
        let mut ids: Vec<u32> = Vec::new();
        for pick in picks {
            match *pick {
                Pick::Row(row) => ids.extend(&self.ids[row * columns..][..columns]),
                Pick::Poison(_) => ids.extend(vec![0; columns]),
            }
        }
        let mut scales = self.scales.clone();
        if fault.is("takes the scale of the row before") {
            scales.rotate_right(head_dim / 32);
        }
        if fault.is("swaps two columns") {
            ids.chunks_mut(columns).for_each(|row| row.swap(0, 1));
        }
        if fault.is("reads the row after") {
            ids.iter_mut().for_each(|id| *id = (*id + 1) % TABLE_ROWS as u32);
        }
        // A damaged table is refused, so the poison row holds the largest values instead.
        let mut codes = self.codes.clone();
        codes[..head_dim].fill(0x7e);
        let (codes, scales) = (stage.input("codes", &codes), stage.input("scales", &scales));
        let mut out = stage.output::<f32>("out", ids.len() * head_dim);
        let args = GatherArgs {
            codes: codes.held(),
            scales: scales.held(),
            ids: &ids,
            columns,
            head_dim,
            quantise,
            out: &mut out.buffer,
        };
        stage.run(|queue| launch_gather(queue, args))?;
        stage.read(codes);
        stage.read(scales);
        stage.rows::<f32>(out, columns * head_dim);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let Table { columns, head_dim, quantise, .. } = *self;
        let groups = head_dim / 32;
        let mut values = Vec::new();
        for &id in &self.ids[row * columns..][..columns] {
            let (codes, scales) = (&self.codes[id as usize * head_dim..], &self.scales[id as usize * groups..]);
            values.extend((0..head_dim).map(|c| e4m3_decode(codes[c]) * e8m0_decode(scales[c / 32])));
        }
        if quantise {
            values = Numerics::Release.qdq8(&values, columns * head_dim);
        }
        values.into_iter().map(Expected::exactly).collect()
    }

    fn work(&self) -> Work {
        Work { bytes: self.ids.len() * self.head_dim * 5, multiply_adds: 0 }
    }
}

const EPS: f32 = 1e-6;

struct Gate {
    hidden: usize,
    streams: Vec<f32>,
    kv: Vec<f32>,
    q_weight: Vec<f32>,
    k_weight: Vec<f32>,
    image: Vec<bool>,
}

fn make_gate(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let hidden = case.size("hidden");
    let mut kv = Vec::new();
    for row in 0..case.rows {
        // Keys so small in some rows that eps matters; values stay large.
        kv.extend(values.bf16(STREAMS * hidden, [1.0, 1e-3][row % 2]));
        kv.extend(values.bf16(hidden, 3.0));
    }
    // One row whose gates lie at the floor of the root: its keys are zero.
    let second = (STREAMS + 1) * hidden;
    kv[second..second + STREAMS * hidden].fill(0.0);
    Box::new(Gate {
        hidden,
        streams: values.bf16(case.rows * STREAMS * hidden, 2.0),
        kv,
        q_weight: values.floats(STREAMS * hidden, 2.0),
        k_weight: values.floats(STREAMS * hidden, 2.0),
        image: (0..case.rows).map(|row| row % 5 == 2).collect(),
    })
}

impl World for Gate {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let hidden = self.hidden;
        let (rows, width) = (picks.len(), (STREAMS + 1) * hidden);
        let mut image: Vec<bool> = picks.iter().map(|pick| self.image[row_of(*pick)]).collect();
        let mut kv = gather(picks, &self.kv, width);
        let mut q_weight = self.q_weight.clone();
        let mut eps = EPS;
        if fault.is("eps in bf16") {
            eps = bf16(f64::from(eps)) as f32;
        }
        if fault.is("takes the key of the next stream") {
            kv.chunks_mut(width).for_each(|row| row[..STREAMS * hidden].rotate_left(hidden));
        }
        if fault.is("leaves the q weight out") {
            q_weight.fill(1.0);
        }
        if fault.is("gates rows of an image") {
            image.fill(false);
        }
        let mut streams = stage.in_place("streams", &gather(picks, &self.streams, STREAMS * hidden));
        let kv = stage.rows_in("kv", &kv);
        let (q_weight, k_weight) = (stage.input("q weight", &q_weight), stage.input("k weight", &self.k_weight));
        let args = GateArgs {
            streams: &mut streams.buffer,
            kv: &kv.buffer,
            q_weight: &q_weight.buffer,
            k_weight: &k_weight.buffer,
            eps,
            image: &image,
            rows,
            hidden,
        };
        stage.run(|queue| launch_gate(queue, args))?;
        for input in [kv, q_weight, k_weight] {
            stage.read(input);
        }
        stage.rows::<f32>(streams, STREAMS * hidden);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let (hidden, width) = (self.hidden, (STREAMS + 1) * self.hidden);
        let streams = wide(&self.streams[row * STREAMS * hidden..][..STREAMS * hidden]);
        if self.image[row] {
            return streams.into_iter().map(Expected::exactly).collect();
        }
        let projected = wide(&self.kv[row * width..][..width]);
        let (q_weight, k_weight, eps) = (wide(&self.q_weight), wide(&self.k_weight), f64::from(EPS));
        let values = reference::gate(&streams, &projected, &q_weight, &k_weight, hidden, eps, Numerics::Release);
        let value = &projected[STREAMS * hidden..];
        let mut spans = Vec::new();
        for i in 0..STREAMS {
            let at = i * hidden..(i + 1) * hidden;
            let (x, key) = (&streams[at.clone()], &projected[at.clone()]);
            let terms: Vec<f64> = at.clone().map(|c| streams[c] * q_weight[c] * k_weight[c] * projected[c]).collect();
            let absolute: f64 = terms.iter().map(|term| term.abs()).sum();
            let norm = |x: &[f64]| 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / hidden as f64 + eps).sqrt();
            let factor = norm(x) * norm(key) / (hidden as f64).sqrt();
            let relative = (hidden.div_ceil(64) + 9) as f64 * U + sum_error(hidden) + 12.0 * U;
            let d = Span::around(terms.iter().sum::<f64>() * factor, absolute * factor * relative);
            let bend = |d: f64| 1.0 / (1.0 + (-(d.abs().max(1e-6).sqrt()).copysign(d)).exp());
            // The root and its rounding reach the exponent of the gate; its slope is below one.
            let gate = d.map(bend).widened(4.0 * U * (1.0 + d.largest().sqrt())).rounded(5.0);
            spans.extend(
                x.iter()
                    .zip(value)
                    .map(|(x, v)| gate.scaled(*v).rounded(1.0).plus(Span::exact(*x)).rounded(1.0).bf16()),
            );
        }
        Expected::zip(&values, &spans)
    }

    fn work(&self) -> Work {
        Work { bytes: (2 * self.streams.len() + self.kv.len()) * 4, multiply_adds: self.streams.len() * 6 }
    }
}
