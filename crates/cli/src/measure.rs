//! `bench concurrent`, `bench cache` and `bench serve`: measure a server from outside. Without `--url` the model is served
//! in this process, by the same code as `serve`, on a loopback port for the time of the run.

use std::time::Duration;

use serde_json::Value as Json;
use tf_bench::workload::{self, Numbers, Request, Settings};
use tf_bench::{Client, Record, cache, concurrent, serve};

use crate::arguments::{self, Arguments, Mistakes, Value, show};
use crate::bench::{counts, record};
use crate::failure::Failure;
use crate::load;
use crate::locate::Located;
use crate::options::{Command, Environment, find};
use crate::output::read;
use crate::serve::Local;

pub const SEED: u64 = 1234;

/// Measures with the given server or with one of its own.
///
/// # Errors
/// Wrong usage, a model that can't be served, a server that can't be reached.
pub fn run(subcommand: &str, arguments: &Arguments, located: &Located) -> Result<Record, Failure> {
    let job = Job::read(subcommand, arguments)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        if let Some(url) = arguments.text("url") {
            let client = Client::new(url).map_err(|error| Mistakes(vec![format!("--url: {error}")]))?;
            let mut record = remote(&client, url, subcommand, job.settings(arguments)).await?;
            job.run(&client, &mut record).await?;
            return Ok(record);
        }
        let words = serve_words(arguments, job.requests_at_once());
        let serving = serving(&words)?;
        let checked = load::checked(located, &serving)?;
        let settings = job.settings(arguments);
        let extra: Vec<(&str, String)> = settings.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        let mut record = record(&format!("bench {subcommand}"), &checked, &checked.loading.options, &extra);
        let local = Local::start(serving, checked).await?;
        let client = Client::new(&local.url).map_err(|error| Failure::run_time(error.to_string()))?;
        let measured = job.run(&client, &mut record).await;
        local.stop().await?;
        measured.map(|()| record)
    })
}

/// `serve` with what was given here and is an option there too.
pub fn serve_words(arguments: &Arguments, at_once: usize) -> Vec<String> {
    let mut words = vec!["serve".to_owned()];
    for flag in crate::options::OPTIONS.iter().map(|spec| spec.flag) {
        let (Some(spec), Some(_)) = (find(Command::Serve, flag), find(Command::Bench, flag)) else { continue };
        // The model is located already, and what a file says has been read.
        if flag == "config" || flag == "model" || !arguments.is_given(flag) {
            continue;
        }
        let Some(setting) = arguments.setting(flag) else { continue };
        match &setting.value {
            value if spec.kind.takes_value() => words.push(format!("--{flag}={}", show(value))),
            Value::On(true) => words.push(format!("--{flag}")),
            Value::On(false) if spec.kind == crate::options::Kind::Toggle => words.push(format!("--no-{flag}")),
            _ => {}
        }
    }
    // Streams that waited for a slot would be measured as slow.
    if !arguments.is_given("parallel") && at_once > 1 {
        words.push(format!("--parallel={at_once}"));
    }
    words
}

/// The arguments of a `serve` with these words.
///
/// # Errors
/// Their mistakes.
pub fn serving(words: &[String]) -> Result<Arguments, Failure> {
    match arguments::parse(words, &Environment::default())? {
        arguments::Request::Run(serving) => Ok(*serving),
        _ => Err(Failure::run_time("the server's own arguments can't be read")),
    }
}

/// The head of a record of a server that runs elsewhere.
async fn remote(
    client: &Client,
    url: &str,
    subcommand: &str,
    options: Vec<(String, String)>,
) -> Result<Record, Failure> {
    let models = client.get("/v1/models").await.map_err(|error| Failure::run_time(error.to_string()))?;
    let model = &models["data"][0];
    let fingerprint = model["tensorfold"]["fingerprint"].as_str().unwrap_or("unknown");
    // Another server has no such route; what it is stays unknown.
    let version = client.get("/version").await.unwrap_or(Json::Null);
    let text = |value: &Json| value.as_str().unwrap_or("unknown").to_owned();
    Ok(Record {
        command: format!("bench {subcommand}"),
        version: text(&version["version"]),
        commit: text(&version["commit"]),
        model: format!("{} {fingerprint}", text(&model["id"])),
        device: url.to_owned(),
        options,
        ..Record::default()
    })
}

/// What is measured, as the arguments say it.
enum Job {
    Concurrent(concurrent::Plan),
    Cache(CacheJob),
    Serve(ServeJob),
}

