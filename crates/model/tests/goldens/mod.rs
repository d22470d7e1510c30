//! The production model in release numerics against values recorded from the release's own code. Which device it runs on is
//! the test program's choice: `crate::model` and `crate::is_ready`.

use crate::common::forced::{Compressed, Mixed, Selected, Tally, Trace, tally};
use crate::common::{check, golden, json, reference, sequence};
use crate::production::{self, feed_all};
use tf_engine::model::{Model, SlotIndex};
use tf_engine::request::Sampling;
use tf_kernels::index_key;
use tf_kernels::kv_compress;
use tf_kernels::numerics_policy::Numerics;
use tf_kernels::reference_formats::{e2m1_decode, e4m3_decode, e8m0_decode};
use tf_kernels::top_k::reference::candidates;
use tf_model::deepseek_v41::parts::Parts;
use tf_model::deepseek_v41::reference::Record;
use tf_model::deepseek_v41::{DeepseekV41, Options};

fn model() -> DeepseekV41 {
    crate::model(Options { round_rows: 320, context: 512, slots: 2, ..Options::default() })
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// Runs a closure over the parts of a fresh model that was opened with the trace's tokens.
fn with_parts<T>(trace: &Trace, run: impl FnOnce(&std::cell::RefCell<Parts<'_>>) -> T) -> T {
    let mut model = model();
    let parts = Parts::open(&mut model, &trace.ids).expect("64 rows fit");
    run(&std::cell::RefCell::new(parts))
}

fn decode_entries(bytes: &[u8], count: usize, head_dim: usize) -> Vec<f64> {
    let record = kv_compress::record_bytes(head_dim);
    let value = |entry: &[u8], column: usize| {
        let code = entry[16 * (column / 32) + column % 16] >> (4 * (column % 32 / 16)) & 15;
        e2m1_decode(code) * e4m3_decode(entry[head_dim / 2 + column / 16])
    };
    let entries = bytes.chunks_exact(record).take(count);
    entries.flat_map(|entry| (0..head_dim).map(move |column| value(entry, column))).collect()
}

fn decode_index_keys(bytes: &[u8], count: usize, head_dim: usize) -> Vec<f64> {
    let block_bytes = index_key::BLOCK * index_key::record_bytes(head_dim);
    let value = |entry: usize, column: usize| {
        let block = &bytes[entry / index_key::BLOCK * block_bytes..][..block_bytes];
        let lane = entry % index_key::BLOCK;
        let byte = block[column / 8 * 4 * index_key::BLOCK + 4 * lane + column % 8 / 2];
        let scale = block[index_key::BLOCK * head_dim / 2 + column / 32 * index_key::BLOCK + lane];
        e2m1_decode(byte >> (4 * (column % 2)) & 15) * e8m0_decode(scale)
    };
    (0..count).flat_map(|entry| (0..head_dim).map(move |column| value(entry, column))).collect()
}

/// Compresses the recorded inputs of every source, so that its caches hold what attention reads.
fn compress_sources(trace: &Trace, parts: &mut Parts<'_>) {
    for layer in reference(Numerics::Release).dimensions.kv_source_layer_ids.iter() {
        parts.compress(*layer, &narrow(&trace.layer(*layer, "attn_in"))).expect("compresses");
    }
}

#[test]
fn attention_of_every_layer() {
    if !crate::is_ready() {
        return;
    }
    let trace = Trace::open();
    let tallies = with_parts(&trace, |parts| {
        compress_sources(&trace, &mut parts.borrow_mut());
        trace.attention(|inputs| {
            let out = parts.borrow_mut().attention(inputs.layer, &narrow(&inputs.x), &inputs.selections);
            wide(&out.expect("attention runs"))
        })
    });
    tallies.iter().for_each(|tally| tally.require(61, 1.0));
}

#[test]
fn experts_of_every_layer() {
    if !crate::is_ready() {
        return;
    }
    let trace = Trace::open();
    let tallies = with_parts(&trace, |parts| {
        trace.moe(|layer, x| {
            let (out, chosen) = parts.borrow_mut().experts(layer, &narrow(x)).expect("experts run");
            (wide(&out), chosen)
        })
    });
    tallies.iter().for_each(|tally| tally.require(62, 1.0));
}

#[test]
fn compressor_of_every_source() {
    if !crate::is_ready() {
        return;
    }
    let trace = Trace::open();
    let dimensions = &reference(Numerics::Release).dimensions;
    let tallies = with_parts(&trace, |parts| {
        trace.compressor(|layer, x| {
            let mut parts = parts.borrow_mut();
            let latent = parts.compress(layer, &narrow(x)).expect("compresses");
            let count = latent.len() / dimensions.head_dim;
            let (entries, keys) = parts.cached(layer).expect("the caches are read");
            Compressed {
                latent: wide(&latent),
                entries: decode_entries(&entries, count, dimensions.head_dim),
                index_keys: decode_index_keys(&keys, count, dimensions.index_head_dim),
            }
        })
    });
    tallies.iter().for_each(|tally| tally.require(tally.rows - 1, 1.0));
}

#[test]
fn selections_of_every_index_source() {
    if !crate::is_ready() {
        return;
    }
    let trace = Trace::open();
    let exact = reference(Numerics::Release);
    let d = &exact.dimensions;
    let compared = with_parts(&trace, |parts| {
        compress_sources(&trace, &mut parts.borrow_mut());
        trace.selection(|inputs| {
            let masks = inputs.candidates.as_deref();
            let scores =
                |weights: fn(f64) -> f64| exact.index_scores(inputs.layer, &inputs.x, 0, &inputs.keys, masks, weights);
            let (scores, magnitudes) = (scores(|weight| weight), scores(f64::abs));
            // As for the reference: the release rounds each score's parts to bfloat16.
            let bound = |sum: &f64| 3.1 * sum / 256.0 + 1e-6;
            let bounds = magnitudes.iter().map(|row| row.iter().map(bound).collect()).collect();
            let selections = parts.borrow_mut().select(inputs.layer, &narrow(&inputs.x)).expect("selects");
            let published = (d.candidate_source_layer_id == Some(inputs.layer)).then(|| {
                let of_row = |row: &Vec<f64>| {
                    let mut mask = candidates(row, d.candidate_block_size, d.candidate_topk_blocks);
                    mask.resize(trace.ids.len(), false);
                    mask
                };
                scores.iter().map(of_row).collect()
            });
            Selected { scores, bounds, selections, candidates: published }
        })
    });
    assert!(compared > 200, "only {compared} selections compared");
}

#[test]
fn hyper_connections_of_every_layer() {
    if !crate::is_ready() {
        return;
    }
    let trace = Trace::open();
    let tallies: Vec<Tally> = with_parts(&trace, |parts| {
        trace.mixes(|inputs| {
            let first = || [1.0, 0.0, 0.0, 0.0].repeat(trace.ids.len());
            let mix = inputs.mix.clone().unwrap_or_else(first);
            let [streams, mix, attention, experts] =
                [&inputs.streams, &mix, &inputs.attn_out, &inputs.ffn_out].map(|values| narrow(values));
            let made = parts.borrow_mut().mixes(inputs.layer, &streams, &mix, &attention, &experts).expect("mixes");
            Mixed {
                attn_in: wide(&made.attention_input),
                ffn_in: wide(&made.experts_input),
                streams: wide(&made.streams),
                mix: wide(&made.mix),
            }
        })
    });
    for tally in &tallies {
        match tally.name.rsplit('.').next() {
            Some("attn_in") => tally.require(63, 1.0),
            Some("ffn_in") => tally.require(62, 1.0),
            // The streams between the halves are not recorded, so one of their roundings may already differ.
            Some("stream") => tally.require(58, 1.0),
            _ => tally.require(0, 0.05),
        }
    }
}

#[test]
fn engram_of_its_layers() {
    if !crate::is_ready() {
        return;
    }
    let trace = Trace::open();
    let tallies = with_parts(&trace, |parts| {
        trace.engram(|layer, streams, _| wide(&parts.borrow_mut().engram(layer, &narrow(streams)).expect("reads")))
    });
    tallies.iter().for_each(|tally| tally.require(61, 1.0));
}

#[test]
fn logits_of_the_recorded_final_norm() {
    if !crate::is_ready() {
        return;
    }
    let trace = Trace::open();
    let normed = narrow(&trace.values("final_norm"));
    let logits = with_parts(&trace, |parts| parts.borrow_mut().head(&normed).expect("the head runs"));
    check("logits", &wide(&logits), &golden("logits_official").floats("len64"), 1e-5);
}

#[test]
fn draft_blocks_on_recorded_taps() {
    if !crate::is_ready() {
        return;
    }
    let (trace, file) = (Trace::open(), golden("dspark_official"));
    let taps = narrow(&trace.values("taps"));
    let columns = taps.len() / trace.ids.len();
    for (name, len) in [("n2", 2), ("n8", 8), ("n20", 20), ("n41", 41), ("n64", 64)] {
        let mut model = model();
        let mut parts = Parts::open(&mut model, &trace.ids[..len]).expect("the rows fit");
        parts.ingest(&taps[..len * columns]).expect("the taps enter");
        for block in 0..3 {
            let x = narrow(&file.floats(&format!("{name}.M{block}.attn_in")));
            let found = parts.draft_attention(block, &x).expect("attention runs");
            let part = format!("{name}.M{block}.attn_out");
            tally(&part, &wide(&found), &file.floats(&part), found.len() / 5).require(4, 1.0);
        }
    }
}

fn whole(name: &str) -> Vec<f64> {
    let mut model = model();
    let ids = sequence(name);
    let rows = feed_all(&mut model, 0, 0, &ids, ids.len());
    rows.iter().flatten().map(|bits| f64::from(f32::from_bits(*bits))).collect()
}

fn mean_distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(found, expected)| (found - expected).abs()).sum::<f64>() / found.len() as f64
}

