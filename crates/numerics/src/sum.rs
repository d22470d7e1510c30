//! The order in which a linear adds: one order for every weight format, row count, thread count and instruction set.
//!
//! Sixteen lanes and four accumulators. Group `g` holds the 32 columns from `32 g` on:
//!
//! ```text
//! scaled  p            = w[32g + l] * x[32g + l]
//!         p            = fma(w[32g + 16 + l], x[32g + 16 + l], p)
//!         acc[g%4][l]  = fma(p, scale[g], acc[g%4][l])
//! plain   acc[g%4][l]  = fma(w[32g + 16 + l], x[32g + 16 + l], fma(w[32g + l], x[32g + l], acc[g%4][l]))
//! end     t[l]         = (acc[0][l] + acc[1][l]) + (acc[2][l] + acc[3][l]), then lanes fold by halves: 8, 4, 2, 1
//! ```
//!
//! `scaled` serves the formats with one power-of-two scale per 32 columns (MXFP4, and FP8 with 32 x 32 blocks; the scale of
//! the activations is already in `x`), `plain` serves bf16 and float32 weights. Columns are padded with zero weights, zero
//! activations and scale 1 to a multiple of 128, in the mirror too: a group left out may differ in the sign of a zero. The
//! order depends on the number of columns and the format only. Columns are never split between threads.
//!
//! [`dot_scaled`] and [`dot_plain`] are the mirrors: they define the bits. Kernels use [`Sum`] with decoded weights.

use crate::lanes::{Kernel, Lanes, Level, WIDTH, dispatch};

/// Columns are padded to a multiple of this.
pub const COLUMNS: usize = 128;
/// Columns that share a scale, and one step of an accumulator.
pub const GROUP: usize = 32;
/// Accumulators; group `g` goes to accumulator `g % 4`.
pub const ACCUMULATORS: usize = 4;

const _: () = assert!(COLUMNS == GROUP * ACCUMULATORS);
const _: () = assert!(GROUP == 2 * WIDTH);

/// `columns` after padding.
pub const fn padded(columns: usize) -> usize {
    columns.next_multiple_of(COLUMNS)
}

/// One output's accumulators.
#[derive(Clone, Copy)]
pub struct Sum<L>(pub [L; ACCUMULATORS]);

impl<L: Lanes> Sum<L> {
    #[inline(always)]
    pub fn zero() -> Self {
        Sum([L::splat(0.0); ACCUMULATORS])
    }

    /// Adds a group with a scale to accumulator `at` = `g % 4`.
    #[inline(always)]
    pub fn scaled(&mut self, at: usize, w: [L; 2], x: [L; 2], scale: L) {
        let p = w[1].fma(x[1], w[0] * x[0]);
        self.0[at] = p.fma(scale, self.0[at]);
    }

    /// Adds a group without a scale to accumulator `at` = `g % 4`.
    #[inline(always)]
    pub fn plain(&mut self, at: usize, w: [L; 2], x: [L; 2]) {
        self.0[at] = w[1].fma(x[1], w[0].fma(x[0], self.0[at]));
    }

    /// The sum of everything added.
    #[inline(always)]
    pub fn fold(self) -> f32 {
        let [a, b, c, d] = self.0;
        ((a + b) + (c + d)).fold()
    }
}

/// The mirror of `scaled`: `sum_k w[k] * x[k] * scales[k / 32]`. `w` and `x` have the same length, `scales` one entry a group.
pub fn dot_scaled(w: &[f32], scales: &[f32], x: &[f32]) -> f32 {
    assert_eq!(w.len(), x.len());
    assert_eq!(scales.len(), w.len().div_ceil(GROUP));
    let at = |row: &[f32], i: usize| row.get(i).copied().unwrap_or(0.0);
    let mut acc = [[0f32; WIDTH]; ACCUMULATORS];
    for g in 0..padded(w.len()) / GROUP {
        let scale = scales.get(g).copied().unwrap_or(1.0);
        for l in 0..WIDTH {
            let (low, high) = (GROUP * g + l, GROUP * g + WIDTH + l);
            let p = at(w, low) * at(x, low);
            let p = at(w, high).mul_add(at(x, high), p);
            acc[g % ACCUMULATORS][l] = p.mul_add(scale, acc[g % ACCUMULATORS][l]);
        }
    }
    fold_mirror(acc)
}

/// The mirror of `plain`: `sum_k w[k] * x[k]`. `w` and `x` have the same length.
pub fn dot_plain(w: &[f32], x: &[f32]) -> f32 {
    assert_eq!(w.len(), x.len());
    let at = |row: &[f32], i: usize| row.get(i).copied().unwrap_or(0.0);
    let mut acc = [[0f32; WIDTH]; ACCUMULATORS];
    for g in 0..padded(w.len()) / GROUP {
        for l in 0..WIDTH {
            let (low, high) = (GROUP * g + l, GROUP * g + WIDTH + l);
            let a = at(w, low).mul_add(at(x, low), acc[g % ACCUMULATORS][l]);
            acc[g % ACCUMULATORS][l] = at(w, high).mul_add(at(x, high), a);
        }
    }
    fold_mirror(acc)
}

fn fold_mirror(acc: [[f32; WIDTH]; ACCUMULATORS]) -> f32 {
    let mut t: [f32; WIDTH] = std::array::from_fn(|l| (acc[0][l] + acc[1][l]) + (acc[2][l] + acc[3][l]));
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            t[l] += t[l + half];
        }
    }
    t[0]
}

