//! `bench`: speed and laws. `decode` times prompt rows and reply rows of the model itself, drafted and not; `slice` times
//! layers of the release's size without a checkpoint; `evaluate` answers a dataset of prompts with expected replies and
//! counts; `concurrent`, `cache` and `serve` ask a server; `soak` loads one for minutes, kills it on the way and compares
//! every reply.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use tf_bench::compare::CompareError;
use tf_bench::{Format, Record, Row};
use tf_device::gpu::rounds::Giving;
use tf_engine::Sampling;
use tf_engine::model::{DraftRequest, Drafts, Drawn, Model, RoundPlan, SequenceView, SlotIndex, Window};
use tf_model::deepseek_v41::{DeepseekV41, Options};

use crate::arguments::{Arguments, Mistakes, Source};
use crate::build;
use crate::device;
use crate::evaluate;
use crate::failure::{Failure, print};
use crate::load::{self, Checked};
use crate::measure;
use crate::options::{Command, Environment, OPTIONS, OptionSpec, Section};
use crate::slice;
use crate::soak;

const SUBCOMMANDS: &str = "decode, slice, evaluate, concurrent, cache, serve, soak, compare";

pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), Failure> {
    crate::logs::start(arguments);
    let mut arguments = arguments.clone();
    let subcommand = match arguments.positionals.is_empty() {
        true => String::new(),
        false => arguments.positionals.remove(0),
    };
    let format = arguments.text("format").and_then(Format::parse).unwrap_or(Format::Table);
    if SUBCOMMANDS.split(", ").any(|name| name == subcommand) {
        let foreign = foreign(&arguments, &subcommand);
        if !foreign.is_empty() {
            return Err(Mistakes(foreign).into());
        }
    }
    if let Some(file) = arguments.text("output") {
        crate::output::check("output", file)?;
    }
    if subcommand == "compare" {
        return compare(&arguments, format);
    }
    if subcommand == "slice" {
        if let Some(word) = arguments.positionals.first() {
            return Err(Mistakes(vec![format!("{word:?} is one argument too many: a slice needs no model")]).into());
        }
        let record = slice::run(&arguments, &device::open(&arguments)?)?;
        return show(&arguments, format, &record, &slice::picture(&record));
    }
    let (located, rest) = load::located(&arguments, environment, false)?;
    if let Some(word) = rest.first() {
        return Err(Mistakes(vec![format!("{word:?} is one argument too many")]).into());
    }
    let record = match subcommand.as_str() {
        "decode" => decode(&arguments, &load::checked(&located, &arguments)?)?,
        "evaluate" => evaluate::run(&arguments, &load::checked(&located, &arguments)?)?,
        "concurrent" | "cache" | "serve" => measure::run(&subcommand, &arguments, &located)?,
        "soak" => soak::run(&arguments, &located, environment)?,
        "" => return Err(Mistakes(vec![format!("bench needs a subcommand: {SUBCOMMANDS}")]).into()),
        other => return Err(Mistakes(vec![format!("bench {other} is unknown: {SUBCOMMANDS}")]).into()),
    };
    show(&arguments, format, &record, "")
}

/// Mistakes for flags that only other subcommands read: their help begins with whose they are.
fn foreign(arguments: &Arguments, subcommand: &str) -> Vec<String> {
    let is_given = |spec: &&OptionSpec| arguments.setting(spec.flag).is_some_and(|s| s.source == Source::Flag);
    let of_bench = OPTIONS.iter().filter(|spec| spec.section == Section::Command && spec.commands == [Command::Bench]);
    let told = |spec: &OptionSpec| {
        let (owners, _) = spec.help.split_once(": ")?;
        let mut names = owners.split(", ");
        let is_owned = owners.split(", ").all(|owner| SUBCOMMANDS.split(", ").any(|name| name == owner));
        let is_foreign = is_owned && names.all(|owner| owner != subcommand);
        let flag = spec.flag;
        is_foreign
            .then(|| format!("--{flag} has no effect on bench {subcommand}; it belongs to {owners}: leave it out"))
    };
    of_bench.filter(is_given).filter_map(told).collect()
}

