//! Launches of the routed experts on CUDA, for a few rows: two kernels, whatever the routing.
//!
//! The chunks of columns are constants ([`chunks`]); the definition of every dot product's bits is [`tf_numerics::fma16`].

use crate::linear::cuda::chunks;
use tf_device::cuda::{CudaError, Gpu, Kernel, Module, Parameter, Shape};

use super::pack_cuda::{BLOCK, SLAB};
use std::sync::Arc;

/// Pairs that share one read of the weights: one tile of the tensor core.
const PASS: usize = 8;
/// Bytes of one block in a warp's ring.
const SLOT: usize = 640;
/// Experts that one block may meet.
const SPAN_MAX: usize = 16;

/// The experts' sizes, each a multiple of 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub hidden: usize,
    pub intermediate: usize,
    pub experts: usize,
}

impl Sizes {
    /// Bytes of one expert's packed codes and scales, up and down.
    pub const fn expert_bytes(&self) -> usize {
        3 * self.hidden * self.intermediate / 2 + 3 * self.hidden * self.intermediate / 32
    }
}

/// The addresses of a launch, on the device.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// `[experts]` of the packed codes, one after the other; scales likewise.
    pub up_codes: u64,
    pub up_scales: u64,
    pub down_codes: u64,
    pub down_scales: u64,
    /// `[rows, hidden]` bf16, QDQ8'd.
    pub x: u64,
    /// Ids of the experts with pairs, their count, and where each one's pairs begin (one more than there are).
    pub active: u64,
    pub active_count: u64,
    pub starts: u64,
    /// `[pairs]`: the row, and the routing weight.
    pub pair_row: u64,
    pub pair_weight: u64,
    /// `[pairs, intermediate]` bf16, between the two kernels.
    pub between: u64,
    /// `[pairs, hidden]` bf16.
    pub out: u64,
}

/// What only changes speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    pub teams: usize,
    pub overlap: bool,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning { teams: 4, overlap: true }
    }
}

/// The family's kernels.
#[derive(Debug)]
pub struct Experts {
    kernels: Vec<Kernel>,
}

impl Experts {
    /// # Errors
    /// [`CudaError::NoKernel`] when the module is another one.
    pub fn new(module: &Arc<Module>) -> Result<Experts, CudaError> {
        let names =
            ["experts_up_10", "experts_up_5", "experts_up_any", "experts_down_9", "experts_down_3", "experts_down_any"];
        Ok(Experts { kernels: names.into_iter().map(|name| module.kernel(name)).collect::<Result<_, _>>()? })
    }

    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// Both kernels, for `rows` rows: no expert has more pairs. `limit` 0 means no clamp.
    ///
    /// # Errors
    /// [`CudaError::Limit`]; nothing is launched.
    pub fn launch(
        &self,
        gpu: &Gpu,
        sizes: Sizes,
        rows: usize,
        to: Addresses,
        limit: f32,
        tuning: Tuning,
    ) -> Result<(), CudaError> {
        let limit = if limit == 0.0 { f32::INFINITY } else { limit };
        let up = (sizes.hidden, chunks::EXPERT_UP, sizes.intermediate / 8, to.up_codes, to.up_scales, to.x, to.between);
        let down = (
            sizes.intermediate,
            chunks::EXPERT_DOWN,
            sizes.hidden / SLAB,
            to.down_codes,
            to.down_scales,
            to.between,
            to.out,
        );
        for (index, (columns, chunk, slabs, codes, scales, x, out)) in [up, down].into_iter().enumerate() {
            let blocks = columns / BLOCK;
            let chunk_blocks = (chunk / BLOCK).min(blocks);
            let chunk_count = blocks.div_ceil(chunk_blocks);
            let last = blocks - (chunk_count - 1) * chunk_blocks;
            let staged_rows = rows.clamp(1, PASS);
            let staged_bytes = blocks * 2 * staged_rows * 64;
            let warps = tuning.teams.clamp(1, 15) * chunk_count;
            let room = gpu.shared_bytes_max.saturating_sub(1024);
            let fits = |depth: usize| chunk_blocks.is_multiple_of(depth) && last.is_multiple_of(depth);
            let (depth, name) = deepest(index == 0, warps, room, staged_bytes, fits);
            let kernel = self.kernels.iter().find(|kernel| kernel.name == name);
            let kernel = kernel.ok_or_else(|| CudaError::NoKernel { kernel: name.to_string() })?;
            let refuse = |what, found: usize, max: usize| {
                let (found, max) = (found as u64, max as u64);
                let refused = CudaError::Limit { kernel: kernel.name.clone(), what, found, max };
                if found <= max { Ok(()) } else { Err(refused) }
            };
            refuse("what is left of the columns by blocks of 64", columns % BLOCK, 0)?;
            refuse("the experts a block meets", sizes.experts.div_ceil(gpu.multiprocessors) + 1, SPAN_MAX)?;
            let parameter = Parameter::new()
                .address(codes)
                .address(scales)
                .address(x)
                .address(to.active)
                .address(to.active_count)
                .address(to.starts)
                .address(to.pair_row)
                .address(to.pair_weight)
                .address(out)
                .int(columns)
                .int([sizes.intermediate, sizes.hidden][index])
                .int(slabs)
                .int(blocks)
                .int(chunk_blocks)
                .int(chunk_count)
                .float(limit)
                .int(staged_rows);
            let shape = Shape {
                blocks: gpu.multiprocessors,
                threads: warps * 32,
                shared_bytes: shared_bytes(warps, depth, staged_bytes),
                cluster: 1,
                overlap: tuning.overlap,
            };
            gpu.launch(kernel, shape, &[parameter])?;
        }
        Ok(())
    }
}

/// Shared memory of a block: sums and rings of its warps, and the inputs.
const fn shared_bytes(warps: usize, depth: usize, staged_bytes: usize) -> usize {
    warps * (1024 + depth * SLOT) + staged_bytes
}

/// The deepest kernel that takes these warps and leaves room for the inputs.
fn deepest(
    up: bool,
    warps: usize,
    room: usize,
    staged_bytes: usize,
    fits: impl Fn(usize) -> bool,
) -> (usize, &'static str) {
    let candidates: [(usize, &str); 3] = if up {
        [(10, "experts_up_10"), (5, "experts_up_5"), (4, "experts_up_any")]
    } else {
        [(9, "experts_down_9"), (3, "experts_down_3"), (4, "experts_down_any")]
    };
    let possible = |(depth, name): &&(usize, &str)| {
        shared_bytes(warps, *depth, staged_bytes) <= room && (name.ends_with("any") || fits(*depth))
    };
    *candidates.iter().find(possible).unwrap_or(&candidates[2])
}
