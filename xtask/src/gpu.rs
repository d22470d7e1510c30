//! Everything that is claimed of an NVIDIA GPU, shown on the one of this machine: laws, kernel contract with checkers, mirrors, model
//! tests, times, slice, demo checkpoint and peers, each by the program that a user would run, into one folder with one report.
//!
//! The programs are built first, or taken from a folder on a machine without a toolchain. A step that fails ends no other. Checks run
//! side by side, on a second GPU where there is one; times have the first GPU to themselves.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::beside;

/// The first lines of a report.
const HEAD: &str = "# This machine's GPU\n\n| step | result | seconds | record |\n| --- | --- | --- | --- |\n";
/// How often a step is looked at.
const PAUSE: Duration = Duration::from_millis(50);
/// Checks that share a GPU at once: most wait for the host's mirror of what they compare with.
const CHECKS_AT_ONCE: usize = 3;
/// The tests of the model on a GPU, as a program.
const MODEL_TESTS: &str = "tf-model-tests";
/// What some steps read of the repository.
const TINY: &str = "crates/model/tests/golden/dsv41-tiny-a/model";

/// One program with its arguments; `{}` in them is the folder of the records.
struct Step {
    title: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
    /// Further arguments, a run each, all of which must end with the same digest of the same backend. Empty: one run.
    ways: &'static [&'static [&'static str]],
    /// Of its output in the folder, without `.txt`.
    name: &'static str,
    /// What it leaves there beside it.
    record: &'static str,
    /// What it took on one H200, about.
    seconds: u64,
    /// A step that takes longer hangs.
    minutes: u64,
    /// Whether its output is Markdown already.
    is_markdown: bool,
    /// Whether it is a time, which needs a GPU of its own.
    is_timed: bool,
    /// A path that it reads, from where the command runs.
    needs: &'static str,
}

const fn step(title: &'static str, program: &'static str, arguments: &'static [&'static str]) -> Step {
    Step {
        title,
        program,
        arguments,
        ways: &[],
        name: program,
        record: "",
        seconds: 10,
        minutes: 10,
        is_markdown: false,
        is_timed: false,
        needs: "",
    }
}

