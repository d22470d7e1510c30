//! Time as an argument: the engine never reads the machine's clock by itself.
//!
//! Times decide when a request has waited too long and how many drafts pay; they can't change a token.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A point in time, counted from the clock's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    pub nanoseconds: u64,
}

impl Time {
    /// The time passed since `earlier`; zero when `earlier` is later.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.nanoseconds.saturating_sub(earlier.nanoseconds))
    }

    /// This time plus `duration`, or the last time that can be named.
    pub fn after(self, duration: Duration) -> Time {
        let added = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Time { nanoseconds: self.nanoseconds.saturating_add(added) }
    }
}

/// Where times come from.
pub trait Clock: Send + Sync {
    fn now(&self) -> Time;
}

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct WallClock {
    start: Instant,
}

impl WallClock {
    pub fn new() -> Self {
        WallClock { start: Instant::now() }
    }
}

impl Default for WallClock {
    fn default() -> Self {
        WallClock::new()
    }
}

impl Clock for WallClock {
    fn now(&self) -> Time {
        Time::default().after(self.start.elapsed())
    }
}

/// A clock that moves only when it is told to. Clones share one time.
#[derive(Clone, Debug, Default)]
pub struct VirtualClock {
    nanoseconds: Arc<AtomicU64>,
}

impl VirtualClock {
    pub fn new() -> Self {
        VirtualClock::default()
    }

    pub fn advance(&self, duration: Duration) {
        self.nanoseconds.store(self.now().after(duration).nanoseconds, Ordering::Release);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Time {
        Time { nanoseconds: self.nanoseconds.load(Ordering::Acquire) }
    }
}
