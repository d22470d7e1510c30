use super::{Args, cpu, gpu};
use crate::kv_store::check_rope;
use tf_device::{LaunchError, Queue};

/// Rotates and quantises the queries, scales their weights.
///
/// # Errors
/// [`LaunchError::Shape`] or [`LaunchError::Limit`] when the arguments disagree; nothing is written.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    let rows = args.rows.len();
    if rows == 0 {
        return Ok(());
    }
    let (heads, head_dim) = (args.heads, args.head_dim);
    LaunchError::check_shape("the index query's columns", head_dim, head_dim.next_multiple_of(32).max(32))?;
    check_rope(args.frequencies.len() * 2, head_dim)?;
    LaunchError::check_room("the index queries", args.queries.len_of::<f32>(), rows * heads * head_dim)?;
    LaunchError::check_room("the index weights", args.weights.len_of::<f32>(), rows * heads)?;
    match queue.launching("index_query") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}
