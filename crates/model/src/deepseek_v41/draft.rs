//! The draft head: context rows made from the target's taps during its own forward, and blocks of proposals.
//!
//! Every forwarded row whose window a later draft can see enters the draft rings, addressed by position like the target's
//! own. A block of the anchor and noise tokens then runs through the draft layers, all its rows seeing the ring and each
//! other, and a Markov chain turns its logits into proposals. Sampled proposals use the target's rule with the target's
//! key, so that a good drafter proposes what the target will draw.
//!
//! Writes nothing that the target reads.

use std::ops::Range;

use tf_device::{Buffer, Device, LaunchError};
use tf_kernels::attention::{self, Span};
use tf_kernels::draft_head::{self, Sampled};
use tf_kernels::linear_fp8::Finish;
use tf_kernels::{embed, kv_store, rms_norm, sample};

use super::cache::Cache;
use super::forward::{self, Step, StepError, fp8};
use super::load::{Draft, Layer, Weights};
use super::rows::RowSet;
use super::scratch::attention_shape;
use super::shape::Shape;

/// Buffers of the draft head's own.
#[derive(Debug)]
pub(super) struct Context {
    /// Projected taps `[rows, hidden]`, and the same normed and after QDQ8.
    projected: Buffer,
    quantised: Buffer,
    /// For each block, keys `[rows, head_dim]` before norm and RoPE.
    keys: Vec<Buffer>,
    /// `[sequences, vocabulary]` f32: logits of one step of the chain.
    pub(super) step_logits: Buffer,
    rows: RowSet,
    ids: Vec<u32>,
    row_indices: Vec<u32>,
    /// Proposals of a batch `[sequences, steps]`, and their confidences.
    pub tokens: Vec<u32>,
    pub confidence: Vec<f32>,
}

impl Context {
    /// # Errors
    /// [`LaunchError::Memory`] when the system refuses.
    pub fn new(device: &Device, shape: &Shape, rows: usize, sequences: usize) -> Result<Context, LaunchError> {
        let floats = |count: usize| Buffer::zeroed_of::<f32>(device, count);
        let keys = (0..shape.num_nextn_predict_layers).map(|_| floats(rows * shape.head_dim));
        Ok(Context {
            projected: floats(rows * shape.hidden_size)?,
            quantised: floats(rows * shape.hidden_size)?,
            keys: keys.collect::<Result<Vec<_>, _>>()?,
            step_logits: floats(sequences * shape.vocab_size)?,
            rows: RowSet::default(),
            ids: Vec::new(),
            row_indices: Vec::new(),
            tokens: Vec::new(),
            confidence: Vec::new(),
        })
    }
}

/// Lets the rows `set`, whose taps are in the scratch, enter the draft rings.
pub(super) fn ingest(
    step: &mut Step<'_>,
    draft: &Draft,
    context: &mut Context,
    set: &RowSet,
    cache: &mut Cache,
) -> Result<(), LaunchError> {
    let Step { shape, tables, queue, scratch: s } = step;
    let rows = set.len();
    fp8(queue, &s.taps, rows, &draft.main_proj, &mut context.projected, Finish::Bf16)?;
    rms_norm::launch(
        queue,
        rms_norm::Args {
            x: &context.projected,
            weight: &draft.main_norm,
            rows,
            columns: shape.hidden_size,
            eps: shape.rms_norm_eps,
            normed: None,
            quantised: Some(&mut context.quantised),
        },
    )?;
    let ring_len = cache.layout().ring_len as usize;
    for ((block, keys), ring) in draft.blocks.iter().zip(&mut context.keys).zip(&mut cache.drafts) {
        fp8(queue, &context.quantised, rows, &block.attention.wkv, keys, Finish::Bf16)?;
        kv_store::launch(
            queue,
            kv_store::Args {
                x: keys,
                norm: &block.attention.kv_norm,
                eps: shape.rms_norm_eps,
                rows: &set.rows,
                frequencies: tables.frequencies(0),
                head_dim: shape.head_dim,
                records: &mut s.records,
            },
        )?;
        let args =
            kv_store::RingArgs { records: &s.records, windows: &set.windows, head_dim: shape.head_dim, ring, ring_len };
        kv_store::launch_ring(queue, args)?;
    }
    Ok(())
}

