//! The sums of CUDA's kernels in scalar arithmetic: what a check compares that device with, bit for bit.
//!
//! Streams are bf16 values and the function's weights float32, so products stay float32 multiply-adds; what differs from
//! [`crate::order`] is that no chain is longer than 40 steps, so that a row's columns can be shared by many blocks. A row has
//! these bits however many blocks share it and however many rows a launch has.
//!
//! ```text
//! squares    quad q (of four streams one behind the other) = fma chain over columns 4q .. 4q + 3
//!            segment = 32 quads, folded by halves 16, 8, 4, 2, 1; lane l = segments l + l + 32 + ..; lanes fold by halves
//! products   chunk = 320 columns of the concatenated streams; lane l of 8 = fma chain over quads l, l + 8, .. of the chunk
//!            lanes fold by halves 4, 2, 1; lane l of 32 = chunks l + l + 32 + ..; lanes fold by halves
//! ```
//!
//! Every sum starts at +0 and takes what is missing at an end as +0.

use super::{CollapseArgs, EnterArgs, MIXES, STREAMS, cpu};
use tf_numerics::bf16;
use tf_numerics::lanes::Level;
use tf_numerics::qdq::{Format, round_row};

const QUAD: usize = 4;
const SEGMENT: usize = 32 * QUAD;
const CHUNK: usize = 320;
const LANES: usize = 8;

/// Chunks of the products of a row with `hidden` columns a stream.
pub(super) const fn chunks(hidden: usize) -> usize {
    (STREAMS * hidden).div_ceil(CHUNK)
}

/// Where the products lie in a row's scratch, behind the sums of squares by segment.
pub(super) const fn sums_at(hidden: usize) -> usize {
    hidden.div_ceil(SEGMENT).next_multiple_of(4)
}

/// A power of two of lanes.
fn fold<const N: usize>(mut lanes: [f32; N]) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Lane `l` adds parts `l`, `l + 32`, and so on.
fn fold_parts(parts: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0.0_f32; 32];
    for (i, part) in parts.enumerate() {
        lanes[i % 32] += part;
    }
    fold(lanes)
}

/// The sum of squares of rows of equal length, side by side.
fn squares(rows: &[&[f32]]) -> f32 {
    squares_in([0, 1, 2, 3], rows)
}

/// As [`squares`], a quad's columns in some order.
fn squares_in(order: [usize; QUAD], rows: &[&[f32]]) -> f32 {
    let columns = rows[0].len();
    let segment = |start: usize| {
        let mut lanes = [0.0_f32; SEGMENT / QUAD];
        for (lane, quad) in lanes.iter_mut().zip((start..columns).step_by(QUAD)) {
            for row in rows {
                *lane = order.iter().map(|i| row[quad + i]).fold(*lane, |sum, x| x.mul_add(x, sum));
            }
        }
        fold(lanes)
    };
    fold_parts((0..columns).step_by(SEGMENT).map(segment))
}

/// `weights . x`.
fn product(weights: &[f32], x: &[f32]) -> f32 {
    let chunk = |(weights, x): (&[f32], &[f32])| {
        let mut lanes = [0.0_f32; LANES];
        for (q, (weights, x)) in weights.chunks(QUAD).zip(x.chunks(QUAD)).enumerate() {
            let lane = &mut lanes[q % LANES];
            *lane = weights.iter().zip(x).fold(*lane, |sum, (w, x)| w.mul_add(*x, sum));
        }
        fold(lanes)
    };
    fold_parts(weights.chunks(CHUNK).zip(x.chunks(CHUNK)).map(chunk))
}

fn inverse_rms(squares: f32, columns: usize, eps: f32) -> f32 {
    1.0 / (squares / columns as f32 + eps).sqrt()
}

/// A row's collapsed streams, their norm, and that after QDQ8.
fn collapse(streams: &[f32], mix: &[f32], norm: &[f32], eps: f32) -> [Vec<f32>; 3] {
    let hidden = norm.len();
    let column = |c: usize| {
        let sum = (1..STREAMS).fold(mix[0] * streams[c], |sum, i| sum + mix[i] * streams[i * hidden + c]);
        bf16::round(sum)
    };
    let collapsed: Vec<f32> = (0..hidden).map(column).collect();
    let factor = inverse_rms(squares(&[&collapsed]), hidden, eps);
    let normed: Vec<f32> = collapsed.iter().zip(norm).map(|(u, norm)| bf16::round(norm * (u * factor))).collect();
    let mut quantised = normed.clone();
    round_row(Level::Scalar, Format::Fp8, &mut quantised);
    [collapsed, normed, quantised]
}

