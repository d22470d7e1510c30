//! The layer graph of one round, a kernel call a line.
//!
//! A round holds windows of several sequences. Every layer computes one set of rows ([`super::rows`]); where late layers
//! need fewer rows, the buffers are compacted once and go on dense. Keys of the round's own rows are read from the round,
//! older ones from the rings; the rings are written after attention has read them.
//!
//! Four things travel down the stack: the streams with their carried mix, the newest compressed cache (a borrowed source
//! index), the newest selection, and the candidate blocks. A sublayer's output stays apart from the streams until the next
//! sublayer enters ([`hyper::launch_enter`] adds it).

use tf_device::{Buffer, LaunchError, Queue};
use tf_kernels::attention::{self, Span};
use tf_kernels::linear_fp8::{self, Finish};
use tf_kernels::rows::{self as kernel_rows, EntryInfo, Pages, RowInfo, WindowInfo};
use tf_kernels::top_k::{CandidateList, CandidateShape, Candidates};
use tf_kernels::{
    embed, engram, hyper, index_key, index_query, index_score, kv_compress, kv_store, linear_bf16, lm_head,
    moe_experts, moe_route, rms_norm,
};
use tf_numerics::rope;

use super::cache::{Cache, CacheError};
use super::draft;
use super::draw::DrawError;
use super::engram::EngramHash;
use super::engram_rows::RowError;
use super::fault::Fault;
use super::load::{Hyper, Layer, Weights};
use super::rows::{RoundRows, RowSet};
use super::scratch::{Scratch, attention_shape};
use super::shape::Shape;

/// Why a round gave nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Engram(#[from] engram::EngramError),
    #[error(transparent)]
    EngramRow(#[from] RowError),
    #[error("{0}")]
    EngramFile(String),
    #[error(transparent)]
    Draw(#[from] DrawError),
    #[error("the round has {rows} rows, the model takes {max}")]
    Rows { rows: usize, max: usize },
    #[error("token {token} is outside the vocabulary of {vocab_size}")]
    Token { token: u32, vocab_size: usize },
    #[error("window {window} of the round: {problem}")]
    Window { window: usize, problem: &'static str },
}

/// Everything a layer reads and writes besides its own weights.
pub(super) struct Step<'a> {
    pub shape: &'a Shape,
    pub tables: &'a Tables,
    pub queue: &'a mut Queue,
    pub scratch: &'a mut Scratch,
}

/// What follows from the configuration and the tokenizer alone.
#[derive(Debug)]
pub(super) struct Tables {
    pub hash: EngramHash,
    /// RoPE frequencies of window-only layers and draft blocks, and of layers with a compressed cache.
    plain: Vec<f32>,
    compressed: Vec<f32>,
}

impl Tables {
    pub fn new(shape: &Shape, hash: EngramHash) -> Tables {
        let scaling = &shape.rope_scaling;
        let yarn = rope::Yarn {
            factor: scaling.factor as f32,
            beta_fast: scaling.beta_fast,
            beta_slow: scaling.beta_slow,
            original_max_position_embeddings: scaling.original_max_position_embeddings as u32,
        };
        Tables {
            hash,
            plain: rope::frequencies(shape.rope_theta, shape.qk_rope_head_dim),
            compressed: rope::yarn_frequencies(shape.compress_rope_theta, shape.qk_rope_head_dim, yarn),
        }
    }

    pub fn frequencies(&self, ratio: usize) -> &[f32] {
        if ratio == 0 { &self.plain } else { &self.compressed }
    }
}

/// The n-gram history of rows: table row ids, written by the host.
#[derive(Debug, Default)]
pub(super) struct History {
    pub ids: Vec<u32>,
}

impl History {
    /// Row ids of every row in one Engram layer.
    fn fill(&mut self, hash: &EngramHash, index: usize, rows: &[RowInfo], cache: &Cache) {
        let columns = hash.columns();
        let lookback = hash.lookback();
        self.ids.clear();
        self.ids.resize(rows.len() * columns, 0);
        for (row, ids) in rows.iter().zip(self.ids.chunks_exact_mut(columns)) {
            let tokens = cache.tokens(row.slot);
            let mut recent = [None; LOOKBACK_MAX];
            for (back, token) in recent[..lookback].iter_mut().enumerate() {
                *token = (row.position as usize).checked_sub(back).map(|position| tokens[position]);
            }
            hash.row_ids(index, &recent[..lookback], ids);
        }
    }
}

/// Longest n-gram whose history is read.
pub(super) const LOOKBACK_MAX: usize = 8;

/// What a round needs besides weights and activations; reused.
pub(super) struct Round<'a> {
    pub rows: &'a RoundRows,
    pub cache: &'a mut Cache,
    pub entries: &'a mut Vec<EntryInfo>,
    pub history: &'a mut History,
    /// Windows whose records enter the rings, where a planted fault leaves some out.
    pub ring_windows: &'a mut Vec<WindowInfo>,
    pub draft: Option<&'a mut draft::Context>,
    pub fault: Fault,
}

