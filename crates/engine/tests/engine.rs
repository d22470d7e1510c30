//! What a request sees of the engine besides its tokens: queue, order, endings, limits, drafting that pays.

use std::sync::Arc;
use std::time::Duration;

use tf_engine::commit;
use tf_engine::model::{Model, ModelLimits};
use tf_engine::prefix_cache::PrefixCache;
use tf_engine::prefixes;
use tf_engine::round::{Scratch, run_round};
use tf_engine::state::State;
use tf_engine::testing::{Drafter, HistoryModel, HistoryOptions, HistorySnapshot};
use tf_engine::{Batch, Clock, DraftPolicy, Engine, EngineHandle, EngineLimits, FinishReason, Reply, ReplyStats};
use tf_engine::{Lifecycle, Priority, Request, StopReason, SubmitError, VirtualClock};

const MODEL_LIMITS: ModelLimits =
    ModelLimits { vocab_size: 32, context: 256, slots: 2, round_rows: 16, draft_block: 5 };

fn engine(options: HistoryOptions, change: impl FnOnce(&mut EngineLimits)) -> (Engine<HistoryModel>, EngineHandle) {
    let clock = options.clock.as_ref().map_or_else(VirtualClock::new, |(clock, ..)| clock.clone());
    let mut limits = EngineLimits::for_model(&options.limits);
    change(&mut limits);
    Engine::new(HistoryModel::new(options), limits, Arc::new(clock)).expect("these limits fit")
}

fn options() -> HistoryOptions {
    HistoryOptions { limits: MODEL_LIMITS, ..HistoryOptions::default() }
}

/// All of a reply: its tokens, why it ended, what it took.
fn whole(reply: &mut Reply) -> (Vec<u32>, FinishReason, ReplyStats) {
    let mut batch = Batch::default();
    let mut tokens = Vec::new();
    loop {
        reply.receive_blocking(&mut batch);
        tokens.extend(batch.tokens.iter().map(|row| row.token));
        if let Some(finished) = batch.finished.take() {
            return (tokens, finished.reason, finished.stats);
        }
    }
}

#[test]
fn requests_that_can_never_be_served_are_refused_at_once() {
    let (_engine, handle) = engine(options(), |_| {});
    let mut biased = Request::greedy(&[1], 1);
    biased.sampling.logit_bias = vec![(32, 1.0)];
    let cases = [
        (Request::greedy(&[], 1), SubmitError::EmptyPrompt),
        (Request::greedy(&[1; 200], 57), SubmitError::TooLong { prompt: 200, max_tokens: 57, context: 256 }),
        (Request::greedy(&[1, 32], 1), SubmitError::UnknownToken { token: 32, vocab_size: 32 }),
        (biased, SubmitError::UnknownToken { token: 32, vocab_size: 32 }),
    ];
    for (request, expected) in cases {
        assert_eq!(handle.submit(request).err(), Some(expected));
    }
    // A request may fill the context exactly, drafting or not.
    assert!(handle.submit(Request::greedy(&[1; 200], 56)).is_ok());
}

#[test]
fn a_full_queue_refuses_and_an_ended_request_makes_room() {
    let (_engine, handle) = engine(options(), |limits| limits.queue = 1);
    let refused = |result: Result<Vec<Reply>, SubmitError>| matches!(result, Err(SubmitError::QueueFull { .. }));
    let request = Request::greedy(&[1], 5);
    let mut replies = handle.submit_all(vec![request.clone(); 2]).expect("two slots");
    let waiting = handle.submit(request.clone()).expect("one place in the queue");
    assert!(refused(handle.submit_all(vec![request.clone()])), "the queue is full");
    drop(waiting);
    // Requests that belong together come in through one place, and stand in for all that they are.
    let many = handle.submit_all(vec![request.clone(); 9]).expect("a dropped reply gives its place back");
    replies.clear();
    assert!(refused(handle.submit_all(vec![request.clone()])), "nine requests are in three places");
    drop(many);
    assert!(handle.submit(request).is_ok());
}

