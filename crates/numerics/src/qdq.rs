//! Quantise-dequantise points of the release: block-scaled FP8 and FP4 activations and cache rows.
//!
//! | name | block | scale | codes |
//! | --- | --- | --- | --- |
//! | `fp8` | 32 | power of two, `2^ceil(log2(max(amax, 1e-4) * f32(1/448)))` as E8M0 | E4M3 |
//! | `fp4` | 32 | power of two, `2^ceil(log2(max(amax, 6 * 2^-126) * f32(1/6)))` as E8M0 | E2M1 |
//! | `fp4_fine` | 16 | `E4M3(max(amax, 6 * 2^-9) / 6)` as E4M3 | E2M1 |
//!
//! Values are divided by the scale, clamped to the largest code and rounded to nearest, ties to the even code. Code times
//! scale is exact in bf16, so that storing codes and storing rounded values are the same thing. A block that holds a NaN or
//! an infinity gets the NaN scale: all of it reads back as NaN, and no other block is touched.
//!
//! Block functions are generic over [`Lanes`] and inlined into the caller's kernel; row functions dispatch themselves and
//! accept a last block that is short (as if filled with zeros).

use crate::fp8::{E4M3_MAX, decode_e4m3, decode_e8m0, encode_e4m3, encode_e4m3_lanes, encode_e8m0_up};
use crate::lanes::{Float, Int, Kernel, Lanes, Level, Mask, dispatch};
use crate::mxfp4::{E2M1, E2M1_MAX, encode_lanes};

/// Values that share a power-of-two scale.
pub const BLOCK: usize = 32;
/// Values that share an E4M3 scale.
pub const FINE_BLOCK: usize = 16;

const FP8_AMAX_MIN: f32 = 1e-4;
/// 6 * 2^-126.
const FP4_AMAX_MIN: f32 = f32::from_bits(0x01c0_0000);
/// 6 * 2^-9.
const FP4_FINE_AMAX_MIN: f32 = 6.0 / 512.0;
const NAN_SCALE: u8 = 255;
const NAN_FINE_SCALE: u8 = 0x7f;

/// The scale byte of an FP8 block whose largest magnitude is `amax` (NaN or infinite for a bad block).
#[inline(always)]
pub fn fp8_scale(amax: f32) -> u8 {
    power_of_two_scale(amax, FP8_AMAX_MIN, 1.0 / E4M3_MAX)
}

/// The scale byte of an FP4 block of 32.
#[inline(always)]
pub fn fp4_scale(amax: f32) -> u8 {
    power_of_two_scale(amax, FP4_AMAX_MIN, 1.0 / E2M1_MAX)
}

#[inline(always)]
fn power_of_two_scale(amax: f32, least: f32, inverse_max: f32) -> u8 {
    if amax < f32::INFINITY { encode_e8m0_up(Float::max(amax, least) * inverse_max) } else { NAN_SCALE }
}

/// The scale byte of an FP4 block of 16.
#[inline(always)]
pub fn fp4_fine_scale(amax: f32) -> u8 {
    if amax < f32::INFINITY { encode_e4m3(Float::max(amax, FP4_FINE_AMAX_MIN) / E2M1_MAX) } else { NAN_FINE_SCALE }
}

/// 1 over the value of an E8M0 scale, exactly; NaN for 255. No scale of this module is below code 1 or, but for NaN, above 253.
#[inline(always)]
fn inverse_e8m0(code: u8) -> f32 {
    if code == NAN_SCALE { f32::NAN } else { f32::from_bits((254 - code as u32) << 23) }
}

/// Largest magnitude of sixteen lanes as the bits of a float32. As integers NaN is above infinity is above all else, so a bad
/// value can't be lost, and the order doesn't matter.
#[inline(always)]
fn magnitude_bits<L: Lanes>(value: L) -> L::Int {
    value.to_bits().and(L::Int::splat(0x7fff_ffff))
}

