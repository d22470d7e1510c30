//! The whole model in float64, composed of the kernels' definitions: what every backend is compared with.
//!
//! Reads like the architecture notes, section by section, one row after the other; keeps every position's state, so it can
//! be cut back anywhere. Shares nothing with the model that serves: not its loader, its caches or its kernels.

mod draft;
mod forward;
mod record;
mod stored;
mod weights;

use std::collections::HashMap;

use tf_kernels::engram::reference::{self as engram, Hash};
use tf_kernels::numerics_policy::Numerics;
use tf_kernels::rope::reference::{Yarn, frequencies};

pub use draft::{Draft, DraftState};
pub use forward::{Forward, LayerState, State};
pub use record::Record;
pub use stored::{Stored, dequantise};
pub use weights::{Attention, Block, Compressor, Draft as DraftWeights, Engram, Hyper, Indexer, Moe, Weights};

/// A tensor as the reference wants it: its shape and its dequantised values, row-major.
pub type Tensor = (Vec<usize>, Vec<f64>);

/// Why a reference model cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError {
    #[error("config.json: text_config.{key} is missing or is not {expected}. Use a DeepSeek-V4.1 configuration.")]
    Config { key: &'static str, expected: &'static str },
    #[error(
        "tensor {name} has shape {found:?}, this configuration needs {expected:?}. Check that they belong together."
    )]
    Shape { name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("tensor {name} could not be read: {reason}")]
    Tensor { name: String, reason: String },
    #[error(
        "the token map has {found} entries, the vocabulary has {expected}. Derive it from this checkpoint's tokenizer."
    )]
    TokenMap { found: usize, expected: usize },
}

/// The numbers of a configuration, under the names of `text_config`.
#[derive(Clone, Debug)]
pub struct Dimensions {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub q_lora_rank: usize,
    pub o_groups: usize,
    pub o_lora_rank: usize,
    pub sliding_window: usize,
    pub compress_ratios: Vec<usize>,
    pub kv_source_layer_ids: Vec<usize>,
    pub index_source_layer_ids: Vec<usize>,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    pub index_topk: usize,
    /// `None` switches candidates off.
    pub candidate_source_layer_id: Option<usize>,
    pub candidate_topk_blocks: usize,
    pub candidate_block_size: usize,
    pub rope_theta: f64,
    pub compress_rope_theta: f64,
    pub rope_scaling: Yarn,
    pub moe_intermediate_size: usize,
    pub n_routed_experts: usize,
    pub num_experts_per_tok: usize,
    pub routed_scaling_factor: f64,
    pub swiglu_limit: f64,
    pub rms_norm_eps: f64,
    pub hc_mult: usize,
    pub hc_sinkhorn_iters: usize,
    pub hc_eps: f64,
    pub engram_layer_ids: Vec<usize>,
    pub engram_num_embeddings: Vec<usize>,
    pub engram_max_ngram_size: usize,
    pub engram_n_heads: usize,
    pub engram_head_dim: usize,
    pub engram_vocab_size: u64,
    pub engram_pad_token_id: usize,
    pub engram_compressed_vocab_size: u64,
    pub num_nextn_predict_layers: usize,
    pub dspark_block_size: usize,
    pub dspark_noise_token_id: u32,
    pub dspark_target_layer_ids: Vec<usize>,
    pub dspark_markov_rank: usize,
    pub dspark_n_routed_experts: usize,
    pub dspark_num_experts_per_tok: usize,
}

