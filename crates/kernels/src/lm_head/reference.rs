//! The definition of the output head: float32 logits of the normalised rows.

use crate::reference_formats::product;

/// `logits = x @ weight^T`, never rounded. `x`: `[rows, columns]`; `weight`: `[vocabulary, columns]`.
pub fn lm_head(x: &[f64], weight: &[f64], columns: usize) -> Vec<f64> {
    product(x, weight, columns)
}
