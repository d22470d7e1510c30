//! The only writer: admits requests, takes over a round's verdict, ends replies.

use std::sync::Arc;

use tf_text::TokenId;

use crate::clock::Time;
use crate::copy;
use crate::depth::Candidate;
use crate::disk::worker::LoadId;
use crate::drafting;
use crate::model::{Drawn, DrawnRow};
use crate::plan::Plan;
use crate::request::{CacheUse, DraftSource, FinishReason, Finished, Position, Priority, ReplyStats, RequestId};
use crate::sequence::Sequence;
use crate::state::{NextUp, Released, State, Waiting};
use crate::stats::EngineStats;
use crate::verify::Accepted;

/// Puts a request at the end of the queue, or behind the last one in the foreground if it is one of these.
pub fn enqueue(state: &mut State, waiting: Waiting) {
    state.stats.requests += 1;
    state.stats.prompt_tokens += waiting.request.prompt.len() as u64;
    let priority = waiting.request.priority;
    let place = state.queue.iter().position(|other| other.request.priority > priority).unwrap_or(state.queue.len());
    state.queue.insert(place, waiting);
    renumber(state);
    publish_load(state);
}

/// Ends what has waited or run too long, then gives free slots to the head of the queue.
pub fn admit(state: &mut State, now: Time) {
    end_overdue(state, now);
    let waiting_before = state.queue.len();
    loop {
        let priority = match state.next_up() {
            NextUp::Nobody => break,
            NextUp::Waiting => state.queue[0].request.priority,
            NextUp::Paused => Priority::Background,
        };
        let is_held_up = state.slots.free_count() == 0 || state.is_head_short_of_pages();
        if is_held_up && !(priority == Priority::Foreground && pause_newest(state)) {
            break;
        }
        if !is_held_up {
            seat(state, now);
        }
    }
    if state.queue.len() != waiting_before {
        renumber(state);
    }
    publish_load(state);
}

fn end_overdue(state: &mut State, now: Time) {
    let is_overdue = |deadline: Option<Time>| deadline.is_some_and(|deadline| deadline <= now);
    for index in (0..state.sequences.len()).rev() {
        if is_overdue(state.sequences[index].request.deadline) {
            end_sequence(state, index, FinishReason::Deadline, now);
        }
    }
    for index in (0..state.paused.len()).rev() {
        if is_overdue(state.paused[index].request.deadline) {
            end_paused(state, index, FinishReason::Deadline, now);
        }
    }
    let is_held_up = state.slots.free_count() == 0 || state.is_head_short_of_pages();
    for index in (0..state.queue.len()).rev() {
        let waiting = &state.queue[index];
        if is_overdue(waiting.request.deadline) {
            end_waiting(state, index, FinishReason::Deadline, now);
        } else if is_held_up && now.since(waiting.submitted) > state.limits.queue_timeout {
            end_waiting(state, index, FinishReason::QueueTimeout, now);
        }
    }
}

/// Takes the newest sequence in the background out of its slot. False where there is none.
fn pause_newest(state: &mut State) -> bool {
    let background = (0..state.sequences.len()).filter(|&index| state.sequences[index].can_pause());
    let Some(index) = background.max_by_key(|&index| state.sequences[index].id) else { return false };
    let mut sequence = state.sequences.remove(index);
    state.stats.pauses += 1;
    leave_slot(state, &sequence, true);
    sequence.pause();
    let place = state.paused.iter().position(|other| other.id > sequence.id).unwrap_or(state.paused.len());
    state.paused.insert(place, sequence);
    true
}

/// Gives a free slot to whoever is next.
fn seat(state: &mut State, now: Time) {
    if matches!(state.next_up(), NextUp::Paused) {
        if let Some(mut sequence) = state.paused.pop_front()
            && let Some(slot) = state.slots.take(sequence.id)
        {
            sequence.slot = slot;
            state.sequences.push(sequence);
        }
        return;
    }
    let Some(waiting) = state.queue.pop_front() else { return };
    let slot = state.slots.take(waiting.id).expect("a free slot was counted");
    let queue = now.since(waiting.submitted);
    waiting.sender.queue_position(0);
    waiting.sender.started();
    state.stats.queue_time += queue;
    state.sequences.push(Sequence::new(waiting, slot, now));
}

/// Ends the request at once, wherever it is. Unknown ids are requests that have ended.
pub fn cancel(state: &mut State, id: RequestId, now: Time) {
    if let Some(index) = state.sequences.iter().position(|sequence| sequence.id == id) {
        end_sequence(state, index, FinishReason::Cancelled, now);
    } else if let Some(index) = state.paused.iter().position(|sequence| sequence.id == id) {
        end_paused(state, index, FinishReason::Cancelled, now);
    } else if let Some(index) = state.queue.iter().position(|waiting| waiting.id == id) {
        end_waiting(state, index, FinishReason::Cancelled, now);
        renumber(state);
    }
    publish_load(state);
}

