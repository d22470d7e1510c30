//! What serving a shape takes, in bytes by part, before anything is loaded.
//!
//! Weights and caches are counted with the same tables that later hold them, activations buffer by buffer; a test
//! compares the sum with what a loaded model has taken. Buffers take memory only where something is written. On a GPU the
//! plan is that of its memory, and what the host keeps beside it is counted apart. Mapped n-gram tables are no part of any
//! sum, because the system may drop their pages.

use tf_device::gpu::Backend;
use tf_kernels::{hyper, kv_compress, kv_store};

use super::cache::CacheLayout;
use super::engram_rows::EngramPlace;
use super::load::WeightBytes;
use super::model::LOGITS_ROWS;
use super::pages::PAGE_POSITIONS;
use super::scratch::{attention_floats, score_floats};
use super::shape::Shape;

/// Weight rows that a thread unpacks at once, at most.
const TILE_ROWS: usize = 16;

/// The plan for one set of options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Whose memory it is; `None` for a model on the CPU.
    pub backend: Option<Backend>,
    /// Where the n-gram rows live. Whoever serves sets this.
    pub engram: EngramPlace,
    pub weights: WeightBytes,
    pub context: u32,
    pub slots: u32,
    /// Each further token of a sequence: compressed entries and index keys.
    pub position_bytes: u64,
    /// A slot whatever its length: window rings and raw pair rows.
    pub slot_bytes: u64,
    /// One kept state: the window rows of every layer. Its entries are shared pages.
    pub snapshot_bytes: u64,
    /// All cache pages.
    pub page_bytes: u64,
    /// Window rows of all kept prefixes, at most. Whoever sets the budget of kept prefixes sets this.
    pub kept_bytes: u64,
    /// Index scores of a row, over the whole context.
    pub indexer_bytes: u64,
    /// Activations of the largest round.
    pub activation_bytes: u64,
    /// What the program takes beside the model. Whoever serves sets this.
    pub program_bytes: u64,
    /// Bodies of requests while they arrive, are parsed and are cut into tokens. Whoever serves sets this.
    pub bodies_bytes: u64,
    /// The list of what is kept on disk. Whoever serves sets this.
    pub disk_index_bytes: u64,
}

impl MemoryPlan {
    /// For a model on the CPU. `pages`: as in the model's options; `None` lets every slot fill while as much again is kept.
    pub fn new(shape: &Shape, slots: u32, context: u32, round_rows: u32, threads: usize, pages: Option<u32>) -> Self {
        MemoryPlan::on(None, shape, slots, context, round_rows, threads, pages)
    }

    /// As [`MemoryPlan::new`], on a GPU of this backend; its launches share no memory of threads.
    pub fn on(
        backend: Option<Backend>,
        shape: &Shape,
        slots: u32,
        context: u32,
        round_rows: u32,
        threads: usize,
        pages: Option<u32>,
    ) -> Self {
        let layout = CacheLayout::new(shape, slots, context, pages);
        let rings = (layout.layer_count + layout.draft_count) * layout.window_record_bytes;
        let (scores, activations) = activation_bytes(backend, shape, round_rows as usize, context as usize, threads);
        MemoryPlan {
            backend,
            engram: EngramPlace::Mapped,
            weights: WeightBytes::plan(shape),
            context,
            slots,
            position_bytes: layout.position_bytes() as u64,
            // The host keeps each slot's tokens and page numbers for the whole context.
            slot_bytes: (layout.slot_bytes() + (layout.context + layout.pages_per_slot) as usize * size_of::<u32>())
                as u64,
            snapshot_bytes: (rings * (shape.sliding_window - 1)) as u64,
            page_bytes: u64::from(layout.page_count) * layout.page_bytes() as u64,
            kept_bytes: 0,
            indexer_bytes: scores as u64,
            activation_bytes: activations as u64,
            program_bytes: 0,
            bodies_bytes: 0,
            disk_index_bytes: 0,
        }
    }

    /// Weights, caches and activations together, without mapped tables; on a GPU without what the host keeps.
    pub fn total_bytes(&self) -> u64 {
        let kept = if self.backend.is_none() { self.kept_bytes } else { 0 };
        self.fixed_bytes() + u64::from(self.slots) * self.slot_bytes + self.page_bytes + kept
    }

    /// What doesn't depend on how many requests run.
    pub fn fixed_bytes(&self) -> u64 {
        let beside = if self.backend.is_none() { self.beside_bytes() } else { 0 };
        self.weights.resident() + self.indexer_bytes + self.activation_bytes + beside
    }

    /// What the host keeps for a model on a GPU: the program itself, kept prefixes, n-gram rows. 0 on the CPU, where that is
    /// part of the one sum.
    pub fn host_only_bytes(&self) -> u64 {
        if self.backend.is_none() { 0 } else { self.beside_bytes() + self.kept_bytes }
    }

