//! Holds kernels that wait for the launch before them to it on every path.
//!
//! A launch behind such a kernel may start early and waits for this kernel alone. What this kernel did not wait for, nobody
//! has: so no thread may end before its wait, and none may write before it what the launch before still reads.

use std::collections::{HashMap, HashSet};

const WAIT: &str = "griddepcontrol.wait";

/// What goes wrong in which entry of a compiled source; entries without any wait are not asked.
pub fn problems(ptx: &str) -> Vec<String> {
    entries(ptx)
        .into_iter()
        .filter(|(_, body)| body.contains(WAIT))
        .filter_map(|(name, body)| Some(format!("{name} {}", first_problem(&body)?)))
        .collect()
}

/// Names and bodies.
fn entries(ptx: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    let mut depth = 0_usize;
    for line in ptx.lines() {
        let text = line.split("//").next().unwrap_or_default().trim();
        if let Some((_, rest)) = text.split_once(".entry ") {
            let name = rest.split(['(', ' ']).next().unwrap_or_default();
            found.push((name.to_owned(), String::new()));
        }
        if let Some((_, body)) = found.last_mut().filter(|_| depth > 0) {
            body.push_str(text);
            // A table of branches goes over several lines.
            body.push(if text.ends_with(',') || text.ends_with(".branchtargets") { ' ' } else { '\n' });
        }
        // Statements of the source in assembly have braces of their own.
        depth += text.matches('{').count();
        depth = depth.saturating_sub(text.matches('}').count());
    }
    found
}

/// The instructions of a body, where its labels stand, and the labels of its tables.
#[derive(Default)]
struct Code<'a> {
    instructions: Vec<&'a str>,
    /// Assembly of a source has labels of its own in every place where it stands.
    labels: HashMap<&'a str, Vec<usize>>,
    tables: HashMap<&'a str, Vec<&'a str>>,
}

