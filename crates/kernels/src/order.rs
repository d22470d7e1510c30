//! The orders in which the row kernels add over columns. They depend on the number of columns only.
//!
//! Columns are taken 16 at a time, chunk `t` holding columns `16 t ..`; every step is one fused multiply-add a lane. The
//! number of columns is a multiple of 16 (the launchers see to it).
//!
//! ```text
//! dot                          acc[l]      = fma(a[16t + l], b[16t + l], acc[l])
//! sum_squares, sum_products    acc[t%4][l] = fma(a[16t + l], b[16t + l], acc[t%4][l]);  acc = (acc[0] + acc[1]) + (acc[2] + acc[3])
//! end                          lanes fold by halves: 8, 4, 2, 1
//! ```
//!
//! `dot` serves many outputs at once, whose chains hide each other's latency; the others serve one output.

use tf_numerics::lanes::{Lanes, WIDTH};

/// Four accumulators of one output.
#[derive(Clone, Copy)]
pub struct Four<L>(pub [L; 4]);

impl<L: Lanes> Four<L> {
    #[inline(always)]
    pub fn zero() -> Self {
        Four([L::splat(0.0); 4])
    }

    #[inline(always)]
    pub fn fold(self) -> f32 {
        let [a, b, c, d] = self.0;
        ((a + b) + (c + d)).fold()
    }
}

/// `sum_c a[c] * b[c]`.
#[inline(always)]
pub fn sum_products<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    debug_assert!(a.len().is_multiple_of(WIDTH));
    let (a, b) = (a.as_chunks::<WIDTH>().0, b.as_chunks::<WIDTH>().0);
    let mut acc = Four::<L>::zero();
    let ((a4, a), (b4, b)) = (a.as_chunks::<4>(), b.as_chunks::<4>());
    for (a, b) in a4.iter().zip(b4) {
        for i in 0..4 {
            acc.0[i] = L::load_array(&a[i]).fma(L::load_array(&b[i]), acc.0[i]);
        }
    }
    for i in 0..3 {
        if i < a.len() {
            acc.0[i] = L::load_array(&a[i]).fma(L::load_array(&b[i]), acc.0[i]);
        }
    }
    acc.fold()
}

/// `sum_c x[c]^2`.
#[inline(always)]
pub fn sum_squares<L: Lanes>(x: &[f32]) -> f32 {
    sum_products::<L>(x, x)
}

/// `OUTPUTS` dots of each of `ROWS` vectors: `out[r][o] = weights[o] . x[r]`, `weights` being `[OUTPUTS, x.len() / ROWS]` and
/// `x` `[ROWS, columns]`.
#[inline(always)]
pub fn dot<L: Lanes, const ROWS: usize, const OUTPUTS: usize>(
    x: &[f32],
    weights: &[f32],
    columns: usize,
) -> [[f32; OUTPUTS]; ROWS] {
    debug_assert!(columns.is_multiple_of(WIDTH));
    let x: [&[[f32; WIDTH]]; ROWS] = std::array::from_fn(|r| x[r * columns..][..columns].as_chunks().0);
    let w: [&[[f32; WIDTH]]; OUTPUTS] = std::array::from_fn(|o| weights[o * columns..][..columns].as_chunks().0);
    let mut acc = [[L::splat(0.0); OUTPUTS]; ROWS];
    for t in 0..columns / WIDTH {
        let mut value = [L::splat(0.0); ROWS];
        for r in 0..ROWS {
            value[r] = L::load_array(&x[r][t]);
        }
        for o in 0..OUTPUTS {
            let weight = L::load_array(&w[o][t]);
            for r in 0..ROWS {
                acc[r][o] = weight.fma(value[r], acc[r][o]);
            }
        }
    }
    let mut out = [[0.0; OUTPUTS]; ROWS];
    for r in 0..ROWS {
        for o in 0..OUTPUTS {
            out[r][o] = acc[r][o].fold();
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Values;
    use tf_numerics::lanes::{Kernel, Level, dispatch};

    struct Sums<'a>(&'a [f32], &'a [f32]);
    impl Kernel for Sums<'_> {
        type Output = [f32; 2];
        #[inline(always)]
        fn run<L: Lanes>(self) -> [f32; 2] {
            [sum_products::<L>(self.0, self.1), dot::<L, 1, 1>(self.0, self.1, self.0.len())[0][0]]
        }
    }

    /// The orders of the module's text, in scalar arithmetic.
    fn mirror(a: &[f32], b: &[f32], accumulators: usize) -> f32 {
        let mut acc = [[0f32; 16]; 4];
        for (c, (a, b)) in a.iter().zip(b).enumerate() {
            let acc = &mut acc[c / 16 % accumulators][c % 16];
            *acc = a.mul_add(*b, *acc);
        }
        let mut t: [f32; 16] = std::array::from_fn(|l| match accumulators {
            1 => acc[0][l],
            _ => (acc[0][l] + acc[1][l]) + (acc[2][l] + acc[3][l]),
        });
        for half in [8, 4, 2, 1] {
            for l in 0..half {
                t[l] += t[l + half];
            }
        }
        t[0]
    }

    #[test]
    fn every_level_adds_in_the_written_order() {
        let mut values = Values::new(1);
        for columns in (0..=20).map(|i| 16 * i).chain([512, 5120]) {
            let (a, b) = (values.spread(columns), values.spread(columns));
            let wanted = [mirror(&a, &b, 4), mirror(&a, &b, 1)];
            for level in Level::available() {
                let got = dispatch(level, Sums(&a, &b));
                assert_eq!(got.map(f32::to_bits), wanted.map(f32::to_bits), "{level}, {columns} columns");
            }
        }
        let (a, b) = (values.uniform(5120, 1.0), values.uniform(5120, 1.0));
        assert_ne!(mirror(&a, &b, 4).to_bits(), mirror(&a, &b, 1).to_bits(), "the data would not notice another order");
    }

    #[test]
    fn a_tile_of_outputs_has_the_bits_of_each_alone() {
        struct Tile<'a>(&'a [f32], &'a [f32]);
        impl Kernel for Tile<'_> {
            type Output = ([[f32; 3]; 2], [[f32; 1]; 6]);
            #[inline(always)]
            fn run<L: Lanes>(self) -> Self::Output {
                let columns = self.0.len() / 2;
                let alone = std::array::from_fn(|i| {
                    let (r, o) = (i / 3, i % 3);
                    dot::<L, 1, 1>(&self.0[r * columns..], &self.1[o * columns..], columns)[0]
                });
                (dot::<L, 2, 3>(self.0, self.1, columns), alone)
            }
        }
        let mut values = Values::new(2);
        let (x, w) = (values.spread(2 * 160), values.spread(3 * 160));
        for level in Level::available() {
            let (tile, alone) = dispatch(level, Tile(&x, &w));
            assert_eq!(tile.as_flattened(), alone.as_flattened(), "{level}");
        }
    }
}
