use super::{Args, EXPERTS_MAX, TOP_K_MAX, cpu, gpu};
use tf_device::{LaunchError, Queue};

/// Chooses the experts of every row.
///
/// # Errors
/// [`LaunchError::Shape`] or [`LaunchError::Limit`] when the arguments disagree; nothing is written.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { rows, experts, top_k, .. } = args;
    if rows == 0 {
        return Ok(());
    }
    LaunchError::check_limit("the experts", experts, EXPERTS_MAX)?;
    LaunchError::check_limit("the experts of a row", top_k, TOP_K_MAX.min(experts))?;
    LaunchError::check_room("the gate logits", args.logits.len_of::<f32>(), rows * experts)?;
    LaunchError::check_shape("the gate bias", args.bias.len_of::<f32>(), experts)?;
    if !args.image.is_empty() {
        LaunchError::check_shape("the image marks", args.image.len(), rows)?;
    }
    if args.image.contains(&true) {
        LaunchError::check_shape("the gate bias of images", args.bias_image.map_or(0, |b| b.len_of::<f32>()), experts)?;
    }
    LaunchError::check_room("the chosen experts", args.chosen.len_of::<u32>(), rows * top_k)?;
    LaunchError::check_room("the experts' weights", args.weights.len_of::<f32>(), rows * top_k)?;
    match queue.launching("moe_route") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}
