//! What opening a checkpoint accepts and refuses. No byte of any file may make it panic.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tf_checkpoint::{Checkpoint, CheckpointError, Dtype, SmallFiles};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// A folder of its own that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, files: &[(&str, Vec<u8>)]) -> Folder {
        let path = std::env::temp_dir().join(format!("tensorfold-open-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        for (name, bytes) in files {
            std::fs::write(path.join(name), bytes).unwrap();
        }
        Folder(path)
    }

    fn open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(&self.0)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A safetensors file from a header's text and its data.
fn file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

const TWO: &str = r#"{"__metadata__": {"format": "pt"},
    "b": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [4, 8]},
    "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}"#;

#[test]
fn fixtures_open_with_typed_views() {
    let golden = Checkpoint::open(&repository("crates/model/tests/golden/dsv41-tiny-a/model")).unwrap();
    assert_eq!((golden.views().len(), golden.shards().len()), (1175, 3));
    let view = golden.view("layers.1.engram.embed.weight").unwrap();
    assert_eq!((view.dtype, view.shape, view.bytes.len()), (Dtype::F8E4M3, &[462, 32][..], 462 * 32));
    let scale = golden.view("layers.0.ffn.experts.7.w2.scale").unwrap();
    assert_eq!((scale.dtype, scale.shape, scale.count()), (Dtype::F8E8M0, &[128, 2][..], 256));
    assert_eq!(golden.view("layers.0.hc_attn_scale").unwrap().f32_values().unwrap().len(), 3);
    assert_eq!(golden.view("norm.weight").unwrap().bf16_bits().unwrap().len(), 128);
    assert!(golden.view("norm.weight").unwrap().f32_values().is_none());
    assert!(golden.view("layers.99.attn_norm.weight").is_none());
    assert!(golden.ignored().is_empty());

    let demo = Checkpoint::open(&repository("models/tiny-dsv41")).unwrap();
    assert_eq!((demo.views().len(), demo.shards().len()), (1782, 1));
    assert_eq!(demo.generation_config().unwrap().do_sample, Some(false));
    assert!(demo.required_file("tokenizer.json").unwrap().starts_with(b"{"));
    assert!(demo.file("nothing.json").unwrap().is_none());
    assert!(demo.required_file("nothing.json").unwrap_err().to_string().contains("nothing.json is missing"));
}

#[test]
fn a_single_file_needs_no_index_and_keeps_odd_alignment() {
    let header = r#"{"w": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]},
        "v": {"dtype": "F32", "shape": [], "data_offsets": [3, 7]},
        "none": {"dtype": "BF16", "shape": [0, 4], "data_offsets": [7, 7]}}   "#;
    let folder = Folder::new("single", &[("model.safetensors", file(header, &[1, 2, 3, 0, 0, 0x80, 0x3f]))]);
    let checkpoint = folder.open().unwrap();
    assert_eq!(checkpoint.view("v").unwrap().f32_values().unwrap(), [1.0]);
    assert_eq!(checkpoint.view("w").unwrap().bytes, [1, 2, 3]);
    assert_eq!(checkpoint.view("none").unwrap().count(), 0);
    assert!(checkpoint.config().unwrap_err().to_string().contains("config.json is missing"));
    assert!(SmallFiles::open(&folder.0).unwrap().config().is_err());
}

static EMBEDDED: &[(&str, &[u8])] = &[
    ("config.json", b"{\"dim\": 32}"),
    (
        "model.safetensors",
        b"\x3f\0\0\0\0\0\0\0{\"a\": {\"dtype\": \"I8\", \"shape\": [1], \"data_offsets\": [0, 1]}}   \x07",
    ),
];

#[test]
fn a_checkpoint_inside_the_program_opens_the_same_way() {
    let checkpoint = Checkpoint::embedded(EMBEDDED).unwrap();
    assert_eq!(checkpoint.view("a").unwrap().bytes, [7]);
    assert_eq!(checkpoint.config().unwrap().get("text_config.hidden_size").unwrap().value, 32);
    assert!(checkpoint.path().is_none());
    let error = Checkpoint::embedded(&[]).unwrap_err().to_string();
    assert!(error.contains("the built-in checkpoint has neither"), "{error}");
}

