//! The launch on a GPU.

use super::Args;
use crate::gpu::{THREADS, groups_of, program};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("lm_head", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => metal(queue, args),
        Backend::Cuda => Err(queue.unsupported("lm_head")),
    }
}

fn metal(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { weights, x, row_indices, out } = args;
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "lm_head",
        bindings: &mut [
            Binding::Read(x),
            Binding::Read(weights.buffer()),
            Binding::Bytes(bytes_of(row_indices)),
            Binding::Write(out),
        ],
        shape: ShapeBytes::new().uint(row_indices.len()).uint(weights.rows()).uint(weights.columns()).bytes(),
        groups: groups_of(weights.rows()),
        threads: THREADS,
        shared_bytes: 0,
    })
}
