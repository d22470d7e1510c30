//! A model whose next token depends, by a hash, on every token before it and on nothing else.
//!
//! One token more or less, or in another place, gives another reply, so any mistake in what the engine feeds, keeps or
//! drops shows at once. The draw is keyed by seed and position. Faults can be planted: each breaks one law, so that a
//! test of that law can prove that it would notice.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tf_text::TokenId;

use crate::clock::VirtualClock;
use crate::model::{DecodeError, PageCounts, SlotIndex, Window};
use crate::model::{DraftRequest, Drafts, Drawn, DrawnRow, ForwardError, Model, ModelLimits, RoundPlan, SequenceView};
use crate::request::{Position, Sampling};
use crate::testing::random::mix;

/// Positions of one page.
pub const PAGE_POSITIONS: u32 = 4;
/// Bytes that a page claims to take.
pub const PAGE_BYTES: u64 = 64;
/// Bytes that a snapshot claims to take beside its pages.
pub const SNAPSHOT_BYTES: u64 = 32;
/// Rows before a prompt's end that this model needs whole; the others may be skipped, and then stay unusable.
pub const HALO: u32 = 10;
/// Rows before a window that it needs whole, whatever its prompt.
pub const WINDOW: u32 = 4;
/// How far before a slot's kept length a snapshot may lie.
pub const SNAPSHOT_REACH: u32 = 3;

/// How good the model's drafter is. A closed set: the laws hold for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drafter {
    /// Proposes what will be drawn.
    Right,
    /// Never does.
    Wrong,
    /// Now and then, and sometimes fewer tokens than it may.
    Mixed,
    /// Every call fails.
    Broken,
}

/// A planted defect. Each breaks the law named with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// L1: rejected rows stay and the next window follows them.
    KeepsRejectedRows,
    /// L1: a row draws the draft that comes next instead of its own token.
    EchoesDrafts,
    /// L1: penalties don't see the tokens of the window itself.
    PenaltiesForgetTheWindow,
    /// L1 and L2: the draw's key counts draws instead of positions.
    DrawsInOrder,
    /// L2: a row's hash depends on how many windows share the round.
    CountsNeighbours,
    /// L2: a slot's next sequence begins with the last one's state.
    ForgetsToRelease,
    /// L4: the first row of a later piece of a prompt sees the cut.
    SeesChunks,
    /// L3: a snapshot at an odd position loses its newest row.
    SnapshotLosesOddRow,
    /// L1: a given token has the log-probability of what would have been drawn.
    ScoresTheDraw,
}

impl Fault {
    pub const ALL: [Fault; 9] = [
        Fault::KeepsRejectedRows,
        Fault::EchoesDrafts,
        Fault::PenaltiesForgetTheWindow,
        Fault::DrawsInOrder,
        Fault::CountsNeighbours,
        Fault::ForgetsToRelease,
        Fault::SeesChunks,
        Fault::SnapshotLosesOddRow,
        Fault::ScoresTheDraw,
    ];
}

/// How a history model is made.
#[derive(Clone, Debug)]
pub struct HistoryOptions {
    pub limits: ModelLimits,
    pub seed: u64,
    pub drafter: Drafter,
    pub fault: Fault,
    /// The clock a forward advances, with the time of a round, of a row, and of a call of the drafter.
    pub clock: Option<(VirtualClock, Duration, Duration, Duration)>,
    /// Forwards that fail, counted from 0.
    pub failures: Vec<u64>,
    /// The forward that loses the device.
    pub lost_at: Option<u64>,
    /// Pages of [`PAGE_POSITIONS`]; `None` is as many as slots and snapshots could want.
    pub pages: Option<u32>,
    /// Replies to follow instead of the hash, one a prompt in the order of first sight; the last token repeats.
    pub scripts: VecDeque<Vec<TokenId>>,
}

impl Default for HistoryOptions {
    fn default() -> Self {
        HistoryOptions {
            limits: ModelLimits { vocab_size: 32, context: 256, slots: 4, round_rows: 64, draft_block: 5 },
            seed: 1,
            drafter: Drafter::Mixed,
            fault: Fault::None,
            clock: None,
            failures: Vec::new(),
            lost_at: None,
            pages: None,
            scripts: VecDeque::new(),
        }
    }
}

