//! A selection counts: three histograms over the bits of the scores find the smallest score that is kept, one more pass
//! collects. Nothing is moved or sorted, so memory and order stay fixed.

use super::{ALL_BLOCKS, Args, CandidateList, CandidateShape, Candidates};
use crate::parallel::threads_for;
use crate::rows::{RowInfo, visible};
use std::ops::Range;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::lanes::{Int, Kernel, Lanes, Mask, WIDTH, dispatch};

const BINS: usize = 1 << 11;

/// Counts of one digit of the keys.
pub(crate) struct Histogram([u32; BINS]);

impl Histogram {
    pub fn new() -> Histogram {
        Histogram([0; BINS])
    }
}

/// Values to select from, as integers in the order of the values. Keys up to [`NEVER`] are not selected.
pub(crate) trait Keys {
    fn count(&self) -> usize;
    /// Keys `16 t..16 t + 16`; those beyond the end are 0.
    fn chunk<L: Lanes>(&self, t: usize) -> L::Int;
}

/// The key of minus infinity. A NaN has key 0.
const NEVER: u32 = 0x007f_ffff;

#[inline(always)]
fn keys_of<L: Lanes>(scores: L) -> L::Int {
    // Adding zero makes the two zeros equal.
    let bits = (scores + L::splat(0.0)).to_bits();
    let keys = bits.xor(bits.sar(31).or(L::Int::splat(0x8000_0000)));
    L::Int::select(scores.is_nan(), L::Int::splat(0), keys)
}

/// Scores themselves.
pub(crate) struct Scores<'a>(pub &'a [f32]);

impl Keys for Scores<'_> {
    #[inline(always)]
    fn count(&self) -> usize {
        self.0.len()
    }
    #[inline(always)]
    fn chunk<L: Lanes>(&self, t: usize) -> L::Int {
        let scores = &self.0[t * WIDTH..];
        let scores = if scores.len() >= WIDTH { L::load(scores) } else { L::load_partial(scores, f32::NAN) };
        keys_of(scores)
    }
}

/// The largest score of each block; the last block, which holds the newest entry, is above all.
struct Blocks<'a> {
    scores: &'a [f32],
    block_size: usize,
}

impl Keys for Blocks<'_> {
    #[inline(always)]
    fn count(&self) -> usize {
        self.scores.len().div_ceil(self.block_size)
    }
    #[inline(always)]
    fn chunk<L: Lanes>(&self, t: usize) -> L::Int {
        let mut largest = [f32::NAN; WIDTH];
        let from = &self.scores[(t * WIDTH * self.block_size).min(self.scores.len())..];
        for (block, largest) in from.chunks(self.block_size).zip(&mut largest) {
            for &score in block {
                // A NaN, as every block starts with, loses to every number.
                *largest = largest.max(score);
            }
        }
        let newest = self.count() - 1;
        if newest / WIDTH == t {
            largest[newest % WIDTH] = f32::INFINITY;
        }
        keys_of(L::load_array(&largest))
    }
}

/// Writes the indices of the `out.len()` largest keys to `out`, equal ones by the smaller index, ascending. Returns how many
/// there are.
#[inline(always)]
pub(crate) fn select_ascending<L: Lanes, K: Keys>(keys: &K, histogram: &mut Histogram, out: &mut [u32]) -> usize {
    let (least, mut equal_left) = threshold::<L, K>(keys, histogram, out.len());
    let mut count = 0;
    for t in 0..keys.count().div_ceil(WIDTH) {
        let chunk = keys.chunk::<L>(t);
        let above = L::Int::splat(least).lt_unsigned(chunk).bits();
        let equal = L::Int::splat(least).eq(chunk).bits();
        let mut kept = above | equal;
        while kept != 0 {
            let lane = kept.trailing_zeros();
            kept &= kept - 1;
            if equal >> lane & 1 == 1 {
                if equal_left == 0 {
                    continue;
                }
                equal_left -= 1;
            }
            out[count] = t as u32 * WIDTH as u32 + lane;
            count += 1;
        }
    }
    count
}

