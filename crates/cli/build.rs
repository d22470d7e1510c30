//! Tells the program which commit it was built from, and from which sources its numbers come.

use std::hash::{DefaultHasher, Hasher};
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The log of HEAD changes with every commit and checkout.
    if Path::new("../../.git/logs/HEAD").exists() {
        println!("cargo::rerun-if-changed=../../.git/logs/HEAD");
    }
    let given = option_env!("TENSORFOLD_COMMIT").map(str::to_owned);
    let commit = given.or_else(of_checkout).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=TF_BUILD_COMMIT={commit}");

    // A commit doesn't name what was edited since, and what is kept on disk must not outlive a changed kernel.
    let mut sources = DefaultHasher::new();
    for folder in NUMERIC_SOURCES {
        println!("cargo::rerun-if-changed={folder}");
        add(Path::new(folder), &mut sources);
    }
    println!("cargo::rustc-env=TF_BUILD_SOURCES={:016x}", sources.finish());
}

/// Everything that decides a bit of a kept state.
const NUMERIC_SOURCES: [&str; 4] = ["../numerics/src", "../device/src", "../kernels/src", "../model/src"];

/// Adds names and contents of all files below `path`, in the order of their names.
fn add(path: &Path, sources: &mut DefaultHasher) {
    let Ok(listed) = std::fs::read_dir(path) else {
        sources.write(&std::fs::read(path).unwrap_or_default());
        return;
    };
    let mut paths: Vec<_> = listed.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    paths.sort();
    for path in paths {
        sources.write(path.as_os_str().as_encoded_bytes());
        add(&path, sources);
    }
}

/// The commit of the checkout, if this is one.
fn of_checkout() -> Option<String> {
    let output = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}