/// In the order of a reader: is it right, how fast is it, and against whom. Each kind in the order in which it runs.
const STEPS: &[Step] = &[
    Step {
        name: "contract",
        record: "contract.json",
        seconds: 60,
        ..step(
            "Kernel contract and checkers",
            "tf-kernel-contract",
            &["--backend", "cuda", "--checkers", "--json", "{}/contract.json"],
        )
    },
    Step {
        name: "selftest",
        seconds: 6,
        ..step(
            "Laws on the built-in checkpoint",
            "tensorfold",
            &["selftest", "--backend", "cuda", "--log-level", "warn"],
        )
    },
    Step {
        name: "selftest-tiny",
        seconds: 6,
        needs: TINY,
        ..step(
            "Laws on dsv41-tiny-a",
            "tensorfold",
            &["selftest", "--backend", "cuda", "--log-level", "warn", "--model", TINY],
        )
    },
    Step {
        name: "ways",
        seconds: 20,
        needs: TINY,
        ways: &[
            &["--backend", "cuda"],
            &["--backend", "auto"],
            &["--backend", "cuda", "--devices", "0"],
            &["--backend", "cuda", "--engram", "ram"],
            &["--backend", "cuda", "--engram", "disk"],
        ],
        ..step(
            "The same bits by every way to a GPU and to n-gram rows",
            "tensorfold",
            &["selftest", "--laws", "L0,L4", "--quick", "--log-level", "warn", "--model", TINY],
        )
    },
    Step {
        name: "model-tests",
        seconds: 16,
        needs: "crates/model/tests/golden",
        ..step("The model's tests", MODEL_TESTS, &["--nocapture", "--test-threads", "2"])
    },
    Step {
        name: "served",
        record: "served.json",
        is_markdown: true,
        seconds: 40,
        ..step(
            "A server, self-check first: alone, among 8 and 64, drafted and not, equal replies",
            "tensorfold",
            &[
                "bench",
                "concurrent",
                "--backend",
                "auto",
                "--levels",
                "1,8,64",
                "--tokens",
                "48",
                "--alone",
                "--serial",
                "--log-level",
                "warn",
                "--format",
                "md",
                "--output",
                "{}/served.json",
            ],
        )
    },
    Step {
        name: "linears-check",
        record: "linears-check.jsonl",
        seconds: 45,
        ..step(
            "Linears, experts and head against their mirror",
            "tf-cuda-check",
            &["check", "long", "--out", "{}/linears-check.jsonl"],
        )
    },
    Step {
        name: "families-check",
        record: "families-check.jsonl",
        seconds: 40,
        ..step(
            "The other kernels against the CPU and their mirrors",
            "tf-families-check",
            &["check", "--out", "{}/families-check.jsonl"],
        )
    },
    Step {
        name: "slice-laws",
        record: "slice-laws.json",
        is_markdown: true,
        is_timed: true,
        seconds: 25,
        ..step(
            "Laws on sixteen layers of the release's size",
            "tensorfold",
            &[
                "bench",
                "slice",
                "--backend",
                "cuda",
                "--rows",
                "8",
                "--prefill",
                "256",
                "--reps",
                "1",
                "--laws",
                "L0,L1,L2,L3,L4",
                "--format",
                "md",
                "--output",
                "{}/slice-laws.json",
            ],
        )
    },
    Step {
        name: "linears-time",
        record: "linears-time.jsonl",
        is_markdown: true,
        is_timed: true,
        seconds: 90,
        ..step(
            "Linears, experts and head: times, and what invariance costs",
            "tf-cuda-check",
            &["time", "cost", "--out", "{}/linears-time.jsonl"],
        )
    },
    Step {
        name: "families",
        record: "families.jsonl",
        is_timed: true,
        seconds: 30,
        ..step("The other kernels: times", "tf-families-check", &["time", "--out", "{}/families.jsonl"])
    },
    Step {
        name: "decode",
        record: "decode.json",
        is_markdown: true,
        is_timed: true,
        seconds: 30,
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
                "--reps",
                "3",
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
        is_timed: true,
        seconds: 75,
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
                "256,2048",
                "--reps",
                "3",
                "--laws",
                "none",
                "--format",
                "md",
                "--output",
                "{}/slice.json",
            ],
        )
    },
    Step {
        name: "slice-long",
        record: "slice-long.json",
        is_markdown: true,
        is_timed: true,
        seconds: 40,
        ..step(
            "Sixteen layers, a long prompt",
            "tensorfold",
            &[
                "bench",
                "slice",
                "--backend",
                "cuda",
                "--rows",
                "1",
                "--context",
                "16384",
                "--prefill",
                "8192",
                "--reps",
                "2",
                "--laws",
                "none",
                "--format",
                "md",
                "--output",
                "{}/slice-long.json",
            ],
        )
    },
    Step {
        name: "peers",
        record: "peers.jsonl",
        is_markdown: true,
        is_timed: true,
        seconds: 90,
        needs: "tools/peers.py",
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
    Skipped(String),
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
    let is_wanted = |step: &&Step| {
        only.as_ref().is_none_or(|only| step.title.contains(only.as_str()) || step.name == only.as_str())
    };
    let wanted: Vec<&Step> = STEPS.iter().filter(is_wanted).collect();
    if wanted.is_empty() {
        bail!("--only {}: no step has this name or this word in its title", only.unwrap_or_default());
    }
    let binaries = binaries.map_or_else(built, Ok)?;
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    report(&wanted, &folder, &binaries, &gpus())
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
    let folder = target.join("release");
    let mut command = Command::new("cargo");
    command.args(["test", "--release", "-p", "tf-model", "--features", "cuda", "--test", "cuda", "--no-run"]);
    let output =
        command.arg("--message-format=json").stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    let program = executable(&String::from_utf8_lossy(&output.stdout)).context("the model's tests can't be built")?;
    fs::copy(&program, folder.join(MODEL_TESTS)).with_context(|| format!("cannot copy {program}"))?;
    Ok(folder)
}

/// The program that cargo's messages, a line of JSON each, name.
fn executable(messages: &str) -> Option<String> {
    let lines = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|message| Some(message.get("executable")?.as_str()?.to_owned())).next_back()
}

