//! Which Engram table rows a token reads: bucket primes, hash multipliers and row ids (spec section 9). Pure integers.
//!
//! A row id depends on the last `engram_max_ngram_size` token ids alone, folded to a smaller vocabulary. The folded map
//! belongs to the tokenizer and is given; everything else follows from the configuration.

use super::shape::Shape;

/// The hash buckets of one Engram layer, one per column. Column `(n - 2) * heads + head` belongs to n-grams of `n`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets {
    pub primes: Vec<u64>,
    /// First table row of each column.
    pub offsets: Vec<u64>,
    /// All rows of the table.
    pub rows: u64,
}

/// The buckets of every Engram layer. No prime is used twice, in one layer or across layers.
pub fn buckets(shape: &Shape) -> Vec<Buckets> {
    let mut used = std::collections::HashSet::new();
    let mut layers = Vec::new();
    for _ in shape.engram_layer_ids.iter() {
        let mut layer = Buckets { primes: Vec::new(), offsets: Vec::new(), rows: 0 };
        for _ in 2..=shape.engram_max_ngram_size {
            let mut candidate = shape.engram_vocab_size - 1;
            for _ in 0..shape.engram_n_heads {
                candidate = next_prime(candidate, &used);
                used.insert(candidate);
                layer.primes.push(candidate);
                layer.offsets.push(layer.rows);
                layer.rows += candidate;
            }
        }
        layers.push(layer);
    }
    layers
}

/// The smallest prime above `floor` that isn't used.
fn next_prime(floor: u64, used: &std::collections::HashSet<u64>) -> u64 {
    (floor + 1..).find(|number| !used.contains(number) && is_prime(*number)).expect("primes never end")
}

fn is_prime(number: u64) -> bool {
    number >= 2
        && (2..).take_while(|divisor| divisor * divisor <= number).all(|divisor| !number.is_multiple_of(divisor))
}

/// The hash multipliers of a layer, one per lookback: odd numbers drawn as NumPy's
/// `default_rng(10007 * layer).integers(0, bound)` draws them.
pub fn multipliers(layer: usize, compressed_vocab_size: u64, count: usize) -> Vec<u64> {
    let bound = ((i64::MAX as u64) / compressed_vocab_size / 2).max(1);
    let mut generator = Pcg64::seeded(10_007 * layer as u64);
    (0..count).map(|_| 2 * generator.below(bound) + 1).collect()
}

/// NumPy's `SeedSequence`: four 64-bit words from one number.
fn seed_words(seed: u64) -> [u64; 4] {
    let mut constant: u32 = 0x43b0_d7e5;
    let mut hashed = |value: u32| {
        let value = value ^ constant;
        constant = constant.wrapping_mul(0x931e_8875);
        let value = value.wrapping_mul(constant);
        value ^ (value >> 16)
    };
    let mixed = |left: u32, right: u32| {
        let value = 0xca01_f9dd_u32.wrapping_mul(left).wrapping_sub(0x4973_f715_u32.wrapping_mul(right));
        value ^ (value >> 16)
    };
    let entropy = [seed as u32, (seed >> 32) as u32, 0, 0];
    let mut pool = entropy.map(&mut hashed);
    for source in 0..4 {
        for target in (0..4).filter(|target| *target != source) {
            pool[target] = mixed(pool[target], hashed(pool[source]));
        }
    }
    let mut constant: u32 = 0x8b51_f9dd;
    let mut word = |index: usize| {
        let value = pool[index % 4] ^ constant;
        constant = constant.wrapping_mul(0x58f3_8ded);
        let value = value.wrapping_mul(constant);
        u64::from(value ^ (value >> 16))
    };
    std::array::from_fn(|index| word(2 * index) | word(2 * index + 1) << 32)
}

/// NumPy's default bit generator.
struct Pcg64 {
    state: u128,
    increment: u128,
}

impl Pcg64 {
    const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;

