//! The quick half of the disk tier: knows which prefix is in which file, decides what is written, read and let go, and
//! hands pieces to the worker as fast as it takes them. Never waits.
//!
//! A file that continues another's tokens holds only the pages that the other lacks. Such a base can't go before those that
//! build on it; what its bits are, its tokens say.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};

use tf_text::TokenId;

use super::format::{Checksum, FileId, Header};
use super::worker::{Disk, Found, LoadId, News, Order, Part, Sink, Worker};
use super::{CHAIN_MAX, DiskIdentity, DiskStats, Files, LOAD_AHEAD, LOADS_MAX, PIECE_BYTES, Refusal};
use crate::clock::Time;
use crate::model::{Model, PageCounts};
use crate::prefix_cache::{USES_MAX, common};
use crate::request::Position;

/// Prefixes that may wait to be written; more are left to the next time that they are kept.
const UNWRITTEN_MAX: usize = 4096;
/// States that stay for the disk's sake after memory let them go.
const LEAVING_MAX: usize = 4;
/// What a file takes in memory beside its tokens, at most: its entries, and what maps and allocator leave unused.
const ENTRY_BYTES: u64 = 1536;

/// What a file of so many tokens takes in memory while it is on disk.
fn entry_bytes(token_count: usize) -> u64 {
    ENTRY_BYTES + (token_count * size_of::<TokenId>()) as u64
}

#[derive(Clone, Debug)]
struct Stored {
    id: FileId,
    header: Header,
    /// `None` while it is being written.
    checksum: Option<Checksum>,
    /// Files that it builds on.
    depth: u32,
    /// Files that build on it.
    builders: u32,
    last_use: u64,
    uses: u32,
}

/// A file that is being written.
struct Job<S> {
    id: FileId,
    snapshot: S,
    header: Header,
    next_page: u32,
}

struct Load<S> {
    id: LoadId,
    tokens: Arc<[TokenId]>,
    resumes_from: Position,
    file: FileId,
    parts: Vec<Part>,
    is_asked: bool,
    /// Something in memory that has the first pages, and how many are taken from it.
    base: Option<(S, u32)>,
    snapshot: Option<S>,
    /// When there was last news of it.
    since: Time,
}

/// Whether a file could begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beginning {
    Begun,
    NotWorth,
    /// When the worker has come further.
    Later,
}

/// Something on disk that a prompt could resume from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub tokens: Arc<[TokenId]>,
    pub position: Position,
}

/// A state that was read, complete and checked.
#[derive(Clone, Debug)]
pub struct Arrival<S> {
    pub tokens: Arc<[TokenId]>,
    pub snapshot: S,
}

/// The way to a worker. New pieces are made only when none waits.
struct Orders {
    sender: SyncSender<Order>,
    /// What the worker had no room for yet.
    waiting: VecDeque<Order>,
}

struct WorkerGone;

impl Orders {
    /// Whether everything was handed over.
    fn hand_over(&mut self) -> Result<bool, WorkerGone> {
        while let Some(order) = self.waiting.pop_front() {
            match self.sender.try_send(order) {
                Ok(()) => {}
                Err(TrySendError::Full(order)) => {
                    self.waiting.push_front(order);
                    return Ok(false);
                }
                Err(TrySendError::Disconnected(_)) => return Err(WorkerGone),
            }
        }
        Ok(true)
    }
}

/// What is on disk. See the module's text.
pub struct Shelf<S> {
    writes: Orders,
    reads: Orders,
    budget: u64,
    index_budget: u64,
    index_bytes: u64,
    /// What the disk is thought to have room for, where it once had no more.
    room: u64,
    /// The last write found the disk full.
    is_full: bool,
    identity: DiskIdentity,
    files: BTreeMap<Arc<[TokenId]>, Stored>,
    tokens_of: HashMap<FileId, Arc<[TokenId]>>,
    stale: Vec<(FileId, u64)>,
    bytes: u64,
    next_id: u64,
    next_load: u64,
    searches: u64,
    /// Each with the searches there had been when it was kept: how recent it is, however late it is written.
    unwritten: VecDeque<(Arc<[TokenId]>, u64)>,
    leaving: VecDeque<(Arc<[TokenId]>, u64, S)>,
    job: Option<Job<S>>,
    loads: Vec<Load<S>>,
    arrived: Vec<Arrival<S>>,
    stats: DiskStats,
    is_closed: bool,
    /// A planted defect: pages are put one place off.
    shifts_pages: bool,
}

