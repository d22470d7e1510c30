use super::Args;
use crate::gpu::{OVERLAP, a_simd_group_each, program};
use tf_device::LaunchError;
use tf_device::gpu::{Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("index_key", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { x, norm, eps, entries, ratio, frequencies, head_dim, cache, pages } = args;
    let sizes = ShapeBytes::new().uint(entries.len()).uint(ratio as usize).uint(head_dim).uint(2 * frequencies.len());
    let shape = sizes.uint(pages.pages_per_slot).uint(pages.entries_per_page).float(eps);
    let (groups, threads) = a_simd_group_each(entries.len());
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "index_key",
            bindings: &mut [
                Binding::Read(x),
                Binding::Read(norm),
                Binding::Bytes(bytes_of(entries)),
                Binding::Bytes(bytes_of(pages.table)),
                Binding::Bytes(bytes_of(frequencies)),
                Binding::Write(cache),
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}
