//! The definition of the index queries of one position and of the weights of their heads.

use crate::linear_bf16::reference::linear_bf16;
use crate::linear_fp8::reference::linear_fp8;
use crate::numerics_policy::Numerics;
use crate::rope::reference::rotate;

/// `QDQ4(RoPE(low_rank @ weight^T, position))` for each head, without a norm. Out: `[heads, head_dim]`.
pub fn index_query(
    low_rank: &[f64],
    weight: &[f64],
    head_dim: usize,
    position: u32,
    frequencies: &[f32],
    numerics: Numerics,
) -> Vec<f64> {
    let mut queries = linear_fp8(low_rank, weight, low_rank.len(), numerics);
    for query in queries.chunks_mut(head_dim) {
        rotate(query, position, frequencies, numerics);
    }
    numerics.qdq4_e8m0(&queries, head_dim)
}

/// `(x @ weight^T) * head_dim^-0.5 * heads^-0.5`, rounded after the product and after the factor.
pub fn index_weights(x: &[f64], weight: &[f64], head_dim: usize, numerics: Numerics) -> Vec<f64> {
    let products = linear_bf16(x, weight, x.len(), numerics);
    let factor = 1.0 / ((head_dim * products.len()) as f64).sqrt();
    products.into_iter().map(|product| numerics.bf16(product * factor)).collect()
}
