//! Which kernel of `split.cuh` takes a launch of nine or more rows, and how its chunks are dealt. Changes no bit.

use super::cuda::{ATOM, Chip, Format, STAGE, tile_shared_bytes};
use tf_device::gpu::Program;

/// Rows of a tile whose inputs a block takes as they are; more come as tiles.
pub(super) const DIRECT_ROWS: usize = 32;
/// Chunks that a cluster holds at most.
const PARTS_MAX: usize = 8;
/// What rounding the inputs before costs, in microseconds on one H200.
pub(super) const ROUNDING_COST: f64 = 2.0;

static FP8: Program = crate::gpu::program("linear_fp8.split", None, true);
static BF16: Program = crate::gpu::program("linear_bf16.split", None, true);

/// What a launch costs, in microseconds on one H200, as measured: blocks come in waves of all that run at the same time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    /// Of a stage of 64 columns; what it is longer by for every block that a multiprocessor has, on the mean.
    pub stage: f64,
    pub load: f64,
    /// Of a block beside its stages.
    pub block: f64,
}

impl Cost {
    /// Of `blocks` blocks of so many stages where `room` run at the same time on `units` multiprocessors.
    pub fn of(self, blocks: usize, stages: usize, room: usize, units: usize) -> f64 {
        let wave = |blocks: usize| {
            let load = self.load * blocks as f64 / units as f64;
            if blocks == 0 { 0.0 } else { stages as f64 * (self.stage + load) + self.block }
        };
        (blocks / room) as f64 * wave(room) + wave(blocks % room)
    }
}

/// A kernel of `split.cuh`.
#[derive(Debug)]
pub(super) struct Kernel {
    pub name: &'static str,
    format: Format,
    /// Slabs of 16 weight rows, and rows, of a block.
    slabs: usize,
    pub rows: usize,
    pub threads: usize,
    /// Whether blocks give each other their sums, in a room beside the rings.
    gives: bool,
    /// Stages of inputs and of weights in shared memory.
    slots: usize,
    depth: usize,
    /// Blocks of a multiprocessor.
    most: usize,
    cost: Cost,
}

static KERNELS: [Kernel; 13] = {
    const fn kernel(
        name: &'static str,
        [slabs, rows, threads]: [usize; 3],
        room: [usize; 3],
        cost: [f64; 3],
    ) -> Kernel {
        let ([slots, depth, most], [stage, load, block]) = (room, cost);
        let (format, cost) = (Format::Fp8, Cost { stage, load, block });
        Kernel { name, format, slabs, rows, threads, gives: false, slots, depth, most, cost }
    }
    const fn bf16(kernel: Kernel) -> Kernel {
        Kernel { format: Format::Bf16, ..kernel }
    }
    const fn gives(kernel: Kernel) -> Kernel {
        Kernel { gives: true, ..kernel }
    }
    [
        gives(kernel("linear_fp8_split_64_32", [4, 32, 256], [8, 8, 2], [0.15, 0.13, 5.4])),
        gives(kernel("linear_fp8_split_192_32", [12, 32, 512], [10, 10, 1], [0.1, 0.42, 5.9])),
        kernel("linear_fp8_split_64_64", [4, 64, 160], [5, 7, 3], [0.3, 0.12, 4.0]),
        gives(kernel("linear_fp8_split_128_64", [8, 64, 288], [9, 8, 1], [0.25, 0.16, 4.0])),
        kernel("linear_fp8_split_192_64", [12, 64, 416], [9, 8, 1], [0.5, 0.0, 5.4]),
        kernel("linear_fp8_split_64_128", [4, 128, 160], [5, 7, 2], [0.2, 0.35, 3.6]),
        kernel("linear_fp8_split_192_128", [12, 128, 416], [7, 8, 1], [0.775, 0.0, 5.5]),
        bf16(gives(kernel("linear_bf16_split_64_32", [4, 32, 256], [8, 8, 2], [0.02, 0.45, 5.0]))),
        bf16(gives(kernel("linear_bf16_split_128_32", [8, 32, 384], [8, 8, 1], [0.05, 0.34, 6.2]))),
        bf16(kernel("linear_bf16_split_64_64", [4, 64, 160], [8, 10, 1], [0.15, 0.0, 4.5])),
        bf16(gives(kernel("linear_bf16_split_128_64", [8, 64, 288], [8, 7, 1], [0.1, 0.4, 4.6]))),
        bf16(kernel("linear_bf16_split_64_128", [4, 128, 160], [8, 8, 1], [0.3, 0.0, 4.7])),
        bf16(kernel("linear_bf16_split_128_128", [8, 128, 288], [6, 7, 1], [0.5, 0.0, 5.0])),
    ]
};

