//! A row is looked at in blocks of 128 logits. One pass finds the largest of each block; later passes visit only blocks that
//! can hold what they look for. Nothing is sorted beyond the candidates that a rule leaves.

use std::cmp::Ordering;

use super::{Args, Draw, Drawn, Outcome, RowError, Scratch};
use crate::parallel::threads_for;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::draw::{GUMBEL_MAX, Threshold, bits, gumbel, noise, weight, weight_halves};
use tf_numerics::lanes::{Int, Kernel, Lanes, Level, Mask, WIDTH, dispatch};
use tf_numerics::math::{exp, ln};

const BLOCK: usize = 128;
const LEAST: f32 = f32::NEG_INFINITY;
/// Further behind than this a token weighs nothing: `exp(-28) < 2^-40`.
const WEIGHTLESS: f32 = -28.0;
/// Places at which one pass of the search for the end of top-p asks for the weight so far.
const PROBES: usize = 7;
/// The search ends by sorting so few candidates.
const SORT_MAX: u32 = 256;
/// Passes of that search; ties can't be told apart by more.
const PASSES_MAX: usize = 8;

/// Working memory of one thread.
#[derive(Debug, Default)]
pub(super) struct RowScratch {
    /// The row after the rules that change values.
    values: Vec<f32>,
    /// Largest value of each block of the raw row, and of `values`.
    raw_maxima: Vec<f32>,
    maxima: Vec<f32>,
    ranked_maxima: Vec<f32>,
    candidates: Vec<Candidate>,
    /// For each token, its count in the reply, with bit 31 set where prompt or reply have it. All zero between rows.
    counts: Vec<u32>,
    touched: Vec<u32>,
}

#[cfg(test)]
impl RowScratch {
    pub(super) fn capacities(&self) -> [usize; 7] {
        [
            self.values.capacity(),
            self.raw_maxima.capacity(),
            self.maxima.capacity(),
            self.ranked_maxima.capacity(),
            self.candidates.capacity(),
            self.counts.capacity(),
            self.touched.capacity(),
        ]
    }
}

/// Larger for the earlier candidate in the order (value descending, id ascending).
#[inline(always)]
pub(super) fn key(value: f32, id: u32) -> u64 {
    // Adding zero makes -0 and +0 equal.
    let bits = (value + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 };
    (ordered as u64) << 32 | !id as u64
}

/// The value in a key.
#[inline(always)]
fn value_of(key: u64) -> f32 {
    let ordered = (key >> 32) as u32;
    f32::from_bits(if ordered >> 31 == 1 { ordered & 0x7fff_ffff } else { !ordered })
}

/// A token that may be drawn.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    /// See [`key`].
    key: u64,
    /// `exp(value - largest)`.
    e: f32,
}

impl Candidate {
    #[inline(always)]
    fn new(value: f32, id: u32, e: f32) -> Self {
        Candidate { key: key(value, id), e }
    }
    #[inline(always)]
    fn id(self) -> u32 {
        !(self.key as u32)
    }
    #[inline(always)]
    fn value(self) -> f32 {
        value_of(self.key)
    }
}

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { logits, vocab, draws, outcomes, top, scratch } = args;
    let Scratch { threads, .. } = scratch;
    let mut top_count = 0;
    for draw in draws {
        let count = (draw.logprobs.unwrap_or(0) as usize).min(vocab);
        // The final word comes from the row; the range is known beforehand, so that rows may run side by side.
        outcomes.push(Ok(Drawn {
            token: 0,
            logprob: 0.0,
            next_logprob: 0.0,
            top_start: top_count as u32,
            top_count: count as u32,
        }));
        top_count += count;
    }
    top.resize(top_count, (0, LEAST));
    let thread_count = queue.pool.threads().min(draws.len()).max(1);
    if threads.len() < thread_count {
        threads.resize_with(thread_count, RowScratch::default);
    }
    let logits = logits.f32();
    let level = queue.level;
    let (threads, outcomes, top) = (Parts::new(threads), Parts::new(outcomes), Parts::new(top));
    queue.pool.run_on(threads_for(draws.len() * vocab * 8).min(thread_count), |index, count| {
        // SAFETY: each thread takes the scratch of its own index.
        let scratch = unsafe { &mut threads.part(index..index + 1)[0] };
        for i in split(draws.len(), count, index, 1) {
            // SAFETY: draws are dealt out, each to one thread.
            let outcome = unsafe { &mut outcomes.part(i..i + 1)[0] };
            let Ok(Drawn { top_start, top_count, .. }) = *outcome else { continue };
            let range = top_start as usize..(top_start + top_count) as usize;
            // SAFETY: the ranges of two draws do not overlap.
            let top = unsafe { top.part(range) };
            let draw = &draws[i];
            let row = &logits[draw.row * vocab..][..vocab];
            *outcome = dispatch(level, RowKernel { row, draw, scratch, top }).map(|drawn| Drawn { top_start, ..drawn });
        }
    });
}