impl Dimensions {
    /// Reads them from a parsed `config.json`.
    ///
    /// # Errors
    /// [`ReferenceError::Config`] for the first key that is missing or of the wrong kind. Their consistency is not checked.
    pub fn from_config(config: &serde_json::Value) -> Result<Dimensions, ReferenceError> {
        let text = &config["text_config"];
        let whole = |key: &'static str| -> Result<usize, ReferenceError> {
            let value = text[key].as_u64().and_then(|value| usize::try_from(value).ok());
            value.ok_or(ReferenceError::Config { key, expected: "a whole number" })
        };
        let number = |key: &'static str| -> Result<f64, ReferenceError> {
            text[key].as_f64().ok_or(ReferenceError::Config { key, expected: "a number" })
        };
        let list = |key: &'static str| -> Result<Vec<usize>, ReferenceError> {
            let values = text[key].as_array().and_then(|values| {
                values.iter().map(|value| value.as_u64().and_then(|value| usize::try_from(value).ok())).collect()
            });
            values.ok_or(ReferenceError::Config { key, expected: "a list of whole numbers" })
        };
        let scaling = |key: &'static str| -> Result<f64, ReferenceError> {
            text["rope_scaling"][key].as_f64().ok_or(ReferenceError::Config { key, expected: "a number" })
        };
        Ok(Dimensions {
            vocab_size: whole("vocab_size")?,
            hidden_size: whole("hidden_size")?,
            num_hidden_layers: whole("num_hidden_layers")?,
            num_attention_heads: whole("num_attention_heads")?,
            head_dim: whole("head_dim")?,
            qk_rope_head_dim: whole("qk_rope_head_dim")?,
            q_lora_rank: whole("q_lora_rank")?,
            o_groups: whole("o_groups")?,
            o_lora_rank: whole("o_lora_rank")?,
            sliding_window: whole("sliding_window")?,
            compress_ratios: list("compress_ratios")?,
            kv_source_layer_ids: list("kv_source_layer_ids")?,
            index_source_layer_ids: list("index_source_layer_ids")?,
            index_n_heads: whole("index_n_heads")?,
            index_head_dim: whole("index_head_dim")?,
            index_topk: whole("index_topk")?,
            candidate_source_layer_id: whole("candidate_source_layer_id").ok(),
            candidate_topk_blocks: whole("candidate_topk_blocks")?,
            candidate_block_size: whole("candidate_block_size")?,
            rope_theta: number("rope_theta")?,
            compress_rope_theta: number("compress_rope_theta")?,
            rope_scaling: Yarn {
                factor: scaling("factor")? as f32,
                beta_fast: scaling("beta_fast")?,
                beta_slow: scaling("beta_slow")?,
                original_positions: scaling("original_max_position_embeddings")?,
            },
            moe_intermediate_size: whole("moe_intermediate_size")?,
            n_routed_experts: whole("n_routed_experts")?,
            num_experts_per_tok: whole("num_experts_per_tok")?,
            routed_scaling_factor: number("routed_scaling_factor")?,
            swiglu_limit: number("swiglu_limit")?,
            rms_norm_eps: number("rms_norm_eps")?,
            hc_mult: whole("hc_mult")?,
            hc_sinkhorn_iters: whole("hc_sinkhorn_iters")?,
            hc_eps: number("hc_eps")?,
            engram_layer_ids: list("engram_layer_ids")?,
            engram_num_embeddings: list("engram_num_embeddings")?,
            engram_max_ngram_size: whole("engram_max_ngram_size")?,
            engram_n_heads: whole("engram_n_heads")?,
            engram_head_dim: whole("engram_head_dim")?,
            engram_vocab_size: whole("engram_vocab_size")? as u64,
            engram_pad_token_id: whole("engram_pad_token_id")?,
            engram_compressed_vocab_size: whole("engram_compressed_vocab_size")? as u64,
            num_nextn_predict_layers: whole("num_nextn_predict_layers")?,
            dspark_block_size: whole("dspark_block_size")?,
            dspark_noise_token_id: whole("dspark_noise_token_id")? as u32,
            dspark_target_layer_ids: list("dspark_target_layer_ids")?,
            dspark_markov_rank: whole("dspark_markov_rank")?,
            dspark_n_routed_experts: whole("dspark_n_routed_experts")?,
            dspark_num_experts_per_tok: whole("dspark_num_experts_per_tok")?,
        })
    }

    /// The layer whose compressed entries layer `layer` reads. `None` when it has no long-range cache.
    pub fn kv_source(&self, layer: usize) -> Option<usize> {
        self.source(&self.kv_source_layer_ids, layer)
    }

    /// The layer whose selection layer `layer` uses. `None` when it has no long-range cache.
    pub fn index_source(&self, layer: usize) -> Option<usize> {
        self.source(&self.index_source_layer_ids, layer)
    }

    fn source(&self, ids: &[usize], layer: usize) -> Option<usize> {
        let has_cache = self.compress_ratios[layer] > 0;
        ids.iter().copied().filter(|&source| source <= layer && has_cache).max()
    }
}

/// A loaded reference model.
pub struct Model {
    pub dimensions: Dimensions,
    pub weights: Weights,
    pub numerics: Numerics,
    /// Token id to compressed id.
    token_map: Vec<u32>,
    /// Engram layer to hash.
    hashes: HashMap<usize, Hash>,
    frequencies_plain: Vec<f32>,
    frequencies_compressed: Vec<f32>,
}

impl Model {
    /// Loads the model. `fetch` returns a tensor by its whole name, dequantised as [`dequantise`] does.
    ///
    /// # Errors
    /// Whatever `fetch` reports, and shapes that do not fit the dimensions.
    pub fn load(
        dimensions: Dimensions,
        numerics: Numerics,
        token_map: Vec<u32>,
        fetch: &mut dyn FnMut(&str) -> Result<Tensor, String>,
    ) -> Result<Model, ReferenceError> {
        if token_map.len() != dimensions.vocab_size {
            return Err(ReferenceError::TokenMap { found: token_map.len(), expected: dimensions.vocab_size });
        }
        let hashes = engram::hashes(
            &dimensions.engram_layer_ids,
            dimensions.engram_compressed_vocab_size,
            dimensions.engram_vocab_size,
            dimensions.engram_max_ngram_size,
            dimensions.engram_n_heads,
        );
        let rope_dim = dimensions.qk_rope_head_dim;
        Ok(Model {
            weights: Weights::load(&dimensions, fetch)?,
            hashes: dimensions.engram_layer_ids.iter().copied().zip(hashes).collect(),
            frequencies_plain: frequencies(dimensions.rope_theta, rope_dim, None),
            frequencies_compressed: frequencies(
                dimensions.compress_rope_theta,
                rope_dim,
                Some(dimensions.rope_scaling),
            ),
            dimensions,
            numerics,
            token_map,
        })
    }

    /// The RoPE frequencies of a backbone layer.
    pub fn frequencies(&self, layer: usize) -> &[f32] {
        if self.dimensions.compress_ratios[layer] > 0 { &self.frequencies_compressed } else { &self.frequencies_plain }
    }
}
