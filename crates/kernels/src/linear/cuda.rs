//! Launches of the CUDA linears: FP8, bf16 and the head, for any number of rows.
//!
//! The chunk of columns is a constant of the operator ([`chunk`]): it fixes the order of every sum. Row tiles, members,
//! warps and phases only decide who computes what, and change no bit. The definition of the bits is
//! [`tf_numerics::fma16::chunked_dot`] over the columns, bf16 inputs and bf16 weights.

use super::gpu::quantise_where_asked;
use super::{Finish, flow, split};
use tf_device::gpu::{Binding, GpuLimits, GpuQueue, Launch, Program, ShapeBytes, Tuning, bytes_of};
use tf_device::{Buffer, LaunchError};

/// Rows of one launch at most.
const ROWS_MAX: usize = 32;
/// Rows at most whose inputs are rounded where they are staged; more are rounded once before.
const DIRECT_ROWS_MAX: usize = 8;
const SLAB: usize = 16;
const BLOCK: usize = 32;
const WARPS_MAX: usize = 16;
/// Blocks of a cluster on every device that has them.
const CLUSTER_MAX: usize = 8;
/// Shared memory that kernels declare, beside what a launch asks for.
const STATIC_SHARED: usize = 1024;
/// Rows from which on the kernels of `flow.cuh` are quicker than tiles of 32 rows, where there are such kernels.
const TILED_ROWS_MIN: usize = 65;
/// Threads of a tile's block.
pub(crate) const TILE_THREADS: usize = 384;
/// Columns of a stage, rows of an atom and bytes of one stage of it.
pub(crate) const STAGE: usize = 64;
pub(crate) const ATOM: usize = 8;
pub(crate) const ATOM_BYTES: usize = 1024;

static INPUTS: Program = crate::gpu::program("linear", None, true);
static FP8: Program = crate::gpu::program("linear_fp8", None, true);
static BF16: Program = crate::gpu::program("linear_bf16", None, true);
static HEAD: Program = crate::gpu::program("lm_head", None, true);

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Fp8,
    Bf16,
    /// bf16 in one chunk.
    Head,
}

/// Columns of a chunk: a function of the format and the column count alone, so that every row of every weight of an
/// operator has one order of sums, however its rows are cut over launches or devices.
pub const fn chunk(format: Format, columns: usize) -> usize {
    match (format, columns) {
        (Format::Head, _) => columns.next_multiple_of(BLOCK),
        (Format::Bf16, _) => 640,
        (Format::Fp8, 2304) => 576,
        (Format::Fp8, 4096) => 1024,
        (Format::Fp8, 6144) => 3072,
        (Format::Fp8, 8192) => 2048,
        (Format::Fp8, 15_360) => 1920,
        (Format::Fp8, _) => 640,
    }
}

impl Format {
    fn program(self) -> &'static Program {
        match self {
            Format::Fp8 => &FP8,
            Format::Bf16 => &BF16,
            Format::Head => &HEAD,
        }
    }

    /// Bytes of one block of one slab.
    const fn block_bytes(self) -> usize {
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
            (Format::Bf16, Fold::Together) => &[(10, 8, "linear_bf16_10"), (1, 16, "linear_bf16_any")],
            (Format::Bf16, Fold::Cluster) => &[(10, 8, "linear_bf16_cluster_10"), (1, 16, "linear_bf16_cluster_any")],
            (Format::Bf16, Fold::Apart) => &[(10, 8, "linear_bf16_apart_10"), (1, 16, "linear_bf16_apart_any")],
            (Format::Head, _) => &[(4, 16, "lm_head_4"), (1, 16, "lm_head_any")],
        }
    }
}

/// Who computes the chunks of a slab. Changes no bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fold {
    /// Warps of one block, which holds the inputs of all chunks.
    Together,
    /// Blocks of one cluster, a chunk each (compute capability 9.0 and later, up to 8 chunks).
    Cluster,
    /// Any blocks; the chunks meet in device memory.
    Apart,
}

/// What a plan must know of the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chip {
    pub units: usize,
    pub shared_bytes: usize,
    /// Clusters and programmatic launches: compute capability 9.0 and later.
    pub hopper: bool,
    /// The matrix instruction of warpgroups, which compute capability 9.0 alone has.
    pub warpgroups: bool,
}

impl Chip {
    /// The figures of a device with these limits.
    pub fn of(limits: &GpuLimits) -> Chip {
        let digits = limits.target.trim_end_matches(|c: char| c.is_ascii_lowercase());
        Chip {
            units: (limits.units as usize).max(1),
            shared_bytes: (limits.shared_bytes_max as usize).saturating_sub(STATIC_SHARED),
            hopper: digits.parse::<u32>().is_ok_and(|capability| capability >= 90),
            warpgroups: limits.target == "90a",
        }
    }

