//! Scores by lanes, the selection by one pass of insertion.

use super::{Args, EXPERTS_MAX, TOP_K_MAX};
use crate::parallel::threads_for;
use std::ops::Range;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::lanes::{Kernel, Lanes, WIDTH, dispatch};
use tf_numerics::math;

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { logits, bias, bias_image, image, rows, experts, top_k, factor, chosen, weights } = args;
    let job = Job {
        logits: logits.f32(),
        bias: bias.f32(),
        bias_image: bias_image.map_or(&[], |bias| bias.f32()),
        image,
        experts,
        top_k,
        factor,
        chosen: Parts::new(&mut chosen.u32_mut()[..rows * top_k]),
        weights: Parts::new(&mut weights.f32_mut()[..rows * top_k]),
    };
    let level = queue.level;
    queue.pool.run_on(threads_for(rows * experts * 64), |index, count| {
        dispatch(level, Rows { job: &job, rows: split(rows, count, index, 1) });
    });
}

struct Job<'a> {
    logits: &'a [f32],
    bias: &'a [f32],
    bias_image: &'a [f32],
    image: &'a [bool],
    experts: usize,
    top_k: usize,
    factor: f32,
    chosen: Parts<'a, u32>,
    weights: Parts<'a, f32>,
}

struct Rows<'a> {
    job: &'a Job<'a>,
    rows: Range<usize>,
}

impl Kernel for Rows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Job { logits, bias, bias_image, image, experts, top_k, factor, chosen, weights } = self.job;
        let mut scores = [0.0; EXPERTS_MAX];
        let scores = &mut scores[..*experts];
        for r in self.rows {
            let logits = &logits[r * experts..(r + 1) * experts];
            for (scores, logits) in scores.chunks_mut(WIDTH).zip(logits.chunks(WIDTH)) {
                math::softplus(L::load_partial(logits, 0.0)).sqrt().store_partial(scores);
            }
            let bias = if image.get(r).copied().unwrap_or(false) { bias_image } else { bias };
            // SAFETY: row `r` belongs to this thread.
            let (chosen, weights) =
                unsafe { (chosen.part(r * top_k..(r + 1) * top_k), weights.part(r * top_k..(r + 1) * top_k)) };
            choose(scores, bias, chosen);
            let mut sum = 0.0;
            for &expert in chosen.iter() {
                sum += scores[expert as usize];
            }
            for (weight, &expert) in weights.iter_mut().zip(chosen.iter()) {
                *weight = scores[expert as usize] / (sum + 1e-20) * factor;
            }
        }
    }
}

/// The `chosen.len()` largest `score + bias`, equal ones by the smaller id, ascending by id.
#[inline(always)]
fn choose(scores: &[f32], bias: &[f32], chosen: &mut [u32]) {
    // Best first. A later expert passes an earlier one only when it is larger.
    let mut best = [(f32::NEG_INFINITY, 0u32); TOP_K_MAX];
    let mut count = 0;
    for (id, (score, bias)) in scores.iter().zip(bias).enumerate() {
        let value = score + bias;
        let value = if value.is_nan() { f32::NEG_INFINITY } else { value };
        if count == chosen.len() && value <= best[count - 1].0 {
            continue;
        }
        let mut place = count.min(chosen.len() - 1);
        while place > 0 && value > best[place - 1].0 {
            best[place] = best[place - 1];
            place -= 1;
        }
        best[place] = (value, id as u32);
        count = (count + 1).min(chosen.len());
    }
    for (chosen, (_, id)) in chosen.iter_mut().zip(&best) {
        *chosen = *id;
    }
    chosen.sort_unstable();
}

#[cfg(test)]
mod tests {
    use crate::moe_route::{Args, launch};
    use crate::testing::*;
    use tf_device::{LaunchError, Queue};
    use tf_numerics::lanes::Level;

