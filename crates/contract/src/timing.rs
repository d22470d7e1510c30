//! `--time`: the cases that were just proved, timed, beside the read rate that this machine reaches.
//!
//! Only the launcher's own time counts; packing and checking lie outside. The least of several launches is reported, whose
//! operands mostly lie in the caches.

use crate::probe::{Counted, Setting, time_of};
use crate::report::TimeReport;
use crate::target::Target;
use std::hint::black_box;
use std::time::{Duration, Instant};
use tf_device::cpu::{Placement, Pool, split};
use tf_kernels::contract::Contract;

const RUNS: usize = 7;
/// Larger than the caches that one core could call its own.
const CEILING_BYTES: usize = 256 << 20;

/// Bytes a second that `threads` threads read from memory.
pub fn read_ceiling(threads: usize) -> f64 {
    let words = vec![1u64; CEILING_BYTES / 8];
    let pool = Pool::new(threads, Placement::Free);
    let mut best = Duration::MAX;
    for _ in 0..3 {
        let started = Instant::now();
        pool.run(|index, count| {
            let part = &words[split(words.len(), count, index, 8)];
            let mut sums = [0u64; 8];
            for chunk in part.as_chunks::<8>().0 {
                for (sum, word) in sums.iter_mut().zip(chunk) {
                    *sum ^= word;
                }
            }
            black_box(sums);
        });
        best = best.min(started.elapsed());
    }
    CEILING_BYTES as f64 / best.as_secs_f64()
}

/// Times every case of a kernel at the best level.
pub fn times(contract: &Contract, seed: u64, threads: usize, ceiling: f64) -> Vec<TimeReport> {
    let mut times = Vec::new();
    for case in contract.cases {
        let world = (contract.make)(case, seed);
        let mut queue = Counted::new(&Target::Cpu, Setting { threads, ..Setting::plain() });
        let runs = (0..RUNS).filter_map(|_| time_of(&*world, &mut queue, case.rows).ok());
        let Some(best) = runs.min() else { continue };
        let (work, seconds) = (world.work(), best.as_secs_f64().max(1e-9));
        times.push(TimeReport {
            case: case.name.to_owned(),
            threads,
            microseconds: seconds * 1e6,
            bytes: work.bytes,
            multiply_adds: work.multiply_adds,
            gigabytes_a_second: work.bytes as f64 / seconds / 1e9,
            share_of_read_ceiling: work.bytes as f64 / seconds / ceiling,
            giga_multiply_adds_a_second: work.multiply_adds as f64 / seconds / 1e9,
        });
    }
    times
}