/// The names of the GPUs that may be used: those of CUDA_VISIBLE_DEVICES, else the indices that nvidia-smi shows.
fn gpus() -> Vec<String> {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(names) => names.split(',').map(|name| name.trim().to_owned()).collect(),
        Err(_) => {
            let output = Command::new("nvidia-smi").arg("-L").stdin(Stdio::null()).output();
            let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
            let count = text.lines().filter(|line| line.starts_with("GPU ")).count();
            (0..count).map(|index| index.to_string()).collect()
        }
    }
}

/// Runs the steps and writes `report.md` after each, so that a run that is broken off leaves what it has.
fn report(steps: &[&Step], folder: &Path, binaries: &Path, gpus: &[String]) -> Result<()> {
    let is_shared = gpus.len() < 2;
    let (timed, checks): (Vec<usize>, Vec<usize>) = (0..steps.len()).partition(|index| steps[*index].is_timed);
    let of = |indices: &[usize]| indices.iter().map(|index| steps[*index].seconds).sum::<u64>();
    let (of_checks, of_times) = (of(&checks) / CHECKS_AT_ONCE.min(2) as u64, of(&timed));
    let about = if is_shared { of_checks + of_times } else { of_checks.max(of_times) };
    println!("{} steps, about {} minutes on an H200", steps.len(), about.div_ceil(60));
    let started = Instant::now();
    let say = |text: String| {
        println!("[{:>4.0} s] {text}", started.elapsed().as_secs_f64());
        // Who reads along through a pipe sees it now.
        let _ = std::io::stdout().flush();
    };
    let mut ends: Vec<Option<(End, String)>> = steps.iter().map(|_| None).collect();
    let queue = |indices: &[usize]| Mutex::new(indices.iter().copied().collect::<VecDeque<usize>>());
    let (checks, timed) = (queue(&checks), queue(&timed));
    let (sender, receiver) = channel();
    let work = |queue: &Mutex<VecDeque<usize>>, gpu: Option<&str>, sender: std::sync::mpsc::Sender<_>| {
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        while let Some(index) = next() {
            say(format!("{} (about {} s) ...", steps[index].title, steps[index].seconds));
            if sender.send((index, perform(steps[index], folder, binaries, gpu))).is_err() {
                return;
            }
        }
    };
    let written = std::thread::scope(|scope| {
        let [first, second] = if is_shared { [None; 2] } else { [0, 1].map(|gpu| Some(gpus[gpu].as_str())) };
        let (checks, timed, work) = (&checks, &timed, &work);
        let others: Vec<_> = (0..CHECKS_AT_ONCE)
            .map(|_| {
                let sender = sender.clone();
                scope.spawn(move || work(checks, second, sender))
            })
            .collect();
        scope.spawn(move || {
            if is_shared {
                // A panic there shows when the scope ends.
                others.into_iter().for_each(|other| drop(other.join()));
            }
            work(timed, first, sender);
        });
        for (index, result) in receiver {
            let (end, output) = result?;
            say(format!("{}: {}", steps[index].title, told(&end)));
            ends[index] = Some((end, output));
            write(steps, &ends, "", folder)?;
        }
        Ok::<_, anyhow::Error>(())
    });
    written?;
    write(steps, &ends, &beside::section(folder)?.unwrap_or_default(), folder)?;
    println!("{}", folder.join("report.md").display());
    let failed = ends.iter().flatten().filter(|(end, _)| matches!(end, End::Done { succeeded: false, .. })).count();
    match failed {
        0 => Ok(()),
        _ => bail!("{failed} of {} steps failed", steps.len()),
    }
}

/// A step's end in words, with its seconds.
fn told(end: &End) -> String {
    match end {
        End::Done { succeeded: true, seconds, .. } => format!("ok, {seconds:.0} s"),
        End::Done { how, seconds, .. } => format!("FAILED, {seconds:.0} s: {how}"),
        End::Skipped(reason) => format!("skipped: {reason}"),
    }
}

