//! What users of other servers reported about kept prefixes, each as the test that would have shown it.

mod common;

use common::{LIMITS, SEED, answer, answers, engine, engine_with_disk, read, text, waiting_engine};
use tf_engine::disk::{Disk, DiskIdentity, DiskLimits, DiskStats};
use tf_engine::testing::Random;
use tf_engine::testing::disk::SimulatedDisk;
use tf_engine::testing::simulate::plain_reply;
use tf_engine::{CacheSource, EngineHandle, Finished, Request};

const PLENTY: u64 = 1 << 30;

fn expect_plain(request: &Request, tokens: &[u32]) {
    assert_eq!(tokens, plain_reply(SEED, LIMITS.vocab_size, request).0.tokens, "{request:?}");
}

#[test]
fn the_second_identical_prompt_is_not_empty_and_another_last_sentence_is_answered_too() {
    let engine = engine(1, None, PLENTY);
    let mut prompt = text(1, 1000);
    let last_sentence = 960;
    let ask = |prompt: &[u32]| Request { snapshot_at: vec![last_sentence], ..Request::greedy(prompt, 24) };
    for call in 0..5 {
        let (tokens, finished) = answer(&engine, ask(&prompt));
        assert_eq!(tokens.len(), 24);
        assert!(call == 0 || finished.stats.cached_tokens == 999, "call {call}: {:?}", finished.stats);
    }
    prompt.truncate(last_sentence as usize);
    prompt.extend(text(77, 40));
    assert_eq!(answer(&engine, ask(&prompt)).1.stats.cached_tokens, last_sentence);
}

#[test]
fn thirty_tails_of_one_system_prompt_six_at_once_are_what_they_are_alone() {
    let system = text(2, 2000);
    let asked = |tail: u32| {
        let mut prompt = system.clone();
        prompt.extend(text(100 + tail, 10 + tail));
        Request { snapshot_at: vec![2000], ..Request::greedy(&prompt, 20) }
    };
    let engine = engine(4, None, PLENTY);
    let mut shared = 0;
    for group in 0..5 {
        let requests: Vec<Request> = (0..6).map(|tail| asked(6 * group + tail)).collect();
        for ((tokens, finished), request) in answers(&engine, requests.clone()).iter().zip(&requests) {
            expect_plain(request, tokens);
            shared += u32::from(finished.stats.cached_tokens >= 2000);
        }
    }
    assert!(shared >= 24, "{shared} of 30 resumed after the system prompt");
}

#[test]
fn a_follow_up_knows_the_context_whatever_the_offset_of_the_hit() {
    let engine = engine(1, None, PLENTY);
    for length in (40..80).chain(120..136) {
        let mut prompt = text(length, length);
        for turn in 0..3 {
            let (tokens, finished) = answer(&engine, Request::greedy(&prompt, 7));
            assert!(turn == 0 || finished.stats.cached_tokens + 8 >= prompt.len() as u32, "{:?}", finished.stats);
            prompt.extend(tokens);
            prompt.extend(text(turn + 200, 5));
        }
    }
}

#[test]
fn eight_long_prompts_at_once_get_nobody_elses_answer() {
    let filler = text(3, 700);
    let requests: Vec<Request> = (0..8)
        .map(|index| {
            let mut prompt = filler.clone();
            let depth = 50 + 80 * index as usize;
            prompt.splice(depth..depth, text(500 + index, 6));
            Request::greedy(&prompt, 16)
        })
        .collect();
    let engine = engine(4, None, PLENTY);
    for _ in 0..5 {
        for ((tokens, _), request) in answers(&engine, requests.clone()).iter().zip(&requests) {
            expect_plain(request, tokens);
        }
    }
}

#[test]
fn a_turn_that_ended_by_itself_is_resumed_with_and_without_its_reasoning() {
    let engine = engine(1, None, PLENTY);
    let prompt = text(4, 300);
    let (tokens, finished) = answer(&engine, Request { end_ids: vec![0, 1], ..Request::greedy(&prompt, 200) });
    assert!(tokens.len() > 2 && tokens.len() < 200, "the reply was meant to end by itself: {finished:?}");
    let mut with = [&prompt[..], &tokens].concat();
    // The end token was drawn and never computed.
    let known = with.len() as u32 - 1;
    with.extend(text(5, 30));
    assert_eq!(answer(&engine, Request::greedy(&with, 9)).1.stats.cached_tokens, known);
    let mut without = [&prompt[..], &tokens[tokens.len() - 2..]].concat();
    without.extend(text(6, 30));
    let cached = answer(&engine, Request::greedy(&without, 9)).1.stats.cached_tokens;
    assert!(cached + 1 >= prompt.len() as u32, "{cached} of {}", prompt.len());
}

