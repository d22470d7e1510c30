//! Writes THIRD-PARTY.md: every library that the program links, with its version, licence and origin, from Cargo's own
//! data.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::check::root;

const HEAD: &str = "\
# Third-party notices

TensorFold links the libraries below. Each is used under the licence named beside it; where several are offered, under
the first of MIT, Apache-2.0 or the one that stands alone. Their texts are part of each library's source, which Cargo
fetches with the build. `cargo xtask notices` rewrites this list, and `cargo xtask tidy` compares it.

Besides libraries: the prompt format's fixed texts come from the DeepSeek release (MIT, `LICENSE-prompt-format` beside
them), and the demo checkpoint's data from WordNet 3.0 (`models/tiny-dsv41/LICENSE-WordNet.txt`).

| library | version | licence | origin |
| --- | --- | --- | --- |
";

/// The page as it should be.
pub fn page() -> Result<String> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(root())
        .output()
        .context("cannot start cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let data: Value = serde_json::from_slice(&output.stdout)?;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let nodes: BTreeMap<String, Value> = list(&data["resolve"]["nodes"])
        .into_iter()
        .filter_map(|node| Some((node["id"].as_str()?.to_owned(), node)))
        .collect();
    let packages: BTreeMap<String, Value> = list(&data["packages"])
        .into_iter()
        .filter_map(|package| Some((package["id"].as_str()?.to_owned(), package)))
        .collect();
    let program =
        packages.values().find(|package| package["name"] == "tensorfold").context("no program in the data")?;
    let mut open = vec![program["id"].as_str().unwrap_or_default().to_owned()];
    let mut linked = BTreeSet::new();
    while let Some(id) = open.pop() {
        if !linked.insert(id.clone()) {
            continue;
        }
        for dependency in list(&nodes.get(&id).context("a package without a node")?["deps"]) {
            // Only what is linked: neither tests nor build scripts.
            let is_normal = list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
            if let (true, Some(id)) = (is_normal, dependency["pkg"].as_str()) {
                open.push(id.to_owned());
            }
        }
    }
    let mut lines = BTreeSet::new();
    for id in linked {
        let package = &packages[&id];
        if package["source"].is_null() {
            continue;
        }
        let text = |key: &str| package[key].as_str().unwrap_or("not given").to_owned();
        lines.insert(format!(
            "| {} | {} | {} | {} |\n",
            text("name"),
            text("version"),
            text("license"),
            text("repository")
        ));
    }
    if lines.is_empty() {
        bail!("no library is linked: that can't be");
    }
    Ok(HEAD.to_owned() + &lines.into_iter().collect::<String>())
}

/// Writes the page.
pub fn run() -> Result<()> {
    fs::write(root().join("THIRD-PARTY.md"), page()?)?;
    Ok(())
}
