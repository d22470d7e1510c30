//! Thousands of seeded schedules, and proof that the simulator would notice each planted defect.

use std::sync::atomic::{AtomicU64, Ordering};

use tf_engine::prefix_cache::CacheFault;
use tf_engine::testing::Fault;
use tf_engine::testing::simulate::{Report, replay_command, simulate, simulate_with};

const SCHEDULES: u64 = 100_000;

fn broken_within(fault: Fault, schedules: u64) -> Option<u64> {
    (0..schedules).find(|&seed| simulate(seed, fault).is_err())
}

/// Runs all schedules on all cores; the first that breaks a law fails the test.
fn simulate_all() -> Report {
    let next = AtomicU64::new(0);
    let work = || {
        let mut own = Report::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= SCHEDULES {
                return own;
            }
            match std::panic::catch_unwind(|| simulate(seed, Fault::None)) {
                Ok(Ok(report)) => own.add(&report),
                broken => {
                    next.store(SCHEDULES, Ordering::Relaxed);
                    let broken =
                        broken.unwrap_or(Ok(own)).err().unwrap_or_else(|| "an invariant is broken".to_string());
                    panic!("seed {seed}: {broken}\nrepeat it with: {}", replay_command(seed));
                }
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let reports: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let mut total = Report::default();
    for report in reports {
        total.add(&report.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    }
    total
}

#[test]
fn every_reply_is_what_it_is_alone() {
    let total = simulate_all();
    println!("{SCHEDULES} schedules: {total:?}");
    let exercised = [
        ("whole replies", total.complete),
        ("cancelled requests", total.cancelled),
        ("slow readers", total.slow),
        ("failed forwards", total.failed),
        ("waits that were too long", total.expired),
        ("accepted drafts", total.accepted),
        ("rejected drafts", total.rejected),
        ("accepted copies", total.copies_accepted),
        ("rejected copies", total.copies_rejected),
        ("known rows", total.known_rows),
        ("sequences that gave their slots away", total.pauses),
        ("shared rounds", total.shared_rounds),
        ("prompt rows beside reply rows", total.mixed_rounds),
        ("prompts in pieces", total.cut_prompts),
        ("resumed prompts", total.resumed),
        ("kept prefixes that were let go", total.evictions),
        ("waits for pages", total.page_waits),
        ("requests that ended for want of pages", total.out_of_memory),
        ("restarts", total.restarts),
        ("files that were written", total.disk_writes),
        ("prompts resumed from files", total.disk_hits),
        ("files that were let go", total.disk_evictions),
        ("files that the disk didn't take", total.disk_failures),
        ("files that were refused", total.disk_refusals),
    ];
    for (name, count) in exercised {
        assert!(count > 100, "{SCHEDULES} schedules exercised only {count} {name}");
    }
}

/// A defect breaks a law, or an invariant in a panic.
fn is_noticed(seed: u64, fault: CacheFault) -> bool {
    std::panic::catch_unwind(|| simulate_with(seed, Fault::None, fault).is_err()).unwrap_or(true)
}

#[test]
fn every_planted_defect_of_the_cache_is_noticed() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let missed = CacheFault::ALL.into_iter().find(|&fault| !(0..30_000).any(|seed| is_noticed(seed, fault)));
    std::panic::set_hook(report);
    assert_eq!(missed, None, "30000 schedules didn't notice it");
}

#[test]
fn every_planted_defect_is_noticed() {
    for fault in Fault::ALL {
        assert!(broken_within(fault, 100).is_some(), "100 schedules didn't notice {fault:?}");
    }
}
