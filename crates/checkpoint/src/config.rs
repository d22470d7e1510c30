//! `config.json`, `inference/config.json` and `generation_config.json` as data. What a value may be is the model's rule.
//!
//! The release ships its configuration in two spellings (spec section 2.3). Both are asked with the names of
//! `config.json`, written as a path (`text_config.rope_scaling.factor`); a field remembers how its file spells it, so
//! that an error can name what the user sees.

use serde_json::Value;

use crate::error::CheckpointError;
use crate::json;

/// How a configuration file spells its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// `config.json`: sections `text_config`, `vision_config`, `quantization_config`.
    Nested,
    /// `inference/config.json`: one level, short names.
    Flat,
}

/// One value of a configuration and the key under which its file has it.
#[derive(Clone, Debug)]
pub struct Field<'a> {
    pub key: String,
    pub value: &'a Value,
}

/// A parsed configuration file.
#[derive(Clone, Debug)]
pub struct Config {
    file: String,
    spelling: Spelling,
    root: Value,
}

impl Config {
    /// Parses the bytes of a configuration. `file` is the name that errors show.
    ///
    /// # Errors
    /// [`CheckpointError::NotJson`] for broken JSON, [`CheckpointError::InvalidJson`] for a repeated key, or anything but an
    /// object.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Config, CheckpointError> {
        let invalid = |reason: String| CheckpointError::InvalidJson { file: file.to_owned(), reason };
        let root = json::parse(bytes).map_err(|error| json::error(file, &error))?;
        if !root.is_object() {
            return Err(invalid("the text is not an object".to_owned()));
        }
        // `dim` is the flat spelling's hidden size; no other configuration of this family has it at the top.
        let spelling = match root.get("dim").is_some() && root.get("text_config").is_none() {
            true => Spelling::Flat,
            false => Spelling::Nested,
        };
        Ok(Config { file: file.to_owned(), spelling, root })
    }

    pub fn file(&self) -> &str {
        &self.file
    }

    pub fn spelling(&self) -> Spelling {
        self.spelling
    }

    /// The value at a path of `config.json`'s spelling. `null` counts as absent.
    pub fn get(&self, path: &str) -> Option<Field<'_>> {
        match self.spelling {
            Spelling::Nested => {
                let (value, key) = match self.walk(path) {
                    Some(value) => (value, path),
                    // Some re-exports put the text model's keys at the top.
                    None if self.root.get("text_config").is_none() => {
                        let short = path.strip_prefix("text_config.")?;
                        (self.walk(short)?, short)
                    }
                    None => return None,
                };
                Some(Field { key: key.to_owned(), value })
            }
            Spelling::Flat => {
                let names = flat_names(path);
                names.iter().find_map(|name| {
                    let value = self.root.get(*name).filter(|value| !value.is_null())?;
                    Some(Field { key: (*name).to_owned(), value })
                })
            }
        }
    }

    /// How this file would spell `path`, for errors about a missing key.
    pub fn key(&self, path: &str) -> String {
        match self.spelling {
            Spelling::Nested => path.to_owned(),
            Spelling::Flat => flat_names(path).first().map_or_else(|| path.to_owned(), |name| (*name).to_owned()),
        }
    }

    /// What stands where [`Config::get`] finds nothing.
    pub fn absence(&self, path: &str) -> &'static str {
        let is_null = match self.spelling {
            Spelling::Nested => {
                let short = path.strip_prefix("text_config.").filter(|_| self.root.get("text_config").is_none());
                [Some(path), short].into_iter().flatten().any(|path| self.raw(path).is_some())
            }
            Spelling::Flat => flat_names(path).iter().any(|name| self.root.get(*name).is_some()),
        };
        if is_null { "null" } else { "missing" }
    }

    fn walk(&self, path: &str) -> Option<&Value> {
        self.raw(path).filter(|value| !value.is_null())
    }

    fn raw(&self, path: &str) -> Option<&Value> {
        path.split('.').try_fold(&self.root, |value, part| value.get(part))
    }
}

/// The flat spellings of a path, the release's own first.
fn flat_names(path: &str) -> &[&str] {
    match FLAT.iter().find(|(nested, _)| *nested == path) {
        Some((_, names)) => names,
        None => &[],
    }
}

