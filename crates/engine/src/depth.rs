//! How many drafts a round should hold: expected tokens per measured cost. Never decides what a reply says.
//!
//! A round of R rows takes a time t(R) that was measured before. A draft adds a row, and a token with the probability
//! that it and all drafts before it land. The best round is the one with the most expected tokens per time; where rows
//! are dear or drafts miss, that is a round without drafts. Rows that were never timed count as free, so that they get
//! timed; a probe now and then keeps old figures from deciding for ever.

use std::time::Duration;

use crate::limits::DRAFTS_MAX;

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
    /// Seconds of one prompt row; 0 is unknown.
    prompt_row: f64,
    /// Seconds of one call of the drafter; 0 is unknown.
    draft_call: f64,
    overall: Acceptance,
    /// Drafts that landed, and the confidence the drafter had in all that were judged.
    landed: f64,
    confidence: f64,
    rounds_without_drafts: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            reply_rows: vec![0.0; ROWS_TIMED_MAX + 1],
            prompt_row: 0.0,
            draft_call: 0.0,
            overall: Acceptance::default(),
            landed: 0.0,
            confidence: 0.0,
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
            blend(&mut self.prompt_row, (seconds - replies).max(1e-9) / prompt_rows as f64);
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

    pub fn record_drafting(&mut self, drafted: bool) {
        self.rounds_without_drafts = if drafted { 0 } else { self.rounds_without_drafts + 1 };
    }

    /// Whether drafts are due for a try although they didn't pay when they were last measured.
    pub fn is_probe_due(&self) -> bool {
        self.rounds_without_drafts >= PROBE_ROUNDS
    }

    /// Prompt rows that fit into `gap` beside `reply_rows`; `None` before any prompt row was timed.
    pub fn prompt_rows_within(&self, gap: Duration, reply_rows: usize) -> Option<u32> {
        if self.prompt_row == 0.0 {
            return None;
        }
        let replies = self.round_seconds(reply_rows).unwrap_or(0.0);
        Some(((gap.as_secs_f64() - replies).max(0.0) / self.prompt_row) as u32)
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

    /// The same for a draft that exists, from the drafter's own confidence.
    pub fn corrected(&self, confidence: f32) -> f64 {
        (f64::from(confidence.clamp(0.0, 1.0)) * self.calibration()).min(1.0)
    }
}

/// One sequence's drafts, for [`choose`].
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Index of the sequence.
    pub sequence: usize,
    /// Most drafts this window can hold.
    pub count_max: u32,
    /// How many it shall hold: the answer.
    pub count: u32,
    /// Probability that draft `i` and all before it land.
    pub products: [f64; DRAFTS_MAX],
}

/// Sets each candidate's count so that the round has the most expected tokens per time.
///
/// `reply_rows`: rows that run anyway, one a running reply. `draft_rows_max`: room for drafts. `call`: whether the cost of
/// calling the drafter is still to be paid.
pub fn choose(pace: &Pace, candidates: &mut [Candidate], reply_rows: usize, draft_rows_max: usize, call: bool) {
    let plain_tokens = reply_rows as f64;
    // Without a round of so few rows there is nothing to compare with: this one becomes it.
    let Some(plain_seconds) = pace.round_seconds(reply_rows).filter(|_| pace.is_timed_within(reply_rows)) else {
        candidates.iter_mut().for_each(|candidate| candidate.count = 0);
        return;
    };
    let draft_seconds = if call { pace.draft_call } else { 0.0 };
    let mut tokens = plain_tokens;
    let mut best_rate = plain_tokens / plain_seconds;
    let mut best_rows = 0;
    // Once for the best number of draft rows, once more to hand them out: the greedy order is the same.
    for row in 1..=draft_rows_max {
        let Some(index) = next(candidates) else { break };
        let candidate = &mut candidates[index];
        tokens += candidate.products[candidate.count as usize];
        candidate.count += 1;
        let seconds = pace.round_seconds(reply_rows + row).unwrap_or(plain_seconds) + draft_seconds;
        if tokens / seconds > best_rate {
            best_rate = tokens / seconds;
            best_rows = row;
        }
    }
    candidates.iter_mut().for_each(|candidate| candidate.count = 0);
    for _ in 0..best_rows {
        let Some(index) = next(candidates) else { break };
        candidates[index].count += 1;
    }
}

/// The candidate whose next draft is the likeliest to land; the first of equals.
fn next(candidates: &[Candidate]) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for (index, candidate) in candidates.iter().enumerate() {
        if candidate.count >= candidate.count_max {
            continue;
        }
        let product = candidate.products[candidate.count as usize];
        if best.is_none_or(|(_, most)| product > most) {
            best = Some((index, product));
        }
    }
    best.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(probability: f64, count_max: u32) -> Candidate {
        let mut products = [0.0; DRAFTS_MAX];
        let mut product = 1.0;
        for slot in &mut products {
            product *= probability;
            *slot = product;
        }
        Candidate { sequence: 0, count_max, count: 0, products }
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
            choose(&timed(times, draft_call), &mut candidates, 1, 100, true);
            assert_eq!(candidates[0].count, expected, "{name}");
        }
    }

    #[test]
    fn gives_rows_to_the_likelier_drafts_first() {
        let mut candidates = [candidate(0.5, 5), candidate(0.9, 5), candidate(0.9, 1)];
        choose(&timed(&[(3, 100)], 0), &mut candidates, 3, 5, false);
        assert_eq!(candidates.map(|candidate| candidate.count), [0, 4, 1]);
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
    }
}