#[inline(always)]
fn amax32<L: Lanes>(low: L, high: L) -> f32 {
    f32::from_bits(L::fold_max_unsigned(magnitude_bits(low).max_unsigned(magnitude_bits(high))))
}

/// A block of 32 as E4M3 codes (`low`: 0 to 15, `high`: 16 to 31) and its scale byte.
#[inline(always)]
pub fn fp8_block<L: Lanes>(low: L, high: L) -> (L::Int, L::Int, u8) {
    let scale = fp8_scale(amax32(low, high));
    let inverse = L::splat(inverse_e8m0(scale));
    // The encoder saturates, which is the clamp.
    (encode_e4m3_lanes(low * inverse), encode_e4m3_lanes(high * inverse), scale)
}

/// A block of 32, rounded to what [`fp8_block`] stores.
#[inline(always)]
pub fn fp8_round_block<L: Lanes>(low: L, high: L) -> (L, L) {
    let scale = fp8_scale(amax32(low, high));
    let (inverse, scale) = (L::splat(inverse_e8m0(scale)), L::splat(decode_e8m0(scale)));
    (fp8_round(low * inverse) * scale, fp8_round(high * inverse) * scale)
}

/// The nearest E4M3 value without the detour through a code. `value` is a block's value over its scale.
#[inline(always)]
fn fp8_round<L: Lanes>(value: L) -> L {
    let int = L::Int::splat;
    let sign = value.to_bits().and(int(0x8000_0000));
    let magnitude = L::splat(E4M3_MAX).min(value.abs());
    let bits = magnitude.to_bits();
    let odd = bits.shr(20).and(int(1));
    let normal = L::from_bits(bits.add(int(0x7_ffff)).add(odd).and(int(0xfff0_0000)));
    // Adding and taking away 2^(23 - 9) rounds to steps of 2^-9; both are exact otherwise.
    let step = L::splat(16384.0);
    let subnormal = (magnitude + step) - step;
    let rounded = L::select(magnitude.lt(L::splat(1.0 / 64.0)), subnormal, normal);
    let rounded = L::select(magnitude.is_nan(), magnitude, rounded);
    L::from_bits(rounded.to_bits().or(sign))
}

/// A block of 32 as E2M1 codes and its scale byte.
#[inline(always)]
pub fn fp4_block<L: Lanes>(low: L, high: L) -> (L::Int, L::Int, u8) {
    let scale = fp4_scale(amax32(low, high));
    let inverse = L::splat(inverse_e8m0(scale));
    (encode_lanes(low * inverse), encode_lanes(high * inverse), scale)
}

/// A block of 32, rounded to what [`fp4_block`] stores.
#[inline(always)]
pub fn fp4_round_block<L: Lanes>(low: L, high: L) -> (L, L) {
    let (low, high, scale) = fp4_block(low, high);
    let scale = L::splat(decode_e8m0(scale));
    (L::decode_fp4(low, 0) * scale, L::decode_fp4(high, 0) * scale)
}

/// A block of 16 as E2M1 codes and its E4M3 scale byte.
#[inline(always)]
pub fn fp4_fine_block<L: Lanes>(values: L) -> (L::Int, u8) {
    let scale = fp4_fine_scale(f32::from_bits(L::fold_max_unsigned(magnitude_bits(values))));
    (encode_lanes(values / L::splat(decode_e4m3(scale))), scale)
}

/// A block of 16, rounded to what [`fp4_fine_block`] stores.
#[inline(always)]
pub fn fp4_fine_round_block<L: Lanes>(values: L) -> L {
    let (codes, scale) = fp4_fine_block(values);
    L::decode_fp4(codes, 0) * L::splat(decode_e4m3(scale))
}

