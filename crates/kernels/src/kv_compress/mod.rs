//! `kv_compress`: pools the positions of a group into one latent and publishes it as a compressed entry.
//!
//! For each entry that the launch completes ([`crate::rows::completed_entries`]), with `e` its index:
//! 1. ratio 2: `m = max(s0, s1)`, `ei = exp(si - m)`, `wi = ei / (e0 + e1)`, `pooled = bf16(v0 * w0 + v1 * w1)` a column, where
//!    `[v | s]` are the raw rows of positions `2e` and `2e + 1`; ratio 1: `pooled` is the raw row, which is bf16 already.
//! 2. `latent = RMSNorm(pooled; norm)`, bf16: what the index key is made of, before RoPE and quantisation.
//! 3. `record = QDQ4(16, E4M3)(RoPE(latent, e * ratio))`, all columns, stored at the entry's place in the cache.
//!
//! Then the raw rows of even positions enter the raw ring (ratio 2), slot `position % raw_len`; the odd ones are never
//! needed again. The partner of a position before the window's start is read from that ring.
//!
//! Record: `head_dim / 2` bytes of E2M1 codes, byte `16 g + l` holding element `32 g + l` low and `32 g + 16 + l` high, then
//! `head_dim / 16` E4M3 scales.
//! Rounding: bf16 after pooling, norm and RoPE, then E2M1; nothing is fused. Sum: [`crate::order::sum_squares`].

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;

pub(crate) use cpu::decode_record;
pub use launch::launch;

use crate::rows::{EntryInfo, Pages, RowInfo, WindowInfo};
use tf_device::Buffer;

/// Bytes of one compressed entry.
pub const fn record_bytes(head_dim: usize) -> usize {
    head_dim / 2 + head_dim / 16
}

/// Floats of a raw row: values, and at ratio 2 the scores after them.
pub const fn raw_columns(head_dim: usize, ratio: u32) -> usize {
    if ratio == 1 { head_dim } else { 2 * head_dim }
}

pub struct Args<'a> {
    /// `[rows, raw_columns]` f32: at ratio 2 `[kv | score]`, float32 products; at ratio 1 the bf16 product.
    pub raw: &'a Buffer,
    pub rows: &'a [RowInfo],
    pub windows: &'a [WindowInfo],
    /// The entries that the rows complete. Their places in the cache are this launch's alone.
    pub entries: &'a [EntryInfo],
    /// 1 or 2.
    pub ratio: u32,
    /// `[head_dim]` f32.
    pub norm: &'a Buffer,
    pub eps: f32,
    /// `[rope_dim / 2]`.
    pub frequencies: &'a [f32],
    /// A multiple of 32.
    pub head_dim: usize,
    /// `[slots, raw_len, 2 * head_dim]` f32. `None` at ratio 1.
    pub raw_ring: Option<&'a mut Buffer>,
    /// Positions that the raw ring holds: the rows of a verify window and one more, or more.
    pub raw_len: usize,
    /// `[pages, entries_per_page, record_bytes]` bytes.
    pub cache: &'a mut Buffer,
    pub pages: Pages<'a>,
    /// `[entries, head_dim]` f32, at least.
    pub latents: &'a mut Buffer,
}
