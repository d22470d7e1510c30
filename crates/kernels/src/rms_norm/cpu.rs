//! One pass for the sum of squares, one for the outputs.

use super::Args;
use crate::order::sum_squares;
use crate::parallel::{part, parts, threads_for};
use std::ops::Range;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::lanes::{Kernel, Lanes, WIDTH, dispatch};
use tf_numerics::qdq;

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn inverse_rms<L: Lanes>(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_squares::<L>(x) / x.len() as f32 + eps).sqrt()
}

/// `out = bf16(weight * (x * factor))`.
#[inline(always)]
pub(crate) fn normalise<L: Lanes>(x: &[f32], weight: &[f32], factor: f32, out: &mut [f32]) {
    assert_eq!(x.len(), weight.len());
    assert_eq!(x.len(), out.len());
    let factor = L::splat(factor);
    let (x, weight) = (x.as_chunks::<WIDTH>().0, weight.as_chunks::<WIDTH>().0);
    for ((x, weight), out) in x.iter().zip(weight).zip(out.as_chunks_mut::<WIDTH>().0) {
        scale_lanes(L::load_array(x), L::load_array(weight), factor).store_array(out);
    }
}

/// As [`normalise`], with both of a norm's outputs wanted or not.
#[inline(always)]
fn normalise_into<L: Lanes>(
    x: &[f32],
    weight: &[f32],
    factor: f32,
    normed: Option<&mut [f32]>,
    quantised: Option<&mut [f32]>,
) {
    let Some(quantised) = quantised else {
        if let Some(normed) = normed {
            normalise::<L>(x, weight, factor, normed);
        }
        return;
    };
    let (x, weight) = (x.as_chunks::<32>().0, weight.as_chunks::<32>().0);
    assert_eq!(x.len(), weight.len());
    assert_eq!(x.len(), quantised.len() / 32);
    let mut normed = normed;
    for (i, out) in quantised.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = scale_lanes(L::load(&x[i]), L::load(&weight[i]), L::splat(factor));
        let high = scale_lanes(L::load(&x[i][16..]), L::load(&weight[i][16..]), L::splat(factor));
        if let Some(normed) = &mut normed {
            low.store(&mut normed[32 * i..]);
            high.store(&mut normed[32 * i + 16..]);
        }
        let (low, high) = qdq::fp8_round_block(low, high);
        low.store(out);
        high.store(&mut out[16..]);
    }
}

#[inline(always)]
fn scale_lanes<L: Lanes>(x: L, weight: L, factor: L) -> L {
    (weight * (x * factor)).bf16_round()
}

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { x, weight, rows, columns, eps, normed, quantised } = args;
    let job = Job {
        x: x.f32(),
        weight: weight.f32(),
        eps,
        normed: parts(normed, rows * columns),
        quantised: parts(quantised, rows * columns),
    };
    let level = queue.level;
    queue.pool.run_on(threads_for(rows * columns * 2), |index, count| {
        dispatch(level, Rows { job: &job, rows: split(rows, count, index, 1) });
    });
}

struct Job<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    normed: Option<Parts<'a, f32>>,
    quantised: Option<Parts<'a, f32>>,
}

struct Rows<'a> {
    job: &'a Job<'a>,
    rows: Range<usize>,
}

