//! Kernels in processes of their own: the parts make the same report as one process, and one that dies or that a checker
//! stops does not end the others. On the CPU, with scripts in the place of a checker and of a program that dies.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tf_contract::controls::Verdict;
use tf_contract::edits::Ahead;
use tf_contract::report::{Report, Status};
use tf_contract::target::Target;
use tf_contract::{Backend, Options, apart, run};
use tf_kernels::contract::Contract;
use tf_kernels::families::CONTRACTS;

const PROGRAM: &str = env!("CARGO_BIN_EXE_tf-kernel-contract");
/// One has the name of its family, which has a second.
const KERNELS: &str = "draft_head/,rms_norm";

fn options() -> Options {
    Options {
        program: "tf-kernel-contract",
        backend: Backend::Cpu,
        only: KERNELS.to_owned(),
        list: false,
        json: None,
        replay: None,
        time: false,
        checkers: false,
        edits: None,
        compile_edits: None,
        launch_only: false,
        seeds: 0,
    }
}

fn contracts() -> Vec<&'static Contract> {
    run::choose(CONTRACTS, KERNELS).unwrap()
}

/// A report of the parts and what was said.
fn apart(program: &Path, checker: Option<&Path>) -> (Report, Vec<String>) {
    let mut lines = Vec::new();
    let mut kept = Vec::new();
    let say = &mut |line: &str| lines.push(line.to_owned());
    let keep = &mut |report: &Report| {
        kept.push(report.holds());
        Ok(())
    };
    let report = apart::report(program, &contracts(), &options(), &Ahead::default(), checker, say, keep).unwrap();
    assert!(!kept.is_empty() && kept.iter().all(|holds| !holds), "a report of some parts never holds");
    (report, lines)
}

/// Programs are written while nobody starts one: a child that is born in between would hold a file open for writing.
static ONE: Mutex<()> = Mutex::new(());

fn one_at_a_time() -> MutexGuard<'static, ()> {
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A program of a few shell lines.
fn script(name: &str, text: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("tensorfold-apart-{}-{name}", std::process::id()));
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
    path
}

#[test]
fn parts_make_the_report_of_one_process() {
    let _one = one_at_a_time();
    let whole = run::report(&contracts(), &Target::Cpu, &options(), &[], &[], &mut |_| {});
    let (parts, lines) = apart(Path::new(PROGRAM), None);
    assert!(parts.holds() && whole.holds());
    // Whatever depends on neither time nor process is equal, kernel by kernel.
    let figures = |report: &Report| {
        let kernels = report.kernels.iter();
        let each = kernels.map(|kernel| {
            let launches: Vec<usize> = kernel.gates.iter().map(|gate| gate.launches).collect();
            (kernel.name.clone(), launches, kernel.controls.len())
        });
        (report.seeds.clone(), report.machine.name.clone(), each.collect::<Vec<_>>())
    };
    assert_eq!(figures(&parts), figures(&whole));
    let durations = |line: String| line.split("; gates").next().unwrap().to_owned();
    assert_eq!(durations(parts.summary_line()), durations(whole.summary_line()));
    assert_eq!(lines.iter().filter(|line| line.starts_with("pass  ")).count(), parts.kernels.len());
}

#[test]
fn a_process_that_dies_fails_its_kernel_and_no_other() {
    let _one = one_at_a_time();
    // Dies on the one kernel and lets the program answer for the other.
    let text = format!("case \"$*\" in *rms_norm*) echo the last word; kill -9 $$;; esac\nexec {PROGRAM} \"$@\"");
    let program = script("dies", &text);
    let (report, lines) = apart(&program, None);
    std::fs::remove_file(&program).unwrap();
    assert!(!report.holds());
    assert_eq!((report.summary.kernels, report.summary.passed, report.summary.failed), (contracts().len(), 1, 1));
    let dead = report.kernels.iter().find(|kernel| kernel.name == "rms_norm").unwrap();
    assert!(dead.gates.iter().all(|gate| gate.status == Status::Fail && gate.failure.contains("the last word")));
    assert!(lines.iter().any(|line| line.starts_with("FAIL  rms_norm") && line.contains("signal")), "{lines:?}");
}

#[test]
fn what_a_checker_finds_is_counted_and_fails_the_run() {
    let _one = one_at_a_time();
    let says = |name: &str, finding: &str| {
        let text = format!("shift 6; \"$@\" || exit $?\n{finding}\necho '========= ERROR SUMMARY: 0 errors'");
        script(name, &text)
    };
    let clean = says("clean", "");
    let (report, _) = apart(Path::new(PROGRAM), Some(&clean));
    assert!(report.holds());
    assert_eq!((report.summary.clean, report.summary.unclean), (2 * contracts().len(), 0));
    let found = "case \"$*\" in *draft_head*) echo '========= Invalid read'; echo '========= ERROR SUMMARY: 1 error'; exit 86;; esac";
    let finds = says("finds", found);
    let (report, lines) = apart(Path::new(PROGRAM), Some(&finds));
    assert!(!report.holds());
    assert_eq!((report.summary.clean, report.summary.unclean), (2, 2));
    let check = report.checks.iter().find(|check| check.status == Status::Fail).unwrap();
    assert!(
        check.kernel == "draft_head" && check.text.contains("1 error") && check.text.contains("Invalid read"),
        "{check:?}"
    );
    assert!(lines.iter().any(|line| line.starts_with("FAIL  draft_head")), "{lines:?}");
    // A device that the checker does not take is a skip, and a run of nothing but skips is none.
    let refuses = script("refuses", "echo '========= Error: Device not supported'; exit 1");
    let (report, _) = apart(Path::new(PROGRAM), Some(&refuses));
    assert!(report.checks.iter().all(|check| check.status == Status::Skipped) && !report.holds());
    for path in [clean, finds, refuses] {
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_control_without_a_device_is_judged_by_processes_of_its_own() {
    let _one = one_at_a_time();
    let contract = contracts()[0];
    let control = contract.controls.iter().find(|control| control.gate.name() == "value").unwrap();
    let judged = |program: &Path| apart::judge(program, "tf-kernel-contract --backend cpu", None, contract, control, 1);
    let Verdict::Red { case, .. } = judged(Path::new(PROGRAM)) else { panic!("{} is not red", control.name) };
    assert!(contract.cases.iter().any(|known| known.name == case));
    let passes = script("passes", "echo pass: 1 launches, 1 elements compared");
    let verdict = judged(&passes);
    std::fs::remove_file(passes).unwrap();
    assert!(matches!(&verdict, Verdict::Missed(text) if text.contains("pass: 1 launches")), "{verdict:?}");
}
