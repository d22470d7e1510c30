//! Intervals that a float32 computation of a definition must end in.
//!
//! A kernel's value before a rounding lies within a radius of the exact one: unit roundoff times the number of roundings on
//! an element's way times the sum of absolute terms. Rounding to bf16, E4M3 or E2M1 is monotone, so it takes the ends of an
//! interval to the ends of the next: mostly one value, two where the exact value lies near a tie.

use crate::reference_formats as formats;
use crate::rope::reference::phase;

/// Unit roundoff of float32.
pub const U: f64 = 1.0 / 16_777_216.0;
/// Half the smallest subnormal of float32, below which its roundings have no relative error.
const TINY: f64 = 7.1e-46;

/// `low <= value <= high`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    pub low: f64,
    pub high: f64,
}

impl Span {
    pub fn exact(value: f64) -> Span {
        Span { low: value, high: value }
    }

    pub fn around(centre: f64, radius: f64) -> Span {
        Span { low: centre - radius, high: centre + radius }
    }

    pub fn all(values: &[f64]) -> Vec<Span> {
        values.iter().map(|value| Span::exact(*value)).collect()
    }

    pub fn centre(self) -> f64 {
        0.5 * (self.low + self.high)
    }

    pub fn radius(self) -> f64 {
        0.5 * (self.high - self.low)
    }

    /// The largest magnitude inside.
    pub fn largest(self) -> f64 {
        self.low.abs().max(self.high.abs())
    }

    /// The smallest magnitude inside.
    pub fn smallest(self) -> f64 {
        if self.low <= 0.0 && self.high >= 0.0 { 0.0 } else { self.low.abs().min(self.high.abs()) }
    }

    pub fn contains(self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }

    pub fn is_finite(self) -> bool {
        self.low.is_finite() && self.high.is_finite()
    }

    pub fn widened(self, radius: f64) -> Span {
        Span { low: self.low - radius, high: self.high + radius }
    }

    /// After `roundings` float32 roundings of the value itself.
    pub fn rounded(self, roundings: f64) -> Span {
        self.widened(self.largest() * U * roundings * 1.0001 + roundings * TINY)
    }

    pub fn plus(self, other: Span) -> Span {
        Span { low: self.low + other.low, high: self.high + other.high }
    }

