//! What must hold of the index scores and of the selection made from them.

use super::{Args, Scored, SelectArgs, launch, launch_select, reference, steps};
use crate::contract::*;
use crate::index_key::{BLOCK, page_bytes};
use crate::reference_formats::{e2m1_decode, e8m0_decode};
use crate::rows::{Pages, visible};
use crate::top_k::{ALL_BLOCKS, CandidateList, CandidateShape, Candidates, reference as selection};
use tf_numerics::bf16;

pub const INDEX_SCORE: Contract = Contract {
    name: "index_score",
    formula: "score[r][j] = sum_h weights[r][h] * max(queries[r][h] . key[j], 0), j < (position + 1) / ratio",
    shapes: "queries [rows, heads, head_dim] f32, weights [rows, heads] f32, keys in pages of index_key, scores \
        [rows, stride] f32",
    order: "a dot product is one fused chain over the columns ascending, the heads another; on CUDA a chain of tensor-core steps, \
        and the heads in four chains, folded in pairs",
    bound: "(head_dim + heads + 1) U times the sum of absolute products",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("heads", 8), ("head_dim", 64), ("entries", 90), ("ratio", 1)] },
        Case { name: "ratio 2", rows: 33, sizes: &[("heads", 13), ("head_dim", 32), ("entries", 70), ("ratio", 2)] },
        Case {
            name: "release heads",
            rows: 6,
            sizes: &[("heads", 64), ("head_dim", 128), ("entries", 40), ("ratio", 2)],
        },
        Case {
            name: "large scales",
            rows: 7,
            sizes: &[("heads", 20), ("head_dim", 96), ("entries", 50), ("ratio", 1), ("scale", 40)],
        },
        Case {
            name: "scales far apart",
            rows: 9,
            sizes: &[("heads", 8), ("head_dim", 128), ("entries", 40), ("ratio", 1), ("apart", 20)],
        },
    ],
    make: make_scores,
    limits: &[],
    controls: &[
        Control::value("drops the last head"),
        Control::value("reads the key of the next entry"),
        Control::value("leaves the maximum with zero out"),
        Control::value("takes the next group's scale"),
    ],
    edits: &[
        metal("leaves the rectifier out (Metal)", "max_second(dots[h], 0.0f)", "dots[h]"),
        Control::metal(
            "scores the entry behind the last (Metal)",
            Gate::Memory,
            include_str!("kernel.metal"),
            "if (entry >= seen) return;",
            "if (entry > seen) return;",
        ),
        metal("takes the neighbour's nibble (Metal)", ">> 4u * (c % 8u) & 15u", ">> 4u * (c % 8u ^ 1u) & 15u"),
        metal("takes the first scale (Metal)", "scales[16u * (c / 32u)]", "scales[0]"),
        metal(
            "adds the heads from the last (Metal)",
            "for (uint h = 0u; h < here; h++) {\n            total",
            "for (uint g = 0u; g < here; g++) {\n            const uint h = here - 1u - g;\n            total",
        ),
        cuda("leaves the rectifier out (CUDA)", "max_second(own[0], 0.0f)", "own[0]"),
        cuda("takes a neighbour's codes (CUDA)", "low[2] = mul_bf16x2(two_codes<1>(x), first);", "low[2] = low[0];"),
        cuda("takes the first scale (CUDA)", "shape.head_dim * 8 + 16 * p", "shape.head_dim * 8"),
        cuda("leaves out what a large scale has above one factor (CUDA)", "(all & 0x8080u) != 0", "false"),
        cuda(
            "rounds a head's product by itself (CUDA)",
            "fma_own(w.y, max_second(own[1], 0.0f), sum)",
            "sum + w.y * max_second(own[1], 0.0f)",
        ),
        cuda(
            "takes the neighbours' weights (CUDA)",
            "const float2 w = *(const float2*)(weight + 8 * (n + k) + 2 * t);",
            "const float2 w = *(const float2*)(weight + 8 * (n + k) + 2 * (t ^ 1));",
        ),
    ],
    standard: STANDARD_CONTROLS,
};

