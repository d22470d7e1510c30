//! Between sequences and kept prefixes: where a prompt starts, which states are kept, who yields when pages run out.
//!
//! Nothing here can change a reply: a restored row equals a computed one, and waiting only takes time.

use std::sync::Arc;

use tf_text::TokenId;

use crate::clock::Time;
use crate::commit;
use crate::disk::shelf::Arrival;
use crate::disk::{News, Shelf};
use crate::limits::{EngineLimits, LOAD_PATIENCE, SNAPSHOT_ROWS_MIN};
use crate::model::{Model, SlotIndex};
use crate::plan::{Plan, plan};
use crate::prefix_cache::{Found, Hit, Keeping, PrefixCache, common};
use crate::request::{CacheReason, CacheSource, CacheUse, Position, RequestId};
use crate::sequence::Sequence;
use crate::state::{KeepRules, State};
use crate::verify::Accepted;

/// An empty cache for `model`.
pub fn cache_for<M: Model>(model: &M, limits: &EngineLimits) -> PrefixCache<M::Snapshot> {
    PrefixCache::new(limits.prefix_cache_bytes, model.pages().bytes)
}

/// When states of `model` are kept.
pub fn rules_for<M: Model>(model: &M, limits: &EngineLimits) -> KeepRules {
    let pages = model.pages();
    KeepRules {
        is_on: limits.prefix_cache_bytes > 0,
        every: limits.snapshot_every,
        reach: model.snapshot_reach(),
        page_positions: pages.positions,
        page_count: pages.total,
    }
}

/// Gives every prompt that hasn't begun its start: the longest kept prefix, the promise of one that another prompt is
/// about to reach, or of one that is being read from disk.
pub fn place<M: Model>(state: &mut State, model: &mut M, cache: &mut PrefixCache<M::Snapshot>, now: Time) {
    let arrived = take_arrived(state, model, cache, now);
    for index in 0..state.sequences.len() {
        let sequence = &state.sequences[index];
        let is_due = match (sequence.follows, sequence.load) {
            (_, Some(load)) => !cache.shelf.as_ref().is_some_and(|shelf| shelf.is_loading(load)),
            (Some((leader, at)), None) => !is_coming(state, leader, at),
            (None, None) => !sequence.is_placed,
        };
        if is_due {
            state.sequences[index].follows = None;
            commit::await_load(state, index, None);
            search(state, index, model, cache, &arrived, now);
        }
    }
}

/// What came from disk since the last round, kept in memory from here on.
fn take_arrived<M: Model>(
    state: &State,
    model: &M,
    cache: &mut PrefixCache<M::Snapshot>,
    now: Time,
) -> Vec<Arrival<M::Snapshot>> {
    let Some(shelf) = &mut cache.shelf else { return Vec::new() };
    shelf.give_up_loads(|since| now.since(since) > LOAD_PATIENCE);
    let arrived = shelf.take_arrived();
    for Arrival { tokens, snapshot } in &arrived {
        let is_wanted = |key: &Arc<[TokenId]>| key == tokens || is_source(&state.sequences, key);
        cache.keep(tokens, keeping(model, snapshot.clone(), tokens.len() as Position), is_wanted);
    }
    arrived
}

/// Takes in what the disk's worker says.
pub fn hear<M: Model>(state: &State, model: &mut M, cache: &mut PrefixCache<M::Snapshot>, news: News, now: Time) {
    let Some(mut shelf) = cache.shelf.take() else { return };
    shelf.hear(news, model, now, |model, pages| {
        while model.pages().free < pages {
            if !cache.evict(|key| is_source(&state.sequences, key)) {
                return false;
            }
        }
        true
    });
    cache.shelf = Some(shelf);
}

