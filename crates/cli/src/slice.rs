//! `bench slice`: some layers of the release's real dimensions with random weights, made on the device without a checkpoint.
//!
//! Times rounds of decode rows and prompt chunks by the layer and compares them with what the device can read: the ceiling is
//! taken in the same run. Then laws of exactness run on the same weights. On the CPU few layers, experts and tokens, so that
//! the command runs anywhere; its figures say little there.

mod times;

use std::time::Instant;

use tf_bench::{Check, Record, Row};
use tf_device::gpu::rounds::Giving;
use tf_device::{Buffer, Device, Queue};
use tf_engine::Sampling;
use tf_engine::model::{DraftRequest, Drafts, Drawn, Model, RoundPlan, SequenceView, SlotIndex, Window};
use tf_kernels::stream_read;
use tf_model::deepseek_v41::engram::EngramHash;
use tf_model::deepseek_v41::laws::{Extent, LAWS, Law, Subject};
use tf_model::deepseek_v41::load::Weights;
use tf_model::deepseek_v41::shape::{FLASH, Shape};
use tf_model::deepseek_v41::{DeepseekV41, Fault, Options, Snapshot, random};
use tf_numerics::lanes::Level;

use crate::arguments::{Arguments, Mistakes};
use crate::bench::{WAYS, counts};
use crate::build;
use crate::device;
use crate::failure::Failure;
use crate::machine;

/// What is built and measured.
struct Plan {
    shape: Shape,
    options: Options,
    rows: Vec<u32>,
    prefill: Vec<u32>,
    /// Positions before the decode rows.
    context: u32,
    repetitions: u32,
    /// Rounds of decode rows that are given to the device before it is waited for.
    burst: u32,
    /// Whether rounds also start in the other ways.
    compares: bool,
    /// Whether rounds are taken apart by kernel.
    apart: bool,
    ceiling_bytes: usize,
    laws: Vec<String>,
    settings: Vec<(String, String)>,
}

/// Layers, rows and the like where nobody says, for a device.
struct Defaults {
    layers: u64,
    rows: &'static [u32],
    prefill: &'static [u32],
    context: u64,
    laws: &'static [&'static str],
}

const ON_GPU: Defaults = Defaults {
    layers: 16,
    rows: &[1, 2, 4, 6, 8, 16, 32, 64, 128],
    prefill: &[2048, 8192],
    context: 4096,
    laws: &["L0", "L4"],
};
const ON_CPU: Defaults = Defaults { layers: 1, rows: &[1, 4], prefill: &[64], context: 128, laws: &["L4"] };
/// The release's layer at which a slice begins: a source of entries, of selections and of candidates.
const FIRST_LAYER: u64 = 20;
/// Layers of the release, for figures of a whole model.
const ALL_LAYERS: f64 = FLASH.num_hidden_layers as f64;
const SEED: u64 = 41;
/// The unit of a row that is a share of the ceiling: [`picture`] draws these.
const SHARE: &str = "of the floor";

/// Measures a slice on `device`.
///
/// # Errors
/// Wrong usage, a device without room, a round that fails.
pub fn run(arguments: &Arguments, device: &Device) -> Result<Record, Failure> {
    let plan = read(arguments, device)?;
    let mut record = Record {
        command: "bench slice".to_owned(),
        version: build::VERSION.to_owned(),
        commit: build::COMMIT.to_owned(),
        model: format!("{} random layers", plan.shape.num_hidden_layers),
        device: device::name(device, &plan.options),
        options: plan.settings.clone(),
        ..Record::default()
    };
    measure(&plan, device, &mut record)?;
    Ok(record)
}