#[test]
fn limits_that_a_model_cannot_serve_are_all_named() {
    let model = HistoryModel::new(options());
    let limits = EngineLimits { slots: 3, context: 1000, prompt_chunk: 0, ..EngineLimits::for_model(&MODEL_LIMITS) };
    let error = Engine::new(model, limits, Arc::new(VirtualClock::new())).err().expect("three mistakes");
    assert_eq!(error.mistakes.len(), 3, "{error}");
}

#[test]
fn a_drain_finishes_what_is_there_and_takes_nothing_new() {
    let (engine, handle) = engine(options(), |_| {});
    let mut replies = handle.submit_all(vec![Request::greedy(&[3, 4], 20); 5]).expect("five requests fit");
    handle.drain();
    assert_eq!(handle.submit(Request::greedy(&[1], 1)).err(), Some(SubmitError::Draining));
    engine.run();
    for reply in &mut replies {
        assert_eq!(whole(reply).1, FinishReason::Length);
    }
    assert!(matches!(handle.lifecycle(), Lifecycle::Stopped(_)));
    assert!(matches!(handle.submit(Request::greedy(&[1], 1)), Err(SubmitError::Stopped(_))));
}

#[test]
fn a_stop_ends_everything_at_once() {
    let (engine, handle) = engine(options(), |_| {});
    let mut replies = handle.submit_all(vec![Request::greedy(&[3, 4], 20); 5]).expect("five requests fit");
    handle.stop();
    engine.run();
    for reply in &mut replies {
        assert_eq!(whole(reply).1, FinishReason::Stopped);
    }
}

#[test]
fn a_failed_forward_ends_the_sequences_of_its_plan_and_no_other() {
    // Two slots; the first forward fails. The third request had no slot, so it isn't in the plan.
    let (engine, handle) = engine(HistoryOptions { failures: vec![0], ..options() }, |_| {});
    let mut replies = handle.submit_all(vec![Request::greedy(&[3, 4], 20); 3]).expect("three requests fit");
    handle.drain();
    engine.run();
    let reasons: Vec<_> = replies.iter_mut().map(|reply| whole(reply).1).collect();
    let failed = FinishReason::Failed("as planned".to_string());
    assert_eq!(reasons, [failed.clone(), failed, FinishReason::Length]);
}

#[test]
fn a_lost_device_ends_every_request() {
    let (engine, handle) = engine(HistoryOptions { lost_at: Some(3), ..options() }, |_| {});
    let mut replies = handle.submit_all(vec![Request::greedy(&[3, 4], 200); 4]).expect("four requests fit");
    engine.run();
    for reply in &mut replies {
        assert_eq!(whole(reply).1, FinishReason::DeviceLost("as planned".to_string()));
    }
    let Err(SubmitError::Stopped(reason)) = handle.submit(Request::greedy(&[1], 1)) else { panic!("taken") };
    assert_eq!(reason, StopReason::DeviceLost("as planned".to_string()));
}

#[test]
fn no_tokens_wanted_computes_the_prompt_only() {
    let (engine, handle) = engine(options(), |_| {});
    let mut reply = handle.submit(Request::greedy(&[3; 40], 0)).expect("it fits");
    let mut scored = Request::greedy(&[3, 5, 7, 9], 0);
    scored.logprobs = Some(1);
    scored.score_prompt = true;
    let mut scored = handle.submit(scored).expect("it fits");
    handle.drain();
    engine.run();
    let (tokens, reason, stats) = whole(&mut reply);
    assert_eq!((tokens.len(), reason, stats.prompt_tokens), (0, FinishReason::Length, 40));
    let mut batch = Batch::default();
    scored.receive_blocking(&mut batch);
    assert_eq!(batch.prompt.iter().map(|row| row.token).collect::<Vec<_>>(), [5, 7, 9]);
    assert!(batch.prompt.iter().all(|row| batch.top_of(row).len() == 1));
}

/// Steps an engine's parts by hand, with a look at the state between rounds.
struct Bench {
    state: State,
    model: HistoryModel,
    scratch: Scratch,
    cache: PrefixCache<HistorySnapshot>,
    clock: VirtualClock,
}

