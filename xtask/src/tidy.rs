//! The form of the tree, where a compiler can't see it: who may depend on whom, where `unsafe` and the environment may
//! appear, which functions may not be used on a path that decides bits, and words that have no place here.
//!
//! Each rule says which file and line broke it. Rules of size count and compare with the committed figures in
//! `xtask/tidy.toml`; only a rise fails.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::check::root;
use crate::form;

/// The arrows of ARCHITECTURE.md: crate folder -> crates of ours that it may use.
const ARROWS: &[(&str, &[&str])] = &[
    ("numerics", &[]),
    ("text", &[]),
    ("device", &["numerics"]),
    ("checkpoint", &["numerics"]),
    ("engine", &["text"]),
    ("kernels", &["device", "numerics"]),
    ("metal-emulator", &["device"]),
    ("contract", &["kernels", "device", "numerics", "metal-emulator"]),
    ("model", &["engine", "kernels", "checkpoint", "device", "numerics"]),
    ("server", &["engine", "text"]),
    ("bench", &[]),
    ("cli", &["server", "engine", "text", "model", "kernels", "checkpoint", "device", "numerics", "contract", "bench"]),
];

/// Most bytes of the tracked tree.
const TREE_BYTES_MAX: u64 = 40 << 20;

struct Findings(Vec<String>);

impl Findings {
    fn add(&mut self, path: &Path, line: usize, text: &str) {
        self.0.push(format!("{}:{line}: {text}", path.display()));
    }
}

fn tracked() -> Result<Vec<PathBuf>> {
    let out = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output().context("cannot start git")?;
    if !out.status.success() {
        bail!("git ls-files failed: tidy reads the tracked files, so it needs a git checkout");
    }
    let paths: Vec<PathBuf> = String::from_utf8(out.stdout)?
        .split('\0')
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
        .filter(|path| root().join(path).is_file())
        .collect();
    if paths.is_empty() {
        bail!("git ls-files names no file");
    }
    Ok(paths)
}

fn arrows(findings: &mut Findings) -> Result<()> {
    for (folder, allowed) in ARROWS {
        let path = PathBuf::from(format!("crates/{folder}/Cargo.toml"));
        let manifest: toml::Table = fs::read_to_string(root().join(&path))?.parse()?;
        let Some(dependencies) = manifest.get("dependencies").and_then(|value| value.as_table()) else { continue };
        for name in dependencies.keys().filter_map(|name| name.strip_prefix("tf-")) {
            if !allowed.contains(&name) {
                findings.add(&path, 1, &format!("{folder} may not depend on {name}; allowed: {allowed:?}"));
            }
        }
    }
    let listed: Vec<_> = ARROWS.iter().map(|(folder, _)| *folder).collect();
    for entry in fs::read_dir(root().join("crates"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !listed.contains(&name.as_str()) {
            findings.add(Path::new("crates"), 1, &format!("crate {name} has no row in the table of arrows"));
        }
    }
    Ok(())
}

/// Source text without what stands in test modules, comments and string literals, line by line.
fn code_lines(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("#[cfg(test)]") {
            break;
        }
        let mut code = String::new();
        let mut in_string = false;
        let mut characters = line.chars().peekable();
        while let Some(character) = characters.next() {
            match character {
                '\\' if in_string => {
                    characters.next();
                }
                '"' => in_string = !in_string,
                '/' if !in_string && characters.peek() == Some(&'/') => break,
                _ if !in_string => code.push(character),
                _ => {}
            }
        }
        lines.push(code);
    }
    lines
}

fn unsafe_allowed(path: &str) -> bool {
    let in_family =
        path.starts_with("crates/kernels/src/") && (path.ends_with("/cpu.rs") || path.ends_with("/launch.rs"));
    // The words stand in the task list's help text in `xtask/src/main.rs`.
    let places = [
        "crates/device/",
        // Metadata that kernels read as bytes.
        "crates/kernels/src/gpu.rs",
        "crates/metal-emulator/",
        "crates/numerics/src/lanes",
        "crates/numerics/tests/",
        "xtask/src/cubins.rs",
        "xtask/src/main.rs",
    ];
    in_family || places.iter().any(|place| path.starts_with(place))
}

