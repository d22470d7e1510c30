//! The definition of the n-gram memory: which table rows a position reads, and how they enter the residual streams.

use crate::numerics_policy::Numerics;
use crate::rms_norm::reference::inverse_rms;

/// The hash of one layer: a multiplier for each lookback and a prime for each table column.
#[derive(Clone, Debug, PartialEq)]
pub struct Hash {
    /// `[ngram_max]`, odd.
    pub multipliers: Vec<u64>,
    /// `[(ngram_max - 1) * heads]`: columns of order 2 first.
    pub primes: Vec<u64>,
}

/// The hashes of all layers, in the order of `layer_ids`; `vocabulary` is the size of the compressed vocabulary.
pub fn hashes(layer_ids: &[usize], vocabulary: u64, bucket_min: u64, ngram_max: usize, heads: usize) -> Vec<Hash> {
    let mut seen: Vec<u64> = Vec::new();
    let of_layer = |&layer: &usize| {
        let mut primes = Vec::new();
        for _order in 2..=ngram_max {
            let mut candidate = bucket_min - 1;
            for _head in 0..heads {
                candidate += 1;
                while seen.contains(&candidate) || !is_prime(candidate) {
                    candidate += 1;
                }
                seen.push(candidate);
                primes.push(candidate);
            }
        }
        let bound = ((i64::MAX as u64) / vocabulary / 2).max(1);
        let mut generator = Generator::new(10007 * layer as u64);
        let multipliers = (0..ngram_max).map(|_| 2 * generator.below(bound) + 1).collect();
        Hash { multipliers, primes }
    };
    layer_ids.iter().map(of_layer).collect()
}

fn is_prime(n: u64) -> bool {
    n >= 2 && (2..).take_while(|d| d * d <= n).all(|d| !n.is_multiple_of(d))
}

/// The table rows of one position. `history[s]` is the compressed id of the token `s` positions back, `None` before the
/// start and for the tokens of an image; `pad` is the compressed id that stands for it and for everything behind it.
pub fn table_rows(history: &[Option<u32>], pad: u32, hash: &Hash) -> Vec<u64> {
    let heads = hash.primes.len() / (hash.multipliers.len() - 1);
    let (mut blocked, mut sum, mut offset, mut rows) = (false, 0u64, 0u64, Vec::new());
    for (back, &multiplier) in hash.multipliers.iter().enumerate() {
        let id = history.get(back).copied().flatten();
        blocked |= id.is_none();
        let id = if blocked { pad } else { id.unwrap_or(pad) };
        sum ^= u64::from(id).wrapping_mul(multiplier);
        if back == 0 {
            continue;
        }
        for &prime in &hash.primes[(back - 1) * heads..][..heads] {
            rows.push(sum % prime + offset);
            offset += prime;
        }
    }
    rows
}

/// The streams of one row after the memory: `X_i + sigmoid(copysign(sqrt(max(|d_i|, 1e-6)), d_i)) * V`, rounded, where
/// `d_i = sum(X_i q_i k_i key_i) / (rms(X_i) rms(key_i) sqrt(columns))`.
///
/// `streams`, `q_weight`, `k_weight`: `[hc, columns]`; `projected`: `[hc + 1, columns]`, the keys and then the value.
pub fn gate(
    streams: &[f64],
    projected: &[f64],
    q_weight: &[f64],
    k_weight: &[f64],
    columns: usize,
    eps: f64,
    numerics: Numerics,
) -> Vec<f64> {
    let value = &projected[streams.len()..];
    let mut out = Vec::with_capacity(streams.len());
    for (i, stream) in streams.chunks(columns).enumerate() {
        let (first, key) = (i * columns, &projected[i * columns..][..columns]);
        let product: f64 = (0..columns).map(|c| stream[c] * q_weight[first + c] * k_weight[first + c] * key[c]).sum();
        let d = product * inverse_rms(stream, eps) * inverse_rms(key, eps) / (columns as f64).sqrt();
        let gate = 1.0 / (1.0 + (-d.abs().max(1e-6).sqrt().copysign(d)).exp());
        out.extend(stream.iter().zip(value).map(|(x, value)| numerics.bf16(x + gate * value)));
    }
    out
}

/// NumPy's `default_rng(seed)`: PCG64 seeded through a `SeedSequence`.
#[derive(Clone, Debug)]
pub struct Generator {
    state: u128,
    increment: u128,
}

impl Generator {
    pub fn new(seed: u64) -> Generator {
        let words = seed_words(seed);
        let increment = (u128::from(words[2]) << 64 | u128::from(words[3])) << 1 | 1;
        let state = increment.wrapping_add(u128::from(words[0]) << 64 | u128::from(words[1]));
        let mut generator = Generator { state, increment };
        generator.step();
        generator
    }

    fn step(&mut self) {
        const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next(&mut self) -> u64 {
        self.step();
        ((self.state >> 64) as u64 ^ self.state as u64).rotate_right((self.state >> 122) as u32)
    }

    /// A uniform integer in `[0, bound)`. Equal to NumPy's for bounds above `2^32`.
    pub fn below(&mut self, bound: u64) -> u64 {
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.next()) * u128::from(bound);
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
        }
    }
}

/// NumPy's `SeedSequence(seed).generate_state(4, uint64)`.
pub fn seed_words(seed: u64) -> [u64; 4] {
    let entropy = [seed as u32, (seed >> 32) as u32, 0, 0];
    let mut constant = 0x43b0_d7e5u32;
    let mut hashed = |mut value: u32| {
        value ^= constant;
        constant = constant.wrapping_mul(0x931e_8875);
        value = value.wrapping_mul(constant);
        value ^ value >> 16
    };
    let mixed = |a: u32, b: u32| {
        let value = 0xca01_f9ddu32.wrapping_mul(a).wrapping_sub(0x4973_f715u32.wrapping_mul(b));
        value ^ value >> 16
    };
    let mut pool = entropy.map(&mut hashed);
    for source in 0..4 {
        for target in 0..4 {
            if target != source {
                pool[target] = mixed(pool[target], hashed(pool[source]));
            }
        }
    }
    let mut constant = 0x8b51_f9ddu32;
    let mut word = |i: usize| {
        let mut value = pool[i % 4] ^ constant;
        constant = constant.wrapping_mul(0x58f3_8ded);
        value = value.wrapping_mul(constant);
        u64::from(value ^ value >> 16)
    };
    std::array::from_fn(|i| word(2 * i) | word(2 * i + 1) << 32)
}