/// Ends every request with `reason`.
pub fn end_all(state: &mut State, reason: &FinishReason, now: Time) {
    for index in (0..state.sequences.len()).rev() {
        end_sequence(state, index, reason.clone(), now);
    }
    for index in (0..state.paused.len()).rev() {
        end_paused(state, index, reason.clone(), now);
    }
    for index in (0..state.queue.len()).rev() {
        end_waiting(state, index, reason.clone(), now);
    }
    publish_load(state);
}

/// Ends the sequences of a plan whose forward failed; the others go on.
pub fn fail(state: &mut State, plan: &Plan, message: &str, now: Time) {
    state.stats.forward_failures += 1;
    for index in (0..state.sequences.len()).rev() {
        if plan.round.windows.iter().any(|window| window.sequence == index) {
            end_sequence(state, index, FinishReason::Failed(message.to_string()), now);
        }
    }
    publish_load(state);
}

/// Takes over the verdict on every window: tokens, statistics, endings.
pub fn commit(state: &mut State, plan: &Plan, drawn: &Drawn, accepted: &[Accepted], now: Time) {
    let (prompt_rows, reply_rows) = plan.row_counts();
    state.stats.count_round(prompt_rows + reply_rows);
    state.stats.prompt_rows += prompt_rows as u64;
    state.stats.reply_rows += reply_rows as u64;
    if prompt_rows > 0 {
        count_passed_over(state, plan);
    }
    assert_eq!(accepted.len(), plan.round.windows.len(), "a window without a verdict");
    for (index, verdict) in accepted.iter().enumerate() {
        let window = &plan.round.windows[index];
        let rows = &drawn.rows[drawn.windows[index].clone()];
        let sequence = &mut state.sequences[window.sequence];
        assert_eq!(sequence.computed, window.start, "a window that doesn't continue its sequence");
        sequence.computed = verdict.kept;
        sequence.snapshot_at.retain(|&at| at > verdict.kept);
        match plan.drafts[index] {
            Some(draft_count) => {
                count_verdict(sequence, &mut state.stats, draft_count as usize, verdict);
                if draft_count > 0 && sequence.draft_source == DraftSource::Head {
                    let judged = verdict.judged as usize;
                    sequence.acceptance.record(verdict.accepted as usize, judged);
                    state.pace.record_verdict(verdict.accepted as usize, &sequence.confidence[..judged]);
                }
            }
            None if window.whole => send_prompt_rows(sequence, window.start, rows, drawn),
            None => {}
        }
        sequence.drafts.clear();
        sequence.confidence.clear();

        let first = verdict.first_row as usize;
        let tokens = &rows[first..first + verdict.token_count as usize];
        let (accepted, judged) = judge_copy(&sequence.copied, tokens);
        if judged > 0 {
            sequence.copy_acceptance.record(accepted, judged);
            state.pace.record_copy(sequence.copy_class, accepted, judged);
        }
        sequence.copied.clear();
        append(sequence, tokens);
        state.stats.reply_tokens += tokens.len() as u64;
        if !tokens.is_empty() && sequence.first_token.is_none() {
            sequence.first_token = Some(now);
        }
        let behind = !tokens.is_empty() && sequence.sender.tokens(tokens, &drawn.top, now).is_err();
        if behind {
            state.endings.push((window.sequence, FinishReason::SlowReader));
        } else if let Some(reason) = &verdict.finish {
            state.endings.push((window.sequence, reason.clone()));
        }
    }
    // From the last to the first, so that the indices before stay valid.
    state.endings.sort_unstable_by_key(|&(index, _)| index);
    while let Some((index, reason)) = state.endings.pop() {
        end_sequence(state, index, reason, now);
    }
    publish_load(state);
}

/// How many of a copy's tokens came true, of how many that can be told.
fn judge_copy(copied: &[TokenId], tokens: &[DrawnRow]) -> (usize, usize) {
    let pairs = copied.iter().zip(tokens);
    let accepted = pairs.take_while(|(copied, row)| **copied == row.token).count();
    (accepted, (accepted + 1).min(copied.len()).min(tokens.len()))
}

fn append(sequence: &mut Sequence, tokens: &[DrawnRow]) {
    sequence.reply.extend(tokens.iter().map(|row| row.token));
    if let Some(forcing) = &sequence.request.forcing {
        tokens.iter().for_each(|row| sequence.forced.push(forcing, row.token));
        sequence.forced.given(forcing, &mut sequence.given);
        sequence.stats.looped = sequence.forced.looped;
    }
}

