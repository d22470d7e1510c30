//! Keeps states of token prefixes, so that a prompt is computed only from the longest kept prefix on.
//!
//! Prefixes are ordered as token sequences. The longest kept prefix of a prompt is found by walking down from the prompt's
//! own place in that order, and every step compares tokens: there is no hash that could collide. One budget in bytes
//! holds for all; the least valuable prefix goes first. Knows no device and no request.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use tf_text::TokenId;

use crate::disk::Shelf;
use crate::model::Model;
use crate::request::Position;

/// Hits beyond this make a prefix no more valuable.
pub(crate) const USES_MAX: u32 = 16;

/// A planted defect, for the tests of the tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheFault {
    #[default]
    None,
    /// A prefix gets the state that was kept last at its length, whatever its tokens.
    Stale,
    /// A hit claims one position more than its state holds.
    OffByOne,
    /// Tokens are not compared, only the length and a weak hash.
    ComparesHashes,
    /// Files are used whatever their checksums say.
    TrustsFiles,
    /// Pages of a file are put one place off.
    ShiftsPages,
}

impl CacheFault {
    pub const ALL: [CacheFault; 5] = [
        CacheFault::Stale,
        CacheFault::OffByOne,
        CacheFault::ComparesHashes,
        CacheFault::TrustsFiles,
        CacheFault::ShiftsPages,
    ];
}

/// A state and what it costs.
#[derive(Clone, Debug)]
pub struct Keeping<S> {
    pub snapshot: S,
    /// Bytes of its own, without pages.
    pub bytes: u64,
    /// Pages that it shares, by number.
    pub pages: Vec<u32>,
    /// Whether any row may follow, so that no other state of this prefix is better.
    pub is_complete: bool,
}

#[derive(Clone, Debug)]
struct Kept<S> {
    keeping: Keeping<S>,
    last_use: u64,
    uses: u32,
}

/// The longest kept prefix that can be used.
#[derive(Clone, Debug)]
pub struct Hit<S> {
    pub prefix: Arc<[TokenId]>,
    pub position: Position,
    pub snapshot: S,
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Found<S> {
    /// Leading tokens that something kept has in common with the prompt.
    pub matched: Position,
    pub hit: Option<Hit<S>>,
    /// A longer prefix was there, but its state couldn't be continued as wanted.
    pub passed_unusable: bool,
}

/// Kept prefixes. See the module's text.
pub struct PrefixCache<S> {
    /// Where prefixes are kept beyond memory, if anywhere.
    pub shelf: Option<Shelf<S>>,
    budget: u64,
    page_bytes: u64,
    kept: BTreeMap<Arc<[TokenId]>, Kept<S>>,
    /// How many prefixes hold each page, by its number.
    pages: Vec<u32>,
    bytes: u64,
    /// Searches so far: the clock of recency.
    searches: u64,
    evictions: u64,
    fault: CacheFault,
    last: Option<(usize, S)>,
}

impl<S: Clone> PrefixCache<S> {
    /// `budget`: bytes of states, tokens and pages together. `page_bytes`: of one page.
    pub fn new(budget: u64, page_bytes: u64) -> Self {
        PrefixCache {
            shelf: None,
            budget,
            page_bytes,
            kept: BTreeMap::new(),
            pages: Vec::new(),
            bytes: 0,
            searches: 0,
            evictions: 0,
            fault: CacheFault::None,
            last: None,
        }
    }

    /// With a planted defect.
    pub fn with_fault(mut self, fault: CacheFault) -> Self {
        self.fault = fault;
        self
    }

    pub fn len(&self) -> usize {
        self.kept.len()
    }

    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Kept prefixes, in the order of their tokens.
    pub fn prefixes(&self) -> impl Iterator<Item = &Arc<[TokenId]>> {
        self.kept.keys()
    }

    /// Pages that kept prefixes hold, each once.
    pub fn held_pages(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.pages).filter(|(_, holders)| **holders > 0).map(|(page, _)| page)
    }

    /// Whether exactly this prefix is kept with a state that any row may follow.
    pub fn has(&self, prefix: &[TokenId]) -> bool {
        self.kept.get(prefix).is_some_and(|kept| kept.keeping.is_complete)
    }

