//! Kept prefixes on the production model: conversations that grow give the bits of a cold run and compute little twice.

mod production;

use std::sync::Arc;

use production::tiny_a;
use tf_engine::model::Model;
use tf_engine::{Batch, CacheSource, EngineHandle, EngineLimits, Finished, Request, VirtualClock};
use tf_model::deepseek_v41::Options;

const PAGE: u32 = tf_model::deepseek_v41::pages::PAGE_POSITIONS;

/// A reply to the bit, and what it took.
struct Answer {
    tokens: Vec<u32>,
    logprobs: Vec<u32>,
    finished: Finished,
}

fn engine(prefix_cache_bytes: u64, prompt_chunk: u32) -> EngineHandle {
    let model = tiny_a().load(Options { context: 1024, slots: 3, round_rows: 128, ..Options::default() });
    let limits = EngineLimits { prefix_cache_bytes, prompt_chunk, ..EngineLimits::for_model(&model.limits()) };
    tf_engine::spawn(model, limits, Arc::new(VirtualClock::new())).expect("these limits fit").0
}

fn answers(engine: &EngineHandle, requests: Vec<Request>) -> Vec<Answer> {
    let mut replies = engine.submit_all(requests).expect("these requests fit");
    let mut batch = Batch::default();
    let answer = |reply: &mut tf_engine::Reply| {
        let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
        loop {
            reply.receive_blocking(&mut batch);
            tokens.extend(batch.tokens.iter().map(|row| row.token));
            logprobs.extend(batch.tokens.iter().map(|row| row.logprob.to_bits()));
            if let Some(finished) = batch.finished.take() {
                return Answer { tokens, logprobs, finished };
            }
        }
    };
    replies.iter_mut().map(answer).collect()
}

fn request(prompt: &[u32], snapshot_at: &[u32]) -> Request {
    Request { logprobs: Some(0), snapshot_at: snapshot_at.to_vec(), ..Request::greedy(prompt, 6) }
}

fn equal(what: &str, warm: &Answer, cold: &Answer) {
    assert_eq!(warm.tokens, cold.tokens, "{what}");
    assert_eq!(warm.logprobs, cold.logprobs, "{what}");
    assert!(warm.finished.reason.is_complete(), "{what}: {:?}", warm.finished.reason);
}

fn text(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|index| (index * 37 + seed * 101 + index * index % 89) % 384).collect()
}

#[test]
fn a_conversation_that_grows_is_resumed_with_the_same_bits() {
    for chunk in [128, 50] {
        let (warm, cold) = (engine(1 << 30, chunk), engine(0, chunk));
        let mut prompt = text(1, 150);
        let mut known = 0;
        for turn in 0..5 {
            let asked = request(&prompt, &[prompt.len() as u32 - 2]);
            let kept = answers(&warm, vec![asked.clone()]).remove(0);
            equal(&format!("turn {turn} in chunks of {chunk}"), &kept, &answers(&cold, vec![asked]).remove(0));
            let stats = kept.finished.stats;
            assert!(stats.cached_tokens + PAGE >= known && stats.cached_tokens <= known, "{stats:?}");
            assert!(turn == 0 || stats.cached_tokens + 2 >= known, "a prompt that grew computes a few rows: {stats:?}");
            assert_eq!(stats.cache.source == CacheSource::Ram, turn > 0);
            // The next turn has the whole reply, or only the prompt with another continuation.
            known = prompt.len() as u32 - 1;
            if turn % 2 == 0 {
                prompt.extend(&kept.tokens);
                known = prompt.len() as u32 - 1;
            }
            prompt.extend(text(turn + 2, 40));
        }
    }
}

#[test]
fn every_cut_gives_the_bits_of_a_fresh_prompt() {
    let (warm, cold) = (engine(1 << 30, 128), engine(0, 128));
    for cut in (1..200).step_by(13).chain([126, 127, 128, 129, 130]) {
        // A text of its own for each cut, so that no other state is near.
        let base = text(3 * cut + 7, 220);
        // Another end after `cut` tokens, at first without a state there and then with one.
        let mut prompt = base[..cut as usize].to_vec();
        prompt.extend(text(cut, 30));
        let first = answers(&warm, vec![request(&prompt, &[cut])]).remove(0);
        prompt.truncate(cut as usize);
        prompt.extend(text(cut + 1, 9));
        let second = answers(&warm, vec![request(&prompt, &[])]).remove(0);
        equal(&format!("cut at {cut}"), &second, &answers(&cold, vec![request(&prompt, &[])]).remove(0));
        let stats = second.finished.stats;
        assert!(cut < 16 || stats.cached_tokens >= cut, "cut at {cut}: {stats:?} after {:?}", first.finished.stats);
    }
}

#[test]
fn prompts_at_once_share_their_common_rows() {
    let (warm, cold) = (engine(1 << 30, 64), engine(0, 64));
    let requests: Vec<Request> = (0..3)
        .map(|tail| {
            let mut prompt = text(3, 200);
            prompt.extend(text(20 + tail, 12 + tail));
            request(&prompt, &[])
        })
        .collect();
    let shared = answers(&warm, requests.clone());
    for (index, (warm, cold)) in shared.iter().zip(answers(&cold, requests)).enumerate() {
        equal(&format!("prompt {index}"), warm, &cold);
        let cached = warm.finished.stats.cached_tokens;
        assert_eq!(cached >= 200 - PAGE, index > 0, "prompt {index}: {cached} cached");
    }
}
