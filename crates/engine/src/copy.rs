//! Copies from the context as drafts: what followed the longest earlier occurrence of the tokens at the end.
//!
//! Every run of [`SEED_TOKENS`] tokens is entered once, under a hash, into chains from the newest to the oldest. A look-up
//! walks one chain and compares backwards, so its cost doesn't grow with the context. An entry takes four bytes, and a
//! head of a chain as much. Nothing here can change a reply: a copy is a guess like any other draft.

use tf_text::TokenId;

use crate::limits::DRAFTS_MAX;

/// Shortest occurrence that is copied from.
pub const SEED_TOKENS: usize = 3;
/// Longer occurrences count as this long.
const MATCH_MAX: usize = 64;
/// Entries of a chain that one look-up visits.
const VISITS_MAX: usize = 64;
/// Tokens that one call enters at most, so that a long prompt never holds up a round.
const ENTRIES_MAX: usize = 1 << 16;
/// Heads of chains, at most.
const HEADS_MAX: usize = 1 << 20;
/// Longest occurrence of each class but the last; the classes' acceptance is measured apart.
const CLASSES: [usize; CLASS_COUNT - 1] = [3, 5, 8, 16];
/// How many classes of occurrences there are.
pub const CLASS_COUNT: usize = 5;

/// A sequence's known tokens.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    pub prompt: &'a [TokenId],
    pub reply: &'a [TokenId],
}

impl Text<'_> {
    fn len(&self) -> usize {
        self.prompt.len() + self.reply.len()
    }

    fn at(&self, index: usize) -> TokenId {
        match index.checked_sub(self.prompt.len()) {
            None => self.prompt[index],
            Some(index) => self.reply[index],
        }
    }
}

/// An earlier occurrence of the tokens at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Index of the token after it.
    pub next: usize,
    /// Tokens that agree, up to 64.
    pub length: usize,
}

impl Found {
    /// The class whose acceptance this copy is expected to have: longer occurrences are copied further.
    pub fn class(&self) -> usize {
        CLASSES.iter().position(|&longest| self.length <= longest).unwrap_or(CLASSES.len())
    }
}

/// Where every short run of one sequence's tokens stands.
#[derive(Clone, Debug, Default)]
pub struct CopyIndex {
    /// For each hash the end of the newest run, exclusive; 0 is none.
    heads: Vec<u32>,
    /// For each run, by its end less [`SEED_TOKENS`], the end of the run before it in its chain.
    before: Vec<u32>,
}

impl CopyIndex {
    /// Finds the longest earlier occurrence of the tokens at the end of `text`, the newest of equals. `None` also while
    /// the text is still being entered.
    pub fn find(&mut self, text: Text<'_>) -> Option<Found> {
        self.enter(text);
        let end = text.len();
        if self.before.len() + SEED_TOKENS != end {
            return None;
        }
        let mut best: Option<Found> = None;
        let mut candidate = self.heads[self.slot(text, end)] as usize;
        for _ in 0..VISITS_MAX {
            if candidate == 0 {
                break;
            }
            let most = candidate.min(MATCH_MAX);
            let length = (1..=most).take_while(|&back| text.at(candidate - back) == text.at(end - back)).count();
            if length >= SEED_TOKENS && best.is_none_or(|found| length > found.length) {
                best = Some(Found { next: candidate, length });
            }
            if length == MATCH_MAX {
                break;
            }
            candidate = self.before[candidate - SEED_TOKENS] as usize;
        }
        best
    }

    /// Enters every run that ends before the last token of `text`, or as many as one call may.
    fn enter(&mut self, text: Text<'_>) {
        if self.heads.is_empty() {
            self.heads = vec![0; text.len().next_power_of_two().clamp(256, HEADS_MAX)];
        }
        let first = self.before.len() + SEED_TOKENS;
        for end in first..text.len().min(first + ENTRIES_MAX) {
            let slot = self.slot(text, end);
            self.before.push(self.heads[slot]);
            self.heads[slot] = end as u32;
        }
    }

