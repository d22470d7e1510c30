//! The program `tensorfold`: reads its arguments with the table of options and hands over to a command.

mod answer;
mod arguments;
mod bench;
mod build;
mod contract;
mod demo;
mod device;
mod disk;
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
mod output;
#[cfg(test)]
mod reference;
mod render;
mod resolve;
mod run;
mod selftest;
mod serve;
mod slice;
mod soak;

use std::process::ExitCode;

use arguments::{Arguments, Mistakes, Request};
use failure::{Failure, print};
use options::{Command, Environment};

fn main() -> ExitCode {
    let environment = Environment::of_process();
    let words = words(std::env::args_os().skip(1));
    let ended = match words.and_then(|words| arguments::parse(&words, &environment)) {
        Ok(Request::Help { command, long }) => print(&help::help(command, long)).map_err(Failure::from),
        Ok(Request::Version) => print(&format!("{}\n", build::text())).map_err(Failure::from),
        Ok(Request::Run(arguments)) => {
            let text: String = arguments.notes.iter().map(|note| format!("note: {note}\n")).collect();
            logs::say(&arguments, &text);
            let ended = run(&arguments, &environment);
            match ended {
                Err(failure) if logs::is_json(&arguments) => {
                    logs::start(&arguments);
                    failure.text.lines().for_each(|line| tracing::error!("{line}"));
                    Err(Failure { text: String::new(), ..failure })
                }
                ended => ended,
            }
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

/// The arguments as text. What isn't text would name another file than the one that was meant.
fn words(arguments: impl Iterator<Item = std::ffi::OsString>) -> Result<Vec<String>, Mistakes> {
    let (mut words, mut mistakes) = (Vec::new(), Vec::new());
    for (index, argument) in arguments.enumerate() {
        match argument.into_string() {
            Ok(word) => words.push(word),
            Err(argument) => mistakes.push(format!(
                "argument {} is no UTF-8 text: {}. Rename the file, or call it by another path",
                index + 1,
                argument.to_string_lossy()
            )),
        }
    }
    if mistakes.is_empty() { Ok(words) } else { Err(Mistakes(mistakes)) }
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

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn an_argument_that_is_no_text_is_refused_and_not_mangled() {
        let arguments = [OsString::from("info"), OsString::from_vec(b"/models/\xff".to_vec())];
        let error = words(arguments.into_iter()).unwrap_err().to_string();
        assert!(error.starts_with("argument 2 is no UTF-8 text"), "{error}");
        assert_eq!(words([OsString::from("info")].into_iter()).unwrap(), ["info"]);
    }
}
