//! The laws one by one, each over a full grid of cases, and each with a planted defect that must turn it red.

use std::sync::Arc;

use tf_engine::model::{Drawn, Model, ModelLimits, RoundPlan, SequenceView, SlotIndex, Window};
use tf_engine::testing::simulate::{ReplyRecord, plain_reply};
use tf_engine::testing::{Drafter, Fault, HistoryModel, HistoryOptions, Random};
use tf_engine::{Batch, DraftPolicy, Engine, EngineLimits, FinishReason, Request, Sampling, VirtualClock};

const VOCAB_SIZE: u32 = 40;
const MODEL_SEED: u64 = 11;

/// How a set of requests is served. The laws say that it makes no difference.
#[derive(Clone, Copy, Debug)]
struct Serving {
    slots: u32,
    prompt_chunk: u32,
    drafts: u32,
    drafter: Drafter,
}

const ALONE: Serving = Serving { slots: 1, prompt_chunk: 1000, drafts: 0, drafter: Drafter::Broken };

fn options(serving: Serving, fault: Fault) -> HistoryOptions {
    HistoryOptions {
        limits: ModelLimits {
            vocab_size: VOCAB_SIZE,
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
    let model = HistoryModel::new(options(serving, fault));
    let limits = EngineLimits {
        prompt_chunk: serving.prompt_chunk,
        draft: DraftPolicy { max: serving.drafts, adaptive: false, confidence_min: 0.0 },
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
    let one = |request: &Request| serve(std::slice::from_ref(request), ALONE, Fault::None).0.remove(0);
    requests.iter().map(one).collect()
}

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
fn l2_together_is_alone() {
    let requests = requests(12);
    let expected = alone(&requests);
    for slots in [1, 2, 4] {
        for drafts in [0, 5] {
            let serving = Serving { slots, prompt_chunk: 1000, drafts, drafter: Drafter::Mixed };
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
            let serving = Serving { slots, prompt_chunk, drafts: 3, drafter: Drafter::Mixed };
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
    let view = SequenceView { sampling, prompt: &[], reply: &[] };
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