/// Of a row, column by column: what `norm` must be so that the norm of the row lies in the middle between two bf16 values, where
/// one unit of the last place of the sum of squares decides.
pub(super) fn edges(streams: &[f32], mix: &[f32], norm: &[f32], eps: f32) -> Vec<f32> {
    let [collapsed, normed, _] = collapse(streams, mix, norm, eps);
    let factor = inverse_rms(squares(&[&collapsed]), norm.len(), eps);
    let edge = |((u, normed), norm): ((&f32, &f32), &f32)| match *u == 0.0 {
        true => *norm,
        false => f32::from_bits(normed.to_bits() | 0x8000) / (u * factor),
    };
    collapsed.iter().zip(&normed).zip(norm).map(edge).collect()
}

/// As [`super::launch_enter`] on CUDA, with buffers of the host. The scratch is left as it is.
///
/// # Panics
/// When a buffer is smaller than the launch would take it.
pub fn enter(args: EnterArgs<'_>) {
    let EnterArgs { y, streams, mix, post, comb, weights, norm, constants, rows, hidden, .. } = args;
    let (function, base, scale) = (weights.function.f32(), weights.base.f32(), weights.scale.f32());
    let (mut normed, mut quantised) = (args.normed, args.quantised);
    let width = STREAMS * hidden;
    for r in 0..rows {
        let x = &mut streams.f32_mut()[r * width..(r + 1) * width];
        let (of_mix, of_post) = (r * STREAMS..(r + 1) * STREAMS, r * STREAMS..(r + 1) * STREAMS);
        let of_comb = r * STREAMS * STREAMS..(r + 1) * STREAMS * STREAMS;
        if let Some(y) = y {
            expand(
                &y.f32()[r * hidden..(r + 1) * hidden],
                x,
                &post.f32()[of_post.clone()],
                &comb.f32()[of_comb.clone()],
            );
        }
        let [_, row_normed, row_quantised] = collapse(x, &mix.f32()[of_mix.clone()], norm.f32(), constants.norm_eps);
        for (out, row) in [(&mut normed, row_normed), (&mut quantised, row_quantised)] {
            if let Some(out) = out {
                out.f32_mut()[r * hidden..(r + 1) * hidden].copy_from_slice(&row);
            }
        }
        let rows: Vec<&[f32]> = x.chunks(hidden).collect();
        let factor = inverse_rms(squares(&rows), width, constants.norm_eps);
        let z: [f32; MIXES] = std::array::from_fn(|o| product(&function[o * width..(o + 1) * width], x) * factor);
        let mixes = cpu::mixes(&z, scale, base, constants);
        mix.f32_mut()[of_mix].copy_from_slice(&mixes.pre);
        post.f32_mut()[of_post].copy_from_slice(&mixes.post);
        comb.f32_mut()[of_comb].copy_from_slice(&mixes.comb);
    }
}

fn expand(y: &[f32], x: &mut [f32], post: &[f32], comb: &[f32]) {
    let hidden = y.len();
    for c in 0..hidden {
        let was: [f32; STREAMS] = std::array::from_fn(|i| x[i * hidden + c]);
        for j in 0..STREAMS {
            let sum = (1..STREAMS).fold(comb[j] * was[0], |sum, i| sum + comb[i * STREAMS + j] * was[i]);
            x[j * hidden + c] = bf16::round(sum + post[j] * y[c]);
        }
    }
}