/// Short runs have no rounding near a tie, so they end where the release ends.
#[test]
fn short_runs_give_the_recorded_logits() {
    if !crate::is_ready() {
        return;
    }
    let file = golden("logits_official");
    for name in ["len1", "len7"] {
        check(name, &whole(name), &file.floats(name), 1e-3);
    }
}

/// Long runs amplify a flipped rounding, but stay as near to float32 as the release does.
#[test]
fn whole_runs_are_as_near_to_float32_as_the_release() {
    if !crate::is_ready() {
        return;
    }
    let stats = json("golden.json")["stats"].clone();
    // An emulated device takes too long for the longest.
    let names = ["len1", "len7", "len64", "len300"];
    for name in &names[..if crate::IS_EMULATED { 3 } else { 4 }] {
        let distance = mean_distance(&whole(name), &golden("logits_f32").floats(name));
        let recorded = stats[format!("official_vs_f32_{name}")]["mean"].as_f64().expect("a number");
        println!("{name}: mean distance {distance:.4}, the release's {recorded:.4}");
        assert!(distance <= 1.25 * recorded, "{name}: {distance} is further than 1.25 x {recorded}");
    }
}

/// Until a sum first falls on the other side of a rounding, a run is the reference's run.
#[test]
fn a_run_follows_the_float64_reference_until_a_rounding_flips() {
    if !crate::is_ready() {
        return;
    }
    let exact = reference(Numerics::Release);
    let ids = &sequence("len64")[..crate::EQUAL_ROWS];
    let mut state = exact.start();
    let expected = exact.forward(&mut state, ids, &mut Record::off()).logits;
    let mut model = model();
    let rows = feed_all(&mut model, 0, 0, ids, ids.len());
    let found: Vec<f64> = rows.iter().flatten().map(|bits| f64::from(f32::from_bits(*bits))).collect();
    check("logits", &found, &expected, 1e-4);
}

