//! bfloat16: the upper half of a float32, rounded to nearest with ties to even.

/// The value of 16 stored bits.
pub const fn to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// The nearest bf16, ties to even. NaN stays NaN (made quiet); beyond the largest finite value it becomes infinity.
pub const fn from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return (bits >> 16) as u16 | 0x0040;
    }
    // The largest finite input carries into the infinity pattern, which is the wanted result.
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// `value` as a float32 that bf16 can hold; [`Float::bf16_round`](crate::lanes::Float::bf16_round) for lanes.
pub const fn round(value: f32) -> f32 {
    to_f32(from_f32(value))
}

/// Widens a row; both slices have the same length.
pub fn widen(from: &[u16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    for (to, &bits) in to.iter_mut().zip(from) {
        *to = to_f32(bits);
    }
}

/// Rounds a row to stored bits; both slices have the same length.
pub fn narrow(from: &[f32], to: &mut [u16]) {
    assert_eq!(from.len(), to.len());
    for (to, &value) in to.iter_mut().zip(from) {
        *to = from_f32(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::Float;

    #[test]
    fn every_code_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let value = to_f32(bits);
            if value.is_nan() {
                assert!(to_f32(from_f32(value)).is_nan(), "{bits:#06x}");
            } else {
                assert_eq!(from_f32(value), bits);
                assert_eq!(value.bf16_round().to_bits(), value.to_bits());
            }
        }
    }

    #[test]
    fn rounds_to_the_nearest_code_with_ties_to_even() {
        let cases: [(u32, u16); 9] = [
            (0x3f80_7fff, 0x3f80), // just below the middle
            (0x3f80_8000, 0x3f80), // a tie with an even lower neighbour
            (0x3f81_8000, 0x3f82), // a tie with an odd lower neighbour
            (0x3f80_8001, 0x3f81),
            (0x0000_8000, 0x0000), // half of the smallest subnormal
            (0x0000_8001, 0x0001),
            (0x8000_8000, 0x8000), // the sign of zero is kept
            (0x7f7f_ffff, 0x7f80), // the largest float32 is beyond the largest bf16
            (0xff80_0000, 0xff80),
        ];
        for (bits, code) in cases {
            let value = f32::from_bits(bits);
            assert_eq!(from_f32(value), code, "{bits:#010x}");
            assert_eq!(value.bf16_round().to_bits() >> 16, code as u32, "{bits:#010x}");
        }
    }
}
