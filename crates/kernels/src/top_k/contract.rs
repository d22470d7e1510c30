//! What must hold of the exact selections.

use super::{ALL_BLOCKS, Args, CandidateShape, Candidates, launch, reference};
use crate::contract::*;

pub const TOP_K: Contract = Contract {
    name: "top_k",
    formula: "the top_k largest scores of each row, equal ones by the smaller index, ascending; the blocks_max \
        best blocks likewise",
    shapes: "scores [tile, stride] f32; selected [rows, top_k] u32, counts [rows] u32; blocks [rows, blocks_max] \
        u32, block counts [rows] u32",
    order: "scores are compared as integers and counted: no order of execution enters",
    bound: "exact",
    cases: &[
        Case { name: "ties", rows: 128, sizes: &[("entries", 700), ("top_k", 64), ("blocks", 9), ("values", 12)] },
        Case { name: "spread", rows: 33, sizes: &[("entries", 133), ("top_k", 40), ("blocks", 6), ("values", 0)] },
        Case {
            name: "last bits",
            rows: 17,
            sizes: &[("entries", 300), ("top_k", 40), ("blocks", 6), ("last bits", 90)],
        },
        Case { name: "long", rows: 5, sizes: &[("entries", 5000), ("top_k", 64), ("blocks", 300), ("values", 0)] },
        Case {
            name: "longest",
            rows: 3,
            sizes: &[("entries", 17_000), ("top_k", 30), ("blocks", 40), ("values", 900)],
        },
        // Fewer than wanted, beside minus infinities.
        Case {
            name: "mostly masked",
            rows: 17,
            sizes: &[("entries", 90), ("top_k", 40), ("blocks", 6), ("values", 0), ("masked", 1)],
        },
        Case { name: "one", rows: 6, sizes: &[("entries", 40), ("top_k", 1), ("blocks", 2), ("values", 3)] },
    ],
    make,
    limits: &[],
    controls: &[
        Control::value("ties go to the larger index"),
        Control::value("keeps one entry too few"),
        Control::value("does not keep the newest block"),
        Control::value("never looks at the last entry"),
    ],
    edits: &[
        metal(
            "ties go to the larger index (Metal)",
            "equal_seen + simd_prefix_exclusive_sum(is_equal) < equal_left",
            "equal_seen + simd_prefix_exclusive_sum(is_equal) >= equal_left",
        ),
        metal("selects minus infinity (Metal)", "if (least <= 0x007fffffu)", "if (least < 0x007fffffu)"),
        metal("keeps one too few (Metal)", "wanted - simd_sum(above)", "wanted - simd_sum(above) - 1u"),
        metal(
            "counts the equal ones of the last step (Metal)",
            "equal_seen += simd_sum(is_equal);",
            "equal_seen = simd_sum(is_equal);",
        ),
        metal(
            "lets the newest block go (Metal)",
            "if ((i + 1u) * block_size >= n) return order_key(INFINITY);",
            "if ((i + 1u) * block_size >= n) return 0x00800000u;",
        ),
        cuda("ties go to the larger index (CUDA)", "if (rank >= left)", "if (rank + left < inside)"),
        cuda(
            "lets the newest block go (CUDA)",
            "8 * (b + k) + 8 >= seen ? order_key(infinite())",
            "8 * (b + k) + 8 >= seen ? LEAST_KEPT",
        ),
        cuda(
            "leaves the last chunk of a warp out (CUDA)",
            "is_there = c < chunks && i < count",
            "is_there = c + 1 < chunks && i < count",
        ),
        cuda("merges the first part twice (CUDA)", "to += part * segment;", "to += part / 2 * segment;"),
    ],
    standard: STANDARD_CONTROLS,
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

/// The same of its CUDA source.
const fn cuda(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::cuda(name, Gate::Value, include_str!("kernel.cu"), find, replace)
}

const BLOCK_SIZE: usize = 8;

struct Rows {
    top_k: usize,
    blocks_max: usize,
    stride: usize,
    scores: Vec<f32>,
    seen: Vec<usize>,
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let (entries, different, last_bits) = (case.size("entries"), case.size("values"), case.size("last bits"));
    let stride = entries.next_multiple_of(16);
    let masked = case.size("masked") > 0;
    let score = |values: &mut Values| match values.below(40) {
        _ if masked && values.below(3) < 2 => f32::NEG_INFINITY,
        0 => f32::NEG_INFINITY,
        1 => f32::NAN,
        2 => [0.0, -0.0][values.below(2)],
        // Scores that only the last bits of their keys tell apart.
        _ if last_bits > 0 => f32::from_bits(0x412f_fc00 + values.below(last_bits) as u32),
        _ if different == 0 => values.floats(1, 100.0)[0],
        _ => values.below(different) as f32 - 4.0,
    };
    let scores = (0..case.rows * stride).map(|_| score(&mut values)).collect();
    let seen = (0..case.rows).map(|row| if row % 3 == 0 { entries } else { 1 + values.below(entries) }).collect();
    Box::new(Rows { top_k: case.size("top_k"), blocks_max: case.size("blocks"), stride, scores, seen })
}

impl Rows {
    /// The scores of a row as the definition wants them: no sign of zero, no NaN.
    fn scores(&self, row: usize) -> Vec<f64> {
        let scores = &self.scores[row * self.stride..][..self.seen[row]];
        scores.iter().map(|score| if score.is_nan() { f64::NEG_INFINITY } else { f64::from(*score) + 0.0 }).collect()
    }
}

impl World for Rows {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let (rows, stride) = (picks.len(), self.stride);
        // With ratio 1 a row at position p sees p + 1 entries.
        let mut seats = Seats::of(picks, |row| (row, self.seen[row] as u32 - 1));
        if fault.is("does not keep the newest block") {
            for row in &mut seats.rows {
                row.position = (row.position + 1).next_multiple_of(BLOCK_SIZE as u32).min(stride as u32) - 1;
            }
        }
        let top_k = self.top_k - usize::from(fault.is("keeps one entry too few"));
        let mut values = gather(picks, &self.scores, stride);
        if fault.is("never looks at the last entry") {
            for (row, info) in values.chunks_mut(stride).zip(&seats.rows) {
                row[info.position as usize] = f32::NEG_INFINITY;
            }
        }
        let scores = stage.rows_in("scores", &values);
        let mut blocks = stage.output::<u32>("blocks", rows * self.blocks_max);
        let mut block_counts = stage.output::<u32>("block counts", rows);
        let mut selected = stage.output::<u32>("selected", rows * top_k);
        let mut counts = stage.output::<u32>("counts", rows);
        let shape = CandidateShape { blocks_max: self.blocks_max, block_size: BLOCK_SIZE };
        let args = Args {
            scores: &scores.buffer,
            stride,
            rows: &seats.rows,
            tile: 0..rows,
            ratio: 1,
            top_k,
            candidates: Candidates::Publish { shape, blocks: &mut blocks.buffer, counts: &mut block_counts.buffer },
            selected: &mut selected.buffer,
            counts: &mut counts.buffer,
        };
        stage.run(|queue| launch(queue, args))?;
        if fault.is("ties go to the larger index") {
            for (place, row) in picks.iter().enumerate().filter_map(|(place, pick)| Some((place, pick.row()?))) {
                let mut scores = self.scores(row);
                let count = scores.len() as u32;
                scores.reverse();
                let mut kept = reference::top_k(&scores, top_k);
                kept.iter_mut().for_each(|entry| *entry = count - 1 - *entry);
                kept.sort_unstable();
                selected.edit::<u32>(|selected| selected[place * top_k..][..kept.len()].copy_from_slice(&kept));
            }
        }
        stage.read(scores);
        let held = |list: &[u32], width: usize| {
            let length = |count: u32| if count == ALL_BLOCKS { 0 } else { (count as usize).min(width) };
            let ranges = list.iter().take(rows).enumerate();
            ranges.map(|(place, count)| (place, place * width..place * width + length(*count))).collect::<Vec<_>>()
        };
        let kept = held(&counts.held::<u32>(), top_k);
        let listed = held(&block_counts.held::<u32>(), self.blocks_max);
        stage.rows::<u32>(counts, 1);
        let free = |stage: &Stage<'_>, width: usize| {
            stage.spare((0..rows).map(move |place| place * width..(place + 1) * width))
        };
        let (of_selected, of_blocks) = (free(stage, top_k), free(stage, self.blocks_max));
        stage.ranges_and_free::<u32>(selected, kept, &of_selected);
        stage.rows::<u32>(block_counts, 1);
        stage.ranges_and_free::<u32>(blocks, listed, &of_blocks);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let scores = self.scores(row);
        let selected = match scores.len() <= self.top_k {
            true => (0..scores.len() as u32).collect(),
            false => reference::top_k(&scores, self.top_k),
        };
        let mut words = vec![selected.len() as u32];
        words.extend(selected);
        let blocks = scores.len().div_ceil(BLOCK_SIZE);
        if blocks <= self.blocks_max {
            words.push(ALL_BLOCKS);
        } else {
            let mask = reference::candidates(&scores, BLOCK_SIZE, self.blocks_max);
            let kept: Vec<u32> = (0..blocks as u32).filter(|block| mask[*block as usize * BLOCK_SIZE]).collect();
            words.push(kept.len() as u32);
            words.extend(kept);
        }
        words.into_iter().map(|word| Expected::exactly(f64::from(word))).collect()
    }

    fn decode(&self, _row: usize, words: &[u32]) -> Vec<f64> {
        words.iter().map(|word| f64::from(*word)).collect()
    }

    fn work(&self) -> Work {
        Work { bytes: self.seen.iter().sum::<usize>() * 4, multiply_adds: 0 }
    }
}