#[rustfmt::skip]
const FLAT: &[(&str, &[&str])] = &[
    ("bos_token_id", &["bos_token_id", "bos_id"]),
    ("eos_token_id", &["eos_token_id", "eos_id"]),
    ("pad_token_id", &["pad_token_id", "pad_id"]),
    ("image_token_id", &["image_token_id", "image_id"]),
    ("text_config.vocab_size", &["vocab_size"]),
    ("text_config.hidden_size", &["dim"]),
    ("text_config.num_hidden_layers", &["n_layers"]),
    ("text_config.num_attention_heads", &["n_heads"]),
    ("text_config.num_key_value_heads", &["n_kv_heads"]),
    ("text_config.head_dim", &["head_dim"]),
    ("text_config.qk_rope_head_dim", &["rope_head_dim"]),
    ("text_config.q_lora_rank", &["q_lora_rank"]),
    ("text_config.o_groups", &["o_groups"]),
    ("text_config.o_lora_rank", &["o_lora_rank"]),
    ("text_config.sliding_window", &["window_size"]),
    ("text_config.compress_ratios", &["compress_ratios"]),
    ("text_config.kv_source_layer_ids", &["kv_source_layers", "kv_source_layer_ids"]),
    ("text_config.index_source_layer_ids", &["index_source_layers", "index_source_layer_ids"]),
    ("text_config.index_n_heads", &["index_n_heads"]),
    ("text_config.index_head_dim", &["index_head_dim"]),
    ("text_config.index_topk", &["index_topk"]),
    ("text_config.candidate_source_layer_id", &["candidate_source_layer", "candidate_source_layer_id"]),
    ("text_config.candidate_topk_blocks", &["candidate_topk_blocks"]),
    ("text_config.candidate_block_size", &["candidate_block_size"]),
    ("text_config.rope_theta", &["rope_theta"]),
    ("text_config.compress_rope_theta", &["compress_rope_theta"]),
    ("text_config.rope_scaling.rope_type", &["rope_type"]),
    ("text_config.rope_scaling.factor", &["rope_factor"]),
    ("text_config.rope_scaling.beta_fast", &["beta_fast"]),
    ("text_config.rope_scaling.beta_slow", &["beta_slow"]),
    ("text_config.rope_scaling.original_max_position_embeddings", &["original_seq_len"]),
    ("text_config.max_position_embeddings", &["max_position_embeddings"]),
    ("text_config.moe_intermediate_size", &["moe_inter_dim"]),
    ("text_config.n_routed_experts", &["n_routed_experts"]),
    ("text_config.num_experts_per_tok", &["n_activated_experts"]),
    ("text_config.n_shared_experts", &["n_shared_experts"]),
    ("text_config.scoring_func", &["score_func"]),
    ("text_config.topk_method", &["topk_method"]),
    ("text_config.norm_topk_prob", &["norm_topk_prob"]),
    ("text_config.routed_scaling_factor", &["route_scale"]),
    ("text_config.swiglu_limit", &["swiglu_limit"]),
    ("text_config.rms_norm_eps", &["norm_eps"]),
    ("text_config.hidden_act", &["hidden_act"]),
    ("text_config.attention_bias", &["attention_bias"]),
    ("text_config.mlp_bias", &["mlp_bias"]),
    ("text_config.n_group", &["n_expert_groups"]),
    ("text_config.topk_group", &["n_limited_groups"]),
    ("text_config.first_k_dense_replace", &["n_dense_layers"]),
    ("text_config.num_hash_layers", &["n_hash_layers"]),
    ("text_config.tie_word_embeddings", &["tie_word_embeddings"]),
    ("quantization_config.scale_fmt", &["scale_fmt"]),
    ("quantization_config.expert_dtype", &["expert_dtype"]),
    ("text_config.hc_mult", &["hc_mult"]),
    ("text_config.hc_sinkhorn_iters", &["hc_sinkhorn_iters"]),
    ("text_config.hc_eps", &["hc_eps"]),
    ("text_config.engram_layer_ids", &["engram_layer_ids", "engram_layers"]),
    ("text_config.engram_num_embeddings", &["engram_num_embeddings"]),
    ("text_config.engram_max_ngram_size", &["engram_max_ngram_size"]),
    ("text_config.engram_n_heads", &["engram_n_heads"]),
    ("text_config.engram_head_dim", &["engram_head_dim"]),
    ("text_config.engram_vocab_size", &["engram_vocab_size"]),
    ("text_config.engram_pad_token_id", &["engram_pad_id", "engram_pad_token_id"]),
    ("text_config.engram_compressed_vocab_size", &["engram_compressed_vocab_size"]),
    ("text_config.num_nextn_predict_layers", &["n_mtp_layers"]),
    ("text_config.dspark_block_size", &["dspark_block_size"]),
    ("text_config.dspark_noise_token_id", &["dspark_noise_token_id", "dspark_noise_id"]),
    ("text_config.dspark_target_layer_ids", &["dspark_target_layer_ids", "dspark_target_layers"]),
    ("text_config.dspark_markov_rank", &["dspark_markov_rank"]),
    ("text_config.dspark_n_routed_experts", &["dspark_n_routed_experts"]),
    ("text_config.dspark_num_experts_per_tok", &["dspark_n_activated_experts"]),
    ("vision_config.num_hidden_layers", &["vision_n_layers"]),
    ("vision_config.hidden_size", &["vision_dim"]),
    ("vision_config.num_attention_heads", &["vision_n_heads"]),
    ("vision_config.intermediate_size", &["vision_inter_dim"]),
    ("vision_config.patch_size", &["vision_patch_size"]),
    ("vision_config.rope_theta", &["vision_rope_theta"]),
    ("vision_config.downsample_ratio", &["vision_downsample_ratio"]),
    ("vision_config.max_image_tokens", &["vision_max_n_token"]),
    ("vision_config.min_pixels", &["vision_min_pixels"]),
    ("vision_config.max_wh_ratio", &["vision_max_wh_ratio"]),
];