#[test]
fn drafts_of_a_run_follow_the_float64_reference() {
    if !crate::is_ready() {
        return;
    }
    let exact = reference(Numerics::Release);
    let mut model = model();
    for (length, anchor) in [(2usize, 5u32), (8, 232), (8, 7)] {
        let ids = &sequence("len64")[..length];
        let mut state = exact.start();
        exact.forward(&mut state, ids, &mut Record::off());
        let expected = exact.draft(&state, anchor, &mut Record::off());
        feed_all(&mut model, 0, 0, ids, 3);
        let drafts = production::head_drafts(&mut model, 0, anchor, length as u32, &Sampling::greedy(), 5);
        let proposals: Vec<usize> = drafts.tokens.iter().map(|id| *id as usize).collect();
        let wanted: Vec<usize> = expected.ids.iter().map(|id| *id as usize).collect();
        assert_eq!(proposals, wanted, "proposals after {length} tokens and {anchor}");
        let probability = |raw: &f64| 1.0 / (1.0 + (-raw).exp());
        let confidence: Vec<f64> = expected.confidence.iter().map(probability).collect();
        let found: Vec<f64> = drafts.confidence.iter().map(|value| f64::from(*value)).collect();
        check(&format!("confidence after {length} tokens and {anchor}"), &found, &confidence, 1e-5);
        model.release(SlotIndex(0));
    }
}

/// The recorded anchor and proposals of the shortest context, whose run has no rounding near a tie.
#[test]
fn drafts_of_the_shortest_context_are_the_recorded_ones() {
    if !crate::is_ready() {
        return;
    }
    let file = golden("dspark_official");
    let mut model = model();
    let ids = &sequence("len64")[..2];
    let rows = feed_all(&mut model, 0, 0, ids, 2);
    let recorded = file.get("n2.draft_ids").integers();
    let last: Vec<f32> = rows[1].iter().map(|bits| f32::from_bits(*bits)).collect();
    let anchor = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b])).expect("logits");
    let drafts = production::head_drafts(&mut model, 0, anchor as u32, 2, &Sampling::greedy(), 5);
    let found: Vec<usize> = std::iter::once(anchor).chain(drafts.tokens.iter().map(|id| *id as usize)).collect();
    let wanted: Vec<usize> = recorded.iter().map(|id| *id as usize).collect();
    assert_eq!(found, wanted);
}
