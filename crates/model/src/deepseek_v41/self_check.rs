//! A few rows through the loaded model: what a server tries before it says that it is ready.
//!
//! Weights that load and still make a row of equal logits, or of NaN, serve the same token for ever. Rows alone are compared
//! with the same rows together, so a device that computes differently by their number is found as well.

use std::ops::Range;

use tf_engine::model::{ForwardError, Model, RoundPlan, SlotIndex, Window};

use super::model::{Counters, DeepseekV41};

/// Rows that are tried, at most.
const ROWS: usize = 8;

/// What makes a loaded model unfit to serve.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RowFault {
    #[error("the logit of token {token} at position {position} is {found}, expected a finite number: {DAMAGED}")]
    NotFinite { position: usize, token: usize, found: f32 },
    #[error("all logits at position {position} are {found}, so every reply would be one token: {DAMAGED}")]
    Constant { position: usize, found: f32 },
    #[error("the logits at positions {} and {position} are equal, so the tokens before them count for nothing: {DAMAGED}", position - 1)]
    Repeated { position: usize },
    #[error(
        "position {position} has other bits alone than together with {company} more rows: this device does not compute as \
         the kernels need it; `tensorfold selftest` says more"
    )]
    Company { position: usize, company: usize },
    #[error(transparent)]
    Forward(#[from] ForwardError),
}

const DAMAGED: &str = "the checkpoint is damaged or not what its configuration says; fetch it again";

impl DeepseekV41 {
    /// Runs up to eight rows together and one by one, judges their logits, and leaves the model as it was.
    ///
    /// # Errors
    /// The first [`RowFault`].
    pub fn self_check(&mut self) -> Result<(), RowFault> {
        let options = self.options();
        let count = ROWS.min(options.round_rows as usize).min(options.context as usize);
        let vocab_size = self.shape().vocab_size;
        let tokens: Vec<u32> = (0..count).map(|index| ((index * 577 + 3) % vocab_size) as u32).collect();
        let together = self.rows_in(&tokens, count);
        let alone = together.and_then(|together| Ok((together, self.rows_in(&tokens, 1)?)));
        self.counters = Counters::default();
        let (together, alone) = alone?;
        judge(&together, vocab_size)?;
        let rows = together.chunks_exact(vocab_size).zip(alone.chunks_exact(vocab_size));
        for (position, (together, alone)) in rows.enumerate() {
            if together.iter().zip(alone).any(|(one, other)| one.to_bits() != other.to_bits()) {
                return Err(RowFault::Company { position, company: count - 1 });
            }
        }
        Ok(())
    }

    /// The logits of all rows, computed `step` rows at a time in a slot that is empty before and after.
    fn rows_in(&mut self, tokens: &[u32], step: usize) -> Result<Vec<f32>, ForwardError> {
        let slot = SlotIndex(0);
        let mut logits = Vec::with_capacity(tokens.len() * self.shape().vocab_size);
        let mut pieces = (0..tokens.len()).step_by(step).map(|first| first..(first + step).min(tokens.len()));
        let result = pieces.try_for_each(|piece| self.logits_rows(&plan(slot, tokens, piece), &mut logits));
        self.release(slot);
        result.map(|()| logits)
    }
}

fn plan(slot: SlotIndex, tokens: &[u32], piece: Range<usize>) -> RoundPlan {
    let window = Window {
        slot,
        start: piece.start as u32,
        rows: 0..piece.len(),
        prompt_end: tokens.len() as u32,
        whole: true,
        draw: 0..piece.len(),
        logprobs: None,
        sequence: 0,
    };
    RoundPlan { tokens: tokens[piece].to_vec(), windows: vec![window] }
}

fn judge(logits: &[f32], vocab_size: usize) -> Result<(), RowFault> {
    let mut before: Option<&[f32]> = None;
    for (position, row) in logits.chunks_exact(vocab_size).enumerate() {
        if let Some(token) = row.iter().position(|logit| !logit.is_finite()) {
            return Err(RowFault::NotFinite { position, token, found: row[token] });
        }
        if row.len() > 1 && row.iter().all(|logit| *logit == row[0]) {
            return Err(RowFault::Constant { position, found: row[0] });
        }
        if before == Some(row) {
            return Err(RowFault::Repeated { position });
        }
        before = Some(row);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_would_serve_one_token_for_ever_are_named() {
        assert_eq!(judge(&[1.0, 2.0, 3.0, 1.0], 2), Ok(()));
        assert_eq!(judge(&[1.0, 2.0, 0.5, 0.5], 2), Err(RowFault::Constant { position: 1, found: 0.5 }));
        assert_eq!(judge(&[1.0, 2.0, 1.0, 2.0], 2), Err(RowFault::Repeated { position: 1 }));
        let nan = judge(&[1.0, f32::NAN], 2).unwrap_err().to_string();
        assert!(nan.starts_with("the logit of token 1 at position 0 is NaN"), "{nan}");
        assert!(judge(&[1.0, f32::NEG_INFINITY], 2).is_err());
    }
}