impl<'a> Code<'a> {
    fn read(body: &'a str) -> Code<'a> {
        let mut code = Code::default();
        for line in body.lines() {
            let mut text = line;
            if let Some((label, rest)) = line.split_once(':').filter(|(label, _)| is_label(label)) {
                code.labels.entry(label).or_default().push(code.instructions.len());
                text = rest.trim();
                if let Some(targets) = text.strip_prefix(".branchtargets") {
                    let targets = targets.split([',', ';']).map(str::trim).filter(|target| !target.is_empty());
                    code.tables.insert(label, targets.collect());
                }
            }
            let is_instruction = text.starts_with(|first: char| first.is_ascii_lowercase() || first == '@');
            if is_instruction {
                code.instructions.push(text);
            }
        }
        code
    }

    /// The label's place nearest to `at`.
    fn place(&self, label: &str, at: usize) -> Option<usize> {
        self.labels.get(label)?.iter().copied().min_by_key(|place| place.abs_diff(at))
    }

    /// Where a branch at `at` may go; `None` for what is no branch, or one to somewhere unknown.
    fn targets(&self, operation: &str, at: usize) -> Option<Vec<usize>> {
        let last = operation.trim_end_matches(';').rsplit([' ', ',', '\t']).next()?;
        match operation.split(['.', ' ', '\t']).next()? {
            "bra" => Some(vec![self.place(last, at)?]),
            "brx" => self.tables.get(last)?.iter().map(|label| self.place(label, at)).collect(),
            _ => None,
        }
    }
}

fn is_label(text: &str) -> bool {
    text.chars().all(|part| part.is_ascii_alphanumeric() || "$_".contains(part)) && !text.is_empty()
}

/// Follows every path up to its wait.
fn first_problem(body: &str) -> Option<String> {
    let code = Code::read(body);
    let (mut seen, mut open) = (HashSet::new(), vec![0]);
    while let Some(at) = open.pop() {
        let Some(instruction) = code.instructions.get(at).filter(|_| seen.insert(at)) else { continue };
        let (is_conditional, operation) = match instruction.split_once(' ').filter(|(guard, _)| guard.starts_with('@'))
        {
            Some((_, operation)) => (true, operation.trim()),
            None => (false, *instruction),
        };
        if operation.starts_with(WAIT) {
            continue;
        }
        let is_end = ["ret", "exit"].iter().any(|end| operation.trim_end_matches(';') == *end);
        if is_end {
            return Some("has a path that ends before its wait".to_owned());
        }
        if writes_global(operation) {
            return Some(format!("writes before its wait: {operation}"));
        }
        let is_branch = operation.starts_with("bra") || operation.starts_with("brx");
        if is_branch {
            let Some(targets) = code.targets(operation, at) else {
                return Some(format!("has a branch that can't be followed: {operation}"));
            };
            open.extend(targets);
        }
        if !is_branch || is_conditional {
            open.push(at + 1);
        }
    }
    None
}

/// Whether other blocks and launches may see what it writes.
fn writes_global(operation: &str) -> bool {
    let mut parts = operation.split(['.', ' ', '\t']);
    let name = parts.next().unwrap_or_default();
    let writes = ["st", "atom", "red", "multimem"].contains(&name) || operation.starts_with("cp.reduce");
    writes && !parts.any(|part| part.starts_with("shared") || ["local", "param"].contains(&part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&str]) -> Vec<String> {
        problems(&format!(".visible .entry norm(\n\t.param .u64 x\n)\n{{\n\t{}\n}}\n", lines.join("\n\t")))
    }

    #[test]
    fn every_path_waits_before_it_ends_or_writes() {
        let wait = "griddepcontrol.wait;";
        let right: [&[&str]; 6] = [
            &[
                ".reg .b32 %r<4>;",
                "ld.global.u32 %r1, [%rd1];",
                "st.shared.u32 [%r2], %r1;",
                wait,
                "st.global.u32 [%rd1], %r1;",
                "ret;",
            ],
            &[
                "@%p1 bra $L__BB0_2;",
                wait,
                "bra.uni $L__BB0_3;",
                "$L__BB0_2:",
                wait,
                "$L__BB0_3:",
                "st.global.u32 [%rd1], %r1;",
                "ret;",
            ],
            &["$L__BB0_1:", "add.s32 %r1, %r1, 1;", "@%p1 bra $L__BB0_1;", wait, "ret;"],
            // Never launched early.
            &["st.global.u32 [%rd1], %r1;", "ret;"],
            &["red.shared::cta.add.u32 [%r1], 1;", wait, "ret;"],
            &[
                "// begin inline asm",
                "{",
                "mov.u32 %r1, {%r2, %r3};",
                "}",
                "bra.uni $L__BB0_1;",
                "$L__BB0_1:",
                wait,
                "ret;",
            ],
        ];
        for lines in right {
            assert_eq!(of(lines), [""; 0], "{lines:?}");
        }
        let wrong: [(&[&str], &str); 6] = [
            (&["@%p1 bra $L__BB0_2;", wait, "$L__BB0_2:", "ret;"], "ends before"),
            (&["@%p1 ret;", wait, "ret;"], "ends before"),
            (&["st.global.u32 [%rd1], %r1;", wait, "ret;"], "writes before its wait: st.global"),
            (&["st.u32 [%rd1], %r1;", wait, "ret;"], "writes before"),
            (&["atom.global.add.u32 %r1, [%rd1], 1;", wait, "ret;"], "writes before"),
            (&["@%p1 bra $L__BB0_9;", wait, "ret;"], "can't be followed"),
        ];
        for (lines, expected) in wrong {
            let found = of(lines);
            assert!(
                found.len() == 1 && found[0].starts_with("norm ") && found[0].contains(expected),
                "{lines:?}: {found:?}"
            );
        }
    }

    #[test]
    fn labels_of_assembly_in_a_source_are_those_nearest() {
        let again = ["{", "AGAIN:", "@!p bra AGAIN;", "}"];
        let wait = ["griddepcontrol.wait;"];
        let lines: Vec<&str> = [&again[..], &wait, &again, &["ret;"]].concat();
        assert_eq!(of(&lines), [""; 0]);
        let lines: Vec<&str> = [&again[..], &["@%p1 ret;"], &wait, &again, &["ret;"]].concat();
        assert_eq!(of(&lines).len(), 1);
    }

    #[test]
    fn tables_of_branches_are_followed() {
        let table = |third: &str| {
            let ptx = [
                "$L_brx_0: .branchtargets",
                "$L__BB0_1,",
                "$L__BB0_2;",
                "brx.idx %r1, $L_brx_0;",
                "$L__BB0_1:",
                "griddepcontrol.wait;",
                "ret;",
                "$L__BB0_2:",
                third,
                "ret;",
            ];
            of(&ptx)
        };
        assert_eq!(table("griddepcontrol.wait;"), [""; 0]);
        assert_eq!(table("add.s32 %r1, %r1, 1;").len(), 1);
    }
}
