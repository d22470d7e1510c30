//! `index_score`: how much a row wants each visible compressed entry, and from that its selection.
//!
//! `score[r][j] = sum_h weights[r][h] * max(queries[r][h] . key[j], 0)` for the entries `j < (position + 1) / ratio`.
//!
//! [`launch`] writes the scores of a range of rows; [`launch_select`] walks over all rows in tiles that fit into the scratch,
//! scores a tile and selects from it ([`crate::top_k`]), so that memory does not grow with rows times entries. Rows that may
//! keep everything they see are not scored at all. A row restricted to candidate blocks is scored on those only; its scores
//! are then compact: the entries of its first block, of its second, and so on.
//!
//! Shapes and types: see [`Args`]. Rounding: none, scores are float32. Order on a CPU and on Metal: each dot product is one
//! chain of fused multiply-adds over the columns ascending; the heads add up in one such chain, ascending. On CUDA: the steps of
//! the tensor core, see [`select_in_steps`] and `steps.rs`, where a query that bf16 does not hold is rounded to it.

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;
mod steps;

pub use launch::{launch, launch_select, select_in_steps};

use crate::rows::{Pages, RowInfo};
use crate::top_k::{CandidateList, Candidates};
use std::ops::Range;
use tf_device::Buffer;

/// What is scored: the queries of a launch against one source's keys.
#[derive(Clone, Copy)]
pub struct Scored<'a> {
    /// `[rows, heads, head_dim]` f32, as `index_query` leaves them.
    pub queries: &'a Buffer,
    /// `[rows, heads]` f32.
    pub weights: &'a Buffer,
    pub rows: &'a [RowInfo],
    /// Positions of an entry.
    pub ratio: u32,
    /// Pages of `index_key`.
    pub keys: &'a Buffer,
    pub pages: Pages<'a>,
    /// At most [`HEADS_MAX`].
    pub heads: usize,
    /// A multiple of 32, at most [`HEAD_DIM_MAX`].
    pub head_dim: usize,
}

/// Largest shapes of one key.
pub const HEADS_MAX: usize = 64;
pub const HEAD_DIM_MAX: usize = 128;

pub struct Args<'a> {
    pub scored: Scored<'a>,
    /// The rows of this tile.
    pub tile: Range<usize>,
    /// Rows that see at most this many entries are left out.
    pub skip_visible: usize,
    pub restrict: Option<CandidateList<'a>>,
    /// `[tile, stride]` f32.
    pub scores: &'a mut Buffer,
    /// At least the entries that the last row sees, a multiple of 16.
    pub stride: usize,
}

pub struct SelectArgs<'a> {
    pub scored: Scored<'a>,
    /// Entries that a row keeps, at most.
    pub top_k: usize,
    pub candidates: Candidates<'a>,
    /// f32; at least as many as the entries that any row sees, rounded up to 16. More means larger tiles.
    pub scratch: &'a mut Buffer,
    /// `[rows, top_k]` u32: entry ids, ascending.
    pub selected: &'a mut Buffer,
    /// `[rows]` u32: how many of them hold.
    pub counts: &'a mut Buffer,
}
