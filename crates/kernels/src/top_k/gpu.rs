use super::{Args, CandidateList, Candidates};
use crate::gpu::{OVERLAP, a_simd_group_each, count, program};
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};
use tf_device::{Buffer, LaunchError};

static PROGRAM: Program = program("top_k", Some(include_str!("kernel.metal")), true);

const CUDA_THREADS: u32 = 1024;
/// Scores that a block of CUDA threads holds; longer rows are cut into parts, about as long.
const PART: usize = 16_384;

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => {
            let shape = sizes(&args);
            let (groups, threads) = a_simd_group_each(args.tile.len());
            launch_whole(queue, args, &shape, (groups, threads, 0))
        }
        Backend::Cuda => run_cuda(queue, args),
    }
}

/// How candidates are used, and how they are cut.
fn mode(candidates: &Candidates<'_>) -> (usize, usize, usize) {
    let (mode, shape) = match candidates {
        Candidates::None => return (0, 0, 1),
        Candidates::Publish { shape, .. } => (1, shape),
        Candidates::Restrict(list) => (2, &list.shape),
    };
    (mode, shape.blocks_max, shape.block_size)
}

fn sizes(args: &Args<'_>) -> ShapeBytes {
    let (mode, blocks_max, block_size) = mode(&args.candidates);
    let tile =
        ShapeBytes::new().uint(args.tile.start).uint(args.tile.len()).uint(args.stride).uint(args.ratio as usize);
    tile.uint(args.top_k).uint(mode).uint(blocks_max).uint(block_size)
}

/// The lists that the launch writes.
fn written<'a>(candidates: &'a mut Candidates<'_>) -> [Binding<'a>; 2] {
    match candidates {
        Candidates::Publish { blocks, counts, .. } => [Binding::Write(blocks), Binding::Write(counts)],
        Candidates::None | Candidates::Restrict(_) => [Binding::Missing, Binding::Missing],
    }
}

/// The lists that it keeps to.
fn read(list: Option<CandidateList<'_>>) -> [Binding<'_>; 2] {
    list.map_or([Binding::Missing, Binding::Missing], |list| [Binding::Read(list.blocks), Binding::Read(list.counts)])
}

fn restriction<'a>(candidates: &Candidates<'a>) -> Option<CandidateList<'a>> {
    match candidates {
        Candidates::Restrict(list) => Some(*list),
        Candidates::None | Candidates::Publish { .. } => None,
    }
}

fn launch_whole(
    queue: &mut GpuQueue,
    mut args: Args<'_>,
    shape: &ShapeBytes,
    (groups, threads, shared_bytes): (u32, u32, u32),
) -> Result<(), LaunchError> {
    let [list, list_counts] = read(restriction(&args.candidates));
    let [blocks, block_counts] = written(&mut args.candidates);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "top_k",
            bindings: &mut [
                Binding::Read(args.scores),
                Binding::Bytes(bytes_of(args.rows)),
                Binding::Write(args.selected),
                Binding::Write(args.counts),
                blocks,
                block_counts,
                list,
                list_counts,
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes,
        },
        OVERLAP,
    )
}

fn run_cuda(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let (mode, blocks_max, block_size) = mode(&args.candidates);
    let rows = args.tile.len();
    // A restricted row has no more scores than its blocks have entries.
    let entries = if mode == 2 { args.stride.min(blocks_max * block_size) } else { args.stride };
    let part = (PART / block_size).max(1) * block_size;
    let parts = entries.div_ceil(part).max(1);
    let shape = sizes(&args).uint(part).uint(parts);
    let blocks = if mode == 1 { args.stride.div_ceil(block_size) } else { 0 };
    if parts == 1 {
        return launch_whole(queue, args, &shape, (count(rows), CUDA_THREADS, count(4 * (entries + blocks))));
    }
    LaunchError::check_limit("the scores that the parts of a row keep", parts * args.top_k, 2 * PART)?;
    LaunchError::check_limit("the blocks of a row", blocks, PART)?;
    let words = [2 * rows * parts * args.top_k, rows * parts, (rows * blocks).max(1)];
    let names = ["top_k/kept", "top_k/counts", "top_k/blocks"];
    let mut work = Vec::new();
    for (name, words) in names.into_iter().zip(words) {
        work.push(queue.take_scratch(name, 4 * words)?);
    }
    let launched = select_in_parts(queue, args, &shape, parts, part, &mut work);
    for (name, buffer) in names.into_iter().zip(work) {
        queue.keep_scratch(name, buffer);
    }
    launched
}

fn select_in_parts(
    queue: &mut GpuQueue,
    mut args: Args<'_>,
    shape: &ShapeBytes,
    parts: usize,
    part: usize,
    work: &mut [Buffer],
) -> Result<(), LaunchError> {
    let [kept, kept_counts, block_keys] = work else { unreachable!("the caller gives three") };
    let (rows, top_k) = (args.tile.len(), args.top_k);
    let restriction = restriction(&args.candidates);
    let [list, list_counts] = read(restriction);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "top_k_parts",
            bindings: &mut [
                Binding::Read(args.scores),
                Binding::Bytes(bytes_of(args.rows)),
                list,
                list_counts,
                Binding::Write(kept),
                Binding::Write(kept_counts),
                Binding::Write(block_keys),
            ],
            shape: shape.bytes(),
            groups: count(rows * parts),
            threads: CUDA_THREADS,
            shared_bytes: count(4 * (part + top_k)),
        },
        OVERLAP,
    )?;
    let [list, list_counts] = read(restriction);
    let [blocks, block_counts] = written(&mut args.candidates);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "top_k_merge",
            bindings: &mut [
                Binding::Bytes(bytes_of(args.rows)),
                Binding::Read(kept),
                Binding::Read(kept_counts),
                Binding::Read(block_keys),
                list,
                list_counts,
                Binding::Write(args.selected),
                Binding::Write(args.counts),
                blocks,
                block_counts,
            ],
            shape: shape.bytes(),
            groups: count(rows),
            threads: CUDA_THREADS,
            shared_bytes: count(4 * (parts * top_k + parts)),
        },
        OVERLAP,
    )
}
