//! The definition of the FP8 linears: the input quantised and dequantised, times the dequantised weight.

use crate::numerics_policy::Numerics;
use crate::reference_formats::{e4m3_decode, e8m0_decode, product};

/// `QDQ8(x) @ weight^T`, rounded. `x`: `[rows, inner]`; `weight`: `[outputs, inner]`, dequantised.
pub fn linear_fp8(x: &[f64], weight: &[f64], inner: usize, numerics: Numerics) -> Vec<f64> {
    numerics.bf16_all(product(&numerics.qdq8(x, inner), weight, inner))
}

/// The grouped output projection: group `g` of a row's columns meets rows block `g` of the weight. The input is *not*
/// quantised. `x`: `[rows, groups * inner]`; `weight`: `[groups * outputs, inner]`; out: `[rows, groups * outputs]`.
pub fn linear_grouped(x: &[f64], weight: &[f64], inner: usize, groups: usize, numerics: Numerics) -> Vec<f64> {
    let block = weight.len() / groups;
    let of_group = |g: usize, row: &[f64]| product(&row[g * inner..][..inner], &weight[g * block..][..block], inner);
    numerics
        .bf16_all(x.chunks(groups * inner).flat_map(|row| (0..groups).flat_map(move |g| of_group(g, row))).collect())
}

/// A stored FP8 weight `[outputs, inner]` with one E8M0 scale for each 32 x 32 block, edge blocks included.
pub fn dequantise(codes: &[u8], scales: &[u8], inner: usize) -> Vec<f64> {
    let scale_columns = inner.div_ceil(32);
    codes
        .iter()
        .enumerate()
        .map(|(i, &code)| {
            let (row, column) = (i / inner, i % inner);
            e4m3_decode(code) * e8m0_decode(scales[row / 32 * scale_columns + column / 32])
        })
        .collect()
}
