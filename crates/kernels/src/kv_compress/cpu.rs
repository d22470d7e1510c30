//! An entry is pooled, normalised, turned and quantised while it lies in the first-level cache.

use super::{Args, raw_columns, record_bytes};
use crate::kv_store::HEAD_DIM_MAX;
use crate::parallel::threads_for;
use crate::rms_norm::{inverse_rms, normalise};
use crate::rope::{Phases, Turn, turn};
use crate::rows::{EntryInfo, Pages, RowInfo, WindowInfo};
use std::ops::Range;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::fp8::decode_e4m3;
use tf_numerics::lanes::{Int, Kernel, Lanes, WIDTH, dispatch};
use tf_numerics::{math, qdq};

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { raw, rows, windows, entries, ratio, norm, eps, frequencies, head_dim, raw_len, cache, pages, .. } = args;
    let mut raw_ring = args.raw_ring;
    let job = Job {
        raw: raw.f32(),
        raw_ring: raw_ring.as_ref().map_or(&[], |ring| ring.f32()),
        raw_len,
        rows,
        windows,
        entries,
        ratio,
        norm: norm.f32(),
        eps,
        frequencies,
        head_dim,
        cache: Parts::new(cache.u8_mut()),
        pages,
        latents: Parts::new(&mut args.latents.f32_mut()[..entries.len() * head_dim]),
    };
    let level = queue.level;
    queue.pool.run_on(threads_for(entries.len() * head_dim * 16), |index, count| {
        dispatch(level, Entries { job: &job, range: split(entries.len(), count, index, 1) });
    });
    if let Some(ring) = &mut raw_ring {
        keep_raw_rows(raw.f32(), rows, windows, 2 * head_dim, raw_len, ring.f32_mut());
    }
}

/// Keeps the rows of even positions, whose group a later launch completes.
fn keep_raw_rows(
    raw: &[f32],
    rows: &[RowInfo],
    windows: &[WindowInfo],
    columns: usize,
    raw_len: usize,
    ring: &mut [f32],
) {
    for window in windows {
        let count = window.row_count as usize;
        for r in (count.saturating_sub(raw_len)..count).map(|i| window.first_row as usize + i) {
            let position = rows[r].position as usize;
            if position.is_multiple_of(2) {
                let place = window.slot as usize * raw_len + position % raw_len;
                ring[place * columns..][..columns].copy_from_slice(&raw[r * columns..][..columns]);
            }
        }
    }
}

struct Job<'a> {
    raw: &'a [f32],
    raw_ring: &'a [f32],
    raw_len: usize,
    rows: &'a [RowInfo],
    windows: &'a [WindowInfo],
    entries: &'a [EntryInfo],
    ratio: u32,
    norm: &'a [f32],
    eps: f32,
    frequencies: &'a [f32],
    head_dim: usize,
    cache: Parts<'a, u8>,
    pages: Pages<'a>,
    latents: Parts<'a, f32>,
}

impl Job<'_> {
    /// The raw row of the position before row `r`, from the same window or from the ring.
    #[inline(always)]
    fn row_before(&self, r: usize) -> &[f32] {
        let columns = raw_columns(self.head_dim, self.ratio);
        let row = self.rows[r];
        if row.position > self.windows[row.window as usize].start {
            return &self.raw[(r - 1) * columns..r * columns];
        }
        let place = row.slot as usize * self.raw_len + (row.position as usize - 1) % self.raw_len;
        &self.raw_ring[place * columns..(place + 1) * columns]
    }
}

struct Entries<'a> {
    job: &'a Job<'a>,
    range: Range<usize>,
}

