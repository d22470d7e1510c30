//! The backbone: layer after layer over the rows of one chunk, on state that holds every position before it.

use tf_kernels::attention::reference::attention;
use tf_kernels::embed::reference::embed;
use tf_kernels::engram::reference as engram;
use tf_kernels::hyper::reference::{MixConstants, Mixes, collapse, expand, mixes, tap};
use tf_kernels::index_key::reference::index_key;
use tf_kernels::index_query::reference::{index_query, index_weights};
use tf_kernels::index_score::reference::index_score;
use tf_kernels::kv_compress::reference as kv_compress;
use tf_kernels::kv_store::reference::window_entries;
use tf_kernels::linear_bf16::reference::{linear_bf16, linear_f32};
use tf_kernels::linear_fp8::reference::{linear_fp8, linear_grouped};
use tf_kernels::lm_head::reference::lm_head;
use tf_kernels::moe_experts::reference::moe;
use tf_kernels::moe_route::reference::route;
use tf_kernels::rms_norm::reference::rms_norm;
use tf_kernels::rope::reference::rotate;
use tf_kernels::top_k::reference::{candidates, masked, top_k};

use super::weights::{Attention, Block, Hyper, Moe};
use super::{DraftState, Model, Record};

/// What a sequence leaves behind in one layer, for every position so far.
#[derive(Clone, Debug, Default)]
pub struct LayerState {
    /// `[positions, head_dim]`: window entries. A row reads the newest `sliding_window` of them.
    pub window: Vec<f64>,
    /// `[positions, head_dim]`: the compressor's values before pooling.
    pub values: Vec<f64>,
    /// `[positions, head_dim]`: its scores. Empty at ratio 1.
    pub scores: Vec<f64>,
    /// `[positions / ratio, head_dim]`.
    pub entries: Vec<f64>,
    /// `[positions / ratio, index_head_dim]`.
    pub index_keys: Vec<f64>,
}

/// A sequence.
#[derive(Clone, Debug)]
pub struct State {
    pub ids: Vec<u32>,
    pub layers: Vec<LayerState>,
    pub draft: DraftState,
}

/// What a forward returns for its rows.
#[derive(Clone, Debug)]
pub struct Forward {
    /// `[rows, vocab_size]`.
    pub logits: Vec<f64>,
    /// `[rows, targets * hidden_size]`: what the draft reads.
    pub taps: Vec<f64>,
}

/// What sources hand down the stack within one forward, for each row.
#[derive(Default)]
struct Carried {
    selections: Vec<Vec<u32>>,
    candidates: Vec<Vec<bool>>,
}

impl Model {
    /// The state before the first token.
    pub fn start(&self) -> State {
        State {
            ids: Vec::new(),
            layers: vec![LayerState::default(); self.dimensions.num_hidden_layers],
            draft: DraftState { keys: vec![Vec::new(); self.dimensions.num_nextn_predict_layers] },
        }
    }

    /// Forgets everything from `position` on.
    pub fn truncate(&self, state: &mut State, position: usize) {
        let d = &self.dimensions;
        state.ids.truncate(position);
        for (layer, layer_state) in state.layers.iter_mut().enumerate() {
            let entries = position.checked_div(d.compress_ratios[layer]).unwrap_or(0);
            layer_state.window.truncate(position * d.head_dim);
            layer_state.values.truncate(position * d.head_dim);
            layer_state.scores.truncate(position * d.head_dim);
            layer_state.entries.truncate(entries * d.head_dim);
            layer_state.index_keys.truncate(entries * d.index_head_dim);
        }
        for keys in &mut state.draft.keys {
            keys.truncate(position * d.head_dim);
        }
    }

