//! Weights without a checkpoint: some layers of a shape with random values, for measurements and laws on real dimensions.
//!
//! Every tensor repeats a random period whose length is no multiple of its rows, and layers of one kind are copies of each
//! other in memory of their own: what counts is that every weight has its own address. Scales keep activations near 1.
//! No value is NaN. Says nothing about the quality of any text.

use std::borrow::Cow;
use std::ops::Range;

use tf_device::{Buffer, Device, Element, LaunchError};
use tf_kernels::draft_head::pack as markov;
use tf_kernels::pack::PackError;
use tf_kernels::{linear_bf16, linear_fp8, moe_experts};
use tf_numerics::bf16;

use super::engram::{EngramError, EngramHash, buckets};
use super::engram_rows::EngramTables;
use super::load::{Attention, Compressor, Draft, Engram, Hyper, IndexKeys, Indexer, Layer, Router, Weights};
use super::shape::{BLOCK, Shape};

/// Why layers can't be cut out of a shape or filled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RandomError {
    #[error("layers {first}..{end} are not layers of a model of {layers}")]
    Layers { first: usize, end: usize, layers: usize },
    #[error(
        "layer {layer} reads what layer {source_layer} writes, which is not among the layers from {first} on: begin there"
    )]
    Source { layer: usize, source_layer: usize, first: usize },
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error(transparent)]
    Device(#[from] LaunchError),
    #[error(transparent)]
    Engram(#[from] EngramError),
}

/// Bucket counts of a cut n-gram table begin here: the pattern of the accesses is what a measurement needs.
const ENGRAM_BUCKETS: u64 = 1 << 14;

/// The layers `layers` of `shape` as a model of their own: sources, n-gram layers and the pattern of ratios are kept, the
/// draft head taps the last layers, n-gram tables are small and there is no image tower.
///
/// # Errors
/// [`RandomError::Layers`] for layers that aren't there, [`RandomError::Source`] when one reads another's entries or
/// selection that lies before the first.
pub fn cut(shape: &Shape, layers: Range<usize>) -> Result<Shape, RandomError> {
    let (first, end, count) = (layers.start, layers.end, layers.len());
    if count == 0 || end > shape.num_hidden_layers {
        return Err(RandomError::Layers { first, end, layers: shape.num_hidden_layers });
    }
    for layer in layers.clone() {
        for source in [shape.kv_source(layer), shape.index_source(layer)].into_iter().flatten() {
            if source < first {
                return Err(RandomError::Source { layer, source_layer: source, first });
            }
        }
    }
    let kept = |ids: &[usize]| -> Cow<'static, [usize]> {
        ids.iter().filter(|id| layers.contains(id)).map(|id| id - first).collect::<Vec<_>>().into()
    };
    let mut ratios = shape.compress_ratios[layers.clone()].to_vec();
    ratios.extend_from_slice(&shape.compress_ratios[shape.num_hidden_layers..]);
    let taps = shape.dspark_target_layer_ids.len();
    let mut cut = Shape {
        num_hidden_layers: count,
        compress_ratios: ratios.into(),
        kv_source_layer_ids: kept(&shape.kv_source_layer_ids),
        index_source_layer_ids: kept(&shape.index_source_layer_ids),
        candidate_source_layer_id: shape
            .candidate_source_layer_id
            .filter(|id| layers.contains(id))
            .map(|id| id - first),
        engram_layer_ids: kept(&shape.engram_layer_ids),
        engram_vocab_size: shape.engram_vocab_size.min(ENGRAM_BUCKETS),
        // With fewer layers than taps the draft head would read a layer twice.
        dspark_target_layer_ids: (count.saturating_sub(taps)..count).collect::<Vec<_>>().into(),
        image_token_id: None,
        vision: None,
        ..shape.clone()
    };
    cut.engram_num_embeddings = buckets(&cut).iter().map(|layer| layer.rows).collect::<Vec<_>>().into();
    Ok(cut)
}

/// A token map of the right size for [`EngramHash::new`]: ids folded by remainder.
///
/// # Errors
/// [`RandomError::Engram`] when the shape's counts disagree.
pub fn hash(shape: &Shape) -> Result<EngramHash, RandomError> {
    let folded = shape.engram_compressed_vocab_size as u32;
    Ok(EngramHash::new(shape, (0..shape.vocab_size as u32).map(|id| id % folded).collect())?)
}

