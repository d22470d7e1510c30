//! What must hold of the draft head: its chain of proposals and their confidence. A world's row is one sequence.

use super::{Args, Sampled, launch, pack, reference};
use crate::contract::*;
use crate::sample::{Scratch, Settings};
use tf_numerics::draw::bits;

pub const DRAFT_HEAD: Contract = Contract {
    name: "draft_head",
    formula: "m = embed[previous]; logits = base[i] + head @ m; proposal = argmax, or what a sampled sequence \
        draws; confidence = proj . [hidden_rows[i], m]",
    shapes: "base [sequences, block, vocabulary] f32, hidden_rows [sequences, block, hidden] f32, embed \
        [vocabulary, rank] bf16; tokens, confidence [sequences, steps]; logits [sequences, vocabulary] f32, those of \
        the last step",
    order: "head @ m one fused chain over the rank, base added; confidence two sums of products as rms_norm's",
    bound: "proposals exact: gaps exceed 1e-3 or are zero; confidence (columns / 64 + 8) U of the absolute \
        products of both parts; logits (rank + 2) U of the absolute products and the base",
    cases: &[
        Case {
            name: "slots",
            rows: 24,
            sizes: &[("vocabulary", 301), ("rank", 32), ("hidden", 128), ("block", 5), ("steps", 5)],
        },
        Case {
            name: "fewer steps",
            rows: 9,
            sizes: &[("vocabulary", 64), ("rank", 16), ("hidden", 64), ("block", 8), ("steps", 3)],
        },
        Case {
            name: "columns of both halves",
            rows: 5,
            sizes: &[("vocabulary", 64), ("rank", 64), ("hidden", 96), ("block", 5), ("steps", 2)],
        },
    ],
    make,
    limits: &[Limit { what: "Markov rank", most: super::RANK_MAX, accepts, beyond: super::RANK_MAX + 16 }],
    controls: &[
        Control::value("takes the anchor for every step"),
        Control::value("ties go to the larger id"),
        Control::value("reads the hidden row of the next step"),
        Control::value("leaves the rank out of the confidence"),
        Control::geometry("takes the anchor of the first sequence"),
    ],
    edits: &[
        metal(
            "goes on from the anchor (Metal)",
            "shape.step == 0u ? anchors[sequence]",
            "shape.step <= 1u ? anchors[sequence]",
        ),
        metal(
            "takes the base of the first step (Metal)",
            "base[ulong(sequence * shape.block + shape.step)",
            "base[ulong(sequence * shape.block)",
        ),
        metal("drops the last of the rank (Metal)", "k < shape.rank; k++) sum", "k + 1u < shape.rank; k++) sum"),
        metal(
            "ties between lanes go to the larger id (Metal)",
            "const uint first = simd_min(best == largest && largest > 0x007fffffu ? token : 0xffffffffu);",
            "const uint first = simd_max(best == largest && largest > 0x007fffffu ? token : 0u);",
        ),
        metal("ties within a lane go to the larger id (Metal)", "if (key > best) {", "if (key >= best) {"),
        metal(
            "takes the hidden row of the first step (Metal)",
            "hidden_rows + ulong(sequence * shape.block + shape.step)",
            "hidden_rows + ulong(sequence * shape.block)",
        ),
        metal("leaves the state out of the confidence (Metal)", "= of_hidden + of_state;", "= of_hidden;"),
        metal("leaves half of the state out (Metal)", "if (c + 32u < columns) odd", "if (c + 64u < columns) odd"),
        metal(
            "adds the rank from its end (Metal)",
            "for (uint k = 0u; k < shape.rank; k++)",
            "for (uint k = shape.rank; k-- > 0u;)",
        ),
    ],
    standard: STANDARD_CONTROLS,
};

/// An edit of this family's Metal source, which gate 1 must notice.
const fn metal(name: &'static str, find: &'static str, replace: &'static str) -> Control {
    Control::metal(name, Gate::Value, include_str!("kernel.metal"), find, replace)
}

struct Heads {
    vocabulary: usize,
    rank: usize,
    hidden: usize,
    block: usize,
    steps: usize,
    base: Vec<f32>,
    hidden_rows: Vec<f32>,
    anchors: Vec<u32>,
    embed: Vec<u16>,
    head: Vec<u16>,
    proj: Vec<f32>,
    greedy: Vec<bool>,
}