    /// Runs the next tokens of a sequence, and gives their taps to its draft context.
    ///
    /// # Panics
    /// When an id is outside the vocabulary.
    pub fn forward(&self, state: &mut State, ids: &[u32], record: &mut Record) -> Forward {
        let d = &self.dimensions;
        let start = state.ids.len();
        state.ids.extend_from_slice(ids);
        let mut streams = embed(&self.weights.embed, d.hidden_size, ids, d.hc_mult);
        let mut mix = self.first_mix(ids.len());
        let mut taps: Vec<Vec<f64>> = vec![Vec::new(); ids.len()];
        let mut carried = Carried::default();

        for (layer, block) in self.weights.layers.iter().enumerate() {
            let name = format!("L{layer:02}");
            if d.engram_layer_ids.contains(&layer) {
                let rows: Vec<Vec<u64>> =
                    (start..state.ids.len()).map(|p| self.table_rows(layer, &state.ids, p)).collect();
                rows.iter().for_each(|rows| {
                    let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
                    record.push_list(&format!("{name}.engram_hash"), &rows);
                });
                streams = self.engram(layer, &streams, &rows);
            }
            if layer == 0 || d.engram_layer_ids.contains(&layer) {
                record.push(&format!("{name}.stream_in"), &streams);
            }
            if d.dspark_target_layer_ids.contains(&layer) {
                for (taps, streams) in taps.iter_mut().zip(streams.chunks(d.hc_mult * d.hidden_size)) {
                    taps.extend(tap(streams, d.hc_mult, self.numerics));
                }
            }
            self.block(block, &name, &mut streams, &mut mix, record, |x, record| {
                self.backbone_attention(layer, x, state, &mut carried, record)
            });
        }

        let hidden = self.collapse_rows(&streams, &mix);
        let normed = rms_norm(&hidden, &self.weights.norm, d.rms_norm_eps, self.numerics);
        record.push("final_norm", &normed);
        let taps = taps.concat();
        record.push("taps", &taps);
        self.extend_draft(&mut state.draft, &taps, start);
        Forward { logits: lm_head(&normed, &self.weights.head, d.hidden_size), taps }
    }

    /// The mix in front of the first sublayer: the first stream alone, while all are equal.
    pub fn first_mix(&self, rows: usize) -> Vec<f64> {
        let hc = self.dimensions.hc_mult;
        (0..rows * hc).map(|i| if i % hc == 0 { 1.0 } else { 0.0 }).collect()
    }

    /// The table rows that position `p` reads at an Engram layer.
    pub fn table_rows(&self, layer: usize, ids: &[u32], p: usize) -> Vec<u64> {
        let back = self.dimensions.engram_max_ngram_size;
        let history: Vec<Option<u32>> =
            (0..back).map(|s| p.checked_sub(s).map(|source| self.token_map[ids[source] as usize])).collect();
        let pad = self.token_map[self.dimensions.engram_pad_token_id];
        engram::table_rows(&history, pad, &self.hashes[&layer])
    }

    /// The streams `[rows, hc_mult, hidden_size]` after the n-gram memory of `layer`.
    pub fn engram(&self, layer: usize, streams: &[f64], table_rows: &[Vec<u64>]) -> Vec<f64> {
        let d = &self.dimensions;
        let weights = &self.weights.engrams[&layer];
        let mut out = Vec::with_capacity(streams.len());
        for (streams, rows) in streams.chunks(d.hc_mult * d.hidden_size).zip(table_rows) {
            let memory: Vec<f64> = rows
                .iter()
                .flat_map(|&row| &weights.table[row as usize * d.engram_head_dim..][..d.engram_head_dim])
                .map(|&value| self.numerics.bf16(value))
                .collect();
            let projected = linear_fp8(&memory, &weights.wkv, memory.len(), self.numerics);
            let (q, k) = (&weights.q_weight, &weights.k_weight);
            out.extend(engram::gate(streams, &projected, q, k, d.hidden_size, d.rms_norm_eps, self.numerics));
        }
        out
    }

