//! The launches on a GPU: one a product.

use super::Args;
use crate::gpu::{THREADS, groups_of, program};
use crate::linear::gpu::{finish_metal, rounds};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes};

static PROGRAM: Program = program("linear_fp8", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => metal(queue, args),
        Backend::Cuda => Err(queue.unsupported("linear_fp8")),
    }
}

fn metal(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    for product in args.products.iter_mut() {
        let (weights, finish) = (product.weights, product.finish);
        let (codes, scales) = weights.buffers();
        let shape = ShapeBytes::new().uint(args.rows).uint(weights.rows()).uint(weights.columns()).uint(args.groups);
        queue.launch(Launch {
            program: &PROGRAM,
            entry: "linear_fp8",
            bindings: &mut [
                Binding::Read(args.x),
                Binding::Read(codes),
                Binding::Read(scales),
                Binding::Write(product.out),
            ],
            shape: shape.uint(rounds(finish)).bytes(),
            groups: groups_of(weights.rows()),
            threads: THREADS,
            shared_bytes: 0,
        })?;
        finish_metal(queue, product.out, args.rows, weights.rows(), finish)?;
    }
    Ok(())
}
