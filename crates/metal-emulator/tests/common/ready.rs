//! For every test program that runs kernels on the emulator.

use tf_metal_emulator::{COMPILER, INSTALL, compiler_found};

/// Whether kernels can be built. Without the compiler a test skips, with its reason; in CI it fails.
pub fn ready(test: &str) -> bool {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        eprintln!("SKIPPED 1 test: {test}: the emulator runs on x86-64 Linux only");
        return false;
    }
    if compiler_found() {
        return true;
    }
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{COMPILER} is missing; {INSTALL}");
    eprintln!("SKIPPED 1 test: {test}: {COMPILER} is missing; {INSTALL}");
    false
}
