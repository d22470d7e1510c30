//! `sample`: one token from each row of logits, and log-probabilities. Decision 0004 fixes the bits.
//!
//! A row's rules, in this order: `logit_bias`; repetition, frequency and presence penalty; grammar mask and masked tokens;
//! division by the temperature; candidates in the order (value descending, id ascending); top-k; top-p; min-p; the largest
//! `value + noise`, with Gumbel noise keyed by (seed, position, token id), the earlier candidate among equals. Temperature 0,
//! or one so small that the largest value overflows: the largest logit after bias, penalties and masks, the lowest id among
//! equals. With `e = exp(value - largest)` a candidate weighs `floor(e * 2^40)`; top-p adds these integers, so that no order
//! of summation exists. Minus infinity is no candidate.
//!
//! Log-probabilities come from the raw row at temperature 1: `(logit - largest) - ln(total * 2^-40)` with the same integer
//! weights, so they do not depend on any setting, and a tail below `2^-40` of the likeliest counts as nothing.
//!
//! Shapes and types: see [`Args`]. Everything is float32 with the functions of [`tf_numerics::math`]. A row with a NaN or plus
//! infinity draws nothing and says so in its [`Outcome`]. Nothing is allocated once [`Scratch`] has seen the largest row.

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;
#[cfg(test)]
mod tests;

pub(crate) use cpu::draw_one;
pub(crate) use gpu::into_tokens;
pub use launch::launch;

use tf_device::Buffer;

/// How a token is chosen. Ranges are checked where they come from; here a value outside its range switches a rule off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings<'a> {
    /// 0 is argmax.
    pub temperature: f32,
    /// Smallest share that the likeliest tokens must reach; 1 is off.
    pub top_p: f32,
    /// So many tokens stay; 0 is off.
    pub top_k: u32,
    /// Least probability relative to the likeliest; 0 is off.
    pub min_p: f32,
    pub seed: u64,
    /// Times the token's count in the reply; 0 is off.
    pub frequency_penalty: f32,
    /// For each token that the reply has; 0 is off.
    pub presence_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens that prompt or reply have; 1 is off.
    pub repetition_penalty: f32,
    /// Added first. Ids outside the vocabulary are ignored.
    pub logit_bias: &'a [(u32, f32)],
    /// Tokens that may not be drawn before the reply has `masked_before` tokens.
    pub masked: &'a [u32],
    pub masked_before: u32,
}

impl Settings<'_> {
    /// The largest logit, without any rule.
    pub const GREEDY: Settings<'static> = Settings {
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        seed: 0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        repetition_penalty: 1.0,
        logit_bias: &[],
        masked: &[],
        masked_before: 0,
    };

    /// Whether the draw needs the tokens before it.
    pub fn needs_history(&self) -> bool {
        self.counts_reply() || self.repetition_penalty != 1.0
    }

    fn counts_reply(&self) -> bool {
        self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }
}

/// The tokens before a draw, for penalties. Empty where [`Settings::needs_history`] is false.
#[derive(Clone, Copy, Debug, Default)]
pub struct History<'a> {
    pub prompt: &'a [u32],
    /// Committed tokens of the reply.
    pub reply: &'a [u32],
    /// Tokens of the same window up to and including the row's own; they count as reply.
    pub window: &'a [u32],
}

/// One token to draw.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    /// Row of the logits.
    pub row: usize,
    /// Absolute position of the token to be drawn: one more than the row's own.
    pub position: u32,
    /// Tokens the reply has before this draw, for `masked_before`.
    pub reply_count: u32,
    pub settings: &'a Settings<'a>,
    pub history: History<'a>,
    /// A grammar's mask: bit `id % 32` of word `id / 32` allows a token. `None` allows all; what the mask lacks is forbidden.
    pub allowed: Option<&'a [u32]>,
    /// `Some(n)`: log-probabilities of the drawn token and of the `n` likeliest.
    pub logprobs: Option<u32>,
    /// A token whose log-probability is wanted: the prompt's next one. Must be inside the vocabulary.
    pub next: Option<u32>,
}

/// One drawn row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    pub token: u32,
    /// Log-probability of `token`; 0 without [`Draw::logprobs`].
    pub logprob: f32,
    /// Log-probability of [`Draw::next`]; 0 without it.
    pub next_logprob: f32,
    /// Range of the row's likeliest tokens in [`Args::top`], in order.
    pub top_start: u32,
    pub top_count: u32,
}

/// Why a row has no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    #[error("the logits of a row hold NaN or infinity: the checkpoint is damaged or a kernel is wrong")]
    NotFinite,
    #[error("no token may be drawn: masks and biases forbid all of them")]
    NoCandidate,
}

/// What a row gave.
pub type Outcome = Result<Drawn, RowError>;

pub struct Args<'a> {
    /// `[rows, vocab]` f32, row-major.
    pub logits: &'a Buffer,
    pub vocab: usize,
    pub draws: &'a [Draw<'a>],
    /// Receives one outcome a draw, in order.
    pub outcomes: &'a mut Vec<Outcome>,
    /// Receives the likeliest tokens and their log-probabilities, draw by draw.
    pub top: &'a mut Vec<(u32, f32)>,
    pub scratch: &'a mut Scratch,
}

/// Working memory, kept from launch to launch.
#[derive(Debug, Default)]
pub struct Scratch {
    threads: Vec<cpu::RowScratch>,
    encoded: gpu::Encoded,
}

/// Largest vocabulary: sums of weights stay below 2^60.
pub const VOCAB_MAX: usize = 1 << 20;
