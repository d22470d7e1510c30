use super::{Args, cpu, gpu};
use tf_device::{LaunchError, Queue};

/// Runs [`super`]'s formula for every row of `ids`.
///
/// # Errors
/// [`LaunchError::Limit`] when an id is outside the table, [`LaunchError::Shape`] when a buffer is too small.
pub fn launch(queue: &mut Queue, args: Args<'_>) -> Result<(), LaunchError> {
    let rows = args.ids.len();
    if rows == 0 {
        return Ok(());
    }
    LaunchError::check_shape("the embedding's columns", args.columns, args.columns.max(1))?;
    LaunchError::check_shape("the streams", args.streams, args.streams.max(1))?;
    let table = args.table.len_of::<u16>();
    let vocabulary = table / args.columns;
    LaunchError::check_shape("the embedding table's length", table, vocabulary * args.columns)?;
    let largest = *args.ids.iter().max().expect("there is a row") as usize;
    LaunchError::check_limit("a token id", largest, vocabulary.saturating_sub(1))?;
    LaunchError::check_room("the embedded rows", args.out.len_of::<f32>(), rows * args.streams * args.columns)?;
    if let Some(mix) = &args.mix {
        LaunchError::check_room("the carried mixes", mix.len_of::<f32>(), rows * args.streams)?;
    }
    match queue.launching("embed") {
        Queue::Cpu(queue) => cpu::run(queue, args),
        Queue::Gpu(queue) => gpu::run(queue, args)?,
    }
    Ok(())
}
