//! The Markov head's layout: blocks of 16 tokens, `[ceil(vocabulary / 16)][rank][16]` bf16, zero behind the last token.

const BLOCK: usize = 16;

/// Elements of the packed head.
pub const fn packed_len(vocabulary: usize, rank: usize) -> usize {
    vocabulary.div_ceil(BLOCK) * BLOCK * rank
}

/// Packs `weight` (`[vocabulary, rank]` bf16) into `out` (`packed_len` elements).
///
/// # Panics
/// When a length disagrees.
pub fn pack(weight: &[u16], vocabulary: usize, rank: usize, out: &mut [u16]) {
    assert_eq!(weight.len(), vocabulary * rank);
    assert_eq!(out.len(), packed_len(vocabulary, rank));
    out.fill(0);
    for (token, row) in weight.chunks_exact(rank.max(1)).enumerate() {
        for (k, &value) in row.iter().enumerate() {
            out[(token / BLOCK * rank + k) * BLOCK + token % BLOCK] = value;
        }
    }
}

/// The inverse of [`pack`].
pub fn unpack(packed: &[u16], vocabulary: usize, rank: usize) -> Vec<u16> {
    assert_eq!(packed.len(), packed_len(vocabulary, rank));
    let at = |token: usize, k: usize| packed[(token / BLOCK * rank + k) * BLOCK + token % BLOCK];
    (0..vocabulary).flat_map(|token| (0..rank).map(move |k| at(token, k))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacking_gives_the_weight_back_and_padding_is_zero() {
        for (vocabulary, rank) in [(16, 4), (17, 3), (1, 8), (100, 32)] {
            let weight: Vec<u16> = (0..vocabulary * rank).map(|i| i as u16 + 1).collect();
            let mut packed = vec![0xffff; packed_len(vocabulary, rank)];
            pack(&weight, vocabulary, rank, &mut packed);
            assert_eq!(unpack(&packed, vocabulary, rank), weight);
            assert_eq!(packed.iter().filter(|v| **v == 0).count(), packed.len() - weight.len());
        }
    }
}