/// Eight codes, one a byte in order, to four bytes of two codes each, the first one low.
#[inline(always)]
fn squeeze(codes: u64) -> u32 {
    let pairs = (codes | codes >> 4) & 0x00ff_00ff_00ff_00ff;
    let quads = (pairs | pairs >> 8) & 0x0000_ffff_0000_ffff;
    (quads | quads >> 16) as u32
}

/// Sixteen E2M1 codes to eight bytes, as stored rows hold them.
#[inline(always)]
pub fn pack_fp4<L: Lanes>(codes: L::Int) -> [u8; 8] {
    let mut bytes = [0u8; 16];
    L::store_u8(codes, &mut bytes);
    let halves = bytes.as_chunks::<8>().0;
    let low = squeeze(u64::from_le_bytes(halves[0])) as u64;
    let high = squeeze(u64::from_le_bytes(halves[1])) as u64;
    (low | high << 32).to_le_bytes()
}

/// Sixteen values of a stored FP4 row: eight bytes of two codes each, without their scale.
#[inline(always)]
pub fn unpack_fp4<L: Lanes>(packed: [u8; 8]) -> L {
    let spread = |half: u32| {
        let quads = (half as u64 | (half as u64) << 16) & 0x0000_ffff_0000_ffff;
        let pairs = (quads | quads << 8) & 0x00ff_00ff_00ff_00ff;
        (pairs | pairs << 4) & 0x0f0f_0f0f_0f0f_0f0f
    };
    let word = u64::from_le_bytes(packed);
    let mut bytes = [0u8; 16];
    bytes[..8].copy_from_slice(&spread(word as u32).to_le_bytes());
    bytes[8..].copy_from_slice(&spread((word >> 32) as u32).to_le_bytes());
    L::decode_fp4(L::load_u8(&bytes), 0)
}

/// Which of the three forms a row function applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// E4M3 codes, one power-of-two scale per 32.
    Fp8,
    /// E2M1 codes, one power-of-two scale per 32.
    Fp4,
    /// E2M1 codes, one E4M3 scale per 16.
    Fp4Fine,
}

impl Format {
    pub const ALL: [Format; 3] = [Format::Fp8, Format::Fp4, Format::Fp4Fine];

    /// Values that share a scale.
    pub const fn block(self) -> usize {
        match self {
            Format::Fp8 | Format::Fp4 => BLOCK,
            Format::Fp4Fine => FINE_BLOCK,
        }
    }

    /// Bytes of codes for `columns` values.
    pub const fn code_bytes(self, columns: usize) -> usize {
        match self {
            Format::Fp8 => columns,
            Format::Fp4 | Format::Fp4Fine => columns.div_ceil(2),
        }
    }

    /// Bytes of scales for `columns` values.
    pub const fn scale_bytes(self, columns: usize) -> usize {
        columns.div_ceil(self.block())
    }

    /// The value of a scale byte.
    pub fn scale(self, code: u8) -> f32 {
        match self {
            Format::Fp8 | Format::Fp4 => decode_e8m0(code),
            Format::Fp4Fine => decode_e4m3(code),
        }
    }
}

/// Rounds a row in place to what its stored form reads back as.
pub fn round_row(level: Level, format: Format, row: &mut [f32]) {
    dispatch(level, RoundRow { format, row });
}

struct RoundRow<'a> {
    format: Format,
    row: &'a mut [f32],
}

impl Kernel for RoundRow<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        round_row_lanes::<L>(self.format, self.row);
    }
}

/// [`round_row`] inside a kernel.
#[inline(always)]
pub fn round_row_lanes<L: Lanes>(format: Format, row: &mut [f32]) {
    for block in row.chunks_mut(format.block()) {
        let (low, high) = load_block::<L>(block);
        let (low, high) = match format {
            Format::Fp8 => fp8_round_block(low, high),
            Format::Fp4 => fp4_round_block(low, high),
            Format::Fp4Fine => (fp4_fine_round_block(low), high),
        };
        let count = block.len().min(16);
        if count == 16 {
            low.store(block);
        } else {
            low.store_partial(&mut block[..count]);
        }
        if block.len() == 32 {
            high.store(&mut block[16..]);
        } else {
            high.store_partial(&mut block[count..]);
        }
    }
}

