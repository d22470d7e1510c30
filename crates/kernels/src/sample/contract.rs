//! What must hold of the draw.

use super::reference::{self, Filters};
use super::{Args, Draw, History, Scratch, Settings, launch};
use crate::contract::*;
use tf_numerics::draw::{bits, noise};

pub const SAMPLE: Contract = Contract {
    name: "sample",
    formula: "the largest logit / temperature + noise(seed, position, id) of the tokens that bias, penalties, \
        masks, top-k, top-p and min-p leave; log-probabilities of the raw row",
    shapes: "logits [rows, vocabulary] f32; a token, its log-probability, the next token's and the likeliest three \
        of each row",
    order: "weights are integers, so that their sums have no order; candidates by value descending, id ascending",
    bound: "tokens exact where the definition's choice hangs on more than 1e-3 or on a tie; log-probabilities 4 U \
        of both terms, 6 U and vocabulary 2^-40",
    cases: &[
        Case { name: "wide", rows: 128, sizes: &[("vocabulary", 301)] },
        Case { name: "large vocabulary", rows: 22, sizes: &[("vocabulary", 5000)] },
        Case { name: "as many threads as there are", rows: 3, sizes: &[("vocabulary", 65_536)] },
    ],
    make,
    limits: &[],
    controls: &[
        Control::value("takes the position before"),
        Control::value("takes the seed of another choice"),
        Control::value("ties go to the larger id"),
        Control::value("leaves top-k out"),
        Control::value("leaves top-p out"),
        Control::value("squares min-p"),
        Control::value("leaves the penalties out"),
        Control::value("leaves the mask out"),
        Control::value("divides by the temperature twice"),
        Control::geometry("takes the seed of the first row"),
    ],
    edits: &[
        Control::metal(
            "declares 16 bytes too many of threadgroup memory (Metal)",
            Gate::Limits,
            include_str!("kernel.metal"),
            "threadgroup ulong part[32];",
            "threadgroup ulong part[4098];",
        ),
        metal(
            "takes the smaller value of equal sums (Metal)",
            "own_score == score && own > key",
            "own_score == score && own < key",
        ),
        metal(
            "gives equal sums of several threads to the smaller id (Metal)",
            "order_key(score)) == highest ? key : 0ul, crew)",
            "order_key(score)) == highest ? ulong(uint(key)) : 0ul, crew)",
        ),
        metal("takes the largest min-p for too large (Metal)", ">= draw.min_p)) continue;", "> draw.min_p)) continue;"),
        metal("leaves the masked tokens in (Metal)", "if (id < count) values[id] = -INFINITY;\n", ""),
        metal(
            "reads a word behind the mask (Metal)",
            "id / 32u < draw.allowed_count",
            "id / 32u <= draw.allowed_count",
        ),
        metal(
            "leaves the last token out (Metal)",
            "id < count; id += crew.threads) {\n        const float value = values[id] / divisor;",
            "id + 1u < count; id += crew.threads) {\n        const float value = values[id] / divisor;",
        ),
        metal_draw(
            "ties go to the larger id (Metal)",
            "ulong(order_key(value)) << 32 | ulong(~id)",
            "ulong(order_key(value)) << 32 | ulong(id)",
        ),
        metal_draw(
            "keys the noise by the next position (Metal)",
            "b = position + keys[1]",
            "b = position + 1u + keys[1]",
        ),
        metal_draw("turns by another count (Metal)", "0x0d0f1a06u : 0x111d1018u", "0x0d0f1a06u : 0x0d0f1a06u"),
        metal_draw(
            "loses the lower half of a weight (Metal)",
            "return (ulong(whole) << 20) + ulong(uint((upper - float(whole)) * 1048576.0f));",
            "return ulong(whole) << 20;",
        ),
        metal_draw(
            "drops the barrier of a sum (Metal)",
            "    if (lane == 0u) part[simdgroup] = value;\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n    ulong sum",
            "    if (lane == 0u) part[simdgroup] = value;\n    ulong sum",
        ),
        metal("keeps one more of top-k (Metal)", ">= ulong(top_k)) least |= bit;", "> ulong(top_k)) least |= bit;"),
        metal(
            "leaves min-p out (Metal)",
            "if (own < first || !(exp_own(value - best) >= draw.min_p)) continue;",
            "if (own < first) continue;",
        ),
        metal("takes the next penalty (Metal)", "value = value - cost - draw.presence;", "value = value - cost;"),
        metal(
            "drops the barrier behind the copy (Metal)",
            "own[id] = row[id];\n        threadgroup_barrier(mem_flags::mem_device);",
            "own[id] = row[id];",
        ),
        metal(
            "drops the barrier behind the penalties (Metal)",
            "        values[id] = value;\n    }\n    threadgroup_barrier(mem_flags::mem_device);\n",
            "        values[id] = value;\n    }\n",
        ),
        metal(
            "takes the mask's next bit (Metal)",
            "(word >> (id & 31u) & 1u) == 0u",
            "(word >> ((id + 1u) & 31u) & 1u) == 0u",
        ),
        metal(
            "lists the likeliest twice (Metal)",
            "if (key < before && key > next) next = key;",
            "if (key > next) next = key;",
        ),
    ],
    standard: HOST_CONTROLS,
};

