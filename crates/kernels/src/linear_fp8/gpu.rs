//! The launches on a GPU: on Metal one a product, on CUDA what [`crate::linear::cuda`] makes of them.

use super::Args;
use crate::gpu::{THREADS, groups_of, program};
use crate::linear::cuda::{self, Format, Input, Linear};
use crate::linear::gpu::{quantise_where_asked, rounds};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes};

static PROGRAM: Program = program("linear_fp8", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => metal(queue, args),
        Backend::Cuda => cuda(queue, args, None),
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
        quantise_where_asked(queue, product.out, args.rows, weights.rows(), finish)?;
    }
    Ok(())
}

/// On CUDA with sums in chunks of `chunk` columns instead of the declared ones.
pub(super) fn run_in_chunks(queue: &mut GpuQueue, args: Args<'_>, chunk: usize) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => Err(queue.unsupported("linear_fp8 in chunks")),
        Backend::Cuda => cuda(queue, args, Some(chunk)),
    }
}

fn cuda(queue: &mut GpuQueue, args: Args<'_>, chunk: Option<usize>) -> Result<(), LaunchError> {
    let Args { x, rows, groups, products } = args;
    let Some(first) = products.first() else { return Ok(()) };
    let columns = first.weights.columns();
    let mut products: Vec<cuda::Product<'_>> = products
        .iter_mut()
        .map(|product| {
            let (codes, scales) = product.weights.buffers();
            let (weight_rows, finish) = (product.weights.rows(), product.finish);
            cuda::Product { codes, scales: Some(scales), weight_rows, out: product.out, finish }
        })
        .collect();
    let (format, input) = (Format::Fp8, Input::F32 { buffer: x, chosen: None });
    let chunk = chunk.unwrap_or_else(|| cuda::chunk(format, columns));
    cuda::run(queue, Linear { format, columns, groups, chunk, rows, input, products: &mut products })
}
