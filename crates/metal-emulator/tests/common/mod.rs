//! Building and launching for the tests of this crate.
#![allow(dead_code)]

mod ready;

pub use ready::ready;

use std::path::Path;
use tf_metal_emulator::{Argument, BuildError, Launch, Program, RunError};

/// Builds a source with the shared texts that kernels include.
pub fn try_build(name: &str, source: &str) -> Result<Program, BuildError> {
    let prelude = include_str!("../../../kernels/src/shared/prelude.metal");
    let linear = include_str!("../../../kernels/src/shared/linear.metal");
    Program::build(
        name,
        source,
        &[("prelude.metal", prelude), ("linear.metal", linear)],
        Path::new(env!("CARGO_TARGET_TMPDIR")),
    )
}

/// As [`try_build`], for a source that must build.
pub fn build(name: &str, source: &str) -> Program {
    try_build(name, source).unwrap_or_else(|error| panic!("{error}"))
}

/// A launch of `grid` threadgroups of `threads` threads.
pub fn launch<'a>(kernel: &'a str, arguments: Vec<Argument<'a>>, grid: u32, threads: u32) -> Launch<'a> {
    Launch {
        kernel,
        arguments,
        grid: [grid, 1, 1],
        threads: [threads, 1, 1],
        threadgroup: Vec::new(),
        constants: Vec::new(),
    }
}

/// `source` with `from` replaced; it must occur exactly once, so that an edit can't miss.
pub fn edited(source: &str, from: &str, to: &str) -> String {
    assert_eq!(source.matches(from).count(), 1, "{from:?} must occur exactly once");
    source.replace(from, to)
}

/// The bytes of numbers, and numbers of bytes.
pub fn bytes<T: Plain>(values: &[T]) -> &[u8] {
    T::bytes(values)
}

/// Numbers that may be seen as bytes.
pub trait Plain: Copy {
    fn bytes(values: &[Self]) -> &[u8];
}

macro_rules! plain {
    ($($kind:ty),*) => { $(
        impl Plain for $kind {
            fn bytes(values: &[Self]) -> &[u8] {
                // SAFETY: a number has no padding, every byte of it may be read, and bytes need no alignment.
                unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
            }
        }
    )* };
}
plain!(u8, u16, u32, f32);

/// A read-only buffer of numbers.
pub fn read<T: Plain>(values: &[T]) -> Argument<'_> {
    Argument::Read(T::bytes(values))
}

/// The float32 values of bytes.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| f32::from_ne_bytes(word)).collect()
}

/// The words of bytes.
pub fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_ne_bytes(word)).collect()
}

/// The text of a launch's error.
pub fn defect(result: Result<tf_metal_emulator::Report, RunError>) -> String {
    match result {
        Ok(_) => "no error".into(),
        Err(error) => error.to_string(),
    }
}

/// Numbers that a wrong kernel can't hide behind: no zeros, no symmetry, magnitudes spread.
pub struct Values(u64);

impl Values {
    /// A generator of the numbers that `seed` names.
    pub fn new(seed: u64) -> Values {
        Values(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    /// 31 bits.
    pub fn word(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
    /// In `0..bound`.
    pub fn below(&mut self, bound: u32) -> u32 {
        self.word() % bound
    }
    /// In `-scale..scale`.
    pub fn f32(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| ((self.word() >> 7) as f32 / 8_388_608.0 - 1.0 + 1e-4) * scale).collect()
    }
    /// As `f32`, rounded to bf16.
    pub fn bf16(&mut self, count: usize, scale: f32) -> Vec<f32> {
        self.f32(count, scale).into_iter().map(tf_numerics::bf16::round).collect()
    }
}
