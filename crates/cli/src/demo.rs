//! The demo checkpoint, part of the program: what runs when no model is named.

use tf_checkpoint::EmbeddedFiles;

pub const NAME: &str = "tiny-dsv41";

macro_rules! file {
    ($name:literal) => {
        ($name, include_bytes!(concat!("../../../models/tiny-dsv41/", $name)) as &[u8])
    };
}

/// The files that serving needs, and the notice that travels with the model's data.
pub const FILES: EmbeddedFiles = &[
    file!("config.json"),
    file!("generation_config.json"),
    file!("tokenizer.json"),
    file!("tokenizer_config.json"),
    file!("model.safetensors.index.json"),
    file!("model-00001-of-00001.safetensors"),
    file!("LICENSE-WordNet.txt"),
];

/// Held-out prompts with expected replies, a JSON object a line.
pub const EVALUATION: &str = include_str!("../../../models/tiny-dsv41/eval.jsonl");
