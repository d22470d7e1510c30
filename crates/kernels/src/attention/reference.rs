//! The definition of the attention of one row: every head over one shared list of keys that are also the values.

use crate::numerics_policy::Numerics;
use crate::reference_formats::dot;
use crate::rope::reference::rotate_back;

/// `o[h] = RoPE^-1(sum_j exp(s_j - M) key_j / (sum_j exp(s_j - M) + exp(sink_h - M)))`, `s_j = q[h] . key_j / sqrt(dim)`.
///
/// `q`: `[heads, dim]`, rotated; `keys`: `[dim]` each, in the canonical order; `sinks`: `[heads]`, not scaled. `M` is the
/// largest `s_j`. Probabilities are rounded where they meet the values and not in the denominator; the output is rounded
/// before it is turned back to the row's position, and again after.
pub fn attention(
    q: &[f64],
    keys: &[&[f64]],
    sinks: &[f64],
    position: u32,
    frequencies: &[f32],
    numerics: Numerics,
) -> Vec<f64> {
    let dim = q.len() / sinks.len();
    let mut out = Vec::with_capacity(q.len());
    for (query, &sink) in q.chunks(dim).zip(sinks) {
        let scores: Vec<f64> = keys.iter().map(|key| dot(query, key) / (dim as f64).sqrt()).collect();
        let max = scores.iter().fold(f64::NEG_INFINITY, |max, &score| max.max(score));
        let denominator = scores.iter().map(|score| (score - max).exp()).sum::<f64>() + (sink - max).exp();
        let mut sum = vec![0.0; dim];
        for (score, key) in scores.iter().zip(keys) {
            let probability = numerics.bf16((score - max).exp());
            for (sum, value) in sum.iter_mut().zip(*key) {
                *sum += probability * value;
            }
        }
        let mut head = numerics.bf16_all(sum.into_iter().map(|sum| sum / denominator).collect());
        rotate_back(&mut head, position, frequencies, numerics);
        out.extend(head);
    }
    out
}
