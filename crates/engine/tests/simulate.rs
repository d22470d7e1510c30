//! Thousands of seeded schedules, and proof that the simulator would notice each planted defect.

use tf_engine::testing::Fault;
use tf_engine::testing::simulate::{Report, replay_command, simulate};

const SCHEDULES: u64 = 5000;

fn broken_within(fault: Fault, schedules: u64) -> Option<u64> {
    (0..schedules).find(|&seed| simulate(seed, fault).is_err())
}

#[test]
fn every_reply_is_what_it_is_alone() {
    let mut total = Report::default();
    for seed in 0..SCHEDULES {
        match simulate(seed, Fault::None) {
            Ok(report) => total.add(&report),
            Err(broken) => panic!("seed {seed}: {broken}\nrepeat it with: {}", replay_command(seed)),
        }
    }
    println!("{SCHEDULES} schedules: {total:?}");
    let exercised = [
        ("whole replies", total.complete),
        ("cancelled requests", total.cancelled),
        ("slow readers", total.slow),
        ("failed forwards", total.failed),
        ("waits that were too long", total.expired),
        ("accepted drafts", total.accepted),
        ("rejected drafts", total.rejected),
        ("shared rounds", total.shared_rounds),
        ("prompt rows beside reply rows", total.mixed_rounds),
        ("prompts in pieces", total.cut_prompts),
    ];
    for (name, count) in exercised {
        assert!(count > 100, "{SCHEDULES} schedules exercised only {count} {name}");
    }
}

#[test]
fn every_planted_defect_is_noticed() {
    for fault in Fault::ALL {
        // Snapshots aren't part of a schedule; `laws.rs` has that one.
        if fault == Fault::SnapshotLosesOddRow {
            continue;
        }
        assert!(broken_within(fault, 100).is_some(), "100 schedules didn't notice {fault:?}");
    }
}
