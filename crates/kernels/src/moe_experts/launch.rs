//! Checks the arguments against each other and runs them on the queue's backend.

use super::{Args, cpu, gpu};
use tf_device::gpu::GpuQueue;
use tf_device::{LaunchError, Queue};

/// Writes the mixture of every row; `rows` 0 is no work.
///
/// # Errors
/// [`LaunchError`] when a buffer or a weight disagrees with the others, or a pick names no expert; nothing is written then.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    check(&args)?;
    if args.rows == 0 {
        return Ok(());
    }
    match queue.launching("moe_experts") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args),
    }
}

/// For measurements of what the declared order costs: as [`launch`] on CUDA with sums in chunks of so many columns of `w1` and
/// `w3`, and of `w2`, each a multiple of 64. The results are those of another order, so no model may use them.
///
/// # Errors
/// As [`launch`]; [`LaunchError::NoKernel`] on another backend.
pub fn measure_in_chunks(queue: &mut GpuQueue, args: Args<'_>, chunks: [usize; 2]) -> Result<(), LaunchError> {
    check(&args)?;
    for chunk in chunks {
        LaunchError::check_shape("the columns of a chunk", chunk, chunk.next_multiple_of(64).max(64))?;
    }
    gpu::run_in_chunks(queue, args, chunks)
}

fn check(args: &Args<'_>) -> Result<(), LaunchError> {
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
    Ok(())
}
