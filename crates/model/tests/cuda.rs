//! The production model on the NVIDIA GPU of this machine: recorded values within the CPU's bounds, and the laws bit for bit.
//! Without a GPU each test skips, with the reason.
#![cfg(feature = "cuda")]

mod common;
mod goldens;
mod production;

use production::{cases, tiny_a};
use tf_device::Device;
use tf_kernels::cubins;
use tf_model::deepseek_v41::laws::{Extent, LAWS, Law};
use tf_model::deepseek_v41::{DeepseekV41, Fault, Options};

const IS_EMULATED: bool = false;

fn device() -> Result<Device, String> {
    tf_device::cuda::device(0, cubins::find).map_err(|error| error.to_string())
}

fn is_ready() -> bool {
    match device() {
        Ok(_) => true,
        Err(reason) => {
            eprintln!("SKIPPED 1 test: {reason}");
            false
        }
    }
}

fn model(options: Options) -> DeepseekV41 {
    tiny_a().load_on(&device().expect("the GPU opened before"), options)
}

/// Holds on every checkpoint without a fault, and breaks with each of its planted faults on the golden one.
#[test]
fn the_laws_hold_and_planted_faults_are_noticed() {
    if !is_ready() {
        return;
    }
    let mut broken = Vec::new();
    for case in cases() {
        let mut subject = case.subject_on(&device().expect("the GPU opened before"));
        for law in LAWS.iter().filter(|law: &&Law| !law.cpu_only) {
            subject.extent = Extent::Full;
            match (law.run)(&subject, Fault::None) {
                Ok(_) => eprintln!("{}: {} {} holds", case.name, law.id, law.title),
                Err(difference) => broken.push(format!("{}: {} {}: {difference}", case.name, law.id, law.title)),
            }
            subject.extent = Extent::Quick;
            for fault in law.faults {
                if (law.run)(&subject, *fault).is_ok() {
                    broken.push(format!("{}: {}: the planted fault {fault:?} was not noticed", case.name, law.title));
                }
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