pub const SELECT: Contract = Contract {
    name: "index_score/select",
    formula: "the top_k largest scores of each row, equal ones by the smaller entry, ascending; candidate blocks \
        published or kept to",
    shapes: "as index_score; selected [rows, top_k] u32, counts [rows] u32, blocks [rows, blocks_max] u32",
    order: "scores as index_score; the selection is exact and has no order",
    bound: "exact: the cases' scores are whole multiples of a quarter, with many ties",
    cases: &[
        Case {
            name: "unrestricted",
            rows: 128,
            sizes: &[("heads", 4), ("head_dim", 32), ("entries", 90), ("ratio", 1), ("top_k", 20)],
        },
        Case {
            name: "publishing",
            rows: 40,
            sizes: &[
                ("heads", 4),
                ("head_dim", 32),
                ("entries", 120),
                ("ratio", 1),
                ("top_k", 20),
                ("blocks", 5),
                ("publish", 1),
            ],
        },
        Case {
            name: "restricted",
            rows: 40,
            sizes: &[("heads", 4), ("head_dim", 32), ("entries", 120), ("ratio", 2), ("top_k", 20), ("blocks", 5)],
        },
    ],
    make: make_selection,
    limits: &[],
    controls: &[
        Control::value("ties go to the larger entry"),
        Control::value("keeps one entry too few"),
        Control::value("does not keep to the candidates"),
        Control::geometry("starts a tile with the selection of the row before"),
    ],
    edits: &[
        Control::metal(
            "drops the barrier behind the selection (Metal)",
            Gate::Value,
            include_str!("../top_k/kernel.metal"),
            "        simdgroup_barrier(mem_flags::mem_device);\n",
            "",
        ),
        Control::metal(
            "takes the tail of the last block (Metal)",
            Gate::Value,
            include_str!("../top_k/kernel.metal"),
            "entries -= min(end > seen ? end - seen : 0u, shape.block_size);",
            "",
        ),
        metal("leaves the rectifier out (Metal)", "max_second(dots[h], 0.0f)", "dots[h]"),
        metal("takes the neighbour's nibble (Metal)", ">> 4u * (c % 8u) & 15u", ">> 4u * (c % 8u ^ 1u) & 15u"),
        metal(
            "scores entries that are no candidates (Metal)",
            "shape.restricted != 0u &&",
            "shape.restricted == 2u &&",
        ),
        cuda("scores entries that are no candidates (CUDA)", "shape.restricted != 0 ?", "shape.restricted == 2 ?"),
        cuda("gives every row the first one's queries (CUDA)", "query + r * of_row", "query"),
        cuda(
            "leaves a group's last row out (CUDA)",
            "r < from + count; r++",
            "r + (count > 1 ? 1 : 0) < from + count; r++",
        ),
        Control::cuda(
            "takes the tail of the last block (CUDA)",
            Gate::Value,
            include_str!("../top_k/kernel.cu"),
            "row.entries -= min(end > row.seen ? end - row.seen : 0, shape.block_size);",
            "",
        ),
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

const ENTRIES_PER_PAGE: usize = 32;
const SEQUENCES: usize = 3;
const BLOCK_SIZE: usize = 8;

/// Keys of a few sequences, queries of rows at many positions, and what is selected.
struct Index {
    heads: usize,
    head_dim: usize,
    entries: usize,
    ratio: usize,
    rows: usize,
    /// `[SEQUENCES]` codes `[entries, head_dim / 2]` and scales `[entries, head_dim / 32]`.
    keys: Vec<(Vec<u8>, Vec<u8>)>,
    queries: Vec<f32>,
    weights: Vec<f32>,
    positions: Vec<u32>,
    top_k: usize,
    blocks_max: usize,
    publish: bool,
    /// `[rows]`: ids of the candidate blocks a row keeps to, or all.
    candidates: Vec<Option<Vec<u32>>>,
}

fn make(case: &Case, seed: u64, whole: bool) -> Index {
    let mut values = Values::new(seed);
    let (heads, head_dim, entries) = (case.size("heads"), case.size("head_dim"), case.size("entries"));
    let ratio = case.size("ratio");
    let key = |values: &mut Values| {
        let codes = values.bytes(entries * head_dim / 2);
        // Whole numbers: one scale, so that every score is exact and ties are real.
        let scales = if whole {
            vec![127; entries * head_dim / 32]
        } else if case.size("apart") > 0 {
            // A dot product then has more bits than leave its product with a weight exact.
            (0..entries * head_dim / 32).map(|_| (117 + values.below(case.size("apart"))) as u8).collect()
        } else {
            values.e8m0(entries * head_dim / 32, case.size("scale") as i32 - 3)
        };
        (codes, scales)
    };
    let keys: Vec<_> = (0..SEQUENCES).map(|_| key(&mut values)).collect();
    let count = case.rows * heads * head_dim;
    let (queries, weights) = if whole {
        // Queries are sparse, so that few different scores exist.
        let queries = (0..count).map(|_| if values.below(6) == 0 { values.below(3) as f32 * 0.5 + 0.5 } else { 0.0 });
        let queries: Vec<f32> = queries.collect();
        (queries, (0..case.rows * heads).map(|_| (values.below(8) as f32 - 3.0) * 0.5).collect())
    } else {
        (values.qdq4(count, 2.0), values.bf16(case.rows * heads, 1.0))
    };
    let last = entries * ratio - 1;
    let positions = (0..case.rows).map(|row| if row % 5 == 0 { last } else { values.below(last + 1) } as u32).collect();
    let mut index = Index {
        heads,
        head_dim,
        entries,
        ratio,
        rows: case.rows,
        keys,
        queries,
        weights,
        positions,
        top_k: case.size("top_k"),
        blocks_max: case.size("blocks"),
        publish: case.size("publish") == 1,
        candidates: vec![None; case.rows],
    };
    if index.blocks_max > 0 && !index.publish {
        // Candidates come from other scores than the row's own: those of the row after it.
        let of_row = |row: usize| {
            let seen = index.seen(row);
            let others = &index.scores_with(row, (row + 1) % index.rows).0;
            let blocks = seen.div_ceil(BLOCK_SIZE);
            let mask = selection::candidates(others, BLOCK_SIZE, index.blocks_max);
            let kept = (0..blocks as u32).filter(|block| mask[*block as usize * BLOCK_SIZE]);
            (blocks > index.blocks_max).then(|| kept.collect::<Vec<u32>>())
        };
        index.candidates = (0..index.rows).map(of_row).collect();
    }
    index
}

fn make_scores(case: &Case, seed: u64) -> Box<dyn World> {
    Box::new(Scores(make(case, seed, false)))
}

fn make_selection(case: &Case, seed: u64) -> Box<dyn World> {
    Box::new(Selection(make(case, seed, true)))
}

impl Index {
    fn sequence(row: usize) -> usize {
        row / 4 % SEQUENCES
    }

    fn seen(&self, row: usize) -> usize {
        visible(self.positions[row], self.ratio as u32)
    }

    fn key(&self, sequence: usize, entry: usize) -> Vec<f64> {
        let (codes, scales) = &self.keys[sequence];
        let (width, groups) = (self.head_dim / 2, self.head_dim / 32);
        let value = |c: usize| {
            let byte = codes[entry * width + c / 2];
            e2m1_decode(if c.is_multiple_of(2) { byte & 15 } else { byte >> 4 })
                * e8m0_decode(scales[entry * groups + c / 32])
        };
        (0..self.head_dim).map(value).collect()
    }

    /// Scores of a row's visible entries under another row's queries, and the sums of absolute products.
    fn scores_with(&self, row: usize, of: usize) -> (Vec<f64>, Vec<f64>) {
        let (heads, head_dim) = (self.heads, self.head_dim);
        let queries = wide(&self.queries[of * heads * head_dim..][..heads * head_dim]);
        let weights = wide(&self.weights[of * heads..][..heads]);
        let sequence = Index::sequence(row);
        let keys: Vec<f64> = (0..self.seen(row)).flat_map(|entry| self.key(sequence, entry)).collect();
        let absolute = |values: &[f64]| values.iter().map(|value| value.abs()).collect::<Vec<_>>();
        let sums = reference::index_score(&absolute(&queries), &absolute(&weights), &absolute(&keys), head_dim);
        (reference::index_score(&queries, &weights, &keys, head_dim), sums)
    }

    /// The key caches of all sequences, one behind the other, and a last one of NaN scales for poison rows.
    fn cache(&self, fault: Fault) -> (Vec<u8>, usize) {
        let head_dim = self.head_dim;
        let pages = self.entries.div_ceil(ENTRIES_PER_PAGE);
        let bytes = page_bytes(head_dim, ENTRIES_PER_PAGE);
        let mut cache = vec![0x7f; (SEQUENCES + 1) * pages * bytes];
        let scales_from = SEQUENCES * pages * bytes;
        cache[scales_from..].fill(0xff);
        let (width, groups) = (head_dim / 2, head_dim / 32);
        for (sequence, (codes, scales)) in self.keys.iter().enumerate() {
            for entry in 0..self.entries {
                let from = if fault.is("reads the key of the next entry") { (entry + 1) % self.entries } else { entry };
                let page = sequence * pages + entry / ENTRIES_PER_PAGE;
                let (block, lane) = (entry % ENTRIES_PER_PAGE / BLOCK, entry % BLOCK);
                let start = page * bytes + block * bytes / (ENTRIES_PER_PAGE / BLOCK);
                for byte in 0..width {
                    cache[start + (byte / 4 * BLOCK + lane) * 4 + byte % 4] = codes[from * width + byte];
                }
                for group in 0..groups {
                    let taken = if fault.is("takes the next group's scale") {
                        from * groups + group + 1
                    } else {
                        from * groups + group
                    };
                    cache[start + width * BLOCK + group * BLOCK + lane] = scales[taken % scales.len()];
                }
            }
        }
        (cache, pages)
    }
}

impl Index {
    fn work(&self) -> Work {
        let seen: usize = (0..self.rows).map(|row| self.seen(row)).sum();
        let bytes = self.keys.iter().map(|(codes, scales)| codes.len() + scales.len()).sum::<usize>() + 4 * seen;
        Work { bytes, multiply_adds: seen * self.heads * self.head_dim }
    }
}

/// What the mirror takes of a row of a case of scores.
#[cfg(test)]
pub(super) struct ScoredRow {
    pub(super) queries: Vec<f32>,
    pub(super) weights: Vec<f32>,
    /// Those that the row sees.
    pub(super) keys: Vec<Vec<f32>>,
}

#[cfg(test)]
pub(super) fn scored_rows(case: &Case, seed: u64) -> Vec<ScoredRow> {
    let index = make(case, seed, false);
    let (heads, head_dim) = (index.heads, index.head_dim);
    let row = |row: usize| {
        let keys = (0..index.seen(row)).map(|entry| {
            let key = index.key(Index::sequence(row), entry);
            key.into_iter().map(|value| value as f32).collect()
        });
        ScoredRow {
            queries: index.queries[row * heads * head_dim..][..heads * head_dim].to_vec(),
            weights: index.weights[row * heads..][..heads].to_vec(),
            keys: keys.collect(),
        }
    };
    (0..index.rows).map(row).collect()
}

/// A launch's view of the index.
struct View {
    seats: Seats,
    keys: Input,
    queries: Input,
    weights: Input,
    table: Vec<u32>,
    pages_per_slot: usize,
}

impl View {
    fn new(index: &Index, stage: &Stage<'_>, picks: &[Pick], fault: Fault) -> View {
        let seats = Seats::of(picks, |row| (Index::sequence(row), index.positions[row]));
        let (cache, pages_per_slot) = index.cache(fault);
        let mut table = vec![0; seats.slots * pages_per_slot];
        for (window, sequence) in seats.windows.iter().zip(&seats.sequences) {
            let first = sequence.unwrap_or(SEQUENCES) * pages_per_slot;
            let slot = &mut table[window.slot as usize * pages_per_slot..][..pages_per_slot];
            slot.iter_mut().enumerate().for_each(|(page, place)| *place = (first + page) as u32);
        }
        let mut weights = gather(picks, &index.weights, index.heads);
        if fault.is("drops the last head") {
            weights.chunks_mut(index.heads).for_each(|row| row[index.heads - 1] = 0.0);
        }
        View {
            seats,
            keys: stage.input("keys", &cache),
            queries: stage.rows_in("queries", &gather(picks, &index.queries, index.heads * index.head_dim)),
            weights: stage.rows_in("weights", &weights),
            table,
            pages_per_slot,
        }
    }

    fn scored<'a>(&'a self, index: &Index) -> Scored<'a> {
        Scored {
            queries: &self.queries.buffer,
            weights: &self.weights.buffer,
            rows: &self.seats.rows,
            ratio: index.ratio as u32,
            keys: &self.keys.buffer,
            pages: Pages {
                table: &self.table,
                pages_per_slot: self.pages_per_slot,
                entries_per_page: ENTRIES_PER_PAGE,
            },
            heads: index.heads,
            head_dim: index.head_dim,
        }
    }

    fn read(self, stage: &mut Stage<'_>) -> Seats {
        stage.read(self.keys);
        stage.read(self.queries);
        stage.read(self.weights);
        self.seats
    }
}

