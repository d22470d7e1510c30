//! Checkpoint bytes -> the layout that the CUDA kernels of this family and of the head stream, and back.
//!
//! ```text
//! slab = 16 weight rows, block = 32 columns; [slabs][blocks][2 k16 groups][32 lanes][16 bytes], lane = 4 g + t
//! lane's words of two columns each:   0: row g, columns 4t, 4t + 1       1: row g + 8, the same columns
//!                                     2: row g, columns 4t + 2, 4t + 3   3: row g + 8, the same columns
//! rows beyond the weight's and columns beyond its own hold zeros
//! ```

use crate::pack::{PackError, check_length, check_multiple};

/// Weight rows of a slab.
pub const SLAB: usize = 16;
/// Columns of a block.
pub const BLOCK: usize = 32;

/// Bytes of a packed weight of this shape.
pub const fn packed_len(rows: usize, columns: usize) -> usize {
    rows.next_multiple_of(SLAB) * columns.next_multiple_of(BLOCK) * 2
}

/// Packs `weight`: `[rows, columns]` bf16, little-endian.
///
/// # Errors
/// [`PackError`] when the byte count differs from the shape.
pub fn pack(weight: &[u8], rows: usize, columns: usize) -> Result<Vec<u8>, PackError> {
    check_multiple("the weight's row count", rows, 1)?;
    check_multiple("the weight's column count", columns, 1)?;
    check_length("the weight", weight, rows * columns * 2, rows, columns)?;
    let mut packed = Vec::with_capacity(packed_len(rows, columns));
    for word in 0..packed_len(rows, columns) / 4 {
        let (row, column) = place(word, columns);
        for column in [column, column + 1] {
            let at = (row * columns + column) * 2;
            let inside = row < rows && column < columns;
            packed.extend_from_slice(if inside { &weight[at..at + 2] } else { &[0, 0] });
        }
    }
    Ok(packed)
}

/// The checkpoint's bytes again.
pub fn unpack(packed: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    let mut weight = vec![0; rows * columns * 2];
    for (word, bytes) in packed.as_chunks::<4>().0.iter().enumerate() {
        let (row, first) = place(word, columns);
        for (column, value) in [first, first + 1].into_iter().zip(bytes.as_chunks::<2>().0) {
            if row < rows && column < columns {
                weight[(row * columns + column) * 2..][..2].copy_from_slice(value);
            }
        }
    }
    weight
}

/// Row and first column of a packed word.
fn place(word: usize, columns: usize) -> (usize, usize) {
    let (part, lane, group) = (word % 4, word / 4 % 32, word / 128);
    let groups = columns.div_ceil(BLOCK) * 2;
    let (slab, group) = (group / groups, group % groups);
    (slab * SLAB + lane / 4 + part % 2 * 8, group * 16 + lane % 4 * 4 + part / 2 * 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacking_gives_the_bytes_back() {
        for (rows, columns) in [(16, 32), (48, 96), (5, 84), (39, 33), (1, 2)] {
            let weight: Vec<u8> = (0..rows * columns * 2).map(|i| (i * 37 + i / 256) as u8).collect();
            let packed = pack(&weight, rows, columns).expect("packs");
            assert_ne!(packed, weight);
            assert_eq!(packed.len(), packed_len(rows, columns));
            assert_eq!(unpack(&packed, rows, columns), weight);
        }
        assert!(pack(&[0; 8 * 32 * 2], 16, 32).is_err());
    }
}
