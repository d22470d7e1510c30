//! One round: decide, compute, judge, write, check.

use crate::clock::Clock;
use crate::commit;
use crate::drafting::{self, draft};
use crate::limits::DISK_PIECES_A_ROUND;
use crate::model::{Drawn, ForwardError, Model, SequenceView};
use crate::plan::Plan;
use crate::prefix_cache::PrefixCache;
use crate::prefixes::{self, release};
use crate::request::FinishReason;
use crate::state::State;
use crate::verify::{Accepted, impose, verify};

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
    drafting: drafting::Scratch,
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
    let given = result.and_then(|()| impose(state, &scratch.plan, &mut scratch.drawn));
    let now = clock.now();
    match given {
        Ok(()) => verify(state, &scratch.plan, &scratch.drawn, &mut scratch.accepted),
        Err(ref error @ (ForwardError::Failed(ref message) | ForwardError::Unreadable(ref message))) => {
            state.stats.is_unreadable = matches!(error, ForwardError::Unreadable(_));
            commit::fail(state, &scratch.plan, message, now);
            release(state, model, cache);
            commit::admit(state, now);
            release(state, model, cache);
            state.check();
            return Ok(Busy::Worked);
        }
        Err(ForwardError::DeviceLost(message)) => return Err(lose(state, model, cache, message, clock)),
    }
    state.stats.is_unreadable = false;
    for (window, verdict) in scratch.plan.round.windows.iter().zip(&scratch.accepted) {
        model.keep(window.slot, verdict.kept);
    }
    prefixes::take(state, &scratch.plan, &scratch.accepted, model, cache);
    let (prompt_rows, reply_rows) = scratch.plan.row_counts();
    state.pace.record_round(prompt_rows, reply_rows, now.since(began));
    commit::commit(state, &scratch.plan, &scratch.drawn, &scratch.accepted, now);
    release(state, model, cache);
    if let Err(error) = draft(state, model, clock, &mut scratch.drafting) {
        return Err(lose(state, model, cache, error.to_string(), clock));
    }
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