    /// One block over rows of streams. `mix` comes from the sublayer before and leaves as the one for the sublayer after.
    pub(super) fn block(
        &self,
        block: &Block,
        name: &str,
        streams: &mut Vec<f64>,
        mix: &mut Vec<f64>,
        record: &mut Record,
        attention: impl FnOnce(&[f64], &mut Record) -> Vec<f64>,
    ) {
        let eps = self.dimensions.rms_norm_eps;
        let made = self.mixes_rows(&block.hc_attn, streams);
        let x = rms_norm(&self.collapse_rows(streams, mix), &block.attn_norm, eps, self.numerics);
        record.push(&format!("{name}.attn_in"), &x);
        let out = attention(&x, record);
        record.push(&format!("{name}.attn_out"), &out);
        *streams = self.expand_rows(&out, streams, &made);
        *mix = made.into_iter().flat_map(|mixes| mixes.pre).collect();

        let made = self.mixes_rows(&block.hc_ffn, streams);
        let x = rms_norm(&self.collapse_rows(streams, mix), &block.ffn_norm, eps, self.numerics);
        record.push(&format!("{name}.ffn_in"), &x);
        let out = self.moe(&block.moe, &x, name, record);
        record.push(&format!("{name}.ffn_out"), &out);
        *streams = self.expand_rows(&out, streams, &made);
        *mix = made.into_iter().flat_map(|mixes| mixes.pre).collect();
        record.push(&format!("{name}.stream"), streams);
        record.push(&format!("{name}.pre_mix"), mix);
    }

    /// The mixes that each row of streams makes.
    pub fn mixes_rows(&self, hyper: &Hyper, streams: &[f64]) -> Vec<Mixes> {
        let d = &self.dimensions;
        let constants =
            MixConstants { hc: d.hc_mult, iterations: d.hc_sinkhorn_iters, hc_eps: d.hc_eps, rms_eps: d.rms_norm_eps };
        let rows = streams.chunks(d.hc_mult * d.hidden_size);
        rows.map(|row| mixes(row, &hyper.weight, &hyper.scale, &hyper.base, constants)).collect()
    }

    /// The rows that a sublayer reads of the streams.
    pub fn collapse_rows(&self, streams: &[f64], mix: &[f64]) -> Vec<f64> {
        let d = &self.dimensions;
        let rows = streams.chunks(d.hc_mult * d.hidden_size).zip(mix.chunks(d.hc_mult));
        rows.flat_map(|(streams, mix)| collapse(streams, mix, self.numerics)).collect()
    }

    /// The streams after a sublayer.
    pub fn expand_rows(&self, out: &[f64], streams: &[f64], mixes: &[Mixes]) -> Vec<f64> {
        let d = &self.dimensions;
        let rows = out.chunks(d.hidden_size).zip(streams.chunks(d.hc_mult * d.hidden_size)).zip(mixes);
        rows.flat_map(|((out, streams), mixes)| expand(out, streams, mixes, self.numerics)).collect()
    }

    /// The mixture of experts over rows `[rows, hidden_size]`.
    pub fn moe(&self, weights: &Moe, x: &[f64], name: &str, record: &mut Record) -> Vec<f64> {
        let d = &self.dimensions;
        let mut out = Vec::with_capacity(x.len());
        for x in x.chunks(d.hidden_size) {
            let route = route(x, &weights.gate, &weights.bias, weights.count, d.routed_scaling_factor);
            record.push_list(&format!("{name}.moe_idx"), &route.experts);
            record.push(&format!("{name}.moe_w"), &route.weights);
            out.extend(moe(x, &route, &weights.experts, &weights.shared, d.swiglu_limit, self.numerics));
        }
        out
    }