/// The smallest key that is kept, and how many keys equal to it are.
#[inline(always)]
fn threshold<L: Lanes, K: Keys>(keys: &K, histogram: &mut Histogram, wanted: usize) -> (u32, usize) {
    if wanted == 0 {
        return (u32::MAX, 0);
    }
    let mut wanted = wanted as u32;
    // The digits of the key that are known, and their number of bits.
    let (mut prefix, mut known) = (0u32, 0u32);
    for digit_bits in [11, 11, 10] {
        let bins = &mut histogram.0[..1 << digit_bits];
        bins.fill(0);
        let shift = 32 - known - digit_bits;
        for t in 0..keys.count().div_ceil(WIDTH) {
            let chunk = keys.chunk::<L>(t);
            let mut matching = L::Int::splat(NEVER).lt_unsigned(chunk);
            if known > 0 {
                matching = matching.and(chunk.shr(32 - known).eq(L::Int::splat(prefix)));
            }
            let mut matching = matching.bits();
            if matching == 0 {
                continue;
            }
            let digits = L::int_to_array(chunk.shr(shift).and(L::Int::splat((1 << digit_bits) - 1)));
            while matching != 0 {
                bins[digits[matching.trailing_zeros() as usize] as usize] += 1;
                matching &= matching - 1;
            }
        }
        let mut above = 0;
        let found = bins.iter().enumerate().rev().find(|(_, count)| {
            above += **count;
            above >= wanted
        });
        let Some((digit, &count)) = found else {
            // Fewer keys than wanted, which only the first digit can find out: keep all that may be.
            return (NEVER + 1, usize::MAX);
        };
        wanted -= above - count;
        prefix = prefix << digit_bits | digit as u32;
        known += digit_bits;
        if wanted == count {
            // Every key with this prefix is kept.
            return ((prefix << shift).max(NEVER + 1), usize::MAX);
        }
    }
    (prefix, wanted as usize)
}

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { scores, stride, rows, tile, ratio, top_k, candidates, selected, counts } = args;
    let candidates = match candidates {
        Candidates::None => Plan::None,
        Candidates::Publish { shape, blocks, counts } => {
            Plan::Publish { shape, blocks: Parts::new(blocks.u32_mut()), counts: Parts::new(counts.u32_mut()) }
        }
        Candidates::Restrict(list) => Plan::Restrict(list),
    };
    let job = Job {
        scores: scores.f32(),
        stride,
        rows,
        first: tile.start,
        ratio,
        top_k,
        candidates,
        selected: Parts::new(selected.u32_mut()),
        counts: Parts::new(counts.u32_mut()),
    };
    let level = queue.level;
    queue.pool.run_on(threads_for(tile.len() * stride * 8), |index, count| {
        let range = split(tile.len(), count, index, 1);
        dispatch(level, Rows { job: &job, rows: tile.start + range.start..tile.start + range.end });
    });
}

enum Plan<'a> {
    None,
    Publish { shape: CandidateShape, blocks: Parts<'a, u32>, counts: Parts<'a, u32> },
    Restrict(CandidateList<'a>),
}

struct Job<'a> {
    scores: &'a [f32],
    stride: usize,
    rows: &'a [RowInfo],
    first: usize,
    ratio: u32,
    top_k: usize,
    candidates: Plan<'a>,
    selected: Parts<'a, u32>,
    counts: Parts<'a, u32>,
}

struct Rows<'a> {
    job: &'a Job<'a>,
    rows: Range<usize>,
}

