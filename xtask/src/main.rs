//! The project's own tasks: `cargo xtask TASK`. Knows how to run things; decides nothing about the product.

mod aarch64;
mod beside;
mod check;
mod cubins;
mod darwin;
mod form;
mod gpu;
mod notices;
mod ptx;
mod sysroot;
mod tidy;

use std::process::ExitCode;

const HELP: &str = "\
cargo xtask TASK

  check          everything that must hold: format, lints, tests, contract, form, licences
  tidy           form of the tree only: dependency arrows, unsafe, environment, words, sizes
  cubins [90a ..]  compiles the CUDA sources for every architecture, or these, without a GPU
  gpu FOLDER     checks and times everything on this machine's NVIDIA GPU into FOLDER (--binaries FOLDER: built elsewhere)
  notices        rewrites THIRD-PARTY.md
  gen            rewrites the generated pages in docs/reference
  aarch64        runs the number and kernel tests for 64-bit Arm under user-mode emulation (Debian, x86-64)
  darwin         links the program for 64-bit Apple targets (Debian, x86-64)
";

fn main() -> ExitCode {
    let task = std::env::args().nth(1).unwrap_or_default();
    let result = match task.as_str() {
        "check" => check::run(),
        "tidy" => tidy::run(),
        "cubins" => cubins::run(&std::env::args().skip(2).collect::<Vec<_>>()),
        "gpu" => gpu::run(&std::env::args().skip(2).collect::<Vec<_>>()),
        "gen" => check::generate(),
        "notices" => notices::run(),
        "aarch64" => aarch64::run(),
        "darwin" => darwin::run(),
        "" | "help" | "-h" | "--help" => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        other => {
            eprint!("unknown task {other:?}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
