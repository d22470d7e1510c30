//! Which kernel of `tile.cuh` takes a launch of many rows. Changes no bit.

use super::cuda::{Chip, Format, tile_shared_bytes};
use super::split;

/// A kernel of `tile.cuh`.
pub(super) struct TileKernel {
    pub name: &'static str,
    format: Format,
    /// Weight rows over 128 and rows of a block.
    weights: usize,
    pub rows: usize,
    /// Whether sums of earlier chunks are parked in shared memory.
    parked: bool,
    /// Stages of inputs and of weights in shared memory.
    slots: usize,
    depth: usize,
    cost: split::Cost,
}

pub(super) static KERNELS: [TileKernel; 5] = {
    const fn kernel(
        name: &'static str,
        format: Format,
        [rows, depth]: [usize; 2],
        [stage, block]: [f64; 2],
    ) -> TileKernel {
        let cost = split::Cost { stage, load: 0.0, block };
        TileKernel { name, format, weights: 1, rows, parked: false, slots: 5, depth, cost }
    }
    let widest = kernel("linear_fp8_tile_256_128", Format::Fp8, [128, 3], [0.88, 8.0]);
    [
        TileKernel { weights: 2, parked: true, slots: 3, ..widest },
        kernel("linear_fp8_tile_128_128", Format::Fp8, [128, 8], [0.48, 6.0]),
        kernel("linear_fp8_tile_128_64", Format::Fp8, [64, 8], [0.4, 4.0]),
        kernel("linear_bf16_tile_128_128", Format::Bf16, [128, 6], [0.45, 3.0]),
        kernel("linear_bf16_tile_128_64", Format::Bf16, [64, 6], [0.33, 3.0]),
    ]
};

/// The quickest kernel that has room, and its cost.
pub(super) fn tile_kernel(operator: &split::Operator, rows: usize, chip: Chip) -> Option<(&'static TileKernel, f64)> {
    let fits = |kernel: &&TileKernel| kernel.format == operator.format && kernel.shared_bytes() <= chip.shared_bytes;
    let costs = KERNELS.iter().filter(fits).map(|kernel| (kernel, kernel.cost(operator, rows, chip.units)));
    costs.min_by(|a, b| a.1.total_cmp(&b.1))
}

impl TileKernel {
    /// Blocks of a launch.
    pub fn blocks(&self, rows: usize, groups: usize, group_slabs: usize) -> usize {
        groups * group_slabs.div_ceil(8 * self.weights) * rows.div_ceil(self.rows)
    }

    /// In the units of [`split::Choice`].
    fn cost(&self, operator: &split::Operator, rows: usize, units: usize) -> f64 {
        self.cost.of(self.blocks(rows, operator.groups, operator.group_slabs), operator.stages, units, units)
    }

    /// Of a block.
    pub fn shared_bytes(&self) -> usize {
        let parked = if self.parked { self.weights * self.rows / 2 * 256 * 4 } else { 0 };
        let slab_bytes = if self.format == Format::Fp8 { 1024 } else { 2048 };
        tile_shared_bytes(self.rows, self.slots, 8 * self.depth * self.weights * slab_bytes) + parked
    }
}
