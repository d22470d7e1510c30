//! The definition of the stored quantised forms: codes and scales of each block of a row.

use crate::reference_formats as formats;

/// E4M3 codes and E8M0 scale bytes, one for 32 values. `columns` must be a multiple of 32.
pub fn quantise_fp8(rows: &[f64], columns: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in blocks(rows, columns, 32) {
        let scale = formats::qdq8_scale(block);
        scales.push(formats::e8m0_encode(scale));
        codes.extend(block.iter().map(|value| formats::e4m3_encode(formats::e4m3(value / scale))));
    }
    (codes, scales)
}

/// Packed E2M1 codes (the even column in the low half) and E8M0 scale bytes, one for 32 values.
pub fn quantise_fp4_e8m0(rows: &[f64], columns: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in blocks(rows, columns, 32) {
        let scale = formats::qdq4_e8m0_scale(block);
        scales.push(formats::e8m0_encode(scale));
        codes.extend(block.iter().map(|value| formats::e2m1_encode(formats::e2m1(value / scale))));
    }
    (pack(&codes), scales)
}

/// Packed E2M1 codes and E4M3 scale bytes, one for 16 values. `columns` must be a multiple of 16.
pub fn quantise_fp4_e4m3(rows: &[f64], columns: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in blocks(rows, columns, 16) {
        let scale = formats::qdq4_e4m3_scale(block);
        scales.push(formats::e4m3_encode(scale));
        codes.extend(block.iter().map(|value| formats::e2m1_encode(formats::e2m1(value / scale))));
    }
    (pack(&codes), scales)
}

fn blocks(rows: &[f64], columns: usize, block: usize) -> impl Iterator<Item = &[f64]> {
    assert_eq!(columns % block, 0, "a row must consist of whole blocks");
    rows.chunks(block)
}

fn pack(codes: &[u8]) -> Vec<u8> {
    codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect()
}