/// Random weights of every tensor of `shape` on `device`.
///
/// # Errors
/// [`RandomError::Device`] or [`RandomError::Pack`] when the device has no room.
pub fn weights(shape: &Shape, device: &Device, seed: u64) -> Result<Weights, RandomError> {
    let maker = Maker { device, shape, seed };
    let mut layers: Vec<Layer> = Vec::with_capacity(shape.num_hidden_layers);
    for index in 0..shape.num_hidden_layers {
        let kind = maker.kind(index);
        let alike = (0..index).find(|other| maker.kind(*other) == kind);
        let layer = match alike {
            Some(other) => duplicate(&layers[other])?,
            None => maker.layer(kind, shape.n_routed_experts)?,
        };
        layers.push(layer);
    }
    let mut blocks: Vec<Layer> = Vec::with_capacity(shape.num_nextn_predict_layers);
    for _ in 0..shape.num_nextn_predict_layers {
        let block = match blocks.first() {
            Some(block) => duplicate(block)?,
            None => maker.layer(Kind::default(), shape.dspark_n_routed_experts)?,
        };
        blocks.push(block);
    }
    let table = |rows: &u64| {
        let values = *rows as usize * shape.engram_head_dim;
        [maker.codes(values), maker.scales(values / BLOCK, FP8_EXPONENT + 6)]
    };
    Ok(Weights {
        embed: maker.bf16_table(shape.vocab_size, shape.hidden_size, 1.0)?,
        norm: maker.ones(shape.hidden_size)?,
        head: maker.bf16(shape.vocab_size, shape.hidden_size)?,
        layers,
        draft: maker.draft(blocks)?,
        engram: EngramTables::Owned(shape.engram_num_embeddings.iter().map(table).collect()),
        device: device.clone(),
    })
}

/// Exponents of the scales at which a sum over some thousand products of random codes is about 1.
const FP8_EXPONENT: i32 = -13;
const FP4_EXPONENT: i32 = -8;
/// Experts of a layer that are packed; the others are copies of them.
const DISTINCT_EXPERTS: usize = 4;
/// Length of the random period: a prime, so that no two rows of a tensor are alike.
const PERIOD: usize = 1_000_003;

/// What a layer has besides attention and experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Kind {
    /// Ratio of a kv source.
    source: Option<usize>,
    is_index_source: bool,
    engram: Option<usize>,
}

/// `count` values: the period, again and again.
fn again<T: Copy>(period: &[T], count: usize) -> Vec<T> {
    let mut values = Vec::with_capacity(count);
    while values.len() < count {
        values.extend_from_slice(&period[..period.len().min(count - values.len())]);
    }
    values
}

struct Maker<'a> {
    device: &'a Device,
    shape: &'a Shape,
    seed: u64,
}

