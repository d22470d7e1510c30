//! A row's streams are expanded, reduced and collapsed while they lie in the cache. With few rows and long streams the phases
//! are shared over columns and outputs instead; no bit depends on which.

use super::{CollapseArgs, Constants, EnterArgs, ExpandArgs, MIXES, SCRATCH_FLOATS, STREAMS, TapArgs};
use crate::order::{Four, dot, sum_squares};
use crate::parallel::{GRAIN, part, parts, threads_for};
use std::ops::Range;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::lanes::{Float, Kernel, Lanes, WIDTH, dispatch};
use tf_numerics::{math, qdq};

/// Where the sum of squares lies in a row's scratch, behind the products.
const SQUARES: usize = MIXES;
const _: () = assert!(SQUARES < SCRATCH_FLOATS);

/// Columns of an item when columns are shared.
const COLUMN_CHUNK: usize = 256;
/// Products of an item when outputs are shared.
const OUTPUT_CHUNK: usize = 2;
const OUTPUT_ITEMS: usize = MIXES / OUTPUT_CHUNK + 1;

pub(super) fn run_enter(queue: &mut CpuQueue, args: EnterArgs<'_>) {
    let EnterArgs { y, streams, mix, post, comb, weights, norm, constants, rows, hidden, normed, quantised, scratch } =
        args;
    let job = Enter {
        y: y.map(|y| y.f32()),
        streams: Parts::new(&mut streams.f32_mut()[..rows * STREAMS * hidden]),
        mix: Parts::new(&mut mix.f32_mut()[..rows * STREAMS]),
        post: Parts::new(&mut post.f32_mut()[..rows * STREAMS]),
        comb: Parts::new(&mut comb.f32_mut()[..rows * STREAMS * STREAMS]),
        function: weights.function.f32(),
        base: weights.base.f32(),
        scale: weights.scale.f32(),
        norm: norm.f32(),
        constants,
        hidden,
        normed: parts(normed, rows * hidden),
        quantised: parts(quantised, rows * hidden),
        scratch: Parts::new(&mut scratch.f32_mut()[..rows * SCRATCH_FLOATS]),
    };
    let level = queue.level;
    let row_work = MIXES * STREAMS * hidden;
    let threads = threads_for(rows * row_work).min(queue.pool.threads());
    if rows >= 2 * threads || row_work < 2 * GRAIN {
        queue.pool.run_on(threads, |index, count| {
            dispatch(level, EnterRows { job: &job, rows: split(rows, count, index, 1) });
        });
        return;
    }
    if y.is_some() {
        let items = rows * hidden.div_ceil(COLUMN_CHUNK);
        queue.pool.run_on(threads, |index, count| {
            dispatch(level, EnterExpand { job: &job, items: split(items, count, index, 1) });
        });
    }
    queue.pool.run_on(threads, |index, count| {
        dispatch(level, EnterProducts { job: &job, items: split(rows * OUTPUT_ITEMS, count, index, 1) });
    });
    queue.pool.run_on(threads, |index, count| {
        dispatch(level, EnterFinish { job: &job, rows: split(rows, count, index, 1) });
    });
}

struct Enter<'a> {
    y: Option<&'a [f32]>,
    streams: Parts<'a, f32>,
    mix: Parts<'a, f32>,
    post: Parts<'a, f32>,
    comb: Parts<'a, f32>,
    function: &'a [f32],
    base: &'a [f32],
    scale: &'a [f32],
    norm: &'a [f32],
    constants: Constants,
    hidden: usize,
    normed: Option<Parts<'a, f32>>,
    quantised: Option<Parts<'a, f32>>,
    scratch: Parts<'a, f32>,
}

