//! The order of the CUDA kernel on the host: the tensor core's steps in integers ([`fma16`]), then the heads.
//!
//! A dot is one chain of steps from `+0` over groups of 32 columns ascending: the first step of a group takes the columns 0, 1, 4
//! and 5 of each eight, the second the columns 2, 3, 6 and 7. Heads are padded with zeros to a multiple of sixteen; of each
//! eight, partial sum `t` takes the heads `2 t` and `2 t + 1`, one fused multiply-add after the other, and the sums fold as
//! `(0 + 1) + (2 + 3)`. Slow: for checks only.

use super::{Args, Scored};
use crate::index_key::Block;
use crate::rows::visible;
use crate::top_k::candidates_of;
use tf_numerics::{bf16, fma16};

/// Operands of a chain of steps.
type Chain = Vec<[u16; 16]>;

/// Columns of the two steps of a group, of each eight.
const COLUMNS: [[usize; 4]; 2] = [[0, 1, 4, 5], [2, 3, 6, 7]];

/// The bf16 bits that `of` gives of each column, as the steps take them. `head_dim` is a multiple of 32.
pub(super) fn chain(head_dim: usize, of: impl Fn(usize) -> u16) -> Chain {
    let steps = (0..head_dim).step_by(32).flat_map(|group| COLUMNS.map(|columns| (group, columns)));
    steps.map(|(group, columns)| std::array::from_fn(|i| of(group + i / 4 * 8 + columns[i % 4]))).collect()
}

/// A row's queries and weights.
pub(super) struct Query<'a> {
    heads: Vec<Chain>,
    weights: &'a [f32],
}

impl Query<'_> {
    /// `queries`: `[heads, head_dim]`, rounded to bf16 here; `weights`: `[heads]`.
    pub(super) fn new<'a>(queries: &[f32], weights: &'a [f32], head_dim: usize) -> Query<'a> {
        let of_head = |query: &[f32]| chain(head_dim, |column| bf16::from_f32(query[column]));
        Query { heads: queries.chunks(head_dim).map(of_head).collect(), weights }
    }

    /// The score of one key.
    pub(super) fn score(&self, key: &Chain) -> f32 {
        self.score_by(f32::mul_add, key)
    }

    /// As [`Query::score`], with what adds a head's product to a sum.
    fn score_by(&self, add: fn(f32, f32, f32) -> f32, key: &Chain) -> f32 {
        let mut partial = [0f32; 4];
        for head in 0..self.heads.len().next_multiple_of(16) {
            let (weight, dot) = match self.heads.get(head) {
                None => (0.0, 0.0),
                Some(query) => {
                    let dot = query.iter().zip(key).fold(0.0, |sum, (query, key)| fma16::step(sum, key, query));
                    (self.weights[head], if dot > 0.0 { dot } else { 0.0 })
                }
            };
            let sum = &mut partial[head % 8 / 2];
            *sum = add(weight, dot, *sum);
        }
        (partial[0] + partial[1]) + (partial[2] + partial[3])
    }
}

/// The key of an entry.
fn key(scored: &Scored<'_>, slot: u32, entry: usize) -> Chain {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let (block, lane) = (Block::of(&scored.pages, slot, entry, scored.head_dim), entry % crate::index_key::BLOCK);
    let keys = scored.keys.u8();
    chain(scored.head_dim, |column| {
        let byte = keys[block.codes(column / 8).start + 4 * lane + column % 8 / 2];
        let code = if column.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
        let scale = match keys[block.scales(column / 32).start + lane] {
            255 => f32::NAN,
            scale => f32::from_bits(u32::from(scale) << 23),
        };
        let magnitude = MAGNITUDES[usize::from(code & 7)];
        // Exact.
        bf16::from_f32(if code & 8 == 0 { magnitude } else { -magnitude } * scale)
    })
}

/// As [`super::launch`] on CUDA; buffers lie on the host.
pub(super) fn run(args: Args<'_>) {
    let Args { scored, tile, skip_visible, restrict, scores, stride } = args;
    let Scored { heads, head_dim, .. } = scored;
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    for (r, row_scores) in tile.clone().zip(scores.f32_mut().chunks_mut(stride)) {
        let row = scored.rows[r];
        let seen = visible(row.position, scored.ratio);
        if seen <= skip_visible {
            continue;
        }
        let kept_to = restrict.as_ref().and_then(|list| Some((candidates_of(list, r, seen)?, list.shape.block_size)));
        let entries = kept_to.map_or(seen, |((_, entries), _)| entries);
        let entry_of = |j: usize| match kept_to {
            None => j,
            Some(((blocks, _), size)) => blocks[j / size] as usize * size + j % size,
        };
        let queries = &scored.queries.f32()[r * heads * head_dim..][..heads * head_dim];
        let query = Query::new(queries, &scored.weights.f32()[r * heads..][..heads], head_dim);
        let share = entries.div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (part, scores) in row_scores[..entries].chunks_mut(share).enumerate() {
                let (query, entry_of) = (&query, &entry_of);
                scope.spawn(move || {
                    for (i, score) in scores.iter_mut().enumerate() {
                        *score = query.score(&key(&scored, row.slot, entry_of(part * share + i)));
                    }
                });
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::contract::{INDEX_SCORE, ScoredRow, scored_rows};
    use super::*;

    /// What a planted edit of the CUDA source does: a case must show it.
    #[test]
    fn a_product_rounded_by_itself_shows_where_scales_lie_far_apart() {
        let case = INDEX_SCORE.cases.iter().find(|case| case.size("apart") > 0).expect("a case with scales far apart");
        let head_dim = case.size("head_dim");
        let (mut shown, mut scores) = (0, 0);
        for ScoredRow { queries, weights, keys } in scored_rows(case, 1) {
            let query = Query::new(&queries, &weights, head_dim);
            for key in keys {
                let key = chain(head_dim, |column| bf16::from_f32(key[column]));
                let apart = query.score_by(|weight, dot, sum| weight * dot + sum, &key);
                shown += usize::from(apart.to_bits() != query.score(&key).to_bits());
                scores += 1;
            }
        }
        assert!(shown >= 10, "{shown} of {scores} scores differ");
    }

    #[test]
    fn each_column_is_taken_once_and_in_its_own_group() {
        let taken = chain(96, |column| column as u16);
        assert_eq!(taken.len(), 6);
        assert_eq!(taken[0], [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29]);
        for (group, pair) in taken.chunks(2).enumerate() {
            let mut columns = pair.concat();
            columns.sort_unstable();
            assert!(columns.into_iter().eq(32 * group as u16..32 * (group as u16 + 1)));
        }
    }

    #[test]
    fn heads_fold_in_the_declared_order() {
        // One column: each head's dot is its query.
        let key = chain(32, |column| if column == 0 { bf16::from_f32(1.0) } else { 0 });
        let mut queries = vec![0.0; 9 * 32];
        let dots = [1.0, 3.0, 5.0, -7.0, 2.0, 4.0, 6.0, 8.0, 9.0];
        dots.iter().enumerate().for_each(|(head, dot)| queries[32 * head] = *dot);
        let weights = [1e8, 1.0, -1e8, 1.0, 3.0, 1.0, 1.0, 0.5, 1.0];
        let sums = [f32::mul_add(1.0, 9.0, f32::mul_add(1.0, 3.0, 1e8)), -5e8, 10.0, 10.0];
        let wanted = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        assert_eq!(Query::new(&queries, &weights, 32).score(&key).to_bits(), wanted.to_bits());
    }
}