/// Writes the record, prints it with `picture` below, and fails where a check fails.
fn show(arguments: &Arguments, format: Format, record: &Record, picture: &str) -> Result<(), Failure> {
    if let Some(file) = arguments.text("output") {
        crate::output::write(Path::new(file), record.print(Format::Json).as_bytes())
            .map_err(|error| Failure::run_time(format!("{file} can't be written: {error}")))?;
    }
    print(&record.print(format))?;
    if format == Format::Table {
        print(picture)?;
    }
    match record.passes() {
        Some(false) if matches!(format, Format::Json | Format::Csv) => {
            Err(Failure { code: 1, text: record.verdict().trim().to_owned() })
        }
        // The table has said why.
        Some(false) => Err(Failure { code: 1, text: String::new() }),
        Some(true) | None => Ok(()),
    }
}

fn compare(arguments: &Arguments, format: Format) -> Result<(), Failure> {
    let [one, other] = &arguments.positionals[..] else {
        return Err(Mistakes(vec!["bench compare takes two records, written with --output".to_owned()]).into());
    };
    let text = tf_bench::compare::compare(Path::new(one), Path::new(other), format).map_err(|error| match error {
        CompareError::Read { .. } => Mistakes(vec![error.to_string()]).into(),
        error => Failure::run_time(error.to_string()),
    })?;
    Ok(print(&text)?)
}

/// The head of a record: everything but its rows.
pub fn record(command: &str, checked: &Checked, options: &Options, extra: &[(&str, String)]) -> Record {
    let settings = [
        ("threads", options.threads.to_string()),
        ("level", options.level.name().to_owned()),
        ("context", options.context.to_string()),
        ("round rows", options.round_rows.to_string()),
    ];
    let owned = |(name, value): &(&str, String)| ((*name).to_owned(), value.clone());
    Record {
        command: command.to_owned(),
        version: build::VERSION.to_owned(),
        commit: build::COMMIT.to_owned(),
        model: format!("{} {}", checked.name, checked.fingerprint),
        device: device::name(&checked.device, options),
        options: settings.iter().chain(extra).map(owned).collect(),
        rows: Vec::new(),
        replies: Vec::new(),
        checks: Vec::new(),
        digest: None,
    }
}

/// A list of counts.
pub fn counts(arguments: &Arguments, flag: &str, default: &[u32]) -> Result<Vec<u32>, Failure> {
    let Some(texts) = arguments.list(flag) else { return Ok(default.to_vec()) };
    let read = |text: &String| text.trim().parse::<u32>().ok().filter(|count| *count > 0);
    texts.iter().map(|text| read(text).ok_or(text)).collect::<Result<_, _>>().map_err(|text| {
        Mistakes(vec![format!("--{flag} takes counts with commas, like 1,4,16; {text:?} is none")]).into()
    })
}

