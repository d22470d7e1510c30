//! `engram`: reads the n-gram memory's rows and adds them to the residual streams.
//!
//! [`launch_gather`]: `out[r][c] = dequantise(table[ids[r][c]])`, the rows of all columns side by side, exact in bf16; with
//! `quantise` then QDQ8, the operand of an FP8 linear. Table row: `head_dim` E4M3 codes, and `head_dim / 32` E8M0 scales in a
//! second array. Bytes come from wherever the caller keeps them; where does not change a bit.
//!
//! [`launch_gate`], per row and stream `i`, with `key_i` and `V` from `kv`:
//! ```text
//! d  = sum((X_i * q_i) * (k_i * key_i)) * (1 / sqrt(mean(X_i^2) + eps)) * (1 / sqrt(mean(key_i^2) + eps)) / sqrt(hidden)
//! g  = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d))          0 for rows of an image
//! X_i' = bf16(X_i + g * V)                                   product and sum rounded to float32
//! ```
//! The factors multiply `d` in the order written. Sums: [`crate::order::sum_products`] and [`crate::order::sum_squares`].

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;

pub use launch::{launch_gate, launch_gather};

use tf_device::{Buffer, LaunchError};

pub struct GatherArgs<'a> {
    /// `[table_rows, head_dim]` E4M3 codes.
    pub codes: &'a [u8],
    /// `[table_rows, head_dim / 32]` E8M0.
    pub scales: &'a [u8],
    /// `[rows, columns]`: table rows.
    pub ids: &'a [u32],
    pub columns: usize,
    /// A multiple of 32.
    pub head_dim: usize,
    pub quantise: bool,
    /// `[rows, columns * head_dim]` f32, at least.
    pub out: &'a mut Buffer,
}

pub struct GateArgs<'a> {
    /// `[rows, 4, hidden]` f32, in place.
    pub streams: &'a mut Buffer,
    /// `[rows, 5, hidden]` f32: a key for each stream, then the value; bf16 values.
    pub kv: &'a Buffer,
    /// `[4, hidden]` f32 each.
    pub q_weight: &'a Buffer,
    pub k_weight: &'a Buffer,
    pub eps: f32,
    /// `[rows]`, or empty: no row belongs to an image.
    pub image: &'a [bool],
    pub rows: usize,
    pub hidden: usize,
}

/// Why a gather gave nothing that may be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngramError {
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("row {row} of the n-gram table holds a NaN {what} at byte {byte}: the file is damaged, fetch it again")]
    NotANumber { what: &'static str, row: u32, byte: usize },
}