/// Looks up what running replies may copy next.
pub fn look_up_copies(state: &mut State) {
    for index in 0..state.sequences.len() {
        let room = drafting::room(state, &state.sequences[index]);
        let sequence = &mut state.sequences[index];
        if sequence.is_prefilling() || sequence.is_held() || !sequence.given.is_empty() || room == 0 {
            continue;
        }
        let text = copy::Text { prompt: &sequence.request.prompt, reply: &sequence.reply };
        sequence.copied.clear();
        if let Some(found) = sequence.copies.find(text) {
            sequence.copy_class = found.class();
            copy::copy(text, found, room as usize, &mut sequence.copied);
        }
    }
}

/// Stores what a sequence shall draft for the window to come. `tokens`, `confidence`: what the draft head has answered.
pub fn propose(state: &mut State, candidate: &Candidate, tokens: &[TokenId], confidence: &[f32]) {
    let sequence = &mut state.sequences[candidate.sequence];
    let count = candidate.count as usize;
    assert!(!sequence.is_prefilling(), "drafts before the prompt is computed");
    assert!(count == 0 || candidate.count < sequence.remaining(), "drafts beyond the reply's end");
    sequence.drafts.clear();
    sequence.confidence.clear();
    sequence.draft_source = candidate.source;
    let tried = match candidate.source {
        DraftSource::Head => {
            sequence.drafts.extend_from_slice(&tokens[..count]);
            sequence.confidence.extend_from_slice(&confidence[..count]);
            count
        }
        DraftSource::Copy => {
            sequence.drafts.extend_from_slice(&sequence.copied[..count]);
            0
        }
    };
    let pace = &state.pace;
    let untried = confidence[tried..].iter().map(|&confidence| pace.corrected(confidence));
    sequence.acceptance.record_untried(tried, untried);
}

/// Starts a sequence at the end of a restored prefix, or says why there is none.
pub fn place(state: &mut State, index: usize, resumed: Position, source: Option<Arc<[TokenId]>>, cache: CacheUse) {
    let sequence = &mut state.sequences[index];
    let is_drawn = sequence.begins_reply();
    assert!(resumed < sequence.fill_length() + Position::from(!is_drawn), "a row that is drawn is always computed");
    // What a paused sequence gets back says nothing of its prompt.
    if !sequence.was_paused {
        assert_eq!(sequence.computed, sequence.stats.cached_tokens, "rows are restored before any is computed");
        state.stats.cached_tokens += u64::from(resumed - sequence.computed);
        sequence.stats.cached_tokens = resumed;
        sequence.stats.cache = cache;
    }
    sequence.is_placed = true;
    sequence.computed = resumed;
    sequence.kept_to = resumed;
    sequence.source = source;
}

/// Names the positions inside a prompt whose state shall be kept.
pub fn want_states(state: &mut State, index: usize, wanted: Vec<Position>) {
    state.sequences[index].snapshot_at = wanted;
}

/// Makes a sequence wait until `leader` has reached `at`, a position of their common prefix.
pub fn follow(state: &mut State, index: usize, leader: usize, at: Position) {
    let other = &mut state.sequences[leader];
    let id = other.id;
    if at + 1 < other.fill_length()
        && let Err(place) = other.snapshot_at.binary_search(&at)
    {
        other.snapshot_at.insert(place, at);
    }
    state.sequences[index].follows = Some((id, at));
}

/// Makes a sequence wait for a prefix from disk, or ends that wait.
pub fn await_load(state: &mut State, index: usize, load: Option<LoadId>) {
    let sequence = &mut state.sequences[index];
    assert!(load.is_none() || sequence.computed == 0, "a prefix is read before any row is computed");
    sequence.asked_disk |= load.is_some();
    sequence.load = load;
}

/// A sequence's state at this position is kept.
pub fn note_kept(state: &mut State, index: usize, at: Position) {
    let sequence = &mut state.sequences[index];
    sequence.kept_to = sequence.kept_to.max(at);
}

/// Leaves a sequence out of the next round, with its state.
pub fn wait(state: &mut State, id: RequestId) {
    state.stats.page_waits += 1;
    state.sequences.iter_mut().filter(|sequence| sequence.id == id).for_each(|sequence| sequence.waits = true);
}

/// Lets sequences that waited take part again.
pub fn end_waits(state: &mut State) {
    state.sequences.iter_mut().for_each(|sequence| sequence.waits = false);
}

/// Ends the newest sequence for want of pages.
pub fn end_newest(state: &mut State, now: Time) {
    let newest = (0..state.sequences.len()).max_by_key(|&index| state.sequences[index].rank());
    if let Some(index) = newest {
        end_sequence(state, index, FinishReason::OutOfMemory, now);
        publish_load(state);
    }
}