/// `plain` inside a kernel, for float32 rows of any length.
#[inline(always)]
pub fn dot_plain_lanes<L: Lanes>(w: &[f32], x: &[f32]) -> f32 {
    assert_eq!(w.len(), x.len());
    let mut sum = Sum::<L>::zero();
    let ((w, w_rest), (x, x_rest)) = (w.as_chunks::<COLUMNS>(), x.as_chunks::<COLUMNS>());
    for (w, x) in w.iter().zip(x) {
        add_columns(&mut sum, w, x);
    }
    if !w_rest.is_empty() {
        let (mut w, mut x) = ([0.0; COLUMNS], [0.0; COLUMNS]);
        w[..w_rest.len()].copy_from_slice(w_rest);
        x[..x_rest.len()].copy_from_slice(x_rest);
        add_columns(&mut sum, &w, &x);
    }
    sum.fold()
}

#[inline(always)]
fn add_columns<L: Lanes>(sum: &mut Sum<L>, w: &[f32; COLUMNS], x: &[f32; COLUMNS]) {
    let (w, x) = (w.as_chunks::<WIDTH>().0, x.as_chunks::<WIDTH>().0);
    for at in 0..ACCUMULATORS {
        let (low, high) = (2 * at, 2 * at + 1);
        sum.plain(
            at,
            [L::load_array(&w[low]), L::load_array(&w[high])],
            [L::load_array(&x[low]), L::load_array(&x[high])],
        );
    }
}

/// [`dot_plain`] on a level of choice.
pub fn dot_plain_at(level: Level, w: &[f32], x: &[f32]) -> f32 {
    struct Dot<'a>(&'a [f32], &'a [f32]);
    impl Kernel for Dot<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<L: Lanes>(self) -> f32 {
            dot_plain_lanes::<L>(self.0, self.1)
        }
    }
    dispatch(level, Dot(w, x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16;
    use crate::mxfp4;

    /// Values over 24 binades, so that cancellation and absorption both occur.
    fn values(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed | 1;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as u32
        };
        (0..count)
            .map(|_| bf16::round(f32::from_bits(random() << 8 & 0x807f_0000 | (115 + random() % 24) << 23)))
            .collect()
    }

    #[test]
    fn plain_rows_of_every_length_have_the_mirror_s_bits() {
        for columns in (0..300).chain([512, 1000, 5120]) {
            let (w, x) = (values(columns, 7), values(columns, 9));
            let wanted = dot_plain(&w, &x);
            for level in Level::available() {
                assert_eq!(dot_plain_at(level, &w, &x).to_bits(), wanted.to_bits(), "{level}, {columns} columns");
            }
        }
    }

    struct Scaled<'a> {
        packed: &'a [[u8; 64]],
        scales: &'a [f32],
        x: &'a [f32],
    }
    impl Kernel for Scaled<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<L: Lanes>(self) -> f32 {
            let x = self.x.as_chunks::<WIDTH>().0;
            let mut sum = Sum::<L>::zero();
            for (i, dwords) in self.packed.iter().enumerate() {
                let q = L::load_dwords(dwords);
                for at in 0..ACCUMULATORS {
                    let n = 2 * at;
                    sum.scaled(
                        at,
                        [L::decode_fp4(q, n as u32), L::decode_fp4(q, n as u32 + 1)],
                        [L::load_array(&x[8 * i + n]), L::load_array(&x[8 * i + n + 1])],
                        L::splat(self.scales[4 * i + at]),
                    );
                }
            }
            sum.fold()
        }
    }

    #[test]
    fn scaled_rows_decoded_from_layout_b_have_the_mirror_s_bits() {
        for columns in [32, 96, 128, 160, 640, 5120] {
            let codes: Vec<u8> = values(columns, 3).iter().map(|v| (v.to_bits() >> 16 & 15) as u8).collect();
            let x = values(columns, 5);
            let scales: Vec<f32> = (0..columns / 32).map(|g| 2f32.powi(g as i32 % 16 - 17)).collect();
            let w: Vec<f32> = codes.iter().map(|&c| mxfp4::E2M1[c as usize]).collect();
            let wanted = dot_scaled(&w, &scales, &x);

            let (mut codes, mut x, mut scales) = (codes, x, scales);
            codes.resize(padded(columns), 0);
            x.resize(padded(columns), 0.0);
            scales.resize(padded(columns) / GROUP, 1.0);
            let packed: Vec<_> = codes.as_chunks::<128>().0.iter().map(mxfp4::pack_group).collect();
            for level in Level::available() {
                let got = dispatch(level, Scaled { packed: &packed, scales: &scales, x: &x });
                assert_eq!(got.to_bits(), wanted.to_bits(), "{level}, {columns} columns");
            }
        }
    }

    #[test]
    fn another_order_would_be_noticed() {
        let (w, x) = (values(640, 7), values(640, 9));
        let one_chain = w.iter().zip(&x).fold(0f32, |sum, (w, x)| w.mul_add(*x, sum));
        assert_ne!(one_chain.to_bits(), dot_plain(&w, &x).to_bits());
    }

    #[test]
    fn padding_gives_positive_zero_for_an_empty_row() {
        assert_eq!(dot_plain(&[], &[]).to_bits(), 0);
        assert_eq!(dot_plain(&[-0.0], &[1.0]).to_bits(), 0);
    }

    #[test]
    fn sums_are_close_to_float64() {
        for columns in [64, 512, 5120] {
            let (w, x) = (values(columns, 11), values(columns, 13));
            let exact: f64 = w.iter().zip(&x).map(|(&w, &x)| w as f64 * x as f64).sum();
            let magnitude: f64 = w.iter().zip(&x).map(|(&w, &x)| (w as f64 * x as f64).abs()).sum();
            // Each lane rounds once a product it adds, and six folds follow.
            let bound = (columns as f64 / 64.0 + 6.0) * magnitude * f32::EPSILON as f64 / 2.0;
            assert!((dot_plain(&w, &x) as f64 - exact).abs() <= bound, "{columns}");
        }
    }
}
