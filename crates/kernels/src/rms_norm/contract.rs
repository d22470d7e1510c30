//! What must hold of `rms_norm`, and the interval of a normalised row that other families build on.

use super::{Args, launch, reference};
use crate::contract::*;
use crate::numerics_policy::Numerics;

pub const RMS_NORM: Contract = Contract {
    name: "rms_norm",
    formula: "normed = bf16(weight * (x * f)), f = 1 / sqrt(mean(x^2) + eps); quantised = QDQ8(normed)",
    shapes: "x, normed, quantised [rows, columns] f32; weight [columns] f32",
    order: "sum of squares: 16 lanes, 4 accumulators, fused; lanes fold by halves",
    bound: "relative error of f: half of (columns / 64 + 7) U of the sum, and 3.5 U; two products; then bf16 and \
        E4M3 are monotone",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("columns", 1024)] },
        Case { name: "narrow", rows: 17, sizes: &[("columns", 64)] },
        Case { name: "odd chunks", rows: 9, sizes: &[("columns", 96)] },
        Case { name: "norm alone, seven chunks", rows: 9, sizes: &[("columns", 112), ("norm alone", 1)] },
        Case { name: "release hidden", rows: 3, sizes: &[("columns", 5120)] },
        Case { name: "on the edges of bf16", rows: 16, sizes: &[("columns", 512), ("edges", 1)] },
    ],
    make,
    limits: &[Limit { what: "columns, a multiple of 32 when quantised", most: 96, accepts, beyond: 112 }],
    controls: &[
        Control::value("eps in bf16"),
        Control::value("leaves the last column out of the sum"),
        Control::value("takes the weight of the column before"),
    ],
    edits: &[
        metal("drops the last columns (Metal)", "first < columns; first += 32u", "first + 32u < columns; first += 32u"),
        metal(
            "takes sixteen lanes for a SIMD group (Metal)",
            "first < columns; first += 32u",
            "first < columns; first += 16u",
        ),
        metal("reads the other row (Metal)", "x + row * columns", "x + (row ^ 1u) * columns"),
        metal(
            "leaves the rounding out (Metal)",
            "bf16_round(weight[c] * (in[c] * factor))",
            "weight[c] * (in[c] * factor)",
        ),
        metal(
            "divides by one column less (Metal)",
            "columns, lane), columns, shape.eps)",
            "columns, lane), columns - 1u, shape.eps)",
        ),
        metal("writes a row that there isn't", "    if (row >= shape.rows) return;\n", ""),
        Control::metal(
            "folds the accumulators one by one (Metal)",
            Gate::Value,
            crate::gpu::PRELUDE,
            "return fold16(even + odd);",
            "return fold16(even) + fold16(odd);",
        ),
    ],
    standard: STANDARD_CONTROLS,
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

const EPS: f32 = 1e-6;

/// Interval of a normalised row of inputs known to intervals.
pub(crate) fn norm_spans(x: &[Span], weight: &[f64], eps: f64) -> Vec<Span> {
    let columns = x.len() as f64;
    let mean = |square: fn(&Span) -> f64| x.iter().map(square).sum::<f64>() / columns + eps;
    let (least, most) = (mean(|span| span.smallest().powi(2)), mean(|span| span.largest().powi(2)));
    let factor = Span { low: 1.0 / most.sqrt(), high: 1.0 / least.sqrt() };
    let relative = sum_error(x.len()) / 2.0 + 3.5 * U;
    let factor = factor.widened(factor.high * relative * 1.001);
    x.iter().zip(weight).map(|(x, weight)| x.times(factor).rounded(1.0).scaled(*weight).rounded(1.0).bf16()).collect()
}

/// Makes a row's columns so different that a sum of their squares rounds at every step.
pub(crate) fn spread(rows: &mut [f32], columns: usize) {
    for row in rows.chunks_mut(columns) {
        row.iter_mut().enumerate().for_each(|(column, value)| *value *= 0.5f32.powi(column as i32 % 9));
    }
}