/// Begins to read a longer prefix than memory has, where the disk has one that saves rows.
fn load<M: Model>(
    state: &mut State,
    index: usize,
    model: &M,
    cache: &mut PrefixCache<M::Snapshot>,
    resumed: Position,
    now: Time,
) -> bool {
    let sequence = &state.sequences[index];
    if sequence.asked_disk || sequence.computed > 0 {
        return false;
    }
    let (prompt, length) = (sequence.fill.clone(), sequence.fill_length());
    let Some(shelf) = &mut cache.shelf else { return false };
    let Some(candidate) = shelf.find(&prompt, resumed + SNAPSHOT_ROWS_MIN - 1, length - 1) else { return false };
    let page_positions = state.keeping.page_positions.max(1);
    // Whole pages of tokens that memory knows are taken from there.
    let base = cache.nearest(&candidate.tokens).map(|(snapshot, matched)| (snapshot, matched / page_positions));
    let base = base.filter(|(_, pages)| *pages > 0).map(|(snapshot, pages)| {
        let mut held = Vec::new();
        model.snapshot_pages(snapshot, &mut held);
        (snapshot.clone(), pages.min(held.len() as u32))
    });
    let Some(shelf) = &mut cache.shelf else { return false };
    let load = shelf.load(&candidate, base, now);
    commit::await_load(state, index, load);
    load.is_some()
}

fn is_coming(state: &State, leader: RequestId, at: Position) -> bool {
    state.sequences.iter().any(|sequence| sequence.id == leader && sequence.is_prefilling() && sequence.computed < at)
}

fn search<M: Model>(
    state: &mut State,
    index: usize,
    model: &mut M,
    cache: &mut PrefixCache<M::Snapshot>,
    arrived: &[Arrival<M::Snapshot>],
    now: Time,
) {
    let sequence = &state.sequences[index];
    let reason = match (state.keeping.is_on, sequence.is_scored()) {
        (false, _) => Some(CacheReason::Off),
        (true, true) => Some(CacheReason::ScoredPrompt),
        (true, false) => None,
    };
    if reason.is_some() {
        commit::place(state, index, 0, None, CacheUse { reason, ..CacheUse::default() });
        return;
    }
    let (prompt, length, slot) = (sequence.fill.clone(), sequence.fill_length(), sequence.slot);
    // A row that is drawn is computed; after a pause none is.
    let most = if sequence.begins_reply() { length - 1 } else { length };
    let mut found = cache.find(&prompt, most, |snapshot| model.can_resume(snapshot, length));
    let from_disk = arrival_for(&prompt, &found, arrived, |snapshot| model.can_resume(snapshot, length));
    if let Some(arrival) = from_disk
        && found.hit.as_ref().is_none_or(|hit| (hit.position as usize) < arrival.tokens.len())
    {
        // Memory was too small to keep it, even for a moment.
        let position = arrival.tokens.len() as Position;
        let (prefix, snapshot) = (arrival.tokens.clone(), arrival.snapshot.clone());
        found.hit = Some(Hit { prefix, position, snapshot });
    }
    let resumed = found.hit.as_ref().map_or(0, |hit| hit.position);
    if from_disk.is_none() && load(state, index, model, cache, resumed, now) {
        return;
    }
    let sequence = &state.sequences[index];
    if let Some(shelf) = &mut cache.shelf {
        found.matched = found.matched.max(shelf.matched(&prompt));
        if from_disk.is_some() {
            shelf.count_hit(&prompt[..resumed as usize]);
        }
    }
    if !sequence.is_placed || resumed > sequence.computed {
        let far = resumed + SNAPSHOT_ROWS_MIN <= found.matched.min(length - 1);
        let nearer = if found.passed_unusable { CacheReason::Incomplete } else { CacheReason::NoSnapshot };
        let source = match (&found.hit, from_disk) {
            (None, _) => CacheSource::None,
            (Some(_), None) => CacheSource::Ram,
            (Some(_), Some(_)) => CacheSource::Disk,
        };
        if sequence.computed > 0 {
            model.release(slot);
        }
        if let Some(hit) = &found.hit {
            model.restore(slot, &hit.snapshot);
        }
        let used = CacheUse { matched: found.matched, source, reason: far.then_some(nearer) };
        commit::place(state, index, resumed, found.hit.map(|hit| hit.prefix), used);
    }
    let wanted = wanted_states(state, index, found.matched, model);
    commit::want_states(state, index, wanted);
    follow(state, index, model);
}

