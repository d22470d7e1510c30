//! The draw against two other ones: a plain one that sorts everything, bit for bit, and the definition in float64.

use super::reference::{self, Filters};
use super::*;
use crate::testing::*;
use std::cmp::Reverse;
use tf_device::{LaunchError, Queue};
use tf_numerics::lanes::{Float, Level};
use tf_numerics::{draw, math};

const PLAIN: Settings<'static> = Settings { temperature: 1.0, ..Settings::GREEDY };

fn draw_of<'a>(settings: &'a Settings<'a>) -> Draw<'a> {
    Draw {
        row: 0,
        position: 10,
        reply_count: 0,
        settings,
        history: History::default(),
        allowed: None,
        logprobs: None,
        next: None,
    }
}

struct Results {
    outcomes: Vec<Outcome>,
    top: Vec<(u32, f32)>,
}

fn run(queue: &mut Queue, scratch: &mut Scratch, logits: &[f32], vocab: usize, draws: &[Draw<'_>]) -> Results {
    let (mut outcomes, mut top) = (vec![Err(RowError::NoCandidate); 3], vec![(9, 9.0); 3]);
    let logits = device(logits);
    let args = Args { logits: &logits, vocab, draws, outcomes: &mut outcomes, top: &mut top, scratch };
    launch(queue, args).unwrap();
    assert_eq!(outcomes.len(), draws.len());
    Results { outcomes, top }
}

/// Draws on every level; all must agree.
fn outcome(logits: &[f32], draw: Draw<'_>) -> Outcome {
    let mut outcomes = Level::available().into_iter().map(|level| {
        run(&mut Queue::cpu(1, level), &mut Scratch::default(), logits, logits.len(), &[draw]).outcomes[0]
    });
    let first = outcomes.next().expect("there is a level");
    assert!(outcomes.all(|other| other == first));
    first
}

fn token(logits: &[f32], draw: Draw<'_>) -> Result<u32, RowError> {
    outcome(logits, draw).map(|drawn| drawn.token)
}

/// The rules one by one on a sorted list, in plain code.
fn plainly(logits: &[f32], draw: &Draw<'_>) -> Result<u32, RowError> {
    let Draw { settings: s, history, .. } = draw;
    if logits.iter().any(|v| v.is_nan() || *v == f32::INFINITY) {
        return Err(RowError::NotFinite);
    }
    let mut values = logits.to_vec();
    for &(id, bias) in s.logit_bias {
        values[id as usize] += bias;
    }
    for (id, value) in values.iter_mut().enumerate() {
        let count = |tokens: &[u32]| tokens.iter().filter(|&&t| t as usize == id).count();
        let in_reply = count(history.reply) + count(history.window);
        if s.repetition_penalty != 1.0 && in_reply + count(history.prompt) > 0 {
            *value = if *value > 0.0 { *value / s.repetition_penalty } else { *value * s.repetition_penalty };
        }
        if in_reply > 0 {
            *value = *value - s.frequency_penalty * in_reply as f32 - s.presence_penalty;
        }
        let forbidden = draw.allowed.is_some_and(|words| words.get(id / 32).is_none_or(|w| w >> (id % 32) & 1 == 0));
        let masked = draw.reply_count < s.masked_before && s.masked.contains(&(id as u32));
        if forbidden || masked {
            *value = f32::NEG_INFINITY;
        }
    }
    let mut order: Vec<u32> = (0..values.len() as u32).filter(|&id| values[id as usize] > f32::NEG_INFINITY).collect();
    // Stable, so that ids stay in order among equals.
    let sort = |order: &mut Vec<u32>, values: &[f32]| {
        order.sort_by(|&a, &b| values[b as usize].partial_cmp(&values[a as usize]).unwrap());
    };
    sort(&mut order, &values);
    let Some(&first) = order.first() else { return Err(RowError::NoCandidate) };
    if s.temperature <= 0.0 || values[first as usize] / s.temperature == f32::INFINITY {
        return Ok(first);
    }
    values.iter_mut().for_each(|v| *v /= s.temperature);
    order.sort_unstable();
    sort(&mut order, &values);
    if s.top_k > 0 {
        order.truncate(s.top_k as usize);
    }
    let largest = values[order[0] as usize];
    let e = |id: u32| math::exp(values[id as usize] - largest);
    if s.top_p < 1.0 {
        let total: u64 = order.iter().map(|&id| draw::weight(e(id))).sum();
        let share = (s.top_p as f64 * 4294967296.0) as u128;
        let mut sum = 0u128;
        let mut count = 0;
        while count < order.len() {
            sum += draw::weight(e(order[count])) as u128;
            count += 1;
            if sum << 32 >= total as u128 * share {
                break;
            }
        }
        order.truncate(count);
    }
    order.retain(|&id| e(id) >= s.min_p);
    let score = |id: u32| values[id as usize] + draw::noise::<f32>(s.seed, draw.position, id);
    // The first of the largest, for candidates are in order of preference.
    let best = order.into_iter().reduce(|best, id| if score(id) > score(best) { id } else { best });
    best.ok_or(RowError::NoCandidate)
}

/// Rows of many shapes: peaked, flat, with ties, with forbidden tokens, all equal.
fn rows(vocab: usize, values: &mut Values) -> Vec<Vec<f32>> {
    let peaked = |values: &mut Values| -> Vec<f32> {
        (0..vocab).map(|_| values.unit() * values.unit() * 12.0 + 3.0 * values.unit().powi(7)).collect()
    };
    let flat = values.uniform(vocab, 0.5);
    let wide = values.uniform(vocab, 60.0);
    let tied: Vec<f32> = (0..vocab).map(|_| (values.unit() * 4.0).round()).collect();
    let zeros: Vec<f32> = (0..vocab).map(|_| if values.below(2) == 0 { 0.0 } else { -0.0 }).collect();
    let mut sparse = peaked(values);
    for value in &mut sparse {
        if values.below(3) > 0 {
            *value = f32::NEG_INFINITY;
        }
    }
    vec![peaked(values), flat, wide, tied, zeros, sparse, vec![f32::NEG_INFINITY; vocab]]
}

fn all_settings(values: &mut Values) -> Vec<Settings<'static>> {
    let mut all = vec![Settings::GREEDY, PLAIN];
    for top_k in [0, 1, 3, 40, 600, 3000] {
        for top_p in [1.0, 0.999_999_9, 0.95, 0.5, 0.01, 0.0] {
            for min_p in [0.0, 0.05] {
                let temperature = [1.0, 0.7, 2.5, 0.05][values.below(4) as usize];
                all.push(Settings { temperature, top_k, top_p, min_p, seed: values.next() as u64, ..PLAIN });
            }
        }
    }
    all
}