    /// The longest kept prefix of `prompt` with at most `most` tokens whose state is `usable`.
    pub fn find(&mut self, prompt: &[TokenId], most: Position, usable: impl Fn(&S) -> bool) -> Found<S> {
        self.searches += 1;
        let matched = self.matched(prompt);
        let mut passed_unusable = false;
        let mut end = (most as usize).min(prompt.len());
        let mut hit = None;
        while let Some(key) = self.before(prompt, end) {
            let is_prefix = self.fault == CacheFault::ComparesHashes || prompt[..end].starts_with(&key);
            if !is_prefix {
                end = common(&key, &prompt[..end]);
                continue;
            }
            let Some(kept) = self.kept.get_mut(&key) else { break };
            if usable(&kept.keeping.snapshot) {
                kept.last_use = self.searches;
                kept.uses = (kept.uses + 1).min(USES_MAX);
                let off = usize::from(self.fault == CacheFault::OffByOne && key.len() < end);
                let position = (key.len() + off) as Position;
                hit = Some(Hit { position, snapshot: kept.keeping.snapshot.clone(), prefix: key });
                break;
            }
            passed_unusable = true;
            end = key.len() - 1;
        }
        Found { matched, hit, passed_unusable }
    }

    /// The last kept prefix that doesn't come after `prompt[..end]`. No prefix of the prompt lies between the two.
    fn before(&self, prompt: &[TokenId], end: usize) -> Option<Arc<[TokenId]>> {
        if self.fault == CacheFault::ComparesHashes {
            let weak = |tokens: &[TokenId]| tokens.last().map(|last| last % 4);
            let same = |key: &&Arc<[TokenId]>| key.len() <= end && weak(key) == weak(&prompt[..key.len()]);
            return self.kept.keys().filter(same).max_by_key(|key| key.len()).cloned();
        }
        let range = (Bound::Unbounded, Bound::Included(&prompt[..end]));
        self.kept.range::<[TokenId], _>(range).next_back().map(|(key, _)| key.clone())
    }

    /// Leading tokens of `prompt` that some kept prefix has too. The neighbours in order have the most.
    fn matched(&self, prompt: &[TokenId]) -> Position {
        self.neighbours(prompt).map(|(key, _)| common(key, prompt)).max().unwrap_or(0) as Position
    }

    /// Keeps the state after `prefix`, then lets the least valuable prefixes go until the budget holds. The new one may
    /// be among them. `is_protected` names prefixes that go last.
    pub fn keep(&mut self, prefix: &[TokenId], keeping: Keeping<S>, is_protected: impl Fn(&Arc<[TokenId]>) -> bool) {
        if prefix.is_empty() {
            return;
        }
        if let Some(kept) = self.kept.get_mut(prefix) {
            kept.last_use = self.searches;
            if kept.keeping.is_complete || !keeping.is_complete {
                return;
            }
        }
        let uses = self.remove(prefix).map_or_else(|| self.take_over_uses(prefix), |kept| kept.uses);
        let mut keeping = keeping;
        if self.fault == CacheFault::Stale {
            let newest = (prefix.len(), keeping.snapshot.clone());
            match self.last.replace(newest) {
                Some((length, stale)) if length == prefix.len() => keeping.snapshot = stale,
                _ => {}
            }
        }
        for &page in &keeping.pages {
            let holders = holders_of(&mut self.pages, page);
            self.bytes += if *holders == 0 { self.page_bytes } else { 0 };
            *holders += 1;
        }
        self.bytes += keeping.bytes + token_bytes(prefix);
        let key: Arc<[TokenId]> = prefix.into();
        if let Some(shelf) = &mut self.shelf {
            shelf.note_kept(&key);
        }
        self.kept.insert(key, Kept { keeping, last_use: self.searches, uses });
        while self.bytes > self.budget {
            let Some(victim) = self.victim(&is_protected) else { break };
            self.evictions += 1;
            if let (Some(kept), Some(shelf)) = (self.remove(&victim), &mut self.shelf) {
                shelf.note_evicted(&victim, kept.keeping.snapshot);
            }
        }
    }

    /// The kept state with the most leading tokens of `tokens`, and how many.
    pub fn nearest(&self, tokens: &[TokenId]) -> Option<(&S, Position)> {
        let both = self.neighbours(tokens).map(|(key, kept)| (&kept.keeping.snapshot, common(key, tokens)));
        both.max_by_key(|(_, matched)| *matched).map(|(snapshot, matched)| (snapshot, matched as Position))
    }

    fn neighbours(&self, tokens: &[TokenId]) -> impl Iterator<Item = (&Arc<[TokenId]>, &Kept<S>)> {
        let before = self.kept.range::<[TokenId], _>((Bound::Unbounded, Bound::Included(tokens))).next_back();
        let after = self.kept.range::<[TokenId], _>((Bound::Excluded(tokens), Bound::Unbounded)).next();
        before.into_iter().chain(after)
    }

