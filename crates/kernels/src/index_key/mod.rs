//! `index_key`: the key by which later positions find a compressed entry.
//!
//! `key[e] = QDQ4(32, E8M0)(RoPE(RMSNorm(x[e]; norm), entry * ratio))`, where `x` is the product of the un-rotated,
//! un-quantised latent with `wk`, rounded to bf16.
//!
//! Cache page: blocks of 16 entries, so that a vector holds 16 entries' codes. A block is `[head_dim / 8][16][4]` bytes of
//! E2M1 codes (byte `b` of group `g`: element `8 g + 2 b` low, `8 g + 2 b + 1` high), then `[head_dim / 32][16]` E8M0 bytes.
//! Pages are opaque to everyone else: copy them whole.
//!
//! Rounding: bf16 after the norm and after RoPE, then E2M1. Sum: [`crate::order::sum_squares`].

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;

pub(crate) use cpu::{Block, decode_block, decode_dwords, decode_scales};
pub(crate) use launch::check_key_cache;
pub use launch::launch;

use crate::rows::{EntryInfo, Pages};
use tf_device::Buffer;

/// Entries whose codes lie interleaved.
pub const BLOCK: usize = 16;

/// Bytes of one entry's share of a page.
pub const fn record_bytes(head_dim: usize) -> usize {
    head_dim / 2 + head_dim / 32
}

/// Bytes of a page of `entries_per_page` entries, a multiple of [`BLOCK`].
pub const fn page_bytes(head_dim: usize, entries_per_page: usize) -> usize {
    record_bytes(head_dim) * entries_per_page
}

pub struct Args<'a> {
    /// `[entries, head_dim]` f32: bf16 products of the latents.
    pub x: &'a Buffer,
    /// `[head_dim]` f32.
    pub norm: &'a Buffer,
    pub eps: f32,
    /// Their places in the cache are this launch's alone.
    pub entries: &'a [EntryInfo],
    pub ratio: u32,
    /// `[rope_dim / 2]`.
    pub frequencies: &'a [f32],
    /// A multiple of 32.
    pub head_dim: usize,
    /// `[pages, page_bytes]` bytes.
    pub cache: &'a mut Buffer,
    pub pages: Pages<'a>,
}
