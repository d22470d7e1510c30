//! `embed`: starts the residual streams of each row from the table's row of its token.
//!
//! `out[r][i] = table[ids[r]]` for every stream `i`; where a mix is given, `mix[r] = (1, 0, ..., 0)`. Also looks up rows of
//! other bf16 tables, with one stream.
//!
//! Shapes and types: see [`Args`]. Rounding: none, bf16 widens exactly. No sums.

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;

pub use launch::launch;

use tf_device::Buffer;

pub struct Args<'a> {
    /// `[rows]`.
    pub ids: &'a [u32],
    /// `[vocabulary, columns]` bf16.
    pub table: &'a Buffer,
    pub columns: usize,
    /// Copies of the row in `out`.
    pub streams: usize,
    /// `[rows, streams, columns]` f32, at least.
    pub out: &'a mut Buffer,
    /// `[rows, streams]` f32, at least: the carried mix of the first sublayer.
    pub mix: Option<&'a mut Buffer>,
}
