//! Checkpoint bytes of one routed expert -> the layouts that the CUDA kernels stream, and back.
//!
//! ```text
//! slab = 16 rows, block = 64 columns; codes [slabs][blocks][32 lanes][16 bytes], lane = 4 g + t
//! lane's word k (0 to 3): columns 16k + 4t .. 16k + 4t + 3 of rows g (c0 c1 c2 c3) and g + 8 (d0 d1 d2 d3)
//! word (codes s e1 e0 m; each half of 16 bits holds four of them): low half = c0 c2 d0 d2, high half = c1 c3 d1 d3
//!   bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
//!   c0     s                    e1 e0  m
//!   c2              s                     e1 e0  m
//!   d0                       s                     e1 e0  m
//!   d2        s  m    e1 e0
//! scales [slabs][blocks][8 g] words of four bytes: row g and g + 8 of the first 32 columns, then of the second
//! a half block at the end of a row holds code 0 and scale 2^0 beyond the columns
//! up: slab i holds rows 8i..8i+7 of w1, then the same rows of w3.   down: slab i holds rows 16i..16i+15 of w2
//! ```
//! `c0 d0` and the like stand for pairs of neighbours: one mask and at most three shifts bring two codes to bf16's places.

use super::pack::ExpertBytes;
use crate::pack::{PackError, check_length, check_multiple, check_scale_range, check_scales};

/// Rows of a slab.
pub const SLAB: usize = 16;
/// Columns of a block.
pub const BLOCK: usize = 64;
const GROUP: usize = 32;
/// Scale codes for which code times scale is exact in bf16, and the kernel's factor is a bf16 number.
pub const SCALE_CODES: std::ops::RangeInclusive<u8> = 2..=128;

/// A matrix as the kernel reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
}

/// Where row `row` of a slab comes from: (matrix, row in it).
type RowOf = fn(slab: usize, row: usize) -> (usize, usize);

fn up_row(slab: usize, row: usize) -> (usize, usize) {
    (row / 8, slab * 8 + row % 8)
}

fn down_row(slab: usize, row: usize) -> (usize, usize) {
    (0, slab * SLAB + row)
}

/// Bytes of one expert's packed up codes, up scales, down codes and down scales.
pub const fn packed_len(hidden: usize, intermediate: usize) -> [usize; 4] {
    let up = 2 * intermediate * hidden.next_multiple_of(BLOCK);
    let down = hidden * intermediate.next_multiple_of(BLOCK);
    [up / 2, up / GROUP, down / 2, down / GROUP]
}

/// `w1` and `w3` for the first kernel and `w2` for the second.
///
/// # Errors
/// [`PackError`] when a dimension is no multiple of 32 (`hidden`, `intermediate`), a byte count differs from the shape, or a
/// scale is outside [`SCALE_CODES`].
pub fn pack(bytes: ExpertBytes<'_>, hidden: usize, intermediate: usize) -> Result<(Packed, Packed), PackError> {
    check_multiple("the hidden size", hidden, GROUP)?;
    check_multiple("the expert's intermediate size", intermediate, GROUP)?;
    let checked = [
        ("w1", bytes.w1, "the scale of w1", bytes.w1_scale, intermediate, hidden),
        ("w3", bytes.w3, "the scale of w3", bytes.w3_scale, intermediate, hidden),
        ("w2", bytes.w2, "the scale of w2", bytes.w2_scale, hidden, intermediate),
    ];
    for (name, weight, scale_name, scale, rows, columns) in checked {
        check_length(name, weight, rows * columns / 2, rows, columns / 2)?;
        check_length(scale_name, scale, rows * columns / GROUP, rows, columns / GROUP)?;
        check_scales(scale, columns / GROUP)?;
        check_scale_range(scale, columns / GROUP, SCALE_CODES)?;
    }
    let up = pack_matrix(&[(bytes.w1, bytes.w1_scale), (bytes.w3, bytes.w3_scale)], up_row, intermediate / 8, hidden);
    let down = pack_matrix(&[(bytes.w2, bytes.w2_scale)], down_row, hidden / SLAB, intermediate);
    Ok((up, down))
}

/// The checkpoint's bytes again: w1, its scale, w3, its scale, w2, its scale.
pub fn unpack(up: &Packed, down: &Packed, hidden: usize, intermediate: usize) -> [Vec<u8>; 6] {
    let mut tensors: [Vec<u8>; 6] =
        std::array::from_fn(|index| vec![0; hidden * intermediate / if index % 2 == 0 { 2 } else { GROUP }]);
    let [w1, w1_scale, w3, w3_scale, w2, w2_scale] = &mut tensors;
    unpack_matrix(up, &mut [(w1, w1_scale), (w3, w3_scale)], up_row, hidden);
    unpack_matrix(down, &mut [(w2, w2_scale)], down_row, intermediate);
    tensors
}

