//! Kernels in processes of their own, several at once: one that faults on a CUDA device leaves its whole process without a
//! device, and must not end the proof of the others. The parts' reports become one. Also runs a kernel's launches under the
//! checkers of compute-sanitizer.

use crate::controls::{Verdict, smallest_first};
use crate::edits::{self, Ahead, is_there};
use crate::options::{Backend, Options};
use crate::replay::Replay;
use crate::report::{CheckReport, GateReport, KernelReport, Machine, Report, SCHEMA, Status, Summary};
use crate::run::only;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tf_kernels::contract::{Contract, Control, Gate};

/// A process that takes longer hangs.
const LONGEST: Duration = Duration::from_secs(600);
/// How often a process is looked at.
const PAUSE: Duration = Duration::from_millis(10);
/// Processes at once: each holds a context of the device, and all but one wait for their turn on it.
const AT_ONCE_MAX: usize = 8;
/// Groups of kernels that a tool watches, each in a process.
const WATCHED_AT_ONCE: usize = 4;
/// The checkers of compute-sanitizer that launches run under.
const CHECKERS: [&str; 2] = ["memcheck", "racecheck"];
/// A checker's exit status for a finding; no status of ours.
const FINDING: &str = "86";
/// Lines of a checker's finding that a report keeps.
const FINDING_LINES: usize = 12;

