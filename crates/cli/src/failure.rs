//! How a command ends when it doesn't end well: an exit code and what to say on stderr.

use std::io;

use crate::arguments::Mistakes;
use crate::locate::LocateError;

/// 1: refused or failed while running. 2: wrong usage. 130: interrupted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: u8,
    /// Lines for stderr; may be empty where everything was said already.
    pub text: String,
}

impl Failure {
    pub fn run_time(text: impl Into<String>) -> Failure {
        Failure { code: 1, text: text.into() }
    }
}

impl From<Mistakes> for Failure {
    fn from(mistakes: Mistakes) -> Failure {
        Failure { code: 2, text: mistakes.to_string() }
    }
}

impl From<LocateError> for Failure {
    fn from(error: LocateError) -> Failure {
        Failure { code: error.exit_code(), text: error.to_string() }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            // The reader has seen enough: a normal ending.
            io::ErrorKind::BrokenPipe => Failure { code: 0, text: String::new() },
            _ => Failure::run_time(format!("output can't be written: {error}")),
        }
    }
}

/// Writes results to stdout.
///
/// # Errors
/// The system's; a closed pipe becomes a normal ending by `Failure::from`.
pub fn print(text: &str) -> io::Result<()> {
    use std::io::Write;
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}
