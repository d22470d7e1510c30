//! Every option of the program, declared once: parsing, checks, help and the reference page all read this table.
//!
//! An option has a flag, a variable `TENSORFOLD_` + the flag in capitals, and a key in the file that `--config` names.
//! Where commands give one flag different values, variable and key carry the command's name too.
//! Flag beats variable beats file beats default. What isn't built is in the table too, so that it is refused by name.
//! This is the only place that reads the environment.

use std::collections::BTreeMap;

use crate::arguments::nearest;

/// Commands of the program, in the order of the help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Command {
    Serve,
    Run,
    Pull,
    Models,
    Info,
    Logits,
    Render,
    Contract,
    Selftest,
    Bench,
}

impl Command {
    pub const ALL: [Command; 10] = [
        Command::Serve,
        Command::Run,
        Command::Pull,
        Command::Models,
        Command::Info,
        Command::Logits,
        Command::Render,
        Command::Contract,
        Command::Selftest,
        Command::Bench,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Command::Serve => "serve",
            Command::Run => "run",
            Command::Pull => "pull",
            Command::Models => "models",
            Command::Info => "info",
            Command::Logits => "logits",
            Command::Render => "render",
            Command::Contract => "contract",
            Command::Selftest => "selftest",
            Command::Bench => "bench",
        }
    }

    /// What stands after the name, and what the command is for.
    pub const fn help(self) -> (&'static str, &'static str) {
        match self {
            Command::Serve => ("[MODEL]", "start the server"),
            Command::Run => ("[MODEL] [PROMPT]", "chat in the terminal, or answer one prompt and exit"),
            Command::Pull => ("MODEL...", "download into the hub cache (not built yet)"),
            Command::Models => ("", "list what is there: built in, in the hub cache, families that can be loaded"),
            Command::Info => ("[MODEL]", "what this machine, this build and a checkpoint are, and what would fit"),
            Command::Logits => ("[MODEL]", "logits for given tokens, with digests"),
            Command::Render => {
                ("[MODEL] [FILE]", "a request body in, the exact prompt out; or a raw reply in, the message out")
            }
            Command::Contract => ("", "the kernel contract on this machine"),
            Command::Selftest => ("[MODEL]", "proves the exactness laws on this machine, backend and model"),
            Command::Bench => ("SUBCOMMAND", "speed and law checks, offline or against a server"),
        }
    }

    /// Arguments that aren't options, at most.
    pub const fn positionals_max(self) -> usize {
        match self {
            Command::Models | Command::Contract => 0,
            Command::Serve | Command::Info | Command::Logits | Command::Selftest => 1,
            Command::Run | Command::Render => 2,
            Command::Bench => 3,
            Command::Pull => usize::MAX,
        }
    }

    /// Reads a command's name or another name for it.
    pub fn parse(name: &str) -> Result<Command, String> {
        let same = match name {
            "list" | "ls" => "models",
            "show" => "info",
            other => other,
        };
        if let Some(command) = Command::ALL.into_iter().find(|command| command.name() == same) {
            return Ok(command);
        }
        if let Some((_, reason)) = NOT_OFFERED.iter().find(|(other, _)| *other == name) {
            return Err(format!("{name}: not offered: {reason}"));
        }
        if let Some((_, instead)) = SECOND_WAVE.iter().find(|(other, _)| *other == name) {
            return Err(format!("{name}: not built yet{instead}"));
        }
        let names = Command::ALL.iter().map(|command| command.name());
        let hint = nearest(name, names).map_or_else(String::new, |near| format!(" Did you mean {near}?"));
        Err(format!("{name} is not a command.{hint} `tensorfold --help` lists them."))
    }
}

const NOT_OFFERED: &[(&str, &str)] = &[
    ("convert", "the release's own files are served"),
    ("quantize", "the release's own files are served"),
    ("update", "updating is the package manager's job"),
    ("cluster", "one host"),
    ("node", "one host"),
    ("stage", "one host"),
];

const SECOND_WAVE: &[(&str, &str)] = &[
    ("rm", ""),
    ("ps", ""),
    ("chat", "; `run` chats without a server"),
    ("batch", ""),
    ("run-batch", ""),
    ("tui", ""),
    ("service", ""),
    ("launch", ""),
    ("plan", "; `info MODEL` shows the memory plan"),
    ("doctor", "; `info` shows machine and build"),
    ("capabilities", "; `info --capabilities` lists them"),
];

/// Where an option stands in help and reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Section {
    Model,
    Endpoint,
    Length,
    Sampling,
    Reasoning,
    Drafting,
    PrefixCache,
    Devices,
    Logs,
    Command,
}

impl Section {
    pub const ALL: [Section; 10] = [
        Section::Model,
        Section::Endpoint,
        Section::Length,
        Section::Sampling,
        Section::Reasoning,
        Section::Drafting,
        Section::PrefixCache,
        Section::Devices,
        Section::Logs,
        Section::Command,
    ];

    pub const fn title(self) -> &'static str {
        match self {
            Section::Model => "Model",
            Section::Endpoint => "Endpoint and security",
            Section::Length => "Length and batch",
            Section::Sampling => "Sampling defaults (a request's own value wins)",
            Section::Reasoning => "Reasoning",
            Section::Drafting => "Drafting (changes speed, never a reply)",
            Section::PrefixCache => "Prefix cache (changes speed, never a reply)",
            Section::Devices => "Devices and memory",
            Section::Logs => "Logs, metrics, developer",
            Section::Command => "Options of single commands",
        }
    }
}

