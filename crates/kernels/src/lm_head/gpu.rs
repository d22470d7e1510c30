//! The launch on a GPU.

use super::Args;
use crate::gpu::{THREADS, groups_of, program};
use crate::linear::Finish;
use crate::linear::cuda::{self, Format, Input, Linear};
use crate::linear_bf16::Dtype;
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("lm_head", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => metal(queue, args),
        Backend::Cuda => cuda(queue, args),
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

fn cuda(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { weights, x, row_indices, out } = args;
    if weights.dtype() == Dtype::F32 {
        return Err(queue.unsupported("lm_head/f32"));
    }
    let (format, columns, rows) = (Format::Head, weights.columns(), row_indices.len());
    let product =
        cuda::Product { codes: weights.buffer(), scales: None, weight_rows: weights.rows(), out, finish: Finish::F32 };
    let (chunk, input) = (cuda::chunk(format, columns), Input::F32 { buffer: x, chosen: Some(row_indices) });
    cuda::run(queue, Linear { format, columns, groups: 1, chunk, rows, input, products: &mut [product] })
}
