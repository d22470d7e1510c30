//! A key is made in one pass; its codes are then scattered into the block's interleaved layout.

use super::{Args, BLOCK, page_bytes, record_bytes};
use crate::kv_store::HEAD_DIM_MAX;
use crate::parallel::threads_for;
use crate::rms_norm::{inverse_rms, normalise};
use crate::rope::{Phases, Turn, turn};
use crate::rows::{EntryInfo, Pages};
use std::ops::Range;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::lanes::{Int, Kernel, Lanes, WIDTH, dispatch};
use tf_numerics::qdq;

/// Where the codes and scales of sixteen neighbouring entries lie in a cache.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    start: usize,
    head_dim: usize,
}

const _: () = assert!(BLOCK == WIDTH);

impl Block {
    /// The block of `entry` of `slot`.
    #[inline(always)]
    pub fn of(pages: &Pages<'_>, slot: u32, entry: usize, head_dim: usize) -> Block {
        let page = pages.page(slot, entry) * page_bytes(head_dim, pages.entries_per_page);
        let block = entry % pages.entries_per_page / BLOCK;
        Block { start: page + block * BLOCK * record_bytes(head_dim), head_dim }
    }

    /// The dwords of columns `8 group..8 group + 8`, one an entry.
    #[inline(always)]
    pub fn codes(self, group: usize) -> Range<usize> {
        let start = self.start + group * 64;
        start..start + 64
    }

    /// The scale bytes of columns `32 group..32 group + 32`, one an entry.
    #[inline(always)]
    pub fn scales(self, group: usize) -> Range<usize> {
        let start = self.start + self.head_dim / 2 * BLOCK + group * BLOCK;
        start..start + BLOCK
    }
}

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { x, norm, eps, entries, ratio, frequencies, head_dim, cache, pages } = args;
    let cache = Parts::new(cache.u8_mut());
    let job = Job { x: x.f32(), norm: norm.f32(), eps, entries, ratio, frequencies, head_dim, cache, pages };
    let level = queue.level;
    queue.pool.run_on(threads_for(entries.len() * head_dim * 16), |index, count| {
        dispatch(level, Entries { job: &job, range: split(entries.len(), count, index, 1) });
    });
}

struct Job<'a> {
    x: &'a [f32],
    norm: &'a [f32],
    eps: f32,
    entries: &'a [EntryInfo],
    ratio: u32,
    frequencies: &'a [f32],
    head_dim: usize,
    cache: Parts<'a, u8>,
    pages: Pages<'a>,
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
        for e in self.range {
            let EntryInfo { slot, entry, .. } = job.entries[e];
            let x = &job.x[e * head_dim..(e + 1) * head_dim];
            normalise::<L>(x, job.norm, inverse_rms::<L>(x, job.eps), key);
            phases.set::<L>(entry * job.ratio, job.frequencies);
            turn::<L>(key, &phases, Turn::Forward);
            let block = Block::of(&job.pages, slot, entry as usize, head_dim);
            let lane = entry as usize % BLOCK;
            for (group, key) in key.as_chunks::<32>().0.iter().enumerate() {
                let (low, high, scale) = qdq::fp4_block(L::load(key), L::load(&key[WIDTH..]));
                let (low, high) = (L::int_to_array(low), L::int_to_array(high));
                for (i, codes) in low.as_chunks::<8>().0.iter().chain(high.as_chunks::<8>().0).enumerate() {
                    let dword = codes.iter().rev().fold(0, |dword, code| dword << 4 | code);
                    let place = block.codes(4 * group + i).start + 4 * lane;
                    // SAFETY: the entries of a launch are different ones, and an entry that is being written lies on a page
                    // of its own sequence (see `Args::entries`); within a block each entry has its own bytes.
                    unsafe { job.cache.part(place..place + 4) }.copy_from_slice(&dword.to_le_bytes());
                }
                // SAFETY: as above.
                unsafe { job.cache.write(block.scales(group).start + lane, scale) };
            }
        }
    }
}

/// Decodes a block: `out[c]` holds column `c` of its sixteen entries. `codes` and `scales` give the bytes of a group.
#[inline(always)]
pub(crate) fn decode_block<L: Lanes>(cache: &[u8], block: Block, out: &mut [[f32; WIDTH]]) {
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = decode_scales::<L>(L::load_u8(&cache[block.scales(group)]));
        for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let codes = &cache[block.codes(4 * group + i)];
            decode_dwords::<L>(L::load_dwords(&codes.as_chunks::<64>().0[0]), scale, out);
        }
    }
}

/// Sixteen E8M0 bytes as values. The scales of stored keys are never below code 1; 255 is NaN.
#[inline(always)]
pub(crate) fn decode_scales<L: Lanes>(codes: L::Int) -> L {
    let nan = codes.eq(L::Int::splat(255));
    L::select(nan, L::splat(f32::NAN), L::from_bits(codes.shl(23)))
}

