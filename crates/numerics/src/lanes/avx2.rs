//! Two 256-bit registers a vector: lanes 0 to 7 and 8 to 15.

use std::arch::x86_64::*;

use super::{Float, Int, Kernel, Lanes, Mask, WIDTH, operators};

/// Runs a kernel with the instruction set switched on.
///
/// # Safety
/// The CPU must have the features named here.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<F32x16>()
}

#[derive(Clone, Copy)]
pub(super) struct F32x16(__m256, __m256);
#[derive(Clone, Copy)]
pub(super) struct U32x16(__m256i, __m256i);
/// All bits of a lane are set or clear.
#[derive(Clone, Copy)]
pub(super) struct M16(__m256, __m256);

/// Calls an instruction of the level.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: this module's types exist only inside `run`, whose caller checked the CPU.
        unsafe { $e }
    };
}
/// Applies an instruction to both halves.
macro_rules! each {
    ($type:ident, $f:expr, $a:expr) => {{
        let a = $a;
        op!($type($f(a.0), $f(a.1)))
    }};
    ($type:ident, $f:expr, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        op!($type($f(a.0, b.0), $f(a.1, b.1)))
    }};
}

impl Mask for M16 {
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        each!(M16, _mm256_and_ps, self, other)
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        each!(M16, _mm256_or_ps, self, other)
    }
    #[inline(always)]
    fn not(self) -> Self {
        let ones = op!(_mm256_castsi256_ps(_mm256_set1_epi32(-1)));
        each!(M16, _mm256_xor_ps, self, M16(ones, ones))
    }
    #[inline(always)]
    fn bits(self) -> u32 {
        op!(_mm256_movemask_ps(self.0) as u32 | (_mm256_movemask_ps(self.1) as u32) << 8)
    }
    #[inline(always)]
    fn any(self) -> bool {
        self.bits() != 0
    }
    #[inline(always)]
    fn all(self) -> bool {
        self.bits() == 0xffff
    }
}

impl M16 {
    #[inline(always)]
    fn from_int(low: __m256i, high: __m256i) -> Self {
        op!(M16(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)))
    }
}

impl Int for U32x16 {
    type Mask = M16;
    #[inline(always)]
    fn splat(value: u32) -> Self {
        let v = op!(_mm256_set1_epi32(value as i32));
        U32x16(v, v)
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        each!(U32x16, _mm256_add_epi32, self, other)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        each!(U32x16, _mm256_sub_epi32, self, other)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        each!(U32x16, _mm256_mullo_epi32, self, other)
    }
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        each!(U32x16, _mm256_and_si256, self, other)
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        each!(U32x16, _mm256_or_si256, self, other)
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        each!(U32x16, _mm256_xor_si256, self, other)
    }
    #[inline(always)]
    fn not(self) -> Self {
        self.xor(Self::splat(u32::MAX))
    }
    #[inline(always)]
    fn shl(self, count: u32) -> Self {
        let c = op!(_mm_cvtsi32_si128(count as i32));
        each!(U32x16, _mm256_sll_epi32, self, U32x16Count(c, c))
    }
    #[inline(always)]
    fn shr(self, count: u32) -> Self {
        let c = op!(_mm_cvtsi32_si128(count as i32));
        each!(U32x16, _mm256_srl_epi32, self, U32x16Count(c, c))
    }
    #[inline(always)]
    fn sar(self, count: u32) -> Self {
        let c = op!(_mm_cvtsi32_si128(count as i32));
        each!(U32x16, _mm256_sra_epi32, self, U32x16Count(c, c))
    }
    #[inline(always)]
    fn eq(self, other: Self) -> M16 {
        op!(M16::from_int(_mm256_cmpeq_epi32(self.0, other.0), _mm256_cmpeq_epi32(self.1, other.1)))
    }
    #[inline(always)]
    fn lt_signed(self, other: Self) -> M16 {
        op!(M16::from_int(_mm256_cmpgt_epi32(other.0, self.0), _mm256_cmpgt_epi32(other.1, self.1)))
    }
    #[inline(always)]
    fn lt_unsigned(self, other: Self) -> M16 {
        let sign = Self::splat(0x8000_0000);
        self.xor(sign).lt_signed(other.xor(sign))
    }
    #[inline(always)]
    fn max_unsigned(self, other: Self) -> Self {
        each!(U32x16, _mm256_max_epu32, self, other)
    }
    #[inline(always)]
    fn select(mask: M16, yes: Self, no: Self) -> Self {
        F32x16::select(mask, F32x16::from_bits(yes), F32x16::from_bits(no)).to_bits()
    }
}

/// A shift count for each half.
struct U32x16Count(__m128i, __m128i);

operators!(
    F32x16,
    |a, b| each!(F32x16, _mm256_add_ps, a, b),
    each!(F32x16, _mm256_sub_ps, a, b),
    each!(F32x16, _mm256_mul_ps, a, b),
    each!(F32x16, _mm256_div_ps, a, b),
    each!(F32x16, _mm256_xor_ps, a, F32x16::splat(-0.0))
);

