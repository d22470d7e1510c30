//! `hyper`: the hyper-connections, by which a sublayer reads the four parallel residual streams and writes them back.
//!
//! State of a row: `X [4, hidden]` (bf16 values), the carried `mix [4]`, and `post [4]`, `comb [4, 4]` of the sublayer that
//! is running. The shift: a sublayer's input is collapsed with the mix that the sublayer *before* made.
//!
//! [`launch_enter`], for each row, in this order:
//! 1. with `y`: `X = expand(y, X, post, comb)`
//! 2. `z = (function @ v) * (1 / sqrt(sum(v^2) / (4 hidden) + norm_eps))`, `v` the four streams concatenated
//! 3. `u = collapse(X, mix)`; `normed = RMSNorm(u; norm)`; `quantised = QDQ8(normed)`
//! 4. `mix[i] = sigmoid(z[i] * scale[0] + base[i]) + hc_eps`, `post[i] = 2 * sigmoid(z[4+i] * scale[1] + base[4+i])`,
//!    `comb = sinkhorn(z[8+4i+j] * scale[2] + base[8+4i+j])`
//!
//! [`launch_expand`] is step 1 alone, [`launch_collapse`] step 3 alone, [`launch_tap`] the mean of the streams.
//!
//! - `expand`: `X'[j] = bf16((((c0 X0 + c1 X1) + c2 X2) + c3 X3) + post[j] * y)`, `ci = comb[i][j]`: the first index of `comb`
//!   is the stream that is read. Every product and sum is rounded to float32, none is fused.
//! - `collapse`: `u = bf16(((m0 X0 + m1 X1) + m2 X2) + m3 X3)`, likewise.
//! - `sinkhorn`: row softmax (row maximum subtracted, sum `((e0+e1)+e2)+e3`), **then** `+ hc_eps`; divide by (column sum +
//!   `hc_eps`); then `iterations - 1` times: divide by (row sum + `hc_eps`), by (column sum + `hc_eps`). Sums in index order.
//! - `tap`: `bf16((((X0 + X1) + X2) + X3) * 0.25)`, with QDQ8 where asked for.
//!
//! Sums over columns: `function @ v` in [`crate::order::dot`] (one accumulator of 16 lanes an output); the sums of squares in
//! [`crate::order::sum_squares`]; on CUDA both in the orders of [`mirror`]. Mixes stay float32.

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod mirror;
pub mod reference;

pub use launch::{launch_collapse, launch_enter, launch_expand, launch_tap};

use tf_device::Buffer;

/// Parallel residual streams.
pub const STREAMS: usize = 4;
/// Values of `z`: `pre`, `post` and `comb`.
pub const MIXES: usize = 2 * STREAMS + STREAMS * STREAMS;
/// Of a row's scratch on backends that add every product up at once.
const SCRATCH_FLOATS: usize = 32;

/// Floats of [`EnterArgs::scratch`] a row.
pub const fn scratch_floats(hidden: usize) -> usize {
    let parts = mirror::sums_at(hidden) + mirror::chunks(hidden) * MIXES;
    if parts > SCRATCH_FLOATS { parts } else { SCRATCH_FLOATS }
}

/// The learned part of the mixes of one sublayer.
#[derive(Clone, Copy)]
pub struct MixWeights<'a> {
    /// `[24, 4 * hidden]` f32.
    pub function: &'a Buffer,
    /// `[24]` f32.
    pub base: &'a Buffer,
    /// `[3]` f32.
    pub scale: &'a Buffer,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// Normalisations of `comb`, the first one (softmax) included.
    pub iterations: u32,
    pub hc_eps: f32,
    pub norm_eps: f32,
}

/// See the module's text. Every row buffer may be larger than `rows` needs.
pub struct EnterArgs<'a> {
    /// `[rows, hidden]` f32: output of the sublayer before. `None` where `streams` already hold it.
    pub y: Option<&'a Buffer>,
    /// `[rows, 4, hidden]` f32, in place.
    pub streams: &'a mut Buffer,
    /// `[rows, 4]` f32, in place: read as the carried mix, written as the next one.
    pub mix: &'a mut Buffer,
    /// `[rows, 4]` f32, in place.
    pub post: &'a mut Buffer,
    /// `[rows, 4, 4]` f32, in place.
    pub comb: &'a mut Buffer,
    pub weights: MixWeights<'a>,
    /// `[hidden]` f32.
    pub norm: &'a Buffer,
    pub constants: Constants,
    pub rows: usize,
    /// A multiple of 32.
    pub hidden: usize,
    /// `[rows, hidden]` f32: the sublayer's input, bf16 values.
    pub normed: Option<&'a mut Buffer>,
    /// `[rows, hidden]` f32: the same after QDQ8.
    pub quantised: Option<&'a mut Buffer>,
    /// `[rows, scratch_floats(hidden)]` f32.
    pub scratch: &'a mut Buffer,
}

/// `streams = expand(y, streams, post, comb)`.
pub struct ExpandArgs<'a> {
    /// `[rows, hidden]` f32.
    pub y: &'a Buffer,
    /// `[rows, 4, hidden]` f32, in place.
    pub streams: &'a mut Buffer,
    /// `[rows, 4]` f32.
    pub post: &'a Buffer,
    /// `[rows, 4, 4]` f32.
    pub comb: &'a Buffer,
    pub rows: usize,
    pub hidden: usize,
}

/// The end of a stack: `collapsed = collapse(streams, mix)`, its norm, and the norm after QDQ8.
pub struct CollapseArgs<'a> {
    /// `[rows, 4, hidden]` f32.
    pub streams: &'a Buffer,
    /// `[rows, 4]` f32.
    pub mix: &'a Buffer,
    /// `[hidden]` f32.
    pub norm: &'a Buffer,
    pub norm_eps: f32,
    pub rows: usize,
    pub hidden: usize,
    /// `[rows, hidden]` f32 each.
    pub collapsed: Option<&'a mut Buffer>,
    pub normed: Option<&'a mut Buffer>,
    pub quantised: Option<&'a mut Buffer>,
}

/// `out[r][out_offset..out_offset + hidden] = tap(streams[r])`.
pub struct TapArgs<'a> {
    /// `[rows, 4, hidden]` f32.
    pub streams: &'a Buffer,
    pub rows: usize,
    pub hidden: usize,
    /// `[rows, out_columns]` f32, at least.
    pub out: &'a mut Buffer,
    pub out_columns: usize,
    pub out_offset: usize,
    /// QDQ8 after the rounding: the tap is the operand of an FP8 linear.
    pub quantise: bool,
}
