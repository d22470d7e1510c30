//! One lane (`f32` itself) and sixteen lanes of plain Rust. These define the bits of every other level.

use super::{Float, Int, Kernel, Lanes, Mask, WIDTH, operators};

/// The values of the E2M1 codes.
pub(super) const FP4: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

impl Mask for bool {
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        self & other
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        self | other
    }
    #[inline(always)]
    fn not(self) -> Self {
        !self
    }
    #[inline(always)]
    fn bits(self) -> u32 {
        self as u32
    }
    #[inline(always)]
    fn any(self) -> bool {
        self
    }
    #[inline(always)]
    fn all(self) -> bool {
        self
    }
}

impl Int for u32 {
    type Mask = bool;
    #[inline(always)]
    fn splat(value: u32) -> Self {
        value
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.wrapping_sub(other)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.wrapping_mul(other)
    }
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        self & other
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        self | other
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        self ^ other
    }
    #[inline(always)]
    fn not(self) -> Self {
        !self
    }
    #[inline(always)]
    fn shl(self, count: u32) -> Self {
        self << count
    }
    #[inline(always)]
    fn shr(self, count: u32) -> Self {
        self >> count
    }
    #[inline(always)]
    fn sar(self, count: u32) -> Self {
        (self as i32 >> count) as u32
    }
    #[inline(always)]
    fn eq(self, other: Self) -> bool {
        self == other
    }
    #[inline(always)]
    fn lt_signed(self, other: Self) -> bool {
        (self as i32) < other as i32
    }
    #[inline(always)]
    fn lt_unsigned(self, other: Self) -> bool {
        self < other
    }
    #[inline(always)]
    fn max_unsigned(self, other: Self) -> Self {
        self.max(other)
    }
    #[inline(always)]
    fn select(mask: bool, yes: Self, no: Self) -> Self {
        if mask { yes } else { no }
    }
}

impl Float for f32 {
    type Mask = bool;
    type Int = u32;
    #[inline(always)]
    fn splat(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        // Rounded once on every target, by an instruction or by the library's correct fallback.
        self.mul_add(b, c)
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        f32::abs(self)
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        if self < other { self } else { other }
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        if self > other { self } else { other }
    }
    #[inline(always)]
    fn lt(self, other: Self) -> bool {
        self < other
    }
    #[inline(always)]
    fn le(self, other: Self) -> bool {
        self <= other
    }
    #[inline(always)]
    fn gt(self, other: Self) -> bool {
        self > other
    }
    #[inline(always)]
    fn ge(self, other: Self) -> bool {
        self >= other
    }
    #[inline(always)]
    fn eq(self, other: Self) -> bool {
        self == other
    }
    #[inline(always)]
    fn is_nan(self) -> bool {
        f32::is_nan(self)
    }
    #[inline(always)]
    fn select(mask: bool, yes: Self, no: Self) -> Self {
        if mask { yes } else { no }
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        f32::to_bits(self)
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        self.round_ties_even()
    }
    #[inline(always)]
    fn to_int(self) -> u32 {
        self.round_ties_even() as i32 as u32
    }
    #[inline(always)]
    fn to_int_trunc(self) -> u32 {
        self as i32 as u32
    }
    #[inline(always)]
    fn from_int(value: u32) -> Self {
        value as i32 as f32
    }
}

#[derive(Clone, Copy)]
pub(super) struct F32x16([f32; WIDTH]);
#[derive(Clone, Copy)]
pub(super) struct U32x16([u32; WIDTH]);
#[derive(Clone, Copy)]
pub(super) struct M16(u32);

/// Applies a one-lane function to all lanes.
macro_rules! each {
    ($type:ident, $f:expr, $a:expr) => {{
        let a = $a.0;
        let mut out = [Default::default(); WIDTH];
        for l in 0..WIDTH {
            out[l] = $f(a[l]);
        }
        $type(out)
    }};
    ($type:ident, $f:expr, $a:expr, $b:expr) => {{
        let (a, b) = ($a.0, $b.0);
        let mut out = [Default::default(); WIDTH];
        for l in 0..WIDTH {
            out[l] = $f(a[l], b[l]);
        }
        $type(out)
    }};
}
/// Compares all lanes.
macro_rules! compare {
    ($f:expr, $a:expr, $b:expr) => {{
        let (a, b) = ($a.0, $b.0);
        let mut bits = 0;
        for l in 0..WIDTH {
            bits |= ($f(a[l], b[l]) as u32) << l;
        }
        M16(bits)
    }};
}