#[test]
fn every_draw_is_that_of_the_plain_rules_on_a_sorted_list() {
    let mut values = Values::new(1);
    let mut drawn = 0;
    let mut beyond_first = 0;
    for vocab in [1, 2, 7, 16, 100, 128, 129, 1000, 4096, 20_011] {
        for row in rows(vocab, &mut values) {
            for settings in all_settings(&mut values) {
                // Sorting the largest vocabulary for every setting would take minutes.
                if vocab > 5000 && values.below(6) > 0 {
                    continue;
                }
                let draw = Draw { position: values.below(1 << 20), ..draw_of(&settings) };
                let wanted = plainly(&row, &draw);
                assert_eq!(token(&row, draw), wanted, "vocabulary {vocab}, {settings:?}, position {}", draw.position);
                drawn += wanted.is_ok() as u32;
                let likeliest = plainly(&row, &Draw { settings: &Settings::GREEDY, ..draw });
                beyond_first += (wanted != likeliest) as u32;
            }
        }
    }
    assert!(drawn > 2000, "{drawn}");
    assert!(beyond_first > 500, "{beyond_first}: draws that never leave the first candidate show nothing");
}

#[test]
fn biases_penalties_and_masks_apply_in_order() {
    let mut values = Values::new(2);
    let vocab = 300;
    let bias = [(3, 5.0), (299, -100.0), (17, 0.25), (17, 1.5)];
    let mut different = 0;
    for round in 0..400 {
        let logits = values.uniform(vocab, 6.0);
        let mut tokens = |count: u32| -> Vec<u32> { (0..count).map(|_| values.below(vocab as u32)).collect() };
        let (prompt, reply, window) = (tokens(40), tokens(20), tokens(3));
        let masked = tokens(30);
        let allowed: Vec<u32> = (0..vocab.div_ceil(32) - round % 2).map(|_| values.next() | values.next()).collect();
        let settings = Settings {
            temperature: [0.0, 0.8][round % 2],
            top_k: [0, 20][round / 2 % 2],
            frequency_penalty: [0.0, 0.7][round / 4 % 2],
            presence_penalty: [0.0, -0.4][round / 8 % 2],
            repetition_penalty: [1.0, 1.3, 0.8][round % 3],
            logit_bias: if round % 5 == 0 { &[] } else { &bias },
            masked: &masked,
            masked_before: 4,
            seed: round as u64,
            ..PLAIN
        };
        let draw = Draw {
            reply_count: [3, 4][round / 3 % 2],
            history: History { prompt: &prompt, reply: &reply, window: &window },
            allowed: [None, Some(&allowed[..])][round / 16 % 2],
            ..draw_of(&settings)
        };
        let wanted = plainly(&logits, &draw);
        assert_eq!(token(&logits, draw), wanted, "round {round}: {settings:?}");
        different += (wanted != plainly(&logits, &draw_of(&settings))) as u32;
    }
    assert!(different > 100, "{different}: rules that change nothing show nothing");
}