/// What an option's value may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// No value on the command line; on or off elsewhere.
    Switch,
    /// `--name` or `--no-name` on the command line; on or off elsewhere.
    Toggle,
    Text,
    File,
    Folder,
    /// A whole number; `32k` is 32,768 and `1M` 1,048,576.
    Count {
        least: u64,
        most: u64,
    },
    /// As `Count`, or `auto`.
    CountOrAuto {
        least: u64,
        most: u64,
    },
    /// A signed 64-bit number.
    Integer,
    Number {
        least: f64,
        most: f64,
    },
    /// Bytes: `512MiB`, `16g`, `64GB`.
    Size,
    /// Bytes, or a share of what there is, like `0.9`.
    SizeOrFraction,
    /// One of the words; those behind the second bar aren't built.
    Choice {
        built: &'static [&'static str],
        later: &'static [&'static str],
    },
    /// `on`, `off` or a count.
    OnOffCount {
        most: u64,
    },
    /// A level's name, or a number from 1 to 100.
    Effort,
    /// `mmap`, `ram`, `disk`, or `disk:SIZE`.
    EngramPlace,
    /// A list with commas.
    List,
    /// `{"thinking": true}` and the like: sets reasoning.
    TemplateArguments,
}

impl Kind {
    /// Whether the flag takes a value on the command line.
    pub const fn takes_value(self) -> bool {
        !matches!(self, Kind::Switch | Kind::Toggle)
    }

    /// What stands for the value in help.
    pub fn placeholder(self) -> String {
        match self {
            Kind::Switch | Kind::Toggle => String::new(),
            Kind::Text => "TEXT".to_owned(),
            Kind::File => "FILE".to_owned(),
            Kind::Folder => "DIR".to_owned(),
            Kind::Count { .. } | Kind::Integer => "N".to_owned(),
            Kind::CountOrAuto { .. } => "N|auto".to_owned(),
            Kind::Number { .. } => "F".to_owned(),
            Kind::Size => "SIZE".to_owned(),
            Kind::SizeOrFraction => "SIZE|F".to_owned(),
            Kind::Choice { built, later } => [built, later].concat().join("|"),
            Kind::OnOffCount { .. } => "on|off|N".to_owned(),
            Kind::Effort => "LEVEL".to_owned(),
            Kind::EngramPlace => "mmap|ram|disk[:SIZE]".to_owned(),
            Kind::List => "LIST".to_owned(),
            Kind::TemplateArguments => "JSON".to_owned(),
        }
    }
}

/// What holds where nobody says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DefaultValue {
    /// This value.
    Is(&'static str),
    /// Decided elsewhere, as the text says.
    Says(&'static str),
}

/// Another name of an option.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alias {
    /// With its dashes.
    pub name: &'static str,
    pub form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// Takes the option's own values.
    Same,
    /// Takes no value and means this one.
    Fixed(&'static str),
    /// Takes a number in this unit.
    Unit(&'static str),
}

/// One option.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptionSpec {
    /// Without dashes.
    pub flag: &'static str,
    pub kind: Kind,
    pub section: Section,
    pub commands: &'static [Command],
    pub default: DefaultValue,
    pub help: &'static str,
    pub aliases: &'static [Alias],
    pub repeatable: bool,
    /// Never shown.
    pub secret: bool,
    /// Why it can't be used yet; empty where it can.
    pub later: &'static str,
}

impl OptionSpec {
    const fn also(mut self, aliases: &'static [Alias]) -> Self {
        self.aliases = aliases;
        self
    }

    const fn repeatable(mut self) -> Self {
        self.repeatable = true;
        self
    }

    const fn secret(mut self) -> Self {
        self.secret = true;
        self
    }

    const fn later(mut self, reason: &'static str) -> Self {
        self.later = reason;
        self
    }

    /// Whether another command gives this flag values of another kind, so that one variable can't serve both.
    pub fn is_scoped(&self) -> bool {
        OPTIONS.iter().any(|other| other.flag == self.flag && other.kind != self.kind)
    }

    /// `TENSORFOLD_MAX_TOKENS` for `max-tokens`, `TENSORFOLD_BENCH_FORMAT` for the `format` of `bench`.
    pub fn variable(&self, command: Command) -> String {
        let scope = if self.is_scoped() { format!("{}_", command.name()) } else { String::new() };
        format!("{PREFIX}{}", format!("{scope}{}", self.flag).to_uppercase().replace('-', "_"))
    }
}

pub const PREFIX: &str = "TENSORFOLD_";

const fn option(
    flag: &'static str,
    kind: Kind,
    section: Section,
    commands: &'static [Command],
    default: DefaultValue,
    help: &'static str,
) -> OptionSpec {
    OptionSpec {
        flag,
        kind,
        section,
        commands,
        default,
        help,
        aliases: &[],
        repeatable: false,
        secret: false,
        later: "",
    }
}

const fn same(name: &'static str) -> Alias {
    Alias { name, form: Form::Same }
}

const fn fixed(name: &'static str, value: &'static str) -> Alias {
    Alias { name, form: Form::Fixed(value) }
}

const fn unit(name: &'static str, unit: &'static str) -> Alias {
    Alias { name, form: Form::Unit(unit) }
}

const fn count(least: u64, most: u64) -> Kind {
    Kind::Count { least, most }
}

const fn choice(built: &'static [&'static str]) -> Kind {
    Kind::Choice { built, later: &[] }
}

const fn number(least: f64, most: f64) -> Kind {
    Kind::Number { least, most }
}

const ON_OFF: Kind = Kind::Choice { built: &["on", "off"], later: &[] };
const NONE: DefaultValue = DefaultValue::Says("none");
const OFF: DefaultValue = DefaultValue::Is("off");

const ANY: &[Command] = &Command::ALL;
const MODEL: &[Command] = &[
    Command::Serve,
    Command::Run,
    Command::Pull,
    Command::Info,
    Command::Logits,
    Command::Render,
    Command::Selftest,
    Command::Bench,
];
/// Commands that load weights.
const LOADS: &[Command] =
    &[Command::Serve, Command::Run, Command::Info, Command::Logits, Command::Selftest, Command::Bench];