/// An edit of the Metal text of the draw.
pub(crate) const fn metal_draw(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, crate::gpu::DRAW, find, replace)
}

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

/// How a row draws, by its index.
const KINDS: usize = 18;
/// Kinds whose two best tokens have equal sums of value and noise: any two, the larger value at the larger id, and at the
/// smaller one; see [`Rows::other`].
const TIED: usize = 13;
const TIED_UPWARDS: usize = 15;
const TIED_DOWNWARDS: usize = 16;
/// The kind whose mask ends before the vocabulary does, and that of the largest min-p, which leaves the last token alone.
const SHORT: usize = 14;
const STRICT: usize = 17;
/// The lower one of the two tied tokens; see [`Rows::other`].
const PAIR: u32 = 66;
const TOP: u32 = 3;
const BIAS: &[(u32, f32)] = &[(3, 2.5), (7, -4.0)];
/// Of tokens that the penalties meet as well: every step changes what the step before it left, in other threads.
const BIAS_OF_SEEN: &[(u32, f32)] = &[(5, 2.5), (11, -4.0)];
/// Ids whose bits, read as a mask, let the lowest tokens of a word through.
const MASKED: &[u32] = &[31, 63];
const PROMPT: &[u32] = &[2, 5, 9, 11];
const REPLY: &[u32] = &[5, 8, 8, 20];

struct Rows {
    vocabulary: usize,
    logits: Vec<f32>,
    seeds: Vec<u64>,
    mask: Vec<u32>,
}

