//! The program `tensorfold`: reads its arguments with the table of options and hands over to a command.

mod answer;
mod arguments;
mod bench;
mod build;
mod contract;
mod demo;
mod evaluate;
mod failure;
mod help;
mod info;
mod inspect;
mod load;
mod locate;
mod logits;
mod logs;
mod machine;
mod measure;
mod models;
mod options;
#[cfg(test)]
mod reference;
mod render;
mod resolve;
mod run;
mod selftest;
mod serve;
mod soak;

use std::process::ExitCode;

use arguments::{Arguments, Request};
use failure::{Failure, print};
use options::{Command, Environment};

fn main() -> ExitCode {
    let environment = Environment::of_process();
    let words: Vec<String> = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let ended = match arguments::parse(&words, &environment) {
        Ok(Request::Help { command, long }) => print(&help::help(command, long)).map_err(Failure::from),
        Ok(Request::Version) => print(&format!("{}\n", build::text())).map_err(Failure::from),
        Ok(Request::Run(arguments)) => {
            for note in &arguments.notes {
                eprintln!("note: {note}");
            }
            run(&arguments, &environment)
        }
        Err(mistakes) => Err(mistakes.into()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            for line in failure.text.lines() {
                eprintln!("error: {line}");
            }
            ExitCode::from(failure.code)
        }
    }
}

fn run(arguments: &Arguments, environment: &Environment) -> Result<(), Failure> {
    match arguments.command {
        Command::Models => models::run(arguments, environment),
        Command::Info => info::run(arguments, environment),
        Command::Render => render::run(arguments, environment),
        Command::Pull => {
            Err(not_built(arguments.command, "fetch the model with another hub client; its cache is read"))
        }
        Command::Serve => serve::run(arguments, environment),
        Command::Run => run::run(arguments, environment),
        Command::Selftest => selftest::run(arguments, environment),
        Command::Bench => bench::run(arguments, environment),
        Command::Logits => logits::run(arguments, environment),
        Command::Contract => contract::run(arguments),
    }
}

fn not_built(command: Command, instead: &str) -> Failure {
    Failure::run_time(format!("{} is not built yet: {instead}", command.name()))
}