/// The token of one row, on the calling thread.
pub(crate) fn draw_one(level: Level, row: &[f32], draw: &Draw<'_>, scratch: &mut Scratch) -> Result<u32, RowError> {
    if scratch.threads.is_empty() {
        scratch.threads.push(RowScratch::default());
    }
    let outcome = dispatch(level, RowKernel { row, draw, scratch: &mut scratch.threads[0], top: &mut [] });
    outcome.map(|drawn| drawn.token)
}

struct RowKernel<'a, 'b> {
    row: &'a [f32],
    draw: &'a Draw<'b>,
    scratch: &'a mut RowScratch,
    top: &'a mut [(u32, f32)],
}

impl Kernel for RowKernel<'_, '_> {
    type Output = Outcome;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Outcome {
        let RowKernel { row, draw, scratch, top } = self;
        let largest = survey::<L>(row, &mut scratch.raw_maxima)?;
        let token = choose_token::<L>(row, draw, largest, scratch)?;
        let mut drawn = Drawn { token, logprob: 0.0, next_logprob: 0.0, top_start: 0, top_count: 0 };
        if draw.logprobs.is_some() || draw.next.is_some() {
            let log_total = log_weight(total_weight::<L>(row, &scratch.raw_maxima, largest));
            let logprob = |id: u32| (row[id as usize] - largest) - log_total;
            if draw.logprobs.is_some() {
                drawn.logprob = logprob(token);
            }
            if let Some(next) = draw.next {
                drawn.next_logprob = logprob(next);
            }
            if !top.is_empty() {
                keep_first_k::<L>(row, top.len(), largest, RankedFrom::Raw, scratch);
                scratch.candidates.sort_unstable_by_key(|c| std::cmp::Reverse(c.key));
                for (top, candidate) in top.iter_mut().zip(&scratch.candidates) {
                    *top = (candidate.id(), logprob(candidate.id()));
                }
                drawn.top_count = scratch.candidates.len() as u32;
            }
        }
        Ok(drawn)
    }
}