    fn backbone_attention(
        &self,
        layer: usize,
        x: &[f64],
        state: &mut State,
        carried: &mut Carried,
        record: &mut Record,
    ) -> Vec<f64> {
        let d = &self.dimensions;
        let rows = x.len() / d.hidden_size;
        let start = state.ids.len() - rows;
        let name = format!("L{layer:02}");
        if self.weights.layers[layer].attention.compressor.is_some() {
            self.compress(layer, x, &mut state.layers[layer], record);
        }
        if self.weights.layers[layer].attention.indexer.is_some() {
            let source = d.kv_source(layer).expect("an index source reads a key source");
            let keys = &state.layers[source].index_keys;
            let bounds = d.candidate_source_layer_id.filter(|&source| source < layer).map(|_| &carried.candidates[..]);
            let scores = self.index_scores(layer, x, start, keys, bounds, |weight| weight);
            let padded = |row: &[f64], len: usize, pad: f64| {
                row.iter().copied().chain(std::iter::repeat(pad)).take(len).collect::<Vec<f64>>()
            };
            let entries = keys.len() / d.index_head_dim;
            for row in &scores {
                record.push(&format!("{name}.index_score"), &padded(row, entries, f64::NEG_INFINITY));
            }
            carried.selections = scores.iter().map(|scores| top_k(scores, d.index_topk)).collect();
            for selection in &carried.selections {
                record.push_list(&format!("{name}.topk"), selection);
            }
            if d.candidate_source_layer_id == Some(layer) {
                let of_row = |scores: &Vec<f64>| candidates(scores, d.candidate_block_size, d.candidate_topk_blocks);
                carried.candidates = scores.iter().map(of_row).collect();
                for row in &carried.candidates {
                    let row: Vec<f64> = row.iter().map(|&kept| f64::from(u8::from(kept))).collect();
                    record.push(&format!("{name}.candidates"), &padded(&row, entries, 0.0));
                }
            }
        }
        // A source's entries are read in the same forward that made them; the window is the layer's own.
        let mut window = std::mem::take(&mut state.layers[layer].window);
        let entries: &[f64] = d.kv_source(layer).map_or(&[], |source| &state.layers[source].entries);
        let none = vec![Vec::new(); rows];
        let selections = if d.kv_source(layer).is_some() { &carried.selections } else { &none };
        let out = self.attention_rows(layer, x, &mut window, entries, selections);
        state.layers[layer].window = window;
        out
    }

    /// Appends the compressor's raw rows for `x`, and the entries and index keys of the groups that these complete.
    pub fn compress(&self, layer: usize, x: &[f64], state: &mut LayerState, record: &mut Record) {
        let d = &self.dimensions;
        let (dim, ratio, eps) = (d.head_dim, d.compress_ratios[layer], d.rms_norm_eps);
        let weights = self.weights.layers[layer].attention.compressor.as_ref().expect("the layer is a source");
        let name = format!("L{layer:02}");
        if let Some(wgate) = &weights.wgate {
            state.values.extend(linear_f32(x, &weights.wkv, d.hidden_size));
            state.scores.extend(linear_f32(x, wgate, d.hidden_size));
        } else {
            state.values.extend(linear_bf16(x, &weights.wkv, d.hidden_size, self.numerics));
        }
        for group in state.entries.len() / dim..state.values.len() / dim / ratio {
            let rows = group * ratio * dim..(group + 1) * ratio * dim;
            let pooled = match &weights.wgate {
                Some(_) => kv_compress::pool(&state.values[rows.clone()], &state.scores[rows], dim, self.numerics),
                None => state.values[rows].to_vec(),
            };
            let latent = kv_compress::latent(&pooled, &weights.norm, eps, self.numerics);
            let (first, frequencies) = ((group * ratio) as u32, self.frequencies(layer));
            let entry = kv_compress::entry(&latent, first, frequencies, self.numerics);
            let (wk, norm) = (&weights.index_wk, &weights.index_norm);
            let key = index_key(&latent, wk, norm, eps, first, frequencies, self.numerics);
            record.push(&format!("{name}.latent"), &latent);
            record.push(&format!("{name}.compressed_kv"), &entry);
            record.push(&format!("{name}.index_keys"), &key);
            state.entries.extend(entry);
            state.index_keys.extend(key);
        }
    }

    /// The index scores of rows `start..` over the entries that each may see, masked with the candidates if given.
    ///
    /// `head_weight` sees each head's weight: the identity gives the scores, the magnitude a scale for their rounding.
    pub fn index_scores(
        &self,
        layer: usize,
        x: &[f64],
        start: usize,
        keys: &[f64],
        candidates: Option<&[Vec<bool>]>,
        head_weight: fn(f64) -> f64,
    ) -> Vec<Vec<f64>> {
        let d = &self.dimensions;
        let weights = &self.weights.layers[layer].attention;
        let indexer = weights.indexer.as_ref().expect("the layer is an index source");
        let low_rank = self.low_rank(weights, x);
        let rows = x.chunks(d.hidden_size).zip(low_rank.chunks(d.q_lora_rank)).enumerate();
        let scores = rows.map(|(row, (x, low_rank))| {
            let position = (start + row) as u32;
            let frequencies = self.frequencies(layer);
            let queries = index_query(low_rank, &indexer.wq_b, d.index_head_dim, position, frequencies, self.numerics);
            let head_weights = index_weights(x, &indexer.weights_proj, d.index_head_dim, self.numerics);
            let head_weights: Vec<f64> = head_weights.into_iter().map(head_weight).collect();
            let visible = kv_compress::visible(position, d.compress_ratios[layer]);
            let scores = index_score(&queries, &head_weights, &keys[..visible * d.index_head_dim], d.index_head_dim);
            candidates.map_or(scores.clone(), |candidates| masked(&scores, &candidates[row]))
        });
        scores.collect()
    }

