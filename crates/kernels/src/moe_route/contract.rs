//! What must hold of the router.

use super::{Args, EXPERTS_MAX, launch, reference};
use crate::contract::*;

pub const MOE_ROUTE: Contract = Contract {
    name: "moe_route",
    formula: "s = sqrt(softplus(logits)); the top_k largest s + bias, equal ones by the smaller id; weight = s / \
        (sum of chosen s + 1e-20) * factor",
    shapes: "logits [rows, experts] f32, bias [experts] f32; chosen [rows, top_k] u32 ascending, weights [rows, \
        top_k] f32",
    order: "the chosen s add up in ascending id",
    bound: "the choice is exact where scores differ by more than 1e-5 or not at all; weights (top_k + 10) U",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("experts", 256), ("top_k", 6)] },
        Case { name: "few experts", rows: 17, sizes: &[("experts", 9), ("top_k", 3)] },
        Case { name: "all chosen", rows: 5, sizes: &[("experts", 4), ("top_k", 4)] },
        Case { name: "experts of the release", rows: 3, sizes: &[("experts", 384), ("top_k", 6)] },
    ],
    make,
    limits: &[Limit { what: "experts", most: EXPERTS_MAX, accepts, beyond: EXPERTS_MAX + 1 }],
    controls: &[
        Control::value("ties go to the larger id"),
        Control::value("leaves the bias out"),
        Control::value("applies the factor twice"),
        Control::value("takes the bias of images for all rows"),
    ],
    edits: &[
        metal("ties go to the larger id (Metal)", "id = simd_min(id);", "id = simd_max(id == 0xffffffffu ? 0u : id);"),
        metal(
            "ties within a lane go to the larger id (Metal)",
            "if (keys[s - 1u] == best) id",
            "if (keys[s - 1u] == best && id == 0xffffffffu) id",
        ),
        metal(
            "adds the bias to the weight (Metal)",
            "weights[place] = scores[s] /",
            "weights[place] = (scores[s] + bias[32u * s + lane]) /",
        ),
        metal(
            "leaves the bias of images out (Metal)",
            "image[row] != 0 ? bias_image[id] : bias[id]",
            "image[row] == 2 ? bias_image[id] : bias[id]",
        ),
        metal("leaves the last experts out (Metal)", "if (id < shape.experts) {", "if (id + 8u < shape.experts) {"),
        metal(
            "leaves the picks unsorted (Metal)",
            "popcount(mask & ((1u << lane) - 1u))",
            "popcount(mask & ~((2u << lane) - 1u))",
        ),
        cuda("leaves the picks unsorted (CUDA)", "__shfl_sync(WARP, own, k) < own ? 1 : 0", "k < lane ? 1 : 0"),
        cuda("leaves the bias out (CUDA)", "order_key(score + offsets[thread])", "order_key(score)"),
        cuda("adds the bias to the weight (CUDA)", "has ? score_of[own] :", "has ? score_of[own] + offsets[own] :"),
    ],
    standard: STANDARD_CONTROLS,
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

/// The same of its CUDA source.
const fn cuda(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::cuda(name, Gate::Value, include_str!("kernel.cu"), find, replace)
}

const FACTOR: f32 = 1.5;

struct Router {
    experts: usize,
    top_k: usize,
    logits: Vec<f32>,
    bias: Vec<f32>,
    bias_image: Vec<f32>,
    image: Vec<bool>,
}

const LANES: usize = 32;

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let (experts, top_k) = (case.size("experts"), case.size("top_k"));
    // Multiples of 1/4 and 1/16, so that whole scores tie and others lie apart.
    let grid = |values: &mut Values, count: usize, step: f32, most: usize| -> Vec<f32> {
        (0..count).map(|_| (values.below(most) as f32 - most as f32 / 2.0) * step).collect()
    };
    let (mut bias, mut bias_image) = (grid(&mut values, experts, 0.0625, 6), grid(&mut values, experts, 0.0625, 6));
    // Experts 32 apart share a lane of a GPU: in every third row they tie.
    let repeat = |values: &mut [f32]| (LANES..values.len()).for_each(|id| values[id] = values[id - LANES]);
    repeat(&mut bias);
    repeat(&mut bias_image);
    let image: Vec<bool> = (0..case.rows).map(|row| row % 4 == 1).collect();
    let mut router = Router { experts, top_k, logits: Vec::new(), bias, bias_image, image };
    for row in 0..case.rows {
        // Rows whose choice hangs on less than a kernel's error are drawn again.
        for _ in 0..1000 {
            router.logits.truncate(row * experts);
            router.logits.extend(grid(&mut values, experts, 0.25, 40));
            if row % 3 == 2 {
                repeat(&mut router.logits[row * experts..]);
            }
            if top_k == experts && row % 2 == 1 {
                // Scores so small that what keeps their sum from zero is seen; the choice is none.
                router.logits[row * experts..].iter_mut().for_each(|logit| *logit -= 60.0);
            }
            if router.is_clear(row) {
                break;
            }
        }
    }
    Box::new(router)
}

