//! The production model on the NVIDIA GPU of this machine: recorded values within the CPU's bounds, and the laws bit for bit.
//! Without a GPU each test skips, with the reason.
#![cfg(feature = "cuda")]

mod common;
mod goldens;
mod production;

use production::{Piece, cases, logits, tiny_a};
use tf_device::Device;
use tf_device::gpu::rounds::Giving;
use tf_kernels::cubins;
use tf_model::deepseek_v41::laws::{Extent, LAWS, Law};
use tf_model::deepseek_v41::{DeepseekV41, Fault, Options};

const IS_EMULATED: bool = false;
/// Rows of a run before a sum first falls on the other side of a rounding: CUDA's orders are not the CPU's.
const EQUAL_ROWS: usize = 8;

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

/// Rounds of changing slots and windows, so that graphs are made, changed and left.
#[test]
fn rounds_as_graphs_give_the_bits_of_launches_one_by_one() {
    if !is_ready() {
        return;
    }
    let case = tiny_a();
    let mut models = [Giving::OneByOne, Giving::Pieces, Giving::Whole].map(|giving| {
        let mut model = model(Options { slots: 4, ..Options::default() });
        model.give_rounds(giving).expect("the GPU switches");
        model
    });
    let mut lengths = [0; 4];
    let mut compared = 0;
    for round in 0..60 {
        let slots = 1 + (round / 10 + round % 2) % 4;
        let rows = if round % 7 == 3 { 5 } else { 1 };
        let pieces: Vec<Piece<'_>> = (0..slots)
            .map(|slot| {
                let start = lengths[slot];
                Piece::reply(slot as u32, start as u32, &case.tokens[start..start + rows])
            })
            .collect();
        let [wanted, in_pieces, whole] = models.each_mut().map(|model| logits(model, &pieces));
        assert_eq!(wanted.len(), slots * rows);
        assert!(in_pieces == wanted, "round {round} of {slots} slots with {rows} rows each differs in pieces");
        assert!(whole == wanted, "round {round} of {slots} slots with {rows} rows each differs as one graph");
        compared += 2 * wanted.len();
        lengths[..slots].iter_mut().for_each(|length| *length += rows);
    }
    let [one_by_one, in_pieces, whole] = models.map(|model| model.round_counts());
    eprintln!("{compared} rows compared; {in_pieces:?}, {whole:?}");
    assert_eq!(one_by_one.replayed, 0);
    assert!(in_pieces.replayed > whole.replayed, "rounds are longer than a piece");
    for counts in [in_pieces, whole] {
        assert!(counts.replayed > 30);
        assert!(counts.changed > 0);
        assert_eq!(counts.rebuilt, 0, "the driver refused to change a launch of a graph");
    }
}