#[test]
fn draws_agree_with_the_definition_in_float64() {
    let mut values = Values::new(3);
    let mut equal = 0;
    for vocab in [5, 130, 2000] {
        for row in rows(vocab, &mut values) {
            for settings in all_settings(&mut values) {
                let draw = Draw { position: values.below(5000), ..draw_of(&settings) };
                let filters = Filters {
                    temperature: settings.temperature as f64,
                    top_k: settings.top_k as usize,
                    top_p: settings.top_p as f64,
                    min_p: settings.min_p as f64,
                };
                let uniform = |id: u32| {
                    let word = draw::bits::<u32>(settings.seed, draw.position, id);
                    1.0 - (word as f64 + 0.5) / 4294967296.0
                };
                // The definition ranks -0 below +0; here they are equal.
                let wide: Vec<f64> = row.iter().map(|&v| v as f64 + 0.0).collect();
                let wanted = reference::draw(&wide, filters, uniform);
                let got = token(&row, draw).ok();
                if got == wanted {
                    equal += 1;
                    continue;
                }
                // Only where the two are as good as equal may rounding choose the other: the contest's values, or the place
                // where a filter cuts.
                let (got, wanted) = (got.expect("a token"), wanted.expect("a token"));
                let value = |id: u32| wide[id as usize] / filters.temperature - (-uniform(id).ln()).ln();
                let kept = reference::kept(&wide, filters);
                let close = (value(got) - value(wanted)).abs() < 1e-4 * value(wanted).abs().max(1.0);
                let at_the_cut = !kept.contains(&got) || kept.last() == Some(&wanted);
                assert!(close || at_the_cut, "vocabulary {vocab}, {settings:?}: {got}, wanted {wanted}");
            }
        }
    }
    assert!(equal > 1400, "{equal}");
}

#[test]
fn the_lowest_id_wins_among_equals() {
    let mut row = vec![1.0; 700];
    for (value, id) in [(2.0, 650), (2.0, 131), (2.0, 130)] {
        row[id] = value;
        assert_eq!(token(&row, draw_of(&Settings::GREEDY)), Ok(id as u32));
    }
    // Zeros of both signs are equal.
    row.fill(-0.0);
    row[5] = 0.0;
    assert_eq!(token(&row, draw_of(&Settings::GREEDY)), Ok(0));
    assert_eq!(token(&row, draw_of(&Settings { top_k: 1, ..PLAIN })), Ok(0));
}

#[test]
fn top_p_takes_the_token_that_reaches_it_and_no_more() {
    // Eight equal tokens: each weighs an eighth.
    let mut row = vec![f32::NEG_INFINITY; 200];
    row[100..108].fill(3.0);
    for (top_p, count) in [(0.0, 1), (0.125, 1), (0.126, 2), (0.5, 4), (0.875, 7), (0.876, 8), (1.0, 8)] {
        let mut seen = [false; 8];
        for position in 0..400 {
            let settings = Settings { top_p, ..PLAIN };
            let drawn = token(&row, Draw { position, ..draw_of(&settings) }).unwrap();
            seen[drawn as usize - 100] = true;
        }
        let wanted: Vec<bool> = (0..8).map(|i| i < count).collect();
        assert_eq!(seen.to_vec(), wanted, "top_p {top_p}");
    }
}