    struct Router<'a> {
        bias: &'a [f32],
        bias_image: Option<&'a [f32]>,
        image: &'a [bool],
        top_k: usize,
    }

    impl Router<'_> {
        /// Chosen experts, then weights.
        fn run(&self, queue: &mut Queue, logits: &[f32]) -> Result<(Vec<u32>, Vec<f32>), LaunchError> {
            let experts = self.bias.len();
            let rows = logits.len() / experts;
            let (mut chosen, mut weights) = (device(&vec![u32::MAX; rows * self.top_k]), dirty(rows * self.top_k));
            let image_bias = self.bias_image.map(device);
            let args = Args {
                logits: &device(logits),
                bias: &device(self.bias),
                bias_image: image_bias.as_ref(),
                image: self.image,
                rows,
                experts,
                top_k: self.top_k,
                factor: 1.5,
                chosen: &mut chosen,
                weights: &mut weights,
            };
            launch(queue, args)?;
            Ok((chosen.u32().to_vec(), weights.f32().to_vec()))
        }
    }

    /// The definition, from the logits on: spec section 8.
    fn wanted(logits: &[f32], bias: &[f32], top_k: usize) -> (Vec<u32>, Vec<f64>) {
        let scores: Vec<f64> = logits.iter().map(|&z| ((f64::from(z)).exp().ln_1p()).sqrt()).collect();
        let biased = |e: &u32| scores[*e as usize] + f64::from(bias[*e as usize]);
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        ids.sort_by(|a, b| biased(b).total_cmp(&biased(a)).then(a.cmp(b)));
        ids.truncate(top_k);
        ids.sort_unstable();
        let sum: f64 = ids.iter().map(|&e| scores[e as usize]).sum();
        let weights = ids.iter().map(|&e| scores[e as usize] / (sum + 1e-20) * 1.5).collect();
        (ids, weights)
    }

    #[test]
    fn the_chosen_experts_and_weights_are_those_of_the_definition() {
        let mut values = Values::new(50);
        for (experts, top_k) in [(384, 6), (128, 3), (16, 3), (8, 3), (4, 2), (20, 16), (3, 3)] {
            let rows = 9;
            let logits = values.uniform(rows * experts, 8.0);
            let bias = values.uniform(experts, 0.5);
            let mut chosen = Vec::new();
            let weights = on_all_queues(|queue| {
                let router = Router { bias: &bias, bias_image: None, image: &[], top_k };
                let (ids, weights) = router.run(queue, &logits).unwrap();
                if chosen.is_empty() {
                    chosen = ids.clone();
                }
                assert_eq!(ids, chosen);
                weights
            });
            for r in 0..rows {
                let (ids, exact) = wanted(&logits[r * experts..][..experts], &bias, top_k);
                assert_eq!(chosen[r * top_k..][..top_k], ids, "row {r} of {experts} experts");
                // softplus and its root to about 3 units, a sum of top_k terms, a division and a product.
                let bounds: Vec<f64> = exact.iter().map(|w| w * (12.0 + 2.0 * top_k as f64) * F32_HALF_ULP).collect();
                assert_close(&weights[r * top_k..][..top_k], &exact, &bounds);
            }
        }
    }

    #[test]
    fn equal_scores_go_to_the_smaller_id_and_nan_to_nobody() {
        let bias = [0.0; 8];
        let cases: [(&[f32; 8], &[u32]); 4] = [
            (&[1.0; 8], &[0, 1, 2]),
            (&[0.0, 1.0, 0.0, 2.0, 1.0, 1.0, 0.0, 0.0], &[1, 3, 4]),
            (&[f32::NAN, 0.0, f32::NAN, 0.0, 0.0, 5.0, 0.0, 0.0], &[1, 3, 5]),
            (&[f32::NAN; 8], &[0, 1, 2]),
        ];
        for (logits, ids) in cases {
            for (name, mut queue) in queues() {
                let router = Router { bias: &bias, bias_image: None, image: &[], top_k: 3 };
                assert_eq!(router.run(&mut queue, logits).unwrap().0, ids, "{name}, {logits:?}");
            }
        }
    }

    #[test]
    fn rows_of_an_image_use_their_own_bias_for_the_choice_only() {
        let bias_image = [0.0, 0.0, 9.0, 9.0];
        let router =
            Router { bias: &[9.0, 9.0, 0.0, 0.0], bias_image: Some(&bias_image), image: &[false, true], top_k: 2 };
        let (ids, weights) = router.run(&mut Queue::cpu(1, Level::Scalar), &[1.0; 8]).unwrap();
        assert_eq!(ids, [0, 1, 2, 3]);
        assert_eq!(weights, [0.75; 4], "the bias does not enter the weights");
        let router = Router { bias_image: None, ..router };
        assert!(matches!(router.run(&mut Queue::cpu(1, Level::Scalar), &[1.0; 8]), Err(LaunchError::Shape { .. })));
    }

    #[test]
    fn a_row_is_the_same_alone_and_among_any_neighbours() {
        let mut values = Values::new(51);
        let (bias, row) = (values.uniform(16, 0.1), values.uniform(16, 4.0));
        let router = Router { bias: &bias, bias_image: None, image: &[], top_k: 3 };
        let mut queue = Queue::cpu(3, Level::best());
        let (ids, weights) = router.run(&mut queue, &row).unwrap();
        let mut logits: Vec<f32> = (0..160).map(|_| values.poison()).collect();
        logits[64..80].copy_from_slice(&row);
        let (all_ids, all_weights) = router.run(&mut queue, &logits).unwrap();
        assert_eq!((&all_ids[12..15], bits(&all_weights[12..15])), (&ids[..], bits(&weights)));
    }
}