impl Bench {
    fn new(options: HistoryOptions, change: impl FnOnce(&mut EngineLimits)) -> Self {
        let clock = options.clock.as_ref().map_or_else(VirtualClock::new, |(clock, ..)| clock.clone());
        let mut limits = EngineLimits::for_model(&options.limits);
        change(&mut limits);
        let model = HistoryModel::new(options);
        let mut state = State::new(limits, &model.limits());
        state.keeping = prefixes::rules_for(&model, &limits);
        let cache = prefixes::cache_for(&model, &limits);
        Bench { state, model, scratch: Scratch::default(), cache, clock }
    }

    fn submit(&mut self, request: Request) {
        let id = tf_engine::RequestId(self.state.stats.requests);
        let waiting = tf_engine::testing::waiting(id, request, &self.clock);
        commit::enqueue(&mut self.state, waiting);
    }

    fn round(&mut self) {
        run_round(&mut self.state, &mut self.model, &self.clock, &mut self.scratch, &mut self.cache)
            .expect("no loss is planned");
    }
}

#[test]
fn a_short_prompt_overtakes_a_long_one_and_the_long_one_is_not_starved() {
    let limits = ModelLimits { slots: 2, round_rows: 4, ..MODEL_LIMITS };
    let mut bench = Bench::new(HistoryOptions { limits, ..options() }, |limits| limits.draft.max = 0);
    bench.submit(Request::greedy(&[1; 200], 1));
    let mut longest_wait = 0;
    let mut wait = 0;
    let mut long_left = 200;
    for round in 0.. {
        assert!(round < 2000, "the long prompt is starved");
        // A new short prompt whenever the last one has ended: the long one always has the most rows left.
        if bench.state.sequences.len() < 2 && bench.state.queue.is_empty() {
            // Its rows fill whole rounds, so that none is left over for the long one.
            bench.submit(Request::greedy(&[2; 32], 1));
        }
        bench.round();
        let Some(long) = bench.state.sequences.iter().find(|sequence| sequence.id.0 == 0) else { break };
        wait = if long.prompt_rows_left() == long_left { wait + 1 } else { 0 };
        long_left = long.prompt_rows_left();
        longest_wait = longest_wait.max(wait);
    }
    assert!(longest_wait >= 7, "the short prompts never went first");
    assert!(longest_wait <= 8, "passed over {longest_wait} times in a row");
    assert!(bench.state.stats.completed > 5, "the short prompts waited for the long one");
}

#[test]
fn drafts_are_used_where_they_pay_and_left_out_where_they_do_not() {
    let micro = Duration::from_micros;
    // A round, a row, a call of the drafter; the drafter; and how many drafts a window should hold on average.
    let cases = [
        ("rows are nearly free", micro(1000), micro(1), micro(10), Drafter::Right, 4.0, 5.0),
        ("every row costs a round", micro(1), micro(1000), micro(10), Drafter::Right, 0.0, 0.4),
        ("no draft ever lands", micro(1000), micro(100), micro(100), Drafter::Wrong, 0.0, 0.4),
        ("the drafter takes five rounds", micro(1000), micro(1), micro(6000), Drafter::Right, 0.0, 0.4),
    ];
    for (name, round, row, call, drafter, least, most) in cases {
        let clock = VirtualClock::new();
        let options = HistoryOptions { drafter, clock: Some((clock, round, row, call)), ..options() };
        let mut bench = Bench::new(options, |limits| {
            limits.draft = DraftPolicy { max: 5, copy: false, ..DraftPolicy::default() };
        });
        bench.submit(Request::greedy(&[1, 2, 3], 250));
        let mut windows = 0;
        while bench.state.stats.completed == 0 {
            bench.round();
            windows += 1;
        }
        let mean = bench.state.stats.drafted as f64 / f64::from(windows);
        assert!((least..=most).contains(&mean), "{name}: {mean} drafts a window");
    }
}