/// Sampling defaults of a checkpoint; each is absent where the file doesn't say.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// `false` asks for argmax.
    pub do_sample: Option<bool>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<u64>,
    pub min_p: Option<f64>,
    pub max_new_tokens: Option<u64>,
}

impl GenerationConfig {
    /// Reads `generation_config.json`. Unknown keys are left alone; a known key of the wrong type is an error.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<GenerationConfig, CheckpointError> {
        let config = Config::parse(file, bytes)?;
        let number = |key: &str, least: f64, most: f64| match config.root.get(key).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) if (least..=most).contains(&number) => Ok(Some(number)),
                _ => Err(wrong(file, key, value, &format!("a number from {least} to {most}"))),
            },
        };
        let count = |key: &str| match config.root.get(key).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => value.as_u64().map(Some).ok_or_else(|| wrong(file, key, value, "a whole number, 0 or more")),
        };
        let do_sample = match config.root.get("do_sample").filter(|value| !value.is_null()) {
            None => None,
            Some(value) => Some(value.as_bool().ok_or_else(|| wrong(file, "do_sample", value, "true or false"))?),
        };
        Ok(GenerationConfig {
            do_sample,
            temperature: number("temperature", 0.0, 100.0)?,
            top_p: number("top_p", 0.0, 1.0)?,
            top_k: count("top_k")?,
            min_p: number("min_p", 0.0, 1.0)?,
            max_new_tokens: count("max_new_tokens")?,
        })
    }
}

fn wrong(file: &str, key: &str, value: &Value, expected: &str) -> CheckpointError {
    CheckpointError::InvalidJson { file: file.to_owned(), reason: format!("{key} is {value}, expected {expected}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_answer_the_same_names() {
        let nested =
            br#"{"model_type": "deepseek_v41", "text_config": {"hidden_size": 128, "rope_scaling": {"factor": 16}},
            "vision_config": {"num_hidden_layers": 2, "max_wh_ratio": null}}"#;
        let flat = br#"{"dim": 128, "rope_factor": 16, "vision_n_layers": 2}"#;
        let top = br#"{"hidden_size": 128, "rope_scaling": {"factor": 16}, "vision_config": {"num_hidden_layers": 2}}"#;
        for (text, spelling, keys) in [
            (&nested[..], Spelling::Nested, ["text_config.hidden_size", "text_config.rope_scaling.factor"]),
            (&flat[..], Spelling::Flat, ["dim", "rope_factor"]),
            (&top[..], Spelling::Nested, ["hidden_size", "rope_scaling.factor"]),
        ] {
            let config = Config::parse("config.json", text).unwrap();
            assert_eq!(config.spelling(), spelling);
            let size = config.get("text_config.hidden_size").unwrap();
            assert_eq!((size.key.as_str(), size.value.as_u64()), (keys[0], Some(128)));
            let factor = config.get("text_config.rope_scaling.factor").unwrap();
            assert_eq!((factor.key.as_str(), factor.value.as_u64()), (keys[1], Some(16)));
            assert_eq!(config.get("vision_config.num_hidden_layers").unwrap().value.as_u64(), Some(2));
            assert!(config.get("vision_config.max_wh_ratio").is_none(), "null is absent");
            assert!(config.get("text_config.vocab_size").is_none());
            assert_eq!(config.absence("text_config.vocab_size"), "missing");
        }
    }

    #[test]
    fn a_value_that_is_null_is_not_called_missing() {
        for text in
            [r#"{"text_config": {"vocab_size": null}}"#, r#"{"vocab_size": null}"#, r#"{"dim": 1, "vocab_size": null}"#]
        {
            let config = Config::parse("config.json", text.as_bytes()).unwrap();
            assert!(config.get("text_config.vocab_size").is_none());
            assert_eq!(config.absence("text_config.vocab_size"), "null", "{text}");
            assert_eq!(config.absence("text_config.head_dim"), "missing", "{text}");
        }
    }

    #[test]
    fn broken_configurations_are_named() {
        for (text, part) in [
            ("[]", "not an object"),
            ("{", "it ends at line 1, column 1"),
            ("null", "not an object"),
            (r#"{"dim": 1, "dim": 2}"#, "appears twice"),
        ] {
            let error = Config::parse("inference/config.json", text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("inference/config.json") && error.contains(part), "{error}");
        }
    }

    #[test]
    fn generation_defaults_keep_their_types() {
        let text = br#"{"do_sample": false, "temperature": 1.0, "top_p": 0.95, "top_k": null, "eos_token_id": 1}"#;
        let read = GenerationConfig::parse("generation_config.json", text).unwrap();
        let expected = GenerationConfig {
            do_sample: Some(false),
            temperature: Some(1.0),
            top_p: Some(0.95),
            ..GenerationConfig::default()
        };
        assert_eq!(read, expected);
        for text in [r#"{"temperature": "1"}"#, r#"{"top_p": 1.5}"#, r#"{"top_k": -1}"#, r#"{"do_sample": 1}"#] {
            assert!(GenerationConfig::parse("generation_config.json", text.as_bytes()).is_err(), "{text}");
        }
    }
}
