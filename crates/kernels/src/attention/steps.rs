//! The declared order of CUDA, on the integer mirror of its tensor-core step: what `kernel.cu` computes, bit for bit.
//!
//! A row's keys lie in places: the selected entries, places without a key up to a multiple of sixteen, then the window and the
//! block. Keys enter the products as their values times 2^-8, which bf16 holds exactly for every scale.
//! ```text
//! s_j = chain over the columns, sixteen a step, of q . (k_j 2^-8), times (head_dim^-0.5 2^8)
//! P_j = bf16(e_j), 0 in a place without a key
//! l   = thirty-two partial sums of e_j, partial p of the quads of places p, p + 32, ... in order; folded by halves; the sink last
//! o   = bf16((chain over the places, sixteen a step, of P_j (k_j 2^-8)) (2^8 / l))
//! ```
//! A chain starts at +0; the order inside a step is free. A block of a window entry whose scale exceeds 2^15 is no number. All
//! else is as on the CPU.

use super::{Args, Span};
use crate::rows::{RowInfo, WindowInfo};
use crate::{kv_compress, kv_store};
use tf_numerics::lanes::{Kernel, Lanes, Level, dispatch};
use tf_numerics::{bf16, fma16, math};

/// Places of a step.
pub const STEP: usize = 16;
/// What scales keys into bf16's range.
pub(super) const FOLD: f32 = 256.0;
/// The largest E8M0 code of a window entry's block.
const SCALE_MAX: u8 = 142;
/// Partial sums of a denominator, and places that each takes at a time.
const PARTIALS: usize = 32;
const QUAD: usize = 4;

/// As [`super::launch`] on the buffers of a CPU, in this order of sums. The arguments are not checked.
///
/// # Panics
/// When the arguments disagree.
pub fn run(args: Args<'_>) {
    let Args { shape, span, q, rows, windows, records, ring, compressed, sinks, frequencies, out, .. } = args;
    let width = shape.heads * shape.head_dim;
    let bytes = kv_store::record_bytes(shape.head_dim);
    let (q, records, ring, sinks) = (q.f32(), records.u8(), ring.u8(), sinks.f32());
    let keys_of = |r: usize, row: RowInfo| {
        let mut entries = Vec::new();
        if let Some(compressed) = &compressed {
            let entry_bytes = kv_compress::record_bytes(shape.head_dim);
            let ids = &compressed.selected.u32()[r * shape.selected_max..][..compressed.counts.u32()[r] as usize];
            entries.extend(ids.iter().map(|&id| {
                let place = compressed.pages.index(row.slot, id as usize);
                entry(&compressed.cache.u8()[place * entry_bytes..][..entry_bytes], shape.head_dim)
            }));
        }
        let window = windows[row.window as usize];
        let seen = seen(span, shape.window, row, window);
        let keys = seen.map(|position| {
            let record = if position >= window.start {
                &records[(window.first_row + position - window.start) as usize * bytes..]
            } else {
                let place = window.slot as usize * shape.ring_len + position as usize % shape.ring_len;
                &ring[place * bytes..]
            };
            key(&record[..bytes], shape.head_dim)
        });
        (entries, keys.collect::<Vec<_>>())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = rows.len().div_ceil(threads).max(1);
    let outputs = out.f32_mut()[..rows.len() * width].chunks_mut(share * width);
    std::thread::scope(|scope| {
        for (part, outputs) in outputs.enumerate() {
            let keys_of = &keys_of;
            scope.spawn(move || {
                for (i, output) in outputs.chunks_mut(width).enumerate() {
                    let r = part * share + i;
                    let (entries, keys) = keys_of(r, rows[r]);
                    let query = &q[r * width..][..width];
                    output.copy_from_slice(&row(query, &entries, &keys, sinks, rows[r].position, frequencies));
                }
            });
        }
    });
}

/// Positions of the window's and the block's keys.
fn seen(span: Span, size: usize, row: RowInfo, window: WindowInfo) -> std::ops::Range<u32> {
    match span {
        Span::Causal => (row.position + 1).saturating_sub(size as u32)..row.position + 1,
        Span::Block => window.start.saturating_sub(size as u32)..window.start + window.row_count,
    }
}

/// The heads of one row. `q`: `[heads, head_dim]` bf16 values, not turned; `entries`, `window`: `[head_dim]` each, exact in bf16;
/// `sinks`: `[heads]`.
pub fn row(
    q: &[f32],
    entries: &[Vec<f32>],
    window: &[Vec<f32>],
    sinks: &[f32],
    position: u32,
    frequencies: &[f32],
) -> Vec<f32> {
    row_by(mix, q, entries, window, sinks, position, frequencies)
}

/// A key of a place, its values times 2^-8; `None` where there is none.
type Place = Option<Vec<u16>>;

/// As [`row`], with the mix of a head's exponentials and keys by place.
fn row_by(
    mix: fn(&[f32], &[Place], usize) -> Vec<f32>,
    q: &[f32],
    entries: &[Vec<f32>],
    window: &[Vec<f32>],
    sinks: &[f32],
    position: u32,
    frequencies: &[f32],
) -> Vec<f32> {
    let head_dim = q.len() / sinks.len();
    let folded = |key: &Vec<f32>| Some(key.iter().map(|&k| bf16::from_f32(k / FOLD)).collect::<Vec<u16>>());
    let mut places: Vec<Place> = entries.iter().map(folded).collect();
    places.resize(entries.len().next_multiple_of(STEP), None);
    places.extend(window.iter().map(folded));
    places.resize(places.len().next_multiple_of(STEP), None);
    let mut out = Vec::with_capacity(q.len());
    for (query, &sink) in q.chunks(head_dim).zip(sinks) {
        let mut query = query.to_vec();
        turn(&mut query, position, frequencies, 1.0);
        let query: Vec<u16> = query.into_iter().map(bf16::from_f32).collect();
        let scale = 1.0 / (head_dim as f32).sqrt() * FOLD;
        let score = |key: &Place| match key {
            Some(key) => fma16::chunked_dot(&query, key, head_dim) * scale,
            None => f32::NEG_INFINITY,
        };
        let scores: Vec<f32> = places.iter().map(score).collect();
        let most = scores.iter().fold(f32::NEG_INFINITY, |most, &score| if score > most { score } else { most });
        let exponentials: Vec<f32> = scores.iter().map(|score| math::exp(score - most)).collect();
        let inverse = FOLD / (sum(&exponentials) + math::exp(sink - most));
        let mut head = mix(&exponentials, &places, head_dim);
        head.iter_mut().for_each(|value| *value = bf16::round(*value * inverse));
        turn(&mut head, position, frequencies, -1.0);
        out.extend(head);
    }
    out
}

/// The sum of the exponentials in the declared order.
fn sum(exponentials: &[f32]) -> f32 {
    let mut partials = [0.0f32; PARTIALS];
    for (quad, values) in exponentials.chunks(QUAD).enumerate() {
        values.iter().for_each(|value| partials[quad % PARTIALS] += value);
    }
    let mut half = PARTIALS / 2;
    while half > 0 {
        for p in 0..half {
            partials[p] += partials[p + half];
        }
        half /= 2;
    }
    partials[0]
}

/// The columns of one head, a chain each.
fn mix(exponentials: &[f32], places: &[Place], head_dim: usize) -> Vec<f32> {
    let mut sums = vec![0.0; head_dim];
    for (exponentials, keys) in exponentials.chunks(STEP).zip(places.chunks(STEP)) {
        let weights: [u16; STEP] = std::array::from_fn(|j| bf16::from_f32(exponentials[j]));
        for (c, sum) in sums.iter_mut().enumerate() {
            let values = std::array::from_fn(|j| keys[j].as_ref().map_or(0, |key| key[c]));
            *sum = fma16::step(*sum, &weights, &values);
        }
    }
    sums
}

/// Turns the last pairs of a head by the position's phases, or back.
fn turn(head: &mut [f32], position: u32, frequencies: &[f32], direction: f32) {
    let first = head.len() - 2 * frequencies.len();
    for (pair, &frequency) in head[first..].as_chunks_mut::<2>().0.iter_mut().zip(frequencies) {
        let (sine, cosine) = math::sin_cos(position as f32 * frequency);
        let (even, odd, sine) = (pair[0], pair[1], sine * direction);
        *pair = [bf16::round(even * cosine + odd * -sine), bf16::round(odd * cosine + even * sine)];
    }
}

struct Decode<'a> {
    record: &'a [u8],
    is_entry: bool,
    head_dim: usize,
}

