use super::{Args, ArgsInPlace, BLOCK};
use crate::gpu::{OVERLAP, a_simd_group_each, program};
use tf_device::LaunchError;
use tf_device::gpu::{Binding, GpuQueue, Launch, Program, ShapeBytes};

static PROGRAM: Program = program("quantise", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { x, out, rows, columns } = args;
    launch(queue, "quantise", &mut [Binding::Read(x), Binding::Write(out)], rows, columns)
}

pub(crate) fn run_in_place(queue: &mut GpuQueue, args: ArgsInPlace<'_>) -> Result<(), LaunchError> {
    let ArgsInPlace { values, rows, columns } = args;
    launch(queue, "quantise_in_place", &mut [Binding::Write(values)], rows, columns)
}

fn launch(
    queue: &mut GpuQueue,
    entry: &'static str,
    bindings: &mut [Binding<'_>],
    rows: usize,
    columns: usize,
) -> Result<(), LaunchError> {
    let shape = ShapeBytes::new().uint(rows).uint(columns);
    let (groups, threads) = a_simd_group_each(rows * columns.div_ceil(BLOCK));
    queue.launch_tuned(
        Launch { program: &PROGRAM, entry, bindings, shape: shape.bytes(), groups, threads, shared_bytes: 0 },
        OVERLAP,
    )
}