/// Commands that run kernels.
const COMPUTES: &[Command] = &[
    Command::Serve,
    Command::Run,
    Command::Info,
    Command::Logits,
    Command::Selftest,
    Command::Bench,
    Command::Contract,
];
/// Commands that print a table.
const PRINTS: &[Command] = &[Command::Models, Command::Info, Command::Render, Command::Selftest, Command::Logits];
const SERVE: &[Command] = &[Command::Serve];
const SERVE_RUN: &[Command] = &[Command::Serve, Command::Run];
const SIZES: &[Command] = &[Command::Serve, Command::Info, Command::Bench];
const WINDOW: &[Command] = &[Command::Serve, Command::Run, Command::Info, Command::Bench];
const DRAFTS: &[Command] = &[Command::Serve, Command::Run, Command::Bench];
/// Commands that keep prefixes.
const KEEPS: &[Command] = &[Command::Serve, Command::Run, Command::Bench];
const RUN: &[Command] = &[Command::Run];
const INFO: &[Command] = &[Command::Info];
const LOGITS: &[Command] = &[Command::Logits];
const RENDER: &[Command] = &[Command::Render];
const CONTRACT: &[Command] = &[Command::Contract];
const SELFTEST: &[Command] = &[Command::Selftest];
const BENCH: &[Command] = &[Command::Bench];
const PULL: &[Command] = &[Command::Pull];

const BACKEND: Kind = match (cfg!(feature = "cuda"), cfg!(target_os = "macos")) {
    (false, false) => Kind::Choice { built: &["auto", "cpu"], later: &["cuda", "metal"] },
    (true, false) => Kind::Choice { built: &["auto", "cpu", "cuda"], later: &["metal"] },
    (false, true) => Kind::Choice { built: &["auto", "cpu", "metal"], later: &["cuda"] },
    (true, true) => Kind::Choice { built: &["auto", "cpu", "cuda", "metal"], later: &[] },
};

/// Why a word of a choice is not there, where the reason is the build and not the program.
pub fn other_build(word: &str) -> Option<&'static str> {
    match word {
        "cuda" => Some("cuda needs a build with `--features cuda`"),
        "metal" => Some("metal needs macOS on Apple silicon"),
        _ => None,
    }
}

const ONE_DEVICE: &str = "it has no effect on the cpu backend";

use Section as S;

