//! What the unquantised linears promise: the mirror's bits whatever the launch, and a value near the float64 one.

use super::*;
use crate::lm_head;
use crate::pack::PackError;
use crate::testing::{F32_HALF_ULP, Values, assert_close, bits, device, dirty, on_all_queues};
use tf_device::{Device, LaunchError, Queue};
use tf_numerics::lanes::{Float, Level};
use tf_numerics::sum::dot_plain;

struct Stored {
    rows: usize,
    columns: usize,
    dtype: Dtype,
    values: Vec<f32>,
}

impl Stored {
    fn new(values: &mut Values, dtype: Dtype, rows: usize, columns: usize) -> Stored {
        let mut stored = values.spread(rows * columns);
        if dtype == Dtype::Bf16 {
            stored.iter_mut().for_each(|value| *value = value.bf16_round());
        }
        Stored { rows, columns, dtype, values: stored }
    }

    fn bytes(&self) -> Vec<u8> {
        match self.dtype {
            Dtype::Bf16 => {
                self.values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
            }
            Dtype::F32 => self.values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }

    fn pack(&self) -> Weights {
        Weights::pack(&Device::cpu(), &self.bytes(), self.dtype, self.rows, self.columns).unwrap()
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.columns..][..self.columns]
    }
}

fn run(queue: &mut Queue, weights: &Weights, x: &[f32], rows: usize, finish: Finish) -> Vec<f32> {
    let mut out = dirty(rows * weights.rows());
    let mut products = [Product { weights, out: &mut out, finish }];
    launch(queue, Args { x: &device(x), rows, products: &mut products }).unwrap();
    out.f32().to_vec()
}

const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F32];

#[test]
fn unpack_gives_the_checkpoint_s_bytes_again() {
    let mut values = Values::new(1);
    for dtype in DTYPES {
        for _ in 0..100 {
            let (rows, columns) = (1 + values.below(40) as usize, 1 + values.below(200) as usize);
            // One byte in front: a tensor may start anywhere in its file.
            let bytes: Vec<u8> = (0..1 + rows * columns * dtype.bytes()).map(|_| values.next() as u8).collect();
            let weights = Weights::pack(&Device::cpu(), &bytes[1..], dtype, rows, columns).unwrap();
            assert_eq!(weights.unpack(), bytes[1..], "[{rows}, {columns}] {dtype:?}");
            assert_eq!(weights.bytes(), Weights::bytes_for(dtype, rows, columns));
        }
    }
    let short = Weights::pack(&Device::cpu(), &[0; 11], Dtype::F32, 1, 3).unwrap_err();
    assert_eq!(short, PackError::Length { what: "the weight", found: 11, expected: 12, rows: 1, columns: 3 });
}

#[test]
fn every_output_has_the_mirror_s_bits_in_any_company() {
    let mut values = Values::new(2);
    for dtype in DTYPES {
        let cases = [
            (16, 160, 33),
            (24, 640, 33),
            (33, 96, 9),
            (6, 64, 33),
            (5, 36, 7),
            (6, 5120, 9),
            (9, 1056, 70),
            (1, 5, 4),
        ];
        for (weight_rows, columns, row_max) in cases {
            let stored = Stored::new(&mut values, dtype, weight_rows, columns);
            let weights = stored.pack();
            let x = values.spread(row_max * columns);
            let rows_of = |x: &[f32]| (0..weight_rows).map(|row| dot_plain(stored.row(row), x)).collect::<Vec<_>>();
            let mirror: Vec<f32> = x.chunks(columns).flat_map(rows_of).collect();
            for rows in (1..=row_max).filter(|rows| *rows < 34 || *rows > 62) {
                let case = format!("[{weight_rows}, {columns}] {dtype:?}, {rows} rows");
                let wanted = &mirror[..rows * weight_rows];
                let out = on_all_queues(|queue| run(queue, &weights, &x, rows, Finish::F32));
                assert_eq!(bits(&out), bits(wanted), "{case}");
                let rounded: Vec<f32> = wanted.iter().map(|value| value.bf16_round()).collect();
                let out = on_all_queues(|queue| run(queue, &weights, &x, rows, Finish::Bf16));
                assert_eq!(bits(&out), bits(&rounded), "{case}, rounded");
            }
        }
    }
}

#[test]
fn neighbours_of_any_content_leave_a_row_alone() {
    let mut values = Values::new(3);
    for dtype in DTYPES {
        let weights = Stored::new(&mut values, dtype, 19, 160).pack();
        for rows in [2, 3, 4, 7] {
            let x = values.spread(rows * 160);
            let whole = on_all_queues(|queue| run(queue, &weights, &x, rows, Finish::F32));
            for kept in 0..rows {
                let mut poisoned = x.clone();
                for (row, x) in poisoned.chunks_mut(160).enumerate() {
                    if row != kept {
                        x.iter_mut().for_each(|x| *x = values.poison());
                    }
                }
                let out = on_all_queues(|queue| run(queue, &weights, &poisoned, rows, Finish::F32));
                let own = kept * 19..(kept + 1) * 19;
                assert_eq!(bits(&out[own.clone()]), bits(&whole[own]), "row {kept} of {rows}");
            }
        }
    }
}