impl<S: Clone> Shelf<S> {
    /// What `disk` holds, and the workers that serve it. `sink` gets their news.
    pub fn new<F: Files>(mut disk: Disk<F>, sink: Sink) -> (Self, [Worker<F>; 2]) {
        let (found, stale) = (std::mem::take(&mut disk.found), std::mem::take(&mut disk.stale));
        let (limits, identity, next_id) = (disk.limits, disk.identity, disk.next_id);
        let stats = DiskStats { refused: disk.refused, ..DiskStats::default() };
        let ([writes, reads], workers) = disk.connect(&sink);
        let mut shelf = Shelf {
            writes: Orders { sender: writes, waiting: VecDeque::new() },
            reads: Orders { sender: reads, waiting: VecDeque::new() },
            budget: limits.bytes,
            index_budget: limits.index_bytes,
            index_bytes: 0,
            room: u64::MAX,
            is_full: false,
            identity,
            files: BTreeMap::new(),
            tokens_of: HashMap::new(),
            bytes: stale.iter().map(|(_, bytes)| bytes).sum(),
            stale,
            next_id,
            next_load: 0,
            searches: found.len() as u64,
            unwritten: VecDeque::new(),
            leaving: VecDeque::new(),
            job: None,
            loads: Vec::new(),
            arrived: Vec::new(),
            stats,
            is_closed: false,
            shifts_pages: false,
        };
        for (age, Found { id, header, checksum }) in found.into_iter().enumerate() {
            shelf.add(id, header, Some(checksum), age as u64);
        }
        // A smaller budget than the last time.
        shelf.make_room(0, 0, f64::INFINITY);
        (shelf, workers)
    }

    /// With a planted defect, for the tests of the tests.
    pub fn shifting_pages(mut self) -> Self {
        self.shifts_pages = true;
        self
    }

    /// What is there and what happened so far.
    pub fn stats(&self) -> DiskStats {
        DiskStats {
            files: self.files.len() as u64,
            bytes: self.bytes,
            budget_bytes: self.budget,
            index_bytes: self.index_bytes,
            ..self.stats
        }
    }

    fn add(&mut self, id: FileId, header: Header, checksum: Option<Checksum>, last_use: u64) {
        self.bytes += header.file_bytes();
        self.index_bytes += entry_bytes(header.tokens.len());
        let base = if header.first_page > 0 { self.base_of(&header) } else { None };
        let depth = base.map_or(0, |base| {
            base.builders += 1;
            base.depth + 1
        });
        let tokens = header.tokens.clone();
        self.tokens_of.insert(id, tokens.clone());
        self.files.insert(tokens, Stored { id, header, checksum, depth, builders: 0, last_use, uses: 1 });
    }

    fn base_of(&mut self, header: &Header) -> Option<&mut Stored> {
        let tokens = self.tokens_of.get(&header.base?)?;
        self.files.get_mut(tokens)
    }

    /// Takes a file out of the list and has it removed.
    fn remove(&mut self, tokens: &Arc<[TokenId]>) {
        let Some(stored) = self.files.remove(tokens) else { return };
        self.bytes -= stored.header.file_bytes();
        self.index_bytes -= entry_bytes(tokens.len());
        self.tokens_of.remove(&stored.id);
        if stored.header.first_page > 0
            && let Some(base) = self.base_of(&stored.header)
        {
            base.builders -= 1;
        }
        if self.job.as_ref().is_some_and(|job| job.id == stored.id) {
            self.job = None;
            self.writes.waiting.push_back(Order::Abandon);
        }
        self.writes.waiting.push_back(Order::Remove(stored.id));
    }

    /// Takes a file and all that build on it out of the list.
    fn remove_with_builders(&mut self, id: FileId) {
        let Some(tokens) = self.tokens_of.get(&id).cloned() else { return };
        while let Some(builder) =
            (self.files.values()).find(|stored| stored.header.first_page > 0 && stored.header.base == Some(id))
        {
            let builder = builder.id;
            self.remove_with_builders(builder);
        }
        self.remove(&tokens);
    }

    /// Leading tokens that some file has in common with `prompt`.
    pub fn matched(&self, prompt: &[TokenId]) -> Position {
        self.nearest(prompt).map_or(0, |(_, matched)| matched) as Position
    }