/// Mapping a file and the platform's own calls need one audited line each.
const UNSAFE_LINES: &[(&str, &str)] =
    &[("crates/checkpoint/src/shards.rs", "Mmap::map"), ("crates/model/tests/allocations.rs", "GlobalAlloc")];

fn environment_allowed(path: &str) -> bool {
    path == "crates/cli/src/options.rs"
        || path.starts_with("xtask/")
        || path.contains("/tests/")
        // A build script is told where it is by its environment.
        || path.ends_with("/build.rs")
}

/// Paths on which a bit is decided: only the project's own transcendental functions there.
fn decides_bits(path: &str) -> bool {
    (path.starts_with("crates/numerics/src/")
        || path.starts_with("crates/kernels/src/")
        || path.starts_with("crates/model/src/"))
        && !["reference", "contract", "/tests", "testing"].iter().any(|part| path.contains(part))
}

const SYSTEM_MATH: &[&str] = &[
    ".exp()",
    ".exp2()",
    ".ln()",
    ".ln_1p()",
    ".log2()",
    ".log10()",
    ".powf(",
    ".powi(",
    ".sin()",
    ".cos()",
    ".tan()",
    ".tanh()",
    ".sin_cos()",
    ".exp_m1()",
];

/// Spelt in pieces, so that this file doesn't find itself.
fn words() -> Vec<(String, &'static str)> {
    let w = |parts: &[&str]| parts.concat();
    vec![
        (w(&["/wo", "rk/"]), "a path of somebody's machine"),
        (w(&["/ro", "ot/"]), "a path of somebody's machine"),
        (w(&["/ho", "me/"]), "a path of somebody's machine"),
        (w(&["TO", "DO"]), "unfinished work: finish it or describe the gap in the docs"),
        (w(&["FIX", "ME"]), "unfinished work: finish it or describe the gap in the docs"),
        (w(&["Co-Authored", "-By"]), "an attribution line"),
        (w(&["unimpl", "emented!("]), "unfinished work"),
    ]
}

fn is_text(path: &str) -> bool {
    let data = ["models/", "crates/model/tests/golden/", "crates/text/tests/golden/", "crates/kernels/tests/golden/"];
    !data.iter().any(|folder| path.starts_with(folder))
        && ["rs", "md", "toml", "cu", "cuh", "metal", "h", "sh", "yml", "html"]
            .iter()
            .any(|extension| path.ends_with(&format!(".{extension}")))
}

