//! `info`: what this machine, this build and a checkpoint are, and what would fit. Never reads weights.

use serde_json::{Value as Json, json};
use tf_model::Family;
use tf_model::deepseek_v41::engram_rows::EngramPlace;
use tf_model::deepseek_v41::memory::MemoryPlan;
use tf_model::deepseek_v41::shape::Shape;
use tf_numerics::lanes::Level;

use crate::arguments::{Arguments, Request, Setting, parse, show};
use crate::build;
use crate::device;
use crate::failure::{Failure, print};
use crate::inspect::Inspection;
use crate::load::Checked;
use crate::locate::{Located, hub_cache, locate};
use crate::machine;
use crate::options::{Command, DefaultValue, Environment, FOREIGN, Honour, Kind, OPTIONS, PREFIX, find};
use crate::resolve::{Loading, show_bytes};

pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), Failure> {
    if arguments.is_on("capabilities") {
        return Ok(print(&format!("{:#}\n", capabilities()))?);
    }
    if arguments.is_on("options") {
        return options(arguments, environment);
    }
    let named = arguments.positionals.first().map(String::as_str);
    let named = named.or_else(|| arguments.text("model").filter(|_| arguments.is_given("model")));
    let Some(name) = named else {
        // A device that was asked for is looked at; without that, one that can't be used is shown with its reason.
        if ["backend", "devices", "pipeline-dir"].iter().any(|flag| arguments.is_given(flag)) {
            device::open(arguments)?;
        }
        let text = match arguments.is_on("json") {
            true => format!("{:#}\n", json!({"machine": machine_json(arguments, environment), "build": build_json()})),
            false => machine_text(arguments, environment),
        };
        return Ok(print(&text)?);
    };
    let located = locate(name, arguments.text("revision").unwrap_or("main"), environment)?;
    let inspection = Inspection::of(&located, arguments, device::site(&device::open(arguments)?));
    let text = match arguments.is_on("json") {
        true => {
            let model = model_json(&located, &inspection);
            let machine = machine_json(arguments, environment);
            format!("{:#}\n", json!({"machine": machine, "build": build_json(), "model": model}))
        }
        false => model_text(&located, &inspection),
    };
    print(&text)?;
    inspection.failure().map_or(Ok(()), Err)
}

fn levels() -> Vec<&'static str> {
    Level::available().into_iter().map(Level::name).collect()
}

fn machine_json(arguments: &Arguments, environment: &Environment) -> Json {
    let memory = machine::memory();
    let architecture = std::env::consts::ARCH;
    let cpu = json!({
        "backend": "cpu", "architecture": architecture, "levels": levels(), "level": Level::best().name(),
    });
    let gpu = device::gpu(arguments).map(|gpu| match gpu {
        Ok(gpu) => device::json(&gpu),
        Err(failure) => json!({"refused": failure.text}),
    });
    let devices: Vec<Json> = [Some(cpu), gpu].into_iter().flatten().collect();
    json!({
        "devices": devices,
        "cores": machine::physical_cores(),
        "memory_bytes": memory.map(|memory| memory.total),
        "memory_available_bytes": memory.map(|memory| memory.available),
        "hub_cache": hub_cache(environment).map(|cache| cache.root().display().to_string()),
    })
}

fn build_json() -> Json {
    let families: Vec<_> = Family::ALL.iter().map(|family| family.model_type()).collect();
    json!({"version": build::VERSION, "commit": build::COMMIT, "backends": build::BACKENDS, "families": families})
}

fn machine_text(arguments: &Arguments, environment: &Environment) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| text += &format!("{name:<14} {value}\n");
    line("program", build::text());
    line("cpu", format!("{}, {} cores, {}", std::env::consts::ARCH, machine::physical_cores(), levels().join(" ")));
    if let Some(gpu) = device::gpu(arguments) {
        line("gpu", gpu.map_or_else(|failure| failure.text, |gpu| device::line(&gpu)));
    }
    let memory = machine::memory().map_or_else(
        || "unknown".to_owned(),
        |memory| format!("{}, {} available", show_bytes(memory.total), show_bytes(memory.available)),
    );
    line("memory", memory);
    let cache = hub_cache(environment).map_or_else(|| "none".to_owned(), |cache| cache.root().display().to_string());
    line("hub cache", cache);
    text
}

