//! Decides which rows run in the next round. Pure: reads the state, returns a plan, changes nothing.
//!
//! Rows of running replies come before prompt rows, so that a long prompt can't stall them. How a prompt is cut is free:
//! bits don't depend on it. Knows rows only by count; bytes and devices belong to the model.

use std::cmp::Reverse;

use crate::limits::{PASSED_OVER_MAX, PROMPT_ROWS_MIN, PROMPT_ROWS_UNTIMED};
use crate::model::{RoundPlan, Window};
use crate::request::Priority;
use crate::sequence::Sequence;
use crate::state::{KeepRules, State};

/// A round's rows. Reused from round to round.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub round: RoundPlan,
    /// For each window, how many of its rows are drafts; `None` for a piece of a prompt.
    pub drafts: Vec<Option<u32>>,
    /// For each window, how many of its draws are dropped for given tokens. The rows of all but the last of these are
    /// known; a window with known rows has no drafts.
    pub given: Vec<u32>,
    /// Scratch: prompts in the order in which they are served.
    order: Vec<usize>,
}

impl Plan {
    fn clear(&mut self) {
        self.round.tokens.clear();
        self.round.windows.clear();
        self.drafts.clear();
        self.given.clear();
        self.order.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.round.windows.is_empty()
    }

    /// Rows of prompts, and rows of replies.
    pub fn row_counts(&self) -> (usize, usize) {
        let rows = |prompt: bool| {
            let windows = self.round.windows.iter().zip(&self.drafts);
            windows.filter(|(_, drafts)| drafts.is_none() == prompt).map(|(window, _)| window.rows.len()).sum()
        };
        (rows(true), rows(false))
    }
}

/// Fills `plan` with the next round.
pub fn plan(state: &State, plan: &mut Plan) {
    plan.clear();
    let decoding = state.sequences.iter().filter(|sequence| is_decoding(sequence)).count() as u32;
    let mut rows_left = state.limits.round_rows - decoding;
    let mut optional_rows_left = optional_rows(state);
    for (index, sequence) in state.sequences.iter().enumerate() {
        if !is_decoding(sequence) {
            continue;
        }
        let known = sequence.window_room(state.draft_block).min(sequence.given.len() as u32);
        let optional = (if known > 0 { known } else { sequence.drafts.len() as u32 }).min(optional_rows_left);
        optional_rows_left -= optional;
        rows_left -= optional;
        push_reply(plan, index, sequence, optional);
    }

    if !state.sequences.iter().any(is_waiting) {
        return;
    }
    let gap_rows = rows_within_gap(state, plan.row_counts().1);
    plan.order.extend((0..state.sequences.len()).filter(|&index| is_waiting(&state.sequences[index])));
    plan.order.sort_unstable_by_key(|&index| {
        let sequence = &state.sequences[index];
        // Of those that are due the one that waited longest, or more than so many prompts would leave some out for ever.
        let due = if sequence.passed_over >= PASSED_OVER_MAX { sequence.passed_over } else { 0 };
        (Reverse(due), sequence.request.priority, sequence.prompt_rows_left(), sequence.id)
    });
    let mut prompt_rows = 0;
    for order_index in 0..plan.order.len() {
        let index = plan.order[order_index];
        let sequence = &state.sequences[index];
        let within_gap = gap_rows[sequence.request.priority as usize];
        let room = rows_left.min(within_gap).saturating_sub(prompt_rows);
        let row_count = sequence.prompt_rows_left().min(state.limits.prompt_chunk).min(room);
        let row_count = up_to_snapshot(state, sequence, row_count);
        if row_count == 0 {
            break;
        }
        prompt_rows += row_count;
        push_prompt(plan, index, sequence, row_count);
    }
}