#[inline(always)]
fn load_block<L: Lanes>(block: &[f32]) -> (L, L) {
    if block.len() == 32 {
        (L::load(block), L::load(&block[16..]))
    } else {
        let count = block.len().min(16);
        (L::load_partial(&block[..count], 0.0), L::load_partial(&block[count..], 0.0))
    }
}

/// Stores a row: `codes` holds `format.code_bytes(row.len())` bytes (FP4: two codes a byte, the first low; `row.len()` even),
/// `scales` one byte a block.
pub fn quantise_row(level: Level, format: Format, row: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    dispatch(level, QuantiseRow { format, row, codes, scales });
}

struct QuantiseRow<'a> {
    format: Format,
    row: &'a [f32],
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

impl Kernel for QuantiseRow<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        quantise_row_lanes::<L>(self.format, self.row, self.codes, self.scales);
    }
}

/// [`quantise_row`] inside a kernel.
#[inline(always)]
pub fn quantise_row_lanes<L: Lanes>(format: Format, row: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    assert_eq!(codes.len(), format.code_bytes(row.len()));
    assert_eq!(scales.len(), format.scale_bytes(row.len()));
    let code_bytes = format.code_bytes(format.block());
    for ((block, codes), scale) in row.chunks(format.block()).zip(codes.chunks_mut(code_bytes)).zip(scales) {
        let (low, high) = load_block::<L>(block);
        let mut bytes = [0u8; BLOCK];
        match format {
            Format::Fp8 => {
                let (low, high, byte) = fp8_block(low, high);
                L::store_u8(low, &mut bytes);
                L::store_u8(high, &mut bytes[16..]);
                *scale = byte;
            }
            Format::Fp4 => {
                let (low, high, byte) = fp4_block(low, high);
                bytes[..8].copy_from_slice(&pack_fp4::<L>(low));
                bytes[8..16].copy_from_slice(&pack_fp4::<L>(high));
                *scale = byte;
            }
            Format::Fp4Fine => {
                let (values, byte) = fp4_fine_block(low);
                bytes[..8].copy_from_slice(&pack_fp4::<L>(values));
                *scale = byte;
            }
        }
        let count = codes.len();
        codes.copy_from_slice(&bytes[..count]);
    }
}

/// Reads a stored row back; lengths as in [`quantise_row`]. Plain Rust: kernels decode inside their own loops.
pub fn dequantise_row(format: Format, codes: &[u8], scales: &[u8], row: &mut [f32]) {
    assert_eq!(codes.len(), format.code_bytes(row.len()));
    assert_eq!(scales.len(), format.scale_bytes(row.len()));
    for (i, value) in row.iter_mut().enumerate() {
        let scale = format.scale(scales[i / format.block()]);
        *value = scale
            * match format {
                Format::Fp8 => decode_e4m3(codes[i]),
                Format::Fp4 | Format::Fp4Fine => E2M1[(codes[i / 2] >> (4 * (i % 2)) & 15) as usize],
            };
    }
}

