//! `index_query`: the index queries of each row, in place.
//!
//! `queries[r][h] = QDQ4(32, E8M0)(RoPE(queries[r][h], position))`, no norm; `weights[r][h] = bf16(weights[r][h] * factor)`,
//! `factor = f32(head_dim^-0.5 * heads^-0.5)`.
//!
//! Inputs are the bf16 products with `wq_b` and `weights_proj`. Rounding: bf16 after RoPE, then E2M1. No sums.

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;

pub use launch::launch;

use crate::rows::RowInfo;
use tf_device::Buffer;

pub struct Args<'a> {
    /// `[rows, heads, head_dim]` f32, in place.
    pub queries: &'a mut Buffer,
    /// `[rows, heads]` f32, in place.
    pub weights: &'a mut Buffer,
    pub rows: &'a [RowInfo],
    /// `[rope_dim / 2]`.
    pub frequencies: &'a [f32],
    pub heads: usize,
    /// A multiple of 32.
    pub head_dim: usize,
}
