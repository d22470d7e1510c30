//! The tensors of the reference model, fetched by name and checked against the dimensions.

use std::collections::HashMap;

use tf_kernels::moe_experts::reference::Expert;

use super::{Dimensions, ReferenceError, Tensor};

/// All tensors of the text path.
pub struct Weights {
    pub embed: Vec<f64>,
    pub norm: Vec<f64>,
    pub head: Vec<f64>,
    pub layers: Vec<Block>,
    /// Engram layer to its tensors.
    pub engrams: HashMap<usize, Engram>,
    pub draft_blocks: Vec<Block>,
    pub draft: Draft,
}

/// The tensors of the draft that belong to no block.
pub struct Draft {
    pub main_proj: Vec<f64>,
    pub main_norm: Vec<f64>,
    pub norm: Vec<f64>,
    pub markov_embed: Vec<f64>,
    pub markov_head: Vec<f64>,
    pub confidence: Vec<f64>,
}

/// One layer, or one draft block.
pub struct Block {
    pub attn_norm: Vec<f64>,
    pub ffn_norm: Vec<f64>,
    pub hc_attn: Hyper,
    pub hc_ffn: Hyper,
    pub attention: Attention,
    pub moe: Moe,
}

/// The tensors that make the mixes of one sublayer.
pub struct Hyper {
    pub weight: Vec<f64>,
    pub base: Vec<f64>,
    pub scale: Vec<f64>,
}

pub struct Attention {
    pub wq_a: Vec<f64>,
    pub q_norm: Vec<f64>,
    pub wq_b: Vec<f64>,
    pub wkv: Vec<f64>,
    pub kv_norm: Vec<f64>,
    pub sinks: Vec<f64>,
    pub wo_a: Vec<f64>,
    pub wo_b: Vec<f64>,
    /// In the sources of compressed entries.
    pub compressor: Option<Compressor>,
    /// In the sources of selections.
    pub indexer: Option<Indexer>,
}

pub struct Compressor {
    pub wkv: Vec<f64>,
    /// At ratios above 1.
    pub wgate: Option<Vec<f64>>,
    pub norm: Vec<f64>,
    pub index_wk: Vec<f64>,
    pub index_norm: Vec<f64>,
}

pub struct Indexer {
    pub wq_b: Vec<f64>,
    pub weights_proj: Vec<f64>,
}

pub struct Moe {
    pub gate: Vec<f64>,
    pub bias: Vec<f64>,
    pub experts: Vec<Expert>,
    pub shared: Expert,
    /// Experts a row visits.
    pub count: usize,
}

pub struct Engram {
    pub table: Vec<f64>,
    pub wkv: Vec<f64>,
    pub q_weight: Vec<f64>,
    pub k_weight: Vec<f64>,
}

struct Fetch<'a>(&'a mut dyn FnMut(&str) -> Result<Tensor, String>);

impl Fetch<'_> {
    fn get(&mut self, name: &str, expected: &[usize]) -> Result<Vec<f64>, ReferenceError> {
        let (found, values) =
            (self.0)(name).map_err(|reason| ReferenceError::Tensor { name: name.to_string(), reason })?;
        if found != expected || values.len() != expected.iter().product::<usize>() {
            return Err(ReferenceError::Shape { name: name.to_string(), found, expected: expected.to_vec() });
        }
        Ok(values)
    }
}

impl Weights {
    pub(super) fn load(
        d: &Dimensions,
        fetch: &mut dyn FnMut(&str) -> Result<Tensor, String>,
    ) -> Result<Weights, ReferenceError> {
        let f = &mut Fetch(fetch);
        let (columns, vocabulary) = (d.hidden_size, d.vocab_size);
        let layers = (0..d.num_hidden_layers).map(|layer| Block::load(d, f, &format!("layers.{layer}"), Some(layer)));
        let layers = layers.collect::<Result<_, _>>()?;
        let draft_blocks = (0..d.num_nextn_predict_layers).map(|i| Block::load(d, f, &format!("mtp.{i}"), None));
        let draft_blocks = draft_blocks.collect::<Result<_, _>>()?;
        let mut engrams = HashMap::new();
        for (&layer, &rows) in d.engram_layer_ids.iter().zip(&d.engram_num_embeddings) {
            let name = format!("layers.{layer}.engram");
            let table_columns = (d.engram_max_ngram_size - 1) * d.engram_n_heads * d.engram_head_dim;
            let engram = Engram {
                table: f.get(&format!("{name}.embed.weight"), &[rows, d.engram_head_dim])?,
                wkv: f.get(&format!("{name}.wkv.weight"), &[(d.hc_mult + 1) * columns, table_columns])?,
                q_weight: f.get(&format!("{name}.q_weight"), &[d.hc_mult, columns])?,
                k_weight: f.get(&format!("{name}.k_weight"), &[d.hc_mult, columns])?,
            };
            engrams.insert(layer, engram);
        }
        let (last, rank) = (d.num_nextn_predict_layers.saturating_sub(1), d.dspark_markov_rank);
        let draft = Draft {
            main_proj: f.get("mtp.0.main_proj.weight", &[columns, d.dspark_target_layer_ids.len() * columns])?,
            main_norm: f.get("mtp.0.main_norm.weight", &[columns])?,
            norm: f.get(&format!("mtp.{last}.norm.weight"), &[columns])?,
            markov_embed: f.get(&format!("mtp.{last}.markov_head.embed.weight"), &[vocabulary, rank])?,
            markov_head: f.get(&format!("mtp.{last}.markov_head.head.weight"), &[vocabulary, rank])?,
            confidence: f.get(&format!("mtp.{last}.confidence_head.proj.weight"), &[1, columns + rank])?,
        };
        Ok(Weights {
            embed: f.get("embed.weight", &[vocabulary, columns])?,
            norm: f.get("norm.weight", &[columns])?,
            head: f.get("head.weight", &[vocabulary, columns])?,
            layers,
            engrams,
            draft_blocks,
            draft,
        })
    }
}