/// Runs all layers over the planned rows. On return `scratch.streams` and `scratch.y` hold the last layer's rows, apart.
pub(super) fn layers(
    step: &mut Step<'_>,
    weights: &Weights,
    round: &mut Round<'_>,
    ids: &[u32],
) -> Result<(), StepError> {
    let shape = step.shape;
    let s = &mut *step.scratch;
    embed::launch(
        step.queue,
        embed::Args {
            ids,
            table: &weights.embed,
            columns: shape.hidden_size,
            streams: shape.hc_mult,
            out: &mut s.streams,
            mix: Some(&mut s.mix),
        },
    )?;
    if round.fault == Fault::RowCount && ids.len() > 1 || round.fault == Fault::Threads && step.queue.threads() > 1 {
        let mut first = [0.0];
        step.queue.read(&s.streams, 0, &mut first)?;
        step.queue.write(&mut s.streams, 0, &[first[0] + 0.25])?;
    }
    // Whether `y` holds a sublayer's output that the streams still lack.
    let mut pending = false;
    for layer in 0..shape.num_hidden_layers {
        let enter = round.rows.set(round.rows.enter(layer));
        if pending && (shape.engram_index(layer).is_some() || shape.tap_index(layer).is_some()) {
            expand(step, enter.len())?;
            pending = false;
        }
        if let Some(index) = shape.engram_index(layer) {
            engram(step, weights, round, layer, index)?;
        }
        if let Some(index) = shape.tap_index(layer) {
            tap(step, weights, round, layer, index)?;
        }
        backbone_layer(step, weights, round, layer, pending)?;
        pending = true;
    }
    Ok(())
}

/// Adds the last sublayer's output to the streams.
pub(super) fn expand(step: &mut Step<'_>, rows: usize) -> Result<(), LaunchError> {
    let Step { shape, queue, scratch: s, .. } = step;
    hyper::launch_expand(
        queue,
        hyper::ExpandArgs {
            y: &s.y,
            streams: &mut s.streams,
            post: &s.post,
            comb: &s.comb,
            rows,
            hidden: shape.hidden_size,
        },
    )
}

/// Reads the n-gram memory into the streams.
pub(super) fn engram(
    step: &mut Step<'_>,
    weights: &Weights,
    round: &mut Round<'_>,
    layer: usize,
    index: usize,
) -> Result<(), StepError> {
    let Step { shape, tables, queue, scratch: s } = step;
    let rows = round.rows.set(round.rows.enter(layer));
    let memory = weights.layers[layer].engram.as_ref().expect("an Engram layer has its weights");
    round.history.fill(&tables.hash, index, &rows.rows, round.cache);
    let gathered = weights.engram.rows(index, &round.history.ids)?;
    let (table, ids) = gathered.table(&round.history.ids);
    engram::launch_gather(
        queue,
        engram::GatherArgs {
            codes: table.codes,
            scales: table.scales,
            ids,
            columns: shape.engram_columns(),
            head_dim: shape.engram_head_dim,
            quantise: true,
            out: &mut s.memory,
        },
    )
    .map_err(|error| gathered.named(error, &round.history.ids))?;
    fp8(queue, &s.memory, rows.len(), &memory.wkv, &mut s.memory_kv, Finish::Bf16)?;
    engram::launch_gate(
        queue,
        engram::GateArgs {
            streams: &mut s.streams,
            kv: &s.memory_kv,
            q_weight: &memory.q_weight,
            k_weight: &memory.k_weight,
            eps: shape.rms_norm_eps,
            image: &[],
            rows: rows.len(),
            hidden: shape.hidden_size,
        },
    )?;
    Ok(())
}

