//! The activations of one round: every buffer that the layers write, sized once for the largest round.

use tf_device::gpu::Backend;
use tf_device::{Buffer, Device, LaunchError, Queue};
use tf_kernels::{attention, hyper, kv_compress, kv_store};

use super::rows::RowSet;
use super::shape::Shape;

/// Row buffers, each `[rows, width]` f32 unless said otherwise.
#[derive(Debug)]
pub(super) struct Scratch {
    /// Residual streams `[rows, streams, hidden]`, without the last sublayer's output.
    pub streams: Buffer,
    pub mix: Buffer,
    pub post: Buffer,
    pub comb: Buffer,
    /// Output of the last sublayer, not yet in the streams.
    pub y: Buffer,
    /// Hyper-connections' own.
    pub hyper: Buffer,
    /// Input of a sublayer, and the same after QDQ8.
    pub normed: Buffer,
    pub quantised: Buffer,
    /// Low-rank queries, and the same normed and after QDQ8.
    pub low: Buffer,
    pub low_quantised: Buffer,
    pub q: Buffer,
    pub k: Buffer,
    /// Window records of the round's own rows, bytes.
    pub records: Buffer,
    pub attention: Buffer,
    pub o: Buffer,
    pub z: Buffer,
    /// Raw compressor rows, latents and index key inputs.
    pub raw: Buffer,
    pub latents: Buffer,
    pub index_keys: Buffer,
    pub index_queries: Buffer,
    pub index_weights: Buffer,
    pub index_scores: Buffer,
    /// The newest index source's selection, u32.
    pub selected: Buffer,
    pub selected_counts: Buffer,
    /// Candidate blocks, u32.
    pub blocks: Buffer,
    pub block_counts: Buffer,
    pub gate: Buffer,
    /// Experts of each row, u32, and their weights.
    pub chosen: Buffer,
    pub routing: Buffer,
    /// Engram rows and their projection.
    pub memory: Buffer,
    pub memory_kv: Buffer,
    /// Streams that the draft head reads.
    pub taps: Buffer,
    /// The collapsed streams at the end of a stack.
    pub collapsed: Buffer,
    /// Logits of a batch of drawn rows `[logits_rows, vocabulary]`.
    pub logits: Buffer,
}

/// Index scores are computed in tiles of this many floats at least.
const SCORE_FLOATS: usize = 1 << 16;
/// On a GPU, for this many rows at a time where that is no more than `GPU_SCORE_FLOATS`.
const GPU_TILE_ROWS: usize = 128;
const GPU_SCORE_FLOATS: usize = 1 << 24;

impl Scratch {
    /// # Errors
    /// [`LaunchError::Memory`] when the system refuses.
    pub fn new(
        device: &Device,
        shape: &Shape,
        rows: usize,
        logits_rows: usize,
        context: usize,
        threads: usize,
    ) -> Result<Scratch, LaunchError> {
        let floats = |count: usize| Buffer::zeroed_of::<f32>(device, count);
        let row = |width: usize| floats(rows * width);
        let words = |width: usize| Buffer::zeroed_of::<u32>(device, rows * width);
        let hidden = shape.hidden_size;
        let experts = shape.n_routed_experts.max(shape.dspark_n_routed_experts);
        let picks = shape.num_experts_per_tok.max(shape.dspark_num_experts_per_tok);
        Ok(Scratch {
            streams: row(shape.stream_width())?,
            mix: row(shape.hc_mult)?,
            post: row(shape.hc_mult)?,
            comb: row(shape.hc_mult * shape.hc_mult)?,
            y: row(hidden)?,
            hyper: row(hyper::scratch_floats(hidden))?,
            normed: row(hidden)?,
            quantised: row(hidden)?,
            low: row(shape.q_lora_rank)?,
            low_quantised: row(shape.q_lora_rank)?,
            q: row(shape.query_width())?,
            k: row(shape.head_dim)?,
            records: Buffer::zeroed(device, rows * kv_store::record_bytes(shape.head_dim))?,
            attention: floats(attention_floats(device.backend(), shape, rows, threads))?,
            o: row(shape.query_width())?,
            z: row(shape.o_groups * shape.o_lora_rank)?,
            raw: row(kv_compress::raw_columns(shape.head_dim, 2))?,
            latents: row(shape.head_dim)?,
            index_keys: row(shape.index_head_dim)?,
            index_queries: row(shape.index_n_heads * shape.index_head_dim)?,
            index_weights: row(shape.index_n_heads)?,
            index_scores: floats(score_floats(device.backend(), context, rows))?,
            selected: words(shape.index_topk)?,
            selected_counts: words(1)?,
            blocks: words(shape.candidate_topk_blocks)?,
            block_counts: words(1)?,
            gate: row(experts)?,
            chosen: words(picks)?,
            routing: row(picks)?,
            memory: row(shape.engram_width())?,
            memory_kv: row((shape.hc_mult + 1) * hidden)?,
            taps: row(shape.tap_width())?,
            collapsed: row(hidden)?,
            logits: floats(logits_rows * shape.vocab_size)?,
        })
    }

