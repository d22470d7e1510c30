//! Packs a checkpoint's tensors into the kernels' own layouts: the one place where files become weights.
//!
//! Layers are packed side by side by several threads; every tensor is read once, in file order within its layer. The
//! n-gram tables are not packed: their rows are read where the file is mapped. A scale or a value that is not a number is
//! refused with its tensor's name, so that no such value reaches a launch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use tf_checkpoint::{Checkpoint, Dtype, View};
use tf_device::gpu::Backend;
use tf_device::{Buffer, Device, HostBytes, LaunchError};
use tf_kernels::draft_head::pack as markov;
use tf_kernels::pack::PackError;
use tf_kernels::{linear_bf16, linear_fp8, moe_experts};
use tf_numerics::bf16;

use super::engram_rows::{self, EngramPlace, EngramPlaceError, EngramTables};
use super::shape::Shape;
use super::weights::{self, BindError, Bound, Owner};

/// All weights of the text path, packed, and the n-gram tables.
#[derive(Debug)]
pub struct Weights {
    /// `[vocabulary, hidden]` bf16.
    pub embed: Buffer,
    /// `[hidden]` f32, as every norm below.
    pub norm: Buffer,
    pub head: linear_bf16::Weights,
    pub layers: Vec<Layer>,
    pub draft: Draft,
    pub(super) engram: EngramTables,
    pub(super) device: Device,
}

/// A backbone layer or a draft block.
#[derive(Debug)]
pub struct Layer {
    pub attn_norm: Buffer,
    pub ffn_norm: Buffer,
    pub hc_attn: Hyper,
    pub hc_ffn: Hyper,
    pub attention: Attention,
    /// Of a kv source.
    pub compressor: Option<Compressor>,
    /// Of an index source.
    pub indexer: Option<Indexer>,
    pub router: Router,
    pub experts: moe_experts::Weights,
    pub engram: Option<Engram>,
}

/// What makes the mixes of one sublayer; all f32.
#[derive(Debug)]
pub struct Hyper {
    /// `[24, 4 * hidden]`
    pub function: Buffer,
    /// `[24]`
    pub base: Buffer,
    /// `[3]`
    pub scale: Buffer,
}

#[derive(Debug)]
pub struct Attention {
    pub wq_a: linear_fp8::Weights,
    pub q_norm: Buffer,
    pub wq_b: linear_fp8::Weights,
    pub wkv: linear_fp8::Weights,
    pub kv_norm: Buffer,
    /// `[heads]` f32.
    pub sinks: Buffer,
    /// Row block `g` belongs to group `g`.
    pub wo_a: linear_fp8::Weights,
    pub wo_b: linear_fp8::Weights,
}

#[derive(Debug)]
pub struct Compressor {
    /// `[head_dim, hidden]`, and at ratio 2 the gate's rows below: the product is the raw row `[kv | score]`.
    pub raw: linear_bf16::Weights,
    pub norm: Buffer,
    pub keys: IndexKeys,
}

#[derive(Debug)]
pub struct IndexKeys {
    /// `[index_head_dim, head_dim]`
    pub wk: linear_bf16::Weights,
    pub norm: Buffer,
}

#[derive(Debug)]
pub struct Indexer {
    pub wq_b: linear_fp8::Weights,
    pub weights_proj: linear_bf16::Weights,
}

#[derive(Debug)]
pub struct Router {
    pub gate: linear_bf16::Weights,
    /// `[experts]` f32, as `bias_image`.
    pub bias: Buffer,
    /// Where the checkpoint has an image tower.
    pub bias_image: Option<Buffer>,
}

#[derive(Debug)]
pub struct Engram {
    /// Which of the tables this layer reads.
    pub index: usize,
    /// `[5 * hidden, engram width]`: a key for each stream, then the value.
    pub wkv: linear_fp8::Weights,
    /// `[4, hidden]` f32, as `k_weight`.
    pub q_weight: Buffer,
    pub k_weight: Buffer,
}