impl Block {
    /// `layer` is `None` for a draft block.
    fn load(d: &Dimensions, f: &mut Fetch, name: &str, layer: Option<usize>) -> Result<Block, ReferenceError> {
        let (count, expert_count) = match layer {
            Some(_) => (d.num_experts_per_tok, d.n_routed_experts),
            None => (d.dspark_num_experts_per_tok, d.dspark_n_routed_experts),
        };
        Ok(Block {
            attn_norm: f.get(&format!("{name}.attn_norm.weight"), &[d.hidden_size])?,
            ffn_norm: f.get(&format!("{name}.ffn_norm.weight"), &[d.hidden_size])?,
            hc_attn: Hyper::load(d, f, &format!("{name}.hc_attn"))?,
            hc_ffn: Hyper::load(d, f, &format!("{name}.hc_ffn"))?,
            attention: Attention::load(d, f, &format!("{name}.attn"), layer)?,
            moe: Moe::load(d, f, &format!("{name}.ffn"), count, expert_count)?,
        })
    }
}

impl Hyper {
    fn load(d: &Dimensions, f: &mut Fetch, name: &str) -> Result<Hyper, ReferenceError> {
        let outputs = 2 * d.hc_mult + d.hc_mult * d.hc_mult;
        Ok(Hyper {
            weight: f.get(&format!("{name}_fn"), &[outputs, d.hc_mult * d.hidden_size])?,
            base: f.get(&format!("{name}_base"), &[outputs])?,
            scale: f.get(&format!("{name}_scale"), &[3])?,
        })
    }
}

impl Attention {
    fn load(d: &Dimensions, f: &mut Fetch, name: &str, layer: Option<usize>) -> Result<Attention, ReferenceError> {
        let (columns, rank, dim) = (d.hidden_size, d.q_lora_rank, d.head_dim);
        let width = d.num_attention_heads * dim;
        let mut linear =
            |part: &str, outputs: usize, inner: usize| f.get(&format!("{name}.{part}.weight"), &[outputs, inner]);
        let (wq_a, wq_b) = (linear("wq_a", rank, columns)?, linear("wq_b", width, rank)?);
        let wkv = linear("wkv", dim, columns)?;
        let wo_a = linear("wo_a", d.o_groups * d.o_lora_rank, width / d.o_groups)?;
        let wo_b = linear("wo_b", columns, d.o_groups * d.o_lora_rank)?;

        let is_source = |ids: &[usize]| layer.is_some_and(|layer| ids.contains(&layer));
        let compressor = match layer.filter(|_| is_source(&d.kv_source_layer_ids)) {
            None => None,
            Some(layer) => Some(Compressor {
                wkv: linear("compressor.wkv", dim, columns)?,
                wgate: (d.compress_ratios[layer] > 1).then(|| linear("compressor.wgate", dim, columns)).transpose()?,
                index_wk: linear("indexer.wk", d.index_head_dim, dim)?,
                norm: f.get(&format!("{name}.compressor.norm.weight"), &[dim])?,
                index_norm: f.get(&format!("{name}.indexer.k_norm.weight"), &[d.index_head_dim])?,
            }),
        };
        let indexer = match is_source(&d.index_source_layer_ids) {
            false => None,
            true => Some(Indexer {
                wq_b: f.get(&format!("{name}.indexer.wq_b.weight"), &[d.index_n_heads * d.index_head_dim, rank])?,
                weights_proj: f.get(&format!("{name}.indexer.weights_proj.weight"), &[d.index_n_heads, columns])?,
            }),
        };
        Ok(Attention {
            wq_a,
            wq_b,
            wkv,
            wo_a,
            wo_b,
            compressor,
            indexer,
            q_norm: f.get(&format!("{name}.q_norm.weight"), &[rank])?,
            kv_norm: f.get(&format!("{name}.kv_norm.weight"), &[dim])?,
            sinks: f.get(&format!("{name}.attn_sink"), &[d.num_attention_heads])?,
        })
    }
}

impl Moe {
    fn load(d: &Dimensions, f: &mut Fetch, name: &str, count: usize, experts: usize) -> Result<Moe, ReferenceError> {
        let (columns, inner) = (d.hidden_size, d.moe_intermediate_size);
        let mut expert = |name: String| -> Result<Expert, ReferenceError> {
            Ok(Expert {
                w1: f.get(&format!("{name}.w1.weight"), &[inner, columns])?,
                w2: f.get(&format!("{name}.w2.weight"), &[columns, inner])?,
                w3: f.get(&format!("{name}.w3.weight"), &[inner, columns])?,
            })
        };
        let shared = expert(format!("{name}.shared_experts"))?;
        let routed = (0..experts).map(|e| expert(format!("{name}.experts.{e}"))).collect::<Result<_, _>>()?;
        Ok(Moe {
            gate: f.get(&format!("{name}.gate.weight"), &[experts, columns])?,
            bias: f.get(&format!("{name}.gate.bias"), &[experts])?,
            experts: routed,
            shared,
            count,
        })
    }
}