impl Kernel for Decode<'_> {
    type Output = Vec<f32>;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Vec<f32> {
        let mut key = vec![0.0; self.head_dim];
        match self.is_entry {
            true => kv_compress::decode_record::<L>(self.record, &mut key),
            false => kv_store::decode_record::<L>(self.record, &mut key),
        }
        key
    }
}

fn entry(record: &[u8], head_dim: usize) -> Vec<f32> {
    dispatch(Level::Scalar, Decode { record, is_entry: true, head_dim })
}

fn key(record: &[u8], head_dim: usize) -> Vec<f32> {
    let mut key = dispatch(Level::Scalar, Decode { record, is_entry: false, head_dim });
    for (block, &scale) in key.chunks_mut(32).zip(&record[head_dim..]) {
        if scale > SCALE_MAX {
            block.fill(f32::NAN);
        }
    }
    key
}

#[cfg(test)]
mod tests {
    use super::super::contract::{CAUSAL, CancelRow, cancelling_rows};
    use super::*;

    /// The last sixteen places first.
    fn backwards(exponentials: &[f32], places: &[Place], head_dim: usize) -> Vec<f32> {
        let exponentials: Vec<f32> = exponentials.chunks(STEP).rev().flatten().copied().collect();
        let places: Vec<Place> = places.chunks(STEP).rev().flatten().cloned().collect();
        mix(&exponentials, &places, head_dim)
    }

    /// What a planted edit of the CUDA source does: a case must show it, in rows of launches that mix many.
    #[test]
    fn the_window_before_the_entries_shows_where_terms_cancel() {
        let case = CAUSAL.cases.iter().find(|case| case.size("cancelling") == 1).expect("a case that cancels");
        let rows = cancelling_rows(case, 1);
        assert!(rows.len() > 32, "as many rows as the kernel of many takes");
        let shown = rows.iter().map(|CancelRow { q, entries, window, sinks, position, frequencies }| {
            let row = |mix| row_by(mix, q, entries, window, sinks, *position, frequencies);
            let (declared, other) = (row(mix), row(backwards));
            declared.iter().zip(&other).filter(|(a, b)| a.to_bits() != b.to_bits()).count()
        });
        let shown: Vec<usize> = shown.collect();
        assert!(shown.iter().sum::<usize>() >= 10, "outputs that differ, by row: {shown:?}");
    }
}