/// Keeps the mean of the streams for the draft head; with the last tap the rows enter the draft rings.
fn tap(
    step: &mut Step<'_>,
    weights: &Weights,
    round: &mut Round<'_>,
    layer: usize,
    index: usize,
) -> Result<(), StepError> {
    let Some(draft) = round.draft.as_deref_mut() else {
        return Ok(());
    };
    let shape = step.shape;
    let set = round.rows.set(round.rows.enter(layer));
    hyper::launch_tap(
        step.queue,
        hyper::TapArgs {
            streams: &step.scratch.streams,
            rows: set.len(),
            hidden: shape.hidden_size,
            out: &mut step.scratch.taps,
            out_columns: shape.tap_width(),
            out_offset: index * shape.hidden_size,
            quantise: true,
        },
    )?;
    if index + 1 == shape.dspark_target_layer_ids.len() {
        let stale;
        let set = match round.fault {
            Fault::StaleDrafts => {
                stale_windows(set, round.cache, round.ring_windows);
                stale = RowSet { rows: set.rows.clone(), windows: round.ring_windows.clone() };
                &stale
            }
            _ => set,
        };
        draft::ingest(step, &weights.draft, draft, set, round.cache)?;
    }
    Ok(())
}

/// One layer: attention over its window and the shared caches, then experts. Leaves its output in `y`.
fn backbone_layer(
    step: &mut Step<'_>,
    weights: &Weights,
    round: &mut Round<'_>,
    layer: usize,
    pending: bool,
) -> Result<(), StepError> {
    let shape = step.shape;
    let w = &weights.layers[layer];
    let plan = round.rows;
    let [enter, keys, out] = [plan.enter(layer), plan.keys(layer), plan.out(layer)].map(|set| plan.set(set));
    let frequencies = step.tables.frequencies(shape.ratio(layer));

    let reads_normed = w.compressor.is_some() || w.indexer.is_some();
    enter_attention(step, w, enter.len(), pending, reads_normed)?;
    if w.compressor.is_some() {
        compress(step, w, round, layer, enter, frequencies)?;
    }
    if plan.enter(layer) != plan.keys(layer) {
        step.scratch.shrink(step.queue, shape, enter, keys)?;
    }
    project_keys(step, w, keys, (plan.keys(layer) != plan.out(layer)).then_some(out), frequencies)?;
    if w.indexer.is_some() {
        select(step, w, round, layer, out, frequencies)?;
    }
    project_queries(step, w, out.len())?;
    attend(step, w, round, layer, keys, out, frequencies)?;
    write_ring(step, round, layer, keys)?;
    attention_output(step, w, out.len())?;
    experts(step, w, out.len(), shape.n_routed_experts, shape.num_experts_per_tok)?;
    Ok(())
}

/// Adds a pending `y` to the streams, and makes the input of attention.
pub(super) fn enter_attention(
    step: &mut Step<'_>,
    w: &Layer,
    rows: usize,
    pending: bool,
    reads_normed: bool,
) -> Result<(), LaunchError> {
    let Step { shape, queue, scratch: s, .. } = step;
    hyper::launch_enter(
        queue,
        hyper::EnterArgs {
            y: pending.then_some(&s.y),
            streams: &mut s.streams,
            mix: &mut s.mix,
            post: &mut s.post,
            comb: &mut s.comb,
            weights: mixes(&w.hc_attn),
            norm: &w.attn_norm,
            constants: constants(shape),
            rows,
            hidden: shape.hidden_size,
            normed: reads_normed.then_some(&mut s.normed),
            quantised: Some(&mut s.quantised),
            scratch: &mut s.hyper,
        },
    )
}

