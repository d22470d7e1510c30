//! What the tests of the production model share: two checkpoints, and small loops over the model that return bits.
#![allow(dead_code, unused_imports, unused_macros, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tf_checkpoint::Checkpoint;
use tf_device::Device;
use tf_engine::model::Drafts;
use tf_engine::request::Sampling;
use tf_model::deepseek_v41::engram::EngramHash;
use tf_model::deepseek_v41::engram_rows::EngramPlace;
use tf_model::deepseek_v41::laws::Subject;
use tf_model::deepseek_v41::load::Weights;
use tf_model::deepseek_v41::shape::Shape;
use tf_model::deepseek_v41::{DeepseekV41, Options};

/// The package's folder, which a test program may be told when it runs elsewhere than where it was built.
fn package() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// A checkpoint and token ids to feed it.
pub struct Case {
    pub name: &'static str,
    checkpoint: Arc<Checkpoint>,
    token_map: Vec<u32>,
    pub tokens: Vec<u32>,
    /// Long enough that late layers skip rows of it.
    pub halo_prompt: usize,
}

impl Case {
    /// The checkpoint as the laws take it.
    pub fn subject(&self) -> Subject {
        self.subject_on(&Device::cpu())
    }

    /// As [`Case::subject`], with the weights on `device`.
    pub fn subject_on(&self, device: &Device) -> Subject {
        let shape = Shape::from_config(&self.checkpoint.config().expect("a configuration")).expect("a known shape");
        let hash = EngramHash::new(&shape, self.token_map.clone()).expect("the map fits");
        let weights = Weights::load(Arc::clone(&self.checkpoint), &shape, device, 1, &|_| {});
        let weights = weights.expect("the checkpoint loads");
        Subject::new(shape, weights, hash, Options::default(), &self.tokens).expect("the laws apply")
    }

    /// On the CPU, with the n-gram rows in this place.
    pub fn load_with_engram(&self, place: EngramPlace, options: Options) -> DeepseekV41 {
        let shape = Shape::from_config(&self.checkpoint.config().expect("a configuration")).expect("a known shape");
        let hash = EngramHash::new(&shape, self.token_map.clone()).expect("the map fits");
        let weights = Weights::load(Arc::clone(&self.checkpoint), &shape, &Device::cpu(), options.threads, &|_| {});
        let weights = weights.expect("the checkpoint loads").with_engram(place, &shape).expect("the rows have a place");
        DeepseekV41::new(shape, weights, hash, options).expect("the options fit")
    }

    pub fn load(&self, options: Options) -> DeepseekV41 {
        self.load_on(&Device::cpu(), options)
    }

    pub fn load_on(&self, device: &Device, options: Options) -> DeepseekV41 {
        tf_model::load_on(device, Arc::clone(&self.checkpoint), self.token_map.clone(), options, &|_| {})
            .expect("the checkpoint loads")
    }
}

fn json(path: &Path) -> serde_json::Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn numbers(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|number| number.as_u64().expect("a token id") as u32).collect()
}

/// The random golden checkpoint: window 16, every feature at small size.
pub fn tiny_a() -> Case {
    let root = package().join("tests/golden/dsv41-tiny-a");
    Case {
        name: "dsv41-tiny-a",
        checkpoint: Arc::new(Checkpoint::open(&root.join("model")).expect("the golden checkpoint opens")),
        token_map: numbers(&json(&root.join("model/engram_layout.debug.json"))["token_map"]),
        tokens: numbers(&json(&root.join("golden.json"))["sequences"]["len300"]),
        halo_prompt: 160,
    }
}

/// The demo checkpoint. The laws need no sensible n-gram classes, only some, so ids are folded by their remainder.
pub fn demo() -> Case {
    let root = package().join("../../models/tiny-dsv41");
    let checkpoint = Arc::new(Checkpoint::open(&root).expect("the demo checkpoint opens"));
    let mut state = 12345u64;
    let tokens = (0..640)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u32 % 4080
        })
        .collect();
    Case {
        name: "tiny-dsv41",
        checkpoint,
        token_map: (0..4096).map(|id| id % 3140).collect(),
        tokens,
        halo_prompt: 560,
    }
}

pub fn cases() -> [Case; 2] {
    [tiny_a(), demo()]
}

use tf_model::deepseek_v41::laws::loops;
/// The loops of the laws; in a test a forward that fails is a failed test.
pub use tf_model::deepseek_v41::laws::loops::{Drafter, Piece, Reply, RowBits, plan};

pub fn logits(model: &mut DeepseekV41, pieces: &[Piece<'_>]) -> Vec<RowBits> {
    loops::logits(model, pieces).expect("the forward runs")
}

pub fn feed_all(model: &mut DeepseekV41, slot: u32, start: u32, tokens: &[u32], chunk: usize) -> Vec<RowBits> {
    loops::feed_all(model, slot, start, tokens, chunk).expect("the forward runs")
}

pub fn feed_prompt(model: &mut DeepseekV41, slot: u32, tokens: &[u32], chunk: usize) -> RowBits {
    loops::feed_prompt(model, slot, tokens, chunk).expect("the forward runs")
}

pub fn head_drafts(
    model: &mut DeepseekV41,
    slot: u32,
    anchor: u32,
    position: u32,
    sampling: &Sampling,
    count: usize,
) -> Drafts {
    loops::head_drafts(model, slot, anchor, position, sampling, count).expect("drafting runs")
}

pub fn reply(
    model: &mut DeepseekV41,
    prompt: &[u32],
    count: usize,
    sampling: &Sampling,
    drafter: Drafter<'_>,
    chunk: usize,
) -> Reply {
    loops::reply(model, prompt, count, sampling, drafter, chunk).expect("the forward runs")
}

/// A test for each law that says something about any device. The program's `check` takes a law's title.
macro_rules! law_tests {
    () => {
        $crate::production::law_tests! {
            company_does_not_change_a_sequence: "a row in company = the row alone",
            drafts_never_change_a_reply: "drafted = undrafted",
            rejected_drafts_leave_no_trace: "rejected drafts leave no trace",
            a_shared_round_draws_what_each_sequence_draws_alone: "draws in company = draws alone",
            slots_of_one_pass_get_the_drafts_that_each_gets_alone: "drafts in company = drafts alone",
            the_engine_serves_what_each_request_gets_alone: "served any way = served alone",
            resumed_sequences_go_on_with_the_same_bits: "resumed = fresh",
            any_split_of_a_sequence_gives_the_same_bits: "any split = whole",
            the_halo_skips_rows_and_changes_nothing: "the halo skips rows and no bits",
        }
    };
    ($($test:ident: $title:literal,)*) => {
        $(
            #[test]
            fn $test() {
                check($title);
            }
        )*

        #[test]
        fn every_law_of_a_device_is_run_by_a_test() {
            let titles: Vec<&str> = LAWS.iter().filter(|law| !law.cpu_only).map(|law| law.title).collect();
            assert_eq!(titles, [$($title),*], "a new law must get a test");
        }
    };
}
pub(crate) use law_tests;