fn read(arguments: &Arguments, device: &Device) -> Result<Plan, Failure> {
    let is_gpu = device.backend().is_some();
    let defaults = if is_gpu { ON_GPU } else { ON_CPU };
    let layers = arguments.count("layers").unwrap_or(defaults.layers) as usize;
    let first = arguments.count("first-layer").unwrap_or(FIRST_LAYER) as usize;
    let mut shape = random::cut(&FLASH, first..first + layers).map_err(|error| Mistakes(vec![error.to_string()]))?;
    if !is_gpu {
        shape.n_routed_experts = 12;
        shape.dspark_n_routed_experts = 4;
        shape.vocab_size = 4096;
        shape.engram_compressed_vocab_size = 4096;
        shape.dspark_noise_token_id = 4095;
    }
    let rows = counts(arguments, "rows", defaults.rows)?;
    let prefill = counts(arguments, "prefill", defaults.prefill)?;
    let context = arguments.count("context").unwrap_or(defaults.context) as u32;
    let laws =
        arguments.list("laws").map_or_else(|| defaults.laws.iter().map(ToString::to_string).collect(), <[_]>::to_vec);
    if let Some(name) = laws.iter().find(|name| *name != "none" && LAWS.iter().all(|law| law.id != **name)) {
        return Err(Mistakes(vec![format!("--laws {name}: no such law; `tensorfold selftest` lists them")]).into());
    }
    let most = |counts: &[u32]| counts.iter().copied().max().unwrap_or(1);
    let repetitions = arguments.count("reps").unwrap_or(if is_gpu { 10 } else { 3 }) as u32;
    let burst = if is_gpu { 8 } else { 1 };
    let options = Options {
        threads: arguments.count("threads").map_or_else(machine::physical_cores, |count| count as usize),
        level: Level::best(),
        context: (context + rounds(repetitions, burst)).max(most(&prefill)),
        slots: most(&rows),
        round_rows: most(&rows).max(most(&prefill)).max(context.min(2048)).max(shape.window_rows_max() as u32),
        // Every layer computes every row, and nothing but the layers.
        halo: false,
        draft: false,
        ..Options::default()
    };
    options.check(&shape).map_err(|error| Mistakes(vec![error.to_string()]))?;
    let list = |counts: &[u32]| counts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let settings = [
        ("layers", format!("{first}..{}", first + layers)),
        ("experts", shape.n_routed_experts.to_string()),
        ("vocabulary", shape.vocab_size.to_string()),
        ("rows", list(&rows)),
        ("prefill", list(&prefill)),
        ("context", context.to_string()),
        ("threads", options.threads.to_string()),
    ];
    Ok(Plan {
        shape,
        options,
        rows,
        prefill,
        context,
        repetitions,
        burst,
        compares: is_gpu,
        apart: arguments.is_on("by-kernel"),
        ceiling_bytes: if is_gpu { 2 << 30 } else { 256 << 20 },
        laws,
        settings: settings.map(|(name, value)| (name.to_owned(), value)).to_vec(),
    })
}

/// Rounds that one count of rows takes, so that every slot has room for them.
fn rounds(repetitions: u32, burst: u32) -> u32 {
    // The bursts, a second time from the same start, and rounds with head and draw.
    (repetitions + 1) * (burst + 1)
}

fn failed(error: impl ToString) -> Failure {
    Failure::run_time(error.to_string())
}

fn measure(plan: &Plan, device: &Device, record: &mut Record) -> Result<(), Failure> {
    let ceiling = ceiling(plan, device)?;
    let bandwidth = ceiling.median().unwrap_or(0.0) * 1e9;
    record.rows.push(ceiling);
    let started = Instant::now();
    let weights = random::weights(&plan.shape, device, SEED).map_err(failed)?;
    let hash = random::hash(&plan.shape).map_err(failed)?;
    let held = weights.bytes().resident() as f64 / 1e9;
    let mut slice = Slice::new(plan, (plan.shape.clone(), weights, hash), plan.options.clone())?;
    push(record, "weights", "GB", vec![held]);
    push(record, "making them", "s", vec![started.elapsed().as_secs_f64()]);
    eprintln!("{held:.1} GB of random weights after {:.0} s", started.elapsed().as_secs_f64());
    slice.fill()?;
    for rows in &plan.rows {
        slice.decode(*rows, bandwidth, record)?;
    }
    for rows in &plan.prefill {
        slice.prompt(*rows, bandwidth, record)?;
    }
    let options = Options { draft: true, slots: 1, ..plan.options.clone() };
    let mut slice = Slice::new(plan, slice.into_parts(), options)?;
    slice.fill()?;
    slice.draft(record)?;
    show_laws(plan, slice.into_parts(), record)
}

