//! What the FP8 linears promise: the mirror's bits whatever the launch, and a value near the float64 one.

use super::*;
use crate::pack::PackError;
use crate::reference_formats::{e4m3_decode, e8m0_decode};
use crate::testing::{BF16_HALF_ULP, F32_HALF_ULP, Values, assert_close, bits, device, dirty, on_all_queues};
use tf_device::{Device, LaunchError, Queue};
use tf_numerics::lanes::{Float, Level};
use tf_numerics::qdq::{self, Format};
use tf_numerics::sum::dot_scaled;

/// A stored weight and its decoded rows.
struct Stored {
    rows: usize,
    columns: usize,
    weight: Vec<u8>,
    scale: Vec<u8>,
}

impl Stored {
    fn new(values: &mut Values, rows: usize, columns: usize) -> Stored {
        let weight =
            (0..rows * columns).map(|_| values.next() as u8).map(|code| if code & 127 == 127 { 0 } else { code });
        let weight = weight.collect();
        let scale = (0..rows.div_ceil(32) * columns.div_ceil(32)).map(|_| 110 + values.below(24) as u8).collect();
        Stored { rows, columns, weight, scale }
    }

    fn pack(&self) -> Weights {
        Weights::pack(&Device::cpu(), &self.weight, &self.scale, self.rows, self.columns).unwrap()
    }

    fn scale(&self, row: usize, column: usize) -> f64 {
        e8m0_decode(self.scale[row / 32 * self.columns.div_ceil(32) + column / 32])
    }

    /// The mirror of one output.
    fn mirror(&self, row: usize, x: &[f32]) -> f32 {
        let codes = &self.weight[row * self.columns..][..self.columns];
        let w: Vec<f32> = codes.iter().map(|code| e4m3_decode(*code) as f32).collect();
        let scales: Vec<f32> = (0..self.columns).step_by(32).map(|column| self.scale(row, column) as f32).collect();
        dot_scaled(&w, &scales, x)
    }

    /// The float64 value of one output and the sum of its terms' magnitudes.
    fn exact(&self, row: usize, x: &[f32]) -> (f64, f64) {
        let term = |column: usize| {
            let weight = e4m3_decode(self.weight[row * self.columns + column]) * self.scale(row, column);
            weight * f64::from(x[column])
        };
        let terms = (0..self.columns).map(term);
        terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
    }
}

fn finished(mut row: Vec<f32>, finish: Finish) -> Vec<f32> {
    if finish != Finish::F32 {
        row.iter_mut().for_each(|value| *value = value.bf16_round());
    }
    if finish == Finish::Qdq8 {
        qdq::round_row(Level::Scalar, Format::Fp8, &mut row);
    }
    row
}

fn run(queue: &mut Queue, weights: &Weights, x: &[f32], rows: usize, groups: usize, finish: Finish) -> Vec<f32> {
    let mut out = dirty(rows * weights.rows());
    let mut products = [Product { weights, out: &mut out, finish }];
    launch(queue, Args { x: &device(x), rows, groups, products: &mut products }).unwrap();
    out.f32().to_vec()
}

#[test]
fn unpack_gives_the_checkpoint_s_bytes_again() {
    let mut values = Values::new(1);
    for _ in 0..200 {
        let (rows, columns) = (1 + values.below(70) as usize, 1 + values.below(200) as usize);
        let mut stored = Stored::new(&mut values, rows, columns);
        stored.scale.iter_mut().for_each(|code| *code = values.below(255) as u8);
        let weights = stored.pack();
        assert_eq!(weights.unpack(), (stored.weight, stored.scale), "[{rows}, {columns}]");
        assert_eq!(weights.bytes(), Weights::bytes_for(rows, columns));
    }
}

#[test]
fn packing_names_what_is_wrong() {
    let pack = |weight: &[u8], scale: &[u8]| Weights::pack(&Device::cpu(), weight, scale, 40, 96).unwrap_err();
    let (weight, scale) = (vec![0x38; 40 * 96], vec![127; 2 * 3]);
    let mut nan_scale = scale.clone();
    nan_scale[4] = 255;
    assert_eq!(pack(&weight, &nan_scale), PackError::NanScale { row_block: 1, column_block: 1 });
    let mut nan_weight = weight.clone();
    nan_weight[3 * 96 + 7] = 0xff;
    assert_eq!(pack(&nan_weight, &scale), PackError::NanWeight { row: 3, column: 7, code: 0xff });
    let short = PackError::Length { what: "the weight", found: 3839, expected: 3840, rows: 40, columns: 96 };
    assert_eq!(pack(&weight[1..], &scale), short);
    let short = PackError::Length { what: "the scale", found: 5, expected: 6, rows: 2, columns: 3 };
    assert_eq!(pack(&weight, &scale[1..]), short);
}