/// Whether a row has a value that would poison its block.
pub fn is_finite_row(level: Level, row: &[f32]) -> bool {
    struct Finite<'a>(&'a [f32]);
    impl Kernel for Finite<'_> {
        type Output = bool;
        #[inline(always)]
        fn run<L: Lanes>(self) -> bool {
            let (chunks, rest) = self.0.as_chunks::<16>();
            let mut largest = magnitude_bits(L::load_partial(rest, 0.0));
            for chunk in chunks {
                largest = largest.max_unsigned(magnitude_bits(L::load_array(chunk)));
            }
            largest.lt_unsigned(L::Int::splat(0x7f80_0000)).all()
        }
    }
    dispatch(level, Finite(row))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16;

    /// A block by the words of the module's table, in float64 and apart from the code above. `None`: the block is bad.
    fn block_by_definition(format: Format, block: &[f32]) -> Option<Vec<f32>> {
        if block.iter().any(|v| !v.is_finite()) {
            return None;
        }
        let amax = block.iter().fold(0f32, |m, v| if v.abs() > m { v.abs() } else { m });
        let power_of_two = |least: f32, max: f32| {
            let wanted = if amax > least { amax } else { least } * (1.0 / max);
            (-126..=127).map(|e| 2f64.powi(e)).find(|&s| s >= wanted as f64).unwrap()
        };
        let codes: Vec<f64> = match format {
            Format::Fp8 => (0..127).map(|c| decode_e4m3(c) as f64).collect(),
            Format::Fp4 | Format::Fp4Fine => E2M1[..8].iter().map(|&v| v as f64).collect(),
        };
        let nearest = |value: f64| {
            let value = value.min(codes[codes.len() - 1]);
            let distance = |i: usize| (codes[i] - value).abs();
            (0..codes.len()).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)))).unwrap()
        };
        let scale = match format {
            Format::Fp8 => power_of_two(1e-4, 448.0),
            Format::Fp4 => power_of_two(FP4_AMAX_MIN, 6.0),
            Format::Fp4Fine => {
                let wanted = (if amax > 6.0 / 512.0 { amax } else { 6.0 / 512.0 }) / 6.0;
                decode_e4m3(encode_e4m3(wanted)) as f64
            }
        };
        let round = |v: &f32| {
            // The quotient is a float32, as in the release.
            let quotient = (v.abs() as f64 / scale) as f32;
            ((codes[nearest(quotient as f64)] * scale) as f32).copysign(*v)
        };
        Some(block.iter().map(round).collect())
    }

    fn rows() -> Vec<Vec<f32>> {
        let mut state = 88172645463325252u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u32
        };
        let mut rows = Vec::new();
        // Any magnitudes at all, bf16; then neighbouring ones; then special rows.
        for spread in [254, 40, 6, 3] {
            for _ in 0..60 {
                let centre = 1 + random() % (255 - spread);
                rows.push(
                    (0..96)
                        .map(|_| {
                            let bits = random() & 0x807f_0000 | (centre + random() % spread) << 23;
                            bf16::round(f32::from_bits(bits))
                        })
                        .collect(),
                );
            }
        }
        rows.push(vec![0.0; 64]);
        rows.push(vec![-0.0; 64]);
        rows.push((0..64).map(|i| f32::from_bits(i << 16)).collect());
        rows.push((0..64).map(|i| bf16::round(448.0 - i as f32 * 16.0)).collect());
        rows.push((0..64).map(|i| (i as f32 - 32.0) * 0.25).collect());
        rows
    }

    #[test]
    fn rows_are_rounded_as_defined_on_every_level() {
        let mut blocks = 0;
        for row in rows() {
            for format in Format::ALL {
                let wanted: Vec<f32> =
                    row.chunks(format.block()).flat_map(|b| block_by_definition(format, b).unwrap()).collect();
                for level in Level::available() {
                    let mut rounded = row.clone();
                    round_row(level, format, &mut rounded);
                    for i in 0..row.len() {
                        assert_eq!(
                            rounded[i].to_bits(),
                            wanted[i].to_bits(),
                            "{format:?} {level} [{i}]: {:e} of {:?} gave {:e}, wanted {:e}",
                            row[i],
                            &row[i / format.block() * format.block()..][..format.block()],
                            rounded[i],
                            wanted[i]
                        );
                    }
                    blocks += row.len() / format.block();
                }
            }
        }
        assert!(blocks > 1000);
    }

    #[test]
    fn stored_rows_read_back_as_rounded_rows_and_fit_bf16() {
        for row in rows() {
            for format in Format::ALL {
                for level in Level::available() {
                    let mut rounded = row.clone();
                    round_row(level, format, &mut rounded);
                    let mut codes = vec![0; format.code_bytes(row.len())];
                    let mut scales = vec![0; format.scale_bytes(row.len())];
                    quantise_row(level, format, &row, &mut codes, &mut scales);
                    let mut read = vec![0.0; row.len()];
                    dequantise_row(format, &codes, &scales, &mut read);
                    for i in 0..row.len() {
                        assert_eq!(read[i].to_bits(), rounded[i].to_bits(), "{format:?} {level} [{i}]");
                        // The scale 2^-126 times a half is a float32 subnormal, which bf16 holds as well.
                        assert_eq!(bf16::round(read[i]).to_bits(), read[i].to_bits(), "{format:?} {level} [{i}]");
                    }
                }
            }
        }
    }

    #[test]
    fn a_short_last_block_is_filled_with_zeros() {
        for format in Format::ALL {
            for columns in [2, 14, 16, 18, 30, 34, 46, 48, 50] {
                let row: Vec<f32> = (0..columns).map(|i| bf16::round((i as f32 - 9.3) * 0.37)).collect();
                let mut long = row.clone();
                long.resize(64, 0.0);
                round_row(Level::Scalar, format, &mut long);
                for level in Level::available() {
                    let mut short = row.clone();
                    round_row(level, format, &mut short);
                    assert_eq!(short, long[..columns], "{format:?} {level} {columns}");
                    let mut codes = vec![0; format.code_bytes(columns)];
                    let mut scales = vec![0; format.scale_bytes(columns)];
                    quantise_row(level, format, &row, &mut codes, &mut scales);
                    let mut read = vec![0.0; columns];
                    dequantise_row(format, &codes, &scales, &mut read);
                    assert_eq!(read, short, "{format:?} {level} {columns}");
                }
            }
        }
    }

    #[test]
    fn a_bad_value_poisons_its_block_and_no_other() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
            for format in Format::ALL {
                let block = format.block();
                for level in Level::available() {
                    for at in [0, 7, block - 1] {
                        let mut row = vec![1.5; 3 * block];
                        row[block + at] = bad;
                        let mut codes = vec![0; format.code_bytes(row.len())];
                        let mut scales = vec![0; format.scale_bytes(row.len())];
                        quantise_row(level, format, &row, &mut codes, &mut scales);
                        assert!(!is_finite_row(level, &row));
                        round_row(level, format, &mut row);
                        let mut read = vec![0.0; row.len()];
                        dequantise_row(format, &codes, &scales, &mut read);
                        for i in 0..row.len() {
                            let poisoned = i / block == 1;
                            assert_eq!(row[i].is_nan(), poisoned, "{format:?} {level} [{i}]");
                            assert_eq!(read[i].is_nan(), poisoned, "{format:?} {level} [{i}]");
                        }
                    }
                }
            }
        }
    }

    struct Unpack([u8; 8]);
    impl Kernel for Unpack {
        type Output = ([f32; 16], [u8; 8]);
        #[inline(always)]
        fn run<L: Lanes>(self) -> Self::Output {
            let values = unpack_fp4::<L>(self.0);
            (values.to_array(), pack_fp4::<L>(encode_lanes(values)))
        }
    }

    #[test]
    fn packed_rows_decode_in_order() {
        for level in Level::available() {
            for seed in 0..=255u8 {
                let packed: [u8; 8] = std::array::from_fn(|i| seed.wrapping_mul(31).wrapping_add((37 * i) as u8));
                let (values, again) = dispatch(level, Unpack(packed));
                for i in 0..16 {
                    let code = packed[i / 2] >> (4 * (i % 2)) & 15;
                    assert_eq!(values[i].to_bits(), E2M1[code as usize].to_bits());
                }
                assert_eq!(again, packed);
            }
        }
    }
}
