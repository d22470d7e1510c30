use super::Args;
use super::cpu::weight_factor;
use crate::gpu::{OVERLAP, a_simd_group_each, program};
use tf_device::LaunchError;
use tf_device::gpu::{Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("index_query", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { queries, weights, rows, frequencies, heads, head_dim } = args;
    let sizes = ShapeBytes::new().uint(rows.len()).uint(heads).uint(head_dim).uint(2 * frequencies.len());
    let shape = sizes.float(weight_factor(heads, head_dim));
    let (groups, threads) = a_simd_group_each(rows.len() * heads);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "index_query",
            bindings: &mut [
                Binding::Write(queries),
                Binding::Write(weights),
                Binding::Bytes(bytes_of(rows)),
                Binding::Bytes(bytes_of(frequencies)),
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}
