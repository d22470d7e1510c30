//! Log lines on stderr, as `--log-level` and `--log-format` say.

use std::io::IsTerminal;

use tracing_subscriber::filter::LevelFilter;

use crate::arguments::Arguments;
use crate::options::{Command, Environment};

/// Starts the log; a second start changes nothing.
pub fn start(arguments: &Arguments) {
    let given = arguments.text("log-level").filter(|_| arguments.is_given("log-level"));
    // A measurement's own requests are no news.
    let default = if arguments.command == Command::Bench { LevelFilter::WARN } else { LevelFilter::INFO };
    let level = given.and_then(|level| level.parse().ok()).unwrap_or(default);
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level).with_target(false);
    // The other start's settings hold then.
    let _ = match arguments.text("log-format") {
        Some("json") => lines.json().try_init(),
        _ => lines.with_ansi(has_colour(std::io::stderr().is_terminal())).try_init(),
    };
}

/// Whether stderr carries log lines as JSON and nothing else.
pub fn is_json(arguments: &Arguments) -> bool {
    arguments.text("log-format") == Some("json")
}

/// Tells people something on stderr; as log lines where these are for programs.
pub fn say(arguments: &Arguments, text: &str) {
    if !is_json(arguments) {
        eprint!("{text}");
        return;
    }
    start(arguments);
    text.lines().for_each(|line| tracing::info!("{}", line.trim()));
}

/// Whether a stream may carry colour.
pub fn has_colour(is_terminal: bool) -> bool {
    is_terminal && Environment::of_process().get("NO_COLOR").is_none()
}
