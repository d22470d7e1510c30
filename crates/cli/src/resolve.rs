//! From checked arguments and a checkpoint's shape to the plain structs of the crates that use them.
//!
//! Everything that depends on the machine or the model is settled here, before a weight is read: what fits is chosen,
//! what was asked for and doesn't fit is refused with the figures and the flag.

use std::time::Duration;

use tf_checkpoint::GenerationConfig;
use tf_device::gpu::Backend;
use tf_engine::limits::EngineLimits;
use tf_engine::model::ModelLimits;
use tf_model::deepseek_v41::Options;
use tf_model::deepseek_v41::engram_rows::EngramPlace;
use tf_model::deepseek_v41::memory::MemoryPlan;
use tf_model::deepseek_v41::pages::PAGE_POSITIONS;
use tf_model::deepseek_v41::shape::Shape;
use tf_numerics::lanes::Level;
use tf_server::{ReasoningField, ReasoningLimits, SamplingDefaults};
use tf_text::chat::openai::{Defaults, parse_effort};

use crate::arguments::{Arguments, Mistakes, Value, engram_place, parse_value, show};
use crate::disk;
use crate::machine::{self, Memory};
use crate::options::{Command, DefaultValue, find};

/// Slots that `--parallel auto` takes where they fit.
const SLOTS_AUTO: u32 = 8;
/// Rows of a round that `--round-rows auto` takes.
const ROUND_ROWS_AUTO: u32 = 512;
/// Full windows that kept prefixes take at most where nobody says.
const KEPT_WINDOWS_AUTO: u64 = 32;
/// What the program takes beside the model: tokenizer, threads, connections, texts of requests, what the allocator keeps.
const PROGRAM_BYTES: u64 = 48 << 20;

/// Memory for cutting the usual text of a token into tokens, and bounds of the whole window's.
const CUT_BYTES_A_TOKEN: u64 = 6 * tf_server::CUT_BYTES as u64;
const CUT_BYTES: (u64, u64) = (1 << 20, 1 << 30);
/// The largest body where nobody says: so much for a token of the window, within bounds. Usual text has four bytes.
const BODY_BYTES_A_TOKEN: u64 = 64;
const BODY_BYTES: (u64, u64) = (4 << 20, 64 << 20);
/// Options whose value may be what leaves no room.
const SIZES: [&str; 5] = ["prefix-cache-bytes", "engram", "max-body", "round-rows", "threads"];

/// What a model is loaded with, and what that takes.
#[derive(Clone, Debug)]
pub struct Loading {
    pub options: Options,
    pub plan: MemoryPlan,
    /// Bytes for kept prefixes, their pages included; 0 keeps none.
    pub prefix_cache_bytes: u64,
    /// The largest body of a request, and memory for work on bodies.
    pub body_bytes: u64,
    pub work_bytes: u64,
    /// What the model may take on its device; `None` where the memory isn't known.
    pub budget: Option<u64>,
    /// Where n-gram rows live.
    pub engram: EngramPlace,
}

/// Why nothing is loaded with these arguments.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadingError {
    /// Values that can't be: wrong usage.
    #[error(transparent)]
    Usage(#[from] Mistakes),
    /// What this machine has no room for.
    #[error("{fact}. {advice}")]
    Room { fact: String, advice: String },
}

/// Where a model would run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Site {
    /// `None` for the CPU.
    pub backend: Option<Backend>,
    /// The memory that weights and caches go into.
    pub memory: Option<Memory>,
    /// The host's.
    pub host: Option<Memory>,
}