/// All options. Order is that of help and reference.
#[rustfmt::skip]
pub const OPTIONS: &[OptionSpec] = &[
    option("model", Kind::Text, S::Model, MODEL, DefaultValue::Is("tiny-dsv41"),
        "what to load: a folder, org/name or org/name@revision in the hub cache, or the built-in tiny-dsv41")
        .also(&[same("-m")]),
    option("revision", Kind::Text, S::Model, MODEL, DefaultValue::Is("main"), "branch, tag or commit in the hub cache"),
    option("pull", Kind::Switch, S::Model, SERVE, OFF,
        "download what is missing before the start")
        .later("downloads aren't built yet; fetch the model with another hub client"),
    option("name", Kind::Text, S::Model, SERVE, DefaultValue::Says("the folder's or repository's name"),
        "id in replies and /v1/models; further ones are aliases")
        .also(&[same("--served-model-name"), same("--alias"), same("-a")]).repeatable(),
    option("any-model", Kind::Switch, S::Model, SERVE, OFF, "serve any model name instead of 404"),
    option("packed-dir", Kind::Folder, S::Model, LOADS, OFF,
        "where packed weights are kept").later("packed weights aren't kept yet; they are packed at each start"),
    option("config", Kind::File, S::Model, ANY, NONE, "TOML file with options, keyed by flag"),

    option("host", Kind::Text, S::Endpoint, SERVE, DefaultValue::Is("127.0.0.1"), "address to listen on"),
    option("port", count(0, 65_535), S::Endpoint, SERVE, DefaultValue::Is("8080"),
        "0 is any free port, printed at start"),
    option("api-key", Kind::Text, S::Endpoint, SERVE, NONE,
        "key that requests must carry; prefer the variable, arguments are visible to other users").repeatable().secret(),
    option("api-key-file", Kind::File, S::Endpoint, SERVE, NONE,
        "lines `label: key`, mode 0600 required").later("key files aren't read yet; use --api-key"),
    option("metrics-open", Kind::Switch, S::Endpoint, SERVE, OFF,
        "/metrics and /memory without a key"),
    option("allowed-origins", Kind::List, S::Endpoint, SERVE, DefaultValue::Says("loopback origins"),
        "CORS origins; `*` is any"),
    option("allowed-hosts", Kind::List, S::Endpoint, SERVE, DefaultValue::Says("loopback names when bound to loopback, else any"),
        "names in the Host header, against DNS rebinding"),
    option("api-prefix", Kind::Text, S::Endpoint, SERVE, NONE,
        "all routes below this path").also(&[same("--root-path")]),
    option("max-body", Kind::Size, S::Endpoint, SERVE, DefaultValue::Says("64 bytes a token of the window, 4MiB to 64MiB"),
        "largest request body; two of them are in the memory plan"),
    option("sse-ping", number(0.1, 3600.0), S::Endpoint, SERVE, DefaultValue::Is("5"),
        "longest silence in an open stream, in seconds").also(&[same("--sse-ping-interval")]),
    option("shutdown-timeout", number(0.0, 86_400.0), S::Endpoint, SERVE, DefaultValue::Is("30"),
        "how long a drain may take, in seconds"),
    option("tls-cert", Kind::File, S::Endpoint, SERVE, NONE,
        "certificate of a TLS listener")
        .also(&[same("--ssl-certfile")]).later("there is no TLS listener yet; put a proxy in front"),
    option("tls-key", Kind::File, S::Endpoint, SERVE, NONE,
        "key of a TLS listener")
        .also(&[same("--ssl-keyfile")]).later("there is no TLS listener yet; put a proxy in front"),
    option("uds", Kind::File, S::Endpoint, SERVE, NONE,
        "Unix socket instead of a port").later("Unix sockets aren't built yet; use --host and --port"),

    option("context", Kind::CountOrAuto { least: 1, most: 1 << 30 }, S::Length, WINDOW, DefaultValue::Is("auto"),
        "window of a request in tokens; auto is the most that fits, at most the model's")
        .also(&[same("--max-model-len"), same("-c"), same("--ctx-size")]),
    option("max-tokens", count(0, 1 << 30), S::Length, SERVE_RUN, DefaultValue::Says("to the end of the window"),
        "reply limit when a request names none").also(&[same("-n"), same("--n-predict")]),
    option("parallel", Kind::CountOrAuto { least: 1, most: 1024 }, S::Length, SIZES, DefaultValue::Is("auto"),
        "requests served at once; auto is up to 8, a number that doesn't fit is refused")
        .also(&[same("--max-num-seqs"), same("-np")]),
    option("round-rows", Kind::CountOrAuto { least: 1, most: 1 << 20 }, S::Length, SIZES, DefaultValue::Is("auto"),
        "most rows of a round").also(&[same("--max-num-batched-tokens"), same("-b"), same("-ub")]),
    option("decode-gap-ms", count(0, 1 << 30), S::Length, SERVE, DefaultValue::Is("200"),
        "prompt rows of a round are limited so that running replies aren't held up longer; 0 is no limit"),
    option("queue", count(0, 1 << 20), S::Length, SERVE, DefaultValue::Is("128"),
        "waiting requests; more get 429").also(&[same("--max-queue")]),
    option("queue-timeout", number(0.0, 86_400.0), S::Length, SERVE, DefaultValue::Is("120"),
        "longest wait for a slot, in seconds"),
    option("choices", count(1, 128), S::Length, SERVE, DefaultValue::Is("16"), "largest `n` of a request"),
    option("watchdog", number(1.0, 86_400.0), S::Length, SERVE, DefaultValue::Is("60"),
        "a round older than this makes the server unhealthy, in seconds"),

    option("temperature", number(0.0, 100.0), S::Sampling, SERVE_RUN, DefaultValue::Says("generation_config.json, else 1.0"),
        "0 is argmax"),
    option("top-p", number(0.0, 1.0), S::Sampling, SERVE_RUN, DefaultValue::Says("generation_config.json, else 1.0"),
        "smallest set of tokens that reaches this probability"),
    option("top-k", count(0, 1 << 30), S::Sampling, SERVE_RUN, DefaultValue::Says("generation_config.json, else off"),
        "only the likeliest tokens; 0 is off"),
    option("min-p", number(0.0, 1.0), S::Sampling, SERVE_RUN, DefaultValue::Says("generation_config.json, else off"),
        "least probability relative to the likeliest token"),
    option("seed-salt", Kind::Text, S::Sampling, SERVE_RUN, NONE, "mixed into the seeds of requests that name none"),

    option("thinking", Kind::Toggle, S::Reasoning, &[Command::Serve, Command::Run, Command::Render], DefaultValue::Says("on"),
        "whether requests that don't say are reasoned about")
        .also(&[same("--chat-template-kwargs"), same("--default-chat-template-kwargs")]),
    option("reasoning-effort", Kind::Effort, S::Reasoning, &[Command::Serve, Command::Run, Command::Render], DefaultValue::Is("high"),
        "minimal and low are 50, medium, high and xhigh 75, max and ultra 100; or a number from 1 to 100"),
    option("thinking-budget", count(0, 1 << 30), S::Reasoning, SERVE_RUN, DefaultValue::Says("off"),
        "most reasoning tokens; then the reasoning is closed and the answer follows")
        .also(&[same("--reasoning-budget")]),
    option("loop-guard", Kind::Switch, S::Reasoning, SERVE_RUN, OFF,
        "closes a reasoning that has been an exact cycle of at most 8 tokens for 256 tokens"),
    option("reasoning-field", choice(&["reasoning_content", "reasoning", "both"]), S::Reasoning, SERVE, DefaultValue::Is("reasoning_content"),
        "field of chat replies that holds the reasoning"),

    option("draft", Kind::OnOffCount { most: 64 }, S::Drafting, DRAFTS, DefaultValue::Is("on"),
        "on adapts up to the draft block; N is at most N drafts a window").also(&[fixed("--no-drafts", "off")]),
    option("draft-confidence", number(0.0, 1.0), S::Drafting, DRAFTS, DefaultValue::Says("the draft head's own rule"),
        "a window stops below this running product"),
    option("draft-copy", ON_OFF, S::Drafting, DRAFTS, DefaultValue::Is("on"),
        "copied continuations from the context as drafts"),
    option("speculative-config", Kind::Text, S::Drafting, DRAFTS, NONE, "drafting as JSON").later("use --draft N"),
    option("mtp-drafts", Kind::Text, S::Drafting, DRAFTS, NONE, "another name of --draft").later("use --draft N"),
    option("mtp-confidence", Kind::Text, S::Drafting, DRAFTS, NONE,
        "another name of --draft-confidence").later("use --draft-confidence"),
    option("spec-type", Kind::Text, S::Drafting, DRAFTS, NONE,
        "kind of drafter").later("use --draft on or --draft off"),

    option("prefix-cache", ON_OFF, S::PrefixCache, KEEPS, DefaultValue::Is("on"),
        "keep prefixes for later requests")
        .also(&[fixed("--enable-prefix-caching", "on"), fixed("--no-enable-prefix-caching", "off")]),
    option("prefix-cache-bytes", Kind::Size, S::PrefixCache, KEEPS,
        DefaultValue::Says("what is idle, up to 32 full windows"),
        "budget of kept prefixes").also(&[unit("--prompt-cache-gib", "GiB")]),
    option("snapshot-every", count(1, 1 << 30), S::PrefixCache, KEEPS, DefaultValue::Is("4096"),
        "tokens between snapshots inside a prompt"),
    option("cache-dir", Kind::Folder, S::PrefixCache, SERVE, OFF,
        "folder of a disk tier that survives a restart; of this server alone")
        .also(&[same("--kv-disk-dir"), same("--slot-save-path")]),
    option("cache-dir-bytes", Kind::Size, S::PrefixCache, SERVE, DefaultValue::Is("32GiB"),
        "budget of the disk tier").also(&[unit("--spill-gib", "GiB")]),
    option("cache-dir-min-free", Kind::Size, S::PrefixCache, SERVE, DefaultValue::Is("4GiB"),
        "disk space that the tier leaves free"),

    option("backend", BACKEND, S::Devices, COMPUTES, DefaultValue::Is("auto"),
        "auto is a GPU of this build whose arithmetic is the declared one, else cpu; one that is named and absent is an error")
        .also(&[same("--device")]),
    option("keep-warm", number(0.0, 3600.0), S::Devices, SERVE_RUN, DefaultValue::Is("0"),
        "seconds after a reply for which an idle GPU's clock is kept up (metal); costs power"),
    option("pipeline-dir", Kind::Folder, S::Devices, COMPUTES, DefaultValue::Says("the user's cache folder"),
        "where compiled kernels are kept (metal); off compiles at every start"),
    option("devices", Kind::List, S::Devices, LOADS, DefaultValue::Is("0"),
        "index of the GPU to use; several aren't used together yet").also(&[same("-dev")]),
    option("threads", count(1, 1024), S::Devices, LOADS, DefaultValue::Says("physical cores"),
        "CPU workers; bits don't depend on it").also(&[same("-t")]),
    option("memory", Kind::SizeOrFraction, S::Devices, LOADS, DefaultValue::Says("what is free, less a reserve"),
        "budget of the whole program").also(&[same("--gpu-memory-utilization")]),
    option("engram", Kind::EngramPlace, S::Devices, LOADS, DefaultValue::Is("mmap"),
        "where n-gram rows live; SIZE (256MiB) bounds the cache of disk; bits don't depend on it")
        .also(&[same("--engram-config")]),
    option("experts", Kind::Choice { built: &["resident"], later: &["host", "disk"] }, S::Devices, LOADS, DefaultValue::Is("resident"),
        "where experts live; bits don't depend on it").also(&[fixed("--ssd-experts", "disk")]),
    option("tensor-parallel", count(1, 64), S::Devices, LOADS, DefaultValue::Is("1"),
        "several devices of one host").also(&[same("-tp"), same("--tensor-parallel-size")]).later(ONE_DEVICE),

    option("log-level", choice(&["error", "warn", "info", "debug", "trace"]), S::Logs, ANY, DefaultValue::Is("info"),
        "what goes to stderr"),
    option("log-format", choice(&["text", "json"]), S::Logs, ANY, DefaultValue::Is("text"),
        "form of log lines"),
    option("access-log", ON_OFF, S::Logs, SERVE, DefaultValue::Is("on"),
        "one line a request: id, method, path, status, time, label of the key")
        .also(&[fixed("--disable-access-log", "off")]),
    option("log-requests", Kind::File, S::Logs, SERVE, OFF,
        "request bodies, for debugging")
        .also(&[same("--enable-log-requests")]).later("request bodies aren't logged yet"),
    option("metrics", ON_OFF, S::Logs, SERVE, DefaultValue::Is("on"),
        "the /metrics route").also(&[fixed("--no-metrics", "off")]),
    option("metrics-names", choice(&["own", "all"]), S::Logs, SERVE, DefaultValue::Is("all"),
        "all adds vLLM's names"),
    option("otlp-endpoint", Kind::Text, S::Logs, SERVE, OFF,
        "traces").also(&[same("--otlp-traces-endpoint")]).later("traces aren't built yet"),
    option("numerics", choice(&["release"]), S::Logs, LOADS, DefaultValue::Is("release"),
        "developer: rounds where the release rounds"),
    option("chunk", Kind::Text, S::Logs, &[Command::Serve, Command::Logits], DefaultValue::Says("auto"),
        "developer: prompt rows a round; for logits a list like 7,128,60 or whole. Bits don't depend on it"),
    option("script", Kind::File, S::Logs, SERVE, OFF,
        "developer: replies follow the token strings in FILE").later("scripted replies aren't built yet"),

    option("json", Kind::Switch, S::Command, PRINTS, OFF,
        "machine-readable output; fields only ever grow"),
    option("dry-run", Kind::Switch, S::Command, SERVE, OFF, "stop after the checks and print the plan"),
    option("options", Kind::Switch, S::Command, INFO, OFF, "each option's value and where it came from"),
    option("capabilities", Kind::Switch, S::Command, INFO, OFF, "backends, families, honoured flags and variables"),
    option("system", Kind::Text, S::Command, RUN, NONE, "system message"),
    option("hide-reasoning", Kind::Switch, S::Command, RUN, OFF, "don't show the reasoning"),
    option("verbose", Kind::Switch, S::Command, RUN, OFF,
        "rates, cached tokens, accepted drafts and token_sha after each reply"),
    option("seed", Kind::Integer, S::Command, &[Command::Run, Command::Bench], DefaultValue::Says("derived from the prompt"),
        "seed of the draws"),
    option("json-schema", Kind::File, S::Command, RUN, NONE,
        "schema of the answer").later("structured output isn't built yet"),
    option("format", choice(&["json"]), S::Command, RUN, NONE,
        "form of the answer").later("structured output isn't built yet"),
    option("image", Kind::File, S::Command, RUN, NONE, "an image beside the prompt").later("images aren't built yet"),
    option("ids", Kind::List, S::Command, LOGITS, NONE, "token ids"),
    option("ids-file", Kind::File, S::Command, LOGITS, NONE, "JSON list of token ids, or a list of lists"),
    option("prompt", Kind::Text, S::Command, LOGITS, NONE, "plain text instead of ids"),
    option("request", Kind::File, S::Command, LOGITS, NONE, "request body instead of ids"),
    option("positions", Kind::Text, S::Command, LOGITS, DefaultValue::Is("last"),
        "rows to print: all, last, or a list"),
    option("top", count(0, 1 << 20), S::Command, LOGITS, DefaultValue::Is("5"), "likeliest tokens of each row"),
    option("output", Kind::File, S::Command, &[Command::Logits, Command::Bench], NONE,
        "full rows as safetensors, or the record of a bench as JSON"),
    option("rows", count(1, 1024), S::Command, LOGITS, DefaultValue::Is("1"),
        "puts N - 1 other sequences beside it; bits must not change"),
    option("decode", count(0, 1 << 30), S::Command, LOGITS, NONE, "prompt to FROM, then one token at a time"),
    option("drafts", Kind::Switch, S::Command, LOGITS, OFF, "also the draft head's proposals"),
    option("reference", choice(&["exact", "qdq", "release"]), S::Command, LOGITS, NONE,
        "run the float64 reference model instead of the backend"),
    option("parse", Kind::Switch, S::Command, RENDER, OFF, "text or ids of a raw reply in, the message out"),
    option("finish", choice(&["stop", "length"]), S::Command, RENDER, DefaultValue::Is("stop"),
        "with --parse: how the reply ended"),
    option("stream", count(1, 1 << 20), S::Command, RENDER, NONE,
        "with --parse: the deltas when N characters arrive at a time"),
    option("only", Kind::Text, S::Command, CONTRACT, NONE,
        "families, FAMILY/KERNEL, or FAMILY/ for the kernel of that name alone, with commas; dsv41 is all"),
    option("list", Kind::Switch, S::Command, CONTRACT, OFF, "what there is to check"),
    option("json", Kind::File, S::Command, CONTRACT, NONE, "writes the results"),
    option("replay", Kind::Text, S::Command, CONTRACT, NONE, "one case again"),
    option("seeds", count(0, 1 << 20), S::Command, CONTRACT, DefaultValue::Is("0"), "fresh seeds whose values are judged as well"),
    option("time", Kind::Switch, S::Command, CONTRACT, OFF, "times the cases as well"),
    option("by-kernel", Kind::Switch, S::Command, BENCH, OFF, "slice: what each kernel of a round takes"),
    option("checkers", Kind::Switch, S::Command, CONTRACT, OFF,
        "CUDA: also launches smaller cases under the memory and the race checker of compute-sanitizer"),
    option("edits", Kind::Folder, S::Command, CONTRACT, NONE,
        "CUDA: compiled edits of the controls are taken from here and kept here"),
    option("compile-edits", Kind::Text, S::Command, CONTRACT, NONE,
        "CUDA: compiles the edits for a target such as 90a and proves nothing; needs no GPU"),
    option("launch-only", Kind::Switch, S::Command, CONTRACT, OFF,
        "launches smaller cases and judges nothing, for a checker that watches"),
    option("laws", Kind::List, S::Command, SELFTEST, DefaultValue::Says("all"), "which laws"),
    option("quick", Kind::Switch, S::Command, SELFTEST, OFF, "fewer cases a law"),
    option("url", Kind::Text, S::Command, BENCH, DefaultValue::Says("a server of its own"), "server to measure"),
    option("format", choice(&["table", "json", "csv", "md"]), S::Command, BENCH, DefaultValue::Is("table"),
        "what is printed"),
    option("same-prompt", Kind::Switch, S::Command, BENCH, OFF, "concurrent, serve: all prompts alike"),
    option("prompt", Kind::List, S::Command, BENCH, DefaultValue::Says("512,2048"), "decode: prompt lengths"),
    option("tokens", count(1, 1 << 20), S::Command, BENCH, DefaultValue::Says("by subcommand"), "reply tokens"),
    option("rows", Kind::List, S::Command, BENCH, DefaultValue::Says("by subcommand"), "decode, slice: rows a round"),
    option("layers", count(1, 1024), S::Command, BENCH, DefaultValue::Says("16, on the CPU 1"), "slice: layers"),
    option("first-layer", count(0, 1024), S::Command, BENCH, DefaultValue::Is("20"), "slice: the release's layer that is the first"),
    option("prefill", Kind::List, S::Command, BENCH, DefaultValue::Says("2048,8192, on the CPU 64"), "slice: rows of a prompt chunk"),
    option("laws", Kind::List, S::Command, BENCH, DefaultValue::Says("L0,L4, on the CPU L4"), "slice: laws to show on it; none is none"),
    option("reps", count(1, 10_000), S::Command, BENCH, DefaultValue::Says("by subcommand"), "repetitions"),
    option("requests", count(1, 1 << 20), S::Command, BENCH, DefaultValue::Is("16"), "serve: requests"),
    option("concurrency", count(1, 1024), S::Command, BENCH, DefaultValue::Is("4"), "serve: requests at once"),
    option("rate", number(0.0, 1e6), S::Command, BENCH, NONE, "serve: requests a second, instead of --concurrency"),
    option("prompt-tokens", count(1, 1 << 20), S::Command, BENCH, DefaultValue::Is("128"), "serve: prompt length"),
    option("dataset", Kind::File, S::Command, BENCH, NONE, "evaluate, serve: prompts, a JSON line each"),
    option("levels", Kind::List, S::Command, BENCH, DefaultValue::Says("1,4"), "concurrent: requests at once"),
    option("temperatures", Kind::List, S::Command, BENCH, DefaultValue::Says("1.0,0"), "concurrent: temperatures"),
    option("mixed", Kind::Switch, S::Command, BENCH, OFF, "concurrent: prompts of mixed length"),
    option("alone", Kind::Switch, S::Command, BENCH, OFF, "concurrent: each request again by itself"),
    option("serial", Kind::Switch, S::Command, BENCH, OFF, "concurrent: each request again without drafts"),
    option("no-seed", Kind::Switch, S::Command, BENCH, OFF, "concurrent: derived seeds"),
    option("stagger-ms", count(0, 1 << 20), S::Command, BENCH, DefaultValue::Is("0"), "concurrent: time between starts"),
    option("minutes", number(0.05, 10_080.0), S::Command, BENCH, DefaultValue::Is("1"), "soak: time under load"),
    option("clients", count(1, 4096), S::Command, BENCH, DefaultValue::Is("64"), "soak: clients at once"),
    option("repeats", count(1, 1000), S::Command, BENCH, DefaultValue::Is("2"), "cache: repetitions of the first row"),
    option("streams", count(1, 1024), S::Command, BENCH, DefaultValue::Is("2"), "cache: concurrent rows"),
    option("prompt-file", Kind::File, S::Command, BENCH, NONE, "cache: JSON list of token ids"),
    option("expected-prompt-tokens", count(1, 1 << 30), S::Command, BENCH, NONE,
        "cache: the prompt must have this length"),
    option("require-cold", Kind::Switch, S::Command, BENCH, OFF, "cache: fails unless the first row was cold"),
    option("require-reuse", Kind::Switch, S::Command, BENCH, OFF, "cache: fails unless later rows were reused"),
    option("include", Kind::Text, S::Command, PULL, NONE, "files to fetch").repeatable(),
    option("exclude", Kind::Text, S::Command, PULL, NONE, "files to leave out").repeatable(),
    option("jobs", count(1, 16), S::Command, PULL, DefaultValue::Is("8"), "ranges at once"),
    option("verify", Kind::Switch, S::Command, PULL, OFF, "hash what is there"),
    option("dry-run", Kind::Switch, S::Command, PULL, OFF, "sizes only"),
];

