//! The definition of the router: which experts a row visits and with which weights.

use crate::linear_bf16::reference::linear_f32;

/// The experts of one row, ascending, and their weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    pub experts: Vec<u32>,
    pub weights: Vec<f64>,
}

/// `s = sqrt(softplus(x @ gate^T))`; the `count` largest `s + bias` are chosen, the smaller id first among equals; the
/// weight of a chosen expert is `s / (sum of the chosen s + 1e-20) * factor`, without the bias.
///
/// `x`: `[columns]`; `gate`: `[experts, columns]`; `bias`: `[experts]`.
pub fn route(x: &[f64], gate: &[f64], bias: &[f64], count: usize, factor: f64) -> Route {
    let scores: Vec<f64> = linear_f32(x, gate, x.len()).into_iter().map(|z| softplus(z).sqrt()).collect();
    let biased = |e: u32| scores[e as usize] + bias[e as usize];
    let mut experts: Vec<u32> = (0..scores.len() as u32).collect();
    experts.sort_by(|&a, &b| biased(b).total_cmp(&biased(a)).then(a.cmp(&b)));
    experts.truncate(count);
    experts.sort_unstable();
    let sum: f64 = experts.iter().map(|&e| scores[e as usize]).sum();
    let weights = experts.iter().map(|&e| scores[e as usize] / (sum + 1e-20) * factor).collect();
    Route { experts, weights }
}

fn softplus(z: f64) -> f64 {
    z.max(0.0) + (-z.abs()).exp().ln_1p()
}
