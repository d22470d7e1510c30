//! Launches of the skinny CUDA linears: FP8, bf16 and the head, for 1 to 32 rows.
//!
//! The chunk of columns is a constant of the operator ([`chunks`]): it fixes the order of every sum. Members, warps and
//! phases only decide who computes what, and change no bit. The definition of the bits is [`tf_numerics::fma16`].

use std::sync::Arc;
use tf_device::cuda::{CudaError, Gpu, GpuBuffer, Kernel, Module, Parameter, Shape};

/// Rows of one launch at most.
pub const ROWS_MAX: usize = 32;
const SLAB: usize = 16;
const BLOCK: usize = 32;
const WARPS_MAX: usize = 16;

/// Columns of a chunk, a constant of each operator.
pub mod chunks {
    pub const WQ_A_WKV: usize = 640;
    pub const WQ_B: usize = 640;
    pub const WO_A: usize = 1024;
    pub const WO_B: usize = 2048;
    pub const EXPERT_UP: usize = 1280;
    pub const EXPERT_DOWN: usize = 576;
    pub const ROUTER: usize = 320;
    pub const COMPRESSOR: usize = 640;
    pub const INDEX_QUERY: usize = 640;
    pub const ENGRAM: usize = 3072;
    pub const MAIN_PROJECTION: usize = 1920;
}

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Fp8,
    Bf16,
    /// bf16, one chunk, with the argmax of each row.
    Head,
}

impl Format {
    /// Bytes of one block of one slab.
    pub const fn block_bytes(self) -> usize {
        match self {
            Format::Fp8 => 512,
            Format::Bf16 | Format::Head => 1024,
        }
    }

    /// Kernels by the blocks that a warp has in flight and the warps of a block, best first; the last takes every length.
    const fn kernels(self, apart: bool) -> &'static [(usize, usize, &'static str)] {
        match (self, apart) {
            (Format::Fp8, false) => &[
                (20, 8, "linear_fp8_20"),
                (18, 8, "linear_fp8_18"),
                (16, 12, "linear_fp8_16"),
                (10, 16, "linear_fp8_10"),
                (9, 16, "linear_fp8_9"),
                (8, 16, "linear_fp8_8"),
                (1, 16, "linear_fp8_any"),
            ],
            (Format::Fp8, true) => &[
                (20, 8, "linear_fp8_apart_20"),
                (16, 12, "linear_fp8_apart_16"),
                (10, 16, "linear_fp8_apart_10"),
                (8, 16, "linear_fp8_apart_8"),
                (1, 16, "linear_fp8_apart_any"),
            ],
            (Format::Bf16, false) => {
                &[(10, 8, "linear_bf16_10"), (5, 16, "linear_bf16_5"), (1, 16, "linear_bf16_any")]
            }
            (Format::Bf16, true) => {
                &[(10, 8, "linear_bf16_apart_10"), (5, 16, "linear_bf16_apart_5"), (1, 16, "linear_bf16_apart_any")]
            }
            (Format::Head, _) => &[(4, 16, "lm_head_4"), (1, 16, "lm_head_any")],
        }
    }
}

/// A linear's fixed figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operator {
    pub format: Format,
    /// Weight rows, a multiple of 16 in every group.
    pub weight_rows: usize,
    /// Columns of a group, a multiple of 32.
    pub columns: usize,
    /// 1, or the block count of `wo_a`: each block of weight rows has its own columns of `x`.
    pub groups: usize,
    pub chunk: usize,
}

/// What only changes speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Slabs that a block computes at once at most, 0 for as many as balance the device.
    pub teams_max: usize,
    /// Chunks of a slab in different blocks even where one block could hold them.
    pub apart: bool,
    /// Thread blocks a multiprocessor where chunks are apart.
    pub residency: usize,
    /// May start while the launch before it ends.
    pub overlap: bool,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning { teams_max: 0, apart: false, residency: 1, overlap: true }
    }
}

/// The addresses of a launch, on the device.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// Packed by the family's `pack_cuda`.
    pub weights: u64,
    /// 0 where the format has none.
    pub scales: u64,
    /// `[rows, groups * columns]` bf16.
    pub x: u64,
    /// `[rows, weight_rows]` float32 or bf16; 0 where only the argmax is wanted.
    pub out: u64,
    pub out_is_bf16: bool,
    /// `[rows]` u32 of the head, else 0.
    pub best_index: u64,
}

