//! Sixteen entries a vector: keys are decoded column by column, so that no sum crosses lanes, and serve every row of a tile.

use super::{Args, HEAD_DIM_MAX, Scored};
use crate::index_key::{BLOCK, Block, decode_block, decode_dwords, decode_scales};
use crate::parallel::threads_for;
use crate::rows::visible;
use crate::top_k::{CandidateList, candidates_of};
use std::ops::Range;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::lanes::{Kernel, Lanes, WIDTH, dispatch};

/// Blocks of entries that are scored together.
const PAIR: usize = 2;

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { scored, tile, skip_visible, restrict, scores, stride } = args;
    let work = tile.len() * stride * scored.heads * scored.head_dim / WIDTH;
    let job = Job {
        scored,
        queries: scored.queries.f32(),
        weights: scored.weights.f32(),
        keys: scored.keys.u8(),
        tile,
        skip_visible,
        restrict,
        scores: Parts::new(scores.f32_mut()),
        stride,
    };
    let level = queue.level;
    queue.pool.run_on(threads_for(work * WIDTH), |index, count| dispatch(level, Thread { job: &job, index, count }));
}

struct Job<'a> {
    scored: Scored<'a>,
    queries: &'a [f32],
    weights: &'a [f32],
    keys: &'a [u8],
    tile: Range<usize>,
    skip_visible: usize,
    restrict: Option<CandidateList<'a>>,
    scores: Parts<'a, f32>,
    stride: usize,
}

impl<'a> Job<'a> {
    #[inline(always)]
    fn seen(&self, r: usize) -> usize {
        visible(self.scored.rows[r].position, self.scored.ratio)
    }

    /// The candidate blocks of a restricted row, and the number of their entries.
    #[inline(always)]
    fn restriction(&self, r: usize) -> Option<(&'a [u32], usize, usize)> {
        let list = self.restrict.as_ref()?;
        let (blocks, entries) = candidates_of(list, r, self.seen(r))?;
        Some((blocks, list.shape.block_size, entries))
    }

    /// Writes row `r`'s scores of `count` vectors of entries from vector `first` on.
    #[inline(always)]
    fn score<L: Lanes, const B: usize>(&self, r: usize, first: usize, keys: &[[[f32; WIDTH]; HEAD_DIM_MAX]; PAIR]) {
        let Scored { heads, head_dim, .. } = self.scored;
        let queries = &self.queries[r * heads * head_dim..][..heads * head_dim];
        let weights = &self.weights[r * heads..][..heads];
        let mut total = [L::splat(0.0); B];
        let mut h = 0;
        while h < heads {
            let (queries, weights) = (&queries[h * head_dim..], &weights[h..]);
            h += match heads - h {
                8.. => add_heads::<L, B, 8>(queries, weights, keys, head_dim, &mut total),
                4.. => add_heads::<L, B, 4>(queries, weights, keys, head_dim, &mut total),
                _ => add_heads::<L, B, 1>(queries, weights, keys, head_dim, &mut total),
            };
        }
        let start = (r - self.tile.start) * self.stride + first * BLOCK;
        // SAFETY: threads own either rows or vectors of entries (see `Thread`), and each is written once.
        let out = unsafe { self.scores.part(start..start + B * WIDTH) };
        for (total, out) in total.iter().zip(out.as_chunks_mut::<WIDTH>().0) {
            total.store_array(out);
        }
    }
}

/// Adds `H` heads to the scores of `B` vectors of entries. Returns `H`.
#[inline(always)]
fn add_heads<L: Lanes, const B: usize, const H: usize>(
    queries: &[f32],
    weights: &[f32],
    keys: &[[[f32; WIDTH]; HEAD_DIM_MAX]; PAIR],
    head_dim: usize,
    total: &mut [L; B],
) -> usize {
    assert!(head_dim <= HEAD_DIM_MAX);
    assert!(queries.len() >= H * head_dim);
    let mut dots = [[L::splat(0.0); H]; B];
    for c in 0..head_dim {
        let mut key = [L::splat(0.0); B];
        for b in 0..B {
            key[b] = L::load_array(&keys[b][c]);
        }
        for h in 0..H {
            // SAFETY: `h < H` and `c < head_dim`; the length is asserted above.
            let query = L::splat(unsafe { *queries.get_unchecked(h * head_dim + c) });
            for b in 0..B {
                dots[b][h] = query.fma(key[b], dots[b][h]);
            }
        }
    }
    for h in 0..H {
        for b in 0..B {
            total[b] = L::splat(weights[h]).fma(dots[b][h].max(L::splat(0.0)), total[b]);
        }
    }
    H
}

