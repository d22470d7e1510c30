//! The reference model against values recorded from the release's own code on a tiny checkpoint.

mod common;

use common::{check, check_lists, golden, index_rows, json, numbers, reference, sequence};
use tf_kernels::draft_head::reference::argmax;
use tf_kernels::numerics_policy::Numerics;
use tf_model::deepseek_v41::reference::{Model, Record, State};

/// Logits, confidences, taps and traces under float32: spec and file agree to about 1e-5; a wrong formula is far above.
const BOUND: f64 = 1e-3;

/// The logits of every position when the sequence arrives in chunks of `size`.
fn chunked(model: &Model, ids: &[u32], size: usize) -> (Vec<f64>, State) {
    let mut state = model.start();
    let chunks = ids.chunks(size);
    let logits = chunks.flat_map(|chunk| model.forward(&mut state, chunk, &mut Record::off()).logits).collect();
    (logits, state)
}

#[test]
fn logits_of_whole_prefills_equal_the_recorded_ones() {
    let file = golden("logits_f32");
    for name in ["len1", "len7", "len64", "len300"] {
        let ids = sequence(name);
        let (logits, _) = chunked(reference(Numerics::Exact), &ids, ids.len());
        check(name, &logits, &file.floats(name), BOUND);
    }
}

#[test]
fn logits_do_not_depend_on_the_chunks() {
    let file = golden("logits_f32");
    for name in ["len1", "len7", "len64", "len300"] {
        for size in [1, 3, 7, 64] {
            let (logits, _) = chunked(reference(Numerics::Exact), &sequence(name), size);
            check(&format!("{name} in chunks of {size}"), &logits, &file.floats(name), BOUND);
        }
    }
}

#[test]
fn single_steps_after_a_prefill_equal_the_recorded_ones() {
    let file = golden("decode_f32");
    let model = reference(Numerics::Exact);
    let ids = sequence("len64");
    for prefill in [1, 41] {
        let mut state = model.start();
        let mut record = Record::off();
        let mut logits = model.forward(&mut state, &ids[..prefill], &mut record).logits;
        logits.drain(..(prefill - 1) * model.dimensions.vocab_size);
        let mut selections = 0;
        for position in prefill..ids.len() {
            let mut record = Record::default();
            logits.extend(model.forward(&mut state, &ids[position..=position], &mut record).logits);
            for layer in &model.dimensions.index_source_layer_ids {
                let name = format!("prefill{prefill}.step{position}.L{layer:02}.topk");
                if file.has(&name) {
                    check_lists(&name, record.lists(&format!("L{layer:02}.topk")), &index_rows(&file, &name));
                    selections += 1;
                }
            }
        }
        check(&format!("prefill{prefill}"), &logits, &file.floats(&format!("prefill{prefill}.logits")), BOUND);
        assert_eq!(selections, if prefill == 41 { 20 } else { 0 }, "recorded selections");
    }
}

/// Compares everything that a trace file holds. `rows` are the positions whose streams the file has.
fn check_trace(model: &Model, file_name: &str, ids: &[u32], rows: Option<&[u32]>, bound: f64) {
    let file = golden(file_name);
    let mut record = Record::default();
    model.forward(&mut model.start(), ids, &mut record);
    let sparse = ["stream", "stream_in", "pre_mix", "final_norm", "taps", "attn_in", "attn_out", "ffn_in", "ffn_out"];
    let mut compared = 0;
    for name in file.names() {
        let part = name.rsplit('.').next().expect("never empty");
        let label = format!("{file_name} {name}");
        match part {
            "engram_hash" => {
                let expected = file.integers(name);
                let layers = &model.dimensions.engram_layer_ids;
                let columns = expected.len() / ids.len();
                for (row, expected) in expected.chunks(columns).enumerate() {
                    let found: Vec<i64> = layers
                        .iter()
                        .flat_map(|layer| record.lists(&format!("L{layer:02}.engram_hash"))[row].clone())
                        .map(i64::from)
                        .collect();
                    assert_eq!(found, expected, "{label}: row {row}");
                }
            }
            "topk" | "moe_idx" => check_lists(&label, record.lists(name), &index_rows(&file, name)),
            "candidates" => {
                let expected: Vec<f64> = file.integers(name).into_iter().map(|bit| bit as f64).collect();
                check(&label, record.values(name), &expected, 0.0);
            }
            // The file lists a row's experts in the order of its own selection.
            "moe_w" => {
                let sorted = |values: &[f64]| -> Vec<f64> {
                    let rows = values.chunks(model.dimensions.num_experts_per_tok);
                    let rows = rows.map(|row| {
                        let mut row = row.to_vec();
                        row.sort_by(f64::total_cmp);
                        row
                    });
                    rows.flatten().collect()
                };
                check(&label, &sorted(record.values(name)), &sorted(&file.floats(name)), bound);
            }
            "topk_gap" | "logits" => continue,
            _ => {
                let expected = file.floats(name);
                let values = record.values(name);
                // A prompt of one token completes no group at ratio 2.
                if expected.is_empty() {
                    assert!(values.is_empty(), "{label}: nothing was recorded");
                    continue;
                }
                let found = match rows.filter(|_| sparse.contains(&part)) {
                    None => values.to_vec(),
                    Some(rows) => {
                        let columns = values.len() / ids.len();
                        let row = |&row: &u32| values[row as usize * columns..][..columns].to_vec();
                        rows.iter().flat_map(row).collect()
                    }
                };
                check(&label, &found, &expected, bound);
            }
        }
        compared += 1;
    }
    assert!(compared >= 60, "{file_name}: only {compared} tensors compared");
}

