//! One 512-bit register a vector.

use std::arch::x86_64::*;

use super::{Float, Int, Kernel, Lanes, Mask, WIDTH, operators};

/// Runs a kernel with the instruction set switched on.
///
/// # Safety
/// The CPU must have the features named here.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<F32x16>()
}

#[derive(Clone, Copy)]
pub(super) struct F32x16(__m512);
#[derive(Clone, Copy)]
pub(super) struct U32x16(__m512i);
#[derive(Clone, Copy)]
pub(super) struct M16(__mmask16);

/// Calls an instruction of the level.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: this module's types exist only inside `run`, whose caller checked the CPU.
        unsafe { $e }
    };
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
        M16(!self.0)
    }
    #[inline(always)]
    fn bits(self) -> u32 {
        self.0 as u32
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
        U32x16(op!(_mm512_set1_epi32(value as i32)))
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        U32x16(op!(_mm512_add_epi32(self.0, other.0)))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        U32x16(op!(_mm512_sub_epi32(self.0, other.0)))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        U32x16(op!(_mm512_mullo_epi32(self.0, other.0)))
    }
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        U32x16(op!(_mm512_and_si512(self.0, other.0)))
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        U32x16(op!(_mm512_or_si512(self.0, other.0)))
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        U32x16(op!(_mm512_xor_si512(self.0, other.0)))
    }
    #[inline(always)]
    fn not(self) -> Self {
        U32x16(op!(_mm512_xor_si512(self.0, _mm512_set1_epi32(-1))))
    }
    #[inline(always)]
    fn shl(self, count: u32) -> Self {
        U32x16(op!(_mm512_sll_epi32(self.0, _mm_cvtsi32_si128(count as i32))))
    }
    #[inline(always)]
    fn shr(self, count: u32) -> Self {
        U32x16(op!(_mm512_srl_epi32(self.0, _mm_cvtsi32_si128(count as i32))))
    }
    #[inline(always)]
    fn sar(self, count: u32) -> Self {
        U32x16(op!(_mm512_sra_epi32(self.0, _mm_cvtsi32_si128(count as i32))))
    }
    #[inline(always)]
    fn eq(self, other: Self) -> M16 {
        M16(op!(_mm512_cmpeq_epi32_mask(self.0, other.0)))
    }
    #[inline(always)]
    fn lt_signed(self, other: Self) -> M16 {
        M16(op!(_mm512_cmplt_epi32_mask(self.0, other.0)))
    }
    #[inline(always)]
    fn lt_unsigned(self, other: Self) -> M16 {
        M16(op!(_mm512_cmplt_epu32_mask(self.0, other.0)))
    }
    #[inline(always)]
    fn max_unsigned(self, other: Self) -> Self {
        U32x16(op!(_mm512_max_epu32(self.0, other.0)))
    }
    #[inline(always)]
    fn select(mask: M16, yes: Self, no: Self) -> Self {
        U32x16(op!(_mm512_mask_blend_epi32(mask.0, no.0, yes.0)))
    }
}

operators!(
    F32x16,
    |a, b| F32x16(op!(_mm512_add_ps(a.0, b.0))),
    F32x16(op!(_mm512_sub_ps(a.0, b.0))),
    F32x16(op!(_mm512_mul_ps(a.0, b.0))),
    F32x16(op!(_mm512_div_ps(a.0, b.0))),
    F32x16(op!(_mm512_xor_ps(a.0, _mm512_set1_ps(-0.0))))
);

