//! `moe_route`: which experts a row visits, and with which weights.
//!
//! `s = sqrt(softplus(logits))`; the `top_k` largest `s + bias` are chosen, equal ones by the smaller id; the weight of a
//! chosen expert is `(s / (sum + 1e-20)) * factor`, `sum` the chosen `s` without bias, added in ascending id. Rows of an image
//! use `bias_image`. A NaN counts as smaller than everything.
//!
//! Shapes and types: see [`Args`]. Rounding: none, all float32.

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;

pub use launch::launch;

use tf_device::Buffer;

/// Experts that a row visits, at most.
pub const TOP_K_MAX: usize = 16;
/// Experts of one router, at most.
pub const EXPERTS_MAX: usize = 512;

pub struct Args<'a> {
    /// `[rows, experts]` f32: `x @ gate^T`.
    pub logits: &'a Buffer,
    /// `[experts]` f32.
    pub bias: &'a Buffer,
    /// `[experts]` f32, for the rows that `image` marks.
    pub bias_image: Option<&'a Buffer>,
    /// `[rows]`, or empty: no row belongs to an image.
    pub image: &'a [bool],
    pub rows: usize,
    pub experts: usize,
    pub top_k: usize,
    pub factor: f32,
    /// `[rows, top_k]` u32, ascending in each row.
    pub chosen: &'a mut Buffer,
    /// `[rows, top_k]` f32.
    pub weights: &'a mut Buffer,
}
