use super::{Args, Compressed, Shape, Span, gpu_keys, gpu_places, gpu_scratch_floats, steps};
use crate::gpu::{OVERLAP, count, program};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("attention", Some(include_str!("kernel.metal")), true);
static WHOLE: Program = program("attention.whole", None, true);

/// Keys of a row on Metal: their scores lie in the group's memory.
const METAL_KEYS_MAX: usize = 1024;
const METAL_THREADS: u32 = 128;

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => run_whole(queue, args),
        Backend::Cuda => run_in_steps(queue, args),
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

/// What every launch finds a row's keys by, in this order.
fn key_bindings<'a>(args: &Args<'a>) -> [Binding<'a>; 8] {
    let [cache, table, selected, counts] = compressed_bindings(&args.compressed);
    [
        Binding::Bytes(bytes_of(args.rows)),
        Binding::Bytes(bytes_of(args.windows)),
        Binding::Read(args.records),
        Binding::Read(args.ring),
        cache,
        table,
        selected,
        counts,
    ]
}

/// A launch's bindings: those of the keys between what stands before and behind them.
macro_rules! around_keys {
    ($args:ident: [$($before:expr),*], [$($behind:expr),*]) => {{
        let [rows, windows, records, ring, cache, table, selected, counts] = key_bindings($args);
        [$($before,)* rows, windows, records, ring, cache, table, selected, counts, $($behind),*]
    }};
}

/// `fold`: what the scale of a dot makes up for.
fn sizes(args: &Args<'_>, rows: usize, fold: f32) -> ShapeBytes {
    let Shape { heads, head_dim, window, ring_len, selected_max, .. } = args.shape;
    let selected_max = if args.compressed.is_some() { selected_max } else { 0 };
    let pages = args.compressed.map_or((1, 1), |compressed| {
        let pages = compressed.pages;
        (pages.pages_per_slot, pages.entries_per_page)
    });
    let sizes = ShapeBytes::new().uint(rows).uint(heads).uint(head_dim).uint(2 * args.frequencies.len());
    let sizes = sizes.uint(window).uint(ring_len).uint(selected_max).uint(usize::from(args.span == Span::Block));
    sizes.uint(pages.0).uint(pages.1).float(1.0 / (head_dim as f32).sqrt() * fold)
}