impl Mask for M16 {
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        M16(self.0 & other.0)
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        M16(self.0 | other.0)
    }
    #[inline(always)]
    fn not(self) -> Self {
        M16(self.0 ^ 0xffff)
    }
    #[inline(always)]
    fn bits(self) -> u32 {
        self.0
    }
    #[inline(always)]
    fn any(self) -> bool {
        self.0 != 0
    }
    #[inline(always)]
    fn all(self) -> bool {
        self.0 == 0xffff
    }
}

impl Int for U32x16 {
    type Mask = M16;
    #[inline(always)]
    fn splat(value: u32) -> Self {
        U32x16([value; WIDTH])
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        each!(U32x16, <u32 as Int>::add, self, other)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        each!(U32x16, <u32 as Int>::sub, self, other)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        each!(U32x16, <u32 as Int>::mul, self, other)
    }
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        each!(U32x16, <u32 as Int>::and, self, other)
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        each!(U32x16, <u32 as Int>::or, self, other)
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        each!(U32x16, <u32 as Int>::xor, self, other)
    }
    #[inline(always)]
    fn not(self) -> Self {
        each!(U32x16, <u32 as Int>::not, self)
    }
    #[inline(always)]
    fn shl(self, count: u32) -> Self {
        each!(U32x16, <u32 as Int>::shl, self, U32x16([count; WIDTH]))
    }
    #[inline(always)]
    fn shr(self, count: u32) -> Self {
        each!(U32x16, <u32 as Int>::shr, self, U32x16([count; WIDTH]))
    }
    #[inline(always)]
    fn sar(self, count: u32) -> Self {
        each!(U32x16, <u32 as Int>::sar, self, U32x16([count; WIDTH]))
    }
    #[inline(always)]
    fn eq(self, other: Self) -> M16 {
        compare!(<u32 as Int>::eq, self, other)
    }
    #[inline(always)]
    fn lt_signed(self, other: Self) -> M16 {
        compare!(<u32 as Int>::lt_signed, self, other)
    }
    #[inline(always)]
    fn lt_unsigned(self, other: Self) -> M16 {
        compare!(<u32 as Int>::lt_unsigned, self, other)
    }
    #[inline(always)]
    fn max_unsigned(self, other: Self) -> Self {
        each!(U32x16, <u32 as Int>::max_unsigned, self, other)
    }
    #[inline(always)]
    fn select(mask: M16, yes: Self, no: Self) -> Self {
        let mut out = no.0;
        for l in 0..WIDTH {
            if mask.0 >> l & 1 == 1 {
                out[l] = yes.0[l];
            }
        }
        U32x16(out)
    }
}

operators!(
    F32x16,
    |a, b| each!(F32x16, std::ops::Add::add, a, b),
    each!(F32x16, std::ops::Sub::sub, a, b),
    each!(F32x16, std::ops::Mul::mul, a, b),
    each!(F32x16, std::ops::Div::div, a, b),
    each!(F32x16, std::ops::Neg::neg, a)
);

impl Float for F32x16 {
    type Mask = M16;
    type Int = U32x16;
    #[inline(always)]
    fn splat(value: f32) -> Self {
        F32x16([value; WIDTH])
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        let mut out = c.0;
        for l in 0..WIDTH {
            out[l] = Float::fma(self.0[l], b.0[l], out[l]);
        }
        F32x16(out)
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        each!(F32x16, <f32 as Float>::sqrt, self)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        each!(F32x16, <f32 as Float>::abs, self)
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        each!(F32x16, <f32 as Float>::min, self, other)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        each!(F32x16, <f32 as Float>::max, self, other)
    }
    #[inline(always)]
    fn lt(self, other: Self) -> M16 {
        compare!(<f32 as Float>::lt, self, other)
    }
    #[inline(always)]
    fn le(self, other: Self) -> M16 {
        compare!(<f32 as Float>::le, self, other)
    }
    #[inline(always)]
    fn gt(self, other: Self) -> M16 {
        compare!(<f32 as Float>::gt, self, other)
    }
    #[inline(always)]
    fn ge(self, other: Self) -> M16 {
        compare!(<f32 as Float>::ge, self, other)
    }
    #[inline(always)]
    fn eq(self, other: Self) -> M16 {
        compare!(<f32 as Float>::eq, self, other)
    }
    #[inline(always)]
    fn is_nan(self) -> M16 {
        compare!(|a: f32, _| f32::is_nan(a), self, self)
    }
    #[inline(always)]
    fn select(mask: M16, yes: Self, no: Self) -> Self {
        let mut out = no.0;
        for l in 0..WIDTH {
            if mask.0 >> l & 1 == 1 {
                out[l] = yes.0[l];
            }
        }
        F32x16(out)
    }
    #[inline(always)]
    fn to_bits(self) -> U32x16 {
        each!(U32x16, f32::to_bits, self)
    }
    #[inline(always)]
    fn from_bits(bits: U32x16) -> Self {
        each!(F32x16, f32::from_bits, bits)
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        each!(F32x16, <f32 as Float>::round_even, self)
    }
    #[inline(always)]
    fn to_int(self) -> U32x16 {
        each!(U32x16, <f32 as Float>::to_int, self)
    }
    #[inline(always)]
    fn to_int_trunc(self) -> U32x16 {
        each!(U32x16, <f32 as Float>::to_int_trunc, self)
    }
    #[inline(always)]
    fn from_int(value: U32x16) -> Self {
        each!(F32x16, <f32 as Float>::from_int, value)
    }
}

