use super::{Args, cpu, gpu, raw_columns, record_bytes};
use crate::kv_store::{check_head_dim, check_rope};
use tf_device::{LaunchError, Queue};

/// Publishes the completed entries, writes their latents and keeps the raw rows of unfinished groups.
///
/// # Errors
/// [`LaunchError::Shape`] or [`LaunchError::Limit`] when the arguments disagree; nothing is written.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    let (rows, head_dim) = (args.rows.len(), args.head_dim);
    if rows == 0 {
        return Ok(());
    }
    LaunchError::check_limit("the compression ratio", args.ratio as usize, 2)?;
    check_head_dim(head_dim)?;
    check_rope(args.frequencies.len() * 2, head_dim)?;
    LaunchError::check_room("the raw rows", args.raw.len_of::<f32>(), rows * raw_columns(head_dim, args.ratio))?;
    LaunchError::check_shape("the weight of the latent norm", args.norm.len_of::<f32>(), head_dim)?;
    LaunchError::check_room("the latents", args.latents.len_of::<f32>(), args.entries.len() * head_dim)?;
    if args.ratio == 2 {
        let slots = args.rows.iter().map(|row| row.slot as usize + 1).max().unwrap_or(0);
        let room = args.raw_ring.as_ref().map_or(0, |ring| ring.len_of::<f32>());
        LaunchError::check_room("the raw rings", room, slots * args.raw_len * 2 * head_dim)?;
    }
    for entry in args.entries {
        LaunchError::check_limit("an entry's row", entry.row as usize, rows - 1)?;
        let end = args.pages.index(entry.slot, entry.entry as usize) + 1;
        LaunchError::check_room("the compressed cache", args.cache.len_bytes(), end * record_bytes(head_dim))?;
    }
    let kernel = if args.ratio == 1 { "kv_compress/ratio1" } else { "kv_compress/ratio2" };
    match queue.launching(kernel) {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}