    fn seeded(seed: u64) -> Self {
        let words = seed_words(seed);
        let join = |high: u64, low: u64| u128::from(high) << 64 | u128::from(low);
        let increment = join(words[2], words[3]) << 1 | 1;
        let mut generator = Pcg64 { state: increment, increment };
        generator.state = generator.state.wrapping_add(join(words[0], words[1]));
        generator.step();
        generator
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(Self::MULTIPLIER).wrapping_add(self.increment);
    }

    fn next(&mut self) -> u64 {
        self.step();
        ((self.state >> 64) as u64 ^ self.state as u64).rotate_right((self.state >> 122) as u32)
    }

    /// Uniform in `[0, bound)` by multiplication with rejection. NumPy takes another path for bounds up to 2^32.
    fn below(&mut self, bound: u64) -> u64 {
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.next()) * u128::from(bound);
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
        }
    }
}

/// A folded token map that doesn't belong to this configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngramError {
    #[error("the folded token map has {found} entries, expected {expected}, one per token id of the configuration")]
    MapLength { found: usize, expected: usize },
    #[error(
        "the tokenizer folds to {found} Engram ids, expected engram_compressed_vocab_size {expected}: tokenizer.json \
         and config.json don't belong together. Fetch both again"
    )]
    FoldedCount { found: u64, expected: u64 },
}

/// Row ids of every Engram layer.
#[derive(Clone, Debug)]
pub struct EngramHash {
    token_map: Vec<u32>,
    pad: u64,
    heads: usize,
    layers: Vec<LayerHash>,
}

#[derive(Clone, Debug)]
struct LayerHash {
    multipliers: Vec<u64>,
    primes: Vec<u64>,
    offsets: Vec<u64>,
}

impl EngramHash {
    /// The folded id of each token.
    pub fn token_map(&self) -> &[u32] {
        &self.token_map
    }

    /// `token_map[id]` is the folded id of token `id`.
    ///
    /// # Errors
    /// [`EngramError`] when the map isn't one of this configuration's vocabulary.
    pub fn new(shape: &Shape, token_map: Vec<u32>) -> Result<EngramHash, EngramError> {
        if token_map.len() != shape.vocab_size {
            return Err(EngramError::MapLength { found: token_map.len(), expected: shape.vocab_size });
        }
        let found = token_map.iter().max().map_or(0, |id| u64::from(*id) + 1);
        if found != shape.engram_compressed_vocab_size {
            return Err(EngramError::FoldedCount { found, expected: shape.engram_compressed_vocab_size });
        }
        let layer = |(layer, buckets): (&usize, Buckets)| LayerHash {
            multipliers: multipliers(*layer, shape.engram_compressed_vocab_size, shape.engram_max_ngram_size),
            primes: buckets.primes,
            offsets: buckets.offsets,
        };
        Ok(EngramHash {
            pad: u64::from(token_map[shape.engram_pad_token_id as usize]),
            heads: shape.engram_n_heads,
            layers: shape.engram_layer_ids.iter().zip(buckets(shape)).map(layer).collect(),
            token_map,
        })
    }

    /// How many token ids a row depends on, the current one included.
    pub fn lookback(&self) -> usize {
        self.layers.first().map_or(1, |layer| layer.multipliers.len())
    }

