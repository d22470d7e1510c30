//! The production model on the emulated Metal device: recorded values within the CPU's bounds, and the laws bit for bit.

mod common;
mod goldens;
mod production;

use production::{Case, tiny_a};
use tf_device::Device;
use tf_metal_emulator::{COMPILER, INSTALL, compiler_found};
use tf_model::deepseek_v41::laws::{Extent, LAWS, Law};
use tf_model::deepseek_v41::{DeepseekV41, Fault, Options};

/// Whether kernels can be built. Without the compiler a test skips, with its reason; in CI it fails.
fn is_ready() -> bool {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        eprintln!("SKIPPED 1 test: the emulator runs on x86-64 Linux only");
        return false;
    }
    if compiler_found() {
        return true;
    }
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{COMPILER} is missing; {INSTALL}");
    eprintln!("SKIPPED 1 test: {COMPILER} is missing; {INSTALL}");
    false
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

#[test]
fn company_does_not_change_a_sequence() {
    check("a row in company = the row alone");
}

#[test]
fn drafts_never_change_a_reply() {
    check("drafted = undrafted");
}

#[test]
fn rejected_drafts_leave_no_trace() {
    check("rejected drafts leave no trace");
}

#[test]
fn a_shared_round_draws_what_each_sequence_draws_alone() {
    check("draws in company = draws alone");
}

#[test]
fn resumed_sequences_go_on_with_the_same_bits() {
    check("resumed = fresh");
}

#[test]
fn any_split_of_a_sequence_gives_the_same_bits() {
    check("any split = whole");
}

#[test]
fn the_halo_skips_rows_and_changes_nothing() {
    check("the halo skips rows and no bits");
}