/// One thread's share of a tile. The split follows the shape of the work and enters no sum.
struct Thread<'a> {
    job: &'a Job<'a>,
    index: usize,
    count: usize,
}

impl Kernel for Thread<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Thread { job, index, count } = self;
        let mut keys = [[[0.0; WIDTH]; HEAD_DIM_MAX]; PAIR];
        let mut r = job.tile.start;
        while r < job.tile.end {
            if job.seen(r) <= job.skip_visible {
                r += 1;
                continue;
            }
            if let Some((blocks, block_size, entries)) = job.restriction(r) {
                let vectors = split(entries.div_ceil(WIDTH), count, index, PAIR);
                self.score_candidates::<L>(r, vectors, blocks, block_size, entries, &mut keys);
                r += 1;
                continue;
            }
            // The unrestricted rows of one sequence share its decoded keys.
            let slot = job.scored.rows[r].slot;
            let (mut end, mut most) = (r, 0);
            while end < job.tile.end
                && job.scored.rows[end].slot == slot
                && job.seen(end) > job.skip_visible
                && job.restriction(end).is_none()
            {
                most = most.max(job.seen(end));
                end += 1;
            }
            let (mut rows, mut vectors) = (r..end, 0..most.div_ceil(WIDTH));
            if rows.len() >= 4 * count {
                let part = split(rows.len(), count, index, 1);
                rows = r + part.start..r + part.end;
            } else {
                vectors = split(vectors.len(), count, index, PAIR);
            }
            self.score_rows::<L>(slot, rows, vectors, &mut keys);
            r = end;
        }
    }
}

