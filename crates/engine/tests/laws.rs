//! The laws one by one, each over a full grid of cases, and each with a planted defect that must turn it red.

use std::sync::Arc;

use tf_engine::model::{Drawn, Model, ModelLimits, RoundPlan, SequenceView, SlotIndex, Window};
use tf_engine::testing::simulate::{ReplyRecord, plain_reply};
use tf_engine::testing::{Drafter, Fault, HistoryModel, HistoryOptions, Random};
use tf_engine::{Batch, DraftPolicy, DraftSource, Engine, EngineLimits, FinishReason, Forcing, Reasoning, ReplyStats};
use tf_engine::{Request, Sampling, VirtualClock};

const VOCAB_SIZE: u32 = 40;
const MODEL_SEED: u64 = 11;

/// How a set of requests is served. The laws say that it makes no difference.
#[derive(Clone, Copy, Debug)]
struct Serving {
    slots: u32,
    prompt_chunk: u32,
    drafts: u32,
    drafter: Drafter,
    head: bool,
    copy: bool,
    vocab_size: u32,
}

const ALONE: Serving = Serving {
    slots: 1,
    prompt_chunk: 1000,
    drafts: 0,
    drafter: Drafter::Broken,
    head: true,
    copy: false,
    vocab_size: VOCAB_SIZE,
};

fn options(serving: Serving, fault: Fault) -> HistoryOptions {
    HistoryOptions {
        limits: ModelLimits {
            vocab_size: serving.vocab_size,
            context: 400,
            slots: serving.slots,
            round_rows: 128,
            draft_block: 7,
        },
        seed: MODEL_SEED,
        drafter: serving.drafter,
        fault,
        ..HistoryOptions::default()
    }
}

/// Serves `requests`, all submitted at once, and returns their replies with how many drafts landed and missed.
fn serve(requests: &[Request], serving: Serving, fault: Fault) -> (Vec<ReplyRecord>, u64, u64) {
    serve_with(HistoryModel::new(options(serving, fault)), requests, serving)
}

fn serve_with(model: HistoryModel, requests: &[Request], serving: Serving) -> (Vec<ReplyRecord>, u64, u64) {
    let limits = EngineLimits {
        prompt_chunk: serving.prompt_chunk,
        draft: DraftPolicy {
            max: serving.drafts,
            head: serving.head,
            copy: serving.copy,
            adaptive: false,
            confidence_min: 0.0,
        },
        ..EngineLimits::for_model(&model.limits())
    };
    let (engine, handle) = Engine::new(model, limits, Arc::new(VirtualClock::new())).expect("these limits fit");
    let mut replies = handle.submit_all(requests.to_vec()).expect("these requests fit");
    handle.drain();
    engine.run();
    let mut batch = Batch::default();
    let records = replies.iter_mut().map(|reply| {
        let mut record = ReplyRecord::default();
        while record.finished.is_none() {
            reply.receive_blocking(&mut batch);
            record.push(&batch);
        }
        record
    });
    let records = records.collect();
    let stats = handle.stats();
    (records, stats.accepted, stats.drafted - stats.accepted)
}

fn requests(count: u32) -> Vec<Request> {
    let mut random = Random::new(5);
    let make = |index: u32| {
        let length = random.between(1, 40);
        let prompt: Vec<u32> = (0..length).map(|_| random.between(0, VOCAB_SIZE - 1)).collect();
        let mut request = Request::greedy(&prompt, random.between(20, 60));
        request.end_ids = vec![0];
        request.logprobs = Some(2);
        request.score_prompt = index.is_multiple_of(3);
        if index % 2 == 1 {
            request.sampling.temperature = 1.0;
            request.sampling.seed = random.roll();
        }
        if index % 4 == 3 {
            request.sampling.presence_penalty = 2.0;
        }
        request
    };
    (0..count).map(make).collect()
}

fn same(left: &[ReplyRecord], right: &[ReplyRecord]) -> bool {
    let whole = |record: &ReplyRecord| {
        let reason = record.finished.as_ref().map(|finished| finished.reason.clone());
        (record.tokens.clone(), record.logprobs.clone(), record.top.clone(), record.prompt.clone(), reason)
    };
    left.iter().map(whole).eq(right.iter().map(whole))
}