    /// The file with the most leading tokens of `tokens`. It is one of the two neighbours in order.
    fn nearest(&self, tokens: &[TokenId]) -> Option<(&Stored, usize)> {
        let before = self.files.range::<[TokenId], _>((Bound::Unbounded, Bound::Included(tokens))).next_back();
        let after = self.files.range::<[TokenId], _>((Bound::Excluded(tokens), Bound::Unbounded)).next();
        let both = before.into_iter().chain(after).map(|(key, stored)| (stored, common(key, tokens)));
        both.max_by_key(|(_, matched)| *matched)
    }

    /// The longest prefix on disk of more than `least` and at most `most` tokens that serves a prompt of this length.
    pub fn find(&mut self, prompt: &[TokenId], least: Position, most: Position) -> Option<Candidate> {
        self.searches += 1;
        let mut end = (most as usize).min(prompt.len());
        while end > least as usize {
            let range = (Bound::Unbounded, Bound::Included(&prompt[..end]));
            let (key, stored) = self.files.range::<[TokenId], _>(range).next_back()?;
            if !prompt[..end].starts_with(key) {
                end = common(key, &prompt[..end]);
                continue;
            }
            if key.len() <= least as usize {
                return None;
            }
            if stored.checksum.is_some() && stored.header.resumes_from as usize <= prompt.len() {
                return Some(Candidate { tokens: key.clone(), position: key.len() as Position });
            }
            end = key.len() - 1;
        }
        None
    }

    /// Begins to read a prefix, or names the load that already does. `base`: a state in memory and how many whole pages
    /// of the prefix it has.
    pub fn load(&mut self, candidate: &Candidate, base: Option<(S, u32)>, now: Time) -> Option<LoadId> {
        if let Some(load) = self.loads.iter().find(|load| load.tokens == candidate.tokens) {
            return Some(load.id);
        }
        let id = LoadId(self.next_load);
        let from = base.as_ref().map_or(0, |(_, pages)| *pages);
        let target = self.files.get(&candidate.tokens)?;
        let (file, resumes_from) = (target.id, target.header.resumes_from);
        let mut parts = Vec::new();
        let mut stored = target;
        let mut end = target.header.pages_end();
        loop {
            let first = stored.header.first_page.max(from).min(end);
            let wants_state = parts.is_empty();
            parts.push(Part { id: stored.id, checksum: stored.checksum?, wants_state, pages: first..end });
            end = first;
            if stored.header.first_page <= from {
                break;
            }
            stored = self.files.get(self.tokens_of.get(&stored.header.base?)?)?;
        }
        self.next_load += 1;
        let tokens = candidate.tokens.clone();
        self.loads.push(Load {
            id,
            tokens,
            resumes_from,
            file,
            parts,
            is_asked: false,
            base,
            snapshot: None,
            since: now,
        });
        self.ask_for_loads();
        Some(id)
    }

    fn ask_for_loads(&mut self) {
        let asked = self.loads.iter().filter(|load| load.is_asked).count();
        for load in self.loads.iter_mut().filter(|load| !load.is_asked).take(LOADS_MAX - asked.min(LOADS_MAX)) {
            load.is_asked = true;
            self.reads.waiting.push_back(Order::Load(load.id, std::mem::take(&mut load.parts)));
            self.reads.waiting.extend((1..LOAD_AHEAD).map(|_| Order::More(load.id)));
        }
        // At once, so that the reader works during the round that follows.
        if self.reads.hand_over().is_err() {
            self.break_down();
        }
    }

    /// Whether this load may still bring something.
    pub fn is_loading(&self, id: LoadId) -> bool {
        self.loads.iter().any(|load| load.id == id)
    }

    /// States that have come in since the last call.
    pub fn take_arrived(&mut self) -> Vec<Arrival<S>> {
        std::mem::take(&mut self.arrived)
    }

    /// A prompt resumed from what was read.
    pub fn count_hit(&mut self, tokens: &[TokenId]) {
        self.stats.hits += 1;
        if let Some(stored) = self.files.get_mut(tokens) {
            stored.last_use = self.searches;
            stored.uses = (stored.uses + 1).min(USES_MAX);
        }
    }

