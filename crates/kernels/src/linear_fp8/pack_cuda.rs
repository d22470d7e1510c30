//! Checkpoint bytes -> the layout that the CUDA kernel streams, and back.
//!
//! ```text
//! slab = 16 weight rows, block = 32 columns; codes [slabs][blocks][32 lanes][16 bytes], lane = 4 g + t
//! lane's words:   0: row g,     columns 4t..4t+3 of the block      1: row g + 8, the same columns
//!                 2: row g,     columns 16 + 4t..16 + 4t + 3       3: row g + 8, the same columns
//! word, columns c0 c1 c2 c3 (codes s eeee mmm; each half of 16 bits holds two of them):
//!   low half  = c0 | c2     high half = c1 | c3
//!   bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
//!   c0     s              e3 e2 e1 e0  m  m  m
//!   c2       e3 e2 e1  s                      e0  m  m  m
//! scales [ceil(slabs / 2)][blocks rounded up to 8] E8M0, the padding zero
//! rows beyond the weight's and columns beyond its own hold code 0
//! ```
//! One mask takes `c0 c1` to bf16's places, two shifts `c2 c3`: the kernel multiplies by `2^(120 + scale)`.

use crate::pack::{PackError, check_length, check_multiple, check_scale_range, check_scales};

/// Weight rows of a slab.
pub const SLAB: usize = 16;
/// Columns of a block.
pub const BLOCK: usize = 32;
/// A row of scales is this many bytes times a whole number.
pub const SCALE_ALIGNMENT: usize = 8;
/// Scale codes for which code times scale is exact in bf16, and the kernel's factor is a bf16 number.
pub const SCALE_CODES: std::ops::RangeInclusive<u8> = 3..=134;

/// A weight as the kernel reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
}

/// Bytes of the packed codes and scales of a weight of this shape.
pub const fn packed_len(rows: usize, columns: usize) -> (usize, usize) {
    let codes = rows.next_multiple_of(SLAB) * columns.next_multiple_of(BLOCK);
    (codes, rows.div_ceil(BLOCK) * columns.div_ceil(BLOCK).next_multiple_of(SCALE_ALIGNMENT))
}

/// Packs `weight`: `[rows, columns]` E4M3, and `scale`: `[rows / 32, columns / 32]` E8M0 (rounded up).
///
/// # Errors
/// [`PackError`] when a byte count differs from the shape, or a scale is outside [`SCALE_CODES`].
pub fn pack(weight: &[u8], scale: &[u8], rows: usize, columns: usize) -> Result<Packed, PackError> {
    check_multiple("the weight's row count", rows, 1)?;
    check_multiple("the weight's column count", columns, 1)?;
    check_length("the weight", weight, rows * columns, rows, columns)?;
    let (row_blocks, blocks) = (rows.div_ceil(BLOCK), columns.div_ceil(BLOCK));
    check_length("the scale", scale, row_blocks * blocks, row_blocks, blocks)?;
    check_scales(scale, blocks)?;
    check_scale_range(scale, blocks, SCALE_CODES)?;
    let (code_bytes, scale_bytes) = packed_len(rows, columns);
    let mut codes = Vec::with_capacity(code_bytes);
    for slab in 0..rows.div_ceil(SLAB) {
        for block in 0..blocks {
            for lane in 0..32 {
                for word in 0..4 {
                    let (row, column) = place(slab, block, lane, word);
                    let four = four_codes(weight, (row, column), (rows, columns));
                    codes.extend(join(four[0], four[1], four[2], four[3]).to_le_bytes());
                }
            }
        }
    }
    let mut scales = vec![0; scale_bytes];
    for (packed, row) in
        scales.chunks_exact_mut(blocks.next_multiple_of(SCALE_ALIGNMENT)).zip(scale.chunks_exact(blocks))
    {
        packed[..blocks].copy_from_slice(row);
    }
    Ok(Packed { codes, scales })
}