/// Each request by itself, undrafted, its prompt whole.
fn alone(requests: &[Request]) -> Vec<ReplyRecord> {
    alone_as(requests, ALONE)
}

fn alone_as(requests: &[Request], serving: Serving) -> Vec<ReplyRecord> {
    let one = |request: &Request| serve(std::slice::from_ref(request), serving, Fault::None).0.remove(0);
    requests.iter().map(one).collect()
}

/// Requests over few tokens, so that runs of them come again, some with tokens that are given.
fn forced_requests(count: u32) -> Vec<Request> {
    let mut requests = requests(count);
    for (index, request) in requests.iter_mut().enumerate() {
        request.prompt = request.prompt.iter().map(|token| token % FEW).collect();
        if index % 4 > 0 {
            request.end_ids.clear();
        }
        let reasoning = Reasoning { close: 2, budget: Some(index as u32), loop_guard: false, closing: vec![1, 2, 1] };
        let opening = [1, 1, 2, 2, 1, 1, 2, 2, 1][..index % 9].to_vec();
        let forcing = match index % 3 {
            0 => None,
            1 => Some(Forcing { reasoning: Some(reasoning), opening }),
            _ => Some(Forcing { reasoning: None, opening }),
        };
        request.forcing = forcing.map(Arc::new);
    }
    requests
}

const FEW: u32 = 4;
const ALONE_OF_FEW: Serving = Serving { vocab_size: FEW, ..ALONE };

#[test]
fn alone_is_what_the_definition_says() {
    let requests = requests(12);
    for (request, record) in requests.iter().zip(alone(&requests)) {
        let (expected, reason) = plain_reply(MODEL_SEED, VOCAB_SIZE, request);
        assert_eq!(record.tokens, expected.tokens);
        assert_eq!(record.logprobs, expected.logprobs);
        assert_eq!(record.prompt, expected.prompt);
        assert_eq!(record.finished.map(|finished| finished.reason), Some(reason));
    }
}

#[test]
fn l1_drafted_is_undrafted() {
    let requests = requests(8);
    let expected = alone(&requests);
    for drafter in [Drafter::Right, Drafter::Wrong, Drafter::Mixed, Drafter::Broken] {
        for drafts in [1, 3, 7] {
            let (mut landed, mut missed) = (0, 0);
            for (request, expected) in requests.iter().zip(&expected) {
                let serving = Serving { drafts, drafter, ..ALONE };
                let (records, accepted, rejected) = serve(std::slice::from_ref(request), serving, Fault::None);
                assert!(same(&records, std::slice::from_ref(expected)), "{serving:?}: {request:?}");
                landed += accepted;
                missed += rejected;
            }
            // Drafters know nothing of penalties and the end, so the right one misses too and the wrong one may land.
            assert!(landed > 0 || matches!(drafter, Drafter::Wrong | Drafter::Broken), "{drafter:?} {drafts}");
            assert_eq!(missed > 0, drafter != Drafter::Broken, "{drafter:?} {drafts}");
        }
    }
}

#[test]
fn l1_copied_is_undrafted_and_given_is_given() {
    let requests = forced_requests(24);
    let undrafted: Vec<Request> =
        requests.iter().map(|request| Request { draft_max: Some(0), ..request.clone() }).collect();
    let expected = alone_as(&undrafted, ALONE_OF_FEW);
    for (request, record) in requests.iter().zip(&expected) {
        let (expected, reason) = plain_reply(MODEL_SEED, FEW, request);
        assert_eq!((&record.tokens, &record.logprobs), (&expected.tokens, &expected.logprobs), "{request:?}");
        assert_eq!(record.finished.as_ref().map(|finished| &finished.reason), Some(&reason));
        assert_eq!(record.finished.as_ref().map(|finished| finished.stats.known_rows), Some(0), "one row a round");
    }
    for (head, copy) in [(false, true), (true, true), (true, false), (false, false)] {
        for drafts in [0, 1, 5] {
            for (slots, prompt_chunk) in [(1, 1000), (4, 3)] {
                let drafter = Drafter::Mixed;
                let serving = Serving { slots, prompt_chunk, drafts, drafter, head, copy, ..ALONE_OF_FEW };
                let (records, ..) = serve(&requests, serving, Fault::None);
                assert!(same(&records, &expected), "{serving:?}");
                let sum = |of: fn(&ReplyStats) -> u64| -> u64 {
                    records
                        .iter()
                        .filter_map(|record| record.finished.as_ref())
                        .map(|finished| of(&finished.stats))
                        .sum()
                };
                let copies = sum(|stats| stats.drafts_of(DraftSource::Copy).accepted);
                let heads = sum(|stats| stats.drafts_of(DraftSource::Head).accepted);
                assert_eq!((copies > 0, heads > 0), (copy && drafts > 0, head && drafts > 0), "{serving:?}");
                assert!(sum(|stats| stats.known_rows.into()) > 50, "{serving:?}");
                let all = |stats: &ReplyStats| stats.drafts.iter().map(|counts| counts.drafted).sum::<u64>();
                assert_eq!(sum(all), sum(|stats| stats.drafted.into()), "{serving:?}");
            }
        }
    }
}