impl Maker<'_> {
    fn kind(&self, layer: usize) -> Kind {
        let shape = self.shape;
        Kind {
            source: shape.is_kv_source(layer).then(|| shape.ratio(layer)),
            is_index_source: shape.is_index_source(layer),
            engram: shape.engram_index(layer),
        }
    }

    /// `count` bytes: one period of random words, again and again.
    fn bytes(&self, count: usize, of: impl Fn(u64) -> u8) -> Vec<u8> {
        let mut state = self.seed | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            of(state >> 32)
        };
        let period: Vec<u8> = (0..count.min(PERIOD)).map(|_| next()).collect();
        again(&period, count)
    }

    /// E4M3 codes without the two that are NaN.
    fn codes(&self, count: usize) -> Vec<u8> {
        self.bytes(count, |word| if word as u8 & 0x7f == 0x7f { word as u8 ^ 1 } else { word as u8 })
    }

    /// E8M0 codes of two to the `exponent`, give or take one.
    fn scales(&self, count: usize, exponent: i32) -> Vec<u8> {
        self.bytes(count, |word| (127 + exponent + (word % 3) as i32 - 1) as u8)
    }

    /// bf16 bits, uniform in (-most, most).
    fn bf16_bits(&self, count: usize, most: f32) -> Vec<u16> {
        let bytes = self.bytes(count.min(PERIOD) * 2, |word| word as u8);
        let value = |pair: &[u8; 2]| bf16::from_f32(f32::from(i16::from_le_bytes(*pair)) / 32_768.0 * most);
        let period: Vec<u16> = bytes.as_chunks().0.iter().map(value).collect();
        again(&period, count)
    }

    fn fp8(&self, rows: usize, columns: usize) -> Result<linear_fp8::Weights, RandomError> {
        let scales = self.scales(rows.div_ceil(BLOCK) * columns.div_ceil(BLOCK), FP8_EXPONENT);
        Ok(linear_fp8::Weights::pack(self.device, &self.codes(rows * columns), &scales, rows, columns)?)
    }

    fn bf16(&self, rows: usize, columns: usize) -> Result<linear_bf16::Weights, RandomError> {
        // The sum over a row has a variance of a third of the largest square times its length.
        let most = (3.0 / columns as f32).sqrt();
        let count = rows * columns;
        let period = self.bf16_bits(count.min(PERIOD), most);
        let bytes = again(&period.into_iter().flat_map(u16::to_le_bytes).collect::<Vec<u8>>(), count * 2);
        Ok(linear_bf16::Weights::pack(self.device, &bytes, linear_bf16::Dtype::Bf16, rows, columns)?)
    }

    fn place<T: Element>(&self, values: &[T]) -> Result<Buffer, RandomError> {
        Ok(Buffer::from_slice(self.device, values)?)
    }

    fn bf16_table(&self, rows: usize, columns: usize, most: f32) -> Result<Buffer, RandomError> {
        self.place(&self.bf16_bits(rows * columns, most))
    }

    fn f32(&self, count: usize, most: f32) -> Result<Buffer, RandomError> {
        let values: Vec<f32> = self.bf16_bits(count, most).into_iter().map(bf16::to_f32).collect();
        self.place(&values)
    }

    fn ones(&self, count: usize) -> Result<Buffer, RandomError> {
        self.place(&vec![1.0_f32; count])
    }

    fn hyper(&self) -> Result<Hyper, RandomError> {
        let (mixes, width) = (self.shape.hc_mix_count(), self.shape.stream_width());
        Ok(Hyper {
            function: self.f32(mixes * width, (3.0 / width as f32).sqrt())?,
            base: self.f32(mixes, 0.5)?,
            scale: self.ones(3)?,
        })
    }

    fn layer(&self, kind: Kind, experts: usize) -> Result<Layer, RandomError> {
        let shape = self.shape;
        let (hidden, head_dim) = (shape.hidden_size, shape.head_dim);
        let compressor = match kind.source {
            Some(ratio) => Some(Compressor {
                raw: self.bf16(ratio.min(2) * head_dim, hidden)?,
                norm: self.ones(head_dim)?,
                keys: IndexKeys {
                    wk: self.bf16(shape.index_head_dim, head_dim)?,
                    norm: self.ones(shape.index_head_dim)?,
                },
            }),
            None => None,
        };
        let indexer = match kind.is_index_source {
            true => Some(Indexer {
                wq_b: self.fp8(shape.index_n_heads * shape.index_head_dim, shape.q_lora_rank)?,
                weights_proj: self.bf16(shape.index_n_heads, hidden)?,
            }),
            false => None,
        };
        let engram = match kind.engram {
            Some(index) => Some(Engram {
                index,
                wkv: self.fp8((shape.hc_mult + 1) * hidden, shape.engram_width())?,
                q_weight: self.ones(shape.stream_width())?,
                k_weight: self.ones(shape.stream_width())?,
            }),
            None => None,
        };
        Ok(Layer {
            attn_norm: self.ones(hidden)?,
            ffn_norm: self.ones(hidden)?,
            hc_attn: self.hyper()?,
            hc_ffn: self.hyper()?,
            attention: self.attention()?,
            compressor,
            indexer,
            router: Router {
                gate: self.bf16(experts, hidden)?,
                bias: self.place(&vec![0.0_f32; experts])?,
                bias_image: None,
            },
            experts: self.experts(experts)?,
            engram,
        })
    }

    fn attention(&self) -> Result<Attention, RandomError> {
        let shape = self.shape;
        let (hidden, low) = (shape.hidden_size, shape.o_groups * shape.o_lora_rank);
        Ok(Attention {
            wq_a: self.fp8(shape.q_lora_rank, hidden)?,
            q_norm: self.ones(shape.q_lora_rank)?,
            wq_b: self.fp8(shape.query_width(), shape.q_lora_rank)?,
            wkv: self.fp8(shape.head_dim, hidden)?,
            kv_norm: self.ones(shape.head_dim)?,
            sinks: self.place(&vec![0.0_f32; shape.num_attention_heads])?,
            wo_a: self.fp8(low, shape.group_width())?,
            wo_b: self.fp8(hidden, low)?,
        })
    }

    fn experts(&self, count: usize) -> Result<moe_experts::Weights, RandomError> {
        let (hidden, inner) = (self.shape.hidden_size, self.shape.moe_intermediate_size);
        let mut distinct = Vec::new();
        for expert in 0..count.min(DISTINCT_EXPERTS) {
            let own = Maker { seed: self.seed ^ (expert as u64 + 1) << 32, ..*self };
            let weight = own.bytes(hidden * inner / 2, |word| word as u8);
            let scale = own.scales(hidden * inner / BLOCK, FP4_EXPONENT);
            let bytes = moe_experts::ExpertBytes {
                w1: &weight,
                w1_scale: &scale,
                w3: &weight,
                w3_scale: &scale,
                w2: &weight,
                w2_scale: &scale,
            };
            distinct.push(moe_experts::Expert::pack(self.device, bytes, hidden, inner)?);
        }
        let (w1, w3, w2) = (self.fp8(inner, hidden)?, self.fp8(inner, hidden)?, self.fp8(hidden, inner)?);
        Ok(moe_experts::Weights::repeated(distinct, count, moe_experts::Shared { w1, w3, w2 })?)
    }

    fn draft(&self, blocks: Vec<Layer>) -> Result<Draft, RandomError> {
        let shape = self.shape;
        let (vocabulary, rank) = (shape.vocab_size, shape.dspark_markov_rank);
        let mut head = vec![0; markov::packed_len(vocabulary, rank)];
        markov::pack(&self.bf16_bits(vocabulary * rank, 0.1), vocabulary, rank, &mut head);
        Ok(Draft {
            blocks,
            main_proj: self.fp8(shape.hidden_size, shape.tap_width())?,
            main_norm: self.ones(shape.hidden_size)?,
            norm: self.ones(shape.hidden_size)?,
            markov_embed: self.bf16_table(vocabulary, rank, 1.0)?,
            markov_head: self.place(&head)?,
            confidence: self.f32(shape.hidden_size + rank, 0.01)?,
        })
    }
}

