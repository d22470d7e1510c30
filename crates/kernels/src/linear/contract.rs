//! What must hold of the linears: one world for every weight format, so that the same questions are asked of all.

use super::Finish;
use crate::contract::*;
use crate::linear_bf16::{self, Dtype};
use crate::numerics_policy::Numerics;
use crate::{linear_fp8, lm_head};

/// Which launch a world runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// With the number of column groups.
    Fp8(usize),
    Bf16,
    F32,
    Head,
}

pub(crate) const ORDER: &str =
    "groups of 32 columns; group g to accumulator g % 4 of 16 lanes, fused; accumulators, then lanes by halves";
pub(crate) const BOUND: &str = "(columns / 128 + 10) U times the sum of absolute products; bf16 and E4M3 are monotone";

/// Roundings on the longest way of a product through the declared order.
pub(crate) fn roundings(columns: usize) -> f64 {
    (2 * columns.div_ceil(128) + 10) as f64
}

pub(crate) const CASES: &[Case] = &[
    Case { name: "wide", rows: 128, sizes: &[("columns", 256), ("outputs", 48)] },
    Case { name: "odd tile", rows: 9, sizes: &[("columns", 160), ("outputs", 39)] },
    Case { name: "padded columns", rows: 7, sizes: &[("columns", 84), ("outputs", 37)] },
    Case { name: "long", rows: 4, sizes: &[("columns", 4096), ("outputs", 64)] },
    Case { name: "three chunks", rows: 40, sizes: &[("columns", 1344), ("outputs", 40)] },
    // More chunks than a cluster has blocks: few rows in slabs, more in tiles, one chunk after the other.
    Case { name: "nine chunks", rows: 18, sizes: &[("columns", 5184), ("outputs", 17)] },
    Case { name: "nine chunks in tiles", rows: 34, sizes: &[("columns", 5184), ("outputs", 17)] },
    Case { name: "smallest scale", rows: 3, sizes: &[("columns", 96), ("outputs", 33), ("smallest scale", 1)] },
];

pub(crate) const CONTROLS: &[Control] = &[
    Control::value("drops the last column"),
    Control::value("reads the next row"),
    Control::value("takes the weight of the output before"),
    Control::geometry("splits the columns from three rows on"),
    Control::geometry("starts the sum elsewhere on two threads"),
];

/// Controls of the formats with scales.
pub(crate) const SCALED_CONTROLS: &[Control] = &[
    Control::value("takes the scale of the next column block"),
    Control::value("applies the scale twice"),
    CONTROLS[0].copy(),
    CONTROLS[1].copy(),
    CONTROLS[2].copy(),
    CONTROLS[3].copy(),
    CONTROLS[4].copy(),
];

/// Edits of the CUDA texts of few rows and of many.
pub(crate) const CUDA_ROUNDING: Control = Control::cuda(
    "leaves the rounding out (CUDA)",
    Gate::Value,
    include_str!("../shared/slab.cuh"),
    "const float value = round_to_bf16 ? bf16_round(sum[tile][i]) : sum[tile][i];",
    "const float value = sum[tile][i];",
);
/// See [`CUDA_ROUNDING`].
pub(crate) const CUDA_THREE_ROWS: Control = Control::cuda(
    "starts three and more rows elsewhere (CUDA)",
    Gate::Geometry,
    include_str!("../shared/slab.cuh"),
    "for (int i = 0; i < 4; i++) acc[tile][i] = 0.0f;",
    "for (int i = 0; i < 4; i++) acc[tile][i] = shape.rows > 2 ? 1.0f : 0.0f;",
);
/// See [`CUDA_ROUNDING`].
pub(crate) const CUDA_SPLIT_STEPS: Control = Control::cuda(
    "multiplies with the inputs of another step (CUDA)",
    Gate::Value,
    include_str!("../shared/split.cuh"),
    "now[m] + 4 * k, descriptor + 2 * k",
    "now[m] + 4 * k, descriptor + 2 * (k ^ 1)",
);
/// See [`CUDA_ROUNDING`].
pub(crate) const CUDA_TILE_STEPS: Control = Control::cuda(
    "multiplies with the inputs of another step in tiles (CUDA)",
    Gate::Value,
    include_str!("../shared/flow.cuh"),
    "low[m] + 4 * k, descriptor + 2 * k",
    "low[m] + 4 * k, descriptor + 2 * (k ^ 1)",
);
/// See [`CUDA_ROUNDING`].
pub(crate) const CUDA_FOLD: Control = Control::cuda(
    "adds the chunks of a cluster in another order (CUDA)",
    Gate::Geometry,
    include_str!("../shared/split.cuh"),
    "for (int c = 1; c < 8; c++)",
    "for (int c = 7; c > 0; c--)",
);
/// See [`CUDA_ROUNDING`].
pub(crate) const CUDA_SCALE: Control = Control::cuda(
    "takes the scale of another block row (CUDA)",
    Gate::Value,
    include_str!("../shared/slab.cuh"),
    ": args.scales0 + (size_t)(slab / 2) * shape.scale_stride",
    ": args.scales0 + (size_t)(slab / 4) * shape.scale_stride",
);

