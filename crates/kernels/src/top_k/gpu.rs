use super::{Args, CandidateList, Candidates};
use crate::gpu::{OVERLAP, a_simd_group_each, count, program};
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};
use tf_device::{Buffer, LaunchError};

static PROGRAM: Program = program("top_k", Some(include_str!("kernel.metal")), true);

const CUDA_THREADS: u32 = 1024;
/// What a block of CUDA threads selects from.
const PART: usize = 16_384;
/// The length of a part where the parts keep few enough for the merge to be as short.
const SHORT_PART: usize = 8192;
/// What the merge selects from.
const MERGED: usize = 32_768;
/// Blocks whose keys one block of threads finds, where the merge takes all of a row's.
const KEYED_BLOCKS: usize = 4096;

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

/// How a long list is cut: the length of a part, how many there are, and what each leaves to the merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    part: usize,
    parts: usize,
    segment: usize,
}

impl Cut {
    /// Of a list of which `kept` are kept.
    fn of(length: usize, kept: usize) -> Cut {
        let segment = kept.next_multiple_of(4);
        let part = if length.div_ceil(SHORT_PART) * segment <= PART { SHORT_PART } else { PART };
        Cut::into(length, part, segment)
    }

    fn into(length: usize, part: usize, segment: usize) -> Cut {
        Cut { part, parts: length.div_ceil(part), segment }
    }

    fn words(&self) -> usize {
        self.parts * self.segment
    }
}

fn run_cuda(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let (mode, blocks_max, block_size) = mode(&args.candidates);
    let rows = args.tile.len();
    // A restricted row has no more scores than its blocks have entries.
    let entries = if mode == 2 { args.stride.min(blocks_max * block_size) } else { args.stride };
    let blocks = if mode == 1 { args.stride.div_ceil(block_size) } else { 0 };
    let lists = if mode == 1 { 2 } else { 1 };
    let blocks_whole = blocks <= MERGED;
    let cut_blocks =
        if blocks_whole { Cut::into(blocks, KEYED_BLOCKS, KEYED_BLOCKS) } else { Cut::of(blocks, blocks_max) };
    let cuts = [Cut::of(entries, args.top_k), cut_blocks];
    let shape = cuts.iter().fold(sizes(&args), |shape, cut| shape.uint(cut.part).uint(cut.parts));
    let shape = shape.uint(usize::from(blocks_whole));
    if entries.max(blocks) <= PART {
        return launch_whole(queue, args, &shape, (count(lists * rows), CUDA_THREADS, 0));
    }
    for (what, cut) in ["the scores that the parts of a row keep", "the blocks that they keep"].into_iter().zip(cuts) {
        LaunchError::check_limit(what, cut.words(), MERGED)?;
    }
    let mut kept = queue.take_scratch("top_k/kept", 8 * rows * (cuts[0].words() + cuts[1].words()))?;
    let launched =
        select_in_parts(queue, args, &shape, (rows * (cuts[0].parts + cuts[1].parts), rows * lists), &mut kept);
    queue.keep_scratch("top_k/kept", kept);
    launched
}

fn select_in_parts(
    queue: &mut GpuQueue,
    mut args: Args<'_>,
    shape: &ShapeBytes,
    (parts, lists): (usize, usize),
    kept: &mut Buffer,
) -> Result<(), LaunchError> {
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
            ],
            shape: shape.bytes(),
            groups: count(parts),
            threads: CUDA_THREADS,
            shared_bytes: 0,
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
                list,
                list_counts,
                Binding::Write(args.selected),
                Binding::Write(args.counts),
                blocks,
                block_counts,
            ],
            shape: shape.bytes(),
            groups: count(lists),
            threads: CUDA_THREADS,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_cut_so_that_the_merge_takes_what_its_parts_keep() {
        let cut = |part, parts, segment| Cut { part, parts, segment };
        for (length, kept, wanted) in [
            (16_385, 512, cut(SHORT_PART, 3, 512)),
            (32 * SHORT_PART, 512, cut(SHORT_PART, 32, 512)),
            (32 * SHORT_PART + 1, 512, cut(PART, 17, 512)),
            (1 << 20, 512, cut(PART, 64, 512)),
            (1 << 17, 2048, cut(PART, 8, 2048)),
            (70_000, 5, cut(SHORT_PART, 9, 8)),
            (0, 0, cut(SHORT_PART, 0, 0)),
        ] {
            assert_eq!(Cut::of(length, kept), wanted, "{kept} of {length}");
            assert!(wanted.words() <= MERGED);
        }
    }
}
