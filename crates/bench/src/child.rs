//! A server in a process of its own, so that it can be killed in the middle of its work.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use thiserror::Error;

/// Longest time from the start to the line that says ready.
const START_MAX: Duration = Duration::from_secs(120);
/// Bytes of the log that an error shows, from its end.
const LOG_SHOWN: usize = 2000;

/// Why there is no server.
#[derive(Debug, Error)]
pub enum ChildError {
    #[error("{program} can't be started: {cause}")]
    Start { program: String, cause: std::io::Error },
    #[error("{log} can't be written: {cause}")]
    Log { log: String, cause: std::io::Error },
    #[error("the server wasn't ready; the end of its log:\n{log}")]
    NotReady { log: String },
}

/// A running server. Dropping it kills it.
pub struct Server {
    child: Child,
    /// `http://HOST:PORT`, as the server printed it.
    pub url: String,
    log: PathBuf,
}

impl Server {
    /// Starts `program` with `words`, without the variables in `hidden`, and waits for its line `ready URL NAME`. What it
    /// says on stderr goes to the end of `log`.
    ///
    /// # Errors
    /// A program that can't be started, or that ends or stays silent before it is ready.
    pub fn start(program: &Path, words: &[String], hidden: &[String], log: &Path) -> Result<Server, ChildError> {
        let to_log = File::options()
            .create(true)
            .append(true)
            .open(log)
            .map_err(|cause| ChildError::Log { log: log.display().to_string(), cause })?;
        let mut command = Command::new(program);
        for name in hidden {
            command.env_remove(name);
        }
        let mut child = command
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(to_log)
            .spawn()
            .map_err(|cause| ChildError::Start { program: program.display().to_string(), cause })?;
        let (say, heard) = mpsc::channel();
        if let Some(output) = child.stdout.take() {
            std::thread::spawn(move || {
                let mut output = BufReader::new(output);
                let mut line = String::new();
                while output.read_line(&mut line).is_ok_and(|count| count > 0) {
                    if let Some(url) = ready_url(&line) {
                        let _ = say.send(url);
                        break;
                    }
                    line.clear();
                }
                // Read on, so that the server never waits for a full pipe.
                let _ = output.read_to_end(&mut Vec::new());
            });
        }
        let mut server = Server { child, url: String::new(), log: log.to_owned() };
        match heard.recv_timeout(START_MAX) {
            Ok(url) => {
                server.url = url;
                Ok(server)
            }
            Err(_) => Err(ChildError::NotReady { log: server.log_end() }),
        }
    }

    /// Ends the process at once, as a crash would.
    pub fn kill(mut self) {
        self.end();
    }

    /// Asks the process to end as a service manager does, and waits for it; its exit code.
    pub fn terminate(mut self) -> Option<i32> {
        let asked = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        match asked {
            Ok(status) if status.success() => self.child.wait().ok()?.code(),
            _ => None,
        }
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// The last lines that the server has written on stderr.
    pub fn log_end(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let start = text.len().saturating_sub(LOG_SHOWN);
        let start = (start..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text[start..].to_owned()
    }

    fn end(&mut self) {
        // An error here means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

fn ready_url(line: &str) -> Option<String> {
    let url = line.strip_prefix("ready ")?.split_whitespace().next()?;
    url.starts_with("http://").then(|| url.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str) -> Result<Server, ChildError> {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let log = std::env::temp_dir().join(format!("tensorfold-child-{}-{number}.log", std::process::id()));
        let server = Server::start(Path::new("/bin/sh"), &["-c".to_owned(), script.to_owned()], &[], &log);
        let _ = std::fs::remove_file(log);
        server
    }

    #[test]
    fn a_server_is_known_by_its_ready_line_and_gone_when_killed() {
        let mut server = start("echo loading; echo ready http://127.0.0.1:7 name; exec sleep 600").unwrap();
        assert_eq!(server.url, "http://127.0.0.1:7");
        assert!(server.is_running());
        let id = server.child.id();
        server.kill();
        assert!(!Path::new(&format!("/proc/{id}/fd")).exists());
    }

    #[test]
    fn a_server_that_ends_before_it_is_ready_shows_its_log() {
        let error = start("echo no memory >&2; exit 1").err().unwrap().to_string();
        assert!(error.contains("no memory"), "{error}");
        assert!(Server::start(Path::new("/nonexistent"), &[], &[], Path::new("/tmp")).is_err());
    }
}