struct Scores(Index);

impl World for Scores {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let index = &self.0;
        let view = View::new(index, stage, picks, fault);
        let stride = index.entries.next_multiple_of(16);
        let mut scores = stage.output::<f32>("scores", picks.len() * stride);
        let args = Args {
            scored: view.scored(index),
            tile: 0..picks.len(),
            skip_visible: 0,
            restrict: None,
            scores: &mut scores.buffer,
            stride,
        };
        stage.run(|queue| launch(queue, args))?;
        if fault.is("leaves the maximum with zero out") {
            for (place, pick) in picks.iter().enumerate() {
                let Some(row) = pick.row() else { continue };
                let (heads, head_dim) = (index.heads, index.head_dim);
                for entry in 0..index.seen(row) {
                    let key = index.key(Index::sequence(row), entry);
                    let product = |head: usize| {
                        let query = &index.queries[(row * heads + head) * head_dim..][..head_dim];
                        query.iter().zip(&key).map(|(q, k)| f64::from(*q) * k).sum::<f64>()
                    };
                    let sum: f64 = (0..heads).map(|h| f64::from(index.weights[row * heads + h]) * product(h)).sum();
                    scores.edit::<f32>(|scores| scores[place * stride + entry] = sum as f32);
                }
            }
        }
        let seats = view.read(stage);
        let seen = |place: usize| visible(seats.rows[place].position, index.ratio as u32);
        let promised = (0..picks.len()).map(|place| (place, place * stride..place * stride + seen(place))).collect();
        let free = stage.spare((0..picks.len()).map(|place| place * stride..(place + 1) * stride));
        stage.ranges_and_free::<f32>(scores, promised, &free);
        Ok(())
    }

    fn stepped(&self, row: usize) -> Option<Vec<u32>> {
        let index = &self.0;
        let (heads, head_dim) = (index.heads, index.head_dim);
        let weights = &index.weights[row * heads..][..heads];
        let query = steps::Query::new(&index.queries[row * heads * head_dim..][..heads * head_dim], weights, head_dim);
        let score = |entry: usize| {
            let key = index.key(Index::sequence(row), entry);
            query.score(&steps::chain(head_dim, |column| bf16::from_f32(key[column] as f32))).to_bits()
        };
        Some((0..index.seen(row)).map(score).collect())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let (scores, sums) = self.0.scores_with(row, row);
        let roundings = (self.0.head_dim + self.0.heads + 1) as f64;
        let spans: Vec<Span> =
            scores.iter().zip(&sums).map(|(score, sum)| Span::around(*score, 1.01 * roundings * U * sum)).collect();
        Expected::zip(&scores, &spans)
    }

    fn work(&self) -> Work {
        self.0.work()
    }
}

