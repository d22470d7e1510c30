//! Every kernel that the model launches is in the registry of the kernel contract, and nearly all of the registry is used.

mod production;

use production::{Drafter, cases, feed_prompt, reply};
use std::collections::BTreeSet;
use tf_engine::model::{Model, SlotIndex};
use tf_engine::request::Sampling;
use tf_kernels::families::{CHAINS, CONTRACTS};
use tf_model::deepseek_v41::Options;

/// Registered launches that no forward makes: fused forms of other kernels stand in their place.
const UNUSED: &[&str] = &["linear_bf16/f32", "quantise", "quantise/in_place"];

#[test]
fn the_model_launches_registered_kernels_only() {
    let registered: BTreeSet<&str> = CONTRACTS.iter().map(|contract| contract.name).collect();
    assert_eq!(registered.len(), CONTRACTS.len(), "two records have one name");
    let mut launched = BTreeSet::new();
    for case in cases() {
        let mut model = case.load(Options { round_rows: 256, context: 1024, slots: 2, ..Options::default() });
        model.record_launches();
        // A prompt long enough that rows select among compressed entries and late layers skip rows, then drafted replies.
        let prompt = &case.tokens[..case.halo_prompt.min(case.tokens.len())];
        feed_prompt(&mut model, 1, prompt, 128);
        model.release(SlotIndex(1));
        let sampled = Sampling { temperature: 0.9, seed: 7, ..Sampling::greedy() };
        for sampling in [Sampling::greedy(), sampled] {
            let reply = reply(&mut model, &case.tokens[..40], 12, &sampling, Drafter::Head, 40);
            assert!(reply.accepted + reply.rejected > 0, "{}: nothing was drafted", case.name);
        }
        let own = model.recorded_launches();
        let strangers: Vec<_> = own.difference(&registered).collect();
        assert!(strangers.is_empty(), "{} launches kernels that are not registered: {strangers:?}", case.name);
        launched.extend(own);
    }
    let idle: Vec<_> = registered.difference(&launched).filter(|name| !CHAINS.contains(name)).copied().collect();
    assert_eq!(idle, UNUSED, "registered kernels that no forward launched");
}
