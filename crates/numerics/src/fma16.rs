//! The tensor-core step of NVIDIA's Hopper generation in integers: `c + sum of 16 bf16 products`, bit for bit as
//! `mma.sync.m16n8k16` and `wgmma.m64nNk16` compute it.
//!
//! The accumulator is the seventeenth term. Terms are aligned to the largest exponent among those that aren't zero,
//! truncated toward zero to 25 fractional bits, added exactly, and the sum is truncated toward zero to float32.
//! Subnormals count, overflow gives infinity. A linear on such a device is [`chunked_dot`]: a chain of steps per chunk
//! of K, folded left in float32. Other generations compute another function, so this mirror belongs to sm_90 alone.

/// Fractional bits that a term keeps below the largest exponent.
const FRACTION_BITS: i32 = 25;
/// What the device writes for any NaN result.
const NAN_BITS: u32 = 0x7fff_ffff;

/// A finite bf16: `significand * 2^(exponent - 7)`.
#[derive(Clone, Copy)]
struct Operand {
    significand: i64,
    exponent: i32,
}

fn operand(bits: u16) -> Operand {
    let field = i32::from(bits >> 7 & 0xff);
    let fraction = i64::from(bits & 0x7f);
    let magnitude = if field > 0 { 0x80 | fraction } else { fraction };
    Operand { significand: if bits >> 15 == 1 { -magnitude } else { magnitude }, exponent: field.max(1) - 127 }
}

fn is_special(bits: u16) -> bool {
    bits >> 7 & 0xff == 0xff
}

/// Infinity and NaN by IEEE's rules.
fn special(c: f32, a: &[u16; 16], b: &[u16; 16]) -> Option<f32> {
    let mut nan = c.is_nan();
    let (mut plus, mut minus) = (c == f32::INFINITY, c == f32::NEG_INFINITY);
    let mut found = !c.is_finite();
    for (&x, &y) in a.iter().zip(b) {
        if !is_special(x) && !is_special(y) {
            continue;
        }
        found = true;
        let is_nan = |bits: u16| is_special(bits) && bits & 0x7f != 0;
        let is_zero = |bits: u16| bits & 0x7fff == 0;
        if is_nan(x) || is_nan(y) || is_zero(x) || is_zero(y) {
            nan = true;
        } else if (x ^ y) >> 15 == 1 {
            minus = true;
        } else {
            plus = true;
        }
    }
    match (found, nan || (plus && minus), plus) {
        (false, ..) => None,
        (true, true, _) => Some(f32::from_bits(NAN_BITS)),
        (true, false, true) => Some(f32::INFINITY),
        (true, false, false) => Some(f32::NEG_INFINITY),
    }
}

/// `magnitude` with `fraction` fractional bits, `below` binary places under the largest exponent, in units of
/// `2^-FRACTION_BITS` of it.
fn aligned(significand: i64, fraction: i32, below: i32) -> i64 {
    let magnitude = significand.unsigned_abs() << (FRACTION_BITS - fraction);
    let kept = if below > 63 { 0 } else { (magnitude >> below) as i64 };
    if significand < 0 { -kept } else { kept }
}

/// `sum * 2^unit` truncated toward zero to float32.
fn truncated(sum: i64, unit: i32) -> f32 {
    if sum == 0 {
        return 0.0;
    }
    let sign = if sum < 0 { 0x8000_0000 } else { 0 };
    let magnitude = sum.unsigned_abs();
    let top = 63 - magnitude.leading_zeros() as i32 + unit;
    let last = (top - 23).max(-149);
    let shift = last - unit;
    let kept = match shift {
        ..=0 => magnitude << -shift,
        1..64 => magnitude >> shift,
        _ => 0,
    };
    // What is too small for a subnormal is a zero without a sign.
    if kept == 0 {
        return 0.0;
    }
    let bits = (i64::from(last + 149) << 23) + kept as i64;
    if bits >= 0x7f80_0000 { f32::from_bits(sign | 0x7f80_0000) } else { f32::from_bits(sign | bits as u32) }
}

