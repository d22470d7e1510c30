//! Whole schedules from one number: requests come, share rounds, are cancelled, fail and are read slowly, and every reply
//! must still be what it is alone, undrafted, one token at a time.
//!
//! The expected reply is not computed by the engine: [`plain_reply`] is a loop over the history model's own two functions.

use std::collections::BTreeMap;
use std::time::Duration;

use tf_text::TokenId;

use crate::channel::{self, Batch, Receiver};
use crate::clock::{Clock, VirtualClock};
use crate::commit;
use crate::limits::{DraftPolicy, EngineLimits};
use crate::model::{Model, ModelLimits};
use crate::prefix_cache::{CacheFault, PrefixCache};
use crate::prefixes::{self, release};
use crate::request::{FinishReason, Finished, Request, RequestId, Sampling};
use crate::round::{Busy, Scratch, run_round};
use crate::state::{State, Waiting};
use crate::testing::history::{Drafter, Fault, HistoryModel, HistoryOptions, HistorySnapshot, PAGE_POSITIONS};
use crate::testing::history::{draw, extend, logprob};
use crate::testing::random::Random;

/// Schedules that take longer than this have hung.
const ROUNDS_MAX: u32 = 20_000;

/// A reply, to the bit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplyRecord {
    pub tokens: Vec<TokenId>,
    pub logprobs: Vec<f32>,
    /// Likeliest tokens of each reply token.
    pub top: Vec<Vec<(TokenId, f32)>>,
    /// Scored prompt tokens.
    pub prompt: Vec<(TokenId, f32)>,
    pub finished: Option<Finished>,
}

impl ReplyRecord {
    /// Takes over what a batch says.
    ///
    /// # Panics
    /// When something comes after the ending.
    pub fn push(&mut self, batch: &Batch) {
        assert!(self.finished.is_none(), "something came after the ending");
        for row in &batch.tokens {
            self.tokens.push(row.token);
            self.logprobs.push(row.logprob);
            self.top.push(batch.top_of(row).to_vec());
        }
        self.prompt.extend(batch.prompt.iter().map(|row| (row.token, row.logprob)));
        self.finished.clone_from(&batch.finished);
    }
}

/// What a request's reply is, by definition: no rounds, no drafts, no company.
pub fn plain_reply(model_seed: u64, vocab_size: u32, request: &Request) -> (ReplyRecord, FinishReason) {
    let mut record = ReplyRecord::default();
    let mut hash = None;
    for (index, &token) in request.prompt.iter().enumerate() {
        if index > 0
            && request.score_prompt
            && let Some(hash) = hash
        {
            let claimed = if request.logprobs.is_some() { logprob(hash, token) } else { 0.0 };
            record.prompt.push((token, claimed));
        }
        hash = Some(extend(model_seed, hash, token));
    }
    while (record.tokens.len() as u32) < request.max_tokens {
        let Some(history) = hash else { break };
        let key = (request.prompt.len() + record.tokens.len()) as u64;
        let reply = record.tokens.iter().copied();
        let token = draw(vocab_size, history, &request.sampling, key, &request.prompt, reply);
        record.tokens.push(token);
        record.logprobs.push(if request.logprobs.is_some() { logprob(history, token) } else { 0.0 });
        if request.end_ids.contains(&token) {
            return (record, FinishReason::Stop(token));
        }
        hash = Some(extend(model_seed, hash, token));
    }
    (record, FinishReason::Length)
}

/// What a schedule exercised. A run that exercised nothing proves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub requests: u64,
    pub complete: u64,
    pub cancelled: u64,
    pub slow: u64,
    pub failed: u64,
    pub expired: u64,
    pub tokens: u64,
    pub rounds: u64,
    pub accepted: u64,
    pub rejected: u64,
    /// Rounds that held windows of more than one sequence.
    pub shared_rounds: u64,
    /// Rounds that held prompt rows beside reply rows.
    pub mixed_rounds: u64,
    /// Prompts computed in more than one piece.
    pub cut_prompts: u64,
    /// Prompts that resumed from a kept prefix.
    pub resumed: u64,
    pub evictions: u64,
    /// Times that a sequence waited for pages, and requests that ended for want of them.
    pub page_waits: u64,
    pub out_of_memory: u64,
}