    /// Whether so many rows that come as bf16 come as tiles.
    pub fn tiles(self, rows: usize) -> bool {
        rows >= TILED_ROWS_MIN && self.has_tiles()
    }

    /// Whether there is room for kernels that take tiles.
    fn has_tiles(self) -> bool {
        // The experts' kernels want less.
        self.warpgroups && flow::fit(self)
    }
}

/// A linear's fixed figures: both weights of a launch together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Operator {
    format: Format,
    slabs: usize,
    /// Of 32 columns, in a group.
    blocks: usize,
    groups: usize,
    /// In blocks.
    chunk: usize,
}

#[derive(Debug)]
struct Plan {
    kernel: &'static str,
    groups: usize,
    threads: usize,
    shared_bytes: usize,
    cluster: usize,
    phases: usize,
    chunk_blocks: usize,
    sums_at: usize,
    fold: Fold,
}

impl Operator {
    const fn chunk_count(&self) -> usize {
        self.blocks.div_ceil(self.chunk)
    }

    /// The most rows of one launch, and how it is cut.
    ///
    /// # Errors
    /// [`LaunchError::Limit`] where even eight rows need more shared memory than there is.
    fn plan(&self, rows: usize, chip: Chip) -> Result<(usize, Plan), LaunchError> {
        let mut tile = rows.min(ROWS_MAX);
        loop {
            let plan = self.plan_tile(tile, chip);
            if plan.shared_bytes <= chip.shared_bytes {
                return Ok((tile, plan));
            }
            if tile <= 8 {
                LaunchError::check_limit("a linear's shared memory", plan.shared_bytes, chip.shared_bytes)?;
            }
            tile = if tile > 16 { 16 } else { 8 };
        }
    }

    /// The first way to fold that the device can take: kernel, grid and staging.
    fn plan_tile(&self, rows: usize, chip: Chip) -> Plan {
        // Where every block would read more inputs than this, reading one chunk of them is quicker.
        let read = self.blocks * tiles(rows) * 512;
        let preferred = match self.format {
            Format::Bf16 if read > 100 << 10 => Fold::Cluster,
            Format::Fp8 if read > 150 << 10 && self.chunk_count() == 4 => Fold::Apart,
            _ => Fold::Together,
        };
        let possible = [preferred, Fold::Together].into_iter().find_map(|fold| self.plan_fold(rows, chip, fold));
        possible.unwrap_or_else(|| self.plan_apart(rows, chip))
    }

    fn plan_fold(&self, rows: usize, chip: Chip, fold: Fold) -> Option<Plan> {
        let chunks = self.chunk_count();
        let possible = match fold {
            Fold::Together => chunks <= WARPS_MAX,
            Fold::Cluster => {
                !self.format.kernels(fold).is_empty() && chip.hopper && (2..=CLUSTER_MAX).contains(&chunks)
            }
            Fold::Apart => chunks > 1,
        };
        if !possible {
            return None;
        }
        let plan = match fold {
            Fold::Together => self.plan_together(rows, chip),
            Fold::Cluster => self.plan_cluster(rows, chip),
            Fold::Apart => self.plan_apart(rows, chip),
        };
        (plan.shared_bytes <= chip.shared_bytes).then_some(plan)
    }

    fn plan_together(&self, rows: usize, chip: Chip) -> Plan {
        let (chunks, group_slabs) = (self.chunk_count(), self.slabs / self.groups);
        let teams_room = WARPS_MAX / chunks.min(WARPS_MAX);
        let members = (chip.units / self.groups).clamp(1, group_slabs);
        let wanted = group_slabs.div_ceil(members);
        let teams = wanted.div_ceil(wanted.div_ceil(teams_room));
        let members = if wanted <= teams_room { group_slabs.div_ceil(teams) } else { members };
        let mine = group_slabs.div_ceil(members);
        let sums = if chunks > 1 { teams * 2 * chunks * tiles(rows) * 512 } else { 0 };
        self.staged(rows, chip, Fold::Together, [members, teams * chunks, mine, sums])
    }

    fn plan_cluster(&self, rows: usize, chip: Chip) -> Plan {
        let (chunks, group_slabs) = (self.chunk_count(), self.slabs / self.groups);
        let members = (chip.units / (self.groups * chunks)).clamp(1, group_slabs);
        let mine = group_slabs.div_ceil(members);
        let sums = mine.next_multiple_of(chunks) * tiles(rows) * 512;
        let warps = mine.div_ceil(mine.div_ceil(WARPS_MAX));
        self.staged(rows, chip, Fold::Cluster, [group_slabs.div_ceil(mine), warps, mine, sums])
    }

