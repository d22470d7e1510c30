use super::{Args, HEAD_DIM_MAX, RingArgs, cpu, gpu, record_bytes};
use crate::rope::ROPE_DIM_MAX;
use tf_device::{LaunchError, Queue};

/// Makes the records of the rows.
///
/// # Errors
/// [`LaunchError::Shape`] or [`LaunchError::Limit`] when the arguments disagree; nothing is written.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    let (rows, head_dim) = (args.rows.len(), args.head_dim);
    if rows == 0 {
        return Ok(());
    }
    check_head_dim(head_dim)?;
    check_rope(args.frequencies.len() * 2, head_dim)?;
    LaunchError::check_room("the projected keys", args.x.len_of::<f32>(), rows * head_dim)?;
    LaunchError::check_shape("the weight of the key norm", args.norm.len_of::<f32>(), head_dim)?;
    LaunchError::check_room("the window records", args.records.len_bytes(), rows * record_bytes(head_dim))?;
    match queue.launching("kv_store") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}

/// Writes the windows' records into their rings.
///
/// # Errors
/// As [`launch`].
pub fn launch_ring(queue: &mut Queue, args: RingArgs<'_>) -> Result<(), LaunchError> {
    let slot_bytes = args.ring_len * record_bytes(args.head_dim);
    for window in args.windows {
        let end = (window.first_row + window.row_count) as usize;
        LaunchError::check_room("the window records", args.records.len_bytes(), end * record_bytes(args.head_dim))?;
        LaunchError::check_room("the rings", args.ring.len_bytes(), (window.slot as usize + 1) * slot_bytes)?;
    }
    match queue.launching("kv_store/ring") {
        Queue::Cpu(queue) => cpu::run_ring(queue, args),
        Queue::Gpu(queue) => gpu::run_ring(queue, args)?,
    }
    Ok(())
}

pub(crate) fn check_head_dim(head_dim: usize) -> Result<(), LaunchError> {
    LaunchError::check_limit("the columns of a key", head_dim, HEAD_DIM_MAX)?;
    LaunchError::check_shape("the columns of a key", head_dim, head_dim.next_multiple_of(32).max(32))
}

pub(crate) fn check_rope(rope_dim: usize, columns: usize) -> Result<(), LaunchError> {
    LaunchError::check_limit("the rotated columns", rope_dim, columns.min(ROPE_DIM_MAX))?;
    LaunchError::check_shape("the rotated columns", rope_dim, rope_dim.next_multiple_of(16))
}
