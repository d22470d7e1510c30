use super::Args;
use crate::gpu::{OVERLAP, a_thread_each, optional, program};
use tf_device::LaunchError;
use tf_device::gpu::{Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("embed", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { ids, table, columns, streams, out, mix } = args;
    let has_mix = usize::from(mix.is_some());
    let shape = ShapeBytes::new().uint(ids.len()).uint(streams).uint(columns).uint(has_mix);
    let (groups, threads) = a_thread_each(ids.len() * streams * columns);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "embed",
            bindings: &mut [Binding::Bytes(bytes_of(ids)), Binding::Read(table), Binding::Write(out), optional(mix)],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}