/// The draft blocks and what belongs to none of them.
#[derive(Debug)]
pub struct Draft {
    pub blocks: Vec<Layer>,
    /// `[hidden, taps * hidden]`
    pub main_proj: linear_fp8::Weights,
    pub main_norm: Buffer,
    pub norm: Buffer,
    /// `[vocabulary, rank]` bf16.
    pub markov_embed: Buffer,
    /// bf16, in blocks of 16 tokens.
    pub markov_head: Buffer,
    /// `[hidden + rank]` f32.
    pub confidence: Buffer,
}

/// How far loading is, in bytes of the checkpoint's packed tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    pub done_bytes: u64,
    pub total_bytes: u64,
}

/// Why a checkpoint gave no weights.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("{file}: {tensor}: {source}")]
    Pack { file: String, tensor: String, source: PackError },
    #[error(
        "{file}: {tensor} holds a scale that is not a number (byte {byte} is 255): the file is damaged or was \
         quantised from a tensor with overflows. Fetch it again"
    )]
    NanScale { file: String, tensor: String, byte: usize },
    #[error(
        "{file}: {tensor} holds {found} at element {element}, expected a finite number: the file is damaged. Fetch it \
         again"
    )]
    NotFinite { file: String, tensor: String, element: usize, found: f32 },
    #[error("{tensor}: {source}")]
    Device { tensor: String, source: LaunchError },
}

impl Weights {
    /// Binds `checkpoint` to `shape` and packs it for `device` with `threads` threads. `progress` hears every layer's
    /// end, from any of them.
    ///
    /// # Errors
    /// [`LoadError`] for a checkpoint that differs from the table, a value that is not a number, or a device without
    /// room.
    pub fn load(
        checkpoint: Arc<Checkpoint>,
        shape: &Shape,
        device: &Device,
        threads: usize,
        progress: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Weights, LoadError> {
        let bound = weights::bind(shape, &checkpoint)?;
        let packed = |owner| !matches!(owner, Owner::EngramTable | Owner::Vision);
        let tensors = weights::table(shape).into_iter().filter(|spec| packed(spec.owner));
        let total_bytes = tensors.map(|spec| bound.view(&spec.name).bytes.len() as u64).sum();
        let done_bytes = AtomicU64::new(0);
        let loader = Loader { bound, checkpoint: &checkpoint, shape, device, done_bytes, total_bytes, progress };

        let embed = loader.bf16("embed.weight")?;
        let norm = loader.f32("norm.weight")?;
        let head = loader.linear_bf16("head.weight")?;
        let mut layers = loader.layers(threads)?;
        let blocks = layers.split_off(shape.num_hidden_layers);
        let draft = loader.draft(blocks)?;
        let engram = EngramTables::Mapped { checkpoint, names: engram_rows::names(shape) };
        Ok(Weights { embed, norm, head, layers, draft, engram, device: device.clone() })
    }

    /// The same with the n-gram rows where `place` says.
    ///
    /// # Errors
    /// [`EngramPlaceError`] for rows that have no file, or no room.
    pub fn with_engram(mut self, place: EngramPlace, shape: &Shape) -> Result<Weights, EngramPlaceError> {
        self.engram = self.engram.placed(place, shape.engram_head_dim)?;
        Ok(self)
    }

    /// Where the packed weights are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes that the packed weights hold, by part.
    pub fn bytes(&self) -> WeightBytes {
        let mut bytes = WeightBytes {
            embedding: self.embed.len_bytes() as u64,
            head: self.head.bytes() as u64,
            ..WeightBytes::default()
        };
        bytes.dense += self.norm.len_bytes() as u64;
        for layer in &self.layers {
            bytes.dense += layer.dense_bytes();
            bytes.experts += layer.experts.bytes() as u64;
        }
        for block in &self.draft.blocks {
            bytes.draft += block.dense_bytes() + block.experts.bytes() as u64;
        }
        let draft = &self.draft;
        let buffers = [&draft.main_norm, &draft.norm, &draft.markov_embed, &draft.markov_head, &draft.confidence];
        bytes.draft += draft.main_proj.bytes() as u64 + sum_bytes(&buffers);
        bytes.engram = (0..self.engram.count()).map(|index| self.engram.table_bytes(index)).sum();
        bytes
    }
}

fn sum_bytes(buffers: &[&Buffer]) -> u64 {
    buffers.iter().map(|buffer| buffer.len_bytes() as u64).sum()
}

impl Hyper {
    fn bytes(&self) -> u64 {
        sum_bytes(&[&self.function, &self.base, &self.scale])
    }
}

impl Layer {
    /// Everything but the experts.
    pub(super) fn dense_bytes(&self) -> u64 {
        let attention = &self.attention;
        let linears = [&attention.wq_a, &attention.wq_b, &attention.wkv, &attention.wo_a, &attention.wo_b];
        let mut bytes: u64 = linears.iter().map(|weights| weights.bytes() as u64).sum();
        bytes += sum_bytes(&[&self.attn_norm, &self.ffn_norm, &attention.q_norm, &attention.kv_norm, &attention.sinks]);
        bytes += self.hc_attn.bytes() + self.hc_ffn.bytes();
        if let Some(compressor) = &self.compressor {
            let keys = &compressor.keys;
            bytes += (compressor.raw.bytes() + keys.wk.bytes()) as u64 + sum_bytes(&[&compressor.norm, &keys.norm]);
        }
        if let Some(indexer) = &self.indexer {
            bytes += (indexer.wq_b.bytes() + indexer.weights_proj.bytes()) as u64;
        }
        let router = &self.router;
        bytes += router.gate.bytes() as u64 + sum_bytes(&[&router.bias]);
        bytes += router.bias_image.as_ref().map_or(0, |bias| bias.len_bytes() as u64);
        if let Some(engram) = &self.engram {
            bytes += engram.wkv.bytes() as u64 + sum_bytes(&[&engram.q_weight, &engram.k_weight]);
        }
        bytes
    }
}

/// Bytes of the weights by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightBytes {
    pub embedding: u64,
    pub head: u64,
    /// Attention, compressors, indexers, routers, hyper-connections, norms.
    pub dense: u64,
    /// Routed and shared experts of the backbone.
    pub experts: u64,
    /// Draft blocks and draft head.
    pub draft: u64,
    /// The n-gram tables, wherever they lie.
    pub engram: u64,
}

