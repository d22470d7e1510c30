//! What the tests of kept prefixes share: an engine around the history model, and replies that are checked as they come.

#![allow(dead_code)]

use std::sync::Arc;

use tf_engine::disk::{Disk, Files};
use tf_engine::model::{Model, ModelLimits};
use tf_engine::testing::simulate::plain_reply;
use tf_engine::testing::{Drafter, HistoryModel, HistoryOptions};
use tf_engine::{Batch, Engine, EngineHandle, EngineLimits, Finished, Reply, Request, VirtualClock};

pub const LIMITS: ModelLimits = ModelLimits { vocab_size: 40, context: 4096, slots: 4, round_rows: 64, draft_block: 5 };
pub const SEED: u64 = 3;

pub fn engine(slots: u32, pages: Option<u32>, bytes: u64) -> EngineHandle {
    let (engine, handle) = waiting_engine(slots, pages, bytes);
    std::thread::spawn(move || engine.run());
    handle
}

/// An engine that doesn't run yet, so that several requests meet it at once.
pub fn waiting_engine(slots: u32, pages: Option<u32>, bytes: u64) -> (Engine<HistoryModel>, EngineHandle) {
    let limits = ModelLimits { slots, ..LIMITS };
    let options = HistoryOptions { limits, seed: SEED, pages, drafter: Drafter::Mixed, ..HistoryOptions::default() };
    let model = HistoryModel::new(options);
    let limits = EngineLimits { prefix_cache_bytes: bytes, ..EngineLimits::for_model(&model.limits()) };
    Engine::new(model, limits, Arc::new(VirtualClock::new())).expect("these limits fit")
}

pub fn answers(engine: &EngineHandle, requests: Vec<Request>) -> Vec<(Vec<u32>, Finished)> {
    read(engine.submit_all(requests).expect("these requests fit"))
}

pub fn read(mut replies: Vec<Reply>) -> Vec<(Vec<u32>, Finished)> {
    let mut batch = Batch::default();
    let whole = |reply: &mut Reply| {
        let mut tokens = Vec::new();
        loop {
            reply.receive_blocking(&mut batch);
            tokens.extend(batch.tokens.iter().map(|row| row.token));
            if let Some(finished) = batch.finished.take() {
                return (tokens, finished);
            }
        }
    };
    replies.iter_mut().map(whole).collect()
}

/// The one reply to `request`, which must be what it is by definition.
pub fn answer(engine: &EngineHandle, request: Request) -> (Vec<u32>, Finished) {
    let (tokens, finished) = answers(engine, vec![request.clone()]).remove(0);
    assert_eq!(tokens, plain_reply(SEED, LIMITS.vocab_size, &request).0.tokens, "{request:?}");
    (tokens, finished)
}

pub fn text(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|index| (index * index * 7 + index * seed + seed) % LIMITS.vocab_size).collect()
}

/// An engine with files, and its thread: it ends when the engine is drained.
pub fn engine_with_disk<F: Files + 'static>(bytes: u64, disk: Disk<F>) -> (EngineHandle, std::thread::JoinHandle<()>) {
    let (mut engine, handle) = waiting_engine(2, None, bytes);
    engine.use_disk(disk, &handle).expect("a thread can be started");
    (handle, std::thread::spawn(move || engine.run()))
}
