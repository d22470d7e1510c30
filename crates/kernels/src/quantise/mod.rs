//! QDQ8: rounds each block of 32 values to E4M3 times a power of two and back, the operand of every FP8 and FP4 linear.
//!
//! `x`, `out`: `[rows, columns]` f32 holding bf16 values, row-major; blocks of 32 lie along the columns, the last may be
//! shorter. Per block (spec section 10): `a = max(max |x|, 1e-4)`, `s = 2^ceil(log2(a * f32(1/448)))`, then
//! `E4M3(clamp(x / s, -448, 448)) * s`, round to nearest even; the result is a bf16 value.
//! A fused form is [`crate::linear_fp8::Finish::Qdq8`].

pub(crate) mod contract;
mod cpu;
pub(crate) mod gpu;
mod launch;
pub mod reference;
#[cfg(test)]
mod tests;

pub use launch::{launch, launch_in_place};

use tf_device::Buffer;

/// Values a block.
pub const BLOCK: usize = tf_numerics::qdq::BLOCK;

/// See the module's text.
pub struct Args<'a> {
    /// `[rows, columns]` f32; may hold more rows.
    pub x: &'a Buffer,
    /// As `x`.
    pub out: &'a mut Buffer,
    pub rows: usize,
    pub columns: usize,
}

/// As [`Args`], over one buffer.
pub struct ArgsInPlace<'a> {
    /// `[rows, columns]` f32; may hold more rows.
    pub values: &'a mut Buffer,
    pub rows: usize,
    pub columns: usize,
}
