//! Checks the arguments against each other and runs them on the queue's backend.

use super::{Args, gpu};
use crate::linear_bf16;
use tf_device::{LaunchError, Queue};

/// Writes the logits of the chosen rows; no chosen row is no work.
///
/// # Errors
/// [`LaunchError`] when a buffer disagrees with the weight, or a chosen row lies beyond `x`; nothing is written then.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    let columns = args.weights.columns();
    let rows = args.x.len_of::<f32>() / columns;
    for index in args.row_indices {
        LaunchError::check_limit("a chosen row, counted from one", *index as usize + 1, rows)?;
    }
    let logits = args.row_indices.len() * args.weights.rows();
    LaunchError::check_room("the length of out", args.out.len_of::<f32>(), logits)?;
    if args.row_indices.is_empty() {
        return Ok(());
    }
    match queue.launching("lm_head") {
        Queue::Cpu(queue) => linear_bf16::run_chosen(queue, args.weights, args.x, args.row_indices, args.out),
        Queue::Gpu(queue) => gpu::run(queue, args),
    }
}