    /// Row ids that one token reads in one layer.
    pub fn columns(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.primes.len())
    }

    /// Writes the table rows of one token into `rows` (`columns()` of them).
    ///
    /// `recent[s]` is the token at position `p - s`; `None` before the sequence's start and for tokens of an image
    /// span. A `None` also hides everything before it. Entries past the end of `recent` are `None`.
    ///
    /// # Panics
    /// When `rows` has another length, `engram_index` isn't an Engram layer's, or a token is outside the vocabulary.
    pub fn row_ids(&self, engram_index: usize, recent: &[Option<u32>], rows: &mut [u32]) {
        let layer = &self.layers[engram_index];
        assert_eq!(rows.len(), layer.primes.len(), "one row id per column");
        let mut blocked = false;
        let mut hash = 0;
        for (back, multiplier) in layer.multipliers.iter().enumerate() {
            let token = recent.get(back).copied().flatten();
            blocked |= token.is_none();
            let folded = match token {
                Some(token) if !blocked => u64::from(self.token_map[token as usize]),
                _ => self.pad,
            };
            // The multiplier's bound keeps the product below 2^63.
            hash ^= folded * multiplier;
            if back == 0 {
                continue;
            }
            for column in (back - 1) * self.heads..back * self.heads {
                rows[column] = (hash % layer.primes[column] + layer.offsets[column]) as u32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::FLASH;
    use super::*;

    #[test]
    fn release_constants_follow_from_the_configuration() {
        let layers = buckets(&FLASH);
        let ends = |layer: &Buckets| (layer.primes[0], layer.primes[23], layer.primes.len());
        assert_eq!(ends(&layers[0]), (16_000_057, 16_000_463, 24));
        assert_eq!(ends(&layers[1]), (16_000_477, 16_000_889, 24));
        assert_eq!([layers[0].rows, layers[1].rows], *FLASH.engram_num_embeddings);
        assert_eq!(layers[0].offsets[..2], [0, 16_000_057]);
        assert_eq!(
            multipliers(1, 99_092, 4),
            [76_632_096_046_245, 4_839_876_093_313, 35_959_672_319_349, 73_987_337_458_391]
        );
        assert_eq!(
            multipliers(14, 99_092, 4),
            [67_716_810_739_261, 51_510_806_800_915, 30_921_347_202_721, 82_619_226_485_591]
        );
    }

    #[test]
    fn seeds_spread_as_numpy_spreads_them() {
        let expected = [0x77d3_2a34_8ad7_0d07, 0x993e_d609_b84a_4fa5, 0xd5f9_72de_c869_8e49, 0x7d79_ebae_bcf1_48de];
        assert_eq!(seed_words(10_007), expected);
    }

    #[test]
    fn a_hidden_token_hides_everything_before_it() {
        let shape = Shape { vocab_size: 8, engram_compressed_vocab_size: 8, ..FLASH };
        let hash = EngramHash::new(&shape, (0..8).collect()).unwrap();
        let ids = |recent: &[Option<u32>]| {
            let mut rows = vec![0; hash.columns()];
            hash.row_ids(0, recent, &mut rows);
            rows
        };
        let pad = Some(shape.engram_pad_token_id);
        type Recent<'a> = &'a [Option<u32>];
        let cases: [(Recent<'_>, Recent<'_>); 4] = [
            (&[Some(5), None, Some(7), Some(3)], &[Some(5), pad, pad, pad]),
            (&[Some(5), Some(6)], &[Some(5), Some(6), pad, pad]),
            (&[None, Some(6), Some(7), Some(3)], &[pad, pad, pad, pad]),
            (&[], &[pad, pad, pad, pad]),
        ];
        for (hidden, padded) in cases {
            assert_eq!(ids(hidden), ids(padded), "{hidden:?}");
        }
        // The longest n-gram reads all four tokens, the shortest two.
        let (left, right) = (ids(&[Some(5), Some(6), Some(7), Some(3)]), ids(&[Some(5), Some(6), Some(7), Some(4)]));
        assert_eq!(left[..16], right[..16]);
        assert_ne!(left[16..], right[16..]);
    }

    #[test]
    fn a_map_of_another_tokenizer_is_refused() {
        let shape = Shape { vocab_size: 4, engram_compressed_vocab_size: 3, ..FLASH };
        let short = EngramHash::new(&shape, vec![0, 1, 2]).unwrap_err();
        assert_eq!(short, EngramError::MapLength { found: 3, expected: 4 });
        let wide = EngramHash::new(&shape, vec![0, 1, 2, 3]).unwrap_err();
        assert_eq!(wide, EngramError::FoldedCount { found: 4, expected: 3 });
    }
}
