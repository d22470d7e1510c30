//! The laws of exactness as functions over a loaded model: each runs the same tokens in two or more ways and compares
//! bits. The tests run them on two checkpoints and with planted faults; `selftest` runs them on the user's machine.
//!
//! A law says what it exercised and fails when that was nothing. All but one know no scheduling: they are the bottom of
//! what the engine stands on; the other runs the engine itself.

mod drafts;
pub mod loops;
mod served;

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use sha2::{Digest, Sha256};
use tf_engine::model::{Drawn, Model, SequenceView, SlotIndex};
use tf_engine::request::Sampling;
use tf_numerics::lanes::Level;

use super::engram::EngramHash;
use super::load::Weights;
use super::shape::Shape;
use super::{DeepseekV41, Fault, Options};
use loops::{Drafter, Piece, RowBits, equal, feed_all, feed_prompt, head_drafts, logits, plan, reply};

/// Tokens that the laws need at least, besides the halo's prompt.
pub const TOKENS_MIN: usize = 220;

/// Weights that are packed once, and models around them with different options.
pub struct Subject {
    parts: RefCell<Option<(Shape, Weights, EngramHash)>>,
    options: Options,
    tokens: Vec<u32>,
    vocab: u32,
    halo_prompt: usize,
    pub extent: Extent,
}

/// How many cases each law has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extent {
    /// Few rows: for devices that are emulated.
    Least,
    Quick,
    #[default]
    Full,
}

impl Extent {
    fn pick<T>(self, least: T, quick: T, full: T) -> T {
        match self {
            Extent::Least => least,
            Extent::Quick => quick,
            Extent::Full => full,
        }
    }
}

/// A model of a subject; gives the weights back when it is dropped.
pub struct Lease<'a> {
    subject: &'a Subject,
    model: Option<DeepseekV41>,
}

impl Subject {
    /// `options` are those of the machine: threads and level. `tokens` are repeated until every law has enough.
    ///
    /// # Errors
    /// Too few distinct tokens, or a model whose positions are too few.
    pub fn new(
        shape: Shape,
        weights: Weights,
        hash: EngramHash,
        options: Options,
        tokens: &[u32],
    ) -> Result<Subject, String> {
        let halo_prompt = halo_prompt(&shape);
        let needed = TOKENS_MIN.max(halo_prompt + REPLY_ROWS);
        if needed + REPLY_ROWS > shape.max_position_embeddings {
            return Err(format!(
                "the laws need {} positions, this model has {}",
                needed + REPLY_ROWS,
                shape.max_position_embeddings
            ));
        }
        let vocab = shape.vocab_size as u32;
        if tokens.is_empty() || tokens.iter().any(|token| *token >= vocab) {
            return Err("the laws need tokens of the model's own vocabulary".to_owned());
        }
        // Each repetition is shifted, so that no position repeats the one a period before it.
        let tokens =
            (0..needed).map(|index| (tokens[index % tokens.len()] + (index / tokens.len()) as u32) % vocab).collect();
        let parts = RefCell::new(Some((shape, weights, hash)));
        Ok(Subject { parts, options, tokens, vocab, halo_prompt, extent: Extent::Full })
    }

    /// A model with these options; one at a time.
    fn model(&self, options: Options) -> Result<Lease<'_>, String> {
        let (shape, weights, hash) = self.parts.borrow_mut().take().ok_or("the weights are in use")?;
        let model = DeepseekV41::new(shape, weights, hash, options).map_err(|error| error.to_string())?;
        Ok(Lease { subject: self, model: Some(model) })
    }

    fn plain(&self, fault: Fault) -> Result<Lease<'_>, String> {
        self.with_slots(8, fault)
    }

    fn with_slots(&self, slots: u32, fault: Fault) -> Result<Lease<'_>, String> {
        self.model(Options { fault, round_rows: 320, context: 1024.min(self.context()), slots, ..self.options.clone() })
    }

    fn context(&self) -> u32 {
        (self.tokens.len() + REPLY_ROWS) as u32
    }
}