impl Kernel for Rows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let job = self.job;
        let mut histogram = Histogram::new();
        for r in self.rows {
            // SAFETY: row `r` belongs to this thread.
            let selected = unsafe { job.selected.part(r * job.top_k..(r + 1) * job.top_k) };
            let seen = visible(job.rows[r].position, job.ratio);
            let scores = &job.scores[(r - job.first) * job.stride..][..if seen > job.top_k { seen } else { 0 }];
            if let Plan::Publish { shape, blocks, counts } = &job.candidates {
                let mut count = ALL_BLOCKS;
                if seen.div_ceil(shape.block_size) > shape.blocks_max {
                    // SAFETY: row `r` belongs to this thread.
                    let blocks = unsafe { blocks.part(r * shape.blocks_max..(r + 1) * shape.blocks_max) };
                    let keys = Blocks { scores, block_size: shape.block_size };
                    count = select_ascending::<L, _>(&keys, &mut histogram, blocks) as u32;
                }
                // SAFETY: as above.
                unsafe { counts.write(r, count) };
            }
            let count = if seen <= job.top_k {
                for (entry, selected) in selected[..seen].iter_mut().enumerate() {
                    *selected = entry as u32;
                }
                seen
            } else {
                match &job.candidates {
                    Plan::Restrict(list) => match candidates_of(list, r, seen) {
                        None => select_ascending::<L, _>(&Scores(scores), &mut histogram, selected),
                        Some((blocks, entries)) => {
                            let kept = select_ascending::<L, _>(&Scores(&scores[..entries]), &mut histogram, selected);
                            let size = list.shape.block_size as u32;
                            for selected in &mut selected[..kept] {
                                *selected = blocks[(*selected / size) as usize] * size + *selected % size;
                            }
                            kept
                        }
                    },
                    Plan::None | Plan::Publish { .. } => {
                        select_ascending::<L, _>(&Scores(scores), &mut histogram, selected)
                    }
                }
            };
            // SAFETY: row `r` belongs to this thread.
            unsafe { job.counts.write(r, count as u32) };
        }
    }
}

/// The candidate blocks of row `r` and the number of entries in them, of which the last block may hold fewer than the
/// others. `None` where the row is not restricted.
#[inline(always)]
pub(crate) fn candidates_of<'a>(list: &CandidateList<'a>, r: usize, seen: usize) -> Option<(&'a [u32], usize)> {
    let count = list.counts.u32()[r];
    if count == ALL_BLOCKS {
        return None;
    }
    let shape = list.shape;
    let count = (count as usize).min(shape.blocks_max);
    let blocks = &list.blocks.u32()[r * shape.blocks_max..][..count];
    let last_end = blocks.last().map_or(0, |&last| (last as usize + 1) * shape.block_size);
    Some((blocks, count * shape.block_size - last_end.saturating_sub(seen).min(shape.block_size)))
}

#[cfg(test)]
mod tests {
    use crate::rows::RowInfo;
    use crate::testing::*;
    use crate::top_k::{ALL_BLOCKS, Args, CandidateList, CandidateShape, Candidates, launch, reference};
    use tf_device::{Buffer, LaunchError, Queue};
    use tf_numerics::lanes::Level;

