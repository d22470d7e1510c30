//! Checks the arguments against each other and runs them on the queue's backend.

use super::{Args, cpu, gpu};
use tf_device::{LaunchError, Queue};

/// Writes the mixture of every row; `rows` 0 is no work.
///
/// # Errors
/// [`LaunchError`] when a buffer or a weight disagrees with the others, or a pick names no expert; nothing is written then.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    let hidden = args.weights.hidden();
    let pick_count = args.rows * args.picks;
    LaunchError::check_room("the length of x", args.x.len_of::<f32>(), args.rows * hidden)?;
    LaunchError::check_room("the length of selected", args.selected.len_of::<u32>(), pick_count)?;
    LaunchError::check_room("the length of routing", args.routing.len_of::<f32>(), pick_count)?;
    LaunchError::check_room("the length of out", args.out.len_of::<f32>(), args.rows * hidden)?;
    // What a GPU has chosen is not known here; its router chooses existing experts only.
    for id in args.selected.host::<u32>().unwrap_or(&[]).iter().take(pick_count) {
        LaunchError::check_limit(
            "a picked expert's number, counted from one",
            *id as usize + 1,
            args.weights.experts().len(),
        )?;
    }
    if args.rows == 0 {
        return Ok(());
    }
    match queue.launching("moe_experts") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args),
    }
}