/// Eight columns of sixteen entries from their dwords.
#[inline(always)]
pub(crate) fn decode_dwords<L: Lanes>(dwords: L::Int, scale: L, out: &mut [[f32; WIDTH]; 8]) {
    (L::decode_fp4(dwords, 0) * scale).store_array(&mut out[0]);
    (L::decode_fp4(dwords, 1) * scale).store_array(&mut out[1]);
    (L::decode_fp4(dwords, 2) * scale).store_array(&mut out[2]);
    (L::decode_fp4(dwords, 3) * scale).store_array(&mut out[3]);
    (L::decode_fp4(dwords, 4) * scale).store_array(&mut out[4]);
    (L::decode_fp4(dwords, 5) * scale).store_array(&mut out[5]);
    (L::decode_fp4(dwords, 6) * scale).store_array(&mut out[6]);
    (L::decode_fp4(dwords, 7) * scale).store_array(&mut out[7]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index_key::launch;
    use crate::numerics_policy::Numerics;
    use crate::rms_norm::reference::rms_norm;
    use crate::rope::reference::{frequencies, rotate};
    use crate::testing::*;
    use tf_device::{Buffer, LaunchError, Queue};
    use tf_numerics::lanes::Level;

    const TABLE: [u32; 4] = [3, 0, 1, 2];
    const PAGES: Pages<'static> = Pages { table: &TABLE, pages_per_slot: 2, entries_per_page: 32 };

    struct Decode<'a>(&'a [u8], Block);
    impl Kernel for Decode<'_> {
        type Output = Vec<[f32; WIDTH]>;
        #[inline(always)]
        fn run<L: Lanes>(self) -> Self::Output {
            let mut out = vec![[0.0; WIDTH]; self.1.head_dim];
            decode_block::<L>(self.0, self.1, &mut out);
            out
        }
    }

    fn key(cache: &Buffer, slot: u32, entry: usize, head_dim: usize) -> Vec<f32> {
        let block = Block::of(&PAGES, slot, entry, head_dim);
        let decode = |level| -> Vec<f32> {
            dispatch(level, Decode(cache.u8(), block)).iter().map(|column| column[entry % BLOCK]).collect()
        };
        let wanted = decode(Level::Scalar);
        for level in Level::available() {
            assert_eq!(bits(&decode(level)), bits(&wanted), "{level}");
        }
        wanted
    }

    fn store(queue: &mut Queue, x: &[f32], norm: &[f32], entries: &[EntryInfo], ratio: u32) -> Buffer {
        let head_dim = norm.len();
        let mut cache = device(&vec![0xffu8; 4 * page_bytes(head_dim, 32)]);
        let args = Args {
            x: &device(x),
            norm: &device(norm),
            eps: 1e-20,
            entries,
            ratio,
            frequencies: &frequencies(1.6e5, 16, None),
            head_dim,
            cache: &mut cache,
            pages: PAGES,
        };
        launch(queue, args).unwrap();
        cache
    }

    #[test]
    fn keys_are_those_of_the_definition_and_lie_where_their_block_says() {
        let mut values = Values::new(11);
        for (head_dim, ratio) in [(32, 1), (128, 2)] {
            let entries: Vec<EntryInfo> = [(0, 0), (0, 17), (0, 33), (1, 5), (1, 63)]
                .map(|(slot, entry)| EntryInfo { slot, entry, row: 0 })
                .into();
            let (x, norm) = (values.bf16(entries.len() * head_dim, 3.0), values.bf16(head_dim, 2.0));
            let got = on_all_queues(|queue| {
                let cache = store(queue, &x, &norm, &entries, ratio);
                entries.iter().flat_map(|e| key(&cache, e.slot, e.entry as usize, head_dim)).collect()
            });
            let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            let mut equal = 0;
            for ((got, x), entry) in got.chunks(head_dim).zip(x.chunks(head_dim)).zip(&entries) {
                let mut wanted = rms_norm(&wide(x), &wide(&norm), 1e-20, Numerics::Release);
                rotate(&mut wanted, entry.entry * ratio, &frequencies(1.6e5, 16, None), Numerics::Release);
                let exact = wanted.clone();
                let wanted = Numerics::Release.qdq4_e8m0(&wanted, head_dim);
                equal += got.iter().zip(&wanted).filter(|(got, wanted)| f64::from(**got) == **wanted).count();
                // E2M1 with a scale of up to twice amax / 6: half a step is at most amax / 3.
                for (got, exact) in got.chunks(32).zip(exact.chunks(32)) {
                    let amax = exact.iter().fold(0f64, |max, v| max.max(v.abs()));
                    assert_close(got, exact, &[amax * 0.35; 32]);
                }
            }
            assert!(equal * 100 >= got.len() * 98, "{equal} of {} values as the release rounds them", got.len());
        }
    }

    #[test]
    fn a_key_is_the_same_alone_and_beside_poisoned_ones() {
        let mut values = Values::new(12);
        let (norm, x) = (values.bf16(32, 2.0), values.bf16(32, 2.0));
        let entry = |entry| EntryInfo { slot: 0, entry, row: 0 };
        let mut queue = Queue::cpu(2, Level::best());
        let alone = key(&store(&mut queue, &x, &norm, &[entry(9)], 2), 0, 9, 32);
        let mut rows: Vec<f32> = (0..96).map(|_| values.poison()).collect();
        rows[32..64].copy_from_slice(&x);
        let cache = store(&mut queue, &rows, &norm, &[entry(8), entry(9), entry(10)], 2);
        assert_eq!(bits(&key(&cache, 0, 9, 32)), bits(&alone));
    }

    #[test]
    fn a_page_that_is_no_whole_number_of_blocks_is_refused() {
        let mut queue = Queue::cpu(1, Level::Scalar);
        let mut cache = device(&[0u8; 1024]);
        let args = Args {
            x: &dirty(32),
            norm: &dirty(32),
            eps: 0.0,
            entries: &[EntryInfo { slot: 0, entry: 0, row: 0 }],
            ratio: 1,
            frequencies: &[1.0; 8],
            head_dim: 32,
            cache: &mut cache,
            pages: Pages { table: &[0], pages_per_slot: 1, entries_per_page: 24 },
        };
        let wanted = LaunchError::Shape { what: "the entries of a page", found: 24, expected: 32 };
        assert_eq!(launch(&mut queue, args), Err(wanted));
    }
}