/// Weights that bring each column of some row to the middle between two bf16 values, as nearly as float32 can: a sum of
/// squares that is one bit off moves some columns to the other side, which other weights hide. Columns take turns at the rows.
pub(crate) fn weights_on_edges(rows: &[Vec<f64>], eps: f64) -> Vec<f32> {
    let columns = rows[0].len();
    let factor = |row: &[f64]| 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / columns as f64 + eps).sqrt();
    let factors: Vec<f64> = rows.iter().map(|row| factor(row)).collect();
    let weight = |column: usize| {
        let normed = rows[column % rows.len()][column] * factors[column % rows.len()];
        // Eight bits of a significand, and the bit behind them.
        let middle = 1.0 + (2 * (column % 64) + 1) as f64 / 256.0;
        if normed == 0.0 { 1.0 } else { (middle / normed) as f32 }
    };
    (0..columns).map(weight).collect()
}

struct Norm {
    columns: usize,
    quantise: bool,
    x: Vec<f32>,
    weight: Vec<f32>,
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let columns = case.size("columns");
    // A third of the rows is so small that eps matters.
    let mut x: Vec<f32> = (0..case.rows).flat_map(|row| values.bf16(columns, [2e-3, 1.0, 40.0][row % 3])).collect();
    let quantise = case.size("norm alone") == 0;
    let mut weight = values.bf16(columns, 2.0);
    if case.size("edges") == 1 {
        spread(&mut x, columns);
        weight = weights_on_edges(&x.chunks(columns).map(wide).collect::<Vec<_>>(), f64::from(EPS));
    }
    Box::new(Norm { columns, quantise, x, weight })
}

impl World for Norm {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let columns = self.columns;
        let mut rows = gather(picks, &self.x, columns);
        let mut weights = self.weight.clone();
        let mut eps = EPS;
        if fault.is("eps in bf16") {
            eps = crate::reference_formats::bf16(f64::from(eps)) as f32;
        }
        if fault.is("takes the weight of the column before") {
            weights.rotate_right(1);
        }
        if fault.is("leaves the last column out of the sum") {
            rows.chunks_mut(columns).for_each(|row| row[columns - 1] = 0.0);
        }
        let (x, weight) = (stage.rows_in("x", &rows), stage.input("weight", &weights));
        let mut normed = stage.output::<f32>("normed", rows.len());
        let mut quantised = stage.output::<f32>("quantised", rows.len());
        let args = Args {
            x: &x.buffer,
            weight: &weight.buffer,
            rows: picks.len(),
            columns,
            eps,
            normed: Some(&mut normed.buffer),
            quantised: self.quantise.then_some(&mut quantised.buffer),
        };
        stage.run(|queue| launch(queue, args))?;
        stage.read(x);
        stage.read(weight);
        stage.rows::<f32>(normed, columns);
        if self.quantise {
            stage.rows::<f32>(quantised, columns);
        } else {
            stage.discard(quantised);
        }
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let x = wide(&self.x[row * self.columns..][..self.columns]);
        let weight = wide(&self.weight);
        let mut values = reference::rms_norm(&x, &weight, f64::from(EPS), Numerics::Release);
        let mut spans = norm_spans(&Span::all(&x), &weight, f64::from(EPS));
        if self.quantise {
            values.extend(Numerics::Release.qdq8(&values, self.columns));
            spans.extend(qdq_e4m3(&spans));
        }
        Expected::zip(&values, &spans)
    }

    fn work(&self) -> Work {
        Work { bytes: self.x.len() * 12, multiply_adds: self.x.len() * 3 }
    }
}

fn accepts(columns: usize) -> bool {
    use tf_device::{Buffer, Device, Queue};
    let buffer = || Buffer::zeroed_of::<f32>(&Device::cpu(), columns).expect("a row fits into memory");
    let (x, weight, mut out) = (buffer(), buffer(), buffer());
    let mut queue = Queue::cpu(1, tf_numerics::lanes::Level::Scalar);
    let args = Args { x: &x, weight: &weight, rows: 1, columns, eps: EPS, normed: None, quantised: Some(&mut out) };
    launch(&mut queue, args).is_ok()
}