impl Report {
    pub fn add(&mut self, other: &Report) {
        let pairs = [
            (&mut self.requests, other.requests),
            (&mut self.complete, other.complete),
            (&mut self.cancelled, other.cancelled),
            (&mut self.slow, other.slow),
            (&mut self.failed, other.failed),
            (&mut self.expired, other.expired),
            (&mut self.tokens, other.tokens),
            (&mut self.rounds, other.rounds),
            (&mut self.accepted, other.accepted),
            (&mut self.rejected, other.rejected),
            (&mut self.shared_rounds, other.shared_rounds),
            (&mut self.mixed_rounds, other.mixed_rounds),
            (&mut self.cut_prompts, other.cut_prompts),
            (&mut self.resumed, other.resumed),
            (&mut self.evictions, other.evictions),
            (&mut self.page_waits, other.page_waits),
            (&mut self.out_of_memory, other.out_of_memory),
        ];
        for (sum, count) in pairs {
            *sum += count;
        }
    }
}

/// The command that repeats one schedule.
pub fn replay_command(seed: u64) -> String {
    format!("cargo run -p tf-engine --example simulate -- {seed}")
}

/// Settings drawn for one schedule.
struct Schedule {
    random: Random,
    model: HistoryOptions,
    limits: EngineLimits,
    clock: VirtualClock,
    request_count: u32,
    /// Once in so many rounds a request arrives, is cancelled, and a reader reads; 0 is never.
    arrival_every: u32,
    cancel_every: u32,
    read_every: u32,
    short_waits: bool,
    /// What was asked so far, with what was drawn: later prompts grow from these.
    told: Vec<Vec<TokenId>>,
}

fn schedule(seed: u64, fault: Fault) -> Schedule {
    let mut random = Random::new(seed);
    let clock = VirtualClock::new();
    let slots = random.between(1, 5);
    let round_rows = slots + 1 + random.pick(&[0, 1, 3, 10, 60]);
    let micro = |random: &mut Random, high| Duration::from_micros(u64::from(random.between(0, high)));
    let costs = (clock.clone(), micro(&mut random, 500), micro(&mut random, 100), micro(&mut random, 200));
    let failures = if random.one_in(4) { (0..4).map(|_| random.roll() % 60).collect() } else { Vec::new() };
    let lost_at = random.one_in(40).then(|| random.roll() % 100);
    let model = HistoryOptions {
        limits: ModelLimits {
            vocab_size: random.pick(&[3, 16, 40]),
            context: random.pick(&[24, 96, 160]),
            slots,
            round_rows,
            draft_block: random.pick(&[0, 1, 5, 7]),
        },
        seed: random.roll(),
        drafter: random.pick(&[Drafter::Right, Drafter::Wrong, Drafter::Mixed, Drafter::Mixed, Drafter::Broken]),
        fault,
        clock: Some(costs),
        failures,
        lost_at,
        pages: None,
        scripts: Default::default(),
    };
    // Now and then there are too few pages for all slots, down to just enough for one.
    let pages_of_one = model.limits.context.div_ceil(PAGE_POSITIONS) + 1;
    let pages = random.one_in(2).then(|| pages_of_one + random.between(0, pages_of_one / 2));
    let model = HistoryOptions { pages, ..model };
    let short_waits = random.one_in(4);
    let limits = EngineLimits {
        prompt_chunk: random.pick(&[1, 2, 3, 7, 1000]),
        decode_gap: random.pick(&[None, Some(Duration::from_micros(300)), Some(Duration::from_millis(200))]),
        queue: random.between(0, 6),
        queue_timeout: if short_waits { Duration::from_millis(5) } else { Duration::from_secs(1000) },
        draft: DraftPolicy {
            max: random.pick(&[0, 1, 3, 5, 7, 7]),
            adaptive: random.one_in(2),
            confidence_min: random.pick(&[0.0, 0.0, 0.3]),
        },
        prefix_cache_bytes: random.pick(&[0, 400, 2000, 2000, 1 << 40]),
        snapshot_every: random.pick(&[7, 32, 4096]),
        unread_tokens: random.pick(&[8, 4096]),
        unread_time: if short_waits { Duration::from_millis(20) } else { Duration::from_secs(1000) },
        ..EngineLimits::for_model(&model.limits)
    };
    Schedule {
        model,
        limits,
        clock,
        request_count: random.between(1, 12),
        arrival_every: random.pick(&[1, 2, 5]),
        cancel_every: random.pick(&[0, 0, 8, 30]),
        read_every: random.pick(&[1, 1, 2, 12]),
        short_waits,
        told: Vec::new(),
        random,
    }
}