/// What has just been read for this prompt, unless memory has something longer.
fn arrival_for<'a, S>(
    prompt: &[TokenId],
    found: &Found<S>,
    arrived: &'a [Arrival<S>],
    usable: impl Fn(&S) -> bool,
) -> Option<&'a Arrival<S>> {
    let resumed = found.hit.as_ref().map_or(0, |hit| hit.position as usize);
    let fits = |arrival: &&Arrival<S>| {
        (resumed.max(1)..prompt.len()).contains(&arrival.tokens.len())
            && prompt.starts_with(&arrival.tokens)
            && usable(&arrival.snapshot)
    };
    arrived.iter().filter(fits).max_by_key(|arrival| arrival.tokens.len())
}

/// Positions inside the prompt whose state later requests may want: those that the request names, and the place where
/// this prompt leaves another that is kept.
fn wanted_states<M: Model>(state: &State, index: usize, matched: Position, model: &M) -> Vec<Position> {
    let sequence = &state.sequences[index];
    let (start, end) = (sequence.computed, sequence.fill_length());
    let saves = |at: Position| end - at <= state.keeping.reach || at - start >= SNAPSHOT_ROWS_MIN;
    let all = sequence.request.snapshot_at.iter().copied().chain([matched]);
    let mut wanted: Vec<Position> =
        all.filter(|&at| at > start && at < end && saves(at) && model.can_continue(sequence.slot, at)).collect();
    wanted.sort_unstable();
    wanted.dedup();
    wanted
}

/// Makes a sequence wait for an older one that is computing rows of their common prefix, where that saves rows.
fn follow<M: Model>(state: &mut State, index: usize, model: &M) {
    let sequence = &state.sequences[index];
    let last = sequence.fill_length() - 1;
    let mut best: Option<(Position, usize)> = None;
    for (other, leader) in state.sequences.iter().enumerate() {
        let is_ahead = leader.rank() < sequence.rank() && leader.is_placed && leader.is_prefilling();
        if !is_ahead || leader.computed < sequence.computed {
            continue;
        }
        let shared = common(&leader.fill, &sequence.fill) as Position;
        let leader_last = leader.fill_length() - 1;
        let at = shared.min(last).min(leader_last);
        let is_taken_anyway = at == leader_last || leader.snapshot_at.contains(&at);
        if at >= leader.computed + SNAPSHOT_ROWS_MIN
            && (is_taken_anyway || model.can_continue(leader.slot, at))
            && best.is_none_or(|(most, _)| at > most)
        {
            best = Some((at, other));
        }
    }
    if let Some((at, leader)) = best {
        commit::follow(state, index, leader, at);
    }
}

/// Keeps the states that the round has reached. Call when the model knows what is kept and before anything is released.
pub fn take<M: Model>(
    state: &mut State,
    plan: &Plan,
    accepted: &[Accepted],
    model: &mut M,
    cache: &mut PrefixCache<M::Snapshot>,
) {
    if !state.keeping.is_on {
        return;
    }
    for (index, window) in plan.round.windows.iter().enumerate() {
        if plan.drafts[index].is_some() {
            continue;
        }
        let sequence = &state.sequences[window.sequence];
        let (start, end) = (window.start, accepted[index].kept);
        let KeepRules { every, reach, .. } = state.keeping;
        // One before the prompt's end serves the same prompt again, whose last row must be computed, as well as a longer one.
        let ends = [sequence.fill_length() - 1, end / every * every];
        let mut positions: Vec<Position> = sequence.snapshot_at.iter().copied().chain(ends).collect();
        positions.retain(|&at| at > start && at <= end && end - at <= reach);
        positions.sort_unstable();
        positions.dedup();
        let (slot, prompt) = (sequence.slot, sequence.fill.clone());
        for at in positions {
            keep_state(state, model, cache, slot, &prompt[..at as usize]);
            commit::note_kept(state, window.sequence, at);
        }
    }
}