fn mixes(hyper: &Hyper) -> hyper::MixWeights<'_> {
    hyper::MixWeights { function: &hyper.function, base: &hyper.base, scale: &hyper.scale }
}

fn constants(shape: &Shape) -> hyper::Constants {
    hyper::Constants { iterations: shape.hc_sinkhorn_iters as u32, hc_eps: shape.hc_eps, norm_eps: shape.rms_norm_eps }
}

/// `out = x @ W^T` for one FP8 weight.
pub(super) fn fp8(
    queue: &mut Queue,
    x: &Buffer,
    rows: usize,
    weights: &linear_fp8::Weights,
    out: &mut Buffer,
    finish: Finish,
) -> Result<(), LaunchError> {
    let products = &mut [linear_fp8::Product { weights, out, finish }];
    linear_fp8::launch(queue, linear_fp8::Args { x, rows, groups: 1, products })
}

/// `out = x @ W^T` for one unquantised weight.
pub(super) fn plain(
    queue: &mut Queue,
    x: &Buffer,
    rows: usize,
    weights: &linear_bf16::Weights,
    out: &mut Buffer,
    finish: Finish,
) -> Result<(), LaunchError> {
    let products = &mut [linear_bf16::Product { weights, out, finish }];
    linear_bf16::launch(queue, linear_bf16::Args { x, rows, products })
}

/// The compressed entries that the rows complete, and their index keys.
pub(super) fn compress(
    step: &mut Step<'_>,
    w: &Layer,
    round: &mut Round<'_>,
    layer: usize,
    set: &RowSet,
    frequencies: &[f32],
) -> Result<(), LaunchError> {
    let Step { shape, queue, scratch: s, .. } = step;
    let compressor = w.compressor.as_ref().expect("the caller checked");
    let source = source_index(shape, layer);
    let ratio = shape.ratio(layer) as u32;
    let finish = if ratio == 1 { Finish::Bf16 } else { Finish::F32 };
    plain(queue, &s.normed, set.len(), &compressor.raw, &mut s.raw, finish)?;
    kernel_rows::completed_entries(&set.rows, ratio, round.entries);
    let layout = round.cache.layout();
    let (pages_per_slot, pair_ring_len) = (layout.pages_per_slot as usize, layout.pair_ring_len as usize);
    let entries_per_page = layout.entries_per_page(source) as usize;
    let cache = &mut *round.cache;
    let pages = Pages { table: &cache.page_table, pages_per_slot, entries_per_page };
    let raw_ring = &mut cache.pairs[source];
    if round.fault == Fault::PairRowLost {
        queue.fill_zero(raw_ring, 0, raw_ring.len_bytes())?;
    }
    kv_compress::launch(
        queue,
        kv_compress::Args {
            raw: &s.raw,
            rows: &set.rows,
            windows: &set.windows,
            entries: round.entries,
            ratio,
            norm: &compressor.norm,
            eps: shape.rms_norm_eps,
            frequencies,
            head_dim: shape.head_dim,
            raw_ring: (ratio > 1).then_some(raw_ring),
            raw_len: pair_ring_len,
            cache: &mut cache.compressed[source],
            pages,
            latents: &mut s.latents,
        },
    )?;
    plain(queue, &s.latents, round.entries.len(), &compressor.keys.wk, &mut s.index_keys, Finish::Bf16)?;
    index_key::launch(
        queue,
        index_key::Args {
            x: &s.index_keys,
            norm: &compressor.keys.norm,
            eps: shape.rms_norm_eps,
            entries: round.entries,
            ratio,
            frequencies,
            head_dim: shape.index_head_dim,
            cache: &mut cache.index_keys[source],
            pages,
        },
    )
}

/// Index of `layer`'s kv source among the kv sources.
pub(super) fn source_index(shape: &Shape, layer: usize) -> usize {
    let source = shape.kv_source(layer).expect("a layer with a compressed cache has a source");
    shape.kv_source_layer_ids.iter().position(|id| *id == source).expect("a source is in the list")
}

