//! `kv_store`: the window entry of each row, made, quantised, and later written into the ring.
//!
//! [`launch`]: `record[r] = QDQ8(RoPE(RMSNorm(x[r]; norm), position))`, every column quantised, the rotated ones included.
//! [`launch_ring`] copies records to slot `position % ring_len` of the sequence's ring, after attention has read the ring;
//! of a window longer than the ring only its last `ring_len` rows.
//!
//! Record: `head_dim` E4M3 codes, then `head_dim / 32` E8M0 bytes; value `code * 2^(scale - 127)`.
//! Shapes and types: see [`Args`]. Rounding: bf16 after the norm and after RoPE, then E4M3. Sum: [`crate::order::sum_squares`].

pub(crate) mod contract;
mod cpu;
mod gpu;
mod launch;
pub mod reference;

pub(crate) use cpu::decode_record;
pub(crate) use launch::{check_head_dim, check_rope};
pub use launch::{launch, launch_ring};

use crate::rows::{RowInfo, WindowInfo};
use tf_device::Buffer;

/// Columns of a key, at most.
pub const HEAD_DIM_MAX: usize = 1024;

/// Bytes of one window entry.
pub const fn record_bytes(head_dim: usize) -> usize {
    head_dim + head_dim / 32
}

pub struct Args<'a> {
    /// `[rows, head_dim]` f32: output of the key projection, bf16 values.
    pub x: &'a Buffer,
    /// `[head_dim]` f32.
    pub norm: &'a Buffer,
    pub eps: f32,
    pub rows: &'a [RowInfo],
    /// `[rope_dim / 2]`.
    pub frequencies: &'a [f32],
    /// A multiple of 32, at most [`HEAD_DIM_MAX`].
    pub head_dim: usize,
    /// `[rows, record_bytes]` bytes, at least.
    pub records: &'a mut Buffer,
}

pub struct RingArgs<'a> {
    /// `[rows, record_bytes]` bytes.
    pub records: &'a Buffer,
    pub windows: &'a [WindowInfo],
    pub head_dim: usize,
    /// `[slots, ring_len, record_bytes]` bytes.
    pub ring: &'a mut Buffer,
    pub ring_len: usize,
}
