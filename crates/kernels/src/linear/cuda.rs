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
/// Blocks of a cluster on every device that has them.
const CLUSTER_MAX: usize = 8;

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
    const fn kernels(self, fold: Fold) -> &'static [(usize, usize, &'static str)] {
        match (self, fold) {
            (Format::Fp8, Fold::Together) => &[
                (20, 8, "linear_fp8_20"),
                (16, 12, "linear_fp8_16"),
                (10, 16, "linear_fp8_10"),
                (9, 12, "linear_fp8_9"),
                (8, 16, "linear_fp8_8"),
                (1, 16, "linear_fp8_any"),
            ],
            (Format::Fp8, Fold::Cluster) => &[],
            (Format::Fp8, Fold::Apart) => {
                &[(10, 12, "linear_fp8_apart_10"), (8, 16, "linear_fp8_apart_8"), (1, 16, "linear_fp8_apart_any")]
            }
            (Format::Bf16, Fold::Together) => {
                &[(10, 8, "linear_bf16_10"), (5, 16, "linear_bf16_5"), (1, 16, "linear_bf16_any")]
            }
            (Format::Bf16, Fold::Cluster) => &[(10, 8, "linear_bf16_cluster_10"), (1, 16, "linear_bf16_cluster_any")],
            (Format::Bf16, Fold::Apart) => &[(10, 8, "linear_bf16_apart_10"), (1, 16, "linear_bf16_apart_any")],
            (Format::Head, _) => &[(4, 16, "lm_head_4"), (1, 16, "lm_head_any")],
        }
    }
}