    /// The attention of a backbone layer over its rows `x`, which follow the positions in `window` and are appended to it.
    ///
    /// `entries`: the compressed entries of the layer's source; `selections`: for each row the ones it reads.
    pub fn attention_rows(
        &self,
        layer: usize,
        x: &[f64],
        window: &mut Vec<f64>,
        entries: &[f64],
        selections: &[Vec<u32>],
    ) -> Vec<f64> {
        let d = &self.dimensions;
        let (weights, frequencies) = (&self.weights.layers[layer].attention, self.frequencies(layer));
        let start = (window.len() / d.head_dim) as u32;
        let positions: Vec<u32> = (start..start + (x.len() / d.hidden_size) as u32).collect();
        window.extend(self.window_keys(weights, x, &positions, frequencies));
        let q = self.queries(weights, x, &positions, frequencies);
        let mut out = Vec::with_capacity(q.len());
        for ((q, &position), selection) in q.chunks(q.len() / positions.len()).zip(&positions).zip(selections) {
            let oldest = (position as usize + 1).saturating_sub(d.sliding_window);
            let selected = selection.iter().map(|&j| &entries[j as usize * d.head_dim..][..d.head_dim]);
            let recent = (oldest..=position as usize).map(|j| &window[j * d.head_dim..][..d.head_dim]);
            let keys: Vec<&[f64]> = selected.chain(recent).collect();
            out.extend(attention(q, &keys, &weights.sinks, position, frequencies, self.numerics));
        }
        self.attention_output(weights, &out)
    }

    fn low_rank(&self, weights: &Attention, x: &[f64]) -> Vec<f64> {
        let projected = linear_fp8(x, &weights.wq_a, self.dimensions.hidden_size, self.numerics);
        rms_norm(&projected, &weights.q_norm, self.dimensions.rms_norm_eps, self.numerics)
    }

    /// The rotated queries of all heads. There is no norm on them.
    pub(super) fn queries(&self, weights: &Attention, x: &[f64], positions: &[u32], frequencies: &[f32]) -> Vec<f64> {
        let d = &self.dimensions;
        let mut q = linear_fp8(&self.low_rank(weights, x), &weights.wq_b, d.q_lora_rank, self.numerics);
        for (row, &position) in q.chunks_mut(d.num_attention_heads * d.head_dim).zip(positions) {
            for head in row.chunks_mut(d.head_dim) {
                rotate(head, position, frequencies, self.numerics);
            }
        }
        q
    }

    pub(super) fn window_keys(
        &self,
        weights: &Attention,
        x: &[f64],
        positions: &[u32],
        frequencies: &[f32],
    ) -> Vec<f64> {
        let d = &self.dimensions;
        let projected = linear_fp8(x, &weights.wkv, d.hidden_size, self.numerics);
        window_entries(&projected, &weights.kv_norm, d.rms_norm_eps, positions, frequencies, self.numerics)
    }

    pub(super) fn attention_output(&self, weights: &Attention, heads: &[f64]) -> Vec<f64> {
        let d = &self.dimensions;
        let inner = d.num_attention_heads * d.head_dim / d.o_groups;
        let grouped = linear_grouped(heads, &weights.wo_a, inner, d.o_groups, self.numerics);
        linear_fp8(&grouped, &weights.wo_b, d.o_groups * d.o_lora_rank, self.numerics)
    }
}
