//! Which kernels a queue has launched, for the test that holds a model's launches against the registry.

use std::collections::BTreeSet;

/// Off at first; then a launch costs one branch.
#[derive(Debug, Default)]
pub(crate) struct LaunchLog(Option<BTreeSet<&'static str>>);

impl LaunchLog {
    pub fn start(&mut self) {
        self.0 = Some(BTreeSet::new());
    }

    #[inline]
    pub fn note(&mut self, kernel: &'static str) {
        if let Some(names) = &mut self.0 {
            names.insert(kernel);
        }
    }

    pub fn take(&mut self) -> BTreeSet<&'static str> {
        self.0.take().unwrap_or_default()
    }
}