struct CacheJob {
    ids: Option<Vec<u32>>,
    tokens: u64,
    seed: u64,
    repeats: usize,
    streams: usize,
    expected_prompt_tokens: Option<u64>,
    require_cold: bool,
    require_reuse: bool,
}

struct ServeJob {
    /// Lines of a dataset.
    dataset: Option<Vec<String>>,
    requests: usize,
    arrival: serve::Arrival,
    prompt_tokens: u64,
    tokens: u64,
    seed: u64,
    same_prompt: bool,
}

impl Job {
    fn read(subcommand: &str, arguments: &Arguments) -> Result<Job, Failure> {
        let seed = arguments.integer("seed").map_or(SEED, |seed| seed as u64);
        let count = |flag, default| arguments.count(flag).unwrap_or(default);
        Ok(match subcommand {
            "concurrent" => Job::Concurrent(concurrent::Plan {
                levels: counts(arguments, "levels", &[1, 4])?.into_iter().map(|level| level as usize).collect(),
                temperatures: temperatures(arguments)?,
                repetitions: count("reps", 3),
                settings: Settings {
                    seed,
                    tokens: count("tokens", 256),
                    temperature: 1.0,
                    mixed: arguments.is_on("mixed"),
                    same_prompt: arguments.is_on("same-prompt"),
                    no_seed: arguments.is_on("no-seed"),
                },
                stagger: Duration::from_millis(count("stagger-ms", 0)),
                alone: arguments.is_on("alone"),
                serial: arguments.is_on("serial"),
            }),
            "cache" => Job::Cache(CacheJob {
                ids: arguments.text("prompt-file").map(read_ids).transpose()?,
                tokens: count("tokens", 64),
                seed,
                repeats: count("repeats", 2) as usize,
                streams: count("streams", 2) as usize,
                expected_prompt_tokens: arguments.count("expected-prompt-tokens"),
                require_cold: arguments.is_on("require-cold"),
                require_reuse: arguments.is_on("require-reuse"),
            }),
            _ => Job::Serve(ServeJob {
                dataset: arguments.text("dataset").map(read_lines).transpose()?,
                requests: count("requests", 16) as usize,
                arrival: arrival(arguments, seed)?,
                prompt_tokens: count("prompt-tokens", 128),
                tokens: count("tokens", 64),
                seed,
                same_prompt: arguments.is_on("same-prompt"),
            }),
        })
    }

    fn requests_at_once(&self) -> usize {
        match self {
            Job::Concurrent(plan) => plan.levels.iter().copied().max().unwrap_or(1),
            Job::Cache(job) => job.streams,
            Job::Serve(job) => match job.arrival {
                serve::Arrival::Concurrency(count) => count,
                serve::Arrival::Rate { .. } => 1,
            },
        }
    }