#[test]
fn tokens_are_drawn_as_often_as_they_are_likely() {
    let logits = [2.0, 1.0, 0.0, -1.0, -3.0, 1.5];
    let temperature = 1.3;
    let scaled: Vec<f64> = logits.iter().map(|&v: &f32| (v / temperature) as f64).collect();
    let probabilities: Vec<f64> = reference::log_softmax(&scaled).into_iter().map(f64::exp).collect();
    let settings = Settings { temperature, seed: 77, ..PLAIN };
    let count = 40_000;
    let draws: Vec<Draw<'_>> = (0..count).map(|position| Draw { position, ..draw_of(&settings) }).collect();
    let drawn = run(&mut Queue::cpu(1, Level::best()), &mut Scratch::default(), &logits, 6, &draws);
    let mut seen = [0.0; 6];
    for outcome in drawn.outcomes {
        seen[outcome.unwrap().token as usize] += 1.0;
    }
    let squares = probabilities.iter().zip(seen).map(|(p, n)| (n - p * count as f64).powi(2) / (p * count as f64));
    // Five degrees of freedom: one in a million lies above 35.9.
    let chi_squared: f64 = squares.sum();
    assert!(chi_squared < 35.9, "{chi_squared}: {seen:?}");
}

#[test]
fn a_rare_token_is_drawn_as_often_as_a_common_one_in_proportion() {
    // 60,000 tokens that share a thousandth: noise with too few bits in its tail would starve them.
    let mut row = vec![-13.88; 60_001];
    row[0] = 4.0;
    let rare = 60_000.0 * (-17.88f64).exp();
    let settings = Settings { seed: 3, ..PLAIN };
    let count = 6000;
    let draws: Vec<Draw<'_>> = (0..count).map(|position| Draw { position, ..draw_of(&settings) }).collect();
    let results = run(&mut Queue::cpu(1, Level::best()), &mut Scratch::default(), &row, row.len(), &draws);
    let seen = results.outcomes.iter().filter(|o| o.unwrap().token != 0).count() as f64;
    let wanted = count as f64 * rare / (1.0 + rare);
    assert!(wanted > 5.0);
    assert!((seen - wanted).abs() < 5.0 * wanted.sqrt(), "{seen} of {wanted}");
}

#[test]
fn log_probabilities_are_those_of_the_raw_row_whatever_the_settings() {
    let mut values = Values::new(4);
    for vocab in [1, 6, 128, 1000, 129_280] {
        let row = values.uniform(vocab, 9.0);
        let wide: Vec<f64> = row.iter().map(|&v| v as f64).collect();
        let exact = reference::log_softmax(&wide);
        let ranked = reference::ranked(&wide);
        let next = values.below(vocab as u32);
        let mut first: Option<Vec<u32>> = None;
        let bias = [(0, 3.0)];
        for settings in [
            Settings::GREEDY,
            Settings { temperature: 0.3, top_k: 5, seed: 8, ..PLAIN },
            Settings { logit_bias: &bias, top_p: 0.7, ..PLAIN },
        ] {
            for level in Level::available() {
                let draws = [Draw { logprobs: Some(20), next: Some(next), ..draw_of(&settings) }];
                let results = run(&mut Queue::cpu(1, level), &mut Scratch::default(), &row, vocab, &draws);
                let drawn = results.outcomes[0].unwrap();
                assert_eq!((drawn.top_start, drawn.top_count as usize), (0, 20.min(vocab)));
                let ids: Vec<u32> = results.top.iter().map(|t| t.0).collect();
                assert_eq!(ids, ranked[..20.min(vocab)]);
                let mut all = vec![(next, drawn.next_logprob), (drawn.token, drawn.logprob)];
                all.extend(&results.top);
                for (id, got) in all {
                    let wanted = exact[id as usize];
                    // The difference, the logarithm of the total and their difference each round once; exp has 1.1 ulp.
                    let bound = 4.0 * F32_HALF_ULP * wanted.abs().max(18.0) + 1e-6;
                    assert!((got as f64 - wanted).abs() <= bound, "{vocab} [{id}]: {got}, wanted {wanted}");
                }
                let mut bits: Vec<u32> = results.top.iter().map(|t| t.1.to_bits()).collect();
                bits.push(drawn.next_logprob.to_bits());
                assert_eq!(*first.get_or_insert_with(|| bits.clone()), bits, "{level}, {settings:?}");
            }
        }
    }
}

#[test]
fn more_likeliest_tokens_than_blocks_are_still_ranked() {
    let row: Vec<f32> = (0..500).map(|i| ((i * 7919) % 500) as f32 * 0.01).collect();
    let wide: Vec<f64> = row.iter().map(|&v| v as f64).collect();
    let draws = [Draw { logprobs: Some(600), ..draw_of(&Settings::GREEDY) }];
    let results = run(&mut Queue::cpu(1, Level::best()), &mut Scratch::default(), &row, 500, &draws);
    let ids: Vec<u32> = results.top.iter().map(|t| t.0).collect();
    assert_eq!(ids, reference::ranked(&wide));
}