impl WeightBytes {
    /// What is held in the device's memory: everything but the n-gram tables.
    pub fn resident(&self) -> u64 {
        self.embedding + self.head + self.dense + self.experts + self.draft
    }

    /// What [`Weights::load`] will hold for a shape, from the table alone.
    pub fn plan(shape: &Shape) -> WeightBytes {
        let mut bytes = WeightBytes::default();
        for spec in weights::table(shape) {
            let draft = spec.name.starts_with("mtp.");
            let packed = packed_bytes(&spec) as u64;
            let part = match spec.owner {
                _ if draft => &mut bytes.draft,
                Owner::Embed => &mut bytes.embedding,
                Owner::LmHead => &mut bytes.head,
                Owner::MoeExperts => &mut bytes.experts,
                Owner::EngramTable => &mut bytes.engram,
                _ => &mut bytes.dense,
            };
            *part += packed;
        }
        // An expert's six tensors are one buffer.
        let expert = moe_experts::Expert::bytes_for(shape.hidden_size, shape.moe_intermediate_size) as u64;
        bytes.experts += expert * (shape.num_hidden_layers * shape.n_routed_experts) as u64;
        bytes.draft += expert * (shape.num_nextn_predict_layers * shape.dspark_n_routed_experts) as u64;
        bytes
    }
}

/// Bytes of one tensor as it is held. Scales count with their weights, routed experts apart.
fn packed_bytes(spec: &weights::TensorSpec) -> usize {
    let count: usize = spec.shape.iter().product();
    match (spec.owner, spec.dtypes[0], &spec.shape[..]) {
        (Owner::Vision, _, _) | (Owner::MoeExperts, Dtype::I8, _) => 0,
        (Owner::EngramTable, dtype, _) => count * dtype.bytes(),
        (_, Dtype::F8E8M0, _) => 0,
        (_, Dtype::F8E4M3, &[rows, columns]) => linear_fp8::Weights::bytes_for(rows, columns),
        (Owner::LinearBf16 | Owner::LmHead, _, &[rows, columns]) => {
            linear_bf16::Weights::bytes_for(linear_bf16::Dtype::Bf16, rows, columns)
        }
        (Owner::Embed, _, _) => count * size_of::<u16>(),
        (Owner::DraftHead, _, &[vocabulary, rank]) if vocabulary > 1 => {
            let head = spec.name.ends_with("head.head.weight");
            size_of::<u16>() * if head { markov::packed_len(vocabulary, rank) } else { count }
        }
        _ => count * size_of::<f32>(),
    }
}

