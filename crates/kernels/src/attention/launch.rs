use super::{Args, Span, cpu, gpu, scratch_floats};
use crate::kv_store::{self, check_head_dim, check_rope};
use tf_device::{LaunchError, Queue};

/// Computes the attention of every row.
///
/// # Errors
/// [`LaunchError::Shape`] or [`LaunchError::Limit`] when the arguments disagree; nothing is written.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    let (rows, shape) = (args.rows.len(), args.shape);
    if rows == 0 {
        return Ok(());
    }
    let record = kv_store::record_bytes(shape.head_dim);
    check_head_dim(shape.head_dim)?;
    check_rope(args.frequencies.len() * 2, shape.head_dim)?;
    LaunchError::check_room("the queries", args.q.len_of::<f32>(), rows * shape.heads * shape.head_dim)?;
    LaunchError::check_room("the attention output", args.out.len_of::<f32>(), rows * shape.heads * shape.head_dim)?;
    LaunchError::check_shape("the attention sinks", args.sinks.len_of::<f32>(), shape.heads)?;
    LaunchError::check_limit("the sliding window", shape.window, shape.ring_len)?;
    let slots = args.windows.iter().map(|window| window.slot as usize + 1).max().unwrap_or(0);
    LaunchError::check_room("the rings", args.ring.len_bytes(), slots * shape.ring_len * record)?;
    for row in args.rows {
        LaunchError::check_limit("a row's window", row.window as usize, args.windows.len().saturating_sub(1))?;
    }
    // Windows describe the records, of which there may be more than query rows.
    let records = args.records.len_bytes() / record;
    for window in args.windows {
        LaunchError::check_limit("a window's last row", (window.first_row + window.row_count) as usize, records)?;
        match args.span {
            Span::Causal => {}
            Span::Block => LaunchError::check_limit("a draft block", window.row_count as usize, shape.block_rows)?,
        }
    }
    if let Some(compressed) = &args.compressed {
        LaunchError::check_room("the selection", compressed.selected.len_of::<u32>(), rows * shape.selected_max)?;
        LaunchError::check_room("the counts of the selection", compressed.counts.len_of::<u32>(), rows)?;
        // What a GPU has counted is not known here; its kernel reads no more than `selected_max`.
        let counts = compressed.counts.host::<u32>().unwrap_or(&[]);
        let most = counts.iter().take(rows).max().copied().unwrap_or(0);
        LaunchError::check_limit("a row's selection", most as usize, shape.selected_max)?;
    }
    let kernel = match args.span {
        Span::Causal => "attention/causal",
        Span::Block => "attention/block",
    };
    match queue.launching(kernel) {
        Queue::Cpu(queue) => {
            let floats = scratch_floats(shape, queue.pool.threads());
            LaunchError::check_room("the scratch of attention", args.scratch.len_of::<f32>(), floats)?;
            cpu::run(queue, args);
        }
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}