#[test]
fn a_reply_that_repeats_itself_is_copied_from_itself() {
    // A cycle of seven tokens, longer than any draft window.
    let script: Vec<u32> = (0..300).map(|index| [3, 1, 4, 1, 5, 9, 2][index % 7]).collect();
    let serving = Serving { drafts: 5, copy: true, head: false, ..ALONE };
    let model = HistoryModel::new(HistoryOptions { scripts: [script.clone()].into(), ..options(serving, Fault::None) });
    let (records, accepted, rejected) = serve_with(model, &[Request::greedy(&[7, 8], 300)], serving);
    assert_eq!(records[0].tokens, script);
    let windows = records[0].finished.as_ref().map_or(0, |finished| finished.stats.windows);
    assert!(windows < 70, "{windows} windows for 300 tokens, {accepted} copies accepted and {rejected} rejected");
}

#[test]
fn a_loop_is_ended_and_drafts_change_nothing() {
    let forcing = |budget, loop_guard| {
        let reasoning = Reasoning { close: 30, budget, loop_guard, closing: vec![31, 30, 32] };
        Some(Arc::new(Forcing { reasoning: Some(reasoning), opening: vec![33, 34] }))
    };
    // The script goes on as if nothing had been given, so each reply is the script with the given tokens in their places.
    let script: Vec<u32> = (0..64).map(|index| index % 29).chain((0..336).map(|index| 1 + index % 3)).collect();
    for (budget, loop_guard, given_at, looped) in
        [(None, true, 64 + 256, Some(3)), (Some(64), true, 64, None), (Some(64), false, 64, None)]
    {
        let mut expected = script.clone();
        expected[given_at..given_at + 5].copy_from_slice(&[31, 30, 32, 33, 34]);
        for (drafts, copy, head) in [(0, false, false), (5, true, false), (5, false, true), (5, true, true)] {
            let serving = Serving { drafts, copy, head, drafter: Drafter::Mixed, ..ALONE };
            let scripts = [script.clone()].into();
            let model = HistoryModel::new(HistoryOptions { scripts, ..options(serving, Fault::None) });
            let request = Request { forcing: forcing(budget, loop_guard), ..Request::greedy(&[7, 8], 390) };
            let (records, ..) = serve_with(model, &[request], serving);
            assert_eq!(records[0].tokens, expected[..390], "{serving:?}");
            assert_eq!(records[0].finished.as_ref().map(|finished| finished.stats.looped), Some(looped));
        }
    }
}

#[test]
fn l2_together_is_alone() {
    let requests = requests(12);
    let expected = alone(&requests);
    for slots in [1, 2, 4] {
        for drafts in [0, 5] {
            let serving = Serving { slots, drafts, drafter: Drafter::Mixed, copy: true, ..ALONE };
            let (records, ..) = serve(&requests, serving, Fault::None);
            assert!(same(&records, &expected), "{serving:?}");
        }
    }
}

#[test]
fn l4_any_cut_is_the_whole_prompt() {
    let requests = requests(12);
    let expected = alone(&requests);
    for prompt_chunk in [1, 2, 3, 7, 16, 39, 1000] {
        for slots in [1, 4] {
            let serving = Serving { slots, prompt_chunk, drafts: 3, drafter: Drafter::Mixed, ..ALONE };
            let (records, ..) = serve(&requests, serving, Fault::None);
            assert!(same(&records, &expected), "{serving:?}");
        }
    }
}