/// One sequence of a draft batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Anchor {
    pub slot: u32,
    pub token: u32,
    pub position: u32,
}

/// Runs the blocks of `anchors` through the draft layers; leaves the base logits in `scratch.logits`, row after row, and the
/// collapsed streams in `scratch.collapsed`.
pub(super) fn blocks(
    step: &mut Step<'_>,
    weights: &Weights,
    context: &mut Context,
    cache: &Cache,
    anchors: impl Iterator<Item = Anchor>,
) -> Result<(), StepError> {
    let shape = step.shape;
    let block = shape.dspark_block_size as u32;
    context.rows.rows.clear();
    context.rows.windows.clear();
    context.ids.clear();
    for Anchor { slot, token, position } in anchors {
        context.rows.push(slot, position..position + block);
        context.ids.push(token);
        context.ids.extend((1..block).map(|_| shape.dspark_noise_token_id));
    }
    let set = &context.rows;
    let s = &mut *step.scratch;
    embed::launch(
        step.queue,
        embed::Args {
            ids: &context.ids,
            table: &weights.embed,
            columns: shape.hidden_size,
            streams: shape.hc_mult,
            out: &mut s.streams,
            mix: Some(&mut s.mix),
        },
    )?;
    for (index, w) in weights.draft.blocks.iter().enumerate() {
        forward::enter_attention(step, w, set.len(), index > 0, false)?;
        block_attention(step, w, set, cache, index)?;
        forward::experts(step, w, set.len(), shape.dspark_n_routed_experts, shape.dspark_num_experts_per_tok)?;
    }
    forward::finish(step, &weights.draft.norm, set.len(), true)?;
    context.row_indices.clear();
    context.row_indices.extend(0..set.len() as u32);
    forward::head(step, &weights.head, &context.row_indices)?;
    Ok(())
}

/// The attention sublayer of one draft block: its rows see the ring and each other.
pub(super) fn block_attention(
    step: &mut Step<'_>,
    w: &Layer,
    set: &RowSet,
    cache: &Cache,
    index: usize,
) -> Result<(), LaunchError> {
    let frequencies = step.tables.frequencies(0);
    forward::project_keys_and_queries(step, w, set, frequencies)?;
    let Step { shape, queue, scratch: s, .. } = step;
    attention::launch(
        queue,
        attention::Args {
            shape: attention_shape(shape, cache.layout().ring_len, 0, shape.dspark_block_size),
            span: Span::Block,
            q: &s.q,
            rows: &set.rows,
            windows: &set.windows,
            records: &s.records,
            ring: &cache.drafts[index],
            compressed: None,
            sinks: &w.attention.sinks,
            frequencies,
            scratch: &mut s.attention,
            out: &mut s.o,
        },
    )?;
    forward::attention_output(step, w, set.len())
}

/// The Markov chain over the base logits of `anchors`: `steps` proposals a sequence into `context.tokens`. A sequence for which
/// `sampled` has nothing takes the argmax.
pub(super) fn chain<'s>(
    step: &mut Step<'_>,
    draft: &Draft,
    context: &mut Context,
    anchors: &[u32],
    sampled: &dyn Fn(usize) -> Option<Sampled<'s>>,
    steps: usize,
    scratch: &mut sample::Scratch,
) -> Result<(), StepError> {
    let Step { shape, queue, scratch: s, .. } = step;
    context.tokens.clear();
    context.tokens.resize(anchors.len() * steps, 0);
    context.confidence.clear();
    context.confidence.resize(anchors.len() * steps, 0.0);
    draft_head::launch(
        queue,
        draft_head::Args {
            base: &s.logits,
            hidden_rows: &s.collapsed,
            anchors,
            embed: &draft.markov_embed,
            head: &draft.markov_head,
            proj: &draft.confidence,
            vocabulary: shape.vocab_size,
            rank: shape.dspark_markov_rank,
            hidden: shape.hidden_size,
            block: shape.dspark_block_size,
            steps,
            sampled,
            logits: &mut context.step_logits,
            tokens: &mut context.tokens,
            confidence: &mut context.confidence,
            scratch,
        },
    )?;
    Ok(())
}

/// The proposals of one sequence of the batch.
pub(super) fn proposals(sequence: usize, steps: usize, count: usize) -> Range<usize> {
    sequence * steps..sequence * steps + count.min(steps)
}