#[test]
fn a_row_is_the_same_alone_and_among_any_neighbours_on_any_threads() {
    let mut values = Values::new(5);
    let vocab = 5000;
    let rows: Vec<Vec<f32>> = (0..9)
        .map(|i| match i {
            2 => vec![f32::NAN; vocab],
            5 => (0..vocab).map(|_| values.poison()).collect(),
            _ => values.uniform(vocab, 8.0),
        })
        .collect();
    let history: Vec<u32> = (0..50).collect();
    let settings: Vec<Settings<'_>> = (0..9)
        .map(|i| Settings {
            temperature: [0.0, 1.0, 0.8][i % 3],
            top_p: [1.0, 0.9][i % 2],
            seed: i as u64,
            repetition_penalty: [1.0, 1.2][i / 4 % 2],
            ..PLAIN
        })
        .collect();
    let draw = |i: usize, row: usize| Draw {
        row,
        position: 100 + i as u32,
        history: History { prompt: &history, ..History::default() },
        logprobs: (i != 4).then_some(3),
        ..draw_of(&settings[i])
    };
    let mut scratch = Scratch::default();
    let alone: Vec<(Outcome, Vec<(u32, f32)>)> = (0..9)
        .map(|i| {
            let results = run(&mut Queue::cpu(1, Level::Scalar), &mut scratch, &rows[i], vocab, &[draw(i, 0)]);
            (results.outcomes[0], results.top)
        })
        .collect();
    assert_eq!(alone.iter().filter(|a| a.0 == Err(RowError::NotFinite)).count(), 2);
    for (name, mut queue) in queues() {
        for reverse in [false, true] {
            let mut order: Vec<usize> = (0..9).collect();
            if reverse {
                order.reverse();
            }
            let logits: Vec<f32> = order.iter().flat_map(|&i| rows[i].clone()).collect();
            let draws: Vec<Draw<'_>> = order.iter().enumerate().map(|(row, &i)| draw(i, row)).collect();
            let results = run(&mut queue, &mut scratch, &logits, vocab, &draws);
            for (&i, got) in order.iter().zip(&results.outcomes) {
                let place = |drawn: Drawn| Drawn { top_start: 0, ..drawn };
                assert_eq!(got.map(place), alone[i].0, "row {i}, {name}");
                if let Ok(drawn) = got {
                    let range = drawn.top_start as usize..(drawn.top_start + drawn.top_count) as usize;
                    let bits = |top: &[(u32, f32)]| top.iter().map(|t| (t.0, t.1.to_bits())).collect::<Vec<_>>();
                    assert_eq!(bits(&results.top[range]), bits(&alone[i].1), "row {i}, {name}");
                }
            }
        }
    }
}

#[test]
fn rows_that_cannot_be_drawn_say_why() {
    let mut row = vec![0.5; 300];
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
        for at in [0, 131, 299] {
            row[at] = bad;
            for settings in [Settings::GREEDY, PLAIN, Settings { top_k: 3, ..PLAIN }] {
                assert_eq!(token(&row, draw_of(&settings)), Err(RowError::NotFinite));
            }
            row[at] = 0.5;
        }
    }
    let none = [0u32; 10];
    for settings in [Settings::GREEDY, PLAIN, Settings { top_k: 3, top_p: 0.5, ..PLAIN }] {
        let draw = Draw { allowed: Some(&none), logprobs: Some(2), ..draw_of(&settings) };
        assert_eq!(token(&row, draw), Err(RowError::NoCandidate));
    }
    assert_eq!(token(&[f32::NEG_INFINITY; 4], draw_of(&PLAIN)), Err(RowError::NoCandidate));
}

#[test]
fn a_temperature_near_zero_is_greedy() {
    let row: Vec<f32> = (0..400).map(|i| if i == 77 { 50.0 } else { i as f32 * 0.1 }).collect();
    for temperature in [1e-38, 1e-40, 1e-4] {
        for position in 0..20 {
            let settings = Settings { temperature, ..PLAIN };
            assert_eq!(token(&row, Draw { position, ..draw_of(&settings) }), Ok(77));
        }
    }
    let bias = [(77, -60.0)];
    let settings = Settings { temperature: 1e-39, logit_bias: &bias, ..PLAIN };
    assert_eq!(token(&row, draw_of(&settings)), Ok(399));
}