/// The command of compute-sanitizer on this machine.
///
/// # Errors
/// That it is not here.
pub fn checker() -> Result<PathBuf, String> {
    const PLACES: [&str; 3] =
        ["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer"];
    let answers = |place: &&str| {
        let mut command = Command::new(place);
        command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    PLACES.iter().find(|place| answers(place)).map(PathBuf::from).ok_or_else(|| {
        "--checkers needs NVIDIA's compute-sanitizer, which is neither on the path nor in /usr/local/cuda/bin: install the CUDA \
         toolkit, or leave the option out"
            .to_owned()
    })
}

/// One process to start.
enum Task<'a> {
    Prove(&'static Contract),
    Watch(Vec<&'static Contract>, &'a Path, &'static str),
}

/// What came of it.
enum Part {
    Proved(Box<Report>),
    Died(&'static Contract, String),
    Watched(Vec<CheckReport>),
}

/// As `run::report`, each kernel in a process of `program`; with a `checker` each also under its tools. Other processes compile
/// what can be compiled `ahead`, and a kernel begins when its own is there. `say` gets what the processes print, as they end,
/// and `keep` the report so far.
///
/// # Errors
/// When this machine keeps no files for the parts, or `keep` fails.
pub fn report(
    program: &Path,
    contracts: &[&'static Contract],
    options: &Options,
    ahead: &Ahead,
    checker: Option<&Path>,
    say: &mut dyn FnMut(&str),
    keep: &mut dyn FnMut(&Report) -> Result<(), String>,
) -> Result<Report, String> {
    let folder = own_place("contract");
    fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    let started = Instant::now();
    let mut options = options.clone();
    let edits = options.edits.get_or_insert_with(|| folder.join("edits")).clone();
    fs::create_dir_all(&edits).map_err(|error| format!("cannot make {}: {error}", edits.display()))?;
    let options = &options;
    let compilers = Compilers::start(program, options, ahead, &edits);
    let pending = Pending::new(contracts, ahead, checker);
    let count = pending.count();
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(AT_ONCE_MAX).min(count);
    let take = || pending.take(&compilers, &edits);
    let (mut parts, mut kept) = (Vec::new(), Ok(()));
    let (next, (sender, receiver)) = (AtomicUsize::new(0), channel());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            let (sender, next, take, folder) = (sender.clone(), &next, &take, &folder);
            scope.spawn(move || {
                while let Some(task) = take() {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let done = perform(program, &task, options, &folder.join(index.to_string()));
                    if sender.send(done).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for (part, lines) in receiver {
            let seconds = started.elapsed().as_secs_f64();
            lines.iter().for_each(|line| say(&with_time(line, seconds)));
            parts.push(part);
            if parts.len() < count {
                let mut so_far = whole(options, contracts, &parts, started.elapsed());
                so_far.complaints.push(format!("the run has done {} of {count} parts", parts.len()));
                kept = keep(&so_far);
            }
        }
    });
    kept?;
    if let Some(text) = compilers.line() {
        say(&text);
    }
    // What is left there is of no use, and of no harm.
    let _ = fs::remove_dir_all(&folder);
    Ok(whole(options, contracts, &parts, started.elapsed()))
}

/// What nobody has begun.
struct Pending<'a>(Mutex<(Vec<Proof>, Vec<Task<'a>>)>);

impl<'a> Pending<'a> {
    fn new(contracts: &[&'static Contract], ahead: &Ahead, checker: Option<&'a Path>) -> Pending<'a> {
        let programs = ahead.programs.iter().cloned().chain(std::iter::repeat((0, Vec::new())));
        let proof = |(contract, (compiling, names)): (&&'static Contract, _)| Proof { contract, compiling, names };
        let mut proofs: Vec<Proof> = contracts.iter().zip(programs).map(proof).collect();
        // As they are compiled: those whose edits take the longest come last.
        proofs.sort_by_key(|proof| proof.compiling);
        let mut watches = Vec::new();
        if let Some(checker) = checker {
            let groups = contracts.chunks(contracts.len().div_ceil(WATCHED_AT_ONCE));
            let tools = |group: &[&'static Contract]| CHECKERS.map(|tool| Task::Watch(group.to_vec(), checker, tool));
            watches.extend(groups.flat_map(tools));
            watches.reverse();
        }
        Pending(Mutex::new((proofs, watches)))
    }

    fn count(&self) -> usize {
        let pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pending.0.len() + pending.1.len()
    }

    /// A proof whose edits are there, or any once nobody compiles; checkers when no proof is left.
    fn take(&self, compilers: &Compilers, edits: &Path) -> Option<Task<'a>> {
        loop {
            let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let (proofs, watches) = &mut *pending;
            if proofs.is_empty() {
                return watches.pop();
            }
            let all_done = compilers.are_done();
            let is_ready = |proof: &Proof| all_done || proof.names.iter().all(|name| is_there(edits, name));
            if let Some(index) = proofs.iter().position(is_ready) {
                return Some(Task::Prove(proofs.remove(index).contract));
            }
            drop(pending);
            std::thread::sleep(PAUSE);
        }
    }
}

/// A kernel to be proved, and the edited programs that it waits for.
struct Proof {
    contract: &'static Contract,
    /// As [`Ahead`] counts it.
    compiling: usize,
    names: Vec<String>,
}

/// Processes that compile edits, and nothing else.
struct Compilers {
    children: Mutex<Vec<Child>>,
    started: Instant,
    count: usize,
    seconds: Mutex<Option<f64>>,
}

impl Compilers {
    /// One process a core, or as many as there is to compile.
    fn start(program: &Path, options: &Options, ahead: &Ahead, edits: &Path) -> Compilers {
        edits::forget_claims(edits);
        let mut missing: Vec<&String> =
            ahead.programs.iter().flat_map(|(_, names)| names).filter(|name| !is_there(edits, name)).collect();
        missing.sort_unstable();
        missing.dedup();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let processes = missing.len().min(cores);
        let one = |target: &String| {
            let mut command = command(program, options);
            command.args(["--only", &options.only, "--compile-edits", target, "--edits"]).arg(edits);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().ok()
        };
        // What nobody compiles ahead is compiled by the proof that needs it.
        let children = (0..processes).filter_map(|_| ahead.architecture.as_ref().and_then(one)).collect();
        Compilers {
            children: Mutex::new(children),
            started: Instant::now(),
            count: missing.len(),
            seconds: Mutex::default(),
        }
    }

    /// Whether none is left.
    fn are_done(&self) -> bool {
        let mut children = self.children.lock().unwrap_or_else(PoisonError::into_inner);
        children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        let done = children.is_empty();
        if done {
            let mut seconds = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
            seconds.get_or_insert(self.started.elapsed().as_secs_f64());
        }
        done
    }

    /// What is said of them.
    fn line(&self) -> Option<String> {
        let seconds = (*self.seconds.lock().unwrap_or_else(PoisonError::into_inner))?;
        (self.count > 0).then(|| format!("      {} edited programs were compiled in {seconds:.1} s", self.count))
    }
}

impl Drop for Compilers {
    fn drop(&mut self) {
        let children = self.children.get_mut().unwrap_or_else(PoisonError::into_inner);
        for child in children {
            // They are ours, and nobody else's.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The line that says how a kernel went, with when it ended.
fn with_time(line: &str, seconds: f64) -> String {
    match line.starts_with(' ') {
        true => line.to_owned(),
        false => format!("{line}, at {seconds:.1} s"),
    }
}

/// Does one task and returns its part and its lines. `place` begins the names of its files.
fn perform(program: &Path, task: &Task<'_>, options: &Options, place: &Path) -> (Part, Vec<String>) {
    match task {
        Task::Prove(contract) => prove(program, contract, options, place),
        Task::Watch(contracts, checker, tool) => {
            let mut checks = watch(program, checker, tool, contracts, options, place);
            if contracts.len() > 1 && checks.iter().any(|check| check.status == Status::Fail) {
                // Whose launches the finding belongs to.
                let alone = |contract| watch(program, checker, tool, &[contract], options, place);
                checks = contracts.iter().flat_map(|contract| alone(*contract)).collect();
            }
            let lines = checks.iter().map(|check| {
                let word = match check.status {
                    Status::Pass => "clean",
                    Status::Skipped => "skip ",
                    _ => "FAIL ",
                };
                format!("{word} {:<22} {tool}: {}", check.kernel, check.text)
            });
            let lines = lines.collect();
            (Part::Watched(checks), lines)
        }
    }
}

fn prove(program: &Path, contract: &'static Contract, options: &Options, place: &Path) -> (Part, Vec<String>) {
    let json = place.with_extension("json");
    let mut command = command(program, options);
    command.args(["--only", &only(contract), "--seeds", &options.seeds.to_string(), "--json"]).arg(&json);
    if let Some(edits) = options.edits.as_ref().filter(|_| options.backend == Backend::Cuda) {
        command.arg("--edits").arg(edits);
    }
    let end = run(&mut command, place);
    let report = fs::read(&json).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let Some(report) = report else {
        let text = format!("its process {}; its last words: {}", end.how, last_lines(&end.text, 3));
        let line = format!("FAIL  {:<22} {text}", contract.name);
        return (Part::Died(contract, text), vec![line]);
    };
    let mine = |line: &&str| ["pass  ", "FAIL  ", "      "].iter().any(|start| line.starts_with(start));
    (Part::Proved(Box::new(report)), end.text.lines().filter(mine).map(str::to_owned).collect())
}

/// The launches of some kernels under one tool of the checker.
fn watch(
    program: &Path,
    checker: &Path,
    tool: &str,
    contracts: &[&'static Contract],
    options: &Options,
    place: &Path,
) -> Vec<CheckReport> {
    let chosen: Vec<String> = contracts.iter().map(|contract| only(contract)).collect();
    let mut words = Command::new(checker);
    // Finding a kernel's argument count ends with an error of the driver, by design.
    words.args(["--tool", tool, "--report-api-errors", "no", "--error-exitcode", FINDING]).arg(program);
    words.args(options.program.split_whitespace().skip(1));
    words.args(["--backend", options.backend.name(), "--only", &chosen.join(","), "--launch-only"]);
    let started = Instant::now();
    let end = run(&mut words, place);
    let said: Vec<&str> = end.text.lines().filter(|line| line.starts_with("=========")).collect();
    let counted = said.iter().rfind(|line| line.contains("SUMMARY")).map(|line| line.trim_start_matches(['=', ' ']));
    let (status, text) = match (end.code, counted) {
        (Some(0), Some(counted)) => (Status::Pass, counted.to_owned()),
        _ if end.text.contains("Device not supported") => {
            (Status::Skipped, "compute-sanitizer does not support this device".to_owned())
        }
        (_, Some(counted)) => {
            let kept: Vec<&str> = said.iter().take(FINDING_LINES).copied().collect();
            (Status::Fail, format!("{counted}; the process {}\n{}", end.how, kept.join("\n")))
        }
        (_, None) => (Status::Fail, format!("the process {}; its last words: {}", end.how, last_lines(&end.text, 6))),
    };
    let milliseconds = started.elapsed().as_millis() as u64;
    let check = |contract: &&'static Contract| CheckReport {
        kernel: contract.name.to_owned(),
        checker: tool.to_owned(),
        status,
        text: text.clone(),
        milliseconds,
    };
    contracts.iter().map(check).collect()
}

/// A control whose device is gone, case by case in processes of `program`. `start` as in [`Options::start`], `edits` the folder
/// of compiled ones.
pub fn judge(
    program: &Path,
    start: &str,
    edits: Option<&Path>,
    contract: &Contract,
    control: &Control,
    seed: u64,
) -> Verdict {
    let mut last = "no case".to_owned();
    for case in smallest_first(contract.cases) {
        let replay = Replay::new(contract, case, control.gate, seed, Some(control));
        let mut command = Command::new(program);
        command.args(start.split_whitespace().skip(1)).args(["--replay", &replay.text()]);
        if let Some(edits) = edits {
            command.arg("--edits").arg(edits);
        }
        let place = own_place("control");
        let end = run(&mut command, &place);
        let _ = fs::remove_file(&place);
        match end.text.lines().find_map(|line| line.strip_prefix("FAIL: red: ")) {
            Some(text) => return Verdict::Red { case: case.name, text: text.to_owned() },
            None => last = format!("case {}: {}", case.name, last_lines(&end.text, 1)),
        }
    }
    Verdict::Missed(last)
}

/// A path for temporary files that nobody else has.
pub(crate) fn own_place(what: &str) -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("tensorfold-{what}-{}-{count}", std::process::id()))
}

/// The words that every part begins with.
fn command(program: &Path, options: &Options) -> Command {
    let mut command = Command::new(program);
    // The words of a subcommand, if this is one.
    command.args(options.program.split_whitespace().skip(1)).args(["--backend", options.backend.name()]);
    command
}

/// How a process ended.
struct End {
    code: Option<i32>,
    how: String,
    /// What it printed.
    text: String,
}

/// Runs a process to its end, or to the end of its time. What it prints goes through the file `place`: nobody has to read
/// along.
fn run(command: &mut Command, place: &Path) -> End {
    let started = File::create(place).and_then(|out| {
        let errors = out.try_clone()?;
        command.stdin(Stdio::null()).stdout(out).stderr(errors).spawn()
    });
    let (code, how) = match started {
        Ok(mut child) => wait(&mut child),
        Err(error) => (None, format!("could not be started: {error}")),
    };
    End { code, how, text: String::from_utf8_lossy(&fs::read(place).unwrap_or_default()).into_owned() }
}

fn wait(child: &mut Child) -> (Option<i32>, String) {
    let started = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return (status.code(), format!("ended with {status}")),
            Ok(None) if started.elapsed() < LONGEST => std::thread::sleep(PAUSE),
            Ok(None) => {
                // It is ours, and nobody else's.
                let _ = child.kill();
                let _ = child.wait();
                return (None, format!("was ended after {} s", LONGEST.as_secs()));
            }
            Err(error) => return (None, format!("can't be waited for: {error}")),
        }
    }
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(count)..].join(" | ")
}

/// One report of the parts, kernels in the order of the registry.
fn whole(options: &Options, contracts: &[&'static Contract], parts: &[Part], elapsed: Duration) -> Report {
    let mut all = Report {
        schema: SCHEMA.into(),
        command: options.command(),
        backend: options.backend.name().into(),
        version: env!("CARGO_PKG_VERSION").into(),
        machine: Machine { name: String::new(), cores: 0, levels: Vec::new() },
        seeds: Vec::new(),
        kernels: Vec::new(),
        checks: Vec::new(),
        skips: Vec::new(),
        limit_problems: Vec::new(),
        complaints: Vec::new(),
        summary: Summary { gates_ms: elapsed.as_millis() as u64, ..Summary::default() },
    };
    for part in parts {
        match part {
            Part::Proved(part) => {
                all.machine = part.machine.clone();
                all.kernels.extend(part.kernels.iter().cloned());
                all.complaints.extend(part.complaints.iter().cloned());
                all.summary.limits_ms += part.summary.limits_ms;
                for seed in &part.seeds {
                    if !all.seeds.contains(seed) {
                        all.seeds.push(*seed);
                    }
                }
                for skip in &part.skips {
                    if !all.skips.iter().any(|known| known.what == skip.what && known.reason == skip.reason) {
                        all.skips.push(skip.clone());
                    }
                }
                for problem in &part.limit_problems {
                    if !all.limit_problems.contains(problem) {
                        all.limit_problems.push(problem.clone());
                    }
                }
            }
            Part::Died(contract, text) => all.kernels.push(dead(contract, text)),
            Part::Watched(checks) => all.checks.extend(checks.iter().cloned()),
        }
    }
    let place = |name: &str| contracts.iter().position(|contract| contract.name == name);
    all.kernels.sort_by_key(|kernel| place(&kernel.name));
    all.checks.sort_by_key(|check| place(&check.kernel));
    all.count();
    all
}

/// The report of a kernel whose process did not live to write one.
fn dead(contract: &Contract, text: &str) -> KernelReport {
    let gate = |gate: Gate| GateReport {
        gate: gate.name().into(),
        status: Status::Fail,
        cases: 0,
        cases_left_out: 0,
        cases_cut: 0,
        launches: 0,
        compared: 0,
        worst_share_of_bound: 0.0,
        worst: String::new(),
        failure: text.to_owned(),
        replay: String::new(),
    };
    KernelReport {
        name: contract.name.into(),
        formula: contract.formula.into(),
        gates: Gate::ALL.map(gate).to_vec(),
        controls: Vec::new(),
        times: Vec::new(),
        milliseconds: 0,
    }
}
