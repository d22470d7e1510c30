//! The definitions against small vectors recorded from the release's own code. One test for each group of the file.

mod safetensors;

use std::path::Path;

use safetensors::File;
use tf_kernels::engram::reference::{hashes, seed_words, table_rows};
use tf_kernels::hyper::reference::{MixConstants, mixes_of_logits};
use tf_kernels::linear_fp8::reference as linear_fp8;
use tf_kernels::moe_experts::reference as moe_experts;
use tf_kernels::numerics_policy::Numerics;
use tf_kernels::quantise::reference::{quantise_fp4_e4m3, quantise_fp4_e8m0, quantise_fp8};
use tf_kernels::reference_formats::e4m3_decode;
use tf_kernels::rope::reference::{Yarn, frequencies, phase};
use tf_kernels::sample::reference::{Filters, draw, kept, log_softmax};
use tf_kernels::top_k::reference::{candidates, top_k};

fn units() -> File {
    File::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/units.safetensors"))
}

/// Fails at the worst element when one is farther from the recorded value than `bound` times the larger of 1 and it.
fn check(name: &str, found: &[f64], expected: &[f64], bound: f64) {
    assert_eq!(found.len(), expected.len(), "{name}: number of values");
    assert!(!found.is_empty(), "{name}: nothing to compare");
    let distance = |i: usize| (found[i] - expected[i]).abs() / expected[i].abs().max(1.0);
    let worst = (0..found.len()).max_by(|&a, &b| distance(a).total_cmp(&distance(b))).expect("not empty");
    println!("{name}: worst element {worst}: {} instead of {}", found[worst], expected[worst]);
    assert!(distance(worst) <= bound, "{name}: element {worst}: {} instead of {}", found[worst], expected[worst]);
}

#[test]
fn e4m3_codes_have_their_values() {
    let found: Vec<f64> = (0..=255).map(e4m3_decode).map(|value| if value.is_nan() { 0.0 } else { value }).collect();
    check("e4m3_table", &found, &units().floats("e4m3_table"), 0.0);
}

#[test]
fn quantising_and_dequantising_equals_the_recorded_values() {
    let units = units();
    let x = units.floats("x");
    for numerics in [Numerics::Qdq, Numerics::Release] {
        check("qdq8_32", &numerics.qdq8(&x, 64), &units.floats("qdq8_32"), 0.0);
        check("qdq4_32_e8m0", &numerics.qdq4_e8m0(&x, 64), &units.floats("qdq4_32_e8m0"), 0.0);
        check("qdq4_16_e4m3", &numerics.qdq4_e4m3(&x, 64), &units.floats("qdq4_16_e4m3"), 0.0);
    }
    assert_eq!(Numerics::Exact.qdq8(&x, 64), x, "exact numerics must not quantise");
}

#[test]
fn stored_codes_and_scales_equal_the_recorded_bytes() {
    let units = units();
    let x = units.floats("x");
    let (codes, scales) = quantise_fp8(&x, 64);
    assert_eq!(codes, units.get("fp8_codes").bytes);
    assert_eq!(scales, units.get("fp8_scale_bytes").bytes);
    let (codes, scales) = quantise_fp4_e8m0(&x, 64);
    assert_eq!(codes, units.get("fp4_packed").bytes);
    assert_eq!(scales, units.get("fp4_scale_bytes").bytes);
}

#[test]
fn stored_forms_dequantise_to_the_rounded_values() {
    let units = units();
    let x = units.floats("x");
    // A row is its own 1 x 32 blocks here, so each is dequantised as a weight of one row.
    let (codes, scales) = quantise_fp8(&x, 64);
    let rows = codes.chunks(64).zip(scales.chunks(2));
    let found: Vec<f64> = rows.flat_map(|(codes, scales)| linear_fp8::dequantise(codes, scales, 64)).collect();
    check("fp8", &found, &units.floats("qdq8_32"), 0.0);
    let (packed, scales) = quantise_fp4_e8m0(&x, 64);
    check("fp4", &moe_experts::dequantise(&packed, &scales, 64), &units.floats("qdq4_32_e8m0"), 0.0);
    let (packed, scales) = quantise_fp4_e4m3(&x, 64);
    let halves = packed.iter().flat_map(|byte| [byte & 15, byte >> 4]);
    let value = |(i, code)| tf_kernels::reference_formats::e2m1_decode(code) * e4m3_decode(scales[i / 16]);
    let found: Vec<f64> = halves.enumerate().map(value).collect();
    check("fp4 with e4m3 scales", &found, &units.floats("qdq4_16_e4m3"), 0.0);
}

#[test]
fn hyper_connection_mixes_equal_the_recorded_ones() {
    let units = units();
    let (scale, base) = (units.floats("hc_scale"), units.floats("hc_base"));
    let constants = MixConstants { hc: 4, iterations: 20, hc_eps: 1e-6, rms_eps: 1e-20 };
    let rows: Vec<_> = units.floats("hc_z").chunks(24).map(|z| mixes_of_logits(z, &scale, &base, constants)).collect();
    let all = |part: fn(&tf_kernels::hyper::reference::Mixes) -> &Vec<f64>| -> Vec<f64> {
        rows.iter().flat_map(|mixes| part(mixes).clone()).collect()
    };
    check("hc_pre", &all(|mixes| &mixes.pre), &units.floats("hc_pre"), 1e-6);
    check("hc_post", &all(|mixes| &mixes.post), &units.floats("hc_post"), 1e-6);
    check("hc_comb", &all(|mixes| &mixes.comb), &units.floats("hc_comb"), 1e-6);
}

