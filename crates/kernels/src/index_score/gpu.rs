use super::Args;
use crate::gpu::{OVERLAP, a_thread_each, count, program};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("index_score", Some(include_str!("kernel.metal")), true);

/// Scores of a group on CUDA, and the heads whose queries it keeps at a time.
const CUDA_THREADS: usize = 256;

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { scored, tile, skip_visible, restrict, scores, stride } = args;
    let (blocks_max, block_size) = restrict.map_or((0, 1), |list| (list.shape.blocks_max, list.shape.block_size));
    // A row that is restricted to blocks, or has no more of them, sees no more than they hold.
    let columns = restrict.map_or(stride, |_| stride.min(blocks_max * block_size));
    let sizes = ShapeBytes::new().uint(tile.start).uint(tile.len()).uint(scored.heads).uint(scored.head_dim);
    let sizes = sizes.uint(scored.ratio as usize).uint(scored.pages.pages_per_slot).uint(scored.pages.entries_per_page);
    let sizes = sizes.uint(skip_visible).uint(stride).uint(usize::from(restrict.is_some()));
    let shape = sizes.uint(blocks_max).uint(block_size).uint(columns);
    let (groups, threads) = match queue.backend() {
        Backend::Metal => a_thread_each(tile.len() * columns),
        Backend::Cuda => (count(tile.len() * columns.div_ceil(CUDA_THREADS)), count(CUDA_THREADS)),
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "index_score",
            bindings: &mut [
                Binding::Read(scored.queries),
                Binding::Read(scored.weights),
                Binding::Bytes(bytes_of(scored.rows)),
                Binding::Read(scored.keys),
                Binding::Bytes(bytes_of(scored.pages.table)),
                restrict.map_or(Binding::Missing, |list| Binding::Read(list.blocks)),
                restrict.map_or(Binding::Missing, |list| Binding::Read(list.counts)),
                Binding::Write(scores),
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}