/// Threads, context, slots and rows for a shape.
///
/// # Errors
/// [`LoadingError::Usage`] for values beyond the model's limits, [`LoadingError::Room`] for a plan beyond the memory; where one
/// option's value is to blame, with that option.
pub fn loading(arguments: &Arguments, shape: &Shape, site: Site) -> Result<Loading, LoadingError> {
    let settled = settle(arguments, shape, site);
    let Err(LoadingError::Room { fact, .. }) = &settled else { return settled };
    for flag in SIZES.into_iter().filter(|flag| is_given(arguments, flag)) {
        if let (Ok(_), Some(value)) = (settle(&arguments.without(flag), shape, site), flag_value(arguments, flag)) {
            let value = if let Value::Bytes(bytes) = value { show_bytes(*bytes) } else { show(value) };
            return Err(LoadingError::Room {
                fact: format!("--{flag} {value} leaves no room for the rest, which fits without it: {fact}"),
                advice: "Use a smaller value, or raise --memory".to_owned(),
            });
        }
    }
    settled
}

/// What was asked for, where it can be.
struct Asked {
    budget: Option<u64>,
    threads: usize,
    context: Option<u32>,
    slots: Option<u32>,
    round_rows: u32,
    is_drafting: bool,
}

fn asked(arguments: &Arguments, shape: &Shape, site: Site) -> Result<Asked, Mistakes> {
    let mut mistakes = Vec::new();
    let budget = budget(arguments, site.memory, &mut mistakes);
    let threads = flag_count(arguments, "threads").map_or_else(machine::physical_cores, |count| count as usize);
    let longest = shape.max_position_embeddings as u32;
    let context = match flag_count(arguments, "context") {
        Some(context) if context > u64::from(longest) => {
            mistakes.push(format!(
                "--context {context} is larger than this model's {longest} positions. Use a smaller value or leave it out"
            ));
            None
        }
        other => other.map(|context| context as u32),
    };
    let slots = flag_count(arguments, "parallel").map(|count| count as u32);
    let is_drafting = draft_max(arguments, shape.dspark_block_size as u32) > 0;
    let verify_rows = if is_drafting { shape.window_rows_max() as u64 } else { 1 };
    let rows_auto = ROUND_ROWS_AUTO.max(2 * slots.unwrap_or(1));
    let round_rows = match flag_count(arguments, "round-rows") {
        Some(rows) if rows < verify_rows => {
            mistakes.push(format!(
                "--round-rows {rows} is fewer than the {verify_rows} rows of a draft block and its anchor, which are computed \
                 whatever --draft N is. Use a larger value, leave it out, or use --draft off"
            ));
            rows_auto
        }
        other => other.map_or(rows_auto, |rows| rows as u32),
    };
    if let Some(slots) = slots.filter(|slots| *slots >= round_rows && (*slots, round_rows) != (1, 1)) {
        mistakes.push(format!(
            "--round-rows {round_rows} leaves no row for prompts beside {slots} replies. Use more rows than --parallel"
        ));
    }
    if let (Command::Serve, Some(text)) = (arguments.command, chunk_text(arguments)) {
        let is_count = text.parse::<u32>().is_ok_and(|rows| rows > 0);
        if text != "auto" && !is_count {
            mistakes.push(format!("--chunk {text} is no number of rows. Use 1 or more, or auto"));
        }
    }
    if let Some(Value::Bytes(0)) = flag_value(arguments, "max-body") {
        mistakes.push("--max-body 0 refuses every request. Use a larger value or leave it out".to_owned());
    }
    match mistakes.is_empty() {
        true => Ok(Asked { budget, threads, context, slots, round_rows, is_drafting }),
        false => Err(Mistakes(mistakes)),
    }
}

/// The largest body of a request; 0 where nobody sends any. What `info` shows is a server's.
fn body_bytes(arguments: &Arguments, context: u32) -> u64 {
    match (arguments.command, flag_value(arguments, "max-body")) {
        (Command::Serve, Some(Value::Bytes(bytes))) => *bytes,
        (Command::Serve | Command::Info, _) => {
            (u64::from(context) * BODY_BYTES_A_TOKEN).clamp(BODY_BYTES.0, BODY_BYTES.1)
        }
        _ => 0,
    }
}