#[test]
fn aliases_of_re_exports_are_read_and_tied_copies_left_out() {
    let header = r#"{"model.layers.0.self_attn.wkv.weight_scale_inv": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]},
        "mtp.0.head.weight": {"dtype": "I8", "shape": [1], "data_offsets": [1, 2]}}"#;
    let index = r#"{"weight_map": {"model.layers.0.self_attn.wkv.weight_scale_inv": "m.safetensors",
        "mtp.0.head.weight": "m.safetensors"}}"#;
    let files = [("m.safetensors", file(header, &[5, 6])), ("model.safetensors.index.json", index.into())];
    let checkpoint = Folder::new("alias", &files).open().unwrap();
    assert_eq!(checkpoint.view("layers.0.attn.wkv.scale").unwrap().bytes, [5]);
    assert_eq!(checkpoint.ignored(), ["mtp.0.head.weight"]);
    assert_eq!(checkpoint.views().len(), 1);
}

/// One damaged file each: the error names the file, what was found and what was expected.
#[test]
fn damaged_files_are_refused_by_name() {
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}}}"#)
    };
    let lies = |length: u64| [&length.to_le_bytes()[..], b"{}"].concat();
    let mut gguf = b"GGUF\x03\0\0\0".to_vec();
    gguf.extend([0xff; 64]);
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "ends at byte 0, its header needs 8"),
        ("short", vec![1, 2, 3], "ends at byte 3, its header needs 8"),
        ("length 2^60", lies(1 << 60), "claims a header of 1152921504606846976 bytes, expected at most 100000000"),
        ("length 2^64 - 1", lies(u64::MAX), "claims a header of 18446744073709551615 bytes"),
        ("length past the end", lies(3), "ends at byte 10, its header needs 11"),
        ("not an object", file("[1]", &[]), "doesn't begin with {"),
        ("no json", file("{nonsense}", &[]), "the header is damaged: key must be a string"),
        ("not utf-8", [&3u64.to_le_bytes()[..], b"{\"\xff"].concat(), "the header is damaged"),
        ("text after it", file("{} {}", &[]), "trailing characters"),
        (
            "deep metadata",
            file(&format!("{{\"__metadata__\": {}", "[".repeat(9999)), &[]),
            "before it is complete. Fetch it again",
        ),
        ("gguf", gguf, "is a GGUF file, a format that is not read"),
        ("zip", b"PK\x03\x04rest of it".to_vec(), "is a zip archive"),
        ("pointer", b"version https://git-lfs.github.com/spec/v1".to_vec(), "is a Git LFS pointer"),
        (
            "unknown dtype",
            file(&one("F16", "[1]", "[0, 2]"), &[0; 2]),
            "a has the dtype \"F16\", expected one of F8_E4M3",
        ),
        (
            "overflow",
            file(&one("F32", "[4294967296, 4294967296]", "[0, 4]"), &[0; 4]),
            "a has the shape [4294967296, 42",
        ),
        ("overflow beside 0", file(&one("F32", "[0, 18446744073709551615]", "[0, 0]"), &[]), "a has the shape [0, 184"),
        ("nine dimensions", file(&one("I8", "[1,1,1,1,1,1,1,1,1]", "[0, 1]"), &[0]), "more than 8 dimensions"),
        ("negative", file(&one("I8", "[-1]", "[0, 1]"), &[0]), "\"a\": found `-1`, expected a whole number"),
        ("wrong size", file(&one("F32", "[2]", "[0, 4]"), &[0; 4]), "a takes bytes 0..4, expected 8 bytes"),
        ("backwards", file(&one("I8", "[1]", "[4, 3]"), &[0; 4]), "a takes bytes 4..3, expected 1 bytes"),
        ("huge offset", file(&one("I8", "[1]", "[18446744073709551615, 0]"), &[0]), "expected 1 bytes"),
        ("hole first", file(&one("I8", "[1]", "[1, 2]"), &[0; 2]), "a begins at byte 1 of the data, expected 0"),
        ("truncated", file(&one("I8", "[9]", "[0, 9]"), &[0; 4]), "ends at byte 72, its header needs 77"),
        (
            "out of the file",
            file(&one("I8", "[1099511627776]", "[0, 1099511627776]"), &[0]),
            "the download is incomplete",
        ),
        ("more than its tensors", file(&one("I8", "[1]", "[0, 1]"), &[0; 3]), "2 bytes follow the last tensor"),
        ("overlap", file(&TWO.replace("[4, 8]", "[2, 6]"), &[0; 6]), "b begins at byte 2 of the data, expected 4"),
        ("hole", file(&TWO.replace("[4, 8]", "[5, 9]"), &[0; 9]), "b begins at byte 5 of the data, expected 4"),
        ("twice", file(&TWO.replace("\"b\"", "\"a\""), &[0; 8]), "\"a\" appears twice"),
        ("field twice", file(r#"{"a": {"dtype": "I8", "dtype": "I8"}}"#, &[]), "twice: `dtype`"),
        ("field missing", file(r#"{"a": {"dtype": "I8", "shape": []}}"#, &[]), "\"a\": data_offsets is missing"),
        ("long name", file(&one("I8", "[1]", "[0, 1]").replace('a', &"n".repeat(600)), &[0]), "a name has 6"),
    ];
    for (name, bytes, part) in cases {
        let started = std::time::Instant::now();
        let folder = Folder::new("damaged", &[("model.safetensors", bytes)]);
        let error = folder.open().unwrap_err().to_string();
        assert!(error.contains("model.safetensors") && error.contains(part), "{name}: {error}");
        assert!(started.elapsed().as_secs_f64() < 1.0, "{name}");
    }
}

/// Each index disagrees with the one good shard beside it.
#[test]
fn an_index_that_disagrees_with_its_shards_is_refused() {
    let index = |map: &str| format!(r#"{{"metadata": {{"total_size": 8}}, "weight_map": {map}}}"#);
    let cases = [
        ("a second shard", index(r#"{"a": "m.safetensors", "b": "n.safetensors"}"#), "1 of 2 shards are missing from"),
        (
            "a second shard, named",
            index(r#"{"a": "m.safetensors", "b": "n.safetensors"}"#),
            "n.safetensors. The download",
        ),
        (
            "a third tensor",
            index(r#"{"a": "m.safetensors", "b": "m.safetensors", "c": "m.safetensors"}"#),
            "sends c to m.safetensors, which doesn't have it. Fetch",
        ),
        (
            "a forgotten tensor",
            index(r#"{"a": "m.safetensors"}"#),
            "m.safetensors has b, which model.safetensors.index",
        ),
        (
            "a tensor twice",
            index(r#"{"a": "m.safetensors", "a": "m.safetensors", "b": "m.safetensors"}"#),
            "a is in model",
        ),
        (
            "a path upwards",
            index(r#"{"a": "../m.safetensors"}"#),
            "sends a to \"../m.safetensors\", expected a plain file",
        ),
        ("an absolute path", index(r#"{"a": "/m.safetensors"}"#), "expected a plain file name"),
        ("another format", index(r#"{"a": "m.gguf"}"#), "expected a plain file name"),
        ("a number", index(r#"{"a": 1}"#), "\"a\": found `1`, expected a string"),
        ("nothing", index("{}"), "weight_map is empty"),
        ("no map", "{}".to_owned(), "weight_map is missing"),
        (
            "no json",
            "weights".to_owned(),
            "model.safetensors.index.json is not valid JSON: expected a value at line 1, column 1",
        ),
        ("a pointer", "version https://git-lfs.github.com/spec/v1".to_owned(), "is a Git LFS pointer"),
    ];
    for (name, text, part) in cases {
        let files = [("m.safetensors", file(TWO, &[0; 8])), ("model.safetensors.index.json", text.into_bytes())];
        let error = Folder::new("index", &files).open().unwrap_err().to_string();
        assert!(error.contains(part), "{name}: {error}");
    }
    // The other way round: the index sends a tensor to the shard that doesn't have it.
    let other = r#"{"c": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}"#;
    let text = index(r#"{"a": "n.safetensors", "b": "m.safetensors", "c": "n.safetensors"}"#);
    let files = [
        ("m.safetensors", file(TWO, &[0; 8])),
        ("n.safetensors", file(other, &[0])),
        ("model.safetensors.index.json", text.into_bytes()),
    ];
    let error = Folder::new("swapped", &files).open().unwrap_err().to_string();
    assert!(error.contains("sends a to n.safetensors, which doesn't have it: it is in m.safetensors"), "{error}");
}

#[test]
fn a_tensor_under_two_names_or_in_two_shards_is_refused() {
    let named =
        |name: &str| file(&format!(r#"{{"{name}": {{"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}}}"#), &[0]);
    let index = r#"{"weight_map": {"norm.weight": "m.safetensors", "model.norm.weight": "n.safetensors"}}"#;
    let files = [
        ("m.safetensors", named("norm.weight")),
        ("n.safetensors", named("model.norm.weight")),
        ("model.safetensors.index.json", index.into()),
    ];
    let error = Folder::new("twice", &files).open().unwrap_err().to_string();
    assert!(error.contains("norm.weight is in m.safetensors and again in n.safetensors"), "{error}");
}

#[test]
fn every_broken_shard_is_reported_at_once() {
    let index = r#"{"weight_map": {"a": "m.safetensors", "b": "n.safetensors"}}"#;
    let files = [
        ("m.safetensors", vec![1]),
        ("n.safetensors", b"GGUF....".to_vec()),
        ("model.safetensors.index.json", index.into()),
    ];
    let reasons = Folder::new("several", &files).open().unwrap_err().reasons();
    assert_eq!(reasons.len(), 2, "{reasons:?}");
}

#[test]
fn folders_without_a_checkpoint_say_what_is_there() {
    let error = Folder::new("gguf", &[("model.gguf", b"GGUF".to_vec())]).open().unwrap_err().to_string();
    assert!(error.contains("but model.gguf, a format that is not read"), "{error}");
    let folder = Folder::new("file", &[("model.safetensors", vec![])]);
    let error = Checkpoint::open(&folder.0.join("model.safetensors")).unwrap_err().to_string();
    assert!(error.contains("this is a file, not a folder"), "{error}");
    let error = Checkpoint::open(&folder.0.join("none")).unwrap_err().to_string();
    assert!(error.contains("there is no such file or folder"), "{error}");
    // A folder, or a pipe, in a shard's place must not be waited for.
    std::fs::remove_file(folder.0.join("model.safetensors")).unwrap();
    std::fs::create_dir(folder.0.join("model.safetensors")).unwrap();
    assert!(folder.open().unwrap_err().to_string().contains("not a regular file"));
}

#[test]
fn a_fingerprint_follows_the_contents_and_not_the_place() {
    let files =
        |last: u8| [("config.json", b"{}".to_vec()), ("model.safetensors", file(TWO, &[0, 0, 0, 0, 0, 0, 0, last]))];
    let print = |name: &str, last: u8| Folder::new(name, &files(last)).open().unwrap().fingerprint().unwrap();
    assert_eq!(print("here", 1), print("there", 1));
    assert_ne!(print("here", 1), print("here", 2));
    assert_eq!(print("here", 1).to_string().len(), 64);
    let other = Folder::new("config", &[("config.json", b"{ }".to_vec()), ("model.safetensors", file(TWO, &[0; 8]))]);
    assert_ne!(print("here", 0), other.open().unwrap().fingerprint().unwrap());
}

/// Opens bytes as the only file and reads everything that was accepted.
fn open_bytes(name: &str, bytes: Vec<u8>) -> bool {
    match Folder::new(name, &[("model.safetensors", bytes)]).open() {
        Ok(checkpoint) => {
            let total: usize =
                checkpoint.views().map(|view| view.bytes.iter().map(|byte| *byte as usize).sum::<usize>()).sum();
            total < usize::MAX
        }
        Err(error) => error.to_string().is_empty(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_judged_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        open_bytes("any", bytes);
    }

    #[test]
    fn mutated_headers_are_judged_without_a_panic(
        edits in prop::collection::vec((0usize..400, any::<u8>()), 1..6),
        cut in 0usize..40,
        grow in 0usize..8,
    ) {
        let mut bytes = file(TWO, &[0; 8]);
        for (place, value) in edits {
            let place = place % bytes.len();
            bytes[place] = value;
        }
        bytes.truncate(bytes.len() - cut.min(bytes.len()));
        bytes.extend(vec![0; grow]);
        open_bytes("mutated", bytes);
    }

    #[test]
    fn mutated_numbers_are_judged_without_a_panic(
        shape in prop::collection::vec(any::<u64>(), 0..10),
        start in any::<u64>(),
        end in any::<u64>(),
        small in any::<bool>(),
    ) {
        let shrink = |value: u64| if small { value % 9 } else { value };
        let shape: Vec<u64> = shape.into_iter().map(shrink).collect();
        let header = format!(
            r#"{{"a": {{"dtype": "BF16", "shape": {shape:?}, "data_offsets": [{}, {}]}}}}"#,
            shrink(start), shrink(end),
        );
        open_bytes("numbers", file(&header, &[0; 8]));
    }

    #[test]
    fn any_index_is_judged_without_a_panic(tensor in ".*", shard in ".*") {
        let index = format!(r#"{{"weight_map": {{{tensor:?}: {shard:?}}}}}"#);
        let files = [("m.safetensors", file(TWO, &[0; 8])), ("model.safetensors.index.json", index.into_bytes())];
        prop_assert!(Folder::new("any-index", &files).open().is_err());
    }
}

#[test]
fn a_file_that_shrinks_or_is_written_to_under_its_map_is_named() {
    type Change = fn(&Path);
    let changes: [(&str, Change, &str); 3] = [
        ("nothing", |_| {}, ""),
        (
            "shrinks",
            |path| std::fs::File::options().write(true).open(path).unwrap().set_len(16).unwrap(),
            "model.safetensors has changed since it was opened: it has 16 bytes and had ",
        ),
        (
            "is written to",
            |path| {
                let file = std::fs::File::options().write(true).open(path).unwrap();
                file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
            },
            "model.safetensors has changed since it was opened: it was written to",
        ),
    ];
    for (name, change, expected) in changes {
        let folder = Folder::new("changed", &[("model.safetensors", file(TWO, &[0; 8]))]);
        let checkpoint = folder.open().unwrap();
        change(&folder.0.join("model.safetensors"));
        let found = [checkpoint.check_unchanged(["a"]), checkpoint.check_all_unchanged()];
        for found in found {
            let text = found.err().map_or_else(String::new, |error| error.to_string());
            assert!(text.starts_with(expected) && text.is_empty() == expected.is_empty(), "{name}: {text}");
        }
        assert!(checkpoint.check_unchanged([]).is_ok(), "{name}: no file was asked for");
    }
    // Another file in its place leaves the mapped one as it is.
    let folder = Folder::new("replaced", &[("model.safetensors", file(TWO, &[0; 8]))]);
    let checkpoint = folder.open().unwrap();
    std::fs::remove_file(folder.0.join("model.safetensors")).unwrap();
    std::fs::write(folder.0.join("model.safetensors"), b"short").unwrap();
    assert!(checkpoint.check_all_unchanged().is_ok());
}