    /// Loads without news for too long, or of which nothing came yet, make way: their prompts are computed.
    pub fn give_up_loads(&mut self, is_late: impl Fn(Time) -> bool) {
        let (late, on_time) = std::mem::take(&mut self.loads).into_iter().partition(|load| is_late(load.since));
        self.loads = on_time;
        self.forget(late);
        self.ask_for_loads();
    }

    fn forget(&mut self, loads: Vec<Load<S>>) {
        self.reads.waiting.extend(loads.into_iter().filter(|load| load.is_asked).map(|load| Order::Forget(load.id)));
    }

    /// Lets everything go that holds pages: what is being written, what waits to be, and what is being read.
    pub fn let_go_of_pages(&mut self) -> bool {
        let held = self.job.is_some() || !self.leaving.is_empty() || !self.loads.is_empty();
        self.leaving.clear();
        if let Some(tokens) = self.job.as_ref().map(|job| job.header.tokens.clone()) {
            self.remove(&tokens);
            self.note_kept(&tokens);
        }
        self.give_up_loads(|_| true);
        held
    }

    /// A state of this prefix is kept in memory.
    pub fn note_kept(&mut self, tokens: &Arc<[TokenId]>) {
        if self.unwritten.len() < UNWRITTEN_MAX && self.unwritten.iter().all(|(other, _)| other != tokens) {
            self.unwritten.push_back((tokens.clone(), self.searches));
        }
    }

    /// Memory lets this state go.
    pub fn note_evicted(&mut self, tokens: &Arc<[TokenId]>, snapshot: S) {
        let Some(place) = self.unwritten.iter().position(|(other, _)| other == tokens) else { return };
        let kept = self.unwritten.remove(place);
        if let Some((tokens, kept)) = kept.filter(|_| self.leaving.len() < LEAVING_MAX) {
            self.leaving.push_back((tokens, kept, snapshot));
        }
    }

    /// Whether there is something to hand to the worker.
    pub fn has_work(&self) -> bool {
        !self.writes.waiting.is_empty()
            || !self.reads.waiting.is_empty()
            || self.job.is_some()
            || !self.leaving.is_empty()
            || !self.unwritten.is_empty()
    }

    /// Whether something is still to be written, handed over or not.
    pub fn is_writing(&self) -> bool {
        self.has_work() || self.files.values().any(|stored| stored.checksum.is_none())
    }

    /// Hands over what the worker has room for, at most `pieces_max` new pieces. `kept`: a state in memory.
    pub fn advance<M: Model<Snapshot = S>>(
        &mut self,
        model: &mut M,
        kept: impl Fn(&[TokenId]) -> Option<S>,
        pieces_max: u32,
    ) {
        for _ in 0..pieces_max {
            if !self.hand_over() || (self.job.is_none() && !self.begin_next(model, &kept)) {
                return;
            }
            self.next_piece(model);
        }
        self.hand_over();
    }

    /// Moves orders to the workers; false while the one that writes has no room for more.
    fn hand_over(&mut self) -> bool {
        match (self.reads.hand_over(), self.writes.hand_over()) {
            (Ok(_), Ok(is_all)) => is_all,
            (Err(WorkerGone), _) | (_, Err(WorkerGone)) => {
                self.break_down();
                false
            }
        }
    }

    /// A worker is gone; memory goes on alone.
    fn break_down(&mut self) {
        self.writes.waiting.clear();
        self.reads.waiting.clear();
        self.unwritten.clear();
        self.leaving.clear();
        self.job = None;
        self.loads.clear();
        self.files.clear();
        self.tokens_of.clear();
        self.bytes = 0;
        self.is_closed = true;
    }

    /// Starts the next file that is worth writing; false when there is none.
    fn begin_next<M: Model<Snapshot = S>>(&mut self, model: &mut M, kept: &impl Fn(&[TokenId]) -> Option<S>) -> bool {
        while !self.is_closed {
            let (tokens, since, snapshot, is_leaving) =
                if let Some((tokens, since, snapshot)) = self.leaving.pop_front() {
                    (tokens, since, snapshot, true)
                } else if let Some((tokens, since)) = self.unwritten.pop_front() {
                    match kept(&tokens) {
                        Some(snapshot) => (tokens, since, snapshot, false),
                        None => continue,
                    }
                } else {
                    return false;
                };
            match self.begin(&tokens, since, &snapshot, model) {
                Beginning::Begun => return true,
                Beginning::NotWorth => {}
                Beginning::Later => {
                    match is_leaving {
                        true => self.leaving.push_front((tokens, since, snapshot)),
                        false => self.unwritten.push_front((tokens, since)),
                    }
                    return false;
                }
            }
        }
        false
    }

