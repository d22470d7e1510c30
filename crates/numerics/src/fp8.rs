//! FP8 E4M3 (the finite variant) and the power-of-two scale E8M0.
//!
//! E4M3: one sign bit, four exponent bits with bias 7, three mantissa bits. Largest value 448, `0x7f` and `0xff` NaN, no
//! infinities, subnormal step 2^-9. E8M0: one byte `b` of value 2^(b - 127); 255 is NaN and 0 is the float32 subnormal
//! 2^-127.

use crate::lanes::{Float, Int};

/// Largest finite E4M3 value.
pub const E4M3_MAX: f32 = 448.0;

/// Value of every E4M3 code.
pub const E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = decode_e4m3(code as u8);
        code += 1;
    }
    table
};

/// The value of a code; NaN for `0x7f` and `0xff`.
pub const fn decode_e4m3(code: u8) -> f32 {
    let sign = (code as u32 & 0x80) << 24;
    let magnitude = code as u32 & 0x7f;
    if magnitude == 0x7f {
        return f32::from_bits(sign | 0x7fc0_0000);
    }
    let value = if magnitude < 8 { magnitude as f32 / 512.0 } else { f32::from_bits((magnitude << 20) + (120 << 23)) };
    f32::from_bits(value.to_bits() | sign)
}

/// The nearest code, ties to even; magnitudes above 448 and infinities become 448, NaN becomes a NaN code.
pub fn encode_e4m3(value: f32) -> u8 {
    encode_e4m3_lanes(value) as u8
}

/// [`encode_e4m3`] for lanes; each result is in 0..256.
#[inline(always)]
pub fn encode_e4m3_lanes<F: Float>(value: F) -> F::Int {
    let int = F::Int::splat;
    let sign = value.to_bits().shr(24).and(int(0x80));
    // The maximum is the first operand, so that a NaN stays.
    let magnitude = F::splat(E4M3_MAX).min(value.abs());
    let bits = magnitude.to_bits();
    // Normal codes: round the float32 bits at bit 20, then move the exponent's bias from 127 to 7.
    let odd = bits.shr(20).and(int(1));
    let normal = bits.add(int(0x7_ffff)).add(odd).shr(20).sub(int(120 << 3));
    // Below 2^-6 the code is the value in steps of 2^-9; eight steps are the first normal code.
    let subnormal = (magnitude * F::splat(512.0)).to_int();
    let code = F::Int::select(magnitude.lt(F::splat(1.0 / 64.0)), subnormal, normal);
    F::Int::select(magnitude.is_nan(), int(0x7f), code).or(sign)
}

/// The value of a scale byte: 2^(b - 127), NaN for 255.
pub const fn decode_e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

/// The byte of the smallest power of two that is at least `value`, for positive normal `value`; 255 for infinity and NaN
/// and above 2^127.
pub const fn encode_e8m0_up(value: f32) -> u8 {
    let bits = value.to_bits();
    let exponent = bits >> 23;
    let up = exponent + (bits & 0x7f_ffff != 0) as u32;
    if up > 255 { 255 } else { up as u8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition of the format, apart from the code above.
    fn e4m3_by_definition(code: u8) -> f64 {
        let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
        let (exponent, mantissa) = ((code >> 3 & 15) as i32, (code & 7) as f64);
        match (exponent, code & 0x7f) {
            (_, 0x7f) => f64::NAN,
            (0, _) => sign * mantissa / 8.0 * 2f64.powi(-6),
            _ => sign * (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        }
    }

    #[test]
    fn every_e4m3_code_has_its_value_and_returns() {
        for code in 0..=255u8 {
            let (value, wanted) = (decode_e4m3(code), e4m3_by_definition(code));
            if wanted.is_nan() {
                assert!(value.is_nan());
                assert!(decode_e4m3(encode_e4m3(value)).is_nan());
                continue;
            }
            assert_eq!(value as f64, wanted, "{code:#04x}");
            assert_eq!(value.is_sign_negative(), code & 0x80 != 0, "{code:#04x}");
            assert_eq!(encode_e4m3(value), code);
        }
    }

    #[test]
    fn values_between_two_codes_go_to_the_nearer_and_ties_to_the_even_one() {
        for code in 0..0x7e_u8 {
            let (low, high) = (decode_e4m3(code), decode_e4m3(code + 1));
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            for (value, wanted) in [(middle, even), (middle.next_down(), code), (middle.next_up(), code + 1)] {
                assert_eq!(encode_e4m3(value), wanted, "{value:e}");
                assert_eq!(encode_e4m3(-value), wanted | 0x80, "-{value:e}");
            }
        }
    }

    #[test]
    fn what_is_too_large_saturates() {
        for value in [448.0, 464.0, 480.0, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!(encode_e4m3(value), 0x7e);
            assert_eq!(encode_e4m3(-value), 0xfe);
        }
        assert_eq!(encode_e4m3(f32::from_bits(1)), 0);
    }

    #[test]
    fn every_e8m0_code_is_its_power_of_two() {
        for code in 0..255u8 {
            assert_eq!(decode_e8m0(code) as f64, 2f64.powi(code as i32 - 127), "{code}");
        }
        assert!(decode_e8m0(255).is_nan());
        for code in 1..255u8 {
            let value = decode_e8m0(code);
            assert_eq!(encode_e8m0_up(value), code);
            assert_eq!(encode_e8m0_up(value.next_up()), code + 1, "just above rounds up");
        }
        assert_eq!(encode_e8m0_up(f32::INFINITY), 255);
        assert_eq!(encode_e8m0_up(f32::NAN), 255);
    }
}