/// The drawn token.
#[inline(always)]
fn choose_token<L: Lanes>(
    row: &[f32],
    draw: &Draw<'_>,
    largest: f32,
    scratch: &mut RowScratch,
) -> Result<u32, RowError> {
    let settings = draw.settings;
    let greedy = settings.temperature <= 0.0;
    let changed = change_logits(row, draw, scratch);
    if greedy && !changed {
        return first_largest(row, &scratch.raw_maxima, largest).ok_or(RowError::NoCandidate);
    }
    // The lists are taken out, so that the row may be borrowed from the same scratch; they go back at the end.
    let mut values = std::mem::take(&mut scratch.values);
    let mut maxima = std::mem::take(&mut scratch.maxima);
    let token = if greedy {
        most_likely::<L>(&values, &mut maxima)
    } else if !changed && settings.temperature == 1.0 {
        std::mem::swap(&mut maxima, &mut scratch.raw_maxima);
        let token = sample::<L>(row, draw, largest, &maxima, scratch);
        std::mem::swap(&mut maxima, &mut scratch.raw_maxima);
        token
    } else {
        if !changed {
            values.clear();
            values.extend_from_slice(row);
        }
        divide::<L>(&mut values, settings.temperature);
        match survey::<L>(&values, &mut maxima) {
            Ok(largest) => sample::<L>(&values, draw, largest, &maxima, scratch),
            // The quotients overflow: the draw of a temperature near 0.
            Err(_) => {
                values.clear();
                values.extend_from_slice(row);
                if changed {
                    scratch.values = values;
                    change_logits(row, draw, scratch);
                    values = std::mem::take(&mut scratch.values);
                }
                most_likely::<L>(&values, &mut maxima)
            }
        }
    };
    scratch.values = values;
    scratch.maxima = maxima;
    token
}

#[inline(always)]
fn most_likely<L: Lanes>(values: &[f32], maxima: &mut Vec<f32>) -> Result<u32, RowError> {
    let largest = survey::<L>(values, maxima)?;
    first_largest(values, maxima, largest).ok_or(RowError::NoCandidate)
}

/// A block of a row; a short last one is filled with minus infinity.
#[inline(always)]
fn full_block<'a>(block: &'a [f32], spare: &'a mut [f32; BLOCK]) -> &'a [f32; BLOCK] {
    match block.try_into() {
        Ok(full) => full,
        Err(_) => {
            spare.fill(LEAST);
            spare[..block.len()].copy_from_slice(block);
            spare
        }
    }
}

/// The largest value of the row and of each block.
#[inline(always)]
fn survey<L: Lanes>(row: &[f32], maxima: &mut Vec<f32>) -> Result<f32, RowError> {
    maxima.clear();
    maxima.reserve(row.len().div_ceil(BLOCK));
    let mut nan = L::splat(0.0).is_nan();
    let mut all = L::splat(LEAST);
    let mut spare = [0.0; BLOCK];
    for block in row.chunks(BLOCK) {
        let block = full_block(block, &mut spare).as_chunks::<WIDTH>().0;
        let mut largest = [L::splat(LEAST); 2];
        for pair in 0..BLOCK / WIDTH / 2 {
            let (a, b) = (L::load_array(&block[2 * pair]), L::load_array(&block[2 * pair + 1]));
            nan = nan.or(a.is_nan()).or(b.is_nan());
            largest = [largest[0].max(a), largest[1].max(b)];
        }
        let largest = largest[0].max(largest[1]);
        all = all.max(largest);
        maxima.push(largest.fold_max());
    }
    let largest = all.fold_max();
    if nan.any() || largest == f32::INFINITY { Err(RowError::NotFinite) } else { Ok(largest) }
}

/// The lowest index of the largest value; `None` when that is minus infinity.
#[inline(always)]
fn first_largest(row: &[f32], maxima: &[f32], largest: f32) -> Option<u32> {
    if largest == LEAST {
        return None;
    }
    let block = maxima.iter().position(|&m| m == largest)?;
    let start = block * BLOCK;
    let place = row[start..].iter().position(|&v| v == largest)?;
    Some((start + place) as u32)
}

/// Divides every value.
#[inline(always)]
fn divide<L: Lanes>(values: &mut [f32], temperature: f32) {
    let (chunks, rest) = values.as_chunks_mut::<WIDTH>();
    for chunk in chunks {
        (L::load_array(chunk) / L::splat(temperature)).store_array(chunk);
    }
    for value in rest {
        *value /= temperature;
    }
}

