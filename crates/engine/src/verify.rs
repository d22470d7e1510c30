//! Judges a round: which draws become tokens, and where a reply ends. Pure.
//!
//! A draft is a guess about a token that the target's own keyed draw has already determined. It is kept where it equals
//! that draw, so drafts change how many tokens a round commits and never which.

use tf_text::TokenId;

use crate::model::{Drawn, ForwardError};
use crate::plan::Plan;
use crate::request::{FinishReason, Position};
use crate::sequence::Sequence;
use crate::state::State;

/// The verdict on one window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// How many of the window's draws become tokens, counted from `first_row`.
    pub token_count: u32,
    /// Which drawn row is the first token, as an index into the window's range of `Drawn::rows`.
    pub first_row: u32,
    /// Drafts that equal a committed draw.
    pub accepted: u32,
    /// Known rows that are kept.
    pub known_rows: u32,
    /// Drafts that were compared with a draw: the accepted ones, and the first that differed.
    pub judged: u32,
    /// Positions that the model keeps.
    pub kept: Position,
    pub finish: Option<FinishReason>,
}

/// Draws that a reply takes over from one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    pub token_count: usize,
    pub accepted: usize,
    pub judged: usize,
    /// The token that ended the reply.
    pub end: Option<TokenId>,
}

/// Takes draws while the drafts before them equal the draws, up to an end token, `token_count_max`, or a token after which
/// `is_cut` says that the window can't go on; it is told every token and its index.
pub fn accept(
    drafts: &[TokenId],
    drawn: impl Iterator<Item = TokenId>,
    ends: &[TokenId],
    token_count_max: u32,
    mut is_cut: impl FnMut(usize, TokenId) -> bool,
) -> Cut {
    let mut cut = Cut { token_count: 0, accepted: 0, judged: 0, end: None };
    for (index, token) in drawn.enumerate() {
        if cut.token_count == token_count_max as usize {
            break;
        }
        cut.token_count += 1;
        // A draft behind the end of the window is compared with nothing.
        let is_last = is_cut(index, token);
        let agreed = drafts.get(index).filter(|_| !is_last).map(|&draft| draft == token);
        cut.judged += usize::from(agreed.is_some());
        cut.accepted += usize::from(agreed == Some(true));
        if ends.contains(&token) {
            cut.end = Some(token);
            break;
        }
        if agreed != Some(true) {
            break;
        }
    }
    cut
}

/// Puts given tokens in the place of the draws that they replace. Their rows' own log-probability of them stands in
/// `next_logprob`.
///
/// # Errors
/// [`ForwardError::Failed`] when the model did not draw the rows it was asked for.
pub fn impose(state: &State, plan: &Plan, drawn: &mut Drawn) -> Result<(), ForwardError> {
    check_drawn(state, plan, drawn)?;
    for (index, window) in plan.round.windows.iter().enumerate() {
        let sequence = &state.sequences[window.sequence];
        let given = &sequence.given[..plan.given[index] as usize];
        let range = drawn.windows[index].clone();
        // In a prompt's last piece the reply's first token comes from the last row.
        let first = if plan.drafts[index].is_some() { range.start } else { range.end - given.len() };
        for (row, &token) in drawn.rows[first..range.end].iter_mut().zip(given) {
            row.token = token;
            row.logprob = row.next_logprob;
        }
    }
    Ok(())
}

