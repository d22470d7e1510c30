//! The weight table: every tensor that a checkpoint of a given [`Shape`] holds, and nothing else (spec section 3).
//!
//! One generator feeds binding, loading and the memory plan, so that they cannot disagree about what exists.

use std::collections::HashSet;
use std::fmt;

use tf_checkpoint::{Checkpoint, Dtype, View};

use super::shape::{BLOCK, Shape};

/// Who packs and owns a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owner {
    Embed,
    LmHead,
    RmsNorm,
    Hyper,
    /// FP8 weights with E8M0 scales for tiles of 32 x 32.
    LinearFp8,
    LinearBf16,
    Attention,
    MoeRoute,
    MoeExperts,
    Engram,
    /// The n-gram tables: read row by row where they lie, never packed.
    EngramTable,
    DraftHead,
    /// Bound and checked, also where nothing reads them.
    Vision,
}

/// A tensor that must be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    /// Any of these.
    pub dtypes: &'static [Dtype],
    pub shape: Vec<usize>,
    pub owner: Owner,
}

const FP8: &[Dtype] = &[Dtype::F8E4M3];
const SCALE: &[Dtype] = &[Dtype::F8E8M0];
const FP4: &[Dtype] = &[Dtype::I8];
const BF16: &[Dtype] = &[Dtype::Bf16];
const F32: &[Dtype] = &[Dtype::F32];
/// Re-exports differ in these few.
const EITHER: &[Dtype] = &[Dtype::Bf16, Dtype::F32];

/// Every expected tensor, in a fixed order.
pub fn table(shape: &Shape) -> Vec<TensorSpec> {
    let mut table = Table { shape, tensors: Vec::new() };
    let hidden = shape.hidden_size;
    table.add("embed.weight", BF16, [shape.vocab_size, hidden], Owner::Embed);
    table.add("norm.weight", BF16, [hidden], Owner::RmsNorm);
    table.add("head.weight", BF16, [shape.vocab_size, hidden], Owner::LmHead);
    for layer in 0..shape.num_hidden_layers {
        let prefix = format!("layers.{layer}.");
        table.block(&prefix, shape.n_routed_experts);
        table.long_range(&prefix, layer);
        if let Some(index) = shape.engram_index(layer) {
            table.engram(&prefix, shape.engram_num_embeddings[index] as usize);
        }
    }
    for block in 0..shape.num_nextn_predict_layers {
        table.block(&format!("mtp.{block}."), shape.dspark_n_routed_experts);
    }
    table.draft_head();
    table.vision();
    table.tensors
}

struct Table<'a> {
    shape: &'a Shape,
    tensors: Vec<TensorSpec>,
}

