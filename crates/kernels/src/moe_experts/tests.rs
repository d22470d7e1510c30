//! What the experts promise: the mirror's bits in any company, and a value near the float64 one.

use super::*;
use crate::linear_fp8;
use crate::moe_route::reference::Route;
use crate::numerics_policy::Numerics;
use crate::pack::PackError;
use crate::reference_formats::{e2m1_decode, e4m3_decode, e8m0_decode};
use crate::testing::{BF16_HALF_ULP, Values, assert_close, bits, device, dirty, on_all_queues};
use tf_device::{Device, LaunchError, Queue};
use tf_numerics::lanes::{Float, Level};
use tf_numerics::math;
use tf_numerics::qdq::{self, Format};
use tf_numerics::sum::dot_scaled;

/// A stored matrix: codes in the checkpoint's order and the scale of each group of 32.
struct Stored {
    columns: usize,
    bytes: Vec<u8>,
    scale: Vec<u8>,
    is_fp8: bool,
}

impl Stored {
    fn fp4(values: &mut Values, rows: usize, columns: usize) -> Stored {
        let bytes = (0..rows * columns / 2).map(|_| values.next() as u8).collect();
        let scale = (0..rows * columns / 32).map(|_| 118 + values.below(6) as u8).collect();
        Stored { columns, bytes, scale, is_fp8: false }
    }

    fn fp8(values: &mut Values, rows: usize, columns: usize) -> Stored {
        let bytes =
            (0..rows * columns).map(|_| values.next() as u8).map(|code| if code & 127 > 0x60 { 1 } else { code });
        let bytes = bytes.collect();
        let scale = (0..rows.div_ceil(32) * columns.div_ceil(32)).map(|_| 116 + values.below(6) as u8).collect();
        Stored { columns, bytes, scale, is_fp8: true }
    }

    fn value(&self, row: usize, column: usize) -> f64 {
        let at = row * self.columns + column;
        match self.is_fp8 {
            true => e4m3_decode(self.bytes[at]),
            false => e2m1_decode(self.bytes[at / 2] >> (4 * (at % 2)) & 15),
        }
    }

    fn scale(&self, row: usize, column: usize) -> f64 {
        let row = if self.is_fp8 { row / 32 } else { row };
        e8m0_decode(self.scale[row * self.columns.div_ceil(32) + column / 32])
    }

    /// `x @ self^T` in the mirror's order, rounded to bf16.
    fn mirror(&self, x: &[f32]) -> Vec<f32> {
        let rows = self.bytes.len() * if self.is_fp8 { 1 } else { 2 } / self.columns;
        let output = |row| {
            let w: Vec<f32> = (0..self.columns).map(|column| self.value(row, column) as f32).collect();
            let scales: Vec<f32> = (0..self.columns).step_by(32).map(|column| self.scale(row, column) as f32).collect();
            dot_scaled(&w, &scales, x).bf16_round()
        };
        (0..rows).map(output).collect()
    }

    fn dequantised(&self) -> Vec<f64> {
        let rows = self.bytes.len() * if self.is_fp8 { 1 } else { 2 } / self.columns;
        let value = |at: usize| {
            let (row, column) = (at / self.columns, at % self.columns);
            self.value(row, column) * self.scale(row, column)
        };
        (0..rows * self.columns).map(value).collect()
    }
}

/// The matrices of one expert: w1, w3, w2.
struct StoredExpert([Stored; 3]);

impl StoredExpert {
    fn mirror(&self, x: &[f32], weight: Option<f32>, limit: f32) -> Vec<f32> {
        let limit = if limit == 0.0 { f32::INFINITY } else { limit };
        let (gate, up) = (self.0[0].mirror(x), self.0[1].mirror(x));
        let activation = gate.iter().zip(&up).map(|(gate, up)| {
            let value = math::silu(f32::min(*gate, limit)) * up.clamp(-limit, limit);
            weight.map_or(value, |weight| value * weight).bf16_round()
        });
        let mut activation: Vec<f32> = activation.collect();
        qdq::round_row(Level::Scalar, Format::Fp8, &mut activation);
        self.0[2].mirror(&activation)
    }

