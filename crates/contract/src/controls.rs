//! Planted defects: each must turn its gate red, in the case where it does so first.

use crate::probe::{Failure, Planted, Probe, Queues, check};
use tf_kernels::contract::{Case, Contract, Control, Gate, Plant};

/// What came of one control.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Its gate caught it, in this case and by these words.
    Red { case: &'static str, text: String },
    /// Its gate passed everywhere, or the launch broke before the gate could answer.
    Missed(String),
    /// It is no control of this backend.
    Skipped(String),
}

/// Runs a control on the cases of its kernel until its gate is red.
pub fn run(contract: &Contract, control: &Control, seed: u64, queues: &mut Queues) -> Verdict {
    run_on(contract, contract.cases, control, seed, queues)
}

/// As [`run`], on chosen cases.
pub fn run_on(contract: &Contract, cases: &[Case], control: &Control, seed: u64, queues: &mut Queues) -> Verdict {
    if let Plant::Edit { source, find, replace, .. } = control.plant {
        let text = match apply_edit(source, find, replace) {
            Ok(text) => text,
            Err(text) => return Verdict::Missed(text),
        };
        if !queues.target.runs(control) {
            return Verdict::Skipped("edits of source text run on their own backend".to_owned());
        }
        if let Err(reason) = queues.target.can_edit() {
            return Verdict::Skipped(reason);
        }
        return match queues.target.edited(source, text) {
            Ok(target) => search(contract, cases, control, Planted::NONE, seed, &mut Queues::new(target)),
            Err(text) => Verdict::Missed(text),
        };
    }
    if let Plant::Simdgroups(count) = control.plant {
        return match queues.target.crowded(count) {
            Ok(target) => search(contract, cases, control, Planted::NONE, seed, &mut Queues::new(target)),
            Err(text) => Verdict::Skipped(text),
        };
    }
    let Some(planted) = Planted::of(control) else { return Verdict::Missed("it is planted nowhere".to_owned()) };
    search(contract, cases, control, planted, seed, queues)
}

/// Runs the gate on case after case until it is red.
fn search(
    contract: &Contract,
    cases: &[Case],
    control: &Control,
    planted: Planted,
    seed: u64,
    queues: &mut Queues,
) -> Verdict {
    let mut last = "no case".to_owned();
    let target = queues.target.clone();
    // Fewer rows first, where a slow device has its own number.
    let few = smallest_first(cases).into_iter().map(|case| (case, target.rows(case)));
    let all = smallest_first(cases).into_iter().map(|case| (case, case.rows));
    for (case, row_count) in few.chain(all.filter(|(case, _)| case.rows > target.rows(case))) {
        let world = (contract.make)(case, seed);
        let mut probe =
            Probe { kernel: contract.name, world: &*world, queues, planted, row_count, tally: Default::default() };
        match check(control.gate, &mut probe) {
            Err(Failure::Red(text)) => return Verdict::Red { case: case.name, text },
            // A device that watches its launches says what is wrong before the gate can compare.
            Err(Failure::Broken(text)) if is_edit(control) && target.is_defect(&text) => {
                return Verdict::Red { case: case.name, text };
            }
            Err(Failure::Broken(text)) => last = format!("case {}: {text}", case.name),
            Ok(()) => last = format!("gate {} passed in case {}", control.gate.name(), case.name),
        }
    }
    Verdict::Missed(last)
}

fn is_edit(control: &Control) -> bool {
    matches!(control.plant, Plant::Edit { .. })
}

/// The cases of a kernel as its controls try them.
pub fn smallest_first(cases: &[Case]) -> Vec<&Case> {
    let mut cases: Vec<&Case> = cases.iter().collect();
    cases.sort_by_key(|case| case.rows * case.sizes.iter().map(|(_, size)| *size).max().unwrap_or(1));
    cases
}

/// The source with its one occurrence of `find` replaced.
///
/// # Errors
/// When `find` does not occur exactly once: the source was rewritten, and the control must follow.
pub fn apply_edit(source: &str, find: &str, replace: &str) -> Result<String, String> {
    match source.matches(find).count() {
        1 => Ok(source.replacen(find, replace, 1)),
        count => Err(format!("the search text {find:?} occurs {count} times in the source, and must occur once")),
    }
}

/// What is wrong with a kernel's controls before any runs.
pub fn complaints(contract: &Contract) -> Vec<String> {
    let mut complaints = Vec::new();
    if contract.controls.len() < 2 {
        complaints.push(format!(
            "{} plants {} controls of its own, and needs two",
            contract.name,
            contract.controls.len()
        ));
    }
    for gate in Gate::ALL {
        if !contract.all_controls().any(|control| control.gate == gate) {
            complaints.push(format!("{} has no control for gate {}", contract.name, gate.name()));
        }
    }
    for control in contract.edits {
        if let Plant::Edit { source, find, replace, .. } = control.plant
            && let Err(text) = apply_edit(source, find, replace)
        {
            complaints.push(format!("{}, control {:?}: {text}", contract.name, control.name));
        }
    }
    let mut names: Vec<&str> = contract.all_controls().map(|control| control.name).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        complaints.push(format!("{} has two controls called {:?}", contract.name, pair[0]));
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_text_must_occur_exactly_once() {
        let source = "for (c = 0; c < cols; ++c) sum += x[c];";
        assert_eq!(
            apply_edit(source, "c < cols", "c < cols - 1").unwrap(),
            "for (c = 0; c < cols - 1; ++c) sum += x[c];"
        );
        for (find, count) in [("rows", "0 times"), ("c", "5 times")] {
            assert!(apply_edit(source, find, "").unwrap_err().contains(count), "{find}");
        }
        let control = |find| Control {
            name: "edit",
            gate: Gate::Value,
            plant: Plant::Edit { backend: tf_device::gpu::Backend::Metal, source: "a b b", find, replace: "" },
        };
        let contract = &tf_kernels::families::CONTRACTS[0];
        let verdict = |find| run_on(contract, contract.cases, &control(find), 1, &mut Queues::default());
        assert!(matches!(verdict("a"), Verdict::Skipped(_)));
        assert!(matches!(verdict("b"), Verdict::Missed(_)));
        assert!(matches!(verdict("gone"), Verdict::Missed(_)));
    }
}