impl Float for F32x16 {
    type Mask = M16;
    type Int = U32x16;
    #[inline(always)]
    fn splat(value: f32) -> Self {
        F32x16(op!(_mm512_set1_ps(value)))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        F32x16(op!(_mm512_fmadd_ps(self.0, b.0, c.0)))
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        F32x16(op!(_mm512_sqrt_ps(self.0)))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        F32x16(op!(_mm512_abs_ps(self.0)))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        F32x16(op!(_mm512_min_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        F32x16(op!(_mm512_max_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn lt(self, other: Self) -> M16 {
        M16(op!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0)))
    }
    #[inline(always)]
    fn le(self, other: Self) -> M16 {
        M16(op!(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(self.0, other.0)))
    }
    #[inline(always)]
    fn gt(self, other: Self) -> M16 {
        M16(op!(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, other.0)))
    }
    #[inline(always)]
    fn ge(self, other: Self) -> M16 {
        M16(op!(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(self.0, other.0)))
    }
    #[inline(always)]
    fn eq(self, other: Self) -> M16 {
        M16(op!(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self.0, other.0)))
    }
    #[inline(always)]
    fn is_nan(self) -> M16 {
        M16(op!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0)))
    }
    #[inline(always)]
    fn select(mask: M16, yes: Self, no: Self) -> Self {
        F32x16(op!(_mm512_mask_blend_ps(mask.0, no.0, yes.0)))
    }
    #[inline(always)]
    fn to_bits(self) -> U32x16 {
        U32x16(op!(_mm512_castps_si512(self.0)))
    }
    #[inline(always)]
    fn from_bits(bits: U32x16) -> Self {
        F32x16(op!(_mm512_castsi512_ps(bits.0)))
    }
    #[inline(always)]
    fn round_even(self) -> Self {
        F32x16(op!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)))
    }
    #[inline(always)]
    fn to_int(self) -> U32x16 {
        U32x16(op!(_mm512_cvtps_epi32(self.0)))
    }
    #[inline(always)]
    fn to_int_trunc(self) -> U32x16 {
        U32x16(op!(_mm512_cvttps_epi32(self.0)))
    }
    #[inline(always)]
    fn from_int(value: U32x16) -> Self {
        F32x16(op!(_mm512_cvtepi32_ps(value.0)))
    }
}

/// `l` -> the E2M1 value of code `l`.
const FP4: [f32; 16] = super::scalar::FP4;

impl F32x16 {
    #[inline(always)]
    fn halves(self) -> (__m256, __m256) {
        op!((_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0)))
    }
}

impl Lanes for F32x16 {
    #[inline(always)]
    fn iota() -> U32x16 {
        U32x16(op!(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)))
    }
    #[inline(always)]
    unsafe fn load_ptr(from: *const f32) -> Self {
        F32x16(op!(_mm512_loadu_ps(from)))
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32) {
        op!(_mm512_storeu_ps(to, self.0))
    }
    #[inline(always)]
    unsafe fn load_u32_ptr(from: *const u32) -> U32x16 {
        U32x16(op!(_mm512_loadu_si512(from.cast())))
    }
    #[inline(always)]
    unsafe fn store_u32_ptr(value: U32x16, to: *mut u32) {
        op!(_mm512_storeu_si512(to.cast(), value.0))
    }
    #[inline(always)]
    unsafe fn load_u8_ptr(from: *const u8) -> U32x16 {
        U32x16(op!(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))))
    }
    #[inline(always)]
    unsafe fn store_u8_ptr(value: U32x16, to: *mut u8) {
        op!(_mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(value.0)))
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(from: *const u16) -> Self {
        let wide = U32x16(op!(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))));
        Self::from_bits(wide.shl(16))
    }
    #[inline(always)]
    unsafe fn load_fp8_finite_ptr(from: *const u8) -> Self {
        // As float16 the code is its value times 2^-8, with the sign copied into bit 14, which the mask clears.
        op!({
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast()));
            let half = _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(0xbfff_u16 as i16));
            F32x16(_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0)))
        })
    }
    #[inline(always)]
    fn decode_fp4(dwords: U32x16, nibble: u32) -> Self {
        // The permutation reads only the low four bits of a lane: no mask is needed.
        let table = Self::load_array(&FP4);
        F32x16(op!(_mm512_permutexvar_ps(dwords.shr(4 * nibble).0, table.0)))
    }
    #[inline(always)]
    fn fold(self) -> f32 {
        let (low, high) = self.halves();
        op!({
            let eight = _mm256_add_ps(low, high);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }
    #[inline(always)]
    fn fold_max(self) -> f32 {
        let (low, high) = self.halves();
        op!({
            let eight = _mm256_max_ps(low, high);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }
    #[inline(always)]
    fn fold_max_unsigned(value: U32x16) -> u32 {
        op!({
            let eight = _mm256_max_epu32(_mm512_castsi512_si256(value.0), _mm512_extracti32x8_epi32::<1>(value.0));
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
