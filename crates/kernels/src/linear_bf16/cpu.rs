//! Hands the products to the shared tiles.

use super::{Args, Dtype, Finish, Weights};
use crate::linear::cpu::{Bf16, F32, Matrix, TASKS_MAX, Task, run as run_tasks};
use tf_device::cpu::{CpuQueue, Parts};
use tf_device::{Buffer, LaunchError};

fn matrix(weights: &Weights) -> Matrix<'_> {
    match weights.dtype() {
        Dtype::Bf16 => Matrix::Bf16(Bf16 { values: weights.bf16(), stride: weights.stride() }),
        Dtype::F32 => Matrix::F32(F32 { values: weights.f32(), stride: weights.stride() }),
    }
}

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    LaunchError::check_limit("the product count of a launch", args.products.len(), TASKS_MAX)?;
    let mut columns = 0;
    let mut tasks: [Option<Task<'_>>; TASKS_MAX] = [const { None }; TASKS_MAX];
    for (task, product) in tasks.iter_mut().zip(args.products.iter_mut()) {
        let weights = product.weights;
        columns = weights.columns();
        *task = Some(Task {
            matrix: matrix(weights),
            rows: weights.rows(),
            out: Parts::new(&mut product.out.f32_mut()[..args.rows * weights.rows()]),
            finish: product.finish,
        });
    }
    run_tasks(queue, args.x.f32(), None, args.rows, 1, columns, &tasks)
}

/// One weight over chosen rows, unrounded. The rows must lie inside `x`.
pub(crate) fn run_chosen(
    queue: &mut CpuQueue,
    weights: &Weights,
    x: &Buffer,
    chosen: &[u32],
    out: &mut Buffer,
) -> Result<(), LaunchError> {
    let task = Task {
        matrix: matrix(weights),
        rows: weights.rows(),
        out: Parts::new(&mut out.f32_mut()[..chosen.len() * weights.rows()]),
        finish: Finish::F32,
    };
    run_tasks(queue, x.f32(), Some(chosen), chosen.len(), 1, weights.columns(), &[Some(task)])
}
