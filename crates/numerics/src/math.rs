//! The project's own mathematical functions.
//!
//! Written once over [`Float`], so that one lane and sixteen lanes give equal bits on every CPU (a NaN's payload excepted);
//! the system's mathematics library differs between machines and is not used. Square root and division are IEEE and need no
//! function here. Bounds below are the largest errors found against float64, rounded up; the tests assert them. One ulp is
//! the distance of neighbouring float32 values at the exact result; results below 2^-126 may be off by one subnormal step.
//!
//! | function | arguments | bound |
//! | --- | --- | --- |
//! | [`exp`], [`exp2`] | all | 1.1 ulp |
//! | [`ln`] | all (negative: NaN, 0: -inf) | 1.0 ulp |
//! | [`log1p`] | all (below -1: NaN, -1: -inf) | 2.0 ulp |
//! | [`sigmoid`] | all | 2.5 ulp |
//! | [`silu`] | above -87, finite | 3.0 ulp |
//! | [`softplus`] | all | 2.0 ulp |
//! | [`tanh`] | all | 2.0 ulp |
//! | [`erf`] | all | 1.5 ulp |
//! | [`sin_cos`] | magnitude up to 1.1e6 | 1.6 ulp or 2^-25, whichever is larger |
//! | [`pow`] | base above 0, result normal | nearest float32 unless within 1e-13 of a tie |

use crate::lanes::{Float, Int};

const LOG2_E: f32 = f32::from_bits(0x3fb8_aa3b);
// ln 2 and pi / 2 as sums of float32 values, each the nearest to what is left.
const LN_2_HIGH: f32 = f32::from_bits(0x3f31_7218);
const LN_2_LOW: f32 = f32::from_bits(0xb102_e308);
// ln 2 in 16 bits and the rest: a product of the first with a float's exponent is exact.
const LN_2_SHORT: f32 = f32::from_bits(0x3f31_7200);
const LN_2_REST: f32 = f32::from_bits(0x35bf_be8e);
const TWO_OVER_PI: f32 = f32::from_bits(0x3f22_f983);
const HALF_PI: [f32; 3] = [f32::from_bits(0x3fc9_0fdb), f32::from_bits(0xb33b_bd2e), f32::from_bits(0xa6f7_2ced)];

/// A polynomial by Horner's rule; the highest coefficient comes first, as bits.
#[inline(always)]
fn polynomial<F: Float, const N: usize>(x: F, coefficients: [u32; N]) -> F {
    let mut value = F::splat(f32::from_bits(coefficients[0]));
    for bits in &coefficients[1..] {
        value = value.fma(x, F::splat(f32::from_bits(*bits)));
    }
    value
}

/// `value * 2^n` for `n` in -300..300, rounded once.
#[inline(always)]
fn scale_by_power<F: Float>(value: F, n: F::Int) -> F {
    // Two steps, so that neither factor leaves the exponent's range; the first product is exact for values near 1.
    let half = n.sar(1);
    let factor = |n: F::Int| F::from_bits(n.add(F::Int::splat(127)).shl(23));
    value * factor(half) * factor(n.sub(half))
}

/// e^x. Overflows to infinity above 88.72, reaches subnormals below -87.33 and 0 below -103.97.
#[inline(always)]
pub fn exp<F: Float>(x: F) -> F {
    // The limits come first, so that a NaN stays; beyond them the result is the same.
    let x = F::splat(-104.0).max(F::splat(89.0).min(x));
    let n = (x * F::splat(LOG2_E)).round_even();
    let r = n.fma(F::splat(-LN_2_HIGH), x);
    let r = n.fma(F::splat(-LN_2_LOW), r);
    let q = polynomial(r, [0x3ab5_638c, 0x3c09_1eef, 0x3d2a_ac2c, 0x3e2a_aa46, 0x3eff_fffe]);
    let value = F::splat(1.0) + (r * r).fma(q, r);
    scale_by_power(value, n.to_int())
}

/// 2^x.
#[inline(always)]
pub fn exp2<F: Float>(x: F) -> F {
    let x = F::splat(-151.0).max(F::splat(129.0).min(x));
    let n = x.round_even();
    let f = x - n;
    let p = polynomial(f, [0x376c_d6d4, 0x3921_c4e3, 0x3aae_d364, 0x3c1d_953a, 0x3d63_5837, 0x3e75_fdf0, 0x3f31_7218]);
    scale_by_power(f.fma(p, F::splat(1.0)), n.to_int())
}

