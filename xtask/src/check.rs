//! One command that says whether the tree is sound. Ends with what was skipped and why; skips what a missing tool
//! makes impossible and never skips silently.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// Folder of the workspace.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies below the workspace").to_path_buf()
}

/// Runs a command in the workspace and fails with its line when it fails.
pub fn sh(program: &str, args: &[&str]) -> Result<()> {
    let line = format!("{program} {}", args.join(" "));
    let status = Command::new(program)
        .args(args)
        .current_dir(root())
        .status()
        .with_context(|| format!("cannot start: {line}"))?;
    if !status.success() {
        bail!("failed: {line} ({status})");
    }
    Ok(())
}

enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

fn cargo(args: &[&str]) -> Outcome {
    match sh("cargo", args) {
        Ok(()) => Outcome::Passed,
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}

/// Lines of a failed test's own output that the summary repeats, and characters of each.
const LINES_OF_A_FAILURE: usize = 12;
const CHARACTERS_OF_A_LINE: usize = 300;

/// Every test of the workspace, also after a failure. What failed is said again in the summary: a log is often
/// kept by its end.
fn tests() -> Result<()> {
    let mut child = Command::new("cargo")
        .args(["test", "--workspace", "--locked", "--no-fail-fast"])
        .current_dir(root())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start: cargo test")?;
    let mut failures = Vec::new();
    let mut lines_left = 0;
    for line in BufReader::new(child.stdout.take().context("cargo test has no output")?).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        println!("{line}");
        if line.starts_with("---- ") {
            lines_left = LINES_OF_A_FAILURE;
        } else if line == "failures:" || line.starts_with("test result:") {
            lines_left = 0;
        }
        if lines_left > 0 && !line.is_empty() {
            lines_left -= 1;
            failures.push(line.chars().take(CHARACTERS_OF_A_LINE).collect::<String>());
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("failed: cargo test ({status})\n{}", failures.join("\n"));
    }
    Ok(())
}

fn licences() -> Outcome {
    let installed = Command::new("cargo").args(["deny", "--version"]).output().is_ok_and(|out| out.status.success());
    if !installed {
        return Outcome::Skipped("cargo-deny is not installed: cargo install cargo-deny --locked".to_string());
    }
    cargo(&["deny", "check", "licenses", "bans", "sources"])
}

/// What the emulator of a Metal device needs.
fn metal_missing() -> Option<String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Some("the emulator of a Metal device runs on x86-64 Linux only".to_string());
    }
    let found = Command::new("clang++-19").arg("--version").output().is_ok_and(|out| out.status.success());
    (!found).then(|| "clang++-19 is missing: apt-get install clang-19".to_string())
}

/// The kernel contract on the emulated Metal device.
fn metal() -> Result<()> {
    let program =
        ["run", "--locked", "-p", "tf-contract", "--features", "emulator", "--bin", "tf-kernel-contract", "--"];
    sh("cargo", &[&program[..], &["--backend", "metal"]].concat())
}

/// Every CUDA source for every architecture, and the host code of the feature that embeds them.
fn cuda() -> Result<()> {
    crate::cubins::run(&[])?;
    let host = ["clippy", "--locked", "-p", "tensorfold", "-p", "tf-contract", "--features", "cuda", "--all-targets"];
    sh("cargo", &[&host[..], &["--", "-D", "warnings"]].concat())
}

fn optional(missing: Option<String>, run: fn() -> Result<()>) -> Outcome {
    match missing {
        Some(reason) => Outcome::Skipped(reason),
        None => match run() {
            Ok(()) => Outcome::Passed,
            Err(error) => Outcome::Failed(format!("{error:#}")),
        },
    }
}

type Step = (&'static str, fn() -> Outcome);

/// In the order in which a fault is cheapest to learn.
const STEPS: &[Step] = &[
    ("format", || cargo(&["fmt", "--all", "--check"])),
    ("tidy", || optional(None, crate::tidy::run)),
    ("lints", || cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"])),
    ("tests", || optional(None, tests)),
    ("kernel contract", || cargo(&["run", "--locked", "-p", "tf-contract", "--bin", "tf-kernel-contract"])),
    ("Metal kernels", || optional(metal_missing(), metal)),
    ("licences", licences),
    ("64-bit Arm", || optional(crate::aarch64::missing(), crate::aarch64::run)),
    ("CUDA kernels", || optional(crate::cubins::missing(), cuda)),
    ("Apple targets", || optional(crate::darwin::missing(), crate::darwin::run)),
];

/// Runs every step, also after a failure, and lists the results.
pub fn run() -> Result<()> {
    let mut lines = Vec::new();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, step) in STEPS {
        eprintln!("== {name}");
        let started = Instant::now();
        let outcome = step();
        let seconds = started.elapsed().as_secs_f64();
        lines.push(match outcome {
            Outcome::Passed => {
                passed += 1;
                format!("pass  {name} ({seconds:.1} s)")
            }
            Outcome::Skipped(reason) => {
                skipped += 1;
                format!("skip  {name}: {reason}")
            }
            Outcome::Failed(reason) => {
                failed += 1;
                format!("FAIL  {name} ({seconds:.1} s): {reason}")
            }
        });
    }
    println!("\n{}", lines.join("\n"));
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    // A run for the record may not have holes; a newcomer without every tool still gets an answer.
    if failed > 0 || (skipped > 0 && std::env::var_os("CI").is_some()) {
        bail!("check failed");
    }
    Ok(())
}

/// Rewrites the generated pages by running the tests that keep them fresh in their writing mode.
pub fn generate() -> Result<()> {
    let status = Command::new("cargo")
        .args(["test", "--workspace", "--locked", "generated_page"])
        .env("TENSORFOLD_GENERATE", "1")
        .current_dir(root())
        .status()?;
    if !status.success() {
        bail!("the pages could not be written");
    }
    Ok(())
}
