//! Drafts for the next windows: copies from the context, the draft head, or none, whichever is expected to pay.
//!
//! A drafter that is wrong, slow or missing changes speed only. What a copy would have brought is judged every round by
//! the tokens that came, used or not; the head is judged where it was asked.

use crate::clock::Clock;
use crate::commit;
use crate::depth::{self, Candidate, Offer};
use crate::limits::DRAFTS_MAX;
use crate::model::{DraftRequest, Drafts, ForwardError, Model};
use crate::plan::optional_rows;
use crate::request::DraftSource;
use crate::sequence::Sequence;
use crate::state::State;

/// What drafting works with. Kept between rounds for its memory alone.
#[derive(Debug, Default)]
pub struct Scratch {
    candidates: Vec<Candidate>,
    drafts: Drafts,
}

/// Gives the running replies drafts for their next windows.
///
/// A drafter that fails leaves the next round without its drafts; replies don't notice.
///
/// # Errors
/// [`ForwardError::DeviceLost`] alone.
pub fn draft<M: Model>(
    state: &mut State,
    model: &mut M,
    clock: &dyn Clock,
    scratch: &mut Scratch,
) -> Result<(), ForwardError> {
    if state.limits.draft.copy {
        commit::look_up_copies(state);
    }
    let Scratch { candidates, drafts } = scratch;
    find_candidates(state, candidates);
    drafts.clear();
    if candidates.is_empty() {
        return Ok(());
    }
    let (fixed_rows, room) = rows(state);
    // A probe uses all drafts there are, whatever they are thought to be worth.
    let is_adaptive = state.limits.draft.adaptive && !state.pace.is_probe_due();
    if is_adaptive {
        depth::deal(&state.pace, candidates, fixed_rows, room, true);
    } else {
        depth::deal_all(candidates, room);
    }

    if candidates.iter().any(is_asked) {
        // One pass of the draft head yields a whole block, so each sequence that drafts gets all it can use.
        ask_head(state, model, clock, candidates, drafts)?;
        if is_adaptive {
            depth::deal(&state.pace, candidates, fixed_rows, room, false);
        } else {
            depth::deal_all(candidates, room);
        }
    }
    state.pace.record_drafting(candidates.iter().any(|candidate| candidate.count > 0));
    for candidate in candidates.iter() {
        let answer = candidate.answer.clone();
        commit::propose(state, candidate, &drafts.tokens[answer.clone()], &drafts.confidence[answer]);
    }
    Ok(())
}

fn is_asked(candidate: &Candidate) -> bool {
    candidate.count > 0 && candidate.source == DraftSource::Head
}

/// Rows of the next round that run anyway, and room for drafts beside them.
fn rows(state: &State) -> (usize, usize) {
    let running = state.sequences.iter().filter(|sequence| !sequence.is_prefilling());
    let known = |sequence: &Sequence| sequence.window_room(state.draft_block).min(sequence.given.len() as u32);
    let known_rows: u32 = running.clone().map(known).sum();
    let room = optional_rows(state);
    (running.count() + known_rows.min(room) as usize, room.saturating_sub(known_rows) as usize)
}

/// Lists the running replies that may draft, with what drafts of each source are expected to be worth.
fn find_candidates(state: &State, candidates: &mut Vec<Candidate>) {
    candidates.clear();
    for (index, sequence) in state.sequences.iter().enumerate() {
        // A sequence that waited still has its drafts.
        if sequence.is_prefilling() || sequence.is_held() || !sequence.given.is_empty() {
            continue;
        }
        let room = room(state, sequence);
        let head = if state.limits.draft.head { room } else { 0 };
        let head = Offer::new(head, |position| state.pace.expected(&sequence.acceptance, position));
        let (class, judged) = (sequence.copy_class, &sequence.copy_acceptance);
        let copy = Offer::new(room.min(sequence.copied.len() as u32), |position| {
            state.pace.expected_copy(judged, class, position)
        });
        if head.count > 0 || copy.count > 0 {
            candidates.push(Candidate::new(index, head, copy));
        }
    }
}

/// Most drafts of a reply's next window. They stop before a token that will be given.
pub fn room(state: &State, sequence: &Sequence) -> u32 {
    let forcing = sequence.request.forcing.as_deref();
    let drawn_max = forcing.and_then(|forcing| sequence.forced.drawn_max(forcing));
    let most = state.limits.draft.max.min(state.draft_block).min(DRAFTS_MAX as u32);
    sequence.window_room(most).min(drawn_max.map_or(u32::MAX, |drawn| drawn.saturating_sub(1)))
}

/// Asks the draft head for the candidates that are to have its drafts, and puts what it says in the place of what was
/// expected of them; the others get none.
fn ask_head<M: Model>(
    state: &mut State,
    model: &mut M,
    clock: &dyn Clock,
    candidates: &mut [Candidate],
    drafts: &mut Drafts,
) -> Result<(), ForwardError> {
    let wanted: Vec<DraftRequest<'_>> = candidates
        .iter()
        .filter(|candidate| is_asked(candidate))
        .map(|candidate| request_of(state, candidate))
        .collect();
    drafts.clear();
    let began = clock.now();
    let result = model.draft(&wanted, drafts);
    let is_answered = match result {
        Ok(()) => is_well_formed(drafts, wanted.len(), state.vocab_size),
        Err(ForwardError::Failed(_) | ForwardError::Unreadable(_)) => false,
        Err(lost @ ForwardError::DeviceLost(_)) => return Err(lost),
    };
    if is_answered {
        state.pace.record_draft_call(clock.now().since(began));
    } else {
        state.stats.draft_failures += 1;
        drafts.clear();
    }
    let mut answers = drafts.ranges.iter();
    for candidate in candidates.iter_mut() {
        let answer = if is_asked(candidate) { answers.next().cloned() } else { None };
        candidate.answer = answer.unwrap_or(0..0);
        candidate.head = weigh(state, candidate.head.count, &drafts.confidence[candidate.answer.clone()]);
    }
    Ok(())
}

fn request_of<'a>(state: &'a State, candidate: &Candidate) -> DraftRequest<'a> {
    let sequence = &state.sequences[candidate.sequence];
    DraftRequest {
        slot: sequence.slot,
        anchor: *sequence.reply.last().expect("a computed prompt has its first token, checked after every round"),
        position: sequence.computed,
        count_max: candidate.head.count,
        sampling: &sequence.request.sampling,
    }
}

/// What the head's own drafts are worth by its own confidence in them.
fn weigh(state: &State, count_max: u32, confidence: &[f32]) -> Offer {
    let mut product = 1.0;
    let is_usable = |confidence: &&f32| {
        product *= **confidence;
        product >= state.limits.draft.confidence_min
    };
    let usable = confidence.iter().take(count_max as usize).take_while(is_usable).count();
    Offer::new(usable as u32, |position| state.pace.corrected(confidence[position]))
}

fn is_well_formed(drafts: &Drafts, wanted: usize, vocab_size: u32) -> bool {
    drafts.ranges.len() == wanted
        && drafts.confidence.len() == drafts.tokens.len()
        && drafts.ranges.iter().all(|range| drafts.tokens.get(range.clone()).is_some())
        && drafts.tokens.iter().all(|&token| token < vocab_size)
}