    fn plan_apart(&self, rows: usize, chip: Chip) -> Plan {
        let (chunks, group_slabs) = (self.chunk_count(), self.slabs / self.groups);
        let members = (chip.units / (self.groups * chunks)).clamp(1, group_slabs);
        let mine = group_slabs.div_ceil(members);
        let warps = mine.div_ceil(mine.div_ceil(WARPS_MAX));
        self.staged(rows, chip, Fold::Apart, [members, warps, mine, 0])
    }

    fn staged(&self, rows: usize, chip: Chip, fold: Fold, figures: [usize; 4]) -> Plan {
        let [members, warps, mine, sums] = figures;
        let chunks = self.chunk_count();
        let input_bytes = |blocks: usize| tiles(rows) * 8 * (blocks * 64 + 32);
        let chunk_blocks = self.chunk.min(self.blocks);
        let last = self.blocks - (chunks - 1) * chunk_blocks;
        let (parts, staged) = match fold {
            Fold::Together => (self.groups, self.blocks),
            Fold::Cluster | Fold::Apart => (self.groups * chunks, chunk_blocks),
        };
        let codes = if self.format == Format::Fp8 { mine * ((staged + 15) & !7) } else { 0 };
        let mut phases = 1;
        while chunks == 1 && phases < staged && input_bytes(staged / phases) + codes > chip.shared_bytes {
            phases += 1;
            while !staged.is_multiple_of(phases) {
                phases += 1;
            }
        }
        let kernels = self.format.kernels(fold);
        let fits = |(depth, most, _): &&(usize, usize, &str)| {
            warps <= *most && (chunk_blocks / phases).is_multiple_of(*depth) && last.is_multiple_of(*depth)
        };
        let fallback = kernels.len() - 1;
        let kernel = kernels[..fallback].iter().find(fits).map_or(kernels[fallback].2, |(.., name)| name);
        let sums_at = (input_bytes(staged / phases) + codes).next_multiple_of(16);
        let cluster = if fold == Fold::Cluster { chunks } else { 1 };
        let (groups, threads, shared_bytes) = (members * parts, warps * 32, sums_at + sums);
        Plan { kernel, groups, threads, shared_bytes, cluster, phases, chunk_blocks, sums_at, fold }
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
pub(crate) const fn scale_stride(columns: usize) -> usize {
    columns.div_ceil(BLOCK).next_multiple_of(crate::linear_fp8::pack_cuda::SCALE_ALIGNMENT)
}

/// The input of a linear.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    /// `[rows, groups * columns]` f32 that holds bf16 values (others are rounded); with the rows that are wanted, if not
    /// all from the first on.
    F32 { buffer: &'a Buffer, chosen: Option<&'a [u32]> },
    /// `[rows, groups, columns rounded up to 32]` bf16, the padding zero; as tiles ([`tile_bytes`]) where [`Chip::tiles`] says
    /// so.
    Bf16 { buffer: &'a Buffer },
}

/// Bytes of inputs as `tile.cuh` wants them: `[stages, atoms, 8 rows, 64 columns]` bf16.
pub(crate) const fn tile_bytes(rows: usize, groups: usize, columns: usize) -> usize {
    groups * columns.div_ceil(STAGE) * rows.div_ceil(ATOM) * ATOM_BYTES
}

/// One weight and where its result goes.
pub(crate) struct Product<'a> {
    pub codes: &'a Buffer,
    /// Of FP8 weights.
    pub scales: Option<&'a Buffer>,
    pub weight_rows: usize,
    /// `[rows, weight_rows]` f32; may hold more rows.
    pub out: &'a mut Buffer,
    pub finish: Finish,
}

/// Weights of one format over one input.
pub(crate) struct Linear<'a, 'b> {
    pub format: Format,
    pub columns: usize,
    pub groups: usize,
    /// [`chunk`], or the constant of the family that launches.
    pub chunk: usize,
    pub rows: usize,
    pub input: Input<'a>,
    pub products: &'b mut [Product<'a>],
}

/// Rows of the weights that one launch stores, counted in a group where there are several.
struct Slice {
    /// The first weight row whose slab is launched: a multiple of 32.
    first: usize,
    /// Rows stored, counted from `first`.
    begin: usize,
    end: usize,
    /// Column of `out` of the first stored row, and first input column.
    out_at: usize,
    x_at: usize,
    groups: usize,
}

