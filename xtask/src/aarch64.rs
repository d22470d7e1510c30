//! Gives the NEON bodies a real run on an x86-64 machine: the number and kernel tests built for 64-bit Arm Linux and
//! executed under user-mode emulation.
//!
//! A stable toolchain from rustup carries no standard library for another target, so a compiler and the standard
//! library's sources of one version come from Debian packages, unpacked below `target/` and never installed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::check::root;

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// A compiler, its library, and sources of the same version; then what links and runs the result.
const UNPACKED: &[&str] = &["rustc-web", "libstd-rust-web-1.96", "libstd-rust-web-dev", "rust-web-src", "libllvm22"];
const CRATES: &[&str] = &["tf-numerics", "tf-kernels"];

fn folder() -> PathBuf {
    root().join("target/aarch64")
}

/// Why the run can't happen here, with the command that mends it.
pub fn missing() -> Option<String> {
    for (tool, package) in [
        ("apt-get", "a Debian system"),
        ("qemu-aarch64-static", "apt-get install qemu-user-static"),
        ("aarch64-linux-gnu-gcc", "apt-get install gcc-aarch64-linux-gnu"),
    ] {
        let found = std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(tool).is_file()));
        if !found {
            return Some(format!("{tool} is missing: {package}"));
        }
    }
    None
}

fn unpack(sysroot: &Path) -> Result<()> {
    if sysroot.join("usr/bin/rustc").is_file() && sysroot.join("usr/lib/rustlib/src/rust/library").exists() {
        return Ok(());
    }
    let packages = folder().join("packages");
    fs::create_dir_all(&packages)?;
    fs::create_dir_all(sysroot)?;
    let status = Command::new("apt-get").arg("download").args(UNPACKED).current_dir(&packages).status()?;
    if !status.success() {
        bail!("apt-get download {} failed: run apt-get update first", UNPACKED.join(" "));
    }
    for entry in fs::read_dir(&packages)? {
        let path = entry?.path();
        let status = Command::new("dpkg").arg("-x").arg(&path).arg(sysroot).status()?;
        if !status.success() {
            bail!("dpkg could not unpack {}", path.display());
        }
    }
    let sources = fs::read_dir(sysroot.join("usr/src"))?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.join("library").is_dir())
        .context("rust-web-src holds no library folder")?;
    let link = sysroot.join("usr/lib/rustlib/src/rust");
    fs::create_dir_all(link.parent().expect("the link has a parent"))?;
    if fs::symlink_metadata(&link).is_ok() {
        fs::remove_file(&link)?;
    }
    std::os::unix::fs::symlink(sources, link)?;
    Ok(())
}

/// A wrapper, because the unpacked compiler finds its own libraries only through the loader's path.
fn wrapper(sysroot: &Path) -> Result<PathBuf> {
    let path = folder().join("rustc");
    let text = format!(
        "#!/bin/sh\nLD_LIBRARY_PATH={0}/usr/lib/x86_64-linux-gnu:{0}/usr/lib exec {0}/usr/bin/rustc --sysroot {0}/usr \"$@\"\n",
        sysroot.display()
    );
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// Builds and runs the tests.
pub fn run() -> Result<()> {
    if let Some(reason) = missing() {
        bail!("{reason}");
    }
    let sysroot = folder().join("sysroot");
    unpack(&sysroot)?;
    let rustc = wrapper(&sysroot)?;
    let mut command = Command::new("cargo");
    command.args(["test", "--release", "-Zbuild-std=std,panic_unwind,test", "--target", TARGET]);
    for name in CRATES {
        command.args(["-p", name]);
    }
    command
        .args(["--lib", "--target-dir"])
        .arg(folder().join("build"))
        .env("RUSTC", &rustc)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc")
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", "qemu-aarch64-static -L /usr/aarch64-linux-gnu")
        .current_dir(root());
    let status = command.status()?;
    if !status.success() {
        bail!("the tests failed on 64-bit Arm ({status})");
    }
    Ok(())
}
