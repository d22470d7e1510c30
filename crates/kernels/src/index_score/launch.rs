use super::{Args, HEAD_DIM_MAX, HEADS_MAX, Scored, SelectArgs, cpu, gpu, steps};
use crate::index_key::{check_key_cache, page_bytes};
use crate::rows::visible;
use crate::top_k::{self, Candidates, check_candidates, check_selection};
use tf_device::{LaunchError, Queue};

/// Writes the scores of the rows of a tile.
///
/// # Errors
/// [`LaunchError::Shape`] or [`LaunchError::Limit`] when the arguments disagree; nothing is written.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    if args.tile.is_empty() {
        return Ok(());
    }
    check(&args)?;
    match queue.launching("index_score") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}

fn check(args: &Args<'_>) -> Result<(), LaunchError> {
    LaunchError::check_limit("the end of a tile", args.tile.end, args.scored.rows.len())?;
    check_scored(&args.scored)?;
    LaunchError::check_shape("the stride of the scores", args.stride, args.stride.next_multiple_of(16))?;
    LaunchError::check_room("the scores", args.scores.len_of::<f32>(), args.tile.len() * args.stride)?;
    let seen = most_visible(&args.scored, args.tile.clone());
    if seen > args.skip_visible {
        LaunchError::check_limit("the entries that a row sees", seen, args.stride)?;
    }
    if let Some(list) = &args.restrict {
        let rows = args.scored.rows.len();
        LaunchError::check_room("the candidate blocks", list.blocks.len_of::<u32>(), rows * list.shape.blocks_max)?;
        LaunchError::check_room("the counts of candidate blocks", list.counts.len_of::<u32>(), rows)?;
    }
    Ok(())
}

/// Selects the entries of every row, tile by tile.
///
/// # Errors
/// As [`launch`]; [`LaunchError::Shape`] when the scratch holds less than one row's scores.
pub fn launch_select(queue: &mut Queue, args: SelectArgs<'_>) -> Result<(), LaunchError> {
    select_with(queue, args, launch)
}

/// As [`launch_select`] on a CPU, with scores in the order of CUDA, step by step: what such a device is compared with.
///
/// # Errors
/// As [`launch_select`].
pub fn select_in_steps(queue: &mut Queue, args: SelectArgs<'_>) -> Result<(), LaunchError> {
    select_with(queue, args, |_, args| {
        check(&args)?;
        steps::run(args);
        Ok(())
    })
}

fn select_with(
    queue: &mut Queue,
    args: SelectArgs<'_>,
    score: fn(&mut Queue, Args<'_>) -> Result<(), LaunchError>,
) -> Result<(), LaunchError> {
    let SelectArgs { scored, top_k, mut candidates, scratch, selected, counts } = args;
    let rows = scored.rows.len();
    if rows == 0 {
        return Ok(());
    }
    check_scored(&scored)?;
    check_selection(rows, top_k, selected.len_of::<u32>(), counts.len_of::<u32>())?;
    check_candidates(&candidates, rows, top_k)?;
    let seen = most_visible(&scored, 0..rows);
    let stride = if seen > top_k { seen.next_multiple_of(16) } else { 0 };
    LaunchError::check_room("the scratch of the index scores", scratch.len_of::<f32>(), stride)?;
    queue.launching("index_score/select");
    let tile_rows = scratch.len_of::<f32>().checked_div(stride).unwrap_or(rows).min(rows);
    for start in (0..rows).step_by(tile_rows) {
        let tile = start..(start + tile_rows).min(rows);
        if stride > 0 {
            let restrict = match &candidates {
                Candidates::Restrict(list) => Some(*list),
                Candidates::None | Candidates::Publish { .. } => None,
            };
            let (tile, scores) = (tile.clone(), &mut *scratch);
            score(queue, Args { scored, tile, skip_visible: top_k, restrict, scores, stride })?;
        }
        let candidates = match &mut candidates {
            Candidates::None => Candidates::None,
            Candidates::Publish { shape, blocks, counts } => Candidates::Publish { shape: *shape, blocks, counts },
            Candidates::Restrict(list) => Candidates::Restrict(*list),
        };
        let (rows, ratio) = (scored.rows, scored.ratio);
        let (selected, counts) = (&mut *selected, &mut *counts);
        top_k::launch(
            queue,
            top_k::Args { scores: scratch, stride, rows, tile, ratio, top_k, candidates, selected, counts },
        )?;
    }
    Ok(())
}

fn most_visible(scored: &Scored<'_>, tile: std::ops::Range<usize>) -> usize {
    scored.rows[tile].iter().map(|row| visible(row.position, scored.ratio)).max().unwrap_or(0)
}

fn check_scored(scored: &Scored<'_>) -> Result<(), LaunchError> {
    let (rows, heads, head_dim) = (scored.rows.len(), scored.heads, scored.head_dim);
    LaunchError::check_limit("the index heads", heads, HEADS_MAX)?;
    LaunchError::check_limit("the index key's columns", head_dim, HEAD_DIM_MAX)?;
    check_key_cache(head_dim, scored.pages)?;
    LaunchError::check_room("the index queries", scored.queries.len_of::<f32>(), rows * heads * head_dim)?;
    LaunchError::check_room("the index weights", scored.weights.len_of::<f32>(), rows * heads)?;
    let page_bytes = page_bytes(head_dim, scored.pages.entries_per_page);
    LaunchError::check_shape("the index key cache", scored.keys.len_bytes() % page_bytes, 0)
}
