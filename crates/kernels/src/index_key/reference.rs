//! The definition of an index key: made from the latent before it is rotated and quantised.

use crate::linear_bf16::reference::linear_bf16;
use crate::numerics_policy::Numerics;
use crate::rms_norm::reference::rms_norm;
use crate::rope::reference::rotate;

/// `QDQ4(RoPE(RMSNorm(latent @ weight^T; norm), first_position))`. `weight`: `[norm.len(), latent.len()]`.
pub fn index_key(
    latent: &[f64],
    weight: &[f64],
    norm: &[f64],
    eps: f64,
    first_position: u32,
    frequencies: &[f32],
    numerics: Numerics,
) -> Vec<f64> {
    let mut key = rms_norm(&linear_bf16(latent, weight, latent.len(), numerics), norm, eps, numerics);
    rotate(&mut key, first_position, frequencies, numerics);
    numerics.qdq4_e8m0(&key, norm.len())
}
