//! The thread that keeps an idle GPU's clock up for a while; see [`crate::apple::ticks`].

use super::driver::State;
use crate::apple::ticks::{EVERY, Next, next};
use objc2::rc::autoreleasepool;
use std::sync::{Mutex, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How long a device that rests is left alone at least.
const REST: Duration = Duration::from_millis(100);

/// Ticks for `window` after each round, as long as the device is there.
pub(super) fn keep(state: Weak<Mutex<State>>, window: Duration) {
    let ticks = move || {
        while let Some(state) = state.upgrade() {
            let pause = match state.try_lock() {
                Ok(state) => match next(Instant::now(), state.worked, state.is_busy(), window) {
                    Next::Tick => {
                        autoreleasepool(|_| state.tick());
                        EVERY
                    }
                    Next::Sleep(pause) => pause,
                    Next::Rest => REST,
                },
                Err(TryLockError::WouldBlock) => EVERY,
                Err(TryLockError::Poisoned(_)) => return,
            };
            // Not held while it sleeps, so that the device can go.
            drop(state);
            thread::sleep(pause);
        }
    };
    // Without the thread the clock may drop, which is what happens without the option.
    drop(thread::Builder::new().name("metal-ticks".into()).spawn(ticks));
}
