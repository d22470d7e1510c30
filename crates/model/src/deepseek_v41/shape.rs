//! The one checked configuration of a DeepSeek-V4.1 checkpoint: inner code gets a [`Shape`] and reads no file.
//!
//! Every field is read by name from either spelling of the configuration and checked against the family's rules and the
//! kernels' limits; all mistakes are reported at once. Field names are those of `config.json` (spec section 2).

use std::borrow::Cow;
use std::fmt;
use std::ops::RangeInclusive;

use serde_json::Value;
use tf_checkpoint::{Config, Spelling};
use tf_kernels::{draft_head, index_score, linear_fp8, moe_experts, moe_route, rope};

use super::engram;

/// FP8 tiles, QDQ8 blocks and MXFP4 blocks are this wide.
pub const BLOCK: usize = 32;

/// YaRN parameters of the compressed layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeScaling {
    pub factor: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub original_max_position_embeddings: usize,
}

/// The image tower; absent from a `Shape` where it has no layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Vision {
    pub num_hidden_layers: usize,
    pub hidden_size: usize,
    pub num_attention_heads: usize,
    pub intermediate_size: usize,
    pub patch_size: usize,
    pub rope_theta: f64,
    pub downsample_ratio: usize,
    pub max_image_tokens: usize,
    pub min_pixels: usize,
    pub max_wh_ratio: Option<f64>,
}

/// A checked configuration. Layer numbers count the backbone from 0; draft block `i` is layer `num_hidden_layers + i`
/// in `compress_ratios` only.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub bos_token_id: u32,
    pub eos_token_id: u32,
    pub pad_token_id: u32,
    /// Known where the checkpoint has an image tower.
    pub image_token_id: Option<u32>,
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Backbone only.
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub head_dim: usize,
    /// Rotated dimensions: the last ones of a head.
    pub qk_rope_head_dim: usize,
    pub q_lora_rank: usize,
    pub o_groups: usize,
    pub o_lora_rank: usize,
    /// Counts the current token.
    pub sliding_window: usize,
    /// One per layer, draft blocks included: 0 (window only), 1 or 2.
    pub compress_ratios: Cow<'static, [usize]>,
    pub kv_source_layer_ids: Cow<'static, [usize]>,
    pub index_source_layer_ids: Cow<'static, [usize]>,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    pub index_topk: usize,
    /// `None` where candidates are switched off.
    pub candidate_source_layer_id: Option<usize>,
    pub candidate_topk_blocks: usize,
    pub candidate_block_size: usize,
    pub rope_theta: f64,
    pub compress_rope_theta: f64,
    pub rope_scaling: RopeScaling,
    pub max_position_embeddings: usize,
    pub moe_intermediate_size: usize,
    pub n_routed_experts: usize,
    pub num_experts_per_tok: usize,
    pub routed_scaling_factor: f32,
    /// 0 is no clamp.
    pub swiglu_limit: f32,
    pub rms_norm_eps: f32,
    pub hc_mult: usize,
    pub hc_sinkhorn_iters: usize,
    pub hc_eps: f32,
    pub engram_layer_ids: Cow<'static, [usize]>,
    /// Table rows, one per Engram layer.
    pub engram_num_embeddings: Cow<'static, [u64]>,
    pub engram_max_ngram_size: usize,
    pub engram_n_heads: usize,
    pub engram_head_dim: usize,
    /// Every bucket count is a prime of at least this.
    pub engram_vocab_size: u64,
    /// A token id, folded before use.
    pub engram_pad_token_id: u32,
    pub engram_compressed_vocab_size: u64,
    /// Draft blocks.
    pub num_nextn_predict_layers: usize,
    pub dspark_block_size: usize,
    pub dspark_noise_token_id: u32,
    /// The streams entering these layers are the draft head's context.
    pub dspark_target_layer_ids: Cow<'static, [usize]>,
    pub dspark_markov_rank: usize,
    pub dspark_n_routed_experts: usize,
    pub dspark_num_experts_per_tok: usize,
    pub vision: Option<Vision>,
}