/// Natural logarithm.
#[inline(always)]
pub fn ln<F: Float>(x: F) -> F {
    let int = F::Int::splat;
    let tiny = x.lt(F::splat(f32::MIN_POSITIVE));
    let scaled = F::select(tiny, x * F::splat(8_388_608.0), x);
    // x = 2^k m with m in [sqrt(1/2), sqrt(2)).
    let bits = scaled.to_bits();
    let k = bits.sub(int(0x3f35_04f3)).sar(23);
    let f = F::from_bits(bits.sub(k.shl(23))) - F::splat(1.0);
    let k = F::from_int(F::Int::select(tiny, k.sub(int(23)), k));
    let q = polynomial(
        f,
        [
            0x3d59_cda4,
            0xbddf_6d40,
            0x3df8_03c5,
            0xbe00_8316,
            0x3e11_817f,
            0xbe2a_9783,
            0x3e4c_d2a1,
            0xbe80_0038,
            0x3eaa_aaa4,
        ],
    );
    let square = f * f;
    let rest = (square * f).fma(q, k * F::splat(LN_2_REST));
    let rest = square.fma(F::splat(-0.5), rest);
    let value = k.fma(F::splat(LN_2_SHORT), f + rest);
    let value = F::select(x.eq(F::splat(f32::INFINITY)), x, value);
    let value = F::select(x.lt(F::splat(0.0)), F::splat(f32::NAN), value);
    let value = F::select(x.eq(F::splat(0.0)), F::splat(f32::NEG_INFINITY), value);
    F::select(x.is_nan(), x, value)
}