    fn begin<M: Model<Snapshot = S>>(
        &mut self,
        tokens: &Arc<[TokenId]>,
        since: u64,
        snapshot: &S,
        model: &mut M,
    ) -> Beginning {
        let Some(resumes_from) = resumes_from(model, snapshot, tokens.len() as Position) else {
            return Beginning::NotWorth;
        };
        if let Some(stored) = self.files.get(tokens) {
            if stored.header.resumes_from <= resumes_from || stored.builders > 0 || stored.checksum.is_none() {
                return Beginning::NotWorth;
            }
            self.remove(tokens);
        }
        let mut pages = Vec::new();
        model.snapshot_pages(snapshot, &mut pages);
        let PageCounts { positions, bytes: page_bytes, .. } = model.pages();
        let mut state = Vec::new();
        model.encode(snapshot, &mut state);
        let (Ok(page_bytes), Ok(state_bytes)) = (u32::try_from(page_bytes), u32::try_from(state.len())) else {
            return Beginning::NotWorth;
        };
        let (base, first_page) = self.base_for(tokens, positions).map_or((None, 0), |(id, pages)| (Some(id), pages));
        let header = Header {
            identity: self.identity,
            tokens: tokens.clone(),
            base,
            first_page,
            page_count: pages.len() as u32 - first_page,
            page_bytes,
            page_positions: positions,
            state_bytes,
            resumes_from,
        };
        // The base must not go to make room for what builds on it.
        if let Some(stored) = self.base_of(&header) {
            stored.builders += 1;
        }
        let index = entry_bytes(tokens.len());
        let room = self.make_room(header.file_bytes(), index, self.value(tokens.len(), 1, since));
        if let Some(stored) = self.base_of(&header) {
            stored.builders -= 1;
        }
        if room != Beginning::Begun {
            return room;
        }
        let id = FileId(self.next_id);
        self.next_id += 1;
        self.add(id, header.clone(), None, since);
        self.writes.waiting.extend([Order::Begin(id, header.clone()), Order::Piece(state)]);
        self.job = Some(Job { id, snapshot: snapshot.clone(), next_page: header.first_page, header });
        Beginning::Begun
    }

    /// The file that has the most whole pages of these tokens, and how many.
    fn base_for(&self, tokens: &[TokenId], page_positions: u32) -> Option<(FileId, u32)> {
        let (mut stored, matched) = self.nearest(tokens)?;
        let whole = (matched as u32 / page_positions).min(stored.header.pages_end());
        // Not a file that merely builds on the one that has them.
        while stored.header.first_page >= whole.max(1) {
            stored = self.files.get(self.tokens_of.get(&stored.header.base?)?)?;
        }
        (whole > 0 && stored.depth < CHAIN_MAX).then_some((stored.id, whole))
    }

    fn next_piece<M: Model<Snapshot = S>>(&mut self, model: &mut M) {
        let Some(job) = &mut self.job else { return };
        let most = (PIECE_BYTES / u64::from(job.header.page_bytes.max(1))).clamp(1, u64::from(u32::MAX)) as u32;
        let end = job.next_page.saturating_add(most).min(job.header.pages_end());
        if end > job.next_page {
            let mut bytes = Vec::with_capacity((end - job.next_page) as usize * job.header.page_bytes as usize);
            if !model.read_pages(&job.snapshot, job.next_page..end, &mut bytes) {
                let tokens = job.header.tokens.clone();
                self.remove(&tokens);
                return;
            }
            self.writes.waiting.push_back(Order::Piece(bytes));
            job.next_page = end;
        }
        if job.next_page == job.header.pages_end() {
            self.writes.waiting.push_back(Order::End);
            self.job = None;
        }
    }