#[test]
fn every_intermediate_value_of_short_prompts_equals_the_recorded_one() {
    for name in ["len7", "len64"] {
        check_trace(reference(Numerics::Exact), &format!("trace_f32_{name}"), &sequence(name), None, BOUND);
    }
}

#[test]
fn streams_and_selections_of_a_long_prompt_equal_the_recorded_ones() {
    let rows = numbers(&json("golden.json")["rows300"]);
    check_trace(reference(Numerics::Exact), "trace_f32_len300", &sequence("len300"), Some(&rows), BOUND);
}

#[test]
fn draft_rounds_equal_the_recorded_ones() {
    let file = golden("dspark_f32");
    let contexts = json("golden.json")["dspark_contexts"].clone();
    let contexts = contexts.as_object().expect("an object");
    assert_eq!(contexts.len(), 6);
    for (name, context) in contexts {
        let model = reference(Numerics::Exact);
        let ids = sequence(context["sequence"].as_str().expect("a name"));
        let ids = &ids[..context["prefix_len"].as_u64().expect("a count") as usize];
        let mut state = model.start();
        let forward = model.forward(&mut state, ids, &mut Record::off());
        let (vocabulary, columns) = (model.dimensions.vocab_size, forward.taps.len() / ids.len());
        check(
            &format!("{name}.tap"),
            &forward.taps[(ids.len() - 1) * columns..],
            &file.floats(&format!("{name}.tap")),
            BOUND,
        );
        let anchor = argmax(&forward.logits[(ids.len() - 1) * vocabulary..]);
        let mut record = Record::default();
        let draft = model.draft(&state, anchor, &mut record);
        let found: Vec<i64> = [anchor].iter().chain(&draft.ids).map(|&id| i64::from(id)).collect();
        assert_eq!(found, file.integers(&format!("{name}.draft_ids")), "{name}.draft_ids");
        check(&format!("{name}.logits"), &draft.logits, &file.floats(&format!("{name}.logits")), BOUND);
        check(&format!("{name}.confidence"), &draft.confidence, &file.floats(&format!("{name}.confidence")), BOUND);
        for block in 0..model.dimensions.num_nextn_predict_layers {
            for part in ["attn_in", "attn_out", "stream", "pre_mix"] {
                let expected = file.floats(&format!("{name}.M{block}.{part}"));
                check(&format!("{name}.M{block}.{part}"), record.values(&format!("M{block}.{part}")), &expected, BOUND);
            }
        }
    }
}

#[test]
fn a_draft_round_after_every_step_equals_the_recorded_one() {
    let file = golden("dspark_f32");
    let model = reference(Numerics::Exact);
    let greedy = numbers(&json("golden.json")["greedy"]["f32"]["len7"]);
    let recorded = file.integers("steps.draft_ids");
    // The round of step i follows the forward of the i-th reply token, so its anchor is the token after that.
    let (_, mut state) = chunked(model, &sequence("len7"), 7);
    for (step, recorded) in recorded.chunks(recorded.len() / greedy.len()).enumerate() {
        let forward = model.forward(&mut state, &[greedy[step]], &mut Record::off());
        let anchor = argmax(&forward.logits);
        if let Some(&next) = greedy.get(step + 1) {
            assert_eq!(anchor, next, "step {step}: greedy token");
        }
        let draft = model.draft(&state, anchor, &mut Record::off());
        let found: Vec<i64> = [anchor].iter().chain(&draft.ids).map(|&id| i64::from(id)).collect();
        assert_eq!(found, recorded, "steps.draft_ids, step {step}");
        let name = format!("steps.{step:02}.confidence");
        check(&name, &draft.confidence, &file.floats(&name), BOUND);
    }
}

