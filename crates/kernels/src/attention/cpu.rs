//! Scores keep sixteen heads a vector, so that neither dot products nor softmax sums cross lanes; outputs keep sixteen columns.
//! A thread owns whole (row, head block) pairs. Neighbouring rows of a window share its decoded keys.

use super::{Args, Compressed, HEAD_BLOCK, Shape, Span, TILE_ROWS, thread_scratch_floats};
use crate::kv_compress::{self, decode_record as decode_entry};
use crate::kv_store::{self, HEAD_DIM_MAX, decode_record as decode_key};
use crate::parallel::threads_for;
use crate::rope::{Phases, Turn, turn};
use crate::rows::{RowInfo, WindowInfo};
use std::ops::Range;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::lanes::{Kernel, Lanes, WIDTH, dispatch};
use tf_numerics::math;

const _: () = assert!(HEAD_BLOCK == WIDTH);

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { shape, span, q, rows, windows, records, ring, compressed, sinks, frequencies, scratch, out } = args;
    let keys = shape.window + shape.selected_max;
    let work = rows.len() * shape.heads * shape.head_dim * keys * 2;
    let blocks = shape.heads.div_ceil(HEAD_BLOCK);
    let job = Job {
        shape,
        span,
        scale: 1.0 / (shape.head_dim as f32).sqrt(),
        q: q.f32(),
        rows,
        windows,
        records: records.u8(),
        ring: ring.u8(),
        compressed: compressed.map(|c| Selection {
            cache: c.cache.u8(),
            ids: c.selected.u32(),
            counts: c.counts.u32(),
            c,
        }),
        sinks: sinks.f32(),
        frequencies,
        out: Parts::new(&mut out.f32_mut()[..rows.len() * shape.heads * shape.head_dim]),
    };
    let scratch = Parts::new(scratch.f32_mut());
    let floats = thread_scratch_floats(shape);
    let level = queue.level;
    queue.pool.run_on(threads_for(work), |index, count| {
        // SAFETY: every thread has its own part.
        let scratch = unsafe { scratch.part(index * floats..(index + 1) * floats) };
        dispatch(level, Thread { job: &job, items: split(rows.len() * blocks, count, index, 1), scratch });
    });
}

struct Selection<'a> {
    c: Compressed<'a>,
    cache: &'a [u8],
    ids: &'a [u32],
    counts: &'a [u32],
}

struct Job<'a> {
    shape: Shape,
    span: Span,
    scale: f32,
    q: &'a [f32],
    rows: &'a [RowInfo],
    windows: &'a [WindowInfo],
    records: &'a [u8],
    ring: &'a [u8],
    compressed: Option<Selection<'a>>,
    sinks: &'a [f32],
    frequencies: &'a [f32],
    out: Parts<'a, f32>,
}

impl Job<'_> {
    /// The keys that row `r` sees besides its selection, as indices into its window's list of keys: positions, with the
    /// block's rows numbered on from its start.
    #[inline(always)]
    fn span_of(&self, r: usize) -> Range<usize> {
        let (row, window) = (self.rows[r], self.windows[self.rows[r].window as usize]);
        let size = self.shape.window;
        match self.span {
            Span::Causal => (row.position as usize + 1).saturating_sub(size)..row.position as usize + 1,
            Span::Block => {
                let start = window.start as usize;
                start.saturating_sub(size)..start + window.row_count as usize
            }
        }
    }

    /// Decodes keys `span` of a window.
    #[inline(always)]
    fn decode_span<L: Lanes>(&self, window: WindowInfo, span: Range<usize>, keys: &mut [f32]) {
        let head_dim = self.shape.head_dim;
        let bytes = kv_store::record_bytes(head_dim);
        let start = window.start as usize;
        for (j, key) in span.zip(keys.chunks_exact_mut(head_dim)) {
            let record = if j >= start {
                &self.records[(window.first_row as usize + j - start) * bytes..][..bytes]
            } else {
                let place = window.slot as usize * self.shape.ring_len + j % self.shape.ring_len;
                &self.ring[place * bytes..][..bytes]
            };
            decode_key::<L>(record, key);
        }
    }

    /// Decodes the entries that row `r` selected; returns how many.
    #[inline(always)]
    fn decode_selection<L: Lanes>(&self, r: usize, keys: &mut [f32]) -> usize {
        let Some(Selection { c, cache, ids, counts }) = &self.compressed else { return 0 };
        let (head_dim, most) = (self.shape.head_dim, self.shape.selected_max);
        let bytes = kv_compress::record_bytes(head_dim);
        let count = counts[r] as usize;
        for (&id, key) in ids[r * most..][..count].iter().zip(keys.chunks_exact_mut(head_dim)) {
            let place = c.pages.index(self.rows[r].slot, id as usize);
            decode_entry::<L>(&cache[place * bytes..][..bytes], key);
        }
        count
    }
}

