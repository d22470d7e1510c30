//! One round: decide, compute, judge, write, check.

use crate::clock::Clock;
use crate::commit;
use crate::depth::{self, Candidate};
use crate::limits::{DISK_PIECES_A_ROUND, DRAFTS_MAX};
use crate::model::{DraftRequest, Drafts, Drawn, ForwardError, Model, SequenceView};
use crate::plan::Plan;
use crate::prefix_cache::PrefixCache;
use crate::prefixes::{self, release};
use crate::request::FinishReason;
use crate::state::State;
use crate::verify::{Accepted, verify};

/// Whether a round had anything to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Busy {
    Worked,
    Idle,
}

/// Nothing can be computed any more; every request has been ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device is lost: {0}")]
pub struct DeviceLost(pub String);

/// What a round works with. Kept between rounds for its memory alone.
#[derive(Debug, Default)]
pub struct Scratch {
    plan: Plan,
    drawn: Drawn,
    accepted: Vec<Accepted>,
    drafts: Drafts,
    candidates: Vec<Candidate>,
}

impl Scratch {
    /// The plan of the round that was run last.
    pub fn last_plan(&self) -> &Plan {
        &self.plan
    }
}

/// Runs one round over everything that has a slot, after giving free slots to the queue. `cache` changes how much of a
/// prompt is computed and nothing else.
///
/// # Errors
/// [`DeviceLost`] ends every request; the loop must stop.
pub fn run_round<M: Model>(
    state: &mut State,
    model: &mut M,
    clock: &dyn Clock,
    scratch: &mut Scratch,
    cache: &mut PrefixCache<M::Snapshot>,
) -> Result<Busy, DeviceLost> {
    let began = clock.now();
    commit::admit(state, began);
    release(state, model, cache);
    prefixes::place(state, model, cache, began);
    prefixes::plan_within_pages(state, model, cache, &mut scratch.plan, began);
    if scratch.plan.is_empty() {
        cache.write_behind(model, DISK_PIECES_A_ROUND);
        state.check();
        return Ok(Busy::Idle);
    }

    scratch.drawn.clear();
    let views: Vec<SequenceView<'_>> = state.sequences.iter().map(|sequence| sequence.view()).collect();
    let result = model.forward(&scratch.plan.round, &views, &mut scratch.drawn);
    let verdict = result.and_then(|()| verify(state, &scratch.plan, &scratch.drawn, &mut scratch.accepted));
    let now = clock.now();
    match verdict {
        Ok(()) => {}
        Err(ForwardError::Failed(message)) => {
            commit::fail(state, &scratch.plan, &message, now);
            release(state, model, cache);
            commit::admit(state, now);
            release(state, model, cache);
            state.check();
            return Ok(Busy::Worked);
        }
        Err(ForwardError::DeviceLost(message)) => return Err(lose(state, model, cache, message, clock)),
    }
    for (window, verdict) in scratch.plan.round.windows.iter().zip(&scratch.accepted) {
        model.keep(window.slot, verdict.kept);
    }
    prefixes::take(state, &scratch.plan, &scratch.accepted, model, cache);
    let (prompt_rows, reply_rows) = scratch.plan.row_counts();
    state.pace.record_round(prompt_rows, reply_rows, now.since(began));
    commit::commit(state, &scratch.plan, &scratch.drawn, &scratch.accepted, now);
    release(state, model, cache);
    draft(state, model, cache, clock, scratch)?;
    commit::admit(state, clock.now());
    release(state, model, cache);
    cache.write_behind(model, DISK_PIECES_A_ROUND);
    state.check();
    Ok(Busy::Worked)
}

fn lose<M: Model>(
    state: &mut State,
    model: &mut M,
    cache: &mut PrefixCache<M::Snapshot>,
    message: String,
    clock: &dyn Clock,
) -> DeviceLost {
    commit::end_all(state, &FinishReason::DeviceLost(message.clone()), clock.now());
    release(state, model, cache);
    DeviceLost(message)
}