/// Flags of the second wave that aren't in the table above: refused by name.
pub const SECOND_WAVE_FLAGS: &[&str] = &[
    "--vision",
    "--vision-urls",
    "--allowed-media-domains",
    "--media-path",
    "--max-images",
    "--limit-mm-per-prompt",
    "--batch-dir",
    "--enable-sleep-mode",
];

/// How a flag of another program is answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Answer {
    /// Accepted; a note says that it has no effect.
    NoEffect,
    /// One of these is accepted with a note; another value is refused with the text.
    Values(&'static [&'static str], &'static str),
    Refused(&'static str),
}

/// A flag of another program that people paste.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pasted {
    /// With its dashes; a `*` at the end stands for any ending.
    pub name: &'static str,
    pub takes_value: bool,
    pub answer: Answer,
}

const FAMILY: &[&str] = &["deepseek_v41", "deepseek_v4", "auto"];
const NOT_THIS_FAMILY: &str = "the name for this family is deepseek_v41";
const KEPT_PRECISION: &str = "the release's own formats are served; --numerics names the numeric mode";
const ONE_HOST: &str = "one host; 1 is the only value";

const fn pasted(name: &'static str, takes_value: bool, answer: Answer) -> Pasted {
    Pasted { name, takes_value, answer }
}

