//! One request's way back: committed tokens, bounded, and exactly one ending.
//!
//! The engine never waits for a reader. Tokens gather in one batch that the reader swaps for an empty one, so that a
//! reader who keeps up costs no allocation. A sender that goes away without an ending leaves one: a request is
//! answered even when the engine's thread breaks down.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tf_text::TokenId;

use crate::clock::Time;
use crate::model::DrawnRow;
use crate::request::{FinishReason, Finished, ReplyStats};

/// One committed token, or one scored token of the prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenRow {
    pub token: TokenId,
    /// From the raw row at temperature 1; 0 where none was asked for.
    pub logprob: f32,
    /// Range in `Batch::top`.
    pub top_start: u32,
    pub top_count: u32,
}

/// What happened since the last one. Reused.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The request has its slot; set once.
    pub started: bool,
    /// Scored prompt tokens in order, from the prompt's second token on.
    pub prompt: Vec<TokenRow>,
    pub tokens: Vec<TokenRow>,
    pub top: Vec<(TokenId, f32)>,
    /// Set in the last batch.
    pub finished: Option<Finished>,
}

impl Batch {
    /// Empties all lists and keeps their memory.
    pub fn clear(&mut self) {
        self.started = false;
        self.prompt.clear();
        self.tokens.clear();
        self.top.clear();
        self.finished = None;
    }

    /// The likeliest tokens beside `row`.
    pub fn top_of(&self, row: &TokenRow) -> &[(TokenId, f32)] {
        &self.top[row.top_start as usize..(row.top_start + row.top_count) as usize]
    }

    fn is_empty(&self) -> bool {
        !self.started && self.prompt.is_empty() && self.tokens.is_empty() && self.finished.is_none()
    }

    fn push(&mut self, into_prompt: bool, token: TokenId, logprob: f32, top: &[(TokenId, f32)]) {
        let row = TokenRow { token, logprob, top_start: self.top.len() as u32, top_count: top.len() as u32 };
        self.top.extend_from_slice(top);
        if into_prompt { self.prompt.push(row) } else { self.tokens.push(row) }
    }
}

struct Inner {
    batch: Batch,
    waker: Option<Waker>,
    oldest_unread: Option<Time>,
    ended: bool,
}

struct Shared {
    inner: Mutex<Inner>,
    ready: Condvar,
    queue_position: AtomicU32,
}

impl Shared {
    /// Every write under this lock leaves a whole batch, so a panic elsewhere can't have torn it.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write<R>(&self, change: impl FnOnce(&mut Inner) -> R) -> R {
        let mut inner = self.lock();
        let result = change(&mut inner);
        let waker = inner.waker.take();
        drop(inner);
        self.ready.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
        result
    }
}

/// The reader's end of a request.
pub(crate) struct Receiver {
    shared: Arc<Shared>,
}

/// The engine's end of a request.
pub struct Sender {
    shared: Arc<Shared>,
    unread_tokens: usize,
    unread_time: Duration,
}

/// The reader is too far behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Behind;

pub(crate) fn channel(unread_tokens: u32, unread_time: Duration) -> (Sender, Receiver) {
    let inner = Inner { batch: Batch::default(), waker: None, oldest_unread: None, ended: false };
    let shared =
        Arc::new(Shared { inner: Mutex::new(inner), ready: Condvar::new(), queue_position: AtomicU32::new(0) });
    (Sender { shared: shared.clone(), unread_tokens: unread_tokens as usize, unread_time }, Receiver { shared })
}

impl Sender {
    pub fn started(&self) {
        self.shared.write(|inner| inner.batch.started = true);
    }

    /// How many requests are before this one, itself included; 0 once it has a slot.
    pub fn queue_position(&self, position: u32) {
        self.shared.queue_position.store(position, Ordering::Relaxed);
    }

