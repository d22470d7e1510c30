//! The definition of the rotary position encoding: adjacent pairs of the last columns turn by `position * frequency`.
//!
//! Frequencies and phases are float32 in every policy: at a million positions a float64 phase differs by 0.03 rad, and
//! the weights were trained with the float32 one.

use crate::numerics_policy::Numerics;

/// YaRN's parameters, as in the `rope_scaling` entry of a configuration.
#[derive(Clone, Copy, Debug)]
pub struct Yarn {
    pub factor: f32,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub original_positions: f64,
}

/// The frequency of each pair: `rope_dim / 2` values, with the YaRN blend if there is one.
pub fn frequencies(base: f64, rope_dim: usize, yarn: Option<Yarn>) -> Vec<f32> {
    let plain = (0..rope_dim / 2).map(|i| 1.0 / base.powf(2.0 * i as f64 / rope_dim as f64) as f32);
    let Some(yarn) = yarn else { return plain.collect() };
    let dimension = |turns: f64| {
        rope_dim as f64 * (yarn.original_positions / (turns * std::f64::consts::TAU)).ln() / (2.0 * base.ln())
    };
    let low = dimension(yarn.beta_fast).floor().max(0.0) as f32;
    let high = dimension(yarn.beta_slow).ceil().min(rope_dim as f64 - 1.0) as f32;
    let blend = |(i, frequency): (usize, f32)| {
        let ramp = ((i as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        frequency / yarn.factor * ramp + frequency * (1.0 - ramp)
    };
    plain.enumerate().map(blend).collect()
}

/// Cosine and sine of `position * frequency`, the product in float32.
pub fn phase(position: u32, frequency: f32) -> (f64, f64) {
    let phase = f64::from(position as f32 * frequency);
    (phase.cos(), phase.sin())
}

/// Turns the last `2 * frequencies.len()` columns of `row` forward, rounding the results.
pub fn rotate(row: &mut [f64], position: u32, frequencies: &[f32], numerics: Numerics) {
    turn(row, position, frequencies, 1.0, numerics);
}

/// Turns them back.
pub fn rotate_back(row: &mut [f64], position: u32, frequencies: &[f32], numerics: Numerics) {
    turn(row, position, frequencies, -1.0, numerics);
}

fn turn(row: &mut [f64], position: u32, frequencies: &[f32], direction: f64, numerics: Numerics) {
    let first = row.len() - 2 * frequencies.len();
    for (pair, &frequency) in row[first..].chunks_mut(2).zip(frequencies) {
        let (cosine, sine) = phase(position, frequency);
        let (a, b) = (pair[0], pair[1]);
        pair[0] = numerics.bf16(a * cosine - b * direction * sine);
        pair[1] = numerics.bf16(a * direction * sine + b * cosine);
    }
}