fn pack_matrix(matrices: &[(&[u8], &[u8])], row_of: RowOf, slabs: usize, columns: usize) -> Packed {
    let mut packed = Packed { codes: Vec::new(), scales: Vec::new() };
    for slab in 0..slabs {
        for block in 0..columns.div_ceil(BLOCK) {
            for lane in 0..32 {
                for word in 0..4 {
                    let column = block * BLOCK + word * 16 + lane % 4 * 4;
                    let four = |row: usize| -> [u8; 4] {
                        if column >= columns {
                            return [0; 4];
                        }
                        let (matrix, row) = row_of(slab, row);
                        let bytes = &matrices[matrix].0[(row * columns + column) / 2..][..2];
                        [bytes[0] & 15, bytes[0] >> 4, bytes[1] & 15, bytes[1] >> 4]
                    };
                    packed.codes.extend(join(four(lane / 4), four(lane / 4 + 8)).to_le_bytes());
                }
            }
            for g in 0..8 {
                for byte in 0..4 {
                    let (matrix, row) = row_of(slab, g + byte % 2 * 8);
                    let group = block * 2 + byte / 2;
                    let inside = group < columns / GROUP;
                    packed.scales.push(if inside { matrices[matrix].1[row * (columns / GROUP) + group] } else { 127 });
                }
            }
        }
    }
    packed
}

fn unpack_matrix(packed: &Packed, matrices: &mut [(&mut Vec<u8>, &mut Vec<u8>)], row_of: RowOf, columns: usize) {
    let blocks = columns.div_ceil(BLOCK);
    for (index, word) in packed.codes.as_chunks::<4>().0.iter().enumerate() {
        let (lane, slab) = (index / 4 % 32, index / 128 / blocks);
        let column = index / 128 % blocks * BLOCK + index % 4 * 16 + lane % 4 * 4;
        if column >= columns {
            continue;
        }
        for (half, four) in split(u32::from_le_bytes(*word)).into_iter().enumerate() {
            let (matrix, row) = row_of(slab, lane / 4 + half * 8);
            let bytes = [four[0] | four[1] << 4, four[2] | four[3] << 4];
            matrices[matrix].0[(row * columns + column) / 2..][..2].copy_from_slice(&bytes);
        }
    }
    for (index, scale) in packed.scales.iter().enumerate() {
        let (byte, g, block, slab) = (index % 4, index / 4 % 8, index / 32 % blocks, index / 32 / blocks);
        let (matrix, row) = row_of(slab, g + byte % 2 * 8);
        let group = block * 2 + byte / 2;
        if group < columns / GROUP {
            matrices[matrix].1[row * (columns / GROUP) + group] = *scale;
        }
    }
}

fn join(c: [u8; 4], d: [u8; 4]) -> u32 {
    let half = |c0: u8, c2: u8, d0: u8, d2: u8| {
        let [c0, c2, d0, d2] = [c0, c2, d0, d2].map(u32::from);
        let plain = |code: u32| (code & 8) << 12 | (code & 7) << 6;
        let last = (d2 & 8) << 11 | (d2 & 6) << 9 | (d2 & 1) << 13;
        plain(c0) | plain(c2) >> 3 | plain(d0) >> 6 | last
    };
    half(c[0], c[2], d[0], d[2]) | half(c[1], c[3], d[1], d[3]) << 16
}

fn split(word: u32) -> [[u8; 4]; 2] {
    let codes = |half: u32| {
        let plain = |bits: u32| ((bits >> 12 & 8) | (bits >> 6 & 7)) as u8;
        let last = ((half >> 11 & 8) | (half >> 9 & 6) | (half >> 13 & 1)) as u8;
        [plain(half), plain(half << 3 & 0xffff), plain(half << 6 & 0xffff), last]
    };
    let (low, high) = (codes(word & 0xffff), codes(word >> 16));
    [[low[0], high[0], low[1], high[1]], [low[2], high[2], low[3], high[3]]]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacking_gives_the_bytes_back() {
        for (hidden, intermediate) in [(128, 64), (160, 96), (32, 32)] {
            round_trip(hidden, intermediate);
        }
    }

    fn round_trip(hidden: usize, intermediate: usize) {
        let tensors: [Vec<u8>; 6] = std::array::from_fn(|index| {
            let count = hidden * intermediate / if index % 2 == 0 { 2 } else { 32 };
            (0..count)
                .map(|i| if index % 2 == 0 { (i * 37 + i / 256 + index) as u8 } else { 100 + (i % 28) as u8 })
                .collect()
        });
        let [w1, w1_scale, w3, w3_scale, w2, w2_scale] = &tensors;
        let bytes = ExpertBytes { w1, w1_scale, w3, w3_scale, w2, w2_scale };
        let (up, down) = pack(bytes, hidden, intermediate).expect("packs");
        let lengths = [up.codes.len(), up.scales.len(), down.codes.len(), down.scales.len()];
        assert_eq!(lengths, packed_len(hidden, intermediate));
        assert_eq!(unpack(&up, &down, hidden, intermediate), tensors);
        let bad = vec![129; hidden * intermediate / 32];
        assert!(pack(ExpertBytes { w2_scale: &bad, ..bytes }, hidden, intermediate).is_err());
        assert!(pack(bytes, hidden + 16, intermediate).is_err());
    }

    #[test]
    fn every_code_lands_where_the_kernel_masks() {
        for code in 0..16_u8 {
            let expected = u32::from(code & 8) << 12 | u32::from(code & 7) << 6;
            let word = join([code, 0, 0, 0], [0; 4]);
            assert_eq!(word & 0x81c0_81c0, expected);
            let word = join([0, 0, code, 0], [0; 4]);
            assert_eq!((word << 3) & 0x81c0_81c0, expected);
            let word = join([0; 4], [code, 0, 0, 0]);
            assert_eq!((word << 6) & 0x81c0_81c0, expected);
            let word = join([0; 4], [0, 0, code, 0]);
            let last = ((word << 1) & 0x8000_8000) | ((word >> 3) & 0x0180_0180) | ((word >> 7) & 0x0040_0040);
            assert_eq!(last, expected);
        }
    }
}
