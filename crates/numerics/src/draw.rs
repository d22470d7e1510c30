//! Keyed random draws: decision 0004 (`docs/adr/0004-keyed-draws.md`) in code.
//!
//! There is no generator state. A token's noise depends on (seed, position, token id) alone, so that a draw can't notice its
//! neighbours, drafts or resumes. Weights and their sums are integers: no order changes them.

use sha2::{Digest, Sha256};

use crate::lanes::{Float, Int};
use crate::math::ln;

/// No noise is larger, so a candidate further behind than this can't win.
pub const GUMBEL_MAX: f32 = 22.9;

/// Threefry2x32 with 20 rounds: two words from a key and a counter of two words each.
#[inline(always)]
pub fn threefry<I: Int>(key: [I; 2], counter: [I; 2]) -> [I; 2] {
    const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];
    let keys = [key[0], key[1], key[0].xor(key[1]).xor(I::splat(0x1bd1_1bda))];
    let [mut a, mut b] = [counter[0].add(keys[0]), counter[1].add(keys[1])];
    for group in 0..5 {
        for rotation in ROTATIONS[group % 2] {
            a = a.add(b);
            b = b.rotate_left(rotation).xor(a);
        }
        a = a.add(keys[(group + 1) % 3]);
        b = b.add(keys[(group + 2) % 3]).add(I::splat(group as u32 + 1));
    }
    [a, b]
}

/// The random word of each token.
#[inline(always)]
pub fn bits<I: Int>(seed: u64, position: u32, token: I) -> I {
    let key = [I::splat(seed as u32), I::splat((seed >> 32) as u32)];
    threefry(key, [token, I::splat(position)])[0]
}

/// A uniform value in [0, 1) from the word's upper 24 bits.
#[inline(always)]
pub fn uniform<F: Float>(bits: F::Int) -> F {
    F::from_int(bits.shr(8)) * F::splat(1.0 / 16_777_216.0)
}

/// Standard Gumbel noise from a random word: `-ln(-ln(u))`, `u = 1 - (r + 1/2) * 2^-32`, all 32 bits kept in both tails.
#[inline(always)]
pub fn gumbel<F: Float>(bits: F::Int) -> F {
    let int = F::Int::splat;
    let upper = bits.lt_signed(int(0));
    let t = F::Int::select(upper, bits.not(), bits);
    // The sum is rounded once: the upper half is a multiple of 65536, and the lower one plus a half is exact.
    let low = F::from_int(t.and(int(0xffff))) + F::splat(0.5);
    let m = F::from_int(t.shr(16)).fma(F::splat(65_536.0), low) * F::splat(f32::from_bits((127 - 32) << 23));
    let one = F::splat(1.0);
    let rest = one - m;
    // What `1 - m` lost, to first order.
    let lost = (-m - (rest - one)) / rest;
    let w = F::select(upper, m, rest);
    let c = F::select(upper, F::splat(0.0), lost);
    -ln(-(ln(w) + c))
}

/// The noise of each token.
#[inline(always)]
pub fn noise<F: Float>(seed: u64, position: u32, token: F::Int) -> F {
    gumbel(bits(seed, position, token))
}

/// Weights are in units of 2^-40 of the likeliest.
pub const WEIGHT_ONE: u64 = 1 << 40;

/// `floor(e * 2^40)` for `e` in [0, 1], as its upper and lower 20 bits (the upper one reaches 2^20 for `e` = 1).
#[inline(always)]
pub fn weight_halves<F: Float>(e: F) -> (F::Int, F::Int) {
    let scale = F::splat(1_048_576.0);
    let upper = e * scale;
    let whole = upper.to_int_trunc();
    // Both steps are exact: the difference has no bits that `upper` lacks.
    let lower = (upper - F::from_int(whole)) * scale;
    (whole, lower.to_int_trunc())
}

/// `floor(e * 2^40)` for `e` in [0, 1].
#[inline(always)]
pub fn weight(e: f32) -> u64 {
    let (upper, lower) = weight_halves(e);
    ((upper as u64) << 20) + lower as u64
}