#[test]
fn a_state_cut_back_continues_as_if_it_had_never_gone_further() {
    let model = reference(Numerics::Exact);
    let ids = sequence("len64");
    let (_, mut state) = chunked(model, &ids, ids.len());
    for cut in [1, 16, 33, 40] {
        let mut cut_state = state.clone();
        model.truncate(&mut cut_state, cut);
        let found = model.forward(&mut cut_state, &ids[cut..], &mut Record::off());
        let (_, mut fresh) = chunked(model, &ids[..cut], cut);
        let expected = model.forward(&mut fresh, &ids[cut..], &mut Record::off());
        assert_eq!(found.logits, expected.logits, "cut at {cut}");
        assert_eq!(
            model.draft(&cut_state, 5, &mut Record::off()),
            model.draft(&fresh, 5, &mut Record::off()),
            "draft after a cut at {cut}"
        );
    }
    model.truncate(&mut state, 0);
    assert_eq!(state.layers[2].entries.len(), 0);
}

#[test]
fn quantised_logits_and_traces_of_short_prompts_equal_the_recorded_ones() {
    let file = golden("logits_f32qdq");
    let model = reference(Numerics::Qdq);
    for name in ["len1", "len7"] {
        let ids = sequence(name);
        let (logits, _) = chunked(model, &ids, ids.len());
        check(name, &logits, &file.floats(name), BOUND);
        check_trace(model, &format!("trace_f32qdq_{name}"), &ids, None, BOUND);
    }
}

/// Mean absolute difference of two sets of logits, their largest, and the share of rows with the same argmax.
fn distance(found: &[f64], expected: &[f64], vocabulary: usize) -> (f64, f64, f64) {
    let differences = || found.iter().zip(expected).map(|(found, expected)| (found - expected).abs());
    let rows = found.chunks(vocabulary).zip(expected.chunks(vocabulary));
    let equal = rows.filter(|(found, expected)| argmax(found) == argmax(expected)).count();
    (
        differences().sum::<f64>() / found.len() as f64,
        differences().fold(0.0, f64::max),
        equal as f64 * vocabulary as f64 / found.len() as f64,
    )
}

#[test]
fn release_logits_are_no_farther_from_float32_than_the_releases_own() {
    let (exact, stats) = (golden("logits_f32"), json("golden.json")["stats"].clone());
    for (policy, numerics) in [("official", Numerics::Release), ("f32qdq", Numerics::Qdq)] {
        for name in ["len1", "len7", "len64", "len300"] {
            let model = reference(numerics);
            let ids = sequence(name);
            let (logits, _) = chunked(model, &ids, ids.len());
            let (mean, max, top1) = distance(&logits, &exact.floats(name), model.dimensions.vocab_size);
            let (own, own_max, _) =
                distance(&logits, &golden(&format!("logits_{policy}")).floats(name), model.dimensions.vocab_size);
            let recorded = &stats[&format!("{policy}_vs_f32_{name}")];
            println!(
                "{policy} {name}: mean {mean:.4} max {max:.3} top-1 {top1:.3}, recorded {recorded}; to the recorded logits {own:.2e} max {own_max:.2e}"
            );
            let allowed = 1.25 * recorded["mean"].as_f64().expect("a number");
            assert!(mean <= allowed, "{policy} {name}: mean distance {mean}, allowed {allowed}");
        }
    }
}

#[test]
fn release_logits_and_drafts_of_short_prompts_equal_the_recorded_ones() {
    let (model, file) = (reference(Numerics::Release), golden("logits_official"));
    for name in ["len1", "len7"] {
        let ids = sequence(name);
        let (logits, _) = chunked(model, &ids, ids.len());
        check(name, &logits, &file.floats(name), 1e-4);
    }
    // In longer contexts a flipped rounding has moved the taps.
    let (file, len) = (golden("dspark_official"), 2);
    let (logits, state) = chunked(model, &sequence("len64")[..len], len);
    let anchor = argmax(&logits[(len - 1) * model.dimensions.vocab_size..]);
    let draft = model.draft(&state, anchor, &mut Record::off());
    let found: Vec<i64> = [anchor].iter().chain(&draft.ids).map(|&id| i64::from(id)).collect();
    assert_eq!(found, file.integers("n2.draft_ids"), "n2.draft_ids");
    check("n2.logits", &draft.logits, &file.floats("n2.logits"), 1e-4);
    check("n2.confidence", &draft.confidence, &file.floats("n2.confidence"), 1e-4);
}