/// Bias, penalties and masks, into `scratch.values`. False when there are none and nothing was written.
fn change_logits(row: &[f32], draw: &Draw<'_>, scratch: &mut RowScratch) -> bool {
    let settings = draw.settings;
    let masked = if draw.reply_count < settings.masked_before { settings.masked } else { &[] };
    let nothing =
        settings.logit_bias.is_empty() && masked.is_empty() && draw.allowed.is_none() && !settings.needs_history();
    if nothing {
        return false;
    }
    let values = &mut scratch.values;
    values.clear();
    values.extend_from_slice(row);
    for &(id, bias) in settings.logit_bias {
        if let Some(value) = values.get_mut(id as usize) {
            *value += bias;
        }
    }
    if settings.needs_history() {
        penalise(draw, scratch);
    }
    let values = &mut scratch.values;
    if let Some(allowed) = draw.allowed {
        for (word, values) in values.chunks_mut(32).enumerate() {
            let bits = allowed.get(word).copied().unwrap_or(0);
            if bits == u32::MAX {
                continue;
            }
            for (bit, value) in values.iter_mut().enumerate() {
                if bits >> bit & 1 == 0 {
                    *value = LEAST;
                }
            }
        }
    }
    for &id in masked {
        if let Some(value) = values.get_mut(id as usize) {
            *value = LEAST;
        }
    }
    true
}

fn penalise(draw: &Draw<'_>, scratch: &mut RowScratch) {
    const SEEN: u32 = 1 << 31;
    let settings = draw.settings;
    let RowScratch { values, counts, touched, .. } = scratch;
    counts.resize(values.len(), 0);
    touched.clear();
    let prompt: &[u32] = if settings.repetition_penalty != 1.0 { draw.history.prompt } else { &[] };
    let reply = draw.history.reply.iter().chain(draw.history.window);
    for (&id, count) in prompt.iter().map(|id| (id, 0)).chain(reply.map(|id| (id, 1))) {
        if let Some(entry) = counts.get_mut(id as usize) {
            if *entry == 0 {
                touched.push(id);
            }
            *entry = (*entry + count) | SEEN;
        }
    }
    for &id in touched.iter() {
        let count = std::mem::take(&mut counts[id as usize]) & !SEEN;
        let value = &mut values[id as usize];
        let penalty = settings.repetition_penalty;
        if penalty != 1.0 {
            *value = if *value > 0.0 { *value / penalty } else { *value * penalty };
        }
        if count > 0 {
            *value = *value - settings.frequency_penalty * count as f32 - settings.presence_penalty;
        }
    }
}

/// A candidate's place in the contest.
#[derive(Clone, Copy)]
struct Best {
    score: f32,
    key: u64,
    id: u32,
}

impl Best {
    fn offer(best: &mut Option<Best>, score: f32, candidate: Candidate) {
        let wins = match best {
            None => true,
            Some(best) => match score.partial_cmp(&best.score) {
                Some(Ordering::Greater) => true,
                Some(Ordering::Equal) => candidate.key > best.key,
                Some(Ordering::Less) | None => false,
            },
        };
        if wins {
            *best = Some(Best { score, key: candidate.key, id: candidate.id() });
        }
    }
}

/// Draws from values that are final. `largest` is their maximum and finite, or minus infinity.
#[inline(always)]
fn sample<L: Lanes>(
    values: &[f32],
    draw: &Draw<'_>,
    largest: f32,
    maxima: &[f32],
    scratch: &mut RowScratch,
) -> Result<u32, RowError> {
    let settings = draw.settings;
    if largest == LEAST {
        return Err(RowError::NoCandidate);
    }
    let (top_k, top_p) = (settings.top_k as usize, settings.top_p.max(0.0));
    let mut best = None;
    if top_k > 0 && top_k < values.len() {
        keep_first_k::<L>(values, top_k, largest, RankedFrom::Maxima(maxima), scratch);
        let candidates = &mut scratch.candidates;
        if top_p < 1.0 {
            let total = candidates.iter().map(|c| weight(c.e)).sum();
            let count = sorted_prefix(candidates, 0, Threshold::new(top_p, total));
            candidates.truncate(count);
        }
        contest::<L>(candidates, draw, &mut best);
    } else {
        let last = if top_p < 1.0 { last_of_share::<L>(values, largest, maxima, top_p, scratch) } else { 0 };
        contest_all::<L>(values, draw, largest, maxima, last, &mut best);
    }
    best.map(|best| best.id).ok_or(RowError::NoCandidate)
}

