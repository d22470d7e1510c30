//! `models`: what can be served here. Reads names, configurations and headers; never a weight.

use serde_json::json;
use tf_checkpoint::{HubSnapshot, SmallFiles};
use tf_model::Family;

use crate::arguments::Arguments;
use crate::demo;
use crate::failure::{Failure, print};
use crate::locate::{Located, Place, hub_cache};
use crate::options::Environment;
use crate::resolve::show_bytes;

/// One line of the list.
struct Entry {
    name: String,
    source: &'static str,
    revision: Option<String>,
    model_type: Option<String>,
    bytes: Option<u64>,
    /// Why it couldn't be served; empty where it could.
    problems: Vec<String>,
}

pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), Failure> {
    let cache = hub_cache(environment);
    let mut entries = vec![entry(&Located { name: demo::NAME.to_owned(), place: Place::BuiltIn }, "built in", None)];
    for snapshot in cache.iter().flat_map(|cache| cache.snapshots()) {
        // Other tools keep other things in the same cache.
        if snapshot.folder.join("config.json").exists() || snapshot.folder.join("inference/config.json").exists() {
            entries.push(of_snapshot(snapshot));
        }
    }
    let root = cache.map(|cache| cache.root().display().to_string());
    let text = match arguments.is_on("json") {
        true => json_text(&entries, root),
        false => table(&entries, root),
    };
    Ok(print(&text)?)
}

fn of_snapshot(snapshot: HubSnapshot) -> Entry {
    let revision = match snapshot.references.is_empty() {
        true => snapshot.commit.clone(),
        false => snapshot.references.join(", "),
    };
    let place = Place::Hub { folder: snapshot.folder, revision: revision.clone() };
    entry(&Located { name: snapshot.name, place }, "hub cache", Some(revision))
}

fn entry(located: &Located, source: &'static str, revision: Option<String>) -> Entry {
    let model_type = located.small_files().ok().and_then(|files| model_type(&files));
    let mut entry =
        Entry { name: located.name.clone(), source, revision, model_type, bytes: None, problems: Vec::new() };
    let known = |model_type: &String| Family::ALL.iter().any(|family| family.model_type() == model_type);
    match &entry.model_type {
        Some(model_type) if !known(model_type) => {
            entry.problems.push(format!("the family {model_type} can't be loaded"));
            return entry;
        }
        _ => {}
    }
    match located.open() {
        Ok(checkpoint) => entry.bytes = Some(checkpoint.shards().map(|(_, bytes)| bytes).sum()),
        Err(error) => entry.problems.extend(error.reasons()),
    }
    entry
}

/// `model_type` of a configuration; the flat spelling has none and belongs to this family alone.
fn model_type(files: &SmallFiles) -> Option<String> {
    let config = files.config().ok()?;
    match config.get("model_type") {
        Some(field) => field.value.as_str().map(str::to_owned),
        None => Some(Family::DeepseekV41.model_type().to_owned()),
    }
}

fn json_text(entries: &[Entry], root: Option<String>) -> String {
    let models: Vec<_> = entries
        .iter()
        .map(|entry| {
            json!({
                "name": entry.name,
                "source": entry.source,
                "revision": entry.revision,
                "family": entry.model_type,
                "size_bytes": entry.bytes,
                "complete": entry.problems.is_empty(),
                "problems": entry.problems,
            })
        })
        .collect();
    let families: Vec<_> = Family::ALL.iter().map(|family| family.model_type()).collect();
    format!("{:#}\n", json!({"models": models, "families": families, "hub_cache": root}))
}

fn table(entries: &[Entry], root: Option<String>) -> String {
    let widest = entries.iter().map(|entry| entry.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for entry in entries {
        let source = match &entry.revision {
            Some(revision) => format!("{}, {revision}", entry.source),
            None => entry.source.to_owned(),
        };
        let state = match (entry.bytes, entry.problems.first()) {
            (Some(bytes), None) => format!("{}, complete", show_bytes(bytes)),
            (_, Some(problem)) => problem.clone(),
            (None, None) => "unknown".to_owned(),
        };
        text += &format!("{:<widest$}  {source:<24}  {state}\n", entry.name);
        for problem in entry.problems.iter().skip(1) {
            text += &format!("{:<widest$}  {:<24}  {problem}\n", "", "");
        }
    }
    let families: Vec<_> = Family::ALL.iter().map(|family| family.model_type()).collect();
    text += &format!("\nfamilies that can be loaded: {}\n", families.join(", "));
    text += &format!(
        "hub cache: {}\n",
        root.unwrap_or_else(|| "none (HF_HUB_CACHE, HF_HOME and HOME are unset)".to_owned())
    );
    text
}