/// Tokens whose rows of the head are equal, the larger ids drawn up as the smallest: a tie wherever they lead, between lanes
/// and, 32 apart, within one.
const TWINS: [usize; 3] = [21, 50, 53];

fn make(case: &Case, seed: u64) -> Box<dyn World> {
    let mut values = Values::new(seed);
    let (vocabulary, rank, hidden) = (case.size("vocabulary"), case.size("rank"), case.size("hidden"));
    let (block, steps) = (case.size("block"), case.size("steps"));
    let mut heads = Heads {
        vocabulary,
        rank,
        hidden,
        block,
        steps,
        base: Vec::new(),
        hidden_rows: values.floats(case.rows * block * hidden, 2.0),
        anchors: (0..case.rows).map(|_| values.below(vocabulary) as u32).collect(),
        embed: values.bf16_bits(vocabulary * rank, 1.0),
        head: values.bf16_bits(vocabulary * rank, 1.0),
        proj: values.floats(hidden + rank, 0.5),
        greedy: (0..case.rows).map(|row| row % 3 != 2).collect(),
    };
    let twin: Vec<u16> = heads.head[TWINS[0] * rank..][..rank].to_vec();
    TWINS[1..].iter().for_each(|id| heads.head[id * rank..][..rank].copy_from_slice(&twin));
    for row in 0..case.rows {
        // Sequences in which two tokens lie within a kernel's error of each other are drawn again.
        for _ in 0..1000 {
            heads.base.truncate(row * block * vocabulary);
            heads.base.extend(values.floats(block * vocabulary, 3.0));
            let own = &mut heads.base[row * block * vocabulary..];
            for step in own.chunks_mut(vocabulary) {
                TWINS[1..].iter().for_each(|twin| step[*twin] = step[TWINS[0]]);
                if row % 4 == 0 {
                    TWINS.iter().for_each(|twin| step[*twin] = 20.0);
                }
            }
            if heads.chain(row).1 > 1e-3 {
                break;
            }
        }
    }
    Box::new(heads)
}

fn bf16_values(bits: &[u16]) -> Vec<f64> {
    bits.iter().map(|bits| f64::from(f32::from_bits(u32::from(*bits) << 16))).collect()
}

/// How a sampled sequence draws, by its row: nothing but its key.
fn settings(row: usize) -> Settings<'static> {
    Settings { temperature: 1.0, seed: 0x5eed_0001_0000_0000 + row as u64 * 77, ..Settings::GREEDY }
}

/// Position of a sequence's first proposal.
fn position(row: usize) -> u32 {
    100 + row as u32 * 3
}

/// What a sampled sequence adds to a token's logit.
fn noise(row: usize, step: usize, token: usize) -> f64 {
    let word = bits(settings(row).seed, position(row) + step as u32, token as u32);
    -(-(1.0 - (f64::from(word) + 0.5) / 4_294_967_296.0).ln()).ln()
}

impl Heads {
    /// The tokens and confidences of a sequence by the definition, and the least gap between its first and second token.
    fn chain(&self, row: usize) -> (Vec<(u32, f64)>, f64) {
        let (vocabulary, rank, hidden, block) = (self.vocabulary, self.rank, self.hidden, self.block);
        let (embed, head, proj) = (bf16_values(&self.embed), bf16_values(&self.head), wide(&self.proj));
        let (mut previous, mut chain, mut gap) = (self.anchors[row], Vec::new(), f64::INFINITY);
        for step in 0..self.steps {
            let at = row * block + step;
            let base = wide(&self.base[at * vocabulary..][..vocabulary]);
            let own = wide(&self.hidden_rows[at * hidden..][..hidden]);
            let found = reference::proposals(&base, &own, &embed, &head, &proj, rank, previous);
            let mut logits = found.logits;
            if !self.greedy[row] {
                logits.iter_mut().enumerate().for_each(|(token, logit)| *logit += noise(row, step, token));
            }
            previous = reference::argmax(&logits);
            let best = logits[previous as usize];
            let second = logits.iter().filter(|logit| **logit < best).fold(f64::NEG_INFINITY, |a, b| a.max(*b));
            gap = gap.min(best - second);
            chain.push((previous, found.confidence[0]));
        }
        (chain, gap)
    }

