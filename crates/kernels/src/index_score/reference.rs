//! The definition of the index scores: how much a position wants each visible compressed entry.

use crate::reference_formats::dot;

/// `score[j] = sum_h weights[h] * max(queries[h] . keys[j], 0)`, never rounded. A weight may be negative.
///
/// `queries`: `[heads, head_dim]`; `weights`: `[heads]`; `keys`: `[entries, head_dim]`, the visible entries only.
pub fn index_score(queries: &[f64], weights: &[f64], keys: &[f64], head_dim: usize) -> Vec<f64> {
    let of_key = |key: &[f64]| {
        queries.chunks(head_dim).zip(weights).map(|(query, weight)| weight * dot(query, key).max(0.0)).sum::<f64>()
    };
    keys.chunks(head_dim).map(of_key).collect()
}
