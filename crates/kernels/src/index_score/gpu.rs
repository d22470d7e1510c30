use super::{Args, Scored};
use crate::gpu::{OVERLAP, a_thread_each, count, program};
use crate::rows::visible;
use crate::top_k::CandidateList;
use std::ops::Range;
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("index_score", Some(include_str!("kernel.metal")), true);

/// Threads of a block on CUDA, and the entries that it scores at a time.
const CUDA_THREADS: usize = 128;
const CUDA_ENTRIES: usize = 128;
/// Rows that share keys, at most, and the room for their queries.
const GROUP_ROWS: usize = 6;
const GROUP_BYTES: usize = 64 << 10;
/// Blocks of one multiprocessor at a time. Each first fetches its group's queries, so there are no more than run together.
const BLOCKS: usize = 3;

/// Rows of one slot, side by side, that read the same keys; `columns`: the scores of the longest, in whole turns of a block, so
/// that few rounds change them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Group {
    first: u32,
    rows: u32,
    columns: u32,
    slot: u32,
}

impl Group {
    /// As the kernel reads it.
    fn words(self) -> [u32; 4] {
        [self.first, self.rows, self.columns, self.slot]
    }
}

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => run_metal(queue, args),
        Backend::Cuda => run_cuda(queue, args),
    }
}

fn sizes(args: &Args<'_>) -> ShapeBytes {
    let Scored { heads, head_dim, ratio, pages, .. } = args.scored;
    let sizes = ShapeBytes::new().uint(args.tile.start).uint(args.tile.len()).uint(heads).uint(head_dim);
    let sizes = sizes.uint(ratio as usize).uint(pages.pages_per_slot).uint(pages.entries_per_page);
    sizes.uint(args.skip_visible).uint(args.stride).uint(usize::from(args.restrict.is_some()))
}

fn candidates<'a>(restrict: Option<CandidateList<'a>>) -> [Binding<'a>; 2] {
    restrict
        .map_or([Binding::Missing, Binding::Missing], |list| [Binding::Read(list.blocks), Binding::Read(list.counts)])
}

fn run_metal(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let (blocks_max, block_size) = args.restrict.map_or((0, 1), |list| (list.shape.blocks_max, list.shape.block_size));
    // A row that is restricted to blocks, or has no more of them, sees no more than they hold.
    let columns = args.restrict.map_or(args.stride, |_| args.stride.min(blocks_max * block_size));
    let shape = sizes(&args).uint(blocks_max).uint(block_size).uint(columns);
    let (groups, threads) = a_thread_each(args.tile.len() * columns);
    let Args { scored, restrict, scores, .. } = args;
    let [blocks, counts] = candidates(restrict);
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
                blocks,
                counts,
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

/// Bytes of a row's queries and weights in shared memory: heads come in sixteens, columns in bf16.
fn row_bytes(heads: usize, head_dim: usize) -> usize {
    heads.next_multiple_of(16) * (2 * head_dim + 4)
}

/// The groups of a tile's rows. Rows that see no more than they may keep are in none where a group has no others; a row
/// that has more blocks than it may keep to candidates of is alone.
fn groups_of(
    scored: &Scored<'_>,
    tile: Range<usize>,
    skip: usize,
    list: Option<&CandidateList<'_>>,
    most: usize,
) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut open = false;
    // A row can see no more entries than positions, which 32 bits hold.
    let turns = |columns: usize| columns.next_multiple_of(CUDA_ENTRIES) as u32;
    for r in tile {
        let seen = visible(scored.rows[r].position, scored.ratio);
        let kept_to = list.map(|list| list.shape).filter(|shape| seen.div_ceil(shape.block_size) > shape.blocks_max);
        let columns = kept_to.map_or(seen, |shape| seen.min(shape.blocks_max * shape.block_size));
        if seen <= skip {
            open = false;
            continue;
        }
        let joins = open
            && kept_to.is_none()
            && groups.last().is_some_and(|group| {
                (group.rows as usize) < most && scored.rows[group.first as usize].slot == scored.rows[r].slot
            });
        match groups.last_mut().filter(|_| joins) {
            Some(group) => {
                group.rows += 1;
                group.columns = group.columns.max(turns(columns));
            }
            None => groups.push(Group { first: r as u32, rows: 1, columns: turns(columns), slot: scored.rows[r].slot }),
        }
        open = kept_to.is_none();
    }
    groups
}

/// Blocks that share a group's entries.
fn chunks_of(groups: &[Group], units: usize) -> usize {
    let columns = groups.iter().map(|group| group.columns as usize).max().unwrap_or(0);
    columns.div_ceil(CUDA_ENTRIES).clamp(1, (BLOCKS * units / groups.len().max(1)).max(1))
}