fn model_json(located: &Located, found: &Inspection) -> Json {
    let formats: serde_json::Map<String, Json> = found
        .formats()
        .into_iter()
        .map(|(dtype, stored)| (dtype.name().to_owned(), json!({"tensors": stored.tensors, "bytes": stored.bytes})))
        .collect();
    let markers: serde_json::Map<String, Json> =
        found.markers().into_iter().map(|(marker, id)| (marker.to_owned(), id.into())).collect();
    json!({
        "name": located.name,
        "place": located.describe(),
        "family": found.shape.as_ref().map(|_| Family::DeepseekV41.model_type()),
        "shape": found.shape.as_ref().map(shape_json),
        "fingerprint": found.fingerprint.map(|fingerprint| fingerprint.to_string()),
        "tensors": found.checkpoint.as_ref().map(|checkpoint| checkpoint.views().len()),
        "formats": formats,
        "ignored_tensors": found.checkpoint.as_ref().map(|checkpoint| checkpoint.ignored()),
        "special_tokens": markers,
        "plan": found.loading.as_ref().map(|loading| plan_json(loading, found.shape.as_ref())),
        "reasons": found.all_reasons().collect::<Vec<_>>(),
    })
}

fn shape_json(shape: &Shape) -> Json {
    json!({
        "layers": shape.num_hidden_layers,
        "draft_blocks": shape.num_nextn_predict_layers,
        "hidden_size": shape.hidden_size,
        "heads": shape.num_attention_heads,
        "head_dim": shape.head_dim,
        "experts": shape.n_routed_experts,
        "experts_per_token": shape.num_experts_per_tok,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "vision_layers": shape.vision.map_or(0, |vision| vision.num_hidden_layers),
    })
}

/// What `/server_info` says of a checkpoint that is served with these arguments. Names no place on this machine.
pub fn served(checked: &Checked, arguments: &Arguments) -> Json {
    let options = OPTIONS.iter().filter(|spec| spec.commands.contains(&arguments.command) && !spec.secret);
    let options = options.filter(|spec| spec.flag != "model" && !matches!(spec.kind, Kind::File | Kind::Folder));
    let options: serde_json::Map<String, Json> = options
        .filter_map(|spec| Some((spec.flag.to_owned(), show(&arguments.setting(spec.flag)?.value).into())))
        .collect();
    json!({
        "schema_version": 1,
        "build": build_json(),
        "cpu": {"architecture": std::env::consts::ARCH, "level": checked.loading.options.level.name()},
        "device": device::json(&checked.device),
        "model": {
            "name": checked.name,
            "family": Family::DeepseekV41.model_type(),
            "fingerprint": checked.fingerprint,
            "shape": shape_json(&checked.shape),
            "plan": plan_json(&checked.loading, Some(&checked.shape)),
        },
        "options": options,
    })
}

fn plan_json(loading: &Loading, shape: Option<&Shape>) -> Json {
    let (plan, options) = (&loading.plan, &loading.options);
    let mut json = json!({
        "context": plan.context,
        "parallel": plan.slots,
        "round_rows": options.round_rows,
        "threads": options.threads,
        "budget_bytes": loading.budget,
        "total_bytes": plan.total_bytes(),
        "request_bytes": plan.request_bytes(),
        "token_bytes": plan.position_bytes,
        "snapshot_bytes": plan.snapshot_bytes,
    });
    json["bytes"] = parts(plan).into_iter().map(|(name, bytes)| (name.to_owned(), Json::from(bytes))).collect();
    if let (Some(budget), Some(shape)) = (loading.budget, shape) {
        json["largest_context"] = plan.largest_context(shape, budget).into();
        json["full_requests"] = plan.full_requests(budget).into();
    }
    json
}