fn decode(arguments: &Arguments, checked: &Checked) -> Result<Record, Failure> {
    let prompts = counts(arguments, "prompt", &[512, 2048])?;
    let rows = counts(arguments, "rows", &[1, 4, 16])?;
    let tokens = arguments.count("tokens").unwrap_or(128) as u32;
    let repetitions = arguments.count("reps").unwrap_or(5) as usize;
    let slots = rows.iter().copied().max().unwrap_or(1);
    let longest = prompts.iter().copied().max().unwrap_or(1).max(tokens + START);
    let limit = checked.shape.max_position_embeddings as u32;
    if longest > limit {
        return Err(Mistakes(vec![format!("{longest} tokens are more than this model's {limit} positions")]).into());
    }
    let options = Options { slots, context: longest, ..checked.loading.options.clone() };
    let extra = [("tokens", tokens.to_string()), ("reps", repetitions.to_string())];
    let mut record = record("bench decode", checked, &options, &extra);
    let mut timed = Timed::new(checked.model(options)?);
    for prompt in prompts {
        let samples = timed.samples(repetitions, |timed| f64::from(prompt) / timed.prompt(0, prompt))?;
        record.rows.push(Row { name: format!("prompt of {prompt}"), unit: "tokens/s".into(), samples });
    }
    let ways = if checked.device.backend().is_some() { &WAYS[..] } else { &WAYS[..1] };
    for rows in rows {
        for (giving, way) in ways {
            timed.model.give_rounds(*giving).map_err(|error| Failure::run_time(error.to_string()))?;
            let samples = timed.samples(repetitions, |timed| f64::from(rows * tokens) / timed.replies(rows, tokens))?;
            record.rows.push(Row { name: format!("decode, {rows} sequences{way}"), unit: "tokens/s".into(), samples });
        }
    }
    timed.model.give_rounds(WAYS[0].0).map_err(|error| Failure::run_time(error.to_string()))?;
    let samples = timed.samples(repetitions, |timed| 1e6 * timed.windows(tokens) / f64::from(tokens))?;
    record.rows.push(Row { name: "verify window of a block".into(), unit: "us".into(), samples });
    let samples = timed.samples(repetitions, |timed| 1e6 * timed.drafts(tokens) / f64::from(tokens))?;
    record.rows.push(Row { name: "draft block".into(), unit: "us".into(), samples });
    for (name, drafts) in [("reply, undrafted", false), ("reply, drafted", true)] {
        let samples = timed.samples(repetitions, |timed| timed.reply(tokens, drafts))?;
        record.rows.push(Row { name: name.into(), unit: "tokens/s".into(), samples });
    }
    Ok(record)
}

/// How rounds start on a GPU: first as they do unasked.
pub const WAYS: [(Giving, &str); 3] =
    [(Giving::Pieces, ""), (Giving::Whole, ", as one graph"), (Giving::OneByOne, ", launched one by one")];

/// Reply rows begin after a prompt of this many tokens.
const START: u32 = 64;

/// A model, timed from outside.
struct Timed {
    model: DeepseekV41,
    sampling: Sampling,
    drawn: Drawn,
    drafts: Drafts,
    plan: RoundPlan,
    failure: Option<String>,
}

impl Timed {
    fn new(model: DeepseekV41) -> Timed {
        Timed {
            model,
            sampling: Sampling::greedy(),
            drawn: Drawn::default(),
            drafts: Drafts::default(),
            plan: RoundPlan::default(),
            failure: None,
        }
    }

    /// One run outside the window, then `repetitions` inside.
    fn samples(&mut self, repetitions: usize, mut run: impl FnMut(&mut Timed) -> f64) -> Result<Vec<f64>, Failure> {
        run(self);
        let samples = (0..repetitions).map(|_| run(self)).collect();
        match self.failure.take() {
            Some(failure) => Err(Failure::run_time(failure)),
            None => Ok(samples),
        }
    }

    /// Distinct tokens that any vocabulary has.
    fn token(&self, index: u32) -> u32 {
        (index * 7919 + 11) % (self.model.shape().vocab_size as u32 / 2)
    }

    fn push(&mut self, slot: u32, start: u32, count: u32, prompt_end: u32, draw: std::ops::Range<usize>) {
        let first = self.plan.tokens.len();
        for row in 0..count {
            let token = self.token(slot * 31 + start + row);
            self.plan.tokens.push(token);
        }
        self.plan.windows.push(Window {
            slot: SlotIndex(slot),
            start,
            rows: first..first + count as usize,
            prompt_end,
            whole: false,
            draw,
            logprobs: None,
            sequence: 0,
        });
    }

    fn round(&mut self) {
        let view = SequenceView { sampling: &self.sampling, prompt: &[], reply: &[], given: &[] };
        if let Err(error) = self.model.forward(&self.plan, &[view], &mut self.drawn) {
            self.failure.get_or_insert(error.to_string());
        }
        for window in &self.plan.windows {
            self.model.keep(window.slot, window.start + window.rows.len() as u32);
        }
        self.plan.tokens.clear();
        self.plan.windows.clear();
    }