    /// Hands what isn't on disk yet to whoever writes it, at most `pieces_max` pieces of it.
    pub fn write_behind<M: Model<Snapshot = S>>(&mut self, model: &mut M, pieces_max: u32) {
        let Self { shelf: Some(shelf), kept, .. } = self else { return };
        shelf.advance(model, |tokens| kept.get(tokens).map(|kept| kept.keeping.snapshot.clone()), pieces_max);
    }

    /// The hits that a new prefix inherits: those of the latest state that it continues, which is the latest no more. A
    /// prefix that several continue is shared, and stays as valuable as it was.
    fn take_over_uses(&mut self, prefix: &[TokenId]) -> u32 {
        let mut end = prefix.len();
        let range = |end: usize| (Bound::Unbounded, Bound::Included(&prefix[..end]));
        while let Some((key, _)) = self.kept.range::<[TokenId], _>(range(end)).next_back() {
            if !prefix.starts_with(key) {
                end = common(key, &prefix[..end]);
                continue;
            }
            let key = key.clone();
            let next = self.kept.range::<[TokenId], _>((Bound::Excluded(&*key), Bound::Unbounded)).next();
            let is_latest = !next.is_some_and(|(next, _)| next.starts_with(&key));
            return match self.kept.get_mut(&key).filter(|_| is_latest) {
                Some(kept) => std::mem::replace(&mut kept.uses, 1),
                None => 1,
            };
        }
        1
    }

    /// Lets the least valuable prefix go; false when none is kept.
    pub fn evict(&mut self, is_protected: impl Fn(&Arc<[TokenId]>) -> bool) -> bool {
        let Some(victim) = self.victim(is_protected) else { return false };
        self.remove(&victim);
        self.evictions += 1;
        true
    }

    /// The prefix whose loss costs least: the rows that a return would compute again, times how likely a return is, by
    /// hits so far and searches since the last one. A prefix that others continue costs the rows since the one before it;
    /// one that nothing continues is a conversation's latest state and counts whole.
    fn victim(&self, is_protected: impl Fn(&Arc<[TokenId]>) -> bool) -> Option<Arc<[TokenId]>> {
        // Prefixes of a prefix come right before it in order, so the nearest kept one is on this stack.
        let mut above: Vec<&Arc<[TokenId]>> = Vec::new();
        let mut lowest = (true, f64::INFINITY);
        let mut victim: Option<&Arc<[TokenId]>> = None;
        let mut kept = self.kept.iter().peekable();
        while let Some((key, of_key)) = kept.next() {
            while above.last().is_some_and(|top| !key.starts_with(top)) {
                above.pop();
            }
            let is_continued = kept.peek().is_some_and(|(next, _)| next.starts_with(key));
            let nearest = above.last().filter(|_| is_continued).map_or(0, |top| top.len());
            let rows = key.len() - nearest;
            let age = (self.searches - of_key.last_use) as f64;
            let value = rows as f64 * f64::from(of_key.uses) / (1.0 + age);
            let rank = (is_protected(key), value);
            if victim.is_none() || rank < lowest {
                (lowest, victim) = (rank, Some(key));
            }
            above.push(key);
        }
        victim.cloned()
    }

    fn remove(&mut self, prefix: &[TokenId]) -> Option<Kept<S>> {
        let kept = self.kept.remove(prefix)?;
        self.bytes -= kept.keeping.bytes + token_bytes(prefix);
        for page in &kept.keeping.pages {
            let holders = holders_of(&mut self.pages, *page);
            *holders -= 1;
            if *holders == 0 {
                self.bytes -= self.page_bytes;
            }
        }
        Some(kept)
    }

    /// Counts everything again.
    ///
    /// # Panics
    /// When a figure is wrong or the budget doesn't hold.
    pub fn check(&self) {
        let mut pages = vec![0; self.pages.len()];
        let mut bytes = 0;
        for (key, kept) in &self.kept {
            bytes += kept.keeping.bytes + token_bytes(key);
            kept.keeping.pages.iter().for_each(|&page| *holders_of(&mut pages, page) += 1);
        }
        bytes += pages.iter().filter(|holders| **holders > 0).count() as u64 * self.page_bytes;
        assert_eq!(pages, self.pages, "a page of a kept prefix was lost or counted twice");
        assert_eq!(bytes, self.bytes, "bytes of kept prefixes don't add up");
        assert!(self.bytes <= self.budget, "kept prefixes take {} of {} bytes", self.bytes, self.budget);
    }
}

