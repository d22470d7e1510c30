//! Every registered kernel on one known vector: what a server tries before it says that it is ready.
//!
//! The smallest case of each record that the device takes, judged by gate 1 alone: every element inside the interval of the
//! float64 definition, so NaN and constant outputs fail. Proves far less than the contract and takes a fraction of a second.

use crate::probe::{Failure, Planted, Probe, Queues, Tally, check};
use crate::run::SEEDS;
use crate::target::{Bench, Changed, Target, tensor_cores_take};
use std::sync::Arc;
use tf_device::Device;
use tf_device::gpu::Backend;
use tf_kernels::contract::{Case, Contract, Gate};
use tf_kernels::families::CONTRACTS;

/// What was tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tried {
    pub kernels: usize,
    /// Output elements inside their intervals.
    pub elements: usize,
}

/// Tries every kernel on a device.
///
/// # Errors
/// The first kernel that is wrong, and how.
pub fn try_all(device: &Device) -> Result<Tried, String> {
    try_each(CONTRACTS, target_of(device), Planted::NONE)
}

fn target_of(device: &Device) -> Target {
    match device {
        Device::Cpu(_) => Target::Cpu,
        Device::Gpu(gpu) => {
            let devices = [("as opened", device.clone())];
            let has_tensor_cores = gpu.backend() == Backend::Cuda;
            Target::Gpu(Arc::new(Opened { name: gpu.name().to_owned(), devices, has_tensor_cores }))
        }
    }
}

fn try_each(contracts: &[Contract], target: Target, planted: Planted) -> Result<Tried, String> {
    let mut queues = Queues::new(target);
    let mut tried = Tried::default();
    for contract in contracts {
        let tally = try_one(contract, &mut queues, planted)
            .map_err(|failure| format!("kernel {}: {}", contract.name, failure.text()))?;
        tried.kernels += 1;
        tried.elements += tally.compared;
    }
    Ok(tried)
}

fn try_one(contract: &Contract, queues: &mut Queues, planted: Planted) -> Result<Tally, Failure> {
    let case = smallest(contract, |case| queues.target.takes(case, Gate::Value, 0))
        .ok_or_else(|| Failure::Broken("it has no case that this device takes".to_owned()))?;
    let world = (contract.make)(case, SEEDS[0]);
    let row_count = case.rows;
    let mut probe =
        Probe { kernel: contract.name, world: &*world, queues, planted, row_count, tally: Tally::default() };
    check(Gate::Value, &mut probe)?;
    Ok(probe.tally)
}

/// The case of least work of those that a device takes.
fn smallest(contract: &Contract, takes: impl Fn(&Case) -> bool) -> Option<&'static Case> {
    contract.cases.iter().filter(|case| takes(case)).min_by_key(|case| work(case))
}

/// Grows with the work of a case.
fn work(case: &Case) -> usize {
    case.sizes.iter().fold(case.rows, |work, (_, size)| work.saturating_mul((*size).max(1)))
}

/// A device that is in use, as it was opened.
struct Opened {
    name: String,
    devices: [(&'static str, Device); 1],
    has_tensor_cores: bool,
}

impl Bench for Opened {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn devices(&self) -> &[(&'static str, Device)] {
        &self.devices
    }

    fn edited(&self, _source: &'static str, _text: String) -> Result<Changed, String> {
        Err("a device in use runs no edited sources".to_owned())
    }

    fn takes(&self, case: &Case) -> bool {
        !self.has_tensor_cores || tensor_cores_take(case)
    }

    fn is_defect(&self, _error: &str) -> bool {
        false
    }

    fn has_cpu_bits(&self, _kernel: &str) -> bool {
        // Whether it has is the contract's question.
        false
    }

    fn rows_max(&self) -> usize {
        usize::MAX
    }

    fn size_max(&self) -> usize {
        usize::MAX
    }

    fn limit_problems(&self) -> Vec<String> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_tried() {
        let tried = try_all(&Device::cpu()).unwrap();
        assert_eq!(tried.kernels, CONTRACTS.len());
        assert!(tried.elements > 10 * CONTRACTS.len(), "{tried:?}");
    }

    /// Reported as: a server did not start on a GPU, because "the scale is code 0, this device's kernels take 3 to 134".
    #[test]
    fn a_device_is_tried_with_what_it_takes() {
        let mut refused = 0;
        for contract in CONTRACTS {
            let case = smallest(contract, tensor_cores_take).unwrap_or_else(|| panic!("{}: no case", contract.name));
            assert!(tensor_cores_take(case), "{}: {}", contract.name, case.name);
            refused += usize::from(!tensor_cores_take(smallest(contract, |_| true).expect("a case")));
        }
        assert!(refused > 0, "no kernel's smallest case is one that tensor cores refuse");
    }

    #[test]
    fn a_wrong_kernel_is_noticed_and_named() {
        for contract in CONTRACTS {
            let faults = contract.controls.iter().filter(|control| control.gate == Gate::Value);
            let noticed = faults
                .filter_map(Planted::of)
                .find_map(|planted| try_each(std::slice::from_ref(contract), Target::Cpu, planted).err());
            let text = noticed.unwrap_or_else(|| panic!("{}: no planted fault was noticed", contract.name));
            assert!(text.starts_with(&format!("kernel {}: ", contract.name)), "{text}");
        }
    }
}