impl Table<'_> {
    fn add<const N: usize>(
        &mut self,
        name: impl Into<String>,
        dtypes: &'static [Dtype],
        shape: [usize; N],
        owner: Owner,
    ) {
        self.tensors.push(TensorSpec { name: name.into(), dtypes, shape: shape.to_vec(), owner });
    }

    /// An FP8 weight `[rows, columns]` and the scales of its tiles.
    fn linear_fp8(&mut self, stem: &str, rows: usize, columns: usize, owner: Owner) {
        self.add(format!("{stem}.weight"), FP8, [rows, columns], owner);
        self.add(format!("{stem}.scale"), SCALE, [rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)], owner);
    }

    /// An FP4 weight `[rows, columns]`, two to a byte, and one scale a row and 32 columns.
    fn linear_fp4(&mut self, stem: &str, rows: usize, columns: usize) {
        self.add(format!("{stem}.weight"), FP4, [rows, columns / 2], Owner::MoeExperts);
        self.add(format!("{stem}.scale"), SCALE, [rows, columns / BLOCK], Owner::MoeExperts);
    }

    /// What a backbone layer and a draft block share.
    fn block(&mut self, prefix: &str, experts: usize) {
        let shape = self.shape;
        let (hidden, inner) = (shape.hidden_size, shape.moe_intermediate_size);
        for norm in ["attn_norm", "ffn_norm"] {
            self.add(format!("{prefix}{norm}.weight"), BF16, [hidden], Owner::RmsNorm);
        }
        for half in ["attn", "ffn"] {
            let (mixes, width) = (shape.hc_mix_count(), shape.stream_width());
            self.add(format!("{prefix}hc_{half}_fn"), F32, [mixes, width], Owner::Hyper);
            self.add(format!("{prefix}hc_{half}_base"), F32, [mixes], Owner::Hyper);
            self.add(format!("{prefix}hc_{half}_scale"), F32, [3], Owner::Hyper);
        }
        let groups = shape.o_groups * shape.o_lora_rank;
        for (name, rows, columns) in [
            ("wq_a", shape.q_lora_rank, hidden),
            ("wq_b", shape.query_width(), shape.q_lora_rank),
            ("wkv", shape.head_dim, hidden),
            ("wo_a", groups, shape.group_width()),
            ("wo_b", hidden, groups),
        ] {
            self.linear_fp8(&format!("{prefix}attn.{name}"), rows, columns, Owner::LinearFp8);
        }
        self.add(format!("{prefix}attn.q_norm.weight"), BF16, [shape.q_lora_rank], Owner::RmsNorm);
        self.add(format!("{prefix}attn.kv_norm.weight"), BF16, [shape.head_dim], Owner::RmsNorm);
        self.add(format!("{prefix}attn.attn_sink"), F32, [shape.num_attention_heads], Owner::Attention);

        self.add(format!("{prefix}ffn.gate.weight"), BF16, [experts, hidden], Owner::LinearBf16);
        self.add(format!("{prefix}ffn.gate.bias"), F32, [experts], Owner::MoeRoute);
        if shape.vision.is_some() {
            self.add(format!("{prefix}ffn.gate.bias_vl"), EITHER, [experts], Owner::MoeRoute);
        }
        for expert in 0..experts {
            for (name, rows, columns) in [("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)] {
                self.linear_fp4(&format!("{prefix}ffn.experts.{expert}.{name}"), rows, columns);
            }
        }
        for (name, rows, columns) in [("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)] {
            self.linear_fp8(&format!("{prefix}ffn.shared_experts.{name}"), rows, columns, Owner::MoeExperts);
        }
    }

    /// Compressor and indexer of the layers that are sources.
    fn long_range(&mut self, prefix: &str, layer: usize) {
        let shape = self.shape;
        let (hidden, index_dim) = (shape.hidden_size, shape.index_head_dim);
        if shape.is_kv_source(layer) {
            let stem = format!("{prefix}attn.compressor");
            self.add(format!("{stem}.wkv.weight"), BF16, [shape.head_dim, hidden], Owner::LinearBf16);
            if shape.ratio(layer) > 1 {
                self.add(format!("{stem}.wgate.weight"), BF16, [shape.head_dim, hidden], Owner::LinearBf16);
            }
            self.add(format!("{stem}.norm.weight"), BF16, [shape.head_dim], Owner::RmsNorm);
            self.add(format!("{prefix}attn.indexer.wk.weight"), BF16, [index_dim, shape.head_dim], Owner::LinearBf16);
            self.add(format!("{prefix}attn.indexer.k_norm.weight"), BF16, [index_dim], Owner::RmsNorm);
        }
        if shape.is_index_source(layer) {
            let stem = format!("{prefix}attn.indexer");
            let width = shape.index_n_heads * index_dim;
            self.linear_fp8(&format!("{stem}.wq_b"), width, shape.q_lora_rank, Owner::LinearFp8);
            self.add(format!("{stem}.weights_proj.weight"), BF16, [shape.index_n_heads, hidden], Owner::LinearBf16);
        }
    }

    fn engram(&mut self, prefix: &str, rows: usize) {
        let shape = self.shape;
        let stem = format!("{prefix}engram");
        self.add(format!("{stem}.embed.weight"), FP8, [rows, shape.engram_head_dim], Owner::EngramTable);
        self.add(format!("{stem}.embed.scale"), SCALE, [rows, shape.engram_head_dim / BLOCK], Owner::EngramTable);
        let width = (shape.hc_mult + 1) * shape.hidden_size;
        self.linear_fp8(&format!("{stem}.wkv"), width, shape.engram_width(), Owner::LinearFp8);
        for name in ["q_weight", "k_weight"] {
            self.add(format!("{stem}.{name}"), EITHER, [shape.hc_mult, shape.hidden_size], Owner::Engram);
        }
    }

    fn draft_head(&mut self) {
        let shape = self.shape;
        let (hidden, rank) = (shape.hidden_size, shape.dspark_markov_rank);
        self.linear_fp8("mtp.0.main_proj", hidden, shape.tap_width(), Owner::LinearFp8);
        self.add("mtp.0.main_norm.weight", BF16, [hidden], Owner::RmsNorm);
        let last = format!("mtp.{}.", shape.num_nextn_predict_layers - 1);
        self.add(format!("{last}norm.weight"), BF16, [hidden], Owner::RmsNorm);
        for name in ["embed", "head"] {
            let name = format!("{last}markov_head.{name}.weight");
            self.add(name, BF16, [shape.vocab_size, rank], Owner::DraftHead);
        }
        self.add(format!("{last}confidence_head.proj.weight"), BF16, [1, hidden + rank], Owner::DraftHead);
    }

    fn vision(&mut self) {
        let Some(vision) = self.shape.vision else { return };
        let (hidden, width, inner) = (self.shape.hidden_size, vision.hidden_size, vision.intermediate_size);
        let mut add = |name: String, shape: &[usize]| {
            self.tensors.push(TensorSpec { name, dtypes: BF16, shape: shape.to_vec(), owner: Owner::Vision });
        };
        for name in ["image_start", "image_newline", "image_end"] {
            add(name.to_owned(), &[hidden]);
        }
        let pixels = 3 * vision.patch_size * vision.patch_size;
        add("vision.patch_embed.proj.weight".to_owned(), &[width, pixels]);
        add("vision.patch_embed.proj.bias".to_owned(), &[width]);
        for block in 0..vision.num_hidden_layers {
            let prefix = format!("vision.blocks.{block}.");
            add(format!("{prefix}norm1.weight"), &[width]);
            add(format!("{prefix}norm2.weight"), &[width]);
            add(format!("{prefix}attn.wqkv.weight"), &[3 * width, width]);
            add(format!("{prefix}attn.wqkv.bias"), &[3 * width]);
            add(format!("{prefix}attn.wo.weight"), &[width, width]);
            add(format!("{prefix}attn.wo.bias"), &[width]);
            add(format!("{prefix}mlp.w1.weight"), &[2 * inner, width]);
            add(format!("{prefix}mlp.w2.weight"), &[width, inner]);
        }
        add("vision.norm.weight".to_owned(), &[width]);
        let cell = width * vision.downsample_ratio * vision.downsample_ratio;
        add("aligner.w1.weight".to_owned(), &[hidden, cell]);
        add("aligner.w1.bias".to_owned(), &[hidden]);
        add("aligner.w2.weight".to_owned(), &[hidden, hidden]);
        add("aligner.w2.bias".to_owned(), &[hidden]);
    }
}

/// One tensor that keeps a checkpoint from being bound.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindProblem {
    #[error("{tensor} is missing, expected {expected}")]
    Missing { tensor: String, expected: String },
    #[error("{file}: {tensor} is unknown: this family has no such tensor with this configuration")]
    Unknown { file: String, tensor: String },
    #[error("{file}: {tensor} is {found}, expected {expected}")]
    Dtype { file: String, tensor: String, found: Dtype, expected: String },
    #[error("{file}: {tensor} has the shape {found:?}, expected {expected:?} from config.json")]
    Shape { file: String, tensor: String, found: Vec<usize>, expected: Vec<usize> },
}