#[test]
fn the_laws_notice_their_planted_defects() {
    let requests = requests(12);
    let expected = alone(&requests);
    let drafted = Serving { drafts: 5, drafter: Drafter::Mixed, ..ALONE };
    let together = Serving { slots: 4, ..ALONE };
    let cut = Serving { prompt_chunk: 3, ..ALONE };
    let cases = [
        (Fault::KeepsRejectedRows, drafted),
        (Fault::EchoesDrafts, drafted),
        (Fault::PenaltiesForgetTheWindow, drafted),
        (Fault::DrawsInOrder, drafted),
        (Fault::CountsNeighbours, together),
        (Fault::ForgetsToRelease, together),
        (Fault::SeesChunks, cut),
    ];
    for (fault, serving) in cases {
        assert!(!same(&serve(&requests, serving, fault).0, &expected), "{fault:?} went unnoticed by {serving:?}");
        // The same serving without the defect is right, so it's the defect that is noticed.
        assert!(same(&serve(&requests, serving, Fault::None).0, &expected), "{serving:?}");
    }
}

/// Runs `tokens` as one window from `start` and returns the draw of its last row.
fn step(model: &mut HistoryModel, slot: u32, start: u32, tokens: &[u32], sampling: &Sampling) -> u32 {
    let slot = SlotIndex(slot);
    let window = Window {
        slot,
        start,
        rows: 0..tokens.len(),
        prompt_end: start,
        whole: false,
        draw: tokens.len() - 1..tokens.len(),
        logprobs: None,
        sequence: 0,
    };
    let plan = RoundPlan { tokens: tokens.to_vec(), windows: vec![window] };
    let mut drawn = Drawn::default();
    let view = SequenceView { sampling, prompt: &[], reply: &[], given: &[] };
    model.forward(&plan, &[view], &mut drawn).expect("no failure is planned");
    model.keep(slot, start + tokens.len() as u32);
    drawn.rows[0].token
}

/// The first length at which a resumed sequence differs from a fresh one.
fn first_wrong_resume(fault: Fault) -> Option<usize> {
    let tokens: Vec<u32> = (0..24).map(|index| (index * 7) % VOCAB_SIZE).collect();
    let sampling = Sampling { temperature: 1.0, seed: 9, ..Sampling::greedy() };
    (1..tokens.len() - 1).find(|&length| {
        let mut model = HistoryModel::new(options(Serving { slots: 3, ..ALONE }, fault));
        let (head, tail) = tokens.split_at(length);
        // Rows beyond the kept length are in the slot when the snapshot is taken; it must not hold them.
        step(&mut model, 0, 0, &tokens, &sampling);
        model.keep(SlotIndex(0), length as u32);
        let snapshot = model.snapshot(SlotIndex(0), length as u32);
        // A slot that held another sequence before.
        step(&mut model, 2, 0, &[1, 2, 3], &sampling);
        model.release(SlotIndex(2));
        model.restore(SlotIndex(2), &snapshot);
        let resumed = step(&mut model, 2, length as u32, tail, &sampling);
        step(&mut model, 1, 0, head, &sampling);
        resumed != step(&mut model, 1, length as u32, tail, &sampling)
    })
}

#[test]
fn l3_resumed_is_fresh() {
    assert_eq!(first_wrong_resume(Fault::None), None);
    let wrong = first_wrong_resume(Fault::SnapshotLosesOddRow);
    assert!(wrong.is_some_and(|length| length % 2 == 1), "{wrong:?}");
}

#[test]
fn the_reply_before_a_stop_does_not_depend_on_drafts() {
    // A reader that cuts at a token, as one does that looks for a stop string, sees the same reply however many tokens a
    // round brought beyond the cut.
    let requests = requests(6);
    let cut = |record: &ReplyRecord| {
        let end = record.tokens.iter().position(|&token| token % 5 == 2).map_or(record.tokens.len(), |index| index + 1);
        record.tokens[..end].to_vec()
    };
    let expected: Vec<_> = alone(&requests).iter().map(cut).collect();
    assert!(expected.iter().any(|tokens| tokens.len() > 3), "the cut leaves nothing to compare");
    for drafts in [1, 7] {
        let (records, ..) = serve(&requests, Serving { drafts, drafter: Drafter::Right, ..ALONE }, Fault::None);
        assert_eq!(records.iter().map(cut).collect::<Vec<_>>(), expected, "{drafts} drafts");
    }
}

