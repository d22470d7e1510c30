//! How many drafts a round should hold, whose, and from where: expected tokens per measured cost. Never decides what a
//! reply says.
//!
//! A round of R rows takes a time t(R) that was measured before. A draft adds a row, and a token with the probability
//! that it and all drafts before it land. The best round is the one with the most expected tokens per time; where rows
//! are dear or drafts miss, that is a round without drafts. Rows that were never timed count as free, so that they get
//! timed; a probe now and then keeps old figures from deciding for ever.

use std::ops::Range;
use std::time::Duration;

use crate::copy::CLASS_COUNT;
use crate::limits::DRAFTS_MAX;
use crate::request::DraftSource;

/// Rounds with more reply rows than this share one figure.
const ROWS_TIMED_MAX: usize = 128;
/// Weight of a new measurement.
const WEIGHT: f64 = 0.125;
/// After so many rounds without drafts one round tries them again.
pub const PROBE_ROUNDS: u32 = 32;
/// How fast old verdicts on drafts fade, a verdict.
const FADE: f64 = 0.95;
/// How many verdicts the engine's average counts for a new sequence.
const PRIOR: f64 = 4.0;
/// What copies are thought to be worth before any was judged, by the class of their occurrence.
const COPY_PRIORS: [f64; CLASS_COUNT] = [0.25, 0.4, 0.55, 0.7, 0.85];

/// Verdicts on drafts by their place in the window, fading.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Acceptance {
    landed: [f64; DRAFTS_MAX],
    judged: [f64; DRAFTS_MAX],
}

impl Acceptance {
    /// Counts a window whose first `judged` drafts were compared and whose first `accepted` landed.
    pub fn record(&mut self, accepted: usize, judged: usize) {
        for index in 0..judged.min(DRAFTS_MAX) {
            self.landed[index] = self.landed[index] * FADE + if index < accepted { 1.0 } else { 0.0 };
            self.judged[index] = self.judged[index] * FADE + 1.0;
        }
    }

    /// Counts drafts that were proposed and not tried, by what they were thought to be worth: a drafter that has lost its
    /// confidence is then asked less often.
    pub fn record_untried(&mut self, first: usize, probabilities: impl Iterator<Item = f64>) {
        for (index, probability) in (first..DRAFTS_MAX).zip(probabilities) {
            self.landed[index] = self.landed[index] * FADE + probability;
            self.judged[index] = self.judged[index] * FADE + 1.0;
        }
    }

    /// Probability that the draft at `index` lands when those before it did; `prior` is the engine's average.
    fn probability(&self, index: usize, prior: f64) -> f64 {
        (self.landed[index] + PRIOR * prior) / (self.judged[index] + PRIOR)
    }
}

/// What rounds cost and what drafts are worth, as measured so far.
#[derive(Clone, Debug)]
pub struct Pace {
    /// Seconds of a round by its count of reply rows; 0 is unknown.
    reply_rows: Vec<f64>,
    /// Seconds of one prompt row, on average and when last timed; 0 is unknown.
    prompt_row: f64,
    prompt_row_last: f64,
    /// Seconds of one call of the drafter; 0 is unknown.
    draft_call: f64,
    overall: Acceptance,
    /// Drafts that landed, and the confidence the drafter had in all that were judged.
    landed: f64,
    confidence: f64,
    /// Copies, by the class of their occurrence.
    copies: [Acceptance; CLASS_COUNT],
    rounds_without_drafts: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            reply_rows: vec![0.0; ROWS_TIMED_MAX + 1],
            prompt_row: 0.0,
            prompt_row_last: 0.0,
            draft_call: 0.0,
            overall: Acceptance::default(),
            landed: 0.0,
            confidence: 0.0,
            copies: [Acceptance::default(); CLASS_COUNT],
            rounds_without_drafts: 0,
        }
    }
}

fn blend(figure: &mut f64, measured: f64) {
    *figure = if *figure == 0.0 { measured } else { *figure + WEIGHT * (measured - *figure) };
}

