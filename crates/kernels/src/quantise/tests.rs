//! What QDQ8 promises: the definition's values exactly, whatever the launch.

use super::*;
use crate::reference_formats::qdq8;
use crate::testing::{Values, bits, device, dirty, on_all_queues};
use tf_device::{LaunchError, Queue};
use tf_numerics::lanes::{Float, Level};

#[test]
fn every_block_is_rounded_as_defined() {
    let mut values = Values::new(1);
    for columns in [32, 64, 96, 160, 5120, 40, 5] {
        for rows in [1, 2, 3, 33] {
            let mut x: Vec<f32> = values.spread(rows * columns).iter().map(|value| value.bf16_round()).collect();
            // Whole blocks of zeros and of the smallest and largest values.
            for block in x.chunks_mut(BLOCK).step_by(5) {
                let scale = [0.0, 1e-30, 1e30][values.below(3) as usize];
                block.iter_mut().for_each(|value| *value = (*value * scale).bf16_round());
            }
            let defined = |row: &[f32]| -> Vec<f32> {
                let blocks = row.chunks(BLOCK).map(|block| block.iter().map(|value| f64::from(*value)).collect());
                blocks.flat_map(|block: Vec<f64>| qdq8(&block)).map(|value| value as f32).collect()
            };
            let wanted: Vec<f32> = x.chunks(columns).flat_map(defined).collect();
            let out = on_all_queues(|queue| {
                let mut out = dirty(rows * columns);
                launch(queue, Args { x: &device(&x), out: &mut out, rows, columns }).unwrap();
                out.f32().to_vec()
            });
            let in_place = on_all_queues(|queue| {
                let mut values = device(&x);
                launch_in_place(queue, ArgsInPlace { values: &mut values, rows, columns }).unwrap();
                values.f32().to_vec()
            });
            assert_eq!(bits(&out), bits(&wanted), "[{rows}, {columns}]");
            assert_eq!(bits(&in_place), bits(&wanted), "[{rows}, {columns}] in place");
        }
    }
}

#[test]
fn a_launch_that_does_not_fit_is_refused() {
    let mut queue = Queue::cpu(1, Level::best());
    let x = device(&[1.0f32; 64]);
    let mut out = dirty(63);
    let got = launch(&mut queue, Args { x: &x, out: &mut out, rows: 1, columns: 64 });
    assert_eq!(got, Err(LaunchError::Shape { what: "the length of out", found: 63, expected: 64 }));
    let got = launch(&mut queue, Args { x: &x, out: &mut out, rows: 2, columns: 64 });
    assert_eq!(got, Err(LaunchError::Shape { what: "the length of x", found: 64, expected: 128 }));
    assert_eq!(launch(&mut queue, Args { x: &x, out: &mut out, rows: 0, columns: 64 }), Ok(()));
    assert!(out.f32().iter().all(|value| value.is_nan()));
}