impl Enter<'_> {
    /// Step 1 for some columns of row `r`.
    ///
    /// # Safety
    /// The columns are the caller's alone, and nobody writes the row's `post` and `comb`.
    #[inline(always)]
    unsafe fn expand<L: Lanes>(&self, r: usize, columns: Range<usize>) {
        let Some(y) = self.y else { return };
        let (width, squares) = (STREAMS * self.hidden, STREAMS * STREAMS);
        let at = |i: usize| r * width + i * self.hidden + columns.start..r * width + i * self.hidden + columns.end;
        // SAFETY: the caller's promise; each stream's columns are their own range.
        let (streams, post, comb) = unsafe {
            let part = |i: usize| self.streams.part(at(i));
            let post = shared(&self.post, r * STREAMS..(r + 1) * STREAMS);
            ([part(0), part(1), part(2), part(3)], post, shared(&self.comb, r * squares..(r + 1) * squares))
        };
        expand::<L>(&y[r * self.hidden..][columns], streams, post, comb);
    }

    /// Step 3 for row `r`.
    ///
    /// # Safety
    /// The row is the caller's alone.
    #[inline(always)]
    unsafe fn collapse<L: Lanes>(&self, r: usize) {
        let (width, at) = (STREAMS * self.hidden, r * self.hidden..(r + 1) * self.hidden);
        // SAFETY: the caller's promise.
        unsafe {
            let (streams, mix) =
                (self.streams.part(r * width..(r + 1) * width), self.mix.part(r * STREAMS..(r + 1) * STREAMS));
            let (normed, quantised) = (part(&self.normed, at.clone()), part(&self.quantised, at));
            collapse::<L>(streams, mix, self.norm, self.constants.norm_eps, None, normed, quantised);
        }
    }

    /// Steps 2 and 4 from the products in the scratch, for up to sixteen rows.
    ///
    /// # Safety
    /// The rows are the caller's alone.
    #[inline(always)]
    unsafe fn mixes<L: Lanes>(&self, rows: Range<usize>) {
        // Sixteen rows cost in lanes about what four cost one after the other.
        if rows.len() < 4 {
            for r in rows {
                // SAFETY: the caller's promise.
                let z = unsafe { self.logits(r) };
                let mixes = mixes::<f32>(&z, self.scale, self.base, self.constants);
                // SAFETY: the caller's promise.
                unsafe { self.store(r, mixes.pre, mixes.post, mixes.comb) };
            }
            return;
        }
        let mut z = [[0.0; WIDTH]; MIXES];
        for (lane, r) in rows.clone().enumerate() {
            // SAFETY: the caller's promise.
            for (z, value) in z.iter_mut().zip(unsafe { self.logits(r) }) {
                z[lane] = value;
            }
        }
        let mut lanes = [L::splat(0.0); MIXES];
        for (lanes, z) in lanes.iter_mut().zip(&z) {
            *lanes = L::load_array(z);
        }
        let mixes = mixes::<L>(&lanes, self.scale, self.base, self.constants);
        let (mut pre, mut post, mut comb) = ([[0.0; WIDTH]; STREAMS], [[0.0; WIDTH]; STREAMS], [[0.0; WIDTH]; 16]);
        for i in 0..STREAMS {
            mixes.pre[i].store_array(&mut pre[i]);
            mixes.post[i].store_array(&mut post[i]);
        }
        for i in 0..STREAMS * STREAMS {
            mixes.comb[i].store_array(&mut comb[i]);
        }
        for (lane, r) in rows.enumerate() {
            let row = |from: &[[f32; WIDTH]; STREAMS]| std::array::from_fn(|i| from[i][lane]);
            // SAFETY: the caller's promise.
            unsafe { self.store(r, row(&pre), row(&post), std::array::from_fn(|i| comb[i][lane])) };
        }
    }

    /// `z` of row `r`.
    ///
    /// # Safety
    /// The row is the caller's alone.
    #[inline(always)]
    unsafe fn logits(&self, r: usize) -> [f32; MIXES] {
        // SAFETY: the caller's promise.
        let sums = unsafe { self.scratch.part(r * SCRATCH_FLOATS..(r + 1) * SCRATCH_FLOATS) };
        let mean = sums[SQUARES] / (STREAMS * self.hidden) as f32;
        let factor = 1.0 / (mean + self.constants.norm_eps).sqrt();
        let mut z = [0.0; MIXES];
        for (z, sum) in z.iter_mut().zip(sums) {
            *z = *sum * factor;
        }
        z
    }

    /// # Safety
    /// The row is the caller's alone.
    #[inline(always)]
    unsafe fn store(&self, r: usize, pre: [f32; STREAMS], post: [f32; STREAMS], comb: [f32; STREAMS * STREAMS]) {
        // SAFETY: the caller's promise.
        unsafe {
            self.mix.part(r * STREAMS..(r + 1) * STREAMS).copy_from_slice(&pre);
            self.post.part(r * STREAMS..(r + 1) * STREAMS).copy_from_slice(&post);
            self.comb.part(r * STREAMS * STREAMS..(r + 1) * STREAMS * STREAMS).copy_from_slice(&comb);
        }
    }

    /// The products of `ROWS` rows from `r` on, and their sums of squares.
    ///
    /// # Safety
    /// The rows are the caller's alone.
    #[inline(always)]
    unsafe fn products<L: Lanes, const ROWS: usize>(&self, r: usize) {
        const OUTPUTS: usize = 6;
        let width = STREAMS * self.hidden;
        // SAFETY: the caller's promise.
        let (streams, sums) = unsafe {
            let sums = self.scratch.part(r * SCRATCH_FLOATS..(r + ROWS) * SCRATCH_FLOATS);
            (self.streams.part(r * width..(r + ROWS) * width), sums)
        };
        for o in (0..MIXES).step_by(OUTPUTS) {
            let products = dot::<L, ROWS, OUTPUTS>(streams, &self.function[o * width..], width);
            for i in 0..ROWS {
                sums[i * SCRATCH_FLOATS + o..][..OUTPUTS].copy_from_slice(&products[i]);
            }
        }
        for i in 0..ROWS {
            sums[i * SCRATCH_FLOATS + SQUARES] = sum_squares::<L>(&streams[i * width..(i + 1) * width]);
        }
    }
}

/// A range that several threads read.
///
/// # Safety
/// Nobody writes it meanwhile.
#[inline(always)]
unsafe fn shared<'a>(parts: &'a Parts<'_, f32>, range: Range<usize>) -> &'a [f32] {
    assert!(range.start <= range.end);
    assert!(range.end <= parts.len());
    // SAFETY: the range lies inside the borrowed output (asserted above) and is only read (the caller's promise).
    unsafe { std::slice::from_raw_parts(parts.as_ptr().add(range.start), range.end - range.start) }
}

/// All steps of whole rows.
struct EnterRows<'a> {
    job: &'a Enter<'a>,
    rows: Range<usize>,
}