/// ln(1 + x), precise near 0.
#[inline(always)]
pub fn log1p<F: Float>(x: F) -> F {
    let one = F::splat(1.0);
    let u = one + x;
    // What the sum lost, to first order; the smaller operand is taken from the sum last, so that this is exact.
    let lost = F::select(x.gt(one), one - (u - x), x - (u - one));
    let value = ln(u) + lost / u;
    let value = F::select(x.eq(F::splat(f32::INFINITY)), x, value);
    let value = F::select(x.eq(F::splat(-1.0)), F::splat(f32::NEG_INFINITY), value);
    // Keeps the sign of zero.
    F::select(x.eq(F::splat(0.0)), x, value)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid<F: Float>(x: F) -> F {
    let one = F::splat(1.0);
    let e = exp(-x.abs());
    F::select(x.ge(F::splat(0.0)), one, e) / (one + e)
}

/// x / (1 + e^-x).
#[inline(always)]
pub fn silu<F: Float>(x: F) -> F {
    x * sigmoid(x)
}

/// ln(1 + e^x).
#[inline(always)]
pub fn softplus<F: Float>(x: F) -> F {
    // Zero comes first, so that a NaN stays.
    F::splat(0.0).max(x) + log1p(exp(-x.abs()))
}

/// Hyperbolic tangent.
#[inline(always)]
pub fn tanh<F: Float>(x: F) -> F {
    let a = x.abs();
    let square = a * a;
    let p = polynomial(square, [0xbbba_87e8, 0x3ca8_fc83, 0xbd5c_1ad2, 0x3e08_837b, 0xbeaa_aa99]);
    let small = (square * a).fma(p, a);
    let large = F::splat(1.0) - F::splat(2.0) / (exp(a + a) + F::splat(1.0));
    with_sign_of(F::select(a.lt(F::splat(0.625)), small, large), x)
}

/// The error function.
#[inline(always)]
pub fn erf<F: Float>(x: F) -> F {
    let a = x.abs();
    let square = a * a;
    let p =
        polynomial(square, [0x38a7_b1f1, 0xba53_04ca, 0x3baa_250a, 0xbcdc_008d, 0x3de7_16b2, 0xbec0_93a0, 0x3e03_75d4]);
    let small = a.fma(p, a);
    // 1 - e^(-a - a g(a)); from 3.92 on the result is 1 in float32.
    let b = F::splat(3.93).min(a);
    let g = polynomial(b, [0x3740_edd8, 0xb9aa_a677, 0x3b6f_6da6, 0xbcc2_d929, 0x3dd9_a0cf, 0x3f22_9836, 0x3e03_bd7b]);
    let large = F::splat(1.0) - exp(-(b.fma(g, b)));
    with_sign_of(F::select(a.lt(F::splat(0.927_734_4)), small, large), x)
}

/// `magnitude`, which is not negative, with the sign of `x`.
#[inline(always)]
fn with_sign_of<F: Float>(magnitude: F, x: F) -> F {
    F::from_bits(magnitude.to_bits().or(x.to_bits().and(F::Int::splat(0x8000_0000))))
}

/// Sine and cosine of `x` radians, for magnitudes up to 1.1e6 (a million positions times a frequency of 1). Magnitudes
/// above 2^21, for which the reduction is not made, give NaN, as do NaN and infinity.
#[inline(always)]
pub fn sin_cos<F: Float>(x: F) -> (F, F) {
    let int = F::Int::splat;
    let x = F::select(x.abs().le(F::splat(2_097_152.0)), x, F::splat(f32::NAN));
    // The first step is exact for this range of quotients; the rest, what pi / 2 has beyond 24 bits, costs one rounding.
    // Far out the quotient itself is off by up to 0.1, so the polynomials reach to 0.94.
    let n = (x * F::splat(TWO_OVER_PI)).round_even();
    let r = n.fma(F::splat(-HALF_PI[0]), x);
    let rest = n.fma(F::splat(-HALF_PI[1]), n * F::splat(-HALF_PI[2]));
    let r = r + rest;
    let quadrant = n.to_int();
    let z = r * r;
    let s = polynomial(z, [0x3638_2232, 0xb950_15f7, 0x3c08_88a6, 0xbe2a_aaab]);
    let sin = (z * r).fma(s, r);
    let c = polynomial(z, [0xb494_6c16, 0x37d0_1cad, 0xbab6_0b92, 0x3d2a_aaab]);
    let cos = (z * z).fma(c, z.fma(F::splat(-0.5), F::splat(1.0)));
    let odd = quadrant.and(int(1)).eq(int(1));
    let (sin, cos) = (F::select(odd, cos, sin), F::select(odd, sin, cos));
    // Bit 1 of the quadrant is the sine's sign, bit 1 of the next quadrant the cosine's.
    let sign = |quadrant: F::Int| quadrant.shl(30).and(int(0x8000_0000));
    (F::from_bits(sin.to_bits().xor(sign(quadrant))), F::from_bits(cos.to_bits().xor(sign(quadrant.add(int(1))))))
}

/// Natural logarithm in float64, for tables made once; relative error below 1e-15. `x` is positive and normal.
pub fn ln_f64(x: f64) -> f64 {
    const SQRT_HALF: u64 = 0x3fe6_a09e_667f_3bcd;
    let bits = x.to_bits();
    let k = (bits.wrapping_sub(SQRT_HALF) as i64) >> 52;
    let m = f64::from_bits(bits.wrapping_sub((k << 52) as u64));
    // ln m = 2 atanh(s) with |s| < 0.1716: the series ends far below the last bit.
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut series = 0.0;
    for i in (1..=13).rev() {
        series = series * square + 1.0 / (2 * i + 1) as f64;
    }
    let (high, low) = LN_2_F64;
    2.0 * s + (2.0 * s * square * series + k as f64 * low) + k as f64 * high
}

/// e^x in float64, for tables made once; relative error below 1e-15 for |x| < 700.
pub fn exp_f64(x: f64) -> f64 {
    let (high, low) = LN_2_F64;
    let n = (x / (high + low)).round_ties_even();
    let r = n.mul_add(-low, n.mul_add(-high, x));
    let mut series = 1.0;
    for i in (1..=18).rev() {
        series = series * r / i as f64 + 1.0;
    }
    let half = (n as i64) >> 1;
    let factor = |n: i64| f64::from_bits(((n + 1023) as u64) << 52);
    series * factor(half) * factor(n as i64 - half)
}

/// ln 2 in 32 bits and the rest.
const LN_2_F64: (f64, f64) = (f64::from_bits(0x3fe6_2e42_fee0_0000), f64::from_bits(0x3dea_39ef_3579_3c76));

/// `base^(numerator / denominator)`, rounded to float32. For the tables of RoPE; the float64 value before rounding is good to
/// 1e-14 relative.
pub fn pow(base: f64, numerator: u32, denominator: u32) -> f32 {
    pow_f64(base, numerator, denominator) as f32
}

/// [`pow`] before it is rounded.
pub fn pow_f64(base: f64, numerator: u32, denominator: u32) -> f64 {
    exp_f64(ln_f64(base) * numerator as f64 / denominator as f64)
}
