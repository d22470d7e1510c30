//! One case of one gate as one command line.

use tf_kernels::contract::{Case, Contract, Control, Gate};

/// What to run again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    pub kernel: String,
    pub case: String,
    pub gate: Gate,
    pub seed: u64,
    /// With this defect planted.
    pub control: Option<String>,
}

impl Replay {
    pub fn new(contract: &Contract, case: &Case, gate: Gate, seed: u64, control: Option<&Control>) -> Replay {
        Replay {
            kernel: contract.name.to_owned(),
            case: case.name.to_owned(),
            gate,
            seed,
            control: control.map(|control| control.name.to_owned()),
        }
    }

    /// The argument of `--replay`.
    pub fn text(&self) -> String {
        let mut text = format!("{}:{}:{}:{}", self.kernel, self.case, self.gate.name(), self.seed);
        if let Some(control) = &self.control {
            text.push(':');
            text.push_str(control);
        }
        text
    }

    /// The command line that replays the case alone; `start` as in `Options::start`.
    pub fn command(&self, start: &str) -> String {
        format!("{start} --replay '{}'", self.text())
    }

    /// Reads [`Replay::text`].
    ///
    /// # Errors
    /// When it has not the form KERNEL:CASE:GATE:SEED or KERNEL:CASE:GATE:SEED:CONTROL.
    pub fn parse(text: &str) -> Result<Replay, String> {
        let wrong = || format!("--replay {text:?}: expected KERNEL:CASE:GATE:SEED, as a failing case prints it");
        let parts: Vec<&str> = text.splitn(5, ':').collect();
        let [kernel, case, gate, seed, control @ ..] = &parts[..] else { return Err(wrong()) };
        let gate = Gate::ALL.into_iter().chain([Gate::Limits]).find(|known| known.name() == *gate).ok_or_else(wrong)?;
        Ok(Replay {
            kernel: (*kernel).to_owned(),
            case: (*case).to_owned(),
            gate,
            seed: seed.parse().map_err(|_| wrong())?,
            control: control.first().map(|name| (*name).to_owned()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_reads_back_what_it_writes() {
        for control in [None, Some("reads: the next row".to_owned())] {
            let replay = Replay { kernel: "a/b".into(), case: "odd tile".into(), gate: Gate::Memory, seed: 7, control };
            assert_eq!(Replay::parse(&replay.text()), Ok(replay));
        }
        for text in ["", "a:b", "a:b:value", "a:b:colour:1", "a:b:value:x"] {
            assert!(Replay::parse(text).is_err(), "{text}");
        }
    }
}