fn hyper_again(hyper: &Hyper) -> Result<Hyper, LaunchError> {
    Ok(Hyper { function: hyper.function.duplicate()?, base: hyper.base.duplicate()?, scale: hyper.scale.duplicate()? })
}

/// The same layer in memory of its own.
fn duplicate(layer: &Layer) -> Result<Layer, LaunchError> {
    let Attention { wq_a, q_norm, wq_b, wkv, kv_norm, sinks, wo_a, wo_b } = &layer.attention;
    let compressor = match &layer.compressor {
        Some(Compressor { raw, norm, keys }) => Some(Compressor {
            raw: raw.duplicate()?,
            norm: norm.duplicate()?,
            keys: IndexKeys { wk: keys.wk.duplicate()?, norm: keys.norm.duplicate()? },
        }),
        None => None,
    };
    let indexer = match &layer.indexer {
        Some(Indexer { wq_b, weights_proj }) => {
            Some(Indexer { wq_b: wq_b.duplicate()?, weights_proj: weights_proj.duplicate()? })
        }
        None => None,
    };
    let engram = match &layer.engram {
        Some(Engram { index, wkv, q_weight, k_weight }) => Some(Engram {
            index: *index,
            wkv: wkv.duplicate()?,
            q_weight: q_weight.duplicate()?,
            k_weight: k_weight.duplicate()?,
        }),
        None => None,
    };
    Ok(Layer {
        attn_norm: layer.attn_norm.duplicate()?,
        ffn_norm: layer.ffn_norm.duplicate()?,
        hc_attn: hyper_again(&layer.hc_attn)?,
        hc_ffn: hyper_again(&layer.hc_ffn)?,
        attention: Attention {
            wq_a: wq_a.duplicate()?,
            q_norm: q_norm.duplicate()?,
            wq_b: wq_b.duplicate()?,
            wkv: wkv.duplicate()?,
            kv_norm: kv_norm.duplicate()?,
            sinks: sinks.duplicate()?,
            wo_a: wo_a.duplicate()?,
            wo_b: wo_b.duplicate()?,
        },
        compressor,
        indexer,
        router: Router { gate: layer.router.gate.duplicate()?, bias: layer.router.bias.duplicate()?, bias_image: None },
        experts: layer.experts.duplicate()?,
        engram,
    })
}

#[cfg(test)]
mod tests {
    use super::super::laws::{Extent, LAWS, Subject};
    use super::super::shape::FLASH;
    use super::super::{Fault, Options};
    use super::*;