fn count_verdict(sequence: &mut Sequence, stats: &mut EngineStats, draft_count: usize, verdict: &Accepted) {
    let accepted = verdict.accepted as usize;
    sequence.stats.windows += 1;
    sequence.stats.drafted += draft_count as u32;
    sequence.stats.accepted += accepted as u32;
    sequence.stats.known_rows += verdict.known_rows;
    stats.draft_windows += u64::from(draft_count > 0);
    stats.drafted += draft_count as u64;
    stats.accepted += accepted as u64;
    stats.known_rows += u64::from(verdict.known_rows);
    let source = sequence.draft_source as usize;
    sequence.stats.drafts[source].record(draft_count, accepted);
    stats.drafts[source].record(draft_count, accepted);
}

fn send_prompt_rows(sequence: &Sequence, start: Position, rows: &[DrawnRow], drawn: &Drawn) {
    let scored = rows.iter().enumerate().filter_map(|(index, row)| {
        let token = *sequence.request.prompt.get(start as usize + index + 1)?;
        let top = &drawn.top[row.top_start as usize..(row.top_start + row.top_count) as usize];
        Some((token, row.next_logprob, top))
    });
    sequence.sender.prompt_rows(scored);
}

fn count_passed_over(state: &mut State, plan: &Plan) {
    for (index, sequence) in state.sequences.iter_mut().enumerate() {
        if sequence.is_prefilling() {
            let has_rows = plan.round.windows.iter().any(|window| window.sequence == index);
            sequence.passed_over = if has_rows { 0 } else { sequence.passed_over + 1 };
        }
    }
}

fn end_sequence(state: &mut State, index: usize, reason: FinishReason, now: Time) {
    let sequence = state.sequences.remove(index);
    let is_whole = !matches!(
        reason,
        FinishReason::Failed(_) | FinishReason::DeviceLost(_) | FinishReason::OutOfMemory | FinishReason::Stopped
    );
    leave_slot(state, &sequence, is_whole);
    finish(state, sequence, reason, now);
}

fn end_paused(state: &mut State, index: usize, reason: FinishReason, now: Time) {
    if let Some(sequence) = state.paused.remove(index) {
        finish(state, sequence, reason, now);
    }
}

/// Frees the slot of a sequence that was taken out of the running ones. `is_whole`: its rows can be kept.
fn leave_slot(state: &mut State, sequence: &Sequence, is_whole: bool) {
    state.slots.free(sequence.slot, sequence.id);
    // A state one row further than a kept one saves nothing worth its bytes.
    let is_kept = state.keeping.is_on && is_whole && sequence.computed > sequence.kept_to + 1;
    let tokens = is_kept.then(|| sequence.computed_tokens());
    state.released.push(Released { slot: sequence.slot, tokens });
}

fn finish(state: &mut State, mut sequence: Sequence, reason: FinishReason, now: Time) {
    let first_token = sequence.first_token.unwrap_or(now);
    sequence.stats.reply_tokens = sequence.reply.len() as u32;
    sequence.stats.prefill = first_token.since(sequence.started);
    sequence.stats.decode = now.since(first_token);
    state.stats.prefill_time += sequence.stats.prefill;
    state.stats.decode_time += sequence.stats.decode;
    count_ending(&mut state.stats, &reason, now);
    sequence.sender.finish(Finished { reason, stats: sequence.stats });
}

fn end_waiting(state: &mut State, index: usize, reason: FinishReason, now: Time) {
    let Some(waiting) = state.queue.remove(index) else { return };
    let stats = ReplyStats {
        prompt_tokens: waiting.request.prompt.len() as u32,
        queue: now.since(waiting.submitted),
        ..ReplyStats::default()
    };
    count_ending(&mut state.stats, &reason, now);
    waiting.sender.finish(Finished { reason, stats });
}

fn count_ending(stats: &mut EngineStats, reason: &FinishReason, now: Time) {
    if reason.is_complete() {
        stats.completed += 1;
    } else {
        stats.broken_off += 1;
    }
    if let Some(last) = stats.last_ending {
        let interval = now.since(last);
        let mean = stats.ending_interval;
        stats.ending_interval = if mean.is_zero() { interval } else { (mean * 7 + interval) / 8 };
    }
    stats.last_ending = Some(now);
}

fn renumber(state: &mut State) {
    for (index, waiting) in state.queue.iter().enumerate() {
        waiting.sender.queue_position(index as u32 + 1);
    }
}

fn publish_load(state: &mut State) {
    let prefilling = state.sequences.iter().filter(|sequence| sequence.is_prefilling()).count();
    state.stats.prefilling = prefilling as u32;
    state.stats.decoding = (state.sequences.len() - prefilling) as u32;
    state.stats.waiting = (state.queue.len() + state.paused.len()) as u32;
}
