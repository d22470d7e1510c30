//! What `/metrics` says. One table of names, so that each figure and its twin are declared once.
//!
//! Figures of replies are taken when a reply ends; those of the engine are read from its counters when they are asked
//! for. What isn't measured has no line.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tf_engine::disk::{DiskStats, Refusal};
use tf_engine::limits::DRAFTS_MAX;
use tf_engine::{
    DraftCounts, DraftSource, EngineHandle, EngineStats, FinishReason, Lifecycle, ROUND_ROW_BOUNDS, ReplyStats,
};

use crate::config::ServerConfig;

/// `Content-Type` of the text form.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Which names are exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsNames {
    Off,
    /// Those that begin with `tensorfold:`.
    Own,
    /// And vLLM's, where the meaning is the same.
    All,
}

const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const EACH_TOKEN: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const TOKENS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];

/// A histogram of replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Series {
    FirstToken,
    BetweenTokens,
    PerToken,
    Latency,
    Queue,
    Prefill,
    Decode,
    Inference,
    PromptTokens,
    ReplyTokens,
}

/// Name, which is also vLLM's, help, upper bounds.
const HISTOGRAMS: [(Series, &str, &str, &[f64]); 10] = [
    (Series::FirstToken, "time_to_first_token_seconds", "From submission to the first token.", FIRST_TOKEN),
    (Series::BetweenTokens, "inter_token_latency_seconds", "Between rounds that brought tokens.", EACH_TOKEN),
    (Series::PerToken, "request_time_per_output_token_seconds", "Mean time of a token after the first.", EACH_TOKEN),
    (Series::Latency, "e2e_request_latency_seconds", "From submission to the last token.", REQUEST),
    (Series::Queue, "request_queue_time_seconds", "From submission to a slot.", REQUEST),
    (Series::Prefill, "request_prefill_time_seconds", "From the slot to the end of the prompt.", REQUEST),
    (Series::Decode, "request_decode_time_seconds", "From the first token to the last.", REQUEST),
    (Series::Inference, "request_inference_time_seconds", "From the slot to the last token.", REQUEST),
    (Series::PromptTokens, "request_prompt_tokens", "Tokens of a prompt.", TOKENS),
    (Series::ReplyTokens, "request_generation_tokens", "Tokens of a reply.", TOKENS),
];

#[derive(Clone, Debug, Default)]
struct Histogram {
    /// One count a bound, then those above all bounds.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn add(&mut self, bounds: &[f64], value: f64) {
        self.counts.resize(bounds.len() + 1, 0);
        let place = bounds.iter().position(|bound| value <= *bound).unwrap_or(bounds.len());
        self.counts[place] += 1;
        self.sum += value;
    }
}