/// The sum of all weights. Integers, so the order is free.
#[inline(always)]
fn total_weight<L: Lanes>(row: &[f32], maxima: &[f32], largest: f32) -> u64 {
    weights_from::<L, 1>(row, maxima, largest, [LEAST])[0].sum
}

/// Candidates from some value on: the sum of their weights and their number (weightless ones may be left out).
#[derive(Clone, Copy, Default)]
struct Share {
    sum: u64,
    count: u32,
}

/// The share of the values from each of `least` on.
#[inline(always)]
fn weights_from<L: Lanes, const N: usize>(row: &[f32], maxima: &[f32], largest: f32, least: [f32; N]) -> [Share; N] {
    // A lane's half-sums grow by at most 2^20 a step.
    const STEPS_MAX: usize = 2048;
    let zero = L::Int::splat(0);
    let (mut upper, mut lower, mut steps) = ([zero; N], [zero; N], 0);
    let mut shares = [Share::default(); N];
    let lowest = least.iter().fold(f32::INFINITY, |a, &b| if a < b { a } else { b });
    let mut spare = [0.0; BLOCK];
    for (block, &block_largest) in row.chunks(BLOCK).zip(maxima) {
        // Comparing the difference and not the value: no value of the block has a larger one.
        if block_largest < lowest || block_largest - largest <= WEIGHTLESS {
            continue;
        }
        for values in full_block(block, &mut spare).as_chunks::<WIDTH>().0 {
            let values = L::load_array(values);
            let (u, l) = weight_halves(exp(values - L::splat(largest)));
            for i in 0..N {
                let counts = values.ge(L::splat(least[i]));
                upper[i] = upper[i].add(L::Int::select(counts, u, zero));
                lower[i] = lower[i].add(L::Int::select(counts, l, zero));
                shares[i].count += counts.bits().count_ones();
            }
        }
        steps += BLOCK / WIDTH;
        if steps >= STEPS_MAX {
            for i in 0..N {
                shares[i].sum += sum_halves::<L>(upper[i], lower[i]);
                (upper[i], lower[i]) = (zero, zero);
            }
            steps = 0;
        }
    }
    for i in 0..N {
        shares[i].sum += sum_halves::<L>(upper[i], lower[i]);
    }
    shares
}

#[inline(always)]
fn sum_halves<L: Lanes>(upper: L::Int, lower: L::Int) -> u64 {
    let (upper, lower) = (L::int_to_array(upper), L::int_to_array(lower));
    let mut sum = 0u64;
    for l in 0..WIDTH {
        sum += ((upper[l] as u64) << 20) + lower[l] as u64;
    }
    sum
}

/// `ln(total * 2^-40)`.
fn log_weight(total: u64) -> f32 {
    ln(total as f32 * (1.0 / (1u64 << 40) as f32))
}

/// Collects the candidates whose value lies in `[least, end)`.
#[inline(always)]
fn gather<L: Lanes>(
    values: &[f32],
    maxima: &[f32],
    largest: f32,
    least: f32,
    end: f32,
    candidates: &mut Vec<Candidate>,
) {
    candidates.clear();
    let mut spare = [0.0; BLOCK];
    for (b, (block, &block_largest)) in values.chunks(BLOCK).zip(maxima).enumerate() {
        if block_largest < least || block_largest == LEAST {
            continue;
        }
        for (i, values) in full_block(block, &mut spare).as_chunks::<WIDTH>().0.iter().enumerate() {
            let lanes = L::load_array(values);
            let inside = lanes.ge(L::splat(least)).and(lanes.lt(L::splat(end)));
            let mut wanted = inside.and(lanes.gt(L::splat(LEAST))).bits();
            if wanted == 0 {
                continue;
            }
            let e = exp(lanes - L::splat(largest)).to_array();
            while wanted != 0 {
                let l = wanted.trailing_zeros() as usize;
                wanted &= wanted - 1;
                candidates.push(Candidate::new(values[l], (b * BLOCK + i * WIDTH + l) as u32, e[l]));
            }
        }
    }
}