/// Runs the wanted laws on the same weights.
fn show_laws(plan: &Plan, (shape, weights, hash): Parts, record: &mut Record) -> Result<(), Failure> {
    let options = Options { halo: true, draft: true, ..plan.options.clone() };
    let tokens: Vec<u32> = (0..4000).map(|index| token(index, &plan.shape)).collect();
    let mut subject = Subject::new(shape, weights, hash, options, &tokens).map_err(Failure::run_time)?;
    subject.extent = Extent::Quick;
    // Only layers behind the last source skip rows.
    let skips = plan.shape.kv_source_layer_ids.last().is_some_and(|last| last + 1 < plan.shape.num_hidden_layers);
    let is_shown =
        |law: &&Law| plan.laws.iter().any(|wanted| wanted == law.id) && (skips || law.faults != [Fault::HaloShort]);
    for law in LAWS.iter().filter(is_shown) {
        let mut check = Check::new(&format!("{} {}", law.id, law.title));
        let outcome = (law.run)(&subject, Fault::None);
        let problem = outcome.as_ref().err().cloned();
        check.count(law.title, Some(problem.is_none()), || problem.clone().unwrap_or_default());
        record.checks.push(check);
    }
    Ok(())
}

fn push(record: &mut Record, name: impl Into<String>, unit: &str, samples: Vec<f64>) {
    record.rows.push(Row { name: name.into(), unit: unit.to_owned(), samples });
}

/// How fast the device reads memory, GB a second.
fn ceiling(plan: &Plan, device: &Device) -> Result<Row, Failure> {
    let mut queue = match device {
        Device::Cpu(_) => Queue::cpu(plan.options.threads, plan.options.level),
        Device::Gpu(gpu) => Queue::gpu(gpu),
    };
    // Written first: pages that nobody wrote are one page of zeros on a CPU.
    let mut from = Buffer::zeroed(device, plan.ceiling_bytes).map_err(failed)?;
    let piece = vec![0x5a5a_5a5a_u32; (plan.ceiling_bytes / 4).min(1 << 20)];
    for first in (0..plan.ceiling_bytes / 4).step_by(piece.len()) {
        queue.write(&mut from, first, &piece).map_err(failed)?;
    }
    let words = stream_read::folded_len(&queue);
    let mut folded = Buffer::zeroed_of::<u32>(device, words).map_err(failed)?;
    let mut samples = Vec::new();
    let times = plan.burst.div_ceil(2);
    for repetition in 0..=plan.repetitions {
        let started = Instant::now();
        for _ in 0..times {
            if let Err(error) = stream_read::launch(&mut queue, &from, &mut folded) {
                eprintln!("note: no ceiling is known here: {error}");
                return Ok(Row { name: "reading memory".into(), unit: "GB/s".into(), samples: Vec::new() });
            }
        }
        queue.finish().map_err(failed)?;
        let seconds = started.elapsed().as_secs_f64();
        if repetition > 0 {
            samples.push(f64::from(times) * plan.ceiling_bytes as f64 / seconds / 1e9);
        }
    }
    Ok(Row { name: "reading memory".into(), unit: "GB/s".into(), samples })
}

/// Tokens that differ from one position to the next.
fn token(index: u32, shape: &Shape) -> u32 {
    (index.wrapping_mul(7919) + 11) % (shape.vocab_size as u32 - 1)
}

struct Slice<'a> {
    plan: &'a Plan,
    model: DeepseekV41,
    tokens: u32,
    round: RoundPlan,
    /// A slot that holds the context.
    filled: Option<Snapshot>,
}

type Parts = (Shape, Weights, EngramHash);

