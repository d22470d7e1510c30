//! Logits of chosen rows: `out[i] = x[row_indices[i]] @ W^T`, float32 and unrounded.
//!
//! `x`: `[rows, columns]` f32, row-major (the final norm's output). `W`: `[vocabulary, columns]` bf16. `out`:
//! `[row_indices.len(), vocabulary]` f32. Most rows of a prompt need no logits, and the head is the largest dense weight, so
//! the rows are chosen here. Order and bits are those of [`crate::linear_bf16`] on the same row.

pub(crate) mod contract;
mod gpu;
mod launch;
pub mod reference;

pub use crate::linear_bf16::{Dtype, Weights};
pub use launch::launch;

use tf_device::Buffer;

/// See the module's text.
pub struct Args<'a> {
    pub weights: &'a Weights,
    /// `[rows, columns]` f32.
    pub x: &'a Buffer,
    /// The rows of `x` that get logits, in the order of the output; repeats are allowed.
    pub row_indices: &'a [u32],
    /// `[row_indices.len(), vocabulary]` f32; may hold more rows.
    pub out: &'a mut Buffer,
}