#[test]
fn short_prompts_hit_as_well_as_long_ones() {
    for length in [300, 1000, 3000] {
        let engine = engine(1, None, PLENTY);
        let request = Request::greedy(&text(7, length), 5);
        answer(&engine, request.clone());
        let cached = answer(&engine, request).1.stats.cached_tokens;
        assert!(cached * 5 > length * 4, "{cached} of {length}");
    }
}

#[test]
fn a_second_prompt_shares_the_rows_of_one_that_still_runs() {
    let (engine, handle) = waiting_engine(2, None, PLENTY);
    let long = text(8, 1500);
    let mut other = long[..1400].to_vec();
    other.extend(text(9, 50));
    let replies = handle.submit_all(vec![Request::greedy(&long, 100), Request::greedy(&other, 5)]).expect("they fit");
    std::thread::spawn(move || engine.run());
    let cached = read(replies)[1].1.stats.cached_tokens;
    assert_eq!(cached, 1400);
}

#[test]
fn a_title_request_beside_a_long_conversation_does_not_evict_it() {
    // Memory for little more than the conversation, and eight times as many side requests.
    let engine = engine(2, None, 40_000);
    let mut prompt = text(10, 1200);
    for turn in 0..4 {
        let mut asked = vec![Request::greedy(&prompt, 8)];
        asked.push(Request::greedy(&prompt[prompt.len() - 60..], 8));
        let replies = answers(&engine, asked);
        let stats = replies[0].1.stats;
        assert!(turn == 0 || stats.cached_tokens + 40 >= prompt.len() as u32, "turn {turn}: {stats:?}");
        prompt.extend(&replies[0].0);
        for side in 0..8 {
            answer(&engine, Request::greedy(&text(300 + 8 * turn + side, 50), 5));
        }
        prompt.extend(text(turn + 20, 25));
    }
}

fn open(disk: &SimulatedDisk, bytes: u64) -> Disk<SimulatedDisk> {
    open_with(disk, DiskLimits { bytes, min_free_bytes: 0, index_bytes: 1 << 30 })
}

fn open_with(disk: &SimulatedDisk, limits: DiskLimits) -> Disk<SimulatedDisk> {
    Disk::new(disk.clone(), limits, DiskIdentity::of(&["reported"]), std::sync::Arc::new(|_| {}))
        .expect("it can be listed")
}

fn new_disk(capacity: u64) -> SimulatedDisk {
    SimulatedDisk::new(capacity, 0, Random::new(1))
}

#[test]
fn what_was_written_at_shutdown_is_found_after_the_restart_and_stays_after_each_load() {
    let disk = new_disk(1 << 40);
    let mut talks = [text(11, 400), text(12, 500)];
    let (handle, thread) = engine_with_disk(PLENTY, open(&disk, PLENTY));
    for talk in &mut talks {
        for turn in 0..3 {
            talk.extend(answer(&handle, Request::greedy(talk, 9)).0);
            talk.extend(text(turn + 40, 12));
        }
    }
    handle.drain();
    thread.join().expect("the engine ends");

    // So little memory that nothing stays in it: each resend reads its file again.
    let (handle, thread) = engine_with_disk(100, open(&disk, PLENTY));
    let files = handle.stats().disk.files;
    assert!(files >= 6);
    for which in [1, 1, 0] {
        let mut prompt = talks[which].clone();
        prompt.extend(text(60, 7));
        let (_, Finished { stats, .. }) = answer(&handle, Request::greedy(&prompt, 9));
        assert_eq!(stats.cache.source, CacheSource::Disk, "{stats:?}");
        assert!(stats.cached_tokens + 22 >= prompt.len() as u32, "{stats:?}");
        assert!(handle.stats().disk.files >= files, "a file went when it was read");
    }
    handle.drain();
    thread.join().expect("the engine ends");
}

#[test]
fn a_full_disk_costs_nothing_but_its_prefixes() {
    let disk = new_disk(9000);
    let (handle, thread) = engine_with_disk(PLENTY, open(&disk, PLENTY));
    for index in 0..10 {
        answer(&handle, Request::greedy(&text(70 + index, 300), 5));
    }
    handle.drain();
    thread.join().expect("the engine ends");
    let stats = handle.stats().disk;
    assert!(stats.write_failures > 0, "{stats:?}");
    assert!(disk.own_bytes() <= 9000);
    assert!(stats.evictions > 0, "what is older makes room for what is newer: {stats:?}");
}

