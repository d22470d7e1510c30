//! Number formats for the float64 references, written from their definitions and shared with no production code.
//!
//! Every format is "round to the nearest multiple of a step, ties to even"; they differ in the step and in the limits.

/// Rounds to `fraction_bits` bits after the leading one, ties to even; below `2^exponent_min` the step stays constant.
fn nearest(value: f64, fraction_bits: i32, exponent_min: i32) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    // Every value that reaches this point is a normal float64, so its exponent field is its logarithm.
    let exponent = ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let step = 2f64.powi(exponent.max(exponent_min) - fraction_bits);
    (value / step).round_ties_even() * step
}

/// Nearest float32, ties to even.
pub fn f32(value: f64) -> f64 {
    f64::from(value as f32)
}

/// Nearest bfloat16, ties to even; infinite beyond the largest finite value.
pub fn bf16(value: f64) -> f64 {
    const MAX: f64 = 3.3895313892515355e38;
    let rounded = nearest(value, 7, -126);
    if rounded.abs() > MAX { f64::INFINITY.copysign(rounded) } else { rounded }
}

/// Nearest E4M3 value, ties to even, saturating at 448.
pub fn e4m3(value: f64) -> f64 {
    nearest(value.clamp(-448.0, 448.0), 3, -6)
}

/// Nearest E2M1 value (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), ties to the even code, saturating at 6.
pub fn e2m1(value: f64) -> f64 {
    nearest(value.clamp(-6.0, 6.0), 1, 0)
}

/// The value of an E4M3 code. `0x7f` and `0xff` are NaN.
pub fn e4m3_decode(code: u8) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => sign * fraction * 2f64.powi(-9),
        _ => sign * (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// The code of a value that E4M3 holds exactly.
pub fn e4m3_encode(value: f64) -> u8 {
    find_code(value, 0..=255, e4m3_decode)
}

/// The value of an E8M0 code: `2^(code - 127)`; 255 is NaN.
pub fn e8m0_decode(code: u8) -> f64 {
    if code == 255 { f64::NAN } else { 2f64.powi(i32::from(code) - 127) }
}

/// The code of a power of two between `2^-127` and `2^127`.
pub fn e8m0_encode(value: f64) -> u8 {
    find_code(value, 0..=254, e8m0_decode)
}

/// The value of an E2M1 code in the low four bits.
pub fn e2m1_decode(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The code of a value that E2M1 holds exactly.
pub fn e2m1_encode(value: f64) -> u8 {
    find_code(value, 0..=15, e2m1_decode)
}

fn find_code(value: f64, mut codes: std::ops::RangeInclusive<u8>, decode: fn(u8) -> f64) -> u8 {
    codes.find(|&code| decode(code).to_bits() == value.to_bits()).expect("the caller rounded the value to the format")
}

/// The smallest power of two that is not below `value`, a positive float32.
fn power_of_two_above(value: f64) -> f64 {
    let below = 2f64.powi(((value.to_bits() >> 52) & 0x7ff) as i32 - 1023);
    if below == value { below } else { 2.0 * below }
}

fn largest(block: &[f64]) -> f64 {
    block.iter().fold(0.0, |largest, value| value.abs().max(largest))
}

/// The scale of a QDQ8 block: the power of two that brings the largest magnitude to at most 448, from a float32 product.
pub fn qdq8_scale(block: &[f64]) -> f64 {
    let reciprocal = 1.0f32 / 448.0;
    power_of_two_above(f64::from(largest(block).max(f32(1e-4)) as f32 * reciprocal))
}

/// The scale of a QDQ4 block of index keys and queries.
pub fn qdq4_e8m0_scale(block: &[f64]) -> f64 {
    let reciprocal = 1.0f32 / 6.0;
    power_of_two_above(f64::from(largest(block).max(6.0 * 2f64.powi(-126)) as f32 * reciprocal))
}

/// The scale of a QDQ4 block of compressed entries: E4M3, so it need not be a power of two.
pub fn qdq4_e4m3_scale(block: &[f64]) -> f64 {
    e4m3(f64::from(largest(block).max(6.0 * 2f64.powi(-9)) as f32 / 6.0))
}

/// `value / scale` as float32 forms it.
fn quotient(value: f64, scale: f64) -> f64 {
    f64::from(value as f32 / scale as f32)
}

/// One block of 32 quantised to E4M3 under its own scale, and back. The values must be float32 values.
pub fn qdq8(block: &[f64]) -> Vec<f64> {
    let scale = qdq8_scale(block);
    block.iter().map(|&value| e4m3(quotient(value, scale)) * scale).collect()
}

/// One block of 32 quantised to E2M1 under a power-of-two scale, and back.
pub fn qdq4_e8m0(block: &[f64]) -> Vec<f64> {
    let scale = qdq4_e8m0_scale(block);
    block.iter().map(|&value| e2m1(quotient(value, scale)) * scale).collect()
}

/// One block of 16 quantised to E2M1 under an E4M3 scale, and back.
pub fn qdq4_e4m3(block: &[f64]) -> Vec<f64> {
    let scale = qdq4_e4m3_scale(block);
    block.iter().map(|&value| e2m1(quotient(value, scale)) * scale).collect()
}

/// `rows[r] . weight[n]` for every row and output: `x [rows, inner]` times the transpose of `weight [outputs, inner]`.
pub fn product(x: &[f64], weight: &[f64], inner: usize) -> Vec<f64> {
    assert_eq!(x.len() % inner, 0, "the rows must be whole");
    assert_eq!(weight.len() % inner, 0, "the weight must be [outputs, {inner}]");
    x.chunks(inner).flat_map(|row| weight.chunks(inner).map(|output| dot(row, output))).collect()
}

/// The scalar product of two vectors of one length, in eight interleaved sums.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let mut sums = [0.0; 8];
    let (a_blocks, b_blocks) = (a.chunks_exact(8), b.chunks_exact(8));
    let tail: f64 = a_blocks.remainder().iter().zip(b_blocks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_blocks.zip(b_blocks) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f64>() + tail
}
