//! Checks the arguments against each other and runs them on the queue's backend.

use super::{Args, Dtype, cpu, gpu};
use crate::linear::Finish;
use tf_device::gpu::GpuQueue;
use tf_device::{LaunchError, Queue};

/// Computes every product of the launch; `rows` 0 is no work.
///
/// # Errors
/// [`LaunchError::Shape`] when a buffer or a weight disagrees with the others; nothing is written then.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    check(&args)?;
    if args.rows == 0 {
        return Ok(());
    }
    for product in args.products.iter() {
        queue.launching(match product.weights.dtype() {
            Dtype::Bf16 => "linear_bf16",
            Dtype::F32 => "linear_bf16/f32",
        });
    }
    match queue {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args),
    }
}

/// For measurements of what the declared order costs: as [`launch`] on CUDA with bf16 weights summed in chunks of `chunk`
/// columns, a multiple of 64. The results are those of another order, so no model may use them.
///
/// # Errors
/// As [`launch`]; [`LaunchError::NoKernel`] on another backend.
pub fn measure_in_chunks(queue: &mut GpuQueue, args: Args<'_>, chunk: usize) -> Result<(), LaunchError> {
    check(&args)?;
    LaunchError::check_shape("the columns of a chunk", chunk, chunk.next_multiple_of(64).max(64))?;
    gpu::run_in_chunks(queue, args, chunk)
}

fn check(args: &Args<'_>) -> Result<(), LaunchError> {
    let Some(first) = args.products.first() else { return Ok(()) };
    let columns = first.weights.columns();
    LaunchError::check_room("the length of x", args.x.len_of::<f32>(), args.rows * columns)?;
    for product in args.products.iter() {
        let weights = product.weights;
        LaunchError::check_shape("a weight's column count", weights.columns(), columns)?;
        LaunchError::check_room("the length of out", product.out.len_of::<f32>(), args.rows * weights.rows())?;
        if product.finish == Finish::Qdq8 {
            let whole_blocks = weights.rows().next_multiple_of(crate::quantise::BLOCK);
            LaunchError::check_shape(
                "the row count of a weight whose output is quantised",
                weights.rows(),
                whole_blocks,
            )?;
        }
    }
    Ok(())
}