/// The count of a page's holders; pages are numbered from 0, so the list is as long as the largest number seen.
fn holders_of(pages: &mut Vec<u32>, page: u32) -> &mut u32 {
    let index = page as usize;
    pages.resize(pages.len().max(index + 1), 0);
    &mut pages[index]
}

fn token_bytes(prefix: &[TokenId]) -> u64 {
    size_of_val(prefix) as u64
}

/// Leading tokens that both have.
pub fn common(left: &[TokenId], right: &[TokenId]) -> usize {
    left.iter().zip(right).take_while(|(left, right)| left == right).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keeping(snapshot: u32, bytes: u64, pages: &[u32]) -> Keeping<u32> {
        Keeping { snapshot, bytes, pages: pages.to_vec(), is_complete: true }
    }

    fn filled(budget: u64, prefixes: &[&[TokenId]]) -> PrefixCache<u32> {
        let mut cache = PrefixCache::new(budget, 10);
        for (index, prefix) in prefixes.iter().enumerate() {
            cache.keep(prefix, keeping(index as u32, 0, &[]), |_| false);
            cache.check();
        }
        cache
    }

    #[test]
    fn the_longest_kept_prefix_is_found() {
        let mut cache = filled(u64::MAX, &[&[1], &[1, 2, 3], &[1, 2, 3, 4, 5], &[1, 2, 9], &[1, 2, 3, 0], &[7]]);
        // prompt, most -> matched, which
        type Case<'a> = (&'a [TokenId], u32, u32, Option<u32>);
        let cases: [Case<'_>; 9] = [
            (&[1, 2, 3, 4, 5, 6], 5, 5, Some(2)),
            (&[1, 2, 3, 4, 5], 4, 5, Some(1)), // the last row of a prompt is always computed
            (&[1, 2, 3, 4, 6], 4, 4, Some(1)),
            (&[1, 2, 8, 8], 3, 2, Some(0)), // neighbours that are no prefixes
            (&[1, 2, 3, 1, 1], 4, 3, Some(1)),
            (&[1, 2, 9, 9], 3, 3, Some(3)),
            (&[7, 7], 1, 1, Some(5)),
            (&[2, 2], 1, 0, None),
            (&[0], 0, 0, None),
        ];
        for (prompt, most, matched, which) in cases {
            let found = cache.find(prompt, most, |_| true);
            assert_eq!((found.matched, found.hit.map(|hit| hit.snapshot)), (matched, which), "{prompt:?}");
        }
        let found = cache.find(&[1, 2, 3, 4, 5, 6], 5, |snapshot| *snapshot != 2);
        assert_eq!((found.hit.map(|hit| hit.snapshot), found.passed_unusable), (Some(1), true));
    }

    #[test]
    fn pages_are_counted_once_and_the_budget_holds() {
        let mut cache = PrefixCache::new(60, 10);
        cache.keep(&[1, 2], keeping(0, 4, &[0, 1]), |_| false);
        assert_eq!(cache.bytes(), 4 + 8 + 20);
        cache.keep(&[1, 2, 3], keeping(1, 4, &[0, 1]), |_| false);
        assert_eq!(cache.bytes(), 2 * 4 + 8 + 12 + 20);
        cache.keep(&[5, 5, 5, 5], keeping(2, 4, &[2]), |_| false);
        cache.check();
        assert!(cache.evictions() > 0 && !cache.is_empty());
    }

    #[test]
    fn what_costs_least_to_lose_goes_first() {
        let long: Vec<TokenId> = (0..100).collect();
        let row = size_of::<TokenId>() as u64;
        // A small side request leaves the large state where it is.
        let mut cache = filled(110 * row, &[&long]);
        for side in 200..220 {
            let _ = cache.find(&[side; 8], 7, |_| true);
            cache.keep(&[side; 8], keeping(side, 0, &[]), |_| false);
            cache.check();
        }
        assert!(cache.has(&long));
        // Of one conversation's states the older ones go.
        let mut cache = filled(180 * row, &[&long[..40], &long[..60]]);
        let _ = cache.find(&long, 99, |_| true);
        cache.keep(&long[..80], keeping(9, 0, &[]), |_| false);
        let _ = cache.find(&long, 99, |_| true);
        cache.keep(&long[..90], keeping(9, 0, &[]), |_| false);
        assert!(cache.has(&long[..90]) && !cache.has(&long[..40]));
        // What is protected goes last.
        let mut cache = filled(150 * row, &[&long[..10]]);
        cache.keep(&long[50..], keeping(1, 0, &[]), |key| key.len() == 10);
        cache.keep(&long, keeping(2, 0, &[]), |key| key.len() == 10);
        assert!(cache.has(&long[..10]));
    }
}
