//! The definition of `rms_norm`: each row divided by its root mean square, times a weight.

use crate::numerics_policy::Numerics;

/// `out[c] = weight[c] * x[c] / sqrt(mean(x^2) + eps)`, rounded once. `x`: `[rows, weight.len()]`.
pub fn rms_norm(x: &[f64], weight: &[f64], eps: f64, numerics: Numerics) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks(weight.len()) {
        let factor = inverse_rms(row, eps);
        out.extend(row.iter().zip(weight).map(|(value, weight)| numerics.bf16(weight * (value * factor))));
    }
    out
}

/// `1 / sqrt(mean(x^2) + eps)`.
pub fn inverse_rms(x: &[f64], eps: f64) -> f64 {
    let mean = x.iter().map(|value| value * value).sum::<f64>() / x.len() as f64;
    1.0 / (mean + eps).sqrt()
}