struct Selection(Index);

impl World for Selection {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let index = &self.0;
        let view = View::new(index, stage, picks, fault);
        let rows = picks.len();
        let top_k = index.top_k - usize::from(fault.is("keeps one entry too few"));
        let shape = CandidateShape { blocks_max: index.blocks_max, block_size: BLOCK_SIZE };
        let (mut lists, mut list_counts) = (vec![0u32; rows * index.blocks_max], vec![ALL_BLOCKS; rows]);
        for (place, pick) in picks.iter().enumerate() {
            let Some(list) = pick.row().and_then(|row| index.candidates[row].as_ref()) else { continue };
            lists[place * index.blocks_max..][..list.len()].copy_from_slice(list);
            list_counts[place] = list.len() as u32;
        }
        let restricted = index.blocks_max > 0 && !index.publish && !fault.is("does not keep to the candidates");
        let (lists, list_counts) = (stage.rows_in("blocks", &lists), stage.rows_in("block counts", &list_counts));
        let mut blocks = stage.output::<u32>("blocks", rows * index.blocks_max);
        let mut block_counts = stage.output::<u32>("block counts", if index.publish { rows } else { 0 });
        let mut selected = stage.output::<u32>("selected", rows * top_k);
        let mut counts = stage.output::<u32>("counts", rows);
        // Room for a few rows at a time, so that a launch of many goes through several tiles.
        let mut scratch = stage.output::<f32>("scratch", 3 * index.entries.next_multiple_of(16));
        let candidates = match (index.publish, restricted) {
            (true, _) => Candidates::Publish { shape, blocks: &mut blocks.buffer, counts: &mut block_counts.buffer },
            (_, true) => {
                Candidates::Restrict(CandidateList { shape, blocks: &lists.buffer, counts: &list_counts.buffer })
            }
            _ => Candidates::None,
        };
        let args = SelectArgs {
            scored: view.scored(index),
            top_k,
            candidates,
            scratch: &mut scratch.buffer,
            selected: &mut selected.buffer,
            counts: &mut counts.buffer,
        };
        stage.run(|queue| launch_select(queue, args))?;
        if fault.is("ties go to the larger entry") {
            for (place, row) in picks.iter().enumerate().filter_map(|(place, pick)| Some((place, pick.row()?))) {
                let mut scores = index.scores_with(row, row).0;
                let count = scores.len();
                scores.reverse();
                let mut kept = selection::top_k(&scores, top_k);
                kept.iter_mut().for_each(|entry| *entry = count as u32 - 1 - *entry);
                kept.sort_unstable();
                selected.edit::<u32>(|selected| selected[place * top_k..][..kept.len()].copy_from_slice(&kept));
            }
        }
        if fault.is("starts a tile with the selection of the row before") && rows > 4 {
            selected.edit::<u32>(|selected| selected.copy_within(2 * top_k..3 * top_k, 3 * top_k));
        }
        stage.read(lists);
        stage.read(list_counts);
        view.read(stage);
        let kept: Vec<usize> = counts.held::<u32>()[..rows].iter().map(|count| *count as usize).collect();
        let held =
            kept.iter().enumerate().map(|(place, kept)| (place, place * top_k..place * top_k + (*kept).min(top_k)));
        let (held, free) = (held.collect(), stage.spare((0..rows).map(|place| place * top_k..(place + 1) * top_k)));
        stage.rows::<u32>(counts, 1);
        stage.ranges_and_free::<u32>(selected, held, &free);
        if index.publish {
            let most = index.blocks_max;
            let listed: Vec<u32> = block_counts.held::<u32>()[..rows].to_vec();
            let length = |count: u32| if count == ALL_BLOCKS { 0 } else { (count as usize).min(most) };
            let held =
                listed.iter().enumerate().map(|(place, count)| (place, place * most..place * most + length(*count)));
            let (held, free) = (held.collect(), stage.spare((0..rows).map(|place| place * most..(place + 1) * most)));
            stage.rows::<u32>(block_counts, 1);
            stage.ranges_and_free::<u32>(blocks, held, &free);
        } else {
            stage.discard(block_counts);
            stage.discard(blocks);
        }
        stage.discard(scratch);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let index = &self.0;
        let scores = index.scores_with(row, row).0;
        let masked = match &index.candidates[row] {
            None => scores.clone(),
            Some(kept) => {
                let mask: Vec<bool> =
                    (0..scores.len()).map(|entry| kept.contains(&((entry / BLOCK_SIZE) as u32))).collect();
                selection::masked(&scores, &mask)
            }
        };
        let selected = if scores.len() <= index.top_k {
            (0..scores.len() as u32).collect()
        } else {
            selection::top_k(&masked, index.top_k)
        };
        let mut words = vec![selected.len() as u32];
        words.extend(selected);
        if index.publish {
            let blocks = scores.len().div_ceil(BLOCK_SIZE);
            if blocks <= index.blocks_max {
                words.push(ALL_BLOCKS);
            } else {
                let mask = selection::candidates(&scores, BLOCK_SIZE, index.blocks_max);
                let kept: Vec<u32> = (0..blocks as u32).filter(|block| mask[*block as usize * BLOCK_SIZE]).collect();
                words.push(kept.len() as u32);
                words.extend(kept);
            }
        }
        words.into_iter().map(|word| Expected::exactly(f64::from(word))).collect()
    }

    fn decode(&self, _row: usize, words: &[u32]) -> Vec<f64> {
        words.iter().map(|word| f64::from(*word)).collect()
    }

    fn work(&self) -> Work {
        self.0.work()
    }
}
