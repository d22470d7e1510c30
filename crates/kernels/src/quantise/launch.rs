//! Checks the arguments against each other and runs them on the queue's backend.

use super::{Args, ArgsInPlace, cpu, gpu};
use tf_device::{LaunchError, Queue};

/// Writes the rounded rows of `x` to `out`; `rows` 0 is no work.
///
/// # Errors
/// [`LaunchError::Shape`] when a buffer is too short; nothing is written then.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    LaunchError::check_room("the length of x", args.x.len_of::<f32>(), args.rows * args.columns)?;
    LaunchError::check_room("the length of out", args.out.len_of::<f32>(), args.rows * args.columns)?;
    if args.rows * args.columns == 0 {
        return Ok(());
    }
    match queue.launching("quantise") {
        Queue::Cpu(queue) => {
            let count = args.rows * args.columns;
            cpu::run(queue, Some(&args.x.f32()[..count]), &mut args.out.f32_mut()[..count], args.columns);
        }
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}

/// As [`launch`], over one buffer.
///
/// # Errors
/// As [`launch`].
pub fn launch_in_place(queue: &mut Queue, args: ArgsInPlace<'_>) -> Result<(), LaunchError> {
    LaunchError::check_room("the length of values", args.values.len_of::<f32>(), args.rows * args.columns)?;
    if args.rows * args.columns == 0 {
        return Ok(());
    }
    match queue.launching("quantise/in_place") {
        Queue::Cpu(queue) => {
            cpu::run(queue, None, &mut args.values.f32_mut()[..args.rows * args.columns], args.columns);
        }
        Queue::Gpu(queue) => gpu::run_in_place(queue, args)?,
    }
    Ok(())
}