impl Operator {
    pub const fn slabs(&self) -> usize {
        self.weight_rows / SLAB
    }

    const fn blocks(&self) -> usize {
        self.columns / BLOCK
    }

    pub const fn chunk_count(&self) -> usize {
        self.columns.div_ceil(self.chunk)
    }

    /// Bytes of the packed weight and its scales: what a launch must read.
    pub const fn weight_bytes(&self) -> usize {
        let scales = match self.format {
            Format::Fp8 => self.slabs().div_ceil(2) * self.blocks(),
            Format::Bf16 | Format::Head => 0,
        };
        self.slabs() * self.blocks() * self.format.block_bytes() + scales
    }

    /// The kernel, the grid and the staging of a launch of `rows` rows.
    fn plan(&self, rows: usize, gpu: &Gpu, tuning: Tuning) -> Plan {
        let tiles = rows.div_ceil(8);
        let chunk_blocks = (self.chunk / BLOCK).min(self.blocks());
        let chunks = self.chunk_count();
        let last = self.blocks() - (chunks - 1) * chunk_blocks;
        let group_slabs = self.slabs() / self.groups;
        let room = gpu.shared_bytes_max.saturating_sub(1024);
        let factor_bytes = if self.format == Format::Fp8 { 4 } else { 0 };

        // Together: a team of `chunks` warps a slab, all inputs in one block.
        let teams_room = WARPS_MAX / chunks.min(WARPS_MAX);
        let members = (gpu.multiprocessors / self.groups).clamp(1, group_slabs);
        let wanted = group_slabs.div_ceil(members);
        let teams = wanted.div_ceil(wanted.div_ceil(teams_room)).clamp(1, if tuning.teams_max > 0 { tuning.teams_max } else { WARPS_MAX });
        let members = if wanted <= teams_room { group_slabs.div_ceil(teams) } else { members };
        let mine = group_slabs.div_ceil(members);
        let sums = if chunks > 1 { teams * 2 * chunks * tiles * 512 } else { 0 };
        let bytes = self.blocks() * tiles * 512 + mine * self.blocks() * factor_bytes;
        let together = chunks == 1 || (!tuning.apart && chunks <= WARPS_MAX && bytes + 16 + sums <= room);

        let (parts, members, warps, mine, staged) = if together {
            (self.groups, members, teams * chunks, mine, self.blocks())
        } else {
            let parts = self.groups * chunks;
            let members = (gpu.multiprocessors * tuning.residency / parts).clamp(1, group_slabs);
            let mine = group_slabs.div_ceil(members);
            (parts, members, mine.div_ceil(mine.div_ceil(WARPS_MAX)), mine, chunk_blocks)
        };
        let factors = mine * staged * factor_bytes;
        let mut phases = 1;
        while chunks == 1 && staged / phases * tiles * 512 + factors > room {
            phases += 1;
            while !staged.is_multiple_of(phases) {
                phases += 1;
            }
        }
        let kernels = self.format.kernels(!together);
        let fits = |(depth, most, _): &&(usize, usize, &str)| {
            warps <= *most && (chunk_blocks / phases).is_multiple_of(*depth) && last.is_multiple_of(*depth)
        };
        let kernel = kernels.iter().find(fits).map_or(kernels[kernels.len() - 1].2, |(.., name)| name);
        let sums_at = (staged / phases * tiles * 512 + factors).next_multiple_of(16);
        let shared_bytes = sums_at + if together { sums } else { 0 };
        let shape = Shape { blocks: members * parts, threads: warps * 32, shared_bytes, overlap: tuning.overlap };
        Plan { kernel, shape, phases, chunk_blocks, sums_at, together }
    }
}

#[derive(Debug)]
struct Plan {
    kernel: &'static str,
    shape: Shape,
    phases: usize,
    chunk_blocks: usize,
    sums_at: usize,
    together: bool,
}