/// Which block maxima belong to the row.
enum RankedFrom<'a> {
    Raw,
    Maxima(&'a [f32]),
}

/// Leaves the `k` first of all candidates in `scratch.candidates`, in any order. `k` > 0.
#[inline(always)]
fn keep_first_k<L: Lanes>(values: &[f32], k: usize, largest: f32, from: RankedFrom<'_>, scratch: &mut RowScratch) {
    let RowScratch { candidates, raw_maxima, ranked_maxima, .. } = scratch;
    let maxima = match from {
        RankedFrom::Raw => raw_maxima.as_slice(),
        RankedFrom::Maxima(maxima) => maxima,
    };
    // The k-th largest of the blocks' maxima: k values are as large, so none below it can be among the first k.
    let mut least = LEAST;
    if k <= maxima.len() {
        ranked_maxima.clear();
        ranked_maxima.extend_from_slice(maxima);
        least = *ranked_maxima.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1;
    }
    gather::<L>(values, maxima, largest, least, f32::INFINITY, candidates);
    if candidates.len() > k {
        candidates.select_nth_unstable_by_key(k - 1, |c| std::cmp::Reverse(c.key));
        candidates.truncate(k);
    }
}

/// The key of the last candidate of the shortest prefix that reaches `top_p`.
#[inline(always)]
fn last_of_share<L: Lanes>(values: &[f32], largest: f32, maxima: &[f32], top_p: f32, scratch: &mut RowScratch) -> u64 {
    // The first pass asks for the total as well: all that weighs anything lies within the last distance.
    let mut distances = [1.0, 2.5, 5.0, 8.0, 12.0, 18.0, -WEIGHTLESS];
    let mut probes: [f32; PROBES] = std::array::from_fn(|i| largest - distances[i]);
    let mut shares = weights_from::<L, PROBES>(values, maxima, largest, probes);
    let threshold = Threshold::new(top_p, shares[PROBES - 1].sum);
    // Values in [least, end) hold the last candidate; `before` is the share from `end` on.
    let (mut end, mut before) = (f32::INFINITY, Share::default());
    let mut end_distance = 0.0;
    let mut least = probes[PROBES - 1];
    for _ in 0..PASSES_MAX {
        let found = shares.iter().position(|share| threshold.is_reached_by(share.sum)).unwrap_or(PROBES - 1);
        if found > 0 {
            (end, before, end_distance) = (probes[found - 1], shares[found - 1], distances[found - 1]);
        }
        least = probes[found];
        if shares[found].count - before.count <= SORT_MAX {
            break;
        }
        let step = (distances[found] - end_distance) / PROBES as f32;
        distances = std::array::from_fn(|i| end_distance + (i + 1) as f32 * step);
        probes = std::array::from_fn(|i| if i + 1 == PROBES { least } else { largest - distances[i] });
        shares = weights_from::<L, PROBES>(values, maxima, largest, probes);
    }
    gather::<L>(values, maxima, largest, least, end, &mut scratch.candidates);
    let count = sorted_prefix(&mut scratch.candidates, before.sum, threshold);
    scratch.candidates.get(count.wrapping_sub(1)).map_or(0, |last| last.key)
}

/// Sorts the candidates. Length of their shortest prefix, at least 1, that with `before` reaches the threshold.
fn sorted_prefix(candidates: &mut [Candidate], before: u64, threshold: Threshold) -> usize {
    candidates.sort_unstable_by_key(|c| std::cmp::Reverse(c.key));
    let mut sum = before;
    for (i, candidate) in candidates.iter().enumerate() {
        sum += weight(candidate.e);
        if threshold.is_reached_by(sum) {
            return i + 1;
        }
    }
    candidates.len()
}

