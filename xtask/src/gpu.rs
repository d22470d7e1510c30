//! Everything that is claimed of an NVIDIA GPU, measured on the one of this machine: checks, times, contract, laws, slice, demo
//! checkpoint and peers, each by the program that a user would run, into one folder with one report.
//!
//! The programs are built first, or taken from a folder on a machine without a toolchain. A step that fails ends no other.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::beside;

/// The first lines of a report.
const HEAD: &str = "# This machine's GPU\n\n| step | result | seconds | record |\n| --- | --- | --- | --- |\n";
/// How often a step is looked at.
const PAUSE: Duration = Duration::from_millis(50);

/// One program with its arguments; `{}` in them is the folder of the records.
struct Step {
    title: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
    /// Of its output in the folder, without `.txt`.
    name: &'static str,
    /// What it leaves there beside it.
    record: &'static str,
    /// A step that takes longer hangs.
    minutes: u64,
    /// Whether its output is Markdown already.
    is_markdown: bool,
}

const fn step(title: &'static str, program: &'static str, arguments: &'static [&'static str]) -> Step {
    Step { title, program, arguments, name: program, record: "", minutes: 10, is_markdown: false }
}

/// In the order of a reader: is it right, how fast is it, and against whom. Short steps first.
const STEPS: &[Step] = &[
    Step { name: "selftest", ..step("Laws", "tensorfold", &["selftest", "--backend", "cuda", "--log-level", "warn"]) },
    Step {
        name: "contract",
        record: "contract.json",
        ..step(
            "Kernel contract and checkers",
            "tf-kernel-contract",
            &["--backend", "cuda", "--checkers", "--json", "{}/contract.json"],
        )
    },
    Step {
        name: "linears-check",
        record: "linears-check.jsonl",
        ..step(
            "Linears, experts and head against their mirror",
            "tf-cuda-check",
            &["check", "long", "--out", "{}/linears-check.jsonl"],
        )
    },
    Step {
        name: "linears-time",
        record: "linears-time.jsonl",
        is_markdown: true,
        ..step(
            "Linears, experts and head: times, and what invariance costs",
            "tf-cuda-check",
            &["time", "cost", "--out", "{}/linears-time.jsonl"],
        )
    },
    Step {
        name: "families",
        record: "families.jsonl",
        ..step("The other kernels", "tf-families-check", &["check", "time", "--out", "{}/families.jsonl"])
    },
    Step {
        name: "decode",
        record: "decode.json",
        is_markdown: true,
        ..step(
            "The built-in checkpoint end to end",
            "tensorfold",
            &[
                "bench",
                "decode",
                "--backend",
                "cuda",
                "--rows",
                "1,8,64",
                "--format",
                "md",
                "--output",
                "{}/decode.json",
            ],
        )
    },
    Step {
        name: "slice",
        record: "slice.json",
        is_markdown: true,
        ..step(
            "Sixteen layers of the release's size",
            "tensorfold",
            &[
                "bench",
                "slice",
                "--backend",
                "cuda",
                "--rows",
                "1,2,4,6,8,16,32,64,128",
                "--prefill",
                "256,2048,8192",
                "--format",
                "md",
                "--output",
                "{}/slice.json",
            ],
        )
    },
    Step {
        name: "peers",
        record: "peers.jsonl",
        is_markdown: true,
        ..step(
            "Ceilings and peers (PyTorch, Triton)",
            "python3",
            &["tools/peers.py", "--seconds", "150", "--slice", "{}/slice.json", "--output", "{}/peers.jsonl"],
        )
    },
];

/// How a step ended.
enum End {
    Done { succeeded: bool, how: String, seconds: f64 },
    Skipped(&'static str),
}

/// `cargo xtask gpu FOLDER [--binaries FOLDER] [--only WORD]`.
///
/// # Errors
/// Wrong usage, programs that can't be built, or a step that failed: the report is there all the same.
pub fn run(arguments: &[String]) -> Result<()> {
    const USAGE: &str = "usage: cargo xtask gpu FOLDER [--binaries FOLDER] [--only WORD]";
    let (mut folder, mut binaries, mut only) = (None, None, None);
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--binaries" => binaries = Some(PathBuf::from(words.next().context(USAGE)?)),
            "--only" => only = Some(words.next().context(USAGE)?.clone()),
            _ if folder.is_none() && !word.starts_with('-') => folder = Some(PathBuf::from(word)),
            _ => bail!(USAGE),
        }
    }
    let folder = folder.context(USAGE)?;
    let wanted: Vec<&Step> =
        STEPS.iter().filter(|step| only.as_ref().is_none_or(|only| step.title.contains(only.as_str()))).collect();
    if wanted.is_empty() {
        bail!("--only {}: no step has this word in its title", only.unwrap_or_default());
    }
    let binaries = binaries.map_or_else(built, Ok)?;
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    report(&wanted, &folder, &binaries)
}