struct Thread<'a> {
    job: &'a Job<'a>,
    /// Of `rows * head blocks`, a row's head blocks next to each other.
    items: Range<usize>,
    scratch: &'a mut [f32],
}

/// A thread's scratch, cut.
struct Scratch<'a> {
    selected: &'a mut [f32],
    span: &'a mut [f32],
    /// `[keys, HEAD_BLOCK]`.
    scores: &'a mut [f32],
    /// `[head_dim, HEAD_BLOCK]`.
    queries: &'a mut [f32],
}

impl Kernel for Thread<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Thread { job, items, scratch } = self;
        let Shape { heads, head_dim, selected_max, window, block_rows, .. } = job.shape;
        let blocks = heads.div_ceil(HEAD_BLOCK);
        let span_keys = window + TILE_ROWS + block_rows;
        let (selected, rest) = scratch.split_at_mut(selected_max * head_dim);
        let (span, rest) = rest.split_at_mut(span_keys * head_dim);
        let (scores, queries) = rest.split_at_mut((selected_max + span_keys) * HEAD_BLOCK);
        let mut scratch = Scratch { selected, span, scores, queries: &mut queries[..head_dim * HEAD_BLOCK] };

        let mut phases = Phases::new();
        // Keys that lie decoded in `scratch.span`, and whose window they are.
        let mut decoded = (usize::MAX, 0..0);
        let mut item = items.start;
        while item < items.end {
            let r = item / blocks;
            let end = items.end.min((r + 1) * blocks);
            let (w, seen) = (job.rows[r].window as usize, job.span_of(r));
            if decoded.0 != w || seen.start < decoded.1.start || seen.end > decoded.1.end {
                // As far as this thread's next rows of the window will look.
                let last = (items.end - 1) / blocks;
                let mut ahead = seen.end;
                for next in r + 1..=last.min(r + TILE_ROWS - 1) {
                    if job.rows[next].window as usize != w {
                        break;
                    }
                    ahead = ahead.max(job.span_of(next).end);
                }
                let ahead = ahead.min(seen.start + span_keys);
                job.decode_span::<L>(job.windows[w], seen.start..ahead, scratch.span);
                decoded = (w, seen.start..ahead);
            }
            let count = job.decode_selection::<L>(r, scratch.selected);
            phases.set::<L>(job.rows[r].position, job.frequencies);
            let from = (seen.start - decoded.1.start) * head_dim;
            for block in item % blocks..end - r * blocks {
                row_heads::<L>(job, r, block, count, from..from + seen.len() * head_dim, &mut scratch, &phases);
            }
            item = end;
        }
    }
}

