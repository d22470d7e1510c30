//! Seeded inputs, shaped so that a wrong kernel cannot pass: no zeros, no symmetry, magnitudes spread.

use super::Pick;
use crate::reference_formats as formats;

/// A stream of seeded values (xorshift); equal on every machine.
pub struct Values(u64);

impl Values {
    pub fn new(seed: u64) -> Values {
        let mut values = Values((seed ^ 0x5851_f42d_4c95_7f2d).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        values.word();
        values
    }

    pub fn word(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.word() as usize % end
    }

    /// In [-1, 1), never zero.
    pub fn unit(&mut self) -> f32 {
        (self.word() | 1) as i32 as f32 / 2147483648.0
    }

    /// `count` float32 values of magnitude `scale`, over four binades.
    pub fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count)
            .map(|_| {
                let binade = [1.0, 0.5, 0.25, 0.125][self.below(4)];
                self.unit() * binade * scale
            })
            .collect()
    }

    /// As [`Values::floats`], rounded to bf16.
    pub fn bf16(&mut self, count: usize, scale: f32) -> Vec<f32> {
        self.floats(count, scale).into_iter().map(|value| formats::bf16(f64::from(value)) as f32).collect()
    }

    /// The bits of bf16 values.
    pub fn bf16_bits(&mut self, count: usize, scale: f32) -> Vec<u16> {
        self.bf16(count, scale).into_iter().map(|value| (value.to_bits() >> 16) as u16).collect()
    }

    /// Multiples of 32 columns that QDQ8 leaves as they are.
    pub fn qdq8(&mut self, count: usize, scale: f32) -> Vec<f32> {
        let wide: Vec<f64> = self.bf16(count, scale).into_iter().map(f64::from).collect();
        wide.chunks(32).flat_map(formats::qdq8).map(|value| value as f32).collect()
    }

    /// Multiples of 32 columns that QDQ4 with power-of-two scales leaves as they are.
    pub fn qdq4(&mut self, count: usize, scale: f32) -> Vec<f32> {
        let wide: Vec<f64> = self.bf16(count, scale).into_iter().map(f64::from).collect();
        wide.chunks(32).flat_map(formats::qdq4_e8m0).map(|value| value as f32).collect()
    }

    /// E4M3 codes that are numbers.
    pub fn e4m3(&mut self, count: usize) -> Vec<u8> {
        (0..count)
            .map(|_| match self.word() as u8 {
                code if code & 0x7f == 0x7f => code & 0xf0 | 0x3c,
                code => code,
            })
            .collect()
    }

    /// E8M0 codes of `2^low` to `2^(low + 3)`.
    pub fn e8m0(&mut self, count: usize, low: i32) -> Vec<u8> {
        (0..count).map(|_| (127 + low + self.below(4) as i32) as u8).collect()
    }

    /// Bytes of any value: two E2M1 codes each.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.word() as u8).collect()
    }

    /// `count` different numbers below `end`, in any order.
    pub fn distinct(&mut self, count: usize, end: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..end as u32).collect();
        for i in 0..count {
            let j = i + self.below(end - i);
            all.swap(i, j);
        }
        all.truncate(count);
        all
    }
}

/// A value that no neighbour may notice.
pub(super) fn poison(kind: usize, index: usize) -> f32 {
    match kind % Pick::POISON_KINDS {
        0 => f32::NAN,
        1 => [f32::INFINITY, f32::NEG_INFINITY][index % 2],
        2 => 0.0,
        3 => [3e38, -3e38][index / 2 % 2],
        _ => [f32::NAN, f32::INFINITY, 0.0, -0.0, 3e38, 1e-40][index % 6],
    }
}

/// The picked rows of `rows: [.., width]`, poison rows in their places.
pub fn gather(picks: &[Pick], rows: &[f32], width: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(picks.len() * width);
    for pick in picks {
        match *pick {
            Pick::Row(row) => out.extend_from_slice(&rows[row * width..][..width]),
            Pick::Poison(kind) => out.extend((0..width).map(|index| poison(kind, index))),
        }
    }
    out
}
