//! Counts of form over a source text: functions that are too long, comments that tell history, public items without docs.
//!
//! They are approximations that need no parser; `tidy` compares them with committed figures and fails only on a rise.

/// Most lines of a function's body.
const FUNCTION_LINES_MAX: usize = 70;

/// What a comment about the present has no use for.
const HISTORY: &[&str] =
    &["no longer", "previously", "used to be", "was changed", "formerly", "in the past", "old version"];

/// Units behind a number that say: somebody measured.
const MEASURED: &[&str] =
    &[" ms", " us", " ns", " GB/s", " MB/s", " tok/s", " tokens/s", "x faster", "x slower", " % faster"];

/// Counts of one Rust file, by name.
pub fn counts(text: &str) -> [(&'static str, i64); 3] {
    [
        ("functions_over_70_lines", long_functions(text)),
        ("comments_that_tell_history", text.lines().filter(|line| tells_history(line)).count() as i64),
        ("public_items_without_docs", undocumented(text)),
    ]
}

fn is_function(line: &str) -> bool {
    let line = line.trim_start();
    let line = line
        .strip_prefix("pub ")
        .or(line.strip_prefix("pub(crate) "))
        .or(line.strip_prefix("pub(super) "))
        .unwrap_or(line);
    let line = ["const ", "unsafe ", "async "].iter().fold(line, |line, word| line.strip_prefix(word).unwrap_or(line));
    line.starts_with("fn ")
}

/// A function ends at the closing brace of its own indentation, as the formatter writes it.
fn long_functions(text: &str) -> i64 {
    let lines: Vec<&str> = text.lines().collect();
    let mut count = 0;
    for (start, line) in lines.iter().enumerate().filter(|(_, line)| is_function(line)) {
        let indent = line.len() - line.trim_start().len();
        let closes = |line: &&str| line.len() == indent + 1 && line.ends_with('}') && line.trim_start() == "}";
        let ends_at_once = line.ends_with('}') || line.ends_with(';');
        let length = lines[start..].iter().position(closes).unwrap_or(0);
        count += i64::from(!ends_at_once && length > FUNCTION_LINES_MAX);
    }
    count
}

fn tells_history(line: &str) -> bool {
    let Some((_, comment)) = line.split_once("//") else { return false };
    if comment.starts_with(['/', '!']) && !comment.contains("measured") {
        // Doc comments name units of what they describe.
        return HISTORY.iter().any(|word| comment.contains(word));
    }
    let measured = MEASURED
        .iter()
        .any(|unit| comment.match_indices(unit).any(|(at, _)| comment[..at].ends_with(|c: char| c.is_ascii_digit())));
    measured || HISTORY.iter().any(|word| comment.contains(word))
}

fn undocumented(text: &str) -> i64 {
    let mut documented = false;
    let mut count = 0;
    for line in text.lines().map(str::trim_start) {
        if line.starts_with("#[cfg(test)]") {
            break;
        }
        if line.starts_with("///") {
            documented = true;
        } else if !line.starts_with("#[") && !line.starts_with(")]") {
            let public = ["pub fn ", "pub const fn ", "pub unsafe fn ", "pub struct ", "pub enum ", "pub trait "];
            count += i64::from(!documented && public.iter().any(|word| line.starts_with(word)));
            documented = false;
        }
    }
    count
}

/// Families of the kernel crate that launch something and have no contract.
pub fn unregistered_kernels(paths: &[String]) -> i64 {
    let families = paths.iter().filter_map(|path| path.strip_prefix("crates/kernels/src/")?.strip_suffix("/launch.rs"));
    families.filter(|family| !paths.contains(&format!("crates/kernels/src/{family}/contract.rs"))).count() as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_function_is_counted_once() {
        let body =
            |lines: usize| format!("impl A {{\n    pub fn f() {{\n{}    }}\n}}\n", "        x();\n".repeat(lines));
        assert_eq!(long_functions(&body(70)), 1);
        assert_eq!(long_functions(&body(69)), 0);
        assert_eq!(long_functions("fn f() {}\nfn g();\n"), 0);
    }

    #[test]
    fn comments_are_about_the_present() {
        for (line, history) in [
            ("// The window keeps one extra row.", false),
            ("let a = 1; // this was 3 ms before", true),
            ("// no longer needed", true),
            ("/// Time out after 5 ms.", false),
            ("let url = \"x\"; // 3 rows", false),
        ] {
            assert_eq!(tells_history(line), history, "{line}");
        }
    }

    #[test]
    fn a_public_item_wants_a_line_of_docs() {
        assert_eq!(undocumented("/// Doc.\n#[derive(Debug)]\npub struct A;\npub fn f() {}\nfn g() {}\n"), 1);
        assert_eq!(undocumented("#[cfg(test)]\npub fn f() {}\n"), 0);
    }

    #[test]
    fn a_family_that_launches_has_a_contract() {
        let paths =
            |names: &[&str]| names.iter().map(|name| format!("crates/kernels/src/{name}.rs")).collect::<Vec<_>>();
        assert_eq!(unregistered_kernels(&paths(&["a/launch", "a/contract", "b/cpu"])), 0);
        assert_eq!(unregistered_kernels(&paths(&["a/launch", "b/contract"])), 1);
    }
}
