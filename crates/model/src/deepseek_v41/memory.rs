//! What serving a shape takes, in bytes by part, before anything is loaded.
//!
//! Weights and caches are counted with the same tables that later hold them, activations buffer by buffer; a test
//! compares the sum with what a loaded model has taken. Buffers take memory only where something is written. The n-gram
//! tables are listed apart, because they stay mapped and the system may drop their pages.

use tf_kernels::{attention, hyper, kv_compress, kv_store};

use super::cache::CacheLayout;
use super::load::WeightBytes;
use super::model::LOGITS_ROWS;
use super::pages::PAGE_POSITIONS;
use super::scratch::{attention_shape, score_floats};
use super::shape::Shape;

/// Weight rows that a thread unpacks at once, at most.
const TILE_ROWS: usize = 16;

/// The plan for one set of options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
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
    /// The list of what is kept on disk. Whoever serves sets this.
    pub disk_index_bytes: u64,
}

impl MemoryPlan {
    /// `pages`: as in the model's options; `None` lets every slot fill while as much again is kept.
    pub fn new(shape: &Shape, slots: u32, context: u32, round_rows: u32, threads: usize, pages: Option<u32>) -> Self {
        let layout = CacheLayout::new(shape, slots, context, pages);
        let rings = (layout.layer_count + layout.draft_count) * layout.window_record_bytes;
        let (scores, activations) = activation_bytes(shape, round_rows as usize, context as usize, threads);
        MemoryPlan {
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
            disk_index_bytes: 0,
        }
    }

    /// Weights, caches and activations together, without the mapped tables.
    pub fn total_bytes(&self) -> u64 {
        self.fixed_bytes() + u64::from(self.slots) * self.slot_bytes + self.page_bytes + self.kept_bytes
    }

    /// What doesn't depend on how many requests run.
    pub fn fixed_bytes(&self) -> u64 {
        let beside = self.program_bytes + self.disk_index_bytes;
        self.weights.resident() + self.indexer_bytes + self.activation_bytes + beside
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
fn activation_bytes(shape: &Shape, rows: usize, context: usize, threads: usize) -> (usize, usize) {
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
    let attention = attention_shape(shape, 0, shape.index_topk, 0);
    let block = attention_shape(shape, 0, 0, shape.dspark_block_size);
    let threads_floats = attention::scratch_floats(attention, threads).max(attention::scratch_floats(block, threads));
    // Of the target and of the draft head.
    let logits = 2 * rows.min(LOGITS_ROWS).max(shape.dspark_block_size) * shape.vocab_size;
    let activations = rows * row + threads_floats + logits;
    (score_floats(context) * float, activations * float + launch_bytes(shape, rows, threads))
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
    fn more_of_anything_takes_more() {
        let plan = |slots, context, rows| MemoryPlan::new(&FLASH, slots, context, rows, 4, None).total_bytes();
        let least = plan(1, 4096, 64);
        assert!(plan(2, 4096, 64) > least && plan(1, 8192, 64) > least && plan(1, 4096, 128) > least);
    }
}
