//! A model without mathematics, a seeded simulator and the laws they check: what the engine's own tests, and those of the
//! crates above it, stand on. Nothing here is fast or clever; it is small enough to be believed.

pub mod disk;
pub mod history;
pub mod random;
pub mod simulate;

pub use history::{Drafter, Fault, HistoryModel, HistoryOptions, HistorySnapshot};
pub use random::Random;

use crate::channel;
use crate::clock::Clock;
use crate::request::{Request, RequestId};
use crate::state::Waiting;
use std::time::Duration;

/// A request for a state that is stepped by hand, with nobody listening.
pub fn waiting(id: RequestId, request: Request, clock: &dyn Clock) -> Waiting {
    let (sender, _) = channel::channel(u32::MAX, Duration::MAX);
    Waiting { id, request, sender, submitted: clock.now() }
}