/// Asks the drafter for the next windows, as far as drafts are expected to pay.
///
/// A drafter that fails leaves the next round without drafts; replies don't notice.
fn draft<M: Model>(
    state: &mut State,
    model: &mut M,
    cache: &mut PrefixCache<M::Snapshot>,
    clock: &dyn Clock,
    scratch: &mut Scratch,
) -> Result<(), DeviceLost> {
    find_candidates(state, scratch);
    if scratch.candidates.is_empty() {
        return Ok(());
    }
    // A probe uses all drafts there are, whatever they are thought to be worth.
    let is_adaptive = state.limits.draft.adaptive && !state.pace.is_probe_due();
    choose(state, &mut scratch.candidates, is_adaptive, true);
    let is_drafting = scratch.candidates.iter().any(|candidate| candidate.count > 0);
    state.pace.record_drafting(is_drafting);
    if !is_drafting {
        return Ok(());
    }

    // One pass of the draft head yields a whole block, so each sequence that drafts gets all it can use.
    scratch.candidates.retain(|candidate| candidate.count > 0);
    let wanted: Vec<DraftRequest<'_>> =
        scratch.candidates.iter().map(|candidate| request_of(state, candidate)).collect();
    scratch.drafts.clear();
    let began = clock.now();
    let result = model.draft(&wanted, &mut scratch.drafts);
    match result {
        Ok(()) if is_well_formed(&scratch.drafts, wanted.len(), state.vocab_size) => {}
        Ok(()) | Err(ForwardError::Failed(_)) => {
            state.stats.draft_failures += 1;
            return Ok(());
        }
        Err(ForwardError::DeviceLost(message)) => return Err(lose(state, model, cache, message, clock)),
    }
    state.pace.record_draft_call(clock.now().since(began));

    for (candidate, range) in scratch.candidates.iter_mut().zip(&scratch.drafts.ranges) {
        weigh(state, candidate, &scratch.drafts.confidence[range.clone()]);
    }
    choose(state, &mut scratch.candidates, is_adaptive, false);
    for (candidate, range) in scratch.candidates.iter().zip(&scratch.drafts.ranges) {
        let tokens = &scratch.drafts.tokens[range.clone()];
        let confidence = &scratch.drafts.confidence[range.clone()];
        commit::propose(state, candidate.sequence, candidate.count as usize, tokens, confidence);
    }
    Ok(())
}

/// Lists the running replies that may draft, with what their drafts are expected to be worth.
fn find_candidates(state: &State, scratch: &mut Scratch) {
    scratch.candidates.clear();
    for (index, sequence) in state.sequences.iter().enumerate() {
        // A sequence that waited still has its drafts.
        if sequence.is_prefilling() || sequence.is_held() {
            continue;
        }
        // The last token wanted is drawn by the row before it, so drafts stop one short of the end.
        let count_max = (state.limits.draft.max)
            .min(state.draft_block)
            .min(sequence.request.draft_max.unwrap_or(u32::MAX))
            .min(sequence.remaining() - 1)
            .min(DRAFTS_MAX as u32);
        if count_max == 0 {
            continue;
        }
        let mut candidate = Candidate { sequence: index, count_max, count: 0, products: [0.0; DRAFTS_MAX] };
        let mut product = 1.0;
        for position in 0..count_max as usize {
            product *= state.pace.expected(&sequence.acceptance, position);
            candidate.products[position] = product;
        }
        scratch.candidates.push(candidate);
    }
}

fn request_of<'a>(state: &'a State, candidate: &Candidate) -> DraftRequest<'a> {
    let sequence = &state.sequences[candidate.sequence];
    DraftRequest {
        slot: sequence.slot,
        anchor: *sequence.reply.last().expect("a computed prompt has its first token, checked after every round"),
        position: sequence.computed,
        count_max: candidate.count_max,
        sampling: &sequence.request.sampling,
    }
}

/// Replaces what was expected of a sequence's drafts by what the drafter says of them.
fn weigh(state: &State, candidate: &mut Candidate, confidence: &[f32]) {
    let mut product = 1.0;
    let mut confidence_product = 1.0;
    let mut usable = 0;
    for (position, &confidence) in confidence.iter().enumerate().take(candidate.count_max as usize) {
        confidence_product *= confidence;
        if confidence_product < state.limits.draft.confidence_min {
            break;
        }
        product *= state.pace.corrected(confidence);
        candidate.products[position] = product;
        usable = position as u32 + 1;
    }
    candidate.count_max = usable;
    candidate.count = 0;
}

fn choose(state: &State, candidates: &mut [Candidate], is_adaptive: bool, is_call_unpaid: bool) {
    if is_adaptive {
        let reply_rows = state.sequences.iter().filter(|sequence| !sequence.is_prefilling()).count();
        let draft_rows_max = (state.limits.round_rows as usize).saturating_sub(reply_rows);
        depth::choose(&state.pace, candidates, reply_rows, draft_rows_max, is_call_unpaid);
    } else {
        candidates.iter_mut().for_each(|candidate| candidate.count = candidate.count_max);
    }
}

fn is_well_formed(drafts: &Drafts, wanted: usize, vocab_size: u32) -> bool {
    drafts.ranges.len() == wanted
        && drafts.confidence.len() == drafts.tokens.len()
        && drafts.ranges.iter().all(|range| drafts.tokens.get(range.clone()).is_some())
        && drafts.tokens.iter().all(|&token| token < vocab_size)
}
