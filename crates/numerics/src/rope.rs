//! Frequencies and rotations of the rotary position embedding, to the bit of the release.
//!
//! A pair `i` of the rotated dimensions turns by `position * f[i]` radians. Everything is float32, as in the release, where it
//! shows: `t = f32(base^(2i / dim))`, `f[i] = 1 / t`, the product with the position, and then sine and cosine of that product.
//! At large positions a frequency or a phase of higher precision would give visibly different angles.

use crate::lanes::Float;
use crate::math::{ln_f64, pow, sin_cos};

/// How the release stretches frequencies beyond the trained length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f32,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub original_max_position_embeddings: u32,
}

/// `1 / f32(base^(2i / dim))` for the `dim / 2` pairs. `dim` is even.
pub fn frequencies(base: f64, dim: usize) -> Vec<f32> {
    assert!(dim.is_multiple_of(2), "pairs need an even number of dimensions");
    (0..dim / 2).map(|i| 1.0 / pow(base, 2 * i as u32, dim as u32)).collect()
}

/// [`frequencies`], blended with the same over `factor`: fast pairs keep theirs, slow ones are divided, between the pairs `low`
/// and `high` the share grows evenly.
pub fn yarn_frequencies(base: f64, dim: usize, yarn: Yarn) -> Vec<f32> {
    let (low, high) = yarn_range(base, dim, yarn);
    let width = (high - low).max(0.001) as f32;
    let blend = |(i, f): (usize, f32)| {
        let ramp = Float::max(0.0, Float::min(1.0, (i as f32 - low as f32) / width));
        f / yarn.factor * ramp + f * (1.0 - ramp)
    };
    frequencies(base, dim).into_iter().enumerate().map(blend).collect()
}

/// First and last pair of the blend.
fn yarn_range(base: f64, dim: usize, yarn: Yarn) -> (f64, f64) {
    // The pair that turns `rotations` times within the trained length.
    let pair = |rotations: f64| {
        let length = yarn.original_max_position_embeddings as f64 / (rotations * 2.0 * std::f64::consts::PI);
        dim as f64 * ln_f64(length) / (2.0 * ln_f64(base))
    };
    (pair(yarn.beta_fast).floor().max(0.0), pair(yarn.beta_slow).ceil().min(dim as f64 - 1.0))
}

/// Sine and cosine of `position * frequency`, the product rounded to float32 first.
#[inline(always)]
pub fn angle<F: Float>(position: F, frequency: F) -> (F, F) {
    sin_cos(position * frequency)
}

/// Sine and cosine of every pair at a position; all three slices have the same length.
pub fn angles(position: u32, frequencies: &[f32], sin: &mut [f32], cos: &mut [f32]) {
    assert_eq!(frequencies.len(), sin.len());
    assert_eq!(frequencies.len(), cos.len());
    for ((&f, sin), cos) in frequencies.iter().zip(sin).zip(cos) {
        (*sin, *cos) = angle(position as f32, f);
    }
}

/// Turns a pair: `(a, b) -> (a cos - b sin, a sin + b cos)`, each product rounded. With `-sin` it turns back.
#[inline(always)]
pub fn rotate<F: Float>(a: F, b: F, sin: F, cos: F) -> (F, F) {
    (a * cos - b * sin, a * sin + b * cos)
}

/// Turns the adjacent pairs `(2i, 2i + 1)` of a row in place and rounds them to bf16. `row.len()` is twice the pairs.
pub fn rotate_row(row: &mut [f32], sin: &[f32], cos: &[f32]) {
    turn(row, sin, cos, 1.0);
}

/// Undoes [`rotate_row`], up to rounding.
pub fn rotate_row_back(row: &mut [f32], sin: &[f32], cos: &[f32]) {
    turn(row, sin, cos, -1.0);
}

fn turn(row: &mut [f32], sin: &[f32], cos: &[f32], direction: f32) {
    assert_eq!(row.len(), 2 * sin.len());
    assert_eq!(row.len(), 2 * cos.len());
    for ((pair, &sin), &cos) in row.chunks_exact_mut(2).zip(sin).zip(cos) {
        let (a, b) = rotate(pair[0], pair[1], direction * sin, cos);
        (pair[0], pair[1]) = (a.bf16_round(), b.bf16_round());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16;

    const RELEASE: Yarn =
        Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_max_position_embeddings: 65_536 };

    #[test]
    fn frequencies_fall_from_one_by_equal_factors() {
        let plain = frequencies(10_000.0, 64);
        assert_eq!(plain.len(), 32);
        assert_eq!(plain[0], 1.0);
        assert_eq!(plain[16], 0.01);
        for pair in plain.windows(2) {
            assert!((pair[1] / pair[0] - 0.749_894_2).abs() < 1e-6);
        }
    }

    #[test]
    fn the_release_blends_between_pairs_15_and_25() {
        assert_eq!(yarn_range(160_000.0, 64, RELEASE), (15.0, 25.0));
        let (plain, blended) = (frequencies(160_000.0, 64), yarn_frequencies(160_000.0, 64, RELEASE));
        for i in 0..32 {
            let share = blended[i] / plain[i];
            match i {
                0..=15 => assert_eq!(share, 1.0, "{i}"),
                16..25 => assert!(share < 1.0 && share > 0.0625, "{i}"),
                _ => assert_eq!(share, 0.0625, "{i}"),
            }
        }
    }

    #[test]
    fn a_range_of_no_width_is_a_step() {
        let yarn = Yarn { beta_fast: 2.0, beta_slow: 1.9, ..RELEASE };
        let (low, high) = yarn_range(160_000.0, 4, yarn);
        assert_eq!((low, high), (1.0, 2.0));
        assert!(yarn_frequencies(160_000.0, 4, yarn).iter().all(|f| f.is_finite()));
    }

    #[test]
    fn pairs_are_adjacent_and_turn_counter_clockwise() {
        let mut row = [1.0, 0.0, 0.0, 2.0];
        rotate_row(&mut row, &[1.0, 1.0], &[0.0, 0.0]);
        assert_eq!(row, [0.0, 1.0, -2.0, 0.0]);
        rotate_row_back(&mut row, &[1.0, 1.0], &[0.0, 0.0]);
        assert_eq!(row, [1.0, 0.0, 0.0, 2.0]);
    }

    #[test]
    fn turning_back_undoes_a_turn_up_to_the_roundings() {
        let f = frequencies(10_000.0, 64);
        let (mut sin, mut cos) = ([0.0; 32], [0.0; 32]);
        for position in [0, 1, 77, 4095, 1_048_575] {
            angles(position, &f, &mut sin, &mut cos);
            let row: Vec<f32> = (0..64).map(|i| bf16::round((i as f32 - 31.7) * 0.13)).collect();
            let mut turned = row.clone();
            rotate_row(&mut turned, &sin, &cos);
            assert_eq!(turned == row, position == 0);
            assert!(turned.iter().all(|&v| bf16::round(v) == v));
            rotate_row_back(&mut turned, &sin, &cos);
            for (pair, wanted) in turned.chunks(2).zip(row.chunks(2)) {
                let length = wanted[0].hypot(wanted[1]);
                assert!((pair[0] - wanted[0]).abs() <= length / 64.0, "{position}");
                assert!((pair[1] - wanted[1]).abs() <= length / 64.0, "{position}");
            }
        }
    }
}