fn settings_of(kind: usize, seed: u64) -> Settings<'static> {
    let plain = Settings { temperature: 0.7, seed, ..Settings::GREEDY };
    match kind {
        0 => Settings::GREEDY,
        1 => plain,
        2 => Settings { top_k: 4, ..plain },
        3 => Settings { top_p: 0.5, temperature: 1.3, ..plain },
        4 => Settings { min_p: 0.4, temperature: 1.5, ..plain },
        5 => Settings { frequency_penalty: 0.5, presence_penalty: 2.0, repetition_penalty: 1.2, ..plain },
        6 => Settings { logit_bias: BIAS, ..plain },
        7 => Settings { top_k: 30, top_p: 0.6, ..plain },
        8 => Settings { top_k: 40, min_p: 0.4, temperature: 1.5, ..plain },
        9 => Settings { top_p: 0.97, min_p: 0.4, temperature: 1.5, ..plain },
        10 => Settings { temperature: 1.5, ..plain },
        12 | SHORT => Settings { masked: MASKED, masked_before: REPLY.len() as u32 + 1, ..plain },
        TIED | TIED_UPWARDS | TIED_DOWNWARDS => Settings { temperature: 1.0, ..plain },
        STRICT => Settings { min_p: 1.0, ..plain },
        _ => Settings {
            logit_bias: BIAS_OF_SEEN,
            frequency_penalty: 0.5,
            presence_penalty: 2.0,
            repetition_penalty: 1.2,
            ..plain
        },
    }
}

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let vocabulary = case.size("vocabulary");
    let mut mask: Vec<u32> = (0..vocabulary.div_ceil(32)).map(|_| values.word() | 1).collect();
    mask[(vocabulary - 1) / 32] |= 1 << ((vocabulary - 1) % 32);
    let mut rows = Rows { vocabulary, logits: Vec::new(), seeds: Vec::new(), mask };
    for row in 0..case.rows {
        // Rows whose choice hangs on less than a kernel's error are drawn again.
        for _ in 0..1000 {
            rows.logits.truncate(row * vocabulary);
            rows.seeds.truncate(row);
            rows.logits.extend((0..vocabulary).map(|_| values.unit() * values.unit() * 6.0));
            if matches!(row % KINDS, 5 | 11) {
                // Penalised tokens lead, so that penalties decide.
                let own = &mut rows.logits[row * vocabulary..];
                PROMPT.iter().chain(REPLY).for_each(|id| own[*id as usize] += 5.0);
            }
            if row % KINDS == 0 {
                // A greedy row with two equal leaders.
                let own = &mut rows.logits[row * vocabulary..];
                own[40 + row % 100] = 12.0;
                own[150 + row % 100] = 12.0;
            }
            rows.seeds.push(u64::from(values.word()) << 32 | u64::from(values.word()));
            rows.lead(row);
            if rows.is_clear(row) {
                break;
            }
        }
    }
    Box::new(rows)
}

impl Rows {
    fn position(row: usize) -> u32 {
        100 + row as u32 * 3
    }

    /// Lets those tokens lead that a rule is about.
    fn lead(&mut self, row: usize) {
        let (vocabulary, kind, seed) = (self.vocabulary, row % KINDS, self.seeds[row]);
        let short = 32 * (self.mask.len() - 1);
        let own = &mut self.logits[row * vocabulary..];
        match kind {
            12 => MASKED.iter().for_each(|id| own[*id as usize] += 8.0),
            SHORT => own[short..].iter_mut().for_each(|value| *value += 8.0),
            TIED | TIED_UPWARDS | TIED_DOWNWARDS => {
                let of_noise = |id| noise::<f32>(seed, Rows::position(row), id);
                let other = Rows::other(row);
                own[PAIR as usize] = 40.0 - of_noise(PAIR);
                let score = own[PAIR as usize] + of_noise(PAIR);
                let near = (score - of_noise(other)).to_bits();
                let equal = (near - 64..near + 64).find(|bits| f32::from_bits(*bits) + of_noise(other) == score);
                own[other as usize] = f32::from_bits(equal.expect("a sum of two numbers is met by a neighbour"));
            }
            // The last token, which loops may leave out.
            _ if kind == STRICT || row / KINDS % 2 == 1 => own[vocabulary - 1] = 13.0,
            _ => {}
        }
    }

    /// The other one of a row's tied tokens: one that the same thread of 32 or 96 looks at, or another lane's and, of
    /// more threads, another SIMD group's.
    fn other(row: usize) -> u32 {
        PAIR + if row % KINDS == TIED { 96 } else { 33 }
    }

    fn is_tied(row: usize) -> bool {
        matches!(row % KINDS, TIED | TIED_UPWARDS | TIED_DOWNWARDS)
    }

    /// The tokens that a row allows, as bits.
    fn mask_of(&self, row: usize) -> Option<&[u32]> {
        match row % KINDS {
            1 | 7 | 11 => Some(&self.mask),
            SHORT => Some(&self.mask[..self.mask.len() - 1]),
            _ => None,
        }
    }