impl Kernel for EnterRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let EnterRows { job, rows } = self;
        for start in rows.clone().step_by(WIDTH) {
            let block = start..rows.end.min(start + WIDTH);
            let mut r = block.start;
            while r < block.end {
                let here = if block.end - r >= 2 { 2 } else { 1 };
                // SAFETY: the rows of this range belong to this thread, here and below.
                unsafe {
                    for r in r..r + here {
                        job.expand::<L>(r, 0..job.hidden);
                    }
                    if here == 2 {
                        job.products::<L, 2>(r);
                    } else {
                        job.products::<L, 1>(r);
                    }
                    for r in r..r + here {
                        job.collapse::<L>(r);
                    }
                }
                r += here;
            }
            // SAFETY: as above; the collapse has read the old mixes.
            unsafe { job.mixes::<L>(block) };
        }
    }
}

struct EnterExpand<'a> {
    job: &'a Enter<'a>,
    items: Range<usize>,
}

impl Kernel for EnterExpand<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let chunks = self.job.hidden.div_ceil(COLUMN_CHUNK);
        for item in self.items {
            let start = item % chunks * COLUMN_CHUNK;
            // SAFETY: this chunk of columns of this row belongs to this thread; this phase writes no mixes.
            unsafe { self.job.expand::<L>(item / chunks, start..self.job.hidden.min(start + COLUMN_CHUNK)) };
        }
    }
}

struct EnterProducts<'a> {
    job: &'a Enter<'a>,
    items: Range<usize>,
}

impl Kernel for EnterProducts<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let job = self.job;
        let width = STREAMS * job.hidden;
        for item in self.items {
            let (r, o) = (item / OUTPUT_ITEMS, item % OUTPUT_ITEMS * OUTPUT_CHUNK);
            // SAFETY: this phase only reads the streams.
            let streams = unsafe { shared(&job.streams, r * width..(r + 1) * width) };
            let at = r * SCRATCH_FLOATS + o;
            if o == SQUARES {
                // SAFETY: this item's place in the scratch is its own.
                unsafe { job.scratch.write(at, sum_squares::<L>(streams)) };
            } else {
                let products = dot::<L, 1, OUTPUT_CHUNK>(streams, &job.function[o * width..], width);
                // SAFETY: as above.
                unsafe { job.scratch.part(at..at + OUTPUT_CHUNK) }.copy_from_slice(&products[0]);
            }
        }
    }
}

struct EnterFinish<'a> {
    job: &'a Enter<'a>,
    rows: Range<usize>,
}

impl Kernel for EnterFinish<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for r in self.rows {
            // SAFETY: row `r` belongs to this thread.
            unsafe {
                self.job.collapse::<L>(r);
                self.job.mixes::<L>(r..r + 1);
            }
        }
    }
}

pub(super) struct Mixes<F> {
    pub pre: [F; STREAMS],
    pub post: [F; STREAMS],
    pub comb: [F; STREAMS * STREAMS],
}

/// Step 4, for one row or for a row in each lane.
#[inline(always)]
pub(super) fn mixes<F: Float>(z: &[F; MIXES], scale: &[f32], base: &[f32], constants: Constants) -> Mixes<F> {
    let eps = F::splat(constants.hc_eps);
    let mut pre = [F::splat(0.0); STREAMS];
    let mut post = [F::splat(0.0); STREAMS];
    for i in 0..STREAMS {
        pre[i] = math::sigmoid(z[i] * F::splat(scale[0]) + F::splat(base[i])) + eps;
        let z = z[STREAMS + i] * F::splat(scale[1]) + F::splat(base[STREAMS + i]);
        post[i] = F::splat(2.0) * math::sigmoid(z);
    }
    let mut comb = [[F::splat(0.0); STREAMS]; STREAMS];
    for i in 0..STREAMS {
        for j in 0..STREAMS {
            let at = 2 * STREAMS + STREAMS * i + j;
            comb[i][j] = z[at] * F::splat(scale[2]) + F::splat(base[at]);
        }
        let row = &mut comb[i];
        let max = row[0].max(row[1]).max(row[2]).max(row[3]);
        for value in row.iter_mut() {
            *value = math::exp(*value - max);
        }
        let sum = sum4(*row);
        for value in row.iter_mut() {
            *value = *value / sum + eps;
        }
    }
    divide_columns(&mut comb, eps);
    for _ in 1..constants.iterations {
        for row in &mut comb {
            let sum = sum4(*row) + eps;
            for value in row.iter_mut() {
                *value = *value / sum;
            }
        }
        divide_columns(&mut comb, eps);
    }
    let mut flat = [F::splat(0.0); STREAMS * STREAMS];
    flat.copy_from_slice(comb.as_flattened());
    Mixes { pre, post, comb: flat }
}

#[inline(always)]
fn sum4<F: Float>(values: [F; STREAMS]) -> F {
    ((values[0] + values[1]) + values[2]) + values[3]
}

#[inline(always)]
fn divide_columns<F: Float>(comb: &mut [[F; STREAMS]; STREAMS], eps: F) {
    let mut sums = [eps; STREAMS];
    for j in 0..STREAMS {
        sums[j] = sum4([comb[0][j], comb[1][j], comb[2][j], comb[3][j]]) + eps;
    }
    for row in comb {
        for j in 0..STREAMS {
            row[j] = row[j] / sums[j];
        }
    }
}