/// Where a running sum of weights satisfies `top_p` of a total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold(u128);

impl Threshold {
    /// `top_p` in [0, 1); `total` below 2^62.
    pub fn new(top_p: f32, total: u64) -> Self {
        Threshold(total as u128 * Threshold::share_of(top_p) as u128)
    }

    /// `top_p` in [0, 1) in units of 2^-32.
    pub fn share_of(top_p: f32) -> u32 {
        // Scaling a float32 by 2^32 is exact, and the conversion rounds down.
        (top_p as f64 * 4_294_967_296.0) as u32
    }

    /// Whether the sum of a prefix is enough.
    #[inline]
    pub fn is_reached_by(self, sum: u64) -> bool {
        (sum as u128) << 32 >= self.0
    }
}

/// The seed of a request that brings none.
pub fn seed_from_prompt(prompt: &[u32], salt: &[u8]) -> u64 {
    let mut hash = Sha256::new();
    hash.update(b"tensorfold prompt seed 1");
    hash.update((salt.len() as u64).to_le_bytes());
    hash.update(salt);
    for id in prompt {
        hash.update(id.to_le_bytes());
    }
    first_word(hash)
}

/// The seed of choice `choice` of a request; choice 0 is the request's own reply.
pub fn choice_seed(seed: u64, choice: u32) -> u64 {
    if choice == 0 {
        return seed;
    }
    let mut hash = Sha256::new();
    hash.update(b"tensorfold choice seed 1");
    hash.update(seed.to_le_bytes());
    hash.update(choice.to_le_bytes());
    first_word(hash)
}