fn keep_state<M: Model>(
    state: &State,
    model: &mut M,
    cache: &mut PrefixCache<M::Snapshot>,
    slot: SlotIndex,
    prefix: &[TokenId],
) {
    if cache.has(prefix) {
        return;
    }
    let position = prefix.len() as Position;
    let snapshot = model.snapshot(slot, position);
    cache.keep(prefix, keeping(model, snapshot, position), |key| is_source(&state.sequences, key));
}

fn keeping<M: Model>(model: &M, snapshot: M::Snapshot, position: Position) -> Keeping<M::Snapshot> {
    let mut pages = Vec::new();
    model.snapshot_pages(&snapshot, &mut pages);
    let bytes = model.snapshot_bytes(&snapshot);
    let is_complete = model.can_resume(&snapshot, position + 1);
    Keeping { snapshot, bytes, pages, is_complete }
}

/// Whether a running sequence resumed from this prefix.
fn is_source(sequences: &[Sequence], key: &Arc<[TokenId]>) -> bool {
    sequences.iter().filter_map(|sequence| sequence.source.as_ref()).any(|source| Arc::ptr_eq(source, key))
}

/// Empties the slots of sequences that have ended, after keeping what they computed.
pub fn release<M: Model>(state: &mut State, model: &mut M, cache: &mut PrefixCache<M::Snapshot>) {
    // In the order of leaving: a slot may have been given away again since, to a sequence that has left it too.
    let mut leaving = std::mem::take(&mut state.released);
    for released in leaving.drain(..) {
        if let Some(tokens) = &released.tokens {
            keep_state(state, model, cache, released.slot, tokens);
        }
        model.release(released.slot);
    }
    state.released = leaving;
    let pages = model.pages();
    (state.stats.pages, state.stats.pages_free, state.stats.page_positions) =
        (pages.total, pages.free, pages.positions);
    state.stats.prefixes = cache.len() as u64;
    state.stats.prefix_bytes = cache.bytes();
    state.stats.prefix_evictions = cache.evictions();
    if let Some(shelf) = &cache.shelf {
        state.stats.disk = shelf.stats();
    }
}

/// Plans the next round so that its pages are there. Kept prefixes go first, then the newest sequences wait a round with
/// their state; where even the oldest can't grow, the newest ends.
pub fn plan_within_pages<M: Model>(
    state: &mut State,
    model: &mut M,
    cache: &mut PrefixCache<M::Snapshot>,
    round: &mut Plan,
    now: Time,
) {
    commit::end_waits(state);
    loop {
        plan(state, round);
        let windows = round.round.windows.iter();
        let end = |window: &crate::model::Window| window.start + window.rows.len() as Position;
        let needed: u64 = windows.map(|window| u64::from(model.pages_needed(window.slot, end(window)))).sum();
        while needed > u64::from(model.pages().free) {
            let before = model.pages().free;
            if !cache.evict(|key| is_source(&state.sequences, key)) {
                break;
            }
            // Pages that only the disk still holds.
            if model.pages().free == before
                && let Some(shelf) = &mut cache.shelf
            {
                shelf.let_go_of_pages();
            }
        }
        if needed <= u64::from(model.pages().free) {
            return;
        }
        // What is on its way to or from the disk goes before anybody waits.
        if cache.shelf.as_mut().is_some_and(Shelf::let_go_of_pages) {
            continue;
        }
        let ranks = round.round.windows.iter().map(|window| state.sequences[window.sequence].rank());
        let oldest = state.sequences.iter().map(|sequence| sequence.rank()).min();
        match ranks.max().filter(|&newest| Some(newest) != oldest) {
            Some((_, newest)) => commit::wait(state, newest),
            None => {
                commit::end_newest(state, now);
                release(state, model, cache);
            }
        }
    }
}
