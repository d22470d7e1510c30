//! A model without mathematics, a seeded simulator and the laws they check: what the engine's own tests, and those of the
//! crates above it, stand on. Nothing here is fast or clever; it is small enough to be believed.

pub mod disk;
pub mod history;
pub mod random;
pub mod simulate;

pub use history::{Drafter, Fault, HistoryModel, HistoryOptions, HistorySnapshot};
pub use random::Random;

use crate::channel::{self, Batch};
use crate::clock::{Clock, VirtualClock};
use crate::commit;
use crate::limits::EngineLimits;
use crate::model::Model;
use crate::prefixes;
use crate::request::{Request, RequestId};
use crate::round::{Scratch, run_round};
use crate::state::{State, Waiting};
use crate::stats::EngineStats;
use crate::testing::simulate::ReplyRecord;
use std::time::Duration;

/// A request for a state that is stepped by hand, with nobody listening.
pub fn waiting(id: RequestId, request: Request, clock: &dyn Clock) -> Waiting {
    let (sender, _) = channel::channel(u32::MAX, Duration::MAX);
    Waiting { id, request, sender, submitted: clock.now() }
}

/// Serves requests with `model` on this thread, each from its round on, and returns their replies and the engine's
/// counters. The model is as empty afterwards as it must be before.
///
/// # Errors
/// Limits that the model can't serve, a lost device, or replies without an end.
pub fn serve<M: Model>(
    model: &mut M,
    limits: EngineLimits,
    arrivals: &[(u64, Request)],
) -> Result<(Vec<ReplyRecord>, EngineStats), String> {
    const ROUNDS_MAX: u64 = 100_000;
    let clock = VirtualClock::new();
    let limits = limits.checked(&model.limits()).map_err(|error| error.to_string())?;
    let mut state = State::new(limits, &model.limits());
    state.keeping = prefixes::rules_for(model, &limits);
    let mut cache = prefixes::cache_for(model, &limits);
    let mut scratch = Scratch::default();
    let mut receivers = Vec::with_capacity(arrivals.len());
    for round in 0..ROUNDS_MAX {
        for (index, (_, request)) in arrivals.iter().enumerate().filter(|(_, (at, _))| *at == round) {
            let (sender, receiver) = channel::channel(u32::MAX, Duration::MAX);
            let waiting =
                Waiting { id: RequestId(index as u64), request: request.clone(), sender, submitted: clock.now() };
            commit::enqueue(&mut state, waiting);
            receivers.push((index, receiver));
        }
        if receivers.len() == arrivals.len() && state.is_idle() {
            let mut records = vec![ReplyRecord::default(); arrivals.len()];
            let mut batch = Batch::default();
            for (index, receiver) in &receivers {
                while receiver.try_receive(&mut batch) {
                    records[*index].push(&batch);
                }
            }
            return Ok((records, state.stats));
        }
        run_round(&mut state, model, &clock, &mut scratch, &mut cache).map_err(|error| error.to_string())?;
    }
    Err(format!("{ROUNDS_MAX} rounds and no end"))
}
