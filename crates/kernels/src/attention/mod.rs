//! `attention`: every head of a row over its window and its selected compressed entries, one key being also the value.
//!
//! For head `h` of the row at position `p`, keys `k_j` in the order below:
//! ```text
//! q    = bf16(RoPE(q[h], p))
//! s_j  = (q . k_j) * head_dim^-0.5                 M = max_j s_j       e_j = exp(s_j - M)
//! l    = sum_j e_j + exp(sink[h] - M)              P_j = bf16(e_j)
//! o    = bf16((sum_j P_j k_j) / l)                 out[h] = bf16(RoPE^-1(o, p))
//! ```
//! Keys, in the one order that every sum follows: the selected entries ascending, then the window ascending by position, then,
//! in a draft block, the block's own rows.
//! - [`Span::Causal`]: window positions `max(0, p - window + 1) ..= p`; those before the window's start come from the ring, the
//!   others from the launch's own records.
//! - [`Span::Block`]: the ring's positions `max(0, start - window) .. start`, then all rows of the row's window, in both
//!   directions.
//!
//! Shapes and types: see [`Args`]. Order on CPU and Metal: each dot product is one chain of fused multiply-adds over the columns
//! ascending; `l` adds the unrounded `e_j` in key order, the sink last; each column of the output is one chain of fused
//! multiply-adds in key order. CUDA has an order of its own, of tensor-core steps: [`steps`]. `M` is a maximum, so its order is
//! free.

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;
pub mod steps;

pub use launch::launch;

use crate::rows::{Pages, RowInfo, WindowInfo};
use tf_device::Buffer;

/// Sizes of one attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub heads: usize,
    /// A multiple of 32.
    pub head_dim: usize,
    /// Positions of the sliding window, the row's own included.
    pub window: usize,
    /// Records of a ring: more than `window` plus the rows of a verify window.
    pub ring_len: usize,
    /// Entries that a row may select; 0 without a compressed cache.
    pub selected_max: usize,
    /// Rows of a draft block; 0 for [`Span::Causal`].
    pub block_rows: usize,
}

/// Which keys a row sees, besides its selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    Causal,
    Block,
}

/// The compressed cache and each row's selection.
#[derive(Clone, Copy)]
pub struct Compressed<'a> {
    /// `[pages, entries_per_page, kv_compress::record_bytes]` bytes.
    pub cache: &'a Buffer,
    pub pages: Pages<'a>,
    /// `[rows, selected_max]` u32, ascending.
    pub selected: &'a Buffer,
    /// `[rows]` u32.
    pub counts: &'a Buffer,
}

pub struct Args<'a> {
    pub shape: Shape,
    pub span: Span,
    /// `[rows, heads, head_dim]` f32: bf16 products, not yet rotated.
    pub q: &'a Buffer,
    pub rows: &'a [RowInfo],
    /// The windows of `records`, which may have more rows than are asked for here.
    pub windows: &'a [WindowInfo],
    /// `[the windows' rows, kv_store::record_bytes]` bytes: the launch's own window records.
    pub records: &'a Buffer,
    /// `[slots, ring_len, kv_store::record_bytes]` bytes.
    pub ring: &'a Buffer,
    pub compressed: Option<Compressed<'a>>,
    /// `[heads]` f32: raw logits, not scaled.
    pub sinks: &'a Buffer,
    /// `[rope_dim / 2]`.
    pub frequencies: &'a [f32],
    /// f32, at least [`scratch_floats`] on the CPU; see [`gpu_scratch_floats`].
    pub scratch: &'a mut Buffer,
    /// `[rows, heads, head_dim]` f32, at least.
    pub out: &'a mut Buffer,
}

/// Heads that are computed together: the lanes of a vector.
pub(crate) const HEAD_BLOCK: usize = 16;
/// Rows that share their decoded window.
pub(crate) const TILE_ROWS: usize = 16;

/// Floats of scratch that one thread needs.
pub const fn thread_scratch_floats(shape: Shape) -> usize {
    let keys = shape.selected_max + shape.window + TILE_ROWS + shape.block_rows;
    // Decoded keys, scores of one head block, the block's transposed queries.
    keys * shape.head_dim + keys * HEAD_BLOCK + shape.head_dim * HEAD_BLOCK
}

/// Keys of a row, at most.
pub(crate) const fn gpu_keys(shape: Shape) -> usize {
    shape.selected_max + shape.window + shape.block_rows
}

/// Places of a row's keys on CUDA, at most; see [`steps`].
pub(crate) const fn gpu_places(shape: Shape) -> usize {
    (shape.selected_max.next_multiple_of(steps::STEP) + shape.window + shape.block_rows).next_multiple_of(32)
}

/// Floats of [`Args::scratch`] with which CUDA computes `rows` rows at a time: their scores and denominators. With fewer it
/// takes more launches; one row's are needed. Metal needs none.
pub const fn gpu_scratch_floats(shape: Shape, rows: usize) -> usize {
    rows * shape.heads * (gpu_places(shape) + 1)
}

/// Floats of [`Args::scratch`] for a queue of `threads` threads.
pub const fn scratch_floats(shape: Shape, threads: usize) -> usize {
    thread_scratch_floats(shape) * threads
}
