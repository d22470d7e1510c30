//! The definition of a window entry: the shared key and value of one position.

use crate::numerics_policy::Numerics;
use crate::rms_norm::reference::rms_norm;
use crate::rope::reference::rotate;

/// `QDQ8(RoPE(RMSNorm(projected; norm), position))`, all columns quantised, the rotated ones included.
///
/// `projected`: `[positions.len(), norm.len()]`, the output of the key projection.
pub fn window_entries(
    projected: &[f64],
    norm: &[f64],
    eps: f64,
    positions: &[u32],
    frequencies: &[f32],
    numerics: Numerics,
) -> Vec<f64> {
    let mut keys = rms_norm(projected, norm, eps, numerics);
    for (key, &position) in keys.chunks_mut(norm.len()).zip(positions) {
        rotate(key, position, frequencies, numerics);
    }
    numerics.qdq8(&keys, norm.len())
}