    /// What the logits of a sequence's last step may be.
    fn last_logits(&self, row: usize, chain: &[(u32, f64)]) -> Vec<Expected> {
        let (vocabulary, rank) = (self.vocabulary, self.rank);
        let previous = self.steps.checked_sub(2).map_or(self.anchors[row], |step| chain[step].0);
        let state = bf16_values(&self.embed[previous as usize * rank..][..rank]);
        let base = wide(&self.base[(row * self.block + self.steps - 1) * vocabulary..][..vocabulary]);
        let of_token = |(base, head): (&f64, &[u16])| {
            let head = bf16_values(head);
            let value = base + head.iter().zip(&state).map(|(a, b)| a * b).sum::<f64>();
            let radius = dot_error(&head, &state, (rank + 2) as f64) + 2.0 * U * base.abs();
            Expected { value, span: Span::around(value, radius) }
        };
        base.iter().zip(self.head.chunks(rank)).map(of_token).collect()
    }
}

impl Heads {
    /// Anchors, hidden rows and the confidence's weights with the fault in them, where it is one of these.
    fn planted(&self, picks: &[Pick], fault: Fault) -> (Vec<u32>, Vec<f32>, Vec<f32>) {
        let Heads { hidden, block, .. } = *self;
        let mut anchors: Vec<u32> = picks.iter().map(|pick| self.anchors[row_of(*pick)]).collect();
        if fault.is("takes the anchor of the first sequence") {
            let first = anchors[0];
            anchors.fill(first);
        }
        let mut hidden_rows = gather(picks, &self.hidden_rows, block * hidden);
        if fault.is("reads the hidden row of the next step") {
            hidden_rows.chunks_mut(block * hidden).for_each(|rows| rows.rotate_left(hidden));
        }
        let mut proj = self.proj.clone();
        if fault.is("leaves the rank out of the confidence") {
            proj[hidden..].fill(0.0);
        }
        (anchors, hidden_rows, proj)
    }
}

impl World for Heads {
    fn launch(&self, stage: &mut Stage<'_>, picks: &[Pick], fault: Fault) -> Result<(), String> {
        let Heads { vocabulary, rank, hidden, block, steps, .. } = *self;
        let sequences = picks.len();
        let (anchors, hidden_rows, proj) = self.planted(picks, fault);
        let mut packed = vec![0; pack::packed_len(vocabulary, rank)];
        pack::pack(&self.head, vocabulary, rank, &mut packed);
        let base = stage.rows_in("base", &gather(picks, &self.base, block * vocabulary));
        let hidden_rows = stage.rows_in("hidden rows", &hidden_rows);
        let (embed, head, proj) =
            (stage.input("embed", &self.embed), stage.input("head", &packed), stage.input("proj", &proj));
        let mut logits = stage.output::<f32>("logits", sequences * vocabulary);
        let (mut tokens, mut confidence) = (vec![u32::MAX; sequences * steps], vec![f32::NAN; sequences * steps]);
        let mut scratch = Scratch::default();
        // With one step a launch the anchor stays what it was.
        let once = fault.is("takes the anchor for every step");
        for step in 0..if once { steps } else { 1 } {
            let (mut part, mut part_confidence) = (vec![0; sequences], vec![0.0; sequences]);
            let shifted: Vec<f32> = match once {
                true => {
                    let of_pick = |rows: &[f32]| rows[step * vocabulary..][..vocabulary].to_vec();
                    gather(picks, &self.base, block * vocabulary).chunks(block * vocabulary).flat_map(of_pick).collect()
                }
                false => Vec::new(),
            };
            let own = stage.rows_in("base", &shifted);
            let sampled = |sequence: usize| {
                let row = row_of(picks[sequence]);
                let first = position(row) + if once { step as u32 } else { 0 };
                (!self.greedy[row]).then(|| Sampled::new(settings(row), first))
            };
            let args = Args {
                base: if once { &own.buffer } else { &base.buffer },
                hidden_rows: &hidden_rows.buffer,
                anchors: &anchors,
                embed: &embed.buffer,
                head: &head.buffer,
                proj: &proj.buffer,
                vocabulary,
                rank,
                hidden,
                block: if once { 1 } else { block },
                steps: if once { 1 } else { steps },
                sampled: &sampled,
                logits: &mut logits.buffer,
                tokens: if once { &mut part } else { &mut tokens },
                confidence: if once { &mut part_confidence } else { &mut confidence },
                scratch: &mut scratch,
            };
            stage.run(|queue| launch(queue, args))?;
            for sequence in 0..if once { sequences } else { 0 } {
                tokens[sequence * steps + step] = part[sequence];
                confidence[sequence * steps + step] = part_confidence[sequence];
            }
        }
        if fault.is("ties go to the larger id") {
            tokens.iter_mut().filter(|token| **token as usize == TWINS[0]).for_each(|token| *token = TWINS[1] as u32);
        }
        for input in [base, hidden_rows, embed, head, proj] {
            stage.read(input);
        }
        stage.rows::<f32>(logits, vocabulary);
        for sequence in 0..sequences {
            let at = sequence * steps..(sequence + 1) * steps;
            stage.words(sequence, tokens[at.clone()].iter().copied());
            stage.words(sequence, confidence[at].iter().map(|confidence| confidence.to_bits()));
        }
        Ok(())
    }