/// Packs tensors by name and counts their bytes.
struct Loader<'a> {
    bound: Bound<'a>,
    checkpoint: &'a Arc<Checkpoint>,
    shape: &'a Shape,
    device: &'a Device,
    done_bytes: AtomicU64,
    total_bytes: u64,
    progress: &'a (dyn Fn(LoadProgress) + Sync),
}

impl Loader<'_> {
    /// All backbone layers, then all draft blocks, packed by `threads` threads.
    fn layers(&self, threads: usize) -> Result<Vec<Layer>, LoadError> {
        let count = self.shape.num_hidden_layers + self.shape.num_nextn_predict_layers;
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            let mut packed = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count || failed.load(Ordering::Relaxed) {
                    return Ok(packed);
                }
                match self.layer(index) {
                    Ok(layer) => packed.push((index, layer)),
                    Err(error) => {
                        failed.store(true, Ordering::Relaxed);
                        return Err((index, error));
                    }
                }
                let done_bytes = self.done_bytes.load(Ordering::Relaxed);
                (self.progress)(LoadProgress { done_bytes, total_bytes: self.total_bytes });
            }
        };
        let results: Vec<_> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.clamp(1, count)).map(|_| scope.spawn(work)).collect();
            workers.into_iter().map(|worker| worker.join()).collect()
        });
        let (mut layers, mut errors) = (Vec::with_capacity(count), Vec::new());
        for result in results {
            match result {
                Ok(Ok(packed)) => layers.extend(packed),
                Ok(Err(error)) => errors.push(error),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        // Several threads may have failed; the first layer's error is the one to show, whoever was first.
        if let Some((_, error)) = errors.into_iter().min_by_key(|(index, _)| *index) {
            return Err(error);
        }
        layers.sort_by_key(|(index, _)| *index);
        Ok(layers.into_iter().map(|(_, layer)| layer).collect())
    }

    /// Layer `index`, counting draft blocks after the backbone.
    fn layer(&self, index: usize) -> Result<Layer, LoadError> {
        let shape = self.shape;
        let backbone = index < shape.num_hidden_layers;
        let (prefix, experts) = match backbone {
            true => (format!("layers.{index}."), shape.n_routed_experts),
            false => (format!("mtp.{}.", index - shape.num_hidden_layers), shape.dspark_n_routed_experts),
        };
        let fp8 = |stem: &str| self.linear_fp8(&format!("{prefix}{stem}"));
        let f32 = |name: &str| self.f32(&format!("{prefix}{name}"));
        let bf16 = |name: &str| self.linear_bf16(&format!("{prefix}{name}"));
        let hyper = |half: &str| {
            Ok::<_, LoadError>(Hyper {
                function: f32(&format!("hc_{half}_fn"))?,
                base: f32(&format!("hc_{half}_base"))?,
                scale: f32(&format!("hc_{half}_scale"))?,
            })
        };
        let compressor = match backbone && shape.is_kv_source(index) {
            true => {
                let stem = format!("{prefix}attn.compressor");
                let parts = [format!("{stem}.wkv.weight"), format!("{stem}.wgate.weight")];
                let parts = &parts[..shape.ratio(index).min(2)];
                Some(Compressor {
                    raw: self.stacked_bf16(parts)?,
                    norm: f32("attn.compressor.norm.weight")?,
                    keys: IndexKeys { wk: bf16("attn.indexer.wk.weight")?, norm: f32("attn.indexer.k_norm.weight")? },
                })
            }
            false => None,
        };
        let indexer = match backbone && shape.is_index_source(index) {
            true => Some(Indexer {
                wq_b: fp8("attn.indexer.wq_b")?,
                weights_proj: bf16("attn.indexer.weights_proj.weight")?,
            }),
            false => None,
        };
        let engram = match shape.engram_index(index).filter(|_| backbone) {
            Some(index) => Some(Engram {
                index,
                wkv: fp8("engram.wkv")?,
                q_weight: f32("engram.q_weight")?,
                k_weight: f32("engram.k_weight")?,
            }),
            None => None,
        };
        Ok(Layer {
            attn_norm: f32("attn_norm.weight")?,
            ffn_norm: f32("ffn_norm.weight")?,
            hc_attn: hyper("attn")?,
            hc_ffn: hyper("ffn")?,
            attention: Attention {
                wq_a: fp8("attn.wq_a")?,
                q_norm: f32("attn.q_norm.weight")?,
                wq_b: fp8("attn.wq_b")?,
                wkv: fp8("attn.wkv")?,
                kv_norm: f32("attn.kv_norm.weight")?,
                sinks: f32("attn.attn_sink")?,
                wo_a: fp8("attn.wo_a")?,
                wo_b: fp8("attn.wo_b")?,
            },
            compressor,
            indexer,
            router: Router {
                gate: bf16("ffn.gate.weight")?,
                bias: f32("ffn.gate.bias")?,
                bias_image: match shape.vision {
                    Some(_) => Some(f32("ffn.gate.bias_vl")?),
                    None => None,
                },
            },
            experts: self.experts(&prefix, experts)?,
            engram,
        })
    }

    fn experts(&self, prefix: &str, count: usize) -> Result<moe_experts::Weights, LoadError> {
        let (hidden, inner) = (self.shape.hidden_size, self.shape.moe_intermediate_size);
        let failed = |source| LoadError::Device { tensor: format!("{prefix}ffn.experts"), source };
        let shared = |name: &str| self.linear_fp8(&format!("{prefix}ffn.shared_experts.{name}"));
        let shared = moe_experts::Shared { w1: shared("w1")?, w3: shared("w3")?, w2: shared("w2")? };
        let mut stored = Vec::with_capacity(count);
        for expert in 0..count {
            let stem = format!("{prefix}ffn.experts.{expert}");
            let weight = |name: &str| self.view(&format!("{stem}.{name}.weight"));
            let scale = |name: &str| self.scale(&format!("{stem}.{name}.scale"));
            let (w1, w2, w3) = (weight("w1"), weight("w2"), weight("w3"));
            let (w1_scale, w2_scale, w3_scale) = (scale("w1")?, scale("w2")?, scale("w3")?);
            let bytes = moe_experts::ExpertBytes {
                w1: w1.bytes,
                w1_scale: w1_scale.bytes,
                w3: w3.bytes,
                w3_scale: w3_scale.bytes,
                w2: w2.bytes,
                w2_scale: w2_scale.bytes,
            };
            stored.push(([w1, w1_scale, w2, w2_scale, w3, w3_scale], bytes));
        }
        // A device that reads the file's layout takes a layer's experts where they are, if one file holds them all.
        let names = || stored.iter().flat_map(|(views, _)| views.iter().map(|view| view.name));
        let span = HostBytes::kept(self.checkpoint, |checkpoint| checkpoint.span(names()).unwrap_or(&[]));
        let bytes: Vec<moe_experts::ExpertBytes<'_>> = stored.iter().map(|(_, bytes)| *bytes).collect();
        let placed = moe_experts::Placed::find(self.device, &span, &bytes, hidden, inner);
        if let Some(placed) = placed.map_err(|source| refused(&stored[0].0[0], source))? {
            return moe_experts::Weights::in_place(placed, shared).map_err(failed);
        }
        let experts = stored.into_iter().map(|(views, bytes)| {
            let packed = moe_experts::Expert::pack(self.device, bytes, hidden, inner);
            packed.map_err(|source| refused(&views[0], source))
        });
        moe_experts::Weights::new(experts.collect::<Result<_, _>>()?, shared).map_err(failed)
    }

    fn draft(&self, blocks: Vec<Layer>) -> Result<Draft, LoadError> {
        let last = format!("mtp.{}.", self.shape.num_nextn_predict_layers - 1);
        let head = self.view(&format!("{last}markov_head.head.weight"));
        let (vocabulary, rank) = (self.shape.vocab_size, self.shape.dspark_markov_rank);
        let mut packed = vec![0; markov::packed_len(vocabulary, rank)];
        markov::pack(&bf16_bits(&head)?, vocabulary, rank, &mut packed);
        Ok(Draft {
            blocks,
            main_proj: self.linear_fp8("mtp.0.main_proj")?,
            main_norm: self.f32("mtp.0.main_norm.weight")?,
            norm: self.f32(&format!("{last}norm.weight"))?,
            markov_embed: self.bf16(&format!("{last}markov_head.embed.weight"))?,
            markov_head: self.place(&head, &packed)?,
            confidence: self.f32(&format!("{last}confidence_head.proj.weight"))?,
        })
    }

    /// A tensor of the table; its bytes count as done.
    fn view(&self, name: &str) -> View<'_> {
        let view = self.bound.view(name);
        self.done_bytes.fetch_add(view.bytes.len() as u64, Ordering::Relaxed);
        view
    }

    /// The bytes of a tensor that was viewed, kept by the checkpoint: a device may read them where they are.
    fn in_place(&self, name: &str) -> HostBytes<'_> {
        HostBytes::kept(self.checkpoint, |checkpoint| checkpoint.view(name).map_or(&[], |view| view.bytes))
    }

    /// Scales without a 255.
    fn scale(&self, name: &str) -> Result<View<'_>, LoadError> {
        let view = self.view(name);
        match view.bytes.iter().position(|code| *code == u8::MAX) {
            None => Ok(view),
            Some(byte) => Err(LoadError::NanScale { file: view.file.to_owned(), tensor: name.to_owned(), byte }),
        }
    }

    fn linear_fp8(&self, stem: &str) -> Result<linear_fp8::Weights, LoadError> {
        let weight = self.view(&format!("{stem}.weight"));
        let scale = self.scale(&format!("{stem}.scale"))?;
        let (rows, columns) = (weight.shape[0], weight.shape[1]);
        let (codes, scales) = (self.in_place(weight.name), self.in_place(scale.name));
        let packed = linear_fp8::Weights::pack(self.device, codes, scales, rows, columns);
        packed.map_err(|source| refused(&weight, source))
    }

    fn linear_bf16(&self, name: &str) -> Result<linear_bf16::Weights, LoadError> {
        self.stacked_bf16(&[name.to_owned()])
    }

    /// Weights of equal width as one, the rows of the first on top.
    fn stacked_bf16(&self, names: &[String]) -> Result<linear_bf16::Weights, LoadError> {
        let views: Vec<View<'_>> = names.iter().map(|name| self.view(name)).collect();
        for view in &views {
            finite_bf16(view)?;
        }
        let joined: Vec<u8>;
        let bytes = match views[..] {
            [one] => self.in_place(one.name),
            _ => {
                joined = views.iter().flat_map(|view| view.bytes).copied().collect();
                HostBytes::from(&joined)
            }
        };
        let rows = views.iter().map(|view| view.shape[0]).sum();
        let columns = views[0].shape[1];
        let packed = linear_bf16::Weights::pack(self.device, bytes, linear_bf16::Dtype::Bf16, rows, columns);
        packed.map_err(|source| refused(&views[0], source))
    }

    /// A small tensor as float32, whichever of the two it is stored as.
    fn f32(&self, name: &str) -> Result<Buffer, LoadError> {
        let view = self.view(name);
        let values = match view.f32_values() {
            Some(values) => {
                finite(&view, &values)?;
                values
            }
            None => bf16_bits(&view)?.into_iter().map(bf16::to_f32).collect(),
        };
        self.place(&view, &values)
    }

    /// A bf16 table as it is.
    fn bf16(&self, name: &str) -> Result<Buffer, LoadError> {
        let view = self.view(name);
        let bits = bf16_bits(&view)?;
        match self.device.backend() {
            // The bytes are the values on a little-endian host.
            Some(Backend::Metal) if cfg!(target_endian = "little") => {
                let failed = |source| LoadError::Device { tensor: view.name.to_owned(), source };
                Buffer::from_host(self.device, &self.in_place(view.name), size_of::<u16>()).map_err(failed)
            }
            _ => self.place(&view, &bits),
        }
    }

    fn place<T: tf_device::Element>(&self, view: &View<'_>, values: &[T]) -> Result<Buffer, LoadError> {
        let failed = |source| LoadError::Device { tensor: view.name.to_owned(), source };
        Buffer::from_slice(self.device, values).map_err(failed)
    }
}