fn run_whole(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    LaunchError::check_limit("the keys of a row", gpu_keys(args.shape), METAL_KEYS_MAX)?;
    let shape = sizes(&args, args.rows.len(), 1.0);
    let (keys, sinks) = (&args, Binding::Read(args.sinks));
    let frequencies = Binding::Bytes(bytes_of(args.frequencies));
    let mut bindings = around_keys!(keys: [Binding::Read(args.q)], [sinks, frequencies, Binding::Write(args.out)]);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "attention",
            bindings: &mut bindings,
            shape: shape.bytes(),
            groups: count(args.rows.len() * args.shape.heads),
            threads: METAL_THREADS,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

/// Scores and mix of as many rows as the scratch holds. Few rows are cut finer, so that they reach every multiprocessor; bits
/// depend on none of the sizes chosen here.
fn run_in_steps(queue: &mut GpuQueue, mut args: Args<'_>) -> Result<(), LaunchError> {
    let (rows, heads, stride) = (args.rows.len(), args.shape.heads, gpu_places(args.shape));
    let row_floats = gpu_scratch_floats(args.shape, 1);
    LaunchError::check_room("the scratch of attention", args.scratch.len_of::<f32>(), row_floats)?;
    let tile_rows = (args.scratch.len_of::<f32>() / row_floats).min(rows);
    let (units, shared_max) = (queue.limits().units as usize, queue.limits().shared_bytes_max as usize);
    if let Some(whole) = Whole::of(args.shape, rows, shared_max) {
        let shape = sizes(&args, rows, steps::FOLD).uint(0).uint(stride).uint(0);
        return launch_whole(queue, &mut args, whole, &shape);
    }
    for first in (0..rows).step_by(tile_rows) {
        let here = tile_rows.min(rows - first);
        let shape = sizes(&args, here, steps::FOLD).uint(first).uint(stride).uint(tile_rows * heads * stride);
        match Few::of(args.shape, here, units, shared_max) {
            Some(few) => {
                launch_scores(queue, &mut args, few.scores, &shape)?;
                launch_mix(queue, &mut args, few.mix, &shape)?;
            }
            None => {
                let (weights, mix) = many(args.shape, here, units);
                launch_weights(queue, &mut args, weights, &shape)?;
                launch_mix_weighed(queue, &mut args, mix, &shape)?;
            }
        }
    }
    Ok(())
}

/// One launch's grid.
#[derive(Clone, Copy)]
struct Sizing {
    entry: &'static str,
    groups: usize,
    threads: u32,
    shared_bytes: usize,
}

/// Rows that small blocks compute.
const FEW_ROWS: usize = 32;
/// Columns of a block that mixes few rows.
const MIX_COLUMNS: usize = 128;
/// Heads of a block where rows are many, and columns of a warp.
const HEADS: usize = 64;
const WARP_COLUMNS: usize = 64;

/// The two launches of few rows.
struct Few {
    scores: Sizing,
    mix: Sizing,
}

impl Few {
    /// None where rows are many, or a block's values do not fit.
    fn of(shape: Shape, rows: usize, units: usize, shared_max: usize) -> Option<Few> {
        let stride = gpu_places(shape);
        let tiles = stride / steps::STEP;
        let blocks = |heads: usize, others: usize| rows * shape.heads.div_ceil(heads) * others;
        // More heads a block as long as the blocks reach every multiprocessor.
        let column_tiles = shape.head_dim.div_ceil(MIX_COLUMNS);
        let mixes = [("attention_mix_8", 8), ("attention_mix_16", 16), ("attention_mix_32", 32)];
        let reaches = |(_, heads): &(&str, usize)| blocks(*heads, column_tiles) <= units;
        let (entry, heads) = mixes.into_iter().find(reaches).unwrap_or(mixes[2]);
        let mix = Sizing {
            entry,
            groups: blocks(heads, column_tiles),
            threads: 512,
            shared_bytes: stride * 2 * MIX_COLUMNS + heads * weight_pitch(stride) + stride * 8,
        };
        let (entry, heads, tiles_of_block) = match rows {
            ..=4 => ("attention_scores_16", 16, 4),
            _ => ("attention_scores_32", 32, 8),
        };
        let scores = Sizing {
            entry,
            groups: blocks(heads, tiles.div_ceil(tiles_of_block)),
            threads: count(2 * 32 * tiles_of_block),
            shared_bytes: heads * query_pitch(shape.head_dim)
                + tiles_of_block * steps::STEP * record_pitch(shape.head_dim),
        };
        let shared_bytes = mix.shared_bytes.max(scores.shared_bytes + PHASES_BYTES);
        (rows <= FEW_ROWS && shared_bytes <= shared_max).then_some(Few { scores, mix })
    }
}

/// The one launch of rows that a block can hold from their queries to their outputs.
struct Whole;

impl Whole {
    const HEAD_DIM: usize = 512;
    const ENTRIES_MAX: usize = 512;
    const WINDOW_MAX: usize = 256;
    const PLACES_MAX: usize = 640;
    /// Rows of a launch from which on this is quicker than blocks of a part of a row.
    const ROWS_MIN: usize = 33;
    /// Bytes of shared memory, as the kernel has them.
    const SHARED_BYTES: usize = 227 << 10;

    /// None where a block can't hold such a row, or where this would be slower: few rows, and rows of the window alone, whose codes
    /// the scores fetch in words.
    fn of(shape: Shape, rows: usize, shared_max: usize) -> Option<Sizing> {
        let (entries, window) = (shape.selected_max.next_multiple_of(steps::STEP), shape.window + shape.block_rows);
        let is_held = shape.head_dim == Whole::HEAD_DIM
            && entries <= Whole::ENTRIES_MAX
            && window <= Whole::WINDOW_MAX
            && entries + window <= Whole::PLACES_MAX
            && entries > window
            && Whole::SHARED_BYTES <= shared_max;
        (is_held && rows >= Whole::ROWS_MIN).then_some(Sizing {
            entry: "attention_whole",
            groups: rows * shape.heads.div_ceil(HEADS),
            threads: 256,
            shared_bytes: Whole::SHARED_BYTES,
        })
    }
}

/// The two launches of many rows: weights, and their mix.
fn many(shape: Shape, rows: usize, units: usize) -> (Sizing, Sizing) {
    let stride = gpu_places(shape);
    let (entry, heads) = match 2 * rows * shape.heads.div_ceil(HEADS) <= units {
        true => ("attention_weights_32", HEADS / 2),
        false => ("attention_weights_64", HEADS),
    };
    let weights = Sizing {
        entry,
        groups: rows * shape.heads.div_ceil(heads),
        threads: 256,
        shared_bytes: heads * query_pitch(shape.head_dim),
    };
    let head_tiles = rows * shape.heads.div_ceil(HEADS);
    // Fewer warps a block where there would be too few blocks.
    let fits = |warps: &usize| head_tiles * shape.head_dim.div_ceil(WARP_COLUMNS * warps) <= units;
    let most = shape.head_dim.div_ceil(WARP_COLUMNS).min(8);
    let warps = [1, 2, 4].into_iter().find(fits).unwrap_or(most).min(most);
    let mix = Sizing {
        entry: "attention_mix",
        groups: head_tiles * shape.head_dim.div_ceil(WARP_COLUMNS * warps),
        threads: 32 * warps as u32,
        shared_bytes: HEADS * weight_pitch(stride) + stride * 8,
    };
    (weights, mix)
}

/// Bytes of the rotation's phases that a block of scores declares beside what it is given.
const PHASES_BYTES: usize = 512;

/// Bytes of a key's staged record, as the kernel has it.
const fn record_pitch(head_dim: usize) -> usize {
    (head_dim + head_dim / 32).next_multiple_of(16)
}

/// Bytes of a head's staged query, as the kernel has it.
const fn query_pitch(head_dim: usize) -> usize {
    ((head_dim / 32) | 1) * 64
}

/// Bytes of a head's staged weights, as the kernel has it.
const fn weight_pitch(stride: usize) -> usize {
    (2 * stride).next_multiple_of(128) + 32
}

fn launch(
    queue: &mut GpuQueue,
    sizing: Sizing,
    bindings: &mut [Binding<'_>],
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    launch_of(queue, &PROGRAM, sizing, bindings, shape)
}

fn launch_of(
    queue: &mut GpuQueue,
    program: &'static Program,
    sizing: Sizing,
    bindings: &mut [Binding<'_>],
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let Sizing { entry, groups, threads, shared_bytes } = sizing;
    let (groups, shared_bytes) = (count(groups), count(shared_bytes));
    queue
        .launch_tuned(Launch { program, entry, bindings, shape: shape.bytes(), groups, threads, shared_bytes }, OVERLAP)
}

fn launch_scores(
    queue: &mut GpuQueue,
    args: &mut Args<'_>,
    sizing: Sizing,
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let frequencies = Binding::Bytes(bytes_of(args.frequencies));
    let mut bindings = around_keys!(args: [Binding::Read(args.q)], [frequencies, Binding::Write(args.scratch)]);
    launch(queue, sizing, &mut bindings, shape)
}

fn launch_weights(
    queue: &mut GpuQueue,
    args: &mut Args<'_>,
    sizing: Sizing,
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let frequencies = Binding::Bytes(bytes_of(args.frequencies));
    let sinks = Binding::Read(args.sinks);
    let mut bindings = around_keys!(args: [Binding::Read(args.q)], [sinks, frequencies, Binding::Write(args.scratch)]);
    launch(queue, sizing, &mut bindings, shape)
}

fn launch_mix(
    queue: &mut GpuQueue,
    args: &mut Args<'_>,
    sizing: Sizing,
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let frequencies = Binding::Bytes(bytes_of(args.frequencies));
    let (sinks, weights) = (Binding::Read(args.sinks), Binding::Read(args.scratch));
    let mut bindings = around_keys!(args: [], [sinks, frequencies, weights, Binding::Write(args.out)]);
    launch(queue, sizing, &mut bindings, shape)
}

fn launch_mix_weighed(
    queue: &mut GpuQueue,
    args: &mut Args<'_>,
    sizing: Sizing,
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let frequencies = Binding::Bytes(bytes_of(args.frequencies));
    let mut bindings = around_keys!(args: [], [frequencies, Binding::Read(args.scratch), Binding::Write(args.out)]);
    launch(queue, sizing, &mut bindings, shape)
}

fn launch_whole(
    queue: &mut GpuQueue,
    args: &mut Args<'_>,
    sizing: Sizing,
    shape: &ShapeBytes,
) -> Result<(), LaunchError> {
    let frequencies = Binding::Bytes(bytes_of(args.frequencies));
    let sinks = Binding::Read(args.sinks);
    let mut bindings = around_keys!(args: [Binding::Read(args.q)], [sinks, frequencies, Binding::Write(args.out)]);
    launch_of(queue, &WHOLE, sizing, &mut bindings, shape)
}