/// An edit of the Metal text of the dot products.
pub(crate) const fn metal_dot(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, crate::gpu::LINEAR, find, replace)
}

/// One weight as stored, and its values.
struct Stored {
    outputs: usize,
    bytes: Vec<u8>,
    scales: Vec<u8>,
    values: Vec<f64>,
    finish: Finish,
}

struct Linear {
    format: Format,
    columns: usize,
    groups: usize,
    x: Vec<f32>,
    rows: usize,
    stored: Vec<Stored>,
}

pub(crate) fn make(case: &Case, seed: u64, format: Format) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let (columns, outputs) = (case.size("columns"), case.size("outputs"));
    let groups = if let Format::Fp8(groups) = format { groups } else { 1 };
    // One launch holds a bf16 result, an unrounded one and a quantised one.
    let products = match format {
        Format::Head => vec![(outputs, Finish::F32)],
        _ => vec![
            (outputs.next_multiple_of(groups), Finish::Bf16),
            ((outputs / 2 + 1).next_multiple_of(groups), Finish::F32),
            (32 * groups, Finish::Qdq8),
        ],
    };
    let mut stored_of = |(outputs, finish): (usize, Finish)| {
        let count = outputs * columns;
        match format {
            Format::Fp8(_) => {
                let blocks = columns.div_ceil(32);
                let bytes = values.e4m3(count);
                let mut scales = values.e8m0(outputs.div_ceil(32) * blocks, -9);
                if finish == Finish::F32 {
                    // Code 0 is 2^-127, which no shift of the code gives.
                    scales[..blocks].fill(if case.size("smallest scale") > 0 { 0 } else { 3 });
                }
                let decoded = linear_fp8::reference::dequantise(&bytes, &scales, columns);
                Stored { outputs, bytes, scales, values: decoded, finish }
            }
            Format::F32 => {
                let held = values.floats(count, 0.25);
                let bytes = held.iter().flat_map(|value| value.to_le_bytes()).collect();
                Stored { outputs, bytes, scales: Vec::new(), values: wide(&held), finish }
            }
            Format::Bf16 | Format::Head => {
                let held = values.bf16(count, 0.25);
                let bytes = held.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect();
                Stored { outputs, bytes, scales: Vec::new(), values: wide(&held), finish }
            }
        }
    };
    let stored = products.into_iter().map(&mut stored_of).collect();
    let count = case.rows * groups * columns;
    let x = match format {
        Format::Fp8(1) => values.qdq8(count, 4.0),
        Format::F32 => values.floats(count, 4.0),
        _ => values.bf16(count, 4.0),
    };
    Box::new(Linear { format, columns, groups, x, rows: case.rows, stored })
}

