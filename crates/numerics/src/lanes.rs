//! Sixteen float32 lanes: kernels are written once, generic over [`Lanes`], and run on every instruction set.
//!
//! A kernel is a value that implements [`Kernel`]; [`dispatch`] runs its body inside one `#[target_feature]` wrapper of
//! the chosen [`Level`]. Every body has 16 lanes, whatever the register width, and only operations with IEEE results,
//! so that all levels give equal bits (a NaN's payload and sign excepted). Mathematical functions take [`Float`], which
//! `f32` implements too: the scalar mirror and the vector body are the same source.
//!
//! Write `#[inline(always)]` on `run` and on every generic helper it calls, and avoid closures in hot loops: whatever is
//! not inlined into the wrapper loses the instruction set, and each operation becomes a call.
//!
//! The vector types are private on purpose: a body can only be reached through [`dispatch`], which checks the CPU.

use std::ops::{Add, Div, Mul, Neg, Sub};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

/// Lanes of every vector body.
pub const WIDTH: usize = 16;

/// One truth value a lane.
pub trait Mask: Copy {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn not(self) -> Self;
    /// Bit `l` is lane `l`.
    fn bits(self) -> u32;
    fn any(self) -> bool;
    fn all(self) -> bool;
}

/// 32-bit integer lanes, the companion of a [`Float`]. Arithmetic wraps.
pub trait Int: Copy {
    type Mask: Mask;
    fn splat(value: u32) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    /// Low 32 bits of the product.
    fn mul(self, other: Self) -> Self;
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
    fn not(self) -> Self;
    /// `count` < 32, the same in all lanes; a constant becomes an immediate.
    fn shl(self, count: u32) -> Self;
    /// Logical shift right, `count` < 32.
    fn shr(self, count: u32) -> Self;
    /// Arithmetic shift right, `count` < 32.
    fn sar(self, count: u32) -> Self;
    fn eq(self, other: Self) -> Self::Mask;
    fn lt_signed(self, other: Self) -> Self::Mask;
    fn lt_unsigned(self, other: Self) -> Self::Mask;
    fn max_unsigned(self, other: Self) -> Self;
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;
    /// Rotates left by `count` in 1..32.
    #[inline(always)]
    fn rotate_left(self, count: u32) -> Self {
        self.shl(count).or(self.shr(32 - count))
    }
}

/// One or more float32 lanes with IEEE arithmetic. Nothing is contracted: `a * b + c` rounds twice, [`Float::fma`] once.
pub trait Float:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + Neg<Output = Self>
{
    type Mask: Mask;
    type Int: Int<Mask = Self::Mask>;
    fn splat(value: f32) -> Self;
    /// `self * b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    fn sqrt(self) -> Self;
    fn abs(self) -> Self;
    /// `self < other ? self : other` in each lane; so `other` where either is NaN or both are zeros. (A compiler may treat a
    /// signalling NaN otherwise; arithmetic never makes one.)
    fn min(self, other: Self) -> Self;
    /// `self > other ? self : other` in each lane; so `other` where either is NaN or both are zeros.
    fn max(self, other: Self) -> Self;
    fn lt(self, other: Self) -> Self::Mask;
    fn le(self, other: Self) -> Self::Mask;
    fn gt(self, other: Self) -> Self::Mask;
    fn ge(self, other: Self) -> Self::Mask;
    fn eq(self, other: Self) -> Self::Mask;
    fn is_nan(self) -> Self::Mask;
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;
    fn to_bits(self) -> Self::Int;
    fn from_bits(bits: Self::Int) -> Self;
    /// Nearest integer as a float, ties to even.
    fn round_even(self) -> Self;
    /// Nearest integer, ties to even, as a signed integer. Only for magnitudes below 2^31.
    fn to_int(self) -> Self::Int;
    /// Towards zero, as a signed integer. Only for magnitudes below 2^31.
    fn to_int_trunc(self) -> Self::Int;
    /// From signed integers, rounded to nearest even.
    fn from_int(value: Self::Int) -> Self;
    /// The nearest bf16 value, ties to even. NaN stays NaN; what rounds beyond the largest bf16 becomes infinity.
    #[inline(always)]
    fn bf16_round(self) -> Self {
        let bits = self.to_bits();
        let odd = bits.shr(16).and(Self::Int::splat(1));
        let rounded = bits.add(Self::Int::splat(0x7fff)).add(odd).and(Self::Int::splat(0xffff_0000));
        // Rounding the bits of a NaN could carry into infinity or zero; `self` is a NaN already.
        let quiet = bits.or(Self::Int::splat(0x0040_0000)).and(Self::Int::splat(0xffff_0000));
        Self::from_bits(Self::Int::select(self.is_nan(), quiet, rounded))
    }
}

