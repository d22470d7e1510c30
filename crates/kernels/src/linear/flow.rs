//! Which kernel of `flow.cuh` takes a launch of many rows. Changes no bit.

use super::cuda::{Chip, Format, tile_shared_bytes};
use super::split::Operator;
use tf_device::LaunchError;

/// A kernel of `flow.cuh`: its blocks go from tile to tile.
pub(super) struct TileKernel {
    pub name: &'static str,
    format: Format,
    /// Weight rows over 128 and rows of a tile.
    weights: usize,
    pub rows: usize,
    /// Stages of inputs and of weights in shared memory.
    slots: usize,
    depth: usize,
    cost: Cost,
}

/// What a launch costs, in microseconds on one H200, as measured: a stage of 64 columns, a tile beside its stages, the rest.
struct Cost {
    stage: f64,
    tile: f64,
    launch: f64,
}

static KERNELS: [TileKernel; 10] = {
    const fn kernel(name: &'static str, tile: [usize; 2], rings: [usize; 2], cost: [f64; 3]) -> TileKernel {
        let ([weights, rows], [slots, depth], [stage, tile, launch]) = (tile, rings, cost);
        TileKernel { name, format: Format::Fp8, weights, rows, slots, depth, cost: Cost { stage, tile, launch } }
    }
    const fn bf16(kernel: TileKernel) -> TileKernel {
        TileKernel { format: Format::Bf16, ..kernel }
    }
    [
        kernel("linear_fp8_tile_256_128", [2, 128], [3, 3], [0.87, 6.0, 4.0]),
        kernel("linear_fp8_tile_128_192", [1, 192], [4, 4], [0.66, 2.3, 4.0]),
        kernel("linear_fp8_tile_128_176", [1, 176], [4, 4], [0.59, 2.0, 4.0]),
        kernel("linear_fp8_tile_128_160", [1, 160], [4, 5], [0.56, 1.8, 4.0]),
        kernel("linear_fp8_tile_128_128", [1, 128], [5, 8], [0.475, 1.8, 4.0]),
        kernel("linear_fp8_tile_128_64", [1, 64], [8, 12], [0.36, 1.5, 4.0]),
        kernel("linear_fp8_tile_256_64", [2, 64], [6, 7], [0.56, 1.5, 7.0]),
        kernel("linear_fp8_tile_256_32", [2, 32], [8, 8], [0.5, 1.2, 5.5]),
        bf16(kernel("linear_bf16_tile_128_128", [1, 128], [5, 4], [0.44, 1.7, 4.0])),
        bf16(kernel("linear_bf16_tile_128_64", [1, 64], [5, 6], [0.3, 1.2, 4.0])),
    ]
};

fn fitting(format: Format, chip: Chip) -> impl Iterator<Item = &'static TileKernel> {
    KERNELS.iter().filter(move |kernel| kernel.format == format && kernel.shared_bytes() <= chip.shared_bytes)
}

/// Whether every format has a kernel that has room.
pub(super) fn fit(chip: Chip) -> bool {
    [Format::Fp8, Format::Bf16].into_iter().all(|format| fitting(format, chip).next().is_some())
}

/// The quickest kernel that has room, and its cost.
///
/// # Errors
/// [`LaunchError::Limit`] where none has.
pub(super) fn quickest(
    operator: &Operator,
    rows: usize,
    chip: Chip,
) -> Result<(&'static TileKernel, f64), LaunchError> {
    let costs = fitting(operator.format, chip).map(|kernel| (kernel, kernel.cost(operator, rows, chip.units)));
    if let Some(found) = costs.min_by(|a, b| a.1.total_cmp(&b.1)) {
        return Ok(found);
    }
    let least = KERNELS.iter().filter(|kernel| kernel.format == operator.format).map(TileKernel::shared_bytes).min();
    LaunchError::check_limit("a tile's shared memory", least.unwrap_or(0), chip.shared_bytes)?;
    Ok((&KERNELS[0], f64::INFINITY))
}

impl TileKernel {
    fn tiles(&self, operator: &Operator, rows: usize) -> usize {
        operator.groups * operator.group_slabs.div_ceil(8 * self.weights) * rows.div_ceil(self.rows)
    }

    /// Blocks of a launch: one a multiprocessor, as long as there are tiles.
    pub fn blocks(&self, operator: &Operator, rows: usize, units: usize) -> usize {
        self.tiles(operator, rows).min(units)
    }

    /// In the units of [`super::split::Choice`].
    fn cost(&self, operator: &Operator, rows: usize, units: usize) -> f64 {
        let Cost { stage, tile, launch } = self.cost;
        let turns = self.tiles(operator, rows).div_ceil(units) as f64;
        launch + turns * (operator.stages as f64 * stage + tile)
    }

    /// Of a block.
    pub fn shared_bytes(&self) -> usize {
        let slab_bytes = if self.format == Format::Fp8 { 1024 } else { 2048 };
        let outputs = self.weights * 128 * self.rows * 4;
        tile_shared_bytes(self.rows, self.slots, 8 * self.depth * self.weights * slab_bytes) + outputs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::cuda::ATOM;

    fn hopper(kib: usize) -> Chip {
        Chip { units: 132, shared_bytes: (kib << 10) - 1024, hopper: true, warpgroups: true }
    }

    #[test]
    fn a_kernel_is_what_its_name_says_and_fits_a_multiprocessor() {
        for kernel in &KERNELS {
            let (weights, rows) = (kernel.weights * 128, kernel.rows);
            assert!(kernel.name.ends_with(&format!("_{weights}_{rows}")), "{}", kernel.name);
            assert!(rows.is_multiple_of(ATOM), "{}", kernel.name);
            assert!(kernel.shared_bytes() <= hopper(227).shared_bytes, "{}: {}", kernel.name, kernel.shared_bytes());
        }
        assert!(fit(hopper(227)) && !fit(hopper(99)));
    }

    #[test]
    fn tiles_are_chosen_so_that_their_last_turn_is_full() {
        let chosen = |slabs, columns, groups, chunk, rows| {
            let operator = Operator::new(Format::Fp8, columns, groups, chunk, slabs);
            let (kernel, _) = quickest(&operator, rows, hopper(227)).expect("there is one");
            (kernel.name, kernel.blocks(&operator, rows, 132))
        };
        assert_eq!(chosen(320, 2304, 1, 576, 2048), ("linear_fp8_tile_128_160", 132));
        assert_eq!(chosen(80, 5120, 1, 640, 2048), ("linear_fp8_tile_128_160", 130));
        assert_eq!(chosen(288, 5120, 1, 1280, 2048), ("linear_fp8_tile_128_192", 132));
        assert_eq!(chosen(320, 8192, 1, 2048, 512), ("linear_fp8_tile_128_176", 120));
        assert_eq!(chosen(2048, 1280, 1, 640, 64), ("linear_fp8_tile_256_64", 128));
        assert_eq!(chosen(512, 4096, 8, 1024, 128), ("linear_fp8_tile_128_64", 128));
    }

    #[test]
    fn too_little_room_is_an_error_with_the_figures() {
        let operator = Operator::new(Format::Bf16, 5120, 1, 640, 24);
        let error = quickest(&operator, 100, hopper(64)).map(|_| ()).expect_err("no room");
        assert!(matches!(error, LaunchError::Limit { .. }), "{error}");
    }
}