fn request(schedule: &mut Schedule) -> Request {
    let random = &mut schedule.random;
    let ModelLimits { vocab_size, context, .. } = schedule.model.limits;
    let prompt_length = random.between(1, context - 1);
    let mut prompt: Vec<TokenId> = (0..prompt_length).map(|_| random.between(0, vocab_size - 1)).collect();
    if !schedule.told.is_empty() && !random.one_in(3) {
        // The same again, a part of it with another end, or all of it with more.
        let told = &schedule.told[random.roll() as usize % schedule.told.len()];
        let shared = if random.one_in(2) { told.len() as u32 } else { random.between(1, told.len() as u32) };
        let added = random.pick(&[0, 1, 5, 40]);
        prompt.splice(
            ..,
            told[..shared as usize]
                .iter()
                .copied()
                .chain((0..added).map(|_| random.between(0, vocab_size - 1)))
                .collect::<Vec<_>>(),
        );
        prompt.truncate(context as usize - 1);
    }
    let prompt_length = prompt.len() as u32;
    let snapshot_at = (0..random.between(0, 3)).map(|_| random.between(0, context)).collect();
    let room = context - prompt_length;
    let max_tokens = if random.one_in(12) { 0 } else { random.between(1, room) };
    let mut sampling = Sampling::greedy();
    if random.one_in(2) {
        sampling.temperature = random.pick(&[0.5, 1.0, 3.0]);
        sampling.seed = random.roll();
    }
    if random.one_in(4) {
        sampling.frequency_penalty = random.pick(&[0.0, 0.5, 2.0]);
        sampling.presence_penalty = random.pick(&[0.0, -1.0, 2.0]);
        sampling.repetition_penalty = random.pick(&[1.0, 1.5]);
    }
    if random.one_in(4) {
        sampling.logit_bias = vec![(random.between(0, vocab_size - 1), random.pick(&[-5.0, 5.0]))];
    }
    let end_ids = if random.one_in(3) { Vec::new() } else { vec![0] };
    if random.one_in(4) {
        sampling.masked_before = random.between(1, 6);
        sampling.masked.clone_from(&end_ids);
    }
    let deadline = (schedule.short_waits && random.one_in(4))
        .then(|| schedule.clock.now().after(Duration::from_millis(u64::from(random.between(0, 30)))));
    let logprobs = random.one_in(3).then(|| random.between(0, 3));
    let request = Request {
        prompt: prompt.into(),
        sampling,
        max_tokens,
        end_ids,
        draft_max: random.pick(&[None, None, Some(0), Some(2)]),
        logprobs,
        score_prompt: logprobs.is_some() && random.one_in(2),
        deadline,
        snapshot_at,
    };
    let reply = plain_reply(schedule.model.seed, vocab_size, &request).0;
    schedule.told.push(request.prompt.iter().chain(&reply.tokens).copied().collect());
    request
}

struct Client {
    request: Request,
    receiver: Receiver,
    record: ReplyRecord,
}

/// Runs the schedule of `seed` and compares every reply with [`plain_reply`].
///
/// # Errors
/// The first law that was broken, in words. Broken invariants panic where they are found.
pub fn simulate(seed: u64, fault: Fault) -> Result<Report, String> {
    simulate_with(seed, fault, CacheFault::None)
}

/// The same with a defect in the cache of prefixes.
///
/// # Errors
/// See [`simulate`].
pub fn simulate_with(seed: u64, fault: Fault, cache_fault: CacheFault) -> Result<Report, String> {
    let mut schedule = schedule(seed, fault);
    let mut model = HistoryModel::new(schedule.model.clone());
    let limits = schedule.limits.checked(&schedule.model.limits).map_err(|error| error.to_string())?;
    let mut state = State::new(limits, &model.limits());
    state.keeping = prefixes::rules_for(&model, &limits);
    let mut cache = prefixes::cache_for(&model, &limits).with_fault(cache_fault);
    let mut scratch = Scratch::default();
    let mut clients: BTreeMap<RequestId, Client> = BTreeMap::new();
    let mut report = Report::default();
    let mut batch = Batch::default();
    let mut next_id = 0;
    let mut is_lost = false;

    for round in 0.. {
        if round > ROUNDS_MAX {
            return Err(format!("{ROUNDS_MAX} rounds and no end"));
        }
        let can_submit = state.queue.len() < limits.queue as usize || state.slots.free_count() > 0;
        if next_id < u64::from(schedule.request_count) && can_submit && schedule.random.one_in(schedule.arrival_every) {
            let id = RequestId(next_id);
            next_id += 1;
            let request = request(&mut schedule);
            let (sender, receiver) = channel::channel(limits.unread_tokens, limits.unread_time);
            let waiting = Waiting { id, request: request.clone(), sender, submitted: schedule.clock.now() };
            commit::enqueue(&mut state, waiting);
            commit::admit(&mut state, schedule.clock.now());
            clients.insert(id, Client { request, receiver, record: ReplyRecord::default() });
        }
        if schedule.cancel_every > 0 && next_id > 0 && schedule.random.one_in(schedule.cancel_every) {
            let id = RequestId(schedule.random.roll() % next_id);
            commit::cancel(&mut state, id, schedule.clock.now());
            release(&mut state, &mut model, &mut cache);
        }

        match run_round(&mut state, &mut model, &schedule.clock, &mut scratch, &mut cache) {
            Ok(Busy::Worked) => count_round(&mut report, &scratch),
            Ok(Busy::Idle) => schedule.clock.advance(Duration::from_millis(1)),
            Err(_) => is_lost = true,
        }
        check_pages(&model, &cache)?;
        for client in clients.values_mut() {
            let is_reading = schedule.random.one_in(schedule.read_every);
            if is_reading && client.record.finished.is_none() && client.receiver.try_receive(&mut batch) {
                client.record.push(&batch);
            }
        }
        let is_over = is_lost || (next_id == u64::from(schedule.request_count) && state.is_idle());
        if is_over {
            break;
        }
    }

    report.rounds = state.stats.rounds;
    report.evictions = cache.evictions();
    report.page_waits = state.stats.page_waits;
    report.accepted = state.stats.accepted;
    report.rejected = state.stats.drafted - state.stats.accepted;
    if model.held_slots() > 0 {
        return Err(format!("{} slots are still held when nothing runs", model.held_slots()));
    }
    for (id, mut client) in clients {
        while client.receiver.try_receive(&mut batch) {
            client.record.push(&batch);
        }
        judge(id, &client, &schedule, &mut report)?;
    }
    Ok(report)
}

