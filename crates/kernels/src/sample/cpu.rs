//! A row is looked at in blocks of 128 logits. One pass finds the largest of each block; later passes visit only blocks that
//! can hold what they look for. Nothing is sorted beyond the candidates that a rule leaves.

use std::cmp::Ordering;

use super::{Args, Draw, Drawn, Outcome, RowError, Scratch};
use crate::parallel::threads_for;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::draw::{GUMBEL_MAX, Threshold, noise, weight, weight_halves};
use tf_numerics::lanes::{Int, Kernel, Lanes, Mask, WIDTH, dispatch};
use tf_numerics::math::{exp, ln};

const BLOCK: usize = 128;
const LEAST: f32 = f32::NEG_INFINITY;
/// Further behind than this a token weighs nothing: `exp(-28) < 2^-40`.
const WEIGHTLESS: f32 = -28.0;
/// Bins of the search for the end of top-p: so many for a step of 1 in the value.
const BINS_PER_UNIT: f32 = 32.0;
const BINS: usize = 1024;
/// Up to so many candidates are simply sorted.
const SORT_MAX: usize = 512;

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
    edge: Vec<Candidate>,
    bins: Vec<u64>,
    /// For each token, its count in the reply, with bit 31 set where prompt or reply have it. All zero between rows.
    counts: Vec<u32>,
    touched: Vec<u32>,
}