/// One head block of one row. Its keys lie decoded: `count` selected ones, then `span` of the window's.
#[inline(always)]
fn row_heads<L: Lanes>(
    job: &Job<'_>,
    r: usize,
    block: usize,
    count: usize,
    span: Range<usize>,
    scratch: &mut Scratch<'_>,
    phases: &Phases,
) {
    let Shape { heads, head_dim, .. } = job.shape;
    let first = block * HEAD_BLOCK;
    let here = (heads - first).min(HEAD_BLOCK);
    let parts = [&scratch.selected[..count * head_dim], &scratch.span[span]];

    // Queries, transposed: column by column, sixteen heads a vector. Lanes without a head are zero.
    let mut query = [0.0; HEAD_DIM_MAX];
    let query = &mut query[..head_dim];
    let queries = scratch.queries.as_chunks_mut::<WIDTH>().0;
    if here < HEAD_BLOCK {
        queries.as_flattened_mut().fill(0.0);
    }
    for h in 0..here {
        query.copy_from_slice(&job.q[(r * heads + first + h) * head_dim..][..head_dim]);
        turn::<L>(query, phases, Turn::Forward);
        for (column, &value) in queries.iter_mut().zip(query.iter()) {
            column[h] = value;
        }
    }

    let scores = scratch.scores.as_chunks_mut::<WIDTH>().0;
    let scores = &mut scores[..(parts[0].len() + parts[1].len()) / head_dim];
    let scale = L::splat(job.scale);
    let mut max = L::splat(f32::NEG_INFINITY);
    let (selected_scores, span_scores) = scores.split_at_mut(count);
    score_keys::<L>(parts[0], queries, scale, selected_scores, &mut max);
    score_keys::<L>(parts[1], queries, scale, span_scores, &mut max);

    let mut sum = L::splat(0.0);
    for score in scores.iter_mut() {
        let e = math::exp(L::load_array(score) - max);
        sum = sum + e;
        e.bf16_round().store_array(score);
    }
    let sinks = L::load_partial(&job.sinks[first..first + here], 0.0);
    let denominators = (sum + math::exp(sinks - max)).to_array();

    let at = (r * heads + first) * head_dim;
    // SAFETY: this head block of row `r` belongs to this thread.
    let out = unsafe { job.out.part(at..at + here * head_dim) };
    let (selected_scores, span_scores) = scores.split_at(count);
    let probabilities = [selected_scores, span_scores];
    let mut h = 0;
    while h < here {
        let out = &mut out[h * head_dim..];
        // Four heads and four vectors of columns keep sixteen chains in registers.
        match (here - h, head_dim / WIDTH % 4) {
            (4.., 0) => h += mix_values::<L, 4, 4>(parts, probabilities, h, head_dim, &denominators, out),
            (4.., _) => h += mix_values::<L, 4, 2>(parts, probabilities, h, head_dim, &denominators, out),
            _ => h += mix_values::<L, 1, 2>(parts, probabilities, h, head_dim, &denominators, out),
        }
    }
    for head in out.chunks_exact_mut(head_dim) {
        turn::<L>(head, phases, Turn::Back);
    }
}

/// `scores[j][h] = (query_h . key_j) * scale`, and the running maximum.
#[inline(always)]
fn score_keys<L: Lanes>(keys: &[f32], queries: &[[f32; WIDTH]], scale: L, scores: &mut [[f32; WIDTH]], max: &mut L) {
    let mut keys = keys;
    let mut scores = scores;
    while !scores.is_empty() {
        let taken = match scores.len() {
            8.. => score_some::<L, 8>(keys, queries, scale, scores, max),
            4.. => score_some::<L, 4>(keys, queries, scale, scores, max),
            2.. => score_some::<L, 2>(keys, queries, scale, scores, max),
            _ => score_some::<L, 1>(keys, queries, scale, scores, max),
        };
        keys = &keys[taken * queries.len()..];
        scores = &mut scores[taken..];
    }
}

