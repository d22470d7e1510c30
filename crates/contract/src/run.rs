//! The run: chosen kernels, their gates, controls and limits, and the report.

use crate::known::{self, KNOWN, Known};
use crate::options::{Backend, Options};
use crate::probe::{Failure, Planted, Probe, Queues, Tally, check};
use crate::replay::Replay;
use crate::report::{
    ControlReport, GateReport, KernelReport, Machine, Report, SCHEMA, Skip, Status, Summary, machine_name,
};
use crate::target::Target;
use crate::{apart, controls, limits, timing};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Instant;
use tf_kernels::contract::{Contract, Gate, Plant};

/// Seeds of every run. Gate 1 judges all of them, the others the first.
pub const SEEDS: &[u64] = &[1, 2, 3];
/// Rows of the launches that a checker watches, besides all of a case.
const WATCHED_ROWS: [usize; 2] = [1, 6];
/// Cases of a kernel that a checker watches, from the smallest on.
const WATCHED_CASES: usize = 3;
/// The name of all kernels of the model.
pub const ALL: &str = "dsv41";

/// The kernels that `--only` names: families, kernels, or, with a slash at its end, the kernel that has its family's name
/// without the others of the family.
///
/// # Errors
/// When a name is neither a family nor a kernel.
pub fn choose<'a>(contracts: &'a [Contract], only: &str) -> Result<Vec<&'a Contract>, String> {
    let mut chosen: Vec<&Contract> = Vec::new();
    for name in only.split(',').map(str::trim) {
        let matches = |contract: &&Contract| match name.strip_suffix('/') {
            Some(alone) => contract.name == alone,
            None => name == ALL || contract.name == name || contract.family() == name,
        };
        let matching: Vec<&Contract> = contracts.iter().filter(matches).collect();
        if matching.is_empty() {
            let mut families: Vec<&str> = contracts.iter().map(Contract::family).collect();
            families.dedup();
            return Err(format!(
                "--only {name}: no such family or kernel. Families: {}; all: {ALL}",
                families.join(" ")
            ));
        }
        for contract in matching {
            if !chosen.iter().any(|known| known.name == contract.name) {
                chosen.push(contract);
            }
        }
    }
    Ok(chosen)
}

/// The `--only` of one kernel and no other of its family.
pub fn only(contract: &Contract) -> String {
    match contract.name.contains('/') {
        true => contract.name.to_owned(),
        false => format!("{}/", contract.name),
    }
}

/// Runs everything over the chosen kernels. `say` gets a line for each kernel.
pub fn report(
    contracts: &[&Contract],
    target: &Target,
    options: &Options,
    fresh_seeds: &[u64],
    known: &[Known],
    say: &mut dyn FnMut(&str),
) -> Report {
    let seeds: Vec<u64> = SEEDS.iter().chain(fresh_seeds).copied().collect();
    let levels = if target.backend() == Backend::Cpu { limits::cpu_levels() } else { Vec::new() };
    let absent = levels.iter().filter(|(_, here)| !here);
    let mut report = Report {
        schema: SCHEMA.into(),
        command: options.command(),
        backend: target.backend().name().into(),
        version: env!("CARGO_PKG_VERSION").into(),
        machine: Machine {
            name: target.device_name().unwrap_or_else(machine_name),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            levels: levels.iter().filter(|(_, here)| *here).map(|(name, _)| (*name).to_owned()).collect(),
        },
        seeds,
        kernels: Vec::new(),
        checks: Vec::new(),
        skips: absent
            .map(|(name, _)| Skip { what: (*name).to_owned(), reason: "this CPU has no such instructions".to_owned() })
            .collect(),
        limit_problems: Vec::new(),
        complaints: Vec::new(),
        summary: Summary::default(),
    };
    let started = Instant::now();
    let is_timed = options.time && target.backend() == Backend::Cpu;
    let ceiling = is_timed.then(|| timing::read_ceiling(report.machine.cores));
    report.kernels = prove_all(contracts, target, options, &report.seeds, known, &mut |contract, kernel| {
        if let Some(ceiling) = ceiling
            && kernel.passed()
        {
            kernel.times = timing::times(contract, SEEDS[0], report.machine.cores, ceiling);
        }
        lines_of(kernel).iter().for_each(|line| say(line));
    });
    report.complaints.extend(contracts.iter().flat_map(|contract| complaints(contract)));
    report.complaints.extend(gone(&report.kernels, known));
    report.summary.gates_ms = started.elapsed().as_millis() as u64;
    let started = Instant::now();
    report.limit_problems = contracts.iter().flat_map(|contract| limits::launcher_problems(contract)).collect();
    // One kernel in several geometries may ask for the same.
    let asked: BTreeSet<String> = target.limit_problems().into_iter().collect();
    report.limit_problems.extend(asked);
    report.summary.limits_ms = started.elapsed().as_millis() as u64;
    report.count();
    report
}

