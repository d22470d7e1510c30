//! What must hold of QDQ8, into another buffer and in place.

use super::{Args, ArgsInPlace, launch, launch_in_place};
use crate::contract::*;
use crate::numerics_policy::Numerics;
use crate::reference_formats as formats;

pub const QUANTISE: Contract = Contract {
    name: "quantise",
    formula: "out = E4M3(clamp(x / s, -448, 448)) * s, s = 2^ceil(log2(max(max|x|, 1e-4) / 448)) for each 32 columns",
    shapes: "x, out [rows, columns] f32",
    order: "no sums; the largest magnitude of a block has no order",
    bound: "exact: scale and quotient are powers of two, and the rounding is to nearest even",
    cases: CASES,
    make: |case, seed| make(case, seed, false),
    limits: &[],
    controls: CONTROLS,
    edits: &[
        metal("leaves the last column out (Metal)", "if (c < shape.columns) out", "if (c + 1u < shape.columns) out"),
        metal(
            "takes the neighbour's column (Metal)",
            "x[row * shape.columns + c] : 0.0f",
            "x[row * shape.columns + (c ^ 1u)] : 0.0f",
        ),
    ],
    standard: STANDARD_CONTROLS,
};

pub const IN_PLACE: Contract = Contract {
    name: "quantise/in_place",
    formula: "as quantise, over one buffer",
    shapes: "values [rows, columns] f32",
    make: |case, seed| make(case, seed, true),
    edits: &[
        metal("leaves the last column out (Metal)", "if (c < shape.columns) out", "if (c + 1u < shape.columns) out"),
        metal(
            "starts at the next block (Metal)",
            "round_block(values, values, group * simdgroups + simdgroup",
            "round_block(values, values, group * simdgroups + simdgroup + 1u",
        ),
    ],
    standard: IN_PLACE_CONTROLS,
    ..QUANTISE
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

const CASES: &[Case] = &[
    Case { name: "wide", rows: 128, sizes: &[("columns", 512)] },
    Case { name: "one block", rows: 17, sizes: &[("columns", 32)] },
    Case { name: "short last block", rows: 9, sizes: &[("columns", 112)] },
];

const CONTROLS: &[Control] = &[
    Control::value("one scale for two blocks"),
    Control::value("leaves the last column unrounded"),
    Control::value("rounds halves away from zero"),
];

struct Rows {
    columns: usize,
    x: Vec<f32>,
    in_place: bool,
}

fn make(case: &Case, seed: u64, in_place: bool) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let columns = case.size("columns");
    let mut x = Vec::new();
    for row in 0..case.rows {
        for block in 0..columns.div_ceil(16) {
            // Halves of a block differ, so that its scale is seen; some blocks lie below the smallest scale, some have ties.
            let scale = [3.0, 0.02, 1e-6, 700.0, 8.0][(row + block) % 5];
            let width = (columns - block * 16).min(16);
            x.extend(match scale {
                8.0 => (0..width).map(|_| (values.below(200) as f32 - 99.5) * 0.125).collect(),
                _ => values.bf16(width, scale),
            });
        }
    }
    Box::new(Rows { columns, x, in_place })
}

impl World for Rows {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let (rows, columns) = (picks.len(), self.columns);
        let values = gather(picks, &self.x, columns);
        let mut out = if self.in_place {
            let mut out = stage.in_place("values", &values);
            stage.run(|queue| launch_in_place(queue, ArgsInPlace { values: &mut out.buffer, rows, columns }))?;
            out
        } else {
            let x = stage.rows_in("x", &values);
            let mut out = stage.output::<f32>("out", values.len());
            stage.run(|queue| launch(queue, Args { x: &x.buffer, out: &mut out.buffer, rows, columns }))?;
            stage.read(x);
            out
        };
        if fault != Fault::NONE {
            out.edit::<f32>(|held| {
                for (row, out) in values.chunks(columns).zip(held.chunks_mut(columns)) {
                    if fault.is("one scale for two blocks") {
                        let wide: Vec<f64> = row.iter().map(|value| f64::from(*value)).collect();
                        let joined = wide.chunks(64.min(columns - 16)).flat_map(formats::qdq8);
                        out.iter_mut().zip(joined).for_each(|(out, value)| *out = value as f32);
                    }
                    if fault.is("leaves the last column unrounded") {
                        out[columns - 1] = row[columns - 1];
                    }
                    if fault.is("rounds halves away from zero") {
                        for (block, out) in row.chunks(32).zip(out.chunks_mut(32)) {
                            let scale = formats::qdq8_scale(&wide(block));
                            for (value, out) in block.iter().zip(out) {
                                let scaled = f64::from(*value) / scale;
                                let nudged = scaled * (1.0 + 1e-9);
                                *out = (formats::e4m3(nudged) * scale) as f32;
                            }
                        }
                    }
                }
            });
        }
        stage.rows::<f32>(out, columns);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let x = wide(&self.x[row * self.columns..][..self.columns]);
        Numerics::Release.qdq8(&x, self.columns).into_iter().map(Expected::exactly).collect()
    }

    fn work(&self) -> Work {
        Work { bytes: self.x.len() * 8, multiply_adds: self.x.len() * 4 }
    }
}