#[test]
fn a_broken_state_is_noticed() {
    let running = || {
        let mut bench = Bench::new(options(), |_| {});
        bench.submit(Request::greedy(&[1, 2, 3], 100));
        bench.round();
        bench.round();
        bench.state.check();
        bench.state
    };
    type Break = fn(&mut State);
    let breaks: [(&str, Break); 6] = [
        ("a token too many", |state| state.sequences[0].reply.push(1)),
        ("a position too few", |state| state.sequences[0].computed -= 1),
        ("a lost slot", |state| assert!(state.slots.take(tf_engine::RequestId(77)).is_some())),
        ("a lost request", |state| drop(state.sequences.pop())),
        ("a request counted twice", |state| state.stats.completed += 1),
        ("more drafts than room", |state| state.sequences[0].drafts = vec![1; 100]),
    ];
    for (name, break_it) in breaks {
        let mut state = running();
        break_it(&mut state);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| state.check()));
        assert!(result.is_err(), "{name} went unnoticed");
    }
}

fn background(request: Request) -> Request {
    Request { priority: Priority::Background, ..request }
}

#[test]
fn the_background_waits_yields_its_slot_and_resumes_where_it_stopped() {
    let limits = ModelLimits { slots: 1, ..MODEL_LIMITS };
    let options = || HistoryOptions { limits, ..options() };
    let mut bench = Bench::new(options(), |limits| limits.prefix_cache_bytes = 1 << 20);
    let slow = background(Request::greedy(&[1; 60], 40));
    bench.submit(slow.clone());
    for _ in 0..12 {
        bench.round();
    }
    let before = bench.state.sequences[0].reply.clone();
    assert!(before.len() > 2, "the reply has begun: {before:?}");
    // Behind it another in the background, then two in the foreground: these go first, in their own order.
    bench.submit(background(Request::greedy(&[2; 10], 3)));
    bench.submit(Request::greedy(&[3; 10], 3));
    bench.submit(Request::greedy(&[4; 10], 3));
    let mut order = Vec::new();
    let mut reply = Vec::new();
    while !bench.state.is_idle() {
        bench.round();
        if let Some(sequence) = bench.state.sequences.first() {
            order.push(sequence.id.0);
            if sequence.id.0 == 0 {
                assert!(sequence.reply.starts_with(&before), "the reply began anew");
                reply.clone_from(&sequence.reply);
            }
        }
    }
    order.dedup();
    assert_eq!(order, [2, 3, 0, 1]);
    assert_eq!((bench.state.stats.pauses, bench.state.stats.completed), (1, 4));
    assert_eq!(bench.state.stats.prompt_rows, 60 + 10 + 10 + 10, "rows of a paused reply were computed again");
    let expected = tf_engine::testing::simulate::plain_reply(1, MODEL_LIMITS.vocab_size, &slow).0.tokens;
    assert!(expected.starts_with(&reply) && reply.len() + 7 > expected.len(), "{reply:?}, alone it is {expected:?}");
}

#[test]
fn a_scored_prompt_is_sent_once_and_never_given_up_halfway() {
    let limits = ModelLimits { slots: 1, round_rows: 8, ..MODEL_LIMITS };
    let mut bench = Bench::new(HistoryOptions { limits, ..options() }, |_| {});
    let scored = Request { logprobs: Some(0), score_prompt: true, ..Request::greedy(&[1; 40], 30) };
    bench.submit(background(scored));
    bench.round();
    bench.submit(Request::greedy(&[3; 10], 3));
    bench.round();
    assert_eq!(bench.state.stats.pauses, 0, "half of the prompt was scored");
    while bench.state.stats.completed == 0 {
        bench.round();
    }
    assert_eq!(bench.state.stats.pauses, 1, "its reply may wait");
}

#[test]
fn of_many_prompts_that_wait_none_is_left_out() {
    // A round has rows for one prompt, and more than nine are due at a time.
    let limits = ModelLimits { slots: 24, round_rows: 26, context: 2000, ..MODEL_LIMITS };
    let mut bench = Bench::new(HistoryOptions { limits, ..options() }, |limits| {
        limits.draft.max = 0;
        limits.prompt_chunk = 26;
    });
    for prompt in 0..24 {
        bench.submit(Request::greedy(&[prompt; 1500], 1));
    }
    for _ in 0..200 {
        bench.round();
    }
    let left: Vec<u32> = bench.state.sequences.iter().map(|sequence| sequence.prompt_rows_left()).collect();
    assert!(left.len() == 24 && left.iter().all(|rows| *rows < 1400), "{left:?}");
}

