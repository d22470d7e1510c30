//! What the GPU launchers of the linears share.

use super::Finish;
use crate::gpu::{THREADS, groups_of, program};
use crate::quantise::BLOCK;
use tf_device::gpu::{Binding, GpuQueue, Launch, Program, ShapeBytes};
use tf_device::{Buffer, LaunchError};

/// The rounding behind a linear, as a launch of its own: a linear gives each output to another SIMD group, a block of QDQ8 is
/// 32 outputs.
static QUANTISE: Program = program("quantise", Some(include_str!("../quantise/kernel.metal")), true);

/// Whether the kernel rounds its sums to bf16.
pub(crate) fn rounds(finish: Finish) -> usize {
    usize::from(finish != Finish::F32)
}

/// QDQ8 of `[rows, columns]` bf16 values in place, where the finish asks for it.
pub(crate) fn finish_metal(
    queue: &mut GpuQueue,
    out: &mut Buffer,
    rows: usize,
    columns: usize,
    finish: Finish,
) -> Result<(), LaunchError> {
    if finish != Finish::Qdq8 {
        return Ok(());
    }
    queue.launch(Launch {
        program: &QUANTISE,
        entry: "quantise_in_place",
        bindings: &mut [Binding::Write(out)],
        shape: ShapeBytes::new().uint(rows).uint(columns).bytes(),
        groups: groups_of(rows * columns.div_ceil(BLOCK)),
        threads: THREADS,
        shared_bytes: 0,
    })
}