#[cfg(test)]
impl RowScratch {
    pub(super) fn capacities(&self) -> [usize; 9] {
        [
            self.values.capacity(),
            self.raw_maxima.capacity(),
            self.maxima.capacity(),
            self.ranked_maxima.capacity(),
            self.candidates.capacity(),
            self.edge.capacity(),
            self.bins.capacity(),
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
        let ordered = (self.key >> 32) as u32;
        f32::from_bits(if ordered >> 31 == 1 { ordered & 0x7fff_ffff } else { !ordered })
    }
}

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) {
    let Args { logits, vocab, draws, outcomes, top, scratch } = args;
    let Scratch { threads } = scratch;
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
        return first_largest::<L>(row, &scratch.raw_maxima, largest).ok_or(RowError::NoCandidate);
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
    first_largest::<L>(values, maxima, largest).ok_or(RowError::NoCandidate)
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
fn first_largest<L: Lanes>(row: &[f32], maxima: &[f32], largest: f32) -> Option<u32> {
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
    let top_k = settings.top_k as usize;
    let limits_count = top_k > 0 && top_k < values.len();
    let limits_share = settings.top_p < 1.0;
    let mut best = None;
    if !limits_count && !limits_share {
        contest_all::<L>(values, draw, largest, maxima, &mut best);
    } else {
        if limits_count {
            keep_first_k::<L>(values, top_k, largest, RankedFrom::Maxima(maxima), scratch);
        }
        if limits_share {
            if limits_count {
                let total = scratch.candidates.iter().map(|c| weight(c.e)).sum();
                keep_share(scratch, largest, Threshold::new(settings.top_p.max(0.0), total));
            } else {
                keep_share_of_all::<L>(values, largest, maxima, settings.top_p.max(0.0), scratch);
            }
        }
        contest::<L>(&scratch.candidates, draw, &mut best);
    }
    best.map(|best| best.id).ok_or(RowError::NoCandidate)
}

/// The sum of all weights. Integers, so the order is free.
#[inline(always)]
fn total_weight<L: Lanes>(row: &[f32], maxima: &[f32], largest: f32) -> u64 {
    // A lane's half-sums grow by at most 2^20 a step.
    const STEPS_MAX: usize = 2048;
    let zero = L::Int::splat(0);
    let (mut upper, mut lower, mut steps) = (zero, zero, 0);
    let mut total = 0u64;
    let mut spare = [0.0; BLOCK];
    for (block, &block_largest) in row.chunks(BLOCK).zip(maxima) {
        // Comparing the difference and not the value: no value of the block has a larger one.
        if block_largest - largest <= WEIGHTLESS {
            continue;
        }
        for values in full_block(block, &mut spare).as_chunks::<WIDTH>().0 {
            let (u, l) = weight_halves(exp(L::load_array(values) - L::splat(largest)));
            upper = upper.add(u);
            lower = lower.add(l);
        }
        steps += BLOCK / WIDTH;
        if steps >= STEPS_MAX {
            total += sum_halves::<L>(upper, lower);
            (upper, lower, steps) = (zero, zero, 0);
        }
    }
    total + sum_halves::<L>(upper, lower)
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

/// Collects the candidates whose value is at least `least`.
#[inline(always)]
fn gather<L: Lanes>(values: &[f32], maxima: &[f32], largest: f32, least: f32, candidates: &mut Vec<Candidate>) {
    candidates.clear();
    let mut spare = [0.0; BLOCK];
    for (b, (block, &block_largest)) in values.chunks(BLOCK).zip(maxima).enumerate() {
        if block_largest < least || block_largest == LEAST {
            continue;
        }
        for (i, values) in full_block(block, &mut spare).as_chunks::<WIDTH>().0.iter().enumerate() {
            let lanes = L::load_array(values);
            let mut wanted = lanes.ge(L::splat(least)).and(lanes.gt(L::splat(LEAST))).bits();
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
    gather::<L>(values, maxima, largest, least, candidates);
    if candidates.len() > k {
        candidates.select_nth_unstable_by_key(k - 1, |c| std::cmp::Reverse(c.key));
        candidates.truncate(k);
    }
}

/// Leaves the shortest prefix of all candidates that reaches `top_p`.
#[inline(always)]
fn keep_share_of_all<L: Lanes>(values: &[f32], largest: f32, maxima: &[f32], top_p: f32, scratch: &mut RowScratch) {
    let threshold = Threshold::new(top_p, total_weight::<L>(values, maxima, largest));
    // Mostly a few likely tokens suffice; what was collected says itself whether it is enough.
    for reach in [3.0, 8.0, 16.0, -WEIGHTLESS] {
        gather::<L>(values, maxima, largest, largest - reach, &mut scratch.candidates);
        let sum = scratch.candidates.iter().map(|c| weight(c.e)).sum();
        if threshold.is_reached_by(sum) {
            break;
        }
    }
    keep_share(scratch, largest, threshold);
}

/// Leaves the shortest prefix of `scratch.candidates` that reaches the threshold; all of them if none does.
fn keep_share(scratch: &mut RowScratch, largest: f32, threshold: Threshold) {
    let RowScratch { candidates, edge, bins, .. } = scratch;
    if candidates.len() <= SORT_MAX {
        candidates.sort_unstable_by_key(|c| std::cmp::Reverse(c.key));
        let count = prefix(candidates, 0, threshold);
        candidates.truncate(count);
        return;
    }
    // Bins by the distance from the largest: a step function of the value, so bins are ordered as values are. Only the bin in
    // which the sum reaches the threshold has to be sorted.
    let bin = |c: &Candidate| (((largest - c.value()) * BINS_PER_UNIT) as usize).min(BINS - 1);
    bins.clear();
    bins.resize(BINS, 0);
    for candidate in candidates.iter() {
        bins[bin(candidate)] += weight(candidate.e);
    }
    let (mut before, mut last) = (0, BINS - 1);
    for (i, &weight) in bins.iter().enumerate() {
        if threshold.is_reached_by(before + weight) {
            last = i;
            break;
        }
        before += weight;
    }
    edge.clear();
    candidates.retain(|candidate| match bin(candidate).cmp(&last) {
        Ordering::Less => true,
        Ordering::Equal => {
            edge.push(*candidate);
            false
        }
        Ordering::Greater => false,
    });
    edge.sort_unstable_by_key(|c| std::cmp::Reverse(c.key));
    let count = prefix(edge, before, threshold);
    candidates.extend_from_slice(&edge[..count]);
}

/// Length of the shortest prefix, at least 1, that with `before` reaches the threshold.
fn prefix(candidates: &[Candidate], before: u64, threshold: Threshold) -> usize {
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

/// As [`contest`], over all tokens of the row.
#[inline(always)]
fn contest_all<L: Lanes>(values: &[f32], draw: &Draw<'_>, largest: f32, maxima: &[f32], best: &mut Option<Best>) {
    let Draw { position, settings, .. } = *draw;
    // The block of the largest value goes first: its score lets most others be passed over.
    let first = maxima.iter().position(|&m| m == largest).unwrap_or(0);
    let mut spare = [0.0; BLOCK];
    for b in std::iter::once(first).chain(0..maxima.len()) {
        let reach = maxima[b] + GUMBEL_MAX;
        if maxima[b] == LEAST || best.as_ref().is_some_and(|best| reach < best.score) {
            continue;
        }
        let end = values.len().min((b + 1) * BLOCK);
        let block = full_block(&values[b * BLOCK..end], &mut spare).as_chunks::<WIDTH>().0;
        for (i, block) in block.iter().enumerate() {
            let lanes = L::load_array(block);
            let id = (b * BLOCK + i * WIDTH) as u32;
            let scores = lanes + noise::<L>(settings.seed, position, L::iota().add(L::Int::splat(id)));
            let floor = best.as_ref().map_or(LEAST, |best| best.score);
            let mut wanted = scores.ge(L::splat(floor)).and(lanes.gt(L::splat(LEAST))).bits();
            if wanted == 0 {
                continue;
            }
            let (scores, e) = (scores.to_array(), exp(lanes - L::splat(largest)).to_array());
            while wanted != 0 {
                let l = wanted.trailing_zeros() as usize;
                wanted &= wanted - 1;
                if e[l] >= settings.min_p {
                    Best::offer(best, scores[l], Candidate::new(block[l], id + l as u32, e[l]));
                }
            }
        }
    }
}