#[test]
fn prompts_in_the_foreground_go_first_and_the_background_is_not_starved() {
    let limits = ModelLimits { slots: 3, round_rows: 4, context: 2000, ..MODEL_LIMITS };
    let mut bench = Bench::new(HistoryOptions { limits, ..options() }, |limits| limits.draft.max = 0);
    bench.submit(background(Request::greedy(&[1; 30], 1)));
    bench.submit(Request::greedy(&[2; 1500], 1));
    let (mut wait, mut longest_wait, mut rows) = (0, 0, 30);
    for round in 0.. {
        bench.round();
        let Some(short) = bench.state.sequences.iter().find(|sequence| sequence.id.0 == 0) else { break };
        assert!(round < 500, "the background is starved");
        wait = if short.prompt_rows_left() == rows { wait + 1 } else { 0 };
        rows = short.prompt_rows_left();
        longest_wait = longest_wait.max(wait);
    }
    assert_eq!(longest_wait, 8, "it has the fewest rows left, and is passed over eight times at most");
}

#[test]
fn replies_in_the_background_hold_up_no_prompt_of_the_foreground() {
    let micro = Duration::from_micros;
    let limits = ModelLimits { slots: 2, round_rows: 200, context: 1000, ..MODEL_LIMITS };
    // A row takes a millisecond, the gap is ten: fewer than ten prompt rows fit beside a running reply.
    for (is_background, expected) in [(false, 9..=10), (true, 199..=199)] {
        let clock = VirtualClock::new();
        let costs = Some((clock, micro(0), micro(1000), micro(0)));
        let mut bench = Bench::new(HistoryOptions { limits, clock: costs, ..options() }, |limits| {
            limits.draft.max = 0;
            limits.decode_gap = Some(Duration::from_millis(10));
        });
        let running = Request::greedy(&[1; 20], 900);
        bench.submit(if is_background { background(running) } else { running });
        for _ in 0..5 {
            bench.round();
        }
        bench.submit(Request::greedy(&[2; 800], 1));
        bench.round();
        let (prompt_rows, reply_rows) = bench.scratch.last_plan().row_counts();
        assert!(reply_rows == 1 && expected.contains(&prompt_rows), "{prompt_rows} rows, background {is_background}");
    }
}

#[test]
fn the_longest_prompt_of_the_window_holds_up_a_running_reply_no_longer_than_the_gap() {
    let micro = Duration::from_micros;
    let limits = ModelLimits { slots: 2, round_rows: 512, context: 20_000, ..MODEL_LIMITS };
    for (gap_ms, drafts) in [(50, 0), (50, 5), (200, 5)] {
        let clock = VirtualClock::new();
        // A round of two milliseconds, rows of a fifth of one, a call of the drafter of three.
        let costs = Some((clock.clone(), micro(2000), micro(200), micro(3000)));
        let options = HistoryOptions { limits, clock: costs, drafter: Drafter::Mixed, ..options() };
        let mut bench = Bench::new(options, |limits| {
            limits.draft.max = drafts;
            limits.decode_gap = Some(Duration::from_millis(gap_ms));
        });
        bench.submit(Request::greedy(&[1; 20], 10_000));
        for _ in 0..5 {
            bench.round();
        }
        bench.submit(Request::greedy(&vec![2; 19_999], 1));
        let mut longest = Duration::ZERO;
        let mut filling_rounds = 0;
        while bench.state.stats.completed == 0 {
            let before = bench.clock.now();
            bench.round();
            longest = longest.max(bench.clock.now().since(before));
            filling_rounds += 1;
        }
        let allowed = Duration::from_millis(gap_ms);
        assert!(longest <= allowed, "{longest:?} of {allowed:?}, {drafts} drafts");
        assert!(longest * 2 > allowed, "{longest:?}: the prompt gets less than it may");
        assert!(filling_rounds < 20_000 / 100, "{filling_rounds} rounds");
    }
}

