//! Kept prefixes as a client sees them: what a prompt computes, and that nothing else changes.

mod common;

use common::{LIMITS, SEED, answer, answers, engine, read, text, waiting_engine};
use tf_engine::testing::simulate::plain_reply;
use tf_engine::{Batch, CacheReason, CacheSource, FinishReason, Request};

#[test]
fn the_same_prompt_again_computes_one_row() {
    for length in [3, 17, 100, 700] {
        let engine = engine(1, None, 1 << 30);
        let request = Request::greedy(&text(1, length), 20);
        assert_eq!(answer(&engine, request.clone()).1.stats.cached_tokens, 0);
        for _ in 0..4 {
            let stats = answer(&engine, request.clone()).1.stats;
            assert_eq!((stats.cached_tokens, stats.cache.source), (length - 1, CacheSource::Ram));
            assert_eq!(stats.cache.reason, None);
        }
        assert_eq!(engine.stats().cached_tokens, 4 * u64::from(length - 1));
    }
}

#[test]
fn every_cut_resumes_with_the_reply_of_a_fresh_prompt() {
    let base = text(2, 120);
    for cut in 1..110 {
        let engine = engine(1, None, 1 << 30);
        let mut prompt = base[..cut as usize].to_vec();
        prompt.extend(text(cut, 30));
        answer(&engine, Request { snapshot_at: vec![cut], ..Request::greedy(&prompt, 5) });
        // The place where two prompts part is kept even when nobody names it.
        prompt.truncate(cut as usize);
        prompt.extend(text(cut + 1, 20));
        let stats = answer(&engine, Request::greedy(&prompt, 5)).1.stats;
        assert!(cut < 16 || stats.cached_tokens >= cut, "cut at {cut}: {stats:?}");
        assert!(stats.cached_tokens <= stats.cache.matched, "cut at {cut}: {stats:?}");
    }
}

#[test]
fn a_journal_that_grows_by_forty_tokens_computes_about_forty() {
    let engine = engine(1, None, 1 << 30);
    let mut journal = text(5, 150);
    for call in 0..12 {
        // Two tokens of header follow the text, and are others the next time.
        let end = journal.len() as u32;
        let mut prompt = journal.clone();
        prompt.extend([call % 7, call % 5]);
        let stats = answer(&engine, Request { snapshot_at: vec![end], ..Request::greedy(&prompt, 9) }).1.stats;
        assert!(call == 0 || end + 2 - stats.cached_tokens <= 42, "call {call}: {stats:?}");
        journal.extend(text(call + 9, 40));
    }
}

#[test]
fn the_next_turn_resumes_after_the_last_reply() {
    let engine = engine(1, None, 1 << 30);
    let mut prompt = text(6, 90);
    let mut known = 0;
    for turn in 0..6 {
        let (tokens, finished) = answer(&engine, Request { end_ids: vec![0], ..Request::greedy(&prompt, 30) });
        assert_eq!(finished.stats.cached_tokens, known, "turn {turn}");
        prompt.extend(&tokens);
        known = prompt.len() as u32 - 1;
        prompt.extend(text(turn + 3, 25));
    }
}

#[test]
fn a_cancelled_prompt_leaves_its_rows() {
    let engine = engine(1, None, 1 << 30);
    let request = Request::greedy(&text(8, 700), 90);
    let mut reply = engine.submit(request.clone()).expect("it fits");
    let mut batch = Batch::default();
    while batch.tokens.is_empty() {
        reply.receive_blocking(&mut batch);
    }
    drop(reply);
    assert_eq!(answer(&engine, request).1.stats.cached_tokens, 699);
}