#[test]
fn a_server_that_keeps_prefixes_for_days_takes_no_more_memory_for_their_list() {
    let disk = new_disk(1 << 40);
    let limits = DiskLimits { bytes: PLENTY, min_free_bytes: 0, index_bytes: 6000 };
    let (handle, thread) = engine_with_disk(PLENTY, open_with(&disk, limits));
    for index in 0..30 {
        answer(&handle, Request::greedy(&text(700 + index, 300), 5));
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert!(handle.stats().disk.index_bytes <= 6000);
    }
    handle.drain();
    thread.join().expect("the engine ends");
    let stats = handle.stats().disk;
    assert!(stats.evictions > 0 && stats.files > 0 && stats.index_bytes <= 6000, "{stats:?}");
    // A server with less memory opens the same folder.
    let limits = DiskLimits { index_bytes: 3000, ..limits };
    let (handle, thread) = engine_with_disk(PLENTY, open_with(&disk, limits));
    answer(&handle, Request::greedy(&text(800, 20), 5));
    let stats = handle.stats().disk;
    assert!(stats.files > 0 && stats.index_bytes <= 3000, "{stats:?}");
    handle.drain();
    thread.join().expect("the engine ends");
}

/// Sends prompts until the disk's figures are as wanted: the workers have threads of their own.
fn until(
    handle: &EngineHandle,
    texts: &mut std::ops::RangeFrom<u32>,
    what: &str,
    holds: impl Fn(&DiskStats) -> bool,
) -> DiskStats {
    for index in texts.take(500) {
        let stats = handle.stats().disk;
        if holds(&stats) {
            return stats;
        }
        answer(handle, Request::greedy(&text(index, 300), 5));
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("waited in vain for {what}: {:?}", handle.stats().disk);
}

#[test]
fn a_disk_that_others_fill_loses_no_file_and_is_written_again_when_they_leave() {
    let disk = new_disk(1 << 40);
    let limits = DiskLimits { bytes: PLENTY, min_free_bytes: 1 << 30, index_bytes: 1 << 30 };
    let (handle, thread) = engine_with_disk(PLENTY, open_with(&disk, limits));
    let mut texts = 500..;
    let before = until(&handle, &mut texts, "some files", |stats| stats.writes >= 4);
    let own = disk.own_bytes();
    disk.set_capacity(1 << 20);
    let full = until(&handle, &mut texts, "a full disk", |stats| stats.write_failures > 0);
    assert!(full.evictions == 0 && disk.own_bytes() >= own, "{before:?} {full:?}");
    disk.set_capacity(1 << 40);
    until(&handle, &mut texts, "another file", |stats| stats.writes > full.writes);
    handle.drain();
    thread.join().expect("the engine ends");
}

#[test]
fn a_disk_that_was_full_to_the_last_byte_is_written_again_when_there_is_room() {
    let disk = new_disk(9000);
    let (handle, thread) = engine_with_disk(PLENTY, open(&disk, PLENTY));
    let mut texts = 600..;
    until(&handle, &mut texts, "a file", |stats| stats.writes > 0);
    disk.set_capacity(5);
    let full = until(&handle, &mut texts, "a full disk", |stats| stats.write_failures > 0);
    disk.set_capacity(1 << 40);
    until(&handle, &mut texts, "another file", |stats| stats.writes > full.writes);
    handle.drain();
    thread.join().expect("the engine ends");
}

#[test]
fn the_disks_budget_keeps_what_is_worth_most() {
    let disk = new_disk(1 << 40);
    let budget = 60_000;
    let (handle, thread) = engine_with_disk(PLENTY, open(&disk, budget));
    let long = text(80, 1500);
    answer(&handle, Request::greedy(&long, 5));
    for side in 0..60 {
        answer(&handle, Request::greedy(&text(400 + side, 60), 5));
        assert!(handle.stats().disk.bytes <= budget);
    }
    handle.drain();
    thread.join().expect("the engine ends");
    assert!(handle.stats().disk.evictions > 0, "the budget was never reached: {:?}", handle.stats().disk);
    let (handle, _) = engine_with_disk(PLENTY, open(&disk, budget));
    let stats = answer(&handle, Request::greedy(&long, 5)).1.stats;
    assert_eq!(
        (stats.cache.source, stats.cached_tokens),
        (CacheSource::Disk, 1499),
        "{stats:?} {:?}",
        handle.stats().disk
    );
}