/// Proves every kernel. A GPU's are shared out over the host's threads, since an emulated one computes on them; `done` gets
/// them as they end.
fn prove_all(
    contracts: &[&Contract],
    target: &Target,
    options: &Options,
    seeds: &[u64],
    known: &[Known],
    done: &mut dyn FnMut(&Contract, &mut KernelReport),
) -> Vec<KernelReport> {
    let start = options.start();
    let one = |contract: &Contract, queues: &mut Queues| prove(&start, contract, seeds, known, queues);
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(contracts.len());
    if target.backend() == Backend::Cpu || workers < 2 {
        let mut queues = Queues::new(target.clone());
        let each = contracts.iter().map(|contract| {
            let mut kernel = one(contract, &mut queues);
            done(contract, &mut kernel);
            kernel
        });
        return each.collect();
    }
    let (next, (sender, receiver)) = (AtomicUsize::new(0), channel());
    let mut kernels: Vec<Option<KernelReport>> = contracts.iter().map(|_| None).collect();
    std::thread::scope(|scope| {
        for _ in 0..workers {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                let mut queues = Queues::new(target.clone());
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(contract) = contracts.get(index) else { break };
                    if sender.send((index, one(contract, &mut queues))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for (index, mut kernel) in receiver {
            done(contracts[index], &mut kernel);
            kernels[index] = Some(kernel);
        }
    });
    kernels.into_iter().flatten().collect()
}

/// What is wrong with a record before it runs.
fn complaints(contract: &Contract) -> Vec<String> {
    let mut complaints = controls::complaints(contract);
    if contract.cases.is_empty() {
        complaints.push(format!("{} has no case", contract.name));
    }
    complaints
}

/// Known findings whose defect did not show although its kernel ran.
fn gone(kernels: &[KernelReport], known: &[Known]) -> Vec<String> {
    let shows = |known: &Known| {
        let gates = kernels.iter().filter(|kernel| kernel.name == known.kernel).flat_map(|kernel| &kernel.gates);
        gates.filter(|gate| gate.gate == known.gate.name()).all(|gate| gate.status != Status::Pass)
    };
    known
        .iter()
        .filter(|known| !shows(known))
        .map(|known| format!("known finding {} no longer shows: remove it", known.id))
        .collect()
}

/// All gates over all cases, then all controls.
fn prove(start: &str, contract: &Contract, seeds: &[u64], known: &[Known], queues: &mut Queues) -> KernelReport {
    let started = Instant::now();
    let gates = Gate::ALL.map(|gate| {
        let seeds = if gate == Gate::Value { seeds } else { &seeds[..1] };
        gate_over_cases(start, contract, gate, seeds, known, queues)
    });
    let mut controls = Vec::new();
    let target = queues.target.clone();
    for control in contract.all_controls().filter(|control| target.runs(control)) {
        let verdict = match target.is_alive() {
            true => controls::run(contract, control, seeds[0], queues),
            // What a fault has ended is not to be held against the controls after it.
            false => match std::env::current_exe() {
                Ok(program) => apart::judge(&program, start, target.folder(), contract, control, seeds[0]),
                Err(error) => controls::Verdict::Missed(format!("this program can't be found: {error}")),
            },
        };
        let (status, case, text) = match verdict {
            controls::Verdict::Red { case, text } => (Status::Red, case, text),
            controls::Verdict::Missed(text) => (Status::Missed, "", text),
            controls::Verdict::Skipped(text) => (Status::Skipped, "", text),
        };
        let (name, gate, case) = (control.name.into(), control.gate.name().into(), case.to_owned());
        controls.push(ControlReport { name, gate, status, case, text });
    }
    KernelReport {
        name: contract.name.into(),
        formula: contract.formula.into(),
        gates: gates.to_vec(),
        controls,
        times: Vec::new(),
        milliseconds: started.elapsed().as_millis() as u64,
    }
}

fn gate_over_cases(
    start: &str,
    contract: &Contract,
    gate: Gate,
    seeds: &[u64],
    known: &[Known],
    queues: &mut Queues,
) -> GateReport {
    let mut report = GateReport {
        gate: gate.name().into(),
        status: Status::Pass,
        cases: 0,
        cases_left_out: 0,
        cases_cut: 0,
        launches: 0,
        compared: 0,
        worst_share_of_bound: 0.0,
        worst: String::new(),
        failure: String::new(),
        replay: String::new(),
    };
    let mut total = Tally::default();
    for case in contract.cases {
        for (index, &seed) in seeds.iter().enumerate() {
            if !queues.target.takes(case, gate, index) {
                report.cases_left_out += 1;
                continue;
            }
            let world = (contract.make)(case, seed);
            let row_count = queues.target.rows(case);
            let mut probe = Probe {
                kernel: contract.name,
                world: &*world,
                queues,
                planted: Planted::NONE,
                row_count,
                tally: Tally::default(),
            };
            let result = check(gate, &mut probe);
            total.add(&probe.tally);
            report.cases += 1;
            report.cases_cut += usize::from(row_count < case.rows);
            if let Err(failure) = result {
                let accepted = known::find(known, contract.name, gate, case.name).is_some();
                if accepted && report.status == Status::Pass {
                    report.status = Status::KnownFinding;
                } else if !accepted && report.status != Status::Fail {
                    report.status = Status::Fail;
                    report.failure = format!("case {}, seed {seed}: {}", case.name, failure.text());
                    report.replay = Replay::new(contract, case, gate, seed, None).command(start);
                }
            }
        }
    }
    if report.cases == 0 {
        report.status = Status::Fail;
        report.failure = "the kernel has no case".to_owned();
    }
    report.launches = total.launches;
    report.compared = total.compared;
    report.worst_share_of_bound = total.worst;
    report.worst = total.worst_at;
    report
}

/// Launches the smaller cases and judges nothing, for a checker that watches this process: it makes each launch many times
/// slower, and what it looks for does not grow with a case. Returns how many launches.
///
/// # Errors
/// The first launch that was refused or broke.
pub fn launch_only(contracts: &[&Contract], target: &Target) -> Result<usize, String> {
    let mut queues = Queues::new(target.clone());
    let mut launches = 0;
    for contract in contracts {
        let cases = controls::smallest_first(contract.cases);
        let taken = cases.into_iter().filter(|case| target.takes(case, Gate::Value, 0)).take(WATCHED_CASES);
        for (place, case) in taken.enumerate() {
            let world = (contract.make)(case, SEEDS[0]);
            let mut probe = Probe {
                kernel: contract.name,
                world: &*world,
                queues: &mut queues,
                planted: Planted::NONE,
                row_count: target.rows(case),
                tally: Tally::default(),
            };
            let rows = probe.all_rows();
            // Counts of rows have kernels of their own; so do the ways to cut a launch, which the smallest case shows.
            let few = WATCHED_ROWS.into_iter().filter(|count| *count < rows.len());
            let counts = few.chain([rows.len()]).map(|count| (target.plain(), count));
            let ways = if place == 0 { target.settings() } else { Vec::new() };
            for (setting, count) in counts.chain(ways.into_iter().map(|setting| (setting, rows.len()))) {
                probe.launch(setting, &rows[..count]).map_err(|failure| {
                    format!("{}, case {}, {count} rows: {}", contract.name, case.name, failure.text())
                })?;
            }
            launches += probe.tally.launches;
        }
    }
    Ok(launches)
}

/// What the screen shows of a kernel: one line, and more where something is wrong or was timed.
fn lines_of(kernel: &KernelReport) -> Vec<String> {
    let failed = kernel.gates.iter().filter(|gate| gate.status == Status::Fail);
    let missed: Vec<_> = kernel.controls.iter().filter(|control| control.status == Status::Missed).collect();
    let launches: usize = kernel.gates.iter().map(|gate| gate.launches).sum();
    let red = kernel.controls.iter().filter(|control| control.status == Status::Red).count();
    let worst = kernel.gates[0].worst_share_of_bound;
    let word = if kernel.failed() || !missed.is_empty() { "FAIL" } else { "pass" };
    let mut lines = vec![format!(
        "{word}  {:<22} {launches:>6} launches, worst element at {:>4.1} % of its bound, {red} of {} controls red, {} ms",
        kernel.name,
        100.0 * worst,
        kernel.controls.len(),
        kernel.milliseconds
    )];
    for gate in failed {
        lines.push(format!("      gate {}: {}\n      {}", gate.gate, gate.failure, gate.replay));
    }
    lines.extend(
        missed
            .iter()
            .map(|control| format!("      missed: {} (gate {}): {}", control.name, control.gate, control.text)),
    );
    for time in &kernel.times {
        lines.push(format!(
            "      {:<18} {:>10.1} us  {:>7.2} GB/s ({:>5.1} % of the read rate)  {:>7.2} G multiply-adds/s",
            time.case,
            time.microseconds,
            time.gigabytes_a_second,
            100.0 * time.share_of_read_ceiling,
            time.giga_multiply_adds_a_second
        ));
    }
    lines
}

/// Runs one case alone.
///
/// # Errors
/// The failure's text, or which part of the name is unknown.
pub fn replay(contracts: &[Contract], target: &Target, replay: &Replay) -> Result<Tally, String> {
    let contract = contracts.iter().find(|contract| contract.name == replay.kernel);
    let contract = contract.ok_or_else(|| format!("no kernel is called {}", replay.kernel))?;
    let case = contract.cases.iter().find(|case| case.name == replay.case);
    let case = case.ok_or_else(|| format!("{} has no case called {}", contract.name, replay.case))?;
    let (mut target, mut planted) = (target.clone(), Planted::NONE);
    if let Some(name) = &replay.control {
        let control = contract.all_controls().find(|control| control.name == name);
        let control = control.ok_or_else(|| format!("{} has no control called {name}", contract.name))?;
        match control.plant {
            Plant::Edit { source, find, replace, .. } => {
                target = target.edited(source, controls::apply_edit(source, find, replace)?)?;
            }
            Plant::Simdgroups(count) => target = target.crowded(count)?,
            Plant::Arguments | Plant::Outcome(_) => planted = Planted::of(control).unwrap_or_default(),
        }
    }
    let world = (contract.make)(case, replay.seed);
    let row_count = target.rows(case);
    let mut queues = Queues::new(target);
    let mut probe = Probe {
        kernel: contract.name,
        world: &*world,
        queues: &mut queues,
        planted,
        row_count,
        tally: Tally::default(),
    };
    check(replay.gate, &mut probe).map_err(|failure| match failure {
        Failure::Red(text) => format!("red: {text}"),
        Failure::Broken(text) => format!("broken: {text}"),
    })?;
    Ok(probe.tally)
}

/// The known findings of this build.
pub fn known_findings() -> &'static [Known] {
    KNOWN
}
