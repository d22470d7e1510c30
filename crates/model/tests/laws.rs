//! The laws of exactness on the production model, bit for bit on logits and log-probabilities, and planted faults that
//! must turn each red.

mod production;

use production::{Case, Piece, cases, feed_all, law_tests, logits, plan, tiny_a};
use tf_engine::model::{Model, SlotIndex};
use tf_model::deepseek_v41::laws::{Extent, LAWS, Law};
use tf_model::deepseek_v41::{DeepseekV41, Fault, Options};

/// Holds on every checkpoint without a fault, and breaks with each of its planted faults on the golden one.
fn check(title: &str) {
    let law: &Law = LAWS.iter().find(|law| law.title == title).expect("a law by this title");
    for case in cases() {
        if let Err(difference) = (law.run)(&case.subject(), Fault::None) {
            panic!("{}: {difference}", case.name);
        }
    }
    let subject = tiny_a().subject();
    for fault in law.faults {
        assert!((law.run)(&subject, *fault).is_err(), "the planted fault {fault:?} was not noticed");
    }
}

law_tests!();

#[test]
fn the_least_extent_shows_something_of_every_law() {
    // That of emulated devices, which show one fault of each law.
    let mut subject = tiny_a().subject();
    subject.extent = Extent::Least;
    for law in LAWS {
        (law.run)(&subject, Fault::None).unwrap_or_else(|error| panic!("{}: {error}", law.title));
        let fault = law.faults.first().expect("every law has a fault");
        assert!((law.run)(&subject, *fault).is_err(), "{}: {fault:?} was not noticed", law.title);
    }
}

#[test]
fn every_level_and_thread_count_gives_the_same_bits() {
    check("every CPU level and thread count");
    let of_the_cpu: Vec<&str> = LAWS.iter().filter(|law| law.cpu_only).map(|law| law.title).collect();
    assert_eq!(of_the_cpu, ["every CPU level and thread count"], "a new law must get a test");
}

fn model(case: &Case, fault: Fault) -> DeepseekV41 {
    case.load(Options { fault, round_rows: 320, context: 1024, slots: 8, ..Options::default() })
}

/// A window that doesn't continue its slot, or would read rows that are gone, is refused and named.
#[test]
fn windows_that_cannot_be_exact_are_refused() {
    let case = tiny_a();
    let mut model = model(&case, Fault::None);
    let mut out = Vec::new();
    let mut refused = |model: &mut DeepseekV41, pieces: &[Piece<'_>], text: &str| {
        let error = model.logits_rows(&plan(pieces), &mut out).expect_err("this cannot be computed");
        assert!(error.to_string().contains(text), "{error}");
    };
    let tokens = &case.tokens[..160];
    refused(&mut model, &[Piece::all(0, 4, &tokens[..3])], "starts at position 4");
    refused(&mut model, &[Piece::all(9, 0, &tokens[..3])], "slot 9");
    refused(&mut model, &[Piece::all(0, 0, &[384])], "token 384");
    refused(&mut model, &[Piece::all(1, 0, &tokens[..2]), Piece::all(1, 0, &tokens[..2])], "two windows");
    // A piece of a long prompt skipped its late layers; ending the prompt earlier would need them.
    let piece = Piece { slot: 2, start: 0, tokens: &tokens[..40], prompt_end: 1000, whole: false, draw: 0..0 };
    assert!(logits(&mut model, &[piece]).is_empty());
    model.keep(SlotIndex(2), 40);
    refused(&mut model, &[Piece::all(2, 40, &tokens[40..50])], "resume from a snapshot");
    model.release(SlotIndex(2));
    // Keeping far fewer positions than were computed: the ring has lost the rows before them.
    feed_all(&mut model, 3, 0, tokens, 160);
    model.keep(SlotIndex(3), 100);
    refused(&mut model, &[Piece::all(3, 100, &tokens[100..101])], "needs window keys");
}

#[test]
fn every_page_returns() {
    let case = tiny_a();
    let mut model = model(&case, Fault::None);
    let free = model.pages_free();
    feed_all(&mut model, 0, 0, &case.tokens, 64);
    let snapshot = model.snapshot(SlotIndex(0), model.length(SlotIndex(0)));
    assert_eq!(model.pages_free(), free - 3);
    model.release(SlotIndex(0));
    assert_eq!(model.pages_free(), free - 3, "the snapshot holds its pages");
    model.restore(SlotIndex(1), &snapshot);
    feed_all(&mut model, 1, 300, &case.tokens[..2], 1);
    assert_eq!(model.pages_free(), free - 4, "only the page that is written was copied");
    drop(snapshot);
    assert_eq!(model.pages_free(), free - 3);
    model.release(SlotIndex(1));
    assert_eq!(model.pages_free(), free);
}
