use super::{CollapseArgs, EnterArgs, ExpandArgs, MIXES, STREAMS, TapArgs, cpu, gpu, scratch_floats};
use tf_device::{LaunchError, Queue};

/// Expands the sublayer before (with `y`), computes this sublayer's mixes and its normalised input.
///
/// # Errors
/// [`LaunchError::Shape`] when a buffer is too small or `hidden` is not a multiple of 32; nothing is written.
pub fn launch_enter(queue: &mut Queue, args: EnterArgs<'_>) -> Result<(), LaunchError> {
    let (rows, hidden) = (args.rows, args.hidden);
    if rows == 0 {
        return Ok(());
    }
    check_hidden(hidden)?;
    if let Some(y) = args.y {
        LaunchError::check_room("the output of a sublayer", y.len_of::<f32>(), rows * hidden)?;
    }
    LaunchError::check_room("the streams", args.streams.len_of::<f32>(), rows * STREAMS * hidden)?;
    LaunchError::check_room("the carried mixes", args.mix.len_of::<f32>(), rows * STREAMS)?;
    LaunchError::check_room("the post weights", args.post.len_of::<f32>(), rows * STREAMS)?;
    LaunchError::check_room("the comb weights", args.comb.len_of::<f32>(), rows * STREAMS * STREAMS)?;
    LaunchError::check_shape("the mix function", args.weights.function.len_of::<f32>(), MIXES * STREAMS * hidden)?;
    LaunchError::check_shape("the mix base", args.weights.base.len_of::<f32>(), MIXES)?;
    LaunchError::check_shape("the mix scale", args.weights.scale.len_of::<f32>(), 3)?;
    LaunchError::check_shape("the weight of a norm", args.norm.len_of::<f32>(), hidden)?;
    let scratch = rows * scratch_floats(hidden);
    LaunchError::check_room("the scratch of the mixes", args.scratch.len_of::<f32>(), scratch)?;
    for out in [&args.normed, &args.quantised].into_iter().flatten() {
        LaunchError::check_room("the input of a sublayer", out.len_of::<f32>(), rows * hidden)?;
    }
    match queue.launching("hyper/enter") {
        Queue::Cpu(queue) => cpu::run_enter(queue, args),
        Queue::Gpu(queue) => gpu::run_enter(queue, args)?,
    }
    Ok(())
}

/// Writes a sublayer's output into the streams.
///
/// # Errors
/// As [`launch_enter`].
pub fn launch_expand(queue: &mut Queue, args: ExpandArgs<'_>) -> Result<(), LaunchError> {
    let (rows, hidden) = (args.rows, args.hidden);
    if rows == 0 {
        return Ok(());
    }
    check_hidden(hidden)?;
    LaunchError::check_room("the output of a sublayer", args.y.len_of::<f32>(), rows * hidden)?;
    LaunchError::check_room("the streams", args.streams.len_of::<f32>(), rows * STREAMS * hidden)?;
    LaunchError::check_room("the post weights", args.post.len_of::<f32>(), rows * STREAMS)?;
    LaunchError::check_room("the comb weights", args.comb.len_of::<f32>(), rows * STREAMS * STREAMS)?;
    match queue.launching("hyper/expand") {
        Queue::Cpu(queue) => cpu::run_expand(queue, args),
        Queue::Gpu(queue) => gpu::run_expand(queue, args)?,
    }
    Ok(())
}

/// Collapses the streams after the last sublayer and normalises the result.
///
/// # Errors
/// As [`launch_enter`].
pub fn launch_collapse(queue: &mut Queue, args: CollapseArgs<'_>) -> Result<(), LaunchError> {
    let (rows, hidden) = (args.rows, args.hidden);
    if rows == 0 {
        return Ok(());
    }
    check_hidden(hidden)?;
    LaunchError::check_room("the streams", args.streams.len_of::<f32>(), rows * STREAMS * hidden)?;
    LaunchError::check_room("the carried mixes", args.mix.len_of::<f32>(), rows * STREAMS)?;
    LaunchError::check_shape("the weight of a norm", args.norm.len_of::<f32>(), hidden)?;
    for out in [&args.collapsed, &args.normed, &args.quantised].into_iter().flatten() {
        LaunchError::check_room("the collapsed rows", out.len_of::<f32>(), rows * hidden)?;
    }
    match queue.launching("hyper/collapse") {
        Queue::Cpu(queue) => cpu::run_collapse(queue, args),
        Queue::Gpu(queue) => gpu::run_collapse(queue, args)?,
    }
    Ok(())
}

/// Records the mean of the streams.
///
/// # Errors
/// As [`launch_enter`], and when the tap does not fit into its columns.
pub fn launch_tap(queue: &mut Queue, args: TapArgs<'_>) -> Result<(), LaunchError> {
    let (rows, hidden) = (args.rows, args.hidden);
    if rows == 0 {
        return Ok(());
    }
    check_hidden(hidden)?;
    LaunchError::check_room("the streams", args.streams.len_of::<f32>(), rows * STREAMS * hidden)?;
    LaunchError::check_limit("the end of a tap", args.out_offset + hidden, args.out_columns)?;
    LaunchError::check_room("the taps", args.out.len_of::<f32>(), rows * args.out_columns)?;
    match queue.launching("hyper/tap") {
        Queue::Cpu(queue) => cpu::run_tap(queue, args),
        Queue::Gpu(queue) => gpu::run_tap(queue, args)?,
    }
    Ok(())
}

fn check_hidden(hidden: usize) -> Result<(), LaunchError> {
    LaunchError::check_shape("the hidden size", hidden, hidden.next_multiple_of(32).max(32))
}