/// Memory for work on bodies: a parsed one of the largest with its prompt, and a window's text while it is cut into tokens.
fn work_bytes(body_bytes: u64, context: u32) -> u64 {
    match body_bytes {
        0 => 0,
        _ => 2 * body_bytes + (u64::from(context) * CUT_BYTES_A_TOKEN).clamp(CUT_BYTES.0, CUT_BYTES.1),
    }
}

/// All that bodies take.
fn bodies_bytes(arguments: &Arguments, context: u32) -> u64 {
    let body_bytes = body_bytes(arguments, context);
    tf_server::BODIES_MAX as u64 * body_bytes + work_bytes(body_bytes, context)
}

fn settle(arguments: &Arguments, shape: &Shape, site: Site) -> Result<Loading, LoadingError> {
    let Asked { budget, threads, context, slots, round_rows, is_drafting } = asked(arguments, shape, site)?;
    let engram = flag_text(arguments, "engram").and_then(engram_place).unwrap_or_default();
    let longest = shape.max_position_embeddings as u32;

    // A copy of a shared page for each slot, beside its own.
    let slot_pages = |slots: u32, context: u32| slots * (context.div_ceil(PAGE_POSITIONS) + 1);
    // The budget of kept prefixes may be used up by pages or by states, and pages once written stay resident.
    let with_pages = |slots: u32, context: u32, pages: u32, kept_bytes: u64| MemoryPlan {
        kept_bytes,
        program_bytes: PROGRAM_BYTES,
        bodies_bytes: bodies_bytes(arguments, context),
        disk_index_bytes: disk::index_bytes(arguments, budget),
        engram,
        ..MemoryPlan::on(site.backend, shape, slots, context, round_rows, threads, Some(pages))
    };
    let page_bytes = with_pages(1, 1, 1, 0).page_bytes.max(1);
    let is_kept = !matches!(flag_value(arguments, "prefix-cache"), Some(Value::Text(text)) if text == "off");
    let asked_bytes = match flag_value(arguments, "prefix-cache-bytes") {
        _ if !is_kept => Some(0),
        Some(Value::Bytes(bytes)) => Some(*bytes),
        _ => None,
    };
    let kept_pages = |bytes: u64| u32::try_from(bytes / page_bytes).unwrap_or(u32::MAX / 2);
    // Without a figure for kept prefixes, a request of the whole window and one kept beside it must fit.
    let plan = |slots: u32, context: u32| {
        let kept = asked_bytes.map_or(slots * context.div_ceil(PAGE_POSITIONS), kept_pages);
        with_pages(slots, context, slot_pages(slots, context).saturating_add(kept), asked_bytes.unwrap_or(0))
    };
    let room = budget.unwrap_or(u64::MAX);
    let refuse = |fact: String, advice: String| LoadingError::Room { fact, advice };
    let least = plan(1, context.unwrap_or(1));
    if let Some(host) = site.host.map(machine::budget).filter(|host| least.host_only_bytes() > *host) {
        let fact = format!(
            "the host keeps {} beside the GPU, and {} are there",
            show_bytes(least.host_only_bytes()),
            show_bytes(host)
        );
        return Err(refuse(fact, "Use --engram disk or mmap, or a smaller --prefix-cache-bytes".to_owned()));
    }
    if least.fixed_bytes() > room {
        let fact = format!(
            "the weights, the activations and the program itself need {}, and {} are there",
            show_bytes(least.fixed_bytes()),
            show_bytes(room)
        );
        return Err(refuse(fact, "Use a machine with more memory, or raise --memory".to_owned()));
    }
    let context = match context {
        Some(context) => context,
        None => {
            let fits = |context: &u32| plan(slots.unwrap_or(1), *context).total_bytes() <= room;
            largest(longest, fits).ok_or_else(|| {
                let room = show_bytes(room);
                match slots {
                    Some(slots) if slots > 1 => refuse(
                        format!("not even one token for each of {slots} requests fits beside the weights in {room}"),
                        "Use a smaller --parallel, or raise --memory".to_owned(),
                    ),
                    _ => refuse(
                        format!("not even one token of context fits beside the weights in {room}"),
                        "Raise --memory".to_owned(),
                    ),
                }
            })?
        }
    };
    let slots = match slots {
        Some(slots) => slots,
        None => {
            let most = SLOTS_AUTO.min(round_rows.saturating_sub(1).max(1));
            largest(most, |slots| plan(*slots, context).total_bytes() <= room).unwrap_or(1)
        }
    };
    let whole = plan;
    let plan = whole(slots, context);
    if plan.total_bytes() > room {
        let most = largest(slots, |slots| whole(*slots, context).total_bytes() <= room);
        let hint = match most {
            Some(most) => format!("--parallel {most} fits"),
            None => "Use a smaller --context".to_owned(),
        };
        let fact = format!(
            "{slots} requests of {context} tokens need {}, and {} are there",
            show_bytes(plan.total_bytes()),
            show_bytes(room)
        );
        return Err(refuse(fact, format!("{hint}, or raise --memory")));
    }
    let own_pages = slot_pages(slots, context);
    let prefix_cache_bytes = asked_bytes.unwrap_or_else(|| {
        let idle = room.saturating_sub(with_pages(slots, context, own_pages, 0).total_bytes()) / 2;
        let idle =
            idle.min(site.host.filter(|_| site.backend.is_some()).map_or(u64::MAX, |host| machine::budget(host) / 2));
        idle.min(KEPT_WINDOWS_AUTO * (u64::from(context) * plan.position_bytes + 4 * plan.snapshot_bytes))
    });
    let pages = own_pages.saturating_add(kept_pages(prefix_cache_bytes));
    let plan = with_pages(slots, context, pages, prefix_cache_bytes);
    let options = Options {
        threads,
        level: Level::best(),
        context,
        slots,
        round_rows,
        draft: is_drafting,
        pages: Some(pages),
        ..Options::default()
    };
    let body_bytes = body_bytes(arguments, context);
    let work_bytes = work_bytes(body_bytes, context);
    Ok(Loading { options, plan, prefix_cache_bytes, body_bytes, work_bytes, budget, engram })
}

