//! The routed MXFP4 experts of each row's picks, and the shared FP8 expert, summed into one output.
//!
//! Spec section 8. `x`: `[rows, hidden]` f32, already QDQ8'd. For expert `e` of a row's picks with routing weight `w`:
//! ```text
//! g = bf16(x @ w1^T)   u = bf16(x @ w3^T)                  each [intermediate]
//! u = clamp(u, -limit, limit)   g = min(g, limit)          limit 0 means no clamp
//! a = QDQ8(bf16(silu(g) * u * w))                          product in f32, left to right
//! y = bf16(a @ w2^T)                                       [hidden]
//! out = bf16(0 + y of the picks in ascending expert id + y of the shared expert)
//! ```
//! The shared expert is the same with `w = 1` left out. The sum is f32 and rounds once.
//!
//! Every dot product is in the order of [`tf_numerics::sum`]'s scaled dot product, a function of its length alone. Rows
//! are grouped by expert, so that a launch decodes an expert's weights once for all rows that picked it; the grouping
//! changes no bit. Packed layout of an expert on the CPU: codes of `w1`, `w3`, `w2` (layout B: 64 bytes hold 128 weights of an output
//! row, dword lane `l` nibble `n` is weight `16 n + l`; rows padded to 128), then their E8M0 scales.

pub(crate) mod contract;
mod cpu;
pub mod cuda;
mod few;
mod gpu;
mod launch;
mod pack;
pub mod pack_cuda;
mod pack_metal;
pub mod reference;
#[cfg(test)]
mod tests;

pub use launch::{launch, measure_in_chunks};
pub use pack::{Expert, ExpertBytes, Placed, Shared, Weights};

use tf_device::Buffer;

/// Hidden and intermediate sizes at most.
pub const COLUMNS_MAX: usize = 1 << 14;

/// See the module's text.
pub struct Args<'a> {
    pub weights: &'a Weights,
    /// `[rows, hidden]` f32, QDQ8'd; may hold more rows.
    pub x: &'a Buffer,
    pub rows: usize,
    /// Picks a row.
    pub picks: usize,
    /// `[rows, picks]` u32: expert ids in any order, no id twice in a row.
    pub selected: &'a Buffer,
    /// `[rows, picks]` f32: the routing weight of each pick.
    pub routing: &'a Buffer,
    /// `swiglu_limit`; 0 means no clamp.
    pub limit: f32,
    /// `[rows, hidden]` f32, bf16 values; may hold more rows.
    pub out: &'a mut Buffer,
}
