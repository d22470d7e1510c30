use super::{Args, Compressed, Shape, Span, gpu_keys, gpu_scratch_floats};
use crate::gpu::{OVERLAP, count, program};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("attention", Some(include_str!("kernel.metal")), true);

/// Keys of a row on Metal: their scores lie in the group's memory.
const METAL_KEYS_MAX: usize = 1024;
const METAL_THREADS: u32 = 128;

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => run_whole(queue, args),
        Backend::Cuda => run_in_tiles(queue, args),
    }
}

/// The page table, the selection and its counts, where there are any.
fn compressed_bindings<'a>(compressed: &Option<Compressed<'a>>) -> [Binding<'a>; 4] {
    match compressed {
        None => [Binding::Missing, Binding::Missing, Binding::Missing, Binding::Missing],
        Some(Compressed { cache, pages, selected, counts }) => [
            Binding::Read(cache),
            Binding::Bytes(bytes_of(pages.table)),
            Binding::Read(selected),
            Binding::Read(counts),
        ],
    }
}

fn sizes(args: &Args<'_>, rows: usize) -> ShapeBytes {
    let Shape { heads, head_dim, window, ring_len, selected_max, .. } = args.shape;
    let selected_max = if args.compressed.is_some() { selected_max } else { 0 };
    let pages = args.compressed.map_or((1, 1), |compressed| {
        let pages = compressed.pages;
        (pages.pages_per_slot, pages.entries_per_page)
    });
    let sizes = ShapeBytes::new().uint(rows).uint(heads).uint(head_dim).uint(2 * args.frequencies.len());
    let sizes = sizes.uint(window).uint(ring_len).uint(selected_max).uint(usize::from(args.span == Span::Block));
    sizes.uint(pages.0).uint(pages.1).float(1.0 / (head_dim as f32).sqrt())
}

fn run_whole(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    LaunchError::check_limit("the keys of a row", gpu_keys(args.shape), METAL_KEYS_MAX)?;
    let shape = sizes(&args, args.rows.len());
    let [cache, table, selected, counts] = compressed_bindings(&args.compressed);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "attention",
            bindings: &mut [
                Binding::Read(args.q),
                Binding::Bytes(bytes_of(args.rows)),
                Binding::Bytes(bytes_of(args.windows)),
                Binding::Read(args.records),
                Binding::Read(args.ring),
                cache,
                table,
                selected,
                counts,
                Binding::Read(args.sinks),
                Binding::Bytes(bytes_of(args.frequencies)),
                Binding::Write(args.out),
            ],
            shape: shape.bytes(),
            groups: count(args.rows.len() * args.shape.heads),
            threads: METAL_THREADS,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

/// Scores of as many rows as the scratch holds, then their softmax, then the mix of their keys. Bits depend on none of the
/// sizes chosen here: a sum belongs to one thread.
fn run_in_tiles(queue: &mut GpuQueue, mut args: Args<'_>) -> Result<(), LaunchError> {
    let (rows, heads, stride) = (args.rows.len(), args.shape.heads, gpu_keys(args.shape));
    let row_floats = gpu_scratch_floats(args.shape, 1);
    LaunchError::check_room("the scratch of attention", args.scratch.len_of::<f32>(), row_floats)?;
    let tile_rows = (args.scratch.len_of::<f32>() / row_floats).min(rows);
    // Few rows are cut finer, so that they reach every multiprocessor.
    let units = queue.limits().units as usize;
    let cut = match rows.min(tile_rows) * heads.div_ceil(64) * stride.div_ceil(16) {
        groups if groups <= units => CUTS[0],
        groups if groups <= 4 * units => CUTS[1],
        _ => CUTS[2],
    };
    for first in (0..rows).step_by(tile_rows) {
        let here = tile_rows.min(rows - first);
        let shape = sizes(&args, here).uint(first).uint(stride).uint(tile_rows * heads * stride);
        launch_scores(queue, &mut args, cut, here, &shape)?;
        launch_softmax(queue, &mut args, here, &shape)?;
        launch_mix(queue, &mut args, cut, here, &shape)?;
    }
    Ok(())
}

/// Threads of a group on CUDA.
const THREADS: u32 = 128;

/// What a group computes on CUDA.
#[derive(Clone, Copy)]
struct Cut {
    heads: usize,
    /// Keys of a score, columns of a mix.
    keys: usize,
    scores: &'static str,
    mix: &'static str,
}

const CUTS: [Cut; 3] = [
    Cut { heads: 32, keys: 16, scores: "attention_scores_32_16", mix: "attention_mix_32_16" },
    Cut { heads: 64, keys: 16, scores: "attention_scores_64_16", mix: "attention_mix_64_16" },
    Cut { heads: 64, keys: 32, scores: "attention_scores_64_32", mix: "attention_mix_64_32" },
];

fn launch_scores(
    queue: &mut GpuQueue,
    args: &mut Args<'_>,
    cut: Cut,
    rows: usize,
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let [cache, table, selected, counts] = compressed_bindings(&args.compressed);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: cut.scores,
            bindings: &mut [
                Binding::Read(args.q),
                Binding::Bytes(bytes_of(args.rows)),
                Binding::Bytes(bytes_of(args.windows)),
                Binding::Read(args.records),
                Binding::Read(args.ring),
                cache,
                table,
                selected,
                counts,
                Binding::Bytes(bytes_of(args.frequencies)),
                Binding::Write(args.scratch),
            ],
            shape: shape.bytes(),
            groups: count(rows * args.shape.heads.div_ceil(cut.heads) * gpu_keys(args.shape).div_ceil(cut.keys)),
            threads: THREADS,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

fn launch_softmax(
    queue: &mut GpuQueue,
    args: &mut Args<'_>,
    rows: usize,
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let [_, _, _, counts] = compressed_bindings(&args.compressed);
    let warps = THREADS as usize / 32;
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "attention_softmax",
            bindings: &mut [
                Binding::Bytes(bytes_of(args.rows)),
                Binding::Bytes(bytes_of(args.windows)),
                counts,
                Binding::Read(args.sinks),
                Binding::Write(args.scratch),
            ],
            shape: shape.bytes(),
            groups: count((rows * args.shape.heads).div_ceil(warps)),
            threads: THREADS,
            shared_bytes: count(4 * warps * gpu_keys(args.shape)),
        },
        OVERLAP,
    )
}

fn launch_mix(
    queue: &mut GpuQueue,
    args: &mut Args<'_>,
    cut: Cut,
    rows: usize,
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let [cache, table, selected, counts] = compressed_bindings(&args.compressed);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: cut.mix,
            bindings: &mut [
                Binding::Bytes(bytes_of(args.rows)),
                Binding::Bytes(bytes_of(args.windows)),
                Binding::Read(args.records),
                Binding::Read(args.ring),
                cache,
                table,
                selected,
                counts,
                Binding::Bytes(bytes_of(args.frequencies)),
                Binding::Read(args.scratch),
                Binding::Write(args.out),
            ],
            shape: shape.bytes(),
            groups: count(rows * args.shape.heads.div_ceil(cut.heads) * (args.shape.head_dim / cut.keys)),
            threads: THREADS,
            shared_bytes: count(8 * gpu_keys(args.shape)),
        },
        OVERLAP,
    )
}
