//! Four 128-bit registers a vector: lanes 0 to 3, 4 to 7, 8 to 11, 12 to 15.

use std::arch::aarch64::*;

use super::{Float, Int, Kernel, Lanes, Mask, WIDTH, operators};

/// Runs a kernel with the instruction set switched on.
///
/// # Safety
/// The CPU must have NEON, which every aarch64 CPU has.
#[target_feature(enable = "neon")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<F32x16>()
}

#[derive(Clone, Copy)]
pub(super) struct F32x16(float32x4_t, float32x4_t, float32x4_t, float32x4_t);
#[derive(Clone, Copy)]
pub(super) struct U32x16(uint32x4_t, uint32x4_t, uint32x4_t, uint32x4_t);
/// All bits of a lane are set or clear.
#[derive(Clone, Copy)]
pub(super) struct M16(uint32x4_t, uint32x4_t, uint32x4_t, uint32x4_t);

/// Calls an instruction of the level.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: every aarch64 CPU has NEON.
        unsafe { $e }
    };
}
/// Applies an instruction to all quarters.
macro_rules! each {
    ($type:ident, $f:expr, $a:expr) => {{
        let a = $a;
        op!($type($f(a.0), $f(a.1), $f(a.2), $f(a.3)))
    }};
    ($type:ident, $f:expr, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        op!($type($f(a.0, b.0), $f(a.1, b.1), $f(a.2, b.2), $f(a.3, b.3)))
    }};
    ($type:ident, $f:expr, $a:expr, $b:expr, $c:expr) => {{
        let (a, b, c) = ($a, $b, $c);
        op!($type($f(a.0, b.0, c.0), $f(a.1, b.1, c.1), $f(a.2, b.2, c.2), $f(a.3, b.3, c.3)))
    }};
}

/// A shift count for each quarter, negative to the right.
struct Count(int32x4_t, int32x4_t, int32x4_t, int32x4_t);

impl Count {
    #[inline(always)]
    fn splat(count: i32) -> Self {
        let c = op!(vdupq_n_s32(count));
        Count(c, c, c, c)
    }
}

impl Mask for M16 {
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        each!(M16, vandq_u32, self, other)
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        each!(M16, vorrq_u32, self, other)
    }
    #[inline(always)]
    fn not(self) -> Self {
        each!(M16, vmvnq_u32, self)
    }
    #[inline(always)]
    fn bits(self) -> u32 {
        const PLACE: [u32; 4] = [1, 2, 4, 8];
        op!({
            let place = vld1q_u32(PLACE.as_ptr());
            vaddvq_u32(vandq_u32(self.0, place))
                | vaddvq_u32(vandq_u32(self.1, place)) << 4
                | vaddvq_u32(vandq_u32(self.2, place)) << 8
                | vaddvq_u32(vandq_u32(self.3, place)) << 12
        })
    }
    #[inline(always)]
    fn any(self) -> bool {
        op!(vmaxvq_u32(vorrq_u32(vorrq_u32(self.0, self.1), vorrq_u32(self.2, self.3))) != 0)
    }
    #[inline(always)]
    fn all(self) -> bool {
        op!(vminvq_u32(vandq_u32(vandq_u32(self.0, self.1), vandq_u32(self.2, self.3))) != 0)
    }
}

impl Int for U32x16 {
    type Mask = M16;
    #[inline(always)]
    fn splat(value: u32) -> Self {
        let v = op!(vdupq_n_u32(value));
        U32x16(v, v, v, v)
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        each!(U32x16, vaddq_u32, self, other)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        each!(U32x16, vsubq_u32, self, other)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        each!(U32x16, vmulq_u32, self, other)
    }
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        each!(U32x16, vandq_u32, self, other)
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        each!(U32x16, vorrq_u32, self, other)
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        each!(U32x16, veorq_u32, self, other)
    }
    #[inline(always)]
    fn not(self) -> Self {
        each!(U32x16, vmvnq_u32, self)
    }
    #[inline(always)]
    fn shl(self, count: u32) -> Self {
        each!(U32x16, vshlq_u32, self, Count::splat(count as i32))
    }
    #[inline(always)]
    fn shr(self, count: u32) -> Self {
        each!(U32x16, vshlq_u32, self, Count::splat(-(count as i32)))
    }
    #[inline(always)]
    fn sar(self, count: u32) -> Self {
        let c = Count::splat(-(count as i32));
        op!(U32x16(
            vreinterpretq_u32_s32(vshlq_s32(vreinterpretq_s32_u32(self.0), c.0)),
            vreinterpretq_u32_s32(vshlq_s32(vreinterpretq_s32_u32(self.1), c.1)),
            vreinterpretq_u32_s32(vshlq_s32(vreinterpretq_s32_u32(self.2), c.2)),
            vreinterpretq_u32_s32(vshlq_s32(vreinterpretq_s32_u32(self.3), c.3))
        ))
    }
    #[inline(always)]
    fn eq(self, other: Self) -> M16 {
        each!(M16, vceqq_u32, self, other)
    }
    #[inline(always)]
    fn lt_signed(self, other: Self) -> M16 {
        let sign = Self::splat(0x8000_0000);
        self.xor(sign).lt_unsigned(other.xor(sign))
    }
    #[inline(always)]
    fn lt_unsigned(self, other: Self) -> M16 {
        each!(M16, vcltq_u32, self, other)
    }
    #[inline(always)]
    fn max_unsigned(self, other: Self) -> Self {
        each!(U32x16, vmaxq_u32, self, other)
    }
    #[inline(always)]
    fn select(mask: M16, yes: Self, no: Self) -> Self {
        each!(U32x16, vbslq_u32, mask, yes, no)
    }
}

