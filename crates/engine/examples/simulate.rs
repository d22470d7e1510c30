//! Repeats schedules of the simulator: `cargo run -p tf-engine --example simulate -- SEED [COUNT]`.

use std::process::ExitCode;

use tf_engine::testing::Fault;
use tf_engine::testing::simulate::{Report, replay_command, simulate};

fn main() -> ExitCode {
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let (first, count) = match numbers[..] {
        [first] => (first, 1),
        [first, count] => (first, count),
        _ => {
            eprintln!("usage: simulate SEED [COUNT]");
            return ExitCode::from(2);
        }
    };
    let mut total = Report::default();
    for seed in first..first + count {
        match simulate(seed, Fault::None) {
            Ok(report) => total.add(&report),
            Err(broken) => {
                eprintln!("seed {seed}: {broken}\nrepeat it with: {}", replay_command(seed));
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{count} schedules hold: {total:?}");
    ExitCode::SUCCESS
}