    /// Fills a slot; seconds.
    fn prompt(&mut self, slot: u32, length: u32) -> f64 {
        self.model.release(SlotIndex(slot));
        let chunk = self.model.options().round_rows;
        let started = Instant::now();
        let mut start = 0;
        while start < length {
            let count = chunk.min(length - start);
            let is_last = start + count == length;
            let draw = if is_last { count as usize - 1..count as usize } else { 0..0 };
            self.push(slot, start, count, length, draw);
            self.round();
            start += count;
        }
        let seconds = started.elapsed().as_secs_f64();
        if length != START {
            self.model.release(SlotIndex(slot));
        }
        seconds
    }

    /// `tokens` rounds of one row a sequence; seconds.
    fn replies(&mut self, sequences: u32, tokens: u32) -> f64 {
        for slot in 0..sequences {
            self.prompt(slot, START);
        }
        let started = Instant::now();
        for start in START..START + tokens {
            for slot in 0..sequences {
                self.push(slot, start, 1, start, 0..1);
            }
            self.round();
        }
        let seconds = started.elapsed().as_secs_f64();
        for slot in 0..sequences {
            self.model.release(SlotIndex(slot));
        }
        seconds
    }

    /// `rounds` full verify windows of which one row is kept; seconds.
    fn windows(&mut self, rounds: u32) -> f64 {
        self.prompt(0, START);
        let rows = self.model.limits().draft_block + 1;
        let context = self.model.options().context;
        let started = Instant::now();
        for start in START..START + rounds {
            let rows = rows.min(context - start);
            self.push(0, start, rows, start, 0..rows as usize);
            self.round();
            self.model.keep(SlotIndex(0), start + 1);
        }
        let seconds = started.elapsed().as_secs_f64();
        self.model.release(SlotIndex(0));
        seconds
    }

    /// One greedy reply of `tokens` tokens, with full windows of drafts or none; tokens a second. The tokens are the
    /// same both ways.
    fn reply(&mut self, tokens: u32, drafts: bool) -> f64 {
        self.prompt(0, START);
        let context = self.model.options().context;
        let mut window = vec![self.token(START)];
        let (mut start, end) = (START, START + tokens);
        let started = Instant::now();
        while start < end && self.failure.is_none() {
            let rows = window.len();
            self.plan.tokens.extend_from_slice(&window);
            self.plan.windows.push(Window {
                slot: SlotIndex(0),
                start,
                rows: 0..rows,
                prompt_end: start,
                whole: false,
                draw: 0..rows,
                logprobs: None,
                sequence: 0,
            });
            self.round();
            let drawn = self.drawn.rows.iter().map(|row| row.token);
            let accepted = drawn.clone().zip(&window[1..]).take_while(|(token, draft)| token == *draft).count();
            let anchor = drawn.clone().nth(accepted).unwrap_or_default();
            start += accepted as u32 + 1;
            self.model.keep(SlotIndex(0), start);
            window.clear();
            window.push(anchor);
            let room = end.min(context).saturating_sub(start + 1);
            if drafts && room > 0 {
                let count_max = self.model.limits().draft_block.min(room);
                let wanted =
                    DraftRequest { slot: SlotIndex(0), anchor, position: start, count_max, sampling: &self.sampling };
                if let Err(error) = self.model.draft(&[wanted], &mut self.drafts) {
                    self.failure.get_or_insert(error.to_string());
                }
                window.extend_from_slice(&self.drafts.tokens);
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        self.model.release(SlotIndex(0));
        f64::from(start - START) / seconds
    }

    /// `rounds` calls of the draft head; seconds.
    fn drafts(&mut self, rounds: u32) -> f64 {
        self.prompt(0, START);
        let count_max = self.model.limits().draft_block;
        let started = Instant::now();
        for anchor in 0..rounds {
            let anchor = self.token(anchor);
            let wanted =
                DraftRequest { slot: SlotIndex(0), anchor, position: START, count_max, sampling: &self.sampling };
            if let Err(error) = self.model.draft(&[wanted], &mut self.drafts) {
                self.failure.get_or_insert(error.to_string());
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        self.model.release(SlotIndex(0));
        seconds
    }
}

/// Never stops a reply.
pub static NEVER: AtomicBool = AtomicBool::new(false);