impl Deref for Lease<'_> {
    type Target = DeepseekV41;

    fn deref(&self) -> &DeepseekV41 {
        self.model.as_ref().expect("the model leaves only when the lease is dropped")
    }
}

impl DerefMut for Lease<'_> {
    fn deref_mut(&mut self) -> &mut DeepseekV41 {
        self.model.as_mut().expect("the model leaves only when the lease is dropped")
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Some(model) = self.model.take() {
            *self.subject.parts.borrow_mut() = Some(model.into_parts());
        }
    }
}

/// Rows of a reply after the halo's prompt.
const REPLY_ROWS: usize = 40;

/// A prompt long enough that every late layer skips rows of it.
fn halo_prompt(shape: &Shape) -> usize {
    let last = shape.num_hidden_layers - 1;
    let source = shape.kv_source_layer_ids.last().copied().unwrap_or(0).min(last);
    shape.sliding_window + (last - source) * (shape.sliding_window - 1) + 2 * shape.sliding_window
}

/// What a law looked at.
pub struct Evidence {
    /// What was exercised, by name; none of it may be 0.
    pub counts: Vec<(&'static str, u64)>,
    digest: Sha256,
}

impl Evidence {
    fn new() -> Evidence {
        Evidence { counts: Vec::new(), digest: Sha256::new() }
    }

    fn bits(&mut self, rows: &[RowBits]) {
        for row in rows {
            for value in row {
                self.digest.update(value.to_le_bytes());
            }
        }
    }

    fn count(&mut self, name: &'static str, count: u64) {
        match self.counts.iter_mut().find(|(other, _)| *other == name) {
            Some((_, sum)) => *sum += count,
            None => self.counts.push((name, count)),
        }
    }

    /// # Errors
    /// The first thing that was never exercised.
    fn complete(self) -> Result<Evidence, String> {
        match self.counts.iter().find(|(_, count)| *count == 0) {
            Some((name, _)) => Err(format!("nothing was shown: {name} is 0")),
            None if self.counts.is_empty() => Err("nothing was shown".to_owned()),
            None => Ok(self),
        }
    }