/// Judges every window of `plan`, with given tokens in their places ([`impose`]).
pub fn verify(state: &State, plan: &Plan, drawn: &Drawn, accepted: &mut Vec<Accepted>) {
    accepted.clear();
    for (index, window) in plan.round.windows.iter().enumerate() {
        let sequence = &state.sequences[window.sequence];
        let rows = &drawn.rows[drawn.windows[index].clone()];
        let tokens = rows.iter().map(|row| row.token);
        accepted.push(match plan.drafts[index] {
            Some(draft_count) => {
                // Known rows and drafts alike: what follows a row is right where it equals the row's token.
                let followers = &plan.round.tokens[window.rows.start + 1..window.rows.end];
                let known_rows = followers.len() - draft_count as usize;
                let given = plan.given[index] as usize;
                let forcing = sequence.request.forcing.as_deref();
                let mut forced = sequence.forced;
                // A token that is given next ends the window, unless its row was planned as known.
                let is_cut = |index: usize, token| {
                    forcing.is_some_and(|forcing| {
                        forced.push(forcing, token);
                        forced.is_given() && index + 1 >= given
                    })
                };
                let cut = accept(followers, tokens, &sequence.request.end_ids, sequence.remaining(), is_cut);
                let is_draft = |count: usize| if known_rows > 0 { 0 } else { count as u32 };
                Accepted {
                    token_count: cut.token_count as u32,
                    first_row: 0,
                    accepted: is_draft(cut.accepted),
                    known_rows: cut.accepted as u32 - is_draft(cut.accepted),
                    judged: is_draft(cut.judged),
                    // The last committed token is pending; the rows before it are kept.
                    kept: window.start + cut.token_count as Position,
                    finish: finish_of(sequence, &cut),
                }
            }
            None => {
                let end = window.start + window.rows.len() as Position;
                // After a pause the reply's pending token is there already.
                let is_last = end == sequence.fill_length() && sequence.begins_reply();
                let token_count_max = if is_last { sequence.remaining().min(1) } else { 0 };
                let first_row = rows.len().saturating_sub(1);
                let ends = &sequence.request.end_ids;
                let cut = accept(&[], tokens.skip(first_row), ends, token_count_max, |_, _| false);
                Accepted {
                    token_count: cut.token_count as u32,
                    first_row: first_row as u32,
                    accepted: 0,
                    known_rows: 0,
                    judged: 0,
                    kept: end,
                    finish: if is_last { finish_of(sequence, &cut) } else { None },
                }
            }
        });
    }
}

fn finish_of(sequence: &Sequence, cut: &Cut) -> Option<FinishReason> {
    match cut.end {
        Some(token) => Some(FinishReason::Stop(token)),
        None => (sequence.remaining() as usize == cut.token_count).then_some(FinishReason::Length),
    }
}

fn check_drawn(state: &State, plan: &Plan, drawn: &Drawn) -> Result<(), ForwardError> {
    let failed = |text: String| Err(ForwardError::Failed(text));
    if drawn.windows.len() != plan.round.windows.len() {
        return failed(format!("{} windows came back, {} were sent", drawn.windows.len(), plan.round.windows.len()));
    }
    for (index, window) in plan.round.windows.iter().enumerate() {
        let Some(rows) = drawn.rows.get(drawn.windows[index].clone()) else {
            return failed(format!("window {index} names rows that were not drawn"));
        };
        if rows.len() != window.draw.len() {
            return failed(format!("window {index} has {} draws, {} were wanted", rows.len(), window.draw.len()));
        }
        for row in rows {
            if row.token >= state.vocab_size {
                return failed(format!("token {} was drawn from a vocabulary of {}", row.token, state.vocab_size));
            }
            if drawn.top.get(row.top_start as usize..(row.top_start as usize + row.top_count as usize)).is_none() {
                return failed(format!("window {index} names likeliest tokens that are not there"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_drafts_up_to_the_first_difference() {
        // drafts, drawn, ends, most tokens -> tokens, accepted, judged, end
        type Case<'a> = (&'a [u32], &'a [u32], &'a [u32], u32, (usize, usize, usize, Option<u32>));
        let cases: [Case<'_>; 9] = [
            (&[5, 6, 7], &[5, 6, 7, 8], &[], 9, (4, 3, 3, None)), // all land: one more token for free
            (&[5, 6, 7], &[5, 9, 7, 8], &[], 9, (2, 1, 2, None)), // what follows a difference is never used
            (&[5], &[4, 6], &[], 9, (1, 0, 1, None)),
            (&[], &[4], &[], 9, (1, 0, 0, None)), // no drafts: plain decode
            (&[5, 1, 7], &[5, 1, 7, 8], &[1], 9, (2, 2, 2, Some(1))), // an end token ends the window
            (&[1, 6], &[1, 6, 7], &[1], 9, (1, 1, 1, Some(1))),
            (&[5, 6, 7], &[5, 6, 7, 8], &[], 2, (2, 2, 2, None)), // the length limit cuts a window
            (&[5, 1], &[5, 1, 7], &[1], 1, (1, 1, 1, None)),      // ... before an end token behind it
            (&[], &[4], &[], 0, (0, 0, 0, None)),
        ];
        for (drafts, drawn, ends, max, (token_count, accepted, judged, end)) in cases {
            let cut = accept(drafts, drawn.iter().copied(), ends, max, |_, _| false);
            assert_eq!(cut, Cut { token_count, accepted, judged, end }, "drafts {drafts:?} drawn {drawn:?} max {max}");
        }
    }
}