operators!(
    F32x16,
    |a, b| each!(F32x16, vaddq_f32, a, b),
    each!(F32x16, vsubq_f32, a, b),
    each!(F32x16, vmulq_f32, a, b),
    each!(F32x16, vdivq_f32, a, b),
    each!(F32x16, vnegq_f32, a)
);

impl Float for F32x16 {
    type Mask = M16;
    type Int = U32x16;
    #[inline(always)]
    fn splat(value: f32) -> Self {
        let v = op!(vdupq_n_f32(value));
        F32x16(v, v, v, v)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        // The instruction's first operand is the addend.
        each!(F32x16, vfmaq_f32, c, self, b)
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        each!(F32x16, vsqrtq_f32, self)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        each!(F32x16, vabsq_f32, self)
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // The instructions for minimum and maximum treat NaN and signed zeros in another way.
        Self::select(self.lt(other), self, other)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self::select(self.gt(other), self, other)
    }
    #[inline(always)]
    fn lt(self, other: Self) -> M16 {
        each!(M16, vcltq_f32, self, other)
    }
    #[inline(always)]
    fn le(self, other: Self) -> M16 {
        each!(M16, vcleq_f32, self, other)
    }
    #[inline(always)]
    fn gt(self, other: Self) -> M16 {
        each!(M16, vcgtq_f32, self, other)
    }
    #[inline(always)]
    fn ge(self, other: Self) -> M16 {
        each!(M16, vcgeq_f32, self, other)
    }
    #[inline(always)]
    fn eq(self, other: Self) -> M16 {
        each!(M16, vceqq_f32, self, other)
    }
    #[inline(always)]
    fn is_nan(self) -> M16 {
        Float::eq(self, self).not()
    }
    #[inline(always)]
    fn select(mask: M16, yes: Self, no: Self) -> Self {
        each!(F32x16, vbslq_f32, mask, yes, no)
    }
    #[inline(always)]
    fn to_bits(self) -> U32x16 {
        each!(U32x16, vreinterpretq_u32_f32, self)
    }
    #[inline(always)]
    fn from_bits(bits: U32x16) -> Self {
        each!(F32x16, vreinterpretq_f32_u32, bits)
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        each!(F32x16, vrndnq_f32, self)
    }
    #[inline(always)]
    fn to_int(self) -> U32x16 {
        op!(U32x16(
            vreinterpretq_u32_s32(vcvtnq_s32_f32(self.0)),
            vreinterpretq_u32_s32(vcvtnq_s32_f32(self.1)),
            vreinterpretq_u32_s32(vcvtnq_s32_f32(self.2)),
            vreinterpretq_u32_s32(vcvtnq_s32_f32(self.3))
        ))
    }
    #[inline(always)]
    fn to_int_trunc(self) -> U32x16 {
        op!(U32x16(
            vreinterpretq_u32_s32(vcvtq_s32_f32(self.0)),
            vreinterpretq_u32_s32(vcvtq_s32_f32(self.1)),
            vreinterpretq_u32_s32(vcvtq_s32_f32(self.2)),
            vreinterpretq_u32_s32(vcvtq_s32_f32(self.3))
        ))
    }
    #[inline(always)]
    fn from_int(value: U32x16) -> Self {
        op!(F32x16(
            vcvtq_f32_s32(vreinterpretq_s32_u32(value.0)),
            vcvtq_f32_s32(vreinterpretq_s32_u32(value.1)),
            vcvtq_f32_s32(vreinterpretq_s32_u32(value.2)),
            vcvtq_f32_s32(vreinterpretq_s32_u32(value.3))
        ))
    }
}

/// The two upper bytes of each E2M1 value as float32: first all upper bytes, then all second ones.
const FP4_BYTES: [u8; 32] = {
    let mut table = [0; 32];
    let mut code = 0;
    while code < 16 {
        let bits = super::scalar::FP4[code].to_bits();
        table[code] = (bits >> 24) as u8;
        table[16 + code] = (bits >> 16) as u8;
        code += 1;
    }
    table
};

