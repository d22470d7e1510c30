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
    let Some(planted) = Planted::of(control) else { return edit(control) };
    let mut last = "no case".to_owned();
    for case in smallest_first(cases) {
        let world = (contract.make)(case, seed);
        let mut probe = Probe { world: &*world, queues, planted, row_count: case.rows, tally: Default::default() };
        match check(control.gate, &mut probe) {
            Err(Failure::Red(text)) => return Verdict::Red { case: case.name, text },
            Err(Failure::Broken(text)) => last = format!("case {}: {text}", case.name),
            Ok(()) => last = format!("gate {} passed in case {}", control.gate.name(), case.name),
        }
    }
    Verdict::Missed(last)
}

fn smallest_first(cases: &[Case]) -> Vec<&Case> {
    let mut cases: Vec<&Case> = cases.iter().collect();
    cases.sort_by_key(|case| case.rows * case.sizes.iter().map(|(_, size)| *size).max().unwrap_or(1));
    cases
}

/// An edited source is built by its own backend; here only its place is checked.
fn edit(control: &Control) -> Verdict {
    let Plant::Edit { source, find, replace } = control.plant else {
        return Verdict::Missed("it is planted nowhere".to_owned());
    };
    match apply_edit(source, find, replace) {
        Ok(_) => Verdict::Skipped("edits of source text run on their own backend".to_owned()),
        Err(text) => Verdict::Missed(text),
    }
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
            plant: Plant::Edit { source: "a b b", find, replace: "" },
        };
        assert!(matches!(edit(&control("a")), Verdict::Skipped(_)));
        assert!(matches!(edit(&control("b")), Verdict::Missed(_)));
        assert!(matches!(edit(&control("gone")), Verdict::Missed(_)));
    }
}
