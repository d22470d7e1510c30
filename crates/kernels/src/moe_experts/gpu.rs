//! The launches on Metal: activations of every row's picks, their products, the rows' sums.

use super::Args;
use crate::gpu::{THREADS, a_thread_each, groups_of, program};
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes};
use tf_device::{Buffer, LaunchError};

static PROGRAM: Program = program("moe_experts", Some(include_str!("kernel.metal")), true);
/// Inner columns of one SIMD group: a block of QDQ8.
const BLOCK: usize = 32;
/// Outputs of one SIMD group.
const OUTPUTS: usize = 8;
/// Rows of the shared expert that one SIMD group takes.
const TILE_ROWS: usize = 32;

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => metal(queue, args),
        Backend::Cuda => super::cuda::run(queue, args),
    }
}

/// On CUDA with sums in chunks of other lengths than the declared ones.
pub(super) fn run_in_chunks(queue: &mut GpuQueue, args: Args<'_>, chunks: [usize; 2]) -> Result<(), LaunchError> {
    match queue.backend() {
        Backend::Metal => Err(queue.unsupported("moe_experts in chunks")),
        Backend::Cuda => super::cuda::run_in_chunks(queue, args, chunks),
    }
}

fn metal(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let (pairs, hidden) = (args.rows * (args.picks + 1), args.weights.hidden());
    let values = pairs * args.weights.intermediate().max(hidden);
    LaunchError::check_limit("the experts' values of all rows", values, u32::MAX as usize)?;
    let mut activations = queue.take_scratch("moe_experts", pairs * args.weights.intermediate() * size_of::<f32>())?;
    let mut products = queue.take_scratch("moe_experts products", pairs * hidden * size_of::<u16>())?;
    let result = passes(queue, args, &mut activations, &mut products);
    queue.keep_scratch("moe_experts", activations);
    queue.keep_scratch("moe_experts products", products);
    result
}

fn passes(
    queue: &mut GpuQueue,
    args: Args<'_>,
    activations: &mut Buffer,
    products: &mut Buffer,
) -> Result<(), LaunchError> {
    let Args { weights, x, rows, picks, selected, routing, limit, out } = args;
    let (hidden, intermediate, count) = (weights.hidden(), weights.intermediate(), weights.experts().len());
    let shared = weights.shared();
    let ((w1, w1_scales), (w3, w3_scales), (w2, w2_scales)) =
        (shared.w1.buffers(), shared.w3.buffers(), shared.w2.buffers());
    // Without picks nobody reads the experts.
    let part = |index: usize| weights.parts().get(index).map_or(Binding::Missing, Binding::Read);
    let shape = ShapeBytes::new().uint(rows).uint(hidden).uint(intermediate).uint(picks).uint(count).uint(TILE_ROWS);
    let shape = shape.float(limit);
    // Candidates for experts, and tiles of the shared one.
    let columns = (rows * picks).min(count) + rows.div_ceil(TILE_ROWS);
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "moe_up",
        bindings: &mut [
            Binding::Read(x),
            Binding::Read(selected),
            Binding::Read(routing),
            part(0),
            part(1),
            Binding::Read(w1),
            Binding::Read(w1_scales),
            Binding::Read(w3),
            Binding::Read(w3_scales),
            Binding::Write(activations),
        ],
        shape: shape.bytes(),
        groups: groups_of(columns * (intermediate / BLOCK)),
        threads: THREADS,
        shared_bytes: 0,
    })?;
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "moe_down",
        bindings: &mut [
            Binding::Read(activations),
            Binding::Read(selected),
            part(0),
            part(1),
            Binding::Read(w2),
            Binding::Read(w2_scales),
            Binding::Write(products),
        ],
        shape: shape.bytes(),
        groups: groups_of(columns * (hidden / OUTPUTS)),
        threads: THREADS,
        shared_bytes: 0,
    })?;
    let (groups, threads) = a_thread_each(rows * hidden);
    queue.launch(Launch {
        program: &PROGRAM,
        entry: "moe_sum",
        bindings: &mut [Binding::Read(products), Binding::Read(selected), Binding::Write(out)],
        shape: shape.bytes(),
        groups,
        threads,
        shared_bytes: 0,
    })
}