    fn bytes(&self) -> ExpertBytes<'_> {
        let [w1, w3, w2] = &self.0;
        ExpertBytes {
            w1: &w1.bytes,
            w1_scale: &w1.scale,
            w3: &w3.bytes,
            w3_scale: &w3.scale,
            w2: &w2.bytes,
            w2_scale: &w2.scale,
        }
    }

    fn reference(&self) -> reference::Expert {
        let [w1, w3, w2] = &self.0;
        reference::Expert { w1: w1.dequantised(), w2: w2.dequantised(), w3: w3.dequantised() }
    }
}

struct Layer {
    hidden: usize,
    experts: Vec<StoredExpert>,
    shared: StoredExpert,
    weights: Weights,
}

impl Layer {
    fn new(values: &mut Values, hidden: usize, intermediate: usize, expert_count: usize) -> Layer {
        let fp4 = |values: &mut Values| {
            StoredExpert([
                Stored::fp4(values, intermediate, hidden),
                Stored::fp4(values, intermediate, hidden),
                Stored::fp4(values, hidden, intermediate),
            ])
        };
        let experts: Vec<StoredExpert> = (0..expert_count).map(|_| fp4(values)).collect();
        let shared = StoredExpert([
            Stored::fp8(values, intermediate, hidden),
            Stored::fp8(values, intermediate, hidden),
            Stored::fp8(values, hidden, intermediate),
        ]);
        let cpu = Device::cpu();
        let packed = experts.iter().map(|expert| Expert::pack(&cpu, expert.bytes(), hidden, intermediate).unwrap());
        let linear = |stored: &Stored, rows| {
            linear_fp8::Weights::pack(&cpu, &stored.bytes, &stored.scale, rows, stored.columns).unwrap()
        };
        let packed_shared = Shared {
            w1: linear(&shared.0[0], intermediate),
            w3: linear(&shared.0[1], intermediate),
            w2: linear(&shared.0[2], hidden),
        };
        let weights = Weights::new(packed.collect(), packed_shared).unwrap();
        assert_eq!(weights.bytes(), Weights::bytes_for(expert_count, hidden, intermediate));
        Layer { hidden, experts, shared, weights }
    }

    fn mirror(&self, x: &[f32], picks: &[(u32, f32)], limit: f32) -> Vec<f32> {
        let mut picks = picks.to_vec();
        picks.sort_by_key(|pick| pick.0);
        let mut sum = vec![0.0f32; self.hidden];
        for (id, weight) in picks {
            let out = self.experts[id as usize].mirror(x, Some(weight), limit);
            sum.iter_mut().zip(out).for_each(|(sum, out)| *sum += out);
        }
        let out = self.shared.mirror(x, None, limit);
        sum.iter().zip(out).map(|(sum, out)| (sum + out).bf16_round()).collect()
    }

    fn run(&self, queue: &mut Queue, batch: &Batch, rows: usize, limit: f32) -> Vec<f32> {
        let picks = batch.picks;
        let mut out = dirty(rows * self.hidden);
        let args = Args {
            weights: &self.weights,
            x: &device(&batch.x),
            rows,
            picks,
            selected: &device(&batch.selected),
            routing: &device(&batch.routing),
            limit,
            out: &mut out,
        };
        launch(queue, args).unwrap();
        out.f32().to_vec()
    }
}

/// Rows with their picks.
#[derive(Clone)]
struct Batch {
    picks: usize,
    x: Vec<f32>,
    selected: Vec<u32>,
    routing: Vec<f32>,
}