/// Runs every product; rows 0 is no work.
///
/// # Errors
/// [`LaunchError`] when the device has no room for working memory, or refuses.
pub(crate) fn run(queue: &mut GpuQueue, linear: Linear<'_, '_>) -> Result<(), LaunchError> {
    let Linear { format, columns, groups, chunk, rows, input, products } = linear;
    let chip = Chip::of(queue.limits());
    let padded = columns.next_multiple_of(BLOCK);
    let slabs = products.iter().take(2).map(|product| product.weight_rows.div_ceil(SLAB)).sum();
    let figures = Figures { format, columns, groups, chunk, slabs, rows, chip };
    let (tiled, direct) = match input {
        Input::Bf16 { .. } => (chip.tiles(rows), false),
        Input::F32 { chosen, .. } => figures.inputs(chosen.is_none() && columns == padded),
    };
    let mut scratch = None;
    let (buffer, x_is_bf16) = match input {
        Input::Bf16 { buffer } => (buffer, true),
        Input::F32 { buffer, .. } if direct => (buffer, false),
        Input::F32 { buffer, chosen } => {
            let bytes = if tiled { tile_bytes(rows, groups, columns) } else { rows * groups * padded * 2 };
            let mut rounded = queue.take_scratch("linear inputs", bytes)?;
            round_inputs(queue, buffer, chosen, &mut rounded, [rows, groups, columns], tiled)?;
            (&*scratch.insert(rounded), true)
        }
    };
    let x_stride = groups * if x_is_bf16 { padded } else { columns };
    let common = Common { format, columns, chunk: chunk / BLOCK, rows, buffer, x_is_bf16, x_stride, tiled, chip };
    if groups == 1 {
        for pair in products.chunks_mut(2) {
            let slabs = pair.iter().map(|product| product.weight_rows.div_ceil(SLAB)).sum();
            let whole = Slice { first: 0, begin: 0, end: usize::MAX, out_at: 0, x_at: 0, groups: 1 };
            common.launch(queue, pair, slabs, &whole)?;
        }
    } else {
        for product in products.chunks_mut(1) {
            common.launch_grouped(queue, product, groups)?;
        }
    }
    if let Some(scratch) = scratch {
        queue.keep_scratch("linear inputs", scratch);
    }
    for product in products.iter_mut() {
        quantise_where_asked(queue, product.out, rows, product.weight_rows, product.finish)?;
    }
    Ok(())
}

/// What decides how the inputs come.
struct Figures {
    format: Format,
    columns: usize,
    groups: usize,
    chunk: usize,
    /// Of the first launch.
    slabs: usize,
    rows: usize,
    chip: Chip,
}

impl Figures {
    /// Whether float32 inputs are made tiles, or else are rounded where they are staged, which is possible where they are whole
    /// blocks and rows as they are.
    fn inputs(&self, whole: bool) -> (bool, bool) {
        let Figures { format, columns, groups, chunk, slabs, rows, chip } = *self;
        if format == Format::Head || !chip.has_tiles() {
            // The head has no kernel between slabs and tiles: a second launch of slabs would read its weights again.
            let tiled = chip.has_tiles() && rows > ROWS_MAX;
            return (tiled, whole && rows <= DIRECT_ROWS_MAX && format != Format::Head);
        }
        let operator = split::Operator::new(format, columns, groups, chunk, slabs);
        if rows <= split::DIRECT_ROWS {
            let direct = rows <= DIRECT_ROWS_MAX || split::beats_slabs(&operator, rows) || self.hides_rounding();
            return if self.tiles_beat_slabs(&operator) { (true, false) } else { (false, whole && direct) };
        }
        let cost = |as_rows| split::choose(&operator, rows, as_rows, chip).map_or(f64::INFINITY, |choice| choice.cost);
        let tiles = flow::quickest(&operator, rows, chip).map_or(f64::INFINITY, |(_, cost)| cost).min(cost(false));
        let as_they_are = whole && cost(true) < tiles + split::ROUNDING_COST;
        (!as_they_are, as_they_are)
    }
}

impl Figures {
    /// Whether tiles are quicker for up to [`split::DIRECT_ROWS`] rows: large FP8 weights with few columns, more than 16 rows.
    fn tiles_beat_slabs(&self, operator: &split::Operator) -> bool {
        let Figures { format, columns, slabs, rows, chip, .. } = *self;
        if format != Format::Fp8 || rows <= 16 || split::beats_slabs(operator, rows) {
            return false;
        }
        // What the kernels of `slab.cuh` take, as measured: microseconds on one H200.
        let by_slabs = 8.0 + (slabs * SLAB * columns) as f64 / 3.4e6;
        flow::quickest(operator, rows, chip).is_ok_and(|(_, cost)| cost + split::ROUNDING_COST < by_slabs)
    }