#[derive(Debug, Default)]
struct Counts {
    /// By route, status and label of the key.
    requests: BTreeMap<(&'static str, u16, String), u64>,
    refusals: BTreeMap<&'static str, u64>,
    finished: BTreeMap<&'static str, u64>,
    histograms: [Histogram; HISTOGRAMS.len()],
    disconnections: u64,
    stream_errors: u64,
}

/// What the server has counted.
#[derive(Debug, Default)]
pub struct Metrics(Mutex<Counts>);

impl Metrics {
    fn counts(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request has its status. `key`: the label of its key, or nothing.
    pub fn answered(&self, route: &'static str, status: u16, key: &str) {
        *self.counts().requests.entry((route, status, key.to_owned())).or_default() += 1;
    }

    /// The queue refused a request.
    pub fn refused(&self, code: &'static str) {
        *self.counts().refusals.entry(code).or_default() += 1;
    }

    /// A client went away before its reply was whole.
    pub fn disconnected(&self) {
        self.counts().disconnections += 1;
    }

    /// A stream that had begun was broken off.
    pub fn stream_failed(&self) {
        self.counts().stream_errors += 1;
    }

    /// Time between two rounds that brought tokens to a reply.
    pub fn between_tokens(&self, time: Duration) {
        self.counts().observe(Series::BetweenTokens, time.as_secs_f64());
    }

    /// A reply has ended.
    pub fn ended(&self, reason: &FinishReason, stats: &ReplyStats) {
        let is_stop = matches!(reason, FinishReason::Stop(_));
        if !is_stop && *reason != FinishReason::Length {
            return;
        }
        let name = if is_stop { "stop" } else { "length" };
        let mut counts = self.counts();
        *counts.finished.entry(name).or_default() += 1;
        let (queue, prefill, decode) =
            (stats.queue.as_secs_f64(), stats.prefill.as_secs_f64(), stats.decode.as_secs_f64());
        counts.observe(Series::Queue, queue);
        counts.observe(Series::Prefill, prefill);
        counts.observe(Series::Decode, decode);
        counts.observe(Series::Inference, prefill + decode);
        counts.observe(Series::Latency, queue + prefill + decode);
        counts.observe(Series::PromptTokens, f64::from(stats.prompt_tokens));
        counts.observe(Series::ReplyTokens, f64::from(stats.reply_tokens));
        if stats.reply_tokens > 0 {
            counts.observe(Series::FirstToken, queue + prefill);
        }
        if stats.reply_tokens > 1 {
            counts.observe(Series::PerToken, decode / f64::from(stats.reply_tokens - 1));
        }
    }
}

impl Counts {
    fn observe(&mut self, series: Series, value: f64) {
        for ((found, _, _, bounds), histogram) in HISTOGRAMS.iter().zip(&mut self.histograms) {
            if *found == series {
                histogram.add(bounds, value);
            }
        }
    }
}

/// Lines of one exposition.
struct Page {
    text: String,
    model: String,
    with_twins: bool,
}

impl Page {
    /// One figure under its own name, and under vLLM's where there is one. `samples`: labels and value.
    fn figure(&mut self, name: &str, twin: &str, kind: &str, help: &str, samples: &[(&[(&str, &str)], f64)]) {
        let own = format!("tensorfold:{name}");
        let twin = (self.with_twins && !twin.is_empty()).then(|| format!("vllm:{twin}"));
        for name in std::iter::once(own).chain(twin) {
            self.head(&name, kind, help);
            for (labels, value) in samples {
                self.sample(&name, labels, *value);
            }
        }
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let _ = write!(self.text, "{name}{{model_name=\"{}\"", escape(&self.model));
        for (label, text) in labels {
            let _ = write!(self.text, ",{label}=\"{}\"", escape(text));
        }
        let _ = writeln!(self.text, "}} {value}");
    }

