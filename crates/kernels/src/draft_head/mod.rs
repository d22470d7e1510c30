//! `draft_head`: proposals one after the other, each biased by the one before, and their confidence.
//!
//! For each sequence, `previous = anchor`, then for step `i`:
//! ```text
//! m          = embed[previous]
//! logits     = base[i] + head @ m
//! proposal   = argmax(logits), the smaller id among equals, or what `choose` returns for a sampled sequence
//! confidence = (proj[..hidden] . hidden_rows[i]) + (proj[hidden..] . m)                a raw logit
//! previous   = proposal
//! ```
//! `hidden_rows` are the collapsed streams *before* the final norm. Nothing is rounded. A NaN logit is never the maximum; what
//! `choose` returns must be inside the vocabulary, or 0 is taken.
//!
//! Order: `head @ m` is one chain of fused multiply-adds over the rank ascending, `base` added to it; the two parts of the
//! confidence are [`crate::order::sum_products`]. `head` is packed by [`pack`] into blocks of 16 tokens, so that a vector
//! holds 16 tokens and no sum crosses lanes.

pub(crate) mod context;
pub(crate) mod contract;
mod cpu;
mod launch;
pub mod pack;
pub mod reference;

pub use launch::launch;

use tf_device::Buffer;

/// Rank of the Markov factors, at most.
pub const RANK_MAX: usize = 512;

pub struct Args<'a> {
    /// `[sequences, block, vocabulary]` f32: logits of the block's rows.
    pub base: &'a Buffer,
    /// `[sequences, block, hidden]` f32.
    pub hidden_rows: &'a Buffer,
    /// `[sequences]`: the token in front of each block.
    pub anchors: &'a [u32],
    /// `[vocabulary, rank]` bf16.
    pub embed: &'a Buffer,
    /// [`pack::packed_len`] bf16.
    pub head: &'a Buffer,
    /// `[hidden + rank]` f32.
    pub proj: &'a Buffer,
    pub vocabulary: usize,
    /// A multiple of 16, at most [`RANK_MAX`].
    pub rank: usize,
    /// A multiple of 16.
    pub hidden: usize,
    /// Rows of a block in `base` and `hidden_rows`.
    pub block: usize,
    /// Proposals for each sequence, at most `block`.
    pub steps: usize,
    /// `[sequences]`: take the argmax instead of asking `choose`.
    pub greedy: &'a [bool],
    /// `[sequences, vocabulary]` f32: the logits of the current step.
    pub logits: &'a mut Buffer,
    /// `[sequences, steps]`.
    pub tokens: &'a mut [u32],
    /// `[sequences, steps]`.
    pub confidence: &'a mut [f32],
}
