use super::mirror::{chunks, sums_at};
use super::{CollapseArgs, EnterArgs, ExpandArgs, MixWeights, TapArgs, scratch_floats};
use crate::gpu::{OVERLAP, a_simd_group_each, a_thread_each, count, optional, program};
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, Tuning};
use tf_device::{Buffer, LaunchError};

static PROGRAM: Program = program("hyper", Some(include_str!("kernel.metal")), true);

/// Threads of a block that has a whole row.
const ROW_THREADS: u32 = 640;
/// Of a row, which its block's threads hold in registers.
const HIDDEN_MAX: usize = 10_240;
/// Columns of a segment, which a warp adds up.
const SEGMENT: usize = 128;
/// Blocks of a cluster that share a row: of few rows, and of rows that fill the device.
const PARTS: [usize; 2] = [8, 4];
/// Up to how many rows.
const PARTS_MAX: [usize; 2] = [16, 128];
const MIX_THREADS: u32 = 128;
/// Chunks of a block of the mixes.
const CHUNKS_OF_BLOCK: usize = 2;
/// Rows of a block, at least, and at most.
const TILES: (usize, usize) = (4, 64);
/// Up to this many rows have their mixes made by the last block of a tile, a warp each; more by a launch of their own.
const ARRIVALS_MAX: usize = 16;

/// The constants of a launch; each entry reads its own.
#[derive(Clone, Copy, Default)]
struct Sizes {
    rows: usize,
    hidden: usize,
    iterations: usize,
    outputs: usize,
    hc_eps: f32,
    norm_eps: f32,
    out_columns: usize,
    out_offset: usize,
}

impl Sizes {
    fn shape(&self) -> ShapeBytes {
        let counts = ShapeBytes::new().uint(self.rows).uint(self.hidden).uint(self.iterations).uint(self.outputs);
        counts.float(self.hc_eps).float(self.norm_eps).uint(self.out_columns).uint(self.out_offset)
    }

    /// As CUDA's kernels read it.
    fn cuda(&self, parts: usize, tile: usize) -> ShapeBytes {
        self.shape().uint(parts).uint(tile).uint(scratch_floats(self.hidden)).uint(sums_at(self.hidden))
    }
}

pub(super) fn run_enter(queue: &mut GpuQueue, args: EnterArgs<'_>) -> Result<(), LaunchError> {
    let sizes = Sizes {
        rows: args.rows,
        hidden: args.hidden,
        iterations: args.constants.iterations as usize,
        outputs: usize::from(args.normed.is_some())
            | usize::from(args.quantised.is_some()) << 1
            | usize::from(args.y.is_some()) << 3,
        hc_eps: args.constants.hc_eps,
        norm_eps: args.constants.norm_eps,
        ..Sizes::default()
    };
    match queue.backend() {
        Backend::Metal => enter_metal(queue, args, &sizes.shape()),
        Backend::Cuda => enter_cuda(queue, args, &sizes),
    }
}

fn enter_metal(queue: &mut GpuQueue, args: EnterArgs<'_>, shape: &ShapeBytes) -> Result<(), LaunchError> {
    let EnterArgs { y, streams, mix, post, comb, weights, norm, rows, hidden, normed, quantised, scratch, .. } = args;
    if let Some(y) = y {
        run_expand(queue, ExpandArgs { y, streams, post, comb, rows, hidden })?;
    }
    // Two outputs a SIMD group, and the squares.
    let (groups, threads) = a_simd_group_each(rows * (super::MIXES / 2 + 1));
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_products",
            bindings: &mut [Binding::Read(streams), Binding::Read(weights.function), Binding::Write(scratch)],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )?;
    let (groups, threads) = a_simd_group_each(rows);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_finish",
            bindings: &mut [
                Binding::Read(streams),
                Binding::Write(mix),
                Binding::Write(post),
                Binding::Write(comb),
                Binding::Read(weights.base),
                Binding::Read(weights.scale),
                Binding::Read(norm),
                Binding::Read(scratch),
                optional(normed),
                optional(quantised),
                Binding::Missing,
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

/// Blocks of a cluster that share a row of `hidden` columns; 1 where the chip has no clusters.
fn parts(queue: &GpuQueue, rows: usize, hidden: usize) -> usize {
    let digits = queue.limits().target.trim_end_matches(|c: char| c.is_ascii_lowercase());
    let has_clusters = digits.parse::<u32>().is_ok_and(|capability| capability >= 90);
    let held = PARTS.iter().zip(PARTS_MAX).filter(|(_, rows_max)| has_clusters && rows <= *rows_max);
    held.map(|(parts, _)| *parts).find(|parts| hidden >= parts * SEGMENT).unwrap_or(1)
}

fn enter_cuda(queue: &mut GpuQueue, args: EnterArgs<'_>, sizes: &Sizes) -> Result<(), LaunchError> {
    LaunchError::check_limit("the hidden size", sizes.hidden, HIDDEN_MAX)?;
    let EnterArgs { y, streams, mix, post, comb, weights, norm, rows, hidden, normed, quantised, scratch, .. } = args;
    let parts = parts(queue, rows, hidden);
    let (entry, threads) = match parts {
        1 => ("hyper_enter", ROW_THREADS),
        _ => ("hyper_enter_split", 32 * count(hidden.div_ceil(SEGMENT).div_ceil(parts))),
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry,
            bindings: &mut [
                y.map_or(Binding::Missing, Binding::Read),
                Binding::Write(streams),
                Binding::Read(mix),
                Binding::Read(post),
                Binding::Read(comb),
                Binding::Read(norm),
                optional(normed),
                optional(quantised),
                Binding::Write(scratch),
            ],
            shape: sizes.cuda(parts, 0).bytes(),
            groups: count(rows * parts),
            threads,
            shared_bytes: 0,
        },
        Tuning { cluster: count(parts), ..OVERLAP },
    )?;
    queue.beside(|queue| mixes_cuda(queue, sizes, streams, [mix, post, comb], weights, scratch))
}