/// The three families' kernels and the scratch that one stream of launches shares.
#[derive(Debug)]
pub struct Linears {
    kernels: Vec<Kernel>,
    partials: GpuBuffer,
    counters: GpuBuffer,
    best: GpuBuffer,
}

impl Linears {
    /// `modules`: of linear_fp8, linear_bf16 and lm_head. Scratch for operators of at most `slabs_max` slabs and
    /// `parts_max` slabs times chunks.
    ///
    /// # Errors
    /// [`CudaError`] when a kernel is missing or memory is short.
    pub fn new(
        gpu: &Gpu,
        modules: &[Arc<Module>; 3],
        slabs_max: usize,
        parts_max: usize,
    ) -> Result<Linears, CudaError> {
        let mut kernels = Vec::new();
        for (module, format) in modules.iter().zip([Format::Fp8, Format::Bf16, Format::Head]) {
            let apart: &[bool] = if format == Format::Head { &[false] } else { &[false, true] };
            for (.., name) in apart.iter().flat_map(|apart| format.kernels(*apart)) {
                kernels.push(module.kernel(name)?);
            }
        }
        let partials = GpuBuffer::zeroed(gpu, parts_max * ROWS_MAX / 8 * 512)?;
        let counters = GpuBuffer::zeroed(gpu, (slabs_max + 1) * 4)?;
        Ok(Linears { kernels, partials, counters, best: GpuBuffer::zeroed(gpu, ROWS_MAX * 8)? })
    }

    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// Kernel, blocks and threads of a launch: for reports.
    pub fn describe(&self, gpu: &Gpu, operator: &Operator, rows: usize, tuning: Tuning) -> String {
        let plan = operator.plan(rows.max(1), gpu, tuning);
        format!("{} {}x{}", plan.kernel, plan.shape.blocks, plan.shape.threads)
    }

    /// One launch. `rows` is 1 to 32.
    ///
    /// # Errors
    /// [`CudaError::Limit`] when a figure is beyond the kernels' or the scratch's; nothing is launched.
    pub fn launch(
        &self,
        gpu: &Gpu,
        operator: &Operator,
        rows: usize,
        to: Addresses,
        tuning: Tuning,
    ) -> Result<(), CudaError> {
        let plan = operator.plan(rows.max(1), gpu, tuning);
        let limit = |what, found: usize, max: usize| {
            let (found, max) = (found as u64, max as u64);
            let refused = CudaError::Limit { kernel: plan.kernel.to_string(), what, found, max };
            if found <= max { Ok(()) } else { Err(refused) }
        };
        limit("the row count", rows, ROWS_MAX)?;
        limit("what is left of the weight rows by slabs of 16", operator.weight_rows % (SLAB * operator.groups), 0)?;
        limit("what is left of the columns by blocks of 32", operator.columns % BLOCK, 0)?;
        limit("what is left of the chunk by blocks of 32", operator.chunk % BLOCK, 0)?;
        limit("the slab count", operator.slabs() + 1, self.counters.len_bytes() / 4)?;
        if !plan.together {
            let parts = operator.slabs() * operator.chunk_count() * rows.div_ceil(8);
            limit("the partial sums", parts * 512, self.partials.len_bytes())?;
        }
        if rows == 0 {
            return Ok(());
        }
        let kernel = self.kernels.iter().find(|kernel| kernel.name == plan.kernel);
        let kernel = kernel.ok_or_else(|| CudaError::NoKernel { kernel: plan.kernel.to_string() })?;
        let columns = operator.groups * operator.columns;
        let parameter = Parameter::new()
            .address(to.weights)
            .address(to.scales)
            .address(to.x)
            .address(to.out)
            .address(self.partials.address())
            .address(self.counters.address())
            .address(if to.best_index == 0 { 0 } else { self.best.address() })
            .address(to.best_index)
            .int(rows)
            .int(columns)
            .int(operator.weight_rows)
            .int(usize::from(to.out_is_bf16))
            .int(operator.slabs())
            .int(operator.blocks())
            .int(plan.chunk_blocks)
            .int(operator.chunk_count())
            .int(operator.groups)
            .int(plan.phases)
            .int(plan.sums_at);
        gpu.launch(kernel, plan.shape, &[parameter])
    }
}
