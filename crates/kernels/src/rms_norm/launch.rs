use super::{Args, cpu, gpu};
use tf_device::{LaunchError, Queue};

/// Runs [`super`]'s formula for every row.
///
/// # Errors
/// [`LaunchError::Shape`] when a buffer is too small or `columns` is not a multiple of 16 (of 32 with `quantised`).
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { rows, columns, .. } = args;
    if rows == 0 {
        return Ok(());
    }
    let multiple = if args.quantised.is_some() { 32 } else { 16 };
    LaunchError::check_shape("the columns of a norm", columns, columns.next_multiple_of(multiple))?;
    LaunchError::check_room("the input of a norm", args.x.len_of::<f32>(), rows * columns)?;
    LaunchError::check_shape("the weight of a norm", args.weight.len_of::<f32>(), columns)?;
    for out in [&args.normed, &args.quantised].into_iter().flatten() {
        LaunchError::check_room("the output of a norm", out.len_of::<f32>(), rows * columns)?;
    }
    match queue.launching("rms_norm") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}