/// Window records and queries of the rows `set`.
pub(super) fn project_keys_and_queries(
    step: &mut Step<'_>,
    w: &Layer,
    set: &RowSet,
    frequencies: &[f32],
) -> Result<(), LaunchError> {
    project_keys(step, w, set, None, frequencies)?;
    project_queries(step, w, set.len())
}

/// Window records of the rows `keys`, and what queries are made of, of the rows `out` where those are fewer.
fn project_keys(
    step: &mut Step<'_>,
    w: &Layer,
    keys: &RowSet,
    out: Option<&RowSet>,
    frequencies: &[f32],
) -> Result<(), LaunchError> {
    let Step { shape, queue, scratch: s, .. } = step;
    let key = linear_fp8::Product { weights: &w.attention.wkv, out: &mut s.k, finish: Finish::Bf16 };
    let low = linear_fp8::Product { weights: &w.attention.wq_a, out: &mut s.low, finish: Finish::Bf16 };
    let args = |x, rows, products| linear_fp8::Args { x, rows, groups: 1, products };
    match out {
        None => linear_fp8::launch(queue, args(&s.quantised, keys.len(), &mut [low, key]))?,
        Some(out) => {
            linear_fp8::launch(queue, args(&s.quantised, keys.len(), &mut [key]))?;
            s.shrink(queue, shape, keys, out)?;
            fp8(queue, &s.quantised, out.len(), &w.attention.wq_a, &mut s.low, Finish::Bf16)?;
        }
    }
    let records = kv_store::Args {
        x: &s.k,
        norm: &w.attention.kv_norm,
        eps: shape.rms_norm_eps,
        rows: &keys.rows,
        frequencies,
        head_dim: shape.head_dim,
        records: &mut s.records,
    };
    // Attention is the first to read them.
    queue.beside(|queue| kv_store::launch(queue, records))?;
    let rows = out.unwrap_or(keys).len();
    rms_norm::launch(
        queue,
        rms_norm::Args {
            x: &s.low,
            weight: &w.attention.q_norm,
            rows,
            columns: shape.q_lora_rank,
            eps: shape.rms_norm_eps,
            normed: None,
            quantised: Some(&mut s.low_quantised),
        },
    )
}

/// The queries of attention.
fn project_queries(step: &mut Step<'_>, w: &Layer, rows: usize) -> Result<(), LaunchError> {
    let Step { queue, scratch: s, .. } = step;
    fp8(queue, &s.low_quantised, rows, &w.attention.wq_b, &mut s.q, Finish::Bf16)
}

/// The entries that each row reads, chosen by an index source from the newest compressed cache.
pub(super) fn select(
    step: &mut Step<'_>,
    w: &Layer,
    round: &mut Round<'_>,
    layer: usize,
    set: &RowSet,
    frequencies: &[f32],
) -> Result<(), LaunchError> {
    let Step { shape, queue, scratch: s, .. } = step;
    let indexer = w.indexer.as_ref().expect("the caller checked");
    let source = source_index(shape, layer);
    let ratio = shape.ratio(layer) as u32;
    // Rows that see no more than they may keep are not scored, so their queries are not needed.
    let seen = set.rows.iter().map(|row| kernel_rows::visible(row.position, ratio)).max().unwrap_or(0);
    if seen > shape.index_topk {
        fp8(queue, &s.low_quantised, set.len(), &indexer.wq_b, &mut s.index_queries, Finish::Bf16)?;
        plain(queue, &s.normed, set.len(), &indexer.weights_proj, &mut s.index_weights, Finish::Bf16)?;
        index_query::launch(
            queue,
            index_query::Args {
                queries: &mut s.index_queries,
                weights: &mut s.index_weights,
                rows: &set.rows,
                frequencies,
                heads: shape.index_n_heads,
                head_dim: shape.index_head_dim,
            },
        )?;
    }
    let candidate_shape =
        CandidateShape { blocks_max: shape.candidate_topk_blocks, block_size: shape.candidate_block_size };
    let candidates = match shape.candidate_source_layer_id {
        Some(source) if source == layer => {
            Candidates::Publish { shape: candidate_shape, blocks: &mut s.blocks, counts: &mut s.block_counts }
        }
        Some(_) if shape.masks_candidates(layer) => {
            Candidates::Restrict(CandidateList { shape: candidate_shape, blocks: &s.blocks, counts: &s.block_counts })
        }
        _ => Candidates::None,
    };
    let layout = round.cache.layout();
    index_score::launch_select(
        queue,
        index_score::SelectArgs {
            scored: index_score::Scored {
                queries: &s.index_queries,
                weights: &s.index_weights,
                rows: &set.rows,
                ratio,
                keys: &round.cache.index_keys[source],
                pages: Pages {
                    table: &round.cache.page_table,
                    pages_per_slot: layout.pages_per_slot as usize,
                    entries_per_page: layout.entries_per_page(source) as usize,
                },
                heads: shape.index_n_heads,
                head_dim: shape.index_head_dim,
            },
            top_k: shape.index_topk,
            candidates,
            scratch: &mut s.index_scores,
            selected: &mut s.selected,
            counts: &mut s.selected_counts,
        },
    )
}

