//! `draft_head`: proposals one after the other, each biased by the one before, and their confidence.
//!
//! For each sequence, `previous = anchor`, then for step `i`:
//! ```text
//! m          = embed[previous]
//! logits     = base[i] + head @ m
//! proposal   = argmax(logits), the smaller id among equals, or the draw of a sampled sequence
//! confidence = (proj[..hidden] . hidden_rows[i]) + (proj[hidden..] . m)                a raw logit
//! previous   = proposal
//! ```
//! `hidden_rows` are the collapsed streams *before* the final norm. Nothing is rounded. A NaN logit is never the maximum; a
//! draw without a candidate proposes token 0, which the target then refuses.
//!
//! Order: `head @ m` is one chain of fused multiply-adds over the rank ascending, `base` added to it; the two parts of the
//! confidence are [`crate::order::sum_products`]. `head` is packed by [`pack`] into blocks of 16 tokens, so that a vector
//! holds 16 tokens and no sum crosses lanes.

pub(crate) mod context;
pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod pack;
pub mod reference;

pub use launch::launch;

use crate::sample::{Draw, History, Scratch, Settings};
use tf_device::Buffer;

/// Rank of the Markov factors, at most.
pub const RANK_MAX: usize = 512;

/// See the module's text.
pub struct Args<'a, 's> {
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
    /// How a sequence, by its index, draws its proposals; `None` takes the argmax.
    pub sampled: &'a dyn Fn(usize) -> Option<Sampled<'s>>,
    /// `[sequences, vocabulary]` f32: the logits of the current step.
    pub logits: &'a mut Buffer,
    /// `[sequences, steps]`.
    pub tokens: &'a mut [u32],
    /// `[sequences, steps]`.
    pub confidence: &'a mut [f32],
    pub scratch: &'a mut Scratch,
}

/// A sequence that draws its proposals by the target's rule and key, without penalties, whose counts the draft head doesn't
/// have, and without masks.
#[derive(Clone, Copy, Debug)]
pub struct Sampled<'a> {
    settings: Settings<'a>,
    position: u32,
}

impl<'a> Sampled<'a> {
    /// `position`: of the first proposal.
    pub fn new(settings: Settings<'a>, position: u32) -> Sampled<'a> {
        let settings = Settings {
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            masked_before: 0,
            ..settings
        };
        Sampled { settings, position }
    }

    /// The draw of step `step` from row `row` of the step's logits.
    fn draw(&self, row: usize, step: usize) -> Draw<'_> {
        Draw {
            row,
            position: self.position + step as u32,
            reply_count: 0,
            settings: &self.settings,
            history: History::default(),
            allowed: None,
            logprobs: None,
            next: None,
        }
    }
}
