use super::{EngramError, GateArgs, GatherArgs, cpu, gpu};
use crate::hyper::STREAMS;
use tf_device::{LaunchError, Queue};

/// Reads and dequantises the table rows of every row.
///
/// # Errors
/// [`EngramError::Launch`] when the arguments disagree or an id is outside the table; nothing is written.
/// [`EngramError::NotANumber`] names the first damaged table row; `out` must not be used.
pub fn launch_gather(queue: &mut Queue, args: GatherArgs<'_>) -> Result<(), EngramError> {
    let GatherArgs { columns, head_dim, .. } = args;
    if args.ids.is_empty() {
        return Ok(());
    }
    LaunchError::check_shape("the columns of an n-gram row", head_dim, head_dim.next_multiple_of(32).max(32))?;
    let rows = args.ids.len() / columns.max(1);
    LaunchError::check_shape("the n-gram row ids", args.ids.len(), rows * columns)?;
    let table_rows = args.codes.len() / head_dim;
    LaunchError::check_shape("the n-gram table", args.codes.len(), table_rows * head_dim)?;
    LaunchError::check_shape("the n-gram scales", args.scales.len(), table_rows * (head_dim / 32))?;
    let largest = args.ids.iter().max().copied().unwrap_or(0) as usize;
    LaunchError::check_limit("an n-gram row id", largest, table_rows.saturating_sub(1))?;
    LaunchError::check_room("the n-gram rows", args.out.len_of::<f32>(), args.ids.len() * head_dim)?;
    match queue.launching("engram/gather") {
        Queue::Cpu(queue) => cpu::run_gather(queue, args),
        Queue::Gpu(queue) => gpu::run_gather(queue, args),
    }
}

/// Adds the gated value to every stream.
///
/// # Errors
/// [`LaunchError::Shape`] when the arguments disagree; nothing is written.
pub fn launch_gate(queue: &mut Queue, args: GateArgs<'_>) -> Result<(), LaunchError> {
    let GateArgs { rows, hidden, .. } = args;
    if rows == 0 {
        return Ok(());
    }
    LaunchError::check_shape("the hidden size", hidden, hidden.next_multiple_of(32).max(32))?;
    LaunchError::check_room("the streams", args.streams.len_of::<f32>(), rows * STREAMS * hidden)?;
    LaunchError::check_room("the n-gram keys and values", args.kv.len_of::<f32>(), rows * (STREAMS + 1) * hidden)?;
    LaunchError::check_shape("the n-gram q weight", args.q_weight.len_of::<f32>(), STREAMS * hidden)?;
    LaunchError::check_shape("the n-gram k weight", args.k_weight.len_of::<f32>(), STREAMS * hidden)?;
    if !args.image.is_empty() {
        LaunchError::check_shape("the image marks", args.image.len(), rows)?;
    }
    match queue.launching("engram/gate") {
        Queue::Cpu(queue) => cpu::run_gate(queue, args),
        Queue::Gpu(queue) => gpu::run_gate(queue, args)?,
    }
    Ok(())
}
