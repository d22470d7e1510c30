//! The rounding policy of the float64 references: what each one rounds, and where.
//!
//! A reference names every point at which the release rounds; the policy decides whether anything happens there. So one
//! definition serves as the mathematics, as a check of where values are quantised, and as the numbers of the release.

use crate::reference_formats as formats;

/// Where a reference rounds. Source: architecture notes, section 10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numerics {
    /// Nowhere: float64 throughout, RoPE phases excepted.
    Exact,
    /// At the quantise-dequantise points only; the value is rounded to float32 before each.
    Qdq,
    /// At every bfloat16 rounding point and every quantise-dequantise point of the release.
    Release,
}

impl Numerics {
    /// A bfloat16 rounding point. The release computes in float32, so the value passes through it.
    pub fn bf16(self, value: f64) -> f64 {
        match self {
            Numerics::Exact | Numerics::Qdq => value,
            Numerics::Release => formats::bf16(formats::f32(value)),
        }
    }

    /// [`Numerics::bf16`] on every value.
    pub fn bf16_all(self, values: Vec<f64>) -> Vec<f64> {
        values.into_iter().map(|value| self.bf16(value)).collect()
    }

    /// The QDQ8 point: E4M3 with one power-of-two scale for 32 values, along rows of `columns` values.
    pub fn qdq8(self, rows: &[f64], columns: usize) -> Vec<f64> {
        self.quantised(rows, columns, 32, formats::qdq8)
    }

    /// The QDQ4 point of index keys and queries: E2M1 with one power-of-two scale for 32 values.
    pub fn qdq4_e8m0(self, rows: &[f64], columns: usize) -> Vec<f64> {
        self.quantised(rows, columns, 32, formats::qdq4_e8m0)
    }

    /// The QDQ4 point of compressed entries: E2M1 with one E4M3 scale for 16 values.
    pub fn qdq4_e4m3(self, rows: &[f64], columns: usize) -> Vec<f64> {
        self.quantised(rows, columns, 16, formats::qdq4_e4m3)
    }

    fn quantised(self, rows: &[f64], columns: usize, block: usize, qdq: fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
        match self {
            Numerics::Exact => rows.to_vec(),
            Numerics::Qdq | Numerics::Release => {
                let rounded: Vec<f64> = rows.iter().map(|&value| formats::f32(value)).collect();
                rounded.chunks(columns).flat_map(|row| row.chunks(block).flat_map(qdq)).collect()
            }
        }
    }
}