    fn beside_bytes(&self) -> u64 {
        self.program_bytes + self.bodies_bytes + self.disk_index_bytes + self.engram_bytes()
    }

    /// What the n-gram rows take in the host's memory.
    pub fn engram_bytes(&self) -> u64 {
        match self.engram {
            EngramPlace::Mapped => 0,
            EngramPlace::Ram => self.weights.engram,
            EngramPlace::Disk { cache_bytes } => cache_bytes,
        }
    }

    /// One request that fills the whole context.
    pub fn request_bytes(&self) -> u64 {
        self.slot_bytes + u64::from(self.context) * self.position_bytes
    }

    /// Of a slot's bytes those of the host's own lists: each token and page number of the whole context.
    pub fn host_bytes(&self) -> u64 {
        (u64::from(self.context) + u64::from(self.context.div_ceil(PAGE_POSITIONS))) * size_of::<u32>() as u64
    }

    /// How many full-length requests `budget` bytes hold beside the fixed part.
    pub fn full_requests(&self, budget: u64) -> u64 {
        budget.saturating_sub(self.fixed_bytes()) / self.request_bytes().max(1)
    }

    /// The longest request that `budget` bytes hold, up to the model's own limit. `None` where not even the fixed part
    /// fits.
    pub fn largest_context(&self, shape: &Shape, budget: u64) -> Option<u64> {
        let room = budget.checked_sub(self.fixed_bytes() + self.slot_bytes)?;
        let longest = shape.max_position_embeddings as u64;
        // Past the planned context the scores of a row grow as well.
        let per_position = self.position_bytes + size_of::<f32>() as u64;
        Some((room / per_position.max(1)).min(longest))
    }
}

/// Index scores, and everything else that a round writes: the buffers of `Scratch` and of the draft head's `Context`.
fn activation_bytes(
    backend: Option<Backend>,
    shape: &Shape,
    rows: usize,
    context: usize,
    threads: usize,
) -> (usize, usize) {
    let float = size_of::<f32>();
    let (hidden, streams) = (shape.hidden_size, shape.stream_width());
    let experts = shape.n_routed_experts.max(shape.dspark_n_routed_experts);
    let picks = shape.num_experts_per_tok.max(shape.dspark_num_experts_per_tok);
    let connections = shape.hc_mult * (shape.hc_mult + 2) + hyper::scratch_floats(hidden);
    let queries = 2 * shape.q_lora_rank + 2 * shape.query_width() + shape.o_groups * shape.o_lora_rank;
    let index = (shape.index_n_heads + 1) * shape.index_head_dim + shape.index_n_heads;
    let selected = shape.index_topk + shape.candidate_topk_blocks + 2;
    let record = kv_store::record_bytes(shape.head_dim).div_ceil(float);
    let keys = 2 * shape.head_dim + kv_compress::raw_columns(shape.head_dim, 2) + record;
    let memory = shape.engram_width() + (shape.hc_mult + 1) * hidden;
    let draft = 2 * hidden + shape.num_nextn_predict_layers * shape.head_dim;
    let row = streams
        + connections
        + 4 * hidden
        + queries
        + keys
        + index
        + selected
        + experts
        + 2 * picks
        + memory
        + shape.tap_width()
        + draft;
    let attention = attention_floats(backend, shape, rows, threads);
    // Of the target and of the draft head.
    let logits = 2 * rows.min(LOGITS_ROWS).max(shape.dspark_block_size) * shape.vocab_size;
    let activations = rows * row + attention + logits;
    let launches = match backend {
        None => launch_bytes(shape, rows, threads),
        Some(_) => gpu_launch_bytes(shape, rows),
    };
    (score_floats(backend, context, rows) * float, activations * float + launches)
}

/// What launches on a GPU share, each family for itself, and the driver's own: staging, graphs, modules.
fn gpu_launch_bytes(shape: &Shape, rows: usize) -> usize {
    const DRIVER: usize = 96 << 20;
    /// Rows of a tile of many rows.
    const TILE: usize = 256;
    let float = size_of::<f32>();
    let picks = shape.num_experts_per_tok.max(shape.dspark_num_experts_per_tok);
    let (hidden, intermediate) = (shape.hidden_size, shape.moe_intermediate_size);
    // Experts: a pair's activation and result in bf16 and its places in the lists; the shared expert's rows in float32.
    let pairs = rows * picks * (2 * (hidden + intermediate) + 64);
    let shared = rows * float * (hidden + 3 * intermediate);
    // Linears: their inputs in bf16, rows and columns padded.
    let widest = [shape.stream_width(), shape.query_width(), shape.tap_width(), shape.engram_width()];
    let widest = widest.into_iter().max().unwrap_or(0).next_multiple_of(TILE);
    let inputs = rows.next_multiple_of(TILE) * widest * 2;
    // Draws: sorted values of a batch of drawn rows. Selections: what the parts of a row keep.
    let draws = rows.min(LOGITS_ROWS) * shape.vocab_size * float;
    let selections = 16 * rows.min(TILE) * shape.index_topk * float;
    DRIVER + pairs + shared + inputs + draws + selections
}

