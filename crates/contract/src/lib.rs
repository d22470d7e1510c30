//! The kernel contract: proves every registered kernel by four gates, shows with planted defects that each gate can fail, and
//! checks launches against the limits of their chips.
//!
//! The records lie beside their kernels (`tf_kernels::families`); this crate runs them. Knows no model and no scheduling.

pub mod apart;
#[cfg(feature = "cuda")]
pub mod compile;
pub mod controls;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod edits;
#[cfg(feature = "emulator")]
pub mod emulated;
pub mod families;
pub mod gates;
pub mod known;
pub mod limits;
#[cfg(target_os = "macos")]
pub mod metal;
pub mod options;
pub mod page;
pub mod probe;
pub mod replay;
pub mod report;
pub mod run;
pub mod self_check;
pub mod target;
pub mod timing;

pub use options::{Backend, Options};

use replay::Replay;
use report::Report;
use std::io::Write;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};
use target::Target;
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
            eprintln!("error: {text}");
            2
        }
    }
}

/// Lines on stdout. After the first error nothing more is written; a closed pipe is a reader who has seen enough.
struct Printer(Option<std::io::Error>);

impl Printer {
    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        if self.0.is_none() {
            self.0 = writeln!(std::io::stdout().lock(), "{text}").err();
        }
    }
}

macro_rules! say {
    ($printer:expr, $($text:tt)*) => { $printer.line(format_args!($($text)*)) };
}

fn perform(options: &Options) -> Result<bool, String> {
    let mut printer = Printer(None);
    let holds = prove(options, &mut printer)?;
    match printer.0 {
        Some(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("error: output can't be written: {error}");
            Ok(false)
        }
        _ => Ok(holds),
    }
}

fn prove(options: &Options, printer: &mut Printer) -> Result<bool, String> {
    if options.time && options.backend != Backend::Cpu {
        return Err(format!(
            "--time measures the CPU's kernels, and --backend is {}: leave one of them out (tf-families-check and \
             tf-cuda-check time a CUDA device)",
            options.backend.name()
        ));
    }
    if options.checkers && options.backend != Backend::Cuda {
        return Err(format!(
            "--checkers watch CUDA devices, and --backend is {}: leave one out",
            options.backend.name()
        ));
    }
    let contracts = run::choose(CONTRACTS, &options.only)?;
    if options.list {
        for contract in &contracts {
            let (cases, controls) = (contract.cases.len(), contract.all_controls().count());
            say!(printer, "{:<22} {cases} cases, {controls} controls: {}", contract.name, contract.formula);
        }
        return Ok(true);
    }
    probe::quiet_launches();
    if let Some(text) = &options.replay {
        let replay = Replay::parse(text)?;
        say!(printer, "{}", replay.command(&options.start()));
        return Ok(match run::replay(CONTRACTS, &target_of(options)?, &replay) {
            Ok(tally) => {
                say!(printer, "pass: {} launches, {} elements compared", tally.launches, tally.compared);
                true
            }
            Err(text) => {
                say!(printer, "FAIL: {text}");
                false
            }
        });
    }
    if let Some(target) = &options.compile_edits {
        let count = compile_edits(options, target, &contracts)?;
        say!(printer, "{count} edited programs compiled for sm_{target}");
        return Ok(true);
    }
    if options.launch_only {
        let target = target_of(options)?;
        let launches = run::launch_only(&contracts, &target)?;
        say!(printer, "launched, {}: {launches} launches, none judged", options.command());
        return Ok(true);
    }
    let report = reported(options, &contracts, printer)?;
    for text in report.complaints.iter().chain(&report.limit_problems) {
        say!(printer, "FAIL  {text}");
    }
    for skip in &report.skips {
        say!(printer, "skip  {}: {}", skip.what, skip.reason);
    }
    say!(printer, "seeds {:?} on {}", report.seeds, report.machine.name);
    save(options, &report)?;
    say!(printer, "{}", report.summary_line());
    Ok(report.holds())
}

/// The report of the chosen kernels, on CUDA made of parts.
fn reported(
    options: &Options,
    contracts: &[&'static tf_kernels::contract::Contract],
    printer: &mut Printer,
) -> Result<Report, String> {
    let is_part = contracts.len() == 1 && options.edits.is_some() && !options.checkers;
    if options.backend == Backend::Cuda && !is_part {
        // Without a device nobody is asked.
        let ahead = target_of(options)?.ahead(contracts);
        let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
        let checker = if options.checkers { Some(apart::checker()?) } else { None };
        let checker = checker.as_deref();
        // Whoever breaks a long run off keeps what it has found.
        let keep = &mut |report: &Report| save(options, report);
        apart::report(&program, contracts, options, &ahead, checker, &mut |line| say!(printer, "{line}"), keep)
    } else {
        let (fresh, known) = (fresh_seeds(options.seeds), run::known_findings());
        let target = target_of(options)?;
        let _turn = target.turn();
        Ok(run::report(contracts, &target, options, &fresh, known, &mut |line| say!(printer, "{line}")))
    }
}

/// Compiles a share of the edits: what no other process has begun.
#[cfg(feature = "cuda")]
fn compile_edits(
    options: &Options,
    target: &str,
    contracts: &[&tf_kernels::contract::Contract],
) -> Result<usize, String> {
    let folder = options.edits.as_deref().ok_or("--compile-edits needs --edits FOLDER: where they go")?;
    std::fs::create_dir_all(folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    compile::compile(folder, target, contracts)
}

#[cfg(not(feature = "cuda"))]
fn compile_edits(_: &Options, _: &str, _: &[&tf_kernels::contract::Contract]) -> Result<usize, String> {
    Err("this build has no CUDA kernels: build with `--features cuda`".to_owned())
}

/// Writes the report where it was asked for.
fn save(options: &Options, report: &Report) -> Result<(), String> {
    let Some(path) = &options.json else { return Ok(()) };
    let text = serde_json::to_string_pretty(report).map_err(|error| error.to_string())?;
    std::fs::write(path, text + "\n").map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// Where the kernels of a run's backend run on this machine.
fn target_of(options: &Options) -> Result<Target, String> {
    match options.backend {
        Backend::Cpu => Ok(Target::Cpu),
        #[cfg(target_os = "macos")]
        Backend::Metal => metal::metal(),
        #[cfg(all(feature = "emulator", not(target_os = "macos")))]
        Backend::Metal => emulated::metal(),
        #[cfg(not(any(feature = "emulator", target_os = "macos")))]
        Backend::Metal => {
            Err("this build has no Metal device and no emulator of one: run it on a Mac with Apple silicon, or build \
             tf-kernel-contract with `--features emulator` on x86-64 Linux"
                .to_owned())
        }
        #[cfg(feature = "cuda")]
        Backend::Cuda => cuda::cuda(options.edits.as_deref()),
        #[cfg(not(feature = "cuda"))]
        Backend::Cuda => Err("this build has no CUDA kernels: build with `--features cuda`".to_owned()),
    }
}

/// Seeds that nobody chose: from the clock, printed so that a run can be repeated with `--replay`.
fn fresh_seeds(count: usize) -> Vec<u64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    (0..count as u64).map(|index| now.wrapping_add(index * 7919) >> 8).collect()
}