/// Everything that differs between a checkpoint and its table. The text lists the first twenty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct BindError {
    pub problems: Vec<BindProblem>,
}

const SHOWN_MAX: usize = 20;

impl BindError {
    /// The reasons one by one, for lists: the first twenty and how many more there are.
    pub fn reasons(&self) -> Vec<String> {
        let mut reasons: Vec<String> = self.problems.iter().take(SHOWN_MAX).map(ToString::to_string).collect();
        if self.problems.len() > SHOWN_MAX {
            reasons.push(format!("and {} more tensors", self.problems.len() - SHOWN_MAX));
        }
        reasons
    }
}

impl fmt::Display for BindError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.reasons().join("\n"))?;
        formatter.write_str("\nFetch the checkpoint again, or use the release's own files")
    }
}

/// Checks that every tensor of the table is there with its dtype and shape, and that none is left over.
///
/// # Errors
/// [`BindError`] with every difference.
pub fn bind<'a>(shape: &Shape, checkpoint: &'a Checkpoint) -> Result<Bound<'a>, BindError> {
    let table = table(shape);
    let mut problems = Vec::new();
    for spec in &table {
        let Some(view) = checkpoint.view(&spec.name) else {
            let expected = format!("{} {:?}", dtype_names(spec.dtypes), spec.shape);
            problems.push(BindProblem::Missing { tensor: spec.name.clone(), expected });
            continue;
        };
        let (file, tensor) = (view.file.to_owned(), spec.name.clone());
        if !spec.dtypes.contains(&view.dtype) {
            let expected = dtype_names(spec.dtypes);
            problems.push(BindProblem::Dtype { file, tensor, found: view.dtype, expected });
        } else if view.shape != spec.shape {
            let (found, expected) = (view.shape.to_vec(), spec.shape.clone());
            problems.push(BindProblem::Shape { file, tensor, found, expected });
        }
    }
    let known: HashSet<&str> = table.iter().map(|spec| spec.name.as_str()).collect();
    for view in checkpoint.views().filter(|view| !known.contains(view.name)) {
        problems.push(BindProblem::Unknown { file: view.file.to_owned(), tensor: view.name.to_owned() });
    }
    match problems.is_empty() {
        true => Ok(Bound { checkpoint }),
        false => Err(BindError { problems }),
    }
}