/// The largest number from 1 to `most` for which `fits` holds; it holds for smaller ones where it does for larger.
fn largest(most: u32, fits: impl Fn(&u32) -> bool) -> Option<u32> {
    let (mut good, mut bad) = (0, most.checked_add(1)?);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        match fits(&middle) {
            true => good = middle,
            false => bad = middle,
        }
    }
    (good > 0).then_some(good)
}

/// A count where the command has this option and someone set it.
fn flag_count(arguments: &Arguments, flag: &str) -> Option<u64> {
    find(arguments.command, flag)?;
    arguments.count(flag)
}

/// The value of an option where the command has it and someone set it.
fn flag_value<'a>(arguments: &'a Arguments, flag: &str) -> Option<&'a Value> {
    find(arguments.command, flag)?;
    arguments.setting(flag).map(|setting| &setting.value)
}

/// Whether a command has this option and someone set it.
pub fn is_given(arguments: &Arguments, flag: &str) -> bool {
    find(arguments.command, flag).is_some() && arguments.is_given(flag)
}

/// Whether an option has the value that it has anyway.
pub fn is_default(arguments: &Arguments, flag: &str) -> bool {
    let default = find(arguments.command, flag).map(|spec| (spec.kind, spec.default));
    let Some((kind, DefaultValue::Is(text))) = default else { return false };
    parse_value(kind, text).ok().as_ref() == flag_value(arguments, flag)
}

/// A text where the command has this option and someone set it.
pub fn flag_text<'a>(arguments: &'a Arguments, flag: &str) -> Option<&'a str> {
    if is_given(arguments, flag) { arguments.text(flag) } else { None }
}