#[test]
fn rope_phases_equal_the_recorded_ones_up_to_the_last_position() {
    let units = units();
    let yarn = Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_positions: 65536.0 };
    let positions = units.integers("rope_positions");
    assert!(positions.iter().any(|&p| p > 1_000_000), "the check needs a large position");
    for (name, base, yarn) in [("plain", 10000.0, None), ("yarn", 160000.0, Some(yarn))] {
        let frequencies = frequencies(base, 64, yarn);
        let phases: Vec<(f64, f64)> =
            positions.iter().flat_map(|&p| frequencies.iter().map(move |&f| phase(p as u32, f))).collect();
        let (cosines, sines): (Vec<f64>, Vec<f64>) = phases.into_iter().unzip();
        check(name, &cosines, &units.floats(&format!("rope_{name}_cos")), 1e-6);
        check(name, &sines, &units.floats(&format!("rope_{name}_sin")), 1e-6);
    }
}

#[test]
fn candidate_masks_equal_the_recorded_ones() {
    let units = units();
    let (scores, lens) = (units.floats("cand_scores"), units.integers("cand_lens"));
    let columns = scores.len() / lens.len();
    let mut found: Vec<i64> = Vec::new();
    for (row, &len) in scores.chunks(columns).zip(&lens) {
        let mut mask: Vec<i64> = candidates(&row[..len as usize], 4, 3).into_iter().map(i64::from).collect();
        mask.resize(columns.max(mask.len()), 0);
        found.extend(&mask[..columns]);
    }
    assert_eq!(found, units.integers("cand_mask_b3_s4"));
}

#[test]
fn engram_hashes_of_the_release_follow_from_its_vocabulary() {
    let hashes = hashes(&[1, 14], 99092, 16_000_000, 4, 8);
    let expected = [
        ([76632096046245, 4839876093313, 35959672319349, 73987337458391], 16000057, 16000463, 384006168),
        ([67716810739261, 51510806800915, 30921347202721, 82619226485591], 16000477, 16000889, 384016682),
    ];
    for (hash, (multipliers, first, last, rows)) in hashes.iter().zip(expected) {
        assert_eq!(hash.multipliers, multipliers);
        assert_eq!((hash.primes.first(), hash.primes.last()), (Some(&first), Some(&last)));
        assert_eq!(hash.primes.iter().sum::<u64>(), rows);
    }
    let words = [0x77d32a348ad70d07, 0x993ed609b84a4fa5, 0xd5f972dec8698e49, 0x7d79ebaebcf148de];
    assert_eq!(seed_words(10007), words);
}

#[test]
fn a_blocked_token_hides_everything_behind_it() {
    let hash = &hashes(&[1], 99092, 16_000_000, 4, 8)[0];
    let cases = [
        ([Some(7), None, Some(5), Some(6)], [Some(7), Some(2), Some(2), Some(2)]),
        ([Some(7), Some(8), None, None], [Some(7), Some(8), Some(2), Some(2)]),
        ([None, Some(8), Some(9), Some(4)], [Some(2), Some(2), Some(2), Some(2)]),
    ];
    for (history, same) in cases {
        assert_eq!(table_rows(&history, 2, hash), table_rows(&same, 2, hash), "{history:?}");
    }
    let open = table_rows(&[Some(7), Some(8), Some(5), Some(6)], 2, hash);
    assert_ne!(open[..8], table_rows(&[Some(7), None, Some(5), Some(6)], 2, hash)[..8]);
}

#[test]
fn top_k_prefers_the_larger_score_and_then_the_smaller_index() {
    let none = f64::NEG_INFINITY;
    let cases: [(&[f64], usize, &[u32]); 5] = [
        (&[1.0, 3.0, 2.0], 2, &[1, 2]),
        (&[0.0, 0.0, 0.0, 0.0], 2, &[0, 1]),
        (&[0.0, -1.0, 0.0, 5.0], 2, &[0, 3]),
        (&[none, -2.0, none], 3, &[1]), // a masked score is never chosen
        (&[], 3, &[]),
    ];
    for (scores, count, expected) in cases {
        assert_eq!(top_k(scores, count), expected, "{scores:?}");
    }
}

#[test]
fn filters_keep_the_likeliest_tokens() {
    let logits = [1.0, 3.0, 3.0, f64::NEG_INFINITY, 2.0];
    let off = Filters { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
    let cases: [(Filters, &[u32]); 6] = [
        (off, &[1, 2, 4, 0]),
        (Filters { temperature: 0.0, ..off }, &[1]),
        (Filters { top_k: 2, ..off }, &[1, 2]),
        (Filters { top_p: 0.5, ..off }, &[1, 2]), // the likeliest has 0.40
        (Filters { top_p: 0.0, ..off }, &[1]),
        (Filters { min_p: 0.3, ..off }, &[1, 2, 4]),
    ];
    for (filters, expected) in cases {
        assert_eq!(kept(&logits, filters), expected, "{filters:?}");
    }
    assert_eq!(draw(&logits, off, |_| 0.5), Some(1), "equal noise draws the likeliest, the smaller id among equals");
    assert_eq!(draw(&logits, off, |id| if id == 0 { 0.999 } else { 0.5 }), Some(0), "noise can lift any kept token");
    assert_eq!(draw(&[f64::NEG_INFINITY], off, |_| 0.5), None);
    let probabilities: f64 = log_softmax(&logits).into_iter().map(f64::exp).sum();
    assert!((probabilities - 1.0).abs() < 1e-12);
}