/// The next mixes, which nobody reads before the sublayer's end.
fn mixes_cuda(
    queue: &mut GpuQueue,
    sizes: &Sizes,
    streams: &Buffer,
    [mix, post, comb]: [&mut Buffer; 3],
    weights: MixWeights<'_>,
    scratch: &mut Buffer,
) -> Result<(), LaunchError> {
    let rows = sizes.rows;
    let tile = (rows.div_ceil(8)).next_multiple_of(TILES.0).clamp(TILES.0, TILES.1);
    let tiles = rows.div_ceil(tile);
    let outputs = usize::from(rows <= ARRIVALS_MAX) << 4;
    let shape = Sizes { outputs, ..*sizes }.cuda(1, tile);
    let mut arrivals = match rows {
        ..=ARRIVALS_MAX => Some(queue.take_counters("hyper", tiles)?),
        _ => None,
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_mixes",
            bindings: &mut [
                Binding::Read(streams),
                Binding::Write(mix),
                Binding::Write(post),
                Binding::Write(comb),
                Binding::Read(weights.function),
                Binding::Read(weights.base),
                Binding::Read(weights.scale),
                Binding::Write(scratch),
                optional(arrivals.as_mut()),
            ],
            shape: shape.bytes(),
            groups: count(tiles * chunks(sizes.hidden).div_ceil(CHUNKS_OF_BLOCK)),
            threads: MIX_THREADS,
            shared_bytes: 0,
        },
        OVERLAP,
    )?;
    if let Some(arrivals) = arrivals {
        queue.keep_counters("hyper", arrivals);
        return Ok(());
    }
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_finish",
            bindings: &mut [
                Binding::Write(scratch),
                Binding::Write(mix),
                Binding::Write(post),
                Binding::Write(comb),
                Binding::Read(weights.base),
                Binding::Read(weights.scale),
            ],
            shape: shape.bytes(),
            groups: count(rows.div_ceil(MIX_THREADS as usize / 32)),
            threads: MIX_THREADS,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

pub(super) fn run_expand(queue: &mut GpuQueue, args: ExpandArgs<'_>) -> Result<(), LaunchError> {
    let ExpandArgs { y, streams, post, comb, rows, hidden } = args;
    let sizes = Sizes { rows, hidden, ..Sizes::default() };
    let ((groups, threads), shape) = match queue.backend() {
        Backend::Metal => (a_thread_each(rows * hidden), sizes.shape()),
        Backend::Cuda => (a_thread_each(rows * hidden / 4), sizes.cuda(1, 0)),
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_expand",
            bindings: &mut [Binding::Read(y), Binding::Write(streams), Binding::Read(post), Binding::Read(comb)],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

pub(super) fn run_collapse(queue: &mut GpuQueue, args: CollapseArgs<'_>) -> Result<(), LaunchError> {
    let CollapseArgs { streams, mix, norm, norm_eps, rows, hidden, collapsed, normed, quantised } = args;
    let outputs =
        usize::from(normed.is_some()) | usize::from(quantised.is_some()) << 1 | usize::from(collapsed.is_some()) << 2;
    let sizes = Sizes { rows, hidden, outputs, norm_eps, ..Sizes::default() };
    let ((groups, threads), shape) = match queue.backend() {
        Backend::Metal => (a_simd_group_each(rows), sizes.shape()),
        Backend::Cuda => {
            LaunchError::check_limit("the hidden size", hidden, HIDDEN_MAX)?;
            ((count(rows), ROW_THREADS), sizes.cuda(1, 0))
        }
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_collapse",
            bindings: &mut [
                Binding::Read(streams),
                Binding::Read(mix),
                Binding::Read(norm),
                optional(normed),
                optional(quantised),
                optional(collapsed),
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

pub(super) fn run_tap(queue: &mut GpuQueue, args: TapArgs<'_>) -> Result<(), LaunchError> {
    let TapArgs { streams, rows, hidden, out, out_columns, out_offset, quantise } = args;
    let outputs = usize::from(quantise) << 1;
    let sizes = Sizes { rows, hidden, outputs, out_columns, out_offset, ..Sizes::default() };
    let ((groups, threads), shape) = match queue.backend() {
        Backend::Metal => (a_simd_group_each(rows), sizes.shape()),
        Backend::Cuda => (a_thread_each(rows * hidden / 4), sizes.cuda(1, 0)),
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "hyper_tap",
            bindings: &mut [Binding::Read(streams), Binding::Write(out)],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}