impl Kernel for Rows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let job = self.job;
        let columns = job.weight.len();
        for r in self.rows {
            let at = r * columns..(r + 1) * columns;
            let x = &job.x[at.clone()];
            let factor = inverse_rms::<L>(x, job.eps);
            // SAFETY: the rows of this range belong to this thread, and each is taken once.
            let normed = unsafe { part(&job.normed, at.clone()) };
            // SAFETY: as above.
            let quantised = unsafe { part(&job.quantised, at) };
            normalise_into::<L>(x, job.weight, factor, normed, quantised);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::numerics_policy::Numerics;
    use crate::rms_norm::{Args, launch, reference};
    use crate::testing::*;
    use tf_device::{LaunchError, Queue};
    use tf_numerics::lanes::Level;
    use tf_numerics::qdq;

    fn norm(queue: &mut Queue, x: &[f32], weight: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let columns = weight.len();
        let (mut normed, mut quantised) = (dirty(x.len()), dirty(x.len()));
        let args = Args {
            x: &device(x),
            weight: &device(weight),
            rows: x.len() / columns,
            columns,
            eps: 1e-20,
            normed: Some(&mut normed),
            quantised: Some(&mut quantised),
        };
        launch(queue, args).unwrap();
        (normed.f32().to_vec(), quantised.f32().to_vec())
    }

    #[test]
    fn rows_match_the_definition_within_one_rounding_to_bf16() {
        let mut values = Values::new(3);
        for (rows, columns) in [(1, 32), (3, 96), (5, 160), (2, 512), (2, 5120)] {
            let (x, weight) = (values.bf16(rows * columns, 4.0), values.bf16(columns, 2.0));
            let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            let wanted = reference::rms_norm(&wide(&x), &wide(&weight), 1e-20, Numerics::Exact);
            let got = on_all_queues(|queue| norm(queue, &x, &weight).0);
            // The factor: a sum of squares with columns / 64 + 8 roundings a lane, halved by the root, and six more.
            let relative = (columns as f64 / 128.0 + 10.0) * F32_HALF_ULP + BF16_HALF_ULP;
            let bounds: Vec<f64> = wanted.iter().map(|w| w.abs() * relative).collect();
            assert_close(&got, &wanted, &bounds);
        }
    }

    #[test]
    fn the_quantised_output_is_the_other_one_after_qdq8() {
        let mut values = Values::new(4);
        let (x, weight) = (values.bf16(3 * 160, 4.0), values.bf16(160, 2.0));
        let mut wanted = Vec::new();
        let got = on_all_queues(|queue| {
            let (normed, quantised) = norm(queue, &x, &weight);
            wanted = normed;
            quantised
        });
        for row in wanted.chunks_mut(160) {
            qdq::round_row(Level::Scalar, qdq::Format::Fp8, row);
        }
        assert_eq!(bits(&got), bits(&wanted));
    }

    #[test]
    fn an_all_zero_row_stays_zero() {
        let got = on_all_queues(|queue| norm(queue, &[0.0; 64], &[1.5; 64]).0);
        assert_eq!(bits(&got), [0; 64]);
    }

    #[test]
    fn a_row_is_the_same_alone_and_among_any_neighbours() {
        let mut values = Values::new(5);
        let weight = values.bf16(96, 2.0);
        let row = values.bf16(96, 3.0);
        let alone = on_all_queues(|queue| norm(queue, &row, &weight).1);
        for place in 0..4 {
            let mut x: Vec<f32> = (0..4 * 96).map(|_| values.poison()).collect();
            x[place * 96..][..96].copy_from_slice(&row);
            let got = on_all_queues(|queue| norm(queue, &x, &weight).1);
            assert_eq!(bits(&got[place * 96..][..96]), bits(&alone), "row {place}");
        }
    }

    #[test]
    fn shapes_that_disagree_are_refused_and_no_rows_are_no_work() {
        let mut queue = Queue::cpu(1, Level::Scalar);
        let (x, weight) = (device(&[1.0f32; 64]), device(&[1.0f32; 32]));
        let mut run = |rows, columns, out: usize| {
            let mut normed = dirty(out);
            let args =
                Args { x: &x, weight: &weight, rows, columns, eps: 1e-20, normed: Some(&mut normed), quantised: None };
            launch(&mut queue, args)
        };
        assert_eq!(run(2, 32, 64), Ok(()));
        assert_eq!(run(0, 32, 0), Ok(()));
        assert!(matches!(run(3, 32, 96), Err(LaunchError::Shape { what: "the input of a norm", .. })));
        assert!(matches!(run(2, 32, 63), Err(LaunchError::Shape { what: "the output of a norm", .. })));
        assert!(matches!(run(1, 64, 64), Err(LaunchError::Shape { what: "the weight of a norm", .. })));
        assert!(matches!(run(1, 24, 64), Err(LaunchError::Shape { what: "the columns of a norm", .. })));
    }
}