/// Prompt rows that running replies allow beside them, for prompts of each priority. Replies in the background don't hold
/// up a prompt in the foreground.
fn rows_within_gap(state: &State, reply_rows: usize) -> [u32; 2] {
    let Some(gap) = state.limits.decode_gap else { return [u32::MAX; 2] };
    let timed = || state.pace.prompt_rows_within(gap, reply_rows).unwrap_or(PROMPT_ROWS_UNTIMED).max(PROMPT_ROWS_MIN);
    let running = state.sequences.iter().filter(|sequence| is_decoding(sequence));
    match running.map(|sequence| sequence.request.priority).min() {
        Some(Priority::Foreground) => [timed(); 2],
        Some(Priority::Background) => [u32::MAX, timed()],
        None => [u32::MAX; 2],
    }
}

/// Room of a round for drafts and known rows. While a prompt waits they take at most half of what is left beside the
/// pending rows.
pub fn optional_rows(state: &State) -> u32 {
    let decoding = state.sequences.iter().filter(|sequence| is_decoding(sequence)).count() as u32;
    let rows_left = state.limits.round_rows - decoding;
    if state.sequences.iter().any(is_waiting) { rows_left / 2 } else { rows_left }
}

fn is_waiting(sequence: &Sequence) -> bool {
    sequence.is_prefilling() && !sequence.is_held()
}

fn is_decoding(sequence: &Sequence) -> bool {
    !sequence.is_prefilling() && !sequence.is_held()
}

/// Rows up to the next position whose state is wanted, or past it as far as the state can still be taken.
fn up_to_snapshot(state: &State, sequence: &Sequence, row_count: u32) -> u32 {
    let KeepRules { is_on, every, reach, .. } = state.keeping;
    if !is_on {
        return row_count;
    }
    let start = sequence.computed;
    let named = sequence.snapshot_at.first().copied();
    let spaced = (start / every + 1).checked_mul(every);
    let next = named.into_iter().chain(spaced).filter(|&at| at > start).min();
    match next {
        Some(at) if start + row_count > at.saturating_add(reach) => at - start,
        _ => row_count,
    }
}

/// The pending row and `optional` more: known rows where tokens are given, else drafts.
fn push_reply(plan: &mut Plan, index: usize, sequence: &Sequence, optional: u32) {
    let pending = *sequence.reply.last().expect("a computed prompt has its first token, checked after every round");
    let first = plan.round.tokens.len();
    plan.round.tokens.push(pending);
    let is_given = !sequence.given.is_empty();
    let tokens = if is_given { &sequence.given } else { &sequence.drafts };
    plan.round.tokens.extend_from_slice(&tokens[..optional as usize]);
    let row_count = plan.round.tokens.len() - first;
    plan.round.windows.push(Window {
        slot: sequence.slot,
        start: sequence.computed,
        rows: first..first + row_count,
        prompt_end: sequence.computed,
        whole: false,
        draw: 0..row_count,
        logprobs: sequence.request.logprobs,
        sequence: index,
    });
    plan.drafts.push(Some(if is_given { 0 } else { optional }));
    plan.given.push(row_count.min(sequence.given.len()) as u32);
}

fn push_prompt(plan: &mut Plan, index: usize, sequence: &Sequence, row_count: u32) {
    let start = sequence.computed;
    let end = start + row_count;
    let is_last = end == sequence.fill_length();
    let first = plan.round.tokens.len();
    let row_count = row_count as usize;
    plan.round.tokens.extend_from_slice(&sequence.fill[start as usize..end as usize]);
    // The last row scores nothing; it is drawn for the reply's first token, if that is wanted and not there.
    let is_drawn = sequence.request.max_tokens > 0 && sequence.begins_reply();
    let draw_end = if is_last && !is_drawn { row_count - 1 } else { row_count };
    let draw = if sequence.is_scored() {
        0..draw_end
    } else if is_last {
        row_count - 1..draw_end
    } else {
        0..0
    };
    plan.given.push(u32::from(is_last && !draw.is_empty() && !sequence.given.is_empty()));
    plan.round.windows.push(Window {
        slot: sequence.slot,
        start,
        rows: first..first + row_count,
        // Rows before a wanted state are computed as if the prompt ended there, so that anything may follow it.
        prompt_end: sequence.snapshot_at.first().copied().unwrap_or(sequence.fill_length()),
        whole: sequence.is_scored(),
        draw,
        logprobs: sequence.request.logprobs,
        sequence: index,
    });
    plan.drafts.push(None);
}