/// As [`super::launch_collapse`] on CUDA, with buffers of the host.
///
/// # Panics
/// As [`enter`].
pub fn collapse_rows(args: CollapseArgs<'_>) {
    let CollapseArgs { streams, mix, norm, norm_eps, rows, hidden, mut collapsed, mut normed, mut quantised } = args;
    for r in 0..rows {
        let streams = &streams.f32()[r * STREAMS * hidden..(r + 1) * STREAMS * hidden];
        let made = collapse(streams, &mix.f32()[r * STREAMS..(r + 1) * STREAMS], norm.f32(), norm_eps);
        for (out, row) in [&mut collapsed, &mut normed, &mut quantised].into_iter().zip(made) {
            if let Some(out) = out {
                out.f32_mut()[r * hidden..(r + 1) * hidden].copy_from_slice(&row);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::contract::COLLAPSE;
    use super::*;
    use crate::testing::Values;

    fn exact(a: &[f32], b: &[f32]) -> (f64, f64) {
        let terms = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        terms.fold((0.0, 0.0), |(sum, absolute), term| (sum + term, absolute + term.abs()))
    }

    #[test]
    fn sums_are_those_of_float64_within_their_roundings() {
        let mut values = Values::new(7);
        for hidden in [32, 96, 160, 512, 5120] {
            let (w, x) = (values.uniform(STREAMS * hidden, 1.0), values.bf16(STREAMS * hidden, 3.0));
            let unit = f64::from(f32::EPSILON) / 2.0;
            let (sum, absolute) = exact(&w, &x);
            // A chain of 40, three folds of lanes, four lanes' parts, five folds.
            assert!((f64::from(product(&w, &x)) - sum).abs() <= 52.0 * unit * absolute, "{hidden}");
            let (sum, _) = exact(&x, &x);
            let streams: Vec<&[f32]> = x.chunks(hidden).collect();
            assert!((f64::from(squares(&streams)) - sum).abs() <= 30.0 * unit * sum, "{hidden}");
        }
    }

    #[test]
    fn a_missing_end_counts_as_zeros() {
        let mut values = Values::new(8);
        let (w, x) = (values.uniform(700, 1.0), values.bf16(700, 3.0));
        let padded = |values: &[f32]| values.iter().copied().chain([0.0; 260]).collect::<Vec<f32>>();
        assert_eq!(product(&w, &x).to_bits(), product(&padded(&w), &padded(&x)).to_bits());
        assert_eq!(squares(&[&x]).to_bits(), squares(&[&padded(&x)]).to_bits());
    }

    #[test]
    fn the_order_is_the_written_one() {
        // Which columns meet first shows where a sum loses a one beside 2^24.
        let (huge, one) = (2.0_f32.powi(24), 1.0);
        let at = |places: &[(usize, f32)]| {
            let mut w = vec![0.0; 1280];
            places.iter().for_each(|(place, value)| w[*place] = *value);
            product(&w, &[1.0; 1280])
        };
        // In a lane: columns of its quad in turn.
        assert_eq!(at(&[(0, huge), (1, one), (2, -huge)]), 0.0);
        // Lanes 0 and 4 fold first, then 2, then 1.
        assert_eq!(at(&[(0, huge), (16, -huge), (4, one)]), 1.0);
        assert_eq!(at(&[(0, huge), (4, one), (8, -huge)]), 1.0);
        assert_eq!(at(&[(0, huge), (8, one), (4, -huge)]), 0.0);
        // Quads 0 and 8 are of one lane, before lanes fold.
        assert_eq!(at(&[(0, huge), (32, -huge), (16, one)]), 1.0);
        assert_eq!(at(&[(0, huge), (33, one), (34, -huge)]), 0.0);
        // Chunks come last: 0 and 2 fold before 1 joins.
        assert_eq!(at(&[(0, huge), (640, -huge), (320, one)]), 1.0);
        assert_eq!(at(&[(0, huge), (320, -huge), (640, one)]), 0.0);
    }

    /// What a planted edit of the CUDA source does: a case must show it.
    #[test]
    fn a_quad_squared_from_its_end_shows_on_the_edges() {
        let case = COLLAPSE.cases.iter().find(|case| case.size("quads") == 1).expect("a case of quads");
        let (streams, mix, norm) = super::super::contract::collapse_inputs(case, 1);
        let width = STREAMS * norm.len();
        let shown = streams.chunks(width).zip(mix.chunks(STREAMS)).map(|(streams, mix)| {
            let [collapsed, normed, _] = collapse(streams, mix, &norm, 1e-6);
            let factor = inverse_rms(squares_in([3, 2, 1, 0], &[&collapsed]), norm.len(), 1e-6);
            let other = collapsed.iter().zip(&norm).map(|(u, norm)| bf16::round(norm * (u * factor)));
            other.zip(&normed).filter(|(other, normed)| other.to_bits() != normed.to_bits()).count()
        });
        let shown: usize = shown.sum();
        assert!(shown >= 10, "{shown} outputs differ");
    }
}
