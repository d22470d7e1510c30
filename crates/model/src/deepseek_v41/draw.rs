//! Draws tokens from rows of logits: hands the engine's settings to the sampler, for the target's rows and for proposals.

use tf_device::{Buffer, LaunchError, Queue};
use tf_engine::model::{DrawnRow, RoundPlan, SequenceView};
use tf_engine::request::Sampling;
use tf_kernels::draft_head::Sampled;
use tf_kernels::sample::{self, Draw, History, Outcome, RowError, Settings};

/// Draws of one launch: what fits on the stack, so that a round allocates nothing.
const DRAWS: usize = 32;

/// The sampler's working memory.
#[derive(Debug)]
pub(super) struct Draws {
    scratch: sample::Scratch,
    outcomes: Vec<Outcome>,
    top: Vec<(u32, f32)>,
}

/// A drawn row of a round: its window and its index in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowOf {
    pub window: usize,
    pub row: usize,
}

fn settings(sampling: &Sampling) -> Settings<'_> {
    Settings {
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        seed: sampling.seed,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        repetition_penalty: sampling.repetition_penalty,
        logit_bias: &sampling.logit_bias,
        masked: &sampling.masked,
        masked_before: sampling.masked_before,
    }
}

impl Draws {
    pub fn new() -> Draws {
        Draws { scratch: sample::Scratch::default(), outcomes: Vec::with_capacity(DRAWS), top: Vec::new() }
    }

    /// Draws the rows `of`, whose logits stand in `logits` in the same order, and appends them to the lists.
    ///
    /// # Errors
    /// A text that names the first row without a token.
    pub fn rows(
        &mut self,
        queue: &mut Queue,
        logits: &Buffer,
        vocab: usize,
        of: &[RowOf],
        plan: &RoundPlan,
        sequences: &[SequenceView<'_>],
        drawn: &mut Vec<DrawnRow>,
        top: &mut Vec<(u32, f32)>,
    ) -> Result<(), DrawError> {
        for (batch, of) in of.chunks(DRAWS).enumerate() {
            let view = |row: &RowOf| &sequences[plan.windows[row.window].sequence];
            let settings: [Settings<'_>; DRAWS] = std::array::from_fn(|index| match of.get(index) {
                Some(row) => settings(view(row).sampling),
                None => Settings::GREEDY,
            });
            let draws: [Draw<'_>; DRAWS] = std::array::from_fn(|index| {
                let row = of.get(index).unwrap_or(&of[0]);
                draw_of(batch * DRAWS + index, row, plan, view(row), &settings[index.min(of.len() - 1)])
            });
            sample::launch(
                queue,
                sample::Args {
                    logits,
                    vocab,
                    draws: &draws[..of.len()],
                    outcomes: &mut self.outcomes,
                    top: &mut self.top,
                    scratch: &mut self.scratch,
                },
            )?;
            let base = top.len() as u32;
            top.extend_from_slice(&self.top);
            for (row, outcome) in of.iter().zip(&self.outcomes) {
                let found = outcome.map_err(|error| {
                    let window = &plan.windows[row.window];
                    DrawError::Row {
                        slot: window.slot.0,
                        position: window.start + (window.draw.start + row.row) as u32,
                        error,
                    }
                })?;
                drawn.push(DrawnRow {
                    token: found.token,
                    logprob: found.logprob,
                    next_logprob: found.next_logprob,
                    top_start: base + found.top_start,
                    top_count: found.top_count,
                });
            }
        }
        Ok(())
    }

    /// The sampler's working memory, for the draft head.
    pub fn scratch(&mut self) -> &mut sample::Scratch {
        &mut self.scratch
    }
}

/// How a sequence draws its proposals, the first one for `position`; `None` for a greedy one.
pub(super) fn proposals(sampling: &Sampling, position: u32) -> Option<Sampled<'_>> {
    (sampling.temperature != 0.0).then(|| Sampled::new(settings(sampling), position))
}

/// What a draw needs: the token to be drawn stands one position after its row.
fn draw_of<'a>(
    logits_row: usize,
    of: &RowOf,
    plan: &'a RoundPlan,
    view: &SequenceView<'a>,
    settings: &'a Settings<'a>,
) -> Draw<'a> {
    let window = &plan.windows[of.window];
    let row = window.draw.start + of.row;
    let position = window.start + row as u32 + 1;
    let in_prompt = (window.start as usize) < view.prompt.len();
    // In a verify window row 0 is the pending token, which `reply` already holds.
    let tokens = &plan.tokens[window.rows.clone()];
    let beyond = if in_prompt { &[][..] } else { &tokens[1..row + 1] };
    let history = match settings.needs_history() {
        true => History { prompt: view.prompt, reply: view.reply, window: beyond },
        false => History::default(),
    };
    Draw {
        row: logits_row,
        position,
        reply_count: position.saturating_sub(view.prompt.len() as u32),
        settings,
        history,
        allowed: None,
        logprobs: window.logprobs,
        next: window.logprobs.and_then(|_| view.known_at(position)),
    }
}

/// Why a round drew nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DrawError {
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("slot {slot}, position {position}: {error}")]
    Row { slot: u32, position: u32, error: RowError },
}