    /// Under its own name, and under vLLM's.
    fn histogram(&mut self, name: &str, twin: &str, help: &str, bounds: &[f64], histogram: &Histogram) {
        let own = format!("tensorfold:{name}");
        for name in std::iter::once(own).chain(self.with_twins.then(|| format!("vllm:{twin}"))) {
            self.head(&name, "histogram", help);
            let mut below = 0;
            for (index, bound) in bounds.iter().enumerate() {
                below += histogram.counts.get(index).copied().unwrap_or(0);
                self.sample(&format!("{name}_bucket"), &[("le", &bound.to_string())], below as f64);
            }
            let all = histogram.counts.iter().sum::<u64>() as f64;
            self.sample(&format!("{name}_bucket"), &[("le", "+Inf")], all);
            self.sample(&format!("{name}_sum"), &[], histogram.sum);
            self.sample(&format!("{name}_count"), &[], all);
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// The page; `engine` is absent while the model is loading.
pub fn page(config: &ServerConfig, engine: Option<&EngineHandle>, metrics: &Metrics, state: &str) -> String {
    let with_twins = config.metrics == MetricsNames::All;
    let mut page = Page { text: String::new(), model: config.names[0].clone(), with_twins };
    let identity = &config.identity;
    let build: &[(&str, &str)] = &[
        ("version", &identity.version),
        ("commit", &identity.commit),
        ("backend", &identity.backend),
        ("numerics", &identity.numerics),
        ("fingerprint", &identity.fingerprint),
        ("exact", "true"),
    ];
    page.figure("build_info", "", "gauge", "What runs here.", &[(build, 1.0)]);
    let is_ready = engine.is_some_and(|engine| engine.lifecycle() == Lifecycle::Running);
    page.figure(
        "model_ready",
        "",
        "gauge",
        "1 when the model is loaded and takes requests.",
        &[(&[], f64::from(u8::from(is_ready)))],
    );
    page.figure("lifecycle_state", "", "gauge", "1 for the present state.", &[(&[("state", state)], 1.0)]);
    if let Some(engine) = engine {
        engine_figures(&mut page, &engine.stats(), engine);
    }
    reply_figures(&mut page, &metrics.counts());
    if let Some(process) = crate::memory::Process::own() {
        let resident = process.resident_bytes as f64;
        page.figure("process_resident_bytes", "", "gauge", "Memory of the process.", &[(&[], resident)]);
        if let Some(own) = process.anonymous_bytes {
            let labels: &[(&str, &str)] = &[("device", &identity.backend), ("part", "process")];
            page.figure("memory_bytes", "", "gauge", "Memory that no file backs.", &[(labels, own as f64)]);
        }
    }
    for &(part, bytes) in &config.memory_plan {
        let labels: &[(&str, &str)] = &[("device", &identity.backend), ("part", part)];
        if part == config.memory_plan[0].0 {
            page.head("tensorfold:memory_plan_bytes", "gauge", "Planned memory.");
        }
        page.sample("tensorfold:memory_plan_bytes", labels, bytes as f64);
    }
    page.text
}

/// Name, vLLM's name, type, help and value of each counter of the engine.
fn engine_table(stats: &EngineStats) -> [(&'static str, &'static str, &'static str, &'static str, f64); 18] {
    let running = f64::from(stats.prefilling + stats.decoding);
    let count = |value: u64| value as f64;
    [
        ("requests_running", "num_requests_running", "gauge", "Requests that have a slot.", running),
        ("requests_waiting", "num_requests_waiting", "gauge", "Requests in the queue.", f64::from(stats.waiting)),
        ("prompt_tokens_total", "prompt_tokens_total", "counter", "Tokens of prompts.", count(stats.prompt_tokens)),
        (
            "generation_tokens_total",
            "generation_tokens_total",
            "counter",
            "Tokens of replies.",
            count(stats.reply_tokens),
        ),
        ("drafts_total", "spec_decode_num_drafts_total", "counter", "Windows with drafts.", count(stats.draft_windows)),
        (
            "draft_tokens_total",
            "spec_decode_num_draft_tokens_total",
            "counter",
            "Drafted tokens.",
            count(stats.drafted),
        ),
        (
            "draft_tokens_accepted_total",
            "spec_decode_num_accepted_tokens_total",
            "counter",
            "Drafted tokens that were accepted.",
            count(stats.accepted),
        ),
        (
            "prompt_tokens_cached_total",
            "prompt_tokens_cached_total",
            "counter",
            "Prompt tokens that weren't computed again.",
            count(stats.cached_tokens),
        ),
        (
            "prefix_cache_queries_total",
            "prefix_cache_queries_total",
            "counter",
            "Prompt tokens that were looked up.",
            count(stats.prompt_tokens),
        ),
        (
            "prefix_cache_hits_total",
            "prefix_cache_hits_total",
            "counter",
            "Prompt tokens that were found.",
            count(stats.cached_tokens),
        ),
        ("prefix_cache_entries", "", "gauge", "Kept prefixes.", count(stats.prefixes)),
        ("prefix_cache_bytes", "", "gauge", "What kept prefixes take.", count(stats.prefix_bytes)),
        ("prefix_cache_evictions_total", "", "counter", "Prefixes that were let go.", count(stats.prefix_evictions)),
        ("page_waits_total", "", "counter", "Rounds that a sequence waited for pages.", count(stats.page_waits)),
        (
            "preemptions_total",
            "num_preemptions_total",
            "counter",
            "Times that a running sequence made way for others.",
            count(stats.page_waits + stats.pauses),
        ),
        ("rounds_total", "", "counter", "Rounds.", count(stats.rounds)),
        ("draft_failures_total", "", "counter", "Calls of the drafter that failed.", count(stats.draft_failures)),
        ("forward_failures_total", "", "counter", "Rounds that failed.", count(stats.forward_failures)),
    ]
}

/// The disk tier: how much is there, what it gave, and what it refused.
fn disk_figures(page: &mut Page, disk: &DiskStats) {
    let table = [
        ("disk_cache_files", "gauge", "Prefixes on disk.", disk.files),
        ("disk_cache_bytes", "gauge", "What they take.", disk.bytes),
        ("disk_cache_budget_bytes", "gauge", "What they may take; 0 without --cache-dir.", disk.budget_bytes),
        ("disk_cache_hits_total", "counter", "Prompts that resumed from a file.", disk.hits),
        ("disk_cache_loads_total", "counter", "Prefixes that were read.", disk.loads),
        ("disk_cache_writes_total", "counter", "Prefixes that were written.", disk.writes),
        ("disk_cache_write_failures_total", "counter", "Prefixes that the disk didn't take.", disk.write_failures),
        ("disk_cache_evictions_total", "counter", "Files that were let go for others.", disk.evictions),
    ];
    for (name, kind, help, value) in table {
        page.figure(name, "", kind, help, &[(&[], value as f64)]);
    }
    let labels = Refusal::ALL.map(|reason| [("reason", reason.name())]);
    let samples: Vec<(&[(&str, &str)], f64)> =
        labels.iter().zip(disk.refused).map(|(label, count)| (&label[..], count as f64)).collect();
    page.figure("disk_cache_refused_total", "", "counter", "Files that were not used.", &samples);
}

fn engine_figures(page: &mut Page, stats: &EngineStats, engine: &EngineHandle) {
    let mut all = DraftCounts::default();
    stats.drafts.iter().for_each(|counts| all.add(counts));
    let positions = all.drafted_per_position.iter().take_while(|drafted| **drafted > 0).count();
    let positions: Vec<String> = (0..positions).map(|position| position.to_string()).collect();
    for (name, twin, kind, help, value) in engine_table(stats) {
        page.figure(name, twin, kind, help, &[(&[], value)]);
    }
    let labels: Vec<[(&str, &str); 1]> = positions.iter().map(|position| [("position", &**position)]).collect();
    let values = all.accepted_per_position.iter().map(|accepted| *accepted as f64);
    let samples: Vec<(&[(&str, &str)], f64)> = labels.iter().map(|label| &label[..]).zip(values).collect();
    page.figure(
        "draft_tokens_accepted_per_position_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Accepted drafts by their place in the window.",
        &samples,
    );
    draft_sources(page, stats, &positions);
    disk_figures(page, &stats.disk);
    page.histogram(
        "round_rows",
        "iteration_tokens_total",
        "Rows of a round.",
        &ROUND_ROW_BOUNDS.map(f64::from),
        &Histogram { counts: stats.round_rows.to_vec(), sum: (stats.prompt_rows + stats.reply_rows) as f64 },
    );
    page_figures(page, stats, engine);
    if let Some(last_round) = stats.last_round {
        let age = engine.now().since(last_round).as_secs_f64();
        page.figure("last_step_age_seconds", "", "gauge", "Since the last round ended.", &[(&[], age)]);
    }
}

/// Drafts by source and place in the window.
fn draft_sources(page: &mut Page, stats: &EngineStats, positions: &[String]) {
    type PerPosition = fn(&DraftCounts) -> &[u64; DRAFTS_MAX];
    let figures: [(&str, &str, PerPosition); 2] = [
        ("draft_source_tokens_total", "Drafted tokens by source and place.", |counts| &counts.drafted_per_position),
        ("draft_source_tokens_accepted_total", "Accepted drafts by source and place.", |counts| {
            &counts.accepted_per_position
        }),
    ];
    for (name, help, of) in figures {
        let rows = DraftSource::ALL.into_iter().zip(&stats.drafts);
        let samples: Vec<([(&str, &str); 2], f64)> = rows
            .flat_map(|(source, counts)| {
                let places = positions.iter().zip(of(counts));
                places.map(move |(place, count)| ([("source", source.as_str()), ("position", &**place)], *count as f64))
            })
            .collect();
        let samples: Vec<(&[(&str, &str)], f64)> =
            samples.iter().map(|(labels, value)| (&labels[..], *value)).collect();
        page.figure(name, "", "counter", help, &samples);
    }
}

/// Pages are known once a round has run.
fn page_figures(page: &mut Page, stats: &EngineStats, engine: &EngineHandle) {
    if stats.pages == 0 {
        return;
    }
    let used = f64::from(stats.pages - stats.pages_free) / f64::from(stats.pages);
    page.figure("kv_cache_usage_ratio", "kv_cache_usage_perc", "gauge", "Share of the pages in use.", &[(&[], used)]);
    let limits = engine.limits();
    let (size, count, bytes) =
        (stats.page_positions.to_string(), stats.pages.to_string(), limits.prefix_cache_bytes.to_string());
    let is_kept = if limits.prefix_cache_bytes > 0 { "True" } else { "False" };
    let labels: &[(&str, &str)] = &[
        ("block_size", &size),
        ("num_gpu_blocks", &count),
        ("enable_prefix_caching", is_kept),
        ("prefix_cache_bytes", &bytes),
    ];
    page.figure("cache_config_info", "cache_config_info", "gauge", "Pages and kept prefixes.", &[(labels, 1.0)]);
}

fn reply_figures(page: &mut Page, counts: &Counts) {
    page.head("tensorfold:requests_total", "counter", "Answered requests.");
    for ((route, status, key), count) in &counts.requests {
        let labels: &[(&str, &str)] = &[("route", route), ("code", &status.to_string()), ("key", key)];
        page.sample("tensorfold:requests_total", labels, *count as f64);
    }
    let by =
        |label: &'static str, counts: &BTreeMap<&'static str, u64>| -> Vec<([(&'static str, &'static str); 1], f64)> {
            counts.iter().map(|(name, count)| ([(label, *name)], *count as f64)).collect()
        };
    let finished = by("finished_reason", &counts.finished);
    let finished: Vec<(&[(&str, &str)], f64)> = finished.iter().map(|(label, value)| (&label[..], *value)).collect();
    page.figure("request_success_total", "request_success_total", "counter", "Whole replies.", &finished);
    let refusals = by("code", &counts.refusals);
    let refusals: Vec<(&[(&str, &str)], f64)> = refusals.iter().map(|(label, value)| (&label[..], *value)).collect();
    page.figure("queue_refusals_total", "", "counter", "Requests that the queue refused.", &refusals);
    let table = [
        ("client_disconnections_total", "", "Clients that left before their reply was whole.", counts.disconnections),
        ("stream_errors_total", "", "Streams that were broken off.", counts.stream_errors),
    ];
    for (name, twin, help, value) in table {
        page.figure(name, twin, "counter", help, &[(&[], value as f64)]);
    }
    for ((_, name, help, bounds), histogram) in HISTOGRAMS.iter().zip(&counts.histograms) {
        page.histogram(name, name, help, bounds, histogram);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_rise_and_buckets_count_everything_below() {
        for (series, name, _, bounds) in HISTOGRAMS {
            assert!(bounds.is_sorted(), "{name}");
            let mut counts = Counts::default();
            for value in [0.0, bounds[1], bounds[bounds.len() - 1] * 2.0] {
                counts.observe(series, value);
            }
            let index = HISTOGRAMS.iter().position(|(other, ..)| *other == series).unwrap();
            let mut page = Page { text: String::new(), model: "m".into(), with_twins: false };
            page.histogram(name, name, "", bounds, &counts.histograms[index]);
            let line = |bound: &str| format!("tensorfold:{name}_bucket{{model_name=\"m\",le=\"{bound}\"}}");
            for (bound, count) in [(bounds[0].to_string(), 1), (bounds[1].to_string(), 2), ("+Inf".to_owned(), 3)] {
                assert!(page.text.contains(&format!("{} {count}\n", line(&bound))), "{}", page.text);
            }
            assert!(page.text.contains(&format!("tensorfold:{name}_count{{model_name=\"m\"}} 3\n")));
        }
    }

    #[test]
    fn labels_are_escaped() {
        let mut page = Page { text: String::new(), model: "a\"b\\c\n".into(), with_twins: false };
        page.sample("x", &[], 1.0);
        assert_eq!(page.text, "x{model_name=\"a\\\"b\\\\c\\n\"} 1\n");
    }
}