impl Router {
    fn bias_of(&self, row: usize) -> Vec<f64> {
        wide(if self.image[row] { &self.bias_image } else { &self.bias })
    }

    fn scores(&self, row: usize) -> Vec<f64> {
        let logits = wide(&self.logits[row * self.experts..][..self.experts]);
        logits.into_iter().map(|z| (z.max(0.0) + (-z.abs()).exp().ln_1p()).sqrt()).collect()
    }

    /// Whether the scores around the last choice are equal or well apart.
    fn is_clear(&self, row: usize) -> bool {
        let mut biased: Vec<f64> = self.scores(row).iter().zip(self.bias_of(row)).map(|(s, bias)| s + bias).collect();
        biased.sort_by(|a, b| b.total_cmp(a));
        biased.windows(2).all(|pair| pair[0] == pair[1] || pair[0] - pair[1] > 1e-5)
    }
}

impl World for Router {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let Router { experts, top_k, .. } = *self;
        let reversed = fault.is("ties go to the larger id");
        let mut values = gather(picks, &self.logits, experts);
        let (mut bias, mut bias_image) = (self.bias.clone(), self.bias_image.clone());
        if fault.is("leaves the bias out") {
            bias.fill(0.0);
        }
        if fault.is("takes the bias of images for all rows") {
            bias.clone_from(&self.bias_image);
        }
        if reversed {
            values.chunks_mut(experts).for_each(<[f32]>::reverse);
            bias.reverse();
            bias_image.reverse();
        }
        let image: Vec<bool> = picks.iter().map(|pick| self.image[row_of(*pick)]).collect();
        let logits = stage.rows_in("logits", &values);
        let (bias, bias_image) = (stage.input("bias", &bias), stage.input("bias of images", &bias_image));
        let mut chosen = stage.output::<u32>("chosen", picks.len() * top_k);
        let mut weights = stage.output::<f32>("weights", picks.len() * top_k);
        let args = Args {
            logits: &logits.buffer,
            bias: &bias.buffer,
            bias_image: Some(&bias_image.buffer),
            image: &image,
            rows: picks.len(),
            experts,
            top_k,
            factor: if fault.is("applies the factor twice") { FACTOR * FACTOR } else { FACTOR },
            chosen: &mut chosen.buffer,
            weights: &mut weights.buffer,
        };
        stage.run(|queue| launch(queue, args))?;
        if reversed {
            let count = picks.len() * top_k;
            chosen.edit::<u32>(|chosen| {
                chosen[..count].iter_mut().for_each(|id| *id = experts as u32 - 1 - *id);
                chosen[..count].chunks_mut(top_k).for_each(<[u32]>::reverse);
            });
            weights.edit::<f32>(|weights| weights[..count].chunks_mut(top_k).for_each(<[f32]>::reverse));
        }
        stage.read(logits);
        stage.read(bias);
        stage.read(bias_image);
        // Whatever a row holds, the experts read by its picks.
        let held = chosen.held::<u32>();
        let is_wrong =
            |ids: &[u32]| ids.iter().enumerate().any(|(at, id)| *id >= experts as u32 || ids[..at].contains(id));
        if let Some(place) = (0..picks.len()).find(|place| is_wrong(&held[place * top_k..(place + 1) * top_k])) {
            return Err(format!("place {place} of {}: its picks are no {top_k} experts of {experts}", picks.len()));
        }
        stage.rows::<u32>(chosen, top_k);
        stage.rows::<f32>(weights, top_k);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let logits = wide(&self.logits[row * self.experts..][..self.experts]);
        // The gate's product is another kernel's: here one column carries the logits.
        let route = reference::route(&[1.0], &logits, &self.bias_of(row), self.top_k, f64::from(FACTOR));
        let ids = route.experts.iter().map(|id| Expected::exactly(f64::from(*id)));
        let roundings = self.top_k as f64 + 10.0;
        let weights =
            route.weights.iter().map(|&value| Expected { value, span: Span::exact(value).rounded(roundings) });
        ids.chain(weights).collect()
    }

    fn decode(&self, _row: usize, words: &[u32]) -> Vec<f64> {
        let (ids, weights) = words.split_at(self.top_k);
        let weights = weights.iter().map(|word| f64::from(f32::from_bits(*word)));
        ids.iter().map(|id| f64::from(*id)).chain(weights).collect()
    }

    fn work(&self) -> Work {
        Work { bytes: self.logits.len() * 4, multiply_adds: self.logits.len() * 10 }
    }
}

fn accepts(experts: usize) -> bool {
    use tf_device::{Buffer, Device, Queue};
    let zeros = |count| Buffer::zeroed_of::<f32>(&Device::cpu(), count).expect("a row fits into memory");
    let (logits, bias, mut chosen, mut weights) = (zeros(experts), zeros(experts), zeros(2), zeros(2));
    let args = Args {
        logits: &logits,
        bias: &bias,
        bias_image: None,
        image: &[],
        rows: 1,
        experts,
        top_k: 2,
        factor: FACTOR,
        chosen: &mut chosen,
        weights: &mut weights,
    };
    launch(&mut Queue::cpu(1, tf_numerics::lanes::Level::Scalar), args).is_ok()
}
