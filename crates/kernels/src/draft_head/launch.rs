use super::{Args, RANK_MAX, cpu, gpu, pack};
use crate::sample::VOCAB_MAX;
use tf_device::{LaunchError, Queue};

/// Proposes `steps` tokens for each sequence. On a GPU it waits once, for the proposals.
///
/// # Errors
/// [`LaunchError::Shape`] or [`LaunchError::Limit`] when the arguments disagree; nothing is written.
pub fn launch(queue: &mut Queue, args: Args<'_, '_>) -> Result<(), LaunchError> {
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
    LaunchError::check_limit("the vocabulary of a draft", vocabulary, VOCAB_MAX)?;
    LaunchError::check_room("the step logits", args.logits.len_of::<f32>(), sequences * vocabulary)?;
    LaunchError::check_shape("the proposals", args.tokens.len(), sequences * steps)?;
    LaunchError::check_shape("the confidences", args.confidence.len(), sequences * steps)?;
    match queue.launching("draft_head") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}