/// A number of seconds where the command has this option.
#[cfg_attr(not(target_os = "macos"), expect(dead_code, reason = "asked by the Metal backend alone"))]
pub fn flag_seconds(arguments: &Arguments, flag: &str) -> Option<Duration> {
    find(arguments.command, flag)?;
    seconds(arguments, flag)
}

/// What the program may take: `--memory`, else what is free less a reserve.
fn budget(arguments: &Arguments, memory: Option<Memory>, mistakes: &mut Vec<String>) -> Option<u64> {
    let setting = find(arguments.command, "memory").and_then(|_| arguments.setting("memory"));
    match (setting.map(|setting| &setting.value), memory) {
        (Some(Value::Bytes(bytes)), _) => Some(*bytes),
        (Some(Value::Number(share)), Some(memory)) => Some((memory.total as f64 * share) as u64),
        (Some(_), None) => {
            mistakes
                .push("--memory as a share needs the machine's memory, which isn't known here. Give a size".to_owned());
            None
        }
        (_, memory) => memory.map(machine::budget),
    }
}

/// Most drafts of a window: `--draft`, at most what the draft block gives.
pub fn draft_max(arguments: &Arguments, block: u32) -> u32 {
    if find(arguments.command, "draft").is_none() {
        return block;
    }
    match arguments.setting("draft").map(|setting| &setting.value) {
        Some(Value::On(false)) => 0,
        Some(Value::Count(count)) => block.min(*count as u32),
        _ => block,
    }
}

/// What the engine allows, for a model that was loaded with these arguments.
pub fn engine_limits(arguments: &Arguments, model: &ModelLimits, loading: &Loading) -> EngineLimits {
    let mut limits = EngineLimits::for_model(model);
    limits.prefix_cache_bytes = loading.prefix_cache_bytes;
    if let Some(every) = flag_count(arguments, "snapshot-every") {
        limits.snapshot_every = every as u32;
    }
    limits.draft.max = draft_max(arguments, model.draft_block);
    limits.draft.adaptive = !matches!(arguments.setting("draft").map(|setting| &setting.value), Some(Value::Count(_)));
    limits.draft.copy = !matches!(flag_value(arguments, "draft-copy"), Some(Value::Text(text)) if text == "off");
    if let Some(confidence) = arguments.number("draft-confidence") {
        limits.draft.confidence_min = confidence as f32;
    }
    if arguments.command != Command::Serve {
        return limits;
    }
    if let Some(gap) = arguments.count("decode-gap-ms") {
        limits.decode_gap = Some(Duration::from_millis(gap)).filter(|gap| !gap.is_zero());
    }
    if let Some(queue) = arguments.count("queue") {
        limits.queue = queue as u32;
    }
    if let Some(timeout) = seconds(arguments, "queue-timeout") {
        limits.queue_timeout = timeout;
    }
    if let Some(rows) = arguments.text("chunk").and_then(|text| text.parse().ok()) {
        limits.prompt_chunk = rows;
    }
    limits
}

fn chunk_text(arguments: &Arguments) -> Option<&str> {
    find(arguments.command, "chunk").and_then(|_| arguments.text("chunk"))
}

/// What may end a reasoning from outside.
pub fn reasoning_limits(arguments: &Arguments) -> ReasoningLimits {
    let budget = arguments.count("thinking-budget").map(|tokens| tokens.try_into().unwrap_or(u32::MAX));
    ReasoningLimits { budget, loop_guard: arguments.is_on("loop-guard") }
}

/// A number of seconds.
pub fn seconds(arguments: &Arguments, flag: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(arguments.number(flag)?).ok()
}