/// `expand` in place, for the same columns of `y` and of the four streams.
#[inline(always)]
fn expand<L: Lanes>(y: &[f32], streams: [&mut [f32]; STREAMS], post: &[f32], comb: &[f32]) {
    let mut weights = [[L::splat(0.0); STREAMS]; STREAMS];
    let mut outputs = [L::splat(0.0); STREAMS];
    for j in 0..STREAMS {
        outputs[j] = L::splat(post[j]);
        for i in 0..STREAMS {
            weights[i][j] = L::splat(comb[i * STREAMS + j]);
        }
    }
    let [s0, s1, s2, s3] = streams.map(|stream| stream.as_chunks_mut::<WIDTH>().0);
    let y = y.as_chunks::<WIDTH>().0;
    assert!(s0.len() == y.len() && s1.len() == y.len() && s2.len() == y.len() && s3.len() == y.len());
    for t in 0..y.len() {
        let x = [L::load_array(&s0[t]), L::load_array(&s1[t]), L::load_array(&s2[t]), L::load_array(&s3[t])];
        let y = L::load_array(&y[t]);
        let mut out = [y; STREAMS];
        for j in 0..STREAMS {
            let mut sum = weights[0][j] * x[0];
            for i in 1..STREAMS {
                sum = sum + weights[i][j] * x[i];
            }
            out[j] = (sum + outputs[j] * y).bf16_round();
        }
        out[0].store_array(&mut s0[t]);
        out[1].store_array(&mut s1[t]);
        out[2].store_array(&mut s2[t]);
        out[3].store_array(&mut s3[t]);
    }
}

/// `collapse` of one row and its norm. The collapsed row waits in one of the outputs for its factor.
#[inline(always)]
fn collapse<L: Lanes>(
    streams: &[f32],
    mix: &[f32],
    norm: &[f32],
    eps: f32,
    collapsed: Option<&mut [f32]>,
    mut normed: Option<&mut [f32]>,
    mut quantised: Option<&mut [f32]>,
) {
    let hidden = norm.len();
    let (x0, rest) = streams.as_chunks::<WIDTH>().0.split_at(hidden / WIDTH);
    let (x1, rest) = rest.split_at(hidden / WIDTH);
    let (x2, x3) = rest.split_at(hidden / WIDTH);
    let mut weights = [L::splat(0.0); STREAMS];
    for i in 0..STREAMS {
        weights[i] = L::splat(mix[i]);
    }
    let mut collapsed = collapsed.map(|out| out.as_chunks_mut::<WIDTH>().0);
    let waiting = quantised.as_deref_mut().or(normed.as_deref_mut());
    let mut waiting = waiting.map(|out| out.as_chunks_mut::<WIDTH>().0);
    let mut squares = Four::<L>::zero();
    for t in 0..hidden / WIDTH {
        let mut sum = weights[0] * L::load_array(&x0[t]);
        sum = sum + weights[1] * L::load_array(&x1[t]);
        sum = sum + weights[2] * L::load_array(&x2[t]);
        sum = sum + weights[3] * L::load_array(&x3[t]);
        let u = sum.bf16_round();
        squares.0[t % 4] = u.fma(u, squares.0[t % 4]);
        if let Some(out) = &mut collapsed {
            u.store_array(&mut out[t]);
        }
        if let Some(out) = &mut waiting {
            u.store_array(&mut out[t]);
        }
    }
    let factor = L::splat(1.0 / (squares.fold() / hidden as f32 + eps).sqrt());
    let norm = norm.as_chunks::<32>().0;
    match (&mut normed, &mut quantised) {
        (None, None) => {}
        (Some(out), None) => {
            for (out, norm) in out.as_chunks_mut::<32>().0.iter_mut().zip(norm) {
                let (low, high) = scale_block::<L>(out, norm, factor);
                low.store(out);
                high.store(&mut out[WIDTH..]);
            }
        }
        (normed, Some(out)) => {
            for (i, (out, norm)) in out.as_chunks_mut::<32>().0.iter_mut().zip(norm).enumerate() {
                let (low, high) = scale_block::<L>(out, norm, factor);
                if let Some(normed) = normed {
                    low.store(&mut normed[32 * i..]);
                    high.store(&mut normed[32 * i + WIDTH..]);
                }
                let (low, high) = qdq::fp8_round_block(low, high);
                low.store(out);
                high.store(&mut out[WIDTH..]);
            }
        }
    }
}

#[inline(always)]
fn scale_block<L: Lanes>(u: &[f32; 32], norm: &[f32; 32], factor: L) -> (L, L) {
    let low = L::load(norm) * (L::load(u) * factor);
    let high = L::load(&norm[WIDTH..]) * (L::load(&u[WIDTH..]) * factor);
    (low.bf16_round(), high.bf16_round())
}

pub(super) fn run_expand(queue: &mut CpuQueue, args: ExpandArgs<'_>) {
    let ExpandArgs { y, streams, post, comb, rows, hidden } = args;
    let job = Expand {
        y: y.f32(),
        streams: Parts::new(&mut streams.f32_mut()[..rows * STREAMS * hidden]),
        post: post.f32(),
        comb: comb.f32(),
        hidden,
    };
    let level = queue.level;
    let items = rows * hidden.div_ceil(COLUMN_CHUNK);
    queue.pool.run_on(threads_for(rows * hidden * 32), |index, count| {
        dispatch(level, ExpandItems { job: &job, items: split(items, count, index, 1) });
    });
}

struct Expand<'a> {
    y: &'a [f32],
    streams: Parts<'a, f32>,
    post: &'a [f32],
    comb: &'a [f32],
    hidden: usize,
}