impl Lanes for F32x16 {
    #[inline(always)]
    fn iota() -> U32x16 {
        U32x16([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15])
    }
    #[inline(always)]
    unsafe fn load_ptr(from: *const f32) -> Self {
        // SAFETY: the caller vouches for 16 floats; an unaligned read of plain data.
        F32x16(unsafe { from.cast::<[f32; WIDTH]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32) {
        // SAFETY: the caller vouches for 16 floats.
        unsafe { to.cast::<[f32; WIDTH]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_u32_ptr(from: *const u32) -> U32x16 {
        // SAFETY: the caller vouches for 16 integers. Bytes in memory are little-endian on every target.
        U32x16(unsafe { from.cast::<[u32; WIDTH]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store_u32_ptr(value: U32x16, to: *mut u32) {
        // SAFETY: the caller vouches for 16 integers.
        unsafe { to.cast::<[u32; WIDTH]>().write_unaligned(value.0) }
    }
    #[inline(always)]
    unsafe fn load_u8_ptr(from: *const u8) -> U32x16 {
        // SAFETY: the caller vouches for 16 bytes.
        let bytes = unsafe { from.cast::<[u8; WIDTH]>().read_unaligned() };
        U32x16(bytes.map(u32::from))
    }
    #[inline(always)]
    unsafe fn store_u8_ptr(value: U32x16, to: *mut u8) {
        // SAFETY: the caller vouches for 16 bytes.
        unsafe { to.cast::<[u8; WIDTH]>().write_unaligned(value.0.map(|v| v as u8)) }
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 16 values.
        let values = unsafe { from.cast::<[u16; WIDTH]>().read_unaligned() };
        F32x16(values.map(|v| f32::from_bits((v as u32) << 16)))
    }
    #[inline(always)]
    unsafe fn load_fp8_finite_ptr(from: *const u8) -> Self {
        // SAFETY: the caller vouches for 16 bytes.
        let codes = unsafe { from.cast::<[u8; WIDTH]>().read_unaligned() };
        // The code's exponent and mantissa fields, placed in a float32, are the value times 2^-120, subnormals included.
        const SCALE: f32 = f32::from_bits((120 + 127) << 23);
        F32x16(codes.map(|c| f32::from_bits((c as u32 & 0x80) << 24 | (c as u32 & 0x7f) << 20) * SCALE))
    }
    #[inline(always)]
    fn decode_fp4(dwords: U32x16, nibble: u32) -> Self {
        each!(F32x16, |q: u32| FP4[(q >> (4 * nibble) & 15) as usize], dwords)
    }
    #[inline(always)]
    fn fold(self) -> f32 {
        let mut t = self.0;
        let mut half = WIDTH / 2;
        while half > 0 {
            for l in 0..half {
                t[l] += t[l + half];
            }
            half /= 2;
        }
        t[0]
    }
    #[inline(always)]
    fn fold_max(self) -> f32 {
        let mut t = self.0;
        let mut half = WIDTH / 2;
        while half > 0 {
            for l in 0..half {
                t[l] = Float::max(t[l], t[l + half]);
            }
            half /= 2;
        }
        t[0]
    }
    #[inline(always)]
    fn fold_max_unsigned(value: U32x16) -> u32 {
        value.0.into_iter().fold(0, u32::max)
    }
    #[inline(always)]
    fn to_array(self) -> [f32; WIDTH] {
        self.0
    }
    #[inline(always)]
    fn int_to_array(value: U32x16) -> [u32; WIDTH] {
        value.0
    }
}

const _: () = assert!(cfg!(target_endian = "little"), "dword loads of packed weights assume little-endian bytes");

/// Runs a kernel without any instruction set.
#[inline]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<F32x16>()
}