/// Sampling of requests that don't say: the options, else what the checkpoint asks for.
pub fn sampling(arguments: &Arguments, checkpoint: &GenerationConfig) -> SamplingDefaults {
    let defaults = checkpoint_sampling(checkpoint);
    SamplingDefaults {
        temperature: arguments.number("temperature").map_or(defaults.temperature, |value| value as f32),
        top_p: arguments.number("top-p").map_or(defaults.top_p, |value| value as f32),
        top_k: arguments.count("top-k").map_or(defaults.top_k, |value| value.try_into().unwrap_or(u32::MAX)),
        min_p: arguments.number("min-p").map_or(defaults.min_p, |value| value as f32),
    }
}

/// Sampling that the checkpoint asks for.
pub fn checkpoint_sampling(checkpoint: &GenerationConfig) -> SamplingDefaults {
    let greedy = checkpoint.do_sample == Some(false);
    SamplingDefaults {
        temperature: if greedy { 0.0 } else { checkpoint.temperature.unwrap_or(1.0) as f32 },
        top_p: checkpoint.top_p.unwrap_or(1.0) as f32,
        top_k: checkpoint.top_k.unwrap_or(0).try_into().unwrap_or(u32::MAX),
        min_p: checkpoint.min_p.unwrap_or(0.0) as f32,
    }
}

/// Reasoning of requests that don't say.
pub fn chat(arguments: &Arguments) -> Defaults {
    let mut defaults = Defaults::default();
    if is_given(arguments, "thinking") {
        defaults.thinking = arguments.is_on("thinking");
    }
    match flag_text(arguments, "reasoning-effort").and_then(parse_effort) {
        Some(Some(effort)) => defaults.effort = effort,
        Some(None) => defaults.thinking = false,
        None => {}
    }
    defaults
}

/// Where chat replies put their reasoning.
pub fn reasoning_field(arguments: &Arguments) -> ReasoningField {
    match arguments.text("reasoning-field") {
        Some("reasoning") => ReasoningField::Reasoning,
        Some("both") => ReasoningField::Both,
        _ => ReasoningField::ReasoningContent,
    }
}

