//! Rows grouped by expert; then two passes over all experts, each dealt to the threads by weight rows.
//!
//! The first pass turns every (row, expert) pair into a quantised activation of the expert's inner size, in slabs of 32 inner
//! columns. In the second each thread owns some of the output columns and adds the experts to them in ascending id.

use super::Args;
use super::pack::Matrix;
use crate::linear::cpu::{Fp4, Fp8, Inputs, Output, Source, multiply, panel_len, round_bf16, threads_for};
use crate::linear_fp8;
use std::ops::Range;
use tf_device::LaunchError;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::lanes::{Kernel, Lanes, Level, dispatch};
use tf_numerics::{math, qdq};

/// Inner columns of one piece of work of the first pass: one quantisation block.
const SLAB: usize = qdq::BLOCK;
/// Output columns that a thread finishes before it goes on.
const COLUMNS: usize = 64;
/// Pairs of one step: what a thread's small buffers hold.
const PAIRS: usize = 48;
/// Floats of a thread's small buffers.
const SMALL: usize = PAIRS * if 2 * SLAB > COLUMNS { 2 * SLAB } else { COLUMNS };
/// The cost of an expert's weights beside that of one row, for sharing out the work.
const WEIGHT_COST: usize = 2;

/// One expert of the launch and its pairs.
struct Member<'a> {
    /// Absent: the shared expert, whose pairs are all rows in order.
    expert: Option<&'a super::Expert>,
    /// Where its pairs' activations lie.
    pairs: Range<usize>,
}

/// The launch, as both passes see it.
struct Plan<'a> {
    args: &'a super::Weights,
    /// `[experts + 1]`: where each expert's pairs start.
    starts: &'a [u32],
    /// `[pairs]`: row of each routed pair.
    rows_of: &'a [u32],
    /// `[pairs]`: its index in `routing`.
    pick_of: &'a [u32],
    row_count: usize,
}

impl<'a> Plan<'a> {
    /// The experts that have pairs, ascending, the shared one last.
    fn members(&self) -> impl Iterator<Item = Member<'a>> {
        let routed = self.args.experts().iter().zip(self.starts.windows(2)).filter_map(|(expert, bounds)| {
            let pairs = bounds[0] as usize..bounds[1] as usize;
            (!pairs.is_empty()).then_some(Member { expert: Some(expert), pairs })
        });
        let routed_count = self.rows_of.len();
        let shared = Member { expert: None, pairs: routed_count..routed_count + self.row_count };
        routed.chain(std::iter::once(shared))
    }
}

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { weights, x, rows, picks, selected, routing, limit, out } = args;
    let (hidden, intermediate) = (weights.hidden(), weights.intermediate());
    let routed_count = rows * picks;
    let pair_count = routed_count + rows;
    let expert_count = weights.experts().len();
    let selected = &selected.u32()[..routed_count];

    let touched = selected.len().min(expert_count) + 1;
    let threads = threads_for(queue, 3 * hidden * intermediate * (pair_count + touched));
    let panel = panel_len(hidden.max(intermediate) / SLAB);
    let own = panel + SMALL;
    let activation_len = pair_count * intermediate;
    let (values, indices) = queue
        .scratch
        .values_and_indices(activation_len.next_multiple_of(16) + threads * own, expert_count + 1 + 2 * routed_count)?;
    let (activations, own_memory) = values.split_at_mut(activation_len.next_multiple_of(16));
    let (starts, lists) = indices.split_at_mut(expert_count + 1);
    let (rows_of, pick_of) = lists.split_at_mut(routed_count);
    group(selected, picks, starts, rows_of, pick_of);

    let plan = Plan { args: weights, starts, rows_of, pick_of, row_count: rows };
    let x = &x.f32()[..rows * hidden];
    let routing = &routing.f32()[..routed_count];
    let limit = if limit == 0.0 { f32::INFINITY } else { limit };
    let level = queue.level;
    let own_memory = Parts::new(own_memory);
    {
        let activations = Parts::new(&mut activations[..activation_len]);
        queue.pool.run_on(threads, |index, count| {
            // SAFETY: each thread takes the memory of its own index.
            let own = unsafe { own_memory.part(index * own..(index + 1) * own) };
            let (panel, small) = own.split_at_mut(panel);
            let first = First { level, plan: &plan, x, hidden, intermediate, routing, limit, out: &activations };
            first.run(index, count, panel, small);
        });
    }
    let out = Parts::new(&mut out.f32_mut()[..rows * hidden]);
    let activations = &activations[..activation_len];
    queue.pool.run_on(threads, |index, count| {
        // SAFETY: each thread takes the memory of its own index.
        let own = unsafe { own_memory.part(index * own..(index + 1) * own) };
        let (panel, small) = own.split_at_mut(panel);
        let second = Second { level, plan: &plan, activations, hidden, intermediate, out: &out };
        second.run(split(hidden, count, index, 4), panel, small);
    });
    Ok(())
}

