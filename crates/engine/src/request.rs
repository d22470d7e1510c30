//! What a client asks of the engine and what it hears back.

use tf_text::TokenId;

/// Absolute index of a token in its sequence.
pub type Position = u32;

/// How one token is chosen from a row of logits. The draw itself is a pure function of the row, these settings, the
/// seed and the position; it runs in the model, which owns the logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is argmax.
    pub temperature: f32,
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    pub min_p: f32,
    pub seed: u64,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    pub repetition_penalty: f32,
    /// Added first, before the penalties.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Tokens that may not be drawn before this many reply tokens exist (`min_tokens`): the end tokens.
    pub masked_before: u32,
    pub masked: Vec<TokenId>,
}

impl Sampling {
    /// Greedy decoding without any rule.
    pub fn greedy() -> Self {
        Sampling {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            masked_before: 0,
            masked: Vec::new(),
        }
    }

    /// Whether the draw needs the tokens before it.
    pub fn needs_history(&self) -> bool {
        self.frequency_penalty != 0.0 || self.presence_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}