fn run_cuda(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let (heads, head_dim) = (args.scored.heads, args.scored.head_dim);
    let (blocks_max, block_size) = args.restrict.map_or((0, 1), |list| (list.shape.blocks_max, list.shape.block_size));
    let most = (GROUP_BYTES / row_bytes(heads, head_dim)).clamp(1, GROUP_ROWS);
    let groups = groups_of(&args.scored, args.tile.clone(), args.skip_visible, args.restrict.as_ref(), most);
    if groups.is_empty() {
        return Ok(());
    }
    let chunks = chunks_of(&groups, queue.limits().units as usize);
    let rows = groups.iter().map(|group| group.rows as usize).max().unwrap_or(1);
    let shape = sizes(&args).uint(blocks_max).uint(block_size).uint(chunks).uint(rows);
    let shape = groups[0].words().into_iter().fold(shape, |shape, word| shape.uint(word as usize));
    let words: Vec<u32> = groups.iter().flat_map(|group| group.words()).collect();
    let Args { scored, restrict, scores, .. } = args;
    let [blocks, counts] = candidates(restrict);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "index_score",
            bindings: &mut [
                Binding::Read(scored.queries),
                Binding::Read(scored.weights),
                Binding::Bytes(bytes_of(scored.rows)),
                Binding::Bytes(bytes_of(&words)),
                Binding::Read(scored.keys),
                Binding::Bytes(bytes_of(scored.pages.table)),
                blocks,
                counts,
                Binding::Write(scores),
            ],
            shape: shape.bytes(),
            groups: count(groups.len() * chunks),
            threads: count(CUDA_THREADS),
            shared_bytes: count(rows * row_bytes(heads, head_dim)),
        },
        OVERLAP,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::{Pages, RowInfo};
    use crate::top_k::CandidateShape;
    use tf_device::{Buffer, Device};

    #[test]
    fn rows_that_read_the_same_keys_go_together() {
        let row = |slot, position| RowInfo { slot, position, window: slot };
        // Two windows, a row that sees too little, one alone, and a prompt longer than a group.
        let mut rows = vec![row(3, 99), row(3, 100), row(1, 400), row(1, 401), row(1, 5), row(1, 402), row(2, 900)];
        rows.extend((0..8).map(|i| row(4, 50 + i)));
        let none = Buffer::zeroed(&Device::cpu(), 0).unwrap();
        let pages = Pages { table: &[], pages_per_slot: 0, entries_per_page: 16 };
        let (queries, weights, keys) = (&none, &none, &none);
        let scored = Scored { queries, weights, rows: &rows, ratio: 1, keys, pages, heads: 4, head_dim: 32 };
        let group = |first, rows, columns, slot| Group { first, rows, columns, slot };
        let prompt = [group(7, 6, 128, 4), group(13, 2, 128, 4)];
        let mut wanted = vec![group(0, 2, 128, 3), group(2, 2, 512, 1), group(5, 1, 512, 1), group(6, 1, 1024, 2)];
        wanted.extend(prompt);
        assert_eq!(groups_of(&scored, 0..15, 10, None, GROUP_ROWS), wanted);
        // Rows of more blocks than they may keep to are alone, and their scores are compact.
        let shape = CandidateShape { blocks_max: 25, block_size: 16 };
        let list = CandidateList { shape, blocks: &none, counts: &none };
        let mut wanted = vec![group(0, 2, 128, 3), group(2, 1, 512, 1), group(3, 1, 512, 1), group(5, 1, 512, 1)];
        wanted.push(group(6, 1, 512, 2));
        wanted.extend(prompt);
        assert_eq!(groups_of(&scored, 0..15, 10, Some(&list), GROUP_ROWS), wanted);
        assert_eq!(groups_of(&scored, 1..3, 10, None, GROUP_ROWS), [group(1, 1, 128, 3), group(2, 1, 512, 1)]);
    }

    #[test]
    fn a_group_is_spread_over_the_device_and_many_are_not() {
        let group = |columns| Group { first: 0, rows: 1, columns, slot: 0 };
        assert_eq!(chunks_of(&[group(128)], 132), 1);
        assert_eq!(chunks_of(&[group(16_384)], 132), 128);
        assert_eq!(chunks_of(&[group(1 << 20)], 132), BLOCKS * 132);
        assert_eq!(chunks_of(&[group(4096); 128], 132), 3);
        assert_eq!(chunks_of(&[group(4096); 4000], 132), 1);
    }
}
