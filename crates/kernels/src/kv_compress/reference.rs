//! The definition of the compressed long-range entries: groups of positions pooled into one latent, rotated, quantised.

use crate::numerics_policy::Numerics;
use crate::rms_norm::reference::rms_norm;
use crate::rope::reference::rotate;

/// Pools one group: per column a softmax over the positions' scores weights their values; rounded.
///
/// `values` and `scores`: `[ratio, columns]`, as the projections made them. At ratio 1 the softmax of one score is 1.
pub fn pool(values: &[f64], scores: &[f64], columns: usize, numerics: Numerics) -> Vec<f64> {
    (0..columns)
        .map(|c| {
            let score = |i: usize| scores[i * columns + c];
            let ratio = values.len() / columns;
            let max = (0..ratio).map(score).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = (0..ratio).map(|i| (score(i) - max).exp()).sum();
            numerics.bf16((0..ratio).map(|i| (score(i) - max).exp() / sum * values[i * columns + c]).sum())
        })
        .collect()
}

/// `RMSNorm(pooled; norm)`: what entries and index keys are both made of.
pub fn latent(pooled: &[f64], norm: &[f64], eps: f64, numerics: Numerics) -> Vec<f64> {
    rms_norm(pooled, norm, eps, numerics)
}

/// The stored entry of a latent: rotated at the position of its group's first token, then QDQ4 with E4M3 scales.
pub fn entry(latent: &[f64], first_position: u32, frequencies: &[f32], numerics: Numerics) -> Vec<f64> {
    let mut entry = latent.to_vec();
    rotate(&mut entry, first_position, frequencies, numerics);
    numerics.qdq4_e4m3(&entry, latent.len())
}

/// How many entries a query at `position` may see: the groups whose last position is not after it.
pub fn visible(position: u32, ratio: usize) -> usize {
    (position as usize + 1) / ratio
}
