//! Each head is turned and rounded in place.

use super::Args;
use crate::parallel::threads_for;
use crate::rope::{Phases, Turn, turn};
use crate::rows::RowInfo;
use std::ops::Range;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::bf16;
use tf_numerics::lanes::{Kernel, Lanes, dispatch};
use tf_numerics::qdq;

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { queries, weights, rows, frequencies, heads, head_dim } = args;
    let job = Job {
        queries: Parts::new(&mut queries.f32_mut()[..rows.len() * heads * head_dim]),
        weights: Parts::new(&mut weights.f32_mut()[..rows.len() * heads]),
        rows,
        frequencies,
        heads,
        head_dim,
        factor: weight_factor(heads, head_dim),
    };
    let level = queue.level;
    queue.pool.run_on(threads_for(rows.len() * heads * head_dim * 4), |index, count| {
        dispatch(level, Rows { job: &job, rows: split(rows.len(), count, index, 1) });
    });
}

/// `head_dim^-0.5 * heads^-0.5`; root and division are IEEE operations, so it is the same everywhere.
pub(super) fn weight_factor(heads: usize, head_dim: usize) -> f32 {
    (1.0 / ((heads * head_dim) as f64).sqrt()) as f32
}

struct Job<'a> {
    queries: Parts<'a, f32>,
    weights: Parts<'a, f32>,
    rows: &'a [RowInfo],
    frequencies: &'a [f32],
    heads: usize,
    head_dim: usize,
    factor: f32,
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
        let mut phases = Phases::new();
        let width = job.heads * job.head_dim;
        for r in self.rows {
            phases.set::<L>(job.rows[r].position, job.frequencies);
            // SAFETY: row `r` belongs to this thread.
            let queries = unsafe { job.queries.part(r * width..(r + 1) * width) };
            for query in queries.chunks_exact_mut(job.head_dim) {
                turn::<L>(query, &phases, Turn::Forward);
                qdq::round_row_lanes::<L>(qdq::Format::Fp4, query);
            }
            // SAFETY: as above.
            for weight in unsafe { job.weights.part(r * job.heads..(r + 1) * job.heads) } {
                *weight = bf16::round(*weight * job.factor);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::index_query::{Args, launch};
    use crate::numerics_policy::Numerics;
    use crate::rope::reference::{frequencies, rotate};
    use crate::rows::RowInfo;
    use crate::testing::*;
    use tf_device::{LaunchError, Queue};
    use tf_numerics::lanes::Level;

    fn run(queue: &mut Queue, queries: &[f32], weights: &[f32], positions: &[u32], head_dim: usize) -> Vec<f32> {
        let heads = weights.len() / positions.len();
        let rows: Vec<RowInfo> = positions.iter().map(|&position| RowInfo { slot: 0, position, window: 0 }).collect();
        let (mut queries, mut weights) = (device(queries), device(weights));
        let frequencies = frequencies(1.6e5, 16, None);
        let (q, w) = (&mut queries, &mut weights);
        launch(queue, Args { queries: q, weights: w, rows: &rows, frequencies: &frequencies, heads, head_dim })
            .unwrap();
        [queries.f32(), weights.f32()].concat()
    }

    #[test]
    fn queries_and_weights_are_those_of_the_definition() {
        let mut values = Values::new(13);
        for (heads, head_dim) in [(4, 32), (32, 128)] {
            let positions = [0, 3, 999];
            let queries = values.bf16(3 * heads * head_dim, 3.0);
            let weights = values.bf16(3 * heads, 2.0);
            let got = on_all_queues(|queue| run(queue, &queries, &weights, &positions, head_dim));
            let (got_queries, got_weights) = got.split_at(queries.len());
            let mut equal = 0;
            for (i, (got, query)) in got_queries.chunks(head_dim).zip(queries.chunks(head_dim)).enumerate() {
                let mut wanted: Vec<f64> = query.iter().map(|&v| v.into()).collect();
                rotate(&mut wanted, positions[i / heads], &frequencies(1.6e5, 16, None), Numerics::Release);
                let wanted = Numerics::Release.qdq4_e8m0(&wanted, head_dim);
                equal += got.iter().zip(&wanted).filter(|(got, wanted)| f64::from(**got) == **wanted).count();
            }
            assert!(equal * 1000 >= queries.len() * 995, "{equal} of {}", queries.len());
            for (got, weight) in got_weights.iter().zip(&weights) {
                let exact = f64::from(*weight) / ((heads * head_dim) as f64).sqrt();
                assert_eq!(f64::from(*got), Numerics::Release.bf16(exact));
            }
        }
    }

    #[test]
    fn a_row_is_the_same_alone_and_among_any_neighbours() {
        let mut values = Values::new(14);
        let (row, weights) = (values.bf16(64, 2.0), values.bf16(2, 1.0));
        let mut queue = Queue::cpu(2, Level::best());
        let alone = run(&mut queue, &row, &weights, &[7], 32);
        let mut queries: Vec<f32> = (0..192).map(|_| values.poison()).collect();
        queries[64..128].copy_from_slice(&row);
        let weights = [f32::NAN, f32::NAN, weights[0], weights[1], 0.0, f32::INFINITY];
        let got = run(&mut queue, &queries, &weights, &[1, 7, 8], 32);
        assert_eq!(bits(&got[64..128]), bits(&alone[..64]));
        assert_eq!(bits(&got[192 + 2..192 + 4]), bits(&alone[64..]));
    }

    #[test]
    fn shapes_that_disagree_are_refused() {
        let mut queue = Queue::cpu(1, Level::Scalar);
        let rows = [RowInfo { slot: 0, position: 0, window: 0 }];
        let (mut queries, mut weights) = (dirty(63), dirty(2));
        let (q, w) = (&mut queries, &mut weights);
        let args = Args { queries: q, weights: w, rows: &rows, frequencies: &[1.0; 8], heads: 2, head_dim: 32 };
        let wanted = LaunchError::Shape { what: "the index queries", found: 63, expected: 64 };
        assert_eq!(launch(&mut queue, args), Err(wanted));
    }
}