fn dtype_names(dtypes: &[Dtype]) -> String {
    dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or ")
}

/// A checkpoint that matches its shape's table.
#[derive(Clone, Copy, Debug)]
pub struct Bound<'a> {
    checkpoint: &'a Checkpoint,
}

impl<'a> Bound<'a> {
    /// A tensor of the table.
    ///
    /// # Panics
    /// When `name` isn't in the table this was bound to.
    pub fn view(&self, name: &str) -> View<'a> {
        match self.checkpoint.view(name) {
            Some(view) => view,
            None => panic!("{name} is not in the weight table"),
        }
    }

    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::super::shape::FLASH;
    use super::*;

    fn folder(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
    }

    fn open(path: &str) -> (Shape, Checkpoint) {
        let checkpoint = Checkpoint::open(&folder(path)).unwrap();
        (Shape::from_config(&checkpoint.config().unwrap()).unwrap(), checkpoint)
    }

    const GOLDEN: &str = "tests/golden/dsv41-tiny-a/model";
    const DEMO: &str = "../../models/tiny-dsv41";

    #[test]
    fn test_checkpoints_hold_exactly_their_tables() {
        for path in [GOLDEN, DEMO] {
            let (shape, checkpoint) = open(path);
            if let Err(error) = bind(&shape, &checkpoint) {
                panic!("{path}: {error}");
            }
            assert_eq!(table(&shape).len(), checkpoint.views().len(), "{path}");
        }
    }

    #[test]
    fn the_release_has_the_reported_number_of_tensors() {
        let table = table(&FLASH);
        assert_eq!(table.len(), 96_085);
        let names: HashSet<&str> = table.iter().map(|spec| spec.name.as_str()).collect();
        assert_eq!(names.len(), table.len(), "no name twice");
        for (name, shape) in [
            ("layers.0.attn.wq_b.weight", vec![32_768, 1280]),
            ("layers.3.attn.wo_a.weight", vec![8192, 4096]),
            ("layers.39.ffn.experts.383.w2.scale", vec![5120, 72]),
            ("layers.14.engram.wkv.scale", vec![800, 192]),
            ("layers.14.engram.embed.scale", vec![384_016_682, 8]),
            ("layers.36.attn.indexer.wq_b.weight", vec![4096, 1280]),
            ("mtp.0.main_proj.scale", vec![160, 480]),
            ("mtp.2.confidence_head.proj.weight", vec![1, 5376]),
            ("vision.blocks.31.mlp.w1.weight", vec![5632, 1024]),
            ("aligner.w1.weight", vec![5120, 9216]),
        ] {
            let spec = table.iter().find(|spec| spec.name == name);
            assert_eq!(spec.map(|spec| &spec.shape), Some(&shape), "{name}");
        }
        for absent in
            ["layers.20.attn.compressor.wgate.weight", "layers.24.attn.indexer.wk.weight", "mtp.1.norm.weight"]
        {
            assert!(!names.contains(absent), "{absent}");
        }
    }

    /// What a checkpoint lacks or has too much is found however the configuration and the files came to differ.
    #[test]
    fn differences_name_the_tensor() {
        type Edit = fn(&mut Shape);
        let cases: [(&str, Edit, &str); 7] = [
            (GOLDEN, |shape| shape.vision = None, "vision.norm.weight is unknown"),
            (GOLDEN, |shape| shape.vision = None, "layers.0.ffn.gate.bias_vl is unknown"),
            (DEMO, |shape| shape.vision = FLASH.vision, "image_start is missing, expected BF16 [160]"),
            (
                DEMO,
                |shape| shape.n_routed_experts += 1,
                "layers.0.ffn.experts.16.w1.weight is missing, expected I8 [64, 80]",
            ),
            (DEMO, |shape| shape.n_routed_experts -= 1, "layers.0.ffn.experts.15.w1.weight is unknown"),
            (
                DEMO,
                |shape| shape.q_lora_rank = 64,
                "layers.0.attn.wq_a.weight has the shape [96, 160], expected [64, 160]",
            ),
            (DEMO, |shape| shape.num_nextn_predict_layers = 2, "mtp.1.markov_head.embed.weight is missing"),
        ];
        for (path, edit, part) in cases {
            let (mut shape, checkpoint) = open(path);
            edit(&mut shape);
            let error = bind(&shape, &checkpoint).unwrap_err();
            assert!(error.problems.iter().any(|problem| problem.to_string().contains(part)), "{part}: {error}");
            assert!(error.reasons().len() <= SHOWN_MAX + 1);
        }
    }

    /// Writes a copy of the golden checkpoint whose headers `edit` changed, and binds it.
    fn bind_edited(name: &str, edit: impl Fn(&mut serde_json::Map<String, serde_json::Value>)) -> Result<(), String> {
        let target = std::env::temp_dir().join(format!("tensorfold-bind-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&target).unwrap();
        let mut index = serde_json::Map::new();
        for shard in 1..=3 {
            let shard = format!("model-0000{shard}-of-00003.safetensors");
            let bytes = std::fs::read(folder(GOLDEN).join(&shard)).unwrap();
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let mut header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
            edit(&mut header);
            index.extend(
                header.keys().filter(|key| *key != "__metadata__").map(|key| (key.clone(), shard.clone().into())),
            );
            let text = serde_json::to_string(&header).unwrap();
            let file = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &bytes[8 + length..]].concat();
            std::fs::write(target.join(&shard), file).unwrap();
        }
        let text = serde_json::json!({"weight_map": index}).to_string();
        std::fs::write(target.join("model.safetensors.index.json"), text).unwrap();
        std::fs::copy(folder(GOLDEN).join("config.json"), target.join("config.json")).unwrap();
        let checkpoint = Checkpoint::open(&target).unwrap();
        let shape = Shape::from_config(&checkpoint.config().unwrap()).unwrap();
        let bound = bind(&shape, &checkpoint).map(|_| ()).map_err(|error| error.to_string());
        std::fs::remove_dir_all(&target).unwrap();
        bound
    }

    #[test]
    fn a_draft_tensor_that_is_not_there_is_an_error_and_never_dropped() {
        assert_eq!(bind_edited("same", |_| {}), Ok(()));
        let rename = |header: &mut serde_json::Map<String, serde_json::Value>| {
            if let Some(tensor) = header.remove("mtp.1.attn.wkv.weight") {
                header.insert("mtp.1.attn.wkv.other".to_owned(), tensor);
            }
        };
        let error = bind_edited("renamed", rename).unwrap_err();
        assert!(error.contains("mtp.1.attn.wkv.weight is missing, expected F8_E4M3 [64, 128]"), "{error}");
        assert!(error.contains("mtp.1.attn.wkv.other is unknown"), "{error}");
    }

    #[test]
    fn a_dtype_of_another_kind_is_refused_and_either_is_accepted_where_exports_differ() {
        let retype = |name: &'static str, dtype: &'static str| {
            move |header: &mut serde_json::Map<String, serde_json::Value>| {
                if let Some(tensor) = header.get_mut(name) {
                    tensor["dtype"] = dtype.into();
                }
            }
        };
        let error = bind_edited("retyped", retype("layers.0.attn.wkv.weight", "I8")).unwrap_err();
        assert!(error.contains("layers.0.attn.wkv.weight is I8, expected F8_E4M3"), "{error}");
        let halve = |header: &mut serde_json::Map<String, serde_json::Value>| {
            // [4, 128] float32 fills the bytes of [4, 256] bf16: only the dtype is accepted, not the shape.
            if let Some(tensor) = header.get_mut("layers.1.engram.q_weight") {
                tensor["dtype"] = "BF16".into();
                tensor["shape"] = serde_json::json!([4, 256]);
            }
        };
        let error = bind_edited("halved", halve).unwrap_err();
        assert!(error.contains("layers.1.engram.q_weight has the shape [4, 256], expected [4, 128]"), "{error}");
    }
}