    /// The row's values after bias, penalties and mask.
    fn values(&self, row: usize) -> Vec<f64> {
        let settings = settings_of(row % KINDS, self.seeds[row]);
        let mut values = wide(&self.logits[row * self.vocabulary..][..self.vocabulary]);
        for &(id, bias) in settings.logit_bias {
            values[id as usize] += f64::from(bias);
        }
        for (id, value) in values.iter_mut().enumerate() {
            let count = |tokens: &[u32]| tokens.iter().filter(|token| **token as usize == id).count();
            let repetition = f64::from(settings.repetition_penalty);
            if repetition != 1.0 && count(PROMPT) + count(REPLY) > 0 {
                *value = if *value > 0.0 { *value / repetition } else { *value * repetition };
            }
            if count(REPLY) > 0 {
                *value -=
                    f64::from(settings.frequency_penalty) * count(REPLY) as f64 + f64::from(settings.presence_penalty);
            }
            let word = self.mask_of(row).map_or(u32::MAX, |mask| mask.get(id / 32).copied().unwrap_or(0));
            if word >> (id % 32) & 1 == 0 || settings.masked.contains(&(id as u32)) {
                *value = f64::NEG_INFINITY;
            }
        }
        values
    }

    fn token(&self, row: usize, nudge: f64) -> u32 {
        let settings = settings_of(row % KINDS, self.seeds[row]);
        let filters = Filters {
            temperature: f64::from(settings.temperature),
            top_k: settings.top_k as usize,
            top_p: if settings.top_p < 1.0 { f64::from(settings.top_p) + nudge } else { 1.0 },
            min_p: (f64::from(settings.min_p) * (1.0 + nudge)).min(1.0),
        };
        // The likeliest may gain a little on the others, and lose a little.
        let mut values = self.values(row);
        for (id, value) in values.iter_mut().enumerate() {
            *value += nudge * if id % 2 == 0 { 1.0 } else { -1.0 };
        }
        let uniform = |id: u32| 1.0 - (f64::from(bits(settings.seed, Rows::position(row), id)) + 0.5) / 4_294_967_296.0;
        reference::draw(&values, filters, uniform).expect("some token stays")
    }

    fn is_clear(&self, row: usize) -> bool {
        let token = self.token(row, 0.0);
        let [at_pair, at_other] = [PAIR, Rows::other(row)].map(|id| self.logits[row * self.vocabulary + id as usize]);
        match row % KINDS {
            TIED_UPWARDS => return at_other > at_pair,
            TIED_DOWNWARDS => return at_other < at_pair,
            _ => {}
        }
        matches!(row % KINDS, 0 | TIED) || [1e-3, -1e-3].iter().all(|nudge| self.token(row, *nudge) == token)
    }
}

/// A row's settings with the fault in them, where it is one of settings; `first` is the seed of the first row.
fn planted<'a>(mut settings: Settings<'a>, first: u64, fault: Fault) -> Settings<'a> {
    if fault.is("takes the seed of another choice") {
        settings.seed ^= 1;
    }
    if fault.is("takes the seed of the first row") {
        settings.seed = first;
    }
    if fault.is("leaves top-k out") {
        settings.top_k = 0;
    }
    if fault.is("leaves top-p out") {
        settings.top_p = 1.0;
    }
    if fault.is("squares min-p") {
        settings.min_p *= settings.min_p;
    }
    if fault.is("leaves the penalties out") {
        settings.frequency_penalty = 0.0;
        settings.presence_penalty = 0.0;
        settings.repetition_penalty = 1.0;
    }
    if fault.is("divides by the temperature twice") {
        settings.temperature *= settings.temperature;
    }
    settings
}