fn refused(view: &View<'_>, source: PackError) -> LoadError {
    LoadError::Pack { file: view.file.to_owned(), tensor: view.name.to_owned(), source }
}

/// The bits of a BF16 tensor, every value of which is finite.
fn bf16_bits(view: &View<'_>) -> Result<Vec<u16>, LoadError> {
    finite_bf16(view)?;
    Ok(view.bf16_bits().expect("the table gives this tensor one of two dtypes, and the other was tried"))
}

fn finite_bf16(view: &View<'_>) -> Result<(), LoadError> {
    let bits = |pair: &[u8; 2]| u16::from_le_bytes(*pair);
    let pairs = view.bytes.as_chunks().0;
    match pairs.iter().position(|pair| bits(pair) & 0x7f80 == 0x7f80) {
        None => Ok(()),
        Some(element) => Err(not_finite(view, element, bf16::to_f32(bits(&pairs[element])))),
    }
}

fn finite(view: &View<'_>, values: &[f32]) -> Result<(), LoadError> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(element) => Err(not_finite(view, element, values[element])),
    }
}

fn not_finite(view: &View<'_>, element: usize, found: f32) -> LoadError {
    LoadError::NotFinite { file: view.file.to_owned(), tensor: view.name.to_owned(), element, found }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::Mutex;

    use super::super::shape::FLASH;
    use super::*;

    const GOLDEN: &str = "tests/golden/dsv41-tiny-a/model";
    const DEMO: &str = "../../models/tiny-dsv41";

    fn folder(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
    }

    fn load(folder: &Path, threads: usize) -> Result<(Shape, Weights, Vec<LoadProgress>), LoadError> {
        let checkpoint = Arc::new(Checkpoint::open(folder).unwrap());
        let shape = Shape::from_config(&checkpoint.config().unwrap()).unwrap();
        let heard = Mutex::new(Vec::new());
        let progress = |progress| heard.lock().unwrap().push(progress);
        let weights = Weights::load(checkpoint, &shape, &Device::cpu(), threads, &progress)?;
        Ok((shape, weights, heard.into_inner().unwrap()))
    }

    #[test]
    fn the_plan_counts_what_loading_holds() {
        for path in [GOLDEN, DEMO] {
            let (shape, weights, heard) = load(&folder(path), 2).unwrap();
            assert_eq!(weights.bytes(), WeightBytes::plan(&shape), "{path}");
            assert_eq!(weights.layers.len(), shape.num_hidden_layers);
            assert_eq!(weights.draft.blocks.len(), shape.num_nextn_predict_layers);
            assert_eq!(heard.len(), shape.num_hidden_layers + shape.num_nextn_predict_layers);
            let last = heard.iter().max_by_key(|progress| progress.done_bytes).unwrap();
            assert!(
                last.done_bytes < last.total_bytes && last.done_bytes > last.total_bytes / 2,
                "the draft head is left"
            );
        }
    }

    #[test]
    fn the_release_fits_its_reported_size() {
        let bytes = WeightBytes::plan(&FLASH);
        // 768 million rows of 256 codes and 8 scales.
        assert_eq!(bytes.engram, (384_006_168 + 384_016_682) * 264);
        assert_eq!(bytes.embedding, 129_280 * 5120 * 2);
        let routed = 40 * 384 * 3 * (2304 * 5120 / 2 + 2304 * 5120 / 32);
        assert!(bytes.experts > routed && bytes.experts < routed + routed / 50, "{bytes:?}");
        let gib = (bytes.resident() + bytes.engram) >> 30;
        assert!((470..480).contains(&gib), "about 475 GiB are reported, {gib} are planned");
    }

    #[test]
    fn packed_weights_are_the_checkpoint_bit_for_bit() {
        let (_, weights, _) = load(&folder(GOLDEN), 3).unwrap();
        let checkpoint = Checkpoint::open(&folder(GOLDEN)).unwrap();
        let bytes = |name: &str| checkpoint.view(name).unwrap().bytes;
        for layer in [0, 2, 11] {
            let stem = format!("layers.{layer}.attn.wo_a");
            let (weight, scale) = weights.layers[layer].attention.wo_a.unpack();
            assert_eq!(weight, bytes(&format!("{stem}.weight")), "{stem}");
            assert_eq!(scale, bytes(&format!("{stem}.scale")), "{stem}");
        }
        let expert = weights.draft.blocks[1].experts.experts()[3].unpack();
        let stem = "mtp.1.ffn.experts.3";
        for (tensor, name) in
            ["w1.weight", "w1.scale", "w3.weight", "w3.scale", "w2.weight", "w2.scale"].iter().enumerate()
        {
            assert_eq!(expert[tensor], bytes(&format!("{stem}.{name}")), "{name}");
        }
        let scale: Vec<f32> = checkpoint.view("layers.5.hc_ffn_scale").unwrap().f32_values().unwrap();
        assert_eq!(weights.layers[5].hc_ffn.scale.f32(), scale);
        let embed = checkpoint.view("embed.weight").unwrap().bf16_bits().unwrap();
        assert_eq!(weights.embed.u16(), embed);
        let table = weights.engram.table(1).unwrap();
        assert_eq!((table.codes, table.scales.len()), (bytes("layers.4.engram.embed.weight"), 630));
        // Sources own what the role table says.
        let roles = |layer: usize| {
            let layer = &weights.layers[layer];
            (layer.compressor.is_some(), layer.indexer.is_some(), layer.engram.is_some())
        };
        assert_eq!((roles(1), roles(2), roles(4)), ((false, false, true), (true, true, false), (true, true, true)));
        assert_eq!((roles(6), roles(8), roles(9)), ((true, true, false), (false, true, false), (false, false, false)));
        let raw = |layer: usize| weights.layers[layer].compressor.as_ref().unwrap().raw.rows();
        assert_eq!((raw(2), raw(6)), (128, 64), "kv and score at ratio 2, kv alone at ratio 1");
    }

    /// Loads a copy of the golden checkpoint in which one tensor's last bytes are `bytes`.
    fn load_damaged(tensor: &str, bytes: &[u8]) -> String {
        let name = format!("tensorfold-load-{}-{}", std::process::id(), tensor.replace('.', "-"));
        let target = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&target).unwrap();
        for entry in std::fs::read_dir(folder(GOLDEN)).unwrap() {
            let path = entry.unwrap().path();
            let mut contents = std::fs::read(&path).unwrap();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                let length = u64::from_le_bytes(contents[..8].try_into().unwrap()) as usize;
                let header: serde_json::Value = serde_json::from_slice(&contents[8..8 + length]).unwrap();
                if let Some(end) = header[tensor]["data_offsets"][1].as_u64() {
                    let end = 8 + length + end as usize;
                    contents[end - bytes.len()..end].copy_from_slice(bytes);
                }
            }
            std::fs::write(target.join(path.file_name().unwrap()), contents).unwrap();
        }
        let error = load(&target, 2).map(|_| ()).unwrap_err().to_string();
        std::fs::remove_dir_all(&target).unwrap();
        error
    }

    #[test]
    fn values_that_are_not_numbers_are_refused_by_name() {
        let infinity = 0x7f80_u16.to_le_bytes();
        let cases: [(&str, &[u8], &str); 7] = [
            ("layers.3.attn.wq_b.scale", &[255], "holds a scale that is not a number (byte 31 is 255)"),
            ("layers.7.ffn.experts.5.w3.scale", &[255], "holds a scale that is not a number"),
            ("mtp.0.ffn.shared_experts.w2.scale", &[255], "holds a scale that is not a number"),
            ("layers.9.attn.wkv.weight", &[0x7f], "is code 0x7f (not a number)"),
            ("head.weight", &infinity, "holds inf at element 49151, expected a finite number"),
            ("layers.0.ffn_norm.weight", &infinity, "holds inf at element 127"),
            ("layers.2.hc_attn_base", &[0, 0, 0xc0, 0x7f], "holds NaN at element 23"),
        ];
        for (tensor, bytes, part) in cases {
            let error = load_damaged(tensor, bytes);
            assert!(error.contains(tensor) && error.contains(part), "{tensor}: {error}");
            assert!(error.contains(".safetensors"), "{tensor}: {error}");
        }
    }
}
