//! When a GPU that waits for the next request gets a tick: a command buffer with next to nothing in it, so that its clock stays
//! up. Pure: the thread that ticks asks what to do now and for how long to sleep.

use std::time::{Duration, Instant};

/// Between two ticks.
pub const EVERY: Duration = Duration::from_millis(20);

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Tick, then ask again after [`EVERY`].
    Tick,
    /// Work is under way, or was just now: ask again after this time.
    Sleep(Duration),
    /// Nobody has asked for anything for so long that the clock may drop; ask again when work has come.
    Rest,
}

/// Decides for a device whose last work ended at `worked`: ticks follow for `window`, then it rests.
pub fn next(now: Instant, worked: Instant, is_busy: bool, window: Duration) -> Next {
    let idle = now.saturating_duration_since(worked);
    if is_busy {
        Next::Sleep(EVERY)
    } else if idle >= window {
        Next::Rest
    } else if idle < EVERY {
        Next::Sleep(EVERY - idle)
    } else {
        Next::Tick
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_device_is_ticked_for_the_window_and_then_rests() {
        let worked = Instant::now();
        let at = |milliseconds| worked + Duration::from_millis(milliseconds);
        let window = Duration::from_secs(2);
        for (now, is_busy, expected) in [
            (at(0), false, Next::Sleep(EVERY)),
            (at(5), false, Next::Sleep(Duration::from_millis(15))),
            (at(20), false, Next::Tick),
            (at(1999), false, Next::Tick),
            (at(1999), true, Next::Sleep(EVERY)),
            (at(2000), false, Next::Rest),
            (at(90_000), true, Next::Sleep(EVERY)),
            (at(90_000), false, Next::Rest),
        ] {
            assert_eq!(next(now, worked, is_busy, window), expected, "{:?}", now - worked);
        }
        assert_eq!(next(worked, at(50), false, window), Next::Sleep(EVERY), "a clock that seems to run backwards");
        assert_eq!(next(at(30), worked, false, Duration::ZERO), Next::Rest, "no window, no tick");
    }
}
