//! Accepted, recorded defects of existing kernels. Each is counted in the summary; one whose defect is gone fails the run, so
//! that the list cannot rot.

use tf_kernels::contract::Gate;

/// One accepted defect.
#[derive(Debug)]
pub struct Known {
    pub id: &'static str,
    pub kernel: &'static str,
    pub gate: Gate,
    pub case: &'static str,
    /// Why it is accepted.
    pub reason: &'static str,
    /// Number of the issue that will end it.
    pub issue: u32,
}

/// None today.
pub const KNOWN: &[Known] = &[];

/// The entry that a failure belongs to.
pub fn find<'a>(known: &'a [Known], kernel: &str, gate: Gate, case: &str) -> Option<&'a Known> {
    known.iter().find(|known| known.kernel == kernel && known.gate == gate && known.case == case)
}