/// Every page is free, held by a slot or held by a kept prefix, and none is lost.
fn check_pages(model: &HistoryModel, cache: &PrefixCache<HistorySnapshot>) -> Result<(), String> {
    cache.check();
    let mut held = model.slot_pages();
    held.extend(cache.held_pages());
    let pages = model.pages();
    if held.len() as u32 + pages.free != pages.total {
        return Err(format!("{} pages are held and {} free of {}", held.len(), pages.free, pages.total));
    }
    Ok(())
}

fn count_round(report: &mut Report, scratch: &Scratch) {
    let plan = scratch.last_plan();
    let (prompt_rows, reply_rows) = plan.row_counts();
    report.shared_rounds += u64::from(plan.round.windows.len() > 1);
    report.mixed_rounds += u64::from(prompt_rows > 0 && reply_rows > 0);
    let is_cut = |window: &crate::model::Window| {
        window.prompt_end > window.start && window.start as usize + window.rows.len() < window.prompt_end as usize
    };
    report.cut_prompts += plan.round.windows.iter().filter(|window| is_cut(window)).count() as u64;
}

fn judge(id: RequestId, client: &Client, schedule: &Schedule, report: &mut Report) -> Result<(), String> {
    let Client { request, record, .. } = client;
    let Some(Finished { reason, stats }) = &record.finished else {
        return Err(format!("request {} has no ending", id.0));
    };
    let limits = &schedule.model.limits;
    let (expected, expected_reason) = plain_reply(schedule.model.seed, limits.vocab_size, request);
    report.requests += 1;
    report.resumed += u64::from(stats.cached_tokens > 0);
    report.tokens += record.tokens.len() as u64;
    match reason {
        FinishReason::Stop(_) | FinishReason::Length => report.complete += 1,
        FinishReason::Cancelled => report.cancelled += 1,
        FinishReason::SlowReader => report.slow += 1,
        FinishReason::Deadline | FinishReason::QueueTimeout => report.expired += 1,
        FinishReason::Failed(text) if text != "as planned" => {
            return Err(format!("request {} failed unplanned: {text} ({request:?})", id.0));
        }
        FinishReason::Failed(_) | FinishReason::DeviceLost(_) => report.failed += 1,
        FinishReason::OutOfMemory => report.out_of_memory += 1,
        FinishReason::Stopped => return Err(format!("request {} was forgotten", id.0)),
    }
    let differs = |what: &str, found: &dyn std::fmt::Debug, wanted: &dyn std::fmt::Debug| {
        Err(format!("request {}: {what} differ: found {found:?}, alone it is {wanted:?} ({request:?})", id.0))
    };
    if reason.is_complete() {
        if record.tokens != expected.tokens {
            return differs("tokens", &record.tokens, &expected.tokens);
        }
        if *reason != expected_reason {
            return differs("endings", reason, &expected_reason);
        }
        if record.prompt != expected.prompt {
            return differs("scored prompts", &record.prompt, &expected.prompt);
        }
        if stats.reply_tokens as usize != record.tokens.len() {
            return differs("token counts", &stats.reply_tokens, &record.tokens.len());
        }
    }
    if !expected.tokens.starts_with(&record.tokens) {
        return differs("tokens of a broken off reply", &record.tokens, &expected.tokens);
    }
    if !expected.logprobs.starts_with(&record.logprobs) {
        return differs("log-probabilities", &record.logprobs, &expected.logprobs);
    }
    Ok(())
}
