//! `contract`: the kernel contract on this machine, the same run as the program `tf-kernel-contract`.

use tf_contract::{Backend, Options};

use crate::arguments::Arguments;
use crate::failure::Failure;

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let options = Options {
        program: "tensorfold contract",
        backend: match arguments.text("backend") {
            Some("cuda") => Backend::Cuda,
            Some("metal") => Backend::Metal,
            // What this program runs on where nobody says is proved by `selftest`.
            _ => Backend::Cpu,
        },
        only: arguments.text("only").unwrap_or(tf_contract::run::ALL).to_owned(),
        list: arguments.is_on("list"),
        json: arguments.text("json").map(Into::into),
        replay: arguments.text("replay").map(str::to_owned),
        time: arguments.is_on("time"),
        checkers: arguments.is_on("checkers"),
        edits: arguments.text("edits").map(Into::into),
        compile_edits: arguments.text("compile-edits").map(str::to_owned),
        launch_only: arguments.is_on("launch-only"),
        seeds: arguments.count("seeds").unwrap_or(0) as usize,
    };
    match tf_contract::execute(&options) {
        0 => Ok(()),
        // What went wrong has been said, line by line.
        code => Err(Failure { code, text: String::new() }),
    }
}