/// A page, given back by the last one to hold it.
#[derive(Debug)]
struct Page {
    index: u32,
    free: Arc<Mutex<Vec<u32>>>,
}

impl Drop for Page {
    fn drop(&mut self) {
        lock(&self.free).push(self.index);
    }
}

fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether windows that need rows from `prompt_end - HALO` on may follow `length` positions.
fn can_follow(held_from: Position, length: Position, prompt_end: Position) -> bool {
    let needed = prompt_end.saturating_sub(HALO).max(length.saturating_sub(WINDOW));
    needed >= length || held_from <= needed
}

#[derive(Clone, Debug, Default)]
struct Slot {
    pages: Vec<Arc<Page>>,
    /// The first position from which no row was skipped.
    held_from: Position,
    /// Hash of the history up to and including each position. Longer than `length` while rejected rows are left over.
    hashes: Vec<u64>,
    /// Kept positions.
    length: usize,
    script: Option<Vec<TokenId>>,
}

/// The state of a slot at its kept length. The hashes are what a page's contents stand for.
#[derive(Clone, Debug)]
pub struct HistorySnapshot {
    pages: Vec<Arc<Page>>,
    held_from: Position,
    length: Position,
    hashes: Arc<Mutex<Vec<u64>>>,
    script: Option<Vec<TokenId>>,
}

/// The model. See the module's text.
#[derive(Debug)]
pub struct HistoryModel {
    options: HistoryOptions,
    slots: Vec<Slot>,
    free: Arc<Mutex<Vec<u32>>>,
    page_count: u32,
    forwards: u64,
    draws: u64,
}

/// The hash of a history with one more token.
pub fn extend(seed: u64, history: Option<u64>, token: TokenId) -> u64 {
    mix(history.unwrap_or(seed) ^ mix(u64::from(token) ^ 0x7461_6c65))
}

/// The raw score of `token` after a history.
fn score(hash: u64, token: TokenId) -> i64 {
    (mix(hash ^ u64::from(token).wrapping_mul(0x9e37_79b9)) >> 48) as i64
}

/// The log-probability that the model claims for `token`.
pub fn logprob(hash: u64, token: TokenId) -> f32 {
    (score(hash, token) - 65_536) as f32 / 8192.0
}

/// The draw: a pure function of the history's hash, the settings, the key and the tokens before.
///
/// `key`: the position of the drawn token. `reply`: reply tokens before it.
pub fn draw(
    vocab_size: u32,
    hash: u64,
    sampling: &Sampling,
    key: u64,
    prompt: &[TokenId],
    reply: impl Iterator<Item = TokenId> + Clone,
) -> TokenId {
    let noise_scale = (sampling.temperature * 256.0) as i64;
    let reply_length = reply.clone().count() as u32;
    let mut best: Option<(i64, TokenId)> = None;
    for token in 0..vocab_size {
        let mut value = score(hash, token) * 256;
        for &(biased, bias) in &sampling.logit_bias {
            value += if biased == token { (bias * 262_144.0) as i64 } else { 0 };
        }
        if sampling.needs_history() {
            let count = reply.clone().filter(|&seen| seen == token).count();
            value -= (sampling.frequency_penalty * 4_194_304.0) as i64 * count as i64;
            value -= if count > 0 { (sampling.presence_penalty * 4_194_304.0) as i64 } else { 0 };
            let is_repeated = count > 0 || prompt.contains(&token);
            value -= if is_repeated { ((sampling.repetition_penalty - 1.0) * 4_194_304.0) as i64 } else { 0 };
        }
        if reply_length < sampling.masked_before && sampling.masked.contains(&token) {
            continue;
        }
        let noise = mix(sampling.seed ^ mix(key ^ mix(u64::from(token) + 1))) >> 48;
        value += noise_scale * noise as i64;
        if best.is_none_or(|(most, _)| value > most) {
            best = Some((value, token));
        }
    }
    best.map_or(0, |(_, token)| token)
}