/// Builds the programs and returns their folder.
fn built() -> Result<PathBuf> {
    let packages = ["tensorfold", "tf-contract"].into_iter().flat_map(|package| ["-p", package]);
    let mut command = Command::new("cargo");
    command.args(["build", "--release", "--features", "tensorfold/cuda,tf-contract/cuda", "--bins"]).args(packages);
    if !command.status().context("cannot start cargo")?.success() {
        bail!("the programs can't be built");
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    Ok(target.join("release"))
}

/// Runs the steps and writes `report.md` after each, so that a run that is broken off leaves what it has.
fn report(steps: &[&Step], folder: &Path, binaries: &Path) -> Result<()> {
    let (mut rows, mut parts, mut failed) = (String::new(), String::new(), 0);
    for step in steps {
        println!("{} ...", step.title);
        let (end, output) = perform(step, folder, binaries)?;
        let (result, seconds) = match &end {
            End::Done { succeeded: true, seconds, .. } => ("ok".to_owned(), format!("{seconds:.0}")),
            End::Done { how, seconds, .. } => (format!("FAILED: {how}"), format!("{seconds:.0}")),
            End::Skipped(reason) => (format!("skipped: {reason}"), String::new()),
        };
        failed += usize::from(matches!(end, End::Done { succeeded: false, .. }));
        println!("  {result} {seconds}");
        let command = format!("{} {}", step.program, step.arguments.join(" ").replace("{}/", ""));
        writeln!(rows, "| {} | {result} | {seconds} | {} |", step.title, step.record)?;
        let fence = if step.is_markdown { "" } else { "```text\n" };
        let end = if step.is_markdown { "" } else { "```\n" };
        writeln!(parts, "\n## {}\n\n`{command}`\n\n{fence}{}{end}", step.title, output.trim_start())?;
        fs::write(folder.join("report.md"), format!("{HEAD}{rows}{parts}"))?;
    }
    let beside = beside::section(folder)?.unwrap_or_default();
    fs::write(folder.join("report.md"), format!("{HEAD}{rows}{beside}{parts}"))?;
    println!("{}", folder.join("report.md").display());
    match failed {
        0 => Ok(()),
        _ => bail!("{failed} of {} steps failed", steps.len()),
    }
}

/// Runs one step and returns what it printed.
fn perform(step: &Step, folder: &Path, binaries: &Path) -> Result<(End, String)> {
    let is_python = step.program == "python3";
    if is_python && !has_peers() {
        return Ok((End::Skipped("python3 has no torch and triton here"), String::new()));
    }
    let program = if is_python { PathBuf::from(step.program) } else { binaries.join(step.program) };
    let place = folder.join(format!("{}.txt", step.name));
    let out = File::create(&place).with_context(|| format!("cannot write {}", place.display()))?;
    let mut command = Command::new(&program);
    command.args(step.arguments.iter().map(|word| word.replace("{}", &folder.display().to_string())));
    command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
    let started = Instant::now();
    let (succeeded, how) = match command.spawn() {
        Err(error) => (false, format!("{} can't be started: {error}", program.display())),
        Ok(mut child) => loop {
            match child.try_wait()? {
                Some(status) => break (status.success(), status.to_string()),
                None if started.elapsed() < Duration::from_secs(60 * step.minutes) => std::thread::sleep(PAUSE),
                None => {
                    child.kill()?;
                    child.wait()?;
                    break (false, format!("ended after {} minutes", step.minutes));
                }
            }
        },
    };
    let output = String::from_utf8_lossy(&fs::read(&place)?).into_owned();
    Ok((End::Done { succeeded, how, seconds: started.elapsed().as_secs_f64() }, output))
}

fn has_peers() -> bool {
    let mut command = Command::new("python3");
    command.args(["-c", "import torch, triton"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("tensorfold-gpu-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn program(folder: &Path, name: &str, text: &str) {
        let path = folder.join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    }

    #[test]
    fn a_step_that_fails_is_reported_and_ends_no_other() {
        let folder = folder("steps");
        let binaries = folder.join("binaries");
        fs::create_dir_all(&binaries).unwrap();
        program(&binaries, "good", "echo said to \"$2\"; echo record > \"$2\"");
        program(&binaries, "bad", "echo why; exit 3");
        let steps = [
            step("First", "bad", &[]),
            Step { record: "good.json", is_markdown: true, ..step("Second", "good", &["--out", "{}/good.json"]) },
            step("Third", "gone", &[]),
        ];
        let error = report(&steps.each_ref(), &folder, &binaries).unwrap_err().to_string();
        assert_eq!(error, "2 of 3 steps failed");
        let text = fs::read_to_string(folder.join("report.md")).unwrap();
        assert!(text.contains("| First | FAILED: exit status: 3 |") && text.contains("```text\nwhy\n```"), "{text}");
        assert!(text.contains("| Second | ok | 0 | good.json |") && text.contains("`good --out good.json`"), "{text}");
        assert!(text.contains("| Third | FAILED: ") && text.contains("gone can't be started"), "{text}");
        assert_eq!(fs::read_to_string(folder.join("good.json")).unwrap(), "record\n");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn wrong_usage_is_refused_before_anything_is_built() {
        for words in [&[][..], &["--only"], &["a", "b"], &["--what", "a"]] {
            let words: Vec<String> = words.iter().map(ToString::to_string).collect();
            assert!(run(&words).unwrap_err().to_string().starts_with("usage: "), "{words:?}");
        }
        let words = ["here", "--binaries", "there", "--only", "nothing"].map(str::to_owned);
        assert!(run(&words).unwrap_err().to_string().contains("--only nothing"));
        assert!(!Path::new("here").exists());
    }

    #[test]
    fn every_step_has_a_name_and_a_record_of_its_own() {
        let mut names: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), STEPS.len());
        for step in STEPS.iter().filter(|step| !step.record.is_empty()) {
            assert!(step.record.starts_with(step.name), "{}", step.record);
            assert!(step.arguments.contains(&format!("{{}}/{}", step.record).as_str()), "{}", step.title);
        }
    }
}