/// The figures of an operator that a choice needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operator {
    pub format: Format,
    pub groups: usize,
    pub group_slabs: usize,
    /// Stages of 64 columns of a group, and of a chunk.
    pub stages: usize,
    chunk_stages: usize,
}

impl Operator {
    /// Of so many columns and slabs in all, chunks of `chunk` columns.
    pub fn new(format: Format, columns: usize, groups: usize, chunk: usize, slabs: usize) -> Operator {
        // The head's weights are bf16 weights.
        let format = if format == Format::Fp8 { Format::Fp8 } else { Format::Bf16 };
        let (stages, chunk_stages) = (columns.div_ceil(STAGE), chunk.div_ceil(STAGE));
        Operator { format, groups, group_slabs: slabs / groups, stages, chunk_stages }
    }
}

/// A kernel, and the blocks of its clusters.
#[derive(Debug)]
pub(super) struct Choice {
    pub kernel: &'static Kernel,
    pub parts: usize,
    pub blocks: usize,
    /// Estimated, in microseconds on one H200.
    pub cost: f64,
}

impl Kernel {
    /// The source that holds it.
    pub fn program(&self) -> &'static Program {
        if self.format == Format::Fp8 { &FP8 } else { &BF16 }
    }

    /// Whether it takes inputs as rows.
    pub fn takes_rows(&self) -> bool {
        self.rows == DIRECT_ROWS
    }

    /// Of a block.
    pub fn shared_bytes(&self) -> usize {
        // A part is as many sums as there are parts, so one may be larger.
        let given = if self.gives { self.sums_bytes() + (PARTS_MAX - 1) * 512 } else { 0 };
        let stage_bytes = self.slabs * if self.format == Format::Fp8 { 1024 } else { 2048 };
        tile_shared_bytes(self.rows, self.slots, self.depth * stage_bytes) + given
    }

    /// Of a tile's float32 sums.
    fn sums_bytes(&self) -> usize {
        self.slabs * 16 * self.rows * 4
    }

    /// How it would run, where it can.
    fn choice(&'static self, operator: &Operator, rows: usize, chip: Chip) -> Option<Choice> {
        let parts = operator.stages.div_ceil(operator.chunk_stages);
        if parts > PARTS_MAX || self.format != operator.format || self.shared_bytes() > chip.shared_bytes {
            return None;
        }
        let tiles = operator.groups * operator.group_slabs.div_ceil(self.slabs) * rows.div_ceil(self.rows);
        let blocks = tiles * parts;
        let stages = operator.chunk_stages.min(operator.stages);
        // A large cluster finds no room in what other clusters leave of its part of the chip.
        let units = if parts > PARTS_MAX / 2 { chip.units * 17 / 20 } else { chip.units };
        let cost = self.cost.of(blocks, stages, (units * self.most).max(parts), chip.units);
        Some(Choice { kernel: self, parts, blocks, cost })
    }
}

/// Whether a launch of up to [`DIRECT_ROWS`] rows is quicker here than by the kernels of `slab.cuh`.
pub(super) fn beats_slabs(operator: &Operator, rows: usize) -> bool {
    let slabs = operator.groups * operator.group_slabs;
    match operator.format {
        Format::Fp8 => rows > 8 && slabs <= if rows > 16 { 320 } else { 256 },
        Format::Bf16 | Format::Head => rows > 8,
    }
}