    /// Lets the least valuable files go until `bytes` more fit, and `index` more in memory. Not where that would take
    /// something worth more than `value`, or everything isn't enough; later where the least valuable one isn't written
    /// yet.
    fn make_room(&mut self, bytes: u64, index: u64, value: f64) -> Beginning {
        if index > self.index_budget {
            return Beginning::NotWorth;
        }
        let budget = self.budget.min(self.room);
        if bytes > budget {
            // Nothing is written now, so that only this finds out whether the disk has room again.
            self.room = self.room.saturating_add(bytes / 8);
            return Beginning::NotWorth;
        }
        while self.bytes + bytes > budget || self.index_bytes + index > self.index_budget {
            if self.bytes + bytes > budget
                && let Some((id, stale)) = self.stale.pop()
            {
                self.bytes -= stale;
                self.writes.waiting.push_back(Order::Remove(id));
                continue;
            }
            let Some((victim, _)) = self.least_valuable().filter(|(_, lowest)| *lowest <= value) else {
                return Beginning::NotWorth;
            };
            if self.files.get(&victim).is_some_and(|stored| stored.checksum.is_none()) {
                return Beginning::Later;
            }
            self.stats.evictions += 1;
            self.remove(&victim);
        }
        Beginning::Begun
    }

    fn value(&self, token_count: usize, uses: u32, last_use: u64) -> f64 {
        let age = self.searches.saturating_sub(last_use) as f64;
        token_count as f64 * f64::from(uses) / (1.0 + age)
    }

    /// Of the files that nothing builds on, the one that costs least to lose: rows, times how likely they are wanted.
    fn least_valuable(&self) -> Option<(Arc<[TokenId]>, f64)> {
        let loose = self.files.iter().filter(|(_, stored)| stored.builders == 0);
        let idle = loose.filter(|(_, stored)| self.loads.iter().all(|load| load.file != stored.id));
        let value = |stored: &Stored| self.value(stored.header.tokens.len(), stored.uses, stored.last_use);
        let valued = idle.map(|(tokens, stored)| (tokens, value(stored), stored.id));
        let least = valued.min_by(|(_, one, first), (_, other, second)| one.total_cmp(other).then(first.cmp(second)));
        least.map(|(tokens, value, _)| (tokens.clone(), value))
    }

    /// Takes in what the worker says. `make_room` frees so many pages if it can.
    pub fn hear<M: Model<Snapshot = S>>(
        &mut self,
        news: News,
        model: &mut M,
        now: Time,
        make_room: impl FnOnce(&mut M, u32) -> bool,
    ) {
        match news {
            News::Room => {}
            News::Closed => self.is_closed = true,
            News::Written(id, checksum) => {
                self.stats.writes += 1;
                let stored = self.tokens_of.get(&id).and_then(|tokens| self.files.get_mut(tokens));
                if let Some(stored) = stored {
                    stored.checksum = Some(checksum);
                    // Others may have left the disk: some room is tried again with each file.
                    self.room = self.room.saturating_add(stored.header.file_bytes() / 8);
                }
                self.is_full = false;
            }
            News::NotWritten(id, held_by_others) => self.not_written(id, held_by_others),
            News::State(id, bytes) => {
                let Some(load) = self.loads.iter_mut().find(|load| load.id == id) else { return };
                load.since = now;
                let base = load.base.as_ref().map(|(base, pages)| (base, *pages));
                let fresh =
                    (load.tokens.len() as u32).div_ceil(model.pages().positions) - base.map_or(0, |(_, pages)| pages);
                let has_room = make_room(model, fresh);
                load.snapshot = if has_room { model.decode(&bytes, base).ok() } else { None };
                match load.snapshot.is_some() {
                    true => self.reads.waiting.push_back(Order::More(id)),
                    false => self.end_load(id),
                }
            }
            News::Pages(id, first, bytes) => {
                let Some(load) = self.loads.iter_mut().find(|load| load.id == id) else { return };
                load.since = now;
                let first = first - u32::from(self.shifts_pages && first > 0);
                let written = load.snapshot.as_ref().is_some_and(|snapshot| model.write_pages(snapshot, first, &bytes));
                match written {
                    true => self.reads.waiting.push_back(Order::More(id)),
                    false => self.end_load(id),
                }
            }
            News::Loaded(id) => self.arrive(id, model),
            News::NotLoaded(id, file, reason) => {
                self.stats.refused[reason.index()] += 1;
                self.end_load(id);
                match reason {
                    // It may be readable the next time, or be somebody else's by now.
                    Refusal::Unreadable | Refusal::Foreign => self.forget_file(file),
                    Refusal::Stale | Refusal::Damaged | Refusal::Orphan => self.remove_with_builders(file),
                }
            }
        }
    }