/// One k16 step: `c + sum a[i] * b[i]`, operands as bf16 bits.
pub fn step(c: f32, a: &[u16; 16], b: &[u16; 16]) -> f32 {
    if let Some(result) = special(c, a, b) {
        return result;
    }
    let field = (c.to_bits() >> 23 & 0xff) as i32;
    let fraction = i64::from(c.to_bits() & 0x7f_ffff);
    let c_magnitude = if field > 0 { 0x80_0000 | fraction } else { fraction };
    let c_significand = if c.to_bits() >> 31 == 1 { -c_magnitude } else { c_magnitude };
    let c_exponent = field.max(1) - 127;

    let mut products = [(0_i64, 0_i32); 16];
    let mut largest = if c_significand == 0 { None } else { Some(c_exponent) };
    for ((product, &x), &y) in products.iter_mut().zip(a).zip(b) {
        let (x, y) = (operand(x), operand(y));
        *product = (x.significand * y.significand, x.exponent + y.exponent);
        if product.0 != 0 {
            largest = Some(largest.map_or(product.1, |exponent: i32| exponent.max(product.1)));
        }
    }
    let Some(largest) = largest else { return 0.0 };
    let mut sum = if c_significand == 0 { 0 } else { aligned(c_significand, 23, largest - c_exponent) };
    for (significand, exponent) in products {
        if significand != 0 {
            sum += aligned(significand, 14, largest - exponent);
        }
    }
    truncated(sum, largest - FRACTION_BITS)
}