impl HistoryModel {
    pub fn new(options: HistoryOptions) -> Self {
        let slots = vec![Slot::default(); options.limits.slots as usize];
        let pages_per_slot = options.limits.context.div_ceil(PAGE_POSITIONS);
        let page_count = options.pages.unwrap_or(options.limits.slots * pages_per_slot + 4096);
        let free = Arc::new(Mutex::new((0..page_count).rev().collect()));
        HistoryModel { options, slots, free, page_count, forwards: 0, draws: 0 }
    }

    /// Forwards so far.
    pub fn forward_count(&self) -> u64 {
        self.forwards
    }

    /// Slots that hold anything.
    pub fn held_slots(&self) -> usize {
        self.slots.iter().filter(|slot| slot.length > 0).count()
    }

    /// Pages that slots hold; a shared one as often as it is held.
    pub fn slot_pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.slots.iter().flat_map(|slot| &slot.pages).map(|page| page.index)
    }

    fn take_page(&self) -> Option<Arc<Page>> {
        let index = lock(&self.free).pop()?;
        Some(Arc::new(Page { index, free: self.free.clone() }))
    }

    /// Refuses what skipped rows or missing pages don't allow, and notes what this window skips.
    fn begin(&mut self, window: &Window) -> Result<(), ForwardError> {
        let failed = |text: String| Err(ForwardError::Failed(text));
        let (start, end) = (window.start, window.start + window.rows.len() as Position);
        let drawn = window.start + window.draw.start as Position + 1;
        let prompt_end = match (window.whole, window.draw.is_empty()) {
            (true, _) => 0,
            (false, true) => window.prompt_end,
            (false, false) => window.prompt_end.min(drawn),
        };
        let slot = &self.slots[window.slot.0 as usize];
        if !can_follow(slot.held_from, start, prompt_end) {
            return failed(format!("rows before {start} were skipped from {} on", slot.held_from));
        }
        for page in start / PAGE_POSITIONS..end.div_ceil(PAGE_POSITIONS) {
            let held = self.slots[window.slot.0 as usize].pages.get(page as usize);
            if held.is_some_and(|held| Arc::strong_count(held) == 1) {
                continue;
            }
            let Some(fresh) = self.take_page() else { return failed("no page is free".to_string()) };
            let pages = &mut self.slots[window.slot.0 as usize].pages;
            match pages.get_mut(page as usize) {
                Some(shared) => *shared = fresh,
                None => pages.push(fresh),
            }
        }
        let needed = prompt_end.saturating_sub(HALO);
        if needed > start {
            self.slots[window.slot.0 as usize].held_from = needed.min(end);
        }
        Ok(())
    }

    /// Writes a window's rows and returns the hash after each.
    fn write(&mut self, window: &Window, tokens: &[TokenId], window_count: usize) -> Vec<u64> {
        let fault = self.options.fault;
        let slot = &mut self.slots[window.slot.0 as usize];
        let start = window.start as usize;
        assert!(start == slot.length, "a window at {start} of a slot that keeps {}", slot.length);
        let mut history = match fault {
            Fault::KeepsRejectedRows | Fault::ForgetsToRelease => slot.hashes.last().copied(),
            _ => start.checked_sub(1).map(|last| slot.hashes[last]),
        };
        if fault != Fault::KeepsRejectedRows {
            slot.hashes.truncate(start);
        }
        let mut written = Vec::with_capacity(tokens.len());
        for (index, &token) in tokens.iter().enumerate() {
            let mut hash = extend(self.options.seed, history, token);
            if fault == Fault::CountsNeighbours && window_count > 1 {
                hash ^= window_count as u64;
            }
            if fault == Fault::SeesChunks && index == 0 && start > 0 && window.prompt_end > window.start {
                hash ^= 1;
            }
            slot.hashes.push(hash);
            written.push(hash);
            history = Some(hash);
        }
        written
    }

    fn draw_window(&mut self, window: &Window, tokens: &[TokenId], view: &SequenceView<'_>, drawn: &mut Drawn) {
        let first = drawn.rows.len();
        let prompt_length = view.prompt.len() as u32;
        let slot = window.slot.0 as usize;
        let written_from = self.slots[slot].hashes.len() - tokens.len();
        for row in window.draw.clone() {
            let position = window.start + row as u32;
            assert!(
                window.whole || position + 1 >= window.prompt_end,
                "row {position} is drawn, but a model may skip it: the prompt ends at {}",
                window.prompt_end
            );
            let hash = self.slots[slot].hashes[written_from + row];
            let is_reply = window.start >= prompt_length;
            let window_tokens = match self.options.fault {
                Fault::PenaltiesForgetTheWindow => &tokens[..0],
                _ if is_reply => &tokens[1..row + 1],
                _ => &tokens[..0],
            };
            let key = match self.options.fault {
                Fault::DrawsInOrder => self.draws,
                _ => u64::from(position) + 1,
            };
            self.draws += 1;
            let reply = view.reply.iter().chain(window_tokens).copied();
            let mut token = draw(self.options.limits.vocab_size, hash, view.sampling, key, view.prompt, reply);
            let script_index = (position + 1).checked_sub(prompt_length);
            if let (Some(script), Some(index)) = (&self.slots[slot].script, script_index)
                && let Some(&scripted) = script.get(index as usize).or(script.last())
            {
                token = scripted;
            }
            if self.options.fault == Fault::EchoesDrafts
                && is_reply
                && let Some(&draft) = tokens.get(row + 1)
            {
                token = draft;
            }
            let mut row = DrawnRow { token, logprob: 0.0, next_logprob: 0.0, top_start: 0, top_count: 0 };
            if let Some(top_count) = window.logprobs {
                row.logprob = logprob(hash, token);
                row.next_logprob = match view.known_at(position + 1) {
                    Some(_) if is_reply && self.options.fault == Fault::ScoresTheDraw => logprob(hash, token),
                    known => known.map_or(0.0, |next| logprob(hash, next)),
                };
                let mut all: Vec<TokenId> = (0..self.options.limits.vocab_size).collect();
                all.sort_by_key(|&token| (-score(hash, token), token));
                row.top_start = drawn.top.len() as u32;
                row.top_count = top_count.min(all.len() as u32);
                drawn.top.extend(all[..row.top_count as usize].iter().map(|&token| (token, logprob(hash, token))));
            }
            drawn.rows.push(row);
        }
        drawn.windows.push(first..drawn.rows.len());
    }
}

