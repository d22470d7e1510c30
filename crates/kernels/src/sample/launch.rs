use super::{Args, VOCAB_MAX, cpu, gpu};
use tf_device::{LaunchError, Queue};

/// Draws a token for every entry of `draws`; both result lists are emptied first.
///
/// # Errors
/// [`LaunchError::Shape`] when a row or a wanted token lies outside the logits, [`LaunchError::Limit`] for a vocabulary beyond
/// [`VOCAB_MAX`]. A bad row is no launch error: its [`super::Outcome`] says so.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    args.outcomes.clear();
    args.top.clear();
    LaunchError::check_limit("the vocabulary of a draw", args.vocab, VOCAB_MAX)?;
    let rows = args.logits.len_of::<f32>().checked_div(args.vocab).unwrap_or(0);
    for draw in args.draws {
        LaunchError::check_room("the logits of a draw, in rows,", rows, draw.row + 1)?;
        if let Some(next) = draw.next {
            LaunchError::check_room("the vocabulary of a draw", args.vocab, next as usize + 1)?;
        }
    }
    match queue.launching("sample") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}