    fn expected(&self, row: usize) -> Vec<Expected> {
        let (rank, hidden) = (self.rank, self.hidden);
        let chain = self.chain(row).0;
        let embed = bf16_values(&self.embed);
        let proj = wide(&self.proj);
        let mut expected = self.last_logits(row, &chain);
        expected.extend(chain.iter().map(|(token, _)| Expected::exactly(f64::from(*token))));
        let mut previous = self.anchors[row];
        for (step, (token, confidence)) in chain.iter().enumerate() {
            let own = wide(&self.hidden_rows[(row * self.block + step) * hidden..][..hidden]);
            let state = &embed[previous as usize * rank..][..rank];
            let roundings = (hidden.max(rank).div_ceil(64) + 9) as f64;
            let radius = dot_error(&proj[..hidden], &own, roundings) + dot_error(&proj[hidden..], state, roundings);
            expected.push(Expected { value: *confidence, span: Span::around(*confidence, radius) });
            previous = *token;
        }
        expected
    }

    fn decode(&self, _row: usize, words: &[u32]) -> Vec<f64> {
        let (logits, proposed) = words.split_at(self.vocabulary);
        let (tokens, confidence) = proposed.split_at(self.steps);
        let float = |word: &u32| f64::from(f32::from_bits(*word));
        let tokens = tokens.iter().map(|token| f64::from(*token));
        logits.iter().map(float).chain(tokens).chain(confidence.iter().map(float)).collect()
    }

    fn work(&self) -> Work {
        let products = self.anchors.len() * self.steps * self.vocabulary * self.rank;
        Work { bytes: self.steps * self.head.len() * 2 + self.base.len() * 4, multiply_adds: products }
    }
}

fn accepts(rank: usize) -> bool {
    use tf_device::{Buffer, Device, Queue};
    let (vocabulary, hidden) = (16, 32);
    let zeros = |bytes| Buffer::zeroed(&Device::cpu(), bytes).expect("a small head fits into memory");
    let (base, rows, embed, head) = (
        zeros(4 * vocabulary),
        zeros(4 * hidden),
        zeros(2 * vocabulary * rank),
        zeros(2 * pack::packed_len(vocabulary, rank)),
    );
    let (proj, mut logits) = (zeros(4 * (hidden + rank)), zeros(4 * vocabulary));
    let args = Args {
        base: &base,
        hidden_rows: &rows,
        anchors: &[0],
        embed: &embed,
        head: &head,
        proj: &proj,
        vocabulary,
        rank,
        hidden,
        block: 1,
        steps: 1,
        sampled: &|_| None,
        logits: &mut logits,
        tokens: &mut [0],
        confidence: &mut [0.0],
        scratch: &mut Scratch::default(),
    };
    let mut queue = Queue::cpu(1, tf_numerics::lanes::Level::Scalar);
    launch(&mut queue, args).is_ok()
}