impl Pace {
    /// Takes in how long a round took.
    pub fn record_round(&mut self, prompt_rows: usize, reply_rows: usize, took: Duration) {
        let seconds = took.as_secs_f64().max(1e-9);
        if prompt_rows == 0 {
            blend(&mut self.reply_rows[reply_rows.min(ROWS_TIMED_MAX)], seconds);
        } else {
            let replies = if reply_rows == 0 { 0.0 } else { self.round_seconds(reply_rows).unwrap_or(0.0) };
            self.prompt_row_last = (seconds - replies).max(1e-9) / prompt_rows as f64;
            blend(&mut self.prompt_row, self.prompt_row_last);
        }
    }

    pub fn record_draft_call(&mut self, took: Duration) {
        blend(&mut self.draft_call, took.as_secs_f64().max(1e-9));
    }

    /// Takes in the verdict on one window. `confidence`: what the drafter expected of each judged draft.
    pub fn record_verdict(&mut self, accepted: usize, confidence: &[f32]) {
        self.overall.record(accepted, confidence.len());
        for (index, &confidence) in confidence.iter().enumerate() {
            self.landed = self.landed * FADE + if index < accepted { 1.0 } else { 0.0 };
            self.confidence = self.confidence * FADE + f64::from(confidence.clamp(0.0, 1.0));
        }
    }

    /// Takes in what became of a copy, used or not: the tokens that followed tell what it would have been worth.
    pub fn record_copy(&mut self, class: usize, accepted: usize, judged: usize) {
        self.copies[class].record(accepted, judged);
    }

    pub fn record_drafting(&mut self, drafted: bool) {
        self.rounds_without_drafts = if drafted { 0 } else { self.rounds_without_drafts + 1 };
    }

    /// Whether drafts are due for a try although they didn't pay when they were last measured.
    pub fn is_probe_due(&self) -> bool {
        self.rounds_without_drafts >= PROBE_ROUNDS
    }

    /// Prompt rows that fit into `gap` beside `reply_rows` and a call of the drafter; `None` before any prompt row was
    /// timed. Rows grow dearer as a prompt grows and dear again after a cheap one, so the dearer figure counts.
    pub fn prompt_rows_within(&self, gap: Duration, reply_rows: usize) -> Option<u32> {
        if self.prompt_row == 0.0 {
            return None;
        }
        let replies = self.round_seconds(reply_rows).unwrap_or(0.0);
        let room = (gap.as_secs_f64() - replies - self.draft_call).max(0.0);
        Some((room / self.prompt_row.max(self.prompt_row_last)) as u32)
    }

    /// Seconds of a round of `rows` reply rows: measured, or between the nearest measured counts. Beyond the largest
    /// one rows count as free. `None` before any round was timed.
    fn round_seconds(&self, rows: usize) -> Option<f64> {
        let rows = rows.min(ROWS_TIMED_MAX);
        let known = |range: std::ops::Range<usize>| {
            let mut range = range;
            move |back: bool| {
                let mut find = |index: usize| (self.reply_rows[index] > 0.0).then_some((index, self.reply_rows[index]));
                if back { range.by_ref().rev().find_map(&mut find) } else { range.by_ref().find_map(&mut find) }
            }
        };
        let below = known(0..rows + 1)(true);
        let above = known(rows..ROWS_TIMED_MAX + 1)(false);
        match (below, above) {
            (Some((low, low_seconds)), Some((high, high_seconds))) if high > low => {
                let share = (rows - low) as f64 / (high - low) as f64;
                Some(low_seconds + share * (high_seconds - low_seconds))
            }
            (Some((_, seconds)), _) | (None, Some((_, seconds))) => Some(seconds),
            (None, None) => None,
        }
    }

    /// Whether a round of at most `rows` reply rows was timed.
    fn is_timed_within(&self, rows: usize) -> bool {
        self.reply_rows[..rows.min(ROWS_TIMED_MAX) + 1].iter().any(|&seconds| seconds > 0.0)
    }