impl World for Rows {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let vocabulary = self.vocabulary;
        let logits = stage.rows_in("logits", &gather(picks, &self.logits, vocabulary));
        let first = self.seeds[row_of(picks[0])];
        let of_pick =
            |pick: &Pick| planted(settings_of(row_of(*pick) % KINDS, self.seeds[row_of(*pick)]), first, fault);
        let settings: Vec<Settings<'_>> = picks.iter().map(of_pick).collect();
        let before = u32::from(fault.is("takes the position before"));
        let draws: Vec<Draw<'_>> = picks
            .iter()
            .zip(&settings)
            .enumerate()
            .map(|(place, (pick, settings))| {
                let row = row_of(*pick);
                let allowed = self.mask_of(row).filter(|_| !fault.is("leaves the mask out"));
                Draw {
                    row: place,
                    position: Rows::position(row) - before,
                    reply_count: REPLY.len() as u32,
                    settings,
                    history: History { prompt: PROMPT, reply: REPLY, window: &[] },
                    allowed,
                    logprobs: Some(TOP),
                    next: Some((row % vocabulary) as u32),
                }
            })
            .collect();
        let (mut outcomes, mut top) = (Vec::new(), Vec::new());
        let mut scratch = Scratch::default();
        let args = Args {
            logits: &logits.buffer,
            vocab: vocabulary,
            draws: &draws,
            outcomes: &mut outcomes,
            top: &mut top,
            scratch: &mut scratch,
        };
        stage.run(|queue| launch(queue, args))?;
        for (place, outcome) in outcomes.iter().enumerate() {
            let row = picks[place].row();
            let Ok(mut drawn) = *outcome else {
                if row.is_some() {
                    // Too few words for a result, so that the row is red.
                    stage.words(place, [u32::MAX, 0, 0]);
                }
                continue;
            };
            if let (Some(row), true) = (row, fault.is("ties go to the larger id")) {
                let values = self.values(row);
                let tied = values.iter().rposition(|value| *value == values[drawn.token as usize]);
                drawn.token = tied.map_or(drawn.token, |id| id as u32);
            }
            stage.words(place, [drawn.token, drawn.logprob.to_bits(), drawn.next_logprob.to_bits()]);
            let listed = &top[drawn.top_start as usize..][..drawn.top_count as usize];
            stage.words(place, listed.iter().flat_map(|(id, logprob)| [*id, logprob.to_bits()]));
        }
        stage.read(logits);
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let logits = wide(&self.logits[row * self.vocabulary..][..self.vocabulary]);
        let logprobs = reference::log_softmax(&logits);
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let of = |id: u32| {
            let (value, logit) = (logprobs[id as usize], logits[id as usize]);
            let log_total = logit - largest - value;
            let radius = 4.0 * U * ((logit - largest).abs() + log_total.abs()) + 6.0 * U;
            let tail = self.vocabulary as f64 / (1u64 << 40) as f64;
            Expected { value, span: Span::around(value, radius + tail) }
        };
        let token = self.token(row, 0.0);
        let mut expected = vec![Expected::exactly(f64::from(token)), of(token), of((row % self.vocabulary) as u32)];
        if Rows::is_tied(row) {
            // The sums differ by less than a rounding: either by the definition, one by the order of float32.
            let either = |a: Span, b: Span| Span { low: a.low.min(b.low), high: a.high.max(b.high) };
            let other = Rows::other(row);
            expected[0].span = Span { low: f64::from(PAIR), high: f64::from(other) };
            expected[1].span = either(of(PAIR).span, of(other).span);
        }
        for id in reference::ranked(&logits).into_iter().take(TOP as usize) {
            expected.extend([Expected::exactly(f64::from(id)), of(id)]);
        }
        expected
    }

    fn decode(&self, _row: usize, words: &[u32]) -> Vec<f64> {
        let float = |word: u32| f64::from(f32::from_bits(word));
        let mut values = vec![f64::from(words[0]), float(words[1]), float(words[2])];
        for pair in words[3..].chunks(2) {
            values.extend([f64::from(pair[0]), float(pair[1])]);
        }
        values
    }

    fn work(&self) -> Work {
        Work { bytes: self.logits.len() * 4, multiply_adds: self.logits.len() * 12 }
    }
}
