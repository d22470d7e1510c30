//! Memory of bodies: what they take while they arrive, are parsed and are cut into tokens stays within what was planned.
//!
//! Bytes that have arrived are counted as they come, so a slow client holds no more than it has sent; when their room is
//! used up, further bodies are refused. Work on a whole body takes far more than its bytes, so it waits for room, first come
//! first served; a body that needs more than there is room for at all is worked on alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bodies of the largest size that may have arrived at once.
pub const BODIES_MAX: usize = 2;
/// What cutting a byte of text into tokens takes at most, as measured with long texts of many kinds.
pub const CUT_BYTES: usize = 192;
/// A parsed value with its share of a list or of an object.
const VALUE_BYTES: usize = 64;
/// Room is counted in pieces of so many bytes.
const PIECE: usize = 4096;

/// Room for the bodies of a server.
#[derive(Debug)]
pub struct Work {
    arrived: Arc<AtomicUsize>,
    arrived_max: usize,
    room: Arc<Semaphore>,
    pieces: u32,
}

/// Bytes of a body that have arrived; gives their room back at its end.
#[derive(Debug)]
pub struct Arrived {
    all: Arc<AtomicUsize>,
    bytes: usize,
}

/// Room to work on a body, until it is dropped.
#[derive(Debug)]
pub struct Room {
    _pieces: Option<OwnedSemaphorePermit>,
    _arrived: Arrived,
}

impl Work {
    /// `body_bytes`: of the largest body; `work_bytes`: for work on bodies.
    pub fn new(body_bytes: usize, work_bytes: u64) -> Self {
        let pieces =
            u32::try_from(work_bytes / PIECE as u64).unwrap_or(u32::MAX).clamp(1, Semaphore::MAX_PERMITS as u32);
        Work {
            arrived: Arc::default(),
            arrived_max: body_bytes.saturating_mul(BODIES_MAX),
            room: Arc::new(Semaphore::new(pieces as usize)),
            pieces,
        }
    }

    /// The count of a body that is about to come.
    pub fn begin(&self) -> Arrived {
        Arrived { all: self.arrived.clone(), bytes: 0 }
    }

    /// Counts `bytes` more of a body; false when there is no room for them.
    pub fn add(&self, arrived: &mut Arrived, bytes: usize) -> bool {
        let added = |all: usize| all.checked_add(bytes).filter(|all| *all <= self.arrived_max);
        let fits = self.arrived.fetch_update(Ordering::AcqRel, Ordering::Acquire, added).is_ok();
        arrived.bytes += if fits { bytes } else { 0 };
        fits
    }

    /// Waits for room for work that takes `bytes`.
    pub async fn room(&self, arrived: Arrived, bytes: usize) -> Room {
        let pieces = u32::try_from(bytes.div_ceil(PIECE)).unwrap_or(u32::MAX).min(self.pieces);
        // Never closed.
        Room { _pieces: self.room.clone().acquire_many_owned(pieces).await.ok(), _arrived: arrived }
    }
}

impl Drop for Arrived {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// What work on a body takes beside its own bytes. `text_bytes`: what of it is cut into tokens, at most.
pub fn bytes_of(body: &str, text_bytes: usize) -> usize {
    let text = body.len().min(text_bytes);
    2 * body.len() + value_count(body) * VALUE_BYTES + text.saturating_mul(CUT_BYTES)
}

/// Values of a JSON text, at most: what its separators part.
fn value_count(body: &str) -> usize {
    let (mut count, mut in_string, mut is_escaped) = (1, false, false);
    for byte in body.bytes() {
        match (in_string, byte) {
            (true, _) if is_escaped => is_escaped = false,
            (true, b'\\') => is_escaped = true,
            (_, b'"') => in_string = !in_string,
            (false, b',' | b':' | b'[' | b'{') => count += 1,
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn bodies_that_arrive_never_take_more_than_two_of_the_largest() {
        let work = Work::new(1000, 1 << 20);
        let (mut first, mut second, mut third) = (work.begin(), work.begin(), work.begin());
        assert!(work.add(&mut first, 1000) && work.add(&mut second, 600) && work.add(&mut second, 400));
        assert!(!work.add(&mut third, 1), "there was room for a third");
        drop(second);
        assert!(work.add(&mut third, 1000) && !work.add(&mut third, 1));
        drop((first, third));
        assert_eq!(work.arrived.load(Ordering::Acquire), 0);
    }

    #[test]
    fn bodies_are_worked_on_together_only_as_far_as_there_is_room() {
        let work = Work::new(1000, 100 * PIECE as u64);
        let room = |pieces: usize| now(work.room(work.begin(), pieces * PIECE));
        let (first, second) = (room(60), room(40));
        assert!(first.is_some() && second.is_some());
        assert!(room(1).is_none(), "room for more than there is");
        drop(first);
        assert!(room(60).is_some() && room(61).is_none());
        drop(second);
        // More than all the room: alone.
        let all = room(5000);
        assert!(all.is_some() && room(1).is_none());
        drop(all);
        assert!(room(1).is_some());
    }

    #[test]
    fn a_list_of_numbers_costs_more_than_a_text_of_its_length() {
        assert_eq!(value_count(r#"{"a": [1, 2], "b": "x,y:[{\"z\",{"}"#), 7);
        let numbers = format!("[{}1]", "1,".repeat(1000));
        let text = format!("[{:?}]", "1,".repeat(1000));
        assert!(bytes_of(&numbers, 0) > 20 * bytes_of(&text, 0) / 2);
        assert_eq!(bytes_of("[]", 1) - bytes_of("[]", 0), CUT_BYTES);
    }
}