    /// How much of the drafter's confidence has come true; 1 before anything was judged.
    fn calibration(&self) -> f64 {
        if self.confidence == 0.0 { 1.0 } else { self.landed / self.confidence }
    }

    /// Probability that a draft lands when those before it did, before the drafter has said anything.
    pub fn expected(&self, acceptance: &Acceptance, index: usize) -> f64 {
        let index = index.min(DRAFTS_MAX - 1);
        acceptance.probability(index, self.overall.probability(index, 0.5))
    }

    /// The same for a copy of this class.
    pub fn expected_copy(&self, acceptance: &Acceptance, class: usize, index: usize) -> f64 {
        let index = index.min(DRAFTS_MAX - 1);
        acceptance.probability(index, self.copies[class].probability(index, COPY_PRIORS[class]))
    }

    /// The same for a draft of the draft head that exists, from the head's own confidence.
    pub fn corrected(&self, confidence: f32) -> f64 {
        (f64::from(confidence.clamp(0.0, 1.0)) * self.calibration()).min(1.0)
    }
}

/// What one source can propose for a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offer {
    pub count: u32,
    /// Probability that draft `i` and all before it land.
    pub products: [f64; DRAFTS_MAX],
}

impl Offer {
    /// Nothing to propose.
    pub const NONE: Offer = Offer { count: 0, products: [0.0; DRAFTS_MAX] };

    /// `count` drafts, each of which lands with its probability when those before it did.
    pub fn new(count: u32, probability: impl Fn(usize) -> f64) -> Self {
        let mut offer = Offer { count: count.min(DRAFTS_MAX as u32), ..Offer::NONE };
        let mut product = 1.0;
        for (index, slot) in offer.products[..offer.count as usize].iter_mut().enumerate() {
            product *= probability(index);
            *slot = product;
        }
        offer
    }

    /// Tokens that the whole offer is expected to bring.
    fn worth(&self) -> f64 {
        self.products[..self.count as usize].iter().sum()
    }
}

/// One sequence's drafts, for [`deal`].
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Index of the sequence.
    pub sequence: usize,
    pub head: Offer,
    pub copy: Offer,
    /// What the head has answered, as a range of `Drafts::tokens`; empty where it wasn't asked.
    pub answer: Range<usize>,
    /// How many drafts it shall have and from where: the answer.
    pub source: DraftSource,
    pub count: u32,
}

impl Candidate {
    /// A sequence with its offers, before anything is dealt.
    pub fn new(sequence: usize, head: Offer, copy: Offer) -> Self {
        Candidate { sequence, head, copy, answer: 0..0, source: DraftSource::Copy, count: 0 }
    }

    /// Turns to the source that is worth more; a copy, which costs no call, where they are worth the same.
    fn choose(&mut self) {
        let is_head = self.head.count > 0 && (self.copy.count == 0 || self.head.worth() > self.copy.worth());
        self.source = if is_head { DraftSource::Head } else { DraftSource::Copy };
    }

    fn offer(&self) -> &Offer {
        match self.source {
            DraftSource::Head => &self.head,
            DraftSource::Copy => &self.copy,
        }
    }
}

/// Deals the draft rows of a round to its sequences, each from the source that is worth more, so that the round has the
/// most expected tokens per time.
///
/// `fixed_rows`: rows that run anyway and bring a token each. `draft_rows_max`: room for drafts. `is_call_due`: drafts of
/// the head still cost a call of it; the deal then weighs a round without that call too.
pub fn deal(pace: &Pace, candidates: &mut [Candidate], fixed_rows: usize, draft_rows_max: usize, is_call_due: bool) {
    if is_call_due {
        candidates.iter_mut().for_each(|candidate| candidate.source = DraftSource::Copy);
        let copies = spread(pace, candidates, fixed_rows, draft_rows_max, 0.0);
        candidates.iter_mut().for_each(Candidate::choose);
        let is_head_used = candidates.iter().any(|candidate| candidate.source == DraftSource::Head);
        if is_head_used && spread(pace, candidates, fixed_rows, draft_rows_max, pace.draft_call) > copies {
            return;
        }
        candidates.iter_mut().for_each(|candidate| candidate.source = DraftSource::Copy);
    } else {
        candidates.iter_mut().for_each(Candidate::choose);
    }
    spread(pace, candidates, fixed_rows, draft_rows_max, 0.0);
}

