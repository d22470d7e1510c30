//! What a run found: the lines on the screen, the SUMMARY line, and the JSON report of
//! `docs/reference/contract.schema.json`.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Names the form of the JSON report; changes with it.
pub const SCHEMA: &str = "tensorfold.contract.3";

/// A name of this program's own, or one that another process of it wrote.
pub type Text = Cow<'static, str>;

/// How a gate or a control ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Pass,
    Fail,
    KnownFinding,
    Red,
    Missed,
    Skipped,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GateReport {
    pub gate: Text,
    pub status: Status,
    /// Cases that ran, each with each seed it had.
    pub cases: usize,
    /// Cases that the device does not take, or not with every seed, likewise.
    pub cases_left_out: usize,
    /// Of `cases`, those that had fewer rows than they are written with.
    pub cases_cut: usize,
    pub launches: usize,
    pub compared: usize,
    /// Gate 1: the largest deviation as a share of its bound, and its place.
    pub worst_share_of_bound: f64,
    pub worst: String,
    /// Empty where the gate passed.
    pub failure: String,
    /// The command that runs the failing case alone.
    pub replay: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ControlReport {
    pub name: Text,
    pub gate: Text,
    pub status: Status,
    pub case: String,
    /// What the gate said, or why it was missed or skipped.
    pub text: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TimeReport {
    pub case: String,
    pub threads: usize,
    pub microseconds: f64,
    pub bytes: usize,
    pub multiply_adds: usize,
    pub gigabytes_a_second: f64,
    /// Of the read rate measured on this machine with the same threads.
    pub share_of_read_ceiling: f64,
    pub giga_multiply_adds_a_second: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KernelReport {
    pub name: Text,
    pub formula: Text,
    pub gates: Vec<GateReport>,
    pub controls: Vec<ControlReport>,
    pub times: Vec<TimeReport>,
    pub milliseconds: u64,
}

impl KernelReport {
    pub fn passed(&self) -> bool {
        self.gates.iter().all(|gate| gate.status == Status::Pass)
    }

    pub fn failed(&self) -> bool {
        self.gates.iter().any(|gate| gate.status == Status::Fail)
    }
}

/// Launches of one kernel that a checker watched.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CheckReport {
    pub kernel: String,
    pub checker: String,
    /// `skipped` where the checker does not run on this machine.
    pub status: Status,
    /// What the checker counted, and what it found.
    pub text: String,
    pub milliseconds: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Summary {
    pub kernels: usize,
    pub passed: usize,
    pub failed: usize,
    pub known_findings: usize,
    pub controls: usize,
    pub red: usize,
    pub missed: usize,
    pub skipped: usize,
    /// Over all gates.
    pub cases_left_out: usize,
    pub cases_cut: usize,
    pub limit_problems: usize,
    /// Kernels under a checker: those without and with findings.
    pub clean: usize,
    pub unclean: usize,
    pub gates_ms: u64,
    pub limits_ms: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    pub name: String,
    pub cores: usize,
    pub levels: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Skip {
    pub what: String,
    pub reason: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub schema: Text,
    pub command: String,
    pub backend: Text,
    pub version: Text,
    pub machine: Machine,
    pub seeds: Vec<u64>,
    pub kernels: Vec<KernelReport>,
    /// Empty where no checker was asked for.
    pub checks: Vec<CheckReport>,
    pub skips: Vec<Skip>,
    pub limit_problems: Vec<String>,
    /// What is wrong with the registry or the list of known findings.
    pub complaints: Vec<String>,
    pub summary: Summary,
}

impl Report {
    /// Counts everything but the durations.
    pub fn count(&mut self) {
        let gates = || self.kernels.iter().flat_map(|kernel| &kernel.gates);
        let controls = || self.kernels.iter().flat_map(|kernel| &kernel.controls);
        let checked = |status| self.checks.iter().filter(|check| check.status == status).count();
        let with = |status| controls().filter(|control| control.status == status).count();
        self.summary = Summary {
            kernels: self.kernels.len(),
            passed: self.kernels.iter().filter(|kernel| kernel.passed()).count(),
            failed: self.kernels.iter().filter(|kernel| kernel.failed()).count(),
            known_findings: gates().filter(|gate| gate.status == Status::KnownFinding).count(),
            controls: controls().count(),
            red: with(Status::Red),
            missed: with(Status::Missed),
            skipped: with(Status::Skipped) + checked(Status::Skipped) + self.skips.len(),
            cases_left_out: gates().map(|gate| gate.cases_left_out).sum(),
            cases_cut: gates().map(|gate| gate.cases_cut).sum(),
            limit_problems: self.limit_problems.len(),
            clean: checked(Status::Pass),
            unclean: checked(Status::Fail),
            gates_ms: self.summary.gates_ms,
            limits_ms: self.summary.limits_ms,
        };
    }

    /// Whether everything holds, and something was asked.
    pub fn holds(&self) -> bool {
        let summary = &self.summary;
        let asked = summary.kernels > 0 && summary.controls > 0;
        let all_pass = summary.failed == 0 && summary.passed + self.kernels_with_known() == summary.kernels;
        let checked = summary.unclean == 0 && (self.checks.is_empty() || summary.clean > 0);
        asked && all_pass && checked && summary.missed == 0 && summary.limit_problems == 0 && self.complaints.is_empty()
    }

    fn kernels_with_known(&self) -> usize {
        let known = |kernel: &&KernelReport| kernel.gates.iter().any(|gate| gate.status == Status::KnownFinding);
        self.kernels.iter().filter(known).filter(|kernel| !kernel.failed()).count()
    }

    /// The last line of a run.
    pub fn summary_line(&self) -> String {
        let Summary { kernels, passed, failed, known_findings, controls, red, missed, .. } = self.summary;
        let Summary { cases_left_out, cases_cut, limit_problems, .. } = self.summary;
        // Beside the two there are controls that could not run, such as edits without a compiler.
        let skipped = match controls - red - missed {
            0 => String::new(),
            count => format!(", {count} skipped"),
        };
        // A device that is slow, or that has no numbers of some kind.
        let cases = match cases_left_out + cases_cut {
            0 => String::new(),
            _ => format!("; {cases_left_out} runs of a case left out, {cases_cut} with fewer rows"),
        };
        let checks = match self.checks.len() {
            0 => String::new(),
            count => {
                let Summary { clean, unclean, .. } = self.summary;
                format!("; {count} runs under checkers: {clean} clean, {unclean} with findings")
            }
        };
        format!(
            "kernel contract, {} ({}): SUMMARY {kernels} kernels: {passed} pass gates 1-4, {failed} fail, {known_findings} \
             known findings; {controls} controls: {red} red as planted, {missed} missed{skipped}{cases}; {limit_problems} limit \
             problems{checks}; gates {} ms, limits {} ms",
            self.command,
            if self.backend == "metal" { "Metal".to_owned() } else { self.backend.to_uppercase() },
            self.summary.gates_ms,
            self.summary.limits_ms,
        )
    }
}

/// The processor's name where the system says it.
pub fn machine_name() -> String {
    let listed = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = listed.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or(std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn report() -> Report {
        let gate = GateReport {
            gate: "value".into(),
            status: Status::Pass,
            cases: 1,
            cases_left_out: 0,
            cases_cut: 0,
            launches: 1,
            compared: 1,
            worst_share_of_bound: 0.5,
            worst: String::new(),
            failure: String::new(),
            replay: String::new(),
        };
        let control = ControlReport {
            name: "c".into(),
            gate: "value".into(),
            status: Status::Red,
            case: String::new(),
            text: String::new(),
        };
        let time = TimeReport {
            case: String::new(),
            threads: 1,
            microseconds: 1.0,
            bytes: 1,
            multiply_adds: 1,
            gigabytes_a_second: 1.0,
            share_of_read_ceiling: 1.0,
            giga_multiply_adds_a_second: 1.0,
        };
        let kernel = KernelReport {
            name: "k".into(),
            formula: "f".into(),
            gates: vec![gate],
            controls: vec![control],
            times: vec![time],
            milliseconds: 1,
        };
        let mut report = Report {
            schema: SCHEMA.into(),
            command: "tf-kernel-contract --only dsv41".to_owned(),
            backend: "cpu".into(),
            version: "0".into(),
            machine: Machine { name: String::new(), cores: 1, levels: vec!["scalar".to_owned()] },
            seeds: vec![1],
            kernels: vec![kernel],
            checks: Vec::new(),
            skips: vec![Skip { what: "w".to_owned(), reason: "r".to_owned() }],
            limit_problems: Vec::new(),
            complaints: Vec::new(),
            summary: Summary { gates_ms: 12, limits_ms: 3, ..Summary::default() },
        };
        report.count();
        report
    }

    fn check(status: Status) -> CheckReport {
        CheckReport { kernel: "k".into(), checker: "memcheck".into(), status, text: String::new(), milliseconds: 1 }
    }

    #[test]
    fn the_summary_counts_what_checkers_watched() {
        let mut report = report();
        report.checks = vec![check(Status::Pass), check(Status::Pass), check(Status::Skipped)];
        report.count();
        let line = report.summary_line();
        assert!(line.contains("; 0 limit problems; 3 runs under checkers: 2 clean, 0 with findings; gates"), "{line}");
        assert!(report.holds());
    }

    #[test]
    fn the_summary_has_the_written_form() {
        assert_eq!(
            report().summary_line(),
            "kernel contract, tf-kernel-contract --only dsv41 (CPU): SUMMARY 1 kernels: 1 pass gates 1-4, 0 fail, 0 known \
             findings; 1 controls: 1 red as planted, 0 missed; 0 limit problems; gates 12 ms, limits 3 ms"
        );
    }

    #[test]
    fn the_summary_says_how_many_controls_were_skipped() {
        let mut report = report();
        let mut skipped = report.kernels[0].controls[0].clone();
        skipped.status = Status::Skipped;
        report.kernels[0].controls.push(skipped);
        report.count();
        let line = report.summary_line();
        assert!(line.contains("; 2 controls: 1 red as planted, 0 missed, 1 skipped; 0 limit problems;"), "{line}");
    }

    #[test]
    fn the_summary_says_what_a_device_left_out_of_the_cases() {
        let mut report = report();
        report.kernels[0].gates[0].cases_left_out = 4;
        report.kernels[0].gates[0].cases_cut = 2;
        report.count();
        let line = report.summary_line();
        assert!(line.contains(", 0 missed; 4 runs of a case left out, 2 with fewer rows; 0 limit problems;"), "{line}");
    }

    #[test]
    fn anything_wrong_and_anything_missing_fails_the_run() {
        assert!(report().holds());
        type Change = fn(&mut Report);
        let cases: &[(&str, Change)] = &[
            ("a failed gate", |report| report.kernels[0].gates[0].status = Status::Fail),
            ("a missed control", |report| report.kernels[0].controls[0].status = Status::Missed),
            ("no controls", |report| report.kernels[0].controls.clear()),
            ("no kernels", |report| report.kernels.clear()),
            ("a limit problem", |report| report.limit_problems.push("p".to_owned())),
            ("a finding of a checker", |report| report.checks.push(check(Status::Fail))),
            ("no checker that runs", |report| report.checks.push(check(Status::Skipped))),
            ("a complaint", |report| report.complaints.push("c".to_owned())),
        ];
        for (what, change) in cases {
            let mut report = report();
            change(&mut report);
            report.count();
            assert!(!report.holds(), "{what}");
        }
    }

    /// Every field of the report is in the schema and every field of the schema in the report, level by level.
    fn same_fields(value: &Value, schema: &Value, path: &str) {
        match value {
            Value::Object(fields) => {
                let properties = schema["properties"].as_object().unwrap_or_else(|| panic!("{path} is no object"));
                let mut listed: Vec<_> = properties.keys().collect();
                let mut required: Vec<_> = schema["required"].as_array().unwrap().iter().collect();
                let mut found: Vec<_> = fields.keys().collect();
                listed.sort();
                found.sort();
                required.sort_by_key(|name| name.as_str());
                assert_eq!(found, listed, "{path}");
                assert_eq!(required.iter().map(|name| name.as_str().unwrap()).collect::<Vec<_>>(), found, "{path}");
                for (name, value) in fields {
                    same_fields(value, &properties[name], &format!("{path}/{name}"));
                }
            }
            Value::Array(items) => {
                assert_eq!(schema["type"], "array", "{path}");
                assert!(!items.is_empty() || path.ends_with("problems") || path.ends_with("complaints"), "{path}");
                items.iter().for_each(|item| same_fields(item, &schema["items"], path));
            }
            Value::String(_) => assert_eq!(schema["type"], "string", "{path}"),
            Value::Number(number) => {
                let whole = if number.is_f64() { "number" } else { "integer" };
                assert!(schema["type"] == whole || schema["type"] == "number", "{path}");
            }
            Value::Bool(_) => assert_eq!(schema["type"], "boolean", "{path}"),
            Value::Null => panic!("{path} is null"),
        }
    }

    #[test]
    fn the_published_schema_has_the_fields_of_the_report() {
        let schema: Value = serde_json::from_str(include_str!("../../../docs/reference/contract.schema.json")).unwrap();
        let report = Report { checks: vec![check(Status::Pass)], ..report() };
        same_fields(&serde_json::to_value(report).unwrap(), &schema, "");
        assert_eq!(schema["properties"]["schema"]["const"], SCHEMA);
    }
}
