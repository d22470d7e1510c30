//! A compiler that can build the standard library for another target: a rustup toolchain carries no sources of its own,
//! so a compiler and sources of one version come from Debian packages, unpacked below `target/` and never installed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::check::root;

/// A compiler, its library, and sources of the same version.
const PACKAGES: &[&str] = &["rustc-web", "libstd-rust-web-1.96", "libstd-rust-web-dev", "rust-web-src", "libllvm22"];

/// Whether a program is on the path.
pub fn on_path(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

/// Folder of everything that is unpacked or built for other targets.
pub fn folder() -> PathBuf {
    root().join("target/cross")
}

/// Writes an executable script.
pub fn script(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

fn unpack(sysroot: &Path) -> Result<()> {
    let sources_link = sysroot.join("usr/lib/rustlib/src/rust");
    if sysroot.join("usr/bin/rustc").is_file() && sources_link.join("library").exists() {
        return Ok(());
    }
    let packages = folder().join("packages");
    fs::create_dir_all(&packages)?;
    fs::create_dir_all(sysroot)?;
    let status = Command::new("apt-get").arg("download").args(PACKAGES).current_dir(&packages).status()?;
    if !status.success() {
        bail!("apt-get download {} failed: run apt-get update first", PACKAGES.join(" "));
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
    fs::create_dir_all(sources_link.parent().expect("the link has a parent"))?;
    if fs::symlink_metadata(&sources_link).is_ok() {
        fs::remove_file(&sources_link)?;
    }
    std::os::unix::fs::symlink(sources, sources_link)?;
    Ok(())
}

/// A `cargo` command that builds with that compiler: a wrapper, because it finds its libraries only through the
/// loader's path. In bash, because other shells drop variables whose names have a hyphen, as those of test programs do.
pub fn cargo(target: &str) -> Result<Command> {
    let sysroot = folder().join("sysroot");
    unpack(&sysroot)?;
    let rustc = folder().join("rustc");
    script(
        &rustc,
        &format!(
            "#!/bin/bash\nLD_LIBRARY_PATH={0}/usr/lib/x86_64-linux-gnu:{0}/usr/lib exec {0}/usr/bin/rustc --sysroot {0}/usr \"$@\"\n",
            sysroot.display()
        ),
    )?;
    let mut command = Command::new("cargo");
    command
        .env("RUSTC", &rustc)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_TARGET_DIR", folder().join(target))
        .current_dir(root());
    Ok(command)
}