struct ExpandItems<'a> {
    job: &'a Expand<'a>,
    items: Range<usize>,
}

impl Kernel for ExpandItems<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Expand { y, streams, post, comb, hidden } = self.job;
        let chunks = hidden.div_ceil(COLUMN_CHUNK);
        for item in self.items {
            let (r, start) = (item / chunks, item % chunks * COLUMN_CHUNK);
            let end = (start + COLUMN_CHUNK).min(*hidden);
            let at = |i: usize| (r * STREAMS + i) * hidden + start..(r * STREAMS + i) * hidden + end;
            // SAFETY: these columns of this row belong to this thread, and the streams are different ranges.
            let streams =
                unsafe { [streams.part(at(0)), streams.part(at(1)), streams.part(at(2)), streams.part(at(3))] };
            let (post, comb) = (&post[r * STREAMS..][..STREAMS], &comb[r * STREAMS * STREAMS..][..STREAMS * STREAMS]);
            expand::<L>(&y[r * hidden + start..r * hidden + end], streams, post, comb);
        }
    }
}

pub(super) fn run_collapse(queue: &mut CpuQueue, args: CollapseArgs<'_>) {
    let CollapseArgs { streams, mix, norm, norm_eps, rows, hidden, collapsed, normed, quantised } = args;
    let job = Collapse {
        streams: streams.f32(),
        mix: mix.f32(),
        norm: norm.f32(),
        norm_eps,
        collapsed: parts(collapsed, rows * hidden),
        normed: parts(normed, rows * hidden),
        quantised: parts(quantised, rows * hidden),
    };
    let level = queue.level;
    queue.pool.run_on(threads_for(rows * hidden * 8), |index, count| {
        dispatch(level, CollapseRows { job: &job, rows: split(rows, count, index, 1) });
    });
}

struct Collapse<'a> {
    streams: &'a [f32],
    mix: &'a [f32],
    norm: &'a [f32],
    norm_eps: f32,
    collapsed: Option<Parts<'a, f32>>,
    normed: Option<Parts<'a, f32>>,
    quantised: Option<Parts<'a, f32>>,
}

struct CollapseRows<'a> {
    job: &'a Collapse<'a>,
    rows: Range<usize>,
}

impl Kernel for CollapseRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Collapse { streams, mix, norm, norm_eps, collapsed, normed, quantised } = self.job;
        let hidden = norm.len();
        for r in self.rows {
            let streams = &streams[r * STREAMS * hidden..(r + 1) * STREAMS * hidden];
            let (mix, at) = (&mix[r * STREAMS..(r + 1) * STREAMS], r * hidden..(r + 1) * hidden);
            // SAFETY: row `r` belongs to this thread.
            let (collapsed, normed, quantised) =
                unsafe { (part(collapsed, at.clone()), part(normed, at.clone()), part(quantised, at)) };
            collapse::<L>(streams, mix, norm, *norm_eps, collapsed, normed, quantised);
        }
    }
}

pub(super) fn run_tap(queue: &mut CpuQueue, args: TapArgs<'_>) {
    let TapArgs { streams, rows, hidden, out, out_columns, out_offset, quantise } = args;
    let job = Tap {
        streams: streams.f32(),
        hidden,
        out: Parts::new(&mut out.f32_mut()[..rows * out_columns]),
        out_columns,
        out_offset,
        quantise,
    };
    let level = queue.level;
    queue.pool.run_on(threads_for(rows * hidden * 8), |index, count| {
        dispatch(level, TapRows { job: &job, rows: split(rows, count, index, 1) });
    });
}

struct Tap<'a> {
    streams: &'a [f32],
    hidden: usize,
    out: Parts<'a, f32>,
    out_columns: usize,
    out_offset: usize,
    quantise: bool,
}

struct TapRows<'a> {
    job: &'a Tap<'a>,
    rows: Range<usize>,
}

impl Kernel for TapRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Tap { streams, hidden, out, out_columns, out_offset, quantise } = self.job;
        for r in self.rows {
            let at = r * out_columns + out_offset;
            // SAFETY: row `r` belongs to this thread.
            let out = unsafe { out.part(at..at + hidden) };
            for (t, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let at = r * STREAMS * hidden + 32 * t;
                let low = mean::<L>(streams, at, *hidden);
                let high = mean::<L>(streams, at + WIDTH, *hidden);
                let (low, high) = if *quantise { qdq::fp8_round_block(low, high) } else { (low, high) };
                low.store(out);
                high.store(&mut out[WIDTH..]);
            }
        }
    }
}

