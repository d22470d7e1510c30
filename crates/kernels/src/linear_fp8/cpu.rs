//! Hands the products to the shared tiles.

use super::Args;
use crate::linear::cpu::{Fp8, Matrix, TASKS_MAX, Task, run as run_tasks};
use tf_device::LaunchError;
use tf_device::cpu::{CpuQueue, Parts};

pub(super) fn run(queue: &mut CpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    LaunchError::check_limit("the product count of a launch", args.products.len(), TASKS_MAX)?;
    let mut columns = 0;
    let mut tasks: [Option<Task<'_>>; TASKS_MAX] = [const { None }; TASKS_MAX];
    for (task, product) in tasks.iter_mut().zip(args.products.iter_mut()) {
        let weights = product.weights;
        columns = weights.columns();
        *task = Some(Task {
            matrix: Matrix::Fp8(Fp8 { codes: weights.codes(), stride: weights.stride(), scales: weights.scales() }),
            rows: weights.rows(),
            out: Parts::new(&mut product.out.f32_mut()[..args.rows * weights.rows()]),
            finish: product.finish,
        });
    }
    run_tasks(queue, args.x.f32(), None, args.rows, args.groups, columns, &tasks)
}