impl Float for F32x16 {
    type Mask = M16;
    type Int = U32x16;
    #[inline(always)]
    fn splat(value: f32) -> Self {
        let v = op!(_mm256_set1_ps(value));
        F32x16(v, v)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        op!(F32x16(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)))
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        each!(F32x16, _mm256_sqrt_ps, self)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        each!(F32x16, _mm256_andnot_ps, F32x16::splat(-0.0), self)
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        each!(F32x16, _mm256_min_ps, self, other)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        each!(F32x16, _mm256_max_ps, self, other)
    }
    #[inline(always)]
    fn lt(self, other: Self) -> M16 {
        each!(M16, _mm256_cmp_ps::<_CMP_LT_OQ>, self, other)
    }
    #[inline(always)]
    fn le(self, other: Self) -> M16 {
        each!(M16, _mm256_cmp_ps::<_CMP_LE_OQ>, self, other)
    }
    #[inline(always)]
    fn gt(self, other: Self) -> M16 {
        each!(M16, _mm256_cmp_ps::<_CMP_GT_OQ>, self, other)
    }
    #[inline(always)]
    fn ge(self, other: Self) -> M16 {
        each!(M16, _mm256_cmp_ps::<_CMP_GE_OQ>, self, other)
    }
    #[inline(always)]
    fn eq(self, other: Self) -> M16 {
        each!(M16, _mm256_cmp_ps::<_CMP_EQ_OQ>, self, other)
    }
    #[inline(always)]
    fn is_nan(self) -> M16 {
        each!(M16, _mm256_cmp_ps::<_CMP_UNORD_Q>, self, self)
    }
    #[inline(always)]
    fn select(mask: M16, yes: Self, no: Self) -> Self {
        op!(F32x16(_mm256_blendv_ps(no.0, yes.0, mask.0), _mm256_blendv_ps(no.1, yes.1, mask.1)))
    }
    #[inline(always)]
    fn to_bits(self) -> U32x16 {
        each!(U32x16, _mm256_castps_si256, self)
    }
    #[inline(always)]
    fn from_bits(bits: U32x16) -> Self {
        each!(F32x16, _mm256_castsi256_ps, bits)
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        each!(F32x16, _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>, self)
    }
    #[inline(always)]
    fn to_int(self) -> U32x16 {
        each!(U32x16, _mm256_cvtps_epi32, self)
    }
    #[inline(always)]
    fn to_int_trunc(self) -> U32x16 {
        each!(U32x16, _mm256_cvttps_epi32, self)
    }
    #[inline(always)]
    fn from_int(value: U32x16) -> Self {
        each!(F32x16, _mm256_cvtepi32_ps, value)
    }
}

impl Lanes for F32x16 {
    #[inline(always)]
    fn iota() -> U32x16 {
        op!(U32x16(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)))
    }
    #[inline(always)]
    unsafe fn load_ptr(from: *const f32) -> Self {
        op!(F32x16(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))))
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32) {
        op!({
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        })
    }
    #[inline(always)]
    unsafe fn load_u32_ptr(from: *const u32) -> U32x16 {
        op!(U32x16(_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())))
    }
    #[inline(always)]
    unsafe fn store_u32_ptr(value: U32x16, to: *mut u32) {
        op!({
            _mm256_storeu_si256(to.cast(), value.0);
            _mm256_storeu_si256(to.add(8).cast(), value.1);
        })
    }
    #[inline(always)]
    unsafe fn load_u8_ptr(from: *const u8) -> U32x16 {
        op!({
            let bytes = _mm_loadu_si128(from.cast());
            U32x16(_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)))
        })
    }
    #[inline(always)]
    unsafe fn store_u8_ptr(value: U32x16, to: *mut u8) {
        // Only the low byte counts, so it is cut out first and the packs cannot saturate. They work within 128-bit parts,
        // which the last permutation puts in order.
        let value = value.and(U32x16::splat(0xff));
        op!({
            let words = _mm256_packus_epi32(value.0, value.1);
            let bytes = _mm256_packus_epi16(words, words);
            let ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(ordered))
        })
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(from: *const u16) -> Self {
        let wide = op!(U32x16(
            _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())),
            _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast()))
        ));
        Self::from_bits(wide.shl(16))
    }
    #[inline(always)]
    unsafe fn load_fp8_finite_ptr(from: *const u8) -> Self {
        // Converting through float16, as the wider body does, or scaling a float32 subnormal would be shorter, but the
        // subnormal codes then take a slow path of the CPU.
        // SAFETY: the caller vouches for 16 bytes.
        let codes = unsafe { Self::load_u8_ptr(from) };
        let sign = codes.shl(24).and(U32x16::splat(0x8000_0000));
        let fields = codes.shl(20).and(U32x16::splat(0x07f0_0000));
        let normal = Self::from_bits(fields.add(U32x16::splat(120 << 23)));
        // With the exponent of 2^-6 put in front, a subnormal code is 2^-6 too large.
        let step = U32x16::splat(121 << 23);
        let subnormal = Self::from_bits(fields.or(step)) - Self::from_bits(step);
        let small = fields.lt_signed(U32x16::splat(8 << 20));
        Self::from_bits(Self::select(small, subnormal, normal).to_bits().or(sign))
    }
    #[inline(always)]
    fn decode_fp4(dwords: U32x16, nibble: u32) -> Self {
        // The permutation reads the low three bits of a lane, the magnitude; bit 3 becomes the sign.
        let code = dwords.shr(4 * nibble);
        let sign = code.shl(28).and(U32x16::splat(0x8000_0000));
        let magnitude = op!({
            let table = _mm256_setr_ps(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0);
            F32x16(_mm256_permutevar8x32_ps(table, code.0), _mm256_permutevar8x32_ps(table, code.1))
        });
        Self::from_bits(magnitude.to_bits().or(sign))
    }
    #[inline(always)]
    fn fold(self) -> f32 {
        op!({
            let eight = _mm256_add_ps(self.0, self.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }
    #[inline(always)]
    fn fold_max(self) -> f32 {
        op!({
            let eight = _mm256_max_ps(self.0, self.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }
    #[inline(always)]
    fn fold_max_unsigned(value: U32x16) -> u32 {
        op!({
            let eight = _mm256_max_epu32(value.0, value.1);
            let four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
            _mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32::<1>(two))) as u32
        })
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