/// Sixteen float32 lanes, with memory access and reductions.
///
/// Slices must hold at least [`WIDTH`] elements (asserted) unless a method says otherwise; the `_ptr` forms are for inner
/// loops whose bounds were checked outside. No form needs alignment.
pub trait Lanes: Float {
    /// 0, 1, .. 15.
    fn iota() -> Self::Int;

    /// # Safety
    /// `from` must be readable for 16 floats.
    unsafe fn load_ptr(from: *const f32) -> Self;
    /// # Safety
    /// `to` must be writable for 16 floats.
    unsafe fn store_ptr(self, to: *mut f32);
    /// # Safety
    /// `from` must be readable for 16 integers.
    unsafe fn load_u32_ptr(from: *const u32) -> Self::Int;
    /// # Safety
    /// `to` must be writable for 16 integers.
    unsafe fn store_u32_ptr(value: Self::Int, to: *mut u32);
    /// Sixteen bytes, zero-extended.
    ///
    /// # Safety
    /// `from` must be readable for 16 bytes.
    unsafe fn load_u8_ptr(from: *const u8) -> Self::Int;
    /// The low byte of each lane.
    ///
    /// # Safety
    /// `to` must be writable for 16 bytes.
    unsafe fn store_u8_ptr(value: Self::Int, to: *mut u8);
    /// Sixteen bf16 values, widened.
    ///
    /// # Safety
    /// `from` must be readable for 16 values.
    unsafe fn load_bf16_ptr(from: *const u16) -> Self;
    /// Sixteen E4M3 codes, decoded; the two NaN codes give +-480. For weights, whose loader refuses NaN.
    ///
    /// # Safety
    /// `from` must be readable for 16 bytes.
    unsafe fn load_fp8_finite_ptr(from: *const u8) -> Self;

    /// Decodes E2M1 nibble `nibble` (0..8) of every dword. `dwords` is 64 bytes of weight layout B: dword lane `l`, nibble
    /// `n` is weight `16 n + l` of a group of 128.
    fn decode_fp4(dwords: Self::Int, nibble: u32) -> Self;

    /// The sum, by halves: lane `l` += lane `l + 8` for `l` < 8, then 4, 2, 1.
    fn fold(self) -> f32;
    /// The largest lane by [`Float::max`], by the same halves.
    fn fold_max(self) -> f32;
    /// The largest lane as an unsigned integer.
    fn fold_max_unsigned(value: Self::Int) -> u32;
    fn to_array(self) -> [f32; WIDTH];
    fn int_to_array(value: Self::Int) -> [u32; WIDTH];