    fn slot(&self, text: Text<'_>, end: usize) -> usize {
        let mut hash = 0u64;
        for index in end - SEED_TOKENS..end {
            hash = (hash ^ u64::from(text.at(index))).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        // The high bits depend on all tokens; the count of heads is a power of two.
        (hash >> 32) as usize & (self.heads.len() - 1)
    }
}

/// Writes what followed `found` to `drafts`. A copy that reaches the text's end goes on with its own beginning, so that a
/// cycle is continued.
pub fn copy(text: Text<'_>, found: Found, count: usize, drafts: &mut Vec<TokenId>) {
    drafts.clear();
    for index in found.next..found.next + count.min(DRAFTS_MAX) {
        let token = match index.checked_sub(text.len()) {
            None => text.at(index),
            Some(own) => drafts[own],
        };
        drafts.push(token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied(tokens: &[TokenId], prompt: usize, count: usize) -> (usize, Vec<TokenId>) {
        let text = Text { prompt: &tokens[..prompt], reply: &tokens[prompt..] };
        let mut drafts = Vec::new();
        let Some(found) = CopyIndex::default().find(text) else { return (0, drafts) };
        copy(text, found, count, &mut drafts);
        (found.length, drafts)
    }

    #[test]
    fn copies_what_followed_the_longest_occurrence() {
        // tokens, wanted -> tokens that agree, drafts
        type Case<'a> = (&'a str, &'a [u32], usize, (usize, &'a [u32]));
        let cases: [Case<'_>; 8] = [
            ("too short", &[1, 2], 4, (0, &[])),
            ("nothing repeats", &[1, 2, 3, 4, 5, 6], 4, (0, &[])),
            ("two tokens are too few", &[1, 2, 9, 3, 1, 2], 4, (0, &[])),
            ("once before", &[1, 2, 3, 7, 8, 9, 1, 2, 3], 3, (3, &[7, 8, 9])),
            ("the longer one", &[5, 1, 2, 3, 7, 4, 1, 2, 3, 8, 5, 1, 2, 3], 2, (4, &[7, 4])),
            ("the newer of equals", &[1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1, (3, &[8])),
            ("beyond its own end", &[6, 1, 2, 3, 4, 1, 2, 3], 7, (3, &[4, 1, 2, 3, 4, 1, 2])),
            ("one token for ever", &[4, 4, 4, 4, 4], 3, (4, &[4, 4, 4])),
        ];
        for (name, tokens, count, (length, drafts)) in cases {
            // Where the prompt ends makes no difference.
            for prompt in 0..=tokens.len() {
                assert_eq!(copied(tokens, prompt, count), (length, drafts.to_vec()), "{name}, prompt of {prompt}");
            }
        }
    }

    #[test]
    fn a_growing_text_finds_what_a_search_through_all_of_it_finds() {
        let mut state = 7u64;
        let mut tokens: Vec<TokenId> = Vec::new();
        let mut index = CopyIndex::default();
        let mut hits = 0;
        for length in 0..600 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            tokens.push((state >> 62) as TokenId);
            let agree = |end: usize| {
                (1..=end.min(MATCH_MAX)).take_while(|&back| tokens[end - back] == tokens[length + 1 - back]).count()
            };
            // The newest of the longest, among as many as a look-up visits: only runs of three that agree are in reach.
            let ends = (SEED_TOKENS..=length).rev().filter(|&end| agree(end) >= SEED_TOKENS).take(20);
            let expected = ends.map(|end| (agree(end), end)).fold(
                (0, 0),
                |best, found| {
                    if found.0 > best.0 { found } else { best }
                },
            );
            let found = index.find(Text { prompt: &tokens[..length / 2], reply: &tokens[length / 2..] });
            let found = found.map_or((0, 0), |found| (found.length, found.next));
            assert!(found.0 >= expected.0, "at {length}: {found:?}, a search finds {expected:?}");
            assert!(found.0 > expected.0 || found == expected, "at {length}: {found:?}, a search finds {expected:?}");
            hits += usize::from(found.0 > 0);
        }
        assert!(hits > 300, "{hits} copies");
    }

    #[test]
    fn a_long_prompt_is_entered_in_pieces() {
        let tokens: Vec<TokenId> = (0..(ENTRIES_MAX as u32 + 10)).chain([5, 6, 7]).collect();
        let text = Text { prompt: &tokens, reply: &[] };
        let mut index = CopyIndex::default();
        assert_eq!(index.find(text), None, "one call entered everything");
        assert_eq!(index.find(text), Some(Found { next: 8, length: 3 }));
    }

    #[test]
    fn classes_rise_with_the_length() {
        let classes = [3, 4, 5, 6, 8, 9, 16, 17, 64].map(|length| Found { next: 0, length }.class());
        assert_eq!(classes, [0, 1, 1, 2, 2, 3, 3, 4, 4]);
    }
}
