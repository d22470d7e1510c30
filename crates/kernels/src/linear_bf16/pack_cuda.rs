//! Checkpoint bytes -> the layout that the CUDA kernels of this family and of the head stream, and back.
//!
//! ```text
//! slab = 16 weight rows, block = 32 columns; [slabs][blocks][2 k16 groups][32 lanes][16 bytes], lane = 4 g + t
//! lane's words of two columns each:   0: row g, columns 4t, 4t + 1       1: row g + 8, the same columns
//!                                     2: row g, columns 4t + 2, 4t + 3   3: row g + 8, the same columns
//! ```

use crate::pack::{PackError, check_length, check_multiple};

/// Weight rows of a slab.
pub const SLAB: usize = 16;
/// Columns of a block.
pub const BLOCK: usize = 32;

/// Packs `weight`: `[rows, columns]` bf16, little-endian.
///
/// # Errors
/// [`PackError`] when rows are no multiple of 16, columns none of 32, or the byte count differs from the shape.
pub fn pack(weight: &[u8], rows: usize, columns: usize) -> Result<Vec<u8>, PackError> {
    check_multiple("the weight's row count", rows, SLAB)?;
    check_multiple("the weight's column count", columns, BLOCK)?;
    check_length("the weight", weight, rows * columns * 2, rows, columns)?;
    let mut packed = Vec::with_capacity(weight.len());
    for word in 0..rows * columns / 2 {
        let (row, column) = place(word, columns);
        packed.extend_from_slice(&weight[(row * columns + column) * 2..][..4]);
    }
    Ok(packed)
}

/// The checkpoint's bytes again.
pub fn unpack(packed: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    let mut weight = vec![0; rows * columns * 2];
    for (word, bytes) in packed.as_chunks::<4>().0.iter().enumerate() {
        let (row, column) = place(word, columns);
        weight[(row * columns + column) * 2..][..4].copy_from_slice(bytes);
    }
    weight
}

/// Row and first column of a packed word.
fn place(word: usize, columns: usize) -> (usize, usize) {
    let (part, lane, group) = (word % 4, word / 4 % 32, word / 128);
    let (slab, group) = (group / (columns / 16), group % (columns / 16));
    (slab * SLAB + lane / 4 + part % 2 * 8, group * 16 + lane % 4 * 4 + part / 2 * 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacking_gives_the_bytes_back() {
        for (rows, columns) in [(16, 32), (48, 96)] {
            let weight: Vec<u8> = (0..rows * columns * 2).map(|i| (i * 37 + i / 256) as u8).collect();
            let packed = pack(&weight, rows, columns).expect("packs");
            assert_ne!(packed, weight);
            assert_eq!(unpack(&packed, rows, columns), weight);
        }
        assert!(pack(&[0; 8 * 32 * 2], 8, 32).is_err());
    }
}