/// DeepSeek-V4.1-Flash as released (spec section 2).
pub const FLASH: Shape = Shape {
    bos_token_id: 0,
    eos_token_id: 1,
    pad_token_id: 2,
    image_token_id: Some(129_264),
    vocab_size: 129_280,
    hidden_size: 5120,
    num_hidden_layers: 40,
    num_attention_heads: 64,
    head_dim: 512,
    qk_rope_head_dim: 64,
    q_lora_rank: 1280,
    o_groups: 8,
    o_lora_rank: 1024,
    sliding_window: 128,
    compress_ratios: Cow::Borrowed(&FLASH_RATIOS),
    kv_source_layer_ids: Cow::Borrowed(&[2, 8, 14, 20]),
    index_source_layer_ids: Cow::Borrowed(&[2, 8, 14, 20, 24, 28, 32, 36]),
    index_n_heads: 32,
    index_head_dim: 128,
    index_topk: 512,
    candidate_source_layer_id: Some(20),
    candidate_topk_blocks: 2048,
    candidate_block_size: 8,
    rope_theta: 10_000.0,
    compress_rope_theta: 160_000.0,
    rope_scaling: RopeScaling {
        factor: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 65_536,
    },
    max_position_embeddings: 1_048_576,
    moe_intermediate_size: 2304,
    n_routed_experts: 384,
    num_experts_per_tok: 6,
    routed_scaling_factor: 1.5,
    swiglu_limit: 10.0,
    rms_norm_eps: 1e-20,
    hc_mult: 4,
    hc_sinkhorn_iters: 20,
    hc_eps: 1e-6,
    engram_layer_ids: Cow::Borrowed(&[1, 14]),
    engram_num_embeddings: Cow::Borrowed(&[384_006_168, 384_016_682]),
    engram_max_ngram_size: 4,
    engram_n_heads: 8,
    engram_head_dim: 256,
    engram_vocab_size: 16_000_000,
    engram_pad_token_id: 2,
    engram_compressed_vocab_size: 99_092,
    num_nextn_predict_layers: 3,
    dspark_block_size: 5,
    dspark_noise_token_id: 128_799,
    dspark_target_layer_ids: Cow::Borrowed(&[37, 38, 39]),
    dspark_markov_rank: 256,
    dspark_n_routed_experts: 128,
    dspark_num_experts_per_tok: 3,
    vision: Some(Vision {
        num_hidden_layers: 32,
        hidden_size: 1024,
        num_attention_heads: 16,
        intermediate_size: 2816,
        patch_size: 14,
        rope_theta: 10_000.0,
        downsample_ratio: 3,
        max_image_tokens: 1024,
        min_pixels: 295_936,
        max_wh_ratio: None,
    }),
};

const FLASH_RATIOS: [usize; 43] = {
    let mut ratios = [0; 43];
    let mut layer = 2;
    while layer < 40 {
        ratios[layer] = if layer < 20 { 2 } else { 1 };
        layer += 1;
    }
    ratios
};

/// One mistake in a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldProblem {
    /// As the file spells it.
    pub field: String,
    pub found: String,
    pub expected: String,
}

/// A configuration that this family can't have, with every mistake found in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ShapeError {
    pub file: String,
    pub problems: Vec<FieldProblem>,
}

impl ShapeError {
    /// The reasons one by one, for lists.
    pub fn reasons(&self) -> Vec<String> {
        let reason = |problem: &FieldProblem| {
            format!("{}: {} is {}, expected {}", self.file, problem.field, problem.found, problem.expected)
        };
        self.problems.iter().map(reason).collect()
    }
}

impl fmt::Display for ShapeError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.reasons().join("\n"))
    }
}

impl Shape {
    /// Reads and checks a configuration in either spelling.
    ///
    /// # Errors
    /// [`ShapeError`] with every field that is missing, of the wrong type, out of range, or at odds with another.
    pub fn from_config(config: &Config) -> Result<Shape, ShapeError> {
        let mut reader = Reader { config, problems: Vec::new() };
        let shape = reader.read();
        if reader.problems.is_empty() {
            reader.relate(&shape);
        }
        match reader.problems.is_empty() {
            true => Ok(shape),
            false => Err(ShapeError { file: config.file().to_owned(), problems: reader.problems }),
        }
    }

