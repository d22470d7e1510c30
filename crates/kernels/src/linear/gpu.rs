//! What the GPU launchers of the linears share.

use super::Finish;
use crate::quantise::{self, ArgsInPlace};
use tf_device::gpu::GpuQueue;
use tf_device::{Buffer, LaunchError};

/// Whether the kernel rounds its sums to bf16.
pub(crate) fn rounds(finish: Finish) -> usize {
    usize::from(finish != Finish::F32)
}

/// QDQ8 of `[rows, columns]` bf16 values in place, where the finish asks for it. A launch of its own: a linear gives each
/// output to another SIMD group, a block of QDQ8 is 32 outputs.
pub(crate) fn quantise_where_asked(
    queue: &mut GpuQueue,
    out: &mut Buffer,
    rows: usize,
    columns: usize,
    finish: Finish,
) -> Result<(), LaunchError> {
    match finish {
        Finish::Qdq8 => quantise::gpu::run_in_place(queue, ArgsInPlace { values: out, rows, columns }),
        Finish::F32 | Finish::Bf16 => Ok(()),
    }
}