    /// Lets every buffer that a layer still reads follow from one row set to a smaller one.
    ///
    /// # Errors
    /// [`LaunchError::Device`] when the device fails.
    pub fn shrink(&mut self, queue: &mut Queue, shape: &Shape, from: &RowSet, to: &RowSet) -> Result<(), LaunchError> {
        let hidden = shape.hidden_size;
        let word = size_of::<f32>();
        let buffers: [(&mut Buffer, usize); 11] = [
            (&mut self.streams, shape.stream_width()),
            (&mut self.mix, shape.hc_mult),
            (&mut self.post, shape.hc_mult),
            (&mut self.comb, shape.hc_mult * shape.hc_mult),
            (&mut self.normed, hidden),
            (&mut self.quantised, hidden),
            (&mut self.taps, shape.tap_width()),
            (&mut self.selected, shape.index_topk),
            (&mut self.selected_counts, 1),
            (&mut self.blocks, shape.candidate_topk_blocks),
            (&mut self.block_counts, 1),
        ];
        for (buffer, width) in buffers {
            let (row, mut moved) = (width * word, Ok(()));
            from.moves(to, |source, target, count| {
                if moved.is_ok() {
                    moved = queue.move_within(buffer, source * row, target * row, count * row);
                }
            });
            moved?;
        }
        Ok(())
    }
}

/// Floats that index scores of a context take, for a round of `rows`.
pub(super) fn score_floats(backend: Option<Backend>, context: usize, rows: usize) -> usize {
    let scores = context.next_multiple_of(16);
    match backend {
        None => scores.max(SCORE_FLOATS),
        Some(_) => scores.max((scores * rows.min(GPU_TILE_ROWS)).min(GPU_SCORE_FLOATS)),
    }
}

/// Floats that attention takes beside its operands, over the selection or a draft block.
pub(super) fn attention_floats(backend: Option<Backend>, shape: &Shape, rows: usize, threads: usize) -> usize {
    let shapes =
        [attention_shape(shape, 0, shape.index_topk, 0), attention_shape(shape, 0, 0, shape.dspark_block_size)];
    let each = shapes.map(|shape| match backend {
        None => attention::scratch_floats(shape, threads),
        Some(Backend::Cuda) => attention::gpu_scratch_floats(shape, rows.min(GPU_TILE_ROWS)),
        Some(Backend::Metal) => 0,
    });
    each[0].max(each[1])
}

/// Sizes of an attention with these optional keys.
pub(super) fn attention_shape(
    shape: &Shape,
    ring_len: u32,
    selected_max: usize,
    block_rows: usize,
) -> attention::Shape {
    attention::Shape {
        heads: shape.num_attention_heads,
        head_dim: shape.head_dim,
        window: shape.sliding_window,
        ring_len: ring_len as usize,
        selected_max,
        block_rows,
    }
}