#[rustfmt::skip]
pub const PASTED: &[Pasted] = &[
    pasted("--trust-remote-code", false, Answer::NoEffect),
    pasted("--enable-auto-tool-choice", false, Answer::NoEffect),
    pasted("--mmproj-auto", false, Answer::NoEffect),
    pasted("--jinja", false, Answer::NoEffect),
    pasted("--tool-call-parser", true, Answer::Values(FAMILY, NOT_THIS_FAMILY)),
    pasted("--reasoning-parser", true, Answer::Values(FAMILY, NOT_THIS_FAMILY)),
    pasted("--tokenizer-mode", true, Answer::Values(FAMILY, NOT_THIS_FAMILY)),
    pasted("--chat-template", true, Answer::Refused("the encoding is code, checked against the release")),
    pasted("--kv-cache-dtype", true, Answer::Values(&["auto", "fp8"], KEPT_PRECISION)),
    pasted("--quantization", true, Answer::Values(&["auto", "fp8"], KEPT_PRECISION)),
    pasted("--dtype", true, Answer::Values(&["auto", "fp8", "bfloat16"], KEPT_PRECISION)),
    pasted("-ngl", true, Answer::Refused("layers aren't split between devices; use --backend")),
    pasted("--mlock", false, Answer::Refused("use --memory")),
    pasted("--no-mmap", false, Answer::Refused("weights are packed into memory; --engram says where n-gram rows live")),
    pasted("--cpu-offload-gb", true, Answer::Refused("use --experts and --engram")),
    pasted("--cpu-moe", false, Answer::Refused("use --experts")),
    pasted("--n-cpu-moe", true, Answer::Refused("use --experts")),
    pasted("-md", true, Answer::Refused("the checkpoint has its own draft head; use --draft")),
    pasted("--pipeline-parallel-size", true, Answer::Values(&["1"], ONE_HOST)),
    pasted("--data-parallel-size", true, Answer::Values(&["1"], ONE_HOST)),
    pasted("--enable-expert-parallel", true, Answer::Values(&["off", "false", "0"], "one host; off is the only value")),
    pasted("--decode-share", true, Answer::Refused("use --decode-gap-ms")),
    pasted("--prefill-pass", true, Answer::Refused("use --round-rows")),
    pasted("--checkpoint-slots", true,
        Answer::Refused("one byte budget in memory, one on disk: --prefix-cache-bytes, --cache-dir-bytes")),
    pasted("--max-snapshots", true, Answer::Refused("one byte budget in memory, one on disk: --prefix-cache-bytes, --cache-dir-bytes")),
    pasted("--prompt-cache-over-cap", true,
        Answer::Refused("one byte budget in memory, one on disk: --prefix-cache-bytes, --cache-dir-bytes")),
    pasted("--snapshot-dir", true, Answer::Refused("one byte budget in memory, one on disk: --prefix-cache-bytes, --cache-dir-bytes")),
    pasted("--learn*", true, Answer::Refused("one byte budget in memory, one on disk: --prefix-cache-bytes, --cache-dir-bytes")),
    pasted("--compact-at", true, Answer::Refused("a prompt is never rewritten")),
    pasted("--compact-keep", true, Answer::Refused("a prompt is never rewritten")),
    pasted("--compact-memory", true, Answer::Refused("a prompt is never rewritten")),
    pasted("--kv-dtype", true, Answer::Refused("nothing is traded for precision")),
    pasted("--prefill-fp8", false, Answer::Refused("nothing is traded for precision")),
    pasted("--precision", true, Answer::Refused("nothing is traded for precision, weights never change")),
    pasted("--slide*", true, Answer::Refused("nothing is traded for precision")),
    pasted("--split*", true, Answer::Refused("one host")),
    pasted("--speed-up", true, Answer::Refused("one host")),
    pasted("--rank", true, Answer::Refused("one host")),
    pasted("--master", true, Answer::Refused("one host")),
    pasted("--segments", true, Answer::Refused("chosen by the program")),
    pasted("--lane-kernels", true, Answer::Refused("chosen by the program")),
    pasted("--policy", true, Answer::Refused("chosen by the program")),
    pasted("--mlx-cache-gib", true, Answer::Refused("chosen by the program")),
    pasted("--pass-cache-gib", true, Answer::Refused("chosen by the program")),
];

