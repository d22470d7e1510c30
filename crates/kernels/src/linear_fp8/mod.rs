//! `out = x @ W^T` for FP8 weights with one power-of-two scale a 32x32 block; several weights may share one input.
//!
//! `x`: `[rows, groups * columns]` f32, row-major. `W`: `[weight rows, columns]` E4M3 with E8M0 scales
//! `[ceil(weight rows / 32), ceil(columns / 32)]`. `out`: `[rows, weight rows]` f32, row-major, finished as [`Finish`] says.
//! The input must already be rounded as the release wants it: QDQ8 for every FP8 linear (spec section 10), plain bf16 for
//! `wo_a`. With `groups` above 1 (`wo_a`) the weight rows are cut into that many equal blocks, and block `g` multiplies
//! column block `g` of `x`.
//!
//! Sums in the order of [`tf_numerics::sum`]'s scaled dot product, which depends on `columns` only: never on rows, threads,
//! tiles or the other weights of the launch. The accumulation is float32 and rounds to bf16 once, at the store.
//! Packed layout: codes `[weight rows, columns rounded up to 32]`, scales as float32 `[row blocks, column blocks]`.

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
mod pack;
pub mod pack_cuda;
pub mod reference;
#[cfg(test)]
mod tests;

pub use crate::linear::Finish;
pub use launch::{launch, measure_in_chunks};
pub use pack::Weights;

use tf_device::Buffer;

/// Columns at most.
pub const COLUMNS_MAX: usize = 1 << 16;

/// See the module's text.
pub struct Args<'a> {
    /// `[rows, groups * columns]` f32; may hold more rows.
    pub x: &'a Buffer,
    pub rows: usize,
    /// 1, or the block count of `wo_a`.
    pub groups: usize,
    /// Each has `columns` columns.
    pub products: &'a mut [Product<'a>],
}

/// One weight of a launch and where its result goes.
pub struct Product<'a> {
    pub weights: &'a Weights,
    /// `[rows, weight rows]` f32; may hold more rows.
    pub out: &'a mut Buffer,
    pub finish: Finish,
}