#[test]
fn prompts_at_once_compute_their_common_prefix_once() {
    let (engine, handle) = waiting_engine(4, None, 1 << 30);
    let requests: Vec<Request> = (0..4)
        .map(|tail| {
            let mut prompt = text(9, 400);
            prompt.extend(text(30 + tail, 10));
            Request::greedy(&prompt, 10)
        })
        .chain([Request::greedy(&text(9, 300), 5)])
        .collect();
    let replies = handle.submit_all(requests.clone()).expect("these requests fit");
    std::thread::spawn(move || engine.run());
    let replies = read(replies);
    for (index, ((tokens, finished), request)) in replies.iter().zip(&requests).enumerate() {
        assert_eq!(*tokens, plain_reply(SEED, LIMITS.vocab_size, request).0.tokens);
        assert!(index == 0 || index == 4 || finished.stats.cached_tokens >= 400, "{index}: {:?}", finished.stats);
    }
    // Choices of one prompt.
    let (engine, handle) = waiting_engine(4, None, 1 << 30);
    let replies = handle.submit_all(vec![Request::greedy(&text(11, 200), 10); 4]).expect("these requests fit");
    std::thread::spawn(move || engine.run());
    let replies = read(replies);
    let cached: Vec<u32> = replies.iter().map(|(_, finished)| finished.stats.cached_tokens).collect();
    assert_eq!(cached, [0, 199, 199, 199]);
}

#[test]
fn a_small_side_request_does_not_evict_the_conversation_beside_it() {
    // Room for about one conversation: 150 pages of 4 positions, tokens and states.
    let engine = engine(2, None, 15_000);
    let mut prompt = text(12, 500);
    for turn in 0..6 {
        let (tokens, finished) = answer(&engine, Request::greedy(&prompt, 10));
        assert!(turn == 0 || finished.stats.cached_tokens + 36 >= prompt.len() as u32, "turn {turn}: {finished:?}");
        prompt.extend(&tokens);
        for side in 0..5 {
            answer(&engine, Request::greedy(&text(50 + 5 * turn + side, 60), 5));
        }
        prompt.extend(text(turn + 13, 25));
    }
    assert!(engine.stats().prefix_evictions > 0, "the budget was never reached");
}

#[test]
fn why_nothing_was_resumed_is_said() {
    let off = engine(1, None, 0);
    let request = Request::greedy(&text(1, 50), 3);
    answer(&off, request.clone());
    let stats = answer(&off, request.clone()).1.stats;
    assert_eq!((stats.cached_tokens, stats.cache.reason), (0, Some(CacheReason::Off)));

    let on = engine(1, None, 1 << 30);
    answer(&on, request.clone());
    let scored = Request { logprobs: Some(1), score_prompt: true, ..request };
    assert_eq!(answer(&on, scored).1.stats.cache.reason, Some(CacheReason::ScoredPrompt));
    let mut other = text(1, 40);
    other.extend([1; 10]);
    let stats = answer(&on, Request::greedy(&other, 3)).1.stats;
    assert_eq!((stats.cached_tokens, stats.cache.reason), (0, Some(CacheReason::NoSnapshot)));
    assert!(stats.cache.matched >= 40);
}

#[test]
fn too_few_pages_make_requests_wait_and_never_stop() {
    // Pages for two of the longest requests, eight requests at four slots, kept prefixes beside them.
    let pages = 2 * 800_u32.div_ceil(4) + 2;
    let engine = engine(4, Some(pages), 1 << 30);
    for _ in 0..3 {
        let requests: Vec<Request> = (0..8)
            .map(|index| {
                let mut prompt = text(20, 100 + 40 * index);
                prompt.extend(text(index, 10));
                Request::greedy(&prompt, 300)
            })
            .collect();
        for ((tokens, finished), request) in answers(&engine, requests.clone()).into_iter().zip(requests) {
            let expected = plain_reply(SEED, LIMITS.vocab_size, &request).0.tokens;
            match finished.reason {
                FinishReason::OutOfMemory => assert!(expected.starts_with(&tokens)),
                _ => assert_eq!(tokens, expected),
            }
        }
    }
    assert!(engine.stats().prefix_evictions + engine.stats().page_waits > 0, "there were pages enough");
}
