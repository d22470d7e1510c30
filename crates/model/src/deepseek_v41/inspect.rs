//! Rows that a reply never shows: what `logits` prints of the draft head.

use tf_engine::model::{ForwardError, SlotIndex};
use tf_numerics::math;

use super::draft::{self, Anchor};
use super::forward::Step;
use super::model::DeepseekV41;

/// One greedy round of the draft head.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftRows {
    /// Proposals for the positions after the anchor.
    pub tokens: Vec<u32>,
    /// Markov-corrected logits, `[tokens, vocab]`.
    pub logits: Vec<f32>,
    /// Raw confidences; their sigmoid is an acceptance probability.
    pub confidence: Vec<f32>,
}

impl DraftRows {
    /// Acceptance probability of each proposal.
    pub fn probabilities(&self) -> impl Iterator<Item = f32> {
        self.confidence.iter().map(|raw| math::sigmoid(*raw))
    }
}

impl DeepseekV41 {
    /// What the draft head proposes after `anchor`, the token at the slot's kept length. `None` without a draft head or
    /// before the second position, which the head's context needs.
    ///
    /// # Errors
    /// [`ForwardError::Failed`] when a launch refuses its arguments.
    pub fn draft_rows(&mut self, slot: SlotIndex, anchor: u32) -> Result<Option<DraftRows>, ForwardError> {
        let position = self.length(slot);
        let Some(context) = self.draft.as_mut() else { return Ok(None) };
        if position < 2 {
            return Ok(None);
        }
        let (shape, tables) = (&self.shape, &self.tables);
        let mut step = Step { shape, tables, queue: &mut self.queue, scratch: &mut self.scratch };
        let failed = |error: super::forward::StepError| ForwardError::Failed(error.to_string());
        let anchors = std::iter::once(Anchor { slot: slot.0, token: anchor, position });
        draft::blocks(&mut step, &self.weights, context, &self.cache, anchors).map_err(failed)?;
        let steps = shape.dspark_block_size;
        // The logits of the last step stay behind, so a chain a step shows them all.
        let mut logits = vec![0f32; steps * shape.vocab_size];
        for (step_index, row) in logits.chunks_exact_mut(shape.vocab_size).enumerate() {
            let draws = self.draws.scratch();
            draft::chain(&mut step, &self.weights.draft, context, &[anchor], &|_| None, step_index + 1, draws)
                .map_err(failed)?;
            context.step_logits.read(0, row).map_err(|error| failed(error.into()))?;
        }
        Ok(Some(DraftRows { tokens: context.tokens.clone(), logits, confidence: context.confidence.clone() }))
    }
}