impl<'a> Slice<'a> {
    fn new(plan: &'a Plan, (shape, weights, hash): Parts, options: Options) -> Result<Slice<'a>, Failure> {
        let mut model = DeepseekV41::new(shape, weights, hash, options).map_err(failed)?;
        model.finish().map_err(failed)?;
        Ok(Slice { plan, model, tokens: 0, round: RoundPlan::default(), filled: None })
    }

    fn into_parts(self) -> Parts {
        let Slice { model, filled, .. } = self;
        // A snapshot holds pages of the model's cache.
        drop(filled);
        model.into_parts()
    }

    fn push(&mut self, slot: u32, start: u32, rows: u32, prompt_end: u32) {
        let first = self.round.tokens.len();
        for _ in 0..rows {
            self.tokens += 1;
            self.round.tokens.push(token(self.tokens, &self.plan.shape));
        }
        self.round.windows.push(Window {
            slot: SlotIndex(slot),
            start,
            rows: first..first + rows as usize,
            prompt_end,
            whole: false,
            draw: rows as usize - 1..rows as usize,
            logprobs: None,
            sequence: 0,
        });
    }

    /// Gives the pushed windows to the device.
    fn compute(&mut self) -> Result<(), Failure> {
        self.model.compute(&self.round).map_err(failed)?;
        self.kept();
        Ok(())
    }

    /// The same with head and draw, whose tokens come back.
    fn forward(&mut self, drawn: &mut Drawn) -> Result<(), Failure> {
        let sampling = Sampling::greedy();
        let view = SequenceView { sampling: &sampling, prompt: &[], reply: &[], given: &[] };
        self.model.forward(&self.round, &[view], drawn).map_err(failed)?;
        self.kept();
        Ok(())
    }

    fn kept(&mut self) {
        for window in &self.round.windows {
            self.model.keep(window.slot, window.start + window.rows.len() as u32);
        }
        self.round.tokens.clear();
        self.round.windows.clear();
    }

    /// Fills slot 0 to the context; [`Slice::rewind`] gives that state to any slot.
    fn fill(&mut self) -> Result<(), Failure> {
        let (context, chunk) = (self.plan.context, self.plan.options.round_rows);
        let mut start = 0;
        while start < context {
            let rows = chunk.min(context - start);
            self.push(0, start, rows, context);
            self.compute()?;
            start += rows;
        }
        self.filled = Some(self.model.snapshot(SlotIndex(0), context));
        self.model.finish().map_err(failed)
    }

    /// Puts the first `slots` slots back to the context.
    fn rewind(&mut self, slots: u32) {
        for slot in 0..slots {
            self.model.release(SlotIndex(slot));
            if let Some(filled) = &self.filled {
                self.model.restore(SlotIndex(slot), filled);
            }
        }
    }

    /// One round of a row in each of `rows` slots.
    fn round_of(&mut self, rows: u32) {
        for slot in 0..rows {
            let start = self.model.length(SlotIndex(slot));
            self.push(slot, start, 1, start);
        }
    }

    fn decode(&mut self, rows: u32, bandwidth: f64, record: &mut Record) -> Result<(), Failure> {
        let layers = self.plan.shape.num_hidden_layers as f64;
        let mut drawn = Drawn::default();
        self.rewind(rows);
        let before = self.model.round_counts();
        let (layer_us, host_us) = self.bursts(rows)?;
        let after = self.model.round_counts();
        let distinct = self.model.experts_chosen(rows as usize).map_err(failed)? as f64;
        let mut round_us = Vec::new();
        for repetition in 0..=self.plan.repetitions {
            let started = Instant::now();
            self.round_of(rows);
            self.forward(&mut drawn)?;
            if repetition > 0 {
                round_us.push(1e6 * started.elapsed().as_secs_f64());
            }
        }
        let bytes = self.model.read_bytes();
        let floor_us = 1e6 * (bytes.dense as f64 / layers + distinct * bytes.expert as f64) / bandwidth;
        let shares = layer_us.iter().map(|us| floor_us / us).filter(|share| share.is_finite()).collect();
        let mut row =
            |name: &str, unit: &str, samples| push(record, format!("decode, {rows} rows{name}"), unit, samples);
        row(": a layer", "us", layer_us);
        row(": experts chosen", "experts", vec![distinct]);
        row(": giving a round to an idle device", "us", host_us);
        row("", SHARE, shares);
        row(": round with head and draw", "us", round_us);
        if self.plan.compares {
            let rounds = f64::from((self.plan.repetitions + 1) * self.plan.burst);
            row(": graphs made", "graphs", vec![(after.built - before.built) as f64]);
            row(": launches changed a round", "launches", vec![(after.changed - before.changed) as f64 / rounds]);
            let given_us = (after.given_ns - before.given_ns) as f64 / 1e3;
            row(": driver's calls of a round", "us", vec![given_us / rounds]);
            for (giving, way) in &WAYS[1..] {
                self.rewind(rows);
                self.model.give_rounds(*giving).map_err(failed)?;
                let (layer_us, host_us) = self.bursts(rows)?;
                row(&format!("{way}: a layer"), "us", layer_us);
                row(&format!("{way}: giving a round to an idle device"), "us", host_us);
            }
            self.model.give_rounds(WAYS[0].0).map_err(failed)?;
        }
        if self.plan.apart {
            self.take_apart(rows, record)?;
        }
        Ok(())
    }

    /// The times of a round of `rows` rows by kernel.
    fn take_apart(&mut self, rows: u32, record: &mut Record) -> Result<(), Failure> {
        self.rewind(rows);
        self.model.give_rounds(Giving::Whole).map_err(failed)?;
        self.round_of(rows);
        let times = self.model.time_round(&self.round, self.plan.repetitions).map_err(failed)?;
        self.kept();
        if let Some(times) = times {
            times::push(record, &format!("decode, {rows} rows"), &times, self.plan.shape.num_hidden_layers as f64);
        }
        self.model.give_rounds(WAYS[0].0).map_err(failed)
    }

    /// Microseconds of a layer in a burst of rounds, and those of giving its first round to the device: later ones may wait
    /// for room in the driver's queue.
    fn bursts(&mut self, rows: u32) -> Result<(Vec<f64>, Vec<f64>), Failure> {
        let rounds = f64::from(self.plan.burst) * self.plan.shape.num_hidden_layers as f64;
        let (mut layer_us, mut host_us) = (Vec::new(), Vec::new());
        for repetition in 0..=self.plan.repetitions {
            let (started, mut given) = (Instant::now(), 0.0);
            for round in 0..self.plan.burst {
                self.round_of(rows);
                self.compute()?;
                if round == 0 {
                    given = started.elapsed().as_secs_f64();
                }
            }
            self.model.finish().map_err(failed)?;
            if repetition > 0 {
                host_us.push(1e6 * given);
                layer_us.push(1e6 * started.elapsed().as_secs_f64() / rounds);
            }
        }
        Ok((layer_us, host_us))
    }

    /// A draft block for one sequence.
    fn draft(&mut self, record: &mut Record) -> Result<(), Failure> {
        let (sampling, mut drafts, mut samples) = (Sampling::greedy(), Drafts::default(), Vec::new());
        let count_max = self.model.limits().draft_block;
        self.rewind(1);
        for repetition in 0..=self.plan.repetitions {
            let position = self.model.length(SlotIndex(0));
            let anchor = token(repetition, &self.plan.shape);
            let wanted = DraftRequest { slot: SlotIndex(0), anchor, position, count_max, sampling: &sampling };
            let started = Instant::now();
            self.model.draft(&[wanted], &mut drafts).map_err(failed)?;
            if repetition > 0 && !drafts.tokens.is_empty() {
                samples.push(1e6 * started.elapsed().as_secs_f64());
            }
        }
        push(record, "draft block of one sequence", "us", samples);
        Ok(())
    }

    /// A prompt chunk of `rows` rows from position 0 on.
    fn prompt(&mut self, rows: u32, bandwidth: f64, record: &mut Record) -> Result<(), Failure> {
        let layers = self.plan.shape.num_hidden_layers as f64;
        let mut layer_us = Vec::new();
        for repetition in 0..=self.plan.repetitions.min(4) {
            self.model.release(SlotIndex(0));
            self.push(0, 0, rows, rows);
            let started = Instant::now();
            self.compute()?;
            self.model.finish().map_err(failed)?;
            if repetition > 0 {
                layer_us.push(1e6 * started.elapsed().as_secs_f64() / layers);
            }
        }
        let distinct = self.model.experts_chosen(rows as usize).map_err(failed)? as f64;
        let bytes = self.model.read_bytes();
        let floor_us = 1e6 * (bytes.dense as f64 / layers + distinct * bytes.expert as f64) / bandwidth;
        let shares = layer_us.iter().map(|us| floor_us / us).filter(|share| share.is_finite()).collect();
        let speeds = layer_us.iter().map(|us| f64::from(rows) / (us * ALL_LAYERS) * 1e6).collect();
        push(record, format!("prompt of {rows}: a layer"), "us", layer_us);
        push(record, format!("prompt of {rows}: experts chosen"), "experts", vec![distinct]);
        push(record, format!("prompt of {rows}, bytes alone"), SHARE, shares);
        push(record, format!("prompt of {rows}: {ALL_LAYERS} such layers"), "tokens/s", speeds);
        Ok(())
    }
}

/// Bars of the shares of the floor and the tables of kernels, for a terminal.
pub fn picture(record: &Record) -> String {
    const WIDTH: f64 = 40.0;
    let rows = record.rows.iter().filter(|row| row.unit == SHARE);
    let mut text = String::new();
    for (row, share) in rows.filter_map(|row| Some((row, row.median()?))) {
        let filled = (share.clamp(0.0, 1.0) * WIDTH).round() as usize;
        let bar = format!("{}{}", "#".repeat(filled), ".".repeat(WIDTH as usize - filled));
        text += &format!("{:<28} {bar} {share:.2}\n", row.name);
    }
    let bars = match text.is_empty() {
        true => text,
        false => format!("\nshare of the floor: bytes read once, at the speed of reading memory\n{text}"),
    };
    bars + &times::table(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes with which a slice takes no time.
    fn tiny() -> Plan {
        let shape = Shape {
            vocab_size: 384,
            hidden_size: 128,
            num_attention_heads: 4,
            head_dim: 64,
            qk_rope_head_dim: 32,
            q_lora_rank: 64,
            o_groups: 2,
            o_lora_rank: 32,
            sliding_window: 16,
            index_n_heads: 2,
            index_head_dim: 64,
            index_topk: 8,
            moe_intermediate_size: 64,
            n_routed_experts: 12,
            num_experts_per_tok: 3,
            engram_compressed_vocab_size: 200,
            dspark_noise_token_id: 383,
            dspark_markov_rank: 32,
            dspark_n_routed_experts: 6,
            ..FLASH
        };
        let shape = random::cut(&shape, 20..24).unwrap();
        let options = Options {
            context: 1024,
            slots: 3,
            round_rows: 64,
            halo: false,
            draft: false,
            level: Level::best(),
            ..Options::default()
        };
        Plan {
            shape,
            options,
            rows: vec![1, 3],
            prefill: vec![40],
            context: 50,
            repetitions: 2,
            burst: 2,
            compares: true,
            apart: true,
            ceiling_bytes: 1 << 20,
            laws: vec!["L4".to_owned()],
            settings: Vec::new(),
        }
    }

    #[test]
    fn a_slice_gives_times_shares_and_laws() {
        let mut record = Record::default();
        measure(&tiny(), &Device::cpu(), &mut record).unwrap();
        let row = |name: &str| record.rows.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("{name}"));
        for name in [
            "reading memory",
            "decode, 1 rows: a layer",
            "decode, 3 rows",
            "prompt of 40: a layer",
            "decode, 3 rows, launched one by one: a layer",
        ] {
            let row = row(name);
            assert_eq!(row.samples.len(), 2, "{name}");
            assert!(row.samples.iter().all(|sample| *sample > 0.0 && sample.is_finite()), "{name}: {row:?}");
        }
        assert_eq!(row("draft block of one sequence").samples.len(), 2);
        let chosen = row("decode, 3 rows: experts chosen").samples[0];
        assert!((3.0..=9.0).contains(&chosen), "{chosen}");
        assert_eq!((record.checks.len(), record.passes()), (2, Some(true)), "{}", record.verdict());
        let picture = picture(&record);
        assert_eq!(
            picture.lines().filter(|line| line.contains('.') && line.starts_with("decode")).count(),
            2,
            "{picture}"
        );
    }

    #[test]
    fn a_picture_has_a_bar_for_each_share() {
        let mut record = Record::default();
        push(&mut record, "decode, 1 rows", SHARE, vec![0.5]);
        push(&mut record, "decode, 1 rows: a layer", "us", vec![90.0]);
        push(&mut record, "prompt of 8", SHARE, vec![2.0]);
        let picture = picture(&record);
        let lines: Vec<&str> = picture.lines().skip(2).collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].contains(&format!(" {}{} 0.50", "#".repeat(20), ".".repeat(20))), "{picture}");
        assert!(lines[1].contains(&format!(" {} 2.00", "#".repeat(40))), "{picture}");
        assert_eq!(super::picture(&Record::default()), "");
    }
}