impl Linear {
    /// The weight that a fault leaves, in the checkpoint's form.
    fn planted(&self, stored: &Stored, fault: Fault) -> (Vec<u8>, Vec<u8>) {
        let (mut bytes, mut scales) = (stored.bytes.clone(), stored.scales.clone());
        if fault.is("takes the weight of the output before") {
            bytes.rotate_right(stored.bytes.len() / stored.outputs);
        }
        if fault.is("takes the scale of the next column block") {
            scales.chunks_mut(self.columns.div_ceil(32)).for_each(|row| row.rotate_left(1));
        }
        if fault.is("applies the scale twice") {
            // Within what every backend packs.
            scales.iter_mut().for_each(|code| *code = code.wrapping_mul(2).wrapping_sub(127).clamp(3, 134));
        }
        (bytes, scales)
    }

    /// All products over `x`, into `outs`.
    fn run(
        &self,
        stage: &mut Stage<'_>,
        x: &tf_device::Buffer,
        rows: usize,
        outs: &mut [Output],
        fault: Fault,
    ) -> Result<(), String> {
        let device = stage.device();
        let planted: Vec<_> = self.stored.iter().map(|stored| self.planted(stored, fault)).collect();
        match self.format {
            Format::Fp8(groups) => {
                let weights = planted.iter().zip(&self.stored).map(|((bytes, scales), stored)| {
                    linear_fp8::Weights::pack(&device, bytes, scales, stored.outputs, self.columns)
                });
                let weights = weights.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
                let mut products = Vec::new();
                for ((weights, out), stored) in weights.iter().zip(outs).zip(&self.stored) {
                    products.push(linear_fp8::Product { weights, out: &mut out.buffer, finish: stored.finish });
                }
                stage.run(|queue| {
                    linear_fp8::launch(queue, linear_fp8::Args { x, rows, groups, products: &mut products })
                })
            }
            Format::Bf16 | Format::F32 | Format::Head => {
                let dtype = if self.format == Format::F32 { Dtype::F32 } else { Dtype::Bf16 };
                let weights = planted.iter().zip(&self.stored).map(|((bytes, _), stored)| {
                    linear_bf16::Weights::pack(&device, bytes, dtype, stored.outputs, self.columns)
                });
                let weights = weights.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
                if self.format == Format::Head {
                    // Rows are chosen from the end, so that their order in the input is another one.
                    let row_indices: Vec<u32> = (0..rows as u32).rev().collect();
                    let (weights, out) = (&weights[0], &mut outs[0].buffer);
                    return stage.run(|queue| {
                        lm_head::launch(queue, lm_head::Args { weights, x, row_indices: &row_indices, out })
                    });
                }
                let mut products = Vec::new();
                for ((weights, out), stored) in weights.iter().zip(outs).zip(&self.stored) {
                    products.push(linear_bf16::Product { weights, out: &mut out.buffer, finish: stored.finish });
                }
                stage.run(|queue| linear_bf16::launch(queue, linear_bf16::Args { x, rows, products: &mut products }))
            }
        }
    }

    /// The unrounded product of a launch whose columns are cut in two at `cut`, the parts added.
    fn run_cut(
        &self,
        stage: &mut Stage<'_>,
        rows: &[f32],
        count: usize,
        cut: usize,
        outs: &mut [Output],
    ) -> Result<(), String> {
        let mut parts: Vec<Vec<f32>> = Vec::new();
        let unrounded = self.stored.iter().position(|stored| stored.finish == Finish::F32).expect("one is unrounded");
        for half in 0..2 {
            let mut x = rows.to_vec();
            for (index, value) in x.iter_mut().enumerate() {
                if (index % self.columns < cut) != (half == 0) {
                    *value = 0.0;
                }
            }
            let x = stage.rows_in("x", &x);
            let mut own: Vec<Output> =
                self.stored.iter().map(|stored| stage.output::<f32>("out", count * stored.outputs)).collect();
            self.run(stage, &x.buffer, count, &mut own, Fault::NONE)?;
            parts.push(own[unrounded].held::<f32>()[..count * self.stored[unrounded].outputs].to_vec());
        }
        outs[unrounded].edit::<f32>(|outs| {
            for (out, (a, b)) in outs.iter_mut().zip(parts[0].iter().zip(&parts[1])) {
                *out = a + b;
            }
        });
        Ok(())
    }
}

