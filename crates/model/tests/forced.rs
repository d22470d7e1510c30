//! The reference in release numerics, sublayer by sublayer, on the recorded inputs of a release run.

mod common;

use common::forced::{Compressed, Mixed, Selected, Tally, Trace, tally};
use common::{check, golden, reference};
use tf_kernels::hyper::reference::{Mixes, tap};
use tf_kernels::kv_compress::reference::visible;
use tf_kernels::lm_head::reference::lm_head;
use tf_kernels::numerics_policy::Numerics;
use tf_kernels::rms_norm::reference::rms_norm;
use tf_kernels::top_k::reference::{candidates, top_k};
use tf_model::deepseek_v41::reference::{Hyper, LayerState, Model, Record};

fn model() -> &'static Model {
    reference(Numerics::Release)
}

#[test]
fn attention_of_every_layer() {
    let tallies = Trace::open().attention(|inputs| {
        model().attention_rows(inputs.layer, &inputs.x, &mut Vec::new(), &inputs.entries, &inputs.selections)
    });
    // Where a rounding falls the other way, one FP8 code of the output projection's input moves a row by less than a step.
    tallies.iter().for_each(|tally| tally.require(63, 1.0));
    assert!(
        tallies.iter().filter(|tally| tally.equal == tally.rows).count() >= 9,
        "most layers are equal in every bit"
    );
}

#[test]
fn experts_of_every_layer() {
    let tallies = Trace::open().moe(|layer, x| {
        let mut record = Record::default();
        let out = model().moe(&model().weights.layers[layer].moe, x, "row", &mut record);
        (out, record.lists("row.moe_idx").to_vec())
    });
    tallies.iter().for_each(|tally| tally.require(64, 0.0));
}

#[test]
fn compressor_of_every_source() {
    let tallies = Trace::open().compressor(|layer, x| {
        let (mut state, mut record) = (LayerState::default(), Record::default());
        model().compress(layer, x, &mut state, &mut record);
        let latent = record.values(&format!("L{layer:02}.latent")).to_vec();
        Compressed { latent, entries: state.entries, index_keys: state.index_keys }
    });
    tallies.iter().for_each(|tally| tally.require(tally.rows - 1, 1.0));
}

#[test]
fn selections_of_every_index_source() {
    let d = &model().dimensions;
    let compared = Trace::open().selection(|inputs| {
        let scores = |x: &[f64], weights: fn(f64) -> f64| {
            let candidates = inputs.candidates.as_deref();
            model().index_scores(inputs.layer, x, 0, &inputs.keys, candidates, weights)
        };
        let (scores, magnitudes) = (scores(&inputs.x, |weight| weight), scores(&inputs.x, f64::abs));
        // The release rounds each head's product, its weighted product and their sum to bfloat16, by up to 1/256 each.
        let bounds = magnitudes.iter().map(|row| row.iter().map(|sum| 3.1 * sum / 256.0 + 1e-6).collect()).collect();
        let selections = scores.iter().map(|row| top_k(row, d.index_topk)).collect();
        let width = visible(63, d.compress_ratios[inputs.layer]);
        let published = (d.candidate_source_layer_id == Some(inputs.layer)).then(|| {
            let of_row = |row: &Vec<f64>| {
                let mut mask = candidates(row, d.candidate_block_size, d.candidate_topk_blocks);
                mask.resize(width, false);
                mask
            };
            scores.iter().map(of_row).collect()
        });
        Selected { scores, bounds, selections, candidates: published }
    });
    println!("{compared} selections compared");
    assert!(compared > 200, "only {compared} selections compared");
}

/// What a wrong formula of the hyper-connections would do.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The combination matrix applied with its first index as the target stream.
    Transposed,
    /// A sublayer that reads the mix it made itself.
    Undelayed,
}

fn mixed(fault: Fault) -> Vec<Tally> {
    let (eps, hc) = (model().dimensions.rms_norm_eps, model().dimensions.hc_mult);
    let made = |hyper: &Hyper, streams: &[f64]| -> (Vec<Mixes>, Vec<f64>) {
        let mut made = model().mixes_rows(hyper, streams);
        if fault == Fault::Transposed {
            for mixes in &mut made {
                mixes.comb = (0..hc * hc).map(|i| mixes.comb[i % hc * hc + i / hc]).collect();
            }
        }
        let mix = made.iter().flat_map(|mixes| mixes.pre.clone()).collect();
        (made, mix)
    };
    let normed = |streams: &[f64], mix: &[f64], weight: &[f64]| {
        rms_norm(&model().collapse_rows(streams, mix), weight, eps, model().numerics)
    };
    Trace::open().mixes(|inputs| {
        let block = &model().weights.layers[inputs.layer];
        let mix_in = inputs.mix.clone().unwrap_or_else(|| model().first_mix(64));
        let (made_a, mix_a) = made(&block.hc_attn, &inputs.streams);
        let streams = model().expand_rows(&inputs.attn_out, &inputs.streams, &made_a);
        let (made_f, mix_f) = made(&block.hc_ffn, &streams);
        let (read_a, read_f) = if fault == Fault::Undelayed { (&mix_a, &mix_f) } else { (&mix_in, &mix_a) };
        Mixed {
            attn_in: normed(&inputs.streams, read_a, &block.attn_norm),
            ffn_in: normed(&streams, read_f, &block.ffn_norm),
            streams: model().expand_rows(&inputs.ffn_out, &streams, &made_f),
            mix: mix_f,
        }
    })
}