/// Attention of the rows `out` over the rings, the fresh records of `keys` and the selected entries.
pub(super) fn attend(
    step: &mut Step<'_>,
    w: &Layer,
    round: &mut Round<'_>,
    layer: usize,
    keys: &RowSet,
    out: &RowSet,
    frequencies: &[f32],
) -> Result<(), LaunchError> {
    let Step { shape, queue, scratch: s, .. } = step;
    let cache = &*round.cache;
    let layout = cache.layout();
    let compressed = (shape.ratio(layer) > 0).then(|| {
        let source = source_index(shape, layer);
        attention::Compressed {
            cache: &cache.compressed[source],
            pages: Pages {
                table: &cache.page_table,
                pages_per_slot: layout.pages_per_slot as usize,
                entries_per_page: layout.entries_per_page(source) as usize,
            },
            selected: &s.selected,
            counts: &s.selected_counts,
        }
    });
    let selected_max = if compressed.is_some() { shape.index_topk } else { 0 };
    attention::launch(
        queue,
        attention::Args {
            shape: attention_shape(shape, layout.ring_len, selected_max, 0),
            span: Span::Causal,
            q: &s.q,
            rows: &out.rows,
            windows: &keys.windows,
            records: &s.records,
            ring: &cache.windows[layer],
            compressed,
            sinks: &w.attention.sinks,
            frequencies,
            scratch: &mut s.attention,
            out: &mut s.o,
        },
    )
}

/// Copies the rows' records into the layer's ring, after attention has read it.
fn write_ring(step: &mut Step<'_>, round: &mut Round<'_>, layer: usize, keys: &RowSet) -> Result<(), LaunchError> {
    let windows = match round.fault {
        Fault::StaleRing => {
            stale_windows(keys, round.cache, round.ring_windows);
            &*round.ring_windows
        }
        _ => &keys.windows,
    };
    let ring_len = round.cache.layout().ring_len as usize;
    let args = kv_store::RingArgs {
        records: &step.scratch.records,
        windows,
        head_dim: step.shape.head_dim,
        ring: &mut round.cache.windows[layer],
        ring_len,
    };
    // Nothing of this round reads them there.
    step.queue.beside(|queue| kv_store::launch_ring(queue, args))
}

/// Leaves out the positions that a rejected row has written before.
fn stale_windows(keys: &RowSet, cache: &Cache, left: &mut Vec<WindowInfo>) {
    left.clear();
    for window in &keys.windows {
        let written = cache.written(window.slot).saturating_sub(window.start).min(window.row_count);
        left.push(WindowInfo {
            slot: window.slot,
            start: window.start + written,
            first_row: window.first_row + written,
            row_count: window.row_count - written,
        });
    }
}