    /// Names and values for the record.
    fn settings(&self, arguments: &Arguments) -> Vec<(String, String)> {
        let list = |numbers: Vec<String>| numbers.join(",");
        let mut settings = match self {
            Job::Concurrent(plan) => vec![
                ("levels", list(plan.levels.iter().map(ToString::to_string).collect())),
                ("temperatures", list(plan.temperatures.iter().map(ToString::to_string).collect())),
                ("reps", plan.repetitions.to_string()),
                ("tokens", plan.settings.tokens.to_string()),
                ("seed", plan.settings.seed.to_string()),
                ("mixed", plan.settings.mixed.to_string()),
                ("same prompt", plan.settings.same_prompt.to_string()),
                ("derived seeds", plan.settings.no_seed.to_string()),
                ("stagger", format!("{} ms", plan.stagger.as_millis())),
            ],
            Job::Cache(job) => vec![
                ("tokens", job.tokens.to_string()),
                ("seed", job.seed.to_string()),
                ("repeats", job.repeats.to_string()),
                ("streams", job.streams.to_string()),
            ],
            Job::Serve(job) => vec![
                ("requests", job.requests.to_string()),
                (
                    "arrival",
                    match job.arrival {
                        serve::Arrival::Concurrency(count) => format!("{count} at once"),
                        serve::Arrival::Rate { per_second, .. } => format!("{per_second} a second"),
                    },
                ),
                (
                    "prompts",
                    match &job.dataset {
                        Some(lines) => format!("{} lines of a dataset", lines.len()),
                        None => format!("{} random tokens", job.prompt_tokens),
                    },
                ),
                ("tokens", job.tokens.to_string()),
                ("seed", job.seed.to_string()),
            ],
        };
        for flag in ["draft", "draft-copy", "prefix-cache"] {
            // What another server does isn't known here.
            if let Some(setting) = arguments.setting(flag).filter(|_| arguments.text("url").is_none()) {
                settings.push((flag, show(&setting.value)));
            }
        }
        settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    async fn run(&self, client: &Client, record: &mut Record) -> Result<(), Failure> {
        match self {
            Job::Concurrent(plan) => concurrent::run(client, plan, record).await,
            Job::Cache(job) => {
                let ids = match &job.ids {
                    Some(ids) => ids.clone(),
                    None => workload::ids(&mut Numbers::new(job.seed), vocab_size(client).await?, CACHE_PROMPT_TOKENS),
                };
                let plan = cache::Plan {
                    request: workload::of_ids(&ids, job.tokens, job.seed),
                    repeats: job.repeats,
                    streams: job.streams,
                    expected_prompt_tokens: job.expected_prompt_tokens,
                    require_cold: job.require_cold,
                    require_reuse: job.require_reuse,
                };
                cache::run(client, &plan, record).await;
            }
            Job::Serve(job) => serve::run(client, &job.bodies(client).await?, job.arrival, record).await,
        }
        Ok(())
    }
}

/// Prompt of `bench cache` without a file.
const CACHE_PROMPT_TOKENS: u64 = 512;

impl ServeJob {
    async fn bodies(&self, client: &Client) -> Result<Vec<Request>, Failure> {
        if let Some(lines) = &self.dataset {
            let one = |index: usize| {
                let line = index % lines.len();
                workload::of_line(&lines[line], self.tokens, self.seed + index as u64)
                    .map_err(|problem| Failure::run_time(format!("--dataset, line {}: {problem}", line + 1)))
            };
            return (0..self.requests).map(one).collect();
        }
        let vocab_size = vocab_size(client).await?;
        let one = |index: u64| {
            let prompt = if self.same_prompt { 0 } else { index };
            let ids = workload::ids(&mut Numbers::new(self.seed ^ prompt), vocab_size, self.prompt_tokens);
            workload::of_ids(&ids, self.tokens, self.seed + index)
        };
        Ok((0..self.requests as u64).map(one).collect())
    }
}

async fn vocab_size(client: &Client) -> Result<u64, Failure> {
    let models = client.get("/v1/models").await.map_err(|error| Failure::run_time(error.to_string()))?;
    models["data"][0]["meta"]["n_vocab"].as_u64().ok_or_else(|| {
        Failure::run_time("/v1/models has no meta.n_vocab, so no tokens can be drawn: use --dataset or --prompt-file")
    })
}

fn temperatures(arguments: &Arguments) -> Result<Vec<f64>, Failure> {
    let Some(texts) = arguments.list("temperatures") else { return Ok(vec![1.0, 0.0]) };
    let read = |text: &str| text.parse::<f64>().ok().filter(|number| (0.0..=100.0).contains(number));
    texts.iter().map(|text| read(text).ok_or(text)).collect::<Result<_, _>>().map_err(|text| {
        Mistakes(vec![format!("--temperatures takes numbers from 0 to 100 with commas; {text:?} is none")]).into()
    })
}

fn arrival(arguments: &Arguments, seed: u64) -> Result<serve::Arrival, Failure> {
    match arguments.number("rate") {
        Some(_) if arguments.is_given("concurrency") => {
            Err(Mistakes(vec!["--rate and --concurrency exclude each other: choose one".to_owned()]).into())
        }
        Some(0.0) => Err(Mistakes(vec!["--rate 0 sends no request: use a number above 0".to_owned()]).into()),
        Some(per_second) => Ok(serve::Arrival::Rate { per_second, seed }),
        None => Ok(serve::Arrival::Concurrency(arguments.count("concurrency").unwrap_or(4) as usize)),
    }
}

fn read_ids(file: &str) -> Result<Vec<u32>, Failure> {
    let ids: Vec<u32> = serde_json::from_str(&read("prompt-file", file)?).map_err(|error| {
        let reason = tf_text::json::reason(&error);
        Failure::run_time(format!("--prompt-file {file} is no JSON list of token ids: {reason}"))
    })?;
    match ids.is_empty() {
        true => Err(Failure::run_time(format!("--prompt-file {file} holds no token"))),
        false => Ok(ids),
    }
}

fn read_lines(file: &str) -> Result<Vec<String>, Failure> {
    let text = read("dataset", file)?;
    let lines: Vec<String> = text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect();
    match lines.is_empty() {
        true => Err(Failure::run_time(format!("--dataset {file} holds no prompt"))),
        false => Ok(lines),
    }
}