/// The report of the steps that have ended.
fn write(steps: &[&Step], ends: &[Option<(End, String)>], beside: &str, folder: &Path) -> Result<()> {
    let (mut rows, mut parts) = (String::new(), String::new());
    for (step, end) in steps.iter().zip(ends) {
        let Some((end, output)) = end else { continue };
        let (result, seconds) = match end {
            End::Done { succeeded: true, seconds, .. } => ("ok".to_owned(), format!("{seconds:.0}")),
            End::Done { how, seconds, .. } => (format!("FAILED: {how}"), format!("{seconds:.0}")),
            End::Skipped(reason) => (format!("skipped: {reason}"), String::new()),
        };
        writeln!(rows, "| {} | {result} | {seconds} | {} |", step.title, step.record)?;
        let mut command = format!("{} {}", step.program, step.arguments.join(" ").replace("{}/", ""));
        if !step.ways.is_empty() {
            let ways: Vec<String> = step.ways.iter().map(|way| way.join(" ")).collect();
            command.push_str(&format!(" with {}", ways.join(" | ")));
        }
        let (fence, end) = if step.is_markdown { ("", "") } else { ("```text\n", "```\n") };
        writeln!(parts, "\n## {}\n\n`{command}`\n\n{fence}{}{end}", step.title, output.trim_start())?;
    }
    let place = folder.join("report.md");
    fs::write(&place, format!("{HEAD}{rows}{beside}{parts}"))
        .with_context(|| format!("cannot write {}", place.display()))
}

/// Runs one step, on the GPU of this name or on those that there are, and returns what it printed.
fn perform(step: &Step, folder: &Path, binaries: &Path, gpu: Option<&str>) -> Result<(End, String)> {
    if step.program == "python3" && !has_peers() {
        return Ok((End::Skipped("python3 has no torch and triton here".to_owned()), String::new()));
    }
    if !Path::new(step.needs).exists() && !step.needs.is_empty() {
        return Ok((End::Skipped(format!("there is no {} here: run it in the repository", step.needs)), String::new()));
    }
    let place = folder.join(format!("{}.txt", step.name));
    let out = File::create(&place).with_context(|| format!("cannot write {}", place.display()))?;
    let started = Instant::now();
    let one: &[&[&str]] = &[&[]];
    let (mut succeeded, mut how) = (true, String::new());
    for way in if step.ways.is_empty() { one } else { step.ways } {
        let command = command(step, way, folder, binaries, gpu)?;
        (succeeded, how) = finish(command, &out, started, step.minutes)?;
        if !succeeded {
            break;
        }
    }
    let output = String::from_utf8_lossy(&fs::read(&place)?).into_owned();
    if succeeded && !step.ways.is_empty() {
        (succeeded, how) = alike(&output, step.ways.len());
    }
    Ok((End::Done { succeeded, how, seconds: started.elapsed().as_secs_f64() }, output))
}

fn command(step: &Step, way: &[&str], folder: &Path, binaries: &Path, gpu: Option<&str>) -> Result<Command> {
    let program = if step.program == "python3" { PathBuf::from(step.program) } else { binaries.join(step.program) };
    let mut command = Command::new(program);
    command.args(step.arguments.iter().map(|word| word.replace("{}", &folder.display().to_string()))).args(way);
    if let Some(gpu) = gpu {
        command.env("CUDA_VISIBLE_DEVICES", gpu);
    }
    if step.program == MODEL_TESTS {
        // Where its recorded values are, wherever it was built.
        command.env("CARGO_MANIFEST_DIR", std::env::current_dir()?.join("crates/model"));
    }
    Ok(command)
}

/// Runs a command to its end or to the end of its time, and says whether it succeeded and how it ended.
fn finish(mut command: Command, out: &File, started: Instant, minutes: u64) -> Result<(bool, String)> {
    command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out.try_clone()?);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            return Ok((false, format!("{} can't be started: {error}", Path::new(command.get_program()).display())));
        }
    };
    loop {
        match child.try_wait()? {
            Some(status) => return Ok((status.success(), status.to_string())),
            None if started.elapsed() < Duration::from_secs(60 * minutes) => std::thread::sleep(PAUSE),
            None => {
                child.kill()?;
                child.wait()?;
                return Ok((false, format!("ended after {minutes} minutes")));
            }
        }
    }
}

