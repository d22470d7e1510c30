//! Whole schedules from one number: requests come, share rounds, are cancelled, fail and are read slowly, and every reply
//! must still be what it is alone, undrafted, one token at a time.
//!
//! The expected reply is not computed by the engine: [`plain_reply`] is a loop over the history model's own two functions.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tf_text::TokenId;

use crate::channel::{self, Batch, Receiver};
use crate::clock::{Clock, Time, VirtualClock};
use crate::commit;
use crate::disk::{Disk, DiskIdentity, DiskLimits, News, Shelf, Worker};
use crate::forcing::{Forcing, Reasoning};
use crate::limits::{DraftPolicy, EngineLimits};
use crate::model::{Model, ModelLimits};
use crate::prefix_cache::{CacheFault, PrefixCache};
use crate::prefixes::{self, release};
use crate::request::{DraftSource, FinishReason, Finished, Priority, Request, RequestId, Sampling};
use crate::round::{Busy, Scratch, run_round};
use crate::state::{State, Waiting};
use crate::testing::disk::SimulatedDisk;
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

/// The token that follows `reply` by definition and not by a draw.
fn given(forcing: &Forcing, reply: &[TokenId]) -> Option<TokenId> {
    let answer = match &forcing.reasoning {
        None => 0,
        Some(reasoning) => {
            let closed = reply.iter().position(|&token| token == reasoning.close);
            let budget = reasoning.budget.map(|budget| budget as usize);
            match (budget, closed) {
                (Some(budget), Some(closed)) if closed < budget => closed + 1,
                (Some(budget), _) if reply.len() >= budget + reasoning.closing.len() => {
                    budget + reasoning.closing.len()
                }
                (Some(budget), _) => return reasoning.closing.get(reply.len().checked_sub(budget)?).copied(),
                (None, closed) => closed? + 1,
            }
        }
    };
    forcing.opening.get(reply.len() - answer).copied()
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
        let given = request.forcing.as_ref().and_then(|forcing| given(forcing, &record.tokens));
        let drawn = || draw(vocab_size, history, &request.sampling, key, &request.prompt, reply.clone());
        let token = given.unwrap_or_else(drawn);
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
    /// Of these, copies from the context.
    pub copies_accepted: u64,
    pub copies_rejected: u64,
    /// Given tokens that shared a round with the token before them.
    pub known_rows: u64,
    /// Sequences in the background that gave their slots away.
    pub pauses: u64,
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
    /// Servers that were drained or killed, and begun again.
    pub restarts: u64,
    pub disk_writes: u64,
    /// Prompts that resumed from a file.
    pub disk_hits: u64,
    pub disk_evictions: u64,
    pub disk_failures: u64,
    pub disk_refusals: u64,
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
            (&mut self.copies_accepted, other.copies_accepted),
            (&mut self.copies_rejected, other.copies_rejected),
            (&mut self.known_rows, other.known_rows),
            (&mut self.pauses, other.pauses),
            (&mut self.shared_rounds, other.shared_rounds),
            (&mut self.mixed_rounds, other.mixed_rounds),
            (&mut self.cut_prompts, other.cut_prompts),
            (&mut self.resumed, other.resumed),
            (&mut self.evictions, other.evictions),
            (&mut self.page_waits, other.page_waits),
            (&mut self.out_of_memory, other.out_of_memory),
            (&mut self.restarts, other.restarts),
            (&mut self.disk_writes, other.disk_writes),
            (&mut self.disk_hits, other.disk_hits),
            (&mut self.disk_evictions, other.disk_evictions),
            (&mut self.disk_failures, other.disk_failures),
            (&mut self.disk_refusals, other.disk_refusals),
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
    disk: Option<DiskSchedule>,
    /// Times that the server still ends and begins again.
    restarts: u32,
    /// How far the clock moves when nothing can run.
    idle_step: Duration,
}

/// A disk, how it works and what happens to it.
struct DiskSchedule {
    disk: SimulatedDisk,
    limits: DiskLimits,
    capacity: u64,
    /// Orders that the worker does between two rounds at most; 0 is a disk that hangs.
    steps_max: u32,
    /// Once in so many rounds somebody changes a file, once in so many calls one fails; 0 is never.
    meddle_every: u32,
    fail_every: u32,
}