/// Sorts the picks by expert, rows ascending within one.
fn group(selected: &[u32], picks: usize, starts: &mut [u32], rows_of: &mut [u32], pick_of: &mut [u32]) {
    starts.fill(0);
    for id in selected {
        starts[*id as usize] += 1;
    }
    // Each count becomes the end of its expert's pairs; filling from the last pick on moves it to their start.
    let mut end = 0;
    for start in starts.iter_mut() {
        end += *start;
        *start = end;
    }
    for (pick, id) in selected.iter().enumerate().rev() {
        let at = &mut starts[*id as usize];
        *at -= 1;
        rows_of[*at as usize] = (pick / picks) as u32;
        pick_of[*at as usize] = pick as u32;
    }
}

/// The first pass: gate, up, activation.
struct First<'a> {
    level: Level,
    plan: &'a Plan<'a>,
    x: &'a [f32],
    hidden: usize,
    intermediate: usize,
    routing: &'a [f32],
    limit: f32,
    /// `[pairs, intermediate]`
    out: &'a Parts<'a, f32>,
}

impl First<'_> {
    /// The slabs of thread `index` of `count`: those whose start, on a scale of estimated cost, falls into its share.
    fn run(&self, index: usize, count: usize, panel: &mut [f32], small: &mut [f32]) {
        let slabs = self.intermediate / SLAB;
        let cost_of = |member: &Member<'_>| member.pairs.len() + WEIGHT_COST;
        let total: usize = self.plan.members().map(|member| slabs * cost_of(&member)).sum();
        let (from, to) = (total * index / count, total * (index + 1) / count);
        let mut base = 0;
        for member in self.plan.members() {
            let cost = cost_of(&member);
            let slab_at = |position: usize| position.saturating_sub(base).div_ceil(cost).min(slabs);
            for slab in slab_at(from)..slab_at(to) {
                let columns = slab * SLAB..(slab + 1) * SLAB;
                match member.expert {
                    Some(expert) => self.slab(fp4(expert.w1()), fp4(expert.w3()), &member, columns, panel, small),
                    None => {
                        let shared = self.plan.args.shared();
                        self.slab(fp8(&shared.w1), fp8(&shared.w3), &member, columns, panel, small);
                    }
                }
            }
            base += slabs * cost;
        }
    }

    fn slab<S: Source>(
        &self,
        w1: S,
        w3: S,
        member: &Member<'_>,
        columns: Range<usize>,
        panel: &mut [f32],
        small: &mut [f32],
    ) {
        let groups = self.hidden / SLAB;
        let (gate, up) = small[..2 * PAIRS * SLAB].split_at_mut(PAIRS * SLAB);
        let mut start = member.pairs.start;
        while start < member.pairs.end {
            let pairs = start..member.pairs.end.min(start + PAIRS);
            let inputs = match member.expert {
                Some(_) => Inputs {
                    values: self.x,
                    stride: self.hidden,
                    offset: 0,
                    chosen: Some(&self.plan.rows_of[pairs.clone()]),
                    count: pairs.len(),
                },
                None => {
                    let first_row = start - member.pairs.start;
                    Inputs {
                        values: self.x,
                        stride: self.hidden,
                        offset: first_row * self.hidden,
                        chosen: None,
                        count: pairs.len(),
                    }
                }
            };
            // SAFETY: `Expert::pack`, `linear_fp8::Weights::pack` and `Weights::new` fixed the weights' shapes; the launch
            // checked that x holds every row; the buffers are this thread's and hold PAIRS rows of a slab.
            unsafe {
                let to = |buffer: &mut [f32]| Output { start: buffer.as_mut_ptr(), stride: SLAB };
                multiply(self.level, w1, columns.clone(), inputs, groups, to(gate), panel);
                multiply(self.level, w3, columns.clone(), inputs, groups, to(up), panel);
            }
            let routing = member.expert.map(|_| &self.plan.pick_of[pairs.clone()]);
            // SAFETY: slab `columns` of these pairs belongs to this thread alone (disjoint shares).
            dispatch(
                self.level,
                Activate {
                    gate,
                    up,
                    picks: routing,
                    routing: self.routing,
                    limit: self.limit,
                    out: self.out,
                    pairs: pairs.clone(),
                    columns: columns.clone(),
                    stride: self.intermediate,
                },
            );
            start = pairs.end;
        }
    }
}

/// `QDQ8(bf16(silu(g) * u * w))` of one slab.
struct Activate<'a> {
    /// `[pairs, SLAB]`, unrounded.
    gate: &'a [f32],
    up: &'a [f32],
    /// Index into `routing` of each pair; absent for the shared expert.
    picks: Option<&'a [u32]>,
    routing: &'a [f32],
    limit: f32,
    /// `[.., stride]`
    out: &'a Parts<'a, f32>,
    pairs: Range<usize>,
    columns: Range<usize>,
    stride: usize,
}