#[test]
fn outputs_are_near_the_float64_values() {
    let mut values = Values::new(4);
    for dtype in DTYPES {
        for (weight_rows, columns) in [(16, 160), (24, 640), (7, 96), (6, 64), (3, 5120)] {
            let stored = Stored::new(&mut values, dtype, weight_rows, columns);
            let weights = stored.pack();
            let x = values.spread(5 * columns);
            let out = on_all_queues(|queue| run(queue, &weights, &x, 5, Finish::F32));
            let (mut wanted, mut bounds) = (Vec::new(), Vec::new());
            for x in x.chunks(columns) {
                for row in 0..weight_rows {
                    let terms = stored.row(row).iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                    let magnitude: f64 = terms.clone().map(f64::abs).sum();
                    wanted.push(terms.sum());
                    // Two roundings a group of its accumulator, and six in the folds.
                    bounds.push((2 * columns.div_ceil(128) + 6) as f64 * F32_HALF_ULP * magnitude * 1.01);
                }
            }
            assert_close(&out, &wanted, &bounds);
        }
    }
}

#[test]
fn weights_of_both_forms_may_share_a_launch() {
    let mut values = Values::new(5);
    let packed: Vec<Weights> =
        DTYPES.into_iter().map(|dtype| Stored::new(&mut values, dtype, 24, 160).pack()).collect();
    for rows in [1, 6] {
        let x = values.spread(rows * 160);
        let together = on_all_queues(|queue| {
            let mut outs: Vec<_> = packed.iter().map(|weights| dirty(rows * weights.rows())).collect();
            let parts = packed.iter().zip(&mut outs);
            let mut products: Vec<_> =
                parts.map(|(weights, out)| Product { weights, out, finish: Finish::F32 }).collect();
            launch(queue, Args { x: &device(&x), rows, products: &mut products }).unwrap();
            outs.iter().flat_map(|out| out.f32()).copied().collect()
        });
        let alone = on_all_queues(|queue| {
            packed.iter().flat_map(|weights| run(queue, weights, &x, rows, Finish::F32)).collect()
        });
        assert_eq!(bits(&together), bits(&alone), "{rows} rows");
    }
}

#[test]
fn chosen_rows_get_the_logits_that_all_rows_would_get() {
    let mut values = Values::new(6);
    for columns in [160, 36] {
        let weights = Stored::new(&mut values, Dtype::Bf16, 101, columns).pack();
        let x = values.spread(9 * columns);
        let all = on_all_queues(|queue| run(queue, &weights, &x, 9, Finish::F32));
        for chosen in [&[8][..], &[], &[3, 0, 5, 5], &[0, 1, 2, 3, 4, 5, 6, 7, 8]] {
            let out = on_all_queues(|queue| {
                let mut out = dirty(chosen.len() * 101);
                let args = lm_head::Args { weights: &weights, x: &device(&x), row_indices: chosen, out: &mut out };
                lm_head::launch(queue, args).unwrap();
                out.f32().to_vec()
            });
            let wanted: Vec<f32> = chosen.iter().flat_map(|row| &all[*row as usize * 101..][..101]).copied().collect();
            assert_eq!(bits(&out), bits(&wanted), "rows {chosen:?}");
        }
        let mut queue = Queue::cpu(1, Level::best());
        let mut out = dirty(101);
        let args = lm_head::Args { weights: &weights, x: &device(&x), row_indices: &[9], out: &mut out };
        let refused = LaunchError::Limit { what: "a chosen row, counted from one", found: 10, max: 9 };
        assert_eq!(lm_head::launch(&mut queue, args), Err(refused));
    }
}

#[test]
fn a_launch_that_does_not_fit_is_refused() {
    let mut values = Values::new(7);
    let weights = Stored::new(&mut values, Dtype::F32, 10, 96).pack();
    let mut queue = Queue::cpu(1, Level::best());
    let shape = |what, found, expected| Err(LaunchError::Shape { what, found, expected });
    let cases = [
        (96, 1, 10, Ok(())),
        (96, 0, 0, Ok(())),
        (95, 1, 10, shape("the length of x", 95, 96)),
        (192, 2, 19, shape("the length of out", 19, 20)),
    ];
    for (x_len, rows, out_len, wanted) in cases {
        let mut out = dirty(out_len);
        let mut products = [Product { weights: &weights, out: &mut out, finish: Finish::F32 }];
        let got = launch(&mut queue, Args { x: &device(&vec![1.0f32; x_len]), rows, products: &mut products });
        assert_eq!(got, wanted);
    }
}