/// The two output projections; the result is the sublayer's `y`.
pub(super) fn attention_output(step: &mut Step<'_>, w: &Layer, rows: usize) -> Result<(), LaunchError> {
    let Step { shape, queue, scratch: s, .. } = step;
    let products = &mut [linear_fp8::Product { weights: &w.attention.wo_a, out: &mut s.z, finish: Finish::Qdq8 }];
    linear_fp8::launch(queue, linear_fp8::Args { x: &s.o, rows, groups: shape.o_groups, products })?;
    fp8(queue, &s.z, rows, &w.attention.wo_b, &mut s.y, Finish::Bf16)
}

/// The second half of a layer: adds attention's output to the streams, then the experts. The result is `y`.
pub(super) fn experts(
    step: &mut Step<'_>,
    w: &Layer,
    rows: usize,
    expert_count: usize,
    picks: usize,
) -> Result<(), LaunchError> {
    enter_experts(step, w, rows)?;
    route_and_run_experts(step, w, rows, expert_count, picks)
}

/// Adds attention's `y` to the streams, and makes the input of the experts.
pub(super) fn enter_experts(step: &mut Step<'_>, w: &Layer, rows: usize) -> Result<(), LaunchError> {
    let Step { shape, queue, scratch: s, .. } = step;
    hyper::launch_enter(
        queue,
        hyper::EnterArgs {
            y: Some(&s.y),
            streams: &mut s.streams,
            mix: &mut s.mix,
            post: &mut s.post,
            comb: &mut s.comb,
            weights: mixes(&w.hc_ffn),
            norm: &w.ffn_norm,
            constants: constants(shape),
            rows,
            hidden: shape.hidden_size,
            normed: Some(&mut s.normed),
            quantised: Some(&mut s.quantised),
            scratch: &mut s.hyper,
        },
    )
}

/// Routes `normed` and runs the experts on `quantised`.
pub(super) fn route_and_run_experts(
    step: &mut Step<'_>,
    w: &Layer,
    rows: usize,
    expert_count: usize,
    picks: usize,
) -> Result<(), LaunchError> {
    let Step { shape, queue, scratch: s, .. } = step;
    plain(queue, &s.normed, rows, &w.router.gate, &mut s.gate, Finish::F32)?;
    moe_route::launch(
        queue,
        moe_route::Args {
            logits: &s.gate,
            bias: &w.router.bias,
            bias_image: None,
            image: &[],
            rows,
            experts: expert_count,
            top_k: picks,
            factor: shape.routed_scaling_factor,
            chosen: &mut s.chosen,
            weights: &mut s.routing,
        },
    )?;
    moe_experts::launch(
        queue,
        moe_experts::Args {
            weights: &w.experts,
            x: &s.quantised,
            rows,
            picks,
            selected: &s.chosen,
            routing: &s.routing,
            limit: shape.swiglu_limit,
            out: &mut s.y,
        },
    )
}

/// The end of a stack: adds the last `y`, collapses the streams and norms them. `collapsed` holds the rows before the norm,
/// `normed` after it.
pub(super) fn finish(step: &mut Step<'_>, norm: &Buffer, rows: usize, keep_collapsed: bool) -> Result<(), LaunchError> {
    expand(step, rows)?;
    let Step { shape, queue, scratch: s, .. } = step;
    hyper::launch_collapse(
        queue,
        hyper::CollapseArgs {
            streams: &s.streams,
            mix: &s.mix,
            norm,
            norm_eps: shape.rms_norm_eps,
            rows,
            hidden: shape.hidden_size,
            collapsed: keep_collapsed.then_some(&mut s.collapsed),
            normed: Some(&mut s.normed),
            quantised: None,
        },
    )
}

/// Logits of chosen rows of `normed`.
pub(super) fn head(step: &mut Step<'_>, weights: &lm_head::Weights, row_indices: &[u32]) -> Result<(), LaunchError> {
    let Step { queue, scratch: s, .. } = step;
    lm_head::launch(queue, lm_head::Args { weights, x: &s.normed, row_indices, out: &mut s.logits })
}
