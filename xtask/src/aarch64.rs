//! Gives the NEON bodies a real run on an x86-64 machine: the number and kernel tests built for 64-bit Arm Linux and
//! executed under user-mode emulation.

use anyhow::{Result, bail};

use crate::sysroot;

const TARGET: &str = "aarch64-unknown-linux-gnu";
const CRATES: &[&str] = &["tf-numerics", "tf-kernels"];

/// Why the run can't happen here, with the command that mends it.
pub fn missing() -> Option<String> {
    [
        ("apt-get", "a Debian system"),
        ("qemu-aarch64-static", "apt-get install qemu-user-static"),
        ("aarch64-linux-gnu-gcc", "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
    ]
    .into_iter()
    .find(|(tool, _)| !sysroot::on_path(tool))
    .map(|(tool, remedy)| format!("{tool} is missing: {remedy}"))
}

/// Builds and runs the tests.
pub fn run() -> Result<()> {
    if let Some(reason) = missing() {
        bail!("{reason}");
    }
    let mut command = sysroot::cargo(TARGET)?;
    command.args(["test", "--release", "--lib", "-Zbuild-std=std,panic_unwind,test", "--target", TARGET]);
    for name in CRATES {
        command.args(["-p", name]);
    }
    command
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc")
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", "qemu-aarch64-static -L /usr/aarch64-linux-gnu");
    let status = command.status()?;
    if !status.success() {
        bail!("the tests failed on 64-bit Arm ({status})");
    }
    Ok(())
}