fn require_mixes(tallies: &[Tally]) {
    for tally in tallies {
        match tally.name.rsplit('.').next() {
            Some("attn_in") => tally.require(64, 0.0),
            Some("ffn_in") => tally.require(63, 1.0),
            // The streams between the halves are not recorded, so one of their roundings may already differ.
            Some("stream") => tally.require(59, 1.0),
            // Float32 values: a step of bfloat16 is far above their rounding.
            _ => tally.require(0, 0.05),
        }
    }
}

#[test]
fn hyper_connections_of_every_layer() {
    require_mixes(&mixed(Fault::None));
}

#[test]
fn wrong_hyper_connections_are_refused() {
    for fault in [Fault::Transposed, Fault::Undelayed] {
        let tallies = mixed(fault);
        assert!(std::panic::catch_unwind(|| require_mixes(&tallies)).is_err());
    }
}

#[test]
fn a_value_that_is_off_or_not_a_number_is_refused() {
    let expected = vec![1.0, -2.0, 0.5, 4.0];
    let cases = [(4.0, true), (4.03125, true), (4.0625, false), (f64::NAN, false), (f64::INFINITY, false)];
    for (value, accepted) in cases {
        let found = [1.0, -2.0, 0.5, value];
        let tally = tally("rows", &found, &expected, 2);
        assert_eq!(std::panic::catch_unwind(|| tally.require(1, 1.0)).is_ok(), accepted, "{value}");
        assert_eq!(std::panic::catch_unwind(|| tally.require(2, 1.0)).is_ok(), value == 4.0, "{value} in an equal row");
    }
}

#[test]
fn engram_of_its_layers() {
    let tallies = Trace::open().engram(|layer, streams, ids| {
        let rows: Vec<Vec<u64>> = (0..ids.len()).map(|p| model().table_rows(layer, ids, p)).collect();
        model().engram(layer, streams, &rows)
    });
    tallies.iter().for_each(|tally| tally.require(62, 1.0));
}

#[test]
fn taps_final_norm_and_logits() {
    let (trace, d) = (Trace::open(), &model().dimensions);
    let columns = d.hc_mult * d.hidden_size;
    let streams: Vec<Vec<f64>> = d.dspark_target_layer_ids.iter().map(|&layer| trace.stream_in(layer)).collect();
    let taps: Vec<f64> = (0..trace.ids.len())
        .flat_map(|p| {
            streams.iter().flat_map(move |rows| tap(&rows[p * columns..][..columns], d.hc_mult, model().numerics))
        })
        .collect();
    trace.tally("taps", &taps).require(64, 0.0);
    let (streams, mix) = trace.last();
    let normed =
        rms_norm(&model().collapse_rows(&streams, &mix), &model().weights.norm, d.rms_norm_eps, model().numerics);
    trace.tally("final_norm", &normed).require(64, 0.0);
    let logits = lm_head(&trace.values("final_norm"), &model().weights.head, d.hidden_size);
    check("logits", &logits, &golden("logits_official").floats("len64"), 1e-5);
}

#[test]
fn draft_blocks_on_recorded_taps() {
    let (trace, file, d) = (Trace::open(), golden("dspark_official"), &model().dimensions);
    let taps = trace.values("taps");
    let columns = taps.len() / trace.ids.len();
    for (name, len) in [("n2", 2), ("n8", 8), ("n20", 20), ("n41", 41), ("n64", 64)] {
        let mut state = model().start();
        state.ids = trace.ids[..len].to_vec();
        model().extend_draft(&mut state.draft, &taps[..len * columns], 0);
        for block in 0..d.num_nextn_predict_layers {
            let found = model().draft_attention(&state, block, &file.floats(&format!("{name}.M{block}.attn_in")));
            let part = format!("{name}.M{block}.attn_out");
            tally(&part, &found, &file.floats(&part), d.hidden_size).require(4, 1.0);
        }
    }
}
