use super::{Args, Candidates, cpu, gpu};
use crate::rows::visible;
use tf_device::{LaunchError, Queue};

/// Selects from the scores of a tile of rows, and publishes their candidate blocks where asked.
///
/// # Errors
/// [`LaunchError::Shape`] or [`LaunchError::Limit`] when the arguments disagree, and on CUDA where a list is longer than its
/// parts can be merged; nothing is written.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    let rows = args.rows.len();
    if args.tile.is_empty() {
        return Ok(());
    }
    LaunchError::check_limit("the end of a tile", args.tile.end, rows)?;
    LaunchError::check_shape("the stride of the scores", args.stride, args.stride.next_multiple_of(16))?;
    LaunchError::check_room("the scores", args.scores.len_of::<f32>(), args.tile.len() * args.stride)?;
    let seen = args.rows[args.tile.clone()].iter().map(|row| visible(row.position, args.ratio)).max().unwrap_or(0);
    if seen > args.top_k {
        LaunchError::check_limit("the entries that a row sees", seen, args.stride)?;
    }
    check_selection(rows, args.top_k, args.selected.len_of::<u32>(), args.counts.len_of::<u32>())?;
    check_candidates(&args.candidates, rows, args.top_k)?;
    match queue.launching("top_k") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}

pub(crate) fn check_selection(rows: usize, top_k: usize, selected: usize, counts: usize) -> Result<(), LaunchError> {
    LaunchError::check_room("the selection", selected, rows * top_k)?;
    LaunchError::check_room("the counts of the selection", counts, rows)
}

pub(crate) fn check_candidates(candidates: &Candidates<'_>, rows: usize, top_k: usize) -> Result<(), LaunchError> {
    let (shape, blocks, counts) = match candidates {
        Candidates::None => return Ok(()),
        Candidates::Publish { shape, blocks, counts } => (shape, blocks.len_of::<u32>(), counts.len_of::<u32>()),
        Candidates::Restrict(list) => (&list.shape, list.blocks.len_of::<u32>(), list.counts.len_of::<u32>()),
    };
    let sure = (shape.blocks_max * shape.block_size + 1).saturating_sub(shape.block_size);
    LaunchError::check_limit("the selection from candidate blocks", top_k, sure)?;
    LaunchError::check_room("the candidate blocks", blocks, rows * shape.blocks_max)?;
    LaunchError::check_room("the counts of candidate blocks", counts, rows)
}