#[test]
fn the_smallest_scale_is_a_subnormal_and_not_zero() {
    let scale = [0, 1, 254];
    let weights = Weights::pack(&Device::cpu(), &[0x38; 96], &scale, 1, 96).unwrap();
    for (block, code) in scale.into_iter().enumerate() {
        let mut x = vec![0.0; 96];
        x[32 * block + 5] = 0.5;
        let out = on_all_queues(|queue| run(queue, &weights, &x, 1, 1, Finish::F32));
        assert_eq!(f64::from(out[0]), 0.5 * e8m0_decode(code), "scale code {code}");
    }
}

#[test]
fn every_output_has_the_mirror_s_bits_in_any_company() {
    let mut values = Values::new(2);
    let cases = [
        (7, 160, 33),
        (33, 96, 33),
        (32, 64, 33),
        (5, 40, 33),
        (6, 5120, 7),
        (9, 1120, 6),
        (70, 128, 4),
        (1, 1, 3),
        (9, 256, 6),
    ];
    for (weight_rows, columns, row_max) in cases {
        let stored = Stored::new(&mut values, weight_rows, columns);
        let weights = stored.pack();
        let x = values.spread(row_max * columns);
        let mirror: Vec<Vec<f32>> =
            x.chunks(columns).map(|x| (0..weight_rows).map(|row| stored.mirror(row, x)).collect()).collect();
        for finish in [Finish::F32, Finish::Bf16, Finish::Qdq8] {
            if finish == Finish::Qdq8 && weight_rows % 32 != 0 {
                continue;
            }
            let wanted: Vec<f32> = mirror.iter().flat_map(|row| finished(row.clone(), finish)).collect();
            for rows in 1..=row_max {
                let out = on_all_queues(|queue| run(queue, &weights, &x, rows, 1, finish));
                let case = format!("[{weight_rows}, {columns}], {rows} rows, {finish:?}");
                assert_eq!(bits(&out), bits(&wanted[..rows * weight_rows]), "{case}");
            }
        }
    }
}

#[test]
fn a_group_of_padding_adds_positive_zero() {
    // Every product underflows to negative zero, and only padding can make an accumulator positive.
    for (columns, wanted) in [(128, -0.0f32), (160, 0.0), (96, 0.0), (1024, -0.0), (1120, 0.0)] {
        let scale = vec![0; columns / 32];
        let weights = Weights::pack(&Device::cpu(), &vec![1; 5 * columns], &scale, 5, columns).unwrap();
        for rows in [1, 2, 3, 4, 9] {
            let x = vec![-f32::from_bits(0x0080_0000); rows * columns];
            let out = on_all_queues(|queue| run(queue, &weights, &x, rows, 1, Finish::F32));
            assert_eq!(bits(&out), vec![wanted.to_bits(); 5 * rows], "{columns} columns, {rows} rows");
        }
        let x = vec![-f32::from_bits(0x0080_0000); columns];
        let scales = vec![e8m0_decode(0) as f32; columns / 32];
        let mirror = dot_scaled(&vec![e4m3_decode(1) as f32; columns], &scales, &x);
        assert_eq!(mirror.to_bits(), wanted.to_bits(), "the mirror, {columns} columns");
    }
}

#[test]
fn neighbours_of_any_content_leave_a_row_alone() {
    let mut values = Values::new(3);
    let stored = Stored::new(&mut values, 37, 160);
    let weights = stored.pack();
    for rows in [2, 3, 4, 7, 12] {
        let x = values.spread(rows * 160);
        let alone = on_all_queues(|queue| run(queue, &weights, &x, rows, 1, Finish::Bf16));
        for kept in 0..rows {
            let mut poisoned = x.clone();
            for (row, x) in poisoned.chunks_mut(160).enumerate() {
                if row != kept {
                    x.iter_mut().for_each(|x| *x = values.poison());
                }
            }
            let out = on_all_queues(|queue| run(queue, &weights, &poisoned, rows, 1, Finish::Bf16));
            let own = kept * 37..(kept + 1) * 37;
            assert_eq!(bits(&out[own.clone()]), bits(&alone[own]), "row {kept} of {rows}");
        }
    }
}

#[test]
fn outputs_are_near_the_float64_values() {
    let mut values = Values::new(4);
    for (weight_rows, columns) in [(65, 160), (40, 96), (33, 64), (8, 5120)] {
        let stored = Stored::new(&mut values, weight_rows, columns);
        let weights = stored.pack();
        let x = values.spread(5 * columns);
        let out = on_all_queues(|queue| run(queue, &weights, &x, 5, 1, Finish::Bf16));
        let (mut wanted, mut bounds) = (Vec::new(), Vec::new());
        for x in x.chunks(columns) {
            for row in 0..weight_rows {
                let (sum, magnitude) = stored.exact(row, x);
                // A term meets two roundings in its group, one a group of its accumulator, and six in the folds.
                let roundings = (2 + columns.div_ceil(128) + 6) as f64;
                let error = roundings * F32_HALF_ULP * magnitude * 1.01;
                wanted.push(sum);
                bounds.push(error + (sum.abs() + error) * BF16_HALF_ULP);
            }
        }
        assert_close(&out, &wanted, &bounds);
    }
}

