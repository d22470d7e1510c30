//! FP4 E2M1 codes and how they are packed.
//!
//! Nibble bit 3 is the sign; codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6. Stored rows hold element `2k` in the low nibble of
//! byte `k` and element `2k + 1` in the high one. Packed weights use layout B instead: 64 bytes hold 128 codes, and dword `l`,
//! nibble `n` is code `16 n + l`, so that one shift and one table lookup decode sixteen neighbours.

use crate::lanes::{Float, Int};

/// Largest E2M1 value.
pub const E2M1_MAX: f32 = 6.0;

/// Value of every code.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Codes in a group of layout B.
pub const GROUP: usize = 128;

/// The nearest code, ties to the even code; magnitudes above 6 become 6. The format has no NaN: NaN becomes 6 too, and the
/// caller's scale must carry it.
pub fn encode(value: f32) -> u8 {
    encode_lanes(value) as u8
}

/// [`encode`] for lanes; each result is in 0..16.
#[inline(always)]
pub fn encode_lanes<F: Float>(value: F) -> F::Int {
    let int = F::Int::splat;
    let sign = value.to_bits().shr(28).and(int(8));
    // Compared as integers, which puts every NaN above 6.
    let (bits, most) = (value.to_bits().and(int(0x7fff_ffff)), int(E2M1_MAX.to_bits()));
    let bits = F::Int::select(bits.lt_signed(most), bits, most);
    let magnitude = F::from_bits(bits);
    // From 1 on: round the float32 bits at bit 22, then move the exponent's bias from 127 to 1.
    let odd = bits.shr(22).and(int(1));
    let normal = bits.add(int(0x1f_ffff)).add(odd).shr(22).sub(int(126 << 1));
    // Below 1 the code is the value in steps of 0.5; two steps are the first normal code.
    let subnormal = (magnitude + magnitude).to_int();
    F::Int::select(magnitude.lt(F::splat(1.0)), subnormal, normal).or(sign)
}

/// Stored row: two codes a byte, the first one low. `codes.len()` is twice `packed.len()`.
pub fn pack(codes: &[u8], packed: &mut [u8]) {
    assert_eq!(codes.len(), 2 * packed.len());
    for (byte, pair) in packed.iter_mut().zip(codes.chunks_exact(2)) {
        *byte = pair[0] & 15 | pair[1] << 4;
    }
}

/// The codes of a stored row.
pub fn unpack(packed: &[u8], codes: &mut [u8]) {
    assert_eq!(codes.len(), 2 * packed.len());
    for (&byte, pair) in packed.iter().zip(codes.chunks_exact_mut(2)) {
        pair[0] = byte & 15;
        pair[1] = byte >> 4;
    }
}

/// 128 codes in order to one group of layout B.
pub fn pack_group(codes: &[u8; GROUP]) -> [u8; GROUP / 2] {
    let mut packed = [0; GROUP / 2];
    for (i, &code) in codes.iter().enumerate() {
        let (nibble, lane) = (i / 16, i % 16);
        packed[4 * lane + nibble / 2] |= (code & 15) << (4 * (nibble % 2));
    }
    packed
}

/// One group of layout B to 128 codes in order.
pub fn unpack_group(packed: &[u8; GROUP / 2]) -> [u8; GROUP] {
    std::array::from_fn(|i| {
        let (nibble, lane) = (i / 16, i % 16);
        packed[4 * lane + nibble / 2] >> (4 * (nibble % 2)) & 15
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_returns() {
        for code in 0..16u8 {
            let value = E2M1[code as usize];
            assert_eq!(encode(value), code, "{value}");
            assert_eq!(value.is_sign_negative(), code & 8 != 0);
        }
    }

    #[test]
    fn ties_go_to_the_even_code() {
        let ties = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)];
        for (i, (middle, even)) in ties.into_iter().enumerate() {
            let middle: f32 = middle;
            assert_eq!(middle, (E2M1[i] + E2M1[i + 1]) / 2.0);
            for (value, code) in [(middle, even), (middle.next_down(), i as u8), (middle.next_up(), i as u8 + 1)] {
                assert_eq!(encode(value), code, "{value}");
                assert_eq!(encode(-value), code | 8, "-{value}");
            }
        }
    }

    #[test]
    fn what_is_too_large_saturates() {
        for value in [6.0, 6.5, 7.0, 1e30, f32::INFINITY] {
            assert_eq!(encode(value), 7);
            assert_eq!(encode(-value), 15);
        }
        assert_eq!(encode(f32::NAN) & 7, 7);
    }

    #[test]
    fn the_first_element_is_the_low_nibble() {
        // The start of a stored row of the release, see the format's description.
        let mut codes = [0; 8];
        unpack(&[0xa0, 0xa8, 0xec, 0x4a], &mut codes);
        assert_eq!(codes.map(|c| E2M1[c as usize]), [0.0, -1.0, -0.0, -1.0, -2.0, -4.0, -1.0, 2.0]);
        let mut packed = [0; 4];
        pack(&codes, &mut packed);
        assert_eq!(packed, [0xa0, 0xa8, 0xec, 0x4a]);
    }

    #[test]
    fn a_group_of_layout_b_puts_sixteen_neighbours_into_sixteen_dwords() {
        let codes: [u8; GROUP] = std::array::from_fn(|i| (i * 7 + i / 16) as u8 & 15);
        let packed = pack_group(&codes);
        assert_eq!(unpack_group(&packed), codes);
        for lane in 0..16 {
            let dword = u32::from_le_bytes(packed[4 * lane..4 * lane + 4].try_into().unwrap());
            for nibble in 0..8 {
                assert_eq!((dword >> (4 * nibble) & 15) as u8, codes[16 * nibble + lane]);
            }
        }
    }
}