impl Batch {
    fn new(values: &mut Values, rows: usize, hidden: usize, experts: usize, picks: usize, scale: f32) -> Batch {
        let mut x = values.bf16(rows * hidden, scale);
        x.chunks_mut(hidden).for_each(|row| qdq::round_row(Level::Scalar, Format::Fp8, row));
        let mut selected = Vec::new();
        for _ in 0..rows {
            let first = selected.len();
            while selected.len() < first + picks {
                let id = values.below(experts as u32);
                if !selected[first..].contains(&id) {
                    selected.push(id);
                }
            }
        }
        let routing = (0..rows * picks).map(|_| values.unit().abs() + 0.1).collect();
        Batch { picks, x, selected, routing }
    }

    fn picks(&self, row: usize) -> Vec<(u32, f32)> {
        let range = row * self.picks..(row + 1) * self.picks;
        self.selected[range.clone()].iter().copied().zip(self.routing[range].iter().copied()).collect()
    }
}

#[test]
fn unpack_gives_the_checkpoint_s_bytes_again() {
    let mut values = Values::new(1);
    for (hidden, intermediate) in [(32, 32), (160, 64), (64, 160), (96, 224), (128, 384), (288, 32)] {
        let layer = Layer::new(&mut values, hidden, intermediate, 2);
        for (packed, stored) in layer.weights.experts().iter().zip(&layer.experts) {
            let [w1, w3, w2] = &stored.0;
            let bytes = [&w1.bytes, &w1.scale, &w3.bytes, &w3.scale, &w2.bytes, &w2.scale];
            assert_eq!(packed.unpack().each_ref(), bytes, "{hidden}, {intermediate}");
        }
    }
}

#[test]
fn packing_names_what_is_wrong() {
    let (codes, scale, short) = (vec![0; 64 * 96 / 2], vec![0; 64 * 96 / 32], vec![0; 5]);
    let mut nan = scale.clone();
    nan[3 * 2 + 1] = 255;
    let good = ExpertBytes { w1: &codes, w1_scale: &scale, w3: &codes, w3_scale: &scale, w2: &codes, w2_scale: &scale };
    let pack = |bytes| Expert::pack(&Device::cpu(), bytes, 64, 96).map(|_| ());
    let length = |what, expected, rows, columns| Err(PackError::Length { what, found: 5, expected, rows, columns });
    assert_eq!(pack(good), Ok(()));
    assert_eq!(pack(ExpertBytes { w3: &short, ..good }), length("w3", 3072, 96, 32));
    assert_eq!(pack(ExpertBytes { w2_scale: &short, ..good }), length("the scale of w2", 192, 64, 3));
    let nan_scale = PackError::NanScale { row_block: 3, column_block: 1 };
    assert_eq!(pack(ExpertBytes { w1_scale: &nan, ..good }), Err(nan_scale));
    let multiple = PackError::Multiple { what: "the hidden size", found: 80, multiple: 32 };
    assert_eq!(Expert::pack(&Device::cpu(), good, 80, 96).unwrap_err(), multiple);
}

#[test]
fn every_row_has_the_mirror_s_bits_in_any_company() {
    let mut values = Values::new(2);
    for (hidden, intermediate, experts, picks, row_max) in
        [(160, 64, 16, 3, 33), (64, 160, 8, 2, 9), (96, 96, 5, 5, 6), (64, 32, 3, 1, 120)]
    {
        let layer = Layer::new(&mut values, hidden, intermediate, experts);
        for limit in [10.0, 0.0, 0.5] {
            let batch = Batch::new(&mut values, row_max, hidden, experts, picks, 2.0);
            let rows = batch.x.chunks(hidden).enumerate();
            let wanted: Vec<f32> = rows.flat_map(|(row, x)| layer.mirror(x, &batch.picks(row), limit)).collect();
            let counts = (1..=row_max).filter(|rows| *rows < 8 || *rows + 2 > row_max || rows % 7 == 0);
            for rows in counts {
                let out = on_all_queues(|queue| layer.run(queue, &batch, rows, limit));
                let case = format!("{hidden}, {intermediate}, {experts} experts, {rows} rows, limit {limit}");
                assert_eq!(bits(&out), bits(&wanted[..rows * hidden]), "{case}");
            }
        }
    }
}

