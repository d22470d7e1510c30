//! The DSpark draft: its context from the target's taps, and one round of proposals.

use tf_kernels::attention::reference::attention;
use tf_kernels::draft_head::reference::{Proposals, proposals};
use tf_kernels::embed::reference::embed;
use tf_kernels::linear_fp8::reference::linear_fp8;
use tf_kernels::lm_head::reference::lm_head;
use tf_kernels::rms_norm::reference::rms_norm;

use super::{Model, Record, State};

/// What a sequence leaves behind in the draft blocks.
#[derive(Clone, Debug)]
pub struct DraftState {
    /// For each block `[positions, head_dim]`. A round reads the newest `sliding_window` of them.
    pub keys: Vec<Vec<f64>>,
}

/// One round: proposals for the positions after the anchor's.
pub type Draft = Proposals;

impl Model {
    /// Appends the context rows of positions `start..`, made of their taps `[rows, targets * hidden_size]`.
    pub fn extend_draft(&self, state: &mut DraftState, taps: &[f64], start: usize) {
        let (d, weights) = (&self.dimensions, &self.weights.draft);
        let inner = d.dspark_target_layer_ids.len() * d.hidden_size;
        let projected = linear_fp8(taps, &weights.main_proj, inner, self.numerics);
        let x = rms_norm(&projected, &weights.main_norm, d.rms_norm_eps, self.numerics);
        let positions: Vec<u32> = (start..start + taps.len() / inner).map(|p| p as u32).collect();
        for (block, keys) in self.weights.draft_blocks.iter().zip(&mut state.keys) {
            keys.extend(self.window_keys(&block.attention, &x, &positions, &self.frequencies_plain));
        }
    }

    /// Proposals after `anchor`, the token chosen for the position that follows the state's last one. Changes no state.
    ///
    /// # Panics
    /// When the state is empty or `anchor` is outside the vocabulary.
    pub fn draft(&self, state: &State, anchor: u32, record: &mut Record) -> Draft {
        let d = &self.dimensions;
        let first = state.ids.len();
        assert!(first > 0, "a draft needs context");
        let mut ids = vec![d.dspark_noise_token_id; d.dspark_block_size];
        ids[0] = anchor;
        let mut streams = embed(&self.weights.embed, d.hidden_size, &ids, d.hc_mult);
        let mut mix = self.first_mix(ids.len());
        for (i, block) in self.weights.draft_blocks.iter().enumerate() {
            self.block(block, &format!("M{i}"), &mut streams, &mut mix, record, |x, _| {
                self.draft_attention(state, i, x)
            });
        }
        let hidden = self.collapse_rows(&streams, &mix);
        let weights = &self.weights.draft;
        let normed = rms_norm(&hidden, &weights.norm, d.rms_norm_eps, self.numerics);
        let base = lm_head(&normed, &self.weights.head, d.hidden_size);
        let (embed, head) = (&weights.markov_embed, &weights.markov_head);
        proposals(&base, &hidden, embed, head, &weights.confidence, d.dspark_markov_rank, anchor)
    }

    /// The attention of a draft block over the rows `x` that follow the state's last position: every row reads the whole
    /// context and all rows.
    pub fn draft_attention(&self, state: &State, block: usize, x: &[f64]) -> Vec<f64> {
        let (d, frequencies) = (&self.dimensions, &self.frequencies_plain);
        let weights = &self.weights.draft_blocks[block].attention;
        let first = state.ids.len();
        let context = &state.draft.keys[block][first.saturating_sub(d.sliding_window) * d.head_dim..];
        let positions: Vec<u32> = (first..first + x.len() / d.hidden_size).map(|p| p as u32).collect();
        let own = self.window_keys(weights, x, &positions, frequencies);
        let keys: Vec<&[f64]> = context.chunks(d.head_dim).chain(own.chunks(d.head_dim)).collect();
        let q = self.queries(weights, x, &positions, frequencies);
        let rows = q.chunks(d.num_attention_heads * d.head_dim).zip(&positions);
        let heads: Vec<f64> = rows
            .flat_map(|(q, &position)| attention(q, &keys, &weights.sinks, position, frequencies, self.numerics))
            .collect();
        self.attention_output(weights, &heads)
    }
}
