//! A row is normalised, turned and quantised while it lies in the first-level cache.

use super::{Args, HEAD_DIM_MAX, RingArgs, record_bytes};
use crate::parallel::threads_for;
use crate::rms_norm::{inverse_rms, normalise};
use crate::rope::{Phases, Turn, turn};
use crate::rows::RowInfo;
use std::ops::Range;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::fp8::decode_e8m0;
use tf_numerics::lanes::{Kernel, Lanes, WIDTH, dispatch};
use tf_numerics::qdq;

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { x, norm, eps, rows, frequencies, head_dim, records } = args;
    let records = Parts::new(&mut records.u8_mut()[..rows.len() * record_bytes(head_dim)]);
    let job = Job { x: x.f32(), norm: norm.f32(), eps, rows, frequencies, head_dim, records };
    let level = queue.level;
    queue.pool.run_on(threads_for(rows.len() * head_dim * 8), |index, count| {
        dispatch(level, Rows { job: &job, rows: split(rows.len(), count, index, 1) });
    });
}

struct Job<'a> {
    x: &'a [f32],
    norm: &'a [f32],
    eps: f32,
    rows: &'a [RowInfo],
    frequencies: &'a [f32],
    head_dim: usize,
    records: Parts<'a, u8>,
}

struct Rows<'a> {
    job: &'a Job<'a>,
    rows: Range<usize>,
}

impl Kernel for Rows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Job { x, norm, eps, rows, frequencies, head_dim, records } = self.job;
        let (mut key, mut phases) = ([0.0; HEAD_DIM_MAX], Phases::new());
        let key = &mut key[..*head_dim];
        let bytes = record_bytes(*head_dim);
        for r in self.rows {
            let x = &x[r * head_dim..(r + 1) * head_dim];
            normalise::<L>(x, norm, inverse_rms::<L>(x, *eps), key);
            phases.set::<L>(rows[r].position, frequencies);
            turn::<L>(key, &phases, Turn::Forward);
            // SAFETY: row `r` belongs to this thread.
            let record = unsafe { records.part(r * bytes..(r + 1) * bytes) };
            let (codes, scales) = record.split_at_mut(*head_dim);
            qdq::quantise_row_lanes::<L>(qdq::Format::Fp8, key, codes, scales);
        }
    }
}

/// Writes the key of a record, `[head_dim]` values exact in bf16, to `key`.
#[inline(always)]
pub(crate) fn decode_record<L: Lanes>(record: &[u8], key: &mut [f32]) {
    let (codes, scales) = record.split_at(key.len());
    let (codes, keys) = (codes.as_chunks::<32>().0, key.as_chunks_mut::<32>().0);
    assert_eq!(scales.len(), keys.len());
    for ((codes, key), &scale) in codes.iter().zip(keys).zip(scales) {
        let scale = L::splat(decode_e8m0(scale));
        (L::load_fp8(codes) * scale).store(key);
        (L::load_fp8(&codes[WIDTH..]) * scale).store(&mut key[WIDTH..]);
    }
}

