//! Formats, quantise-dequantise points and rotations against vectors recorded from outside this project.

use std::collections::HashMap;

use tf_numerics::lanes::Level;
use tf_numerics::qdq::{self, Format};
use tf_numerics::{bf16, fp8, rope};

/// The tensors of a safetensors file, as (shape, bytes).
struct Golden(HashMap<String, (Vec<usize>, Vec<u8>)>);

impl Golden {
    fn open() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/tests/golden/units.safetensors");
        let file = std::fs::read(path).expect("the golden file is part of the repository");
        let header_len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&file[8..8 + header_len]).unwrap();
        let data = &file[8 + header_len..];
        let numbers = |v: &serde_json::Value| -> Vec<usize> {
            v.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
        };
        let tensor = |v: &serde_json::Value| {
            let range = numbers(&v["data_offsets"]);
            (numbers(&v["shape"]), data[range[0]..range[1]].to_vec())
        };
        Golden(header.as_object().unwrap().iter().map(|(name, v)| (name.clone(), tensor(v))).collect())
    }
    fn bytes(&self, name: &str) -> &[u8] {
        &self.0[name].1
    }
    fn columns(&self, name: &str) -> usize {
        *self.0[name].0.last().unwrap()
    }
    fn f32(&self, name: &str) -> Vec<f32> {
        self.bytes(name).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
    fn i64(&self, name: &str) -> Vec<i64> {
        self.bytes(name).chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }
    fn bf16(&self, name: &str) -> Vec<f32> {
        self.bytes(name).chunks_exact(2).map(|b| bf16::to_f32(u16::from_le_bytes(b.try_into().unwrap()))).collect()
    }
}

fn assert_same(got: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(got.len(), wanted.len());
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert!(got == wanted || (got.is_nan() && wanted.is_nan()), "{what} [{i}]: {got:e}, wanted {wanted:e}");
    }
}

#[test]
fn e4m3_codes_have_the_recorded_values() {
    let wanted = Golden::open().f32("e4m3_table");
    for code in 0..=255u8 {
        // The recording shows NaN codes as 0.
        let value = if code & 0x7f == 0x7f { 0.0 } else { fp8::decode_e4m3(code) };
        assert_eq!(value, wanted[code as usize], "{code:#04x}");
    }
}

#[test]
fn quantised_and_dequantised_rows_are_as_recorded() {
    let golden = Golden::open();
    let (x, columns) = (golden.bf16("x"), golden.columns("x"));
    for (format, name) in [(Format::Fp8, "qdq8_32"), (Format::Fp4, "qdq4_32_e8m0"), (Format::Fp4Fine, "qdq4_16_e4m3")] {
        for level in Level::available() {
            let mut rounded = x.clone();
            for row in rounded.chunks_exact_mut(columns) {
                qdq::round_row(level, format, row);
            }
            assert_same(&rounded, &golden.bf16(name), &format!("{name} on {level}"));
        }
    }
}

#[test]
fn stored_rows_are_as_recorded() {
    let golden = Golden::open();
    let (x, columns) = (golden.bf16("x"), golden.columns("x"));
    for (format, codes, scales) in
        [(Format::Fp8, "fp8_codes", "fp8_scale_bytes"), (Format::Fp4, "fp4_packed", "fp4_scale_bytes")]
    {
        for level in Level::available() {
            let mut got_codes = vec![0; golden.bytes(codes).len()];
            let mut got_scales = vec![0; golden.bytes(scales).len()];
            for (i, row) in x.chunks_exact(columns).enumerate() {
                let (c, s) = (format.code_bytes(columns), format.scale_bytes(columns));
                qdq::quantise_row(level, format, row, &mut got_codes[i * c..][..c], &mut got_scales[i * s..][..s]);
            }
            assert_eq!(got_codes, golden.bytes(codes), "{codes} on {level}");
            assert_eq!(got_scales, golden.bytes(scales), "{scales} on {level}");
        }
    }
}

#[test]
fn rope_angles_of_the_release_are_as_recorded() {
    let golden = Golden::open();
    let yarn = rope::Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_max_position_embeddings: 65536 };
    let tables = [("plain", rope::frequencies(10_000.0, 64)), ("yarn", rope::yarn_frequencies(160_000.0, 64, yarn))];
    let positions = golden.i64("rope_positions");
    assert!(positions.iter().any(|&p| p > 100_000), "large positions are what tells frequencies apart");
    for (name, frequencies) in tables {
        let (sin, cos) = (golden.f32(&format!("rope_{name}_sin")), golden.f32(&format!("rope_{name}_cos")));
        let mut worst = 0f32;
        for (row, &position) in positions.iter().enumerate() {
            let (mut s, mut c) = ([0.0; 32], [0.0; 32]);
            rope::angles(position as u32, &frequencies, &mut s, &mut c);
            for i in 0..32 {
                for (got, wanted) in [(s[i], sin[32 * row + i]), (c[i], cos[32 * row + i])] {
                    let error = (got - wanted).abs();
                    assert!(error <= 1e-6, "{name} pair {i} at {position}: {got} is not {wanted}");
                    worst = worst.max(error);
                }
            }
        }
        println!("{name}: largest difference {worst:e}");
    }
}