#[test]
fn large_inner_sizes_have_the_mirror_s_bits_too() {
    let mut values = Values::new(3);
    let layer = Layer::new(&mut values, 5120, 32, 2);
    let batch = Batch::new(&mut values, 11, 5120, 2, 1, 1.0);
    let rows = batch.x.chunks(5120).enumerate();
    let wanted: Vec<f32> = rows.flat_map(|(row, x)| layer.mirror(x, &batch.picks(row), 10.0)).collect();
    for rows in [1, 5, 11] {
        let out = on_all_queues(|queue| layer.run(queue, &batch, rows, 10.0));
        assert_eq!(bits(&out), bits(&wanted[..rows * 5120]), "{rows} rows");
    }
}

#[test]
fn the_order_of_a_row_s_picks_changes_nothing() {
    let mut values = Values::new(4);
    let layer = Layer::new(&mut values, 64, 64, 8);
    let mut batch = Batch::new(&mut values, 4, 64, 8, 3, 2.0);
    let before = on_all_queues(|queue| layer.run(queue, &batch, 4, 10.0));
    batch.selected.chunks_mut(3).for_each(|picks| picks.reverse());
    batch.routing.chunks_mut(3).for_each(|picks| picks.reverse());
    let after = on_all_queues(|queue| layer.run(queue, &batch, 4, 10.0));
    assert_eq!(bits(&before), bits(&after));
}

#[test]
fn neighbours_of_any_content_leave_a_row_alone() {
    let mut values = Values::new(5);
    let layer = Layer::new(&mut values, 64, 64, 4);
    for rows in [2, 5, 9] {
        let batch = Batch::new(&mut values, rows, 64, 4, 2, 2.0);
        let whole = on_all_queues(|queue| layer.run(queue, &batch, rows, 10.0));
        for kept in 0..rows {
            let mut poisoned = batch.clone();
            for (row, x) in poisoned.x.chunks_mut(64).enumerate() {
                if row != kept {
                    x.iter_mut().for_each(|x| *x = values.poison());
                }
            }
            let out = on_all_queues(|queue| layer.run(queue, &poisoned, rows, 10.0));
            let own = kept * 64..(kept + 1) * 64;
            assert_eq!(bits(&out[own.clone()]), bits(&whole[own]), "row {kept} of {rows}");
        }
    }
}

#[test]
fn a_launch_that_does_not_fit_is_refused() {
    let mut values = Values::new(6);
    let layer = Layer::new(&mut values, 64, 32, 4);
    let mut queue = Queue::cpu(1, Level::best());
    let mut check = |rows, x_len: usize, ids: &[u32], out_len, wanted| {
        let mut out = dirty(out_len);
        let args = Args {
            weights: &layer.weights,
            x: &device(&vec![1.0f32; x_len]),
            rows,
            picks: 2,
            selected: &device(ids),
            routing: &device(&[0.5f32; 4]),
            limit: 10.0,
            out: &mut out,
        };
        assert_eq!(launch(&mut queue, args), wanted);
        assert!(wanted.is_ok() || out.f32().iter().all(|value| value.is_nan()));
    };
    let shape = |what, found, expected| Err(LaunchError::Shape { what, found, expected });
    check(2, 128, &[0, 1, 2, 3], 128, Ok(()));
    check(0, 0, &[], 0, Ok(()));
    check(2, 127, &[0, 1, 2, 3], 128, shape("the length of x", 127, 128));
    check(2, 128, &[0, 1, 2], 128, shape("the length of selected", 3, 4));
    check(2, 128, &[0, 1, 2, 3], 127, shape("the length of out", 127, 128));
    let limit = LaunchError::Limit { what: "a picked expert's number, counted from one", found: 5, max: 4 };
    check(2, 128, &[0, 1, 4, 3], 128, Err(limit));
    check(3, 192, &[0, 1, 2, 3, 0, 1], 192, shape("the length of routing", 4, 6));
}