    /// A full disk makes room as a smaller budget would; the prefix gets one more try.
    fn not_written(&mut self, id: FileId, held_by_others: Option<u64>) {
        self.stats.write_failures += 1;
        let tokens = self.tokens_of.get(&id).cloned();
        self.remove_with_builders(id);
        let Some(held_by_others) = held_by_others else { return };
        // Where the files here make up less than what is missing, letting them go would make no room.
        if held_by_others <= self.bytes {
            self.room = self.bytes;
        }
        if let Some(tokens) = tokens.filter(|_| !self.is_full) {
            self.note_kept(&tokens);
        }
        self.is_full = true;
    }

    /// Takes a file out of the list and leaves it where it is; those that build on it go.
    fn forget_file(&mut self, id: FileId) {
        self.remove_with_builders(id);
        self.writes.waiting.retain(|order| !matches!(order, Order::Remove(removed) if *removed == id));
    }

    fn end_load(&mut self, id: LoadId) {
        let (ended, others) = std::mem::take(&mut self.loads).into_iter().partition(|load| load.id == id);
        self.loads = others;
        self.forget(ended);
        self.ask_for_loads();
    }

    fn arrive<M: Model<Snapshot = S>>(&mut self, id: LoadId, model: &M) {
        let Some(place) = self.loads.iter().position(|load| load.id == id) else { return };
        let load = self.loads.remove(place);
        if let Some(snapshot) = load.snapshot
            && model.can_resume(&snapshot, load.resumes_from)
        {
            self.stats.loads += 1;
            self.arrived.push(Arrival { tokens: load.tokens, snapshot });
        }
        self.ask_for_loads();
    }

    /// Tells the worker that nothing follows; [`Shelf::is_closed`] once all is done.
    pub fn close(&mut self) {
        self.writes.waiting.push_back(Order::Close);
    }

    /// Whether the worker has done everything, or is gone.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Appends the pages that are held for the disk's sake.
    pub fn held_pages<M: Model<Snapshot = S>>(&self, model: &M, pages: &mut Vec<u32>) {
        let loads =
            self.loads.iter().flat_map(|load| load.snapshot.iter().chain(load.base.iter().map(|(base, _)| base)));
        let all = (self.job.iter().map(|job| &job.snapshot))
            .chain(self.leaving.iter().map(|(_, _, snapshot)| snapshot))
            .chain(self.arrived.iter().map(|arrival| &arrival.snapshot))
            .chain(loads);
        for snapshot in all {
            model.snapshot_pages(snapshot, pages);
        }
    }

    /// Counts everything again.
    ///
    /// # Panics
    /// When a figure is wrong or the budget doesn't hold.
    pub fn check(&self) {
        let mut bytes: u64 = self.stale.iter().map(|(_, bytes)| bytes).sum();
        let mut builders: HashMap<FileId, u32> = HashMap::new();
        for stored in self.files.values() {
            bytes += stored.header.file_bytes();
            if let Some(base) = stored.header.base.filter(|_| stored.header.first_page > 0) {
                assert!(self.tokens_of.contains_key(&base), "a file whose base is gone");
                *builders.entry(base).or_default() += 1;
            }
        }
        assert_eq!(self.files.len(), self.tokens_of.len(), "a file without a name, or a name without a file");
        for stored in self.files.values() {
            let counted = builders.get(&stored.id).copied().unwrap_or(0);
            assert_eq!(stored.builders, counted, "files that build on {} are miscounted", stored.id.name());
        }
        assert_eq!(self.bytes, bytes, "bytes on disk are miscounted");
        assert!(self.bytes <= self.budget, "the disk's budget is exceeded");
        let index: u64 = self.files.keys().map(|tokens| entry_bytes(tokens.len())).sum();
        assert_eq!(self.index_bytes, index, "the list's memory is miscounted");
        assert!(index <= self.index_budget, "the list of the files takes more than its memory");
    }
}

/// The shortest prompt that may follow this state; `None` when none may.
fn resumes_from<M: Model>(model: &M, snapshot: &M::Snapshot, position: Position) -> Option<Position> {
    let (mut low, mut high) = (position + 1, model.limits().context);
    if position >= high || !model.can_resume(snapshot, high) {
        return None;
    }
    while low < high {
        let middle = low + (high - low) / 2;
        match model.can_resume(snapshot, middle) {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    Some(low)
}
