//! The launches on a GPU: on Metal one a product, on CUDA what [`crate::linear::cuda`] makes of them.

use super::{Args, Dtype};
use crate::gpu::{THREADS, groups_of, program};
use crate::linear::cuda::{self, Format, Input, Linear};
use crate::linear::gpu::{quantise_where_asked, rounds};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes};

static PROGRAM: Program = program("linear_bf16", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => metal(queue, args),
        Backend::Cuda => cuda(queue, args, None),
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
        quantise_where_asked(queue, product.out, args.rows, weights.rows(), finish)?;
    }
    Ok(())
}

/// On CUDA with bf16 weights summed in chunks of `chunk` columns instead of the declared ones.
pub(super) fn run_in_chunks(queue: &mut GpuQueue, args: Args<'_>, chunk: usize) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => Err(queue.unsupported("linear_bf16 in chunks")),
        Backend::Cuda => cuda(queue, args, Some(chunk)),
    }
}

fn cuda(queue: &mut GpuQueue, args: Args<'_>, chunk: Option<usize>) -> Result<(), LaunchError> {
    let Args { x, rows, products } = args;
    let mut bf16 = Vec::with_capacity(products.len());
    let mut columns = 0;
    for product in products.iter_mut() {
        let (weights, finish, weight_rows) = (product.weights, product.finish, product.weights.rows());
        columns = weights.columns();
        match weights.dtype() {
            Dtype::F32 => cuda::run_f32(queue, x, weights.buffer(), [rows, weight_rows, columns], product.out, finish)?,
            Dtype::Bf16 => {
                bf16.push(cuda::Product {
                    codes: weights.buffer(),
                    scales: None,
                    weight_rows,
                    out: product.out,
                    finish,
                });
            }
        }
    }
    if bf16.is_empty() {
        return Ok(());
    }
    let (format, input) = (Format::Bf16, Input::F32 { buffer: x, chosen: None });
    let chunk = chunk.unwrap_or_else(|| cuda::chunk(format, columns));
    cuda::run(queue, Linear { format, columns, groups: 1, chunk, rows, input, products: &mut bf16 })
}
