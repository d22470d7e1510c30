//! Pairs are turned sixteen columns at a time: the row times the cosines, plus the row with its pairs swapped times the signed
//! sines.

use super::ROPE_DIM_MAX;
use tf_numerics::lanes::{Lanes, WIDTH};
use tf_numerics::math;

const CHUNKS: usize = ROPE_DIM_MAX / WIDTH;

/// Cosines and signed sines of one position, each written for both columns of its pair.
pub(crate) struct Phases {
    cosine: [[f32; WIDTH]; CHUNKS],
    /// `(-s, s)` of each pair.
    sine: [[f32; WIDTH]; CHUNKS],
    chunks: usize,
}

/// Which way a pair turns.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    Forward,
    Back,
}

impl Phases {
    /// Nothing turns yet; see [`Phases::set`].
    #[inline(always)]
    pub fn new() -> Phases {
        Phases { cosine: [[1.0; WIDTH]; CHUNKS], sine: [[0.0; WIDTH]; CHUNKS], chunks: 0 }
    }

    /// The phases of `position`; `2 * frequencies.len()` is a multiple of 16, at most [`ROPE_DIM_MAX`].
    #[inline(always)]
    pub fn set<L: Lanes>(&mut self, position: u32, frequencies: &[f32]) {
        assert!(2 * frequencies.len() <= ROPE_DIM_MAX);
        self.chunks = 2 * frequencies.len() / WIDTH;
        let position = L::splat(position as f32);
        for (i, frequencies) in frequencies.chunks(WIDTH).enumerate() {
            let (sine, cosine) = math::sin_cos(position * L::load_partial(frequencies, 0.0));
            let (sine, cosine) = (sine.to_array(), cosine.to_array());
            for l in 0..WIDTH {
                let (chunk, column) = (2 * i + l / 8, 2 * (l % 8));
                if chunk < CHUNKS {
                    self.cosine[chunk][column] = cosine[l];
                    self.cosine[chunk][column + 1] = cosine[l];
                    self.sine[chunk][column] = -sine[l];
                    self.sine[chunk][column + 1] = sine[l];
                }
            }
        }
    }
}

/// Turns the last columns of `row` in place and rounds them to bf16.
#[inline(always)]
pub(crate) fn turn<L: Lanes>(row: &mut [f32], phases: &Phases, direction: Turn) {
    let first = row.len() - phases.chunks * WIDTH;
    for (i, columns) in row[first..].as_chunks_mut::<WIDTH>().0.iter_mut().enumerate() {
        let mut swapped = [0.0; WIDTH];
        for pair in 0..WIDTH / 2 {
            swapped[2 * pair] = columns[2 * pair + 1];
            swapped[2 * pair + 1] = columns[2 * pair];
        }
        let sine = L::load_array(&phases.sine[i]);
        let sine = if direction == Turn::Back { -sine } else { sine };
        let turned = L::load_array(columns) * L::load_array(&phases.cosine[i]) + L::load_array(&swapped) * sine;
        turned.bf16_round().store_array(columns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics_policy::Numerics;
    use crate::rope::reference;
    use crate::testing::*;
    use tf_numerics::lanes::{Kernel, Level, dispatch};

    struct Turned<'a> {
        row: &'a [f32],
        position: u32,
        frequencies: &'a [f32],
        direction: Turn,
    }
    impl Kernel for Turned<'_> {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<L: Lanes>(self) -> Vec<f32> {
            let mut row = self.row.to_vec();
            let mut phases = Phases::new();
            phases.set::<L>(self.position, self.frequencies);
            turn::<L>(&mut row, &phases, self.direction);
            row
        }
    }

    #[test]
    fn rows_turn_as_defined_on_every_level_and_back_again() {
        let mut values = Values::new(6);
        let yarn = reference::Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_positions: 65536.0 };
        for (columns, rope_dim) in [(64, 16), (512, 64), (128, 64), (32, 16), (32, 32)] {
            for (base, yarn) in [(1e4, None), (1.6e5, Some(yarn))] {
                let frequencies = reference::frequencies(base, rope_dim, yarn);
                for position in [0, 1, 127, 4095, 1_000_003] {
                    let row = values.bf16(columns, 4.0);
                    for direction in [Turn::Forward, Turn::Back] {
                        let mut wanted: Vec<f64> = row.iter().map(|&v| v.into()).collect();
                        match direction {
                            Turn::Forward => reference::rotate(&mut wanted, position, &frequencies, Numerics::Exact),
                            Turn::Back => reference::rotate_back(&mut wanted, position, &frequencies, Numerics::Exact),
                        }
                        let job = || Turned { row: &row, position, frequencies: &frequencies, direction };
                        let got = dispatch(Level::Scalar, job());
                        for level in Level::available() {
                            assert_eq!(bits(&dispatch(level, job())), bits(&got), "{level}");
                        }
                        // Three float32 roundings and the error of sine and cosine, of terms up to 4, then bf16.
                        let bounds: Vec<f64> =
                            wanted.iter().map(|w| w.abs() * BF16_HALF_ULP + 8.0 * 8.0 * F32_HALF_ULP).collect();
                        assert_close(&got, &wanted, &bounds);
                        assert_eq!(got[..columns - rope_dim], row[..columns - rope_dim], "columns that do not turn");
                        if position != 0 {
                            assert_ne!(got[columns - rope_dim..], row[columns - rope_dim..]);
                        }
                    }
                }
            }
        }
    }
}
