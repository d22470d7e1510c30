use super::{Args, RANK_MAX, cpu, pack};
use tf_device::{LaunchError, Queue};

/// Proposes `steps` tokens for each sequence. `choose(sequence, step, logits)` picks the token of a sampled sequence from its
/// row of `[vocabulary]` logits; it is not called for greedy ones.
///
/// # Errors
/// [`LaunchError::Shape`] or [`LaunchError::Limit`] when the arguments disagree; nothing is written.
pub fn launch(
    queue: &mut Queue,
    args: Args<'_>,
    choose: &mut dyn FnMut(usize, usize, &[f32]) -> u32,
) -> Result<(), LaunchError> {
    let sequences = args.anchors.len();
    if sequences == 0 || args.steps == 0 {
        return Ok(());
    }
    let Args { vocabulary, rank, hidden, block, steps, .. } = args;
    LaunchError::check_limit("the Markov rank", rank, RANK_MAX)?;
    LaunchError::check_shape("the Markov rank", rank, rank.next_multiple_of(16).max(16))?;
    LaunchError::check_shape("the hidden size", hidden, hidden.next_multiple_of(16).max(16))?;
    LaunchError::check_limit("the draft steps", steps, block)?;
    LaunchError::check_room("the draft logits", args.base.len_of::<f32>(), sequences * block * vocabulary)?;
    LaunchError::check_room("the draft rows", args.hidden_rows.len_of::<f32>(), sequences * block * hidden)?;
    let largest = args.anchors.iter().max().copied().unwrap_or(0) as usize;
    LaunchError::check_limit("an anchor token", largest, vocabulary.saturating_sub(1))?;
    LaunchError::check_shape("the Markov table", args.embed.len_of::<u16>(), vocabulary * rank)?;
    LaunchError::check_shape("the packed Markov head", args.head.len_of::<u16>(), pack::packed_len(vocabulary, rank))?;
    LaunchError::check_shape("the confidence weight", args.proj.len_of::<f32>(), hidden + rank)?;
    LaunchError::check_shape("the greedy marks", args.greedy.len(), sequences)?;
    LaunchError::check_room("the step logits", args.logits.len_of::<f32>(), sequences * vocabulary)?;
    LaunchError::check_shape("the proposals", args.tokens.len(), sequences * steps)?;
    LaunchError::check_shape("the confidences", args.confidence.len(), sequences * steps)?;
    match queue.launching("draft_head") {
        Queue::Cpu(queue) => cpu::run(queue, args, choose),
        Queue::Gpu(queue) => return Err(queue.unsupported("draft_head")),
    }
    Ok(())
}
