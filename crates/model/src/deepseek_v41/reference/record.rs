//! Intermediate values of a forward, by name, for comparison with recorded ones.

use std::collections::BTreeMap;

/// Values appended in the order of rows. Names are those of the recorded traces: `L04.attn_in`, `M1.stream`, `taps`.
#[derive(Clone, Debug, Default)]
pub struct Record {
    off: bool,
    values: BTreeMap<String, Vec<f64>>,
    lists: BTreeMap<String, Vec<Vec<u32>>>,
}

impl Record {
    /// A record that keeps nothing.
    pub fn off() -> Record {
        Record { off: true, ..Record::default() }
    }

    /// Every value recorded under `name`, row after row. Empty when there is none.
    pub fn values(&self, name: &str) -> &[f64] {
        self.values.get(name).map_or(&[], Vec::as_slice)
    }

    /// The lists recorded under `name`, one for each row: selections, experts, table rows.
    pub fn lists(&self, name: &str) -> &[Vec<u32>] {
        self.lists.get(name).map_or(&[], Vec::as_slice)
    }

    pub(super) fn push(&mut self, name: &str, values: &[f64]) {
        if !self.off {
            self.values.entry(name.to_string()).or_default().extend_from_slice(values);
        }
    }

    pub(super) fn push_list(&mut self, name: &str, list: &[u32]) {
        if !self.off {
            self.lists.entry(name.to_string()).or_default().push(list.to_vec());
        }
    }
}