/// What launches on a CPU share: it grows to the largest, the experts of a whole round, in steps of half its size.
fn launch_bytes(shape: &Shape, rows: usize, threads: usize) -> usize {
    const LEAST: usize = 1 << 16;
    let picks = shape.num_experts_per_tok.max(shape.dspark_num_experts_per_tok);
    let experts = shape.n_routed_experts.max(shape.dspark_n_routed_experts);
    let values = rows * (picks + 1) * shape.moe_intermediate_size;
    // A thread unpacks a tile of weight rows over the widest input; inputs of odd width are copied with padding.
    let widest = [shape.stream_width(), shape.query_width(), shape.o_groups * shape.o_lora_rank, shape.tap_width()];
    let widest = widest.into_iter().max().unwrap_or(0).next_multiple_of(32);
    let tiles = threads * TILE_ROWS * (widest + widest / 16);
    let padded = rows * shape.engram_width().max(shape.hidden_size).next_multiple_of(32);
    let indices = experts + 1 + 2 * rows * picks;
    let grown = |count: usize| (count * size_of::<f32>() * 3 / 2).max(LEAST);
    grown(values.max(padded) + tiles) + grown(indices)
}

#[cfg(test)]
mod tests {
    use super::super::shape::FLASH;
    use super::*;

    #[test]
    fn the_releases_long_context_costs_what_its_records_cost() {
        let plan = MemoryPlan::new(&FLASH, 1, 1 << 20, 512, 8, None);
        // Three sources at ratio 2 and one at ratio 1; an entry is 512 / 2 + 512 / 16 bytes, a key 128 / 2 + 128 / 32.
        let entry: u64 = 288 + 68;
        assert_eq!(plan.position_bytes, (3 * entry).div_ceil(2) + entry + 4);
        assert!(plan.request_bytes() > (1 << 20) * 5 * entry / 2);
        assert_eq!(plan.full_requests(plan.fixed_bytes() + 3 * plan.request_bytes()), 3);
        assert_eq!(plan.full_requests(0), 0);
        assert_eq!(plan.largest_context(&FLASH, u64::MAX), Some(1 << 20));
        assert_eq!(plan.largest_context(&FLASH, plan.weights.resident()), None);
    }

    #[test]
    fn a_gpu_holds_the_model_and_the_host_what_is_beside_it() {
        let on = |backend| MemoryPlan {
            kept_bytes: 1 << 30,
            program_bytes: 1 << 20,
            engram: EngramPlace::Disk { cache_bytes: 1 << 28 },
            ..MemoryPlan::on(backend, &FLASH, 2, 8192, 512, 64, None)
        };
        let (cpu, gpu) = (on(None), on(Some(Backend::Cuda)));
        let beside = (1 << 30) + (1 << 20) + (1 << 28);
        assert_eq!((cpu.host_only_bytes(), gpu.host_only_bytes()), (0, beside));
        assert_eq!(cpu.total_bytes(), MemoryPlan::new(&FLASH, 2, 8192, 512, 64, None).total_bytes() + beside);
        assert_eq!(
            gpu.total_bytes(),
            MemoryPlan::on(Some(Backend::Cuda), &FLASH, 2, 8192, 512, 64, None).total_bytes()
        );
        // Scores of many rows at once, and nothing for each of 64 threads.
        assert!(gpu.indexer_bytes > cpu.indexer_bytes);
        let more_threads = MemoryPlan::on(Some(Backend::Cuda), &FLASH, 2, 8192, 512, 128, None);
        assert_eq!(more_threads.activation_bytes, gpu.activation_bytes);
        let held = MemoryPlan { engram: EngramPlace::Ram, ..gpu };
        assert_eq!(held.host_only_bytes(), (1 << 30) + (1 << 20) + gpu.weights.engram);
    }

    #[test]
    fn more_of_anything_takes_more() {
        let plan = |slots, context, rows| MemoryPlan::new(&FLASH, slots, context, rows, 4, None).total_bytes();
        let least = plan(1, 4096, 64);
        assert!(plan(2, 4096, 64) > least && plan(1, 8192, 64) > least && plan(1, 4096, 128) > least);
    }
}
