use super::{Args, BLOCK, cpu, gpu, page_bytes};
use crate::kv_store::check_rope;
use crate::rows::Pages;
use tf_device::{LaunchError, Queue};

/// Publishes the keys of the completed entries.
///
/// # Errors
/// [`LaunchError::Shape`] or [`LaunchError::Limit`] when the arguments disagree; nothing is written.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    let (count, head_dim) = (args.entries.len(), args.head_dim);
    if count == 0 {
        return Ok(());
    }
    check_key_cache(head_dim, args.pages)?;
    check_rope(args.frequencies.len() * 2, head_dim)?;
    LaunchError::check_room("the projected latents", args.x.len_of::<f32>(), count * head_dim)?;
    LaunchError::check_shape("the weight of the index key norm", args.norm.len_of::<f32>(), head_dim)?;
    for entry in args.entries {
        let end = args.pages.page(entry.slot, entry.entry as usize) + 1;
        let bytes = end * page_bytes(head_dim, args.pages.entries_per_page);
        LaunchError::check_room("the index key cache", args.cache.len_bytes(), bytes)?;
    }
    match queue.launching("index_key") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}

/// What the page layout needs.
pub(crate) fn check_key_cache(head_dim: usize, pages: Pages<'_>) -> Result<(), LaunchError> {
    LaunchError::check_shape("the index key's columns", head_dim, head_dim.next_multiple_of(32).max(32))?;
    let entries = pages.entries_per_page;
    LaunchError::check_shape("the entries of a page", entries, entries.next_multiple_of(BLOCK).max(BLOCK))
}