    /// Whether a block of `slab.cuh` streams FP8 weights for about as long as it takes to read its inputs as float32.
    fn hides_rounding(&self) -> bool {
        let Figures { format, columns, groups, chunk, slabs, rows, chip } = *self;
        let blocks = columns.div_ceil(BLOCK);
        let Ok((tile, plan)) = Operator { format, slabs, blocks, groups, chunk: chunk / BLOCK }.plan(rows, chip) else {
            return false;
        };
        let read = tile * 4 * if plan.fold == Fold::Together { columns } else { chunk };
        let streamed = slabs * SLAB * columns / chip.units;
        format == Format::Fp8 && read <= streamed + streamed / 4
    }
}

/// What the launches of a linear share.
struct Common<'a> {
    format: Format,
    columns: usize,
    /// In blocks.
    chunk: usize,
    rows: usize,
    buffer: &'a Buffer,
    x_is_bf16: bool,
    x_stride: usize,
    tiled: bool,
    chip: Chip,
}

impl Common<'_> {
    fn launch_grouped(
        &self,
        queue: &mut GpuQueue,
        product: &mut [Product<'_>],
        groups: usize,
    ) -> Result<(), LaunchError> {
        let weight_rows = product[0].weight_rows;
        let group_rows = weight_rows / groups;
        if group_rows.is_multiple_of(SLAB) {
            let whole = Slice { first: 0, begin: 0, end: usize::MAX, out_at: 0, x_at: 0, groups };
            return self.launch(queue, product, weight_rows / SLAB, &whole);
        }
        // A slab would belong to two groups: one launch a group, which stores its own rows.
        for group in 0..groups {
            let (row, first) = (group * group_rows, group * group_rows / BLOCK * BLOCK);
            let (begin, end) = (row - first, row - first + group_rows);
            let x_at = group * self.x_stride / groups;
            let slice = Slice { first, begin, end, out_at: row, x_at, groups: 1 };
            self.launch(queue, product, end.div_ceil(SLAB), &slice)?;
        }
        Ok(())
    }

    /// One product or two, in tiles of rows.
    fn launch(
        &self,
        queue: &mut GpuQueue,
        products: &mut [Product<'_>],
        slabs: usize,
        slice: &Slice,
    ) -> Result<(), LaunchError> {
        if self.tiled {
            return self.launch_tiled(queue, products, slabs, slice);
        }
        let operator = self.operator(slabs, slice);
        // More rows come here as they are where this is quicker; by slabs they would be several launches.
        let wanted = self.rows > split::DIRECT_ROWS || split::beats_slabs(&operator, self.rows);
        if wanted
            && self.format != Format::Head
            && self.chip.has_tiles()
            && let Some(choice) = split::choose(&operator, self.rows, true, self.chip)
        {
            return self.launch_split(queue, products, slabs, slice, &choice);
        }
        let blocks = self.columns.div_ceil(BLOCK);
        let operator = Operator { format: self.format, slabs, blocks, groups: slice.groups, chunk: self.chunk };
        let mut row = 0;
        while row < self.rows {
            let (tile, plan) = operator.plan(self.rows - row, self.chip)?;
            self.launch_tile(queue, products, &operator, slice, (row, tile), &plan)?;
            row += tile;
        }
        Ok(())
    }

    fn launch_tile(
        &self,
        queue: &mut GpuQueue,
        products: &mut [Product<'_>],
        operator: &Operator,
        slice: &Slice,
        (row, rows): (usize, usize),
        plan: &Plan,
    ) -> Result<(), LaunchError> {
        let chunks = operator.chunk_count();
        let apart = plan.fold == Fold::Apart;
        let (mut partials, mut counters) = (None, None);
        if apart {
            let parts = operator.slabs * chunks * tiles(rows) * 512;
            partials = Some(queue.take_scratch("linear sums", parts)?);
            counters = Some(queue.take_counters("linear", operator.slabs)?);
        }
        let x_bytes = if self.x_is_bf16 { 2 } else { 4 };
        let first_slabs = if products.len() == 1 { operator.slabs } else { products[0].weight_rows.div_ceil(SLAB) };
        let stride = scale_stride(self.columns);
        let mut shape = first_fields(operator, plan, rows, self.x_stride, self.x_is_bf16, stride, first_slabs);
        for index in 0..2 {
            shape = output_shape(shape, products.get(index), slice);
        }
        let x = Binding::ReadAt(self.buffer, (row * self.x_stride + slice.x_at) * x_bytes);
        let mut bindings = self.weight_bindings(products, slice, row, x);
        bindings.push(partials.as_mut().map_or(Binding::Missing, Binding::Write));
        bindings.push(counters.as_mut().map_or(Binding::Missing, Binding::Write));
        queue.launch_tuned(
            Launch {
                program: self.format.program(),
                entry: plan.kernel,
                bindings: &mut bindings,
                shape: shape.bytes(),
                groups: plan.groups as u32,
                threads: plan.threads as u32,
                shared_bytes: plan.shared_bytes as u32,
            },
            Tuning { cluster: plan.cluster as u32, overlap: true },
        )?;
        drop(bindings);
        if let (Some(partials), Some(counters)) = (partials, counters) {
            queue.keep_scratch("linear sums", partials);
            queue.keep_counters("linear", counters);
        }
        Ok(())
    }
}

/// Shared memory of a tile: inputs of `slots` stages and their barriers, the weights' rings of all warps, and the way to the
/// first kilobyte boundary.
pub(crate) const fn tile_shared_bytes(rows: usize, slots: usize, rings_bytes: usize) -> usize {
    1024 + slots * (rows * 128 + 16) + rings_bytes
}

impl Common<'_> {
    /// One product or two of many rows.
    fn launch_tiled(
        &self,
        queue: &mut GpuQueue,
        products: &mut [Product<'_>],
        slabs: usize,
        slice: &Slice,
    ) -> Result<(), LaunchError> {
        let operator = self.operator(slabs, slice);
        let tile = flow::quickest(&operator, self.rows, self.chip);
        let split = split::choose(&operator, self.rows, false, self.chip);
        if let Some(choice) = split.filter(|choice| tile.as_ref().map_or(true, |(_, cost)| choice.cost < *cost)) {
            return self.launch_split(queue, products, slabs, slice, &choice);
        }
        let (kernel, _) = tile?;
        let shape = self.tile_shape(products, slabs, slice, kernel.rows);
        let x_at = self.tiles_at(slice);
        let mut bindings = self.weight_bindings(products, slice, 0, Binding::ReadAt(self.buffer, x_at));
        queue.launch_tuned(
            Launch {
                program: operator.format.program(),
                entry: kernel.name,
                bindings: &mut bindings,
                shape: shape.bytes(),
                groups: kernel.blocks(&operator, self.rows, self.chip.units) as u32,
                threads: TILE_THREADS as u32,
                shared_bytes: kernel.shared_bytes() as u32,
            },
            Tuning { cluster: 1, overlap: true },
        )
    }

    fn operator(&self, slabs: usize, slice: &Slice) -> split::Operator {
        split::Operator::new(self.format, self.columns, slice.groups, self.chunk * BLOCK, slabs)
    }

    /// The fields of `TileShape`.
    fn tile_shape(&self, products: &[Product<'_>], slabs: usize, slice: &Slice, tile_rows: usize) -> ShapeBytes {
        let first_slabs = if products.len() == 1 { slabs } else { products[0].weight_rows.div_ceil(SLAB) };
        let mut shape = ShapeBytes::new()
            .uint(self.rows)
            .uint(self.rows.div_ceil(ATOM))
            .uint(self.columns.div_ceil(BLOCK))
            .uint((self.chunk * BLOCK).div_ceil(STAGE))
            .uint(slice.groups)
            .uint(slabs)
            .uint(first_slabs)
            .uint(scale_stride(self.columns))
            .uint(self.rows.div_ceil(tile_rows));
        for index in 0..2 {
            shape = output_shape(shape, products.get(index), slice);
        }
        shape
    }

    /// The first byte of a slice's inputs as tiles: `x_at` counts columns of a row; a group's stages lie one after the other.
    fn tiles_at(&self, slice: &Slice) -> usize {
        slice.x_at / self.columns.next_multiple_of(BLOCK) * tile_bytes(self.rows, 1, self.columns)
    }

    fn launch_split(
        &self,
        queue: &mut GpuQueue,
        products: &mut [Product<'_>],
        slabs: usize,
        slice: &Slice,
        choice: &split::Choice,
    ) -> Result<(), LaunchError> {
        let kernel = choice.kernel;
        let shape = self
            .tile_shape(products, slabs, slice, kernel.rows)
            .uint(choice.parts)
            .uint(self.x_stride)
            .uint(self.columns.next_multiple_of(BLOCK))
            .uint(usize::from(self.x_is_bf16));
        let x_bytes = if self.x_is_bf16 { 2 } else { 4 };
        let x_at = if self.tiled { self.tiles_at(slice) } else { slice.x_at * x_bytes };
        let mut bindings = self.weight_bindings(products, slice, 0, Binding::ReadAt(self.buffer, x_at));
        queue.launch_tuned(
            Launch {
                program: kernel.program(),
                entry: kernel.name,
                bindings: &mut bindings,
                shape: shape.bytes(),
                groups: choice.blocks as u32,
                threads: kernel.threads as u32,
                shared_bytes: kernel.shared_bytes() as u32,
            },
            Tuning { cluster: choice.parts as u32, overlap: true },
        )
    }

    /// Codes, scales, inputs, output of the first product; codes, scales, output of the second.
    fn weight_bindings<'b>(
        &'b self,
        products: &'b mut [Product<'_>],
        slice: &Slice,
        row: usize,
        x: Binding<'b>,
    ) -> Vec<Binding<'b>> {
        let code_at = slice.first / SLAB * self.columns.div_ceil(BLOCK) * self.format.block_bytes();
        let scale_at = slice.first / BLOCK * scale_stride(self.columns);
        let mut bindings: Vec<Binding<'b>> = Vec::with_capacity(9);
        for product in products.iter_mut() {
            let scales = product.scales.map_or(Binding::Missing, |scales| Binding::ReadAt(scales, scale_at));
            let out_at = (row * product.weight_rows + slice.out_at) * 4;
            let out = Binding::WriteAt(&mut *product.out, out_at);
            bindings.extend([Binding::ReadAt(product.codes, code_at), scales, out]);
        }
        bindings.insert(2, x);
        bindings.resize_with(7, || Binding::Missing);
        bindings
    }
}

/// The fields of `LinearShape` up to the outputs.
fn first_fields(
    operator: &Operator,
    plan: &Plan,
    rows: usize,
    x_stride: usize,
    x_is_bf16: bool,
    scale_stride: usize,
    first_slabs: usize,
) -> ShapeBytes {
    ShapeBytes::new()
        .uint(rows)
        .uint(x_stride)
        .uint(usize::from(x_is_bf16))
        .uint(operator.blocks)
        .uint(plan.chunk_blocks)
        .uint(operator.chunk_count())
        .uint(operator.groups)
        .uint(plan.phases)
        .uint(scale_stride)
        .uint(plan.sums_at)
        .uint(operator.slabs)
        .uint(first_slabs)
}

/// The fields of a product's output; zeros where there is none.
fn output_shape(shape: ShapeBytes, product: Option<&Product<'_>>, slice: &Slice) -> ShapeBytes {
    let Some(product) = product else { return shape.uint(0).uint(0).uint(0).uint(0) };
    let (begin, end) = (slice.begin, slice.end.min(product.weight_rows));
    shape.uint(begin).uint(end).uint(product.weight_rows).uint(usize::from(product.finish != Finish::F32))
}

/// `[rows, outputs] = x @ w^T` for float32 weights `[outputs, columns]`, in the CPU's order.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_f32(
    queue: &mut GpuQueue,
    x: &Buffer,
    weights: &Buffer,
    [rows, outputs, columns]: [usize; 3],
    out: &mut Buffer,
    finish: Finish,
) -> Result<(), LaunchError> {
    let rounded = usize::from(finish != Finish::F32);
    let shape = ShapeBytes::new().uint(rows).uint(outputs).uint(columns).uint(rounded);
    let bindings = &mut [Binding::Read(x), Binding::Read(weights), Binding::Write(out)];
    launch_simple(queue, "linear_f32", bindings, &shape, rows * outputs * 32)?;
    quantise_where_asked(queue, out, rows, outputs, finish)
}