/// Gives every candidate all of its better source, as far as the rows go: what drafts bring is measured by trying them.
pub fn deal_all(candidates: &mut [Candidate], draft_rows_max: usize) {
    candidates.iter_mut().for_each(|candidate| {
        candidate.choose();
        candidate.count = 0;
    });
    hand_out(candidates, draft_rows_max);
}

/// Sets the counts for the most expected tokens per time, with each candidate's source as it stands, and returns that
/// rate. Drafts cost `draft_seconds` beside their rows.
fn spread(
    pace: &Pace,
    candidates: &mut [Candidate],
    fixed_rows: usize,
    draft_rows_max: usize,
    draft_seconds: f64,
) -> f64 {
    candidates.iter_mut().for_each(|candidate| candidate.count = 0);
    // Without a round of so few rows there is nothing to compare with: this one becomes it.
    let Some(plain_seconds) = pace.round_seconds(fixed_rows).filter(|_| pace.is_timed_within(fixed_rows)) else {
        return 0.0;
    };
    let mut tokens = fixed_rows as f64;
    let mut best_rate = tokens / plain_seconds;
    let mut best_rows = 0;
    // Once for the best number of draft rows, once more to hand them out: the greedy order is the same.
    for row in 1..=draft_rows_max {
        let Some(index) = next(candidates) else { break };
        let candidate = &mut candidates[index];
        tokens += candidate.offer().products[candidate.count as usize];
        candidate.count += 1;
        let seconds = pace.round_seconds(fixed_rows + row).unwrap_or(plain_seconds) + draft_seconds;
        if tokens / seconds > best_rate {
            best_rate = tokens / seconds;
            best_rows = row;
        }
    }
    candidates.iter_mut().for_each(|candidate| candidate.count = 0);
    hand_out(candidates, best_rows);
    best_rate
}

fn hand_out(candidates: &mut [Candidate], rows: usize) {
    for _ in 0..rows {
        let Some(index) = next(candidates) else { break };
        candidates[index].count += 1;
    }
}