impl Thread<'_> {
    #[inline(always)]
    fn score_rows<L: Lanes>(
        &self,
        slot: u32,
        rows: Range<usize>,
        vectors: Range<usize>,
        keys: &mut [[[f32; WIDTH]; HEAD_DIM_MAX]; PAIR],
    ) {
        let job = self.job;
        let head_dim = job.scored.head_dim;
        for first in vectors.clone().step_by(PAIR) {
            let here = (vectors.end - first).min(PAIR);
            for (b, keys) in keys[..here].iter_mut().enumerate() {
                let block = Block::of(&job.scored.pages, slot, (first + b) * BLOCK, head_dim);
                decode_block::<L>(job.keys, block, &mut keys[..head_dim]);
            }
            for r in rows.clone() {
                let seen = job.seen(r).div_ceil(WIDTH);
                if first + 1 < seen && here == PAIR {
                    job.score::<L, 2>(r, first, keys);
                } else if first < seen {
                    job.score::<L, 1>(r, first, keys);
                }
            }
        }
    }

    /// Scores row `r` on its candidates: their dwords are gathered into vectors of their own.
    #[inline(always)]
    fn score_candidates<L: Lanes>(
        &self,
        r: usize,
        vectors: Range<usize>,
        blocks: &[u32],
        block_size: usize,
        entries: usize,
        keys: &mut [[[f32; WIDTH]; HEAD_DIM_MAX]; PAIR],
    ) {
        let job = self.job;
        let head_dim = job.scored.head_dim;
        let slot = job.scored.rows[r].slot;
        for first in vectors.clone().step_by(PAIR) {
            let here = (vectors.end - first).min(PAIR);
            for (b, keys) in keys[..here].iter_mut().enumerate() {
                let mut places = [(Block::of(&job.scored.pages, slot, 0, head_dim), 0); WIDTH];
                for (lane, place) in places.iter_mut().enumerate() {
                    // Lanes behind the last entry repeat it; their scores are not read.
                    let i = ((first + b) * WIDTH + lane).min(entries - 1);
                    let entry = blocks[i / block_size] as usize * block_size + i % block_size;
                    *place = (Block::of(&job.scored.pages, slot, entry, head_dim), entry % BLOCK);
                }
                for (group, keys) in keys[..head_dim].as_chunks_mut::<32>().0.iter_mut().enumerate() {
                    let scales = places.map(|(block, lane)| u32::from(job.keys[block.scales(group).start + lane]));
                    let scale = decode_scales::<L>(L::load_u32(&scales));
                    for (i, keys) in keys.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                        let dwords = places.map(|(block, lane)| {
                            let start = block.codes(4 * group + i).start + 4 * lane;
                            u32::from_le_bytes(job.keys[start..].as_chunks::<4>().0[0])
                        });
                        decode_dwords::<L>(L::load_u32(&dwords), scale, keys);
                    }
                }
            }
            match here {
                PAIR => job.score::<L, PAIR>(r, first, keys),
                _ => job.score::<L, 1>(r, first, keys),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index_key;
    use crate::index_score::{SelectArgs, launch, launch_select, reference};
    use crate::rope::reference::frequencies;
    use crate::rows::{EntryInfo, Pages, RowInfo};
    use crate::testing::*;
    use crate::top_k::{ALL_BLOCKS, CandidateShape, Candidates, reference as top_k};
    use tf_device::{Buffer, LaunchError, Queue};
    use tf_numerics::lanes::Level;
    use tf_numerics::qdq;

    const PAGE: usize = 32;

    /// Keys of two sequences whose pages lie in any order, and queries on them.
    struct Setting {
        heads: usize,
        head_dim: usize,
        entries: usize,
        table: Vec<u32>,
        keys: Buffer,
        /// As the launch stores them: `[slot][entry]`.
        values: Vec<Vec<Vec<f32>>>,
    }

    impl Setting {
        fn new(heads: usize, head_dim: usize, entries: usize) -> Setting {
            let mut values = Values::new(18);
            let pages_per_slot = entries.div_ceil(PAGE);
            let mut table: Vec<u32> = (0..2 * pages_per_slot as u32).collect();
            for i in (1..table.len()).rev() {
                table.swap(i, values.below(i as u32 + 1) as usize);
            }
            let bytes = table.len() * index_key::page_bytes(head_dim, PAGE);
            // Entries that were never written hold the worst bytes there are.
            let mut setting =
                Setting { heads, head_dim, entries, table, keys: device(&vec![0xffu8; bytes]), values: Vec::new() };
            let x = values.bf16(2 * entries * head_dim, 2.0);
            let infos: Vec<EntryInfo> = (0..2 * entries)
                .map(|i| EntryInfo { slot: (i / entries) as u32, entry: (i % entries) as u32, row: 0 })
                .collect();
            let mut queue = Queue::cpu(1, Level::best());
            let pages = Pages { table: &setting.table, pages_per_slot, entries_per_page: PAGE };
            let args = index_key::Args {
                x: &device(&x),
                norm: &device(&vec![1.0f32; head_dim]),
                eps: 1e-20,
                entries: &infos,
                ratio: 1,
                frequencies: &frequencies(1e4, 16, None),
                head_dim,
                cache: &mut setting.keys,
                pages,
            };
            index_key::launch(&mut queue, args).unwrap();
            let key = |slot: u32, entry: usize| -> Vec<f32> {
                let block = Block::of(&setting.pages(), slot, entry, head_dim);
                let mut out = vec![[0.0; WIDTH]; head_dim];
                struct Decode<'a>(&'a [u8], Block, &'a mut [[f32; WIDTH]]);
                impl Kernel for Decode<'_> {
                    type Output = ();
                    #[inline(always)]
                    fn run<L: Lanes>(self) {
                        decode_block::<L>(self.0, self.1, self.2);
                    }
                }
                dispatch(Level::Scalar, Decode(setting.keys.u8(), block, &mut out));
                out.iter().map(|column| column[entry % BLOCK]).collect()
            };
            setting.values = (0..2).map(|slot| (0..entries).map(|entry| key(slot, entry)).collect()).collect();
            setting
        }

        fn pages(&self) -> Pages<'_> {
            Pages { table: &self.table, pages_per_slot: self.entries.div_ceil(PAGE), entries_per_page: PAGE }
        }

        /// Queries and weights of rows, as `index_query` would leave them.
        fn queries(&self, rows: usize, seed: u64) -> (Vec<f32>, Vec<f32>) {
            let mut values = Values::new(seed);
            let mut queries = values.bf16(rows * self.heads * self.head_dim, 2.0);
            queries.chunks_mut(self.head_dim).for_each(|q| qdq::round_row(Level::Scalar, qdq::Format::Fp4, q));
            (queries, values.bf16(rows * self.heads, 1.0))
        }

        /// The exact scores of a row and the sums of absolute products behind them.
        fn wanted(&self, row: RowInfo, queries: &[f32], weights: &[f32], ratio: u32) -> (Vec<f64>, Vec<f64>) {
            let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            let keys: Vec<f64> =
                self.values[row.slot as usize][..visible(row.position, ratio)].iter().flat_map(|k| wide(k)).collect();
            let (queries, weights) = (wide(queries), wide(weights));
            let scores = reference::index_score(&queries, &weights, &keys, self.head_dim);
            let absolute = |v: &[f64]| v.iter().map(|v| v.abs()).collect::<Vec<_>>();
            let sums =
                reference::index_score(&absolute(&queries), &absolute(&weights), &absolute(&keys), self.head_dim);
            (scores, sums)
        }
    }

    fn scored<'a>(s: &'a Setting, q: &'a Buffer, w: &'a Buffer, rows: &'a [RowInfo], ratio: u32) -> Scored<'a> {
        let (heads, head_dim) = (s.heads, s.head_dim);
        Scored { queries: q, weights: w, rows, ratio, keys: &s.keys, pages: s.pages(), heads, head_dim }
    }

    fn row(slot: u32, position: u32) -> RowInfo {
        RowInfo { slot, position, window: slot }
    }

    #[test]
    fn scores_match_the_definition_for_rows_of_several_sequences() {
        for (heads, head_dim, ratio) in [(4, 32, 1), (32, 128, 2), (8, 32, 2), (13, 64, 1)] {
            let setting = Setting::new(heads, head_dim, 100);
            let last = 100 * ratio - 1;
            let rows = [row(0, 0), row(0, 33), row(0, last), row(1, last - 1), row(1, last), row(0, 4)];
            let (q, w) = setting.queries(rows.len(), 19);
            let got = on_all_queues(|queue| {
                let (q, w) = (device(&q), device(&w));
                let mut scores = dirty(rows.len() * 112);
                let scored = scored(&setting, &q, &w, &rows, ratio);
                let args =
                    Args { scored, tile: 0..6, skip_visible: 0, restrict: None, scores: &mut scores, stride: 112 };
                launch(queue, args).unwrap();
                let seen = |r: usize| visible(rows[r].position, ratio);
                (0..6).flat_map(|r| scores.f32()[r * 112..][..seen(r)].to_vec()).collect()
            });
            let mut at = 0;
            for (r, &info) in rows.iter().enumerate() {
                let (q, w) = (&q[r * heads * head_dim..][..heads * head_dim], &w[r * heads..][..heads]);
                let (wanted, sums) = setting.wanted(info, q, w, ratio);
                // One rounding a column, one a head.
                let roundings = (head_dim + heads + 1) as f64 * F32_HALF_ULP;
                let bounds: Vec<f64> = sums.iter().map(|sum| sum * roundings).collect();
                assert_close(&got[at..at + wanted.len()], &wanted, &bounds);
                at += wanted.len();
            }
            assert_eq!(at, got.len());
        }
    }

    #[test]
    fn a_row_is_the_same_in_any_tile_and_beside_poisoned_rows() {
        let setting = Setting::new(4, 32, 100);
        let mut values = Values::new(20);
        let (q, w) = setting.queries(1, 21);
        let run = |queue: &mut Queue, rows: &[RowInfo], place: usize, tile: Range<usize>, values: &mut Values| {
            let mut all_q: Vec<f32> = (0..rows.len() * q.len()).map(|_| values.poison()).collect();
            let mut all_w: Vec<f32> = (0..rows.len() * w.len()).map(|_| values.poison()).collect();
            all_q[place * q.len()..][..q.len()].copy_from_slice(&q);
            all_w[place * w.len()..][..w.len()].copy_from_slice(&w);
            let (q, w, mut scores) = (device(&all_q), device(&all_w), dirty(tile.len() * 112));
            let first = tile.start;
            let scored = scored(&setting, &q, &w, rows, 1);
            let args = Args { scored, tile, skip_visible: 3, restrict: None, scores: &mut scores, stride: 112 };
            launch(queue, args).unwrap();
            scores.f32()[(place - first) * 112..][..rows[place].position as usize + 1].to_vec()
        };
        let mut alone_queue = Queue::cpu(1, Level::Scalar);
        let alone = run(&mut alone_queue, &[row(1, 76)], 0, 0..1, &mut values);
        for (name, mut queue) in queues() {
            let rows = [row(0, 99), row(1, 99), row(1, 76), row(1, 2), row(1, 77)];
            assert_eq!(bits(&run(&mut queue, &rows, 2, 0..5, &mut values)), bits(&alone), "{name}");
            assert_eq!(bits(&run(&mut queue, &rows, 2, 2..4, &mut values)), bits(&alone), "{name}");
            let many: Vec<RowInfo> = (60..92).map(|p| row(1, p)).collect();
            assert_eq!(bits(&run(&mut queue, &many, 16, 0..32, &mut values)), bits(&alone), "{name}");
        }
    }

    #[test]
    fn selections_are_the_same_with_any_scratch_and_keep_to_the_candidates() {
        let setting = Setting::new(4, 32, 200);
        let shape = CandidateShape { blocks_max: 6, block_size: 8 };
        let rows: Vec<RowInfo> =
            [(0, 12), (0, 39), (0, 40), (0, 47), (0, 48), (1, 150), (1, 199), (0, 100)].map(|(s, p)| row(s, p)).into();
        let (q, w) = setting.queries(rows.len(), 22);
        let (other_q, other_w) = setting.queries(rows.len(), 23);
        let top_k = 40;
        let exact = |queries: &[f32], weights: &[f32]| -> Vec<Vec<f64>> {
            let of = |(r, info): (usize, &RowInfo)| {
                setting.wanted(*info, &queries[r * 128..][..128], &weights[r * 4..][..4], 1).0
            };
            rows.iter().enumerate().map(of).collect()
        };
        let mut first: Option<(Vec<u32>, Vec<u32>, Vec<u32>)> = None;
        for (name, mut queue) in queues() {
            for scratch in [208, 500, 5000] {
                let mut scratch = dirty(scratch);
                let (mut blocks, mut block_counts) = (device(&[9999u32; 6 * 8]), device(&[0u32; 8]));
                let mut select = |q: &[f32], w: &[f32], candidates: Candidates<'_>| {
                    let (q, w) = (device(q), device(w));
                    let (mut selected, mut counts) = (device(&vec![9999u32; 8 * top_k]), device(&[0u32; 8]));
                    let args = SelectArgs {
                        scored: scored(&setting, &q, &w, &rows, 1),
                        top_k,
                        candidates,
                        scratch: &mut scratch,
                        selected: &mut selected,
                        counts: &mut counts,
                    };
                    launch_select(&mut queue, args).unwrap();
                    let row = |r: usize| selected.u32()[r * top_k..][..counts.u32()[r] as usize].to_vec();
                    (0..8).map(row).collect::<Vec<_>>()
                };
                let publish = Candidates::Publish { shape, blocks: &mut blocks, counts: &mut block_counts };
                let own = select(&q, &w, publish);
                let list = CandidateList { shape, blocks: &blocks, counts: &block_counts };
                let later = select(&other_q, &other_w, Candidates::Restrict(list));

                for (r, scores) in exact(&q, &w).iter().enumerate() {
                    assert_eq!(own[r], top_k::top_k(scores, top_k), "{name}, row {r}");
                    let mask = top_k::candidates(scores, 8, 6);
                    if scores.len() <= 48 {
                        assert_eq!(block_counts.u32()[r], ALL_BLOCKS, "row {r}");
                    }
                    let others = &exact(&other_q, &other_w)[r];
                    let wanted = top_k::top_k(&top_k::masked(others, &mask), top_k);
                    assert_eq!(later[r], wanted, "{name}, row {r}");
                }
                let all = (own.concat(), later.concat(), block_counts.u32().to_vec());
                assert_eq!(first.get_or_insert(all.clone()), &all, "{name}");
            }
        }
    }

    #[test]
    fn a_scratch_below_one_row_is_refused() {
        let setting = Setting::new(4, 32, 100);
        let (q, w) = setting.queries(1, 24);
        let (q, w) = (device(&q), device(&w));
        let rows = [row(0, 99)];
        let run = |floats: usize, top_k: usize| {
            let (mut scratch, mut selected, mut counts) = (dirty(floats), device(&vec![0u32; top_k]), device(&[0u32]));
            let args = SelectArgs {
                scored: scored(&setting, &q, &w, &rows, 1),
                top_k,
                candidates: Candidates::None,
                scratch: &mut scratch,
                selected: &mut selected,
                counts: &mut counts,
            };
            launch_select(&mut Queue::cpu(1, Level::Scalar), args)
        };
        assert_eq!(run(112, 10), Ok(()));
        assert_eq!(run(0, 100), Ok(()), "a row that keeps everything needs no scores");
        let wanted = LaunchError::Shape { what: "the scratch of the index scores", found: 111, expected: 112 };
        assert_eq!(run(111, 10), Err(wanted));
    }
}