impl Kernel for Entries<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let job = self.job;
        let head_dim = job.head_dim;
        let (mut key, mut phases) = ([0.0; HEAD_DIM_MAX], Phases::new());
        let key = &mut key[..head_dim];
        let columns = raw_columns(head_dim, job.ratio);
        for e in self.range {
            let EntryInfo { slot, entry, row } = job.entries[e];
            let raw = &job.raw[row as usize * columns..(row as usize + 1) * columns];
            if job.ratio == 1 {
                key.copy_from_slice(raw);
            } else {
                pool::<L>(job.row_before(row as usize), raw, key);
            }
            // SAFETY: entry `e` belongs to this thread.
            let latent = unsafe { job.latents.part(e * head_dim..(e + 1) * head_dim) };
            normalise::<L>(key, job.norm, inverse_rms::<L>(key, job.eps), latent);
            key.copy_from_slice(latent);
            phases.set::<L>(entry * job.ratio, job.frequencies);
            turn::<L>(key, &phases, Turn::Forward);
            let bytes = record_bytes(head_dim);
            let place = job.pages.index(slot, entry as usize);
            // SAFETY: the entries of a launch are different ones, and an entry that is being written lies on a page of its
            // own sequence (see `Args::entries`), so no two places are the same.
            let record = unsafe { job.cache.part(place * bytes..(place + 1) * bytes) };
            encode_record::<L>(key, record);
        }
    }
}

/// `bf16(softmax-weighted sum)` of two rows `[values | scores]`, column by column.
#[inline(always)]
fn pool<L: Lanes>(first: &[f32], second: &[f32], out: &mut [f32]) {
    let columns = out.len();
    let ((v0, s0), (v1, s1)) = (first.split_at(columns), second.split_at(columns));
    for (c, out) in out.as_chunks_mut::<WIDTH>().0.iter_mut().enumerate() {
        let at = c * WIDTH;
        let (s0, s1) = (L::load(&s0[at..]), L::load(&s1[at..]));
        let max = s0.max(s1);
        let (e0, e1) = (math::exp(s0 - max), math::exp(s1 - max));
        let sum = e0 + e1;
        let pooled = L::load(&v0[at..]) * (e0 / sum) + L::load(&v1[at..]) * (e1 / sum);
        pooled.bf16_round().store_array(out);
    }
}

#[inline(always)]
fn encode_record<L: Lanes>(key: &[f32], record: &mut [u8]) {
    let (codes, scales) = record.split_at_mut(key.len() / 2);
    let keys = key.as_chunks::<32>().0;
    for ((key, codes), scales) in keys.iter().zip(codes.as_chunks_mut::<16>().0).zip(scales.as_chunks_mut::<2>().0) {
        let (low, low_scale) = qdq::fp4_fine_block(L::load(key));
        let (high, high_scale) = qdq::fp4_fine_block(L::load(&key[WIDTH..]));
        L::store_u8(low.or(high.shl(4)), codes);
        *scales = [low_scale, high_scale];
    }
}