fn disk_schedule(random: &mut Random) -> DiskSchedule {
    let fail_every = random.pick(&[0, 0, 0, 0, 9, 60]);
    let capacity = random.pick(&[1500, 6000, 1 << 40, 1 << 40, 1 << 40]);
    let min_free_bytes = random.pick(&[0, 0, 700]);
    let index_bytes = random.pick(&[2000, 6000, 1 << 30, 1 << 30]);
    let limits = DiskLimits { bytes: random.pick(&[700, 2500, 20_000, 1 << 40]), min_free_bytes, index_bytes };
    let disk = SimulatedDisk::new(capacity, fail_every, Random::new(random.roll()));
    // The file of somebody else takes some of it.
    let capacity = capacity - 5;
    let steps_max = if random.one_in(30) { 0 } else { random.pick(&[1, 3, 20, 20]) };
    DiskSchedule { disk, limits, capacity, steps_max, meddle_every: random.pick(&[0, 0, 4, 30]), fail_every }
}

fn model_options(random: &mut Random, clock: &VirtualClock, has_disk: bool, fault: Fault) -> HistoryOptions {
    let slots = random.between(1, 5);
    let round_rows = slots + 1 + random.pick(&[0, 1, 3, 10, 60]);
    let micro = |random: &mut Random, high| Duration::from_micros(u64::from(random.between(0, high)));
    let costs = (clock.clone(), micro(random, 500), micro(random, 100), micro(random, 200));
    let failures = if random.one_in(4) { (0..4).map(|_| random.roll() % 60).collect() } else { Vec::new() };
    let lost_at = random.one_in(40).then(|| random.roll() % 100);
    let model = HistoryOptions {
        limits: ModelLimits {
            vocab_size: random.pick(&[3, 16, 40]),
            context: if has_disk { random.pick(&[96, 160]) } else { random.pick(&[24, 96, 160]) },
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
    HistoryOptions { pages, ..model }
}

fn schedule(seed: u64, fault: Fault) -> Schedule {
    let mut random = Random::new(seed);
    let clock = VirtualClock::new();
    let disk = random.one_in(2).then(|| disk_schedule(&mut random));
    let model = model_options(&mut random, &clock, disk.is_some(), fault);
    let short_waits = random.one_in(4);
    let limits = EngineLimits {
        prompt_chunk: random.pick(&[1, 2, 3, 7, 1000]),
        decode_gap: random.pick(&[None, Some(Duration::from_micros(300)), Some(Duration::from_millis(200))]),
        queue: random.between(0, 6),
        queue_timeout: if short_waits { Duration::from_millis(5) } else { Duration::from_secs(1000) },
        draft: DraftPolicy {
            max: random.pick(&[0, 1, 3, 5, 7, 7]),
            head: !random.one_in(4),
            copy: random.one_in(2),
            adaptive: random.one_in(2),
            confidence_min: random.pick(&[0.0, 0.0, 0.3]),
        },
        // With a disk, often too little for one prefix.
        prefix_cache_bytes: match disk {
            Some(_) => random.pick(&[60, 400, 400, 2000, 1 << 40]),
            None => random.pick(&[0, 400, 2000, 2000, 1 << 40]),
        },
        snapshot_every: random.pick(&[7, 32, 4096]),
        unread_tokens: random.pick(&[8, 4096]),
        unread_time: if short_waits { Duration::from_millis(20) } else { Duration::from_secs(1000) },
        ..EngineLimits::for_model(&model.limits)
    };
    let hangs = disk.as_ref().is_some_and(|disk| disk.steps_max == 0);
    Schedule {
        restarts: if disk.is_some() { random.pick(&[0, 1, 1, 2]) } else { u32::from(random.one_in(20)) },
        idle_step: Duration::from_millis(if hangs { 500 } else { 1 }),
        model,
        limits,
        clock,
        // Most are short, so that there are many; a long one now and then sees what takes time to build up.
        request_count: match (random.one_in(100), &disk) {
            (true, _) => random.between(40, 120),
            (false, Some(_)) => random.between(1, 16),
            (false, None) => random.between(1, 10),
        },
        arrival_every: random.pick(&[1, 2, 5]),
        cancel_every: random.pick(&[0, 0, 8, 30]),
        read_every: random.pick(&[1, 1, 2, 12]),
        short_waits,
        told: Vec::new(),
        disk,
        random,
    }
}

/// A request, and what its reply must be.
fn request(schedule: &mut Schedule) -> (Request, ReplyRecord, FinishReason) {
    let random = &mut schedule.random;
    let ModelLimits { vocab_size, context, .. } = schedule.model.limits;
    let prompt_length = random.between(1, context - 1);
    let mut prompt: Vec<TokenId> = (0..prompt_length).map(|_| random.between(0, vocab_size - 1)).collect();
    let is_new = random.one_in(if schedule.disk.is_some() { 8 } else { 3 });
    if !schedule.told.is_empty() && !is_new {
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
        forcing: random.one_in(3).then(|| forcing(random, vocab_size).into()),
        priority: random.pick(&[Priority::Foreground, Priority::Foreground, Priority::Background]),
    };
    let (expected, reason) = plain_reply(schedule.model.seed, vocab_size, &request);
    schedule.told.push(request.prompt.iter().chain(&expected.tokens).copied().collect());
    (request, expected, reason)
}

/// A reasoning with a budget, an opening of the answer, or both.
fn forcing(random: &mut Random, vocab_size: u32) -> Forcing {
    let tokens = |random: &mut Random, most: u32| -> Vec<TokenId> {
        (0..random.between(0, most)).map(|_| random.between(0, vocab_size - 1)).collect()
    };
    let reasoning = (!random.one_in(3)).then(|| {
        let close = random.between(0, vocab_size - 1);
        let mut closing = tokens(random, 3);
        closing.push(close);
        closing.extend(tokens(random, 2));
        Reasoning {
            close,
            budget: random.pick(&[None, Some(0), Some(1), Some(6), Some(20)]),
            loop_guard: false,
            closing,
        }
    });
    Forcing { reasoning, opening: tokens(random, 9) }
}

struct Client {
    request: Request,
    receiver: Receiver,
    record: ReplyRecord,
    expected: ReplyRecord,
    expected_reason: FinishReason,
}

/// A server's life: from its start to its drain, or to where it was killed.
struct Life {
    model: HistoryModel,
    state: State,
    cache: PrefixCache<HistorySnapshot>,
    /// The one that writes and the one that reads.
    workers: Option<[Worker<SimulatedDisk>; 2]>,
    news: Arc<Mutex<VecDeque<News>>>,
    scratch: Scratch,
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
    let limits = schedule.limits.checked(&schedule.model.limits).map_err(|error| error.to_string())?;
    let mut report = Report::default();
    let mut next_id = 0;
    loop {
        let mut life = Life::begin(&schedule, limits, cache_fault);
        let mut clients = BTreeMap::new();
        let ending = life.run(&mut schedule, &mut clients, &mut next_id, &mut report)?;
        life.count(&mut report);
        if !matches!(ending, Ending::Killed) && life.model.held_slots() > 0 {
            return Err(format!("{} slots are still held when nothing runs", life.model.held_slots()));
        }
        for (id, mut client) in clients {
            let mut batch = Batch::default();
            while client.receiver.try_receive(&mut batch) {
                client.record.push(&batch);
            }
            judge(id, &client, matches!(ending, Ending::Killed), &mut report)?;
        }
        if matches!(ending, Ending::Over) {
            break;
        }
        report.restarts += 1;
        schedule.restarts -= 1;
    }
    if schedule.disk.as_ref().is_some_and(|disk| !disk.disk.is_other_untouched()) {
        return Err("a file that isn't the engine's was touched".to_string());
    }
    Ok(report)
}

/// How a life ends.
enum Ending {
    /// Nothing more is asked.
    Over,
    /// It was asked to end, finished what was there and wrote the rest to disk.
    Drained,
    /// It ended between two rounds, and the disk with it.
    Killed,
}

impl Life {
    fn begin(schedule: &Schedule, limits: EngineLimits, fault: CacheFault) -> Life {
        let model = HistoryModel::new(schedule.model.clone());
        let mut state = State::new(limits, &model.limits());
        state.keeping = prefixes::rules_for(&model, &limits);
        let mut cache = prefixes::cache_for(&model, &limits).with_fault(fault);
        let news = Arc::new(Mutex::new(VecDeque::new()));
        let mut workers = None;
        if let Some(disk) = schedule.disk.as_ref().filter(|_| state.keeping.is_on) {
            let identity = DiskIdentity::of(&["simulated"]);
            let opened = Disk::new(disk.disk.clone(), disk.limits, identity, Arc::new(|_| {}));
            let mut opened = opened.expect("the simulated directory can be listed");
            if fault == CacheFault::TrustsFiles {
                opened = opened.trusting_all();
            }
            let sink = news.clone();
            let (mut shelf, of_shelf) = Shelf::new(opened, Arc::new(move |news| lock(&sink).push_back(news)));
            if fault == CacheFault::ShiftsPages {
                shelf = shelf.shifting_pages();
            }
            cache.shelf = Some(shelf);
            workers = Some(of_shelf);
        }
        Life { model, state, cache, workers, news, scratch: Scratch::default() }
    }

    fn run(
        &mut self,
        schedule: &mut Schedule,
        clients: &mut BTreeMap<RequestId, Client>,
        next_id: &mut u64,
        report: &mut Report,
    ) -> Result<Ending, String> {
        let ends_at = (schedule.restarts > 0).then(|| schedule.random.between(1, 200));
        let is_killed = schedule.random.one_in(2);
        let mut batch = Batch::default();
        for round in 0.. {
            if round > ROUNDS_MAX {
                return Err(format!("{ROUNDS_MAX} rounds and no end"));
            }
            let is_ending = ends_at.is_some_and(|end| round >= end);
            if is_ending && is_killed {
                schedule.disk.iter().for_each(|disk| disk.disk.crash());
                return Ok(Ending::Killed);
            }
            if !is_ending {
                self.arrive(schedule, clients, next_id);
            }
            let is_lost = match self.round(schedule) {
                Ok(Busy::Worked) => {
                    count_round(report, &self.scratch);
                    false
                }
                Ok(Busy::Idle) => {
                    schedule.clock.advance(schedule.idle_step);
                    false
                }
                Err(_) => true,
            };
            self.check(schedule)?;
            for client in clients.values_mut() {
                let is_reading = schedule.random.one_in(schedule.read_every);
                if is_reading && client.record.finished.is_none() && client.receiver.try_receive(&mut batch) {
                    client.record.push(&batch);
                }
            }
            let is_over = is_lost || (*next_id == u64::from(schedule.request_count) && self.state.is_idle());
            if is_over && schedule.restarts == 0 {
                return Ok(Ending::Over);
            }
            if is_lost || (self.state.is_idle() && (is_over || is_ending)) {
                self.drain(schedule)?;
                return Ok(Ending::Drained);
            }
        }
        unreachable!("the rounds above have no end but the ones inside")
    }

    /// A request may come, and one may be cancelled.
    fn arrive(&mut self, schedule: &mut Schedule, clients: &mut BTreeMap<RequestId, Client>, next_id: &mut u64) {
        let (state, limits) = (&mut self.state, schedule.limits);
        let can_submit = state.queue.len() < limits.queue as usize || state.slots.free_count() > 0;
        if *next_id < u64::from(schedule.request_count) && can_submit && schedule.random.one_in(schedule.arrival_every)
        {
            let id = RequestId(*next_id);
            *next_id += 1;
            let (request, expected, expected_reason) = request(schedule);
            let (sender, receiver) = channel::channel(limits.unread_tokens, limits.unread_time);
            let waiting = Waiting { id, request: request.clone(), sender, submitted: schedule.clock.now() };
            commit::enqueue(state, waiting);
            commit::admit(state, schedule.clock.now());
            let record = ReplyRecord::default();
            clients.insert(id, Client { request, receiver, record, expected, expected_reason });
        }
        if schedule.cancel_every > 0 && *next_id > 0 && schedule.random.one_in(schedule.cancel_every) {
            let id = RequestId(schedule.random.roll() % *next_id);
            commit::cancel(state, id, schedule.clock.now());
            release(state, &mut self.model, &mut self.cache);
        }
    }

    /// One round, and as much of the disk's work as the schedule says.
    fn round(&mut self, schedule: &mut Schedule) -> Result<Busy, crate::round::DeviceLost> {
        if let (Some(disk), Some(workers)) = (&schedule.disk, &mut self.workers) {
            let steps = if disk.steps_max == 0 { 0 } else { schedule.random.between(0, disk.steps_max) };
            for _ in 0..steps {
                workers[schedule.random.between(0, 1) as usize].step();
            }
            if disk.meddle_every > 0 && schedule.random.one_in(disk.meddle_every) {
                disk.disk.meddle();
            }
            self.hear(schedule.clock.now());
            if self.state.is_idle() {
                self.cache.write_behind(&mut self.model, 3);
            }
        }
        run_round(&mut self.state, &mut self.model, &schedule.clock, &mut self.scratch, &mut self.cache)
    }

    fn hear(&mut self, now: Time) {
        loop {
            let Some(news) = lock(&self.news).pop_front() else { return };
            prefixes::hear(&self.state, &mut self.model, &mut self.cache, news, now);
        }
    }

    /// What a server does when it is asked to end: everything that is kept goes to disk.
    fn drain(&mut self, schedule: &Schedule) -> Result<(), String> {
        for step in 0.. {
            if step > ROUNDS_MAX {
                return Err("the disk's worker never closed".to_string());
            }
            let Some(shelf) = self.cache.shelf.as_mut().filter(|shelf| !shelf.is_closed()) else { return Ok(()) };
            if !shelf.is_writing() {
                shelf.close();
            }
            self.cache.write_behind(&mut self.model, u32::MAX);
            self.workers.iter_mut().flatten().for_each(|worker| while worker.step() {});
            self.hear(schedule.clock.now());
            self.check(schedule)?;
        }
        Ok(())
    }

    /// Every page is free, held by a slot, by a kept prefix or for the disk, and none is lost; the disk's budget holds.
    fn check(&self, schedule: &Schedule) -> Result<(), String> {
        self.cache.check();
        let pages = self.model.pages();
        let mut is_held = vec![false; pages.total as usize];
        let mut of_disk = Vec::new();
        if let Some(shelf) = &self.cache.shelf {
            shelf.check();
            shelf.held_pages(&self.model, &mut of_disk);
        }
        let all = self.model.slot_pages().chain(self.cache.held_pages()).chain(of_disk);
        all.for_each(|page| is_held[page as usize] = true);
        let held = is_held.iter().filter(|is_held| **is_held).count() as u32;
        if held + pages.free != pages.total {
            return Err(format!("{held} pages are held and {} free of {}", pages.free, pages.total));
        }
        let Some(disk) = schedule.disk.as_ref().filter(|disk| disk.meddle_every == 0 && disk.fail_every == 0) else {
            return Ok(());
        };
        let bytes = disk.disk.own_bytes();
        let room = disk.limits.bytes.min(disk.capacity.saturating_sub(disk.limits.min_free_bytes));
        match bytes > room {
            true => Err(format!("{bytes} bytes are on a disk that has room for {room}")),
            false => Ok(()),
        }
    }

    fn count(&self, report: &mut Report) {
        let stats = &self.state.stats;
        report.rounds += stats.rounds;
        report.evictions += self.cache.evictions();
        report.page_waits += stats.page_waits;
        report.accepted += stats.accepted;
        report.rejected += stats.drafted - stats.accepted;
        let copies = &stats.drafts[DraftSource::Copy as usize];
        report.copies_accepted += copies.accepted;
        report.copies_rejected += copies.drafted - copies.accepted;
        report.known_rows += stats.known_rows;
        report.pauses += stats.pauses;
        let disk = self.cache.shelf.as_ref().map(Shelf::stats).unwrap_or_default();
        report.disk_writes += disk.writes;
        report.disk_hits += disk.hits;
        report.disk_evictions += disk.evictions;
        report.disk_failures += disk.write_failures;
        report.disk_refusals += disk.refused.iter().sum::<u64>();
    }
}

fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
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

fn judge(id: RequestId, client: &Client, is_killed: bool, report: &mut Report) -> Result<(), String> {
    let Client { request, record, expected, expected_reason, .. } = client;
    let Some(Finished { reason, stats }) = &record.finished else {
        return match is_killed && expected.tokens.starts_with(&record.tokens) {
            true => Ok(()),
            false => Err(format!("request {} has no ending, or other tokens than alone", id.0)),
        };
    };
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
        if reason != expected_reason {
            return differs("endings", reason, expected_reason);
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
