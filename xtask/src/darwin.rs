//! Type-checks the workspace, tests included, for Apple's 64-bit target and links the program to a Mach-O on Linux, with
//! packages from the registries alone: no SDK, no Mac. It says that the host code compiles and links; it has not run on
//! Apple hardware.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::sysroot;

const TARGET: &str = "aarch64-apple-darwin";
const ZIG: &str = "ziglang==0.17.1";

/// Library below the stub folder, its install name, and the symbols that the program uses from it.
const STUBS: &[(&str, &str, &str)] = &[
    (
        "Metal.framework/Metal.tbd",
        "/System/Library/Frameworks/Metal.framework/Versions/A/Metal",
        "_MTLCreateSystemDefaultDevice, _MTLCopyAllDevices",
    ),
    (
        "Foundation.framework/Foundation.tbd",
        "/System/Library/Frameworks/Foundation.framework/Versions/C/Foundation",
        "_unused_foundation",
    ),
    (
        "CoreFoundation.framework/CoreFoundation.tbd",
        "/System/Library/Frameworks/CoreFoundation.framework/Versions/A/CoreFoundation",
        "_unused_core_foundation",
    ),
    ("libiconv.tbd", "/usr/lib/libiconv.2.dylib", "_iconv"),
    (
        "libobjc.tbd",
        "/usr/lib/libobjc.A.dylib",
        "_class_getName, _class_isMetaClass, _objc_alloc, _objc_autoreleasePoolPop, _objc_autoreleasePoolPush, \
         _objc_getClass, _objc_msgSend, _objc_release, _objc_retain, _objc_retainAutoreleasedReturnValue, \
         _object_getClass, _sel_getName, _sel_registerName",
    ),
];

/// Why the run can't happen here, with the command that mends it.
pub fn missing() -> Option<String> {
    [("apt-get", "a Debian system"), ("python3", "python3 with pip and venv fetches the linker")]
        .into_iter()
        .find(|(tool, _)| !sysroot::on_path(tool))
        .map(|(tool, remedy)| format!("{tool} is missing: {remedy}"))
}

fn linker() -> Result<std::path::PathBuf> {
    let folder = sysroot::folder();
    fs::create_dir_all(&folder)?;
    let zig = folder.join("zig");
    if !zig.join("ziglang").is_dir() {
        let status = Command::new("python3")
            .args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"])
            .arg(&zig)
            .arg(ZIG)
            .status()
            .context("python3 -m pip is used as the download client for the linker")?;
        if !status.success() {
            bail!("pip could not fetch {ZIG}");
        }
    }
    let stubs = folder.join("apple");
    for (file, install_name, symbols) in STUBS {
        let path = stubs.join(file);
        fs::create_dir_all(path.parent().expect("a stub has a folder"))?;
        fs::write(
            path,
            format!(
                "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: '{install_name}'\nexports:\n  \
                 - targets: [ arm64-macos ]\n    symbols: [ {symbols} ]\n...\n"
            ),
        )?;
    }
    let linker = folder.join("apple-linker");
    sysroot::script(
        &linker,
        &format!(
            "#!/bin/bash\nargs=(); for a in \"$@\"; do case \"$a\" in -arch|arm64|-mmacosx-version-min=*) ;; *) args+=(\"$a\");; esac; done\n\
             PYTHONPATH={0} exec python3 -m ziglang cc -target aarch64-macos.13.0 -F{1} -L{1} \"${{args[@]}}\"\n",
            zig.display(),
            stubs.display()
        ),
    )?;
    Ok(linker)
}

/// What of the standard library is built: tests need a crate of their own.
const STD: &str = "-Zbuild-std=std,panic_abort,test";

/// Type-checks every crate of the workspace with its tests, then links the program.
pub fn run() -> Result<()> {
    if let Some(reason) = missing() {
        bail!("{reason}");
    }
    let mut check = sysroot::cargo(TARGET)?;
    check.args(["check", "--release", "--locked", "--workspace", "--all-targets", STD, "--target", TARGET]);
    check.env("RUSTFLAGS", "-Dwarnings");
    if !check.status()?.success() {
        bail!("the workspace does not type-check for {TARGET}");
    }
    let linker = linker()?;
    let mut command = sysroot::cargo(TARGET)?;
    command
        .args(["build", "--release", STD, "--target", TARGET, "-p", "tensorfold"])
        .env("CARGO_PROFILE_RELEASE_STRIP", "none")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
        .env("CARGO_PROFILE_RELEASE_SPLIT_DEBUGINFO", "off")
        .env("CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER", linker);
    if !command.status()?.success() {
        bail!("the program does not build for {TARGET}");
    }
    let program = sysroot::folder().join(TARGET).join(TARGET).join("release/tensorfold");
    let head = fs::read(&program).with_context(|| format!("{}", program.display()))?;
    // 64-bit Mach-O, little-endian, processor type arm64.
    if head.get(..8) != Some(&[0xcf, 0xfa, 0xed, 0xfe, 0x0c, 0x00, 0x00, 0x01]) {
        bail!("{} is no 64-bit Arm Mach-O", program.display());
    }
    // The driver's own words: a program without them was linked without the driver.
    const DRIVER: &[u8] = b"it gives no command queue";
    if !head.windows(DRIVER.len()).any(|window| window == DRIVER) {
        bail!("{} has no Metal driver in it", program.display());
    }
    println!("linked a 64-bit Arm Mach-O of {} bytes with the Metal driver; not run on Apple hardware", head.len());
    Ok(())
}