/// Codes `column` to `column + 3` of a row, 0 where the weight has none.
fn four_codes(weight: &[u8], (row, column): (usize, usize), (rows, columns): (usize, usize)) -> [u8; 4] {
    if row >= rows {
        return [0; 4];
    }
    if column + 4 <= columns {
        return weight[row * columns + column..][..4].try_into().expect("four bytes");
    }
    std::array::from_fn(|i| if column + i < columns { weight[row * columns + column + i] } else { 0 })
}

/// The checkpoint's bytes again: the weight and its scale.
pub fn unpack(packed: &Packed, rows: usize, columns: usize) -> (Vec<u8>, Vec<u8>) {
    let blocks = columns.div_ceil(BLOCK);
    let mut weight = vec![0; rows * columns];
    for (index, word) in packed.codes.as_chunks::<4>().0.iter().enumerate() {
        let (word, lane, block) = (u32::from_le_bytes(*word), index / 4 % 32, index / 128 % blocks);
        let (row, column) = place(index / 128 / blocks, block, lane, index % 4);
        if row < rows {
            let kept = columns.saturating_sub(column).min(4);
            weight[row * columns + column.min(columns)..][..kept].copy_from_slice(&split(word)[..kept]);
        }
    }
    let scale_rows = packed.scales.chunks_exact(blocks.next_multiple_of(SCALE_ALIGNMENT));
    (weight, scale_rows.flat_map(|row| &row[..blocks]).copied().collect())
}

/// Row and first column of a lane's word.
fn place(slab: usize, block: usize, lane: usize, word: usize) -> (usize, usize) {
    (slab * SLAB + lane / 4 + word % 2 * 8, block * BLOCK + word / 2 * 16 + lane % 4 * 4)
}

fn join(c0: u8, c1: u8, c2: u8, c3: u8) -> u32 {
    let half = |first: u8, second: u8| {
        let (first, second) = (u32::from(first), u32::from(second));
        (first & 0x80) << 8 | (first & 0x7f) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 | (second & 15)
    };
    half(c0, c2) | half(c1, c3) << 16
}

fn split(word: u32) -> [u8; 4] {
    let first = |half: u32| ((half >> 8 & 0x80) | (half >> 4 & 0x7f)) as u8;
    let second = |half: u32| ((half >> 4 & 0x80) | (half >> 8 & 0x70) | (half & 15)) as u8;
    let (low, high) = (word & 0xffff, word >> 16);
    [first(low), first(high), second(low), second(high)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacking_gives_the_bytes_back() {
        for (rows, columns) in [(16_usize, 32_usize), (48, 96), (32, 64), (5, 84), (39, 33), (1, 2)] {
            let weight: Vec<u8> = (0..rows * columns).map(|i| (i * 37 + i / 256) as u8).collect();
            let scale: Vec<u8> = (0..rows.div_ceil(32) * columns.div_ceil(32)).map(|i| 100 + i as u8).collect();
            let packed = pack(&weight, &scale, rows, columns).expect("packs");
            assert_ne!(packed.codes, weight);
            assert_eq!((packed.codes.len(), packed.scales.len()), packed_len(rows, columns));
            assert_eq!(unpack(&packed, rows, columns), (weight, scale));
        }
    }

    #[test]
    fn every_code_lands_where_the_kernel_masks() {
        for code in 0..=255_u8 {
            let word = join(code, 0, 0, 0);
            let sign = u32::from(code >> 7) << 15;
            let field = u32::from(code & 0x7f) << 4;
            assert_eq!(word & 0x87f0_87f0, sign | field);
            let word = join(0, 0, code, 0);
            assert_eq!(((word << 4) & 0x80f0_80f0) | ((word >> 4) & 0x0700_0700), sign | field);
        }
    }

    #[test]
    fn what_the_kernel_cannot_hold_exactly_is_refused() {
        let weight = vec![0; 16 * 32];
        for scale in [2, 135, 255] {
            assert!(pack(&weight, &[scale], 16, 32).is_err(), "scale {scale}");
        }
        for scale in [3, 134] {
            assert!(pack(&weight, &[scale], 16, 32).is_ok(), "scale {scale}");
        }
        assert!(pack(&weight[..8 * 32], &[120], 16, 32).is_err());
        assert!(pack(&weight, &[120, 120], 16, 32).is_err());
    }
}