/// Who computes the chunks of a slab. Changes no bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Warps of one block, which holds the inputs of all chunks.
    Together,
    /// Blocks of one cluster, a chunk each (compute capability 9.0 and later, up to 8 chunks).
    Cluster,
    /// Any blocks; the chunks meet in device memory.
    Apart,
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
    /// The way to fold, where it is possible; else the first that is.
    pub fold: Option<Fold>,
    /// May start while the launch before it ends.
    pub overlap: bool,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning { fold: None, overlap: true }
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
            Format::Fp8 => self.slabs().div_ceil(2) * scale_stride(self.columns),
            Format::Bf16 | Format::Head => 0,
        };
        self.slabs() * self.blocks() * self.format.block_bytes() + scales
    }

    /// The first way to fold that the device can take: kernel, grid and staging.
    fn plan(&self, rows: usize, gpu: &Gpu, tuning: Tuning) -> Plan {
        // Where every block would read more inputs than this, reading one chunk of them is quicker.
        let read = self.blocks() * tiles(rows) * 512;
        let preferred = match self.format {
            Format::Bf16 if read > 100 << 10 => Fold::Cluster,
            Format::Fp8 if read > 150 << 10 && self.chunk_count() == 4 => Fold::Apart,
            _ => Fold::Together,
        };
        let ways = [tuning.fold.unwrap_or(preferred), Fold::Together];
        let possible = ways.into_iter().find_map(|fold| self.plan_fold(rows, gpu, fold, tuning));
        possible.unwrap_or_else(|| self.plan_apart(rows, gpu, tuning.overlap))
    }

    fn plan_fold(&self, rows: usize, gpu: &Gpu, fold: Fold, tuning: Tuning) -> Option<Plan> {
        let chunks = self.chunk_count();
        let overlap = tuning.overlap;
        let possible = match fold {
            Fold::Together => chunks <= WARPS_MAX,
            Fold::Cluster => {
                let has_kernels = !self.format.kernels(fold).is_empty();
                has_kernels && gpu.capability.0 >= 9 && (2..=CLUSTER_MAX).contains(&chunks)
            }
            Fold::Apart => chunks > 1,
        };
        if !possible {
            return None;
        }
        let plan = match fold {
            Fold::Together => self.plan_together(rows, gpu, tuning),
            Fold::Cluster => self.plan_cluster(rows, gpu, overlap),
            Fold::Apart => self.plan_apart(rows, gpu, overlap),
        };
        (plan.shape.shared_bytes <= gpu.shared_bytes_max.saturating_sub(1024)).then_some(plan)
    }

    fn plan_together(&self, rows: usize, gpu: &Gpu, tuning: Tuning) -> Plan {
        let (chunks, group_slabs) = (self.chunk_count(), self.slabs() / self.groups);
        let teams_room = WARPS_MAX / chunks.min(WARPS_MAX);
        let members = (gpu.multiprocessors / self.groups).clamp(1, group_slabs);
        let wanted = group_slabs.div_ceil(members);
        let teams = wanted.div_ceil(wanted.div_ceil(teams_room));
        let members = if wanted <= teams_room { group_slabs.div_ceil(teams) } else { members };
        let mine = group_slabs.div_ceil(members);
        let sums = if chunks > 1 { teams * 2 * chunks * tiles(rows) * 512 } else { 0 };
        self.staged(rows, gpu, Fold::Together, [members, teams * chunks, mine, sums], tuning.overlap)
    }

    fn plan_cluster(&self, rows: usize, gpu: &Gpu, overlap: bool) -> Plan {
        let (chunks, group_slabs) = (self.chunk_count(), self.slabs() / self.groups);
        let members = (gpu.multiprocessors / (self.groups * chunks)).clamp(1, group_slabs);
        let mine = group_slabs.div_ceil(members);
        let sums = mine.next_multiple_of(chunks) * tiles(rows) * 512;
        let warps = mine.div_ceil(mine.div_ceil(WARPS_MAX));
        self.staged(rows, gpu, Fold::Cluster, [group_slabs.div_ceil(mine), warps, mine, sums], overlap)
    }

    fn plan_apart(&self, rows: usize, gpu: &Gpu, overlap: bool) -> Plan {
        let (chunks, group_slabs) = (self.chunk_count(), self.slabs() / self.groups);
        let members = (gpu.multiprocessors / (self.groups * chunks)).clamp(1, group_slabs);
        let mine = group_slabs.div_ceil(members);
        let warps = mine.div_ceil(mine.div_ceil(WARPS_MAX));
        self.staged(rows, gpu, Fold::Apart, [members, warps, mine, 0], overlap)
    }

    fn staged(&self, rows: usize, gpu: &Gpu, fold: Fold, figures: [usize; 4], overlap: bool) -> Plan {
        let [members, warps, mine, sums] = figures;
        let chunks = self.chunk_count();
        let input_bytes = |blocks: usize| tiles(rows) * 8 * (blocks * 64 + 32);
        let chunk_blocks = (self.chunk / BLOCK).min(self.blocks());
        let last = self.blocks() - (chunks - 1) * chunk_blocks;
        let (parts, staged) = match fold {
            Fold::Together => (self.groups, self.blocks()),
            Fold::Cluster | Fold::Apart => (self.groups * chunks, chunk_blocks),
        };
        let codes = if self.format == Format::Fp8 { mine * ((staged + 15) & !7) } else { 0 };
        let mut phases = 1;
        while chunks == 1 && input_bytes(staged / phases) + codes > gpu.shared_bytes_max.saturating_sub(1024) {
            phases += 1;
            while !staged.is_multiple_of(phases) {
                phases += 1;
            }
        }
        let kernels = self.format.kernels(fold);
        let fits = |(depth, most, _): &&(usize, usize, &str)| {
            warps <= *most && (chunk_blocks / phases).is_multiple_of(*depth) && last.is_multiple_of(*depth)
        };
        let kernel = kernels.iter().find(fits).map_or(kernels[kernels.len() - 1].2, |(.., name)| name);
        let sums_at = (input_bytes(staged / phases) + codes).next_multiple_of(16);
        let cluster = if fold == Fold::Cluster { chunks } else { 1 };
        let shape =
            Shape { blocks: members * parts, threads: warps * 32, shared_bytes: sums_at + sums, cluster, overlap };
        Plan { kernel, shape, phases, chunk_blocks, sums_at, fold }
    }
}

/// Tiles of 8 rows that a launch computes.
const fn tiles(rows: usize) -> usize {
    match rows {
        ..=8 => 1,
        9..=16 => 2,
        _ => 4,
    }
}

/// Bytes of a row of packed FP8 scales.
const fn scale_stride(columns: usize) -> usize {
    (columns / BLOCK).next_multiple_of(crate::linear_fp8::pack_cuda::SCALE_ALIGNMENT)
}

#[derive(Debug)]
struct Plan {
    kernel: &'static str,
    shape: Shape,
    phases: usize,
    chunk_blocks: usize,
    sums_at: usize,
    fold: Fold,
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
            let folds: &[Fold] =
                if format == Format::Head { &[Fold::Together] } else { &[Fold::Together, Fold::Cluster, Fold::Apart] };
            for (.., name) in folds.iter().flat_map(|fold| format.kernels(*fold)) {
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
        if plan.fold == Fold::Apart {
            let parts = operator.slabs() * operator.chunk_count() * tiles(rows);
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
            .int(scale_stride(operator.columns))
            .int(plan.sums_at);
        gpu.launch(kernel, plan.shape, &[parameter])
    }
}