#[test]
fn under_pressure_caches_go_first_then_the_newest_waits_then_it_ends() {
    // Two replies that grow to 64 pages each, and a kept prefix of 26.
    // With 117 pages the newest lacks one while the oldest writes its last tokens; with 80 the oldest lacks them too.
    // pages -> prefixes are let go, a sequence waits, how the newest ends
    let cases = [
        (200, false, false, FinishReason::Length),
        (140, true, false, FinishReason::Length),
        (117, true, true, FinishReason::Length),
        (80, true, true, FinishReason::OutOfMemory),
    ];
    for (pages, evicts, waits, ending) in cases {
        let limits = ModelLimits { round_rows: 128, ..MODEL_LIMITS };
        let options = HistoryOptions { limits, pages: Some(pages), ..options() };
        let mut model = HistoryModel::new(options);
        let mut limits = EngineLimits { prefix_cache_bytes: 1 << 30, ..EngineLimits::for_model(&model.limits()) };
        limits.draft.max = 0;
        let requests = [Request::greedy(&[1; 100], 156), Request::greedy(&[2; 58], 198)];
        let [oldest, newest] = requests.clone().map(|request| (5, request));
        let arrivals = [(0, Request::greedy(&[7; 100], 1)), oldest, newest];
        let (records, stats) = tf_engine::testing::serve(&mut model, limits, &arrivals).expect("it comes to an end");
        let reason = |index: usize| records[index].finished.as_ref().map(|finished| finished.reason.clone());
        assert_eq!(stats.prefix_evictions > 0, evicts, "{pages} pages: {stats:?}");
        assert_eq!(stats.page_waits > 0, waits, "{pages} pages: {stats:?}");
        assert_eq!((reason(1), reason(2)), (Some(FinishReason::Length), Some(ending)), "{pages} pages");
        assert_eq!(stats.prompt_rows, 258, "{pages} pages: rows of a sequence that waited were computed again");
        for (index, request) in requests.iter().enumerate() {
            let expected = tf_engine::testing::simulate::plain_reply(1, MODEL_LIMITS.vocab_size, request).0.tokens;
            let tokens = &records[index + 1].tokens;
            assert!(expected.starts_with(tokens), "{pages} pages");
            assert!(reason(index + 1) != Some(FinishReason::Length) || *tokens == expected, "{pages} pages");
        }
    }
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    let micro = Duration::from_micros;
    for slots in [1, 3] {
        let limits = ModelLimits { slots, ..MODEL_LIMITS };
        let clock = VirtualClock::new();
        let costs = Some((clock.clone(), micro(1000), micro(0), micro(0)));
        let mut bench = Bench::new(HistoryOptions { limits, clock: costs, ..options() }, |limits| limits.draft.max = 0);
        let deadline = |milliseconds| Some(clock.now().after(Duration::from_millis(milliseconds)));
        // One that runs, one in its prompt or in the queue, and one in the background that gave its slot away.
        bench.submit(background(Request { deadline: deadline(30), ..Request::greedy(&[3; 9], 200) }));
        bench.round();
        bench.submit(Request { deadline: deadline(20), ..Request::greedy(&[1; 9], 200) });
        bench.submit(Request { deadline: deadline(10), ..Request::greedy(&[2; 200], 20) });
        let mut endings = Vec::new();
        while !bench.state.is_idle() {
            let before = bench.state.stats.broken_off;
            bench.round();
            let ended = bench.state.stats.broken_off - before;
            endings.extend((0..ended).map(|_| bench.clock.now().since(Default::default()).as_millis()));
        }
        // Within a round of its deadline each, and nothing is left.
        assert_eq!((bench.state.stats.completed, bench.state.stats.broken_off), (0, 3), "{slots} slots");
        let pairs = endings.iter().zip([10, 20, 30]);
        assert!(
            pairs.clone().all(|(found, wanted)| (wanted..=wanted + 1).contains(found)),
            "{slots} slots: {endings:?}"
        );
        assert_eq!(bench.model.held_slots(), 0);
    }
}
