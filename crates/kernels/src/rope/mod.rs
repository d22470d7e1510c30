//! `rope`: the rotary position encoding, as helpers of the families that turn rows (no launch of its own).
//!
//! Adjacent pairs `(a, b)` of the last `rope_dim` columns turn by `position * frequency`: `(a c - b s, a s + b c)`; backward
//! with `-s`. The phase is one float32 product; sine and cosine are the project's own, of that product. Every product and
//! sum is rounded to float32, none is fused, and the result is rounded to bf16. Frequencies come from
//! [`tf_numerics::rope`]; `[rope_dim / 2]` f32.

mod cpu;
pub mod reference;

pub(crate) use cpu::{Phases, Turn, turn};

/// Columns that turn, at most.
pub const ROPE_DIM_MAX: usize = 128;