    #[test]
    fn a_cut_keeps_the_roles_of_its_layers() {
        let late = cut(&FLASH, 20..36).unwrap();
        assert_eq!(late.num_hidden_layers, 16);
        assert_eq!((&*late.kv_source_layer_ids, &*late.index_source_layer_ids), (&[0][..], &[0, 4, 8, 12][..]));
        assert_eq!((late.candidate_source_layer_id, late.engram_layer_ids.len()), (Some(0), 0));
        assert_eq!(late.compress_ratios[..], [vec![1; 16], vec![0; 3]].concat());
        assert_eq!(late.dspark_target_layer_ids[..], [13, 14, 15]);
        let early = cut(&FLASH, 0..9).unwrap();
        assert_eq!((&*early.kv_source_layer_ids, &*early.engram_layer_ids), (&[2, 8][..], &[1][..]));
        assert_eq!(early.engram_num_embeddings.len(), 1);
        assert!(early.engram_num_embeddings[0] < 1 << 19);
        assert_eq!(early.candidate_source_layer_id, None);
        assert_eq!(cut(&FLASH, 0..1).unwrap().dspark_target_layer_ids[..], [0]);
    }

    #[test]
    fn layers_without_their_source_are_refused() {
        let error = cut(&FLASH, 21..30).unwrap_err();
        assert_eq!(error, RandomError::Source { layer: 21, source_layer: 20, first: 21 });
        assert_eq!(cut(&FLASH, 30..41).unwrap_err(), RandomError::Layers { first: 30, end: 41, layers: 40 });
        assert!(cut(&FLASH, 5..5).is_err());
    }

    /// The release's pattern with small sizes.
    fn small() -> Shape {
        Shape {
            vocab_size: 384,
            hidden_size: 128,
            num_attention_heads: 4,
            head_dim: 64,
            qk_rope_head_dim: 32,
            q_lora_rank: 64,
            o_groups: 2,
            o_lora_rank: 32,
            sliding_window: 16,
            index_n_heads: 2,
            index_head_dim: 64,
            index_topk: 8,
            candidate_topk_blocks: 8,
            candidate_block_size: 2,
            moe_intermediate_size: 64,
            n_routed_experts: 12,
            num_experts_per_tok: 3,
            engram_head_dim: 32,
            engram_vocab_size: 97,
            engram_compressed_vocab_size: 200,
            dspark_noise_token_id: 383,
            dspark_markov_rank: 32,
            dspark_n_routed_experts: 6,
            ..FLASH
        }
    }

    #[test]
    fn random_layers_are_a_model_for_which_the_laws_hold() {
        for layers in [0..9, 20..29] {
            let shape = cut(&small(), layers.clone()).unwrap();
            let weights = weights(&shape, &Device::cpu(), 7).unwrap();
            assert_eq!(weights.layers.len(), 9);
            assert_eq!(weights.layers[1].experts.experts().len(), 12);
            let hash = hash(&shape).unwrap();
            let tokens: Vec<u32> = (0..200).map(|index| index * 37 % 384).collect();
            let mut subject = Subject::new(shape, weights, hash, Options::default(), &tokens).unwrap();
            subject.extent = Extent::Quick;
            // The last of the early layers is a source, which skips no row.
            let titles = ["any split = whole", "a row in company = the row alone", "the halo skips rows and no bits"];
            for title in &titles[..if layers.start == 0 { 2 } else { 3 }] {
                let law = LAWS.iter().find(|law| law.title == *title).unwrap();
                (law.run)(&subject, Fault::None).unwrap_or_else(|error| panic!("{layers:?}: {title}: {error}"));
                assert!((law.run)(&subject, *law.faults.last().unwrap()).is_err(), "{layers:?}: {title} can't fail");
            }
        }
    }

    #[test]
    fn tensors_hold_no_code_that_is_not_a_number_and_no_row_twice() {
        let shape = small();
        let maker = Maker { device: &Device::cpu(), shape: &shape, seed: 3 };
        let codes = maker.codes(PERIOD + 5000);
        assert!(codes.iter().all(|code| code & 0x7f != 0x7f));
        assert_eq!(codes[..5000], codes[PERIOD..], "the period comes again");
        let rows: std::collections::HashSet<&[u8]> = codes.chunks_exact(640).collect();
        assert_eq!(rows.len(), codes.len() / 640);
        let scales = maker.scales(1000, FP8_EXPONENT);
        assert!(scales.iter().all(|scale| (113..=115).contains(scale)), "two to the -13, give or take one");
    }
}
