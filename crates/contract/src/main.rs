//! `tf-kernel-contract`: the kernel contract as a program of its own.

use clap::Parser;
use std::process::ExitCode;

/// Proves the registered kernels on this machine.
#[derive(Parser)]
#[command(name = "tf-kernel-contract", version)]
struct Program {
    #[command(flatten)]
    options: tf_contract::Options,
}

fn main() -> ExitCode {
    tf_contract::run(&Program::parse().options)
}
