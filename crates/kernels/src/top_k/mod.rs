//! `top_k`: the entries that a row keeps, and the candidate blocks that it hands to later layers.
//!
//! Of `n` scores the `min(k, n)` largest are kept, equal ones by the smaller index, and written ascending. Where a row sees at
//! most `k` entries it keeps them all, and its scores are not read.
//!
//! Candidates: entries are cut into blocks of `block_size`; a block's score is the largest of its entries', the block of the
//! newest visible entry counts as infinity; the `blocks_max` best are kept, equal ones by the smaller index. A row with no
//! more blocks than that publishes [`ALL_BLOCKS`]. The publishing row's own selection is not restricted.
//!
//! A score that is NaN or minus infinity is never kept, unless the row keeps everything it sees.
//!
//! Exact: scores are compared as integers in the order of their values (`-0` and `+0` are equal) and counted, so no order of
//! execution enters. No arithmetic on scores.

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;

pub(crate) use cpu::candidates_of;
pub use launch::launch;
pub(crate) use launch::{check_candidates, check_selection};

use crate::rows::RowInfo;
use std::ops::Range;
use tf_device::Buffer;

/// In a row's block count: no restriction, and no list was written.
pub const ALL_BLOCKS: u32 = u32::MAX;

/// How candidates are cut. A valid shape has `blocks_max * block_size - (block_size - 1) >= k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CandidateShape {
    pub blocks_max: usize,
    pub block_size: usize,
}

/// The candidate blocks of each row of a launch.
#[derive(Clone, Copy)]
pub struct CandidateList<'a> {
    pub shape: CandidateShape,
    /// `[rows, blocks_max]` u32, ascending.
    pub blocks: &'a Buffer,
    /// `[rows]` u32.
    pub counts: &'a Buffer,
}

/// What a selection has to do with candidates.
pub enum Candidates<'a> {
    None,
    /// Writes them. Shapes as in [`CandidateList`].
    Publish {
        shape: CandidateShape,
        blocks: &'a mut Buffer,
        counts: &'a mut Buffer,
    },
    /// Keeps to them.
    Restrict(CandidateList<'a>),
}

pub struct Args<'a> {
    /// `[tile, stride]` f32; compact for restricted rows, see [`crate::index_score`].
    pub scores: &'a Buffer,
    /// A multiple of 16.
    pub stride: usize,
    /// All rows of the launch.
    pub rows: &'a [RowInfo],
    /// The rows whose scores these are.
    pub tile: Range<usize>,
    pub ratio: u32,
    pub top_k: usize,
    pub candidates: Candidates<'a>,
    /// `[rows, top_k]` u32.
    pub selected: &'a mut Buffer,
    /// `[rows]` u32.
    pub counts: &'a mut Buffer,
}