/// The candidate whose next draft is the likeliest to land; the first of equals.
fn next(candidates: &[Candidate]) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for (index, candidate) in candidates.iter().enumerate() {
        if candidate.count >= candidate.offer().count {
            continue;
        }
        let product = candidate.offer().products[candidate.count as usize];
        if best.is_none_or(|(_, most)| product > most) {
            best = Some((index, product));
        }
    }
    best.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(probability: f64, count: u32) -> Candidate {
        Candidate::new(0, Offer::new(count, |_| probability), Offer::NONE)
    }

    fn timed(times: &[(usize, u64)], draft_call: u64) -> Pace {
        let mut pace = Pace::default();
        for &(rows, microseconds) in times {
            pace.record_round(0, rows, Duration::from_micros(microseconds));
        }
        if draft_call > 0 {
            pace.record_draft_call(Duration::from_micros(draft_call));
        }
        pace
    }

    #[test]
    fn drafts_where_they_pay_and_nowhere_else() {
        // measured (rows, microseconds), draft call, probability a draft, drafts chosen of 5
        type Case<'a> = (&'a str, &'a [(usize, u64)], u64, f64, u32);
        let cases: [Case<'_>; 8] = [
            ("nothing timed: a plain round first", &[], 0, 1.0, 0),
            ("only drafted rounds timed: a plain one too", &[(6, 100)], 0, 1.0, 0),
            ("only one row timed: more rows may be free", &[(1, 100)], 0, 0.5, 5),
            ("rows are free and drafts land", &[(1, 100), (6, 100)], 10, 0.9, 5),
            ("rows are free and drafts never land", &[(1, 100), (6, 100)], 10, 0.0, 0),
            ("every row costs a whole round", &[(1, 100), (6, 600)], 0, 0.9, 0),
            ("rows cost a third of a round", &[(1, 90), (6, 240)], 0, 0.6, 1),
            ("the drafter itself is too slow", &[(1, 100), (6, 110)], 400, 0.6, 0),
        ];
        for (name, times, draft_call, probability, expected) in cases {
            let mut candidates = [candidate(probability, 5)];
            deal(&timed(times, draft_call), &mut candidates, 1, 100, true);
            assert_eq!(candidates[0].count, expected, "{name}");
        }
    }

    #[test]
    fn gives_rows_to_the_likelier_drafts_first() {
        let mut candidates = [candidate(0.5, 5), candidate(0.9, 5), candidate(0.9, 1)];
        deal(&timed(&[(3, 100)], 0), &mut candidates, 3, 5, false);
        assert_eq!(candidates.clone().map(|candidate| candidate.count), [0, 4, 1]);
        deal_all(&mut candidates, 5);
        assert_eq!(candidates.clone().map(|candidate| candidate.count), [0, 4, 1]);
        deal_all(&mut candidates, 100);
        assert_eq!(candidates.map(|candidate| candidate.count), [5, 5, 1]);
        // Where the deal is to try all there is, drafts that never landed are tried too.
        let mut candidates = [candidate(0.0, 5)];
        deal_all(&mut candidates, 4);
        assert_eq!(candidates.map(|candidate| (candidate.source, candidate.count)), [(DraftSource::Head, 4)]);
    }

    #[test]
    fn rows_go_to_sequences_by_expected_tokens_per_time() {
        // measured (rows, microseconds), each sequence's probability a draft and most drafts, room -> drafts
        type Case<'a> = (&'a str, &'a [(usize, u64)], [(f64, u32); 3], usize, [u32; 3]);
        let cases: [Case<'_>; 6] = [
            ("free rows, all that fit", &[(3, 100), (20, 100)], [(0.9, 5), (0.5, 5), (0.7, 5)], 100, [5, 5, 5]),
            ("free rows, little room", &[(3, 100), (20, 100)], [(0.9, 5), (0.5, 5), (0.7, 5)], 6, [5, 0, 1]),
            ("dear rows, the sure drafts only", &[(3, 90), (18, 340)], [(0.9, 5), (0.5, 5), (0.7, 5)], 100, [4, 0, 1]),
            (
                "dear rows, none is worth its cost",
                &[(3, 90), (18, 540)],
                [(0.6, 5), (0.5, 5), (0.7, 5)],
                100,
                [0, 0, 0],
            ),
            ("no room", &[(3, 100), (20, 100)], [(0.9, 5), (0.5, 5), (0.7, 5)], 0, [0, 0, 0]),
            ("one that may not draft", &[(3, 100), (20, 100)], [(0.9, 0), (0.5, 2), (0.7, 1)], 100, [0, 2, 1]),
        ];
        for (name, times, sequences, room, expected) in cases {
            let mut candidates = sequences.map(|(probability, count)| candidate(probability, count));
            deal(&timed(times, 0), &mut candidates, 3, room, false);
            assert_eq!(candidates.map(|candidate| candidate.count), expected, "{name}");
        }
    }

    #[test]
    fn each_sequence_drafts_from_the_source_that_is_worth_more() {
        use DraftSource::{Copy, Head};
        // a call of the head, due or paid; head and copy (probability, drafts) of two sequences -> sources, counts
        type Offers = [(f64, u32); 2];
        type Case<'a> = (&'a str, u64, bool, [Offers; 2], [(DraftSource, u32); 2]);
        let cases: [Case<'_>; 7] = [
            ("a long copy beats the head", 10, true, [[(0.5, 5), (0.95, 5)]; 2], [(Copy, 5); 2]),
            ("the head beats a short copy", 10, true, [[(0.9, 5), (0.3, 5)]; 2], [(Head, 5); 2]),
            ("equals are copied", 10, true, [[(0.5, 5), (0.5, 5)]; 2], [(Copy, 5); 2]),
            ("each its own", 10, true, [[(0.9, 5), (0.3, 5)], [(0.5, 5), (0.95, 5)]], [(Head, 5), (Copy, 5)]),
            ("a slow head is left out", 900, true, [[(0.9, 5), (0.3, 5)], [(0.5, 5), (0.95, 5)]], [(Copy, 5); 2]),
            ("... but not when it was called", 900, false, [[(0.9, 5), (0.3, 5)]; 2], [(Head, 5); 2]),
            ("nothing to copy", 10, true, [[(0.9, 3), (0.9, 0)]; 2], [(Head, 3); 2]),
        ];
        for (name, call, is_due, offers, expected) in cases {
            let offer = |(probability, count)| Offer::new(count, |_| probability);
            let mut candidates = offers.map(|[head, copy]| Candidate::new(0, offer(head), offer(copy)));
            deal(&timed(&[(2, 100), (12, 100)], call), &mut candidates, 2, 100, is_due);
            assert_eq!(candidates.map(|candidate| (candidate.source, candidate.count)), expected, "{name}");
        }
    }

    #[test]
    fn copies_are_judged_by_class_and_sequence() {
        let mut pace = Pace::default();
        let (fresh, mut own) = (Acceptance::default(), Acceptance::default());
        assert!(pace.expected_copy(&fresh, 4, 0) > 0.8 && pace.expected_copy(&fresh, 0, 0) < 0.3);
        for _ in 0..200 {
            pace.record_copy(4, 0, 1);
            pace.record_copy(0, 2, 2);
        }
        assert!(pace.expected_copy(&fresh, 4, 0) < 0.2, "long copies never land");
        assert!(pace.expected_copy(&fresh, 0, 1) > 0.8, "short ones always do");
        for _ in 0..50 {
            own.record(1, 1);
        }
        assert!(pace.expected_copy(&own, 4, 0) > 0.7, "but here they do");
    }

    #[test]
    fn learns_what_confidence_is_worth() {
        let mut pace = Pace::default();
        assert_eq!(pace.corrected(0.75), 0.75);
        for _ in 0..500 {
            pace.record_verdict(0, &[0.9]);
        }
        assert!(pace.corrected(0.9) < 0.01, "a drafter who is always wrong");
        for _ in 0..500 {
            pace.record_verdict(2, &[0.5, 0.5]);
        }
        assert!(pace.corrected(0.5) > 0.95, "a drafter who is always right");
    }

    #[test]
    fn prompt_rows_fit_the_gap() {
        let mut pace = timed(&[(2, 50_000)], 0);
        assert_eq!(pace.prompt_rows_within(Duration::from_millis(200), 2), None);
        pace.record_round(100, 2, Duration::from_millis(150));
        assert_eq!(pace.prompt_rows_within(Duration::from_millis(200), 2), Some(150));
        assert_eq!(pace.prompt_rows_within(Duration::from_millis(20), 2), Some(0));
        pace.record_draft_call(Duration::from_millis(50));
        assert_eq!(pace.prompt_rows_within(Duration::from_millis(200), 2), Some(100));
    }

    #[test]
    fn the_gap_holds_while_rows_grow_dearer() {
        let gap = Duration::from_millis(200);
        let mut pace = timed(&[(2, 20_000)], 5_000);
        // Attention over a longer past: each piece's rows take a tenth more than those of the piece before.
        let mut row = 100e-6;
        let (mut longest, mut rows) = (0.0f64, 64);
        for _ in 0..40 {
            row *= 1.1;
            let seconds = 0.02 + row * f64::from(rows);
            longest = longest.max(seconds + 0.005);
            pace.record_round(rows as usize, 2, Duration::from_secs_f64(seconds));
            rows = pace.prompt_rows_within(gap, 2).expect("rows were timed");
            assert!(rows > 0);
        }
        assert!(longest < 0.22, "{longest} s");
        // One dear piece makes the next one small at once.
        pace.record_round(rows as usize, 2, Duration::from_secs(2));
        assert!(pace.prompt_rows_within(gap, 2).is_some_and(|next| next <= rows / 9), "{rows} rows");
    }
}
