//! The golden files, the tiny checkpoint read without production code, and comparisons that name the worst element.
#![allow(dead_code, reason = "each test binary uses a part")]

pub mod forced;
#[path = "../../../kernels/tests/safetensors/mod.rs"]
pub mod safetensors;

use std::path::PathBuf;
use std::sync::OnceLock;

use safetensors::File;
use tf_kernels::numerics_policy::Numerics;
use tf_model::deepseek_v41::reference::{Dimensions, Model, Stored, Tensor, dequantise};

/// The package's folder, which a test program may be told when it runs elsewhere than where it was built.
fn package() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

pub fn directory() -> PathBuf {
    package().join("tests/golden/dsv41-tiny-a")
}

/// A golden file by its name without the extension.
pub fn golden(name: &str) -> File {
    File::open(&directory().join(format!("{name}.safetensors")))
}

pub fn json(path: &str) -> serde_json::Value {
    let path = directory().join(path);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A token sequence of `golden.json`.
pub fn sequence(name: &str) -> Vec<u32> {
    numbers(&json("golden.json")["sequences"][name])
}

pub fn numbers(list: &serde_json::Value) -> Vec<u32> {
    list.as_array().expect("a list").iter().map(|value| value.as_u64().expect("a number") as u32).collect()
}

pub fn config() -> serde_json::Value {
    json("model/config.json")
}

/// The reference model on the tiny checkpoint, loaded once for each policy.
pub fn reference(numerics: Numerics) -> &'static Model {
    static MODELS: [OnceLock<Model>; 3] = [const { OnceLock::new() }; 3];
    MODELS[numerics as usize].get_or_init(|| {
        let dimensions = Dimensions::from_config(&config()).expect("the configuration is complete");
        let token_map = numbers(&json("model/engram_layout.debug.json")["token_map"]);
        let shards = Shards::open();
        Model::load(dimensions, numerics, token_map, &mut |name| shards.tensor(name)).expect("the shapes fit")
    })
}

/// The shards of the tiny checkpoint.
struct Shards(Vec<File>);

impl Shards {
    fn open() -> Shards {
        let shard = |i: usize| File::open(&directory().join(format!("model/model-0000{i}-of-00003.safetensors")));
        Shards((1..=3).map(shard).collect())
    }

    /// A tensor by its name, dequantised with the scale that lies beside it if there is one.
    fn tensor(&self, name: &str) -> Result<Tensor, String> {
        let find = |name: &str| -> Option<Stored<'_>> {
            let stored = self.0.iter().find(|file| file.has(name))?.get(name);
            Some(Stored { dtype: stored.dtype, shape: stored.shape, bytes: stored.bytes })
        };
        let stored = find(name).ok_or("the checkpoint does not hold it")?;
        let scale = name.strip_suffix(".weight").and_then(|stem| find(&format!("{stem}.scale")));
        dequantise(name, &stored, scale.as_ref())
    }
}

/// Fails at the worst element when it is farther from the recorded value than `bound`. Returns the worst distance.
pub fn check(name: &str, found: &[f64], expected: &[f64], bound: f64) -> f64 {
    assert_eq!(found.len(), expected.len(), "{name}: number of values");
    assert!(!found.is_empty(), "{name}: nothing to compare");
    let distance = |i: usize| if found[i] == expected[i] { 0.0 } else { (found[i] - expected[i]).abs() };
    let worst = (0..found.len()).max_by(|&a, &b| distance(a).total_cmp(&distance(b))).expect("not empty");
    let text = format!(
        "{name}: worst element {worst} of {}: {} instead of {} ({:.2e})",
        found.len(),
        found[worst],
        expected[worst],
        distance(worst)
    );
    println!("{text}");
    assert!(distance(worst) <= bound, "{text}, allowed {bound:.0e}");
    distance(worst)
}

/// The rows of a recorded list of indices without their padding, each ascending.
pub fn index_rows(file: &File, name: &str) -> Vec<Vec<u32>> {
    let stored = file.get(name);
    let columns = *stored.shape.last().expect("at least one dimension");
    let rows = stored.integers();
    let row = |row: &[i64]| -> Vec<u32> {
        let mut row: Vec<u32> = row.iter().filter(|&&j| j >= 0).map(|&j| j as u32).collect();
        row.sort_unstable();
        row
    };
    if columns == 0 { vec![Vec::new(); stored.shape[0]] } else { rows.chunks(columns).map(row).collect() }
}

/// Fails at the first row whose indices differ.
pub fn check_lists(name: &str, found: &[Vec<u32>], expected: &[Vec<u32>]) {
    assert_eq!(found.len(), expected.len(), "{name}: number of rows");
    assert!(!found.is_empty(), "{name}: nothing to compare");
    for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found, expected, "{name}: row {row}");
    }
}
