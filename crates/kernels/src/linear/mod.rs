//! What the linear families share: how a result is finished, and the tiles that keep one order for every output.

pub(crate) mod contract;
pub(crate) mod cpu;
pub mod cuda;
mod flow;
pub(crate) mod gpu;
mod split;

/// What happens to a finished float32 sum before it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// Stored as it is.
    F32,
    /// Rounded to bf16, nearest even.
    Bf16,
    /// Rounded to bf16, then QDQ8 over blocks of 32 outputs: the input of the next FP8 linear.
    Qdq8,
}

/// The value of an E8M0 code other than 255: `2^(code - 127)`. Code 0 is a subnormal, which a plain shift would lose.
pub(crate) const fn scale_value(code: u8) -> f32 {
    f32::from_bits(if code == 0 { 0x0040_0000 } else { (code as u32) << 23 })
}