/// What a variable of another project does here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Honour {
    Read,
    /// Accepted without effect.
    NoEffect,
    /// Read once the part exists that needs it.
    Later,
}

/// Variables of other projects and what they mean here. No other variable is read.
#[rustfmt::skip]
pub const FOREIGN: &[(&str, Honour, &str)] = &[
    ("HF_HUB_CACHE", Honour::Read, "the hub cache"),
    ("HF_HOME", Honour::Read, "the hub cache is its folder hub"),
    ("XDG_CACHE_HOME", Honour::Read, "the user's cache folder"),
    ("HOME", Honour::Read, "the user's cache folder is its .cache"),
    ("NO_COLOR", Honour::Read, "no colour and no redrawn progress"),
    ("HF_TOKEN", Honour::Later, "downloads"),
    ("HF_TOKEN_PATH", Honour::Later, "downloads"),
    ("HF_HUB_DISABLE_IMPLICIT_TOKEN", Honour::Later, "downloads"),
    ("HF_ENDPOINT", Honour::Later, "downloads"),
    ("HF_HUB_OFFLINE", Honour::Later, "downloads; nothing here opens a socket to the hub"),
    ("TRANSFORMERS_OFFLINE", Honour::Later, "downloads; nothing here opens a socket to the hub"),
    ("HF_HUB_ETAG_TIMEOUT", Honour::Later, "downloads"),
    ("HF_HUB_DOWNLOAD_TIMEOUT", Honour::Later, "downloads"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", Honour::Later, "downloads"),
    ("HTTPS_PROXY", Honour::Later, "downloads"),
    ("HTTP_PROXY", Honour::Later, "downloads"),
    ("NO_PROXY", Honour::Later, "downloads"),
    ("ALL_PROXY", Honour::Later, "downloads"),
    ("SSL_CERT_FILE", Honour::Later, "downloads"),
    ("REQUESTS_CA_BUNDLE", Honour::Later, "downloads"),
    ("CUDA_VISIBLE_DEVICES", Honour::Read, "the GPUs that NVIDIA's driver shows, and their order"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", Honour::Later, "traces"),
    ("OTEL_EXPORTER_OTLP_HEADERS", Honour::Later, "traces"),
    ("OTEL_SERVICE_NAME", Honour::Later, "traces"),
    ("HF_HUB_DISABLE_TELEMETRY", Honour::NoEffect, "nothing is ever reported home"),
    ("DO_NOT_TRACK", Honour::NoEffect, "nothing is ever reported home"),
    ("HF_HUB_DISABLE_XET", Honour::NoEffect, ""),
    ("HF_XET_HIGH_PERFORMANCE", Honour::NoEffect, ""),
    ("HF_HUB_ENABLE_HF_TRANSFER", Honour::NoEffect, ""),
];

/// The variables that the program may see: ours, and those of the table above that are read.
#[derive(Clone, Debug, Default)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The process's own. Variables that aren't UTF-8 are left out.
    pub fn of_process() -> Environment {
        let read = |name: &str| FOREIGN.iter().any(|(other, honour, _)| *other == name && *honour == Honour::Read);
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            let wanted = name.starts_with(PREFIX) || read(&name);
            Some((name, value.into_string().ok()?)).filter(|_| wanted)
        });
        Environment(variables.collect())
    }

    #[cfg(test)]
    pub fn of(pairs: &[(&str, &str)]) -> Environment {
        Environment(pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect())
    }

    /// A variable's value; an empty one counts as absent.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

/// The option called `flag` of a command.
pub fn find(command: Command, flag: &str) -> Option<&'static OptionSpec> {
    OPTIONS.iter().find(|spec| spec.flag == flag && spec.commands.contains(&command))
}

#[cfg(test)]
mod tests;