#[test]
fn tokens_passed_over_could_not_have_won() {
    // The skipping of the contest over a whole row, with and without a filter, at magnitudes where sums lose bits.
    let mut values = Values::new(8);
    for scale in [0.0, 1.0, 30.0, 1e4, 1e7] {
        for round in 0..60 {
            let row: Vec<f32> =
                (0..3000).map(|_| values.unit().powi(3) * 9.0 + values.unit().round() * scale).collect();
            let settings = Settings { seed: round, top_p: [1.0, 0.97][round as usize % 2], ..PLAIN };
            let draw = draw_of(&settings);
            assert_eq!(token(&row, draw), plainly(&row, &draw), "scale {scale}, round {round}");
        }
    }
}

#[test]
fn seed_position_and_nothing_else_move_the_noise() {
    let row = vec![0.0; 5000];
    let base = Settings { seed: 5, ..PLAIN };
    let drawn = |settings: &Settings<'_>, position| token(&row, Draw { position, ..draw_of(settings) }).unwrap();
    let first = drawn(&base, 3);
    assert_eq!(drawn(&base, 3), first);
    // Filters that keep everything leave the draw as it is.
    assert_eq!(drawn(&Settings { top_p: 0.999_999_94, ..base }, 3), first);
    assert_eq!(drawn(&Settings { top_k: 4999, temperature: 1.0, ..base }, 3), first);
    assert_ne!(drawn(&base, 4), first);
    assert_ne!(drawn(&Settings { seed: 6, ..base }, 3), first);
    assert_ne!(drawn(&Settings { seed: 5 | 1 << 40, ..base }, 3), first);
}

#[test]
fn shapes_that_disagree_are_refused_and_no_draws_are_no_work() {
    let logits = device(&[0.0f32; 20]);
    let mut queue = Queue::cpu(1, Level::Scalar);
    let mut launch_with = |vocab: usize, draws: &[Draw<'_>]| {
        let (mut outcomes, mut top, mut scratch) = (vec![], vec![], Scratch::default());
        let args =
            Args { logits: &logits, vocab, draws, outcomes: &mut outcomes, top: &mut top, scratch: &mut scratch };
        launch(&mut queue, args)
    };
    let draw = draw_of(&PLAIN);
    assert_eq!(launch_with(10, &[Draw { row: 1, ..draw }]), Ok(()));
    assert_eq!(launch_with(10, &[]), Ok(()));
    assert!(matches!(launch_with(10, &[Draw { row: 2, ..draw }]), Err(LaunchError::Shape { .. })));
    assert!(matches!(launch_with(10, &[Draw { next: Some(10), ..draw }]), Err(LaunchError::Shape { .. })));
    assert!(matches!(launch_with(0, &[draw]), Err(LaunchError::Shape { .. })));
    assert!(matches!(launch_with(VOCAB_MAX + 1, &[draw]), Err(LaunchError::Limit { .. })));
}

#[test]
fn memory_stops_growing() {
    let mut values = Values::new(6);
    let row = values.uniform(3000, 5.0);
    let bias = [(1, 1.0)];
    let mut scratch = Scratch::default();
    let mut queue = Queue::cpu(1, Level::best());
    let mut all = |values: &mut Values| {
        for settings in all_settings(values) {
            let settings = Settings { logit_bias: &bias, repetition_penalty: 1.1, ..settings };
            let history = History { prompt: &[1, 2, 3], ..History::default() };
            let draws = [Draw { history, logprobs: Some(20), ..draw_of(&settings) }];
            run(&mut queue, &mut scratch, &row, 3000, &draws);
        }
        scratch.threads.iter().map(|t| t.capacities()).collect::<Vec<_>>()
    };
    let first = all(&mut values);
    assert_eq!(all(&mut values), first);
}

#[test]
fn keys_order_candidates_by_value_and_then_by_id() {
    let mut values = Values::new(7);
    let mut list: Vec<(f32, u32)> =
        (0..500).map(|_| (values.unit().round() * values.unit(), values.below(50))).collect();
    list.extend([(0.0, 3), (-0.0, 2), (f32::MAX, 1), (-f32::MAX, 9), (f32::MIN_POSITIVE, 4)]);
    let mut by_key = list.clone();
    by_key.sort_by_key(|&(v, id)| Reverse(cpu::key(v, id)));
    list.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1)));
    let canonical =
        |l: &[(f32, u32)]| l.iter().map(|&(v, id)| (Float::max(v, 0.0) + Float::min(v, 0.0), id)).collect::<Vec<_>>();
    assert_eq!(canonical(&by_key), canonical(&list));
}