/// `x` rounded to bf16, rows chosen, columns padded with zeros: `[rows, groups, whole blocks of 32]`, or tiles.
fn round_inputs(
    queue: &mut GpuQueue,
    x: &Buffer,
    chosen: Option<&[u32]>,
    out: &mut Buffer,
    [rows, groups, columns]: [usize; 3],
    tiled: bool,
) -> Result<(), LaunchError> {
    let shape = ShapeBytes::new().uint(rows).uint(groups * columns).uint(groups).uint(columns);
    let chosen = chosen.map_or(Binding::Missing, |chosen| Binding::Bytes(bytes_of(chosen)));
    let bindings = &mut [Binding::Read(x), chosen, Binding::Write(out)];
    if tiled {
        let stages = columns.div_ceil(STAGE);
        let shape = shape.uint(stages).uint(rows.div_ceil(ATOM));
        return launch_simple(queue, "linear_tiles", bindings, &shape, rows * groups * stages * 4);
    }
    let padded = columns.next_multiple_of(BLOCK);
    launch_simple(queue, "linear_inputs", bindings, &shape.uint(padded), rows * groups * padded / 2)
}

/// An entry whose blocks of 256 threads stride over `threads` items.
fn launch_simple(
    queue: &mut GpuQueue,
    entry: &'static str,
    bindings: &mut [Binding<'_>],
    shape: &ShapeBytes,
    threads: usize,
) -> Result<(), LaunchError> {
    let groups = threads.div_ceil(256).min(queue.limits().units as usize * 8) as u32;
    let shape = shape.bytes();
    queue.launch_tuned(
        Launch { program: &INPUTS, entry, bindings, shape, groups, threads: 256, shared_bytes: 0 },
        Tuning { cluster: 1, overlap: true },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPES: [(Format, usize, usize, usize); 12] = [
        (Format::Fp8, 1280, 5120, 1),
        (Format::Fp8, 32_768, 1280, 1),
        (Format::Fp8, 8192, 4096, 8),
        (Format::Fp8, 5120, 8192, 1),
        (Format::Fp8, 5120, 2304, 1),
        (Format::Fp8, 25_600, 6144, 1),
        (Format::Fp8, 5120, 15_360, 1),
        (Format::Fp8, 96, 160, 1),
        (Format::Bf16, 384, 5120, 1),
        (Format::Bf16, 4, 160, 1),
        (Format::Head, 129_280, 5120, 1),
        (Format::Head, 384, 128, 1),
    ];

    fn chips() -> [Chip; 4] {
        let chip = |units, kib: usize, hopper| Chip {
            units,
            shared_bytes: (kib << 10) - STATIC_SHARED,
            hopper,
            warpgroups: hopper,
        };
        [chip(108, 163, false), chip(46, 99, false), chip(132, 227, true), chip(132, 99, true)]
    }

    #[test]
    fn every_shape_finds_a_launch_that_fits() {
        for chip in chips() {
            for (format, weight_rows, columns, groups) in SHAPES {
                let (slabs, blocks) = (weight_rows.div_ceil(SLAB), columns.div_ceil(BLOCK));
                let operator = Operator { format, slabs, blocks, groups, chunk: chunk(format, columns) / BLOCK };
                for rows in 1..=ROWS_MAX {
                    let (tile, plan) = operator.plan(rows, chip).expect("there is a way");
                    assert!((1..=rows).contains(&tile), "{format:?} {weight_rows}x{columns}, {rows} rows: {tile}");
                    assert!(plan.shared_bytes <= chip.shared_bytes && plan.threads <= 512, "{plan:?}");
                    assert!(plan.threads.is_multiple_of(32) && plan.groups > 0, "{plan:?}");
                    assert!(plan.cluster == 1 || (chip.hopper && plan.groups.is_multiple_of(plan.cluster)), "{plan:?}");
                    // A phase is a whole part of the only chunk.
                    assert!(plan.phases == 1 || plan.chunk_blocks.is_multiple_of(plan.phases), "{plan:?}");
                }
            }
        }
    }

    #[test]
    fn a_chunk_is_whole_stages_of_both_kernels() {
        for (format, _, columns, _) in SHAPES {
            let length = chunk(format, columns);
            assert!(length.is_multiple_of(BLOCK), "{format:?} {columns}");
            assert!(length.is_multiple_of(STAGE) || length >= columns, "{format:?} {columns}: {length}");
        }
    }

    #[test]
    fn the_head_is_read_once_for_any_number_of_rows() {
        let chip = chips()[2];
        let figures = |rows| Figures {
            format: Format::Head,
            columns: 5120,
            groups: 1,
            chunk: 5120,
            slabs: 129_280 / SLAB,
            rows,
            chip,
        };
        assert_eq!(figures(ROWS_MAX).inputs(true), (false, false));
        for rows in [ROWS_MAX + 1, 64, 128] {
            assert_eq!(figures(rows).inputs(true), (true, false), "{rows} rows");
        }
    }

    #[test]
    fn tiles_are_for_many_rows_on_chips_with_room() {
        let hopper = chips()[2];
        assert!(!chips()[0].tiles(4096) && hopper.tiles(TILED_ROWS_MIN) && !hopper.tiles(TILED_ROWS_MIN - 1));
        assert!(!chips()[3].tiles(4096));
    }
}