#[inline(always)]
fn mean<L: Lanes>(streams: &[f32], at: usize, hidden: usize) -> L {
    let mut sum = L::load(&streams[at..]);
    for i in 1..STREAMS {
        sum = sum + L::load(&streams[at + i * hidden..]);
    }
    (sum * L::splat(0.25)).bf16_round()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hyper::{
        MixWeights, launch_collapse, launch_enter, launch_expand, launch_tap, reference, scratch_floats,
    };
    use crate::numerics_policy::Numerics;
    use crate::rms_norm::reference::rms_norm;
    use crate::testing::*;
    use tf_device::{Buffer, LaunchError, Queue};
    use tf_numerics::lanes::Level;

    const CONSTANTS: Constants = Constants { iterations: 20, hc_eps: 1e-6, norm_eps: 1e-20 };
    const REFERENCE: reference::MixConstants =
        reference::MixConstants { hc: 4, iterations: 20, hc_eps: 1e-6, rms_eps: 1e-20 };

    /// The learned values of one sublayer and the state of some rows.
    #[derive(Clone)]
    struct Setting {
        hidden: usize,
        function: Vec<f32>,
        base: Vec<f32>,
        scale: Vec<f32>,
        norm: Vec<f32>,
        y: Vec<f32>,
        streams: Vec<f32>,
        mix: Vec<f32>,
        post: Vec<f32>,
        comb: Vec<f32>,
    }

    impl Setting {
        fn new(rows: usize, hidden: usize) -> Setting {
            let mut values = Values::new(40 + hidden as u64);
            let positive = |v: Vec<f32>| v.into_iter().map(f32::abs).collect::<Vec<_>>();
            Setting {
                hidden,
                function: values.uniform(MIXES * STREAMS * hidden, 2.0 / (hidden as f32).sqrt()),
                base: values.uniform(MIXES, 1.0),
                scale: vec![0.7, 1.3, 0.9],
                norm: values.bf16(hidden, 1.5),
                y: values.bf16(rows * hidden, 2.0),
                streams: values.bf16(rows * STREAMS * hidden, 3.0),
                mix: positive(values.uniform(rows * STREAMS, 1.0)),
                post: positive(values.uniform(rows * STREAMS, 2.0)),
                comb: positive(values.uniform(rows * STREAMS * STREAMS, 0.5)),
            }
        }

        fn rows(&self) -> usize {
            self.y.len() / self.hidden
        }

        fn row(&self, r: usize) -> Setting {
            let cut = |v: &[f32]| v[r * v.len() / self.rows()..(r + 1) * v.len() / self.rows()].to_vec();
            Setting {
                y: cut(&self.y),
                streams: cut(&self.streams),
                mix: cut(&self.mix),
                post: cut(&self.post),
                comb: cut(&self.comb),
                ..self.clone()
            }
        }

        /// The state and both outputs after [`launch_enter`].
        fn enter(&self, queue: &mut Queue, with_y: bool) -> Entered {
            let (rows, hidden) = (self.rows(), self.hidden);
            let (mut streams, mut mix) = (device(&self.streams), device(&self.mix));
            let (mut post, mut comb) = (device(&self.post), device(&self.comb));
            let (mut normed, mut quantised) = (dirty(rows * hidden), dirty(rows * hidden));
            let y = device(&self.y);
            let args = EnterArgs {
                y: with_y.then_some(&y),
                streams: &mut streams,
                mix: &mut mix,
                post: &mut post,
                comb: &mut comb,
                weights: MixWeights {
                    function: &device(&self.function),
                    base: &device(&self.base),
                    scale: &device(&self.scale),
                },
                norm: &device(&self.norm),
                constants: CONSTANTS,
                rows,
                hidden,
                normed: Some(&mut normed),
                quantised: Some(&mut quantised),
                scratch: &mut dirty(rows * scratch_floats(hidden)),
            };
            launch_enter(queue, args).unwrap();
            let of = |buffer: &Buffer| buffer.f32().to_vec();
            Entered {
                streams: of(&streams),
                mix: of(&mix),
                post: of(&post),
                comb: of(&comb),
                normed: of(&normed),
                quantised: of(&quantised),
            }
        }
    }

    struct Entered {
        streams: Vec<f32>,
        mix: Vec<f32>,
        post: Vec<f32>,
        comb: Vec<f32>,
        normed: Vec<f32>,
        quantised: Vec<f32>,
    }

    impl Entered {
        fn all(&self) -> Vec<f32> {
            [&self.streams, &self.mix, &self.post, &self.comb, &self.normed, &self.quantised].map(|v| &v[..]).concat()
        }
    }

    #[test]
    fn mixes_match_the_recorded_ones() {
        let (z, scale, base) = (narrow(golden("hc_z")), narrow(golden("hc_scale")), narrow(golden("hc_base")));
        let wanted = [golden("hc_pre"), golden("hc_post"), golden("hc_comb")];
        let (rows, _) = z.as_chunks::<MIXES>();
        assert_eq!(rows.len(), 5);
        let mut got = [Vec::new(), Vec::new(), Vec::new()];
        for z in rows {
            let mixes = mixes::<f32>(z, &scale, &base, CONSTANTS);
            got[0].extend(mixes.pre);
            got[1].extend(mixes.post);
            got[2].extend(mixes.comb);
        }
        for (got, wanted) in got.iter().zip(&wanted) {
            let bounds: Vec<f64> = wanted.iter().map(|w| w.abs() * 1e-6).collect();
            assert_close(got, wanted, &bounds);
        }
    }

    #[test]
    fn a_row_in_each_lane_has_the_mixes_of_the_row_alone() {
        struct InLanes<'a>(&'a [[f32; WIDTH]; MIXES], &'a [f32], &'a [f32]);
        impl Kernel for InLanes<'_> {
            type Output = Vec<[f32; WIDTH]>;
            #[inline(always)]
            fn run<L: Lanes>(self) -> Self::Output {
                let mut z = [L::splat(0.0); MIXES];
                for i in 0..MIXES {
                    z[i] = L::load_array(&self.0[i]);
                }
                let mixes = mixes::<L>(&z, self.1, self.2, CONSTANTS);
                mixes.pre.iter().chain(&mixes.post).chain(&mixes.comb).map(|v| v.to_array()).collect()
            }
        }
        let mut values = Values::new(41);
        let z: [[f32; WIDTH]; MIXES] = std::array::from_fn(|_| std::array::from_fn(|_| values.unit() * 6.0));
        let base = values.uniform(MIXES, 1.0);
        let scale = [0.7, 1.3, 0.9];
        for level in Level::available() {
            let together = dispatch(level, InLanes(&z, &scale, &base));
            for lane in 0..WIDTH {
                let row = std::array::from_fn(|i| z[i][lane]);
                let alone = mixes::<f32>(&row, &scale, &base, CONSTANTS);
                let alone = [&alone.pre[..], &alone.post, &alone.comb].concat();
                let together: Vec<f32> = together.iter().map(|v| v[lane]).collect();
                assert_eq!(bits(&together), bits(&alone), "{level}");
            }
        }
    }

    #[test]
    fn a_sublayer_s_input_and_mixes_are_those_of_the_definition() {
        for (rows, hidden) in [(1, 32), (5, 160), (2, 5120)] {
            let setting = Setting::new(rows, hidden);
            let mut entered = None;
            on_all_queues(|queue| {
                let now = setting.enter(queue, true);
                let all = now.all();
                entered = Some(now);
                all
            });
            let got = entered.unwrap();
            for r in 0..rows {
                let row = setting.row(r);
                let width = STREAMS * hidden;
                let old = reference::Mixes { pre: wide(&row.mix), post: wide(&row.post), comb: wide(&row.comb) };
                let streams = &got.streams[r * width..(r + 1) * width];
                // Each product and sum is rounded to float32 (values up to 3 * 0.5 * 4 + 4 = 10), then once to bf16.
                let exact = reference::expand(&wide(&row.y), &wide(&row.streams), &old, Numerics::Exact);
                let noise = 10.0 * 10.0 * F32_HALF_ULP;
                let bounds: Vec<f64> = exact.iter().map(|w| w.abs() * BF16_HALF_ULP + noise).collect();
                assert_close(streams, &exact, &bounds);

                // From here on the stored streams are what counts.
                let streams = wide(streams);
                let collapsed = reference::collapse(&streams, &wide(&row.mix), Numerics::Release);
                let normed = rms_norm(&collapsed, &wide(&row.norm), 1e-20, Numerics::Exact);
                let bounds: Vec<f64> = normed.iter().map(|w| w.abs() * 2.5 * BF16_HALF_ULP + 1e-4).collect();
                assert_close(&got.normed[r * hidden..(r + 1) * hidden], &normed, &bounds);

                let function = wide(&row.function);
                let mixes = reference::mixes(&streams, &function, &wide(&row.scale), &wide(&row.base), REFERENCE);
                // The products' error: columns / 16 roundings a lane of terms whose magnitudes add up to at most 8 * hidden^0.5;
                // each sigmoid and each of 39 normalisations passes it on without growth, adding a few roundings of its own.
                let factor = crate::rms_norm::reference::inverse_rms(&streams, 1e-20);
                let magnitude: f64 = (0..MIXES)
                    .map(|o| (0..width).map(|c| (function[o * width + c] * streams[c]).abs()).sum::<f64>())
                    .fold(0.0, f64::max);
                let error =
                    (width as f64 / 16.0 + 20.0) * F32_HALF_ULP * magnitude * factor * 1.3 + 200.0 * F32_HALF_ULP;
                let close = |got: &[f32], wanted: &[f64], scale: f64| {
                    assert_close(got, wanted, &vec![error * scale; wanted.len()]);
                };
                close(&got.mix[r * 4..][..4], &mixes.pre, 1.0);
                close(&got.post[r * 4..][..4], &mixes.post, 2.0);
                close(&got.comb[r * 16..][..16], &mixes.comb, 4.0);
            }
            let mut wanted = got.normed.clone();
            wanted.chunks_mut(hidden).for_each(|row| qdq::round_row(Level::Scalar, qdq::Format::Fp8, row));
            assert_eq!(bits(&got.quantised), bits(&wanted));
        }
    }

    #[test]
    fn the_release_s_rounding_of_streams_and_inputs_is_reproduced() {
        let setting = Setting::new(8, 160);
        let got = setting.enter(&mut Queue::cpu(1, Level::best()), true);
        let (mut equal, mut all) = (0, 0);
        for r in 0..8 {
            let row = setting.row(r);
            let old = reference::Mixes { pre: wide(&row.mix), post: wide(&row.post), comb: wide(&row.comb) };
            let streams = reference::expand(&wide(&row.y), &wide(&row.streams), &old, Numerics::Release);
            let stored = wide(&got.streams[r * 640..(r + 1) * 640]);
            let collapsed = reference::collapse(&stored, &wide(&row.mix), Numerics::Release);
            let normed = rms_norm(&collapsed, &wide(&row.norm), 1e-20, Numerics::Release);
            let wanted = [streams, normed].concat();
            let got = [stored, wide(&got.normed[r * 160..(r + 1) * 160])].concat();
            equal += got.iter().zip(&wanted).filter(|(got, wanted)| got == wanted).count();
            all += got.len();
        }
        assert!(equal * 1000 >= all * 995, "{equal} of {all}");
    }

    #[test]
    fn entering_is_expanding_and_then_entering() {
        let setting = Setting::new(3, 160);
        let fused = on_all_queues(|queue| setting.enter(queue, true).all());
        let split = on_all_queues(|queue| {
            let mut streams = device(&setting.streams);
            let args = ExpandArgs {
                y: &device(&setting.y),
                streams: &mut streams,
                post: &device(&setting.post),
                comb: &device(&setting.comb),
                rows: 3,
                hidden: 160,
            };
            launch_expand(queue, args).unwrap();
            let expanded = Setting { streams: streams.f32().to_vec(), ..setting.clone() };
            expanded.enter(queue, false).all()
        });
        assert_eq!(bits(&fused), bits(&split));
    }

    #[test]
    fn a_row_is_the_same_alone_and_among_any_neighbours() {
        // The long rows are shared over columns and outputs when they are few, and not when they are many.
        for (hidden, counts) in [(160, &[1usize, 2, 3, 17, 40][..]), (3072, &[1, 2, 7])] {
            let row = Setting::new(1, hidden);
            let alone = on_all_queues(|queue| row.enter(queue, true).all());
            let mut values = Values::new(42);
            for &count in counts {
                let place = count / 2;
                let mut together = row.clone();
                let mut spread = |v: &[f32]| {
                    let mut all: Vec<f32> = (0..count * v.len()).map(|_| values.poison()).collect();
                    all[place * v.len()..(place + 1) * v.len()].copy_from_slice(v);
                    all
                };
                together.y = spread(&row.y);
                together.streams = spread(&row.streams);
                together.mix = spread(&row.mix);
                together.post = spread(&row.post);
                together.comb = spread(&row.comb);
                on_all_queues(|queue| {
                    let got = together.enter(queue, true);
                    let cut = |v: &[f32]| v[place * v.len() / count..(place + 1) * v.len() / count].to_vec();
                    let got =
                        [&got.streams, &got.mix, &got.post, &got.comb, &got.normed, &got.quantised].map(|v| cut(v));
                    assert_eq!(bits(&got.concat()), bits(&alone), "{count} rows");
                    Vec::new()
                });
            }
        }
    }

    #[test]
    fn the_end_of_a_stack_collapses_as_a_sublayer_does() {
        let setting = Setting::new(3, 160);
        let entered = setting.enter(&mut Queue::cpu(1, Level::Scalar), false);
        let got = on_all_queues(|queue| {
            let (streams, mix, norm) = (device(&setting.streams), device(&setting.mix), device(&setting.norm));
            let run = |queue: &mut Queue, wanted: [bool; 3]| {
                let mut out = [dirty(480), dirty(480), dirty(480)];
                let [collapsed, normed, quantised] = out.each_mut();
                let args = CollapseArgs {
                    streams: &streams,
                    mix: &mix,
                    norm: &norm,
                    norm_eps: 1e-20,
                    rows: 3,
                    hidden: 160,
                    collapsed: wanted[0].then_some(collapsed),
                    normed: wanted[1].then_some(normed),
                    quantised: wanted[2].then_some(quantised),
                };
                launch_collapse(queue, args).unwrap();
                out.map(|out| out.f32().to_vec())
            };
            let all = run(queue, [true; 3]);
            assert_eq!(bits(&all[1]), bits(&entered.normed));
            assert_eq!(bits(&all[2]), bits(&entered.quantised));
            for only in 0..3 {
                let mut wanted = [false; 3];
                wanted[only] = true;
                assert_eq!(bits(&run(queue, wanted)[only]), bits(&all[only]), "output {only} alone");
            }
            all[0].clone()
        });
        let exact: Vec<f64> = (0..3)
            .flat_map(|r| {
                let row = setting.row(r);
                reference::collapse(&wide(&row.streams), &wide(&row.mix), Numerics::Exact)
            })
            .collect();
        let bounds: Vec<f64> = exact.iter().map(|w| w.abs() * BF16_HALF_ULP + 12.0 * 8.0 * F32_HALF_ULP).collect();
        assert_close(&got, &exact, &bounds);
    }

    #[test]
    fn a_tap_is_the_mean_of_the_streams_in_its_columns() {
        let setting = Setting::new(3, 64);
        for quantise in [false, true] {
            let got = on_all_queues(|queue| {
                let mut out = device(&vec![7.0f32; 3 * 192]);
                let args = TapArgs {
                    streams: &device(&setting.streams),
                    rows: 3,
                    hidden: 64,
                    out: &mut out,
                    out_columns: 192,
                    out_offset: 64,
                    quantise,
                };
                launch_tap(queue, args).unwrap();
                out.f32().to_vec()
            });
            for r in 0..3 {
                let row = &got[r * 192..(r + 1) * 192];
                let wanted = reference::tap(&wide(&setting.row(r).streams), 4, Numerics::Release);
                let wanted = if quantise { Numerics::Release.qdq8(&wanted, 64) } else { wanted };
                assert_eq!(wide(&row[64..128]), wanted);
                assert!(row[..64].iter().chain(&row[128..]).all(|&v| v == 7.0), "columns of other taps");
            }
        }
    }

    #[test]
    fn a_tap_beyond_its_columns_is_refused() {
        let mut out = dirty(192);
        let (streams, out) = (dirty(256), &mut out);
        let args =
            TapArgs { streams: &streams, rows: 1, hidden: 64, out, out_columns: 192, out_offset: 160, quantise: false };
        let wanted = LaunchError::Limit { what: "the end of a tap", found: 224, max: 192 };
        assert_eq!(launch_tap(&mut Queue::cpu(1, Level::Scalar), args), Err(wanted));
    }
}