impl Kernel for Activate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let limit = L::splat(self.limit);
        for (index, pair) in self.pairs.clone().enumerate() {
            let gate = &self.gate[index * SLAB..][..SLAB];
            let up = &self.up[index * SLAB..][..SLAB];
            let weight = self.picks.map(|picks| L::splat(self.routing[picks[index] as usize]));
            let low = activate(L::load(gate), L::load(up), weight, limit);
            let high = activate(L::load(&gate[16..]), L::load(&up[16..]), weight, limit);
            let (low, high) = qdq::fp8_round_block(low, high);
            let at = pair * self.stride + self.columns.start;
            // SAFETY: this slab of this pair belongs to the thread that computes it.
            let out = unsafe { self.out.part(at..at + SLAB) };
            low.store(out);
            high.store(&mut out[16..]);
        }
    }
}

#[inline(always)]
fn activate<L: Lanes>(gate: L, up: L, weight: Option<L>, limit: L) -> L {
    // The limit stands first, so that a NaN stays one.
    let gate = limit.min(gate.bf16_round());
    let up = limit.min((-limit).max(up.bf16_round()));
    let value = math::silu(gate) * up;
    match weight {
        Some(weight) => (value * weight).bf16_round(),
        None => value.bf16_round(),
    }
}

/// The second pass: down, and the sum over the experts.
struct Second<'a> {
    level: Level,
    plan: &'a Plan<'a>,
    /// `[pairs, intermediate]`
    activations: &'a [f32],
    hidden: usize,
    intermediate: usize,
    /// `[rows, hidden]`
    out: &'a Parts<'a, f32>,
}

impl Second<'_> {
    /// Output columns `range`, which are this thread's own.
    fn run(&self, range: Range<usize>, panel: &mut [f32], small: &mut [f32]) {
        let mut start = range.start;
        while start < range.end {
            let columns = start..range.end.min(start + COLUMNS);
            for row in 0..self.plan.row_count {
                // SAFETY: these columns are this thread's own.
                unsafe { self.out.part(row * self.hidden + columns.start..row * self.hidden + columns.end) }.fill(0.0);
            }
            for member in self.plan.members() {
                match member.expert {
                    Some(expert) => self.add(fp4(expert.w2()), &member, columns.clone(), panel, small),
                    None => self.add(fp8(&self.plan.args.shared().w2), &member, columns.clone(), panel, small),
                }
            }
            start = columns.end;
        }
    }

    fn add<S: Source>(&self, w2: S, member: &Member<'_>, columns: Range<usize>, panel: &mut [f32], small: &mut [f32]) {
        let width = columns.len();
        let mut start = member.pairs.start;
        while start < member.pairs.end {
            let pairs = start..member.pairs.end.min(start + PAIRS);
            let inputs = Inputs {
                values: self.activations,
                stride: self.intermediate,
                offset: start * self.intermediate,
                chosen: None,
                count: pairs.len(),
            };
            // SAFETY: as in the first pass; the activations hold every pair, and `small` PAIRS rows of COLUMNS.
            unsafe {
                let out = Output { start: small.as_mut_ptr(), stride: width };
                multiply(self.level, w2, columns.clone(), inputs, self.intermediate / SLAB, out, panel);
            }
            dispatch(
                self.level,
                Add {
                    values: &mut small[..pairs.len() * width],
                    rows: member.expert.map(|_| &self.plan.rows_of[pairs.clone()]),
                    first_row: start - member.pairs.start,
                    out: self.out,
                    columns: columns.clone(),
                    stride: self.hidden,
                },
            );
            start = pairs.end;
        }
    }
}

/// Adds the rounded outputs of one expert; those of the shared one, which is the last, round the sum as well.
struct Add<'a> {
    /// `[pairs, columns]`, unrounded.
    values: &'a mut [f32],
    /// Row of each pair; absent for the shared expert, whose pairs are the rows from `first_row` on.
    rows: Option<&'a [u32]>,
    first_row: usize,
    /// `[.., stride]`
    out: &'a Parts<'a, f32>,
    columns: Range<usize>,
    stride: usize,
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        round_bf16::<L>(self.values);
        for (index, values) in self.values.chunks_exact(self.columns.len()).enumerate() {
            let row = self.rows.map_or(self.first_row + index, |rows| rows[index] as usize);
            let at = row * self.stride;
            // SAFETY: these columns belong to the thread that computes them.
            let out = unsafe { self.out.part(at + self.columns.start..at + self.columns.end) };
            for (out, value) in out.iter_mut().zip(values) {
                *out += value;
            }
            if self.rows.is_none() {
                round_bf16::<L>(out);
            }
        }
    }
}

fn fp4(matrix: Matrix<'_>) -> Fp4<'_> {
    Fp4 { codes: matrix.codes, stride: matrix.code_stride, scales: matrix.scales, groups: matrix.columns / SLAB }
}

fn fp8(weights: &linear_fp8::Weights) -> Fp8<'_> {
    Fp8 { codes: weights.codes(), stride: weights.stride(), scales: weights.scales() }
}