/// The largest value plus noise among the candidates that min-p leaves.
#[inline(always)]
fn contest<L: Lanes>(candidates: &[Candidate], draw: &Draw<'_>, best: &mut Option<Best>) {
    let min_p = draw.settings.min_p;
    let (mut ids, mut values) = ([0u32; WIDTH], [0f32; WIDTH]);
    for chunk in candidates.chunks(WIDTH) {
        for (l, candidate) in chunk.iter().enumerate() {
            ids[l] = candidate.id();
            values[l] = candidate.value();
        }
        let scores =
            (L::load_array(&values) + noise::<L>(draw.settings.seed, draw.position, L::load_u32(&ids))).to_array();
        for (candidate, &score) in chunk.iter().zip(&scores) {
            if candidate.e >= min_p {
                Best::offer(best, score, *candidate);
            }
        }
    }
}

/// As [`contest`], over all tokens of the row whose key is at least `last`.
#[inline(always)]
fn contest_all<L: Lanes>(
    values: &[f32],
    draw: &Draw<'_>,
    largest: f32,
    maxima: &[f32],
    last: u64,
    best: &mut Option<Best>,
) {
    let Draw { position, settings, .. } = *draw;
    let least = if last == 0 { LEAST } else { value_of(last) };
    // The block of the largest value goes first: its score lets most others be passed over.
    let first = maxima.iter().position(|&m| m == largest).unwrap_or(0);
    let mut spare = [0.0; BLOCK];
    for b in std::iter::once(first).chain(0..maxima.len()) {
        if maxima[b] < least || maxima[b] == LEAST {
            continue;
        }
        let floor = best.as_ref().map_or(LEAST, |best| best.score);
        if maxima[b] + GUMBEL_MAX < floor {
            continue;
        }
        let last_word = L::Int::splat(last_winning_word(maxima[b], floor));
        let end = values.len().min((b + 1) * BLOCK);
        let block = full_block(&values[b * BLOCK..end], &mut spare).as_chunks::<WIDTH>().0;
        for (i, block) in block.iter().enumerate() {
            let lanes = L::load_array(block);
            let id = (b * BLOCK + i * WIDTH) as u32;
            let words = bits(settings.seed, position, L::iota().add(L::Int::splat(id)));
            let may_win = last_word.lt_unsigned(words).not();
            let may_win = may_win.and(lanes.ge(L::splat(least))).and(lanes.gt(L::splat(LEAST)));
            if !may_win.any() {
                continue;
            }
            let scores = lanes + gumbel::<L>(words);
            let floor = best.as_ref().map_or(LEAST, |best| best.score);
            let mut wanted = may_win.and(scores.ge(L::splat(floor))).bits();
            if wanted == 0 {
                continue;
            }
            let (scores, e) = (scores.to_array(), exp(lanes - L::splat(largest)).to_array());
            while wanted != 0 {
                let l = wanted.trailing_zeros() as usize;
                wanted &= wanted - 1;
                let candidate = Candidate::new(block[l], id + l as u32, e[l]);
                if e[l] >= settings.min_p && candidate.key >= last {
                    Best::offer(best, scores[l], candidate);
                }
            }
        }
    }
}

/// A token of value up to `largest` can reach the score `floor` only with a random word up to this. Noise of `d` or more has a
/// word of at most `2^32 * exp(-d)`; the margin is far beyond all rounding.
fn last_winning_word(largest: f32, floor: f32) -> u32 {
    let margin = 0.02 + (largest.abs() + floor.abs()) * 1e-6;
    let lead = floor - largest - margin;
    if lead > 1.0 { (exp(-lead) * 4_294_967_296.0) as u32 } else { u32::MAX }
}