/// A linear's output: one chain of steps from +0 per chunk of `chunk` elements, the chunks added left to right in
/// float32. A last group shorter than sixteen is filled with zeros.
///
/// `a`, `b`: bf16 bits of equal length. `chunk`: a multiple of 16, a constant of the operator.
///
/// # Panics
/// When the lengths differ or `chunk` is no multiple of 16: a mistake of the caller, never of data.
pub fn chunked_dot(a: &[u16], b: &[u16], chunk: usize) -> f32 {
    assert_eq!(a.len(), b.len(), "operands of one length");
    assert!(chunk > 0 && chunk.is_multiple_of(16), "a chunk is a multiple of 16");
    let mut total = None;
    for (x, y) in a.chunks(chunk).zip(b.chunks(chunk)) {
        let mut chain = 0.0;
        for (x, y) in x.chunks(16).zip(y.chunks(16)) {
            let (mut left, mut right) = ([0; 16], [0; 16]);
            left[..x.len()].copy_from_slice(x);
            right[..y.len()].copy_from_slice(y);
            chain = step(chain, &left, &right);
        }
        total = Some(total.map_or(chain, |sum: f32| sum + chain));
    }
    total.unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: u16 = 0x3f80;

    fn one_product(c: f32, a: u16, b: u16) -> f32 {
        let (mut left, mut right) = ([0; 16], [0; 16]);
        left[3] = a;
        right[3] = b;
        step(c, &left, &right)
    }

    #[test]
    fn exact_sums_are_exact() {
        let a = std::array::from_fn(|i| crate::bf16::from_f32(i as f32 - 7.0));
        let b = std::array::from_fn(|i| crate::bf16::from_f32(0.5 * (i % 5) as f32));
        let expected: f32 = (0..16).map(|i| (i as f32 - 7.0) * 0.5 * (i % 5) as f32).sum();
        assert_eq!(step(1.5, &a, &b), 1.5 + expected);
    }

    #[test]
    fn rounds_toward_zero_and_not_to_nearest() {
        // 1 + 3 * 2^-25 lies nearest to 1 + 2^-23's lower neighbour; truncation gives 1 either way of sign.
        let tiny = crate::bf16::from_f32(1.5 * 2.0_f32.powi(-24));
        assert_eq!(one_product(1.0, ONE, tiny), 1.0);
        assert_eq!(one_product(-1.0, ONE, tiny | 0x8000), -1.0);
        // Just below one the sum truncates to the neighbour under it.
        assert_eq!(one_product(1.0, ONE, tiny | 0x8000), f32::from_bits(0x3f7f_fffe));
    }

    #[test]
    fn a_term_loses_what_lies_under_25_fractional_bits() {
        let term = crate::bf16::from_f32(2.0_f32.powi(-26));
        // Sixteen terms of 2^-26 would add 2^-22; each is truncated to nothing beside a one.
        assert_eq!(step(1.0, &[ONE; 16], &[term; 16]), 1.0);
        let term = crate::bf16::from_f32(2.0_f32.powi(-25));
        assert_eq!(step(1.0, &[ONE; 16], &[term; 16]), 1.0 + 2.0_f32.powi(-21));
    }

    #[test]
    fn zeros_have_no_exponent() {
        // A zero accumulator must not push small products out of range.
        let small = crate::bf16::from_f32(2.0_f32.powi(-60));
        assert_eq!(one_product(0.0, small, small), 2.0_f32.powi(-120));
        let huge = crate::bf16::from_f32(2.0_f32.powi(100));
        let (mut left, mut right) = ([0; 16], [0; 16]);
        (left[0], right[0]) = (huge, 0);
        (left[1], right[1]) = (small, ONE);
        assert_eq!(step(0.0, &left, &right), 2.0_f32.powi(-60));
    }

    #[test]
    fn subnormals_count_and_overflow_is_infinite() {
        assert_eq!(one_product(0.0, 1, ONE), f32::from_bits(1 << 16));
        let huge = crate::bf16::from_f32(2.0_f32.powi(127));
        assert_eq!(one_product(0.0, huge, huge), f32::INFINITY);
        assert_eq!(one_product(0.0, huge, huge | 0x8000), f32::NEG_INFINITY);
    }

    #[test]
    fn what_underflows_is_a_positive_zero() {
        for (exponent, sign) in [(-75, 0), (-75, 0x8000), (-100, 0), (-100, 0x8000), (-126, 0x8000)] {
            let small = crate::bf16::from_f32(2.0_f32.powi(exponent));
            assert_eq!(one_product(0.0, small, small | sign).to_bits(), 0, "2^{exponent} squared");
        }
        let least = crate::bf16::from_f32(2.0_f32.powi(-74));
        assert_eq!(one_product(0.0, least, least | 0x8000), -f32::from_bits(2));
    }

    #[test]
    fn infinities_and_nan_follow_ieee() {
        let infinity = 0x7f80;
        assert_eq!(one_product(1.0, infinity, ONE), f32::INFINITY);
        assert_eq!(one_product(f32::NEG_INFINITY, ONE, ONE), f32::NEG_INFINITY);
        for (c, a, b) in
            [(f32::NEG_INFINITY, infinity, ONE), (0.0, infinity, 0), (0.0, 0x7fc0, 0), (f32::NAN, ONE, ONE)]
        {
            assert_eq!(one_product(c, a, b).to_bits(), NAN_BITS);
        }
    }

    #[test]
    fn the_order_inside_a_step_does_not_matter_and_the_chunk_does() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Exponents spread over 20 binades, both signs.
            (((state >> 40) as u16) & 0x807f) | ((117 + (state >> 20) % 20) as u16) << 7
        };
        let a: Vec<u16> = (0..640).map(|_| next()).collect();
        let b: Vec<u16> = (0..640).map(|_| next()).collect();
        let mut swapped = (a.clone(), b.clone());
        swapped.0[..16].reverse();
        swapped.1[..16].reverse();
        assert_eq!(chunked_dot(&a, &b, 640).to_bits(), chunked_dot(&swapped.0, &swapped.1, 640).to_bits());
        assert_ne!(chunked_dot(&a, &b, 640).to_bits(), chunked_dot(&a, &b, 160).to_bits());
        let exact: f64 = a
            .iter()
            .zip(&b)
            .map(|(&x, &y)| f64::from(crate::bf16::to_f32(x)) * f64::from(crate::bf16::to_f32(y)))
            .sum();
        let terms: f64 = a
            .iter()
            .zip(&b)
            .map(|(&x, &y)| (f64::from(crate::bf16::to_f32(x)) * f64::from(crate::bf16::to_f32(y))).abs())
            .sum();
        // Each of the 40 steps truncates once and drops at most 17 units of 2^-25.
        assert!((f64::from(chunked_dot(&a, &b, 640)) - exact).abs() <= terms * 40.0 * 2.0 * 2.0_f64.powi(-23));
    }
}