/// The quickest way.
pub(super) fn choose(operator: &Operator, rows: usize, rows_as_they_are: bool, chip: Chip) -> Option<Choice> {
    if !chip.warpgroups {
        return None;
    }
    let kernels = KERNELS.iter().filter(|kernel| kernel.takes_rows() == rows_as_they_are);
    let ways = kernels.filter_map(|kernel| kernel.choice(operator, rows, chip));
    ways.min_by(|a, b| a.cost.total_cmp(&b.cost))
}

const _: () = assert!(DIRECT_ROWS.is_multiple_of(ATOM) && STAGE == 64);

#[cfg(test)]
mod tests {
    use super::*;

    fn hopper(units: usize, kib: usize) -> Chip {
        Chip { units, shared_bytes: (kib << 10) - 1024, hopper: true, warpgroups: true }
    }

    fn operator(format: Format, slabs: usize, columns: usize, groups: usize, chunk: usize) -> Operator {
        Operator::new(format, columns, groups, chunk, slabs)
    }

    #[test]
    fn a_kernel_is_what_its_name_says_and_fits_as_often_as_it_claims() {
        for kernel in &KERNELS {
            let (slabs, rows) = (kernel.slabs * 16, kernel.rows);
            assert!(kernel.name.ends_with(&format!("_{slabs}_{rows}")), "{}", kernel.name);
            // A multiprocessor keeps a kilobyte of each block for itself.
            let room = kernel.most * (kernel.shared_bytes() + 1024);
            assert!(room <= 228 << 10, "{}: {room} bytes for {} blocks", kernel.name, kernel.most);
            // The sums of a tile lie where the rings were.
            assert!(kernel.gives || kernel.sums_bytes() + 1024 <= kernel.shared_bytes(), "{}", kernel.name);
        }
    }

    #[test]
    fn every_chunk_has_a_block_and_clusters_divide_the_grid() {
        let chips = [hopper(132, 227), hopper(7, 227)];
        let operators = [
            operator(Format::Fp8, 112, 5120, 1, 640),
            operator(Format::Fp8, 2048, 1280, 1, 640),
            operator(Format::Fp8, 512, 4096, 8, 1024),
            operator(Format::Fp8, 320, 8192, 1, 2048),
            operator(Format::Fp8, 5, 1696, 1, 640),
            operator(Format::Fp8, 6, 160, 1, 640),
            operator(Format::Bf16, 24, 5120, 1, 640),
            operator(Format::Bf16, 1, 160, 1, 640),
        ];
        for (chip, operator) in chips.iter().flat_map(|chip| operators.iter().map(move |operator| (*chip, operator))) {
            for rows in [9, 16, 17, DIRECT_ROWS, 33, 64, 65, 128, 129, 2048] {
                let direct = rows <= DIRECT_ROWS;
                let choice = choose(operator, rows, direct, chip).expect("there is a way");
                assert_eq!(choice.kernel.takes_rows(), direct, "{rows} rows: {choice:?}");
                assert!(choice.blocks > 0 && choice.blocks.is_multiple_of(choice.parts), "{rows} rows: {choice:?}");
                let chunks = operator.stages.div_ceil(operator.chunk_stages);
                assert_eq!(choice.parts, chunks, "{rows} rows: {choice:?}");
            }
        }
    }

    #[test]
    fn up_to_eight_rows_go_in_slabs() {
        for (format, slabs) in [(Format::Fp8, 112), (Format::Fp8, 2048), (Format::Bf16, 24)] {
            let operator = operator(format, slabs, 5120, 1, 640);
            assert!((1..=8).all(|rows| !beats_slabs(&operator, rows)), "{format:?} {slabs}");
        }
        assert!(beats_slabs(&operator(Format::Fp8, 112, 5120, 1, 640), 9));
    }

    #[test]
    fn there_is_no_way_without_warpgroups_or_room() {
        let operator = operator(Format::Fp8, 320, 8192, 1, 2048);
        assert!(choose(&operator, 16, true, Chip { warpgroups: false, ..hopper(132, 227) }).is_none());
        assert!(choose(&operator, 16, true, hopper(132, 64)).is_none());
        // Bf16 in more chunks than a cluster has blocks.
        let long = self::operator(Format::Bf16, 24, 10_240, 1, 640);
        assert!(choose(&long, 16, true, hopper(132, 227)).is_none());
    }
}
