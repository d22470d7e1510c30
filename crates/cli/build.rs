//! Tells the program which commit it was built from.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The log of HEAD changes with every commit and checkout.
    if std::path::Path::new("../../.git/logs/HEAD").exists() {
        println!("cargo::rerun-if-changed=../../.git/logs/HEAD");
    }
    let given = option_env!("TENSORFOLD_COMMIT").map(str::to_owned);
    let commit = given.or_else(of_checkout).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=TF_BUILD_COMMIT={commit}");
}

/// The commit of the checkout, if this is one.
fn of_checkout() -> Option<String> {
    let output = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}
