use super::Args;
use crate::gpu::{OVERLAP, a_simd_group_each, count, optional, program};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes};

static PROGRAM: Program = program("rms_norm", Some(include_str!("kernel.metal")), true);

const CUDA_COLUMNS_MAX: usize = 16_384;

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { x, weight, rows, columns, eps, normed, quantised } = args;
    let outputs = usize::from(normed.is_some()) | usize::from(quantised.is_some()) << 1;
    let shape = ShapeBytes::new().uint(rows).uint(columns).float(eps).uint(outputs);
    let ((groups, threads), shared_bytes) = match queue.backend() {
        Backend::Metal => (a_simd_group_each(rows), 0),
        Backend::Cuda => {
            LaunchError::check_limit("the columns of a norm", columns, CUDA_COLUMNS_MAX)?;
            // A thread has four columns, or more where there are too many.
            ((count(rows), count(columns.div_ceil(4).next_multiple_of(32).min(1024))), count(4 * columns))
        }
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "rms_norm",
            bindings: &mut [Binding::Read(x), Binding::Read(weight), optional(normed), optional(quantised)],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes,
        },
        OVERLAP,
    )
}