    /// The compression ratio of a backbone layer; 0 is window only.
    pub fn ratio(&self, layer: usize) -> usize {
        self.compress_ratios[layer]
    }

    /// The layer whose compressed entries and index keys `layer` reads. `None` at ratio 0.
    pub fn kv_source(&self, layer: usize) -> Option<usize> {
        self.source(&self.kv_source_layer_ids, layer)
    }

    /// The layer whose selection `layer` reads. `None` at ratio 0.
    pub fn index_source(&self, layer: usize) -> Option<usize> {
        self.source(&self.index_source_layer_ids, layer)
    }

    fn source(&self, sources: &[usize], layer: usize) -> Option<usize> {
        match self.ratio(layer) {
            0 => None,
            _ => sources.iter().copied().take_while(|source| *source <= layer).last(),
        }
    }

    pub fn is_kv_source(&self, layer: usize) -> bool {
        self.kv_source_layer_ids.contains(&layer)
    }

    pub fn is_index_source(&self, layer: usize) -> bool {
        self.index_source_layer_ids.contains(&layer)
    }

    /// Whether `layer` is an index source whose scores are masked by the candidates of an earlier one.
    pub fn masks_candidates(&self, layer: usize) -> bool {
        self.is_index_source(layer) && self.candidate_source_layer_id.is_some_and(|source| source < layer)
    }

    /// The index of `layer` among the Engram layers.
    pub fn engram_index(&self, layer: usize) -> Option<usize> {
        self.engram_layer_ids.iter().position(|id| *id == layer)
    }

    /// The index of `layer` among the draft head's taps.
    pub fn tap_index(&self, layer: usize) -> Option<usize> {
        self.dspark_target_layer_ids.iter().position(|id| *id == layer)
    }

    /// Compressed entries that exist after `positions` tokens at a layer's ratio: the complete groups.
    pub fn entries(&self, layer: usize, positions: usize) -> usize {
        match self.ratio(layer) {
            0 => 0,
            ratio => positions / ratio,
        }
    }

    /// `[num_attention_heads * head_dim]`, the width of all queries.
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// The input width of one group of `wo_a`.
    pub fn group_width(&self) -> usize {
        self.query_width() / self.o_groups
    }

    /// Output columns of a layer's hyper-connection function: pre, post and comb.
    pub fn hc_mix_count(&self) -> usize {
        (2 + self.hc_mult) * self.hc_mult
    }

    /// All streams of a token: `hc_mult * hidden_size`.
    pub fn stream_width(&self) -> usize {
        self.hc_mult * self.hidden_size
    }

    /// Engram rows that one token reads in one Engram layer.
    pub fn engram_columns(&self) -> usize {
        (self.engram_max_ngram_size - 1) * self.engram_n_heads
    }

    /// The concatenated Engram rows of a token.
    pub fn engram_width(&self) -> usize {
        self.engram_columns() * self.engram_head_dim
    }

    /// The concatenated taps of a token.
    pub fn tap_width(&self) -> usize {
        self.dspark_target_layer_ids.len() * self.hidden_size
    }

    /// Draft block and target together: rows of a verify window at most.
    pub fn window_rows_max(&self) -> usize {
        self.dspark_block_size + 1
    }
}

/// Reads fields and collects mistakes. A bad field yields a harmless value, so that reading goes on.
struct Reader<'a> {
    config: &'a Config,
    problems: Vec<FieldProblem>,
}