/// Writes the values of a record, `[head_dim]`, exact in bf16, to `key`.
#[inline(always)]
pub(crate) fn decode_record<L: Lanes>(record: &[u8], key: &mut [f32]) {
    let (codes, scales) = record.split_at(key.len() / 2);
    let keys = key.as_chunks_mut::<32>().0;
    for ((key, codes), scales) in keys.iter_mut().zip(codes.as_chunks::<16>().0).zip(scales.as_chunks::<2>().0) {
        let codes = L::load_u8(codes);
        (L::decode_fp4(codes, 0) * L::splat(decode_e4m3(scales[0]))).store(key);
        (L::decode_fp4(codes, 1) * L::splat(decode_e4m3(scales[1]))).store(&mut key[WIDTH..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_compress::{launch, reference};
    use crate::numerics_policy::Numerics;
    use crate::rope::reference::frequencies;
    use crate::rows::completed_entries;
    use crate::testing::*;
    use tf_device::{Buffer, LaunchError, Queue};
    use tf_numerics::lanes::Level;

    const RAW_LEN: usize = 8;
    const TABLE: [u32; 6] = [5, 0, 3, 1, 4, 2];
    const PAGES: Pages<'static> = Pages { table: &TABLE, pages_per_slot: 3, entries_per_page: 16 };

    struct Decode<'a>(&'a [u8], usize);
    impl Kernel for Decode<'_> {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<L: Lanes>(self) -> Vec<f32> {
            let mut key = vec![0.0; self.1];
            decode_record::<L>(self.0, &mut key);
            key
        }
    }

    /// A sequence's cache, and launches of windows on it.
    struct Sequence {
        cache: Buffer,
        ring: Buffer,
        head_dim: usize,
        ratio: u32,
        norm: Vec<f32>,
        frequencies: Vec<f32>,
    }

    impl Sequence {
        fn new(head_dim: usize, ratio: u32) -> Sequence {
            let mut values = Values::new(10);
            Sequence {
                cache: device(&vec![0x11u8; 6 * 16 * record_bytes(head_dim)]),
                ring: dirty(2 * RAW_LEN * 2 * head_dim),
                head_dim,
                ratio,
                norm: values.bf16(head_dim, 2.0),
                frequencies: frequencies(1.6e5, 16, None),
            }
        }

        /// Runs positions `start..start + count` of each `(slot, start, count)` as one launch; `raw` gives the row of a slot's
        /// position. Returns the latents.
        fn run(
            &mut self,
            queue: &mut Queue,
            windows: &[(u32, u32, u32)],
            raw: impl Fn(u32, u32) -> Vec<f32>,
        ) -> Vec<f32> {
            let (mut rows, mut infos, mut data) = (Vec::new(), Vec::new(), Vec::new());
            for (w, &(slot, start, row_count)) in windows.iter().enumerate() {
                infos.push(WindowInfo { slot, start, first_row: rows.len() as u32, row_count });
                for position in start..start + row_count {
                    rows.push(RowInfo { slot, position, window: w as u32 });
                    data.extend(raw(slot, position));
                }
            }
            let mut entries = Vec::new();
            completed_entries(&rows, self.ratio, &mut entries);
            let mut latents = dirty(entries.len() * self.head_dim);
            let args = Args {
                raw: &device(&data),
                rows: &rows,
                windows: &infos,
                entries: &entries,
                ratio: self.ratio,
                norm: &device(&self.norm),
                eps: 1e-20,
                frequencies: &self.frequencies,
                head_dim: self.head_dim,
                raw_ring: if self.ratio == 2 { Some(&mut self.ring) } else { None },
                raw_len: RAW_LEN,
                cache: &mut self.cache,
                pages: PAGES,
                latents: &mut latents,
            };
            launch(queue, args).unwrap();
            latents.f32().to_vec()
        }

        fn entry(&self, slot: u32, entry: usize) -> Vec<f32> {
            let bytes = record_bytes(self.head_dim);
            let record = &self.cache.u8()[PAGES.index(slot, entry) * bytes..][..bytes];
            let key = dispatch(Level::Scalar, Decode(record, self.head_dim));
            for level in Level::available() {
                assert_eq!(bits(&dispatch(level, Decode(record, self.head_dim))), bits(&key), "{level}");
            }
            key
        }
    }

    fn raw_rows(head_dim: usize, ratio: u32) -> impl Fn(u32, u32) -> Vec<f32> + Copy {
        move |slot, position| {
            let mut values = Values::new(u64::from(slot * 1000 + position) + 77);
            if ratio == 1 { values.bf16(head_dim, 3.0) } else { values.uniform(2 * head_dim, 3.0) }
        }
    }

    #[test]
    fn latents_and_entries_are_those_of_the_definition() {
        for (head_dim, ratio) in [(64, 1), (64, 2), (512, 2)] {
            let raw = raw_rows(head_dim, ratio);
            let mut wanted_latents = Vec::new();
            let mut entries = Vec::new();
            let latents = on_all_queues(|queue| {
                let mut sequence = Sequence::new(head_dim, ratio);
                let latents = sequence.run(queue, &[(1, 0, 12)], raw);
                let wide = |v: Vec<f32>| v.into_iter().map(f64::from).collect::<Vec<_>>();
                let (norm, groups) = (wide(sequence.norm.clone()), 12 / ratio);
                wanted_latents.clear();
                entries.clear();
                for e in 0..groups {
                    let rows: Vec<Vec<f64>> = (0..ratio).map(|i| wide(raw(1, e * ratio + i))).collect();
                    let half =
                        |from: usize| rows.iter().flat_map(|r| r[from..from + head_dim].to_vec()).collect::<Vec<_>>();
                    let pooled = match ratio {
                        1 => rows[0].clone(),
                        _ => reference::pool(&half(0), &half(head_dim), head_dim, Numerics::Release),
                    };
                    let latent = reference::latent(&pooled, &norm, 1e-20, Numerics::Release);
                    let frequencies = &sequence.frequencies;
                    let entry = reference::entry(&latent, e * ratio, frequencies, Numerics::Release);
                    wanted_latents.extend(latent);
                    entries.push((sequence.entry(1, e as usize), entry));
                }
                latents
            });
            // The reference rounds at the same points; float32 noise can move a bf16 rounding by one unit (2 half units), twice.
            let bounds: Vec<f64> = wanted_latents.iter().map(|w| w.abs() * 4.0 * BF16_HALF_ULP).collect();
            assert_close(&latents, &wanted_latents, &bounds);
            let (mut equal, mut all) = (0, 0);
            for (got, wanted) in &entries {
                equal += got.iter().zip(wanted).filter(|(got, wanted)| f64::from(**got) == **wanted).count();
                all += got.len();
            }
            assert!(equal * 100 >= all * 98, "{equal} of {all} values as the release rounds them");
        }
    }

    #[test]
    fn any_split_of_a_prompt_publishes_the_same_entries() {
        for ratio in [1, 2] {
            let raw = raw_rows(64, ratio);
            let mut queue = Queue::cpu(2, Level::best());
            let mut whole = Sequence::new(64, ratio);
            let latents = whole.run(&mut queue, &[(0, 0, 20)], raw);
            for cuts in [&[1u32; 20][..], &[3, 1, 1, 5, 10], &[7, 13], &[2, 3, 15]] {
                let mut split = Sequence::new(64, ratio);
                let (mut start, mut got) = (0, Vec::new());
                for &count in cuts {
                    // A neighbour of another slot shares each launch.
                    got.extend(split.run(&mut queue, &[(0, start, count)], raw));
                    split.run(&mut queue, &[(1, start, count)], |_, _| vec![f32::NAN; super::raw_columns(64, ratio)]);
                    start += count;
                }
                assert_eq!(bits(&got), bits(&latents), "{cuts:?}");
                for e in 0..20 / ratio as usize {
                    assert_eq!(split.entry(0, e), whole.entry(0, e), "{cuts:?}");
                }
            }
        }
    }

    #[test]
    fn rejected_rows_are_overwritten() {
        let raw = raw_rows(64, 2);
        let mut queue = Queue::cpu(1, Level::best());
        let mut fresh = Sequence::new(64, 2);
        fresh.run(&mut queue, &[(0, 0, 12)], raw);
        let mut drafted = Sequence::new(64, 2);
        drafted.run(&mut queue, &[(0, 0, 5)], raw);
        // Six drafts from position 5 on, of which only position 5 and 6 were right.
        drafted.run(&mut queue, &[(0, 5, 6)], |slot, p| raw(slot + u32::from(p > 6), p));
        drafted.run(&mut queue, &[(0, 7, 5)], raw);
        for e in 0..6 {
            assert_eq!(drafted.entry(0, e), fresh.entry(0, e), "entry {e}");
        }
    }

    #[test]
    fn a_missing_page_or_short_cache_is_refused() {
        let mut queue = Queue::cpu(1, Level::Scalar);
        let rows = [RowInfo { slot: 0, position: 0, window: 0 }];
        let windows = [WindowInfo { slot: 0, start: 0, first_row: 0, row_count: 1 }];
        let entries = [EntryInfo { slot: 0, entry: 0, row: 0 }];
        let mut run = |cache_bytes: usize, ratio: u32| {
            let (mut cache, mut latents) = (device(&vec![0u8; cache_bytes]), dirty(64));
            let args = Args {
                raw: &dirty(64),
                rows: &rows,
                windows: &windows,
                entries: &entries,
                ratio,
                norm: &device(&[1.0f32; 64]),
                eps: 0.0,
                frequencies: &[1.0; 8],
                head_dim: 64,
                raw_ring: None,
                raw_len: RAW_LEN,
                cache: &mut cache,
                pages: PAGES,
                latents: &mut latents,
            };
            launch(&mut queue, args)
        };
        // Entry 0 of slot 0 lies on page 5.
        assert_eq!(run(81 * record_bytes(64), 1), Ok(()));
        assert!(matches!(run(80 * record_bytes(64), 1), Err(LaunchError::Shape { what: "the compressed cache", .. })));
        assert!(matches!(run(81 * record_bytes(64), 3), Err(LaunchError::Limit { .. })));
        assert!(run(81 * record_bytes(64), 2).is_err(), "ratio 2 without a ring");
    }
}