    pub fn times(self, other: Span) -> Span {
        let ends = [self.low * other.low, self.low * other.high, self.high * other.low, self.high * other.high];
        Span {
            low: ends.iter().copied().fold(f64::INFINITY, f64::min),
            high: ends.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }

    pub fn scaled(self, factor: f64) -> Span {
        self.times(Span::exact(factor))
    }

    pub fn hull(self, other: Span) -> Span {
        Span { low: self.low.min(other.low), high: self.high.max(other.high) }
    }

    /// Through a monotone function.
    pub fn map(self, f: impl Fn(f64) -> f64) -> Span {
        Span { low: f(self.low), high: f(self.high) }
    }

    pub fn clamp(self, low: f64, high: f64) -> Span {
        self.map(|value| value.clamp(low, high))
    }

    /// Rounded to bf16.
    pub fn bf16(self) -> Span {
        self.map(formats::bf16)
    }
}

/// Radius of a dot product of exact operands: `roundings` on the longest way times the sum of absolute products.
pub fn dot_error(a: &[f64], b: &[f64], roundings: f64) -> f64 {
    let gamma = roundings * U / (1.0 - roundings * U);
    gamma * a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum::<f64>() + roundings * TINY
}

/// A dot product whose first operand is known to an interval.
pub fn dot_span(a: &[Span], b: &[f64], roundings: f64) -> Span {
    assert_eq!(a.len(), b.len());
    let gamma = roundings * U / (1.0 - roundings * U);
    let (mut centre, mut radius) = (0.0, roundings * TINY);
    for (a, b) in a.iter().zip(b) {
        centre += a.centre() * b;
        radius += a.radius() * b.abs() + gamma * a.largest() * b.abs();
    }
    Span::around(centre, radius)
}

/// Relative error of a sum of squares or of products of one sign in [`crate::order::sum_products`]: one product, a chain of
/// `columns / 64`, and six additions.
pub fn sum_error(columns: usize) -> f64 {
    (columns.div_ceil(64) + 7) as f64 * U
}

/// The last columns turned by their position; each output is two products with sine and cosine (2 U each), one sum, bf16.
pub fn rotate(row: &mut [Span], position: u32, frequencies: &[f32], forward: bool) {
    let first = row.len() - 2 * frequencies.len();
    for (pair, &frequency) in row[first..].chunks_mut(2).zip(frequencies) {
        let (cosine, sine) = phase(position, frequency);
        let sine = if forward { sine } else { -sine };
        let by = |value: Span, factor: f64| value.times(Span::around(factor, 2.0 * U)).rounded(1.0);
        let (a, b) = (pair[0], pair[1]);
        pair[0] = by(a, cosine).plus(by(b, -sine)).rounded(1.0).bf16();
        pair[1] = by(a, sine).plus(by(b, cosine)).rounded(1.0).bf16();
    }
}

/// QDQ8 of whole blocks of 32.
pub fn qdq_e4m3(row: &[Span]) -> Vec<Span> {
    quantised(row, 32, formats::qdq8_scale, formats::e4m3)
}

/// QDQ4 of blocks of 32 with power-of-two scales.
pub fn qdq_fp4(row: &[Span]) -> Vec<Span> {
    quantised(row, 32, formats::qdq4_e8m0_scale, formats::e2m1)
}

/// QDQ4 of blocks of 16 with E4M3 scales.
pub fn qdq_fine(row: &[Span]) -> Vec<Span> {
    quantised(row, 16, formats::qdq4_e4m3_scale, formats::e2m1)
}

/// The largest magnitude of a block is known to an interval, and so is its scale: mostly one, at most two.
fn quantised(row: &[Span], block: usize, scale: fn(&[f64]) -> f64, grid: fn(f64) -> f64) -> Vec<Span> {
    let mut out = Vec::with_capacity(row.len());
    for block in row.chunks(block) {
        let least = block.iter().fold(0f64, |most, span| most.max(span.smallest()));
        let most = block.iter().fold(0f64, |most, span| most.max(span.largest()));
        let under = |span: Span, scale: f64| span.map(|value| grid(f64::from(value as f32 / scale as f32)) * scale);
        let (small, large) = (scale(&[least]), scale(&[most]));
        out.extend(block.iter().map(|span| under(*span, small).hull(under(*span, large))));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_away_from_ties_rounds_to_one_value_and_near_a_tie_to_two() {
        let tie = 1.0 + 1.0 / 256.0;
        for (centre, ends) in [(1.001, 1), (tie, 2), (tie + 1e-4, 1), (-tie, 2)] {
            let span = Span::around(centre, 1e-6).bf16();
            assert_eq!(if span.low == span.high { 1 } else { 2 }, ends, "{centre}");
        }
    }

    #[test]
    fn a_block_whose_scale_is_open_covers_both() {
        // 448 is the largest value of scale 1; a little more takes scale 2, whose steps are twice as wide.
        let mut block = vec![Span::exact(17.0); 32];
        block[0] = Span::around(448.0, 0.01);
        let out = qdq_e4m3(&block);
        assert!(out[1].contains(16.0));
        block[0] = Span::exact(440.0);
        assert!(qdq_e4m3(&block)[1].is_finite());
        let exact: Vec<f64> = (0..32).map(|i| f64::from(i) * 0.37 - 5.0).collect();
        let spans = qdq_e4m3(&Span::all(&exact));
        for (span, value) in spans.iter().zip(formats::qdq8(&exact)) {
            assert_eq!((span.low, span.high), (value, value));
        }
    }

    #[test]
    fn dots_of_intervals_hold_the_dots_of_their_ends() {
        let a = [Span::around(1.0, 0.5), Span::around(-2.0, 0.25)];
        let span = dot_span(&a, &[3.0, -1.0], 4.0);
        for (x, y) in [(0.5, -2.25), (1.5, -1.75), (1.5, -2.25)] {
            assert!(span.contains(3.0 * x - y));
        }
        assert!(!span.contains(3.0 * 1.6 + 2.25));
    }
}
