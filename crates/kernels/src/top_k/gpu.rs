use super::{Args, Candidates};
use crate::gpu::{a_simd_group_each, count, program};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("top_k", Some(include_str!("kernel.metal")), true);

const CUDA_THREADS: u32 = 1024;

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { scores, stride, rows, tile, ratio, top_k, candidates, selected, counts } = args;
    let (mode, candidate_shape) = match &candidates {
        Candidates::None => (0, None),
        Candidates::Publish { shape, .. } => (1, Some(*shape)),
        Candidates::Restrict(list) => (2, Some(list.shape)),
    };
    let (blocks_max, block_size) = candidate_shape.map_or((0, 1), |shape| (shape.blocks_max, shape.block_size));
    let (mut blocks, mut block_counts) = (Binding::Missing, Binding::Missing);
    let (mut lists, mut list_counts) = (Binding::Missing, Binding::Missing);
    match candidates {
        Candidates::None => {}
        Candidates::Publish { blocks: to, counts, .. } => {
            (blocks, block_counts) = (Binding::Write(to), Binding::Write(counts));
        }
        Candidates::Restrict(list) => (lists, list_counts) = (Binding::Read(list.blocks), Binding::Read(list.counts)),
    }
    // On CUDA the keys of the blocks lie in the group's memory, where they have room.
    let block_key_bytes = if mode == 1 { 4 * stride.div_ceil(block_size) } else { 0 };
    let (groups, threads, shared_bytes) = match queue.backend() {
        Backend::Metal => {
            let (groups, threads) = a_simd_group_each(tile.len());
            (groups, threads, 0)
        }
        Backend::Cuda => (count(tile.len()), CUDA_THREADS, count(block_key_bytes)),
    };
    let sizes = ShapeBytes::new().uint(tile.start).uint(tile.len()).uint(stride).uint(ratio as usize);
    let shape = sizes.uint(top_k).uint(mode).uint(blocks_max).uint(block_size);
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "top_k",
        bindings: &mut [
            Binding::Read(scores),
            Binding::Bytes(bytes_of(rows)),
            Binding::Write(selected),
            Binding::Write(counts),
            blocks,
            block_counts,
            lists,
            list_counts,
        ],
        shape: shape.bytes(),
        groups,
        threads,
        shared_bytes,
    })
}
