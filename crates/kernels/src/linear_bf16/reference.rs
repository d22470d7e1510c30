//! The definition of the linears whose weights are stored in bfloat16 or float32 and whose input is not quantised.

use crate::numerics_policy::Numerics;
use crate::reference_formats::product;

/// `x @ weight^T`, rounded. `x`: `[rows, inner]`; `weight`: `[outputs, inner]`.
pub fn linear_bf16(x: &[f64], weight: &[f64], inner: usize, numerics: Numerics) -> Vec<f64> {
    numerics.bf16_all(product(x, weight, inner))
}

/// `x @ weight^T` kept in float32 by the release: gate logits and the compressor's values and scores at ratio 2.
pub fn linear_f32(x: &[f64], weight: &[f64], inner: usize) -> Vec<f64> {
    product(x, weight, inner)
}