    /// SHA-256 over the bits that were compared.
    pub fn digest(&self) -> [u8; 32] {
        self.digest.clone().finalize().into()
    }
}

/// One law.
pub struct Law {
    /// `L0` and so on, as the laws are numbered.
    pub id: &'static str,
    pub title: &'static str,
    pub run: fn(&Subject, Fault) -> Result<Evidence, String>,
    /// Planted faults that must turn it red.
    pub faults: &'static [Fault],
    /// Whether it says nothing about a GPU.
    pub cpu_only: bool,
}

/// All laws that one device can show.
pub const LAWS: &[Law] = &[
    Law {
        id: "L0",
        title: "a row in company = the row alone",
        run: company,
        faults: &[Fault::RowCount],
        cpu_only: false,
    },
    Law {
        id: "L1",
        title: "drafted = undrafted",
        run: drafted,
        faults: &[Fault::StaleRing, Fault::StaleTokens, Fault::RowCount, Fault::PairRowLost],
        cpu_only: false,
    },
    Law {
        id: "L1",
        title: "rejected drafts leave no trace",
        run: rejected,
        faults: &[Fault::StaleRing, Fault::StaleTokens, Fault::PairRowLost, Fault::DraftWrites, Fault::RowCount],
        cpu_only: false,
    },
    Law {
        id: "L2",
        title: "draws in company = draws alone",
        run: drawn_together,
        faults: &[Fault::RowCount],
        cpu_only: false,
    },
    Law {
        id: "L2",
        title: "drafts in company = drafts alone",
        run: drafts::together,
        faults: &[Fault::StaleDrafts, Fault::DraftSlot],
        cpu_only: false,
    },
    Law {
        id: "L2",
        title: "served any way = served alone",
        run: served::served,
        faults: &[Fault::RowCount, Fault::StaleRing, Fault::PairRowLost, Fault::SnapshotShort],
        cpu_only: false,
    },
    Law {
        id: "L3",
        title: "resumed = fresh",
        run: resumed,
        faults: &[Fault::SnapshotShort, Fault::SharedPage],
        cpu_only: false,
    },
    Law {
        id: "L4",
        title: "any split = whole",
        run: any_split,
        faults: &[Fault::PairRowLost, Fault::RowCount],
        cpu_only: false,
    },
    Law { id: "L4", title: "the halo skips rows and no bits", run: halo, faults: &[Fault::HaloShort], cpu_only: false },
    Law {
        id: "L5",
        title: "every CPU level and thread count",
        run: processors,
        faults: &[Fault::Threads],
        cpu_only: true,
    },
];

fn sampled(seed: u64) -> Sampling {
    Sampling { temperature: 0.9, top_p: 0.95, top_k: 40, min_p: 0.01, seed, ..Sampling::greedy() }
}

fn samplings() -> [Sampling; 3] {
    let penalised = Sampling { frequency_penalty: 0.4, presence_penalty: 0.2, repetition_penalty: 1.1, ..sampled(77) };
    [Sampling::greedy(), sampled(5), penalised]
}

/// One token at a time = chunks of 3, 7 and 64 = whole.
fn any_split(subject: &Subject, fault: Fault) -> Result<Evidence, String> {
    let tokens = &subject.tokens[..subject.extent.pick(40, 70, 150)];
    let mut evidence = Evidence::new();
    let mut model = subject.plain(fault)?;
    let whole = feed_all(&mut model, 0, 0, tokens, tokens.len())?;
    for &chunk in subject.extent.pick(&[7, 1][..], &[64, 7, 3, 1], &[64, 7, 3, 1]) {
        model.release(SlotIndex(0));
        let rows = feed_all(&mut model, 0, 0, tokens, chunk)?;
        equal(&format!("chunks of {chunk}"), &rows, &whole)?;
        evidence.count("rows compared", rows.len() as u64);
    }
    evidence.bits(&whole);
    evidence.complete()
}

/// 2, 3, 8 and 16 sequences together = each alone, joining and leaving at different rounds.
fn company(subject: &Subject, fault: Fault) -> Result<Evidence, String> {
    let mut evidence = Evidence::new();
    let counts = subject.extent.pick(&[2usize, 4][..], &[2, 3, 8], &[2, 3, 8, 16]);
    let mut model = subject.with_slots(counts.iter().map(|count| *count as u32).fold(8, u32::max), fault)?;
    for &count in counts {
        let length = subject.extent.pick(20, 40, 40);
        let sequences: Vec<&[u32]> =
            (0..count).map(|index| &subject.tokens[11 * index..11 * index + length + 7 * (index % 3)]).collect();
        let mut wanted: Vec<Vec<RowBits>> = Vec::new();
        for tokens in &sequences {
            wanted.push(feed_all(&mut model, 0, 0, tokens, 1)?);
            model.release(SlotIndex(0));
        }
        let mut found: Vec<Vec<RowBits>> = vec![Vec::new(); count];
        for round in 0..200 {
            let mut pieces = Vec::new();
            for (index, tokens) in sequences.iter().enumerate().filter(|(index, _)| round >= 2 * index) {
                let done = found[index].len();
                // Prompt pieces of different lengths beside single rows.
                let rows = if round == 2 * index { 9 + index } else { 1 + (index + round) % 3 };
                let slot = (count - 1 - index) as u32;
                if done < tokens.len() {
                    let piece = &tokens[done..(done + rows).min(tokens.len())];
                    pieces.push((index, Piece::all(slot, done as u32, piece)));
                }
            }
            if pieces.is_empty() && round > 2 * count {
                break;
            }
            if round % 2 == 1 {
                pieces.reverse();
            }
            let (indices, pieces): (Vec<usize>, Vec<Piece<'_>>) = pieces.into_iter().unzip();
            let mut rows = logits(&mut model, &pieces)?.into_iter();
            for (index, piece) in indices.iter().zip(&pieces) {
                found[*index].extend(rows.by_ref().take(piece.tokens.len()));
                model.keep(SlotIndex(piece.slot), piece.start + piece.tokens.len() as u32);
            }
        }
        for (index, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            equal(&format!("sequence {index} of {count}"), found, wanted)?;
            evidence.bits(wanted);
            model.release(SlotIndex(index as u32));
        }
    }
    evidence.count("rows that shared a round", model.counters().rows_shared);
    evidence.complete()
}

/// Every level of this CPU, 1, 2 and 3 threads.
fn processors(subject: &Subject, fault: Fault) -> Result<Evidence, String> {
    let tokens = &subject.tokens[..100];
    let mut evidence = Evidence::new();
    let run = |level, threads| {
        let options =
            Options { fault, level, threads, round_rows: 128, context: 256, slots: 1, ..subject.options.clone() };
        let mut model = subject.model(options)?;
        let mut rows = feed_all(&mut model, 0, 0, &tokens[..70], 70)?;
        rows.extend(feed_all(&mut model, 0, 70, &tokens[70..], 1)?);
        let drafts = head_drafts(&mut model, 0, 7, 100, &sampled(3), 5)?;
        rows.push(drafts.tokens);
        rows.push(drafts.confidence.iter().map(|value| value.to_bits()).collect());
        Ok::<_, String>(rows)
    };
    let wanted = run(Level::best(), 1)?;
    for level in Level::available() {
        for threads in [1, 2, 3] {
            equal(&format!("{}, {threads} threads", level.name()), &run(level, threads)?, &wanted)?;
            evidence.count("levels and thread counts", 1);
        }
    }
    evidence.bits(&wanted);
    evidence.complete()
}

/// The exact halo: skipping changes nothing that can be asked for afterwards.
fn halo(subject: &Subject, fault: Fault) -> Result<Evidence, String> {
    let prompt = &subject.tokens[..subject.halo_prompt];
    let reply = &subject.tokens[subject.halo_prompt..subject.halo_prompt + REPLY_ROWS];
    let mut evidence = Evidence::new();
    let run = |halo, chunk| {
        let round_rows = (subject.halo_prompt as u32).max(64);
        let context = subject.context();
        let mut model =
            subject.model(Options { fault, halo, round_rows, context, slots: 1, ..subject.options.clone() })?;
        let mut rows = vec![feed_prompt(&mut model, 0, prompt, chunk)?];
        let skipped = model.counters().layer_rows_skipped;
        let position = prompt.len() as u32;
        let drafts = head_drafts(&mut model, 0, reply[0], position, &Sampling::greedy(), 5)?;
        rows.push(drafts.tokens);
        rows.push(drafts.confidence.iter().map(|value| value.to_bits()).collect());
        for (index, token) in reply.iter().enumerate() {
            let start = position + index as u32;
            rows.extend(logits(&mut model, &[Piece::reply(0, start, &[*token])])?);
            model.keep(SlotIndex(0), start + 1);
        }
        Ok::<_, String>((rows, skipped))
    };
    let (wanted, skipped) = run(false, prompt.len())?;
    if skipped != 0 {
        return Err(format!("{skipped} rows were skipped without the halo"));
    }
    for chunk in subject.extent.pick(vec![50], vec![50], vec![prompt.len(), 50, 7]) {
        let (rows, skipped) = run(true, chunk)?;
        equal(&format!("halo, chunks of {chunk}"), &rows, &wanted)?;
        evidence.count("rows skipped in a layer", skipped);
    }
    evidence.bits(&wanted);
    evidence.complete()
}

/// Verify windows whose drafts are kept up to the first wrong one = plain decode; drafting between them changes nothing.
fn rejected(subject: &Subject, fault: Fault) -> Result<Evidence, String> {
    let tokens = &subject.tokens[..subject.extent.pick(60, 120, 120)];
    let mut evidence = Evidence::new();
    let mut model = subject.plain(fault)?;
    let wanted = feed_all(&mut model, 0, 0, tokens, 1)?;
    model.release(SlotIndex(0));
    let prompt = 21;
    let mut rows = feed_all(&mut model, 0, 0, &tokens[..prompt], prompt)?;
    let mut start = prompt;
    while start < tokens.len() {
        // The window's first `right` drafts are the true continuation, the others are not.
        let right = ((start * 7 / 3) % 6).min(tokens.len() - start - 1);
        let mut window: Vec<u32> = tokens[start..=start + right].to_vec();
        while window.len() < 6 {
            let position = start + window.len();
            window.push((tokens.get(position).copied().unwrap_or(0) + 1 + position as u32) % subject.vocab);
        }
        let computed = logits(&mut model, &[Piece::reply(0, start as u32, &window)])?;
        rows.extend_from_slice(&computed[..=right]);
        evidence.count("drafts accepted", right as u64);
        evidence.count("drafts rejected", 5 - right as u64);
        start += right + 1;
        model.keep(SlotIndex(0), start as u32);
        head_drafts(&mut model, 0, 3, start as u32, &Sampling::greedy(), 5)?;
    }
    equal("verify windows", &rows, &wanted)?;
    evidence.bits(&wanted);
    evidence.complete()
}

/// A slot restored from a snapshot goes on as the sequence itself does, also beside the one it was taken from.
fn resumed(subject: &Subject, fault: Fault) -> Result<Evidence, String> {
    let tokens = &subject.tokens[..subject.extent.pick(80, 200, 200)];
    let end = tokens.len() as u32;
    let mut evidence = Evidence::new();
    let mut model = subject.plain(fault)?;
    let wanted = feed_all(&mut model, 0, 0, tokens, tokens.len())?;
    model.release(SlotIndex(0));
    let lengths: &[usize] =
        subject.extent.pick(&[33], &[17, 128], &[1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 163]);
    for &length in lengths {
        feed_prompt(&mut model, 0, &tokens[..length], 50)?;
        let snapshot = model.snapshot(SlotIndex(0), length as u32);
        // The original writes on into its pages while the snapshot is held, with other tokens.
        let other: Vec<u32> = tokens[length..].iter().map(|token| (token + 5) % subject.vocab).collect();
        let original = feed_all(&mut model, 0, length as u32, &other[..20], 7)?;
        model.restore(SlotIndex(3), &snapshot);
        model.restore(SlotIndex(5), &snapshot);
        let rows = feed_all(&mut model, 3, length as u32, &tokens[length..], 9)?;
        equal(&format!("resumed at {length}"), &rows, &wanted[length..])?;
        let drafts = head_drafts(&mut model, 3, 9, end, &Sampling::greedy(), 5)?.tokens;
        // The original goes on after the first copy wrote, and before the second does.
        let further = feed_all(&mut model, 0, length as u32 + 20, &tokens[..10], 1)?;
        let again = feed_all(&mut model, 5, length as u32, &other[..20], 3)?;
        equal(&format!("resumed at {length} once more"), &again, &original)?;
        let rest = feed_all(&mut model, 5, length as u32 + 20, &tokens[..10], 5)?;
        equal(&format!("both ways on from {length}"), &further, &rest)?;
        for slot in [0, 3, 5] {
            model.release(SlotIndex(slot));
        }
        feed_all(&mut model, 0, 0, tokens, 64)?;
        if head_drafts(&mut model, 0, 9, end, &Sampling::greedy(), 5)?.tokens != drafts {
            return Err(format!("resumed at {length}: other drafts"));
        }
        model.release(SlotIndex(0));
        evidence.count("positions resumed", 2 * length as u64);
    }
    evidence.bits(&wanted);
    evidence.complete()
}

/// A drafted reply = the plain one, greedy and sampled, tokens and log-probabilities.
fn drafted(subject: &Subject, fault: Fault) -> Result<Evidence, String> {
    let prompt = &subject.tokens[..subject.extent.pick(20, 45, 45)];
    let count = subject.extent.pick(12, 24, 48);
    let mut evidence = Evidence::new();
    let mut model = subject.plain(fault)?;
    for sampling in samplings() {
        let plain = reply(&mut model, prompt, count, &sampling, Drafter::Absent, 64)?;
        if plain.tokens.len() != count || plain.logprobs.is_empty() {
            return Err("the plain reply is not complete".into());
        }
        let right = plain.tokens.clone();
        let drafters = [
            (Drafter::Right(&right), true, false),
            (Drafter::Wrong(&right), false, true),
            (Drafter::Mixed(&right), true, true),
            (Drafter::Head, false, false),
        ];
        for (drafter, accepts, rejects) in drafters {
            for &chunk in subject.extent.pick(&[8][..], &[64, 8], &[64, 8]) {
                let drafted = reply(&mut model, prompt, count, &sampling, drafter, chunk)?;
                drafted.same(&plain).map_err(|difference| format!("{sampling:?}: {difference}"))?;
                if accepts && drafted.accepted == 0 || rejects && drafted.rejected == 0 {
                    return Err(format!("{} accepted, {} rejected", drafted.accepted, drafted.rejected));
                }
                evidence.count("drafts accepted", drafted.accepted as u64);
                evidence.count("drafts rejected", drafted.rejected as u64);
            }
        }
        evidence.bits(&[plain.tokens, plain.logprobs]);
    }
    evidence.complete()
}

/// A round of several windows draws what each window draws alone, with its own settings and key.
fn drawn_together(subject: &Subject, fault: Fault) -> Result<Evidence, String> {
    let prompts = [&subject.tokens[..33], &subject.tokens[20..41], &subject.tokens[5..52]];
    let samplings = samplings();
    let mut evidence = Evidence::new();
    let draw = |model: &mut DeepseekV41, sequences: &[usize]| {
        let pieces: Vec<Piece<'_>> = sequences
            .iter()
            .map(|sequence| {
                let tokens = prompts[*sequence];
                let draw = tokens.len() - 1..tokens.len();
                let prompt_end = tokens.len() as u32;
                Piece { slot: *sequence as u32, start: 0, tokens, prompt_end, whole: false, draw }
            })
            .collect();
        let mut plan = plan(&pieces);
        plan.windows.iter_mut().for_each(|window| window.logprobs = Some(5));
        let views: Vec<SequenceView<'_>> = sequences
            .iter()
            .map(|sequence| SequenceView {
                sampling: &samplings[*sequence],
                prompt: prompts[*sequence],
                reply: &[],
                given: &[],
            })
            .collect();
        let mut drawn = Drawn::default();
        model.forward(&plan, &views, &mut drawn).map_err(|error| error.to_string())?;
        sequences.iter().for_each(|sequence| model.release(SlotIndex(*sequence as u32)));
        let of_window = |window: &std::ops::Range<usize>| -> RowBits {
            drawn.rows[window.clone()]
                .iter()
                .flat_map(|row| {
                    let top = &drawn.top[row.top_start as usize..(row.top_start + row.top_count) as usize];
                    let top = top.iter().flat_map(|(token, logprob)| [*token, logprob.to_bits()]);
                    [row.token, row.logprob.to_bits()].into_iter().chain(top).collect::<Vec<_>>()
                })
                .collect()
        };
        Ok::<_, String>(drawn.windows.iter().map(of_window).collect::<Vec<_>>())
    };
    let mut model = subject.plain(fault)?;
    let mut alone: Vec<RowBits> = Vec::new();
    for sequence in 0..3 {
        alone.extend(draw(&mut model, &[sequence])?);
    }
    if alone.iter().any(|row| row.len() != 12) {
        return Err("a row lacks its log-probabilities".into());
    }
    for order in [[0, 1, 2], [2, 0, 1]] {
        let wanted: Vec<RowBits> = order.iter().map(|sequence| alone[*sequence].clone()).collect();
        equal(&format!("order {order:?}"), &draw(&mut model, &order)?, &wanted)?;
        evidence.count("draws in a shared round", 3);
    }
    evidence.bits(&alone);
    evidence.complete()
}