fn sources(findings: &mut Findings, sizes: &mut BTreeMap<String, i64>) -> Result<()> {
    let words = words();
    let mut bytes = 0;
    let mut read = 0;
    let tracked = tracked()?;
    let names: Vec<String> = tracked.iter().map(|path| path.to_string_lossy().into_owned()).collect();
    sizes.insert("unregistered_kernels".into(), form::unregistered_kernels(&names));
    for path in tracked {
        let name = path.to_string_lossy().into_owned();
        bytes += fs::metadata(root().join(&path))?.len();
        if !is_text(&name) || name == "LICENSE" {
            continue;
        }
        let text = fs::read_to_string(root().join(&path)).with_context(|| format!("{name} is not UTF-8"))?;
        read += 1;
        for (index, line) in text.lines().enumerate() {
            for (word, why) in &words {
                if line.contains(word.as_str()) {
                    findings.add(&path, index + 1, &format!("{word:?}: {why}"));
                }
            }
        }
        if !name.ends_with(".rs") {
            continue;
        }
        let code = code_lines(&text);
        for (index, line) in code.iter().enumerate() {
            let excused = UNSAFE_LINES.iter().any(|(file, _)| *file == name);
            let opens = line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
            if opens && !excused && !unsafe_allowed(&name) {
                findings.add(&path, index + 1, "unsafe outside device, lanes, a family's cpu.rs or launch.rs");
            }
            if (line.contains("env::var") || line.contains("env::vars")) && !environment_allowed(&name) {
                findings.add(&path, index + 1, "the environment is read in the options table only");
            }
            if decides_bits(&name) {
                for call in SYSTEM_MATH {
                    if line.contains(call) {
                        findings.add(&path, index + 1, &format!("{call} differs between system libraries"));
                    }
                }
            }
        }
        for (count, found) in form::counts(&text) {
            *sizes.entry(count.into()).or_default() += found;
        }
        let lines = text.lines().count() as i64;
        *sizes.entry("rust_files_over_900_lines".into()).or_default() += i64::from(lines > 900);
        *sizes.entry("lines_over_140_columns".into()).or_default() +=
            text.lines().filter(|line| line.chars().count() > 140).count() as i64;
    }
    if read == 0 {
        bail!("tidy read no source file");
    }
    if bytes > TREE_BYTES_MAX {
        findings.add(Path::new("."), 1, &format!("the tree has {bytes} bytes, at most {TREE_BYTES_MAX}"));
    }
    Ok(())
}

/// Fails only where a count rose, so that an old weakness doesn't block and a new one shows.
fn counts(findings: &mut Findings, found: &BTreeMap<String, i64>) -> Result<()> {
    let path = PathBuf::from("xtask/tidy.toml");
    let committed: toml::Table = fs::read_to_string(root().join(&path))?.parse()?;
    for (name, count) in found {
        let Some(most) = committed.get(name).and_then(toml::Value::as_integer) else {
            findings.add(&path, 1, &format!("{name} has no committed count"));
            continue;
        };
        if *count > most {
            findings.add(&path, 1, &format!("{name} rose from {most} to {count}"));
        } else if *count < most {
            eprintln!("tidy: {name} fell from {most} to {count}; lower it in {}", path.display());
        }
    }
    Ok(())
}

/// Reads the tree and lists what breaks a rule.
pub fn run() -> Result<()> {
    let mut findings = Findings(Vec::new());
    let mut sizes = BTreeMap::new();
    arrows(&mut findings)?;
    sources(&mut findings, &mut sizes)?;
    counts(&mut findings, &sizes)?;
    if fs::read_to_string(root().join("THIRD-PARTY.md")).unwrap_or_default() != crate::notices::page()? {
        findings.add(Path::new("THIRD-PARTY.md"), 1, "out of date: run cargo xtask notices");
    }
    if !findings.0.is_empty() {
        bail!("{}\n{} findings", findings.0.join("\n"), findings.0.len());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_seen_without_comments_strings_and_tests() {
        let text = "let a = 1; // unsafe\nlet b = \"unsafe // \\\" x\"; call();\n#[cfg(test)]\nunsafe {}";
        let lines = code_lines(text);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].trim(), "let a = 1;");
        assert!(lines[1].contains("call()"));
        assert!(!lines.concat().contains("unsafe"));
    }

    #[test]
    fn unsafe_has_its_places() {
        for (path, allowed) in [
            ("crates/device/src/cpu/pool.rs", true),
            ("crates/numerics/src/lanes/avx512.rs", true),
            ("crates/kernels/src/attention/cpu.rs", true),
            ("crates/kernels/src/attention/reference.rs", false),
            ("crates/engine/src/round.rs", false),
        ] {
            assert_eq!(unsafe_allowed(path), allowed, "{path}");
        }
    }

    #[test]
    fn an_arrow_points_at_a_crate_that_exists() {
        for (folder, allowed) in ARROWS {
            assert!(root().join("crates").join(folder).is_dir(), "{folder}");
            assert!(allowed.iter().all(|name| ARROWS.iter().any(|(other, _)| other == name)), "{folder}");
        }
    }
}