/// `N` keys at a time, whose chains hide each other's latency.
#[inline(always)]
fn score_some<L: Lanes, const N: usize>(
    keys: &[f32],
    queries: &[[f32; WIDTH]],
    scale: L,
    scores: &mut [[f32; WIDTH]],
    max: &mut L,
) -> usize {
    let head_dim = queries.len();
    assert!(keys.len() >= N * head_dim);
    let mut dots = [L::splat(0.0); N];
    for c in 0..head_dim {
        let query = L::load_array(&queries[c]);
        for n in 0..N {
            // SAFETY: `n < N` and `c < head_dim`; the length is asserted above.
            let key = L::splat(unsafe { *keys.get_unchecked(n * head_dim + c) });
            dots[n] = key.fma(query, dots[n]);
        }
    }
    for n in 0..N {
        let score = dots[n] * scale;
        *max = score.max(*max);
        score.store_array(&mut scores[n]);
    }
    N
}

/// The outputs of heads `h..h + H` before the rotation: probabilities times values over the denominator, `V` vectors of
/// columns at a time. Returns `H`.
#[inline(always)]
fn mix_values<L: Lanes, const H: usize, const V: usize>(
    values: [&[f32]; 2],
    probabilities: [&[[f32; WIDTH]]; 2],
    h: usize,
    head_dim: usize,
    denominators: &[f32; WIDTH],
    out: &mut [f32],
) -> usize {
    assert!(h + H <= WIDTH);
    for c in (0..head_dim).step_by(V * WIDTH) {
        let mut sums = [[L::splat(0.0); V]; H];
        for (values, probabilities) in values.into_iter().zip(probabilities) {
            for (value, probabilities) in values.chunks_exact(head_dim).zip(probabilities) {
                let value = &value[c..c + V * WIDTH];
                let mut columns = [L::splat(0.0); V];
                for v in 0..V {
                    columns[v] = L::load(&value[v * WIDTH..]);
                }
                for i in 0..H {
                    let probability = L::splat(probabilities[h + i]);
                    for v in 0..V {
                        sums[i][v] = probability.fma(columns[v], sums[i][v]);
                    }
                }
            }
        }
        for i in 0..H {
            let denominator = L::splat(denominators[h + i]);
            for v in 0..V {
                let output = (sums[i][v] / denominator).bf16_round();
                output.store(&mut out[i * head_dim + c + v * WIDTH..]);
            }
        }
    }
    H
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{launch, reference, scratch_floats};
    use crate::numerics_policy::Numerics;
    use crate::rope::reference::{frequencies, rotate};
    use crate::rows::{EntryInfo, Pages, completed_entries, visible};
    use crate::testing::*;
    use tf_device::{Buffer, LaunchError, Queue};
    use tf_numerics::lanes::Level;

    const SMALL: Shape = Shape { heads: 8, head_dim: 64, window: 16, ring_len: 24, selected_max: 12, block_rows: 0 };
    const RELEASE: Shape =
        Shape { heads: 64, head_dim: 512, window: 128, ring_len: 140, selected_max: 40, block_rows: 0 };
    const ODD: Shape = Shape { heads: 21, head_dim: 96, window: 7, ring_len: 9, selected_max: 5, block_rows: 0 };
    const RATIO: u32 = 2;
    const PAGE: usize = 16;

    /// What a position of a slot brings: its query and projected key, and its raw row for the compressed cache.
    fn inputs(shape: Shape, slot: u32, position: u32) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let mut values = Values::new(u64::from(slot) * 100_003 + u64::from(position));
        (
            values.bf16(shape.heads * shape.head_dim, 1.5),
            values.bf16(shape.head_dim, 1.0),
            values.uniform(2 * shape.head_dim, 1.0),
        )
    }

    /// Caches of `slots` sequences, which launches fill as a layer would.
    struct Layer {
        shape: Shape,
        ring: Buffer,
        cache: Buffer,
        raw_ring: Buffer,
        table: Vec<u32>,
        pages_per_slot: usize,
        sinks: Vec<f32>,
        frequencies: Vec<f32>,
        /// Fill the caches only.
        store_only: bool,
    }

    impl Layer {
        fn new(shape: Shape, slots: usize, positions: usize) -> Layer {
            let mut values = Values::new(31);
            let pages_per_slot = (positions / RATIO as usize).div_ceil(PAGE);
            let mut table: Vec<u32> = (0..(slots * pages_per_slot) as u32).collect();
            table.reverse();
            Layer {
                shape,
                ring: device(&vec![0xffu8; slots * shape.ring_len * kv_store::record_bytes(shape.head_dim)]),
                cache: device(&vec![0xffu8; table.len() * PAGE * kv_compress::record_bytes(shape.head_dim)]),
                raw_ring: dirty(slots * 32 * 2 * shape.head_dim),
                table,
                pages_per_slot,
                sinks: values.uniform(shape.heads, 2.0),
                frequencies: frequencies(1e4, 16, None),
                store_only: false,
            }
        }

        /// Runs `(slot, start, count)` windows as one launch and returns the outputs, and the records.
        fn run(&mut self, queue: &mut Queue, windows: &[(u32, u32, u32)], span: Span, compressed: bool) -> Outcome {
            let shape = self.shape;
            let (mut rows, mut infos) = (Vec::new(), Vec::new());
            let (mut q, mut k, mut raw) = (Vec::new(), Vec::new(), Vec::new());
            for (w, &(slot, start, row_count)) in windows.iter().enumerate() {
                infos.push(WindowInfo { slot, start, first_row: rows.len() as u32, row_count });
                for position in start..start + row_count {
                    rows.push(RowInfo { slot, position, window: w as u32 });
                    let (row_q, row_k, row_raw) = inputs(shape, slot, position);
                    q.extend(row_q);
                    k.extend(row_k);
                    raw.extend(row_raw);
                }
            }
            let norm = device(&vec![1.0f32; shape.head_dim]);
            let mut records = device(&vec![0u8; rows.len() * kv_store::record_bytes(shape.head_dim)]);
            let args = kv_store::Args {
                x: &device(&k),
                norm: &norm,
                eps: 1e-20,
                rows: &rows,
                frequencies: &self.frequencies,
                head_dim: shape.head_dim,
                records: &mut records,
            };
            kv_store::launch(queue, args).unwrap();

            let mut entries: Vec<EntryInfo> = Vec::new();
            completed_entries(&rows, RATIO, &mut entries);
            let pages = Pages { table: &self.table, pages_per_slot: self.pages_per_slot, entries_per_page: PAGE };
            let (mut selected, mut counts) = (Vec::new(), Vec::new());
            if compressed {
                let args = kv_compress::Args {
                    raw: &device(&raw),
                    rows: &rows,
                    windows: &infos,
                    entries: &entries,
                    ratio: RATIO,
                    norm: &norm,
                    eps: 1e-20,
                    frequencies: &self.frequencies,
                    head_dim: shape.head_dim,
                    raw_ring: Some(&mut self.raw_ring),
                    raw_len: 32,
                    cache: &mut self.cache,
                    pages,
                    latents: &mut dirty(entries.len() * shape.head_dim),
                };
                kv_compress::launch(queue, args).unwrap();
                for row in &rows {
                    let ids = selection(shape, *row);
                    counts.push(ids.len() as u32);
                    selected.extend(ids.iter().copied().chain(std::iter::repeat(u32::MAX)).take(shape.selected_max));
                }
            }
            let (selected, counts) = (device(&selected), device(&counts));
            let mut out = dirty(q.len());
            let mut scratch = dirty(scratch_floats(shape, queue.threads()));
            let args = Args {
                shape,
                span,
                q: &device(&q),
                rows: &rows,
                windows: &infos,
                records: &records,
                ring: &self.ring,
                compressed: compressed.then_some(Compressed {
                    cache: &self.cache,
                    pages,
                    selected: &selected,
                    counts: &counts,
                }),
                sinks: &device(&self.sinks),
                frequencies: &self.frequencies,
                scratch: &mut scratch,
                out: &mut out,
            };
            if !self.store_only {
                launch(queue, args).unwrap();
            }
            if span == Span::Causal {
                let args = kv_store::RingArgs {
                    records: &records,
                    windows: &infos,
                    head_dim: shape.head_dim,
                    ring: &mut self.ring,
                    ring_len: shape.ring_len,
                };
                kv_store::launch_ring(queue, args).unwrap();
            }
            Outcome { rows, infos, out: out.f32().to_vec(), records }
        }

        fn decode(&self, record: &[u8], compressed: bool) -> Vec<f64> {
            struct Decode<'a>(&'a [u8], bool, usize);
            impl Kernel for Decode<'_> {
                type Output = Vec<f32>;
                #[inline(always)]
                fn run<L: Lanes>(self) -> Vec<f32> {
                    let mut key = vec![0.0; self.2];
                    if self.1 {
                        decode_entry::<L>(self.0, &mut key);
                    } else {
                        decode_key::<L>(self.0, &mut key);
                    }
                    key
                }
            }
            let key = dispatch(Level::Scalar, Decode(record, compressed, self.shape.head_dim));
            key.into_iter().map(f64::from).collect()
        }

        /// The reference's output of row `r`, from the stored keys in the order of the module's text.
        fn wanted(&self, outcome: &Outcome, r: usize, span: Span, compressed: bool, numerics: Numerics) -> Vec<f64> {
            let shape = self.shape;
            let row = outcome.rows[r];
            let window = outcome.infos[row.window as usize];
            let bytes = kv_store::record_bytes(shape.head_dim);
            let mut keys = Vec::new();
            if compressed {
                let pages = Pages { table: &self.table, pages_per_slot: self.pages_per_slot, entries_per_page: PAGE };
                let bytes = kv_compress::record_bytes(shape.head_dim);
                for id in selection(shape, row) {
                    let place = pages.index(row.slot, id as usize);
                    keys.push(self.decode(&self.cache.u8()[place * bytes..][..bytes], true));
                }
            }
            let (first, last) = match span {
                Span::Causal => ((row.position + 1).saturating_sub(shape.window as u32), row.position),
                Span::Block => (window.start.saturating_sub(shape.window as u32), window.start + window.row_count - 1),
            };
            for j in first..=last {
                let record = if j >= window.start {
                    &outcome.records.u8()[(window.first_row + j - window.start) as usize * bytes..]
                } else {
                    &self.ring.u8()[(row.slot as usize * shape.ring_len + j as usize % shape.ring_len) * bytes..]
                };
                keys.push(self.decode(&record[..bytes], false));
            }
            let mut q: Vec<f64> = inputs(shape, row.slot, row.position).0.into_iter().map(f64::from).collect();
            for head in q.chunks_mut(shape.head_dim) {
                rotate(head, row.position, &self.frequencies, Numerics::Release);
            }
            let keys: Vec<&[f64]> = keys.iter().map(|key| &key[..]).collect();
            let sinks: Vec<f64> = self.sinks.iter().map(|&s| s.into()).collect();
            reference::attention(&q, &keys, &sinks, row.position, &self.frequencies, numerics)
        }
    }

    struct Outcome {
        rows: Vec<RowInfo>,
        infos: Vec<WindowInfo>,
        out: Vec<f32>,
        records: Buffer,
    }

    /// Some of the entries that a row sees, which depend on the row alone.
    fn selection(shape: Shape, row: RowInfo) -> Vec<u32> {
        let seen = visible(row.position, RATIO) as u32;
        let mut values = Values::new(u64::from(row.position) + 5);
        let mut ids: Vec<u32> =
            (0..shape.selected_max).map(|_| values.below(seen.max(1))).filter(|&id| id < seen).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    fn check(layer: &Layer, outcome: &Outcome, rows: &[usize], span: Span, compressed: bool) {
        let (mut equal, mut all) = (0, 0);
        let width = layer.shape.heads * layer.shape.head_dim;
        for &r in rows {
            let got = &outcome.out[r * width..][..width];
            let exact = layer.wanted(outcome, r, span, compressed, Numerics::Exact);
            let release = layer.wanted(outcome, r, span, compressed, Numerics::Release);
            // P and the output twice in bf16, of values up to 4 (normalised rows), and a query rounded the other way now and
            // then; the softmax weights add up to less than one.
            let bounds: Vec<f64> =
                exact.iter().map(|w| w.abs() * 2.0 * BF16_HALF_ULP + 4.0 * 3.0 * BF16_HALF_ULP).collect();
            assert_close(got, &exact, &bounds);
            equal += got.iter().zip(&release).filter(|(got, wanted)| f64::from(**got) == **wanted).count();
            all += got.len();
        }
        assert!(equal * 100 >= all * 95, "{equal} of {all} values as the release rounds them");
    }

    #[test]
    fn rows_match_the_definition_over_ring_own_rows_and_selection() {
        for (shape, first, count) in [(SMALL, 40, 21), (RELEASE, 150, 3), (ODD, 30, 9)] {
            let mut layer = None;
            let mut outcome = None;
            on_all_queues(|queue| {
                let mut fresh = Layer::new(shape, 2, 256);
                fresh.store_only = true;
                fresh.run(queue, &[(1, 0, first)], Span::Causal, true);
                fresh.store_only = false;
                // The ring must not have been written when the reference reads it.
                let before = device(fresh.ring.u8());
                let done = fresh.run(queue, &[(1, first, count)], Span::Causal, true);
                fresh.ring = before;
                let out = done.out.clone();
                (layer, outcome) = (Some(fresh), Some(done));
                out
            });
            let (layer, outcome) = (layer.unwrap(), outcome.unwrap());
            check(&layer, &outcome, &[0, 1, count as usize - 1], Span::Causal, true);
        }
    }

    #[test]
    fn a_first_row_sees_itself_only_and_layers_without_a_cache_their_window() {
        let mut queue = Queue::cpu(1, Level::best());
        let mut layer = Layer::new(SMALL, 1, 64);
        let before = device(layer.ring.u8());
        let outcome = layer.run(&mut queue, &[(0, 0, 20)], Span::Causal, false);
        layer.ring = before;
        check(&layer, &outcome, &[0, 1, 15, 16, 19], Span::Causal, false);
    }

    #[test]
    fn a_draft_block_sees_the_ring_before_it_and_all_of_its_own_rows() {
        let shape = Shape { block_rows: 5, selected_max: 0, ..SMALL };
        for start in [2, 15, 16, 40] {
            let mut layer = None;
            let mut outcome = None;
            on_all_queues(|queue| {
                let mut fresh = Layer::new(shape, 2, 64);
                fresh.run(queue, &[(1, 0, start)], Span::Causal, false);
                let done = fresh.run(queue, &[(1, start, 5)], Span::Block, false);
                let out = done.out.clone();
                (layer, outcome) = (Some(fresh), Some(done));
                out
            });
            check(&layer.unwrap(), &outcome.unwrap(), &[0, 2, 4], Span::Block, false);
        }
    }

    #[test]
    fn any_split_of_a_prompt_in_any_company_gives_the_same_rows() {
        let mut whole = Vec::new();
        let width = SMALL.heads * SMALL.head_dim;
        for (name, mut queue) in queues() {
            let mut layer = Layer::new(SMALL, 2, 64);
            let out = layer.run(&mut queue, &[(0, 0, 50)], Span::Causal, true).out;
            if whole.is_empty() {
                whole = out.clone();
            }
            assert_eq!(bits(&out), bits(&whole), "{name}");
            for cuts in [&[1u32; 50][..], &[20, 30], &[7, 1, 1, 6, 17, 18]] {
                let mut layer = Layer::new(SMALL, 2, 64);
                let (mut start, mut got) = (0, Vec::new());
                for (i, &count) in cuts.iter().enumerate() {
                    // The neighbour comes first or last, and with as many rows as it likes.
                    let neighbour = (1, start, 1 + i as u32 % 3);
                    let windows =
                        if i % 2 == 0 { [neighbour, (0, start, count)] } else { [(0, start, count), neighbour] };
                    let out = layer.run(&mut queue, &windows, Span::Causal, true).out;
                    let first = if i % 2 == 0 { neighbour.2 as usize } else { 0 };
                    got.extend_from_slice(&out[first * width..][..count as usize * width]);
                    start += count;
                }
                assert_eq!(bits(&got), bits(&whole), "{name}, {cuts:?}");
            }
        }
    }

    #[test]
    fn poisoned_queries_beside_a_row_do_not_reach_it() {
        let mut queue = Queue::cpu(2, Level::best());
        let rows: Vec<RowInfo> = (0..3).map(|position| RowInfo { slot: 0, position, window: 0 }).collect();
        let windows = [WindowInfo { slot: 0, start: 0, first_row: 0, row_count: 3 }];
        let mut values = Values::new(33);
        let records = device(&vec![0x38u8; 3 * kv_store::record_bytes(64)]);
        let ring = device(&vec![0xffu8; 24 * kv_store::record_bytes(64)]);
        let mut run = |q: &[f32]| {
            let (mut out, mut scratch) = (dirty(q.len()), dirty(scratch_floats(SMALL, 2)));
            let args = Args {
                shape: SMALL,
                span: Span::Causal,
                q: &device(q),
                rows: &rows,
                windows: &windows,
                records: &records,
                ring: &ring,
                compressed: None,
                sinks: &device(&[0.5f32; 8]),
                frequencies: &[1.0; 8],
                scratch: &mut scratch,
                out: &mut out,
            };
            launch(&mut queue, args).unwrap();
            out.f32().to_vec()
        };
        let clean = values.bf16(3 * 512, 1.0);
        let wanted = run(&clean);
        let mut poisoned = clean.clone();
        for i in (0..512).chain(1024..1536) {
            poisoned[i] = values.poison();
        }
        assert_eq!(bits(&run(&poisoned)[512..1024]), bits(&wanted[512..1024]));
        // And no head reaches another head of its row.
        let mut poisoned = clean;
        poisoned[512..576].fill(f32::NAN);
        assert_eq!(bits(&run(&poisoned)[576..1024]), bits(&wanted[576..1024]));
    }

    #[test]
    fn arguments_that_disagree_are_refused() {
        let mut queue = Queue::cpu(1, Level::Scalar);
        let rows = [RowInfo { slot: 0, position: 0, window: 0 }];
        let windows = [WindowInfo { slot: 0, start: 0, first_row: 0, row_count: 1 }];
        let mut run = |scratch: usize, selected: u32, row_count: u32| {
            let windows = [WindowInfo { row_count, ..windows[0] }];
            let (mut out, mut scratch) = (dirty(512), dirty(scratch));
            let (selected_ids, counts) = (device(&[0u32; 12]), device(&[selected]));
            let cache = device(&vec![0u8; 16 * kv_compress::record_bytes(64)]);
            let args = Args {
                shape: SMALL,
                span: Span::Causal,
                q: &device(&[0.0f32; 512]),
                rows: &rows,
                windows: &windows,
                records: &device(&[0u8; 66]),
                ring: &device(&vec![0u8; 24 * 66]),
                compressed: Some(Compressed {
                    cache: &cache,
                    pages: Pages { table: &[0], pages_per_slot: 1, entries_per_page: 16 },
                    selected: &selected_ids,
                    counts: &counts,
                }),
                sinks: &device(&[0.0f32; 8]),
                frequencies: &[1.0; 8],
                scratch: &mut scratch,
                out: &mut out,
            };
            launch(&mut queue, args)
        };
        let floats = scratch_floats(SMALL, 1);
        assert_eq!(run(floats, 1, 1), Ok(()));
        assert!(matches!(run(floats - 1, 1, 1), Err(LaunchError::Shape { what: "the scratch of attention", .. })));
        assert!(matches!(run(floats, 13, 1), Err(LaunchError::Limit { what: "a row's selection", .. })));
        assert!(matches!(run(floats, 1, 2), Err(LaunchError::Limit { what: "a window's last row", .. })));
    }
}
