//! The kernel contract: proves every registered kernel by four gates, shows with planted defects that each gate can fail, and
//! checks launches against the limits of their chips.
//!
//! The records lie beside their kernels (`tf_kernels::families`); this crate runs them. Knows no model and no scheduling.

pub mod controls;
pub mod gates;
pub mod known;
pub mod limits;
pub mod options;
pub mod page;
pub mod probe;
pub mod replay;
pub mod report;
pub mod run;
pub mod timing;

pub use options::{Backend, Options};

use replay::Replay;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};
use tf_kernels::families::CONTRACTS;

/// What `tf-kernel-contract` and `tensorfold contract` do. Success only where everything asked for holds.
pub fn run(options: &Options) -> ExitCode {
    ExitCode::from(execute(options))
}

/// As [`run`], the status as a number: 0 where all holds, 1 where something does not, 2 where the question was wrong.
pub fn execute(options: &Options) -> u8 {
    match perform(options) {
        Ok(holds) => u8::from(!holds),
        Err(text) => {
            eprintln!("{text}");
            2
        }
    }
}

fn perform(options: &Options) -> Result<bool, String> {
    if options.backend != Backend::Cpu {
        return Err(format!("no {:?} kernel is registered in this build, so nothing can be proved", options.backend)
            .to_lowercase());
    }
    let contracts = run::choose(CONTRACTS, &options.only)?;
    if options.list {
        for contract in &contracts {
            let (cases, controls) = (contract.cases.len(), contract.all_controls().count());
            println!("{:<22} {cases} cases, {controls} controls: {}", contract.name, contract.formula);
        }
        return Ok(true);
    }
    probe::quiet_launches();
    if let Some(text) = &options.replay {
        let replay = Replay::parse(text)?;
        println!("{}", replay.command(options.program));
        return Ok(match run::replay(CONTRACTS, &replay) {
            Ok(tally) => {
                println!("pass: {} launches, {} elements compared", tally.launches, tally.compared);
                true
            }
            Err(text) => {
                println!("FAIL: {text}");
                false
            }
        });
    }
    let fresh = fresh_seeds(options.seeds);
    let report = run::report(&contracts, options, &fresh, run::known_findings(), &mut |line| println!("{line}"));
    for text in report.complaints.iter().chain(&report.limit_problems) {
        println!("FAIL  {text}");
    }
    for skip in &report.skips {
        println!("skip  {}: {}", skip.what, skip.reason);
    }
    println!("seeds {:?} on {}", report.seeds, report.machine.name);
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report).map_err(|error| error.to_string())?;
        std::fs::write(path, text + "\n").map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    println!("{}", report.summary_line());
    Ok(report.holds())
}

/// Seeds that nobody chose: from the clock, printed so that a run can be repeated with `--replay`.
fn fresh_seeds(count: usize) -> Vec<u64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    (0..count as u64).map(|index| now.wrapping_add(index * 7919) >> 8).collect()
}
