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

/// Two launches for few rows where their operands fit into shared memory; otherwise scores of as many rows as the scratch holds,
/// their softmax, and the mix of their keys. Bits depend on none of the sizes chosen here: a sum belongs to one thread.
fn run_in_tiles(queue: &mut GpuQueue, mut args: Args<'_>) -> Result<(), LaunchError> {
    let (rows, heads, stride) = (args.rows.len(), args.shape.heads, gpu_keys(args.shape));
    let row_floats = gpu_scratch_floats(args.shape, 1);
    LaunchError::check_room("the scratch of attention", args.scratch.len_of::<f32>(), row_floats)?;
    let tile_rows = (args.scratch.len_of::<f32>() / row_floats).min(rows);
    let limits = queue.limits();
    let head_dim = args.shape.head_dim;
    let few_bytes = few_scores_bytes(head_dim).max(few_mix_bytes(stride));
    if rows <= FEW_ROWS && tile_rows == rows && few_bytes <= limits.shared_bytes_max as usize {
        let shape = sizes(&args, rows).uint(0).uint(stride).uint(0);
        let head_tiles = |size| rows * heads.div_ceil(size);
        launch_scores(
            queue,
            &mut args,
            Sizing {
                entry: "attention_scores_few",
                groups: head_tiles(FEW_HEADS) * stride.div_ceil(FEW_KEYS),
                threads: 320,
                shared_bytes: few_scores_bytes(head_dim),
            },
            &shape,
        )?;
        return launch_mix_few(queue, &mut args, head_tiles(MIXED_HEADS), &shape);
    }
    // Few rows are cut finer, so that they reach every multiprocessor.
    let fine = tile_rows * heads.div_ceil(32) * stride.div_ceil(64) <= 4 * limits.units as usize;
    let cut = CUTS[usize::from(!fine)];
    for first in (0..rows).step_by(tile_rows) {
        let here = tile_rows.min(rows - first);
        let shape = sizes(&args, here).uint(first).uint(stride).uint(tile_rows * heads.next_multiple_of(4) * stride);
        let sizing = |entry, tiles: usize, shared_bytes| Sizing {
            entry,
            groups: here * heads.div_ceil(cut.heads) * tiles,
            threads: 128,
            shared_bytes,
        };
        let scores = sizing(cut.scores, stride.div_ceil(cut.others), TILE_BYTES);
        launch_scores(queue, &mut args, scores, &shape)?;
        launch_softmax(queue, &mut args, here, &shape)?;
        let mix = sizing(cut.mix, head_dim.div_ceil(cut.others), TILE_BYTES + 8 * stride);
        launch_mix(queue, &mut args, mix, &shape)?;
    }
    Ok(())
}

/// Rows that are so few that small blocks with all of their operands at once beat tiles.
const FEW_ROWS: usize = 2;
/// What a block of `attention_scores_few` computes.
const FEW_HEADS: usize = 16;
const FEW_KEYS: usize = 20;
/// What a block of `attention_mix_few` computes.
const MIXED_HEADS: usize = 8;
const MIXED_COLUMNS: usize = 32;

const fn few_scores_bytes(head_dim: usize) -> usize {
    4 * (FEW_HEADS + FEW_KEYS) * (head_dim + 4)
}

/// Values, weights and exponentials of `stride` keys.
const fn few_mix_bytes(stride: usize) -> usize {
    4 * (MIXED_COLUMNS + 2 * MIXED_HEADS) * (stride.next_multiple_of(4) + 4)
}

/// What a group computes on CUDA where rows are many.
#[derive(Clone, Copy)]
struct Cut {
    heads: usize,
    /// Keys of the scores, columns of the mix.
    others: usize,
    scores: &'static str,
    mix: &'static str,
}

const CUTS: [Cut; 2] = [
    Cut { heads: 32, others: 64, scores: "attention_scores_32_64", mix: "attention_mix_32_64" },
    Cut { heads: 64, others: 128, scores: "attention_scores_64_128", mix: "attention_mix_64_128" },
];

/// Shared memory of two steps of either cut.
const TILE_BYTES: usize = 2 * 32 * (64 + 128) * 4;

/// One launch's grid.
struct Sizing {
    entry: &'static str,
    groups: usize,
    threads: u32,
    shared_bytes: usize,
}

fn launch_scores(
    queue: &mut GpuQueue,
    args: &mut Args<'_>,
    sizing: Sizing,
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let [cache, table, selected, counts] = compressed_bindings(&args.compressed);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: sizing.entry,
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
            groups: count(sizing.groups),
            threads: sizing.threads,
            shared_bytes: count(sizing.shared_bytes),
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
            groups: count(rows * args.shape.heads.div_ceil(32)),
            threads: 288,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

fn launch_mix(
    queue: &mut GpuQueue,
    args: &mut Args<'_>,
    sizing: Sizing,
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let [cache, table, selected, counts] = compressed_bindings(&args.compressed);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: sizing.entry,
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
            groups: count(sizing.groups),
            threads: sizing.threads,
            shared_bytes: count(sizing.shared_bytes),
        },
        OVERLAP,
    )
}

fn launch_mix_few(
    queue: &mut GpuQueue,
    args: &mut Args<'_>,
    head_tiles: usize,
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let [cache, table, selected, counts] = compressed_bindings(&args.compressed);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "attention_mix_few",
            bindings: &mut [
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
                Binding::Read(args.scratch),
                Binding::Write(args.out),
            ],
            shape: shape.bytes(),
            groups: count(head_tiles * (args.shape.head_dim / MIXED_COLUMNS)),
            threads: 256,
            shared_bytes: count(few_mix_bytes(gpu_keys(args.shape))),
        },
        OVERLAP,
    )
}