impl World for Linear {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let width = self.groups * self.columns;
        let mut picks = picks.to_vec();
        if fault.is("reads the next row") {
            picks.iter_mut().for_each(|pick| *pick = pick.row().map_or(*pick, |row| Pick::Row((row + 1) % self.rows)));
        }
        if self.format == Format::Head {
            picks.reverse();
        }
        let mut rows = gather(&picks, &self.x, width);
        if fault.is("drops the last column") {
            rows.chunks_mut(self.columns).for_each(|row| row[self.columns - 1] = 0.0);
        }
        // The head finds its rows by the input's length.
        let x = if self.format == Format::Head { stage.input("x", &rows) } else { stage.rows_in("x", &rows) };
        let mut outs: Vec<Output> =
            self.stored.iter().map(|stored| stage.output::<f32>("out", picks.len() * stored.outputs)).collect();
        self.run(stage, &x.buffer, picks.len(), &mut outs, fault)?;
        if fault.is("splits the columns from three rows on") && picks.len() > 2 {
            self.run_cut(stage, &rows, picks.len(), self.columns / 2, &mut outs)?;
        }
        if fault.is("starts the sum elsewhere on two threads") && stage.threads() == 2 {
            self.run_cut(stage, &rows, picks.len(), self.columns / 4, &mut outs)?;
        }
        stage.read(x);
        for (out, stored) in outs.into_iter().zip(&self.stored) {
            stage.rows::<f32>(out, stored.outputs);
        }
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let width = self.groups * self.columns;
        let x = wide(&self.x[row * width..][..width]);
        let mut expected = Vec::new();
        for stored in &self.stored {
            let numerics = if stored.finish == Finish::F32 { Numerics::Exact } else { Numerics::Release };
            let grouped = linear_fp8::reference::linear_grouped;
            let mut values = match self.format {
                Format::Fp8(1) => match stored.finish {
                    Finish::F32 => linear_bf16::reference::linear_f32(&x, &stored.values, self.columns),
                    _ => linear_fp8::reference::linear_fp8(&x, &stored.values, self.columns, numerics),
                },
                Format::Fp8(groups) => grouped(&x, &stored.values, self.columns, groups, numerics),
                Format::Bf16 | Format::F32 => {
                    linear_bf16::reference::linear_bf16(&x, &stored.values, self.columns, numerics)
                }
                Format::Head => lm_head::reference::lm_head(&x, &stored.values, self.columns),
            };
            let block = stored.outputs / self.groups;
            let mut spans = Vec::new();
            for (output, weight) in stored.values.chunks(self.columns).enumerate() {
                let x = &x[output / block * self.columns..][..self.columns];
                let exact: f64 = x.iter().zip(weight).map(|(x, weight)| x * weight).sum();
                spans.push(Span::around(exact, dot_error(x, weight, roundings(self.columns))));
            }
            if stored.finish != Finish::F32 {
                spans.iter_mut().for_each(|span| *span = span.bf16());
            }
            if stored.finish == Finish::Qdq8 {
                values = Numerics::Release.qdq8(&values, stored.outputs);
                spans = qdq_e4m3(&spans);
            }
            expected.extend(Expected::zip(&values, &spans));
        }
        expected
    }

    fn work(&self) -> Work {
        let weights: usize = self.stored.iter().map(|stored| stored.bytes.len() + stored.scales.len()).sum();
        let outputs: usize = self.stored.iter().map(|stored| stored.outputs).sum();
        Work {
            bytes: weights + self.x.len() * 4 + self.rows * outputs * 4,
            multiply_adds: self.rows * outputs * self.columns,
        }
    }
}