impl Lanes for F32x16 {
    #[inline(always)]
    fn iota() -> U32x16 {
        const LANES: [u32; WIDTH] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        Self::load_u32(&LANES)
    }
    #[inline(always)]
    unsafe fn load_ptr(from: *const f32) -> Self {
        op!(F32x16(vld1q_f32(from), vld1q_f32(from.add(4)), vld1q_f32(from.add(8)), vld1q_f32(from.add(12))))
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32) {
        op!({
            vst1q_f32(to, self.0);
            vst1q_f32(to.add(4), self.1);
            vst1q_f32(to.add(8), self.2);
            vst1q_f32(to.add(12), self.3);
        })
    }
    #[inline(always)]
    unsafe fn load_u32_ptr(from: *const u32) -> U32x16 {
        // Loaded as bytes, for dwords of packed weights need not be aligned.
        op!({
            let bytes = from.cast::<u8>();
            U32x16(
                vreinterpretq_u32_u8(vld1q_u8(bytes)),
                vreinterpretq_u32_u8(vld1q_u8(bytes.add(16))),
                vreinterpretq_u32_u8(vld1q_u8(bytes.add(32))),
                vreinterpretq_u32_u8(vld1q_u8(bytes.add(48))),
            )
        })
    }
    #[inline(always)]
    unsafe fn store_u32_ptr(value: U32x16, to: *mut u32) {
        op!({
            let bytes = to.cast::<u8>();
            vst1q_u8(bytes, vreinterpretq_u8_u32(value.0));
            vst1q_u8(bytes.add(16), vreinterpretq_u8_u32(value.1));
            vst1q_u8(bytes.add(32), vreinterpretq_u8_u32(value.2));
            vst1q_u8(bytes.add(48), vreinterpretq_u8_u32(value.3));
        })
    }
    #[inline(always)]
    unsafe fn load_u8_ptr(from: *const u8) -> U32x16 {
        op!({
            let bytes = vld1q_u8(from);
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
            U32x16(
                vmovl_u16(vget_low_u16(low)),
                vmovl_high_u16(low),
                vmovl_u16(vget_low_u16(high)),
                vmovl_high_u16(high),
            )
        })
    }
    #[inline(always)]
    unsafe fn store_u8_ptr(value: U32x16, to: *mut u8) {
        op!({
            let low = vcombine_u16(vmovn_u32(value.0), vmovn_u32(value.1));
            let high = vcombine_u16(vmovn_u32(value.2), vmovn_u32(value.3));
            vst1q_u8(to, vcombine_u8(vmovn_u16(low), vmovn_u16(high)))
        })
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(from: *const u16) -> Self {
        op!({
            let (low, high) = (vld1q_u16(from), vld1q_u16(from.add(8)));
            Self::from_bits(U32x16(
                vshll_n_u16::<16>(vget_low_u16(low)),
                vshll_high_n_u16::<16>(low),
                vshll_n_u16::<16>(vget_low_u16(high)),
                vshll_high_n_u16::<16>(high),
            ))
        })
    }
    #[inline(always)]
    unsafe fn load_fp8_finite_ptr(from: *const u8) -> Self {
        // The code's exponent and mantissa fields, placed in a float32, are the value times 2^-120, subnormals included.
        // SAFETY: the caller vouches for 16 bytes.
        let codes = unsafe { Self::load_u8_ptr(from) };
        let sign = codes.shl(24).and(U32x16::splat(0x8000_0000));
        let bits = codes.and(U32x16::splat(0x7f)).shl(20).or(sign);
        Self::from_bits(bits) * Self::splat(f32::from_bits((120 + 127) << 23))
    }
    #[inline(always)]
    fn decode_fp4(dwords: U32x16, nibble: u32) -> Self {
        // Index bytes: 3 picks the upper byte of the code's value, 2 the second one, 1 and 0 are out of range: zero.
        let code = dwords.shr(4 * nibble).and(U32x16::splat(15));
        op!({
            let table = uint8x16x2_t(vld1q_u8(FP4_BYTES.as_ptr()), vld1q_u8(FP4_BYTES.as_ptr().add(16)));
            let index = vdupq_n_u32(0x0010_ffff);
            F32x16(
                vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(vmlaq_n_u32(index, code.0, 0x0101_0000)))),
                vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(vmlaq_n_u32(index, code.1, 0x0101_0000)))),
                vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(vmlaq_n_u32(index, code.2, 0x0101_0000)))),
                vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(vmlaq_n_u32(index, code.3, 0x0101_0000)))),
            )
        })
    }
    #[inline(always)]
    fn fold(self) -> f32 {
        op!({
            let four = vaddq_f32(vaddq_f32(self.0, self.2), vaddq_f32(self.1, self.3));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        })
    }
    #[inline(always)]
    fn fold_max(self) -> f32 {
        let mut t = self.to_array();
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
        op!(vmaxvq_u32(vmaxq_u32(vmaxq_u32(value.0, value.1), vmaxq_u32(value.2, value.3))))
    }
    #[inline(always)]
    fn to_array(self) -> [f32; WIDTH] {
        let mut out = [0.0; WIDTH];
        self.store_array(&mut out);
        out
    }
    #[inline(always)]
    fn int_to_array(value: U32x16) -> [u32; WIDTH] {
        let mut out = [0; WIDTH];
        Self::store_u32(value, &mut out);
        out
    }
}