#[test]
fn every_request_hears_its_end_when_the_thread_breaks_down() {
    // A model whose contract is broken panics inside a round; the senders in the state end the requests.
    let model = HistoryModel::new(HistoryOptions { fault: Fault::None, ..HistoryOptions::default() });
    let limits = EngineLimits::for_model(&model.limits());
    let (handle, thread) = tf_engine::spawn(Panics(model), limits, Arc::new(VirtualClock::new())).expect("limits fit");
    let mut replies = handle.submit_all(vec![Request::greedy(&[1, 2], 5); 3]).expect("requests fit");
    let mut batch = Batch::default();
    for reply in &mut replies {
        while batch.finished.is_none() {
            reply.receive_blocking(&mut batch);
        }
        assert_eq!(batch.finished.take().map(|finished| finished.reason), Some(FinishReason::Stopped));
    }
    assert!(thread.join().is_err(), "the thread was meant to break down");
    assert!(handle.submit(Request::greedy(&[1], 1)).is_err(), "a request was taken by a thread that is gone");
}

/// A model that breaks down in its first forward.
struct Panics(HistoryModel);

impl Model for Panics {
    type Snapshot = <HistoryModel as Model>::Snapshot;

    fn limits(&self) -> ModelLimits {
        self.0.limits()
    }

    fn forward(
        &mut self,
        _: &RoundPlan,
        _: &[SequenceView<'_>],
        _: &mut Drawn,
    ) -> Result<(), tf_engine::model::ForwardError> {
        panic!("a planned breakdown")
    }

    fn keep(&mut self, slot: SlotIndex, length: u32) {
        self.0.keep(slot, length);
    }

    fn draft(
        &mut self,
        wanted: &[tf_engine::model::DraftRequest<'_>],
        drafts: &mut tf_engine::model::Drafts,
    ) -> Result<(), tf_engine::model::ForwardError> {
        self.0.draft(wanted, drafts)
    }

    fn snapshot(&mut self, slot: SlotIndex, position: u32) -> Self::Snapshot {
        self.0.snapshot(slot, position)
    }

    fn snapshot_reach(&self) -> u32 {
        self.0.snapshot_reach()
    }

    fn can_resume(&self, snapshot: &Self::Snapshot, prompt_end: u32) -> bool {
        self.0.can_resume(snapshot, prompt_end)
    }

    fn can_continue(&self, slot: SlotIndex, prompt_end: u32) -> bool {
        self.0.can_continue(slot, prompt_end)
    }

    fn snapshot_bytes(&self, snapshot: &Self::Snapshot) -> u64 {
        self.0.snapshot_bytes(snapshot)
    }

    fn snapshot_pages(&self, snapshot: &Self::Snapshot, pages: &mut Vec<u32>) {
        self.0.snapshot_pages(snapshot, pages);
    }

    fn pages(&self) -> tf_engine::model::PageCounts {
        self.0.pages()
    }

    fn pages_needed(&self, slot: SlotIndex, end: u32) -> u32 {
        self.0.pages_needed(slot, end)
    }

    fn encode(&mut self, snapshot: &Self::Snapshot, bytes: &mut Vec<u8>) {
        self.0.encode(snapshot, bytes);
    }

    fn read_pages(&mut self, snapshot: &Self::Snapshot, pages: std::ops::Range<u32>, bytes: &mut Vec<u8>) -> bool {
        self.0.read_pages(snapshot, pages, bytes)
    }

    fn decode(
        &mut self,
        bytes: &[u8],
        base: Option<(&Self::Snapshot, u32)>,
    ) -> Result<Self::Snapshot, tf_engine::model::DecodeError> {
        self.0.decode(bytes, base)
    }

    fn write_pages(&mut self, snapshot: &Self::Snapshot, first: u32, bytes: &[u8]) -> bool {
        self.0.write_pages(snapshot, first, bytes)
    }

    fn restore(&mut self, slot: SlotIndex, snapshot: &Self::Snapshot) {
        self.0.restore(slot, snapshot);
    }

    fn release(&mut self, slot: SlotIndex) {
        self.0.release(slot);
    }
}