    /// One row of scores that sees all of them (ratio 1).
    struct Row<'a> {
        scores: &'a [f32],
        top_k: usize,
    }

    fn rows_seeing(counts: &[usize]) -> Vec<RowInfo> {
        counts.iter().map(|&n| RowInfo { slot: 0, position: n as u32 - 1, window: 0 }).collect()
    }

    fn select(queue: &mut Queue, row: &Row<'_>, candidates: Candidates<'_>) -> Vec<u32> {
        let stride = row.scores.len().next_multiple_of(16);
        let mut scores = row.scores.to_vec();
        scores.resize(stride, f32::INFINITY);
        let rows = rows_seeing(&[row.scores.len()]);
        let (mut selected, mut counts) = (device(&vec![u32::MAX; row.top_k]), device(&[0u32]));
        let args = Args {
            scores: &device(&scores),
            stride,
            rows: &rows,
            tile: 0..1,
            ratio: 1,
            top_k: row.top_k,
            candidates,
            selected: &mut selected,
            counts: &mut counts,
        };
        launch(queue, args).unwrap();
        let count = counts.u32()[0] as usize;
        assert!(selected.u32()[count..].iter().all(|&v| v == u32::MAX), "written beyond the count");
        selected.u32()[..count].to_vec()
    }

    fn score_rows() -> Vec<(&'static str, Vec<f32>)> {
        let mut values = Values::new(15);
        let few: Vec<f32> = (0..700).map(|_| [0.0, -0.0, 1.0, -1.0, 2.5][values.below(5) as usize]).collect();
        let mut descending: Vec<f32> = (0..1000).map(|i| 1000.0 - i as f32).collect();
        descending[990] = 5000.0;
        let near: Vec<f32> = (0..900).map(|_| f32::from_bits(0x3f80_0000 + values.below(4000))).collect();
        let mut damaged = values.uniform(300, 1.0);
        for at in [0, 7, 290] {
            damaged[at] = f32::NAN;
            damaged[at + 3] = f32::NEG_INFINITY;
            damaged[at + 5] = f32::INFINITY;
        }
        vec![
            ("random", values.uniform(5000, 3.0)),
            ("spread", values.spread(1003)),
            ("constant", vec![-1.5; 513]),
            ("few values", few),
            ("descending", descending),
            ("neighbouring floats", near),
            ("damaged", damaged),
            ("nothing to keep", vec![f32::NAN; 40]),
            (
                "largest and smallest",
                vec![f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45, -1e-45, f32::INFINITY, 0.0, 1.0],
            ),
        ]
    }

    /// The reference sees the zeros as equal, as the order of values does.
    fn wanted(scores: &[f32], top_k: usize) -> Vec<u32> {
        let wide: Vec<f64> = scores.iter().map(|&s| if s == 0.0 { 0.0 } else { s.into() }).collect();
        reference::top_k(&wide, top_k)
    }

    #[test]
    fn the_largest_scores_are_kept_and_equal_ones_by_the_smaller_index() {
        for (name, scores) in score_rows() {
            for top_k in [1, 2, 5, 24, 64, 512] {
                for (queue_name, mut queue) in queues() {
                    let row = Row { scores: &scores, top_k };
                    let got = select(&mut queue, &row, Candidates::None);
                    if scores.len() <= top_k {
                        assert_eq!(got, (0..scores.len() as u32).collect::<Vec<_>>(), "{name}: all are kept");
                    } else {
                        assert_eq!(got, wanted(&scores, top_k), "{name}, top {top_k}, {queue_name}");
                    }
                }
            }
        }
    }

    #[test]
    fn candidate_blocks_are_the_best_ones_and_the_newest() {
        let mut values = Values::new(16);
        for (entries, block_size, blocks_max) in [(37, 4, 3), (1000, 8, 64), (515, 8, 64), (512, 8, 64), (700, 8, 64)] {
            let mut scores = values.uniform(entries, 2.0);
            for i in (0..entries).step_by(7) {
                scores[i] = 1.25;
            }
            let shape = CandidateShape { blocks_max, block_size };
            let top_k = blocks_max * block_size + 1 - block_size;
            let wide: Vec<f64> = scores.iter().map(|&s| s.into()).collect();
            let mut wanted_mask = reference::candidates(&wide, block_size, blocks_max);
            wanted_mask.truncate(entries);
            for (name, mut queue) in queues() {
                let (mut blocks, mut counts) = (device(&vec![u32::MAX; blocks_max]), device(&[7u32]));
                let row = Row { scores: &scores, top_k: top_k.min(entries - 1) };
                let publish = Candidates::Publish { shape, blocks: &mut blocks, counts: &mut counts };
                let own = select(&mut queue, &row, publish);
                assert_eq!(own, wanted(&scores, row.top_k), "the publisher is not restricted");
                let count = counts.u32()[0];
                if entries.div_ceil(block_size) <= blocks_max {
                    assert_eq!(count, ALL_BLOCKS);
                    assert!(wanted_mask.iter().all(|kept| *kept));
                } else {
                    let kept = &blocks.u32()[..count as usize];
                    let mask: Vec<bool> = (0..entries).map(|j| kept.contains(&((j / block_size) as u32))).collect();
                    assert_eq!(mask, wanted_mask, "{name}, {entries} entries");
                    assert!(kept.is_sorted());
                }
                // A later layer selects within them, from compact scores of its own.
                let later = values_for(entries);
                let wide: Vec<f64> = later.iter().map(|&s| s.into()).collect();
                let wanted = reference::top_k(&reference::masked(&wide, &wanted_mask), 5);
                let got = restricted(&mut queue, &later, shape, &blocks, &counts, 5);
                assert_eq!(got, wanted, "{name}, {entries} entries");
            }
        }
    }

    #[test]
    fn candidates_match_the_recorded_ones() {
        let (scores, lens, mask) = (narrow(golden("cand_scores")), golden("cand_lens"), golden("cand_mask_b3_s4"));
        let shape = CandidateShape { blocks_max: 3, block_size: 4 };
        for ((scores, &len), mask) in scores.chunks(37).zip(&lens).zip(mask.chunks(37)) {
            let scores = &scores[..len as usize];
            let (mut blocks, mut counts) = (device(&[0u32; 3]), device(&[0u32]));
            let publish = Candidates::Publish { shape, blocks: &mut blocks, counts: &mut counts };
            select(&mut Queue::cpu(1, Level::best()), &Row { scores, top_k: 9 }, publish);
            let kept = &blocks.u32()[..counts.u32()[0] as usize];
            let got: Vec<f64> = (0..37).map(|j| f64::from(u8::from(kept.contains(&(j / 4))))).collect();
            assert_eq!(got, mask, "{len} visible entries");
        }
    }

    fn values_for(entries: usize) -> Vec<f32> {
        Values::new(entries as u64).uniform(entries, 1.0)
    }

    fn restricted(
        queue: &mut Queue,
        scores: &[f32],
        shape: CandidateShape,
        blocks: &Buffer,
        counts: &Buffer,
        top_k: usize,
    ) -> Vec<u32> {
        let count = counts.u32()[0];
        let compact: Vec<f32> = if count == ALL_BLOCKS {
            scores.to_vec()
        } else {
            let entries = |block: &u32| {
                let start = *block as usize * shape.block_size;
                start..(start + shape.block_size).min(scores.len())
            };
            blocks.u32()[..count as usize].iter().flat_map(entries).map(|j| scores[j]).collect()
        };
        let stride = scores.len().next_multiple_of(16);
        let mut padded = compact;
        padded.resize(stride, f32::INFINITY);
        let (mut selected, mut kept) = (device(&vec![0u32; top_k]), device(&[0u32]));
        let args = Args {
            scores: &device(&padded),
            stride,
            rows: &rows_seeing(&[scores.len()]),
            tile: 0..1,
            ratio: 1,
            top_k,
            candidates: Candidates::Restrict(CandidateList { shape, blocks, counts }),
            selected: &mut selected,
            counts: &mut kept,
        };
        launch(queue, args).unwrap();
        selected.u32()[..kept.u32()[0] as usize].to_vec()
    }

    #[test]
    fn a_row_is_the_same_in_any_tile() {
        let mut values = Values::new(17);
        let (stride, top_k) = (96, 10);
        let seen = [96, 5, 80, 11, 10, 64];
        let scores = values.uniform(stride * seen.len(), 1.0);
        let rows = rows_seeing(&seen);
        let run = |queue: &mut Queue, tiles: &[std::ops::Range<usize>]| {
            let (mut selected, mut counts) = (device(&[9u32; 60]), device(&[0u32; 6]));
            for tile in tiles {
                let args = Args {
                    scores: &device(&scores[tile.start * stride..]),
                    stride,
                    rows: &rows,
                    tile: tile.clone(),
                    ratio: 1,
                    top_k,
                    candidates: Candidates::None,
                    selected: &mut selected,
                    counts: &mut counts,
                };
                launch(queue, args).unwrap();
            }
            (selected.u32().to_vec(), counts.u32().to_vec())
        };
        let alone: Vec<_> = (0..6).map(|r| r..r + 1).collect();
        let wanted = run(&mut Queue::cpu(1, Level::Scalar), &alone);
        assert_eq!(wanted.1, [10, 5, 10, 10, 10, 10]);
        for (name, mut queue) in queues() {
            assert_eq!(run(&mut queue, std::slice::from_ref(&(0..6))), wanted, "{name}");
            assert_eq!(run(&mut queue, &[0..2, 2..6]), wanted, "{name}");
        }
    }

    #[test]
    fn too_few_candidates_for_the_selection_are_refused() {
        let mut queue = Queue::cpu(1, Level::Scalar);
        let (mut blocks, mut counts) = (device(&[0u32; 3]), device(&[0u32]));
        let shape = CandidateShape { blocks_max: 3, block_size: 4 };
        let (mut selected, mut kept) = (device(&[0u32; 10]), device(&[0u32]));
        let args = Args {
            scores: &device(&[0.0f32; 16]),
            stride: 16,
            rows: &rows_seeing(&[16]),
            tile: 0..1,
            ratio: 1,
            top_k: 10,
            candidates: Candidates::Publish { shape, blocks: &mut blocks, counts: &mut counts },
            selected: &mut selected,
            counts: &mut kept,
        };
        let wanted = LaunchError::Limit { what: "the selection from candidate blocks", found: 10, max: 9 };
        assert_eq!(launch(&mut queue, args), Err(wanted));
    }
}
