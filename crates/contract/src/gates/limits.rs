//! What controls of the limit problems must turn red: a launch that asks for more than a chip takes, whether it fails or not.

use crate::probe::{Failure, Probe};

/// Launches all rows once and looks at what was asked of the chips.
pub fn check(probe: &mut Probe<'_>) -> Result<(), Failure> {
    let rows = probe.all_rows();
    let launched = probe.launch(probe.queues.target.plain(), &rows);
    if let Some(problem) = probe.queues.target.limit_problems().into_iter().next() {
        return Err(Failure::Red(problem));
    }
    launched?;
    probe.tally.compared += 1;
    Ok(())
}