impl Reader<'_> {
    fn read(&mut self) -> Shape {
        self.fixed();
        let layers = self.bound("text_config.num_hidden_layers", 1..=1024);
        let drafts = self.count("text_config.num_nextn_predict_layers", 1..=16);
        let lengths = if self.problems.is_empty() { layers + drafts..=layers + drafts } else { 0..=usize::MAX };
        let vocab_size = self.bound("text_config.vocab_size", 1..=1 << 24);
        let rope_scaling = RopeScaling {
            factor: self.number("text_config.rope_scaling.factor", 1.0, 1e6),
            beta_fast: self.number("text_config.rope_scaling.beta_fast", 1e-3, 1e6),
            beta_slow: self.number("text_config.rope_scaling.beta_slow", 1e-3, 1e6),
            original_max_position_embeddings: self
                .count("text_config.rope_scaling.original_max_position_embeddings", 1..=1 << 24),
        };
        // The flat spelling has no such key: the scaled length is what the release states.
        let scaled = (rope_scaling.factor * rope_scaling.original_max_position_embeddings as f64) as usize;
        let positions = "text_config.max_position_embeddings";
        let max_position_embeddings =
            match self.config.spelling() == Spelling::Flat && self.config.get(positions).is_none() {
                true => scaled,
                false => self.count(positions, 1..=1 << 24),
            };
        let vision = self.vision();
        Shape {
            bos_token_id: self.token("bos_token_id", Some(0), vocab_size),
            eos_token_id: self.token("eos_token_id", Some(1), vocab_size),
            pad_token_id: self.token("pad_token_id", Some(2), vocab_size),
            image_token_id: match vision.is_some() || self.config.get("image_token_id").is_some() {
                true => Some(self.token("image_token_id", None, vocab_size)),
                false => None,
            },
            vocab_size,
            hidden_size: self.blocks("text_config.hidden_size", moe_experts::COLUMNS_MAX),
            num_hidden_layers: layers,
            num_attention_heads: self.count("text_config.num_attention_heads", 1..=1024),
            head_dim: self.blocks("text_config.head_dim", 4096),
            qk_rope_head_dim: self.even("text_config.qk_rope_head_dim", rope::ROPE_DIM_MAX),
            q_lora_rank: self.blocks("text_config.q_lora_rank", 1 << 16),
            o_groups: self.count("text_config.o_groups", 1..=1024),
            o_lora_rank: self.blocks("text_config.o_lora_rank", 1 << 16),
            sliding_window: self.count("text_config.sliding_window", 1..=4096),
            compress_ratios: self.list("text_config.compress_ratios", lengths, 0..=2),
            kv_source_layer_ids: self.ascending("text_config.kv_source_layer_ids", layers),
            index_source_layer_ids: self.ascending("text_config.index_source_layer_ids", layers),
            index_n_heads: self.count("text_config.index_n_heads", 1..=index_score::HEADS_MAX),
            index_head_dim: self.blocks("text_config.index_head_dim", index_score::HEAD_DIM_MAX),
            index_topk: self.count("text_config.index_topk", 1..=1 << 16),
            candidate_source_layer_id: self.candidate_source(layers),
            candidate_topk_blocks: self.count("text_config.candidate_topk_blocks", 1..=1 << 20),
            candidate_block_size: self.count("text_config.candidate_block_size", 1..=4096),
            rope_theta: self.number("text_config.rope_theta", 1.0, 1e12),
            compress_rope_theta: self.number("text_config.compress_rope_theta", 1.0, 1e12),
            rope_scaling,
            max_position_embeddings,
            moe_intermediate_size: self.blocks("text_config.moe_intermediate_size", moe_experts::COLUMNS_MAX),
            n_routed_experts: self.count("text_config.n_routed_experts", 1..=moe_route::EXPERTS_MAX),
            num_experts_per_tok: self.count("text_config.num_experts_per_tok", 1..=moe_route::TOP_K_MAX),
            routed_scaling_factor: self.number("text_config.routed_scaling_factor", 1e-6, 1e6) as f32,
            swiglu_limit: self.number("text_config.swiglu_limit", 0.0, 1e6) as f32,
            // Below the smallest normal float32 the eps would be lost.
            rms_norm_eps: self.number("text_config.rms_norm_eps", 1.2e-38, 1.0) as f32,
            hc_mult: self.count("text_config.hc_mult", 4..=4),
            hc_sinkhorn_iters: self.count("text_config.hc_sinkhorn_iters", 1..=1000),
            hc_eps: self.number("text_config.hc_eps", 1.2e-38, 1.0) as f32,
            engram_layer_ids: self.ascending("text_config.engram_layer_ids", layers),
            engram_num_embeddings: self.long_list("text_config.engram_num_embeddings"),
            engram_max_ngram_size: self.count("text_config.engram_max_ngram_size", 2..=8),
            engram_n_heads: self.count("text_config.engram_n_heads", 1..=64),
            engram_head_dim: self.blocks("text_config.engram_head_dim", 4096),
            engram_vocab_size: self.count("text_config.engram_vocab_size", 2..=1 << 30) as u64,
            engram_pad_token_id: self.token("text_config.engram_pad_token_id", None, vocab_size),
            engram_compressed_vocab_size: self.count("text_config.engram_compressed_vocab_size", 1..=vocab_size.max(1))
                as u64,
            num_nextn_predict_layers: drafts,
            dspark_block_size: self.count("text_config.dspark_block_size", 1..=64),
            dspark_noise_token_id: self.token("text_config.dspark_noise_token_id", None, vocab_size),
            dspark_target_layer_ids: self.ascending("text_config.dspark_target_layer_ids", layers),
            dspark_markov_rank: self.blocks("text_config.dspark_markov_rank", draft_head::RANK_MAX),
            dspark_n_routed_experts: self.count("text_config.dspark_n_routed_experts", 1..=moe_route::EXPERTS_MAX),
            dspark_num_experts_per_tok: self.count("text_config.dspark_num_experts_per_tok", 1..=moe_route::TOP_K_MAX),
            vision,
        }
    }

    /// Fields with one possible value: what the program does whatever the file says, so another value would be ignored. The
    /// flat spelling leaves most of them out.
    fn fixed(&mut self) {
        let required = self.config.spelling() == Spelling::Nested;
        for (path, expected) in [
            ("model_type", Value::from("deepseek_v41")),
            ("quantization_config.quant_method", "fp8".into()),
            ("quantization_config.weight_block_size", vec![BLOCK, BLOCK].into()),
            ("quantization_config.scale_fmt", "ue8m0".into()),
            ("quantization_config.expert_dtype", "fp4".into()),
            ("text_config.num_key_value_heads", 1.into()),
            ("text_config.hidden_act", "silu".into()),
            ("text_config.topk_method", "noaux_tc".into()),
            ("text_config.norm_topk_prob", true.into()),
            ("text_config.n_shared_experts", 1.into()),
            ("text_config.rope_scaling.rope_type", "yarn".into()),
        ] {
            self.one_value(path, required, &expected);
        }
        self.one_value("text_config.scoring_func", true, &"sqrtsoftplus".into());
        for (path, expected) in [
            ("architectures", Value::from(vec!["DeepseekV41ForCausalLM"])),
            ("dtype", "bfloat16".into()),
            ("torch_dtype", "bfloat16".into()),
            ("tie_word_embeddings", false.into()),
            ("quantization_config.activation_scheme", "dynamic".into()),
            ("quantization_config.fmt", "e4m3".into()),
            ("text_config.model_type", "deepseek_v41_text".into()),
            ("text_config.dtype", "bfloat16".into()),
            ("text_config.attention_bias", false.into()),
            ("text_config.mlp_bias", false.into()),
            ("text_config.tie_word_embeddings", false.into()),
            ("text_config.n_group", 1.into()),
            ("text_config.topk_group", 1.into()),
            ("text_config.moe_layer_freq", 1.into()),
            ("text_config.first_k_dense_replace", 0.into()),
            ("text_config.num_hash_layers", 0.into()),
            ("text_config.rope_scaling.attention_factor", 1.into()),
            ("text_config.rope_scaling.mscale_all_dim", 0.into()),
            ("vision_config.model_type", "deepseek_v41_vision".into()),
        ] {
            self.one_value(path, false, &expected);
        }
    }

    fn one_value(&mut self, path: &str, required: bool, expected: &Value) {
        // 1.0 is 1.
        let is_equal = |found: &Value| found == expected || found.is_number() && found.as_f64() == expected.as_f64();
        match self.config.get(path) {
            None if required => self.missing(path, expected.to_string()),
            Some(field) if !is_equal(field.value) => {
                let found = show(field.value);
                self.problem(field.key, found, expected.to_string());
            }
            _ => {}
        }
    }

    /// Rules between fields. Only run when every field is right by itself.
    fn relate(&mut self, shape: &Shape) {
        let layers = shape.num_hidden_layers;
        let config = self.config;
        let ratio_key = config.key("text_config.compress_ratios");
        let mut rule = |path: &str, holds: bool, found: String, expected: String| {
            if !holds {
                self.problem(config.key(path), found, expected);
            }
        };
        rule(
            "text_config.qk_rope_head_dim",
            shape.qk_rope_head_dim <= shape.head_dim && shape.qk_rope_head_dim <= shape.index_head_dim,
            shape.qk_rope_head_dim.to_string(),
            format!("at most head_dim {} and index_head_dim {}", shape.head_dim, shape.index_head_dim),
        );
        rule(
            "text_config.o_groups",
            shape.num_attention_heads.is_multiple_of(shape.o_groups),
            shape.o_groups.to_string(),
            format!("a divisor of num_attention_heads {}", shape.num_attention_heads),
        );
        for (path, used, all) in [
            ("text_config.num_experts_per_tok", shape.num_experts_per_tok, shape.n_routed_experts),
            ("text_config.dspark_num_experts_per_tok", shape.dspark_num_experts_per_tok, shape.dspark_n_routed_experts),
        ] {
            rule(path, used <= all, used.to_string(), format!("at most the {all} routed experts"));
        }
        for (path, width) in [
            ("text_config.o_lora_rank", shape.o_groups * shape.o_lora_rank),
            ("text_config.num_attention_heads", shape.group_width()),
            ("text_config.dspark_target_layer_ids", shape.tap_width()),
            ("text_config.engram_head_dim", shape.engram_width()),
        ] {
            let expected = format!("an input of at most {} columns", linear_fp8::COLUMNS_MAX);
            rule(path, width <= linear_fp8::COLUMNS_MAX, format!("an input of {width} columns"), expected);
        }
        for (block, ratio) in shape.compress_ratios[layers..].iter().enumerate() {
            let path = format!("{ratio_key}[{}]", layers + block);
            rule(&path, *ratio == 0, ratio.to_string(), "0: draft blocks keep a window only".to_owned());
        }
        for layer in 0..layers {
            let path = format!("{ratio_key}[{layer}]");
            let ratio = shape.ratio(layer);
            let last = |sources: &[usize]| sources.iter().copied().take_while(|source| *source <= layer).last();
            match (ratio, last(&shape.kv_source_layer_ids), last(&shape.index_source_layer_ids)) {
                (0, _, _) => {}
                (_, Some(source), Some(_)) => {
                    let expected = shape.ratio(source);
                    let text = format!("{expected}, the ratio of its kv source {source}");
                    rule(&path, ratio == expected, ratio.to_string(), text);
                }
                _ => {
                    let text = "0: no kv and index source at or before this layer".to_owned();
                    rule(&path, false, ratio.to_string(), text);
                }
            }
        }
        for (path, sources) in [
            ("text_config.kv_source_layer_ids", &shape.kv_source_layer_ids),
            ("text_config.index_source_layer_ids", &shape.index_source_layer_ids),
        ] {
            for source in sources.iter() {
                let text = "layers with a compression ratio above 0".to_owned();
                rule(path, shape.ratio(*source) > 0, source.to_string(), text);
            }
        }
        for source in shape.kv_source_layer_ids.iter() {
            // A selection names entries of one cache, so it must be renewed where the cache changes.
            let holds = shape.is_index_source(*source);
            let text = format!("a list with the kv source {source}");
            rule("text_config.index_source_layer_ids", holds, show_list(&shape.index_source_layer_ids), text);
        }
        if let Some(source) = shape.candidate_source_layer_id {
            rule(
                "text_config.candidate_source_layer_id",
                shape.is_index_source(source),
                source.to_string(),
                "an index source, or a negative number".to_owned(),
            );
            let kept = shape.candidate_topk_blocks * shape.candidate_block_size;
            rule(
                "text_config.candidate_topk_blocks",
                kept - (shape.candidate_block_size - 1) >= shape.index_topk,
                shape.candidate_topk_blocks.to_string(),
                format!(
                    "candidate_topk_blocks * candidate_block_size - (candidate_block_size - 1) of at least index_topk {}",
                    shape.index_topk
                ),
            );
            for layer in (source + 1..layers).filter(|layer| shape.is_index_source(*layer)) {
                let own = shape.kv_source(layer);
                let text = format!("a source whose cache the index source {layer} reads as well");
                let holds = own == shape.kv_source(source);
                rule("text_config.candidate_source_layer_id", holds, source.to_string(), text);
            }
        }
        rule(
            "text_config.engram_num_embeddings",
            shape.engram_num_embeddings.len() == shape.engram_layer_ids.len(),
            format!("a list of {}", shape.engram_num_embeddings.len()),
            format!("one row count for each of the {} Engram layers", shape.engram_layer_ids.len()),
        );
        for (index, buckets) in engram::buckets(shape).iter().enumerate() {
            let found = shape.engram_num_embeddings.get(index).copied().unwrap_or(buckets.rows);
            rule(
                "text_config.engram_num_embeddings",
                found == buckets.rows,
                found.to_string(),
                format!("{}, the sum of the bucket primes of layer {}", buckets.rows, shape.engram_layer_ids[index]),
            );
            // Row ids are 32-bit.
            rule(
                "text_config.engram_vocab_size",
                buckets.rows <= u64::from(u32::MAX),
                shape.engram_vocab_size.to_string(),
                format!("tables of at most {} rows", u32::MAX),
            );
        }
        if let Some(vision) = shape.vision {
            rule(
                "vision_config.num_attention_heads",
                vision.hidden_size.is_multiple_of(4 * vision.num_attention_heads),
                vision.num_attention_heads.to_string(),
                format!("heads of a multiple of 4 in hidden_size {}", vision.hidden_size),
            );
        }
    }

    fn vision(&mut self) -> Option<Vision> {
        let layers = "vision_config.num_hidden_layers";
        // A text-only export may leave the section out.
        self.config.get(layers)?;
        match self.count(layers, 0..=1024) {
            0 => None,
            num_hidden_layers => Some(Vision {
                num_hidden_layers,
                hidden_size: self.count("vision_config.hidden_size", 4..=1 << 16),
                num_attention_heads: self.count("vision_config.num_attention_heads", 1..=1024),
                intermediate_size: self.count("vision_config.intermediate_size", 1..=1 << 16),
                patch_size: self.count("vision_config.patch_size", 1..=256),
                rope_theta: match self.config.get("vision_config.rope_theta") {
                    None if self.config.spelling() == Spelling::Flat => 10_000.0,
                    _ => self.number("vision_config.rope_theta", 1.0, 1e12),
                },
                downsample_ratio: self.count("vision_config.downsample_ratio", 1..=16),
                max_image_tokens: self.count("vision_config.max_image_tokens", 4..=1 << 20),
                min_pixels: self.count("vision_config.min_pixels", 1..=1 << 30),
                max_wh_ratio: {
                    let path = "vision_config.max_wh_ratio";
                    self.config.get(path).is_some().then(|| self.number(path, 1.0, 1e6))
                },
            }),
        }
    }

    fn problem(&mut self, field: String, found: String, expected: String) {
        self.problems.push(FieldProblem { field, found, expected });
    }

    fn missing(&mut self, path: &str, expected: String) {
        self.problem(self.config.key(path), self.config.absence(path).to_owned(), expected);
    }

    /// The value at `path` as `convert` reads it, or a problem and `None`.
    fn value<T>(&mut self, path: &str, expected: &str, convert: impl FnOnce(&Value) -> Option<T>) -> Option<T> {
        match self.config.get(path) {
            None => {
                self.missing(path, expected.to_owned());
                None
            }
            Some(field) => {
                let read = convert(field.value);
                if read.is_none() {
                    self.problem(field.key, show(field.value), expected.to_owned());
                }
                read
            }
        }
    }

    /// A count that others are compared with: a bad one is large, so that it leads to no further mistakes.
    fn bound(&mut self, path: &str, range: RangeInclusive<usize>) -> usize {
        let (before, most) = (self.problems.len(), *range.end());
        let count = self.count(path, range);
        if self.problems.len() > before { most } else { count }
    }

    fn count(&mut self, path: &str, range: RangeInclusive<usize>) -> usize {
        let expected = match range.start() == range.end() {
            true => range.start().to_string(),
            false => format!("a whole number from {} to {}", range.start(), range.end()),
        };
        let read = |value: &Value| as_count(value).filter(|count| range.contains(count));
        self.value(path, &expected, read).unwrap_or(*range.start())
    }

    /// A dimension that kernels cut into blocks of 32.
    fn blocks(&mut self, path: &str, most: usize) -> usize {
        let expected = format!("a multiple of {BLOCK} from {BLOCK} to {most}");
        let fits = |count: &usize| (BLOCK..=most).contains(count) && count.is_multiple_of(BLOCK);
        self.value(path, &expected, |value| as_count(value).filter(fits)).unwrap_or(BLOCK)
    }

    fn even(&mut self, path: &str, most: usize) -> usize {
        let expected = format!("an even number from 2 to {most}");
        let fits = |count: &usize| (2..=most).contains(count) && count.is_multiple_of(2);
        self.value(path, &expected, |value| as_count(value).filter(fits)).unwrap_or(2)
    }

    fn number(&mut self, path: &str, least: f64, most: f64) -> f64 {
        let expected = format!("a number from {least} to {most}");
        let read = |value: &Value| value.as_f64().filter(|number| (least..=most).contains(number));
        self.value(path, &expected, read).unwrap_or(least)
    }

    /// A token id. With a `default`, the flat spelling may leave it out.
    fn token(&mut self, path: &str, default: Option<u32>, vocab_size: usize) -> u32 {
        if let (Some(default), Spelling::Flat, None) = (default, self.config.spelling(), self.config.get(path)) {
            return default;
        }
        let expected = format!("a token id below {vocab_size}");
        let read = |value: &Value| as_count(value).filter(|id| *id < vocab_size).and_then(|id| u32::try_from(id).ok());
        self.value(path, &expected, read).unwrap_or(0)
    }

    fn list(
        &mut self,
        path: &str,
        length: RangeInclusive<usize>,
        item: RangeInclusive<usize>,
    ) -> Cow<'static, [usize]> {
        let expected = match length.start() == length.end() {
            true => format!("a list of {} numbers from {} to {}", length.start(), item.start(), item.end()),
            false => format!("a list of numbers from {} to {}", item.start(), item.end()),
        };
        let read = |value: &Value| {
            let items = value.as_array().filter(|items| length.contains(&items.len()))?;
            items.iter().map(|value| as_count(value).filter(|count| item.contains(count))).collect::<Option<Vec<_>>>()
        };
        Cow::Owned(self.value(path, &expected, read).unwrap_or_default())
    }

    /// Layer numbers, each larger than the one before; at least one.
    fn ascending(&mut self, path: &str, layers: usize) -> Cow<'static, [usize]> {
        let expected = format!("a list of ascending layer numbers below {layers}");
        let read = |value: &Value| {
            let items = value.as_array().filter(|items| !items.is_empty())?;
            let ids = items.iter().map(as_count).collect::<Option<Vec<_>>>()?;
            let fits = ids.iter().all(|id| *id < layers) && ids.windows(2).all(|pair| pair[0] < pair[1]);
            fits.then_some(ids)
        };
        Cow::Owned(self.value(path, &expected, read).unwrap_or_default())
    }

    fn long_list(&mut self, path: &str) -> Cow<'static, [u64]> {
        let read = |value: &Value| value.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<_>>>();
        Cow::Owned(self.value(path, "a list of row counts", read).unwrap_or_default())
    }

    fn candidate_source(&mut self, layers: usize) -> Option<usize> {
        let expected = format!("a layer number below {layers}, or a negative number");
        let read = |value: &Value| value.as_i64().filter(|id| *id < layers as i64);
        let id = self.value("text_config.candidate_source_layer_id", &expected, read)?;
        usize::try_from(id).ok()
    }
}

fn as_count(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|count| usize::try_from(count).ok())
}

/// A value for an error line: short, whatever the file holds.
fn show(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

fn show_list(list: &[usize]) -> String {
    format!("{list:?}")
}

#[cfg(test)]
mod tests;
