//! The production model on the emulated Metal device: recorded values within the CPU's bounds, and the laws bit for bit.

mod common;
mod goldens;
mod production;
#[path = "../../metal-emulator/tests/common/ready.rs"]
mod ready;

use production::{Case, law_tests, tiny_a};
use tf_device::Device;
use tf_model::deepseek_v41::laws::{Extent, LAWS, Law};
use tf_model::deepseek_v41::{DeepseekV41, Fault, Options};

fn is_ready() -> bool {
    ready::ready("the model on the emulated device")
}

fn device() -> Device {
    tf_metal_emulator::device().expect("the compiler is installed")
}

const IS_EMULATED: bool = true;
/// Rows of a run before a float32 sum first falls on the other side of a rounding.
const EQUAL_ROWS: usize = 19;

fn model(options: Options) -> DeepseekV41 {
    tiny_a().load_on(&device(), options)
}

/// Holds without a fault, and breaks with the first of its planted ones.
fn check(title: &str) {
    if !is_ready() {
        return;
    }
    let law: &Law = LAWS.iter().find(|law| law.title == title).expect("a law by this title");
    let case: Case = tiny_a();
    let mut subject = case.subject_on(&device());
    subject.extent = Extent::Least;
    if let Err(difference) = (law.run)(&subject, Fault::None) {
        panic!("{}: {difference}", case.name);
    }
    // On the CPU every fault is planted; here one a law shows that this extent still sees it.
    if let Some(fault) = law.faults.first() {
        assert!((law.run)(&subject, *fault).is_err(), "the planted fault {fault:?} was not noticed");
    }
}

law_tests!();