#[test]
fn group_g_of_the_rows_meets_group_g_of_the_columns() {
    let mut values = Values::new(5);
    for (groups, block_rows, columns) in [(2, 64, 256), (4, 8, 160), (8, 3, 40)] {
        let stored = Stored::new(&mut values, groups * block_rows, columns);
        let weights = stored.pack();
        for rows in [1, 3, 6] {
            let x = values.spread(rows * groups * columns);
            let out = on_all_queues(|queue| run(queue, &weights, &x, rows, groups, Finish::Bf16));
            let mut wanted = Vec::new();
            for x in x.chunks(groups * columns) {
                for row in 0..groups * block_rows {
                    let x = &x[row / block_rows * columns..][..columns];
                    wanted.push(stored.mirror(row, x).bf16_round());
                }
            }
            assert_eq!(bits(&out), bits(&wanted), "{groups} groups, {rows} rows");
        }
    }
}

#[test]
fn weights_that_share_a_launch_give_what_each_gives_alone() {
    let mut values = Values::new(6);
    let packed: Vec<Weights> = [96, 64, 5].into_iter().map(|rows| Stored::new(&mut values, rows, 160).pack()).collect();
    let finishes = [Finish::Bf16, Finish::Qdq8, Finish::F32];
    for rows in [1, 5] {
        let x = values.spread(rows * 160);
        let together = on_all_queues(|queue| {
            let mut outs: Vec<_> = packed.iter().map(|weights| dirty(rows * weights.rows())).collect();
            let parts = packed.iter().zip(&mut outs).zip(finishes);
            let mut products: Vec<_> = parts.map(|((weights, out), finish)| Product { weights, out, finish }).collect();
            launch(queue, Args { x: &device(&x), rows, groups: 1, products: &mut products }).unwrap();
            outs.iter().flat_map(|out| out.f32()).copied().collect()
        });
        let alone = on_all_queues(|queue| {
            let each = packed.iter().zip(finishes);
            each.flat_map(|(weights, finish)| run(queue, weights, &x, rows, 1, finish)).collect()
        });
        assert_eq!(bits(&together), bits(&alone), "{rows} rows");
    }
}

#[test]
fn a_launch_that_does_not_fit_is_refused_and_writes_nothing() {
    let mut values = Values::new(7);
    let weights = Stored::new(&mut values, 40, 96).pack();
    let other = Stored::new(&mut values, 40, 64).pack();
    let mut queue = Queue::cpu(1, Level::best());
    let shape = |what, found, expected| Err(LaunchError::Shape { what, found, expected });
    let x = device(&vec![1.0f32; 2 * 96]);
    let mut check = |x: &Buffer, rows, groups, weights: &Weights, out_len, finish, wanted| {
        let mut out = device(&vec![7.0f32; out_len]);
        let mut products = [Product { weights, out: &mut out, finish }];
        let got = launch(&mut queue, Args { x, rows, groups, products: &mut products });
        assert_eq!(got, wanted);
        assert!(wanted.is_ok() || out.f32().iter().all(|value| *value == 7.0));
    };
    check(&x, 2, 1, &weights, 80, Finish::Bf16, Ok(()));
    check(&x, 0, 1, &weights, 0, Finish::Bf16, Ok(()));
    check(&x, 3, 1, &weights, 120, Finish::Bf16, shape("the length of x", 192, 288));
    check(&x, 2, 1, &weights, 79, Finish::Bf16, shape("the length of out", 79, 80));
    check(&x, 1, 0, &weights, 40, Finish::Bf16, shape("the group count", 0, 1));
    check(&x, 1, 3, &other, 40, Finish::Bf16, shape("a grouped weight's row count", 40, 42));
    check(&x, 1, 1, &weights, 40, Finish::Qdq8, shape("the row count of a weight whose output is quantised", 40, 64));
    let (mut out, mut other_out) = (dirty(40), dirty(40));
    let mut products = [
        Product { weights: &weights, out: &mut out, finish: Finish::Bf16 },
        Product { weights: &other, out: &mut other_out, finish: Finish::Bf16 },
    ];
    let got = launch(&mut queue, Args { x: &x, rows: 1, groups: 1, products: &mut products });
    assert_eq!(got, shape("a weight's column count", 64, 96));
}