/// Whether all runs have given the same digest of the same backend, which their verdicts end with.
fn alike(output: &str, count: usize) -> (bool, String) {
    let verdicts: Vec<&str> =
        output.lines().filter(|line| line.starts_with("PASS: ")).filter_map(|line| line.split(" on ").nth(1)).collect();
    match verdicts.iter().all(|verdict| *verdict == verdicts[0]) && verdicts.len() == count {
        true => (true, String::new()),
        false => (false, format!("{count} runs ended with {verdicts:?}")),
    }
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
        let error = report(&steps.each_ref(), &folder, &binaries, &[]).unwrap_err().to_string();
        assert_eq!(error, "2 of 3 steps failed");
        let text = fs::read_to_string(folder.join("report.md")).unwrap();
        assert!(text.contains("| First | FAILED: exit status: 3 |") && text.contains("```text\nwhy\n```"), "{text}");
        assert!(text.contains("| Second | ok | 0 | good.json |") && text.contains("`good --out good.json`"), "{text}");
        assert!(text.contains("| Third | FAILED: ") && text.contains("gone can't be started"), "{text}");
        assert_eq!(fs::read_to_string(folder.join("good.json")).unwrap(), "record\n");
        fs::remove_dir_all(&folder).unwrap();
    }

    /// Two checks wait for each other; a time fails if one of them still runs.
    #[test]
    fn checks_run_side_by_side_and_times_alone() {
        let folder = folder("lanes");
        let wait = "i=0; while [ ! -e \"$2\" ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i + 1)); done; [ -e \"$2\" ]";
        program(&folder, "check", &format!("touch \"$1\"; {wait} && sleep 0.2 && touch \"$1.ended\""));
        program(&folder, "time", "[ -e \"$1.ended\" ] && [ -e \"$2.ended\" ]");
        let steps = [
            Step { name: "alone", is_timed: true, ..step("Alone", "time", &["{}/a", "{}/b"]) },
            Step { name: "one", ..step("One", "check", &["{}/a", "{}/b"]) },
            Step { name: "other", ..step("Other", "check", &["{}/b", "{}/a"]) },
        ];
        report(&steps.each_ref(), &folder, &folder, &[]).unwrap();
        let text = fs::read_to_string(folder.join("report.md")).unwrap();
        let places = ["| Alone | ok", "| One | ok", "| Other | ok"].map(|row| text.find(row).expect("a row"));
        assert!(places.is_sorted(), "a report has the order of the steps: {text}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_second_gpu_takes_the_checks() {
        let folder = folder("gpus");
        program(&folder, "where", "echo GPU $CUDA_VISIBLE_DEVICES");
        let steps = [Step { name: "time", is_timed: true, ..step("Time", "where", &[]) }, step("Check", "where", &[])];
        report(&steps.each_ref(), &folder, &folder, &["3".to_owned(), "5".to_owned()]).unwrap();
        let said = ["time", "where"].map(|name| fs::read_to_string(folder.join(format!("{name}.txt"))).unwrap());
        assert_eq!(said, ["GPU 3\n", "GPU 5\n"]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn every_way_must_end_with_the_same_digest() {
        let folder = folder("ways");
        program(&folder, "says", "echo \"PASS: 2 passed; model on $1; digest $2\"");

        let same = Step { ways: &[&["cuda", "ab"], &["cuda", "ab"]], ..step("Ways", "says", &[]) };
        report(&[&same], &folder, &folder, &[]).unwrap();
        const OTHERS: [&[&[&str]]; 2] = [&[&["cuda", "ab"], &["cuda", "ac"]], &[&["cuda", "ab"], &["cpu", "ab"]]];
        for ways in OTHERS {
            let step = Step { ways, ..step("Ways", "says", &[]) };
            report(&[&step], &folder, &folder, &[]).unwrap_err();
        }
        assert!(fs::read_to_string(folder.join("report.md")).unwrap().contains("2 runs ended with"));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_is_not_here_is_skipped_and_what_cargo_built_is_found() {
        let folder = folder("needs");
        let step = Step { needs: "no such folder", ..step("Absent", "gone", &[]) };
        report(&[&step], &folder, &folder, &[]).unwrap();
        assert!(
            fs::read_to_string(folder.join("report.md")).unwrap().contains("skipped: there is no no such folder here")
        );
        fs::remove_dir_all(&folder).unwrap();
        let messages =
            "{\"reason\":\"compiler-artifact\",\"executable\":null}\n{\"executable\":\"/t/cuda-1\"}\nno JSON";
        assert_eq!(executable(messages).as_deref(), Some("/t/cuda-1"));
        assert_eq!(executable("{}"), None);
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
