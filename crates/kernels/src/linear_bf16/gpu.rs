//! The launches on a GPU: one a product.

use super::{Args, Dtype};
use crate::gpu::{THREADS, groups_of, program};
use crate::linear::gpu::{finish_metal, rounds};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes};

static PROGRAM: Program = program("linear_bf16", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => metal(queue, args),
        Backend::Cuda => Err(queue.unsupported("linear_bf16")),
    }
}

fn metal(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    for product in args.products.iter_mut() {
        let (weights, finish) = (product.weights, product.finish);
        let shape = ShapeBytes::new().uint(args.rows).uint(weights.rows()).uint(weights.columns());
        queue.launch(Launch {
            program: &PROGRAM,
            entry: match weights.dtype() {
                Dtype::Bf16 => "linear_bf16",
                Dtype::F32 => "linear_f32",
            },
            bindings: &mut [Binding::Read(args.x), Binding::Read(weights.buffer()), Binding::Write(product.out)],
            shape: shape.uint(rounds(finish)).bytes(),
            groups: groups_of(weights.rows()),
            threads: THREADS,
            shared_bytes: 0,
        })?;
        finish_metal(queue, product.out, args.rows, weights.rows(), finish)?;
    }
    Ok(())
}
