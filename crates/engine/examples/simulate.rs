//! The simulator by hand: repeats the schedules of seeds, or goes on for as long as it is told to.
//!
//! `cargo run -p tf-engine --example simulate -- SEED [COUNT]` repeats; `-- soak SECONDS [SEED]` begins at a seed, by
//! default a new one each time, on every core.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tf_engine::testing::Fault;
use tf_engine::testing::simulate::{Report, replay_command, simulate};

const USAGE: &str = "usage: simulate SEED [COUNT], or simulate soak SECONDS [SEED]";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let is_soak = words.first().is_some_and(|word| word == "soak");
    let numbers: Option<Vec<u64>> = words.iter().skip(usize::from(is_soak)).map(|word| word.parse().ok()).collect();
    match (is_soak, numbers.as_deref()) {
        (false, Some([first])) => run(*first, 1, None),
        (false, Some([first, count])) => run(*first, *count, None),
        (true, Some([seconds])) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            run(now.as_secs() << 20, u64::MAX >> 1, Some(Duration::from_secs(*seconds)))
        }
        (true, Some([seconds, first])) => run(*first, u64::MAX >> 1, Some(Duration::from_secs(*seconds))),
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// Runs schedules on all cores until `count` are done, the time is over, or one breaks a law.
fn run(first: u64, count: u64, time: Option<Duration>) -> ExitCode {
    let began = Instant::now();
    let (next, is_broken, total) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::new(Report::default()));
    let work = || {
        let mut own = Report::default();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let is_over = index >= count || time.is_some_and(|time| began.elapsed() > time);
            if is_over || is_broken.load(Ordering::Relaxed) {
                break;
            }
            let seed = first.wrapping_add(index);
            // A broken invariant panics; its seed is said before.
            let result = std::panic::catch_unwind(|| simulate(seed, Fault::None));
            match result {
                Ok(Ok(report)) => own.add(&report),
                Ok(Err(broken)) => {
                    is_broken.store(true, Ordering::Relaxed);
                    eprintln!("seed {seed}: {broken}\nrepeat it with: {}", replay_command(seed));
                }
                Err(_) => {
                    is_broken.store(true, Ordering::Relaxed);
                    eprintln!("seed {seed}: an invariant is broken\nrepeat it with: {}", replay_command(seed));
                }
            }
        }
        total.lock().unwrap_or_else(std::sync::PoisonError::into_inner).add(&own);
    };
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get()).min(count as usize);
    std::thread::scope(|scope| {
        (0..cores).for_each(|_| {
            scope.spawn(work);
        });
    });
    if is_broken.load(Ordering::Relaxed) {
        return ExitCode::FAILURE;
    }
    let total = total.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let done = next.load(Ordering::Relaxed).saturating_sub(cores as u64).min(count);
    println!("{done} schedules from seed {first} hold: {total:?}");
    ExitCode::SUCCESS
}