/// Bytes for people.
pub fn show_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut scaled = bytes as f64;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{scaled:.1} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use tf_model::deepseek_v41::shape::FLASH;

    use super::*;
    use crate::arguments::{Request, parse};
    use crate::options::Environment;

    fn arguments(line: &str) -> Arguments {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        match parse(&words, &Environment::of(&[])).unwrap() {
            Request::Run(arguments) => *arguments,
            other => panic!("{other:?}"),
        }
    }

    fn small() -> Shape {
        let files = tf_checkpoint::SmallFiles::embedded(crate::demo::FILES);
        Shape::from_config(&files.config().unwrap()).unwrap()
    }

    fn memory(available: u64) -> Site {
        Site { memory: Some(Memory { total: 1 << 42, available }), ..Site::default() }
    }

    #[test]
    fn auto_takes_what_fits() {
        let loading = loading(&arguments("serve --threads 3"), &small(), memory(64 << 30)).unwrap();
        let options = &loading.options;
        assert_eq!((options.context, options.slots, options.round_rows, options.threads), (8192, 8, 512, 3));
        assert!(options.draft && loading.plan.total_bytes() <= loading.budget.unwrap());
        // Little memory: a shorter window before fewer than one request.
        let tight = loading_of("serve --threads 1 --memory 96MiB").unwrap();
        assert!(tight.options.context < 8192 && tight.options.slots == 1, "{tight:?}");
        assert!(tight.plan.total_bytes() <= 96 << 20);
        // Without any figure of the machine everything is taken as asked.
        let unknown = super::loading(&arguments("serve --parallel 3"), &FLASH, Site::default()).unwrap();
        assert_eq!((unknown.options.context, unknown.options.slots, unknown.budget), (1 << 20, 3, None));
    }

    fn loading_of(line: &str) -> Result<Loading, LoadingError> {
        loading(&arguments(line), &small(), memory(64 << 30))
    }

    #[test]
    fn a_raised_budget_never_shrinks_a_window() {
        let (mut context, mut slots, mut grew) = (0, 0, 0);
        for mebibytes in 96..132 {
            let line = format!("serve --threads 1 --memory {mebibytes}MiB");
            let options = loading_of(&line).unwrap().options;
            assert!(options.context >= context && options.slots >= slots, "{mebibytes} MiB: {options:?}");
            grew += u32::from(options.context > context || options.slots > slots);
            (context, slots) = (options.context, options.slots);
        }
        assert!(grew > 2 && context == 8192 && slots == 8);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_figures_and_flag() {
        for (line, part) in [
            ("serve --context 8193", "--context 8193 is larger than this model's 8192 positions"),
            ("serve --chunk abc", "--chunk abc is no number of rows"),
            ("serve --chunk 0", "--chunk 0 is no number of rows"),
            ("serve --round-rows 5", "--round-rows 5 is fewer than the 6 rows of a draft block"),
            ("serve --round-rows 8 --parallel 8", "--round-rows 8 leaves no row for prompts beside 8 replies"),
            ("serve --memory 1MiB", "the weights, the activations and the program itself need"),
            ("serve --memory 166MiB --parallel 1000", "one token for each of 1000 requests"),
            ("serve --memory 130MiB --parallel 200 --context 8k", "or raise --memory"),
        ] {
            let error = loading_of(line).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
        let serial = loading_of("serve --round-rows 1 --draft off").unwrap().options;
        assert_eq!((serial.round_rows, serial.slots, serial.draft), (1, 1, false));
        let both = loading_of("serve --context 9k --round-rows 1").unwrap_err();
        assert!(matches!(&both, LoadingError::Usage(mistakes) if mistakes.0.len() == 2), "{both}");
        let release = loading(&arguments("info x"), &FLASH, memory(64 << 30)).unwrap_err().to_string();
        assert!(release.contains("GiB, and 56.0 GiB are there"), "{release}");
    }

    /// Reported as: `--prefix-cache-bytes 999TiB` is told to use a smaller --parallel, `--engram disk:99999999GiB` to buy memory.
    #[test]
    fn the_option_that_leaves_no_room_is_the_one_that_is_named() {
        for (line, part) in [
            ("serve --prefix-cache-bytes 999TiB", "--prefix-cache-bytes 999.0 TiB leaves no room"),
            ("serve --prefix-cache-bytes 63GiB --parallel 2", "--prefix-cache-bytes 63.0 GiB leaves no room"),
            ("serve --engram disk:99999999GiB", "--engram disk:99999999GiB leaves no room"),
            ("serve --max-body 40GiB", "--max-body 40.0 GiB leaves no room"),
            ("serve --memory 16GiB --round-rows 1M", "--round-rows 1048576 leaves no room"),
        ] {
            let error = loading_of(line).unwrap_err().to_string();
            assert!(error.starts_with(part) && error.contains("GiB"), "{line}: {error}");
            assert!(error.ends_with("Use a smaller value, or raise --memory"), "{line}: {error}");
        }
        let error = loading_of("serve --memory 1MiB --prefix-cache-bytes 1GiB").unwrap_err().to_string();
        assert!(error.starts_with("the weights"), "without it the rest doesn't fit either: {error}");
    }

    #[test]
    fn bodies_are_in_the_plan_of_whoever_reads_some() {
        let plan = |line: &str| loading_of(line).unwrap().plan;
        let (serve, info) = (plan("serve --context 8k"), plan("info tiny-dsv41 --context 8k"));
        assert_eq!(serve.bodies_bytes, info.bodies_bytes, "the plan of info is the plan of serve");
        assert_eq!(serve.bodies_bytes, 4 * (4 << 20) + 8192 * 6 * 192);
        assert_eq!(plan("serve --context 8k --max-body 3MiB").bodies_bytes, 4 * (3 << 20) + 8192 * 6 * 192);
        assert_eq!(plan("run hello").bodies_bytes, 0);
        let release = |line: &str| loading(&arguments(line), &FLASH, Site::default()).unwrap();
        let (long, short) = (release("serve"), release("serve --context 128k"));
        assert_eq!((long.body_bytes, short.body_bytes), (64 << 20, 8 << 20), "64 bytes a token");
        assert_eq!(long.plan.bodies_bytes, 4 * (64 << 20) + (1 << 30), "at most");
        let error = loading_of("serve --max-body 0").unwrap_err().to_string();
        assert!(error.contains("--max-body 0 refuses every request"), "{error}");
    }

    #[test]
    fn flags_beat_the_checkpoints_sampling_which_beats_plain() {
        let plain = sampling(&arguments("serve"), &GenerationConfig::default());
        assert_eq!(plain, SamplingDefaults { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0 });
        let own = GenerationConfig {
            do_sample: Some(false),
            temperature: Some(0.7),
            top_p: Some(0.9),
            top_k: Some(40),
            min_p: Some(0.1),
            max_new_tokens: None,
        };
        let greedy = sampling(&arguments("serve"), &own);
        assert_eq!(greedy, SamplingDefaults { temperature: 0.0, top_p: 0.9, top_k: 40, min_p: 0.1 });
        let flags = sampling(&arguments("serve --temperature 0.5 --top-p 0.8 --top-k 0 --min-p 0"), &own);
        assert_eq!(flags, SamplingDefaults { temperature: 0.5, top_p: 0.8, top_k: 0, min_p: 0.0 });
    }

    #[test]
    fn engine_and_chat_hear_their_flags() {
        let model = ModelLimits { vocab_size: 8, context: 64, slots: 2, round_rows: 32, draft_block: 5 };
        let limits = |line: &str| engine_limits(&arguments(line), &model, &loading_of(line).unwrap());
        let default = limits("serve");
        assert_eq!((default.draft.max, default.draft.adaptive, default.queue), (5, true, 128));
        assert_eq!(limits("serve --no-drafts").draft.max, 0);
        assert_eq!((limits("serve --draft 3").draft.max, limits("serve --draft 3").draft.adaptive), (3, false));
        assert_eq!(limits("serve --draft 9").draft.max, 5);
        assert!(default.draft.head && default.draft.copy);
        assert!(!limits("serve --draft-copy off").draft.copy);
        assert_eq!(limits("serve --decode-gap-ms 0").decode_gap, None);
        assert_eq!(limits("serve --queue-timeout 1.5").queue_timeout, Duration::from_millis(1500));
        assert_eq!(limits("serve --chunk 7").prompt_chunk, 7);
        assert_eq!(limits("run").queue, 128);
        assert!(default.prefix_cache_bytes > 0 && default.snapshot_every == 4096);
        assert_eq!(limits("serve --prefix-cache off").prefix_cache_bytes, 0);
        assert_eq!(limits("serve --prefix-cache-bytes 3MiB").prefix_cache_bytes, 3 << 20);
        assert_eq!(limits("run --snapshot-every 7").snapshot_every, 7);
        assert!(chat(&arguments("serve")).thinking);
        assert!(!chat(&arguments("serve --no-thinking")).thinking);
        assert!(!chat(&arguments("run --reasoning-effort none")).thinking);
        assert_eq!(chat(&arguments("run --reasoning-effort max")).effort.value(), 100);
        assert_eq!(reasoning_field(&arguments("serve --reasoning-field both")), ReasoningField::Both);
    }

    #[test]
    fn the_largest_that_fits_is_found() {
        for most in [1, 2, 7, 8] {
            for limit in 0..=most {
                let expected = (limit > 0).then_some(limit);
                assert_eq!(largest(most, |number| *number <= limit), expected, "{limit} of {most}");
            }
        }
        assert_eq!(show_bytes(1023), "1023 B");
        assert_eq!(show_bytes(3 << 30), "3.0 GiB");
    }
}
