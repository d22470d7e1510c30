//! `rms_norm`: each row divided by its root mean square, times a weight.
//!
//! `normed[r][c] = bf16(weight[c] * (x[r][c] * f))`, `f = 1 / sqrt(sum_c(x[r][c]^2) / columns + eps)`;
//! `quantised[r] = QDQ8(normed[r])`. Either output may be left out.
//!
//! Shapes and types: see [`Args`]. Rounding: one bf16 rounding at the store, then QDQ8 where it is asked for. `eps` enters
//! in float32, so 1e-20 keeps an all-zero row zero. Sum: [`crate::order::sum_squares`] (four accumulators of 16 lanes).

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;

pub(crate) use cpu::{inverse_rms, normalise};
pub use launch::launch;

use tf_device::Buffer;

pub struct Args<'a> {
    /// `[rows, columns]` f32.
    pub x: &'a Buffer,
    /// `[columns]` f32.
    pub weight: &'a Buffer,
    pub rows: usize,
    /// A multiple of 16; of 32 with `quantised`.
    pub columns: usize,
    pub eps: f32,
    /// As `x`, at least: bf16 values.
    pub normed: Option<&'a mut Buffer>,
    /// As `x`, at least: the rows after QDQ8.
    pub quantised: Option<&'a mut Buffer>,
}
