//! Every launcher names its kernel to the queue, and by a name of the registry: a silent launch could not be checked.

use std::collections::BTreeSet;
use std::path::Path;
use tf_kernels::families::{CHAINS, CONTRACTS};

/// Names given to queues in a launcher's text.
fn names(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    for literal in text.split('"').skip(1).step_by(2) {
        let family = literal.split('/').next().unwrap_or_default();
        let is_name = !literal.is_empty() && literal.chars().all(|c| c.is_ascii_alphanumeric() || "_/".contains(c));
        if is_name && CONTRACTS.iter().any(|contract| contract.family() == family) {
            names.push(literal.to_owned());
        }
    }
    names
}

#[test]
fn every_launcher_names_a_registered_kernel() {
    let mut named = BTreeSet::new();
    let mut launchers = 0;
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap() {
        let Ok(text) = std::fs::read_to_string(entry.unwrap().path().join("launch.rs")) else { continue };
        let launches = text.matches("pub fn launch").count();
        let announced = text.matches(".launching(").count();
        assert!(announced >= launches, "{launches} launches, {announced} named to the queue:\n{text}");
        launchers += launches;
        named.extend(names(&text));
    }
    assert!(launchers >= 20, "only {launchers} launchers were found");
    let launches = CONTRACTS.iter().filter(|contract| !CHAINS.contains(&contract.name));
    let registered: BTreeSet<String> = launches.map(|contract| contract.name.to_owned()).collect();
    assert_eq!(named, registered, "the launchers' names and the registry differ");
}