pub(super) fn run_ring(_queue: &mut CpuQueue, args: RingArgs<'_>) {
    let RingArgs { records, windows, head_dim, ring, ring_len } = args;
    let bytes = record_bytes(head_dim);
    let (records, ring) = (records.u8(), ring.u8_mut());
    for window in windows {
        let ring = &mut ring[window.slot as usize * ring_len * bytes..][..ring_len * bytes];
        let count = window.row_count as usize;
        for i in count.saturating_sub(ring_len)..count {
            let place = (window.start as usize + i) % ring_len;
            let record = &records[(window.first_row as usize + i) * bytes..][..bytes];
            ring[place * bytes..][..bytes].copy_from_slice(record);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_store::{launch, launch_ring, reference};
    use crate::numerics_policy::Numerics;
    use crate::rope::reference::frequencies;
    use crate::rows::WindowInfo;
    use crate::testing::*;
    use tf_device::{Buffer, LaunchError, Queue};
    use tf_numerics::lanes::Level;

    fn rows_at(positions: &[u32]) -> Vec<RowInfo> {
        positions.iter().map(|&position| RowInfo { slot: 0, position, window: 0 }).collect()
    }

    fn store(queue: &mut Queue, x: &[f32], norm: &[f32], rows: &[RowInfo], frequencies: &[f32]) -> Buffer {
        let head_dim = norm.len();
        let mut records = device(&vec![0xa5u8; rows.len() * record_bytes(head_dim)]);
        let (x, norm) = (device(x), device(norm));
        let args = Args { x: &x, norm: &norm, eps: 1e-20, rows, frequencies, head_dim, records: &mut records };
        launch(queue, args).unwrap();
        records
    }

    fn decoded(records: &Buffer, head_dim: usize) -> Vec<f32> {
        let mut keys = Vec::new();
        for record in records.u8().chunks(record_bytes(head_dim)) {
            let mut key = vec![0.0; head_dim];
            let (codes, scales) = record.split_at(head_dim);
            qdq::dequantise_row(qdq::Format::Fp8, codes, scales, &mut key);
            keys.extend(key);
        }
        keys
    }

    #[test]
    fn records_hold_the_key_of_the_definition() {
        let mut values = Values::new(7);
        for (head_dim, rope_dim) in [(64, 16), (512, 64)] {
            let frequencies = frequencies(1e4, rope_dim, None);
            let rows = rows_at(&[0, 1, 77, 4000, 70001]);
            let (x, norm) = (values.bf16(rows.len() * head_dim, 3.0), values.bf16(head_dim, 2.0));
            let got = on_all_queues(|queue| decoded(&store(queue, &x, &norm, &rows, &frequencies), head_dim));
            let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            let positions: Vec<u32> = rows.iter().map(|row| row.position).collect();
            let wanted =
                reference::window_entries(&wide(&x), &wide(&norm), 1e-20, &positions, &frequencies, Numerics::Exact);
            // bf16 twice and E4M3 once, whose step in a block is at most 1/16 of its largest value (bounded by the row's).
            for (got, wanted) in got.chunks(32).zip(wanted.chunks(32)) {
                let largest = wanted.iter().fold(0f64, |max, v| max.max(v.abs())) * 1.02;
                let bounds = vec![largest * (1.0 / 16.0 + 3.0 * BF16_HALF_ULP); 32];
                assert_close(got, wanted, &bounds);
            }
            let release =
                reference::window_entries(&wide(&x), &wide(&norm), 1e-20, &positions, &frequencies, Numerics::Release);
            let equal = got.iter().zip(&release).filter(|(got, wanted)| f64::from(**got) == **wanted).count();
            assert!(equal * 1000 >= got.len() * 995, "{equal} of {} values as the release rounds them", got.len());
        }
    }

    #[test]
    fn decoding_a_record_in_a_kernel_gives_its_exact_values() {
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
        let mut values = Values::new(8);
        let mut queue = Queue::cpu(1, Level::Scalar);
        let (x, norm, frequencies) = (values.bf16(64, 3.0), values.bf16(64, 2.0), frequencies(1e4, 16, None));
        let records = store(&mut queue, &x, &norm, &rows_at(&[5]), &frequencies);
        for level in Level::available() {
            assert_eq!(bits(&dispatch(level, Decode(records.u8(), 64))), bits(&decoded(&records, 64)), "{level}");
        }
    }

    #[test]
    fn a_record_is_the_same_alone_and_among_any_neighbours() {
        let mut values = Values::new(9);
        let (norm, frequencies) = (values.bf16(64, 2.0), frequencies(1e4, 16, None));
        let row = values.bf16(64, 3.0);
        let mut queue = Queue::cpu(1, Level::best());
        let alone = store(&mut queue, &row, &norm, &rows_at(&[9]), &frequencies).u8().to_vec();
        for place in 0..3 {
            let mut x: Vec<f32> = (0..3 * 64).map(|_| values.poison()).collect();
            x[place * 64..][..64].copy_from_slice(&row);
            let together = store(&mut queue, &x, &norm, &rows_at(&[9, 9, 9]), &frequencies);
            assert_eq!(together.u8()[place * alone.len()..][..alone.len()], alone);
        }
    }

    #[test]
    fn the_ring_keeps_the_last_rows_of_a_window_at_their_position() {
        let mut queue = Queue::cpu(1, Level::Scalar);
        let (head_dim, ring_len, slots) = (32, 5, 3);
        let bytes = record_bytes(head_dim);
        let rows = 12;
        let records = device(&(0..rows).flat_map(|r| vec![r as u8 + 1; bytes]).collect::<Vec<_>>());
        // Slot 2 gets a window longer than the ring, slot 0 a short one that wraps; slot 1 nothing.
        let windows = [
            WindowInfo { slot: 2, start: 7, first_row: 0, row_count: 9 },
            WindowInfo { slot: 0, start: 4, first_row: 9, row_count: 3 },
        ];
        let mut ring = device(&vec![0u8; slots * ring_len * bytes]);
        let args = RingArgs { records: &records, windows: &windows, head_dim, ring: &mut ring, ring_len };
        launch_ring(&mut queue, args).unwrap();
        let held: Vec<u8> = ring.u8().chunks(bytes).map(|record| record[0]).collect();
        // Positions 11..=15 of slot 2 are rows 4..=8; position p lies at p % 5.
        assert_eq!(held[10..], [9, 5, 6, 7, 8]);
        assert_eq!(held[..5], [11, 12, 0, 0, 10]);
        assert_eq!(held[5..10], [0; 5]);
        assert!(ring.u8().chunks(bytes).all(|record| record.iter().all(|b| *b == record[0])));
    }

    #[test]
    fn shapes_that_disagree_are_refused() {
        let mut queue = Queue::cpu(1, Level::Scalar);
        let frequencies = frequencies(1e4, 16, None);
        let rows = rows_at(&[0]);
        let mut run = |x: usize, head_dim: usize, bytes: usize, frequencies: &[f32]| {
            let (x, norm) = (device(&vec![1.0f32; x]), device(&vec![1.0f32; head_dim]));
            let mut records = device(&vec![0u8; bytes]);
            let args = Args { x: &x, norm: &norm, eps: 0.0, rows: &rows, frequencies, head_dim, records: &mut records };
            launch(&mut queue, args)
        };
        assert_eq!(run(64, 64, 66, &frequencies), Ok(()));
        assert!(matches!(run(63, 64, 66, &frequencies), Err(LaunchError::Shape { .. })));
        assert!(matches!(run(64, 64, 65, &frequencies), Err(LaunchError::Shape { .. })));
        assert!(matches!(run(48, 48, 66, &frequencies), Err(LaunchError::Shape { .. })));
        assert!(matches!(run(2048, 2048, 4096, &frequencies), Err(LaunchError::Limit { .. })));
        assert!(matches!(run(64, 64, 66, &[1.0; 33]), Err(LaunchError::Limit { .. })));
        assert!(matches!(run(64, 64, 66, &[1.0; 3]), Err(LaunchError::Shape { .. })));
    }
}