    #[inline(always)]
    fn load_array(from: &[f32; WIDTH]) -> Self {
        // SAFETY: the array has 16 floats.
        unsafe { Self::load_ptr(from.as_ptr()) }
    }
    #[inline(always)]
    fn store_array(self, to: &mut [f32; WIDTH]) {
        // SAFETY: the array has 16 floats.
        unsafe { self.store_ptr(to.as_mut_ptr()) }
    }
    #[inline(always)]
    fn load(from: &[f32]) -> Self {
        assert!(from.len() >= WIDTH);
        // SAFETY: the length was asserted.
        unsafe { Self::load_ptr(from.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        assert!(to.len() >= WIDTH);
        // SAFETY: the length was asserted.
        unsafe { self.store_ptr(to.as_mut_ptr()) }
    }
    #[inline(always)]
    fn load_bf16(from: &[u16]) -> Self {
        assert!(from.len() >= WIDTH);
        // SAFETY: the length was asserted.
        unsafe { Self::load_bf16_ptr(from.as_ptr()) }
    }
    /// Sixteen E4M3 codes, decoded; 0x7f and 0xff give NaN.
    ///
    /// # Safety
    /// `from` must be readable for 16 bytes.
    #[inline(always)]
    unsafe fn load_fp8_ptr(from: *const u8) -> Self {
        // SAFETY: both read 16 bytes, which the caller vouches for.
        let (codes, values) = unsafe { (Self::load_u8_ptr(from), Self::load_fp8_finite_ptr(from)) };
        let nan = codes.and(Self::Int::splat(0x7f)).eq(Self::Int::splat(0x7f));
        Self::select(nan, Self::splat(f32::NAN), values)
    }
    /// Sixteen E4M3 codes, decoded; 0x7f and 0xff give NaN.
    #[inline(always)]
    fn load_fp8(from: &[u8]) -> Self {
        assert!(from.len() >= WIDTH);
        // SAFETY: the length was asserted.
        unsafe { Self::load_fp8_ptr(from.as_ptr()) }
    }
    #[inline(always)]
    fn load_u8(from: &[u8]) -> Self::Int {
        assert!(from.len() >= WIDTH);
        // SAFETY: the length was asserted.
        unsafe { Self::load_u8_ptr(from.as_ptr()) }
    }
    #[inline(always)]
    fn store_u8(value: Self::Int, to: &mut [u8]) {
        assert!(to.len() >= WIDTH);
        // SAFETY: the length was asserted.
        unsafe { Self::store_u8_ptr(value, to.as_mut_ptr()) }
    }
    #[inline(always)]
    fn load_u32(from: &[u32]) -> Self::Int {
        assert!(from.len() >= WIDTH);
        // SAFETY: the length was asserted.
        unsafe { Self::load_u32_ptr(from.as_ptr()) }
    }
    #[inline(always)]
    fn store_u32(value: Self::Int, to: &mut [u32]) {
        assert!(to.len() >= WIDTH);
        // SAFETY: the length was asserted.
        unsafe { Self::store_u32_ptr(value, to.as_mut_ptr()) }
    }
    /// Sixty-four bytes as sixteen little-endian dwords, for [`Lanes::decode_fp4`].
    #[inline(always)]
    fn load_dwords(from: &[u8; 64]) -> Self::Int {
        // SAFETY: the array has 64 bytes; the load needs no alignment.
        unsafe { Self::load_u32_ptr(from.as_ptr().cast()) }
    }
    /// Up to 16 floats; the other lanes are `fill`.
    #[inline(always)]
    fn load_partial(from: &[f32], fill: f32) -> Self {
        let mut lanes = [fill; WIDTH];
        let count = from.len().min(WIDTH);
        lanes[..count].copy_from_slice(&from[..count]);
        Self::load_array(&lanes)
    }
    /// Stores the first lanes of `self`, as many as `to` holds (up to 16).
    #[inline(always)]
    fn store_partial(self, to: &mut [f32]) {
        let count = to.len().min(WIDTH);
        to[..count].copy_from_slice(&self.to_array()[..count]);
    }
}

/// An instruction set with a body of [`Lanes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// Plain Rust on any CPU; it defines the bits.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// 64-bit Arm.
    Neon,
}

impl Level {
    pub const ALL: [Level; 4] = [Level::Scalar, Level::Avx2, Level::Avx512, Level::Neon];

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        match self {
            Level::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
            }
            #[cfg(target_arch = "aarch64")]
            Level::Neon => true,
            #[cfg(not(target_arch = "x86_64"))]
            Level::Avx2 | Level::Avx512 => false,
            #[cfg(not(target_arch = "aarch64"))]
            Level::Neon => false,
        }
    }

    /// Every level of this CPU, [`Level::Scalar`] first, the quickest last.
    pub fn available() -> Vec<Level> {
        Level::ALL.into_iter().filter(|level| level.is_available()).collect()
    }

    /// The quickest level of this CPU.
    pub fn best() -> Level {
        Level::ALL.into_iter().rev().find(|level| level.is_available()).unwrap_or(Level::Scalar)
    }

    /// Reads `scalar`, `avx2`, `avx512` or `neon`.
    pub fn parse(name: &str) -> Option<Level> {
        Level::ALL.into_iter().find(|level| level.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Neon => "neon",
        }
    }
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A computation written once for all levels.
pub trait Kernel {
    type Output;
    /// Needs `#[inline(always)]` in the implementation, see the module's text.
    fn run<L: Lanes>(self) -> Self::Output;
}

/// Runs `kernel` with the lanes of `level`.
///
/// # Panics
/// When this CPU lacks `level`; choose it by [`Level::is_available`].
#[inline]
pub fn dispatch<K: Kernel>(level: Level, kernel: K) -> K::Output {
    assert!(level.is_available(), "this CPU has no {level}");
    match level {
        Level::Scalar => scalar::run(kernel),
        // SAFETY: the assertion above found the CPU's features.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2::run(kernel) },
        // SAFETY: the assertion above found the CPU's features.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { avx512::run(kernel) },
        // SAFETY: NEON is part of every aarch64 CPU.
        #[cfg(target_arch = "aarch64")]
        Level::Neon => unsafe { neon::run(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        Level::Avx2 | Level::Avx512 => unreachable!("asserted above"),
        #[cfg(not(target_arch = "aarch64"))]
        Level::Neon => unreachable!("asserted above"),
    }
}

/// Implements the arithmetic operators of a vector type. Expressions, not closures: a closure is a function of its own,
/// compiled without the instruction set.
macro_rules! operators {
    ($type:ty, |$a:ident, $b:ident| $add:expr, $sub:expr, $mul:expr, $div:expr, $neg:expr) => {
        operators!(@one $type, Add, add, $a, $b, $add);
        operators!(@one $type, Sub, sub, $a, $b, $sub);
        operators!(@one $type, Mul, mul, $a, $b, $mul);
        operators!(@one $type, Div, div, $a, $b, $div);
        impl std::ops::Neg for $type {
            type Output = Self;
            #[inline(always)]
            fn neg(self) -> Self {
                let $a = self;
                $neg
            }
        }
    };
    (@one $type:ty, $trait:ident, $method:ident, $a:ident, $b:ident, $value:expr) => {
        impl std::ops::$trait for $type {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                let ($a, $b) = (self, other);
                $value
            }
        }
    };
}
use operators;