    /// Hands over scored prompt tokens. Not bounded: there are no more than the client sent.
    pub fn prompt_rows<'a>(&self, rows: impl Iterator<Item = (TokenId, f32, &'a [(TokenId, f32)])>) {
        self.shared.write(|inner| rows.for_each(|(token, logprob, top)| inner.batch.push(true, token, logprob, top)));
    }

    /// Hands over committed tokens.
    ///
    /// # Errors
    /// [`Behind`] when too much is unread, or for too long; nothing is handed over then.
    pub fn tokens(&self, rows: &[DrawnRow], top: &[(TokenId, f32)], now: Time) -> Result<(), Behind> {
        self.shared.write(|inner| {
            let oldest = *inner.oldest_unread.get_or_insert(now);
            if now.since(oldest) > self.unread_time {
                return Err(Behind);
            }
            if inner.batch.tokens.len() + rows.len() > self.unread_tokens {
                return Err(Behind);
            }
            for row in rows {
                let range = row.top_start as usize..(row.top_start + row.top_count) as usize;
                inner.batch.push(false, row.token, row.logprob, &top[range]);
            }
            Ok(())
        })
    }

    /// Says the last word.
    pub fn finish(self, finished: Finished) {
        self.end(finished);
    }

    fn end(&self, finished: Finished) {
        self.shared.write(|inner| {
            if !inner.ended {
                inner.ended = true;
                inner.batch.finished = Some(finished);
            }
        });
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.end(Finished { reason: FinishReason::Stopped, stats: ReplyStats::default() });
    }
}

impl Receiver {
    pub fn queue_position(&self) -> u32 {
        self.shared.queue_position.load(Ordering::Relaxed)
    }

    /// Swaps what has gathered for the emptied `batch`. False when nothing has.
    pub fn try_receive(&self, batch: &mut Batch) -> bool {
        batch.clear();
        Self::take(&mut self.shared.lock(), batch)
    }

    pub fn receive_blocking(&self, batch: &mut Batch) {
        batch.clear();
        let mut inner = self.shared.lock();
        while !Self::take(&mut inner, batch) {
            inner = self.shared.ready.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub fn poll_receive(&self, context: &mut Context<'_>, batch: &mut Batch) -> Poll<()> {
        batch.clear();
        let mut inner = self.shared.lock();
        if Self::take(&mut inner, batch) {
            return Poll::Ready(());
        }
        inner.waker = Some(context.waker().clone());
        Poll::Pending
    }

    fn take(inner: &mut Inner, batch: &mut Batch) -> bool {
        if inner.batch.is_empty() {
            return false;
        }
        std::mem::swap(&mut inner.batch, batch);
        inner.oldest_unread = None;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(token: TokenId) -> DrawnRow {
        DrawnRow { token, logprob: 0.0, next_logprob: 0.0, top_start: 0, top_count: 0 }
    }

    fn at(seconds: u64) -> Time {
        Time::default().after(Duration::from_secs(seconds))
    }

    #[test]
    fn a_reader_who_is_behind_is_refused() {
        // (tokens at once, seconds of each push, read between, refused at push)
        let cases: [(usize, &[u64], bool, Option<usize>); 5] = [
            (2, &[0, 1], false, None),
            (2, &[0, 1, 2], false, Some(2)),
            (2, &[0, 1, 2, 3, 4], true, None),
            (1, &[0, 60], false, None),
            (1, &[0, 61], false, Some(1)),
        ];
        for (count, seconds, read, refused) in cases {
            let (sender, receiver) = channel(5, Duration::from_secs(60));
            let mut batch = Batch::default();
            let rows = vec![row(1); count];
            let mut first_refusal = None;
            for (index, &second) in seconds.iter().enumerate() {
                if sender.tokens(&rows, &[], at(second)).is_err() {
                    first_refusal.get_or_insert(index);
                }
                if read {
                    assert!(receiver.try_receive(&mut batch));
                }
            }
            assert_eq!(first_refusal, refused, "{count} tokens at {seconds:?}, read {read}");
        }
    }

    #[test]
    fn a_lost_sender_leaves_exactly_one_ending() {
        for finish in [false, true] {
            let (sender, receiver) = channel(5, Duration::from_secs(60));
            if finish {
                sender.finish(Finished { reason: FinishReason::Length, stats: ReplyStats::default() });
            } else {
                drop(sender);
            }
            let mut batch = Batch::default();
            receiver.receive_blocking(&mut batch);
            let expected = if finish { FinishReason::Length } else { FinishReason::Stopped };
            assert_eq!(batch.finished.as_ref().map(|finished| &finished.reason), Some(&expected));
            assert!(!receiver.try_receive(&mut batch), "a second ending");
        }
    }
}