fn first_word(hash: Sha256) -> u64 {
    let digest = hash.finalize();
    u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::{Kernel, Lanes, Level, dispatch};
    use crate::math::log1p;

    #[test]
    fn the_generator_gives_its_published_words() {
        let cases = [
            ([0, 0], [0, 0], [0x6b20_0159, 0x99ba_4efe]),
            ([u32::MAX; 2], [u32::MAX; 2], [0x1cb9_96fc, 0xbb00_2be7]),
            ([0x1319_8a2e, 0x0370_7344], [0x243f_6a88, 0x85a3_08d3], [0xc492_3a9c, 0x483d_f7a0]),
        ];
        for (key, counter, words) in cases {
            assert_eq!(threefry::<u32>(key, counter), words, "{key:x?} {counter:x?}");
        }
    }

    #[test]
    fn key_and_counter_are_laid_out_as_decided() {
        let (seed, position, token) = (0x0370_7344_1319_8a2e, 0x85a3_08d3, 0x243f_6a88_u32);
        assert_eq!(bits(seed, position, token), 0xc492_3a9c);
        // Every part of the key matters.
        let all = [bits(1, 2, 3u32), bits(1 << 32, 2, 3u32), bits(1, 3, 2u32), bits(2, 1, 3u32), bits(1, 2, 4u32)];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b));
        }
    }

    struct Noise {
        seed: u64,
        position: u32,
        first: u32,
    }
    impl Kernel for Noise {
        type Output = [f32; 16];
        #[inline(always)]
        fn run<L: Lanes>(self) -> [f32; 16] {
            noise::<L>(self.seed, self.position, L::iota().add(L::Int::splat(self.first))).to_array()
        }
    }

    #[test]
    fn lanes_and_single_tokens_have_the_same_noise_on_every_level() {
        for level in Level::available() {
            for (seed, position) in [(0, 0), (8311264970021855313, 17), (u64::MAX, 1_048_575)] {
                for first in (0..129_280).step_by(16 * 37) {
                    let lanes = dispatch(level, Noise { seed, position, first });
                    for (l, value) in lanes.into_iter().enumerate() {
                        let one: f32 = noise(seed, position, first + l as u32);
                        assert_eq!(value.to_bits(), one.to_bits(), "{level}");
                    }
                }
            }
        }
    }

    #[test]
    fn noise_is_right_in_both_tails_and_never_beyond_its_limit() {
        let mut words: Vec<u32> = (0..4096).collect();
        words.extend((0..=u32::MAX).step_by(65_521));
        words.extend(words.clone().into_iter().map(|r| !r));
        words.extend([0x7fff_ffff, 0x8000_0000]);
        for r in words {
            let got = gumbel::<f32>(r) as f64;
            // 1 - u is exact in float64, and so is u.
            let v = (r as f64 + 0.5) / 4_294_967_296.0;
            let wanted = -(-(-v).ln_1p()).ln();
            let bound = 1e-6 * wanted.abs().max(0.2);
            assert!((got - wanted).abs() <= bound, "{r:#010x}: {got}, wanted {wanted}");
            assert!(got <= GUMBEL_MAX as f64);
            if r < 1 << 31 {
                let m = v as f32;
                assert_eq!(gumbel::<f32>(r).to_bits(), (-ln(-log1p(-m))).to_bits(), "{r:#010x}");
            }
        }
    }

    #[test]
    fn noise_has_the_moments_of_its_distribution() {
        let count = 400_000u32;
        let mut sums = [0.0; 2];
        for i in 0..count {
            let g = noise::<f32>(5, i % 1000, i / 1000) as f64;
            sums[0] += g;
            sums[1] += g * g;
        }
        let mean = sums[0] / count as f64;
        let variance = sums[1] / count as f64 - mean * mean;
        // Euler's constant and pi^2 / 6; five standard deviations of the estimates.
        assert!((mean - 0.577_215_66).abs() < 0.0102, "{mean}");
        assert!((variance - 1.644_934).abs() < 0.03, "{variance}");
    }

    #[test]
    fn uniform_values_come_from_the_upper_bits() {
        assert_eq!(uniform::<f32>(0xff), 0.0);
        assert_eq!(uniform::<f32>(0x8000_0000), 0.5);
        assert_eq!(uniform::<f32>(u32::MAX), 1.0 - f32::EPSILON / 2.0);
    }

    #[test]
    fn weights_are_rounded_down_exactly() {
        for e in [0.0, 1.0, 0.5, 0.999_999_94, 1e-3, 0.333_333_34, 9.094_947e-13, 9.09e-13, 1e-20, f32::from_bits(1)] {
            let wanted = (e as f64 * WEIGHT_ONE as f64).floor() as u64;
            assert_eq!(weight(e), wanted, "{e:e}");
        }
        for i in 0..100_000u32 {
            let e = f32::from_bits(0x3f80_0000 - i * 3_391);
            assert_eq!(weight(e), (e as f64 * WEIGHT_ONE as f64).floor() as u64, "{e:e}");
        }
    }

    #[test]
    fn thresholds_are_exact() {
        let half = Threshold::new(0.5, 10);
        assert!(!half.is_reached_by(4));
        assert!(half.is_reached_by(5));
        assert!(Threshold::new(0.0, 10).is_reached_by(0));
        let almost_all = Threshold::new(1.0 - f32::EPSILON / 2.0, 1 << 60);
        assert!(!almost_all.is_reached_by((1 << 60) - (1 << 36) - 1));
        assert!(almost_all.is_reached_by((1 << 60) - (1 << 36)));
    }

    #[test]
    fn seeds_are_as_decided() {
        assert_eq!(seed_from_prompt(&[], b""), EMPTY);
        assert_eq!(seed_from_prompt(&[0, 128_803, 5], b"salt"), SALTED);
        assert_ne!(seed_from_prompt(&[0, 128_803, 5], b""), SALTED);
        assert_eq!(choice_seed(42, 0), 42);
        assert_eq!(choice_seed(42, 1), CHOICE);
        assert_ne!(choice_seed(42, 2), CHOICE);
    }

    // Computed apart from this code, from the words of the decision.
    const EMPTY: u64 = 10_428_440_064_954_323_557;
    const SALTED: u64 = 6_096_688_156_033_971_099;
    const CHOICE: u64 = 17_384_333_909_637_774_036;
}