/// What n-gram rows hold in memory; of a mapped table its file's bytes, which are no part of the sum.
fn engram_shown(plan: &MemoryPlan) -> u64 {
    if plan.engram == EngramPlace::Mapped { plan.weights.engram } else { plan.engram_bytes() }
}

/// The plan's parts by name, in the order of the list.
pub fn parts(plan: &MemoryPlan) -> [(&'static str, u64); 14] {
    [
        ("embedding", plan.weights.embedding),
        ("head", plan.weights.head),
        ("dense", plan.weights.dense),
        ("experts", plan.weights.experts),
        ("draft", plan.weights.draft),
        (if plan.engram == EngramPlace::Mapped { "engram (mapped)" } else { "engram" }, engram_shown(plan)),
        ("slots", u64::from(plan.slots) * plan.slot_bytes),
        ("cache pages", plan.page_bytes),
        ("kept states", plan.kept_bytes),
        ("indexer scratch", plan.indexer_bytes),
        ("activations", plan.activation_bytes),
        ("disk index", plan.disk_index_bytes),
        ("bodies", plan.bodies_bytes),
        ("program", plan.program_bytes),
    ]
}

/// The plan as `/memory` names its parts. The n-gram tables stay mapped and are no part of the sum.
pub fn memory_plan(plan: &MemoryPlan) -> [(&'static str, u64); 9] {
    let weights = &plan.weights;
    [
        ("weights", weights.embedding + weights.head + weights.dense + weights.draft),
        ("engram", engram_shown(plan)),
        ("experts", weights.experts),
        ("kv", u64::from(plan.slots) * plan.slot_bytes + plan.page_bytes),
        ("snapshots", plan.kept_bytes),
        ("scratch", plan.indexer_bytes + plan.activation_bytes),
        ("disk_index", plan.disk_index_bytes),
        ("bodies", plan.bodies_bytes),
        ("program", plan.program_bytes),
    ]
}

fn model_text(located: &Located, found: &Inspection) -> String {
    let mut text = format!("{} ({})\n", located.name, located.describe());
    let mut line = |name: &str, value: String| text += &format!("  {name:<16} {value}\n");
    if let Some(shape) = &found.shape {
        line("family", Family::DeepseekV41.model_type().to_owned());
        line(
            "shape",
            format!(
                "{} layers and {} draft blocks, hidden {}, {} heads of {}, {} experts ({} active)",
                shape.num_hidden_layers,
                shape.num_nextn_predict_layers,
                shape.hidden_size,
                shape.num_attention_heads,
                shape.head_dim,
                shape.n_routed_experts,
                shape.num_experts_per_tok
            ),
        );
        line("vocabulary", format!("{} ids", shape.vocab_size));
        line("positions", shape.max_position_embeddings.to_string());
        let tower = |layers: usize| format!("{layers} layers, checked but not served yet");
        line("vision", shape.vision.map_or_else(|| "none".to_owned(), |vision| tower(vision.num_hidden_layers)));
    }
    if let Some(fingerprint) = found.fingerprint {
        line("fingerprint", fingerprint.to_string());
    }
    if let Some(checkpoint) = &found.checkpoint {
        let shards = checkpoint.shards();
        let count = shards.len();
        let bytes = shards.map(|(_, bytes)| bytes).sum();
        let shards = if count == 1 { "shard" } else { "shards" };
        line("tensors", format!("{} in {count} {shards}, {}", checkpoint.views().len(), show_bytes(bytes)));
        for (dtype, stored) in found.formats() {
            line("", format!("{:<8} {:>7} tensors {:>12}", dtype.name(), stored.tensors, show_bytes(stored.bytes)));
        }
        if !checkpoint.ignored().is_empty() {
            line("ignored", checkpoint.ignored().join(", "));
        }
    }
    let markers: Vec<String> = found.markers().into_iter().map(|(marker, id)| format!("{marker} {id}")).collect();
    for (index, pair) in markers.chunks(3).enumerate() {
        line(if index == 0 { "special tokens" } else { "" }, pair.join("   "));
    }
    let Some(loading) = &found.loading else { return text };
    let plan = &loading.plan;
    let budget = loading.budget.map_or_else(|| "an unknown amount".to_owned(), show_bytes);
    let requests = if plan.slots == 1 { "request" } else { "requests" };
    text += &format!(
        "\nmemory for {} {requests} of {} tokens: {} of {budget}\n",
        plan.slots,
        plan.context,
        show_bytes(plan.total_bytes())
    );
    let mut line = |name: &str, value: String| text += &format!("  {name:<16} {value:>12}\n");
    for (name, bytes) in parts(plan) {
        line(name, show_bytes(bytes));
    }
    line("a token", show_bytes(plan.position_bytes));
    line("a full request", show_bytes(plan.request_bytes()));
    line("a snapshot", show_bytes(plan.snapshot_bytes));
    if let (Some(budget), Some(shape)) = (loading.budget, &found.shape) {
        let largest = plan.largest_context(shape, budget);
        line("largest context", largest.map_or_else(|| "none".to_owned(), |tokens| tokens.to_string()));
        line("full requests", plan.full_requests(budget).to_string());
    }
    text
}

/// Each option's value and where it came from, as `serve` would see them.
fn options(arguments: &Arguments, environment: &Environment) -> Result<(), Failure> {
    let mut words = vec![Command::Serve.name().to_owned()];
    if let Some(file) = arguments.text("config") {
        words.extend(["--config".to_owned(), file.to_owned()]);
    }
    let Request::Run(serve) = parse(&words, environment)? else {
        return Err(Failure::run_time("the options of serve can't be read"));
    };
    let given = |flag: &str| find(arguments.command, flag).and_then(|_| arguments.setting(flag));
    let mut rows = Vec::new();
    for spec in OPTIONS.iter().filter(|spec| spec.commands.contains(&Command::Serve) && spec.later.is_empty()) {
        let own = given(spec.flag).filter(|_| arguments.is_given(spec.flag));
        let setting: Option<&Setting> = own.or_else(|| serve.setting(spec.flag));
        let (value, source) = match (setting, spec.default) {
            (Some(setting), _) => (show(&setting.value), setting.source.to_string()),
            (None, DefaultValue::Says(text)) => (format!("({text})"), "default".to_owned()),
            (None, DefaultValue::Is(value)) => (value.to_owned(), "default".to_owned()),
        };
        let value = if spec.secret && setting.is_some() { "(set)".to_owned() } else { value };
        rows.push((format!("--{}", spec.flag), value, source));
    }
    let text = match arguments.is_on("json") {
        true => {
            let object: serde_json::Map<String, Json> = rows
                .into_iter()
                .map(|(flag, value, source)| (flag, json!({"value": value, "source": source})))
                .collect();
            format!("{:#}\n", Json::Object(object))
        }
        false => rows.iter().map(|(flag, value, source)| format!("{flag:<22} {value:<50} {source}\n")).collect(),
    };
    Ok(print(&text)?)
}

/// For programs that drive this one.
fn capabilities() -> Json {
    let options: Vec<Json> = OPTIONS
        .iter()
        .filter(|spec| spec.later.is_empty())
        .map(|spec| {
            let commands: Vec<_> = spec.commands.iter().map(|command| command.name()).collect();
            let variable = spec.variable(spec.commands[0]);
            let mut json = json!({"flag": format!("--{}", spec.flag), "variable": variable, "commands": commands});
            if let Kind::Choice { built, .. } = spec.kind {
                json["values"] = built.into();
            }
            json
        })
        .collect();
    let read = FOREIGN.iter().filter(|(_, honour, _)| *honour == Honour::Read).map(|(name, _, _)| *name);
    let formats = ["F8_E4M3 with F8_E8M0 tiles of 32x32", "FP4 (I8) with F8_E8M0 groups of 32", "BF16", "F32"];
    json!({
        "schema_version": 1,
        "build": build_json(),
        "weight_formats": {Family::DeepseekV41.model_type(): formats},
        "options": options,
        "variables": read.collect::<Vec<_>>(),
        "variable_prefix": PREFIX,
    })
}
