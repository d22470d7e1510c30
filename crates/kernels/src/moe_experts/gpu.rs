//! The launches on a GPU: activations of every row's picks, then their sums.

use super::Args;
use crate::gpu::{THREADS, groups_of, program};
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes};
use tf_device::{Buffer, LaunchError};

static PROGRAM: Program = program("moe_experts", Some(include_str!("kernel.metal")), true);
/// Inner columns of one SIMD group: a block of QDQ8.
const BLOCK: usize = 32;

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => metal(queue, args),
        Backend::Cuda => super::cuda::run(queue, args),
    }
}

fn metal(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let bytes = args.rows * (args.picks + 1) * args.weights.intermediate() * size_of::<f32>();
    let mut activations = queue.take_scratch("moe_experts", bytes)?;
    let result = passes(queue, args, &mut activations);
    queue.keep_scratch("moe_experts", activations);
    result
}

fn passes(queue: &mut GpuQueue, args: Args<'_>, activations: &mut Buffer) -> Result<(), LaunchError> {
    let Args { weights, x, rows, picks, selected, routing, limit, out } = args;
    let (hidden, intermediate) = (weights.hidden(), weights.intermediate());
    let shared = weights.shared();
    let ((w1, w1_scales), (w3, w3_scales), (w2, w2_scales)) =
        (shared.w1.buffers(), shared.w3.buffers(), shared.w2.buffers());
    // Without picks nobody reads the experts.
    let experts = || weights.parts().first().map_or(Binding::Missing, Binding::Read);
    let shape = ShapeBytes::new().uint(rows).uint(hidden).uint(intermediate).uint(picks).float(limit);
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "moe_up",
        bindings: &mut [
            Binding::Read(x),
            Binding::Read(selected),
            Binding::Read(routing),
            experts(),
            Binding::Read(w1),
            Binding::Read(w1_scales),
            Binding::Read(w3),
            Binding::Read(w3_scales),
            Binding::Write(activations),
        ],
        shape: shape.bytes(),
        groups: groups_of(rows * (picks + 1) * (intermediate / BLOCK)),
        threads: THREADS,
        shared_bytes: 0,
    })?;
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "moe_down",
        bindings: &mut [
            Binding::Read(activations),
            Binding::Read(selected),
            experts(),
            Binding::Read(w2),
            Binding::Read(w2_scales),
            Binding::Write(out),
        ],
        shape: shape.bytes(),
        groups: groups_of(rows * hidden),
        threads: THREADS,
        shared_bytes: 0,
    })
}