impl Model for HistoryModel {
    type Snapshot = HistorySnapshot;

    fn limits(&self) -> ModelLimits {
        self.options.limits
    }

    fn forward(
        &mut self,
        plan: &RoundPlan,
        sequences: &[SequenceView<'_>],
        drawn: &mut Drawn,
    ) -> Result<(), ForwardError> {
        let forward = self.forwards;
        self.forwards += 1;
        assert!(plan.tokens.len() <= self.options.limits.round_rows as usize, "more rows than the model holds");
        if let Some((clock, round, row, _)) = &self.options.clock {
            clock.advance(*round + *row * plan.tokens.len() as u32);
        }
        if self.options.lost_at == Some(forward) {
            return Err(ForwardError::DeviceLost("as planned".to_string()));
        }
        for window in &plan.windows {
            let view = &sequences[window.sequence];
            let slot = &mut self.slots[window.slot.0 as usize];
            if window.start == 0 && slot.script.is_none() {
                slot.script = self.options.scripts.pop_front();
            }
            let tokens = &plan.tokens[window.rows.clone()];
            self.begin(window)?;
            self.write(window, tokens, plan.windows.len());
            self.draw_window(window, tokens, view, drawn);
        }
        // A failing forward has written rows, as a real one may have.
        if self.options.failures.contains(&forward) {
            return Err(ForwardError::Failed("as planned".to_string()));
        }
        Ok(())
    }

    fn keep(&mut self, slot: SlotIndex, length: Position) {
        let slot = &mut self.slots[slot.0 as usize];
        assert!(length as usize <= slot.hashes.len(), "more positions are kept than were written");
        slot.length = length as usize;
        // Rejected rows stay where they are: the next window overwrites them.
    }

    fn draft(&mut self, wanted: &[DraftRequest<'_>], drafts: &mut Drafts) -> Result<(), ForwardError> {
        if let Some((clock, _, _, call)) = &self.options.clock {
            clock.advance(*call);
        }
        if self.options.drafter == Drafter::Broken {
            return Err(ForwardError::Failed("the drafter is broken".to_string()));
        }
        for request in wanted {
            let first = drafts.tokens.len();
            let slot = &self.slots[request.slot.0 as usize];
            assert!(request.position as usize == slot.length, "an anchor that isn't at the kept length");
            assert!(request.count_max <= self.options.limits.draft_block, "more drafts than a block holds");
            let mut history = slot.length.checked_sub(1).map(|last| slot.hashes[last]);
            let mut previous = request.anchor;
            let mut count = request.count_max;
            let dice = mix(history.unwrap_or(0) ^ mix(u64::from(previous)));
            if self.options.drafter == Drafter::Mixed && dice.is_multiple_of(4) {
                count = (dice >> 8) as u32 % (count + 1);
            }
            for index in 0..count {
                let hash = extend(self.options.seed, history, previous);
                history = Some(hash);
                let key = u64::from(request.position + index) + 1;
                let none = std::iter::empty();
                let right = draw(self.options.limits.vocab_size, hash, request.sampling, key, &[], none);
                let wrong = (right + 1) % self.options.limits.vocab_size;
                let (token, confidence) = match self.options.drafter {
                    Drafter::Right => (right, 0.9),
                    Drafter::Wrong => (wrong, 0.5),
                    Drafter::Mixed if mix(hash).is_multiple_of(3) => (wrong, 0.4),
                    Drafter::Mixed | Drafter::Broken => (right, 0.8),
                };
                drafts.tokens.push(token);
                drafts.confidence.push(confidence);
                previous = token;
            }
            drafts.ranges.push(first..drafts.tokens.len());
        }
        Ok(())
    }

    fn snapshot(&mut self, slot: SlotIndex, position: Position) -> HistorySnapshot {
        let slot = &self.slots[slot.0 as usize];
        let behind = (slot.length as Position).checked_sub(position);
        assert!(behind.is_some_and(|behind| behind <= SNAPSHOT_REACH), "a snapshot at {position} of {}", slot.length);
        let mut hashes = slot.hashes[..position as usize].to_vec();
        if self.options.fault == Fault::SnapshotLosesOddRow && hashes.len() % 2 == 1 {
            let last = hashes.len() - 1;
            hashes[last] = 0;
        }
        let pages = slot.pages[..position.div_ceil(PAGE_POSITIONS) as usize].to_vec();
        HistorySnapshot {
            pages,
            held_from: slot.held_from.min(position),
            length: position,
            hashes: Arc::new(Mutex::new(hashes)),
            script: slot.script.clone(),
        }
    }

    fn snapshot_reach(&self) -> u32 {
        SNAPSHOT_REACH
    }

    fn can_resume(&self, snapshot: &HistorySnapshot, prompt_end: Position) -> bool {
        can_follow(snapshot.held_from, snapshot.length, prompt_end)
    }

    fn can_continue(&self, slot: SlotIndex, prompt_end: Position) -> bool {
        let slot = &self.slots[slot.0 as usize];
        can_follow(slot.held_from, slot.length as Position, prompt_end)
    }

    fn snapshot_bytes(&self, _: &HistorySnapshot) -> u64 {
        SNAPSHOT_BYTES
    }

    fn snapshot_pages(&self, snapshot: &HistorySnapshot, pages: &mut Vec<u32>) {
        pages.extend(snapshot.pages.iter().map(|page| page.index));
    }

    fn pages(&self) -> PageCounts {
        let free = lock(&self.free).len() as u32;
        PageCounts { total: self.page_count, free, positions: PAGE_POSITIONS, bytes: PAGE_BYTES }
    }

    fn pages_needed(&self, slot: SlotIndex, end: Position) -> u32 {
        let slot = &self.slots[slot.0 as usize];
        let pages = slot.length / PAGE_POSITIONS as usize..end.div_ceil(PAGE_POSITIONS) as usize;
        pages.filter(|&page| slot.pages.get(page).is_none_or(|held| Arc::strong_count(held) > 1)).count() as u32
    }

    fn encode(&mut self, snapshot: &HistorySnapshot, bytes: &mut Vec<u8>) {
        bytes.extend(snapshot.held_from.to_le_bytes());
        bytes.extend(snapshot.length.to_le_bytes());
        let script = snapshot.script.iter().flatten();
        bytes.push(u8::from(snapshot.script.is_some()));
        bytes.extend(script.flat_map(|token| token.to_le_bytes()));
    }

    fn read_pages(&mut self, snapshot: &HistorySnapshot, pages: Range<u32>, bytes: &mut Vec<u8>) -> bool {
        for page in pages {
            let first = bytes.len();
            let hashes = lock(&snapshot.hashes);
            let of_page = hashes.iter().skip((page * PAGE_POSITIONS) as usize).take(PAGE_POSITIONS as usize);
            bytes.extend(of_page.flat_map(|hash| hash.to_le_bytes()));
            bytes.resize(first + PAGE_BYTES as usize, 0);
        }
        true
    }

    fn decode(&mut self, bytes: &[u8], base: Option<(&HistorySnapshot, u32)>) -> Result<HistorySnapshot, DecodeError> {
        let number = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let (Some(held_from), Some(length), Some(&has_script)) = (number(0), number(4), bytes.get(8)) else {
            return Err(DecodeError::Malformed);
        };
        if length > self.options.limits.context {
            return Err(DecodeError::Malformed);
        }
        let script = (has_script == 1).then(|| (9..bytes.len()).step_by(4).filter_map(number).collect());
        let mut pages = Vec::new();
        let mut hashes = vec![0; length as usize];
        if let Some((base, count)) = base {
            let shared = (count * PAGE_POSITIONS).min(length) as usize;
            pages.extend_from_slice(&base.pages[..count as usize]);
            hashes[..shared].copy_from_slice(&lock(&base.hashes)[..shared]);
        }
        for _ in pages.len() as u32..length.div_ceil(PAGE_POSITIONS) {
            pages.push(self.take_page().ok_or(DecodeError::Pages)?);
        }
        Ok(HistorySnapshot { pages, held_from, length, hashes: Arc::new(Mutex::new(hashes)), script })
    }

    fn write_pages(&mut self, snapshot: &HistorySnapshot, first: u32, bytes: &[u8]) -> bool {
        let end = first as usize + bytes.len() / PAGE_BYTES as usize;
        let own = snapshot.pages.get(first as usize..end);
        if !own.is_some_and(|own| own.iter().all(|page| Arc::strong_count(page) == 1)) {
            return false;
        }
        let mut hashes = lock(&snapshot.hashes);
        for (page, content) in (first..).zip(bytes.chunks_exact(PAGE_BYTES as usize)) {
            let start = (page * PAGE_POSITIONS) as usize;
            for (index, hash) in content.as_chunks().0.iter().enumerate().take(PAGE_POSITIONS as usize) {
                if let Some(place) = hashes.get_mut(start + index) {
                    *place = u64::from_le_bytes(*hash);
                }
            }
        }
        true
    }

    fn restore(&mut self, slot: SlotIndex, snapshot: &HistorySnapshot) {
        let slot = &mut self.slots[slot.0 as usize];
        assert!(slot.length == 0, "a snapshot is restored into a slot that holds something");
        slot.pages.clone_from(&snapshot.pages);
        slot.held_from = snapshot.held_from;
        slot.hashes.clone_from(&lock(&snapshot.hashes));
        slot.length = snapshot.length as usize;
        slot.script.clone_from(&snapshot.script);
    }

    fn release(&mut self, slot: SlotIndex) {
        let slot = &mut self.slots[slot.0 as usize];
        slot.length = 0;
        slot.held_from = 0;
        slot.pages.clear();
        slot.script = None;
        if self.options.fault != Fault::ForgetsToRelease {
            slot.hashes.clear();
        }
    }
}