#[test]
fn outputs_are_near_the_float64_values() {
    let mut values = Values::new(7);
    let (hidden, intermediate, limit) = (160, 64, 10.0);
    let layer = Layer::new(&mut values, hidden, intermediate, 6);
    let experts: Vec<reference::Expert> = layer.experts.iter().map(StoredExpert::reference).collect();
    let shared = layer.shared.reference();
    let batch = Batch::new(&mut values, 8, hidden, 6, 3, 1.0);
    let out = on_all_queues(|queue| layer.run(queue, &batch, 8, limit));
    let (mut wanted, mut bounds) = (Vec::new(), Vec::new());
    for (row, x) in batch.x.chunks(hidden).enumerate() {
        let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let mut picks = batch.picks(row);
        picks.sort_by_key(|pick| pick.0);
        let route = Route {
            experts: picks.iter().map(|pick| pick.0).collect(),
            weights: picks.iter().map(|pick| f64::from(pick.1)).collect(),
        };
        wanted.extend(reference::moe(&x, &route, &experts, &shared, f64::from(limit), Numerics::Exact));
        // What the roundings of the release may do to each output, summed over the experts of the row.
        let mut bound = vec![0.0; hidden];
        let mut magnitude = vec![0.0; hidden];
        for (id, weight) in picks {
            add_bound(&experts[id as usize], &x, f64::from(weight), f64::from(limit), &mut bound, &mut magnitude);
        }
        add_bound(&shared, &x, 1.0, f64::from(limit), &mut bound, &mut magnitude);
        // The sum's own rounding to bf16, and the float32 ones before it.
        bounds.extend(
            bound.iter().zip(magnitude).map(|(bound, magnitude)| bound + 1.01 * (magnitude + bound) * BF16_HALF_ULP),
        );
    }
    assert_close(&out, &wanted, &bounds);
}

/// Adds the largest change that one expert's rounding points can make, and the magnitude of its output.
fn add_bound(expert: &reference::Expert, x: &[f64], weight: f64, limit: f64, bound: &mut [f64], magnitude: &mut [f64]) {
    // bf16 with the float32 sum before it: a little more than half a unit in the last place.
    let bf16 = 1.01 * BF16_HALF_ULP;
    let product =
        |w: &[f64]| -> Vec<f64> { w.chunks(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect() };
    let (gate, up) = (product(&expert.w1), product(&expert.w3));
    let inner = gate.len();
    let mut value = Vec::new();
    let mut error = Vec::new();
    for (gate, up) in gate.iter().zip(&up) {
        let (g, u) = (gate.min(limit), up.clamp(-limit, limit));
        let silu = g / (1.0 + (-g).exp());
        // Clamping does not widen an error; the slope of silu is at most 1.1.
        let silu_error = 1.1 * gate.abs() * bf16;
        let up_error = up.abs() * bf16;
        let a = silu * u * weight;
        let before = (silu_error * (u.abs() + up_error) + silu.abs() * up_error) * weight;
        value.push(a);
        error.push(before + (a.abs() + before) * bf16);
    }
    for (values, errors) in value.chunks(32).zip(error.chunks_mut(32)) {
        let largest = values.iter().zip(&*errors).map(|(value, error)| value.abs() + error).fold(1e-4, f64::max);
        for (value, error) in values.iter().zip(errors) {
            // E4M3 keeps four significant bits; below 2^-6 of its scale, which is at most largest / 224, the step is 2^-9.
            *error += (value.abs() + *error) / 16.0 + largest / 224.0 * 2f64.powi(-10);
        }
    }
    for (row, w2) in expert.w2.chunks(inner).enumerate() {
        let terms = w2.iter().zip(&value).map(|(w, value)| w * value);
        let out: f64 = terms.sum::<f64>().abs();
        let change: f64 = w2.iter().zip(&error).map(|(w, error)| w.abs() * error).sum();
        bound[row] += change + (out + change) * bf16;
        magnitude[row] += out;
    }
}
