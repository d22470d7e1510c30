//! `out = x @ W^T` for unquantised weights, bf16 or float32; several weights may share one input.
//!
//! `x`: `[rows, columns]` f32, row-major. `W`: `[weight rows, columns]` bf16 or f32. `out`: `[rows, weight rows]` f32,
//! row-major, finished as [`Finish`] says. Serves the gate, the compressor, the indexer's `wk` and `weights_proj`, the
//! hyper-connection mixes (`fn`, f32, over the concatenated streams) and the Markov and confidence heads.
//!
//! Sums in the order of [`tf_numerics::sum`]'s plain dot product, which depends on `columns` only. The accumulation is
//! float32; f32 weights and f32 inputs are used unrounded. Packed layout: `[weight rows, columns rounded up to 32]`.

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
pub(crate) use cpu::run_chosen;
pub use launch::{launch, measure_in_chunks};
pub use pack::{Dtype, Weights};

use tf_device::Buffer;

/// See the module's text.
pub struct Args<'a> {
    /// `[rows, columns]` f32; may hold more rows.
    pub x: &'a Buffer,
    pub rows: usize,
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
