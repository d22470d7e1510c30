use super::cpu::check_row;
use super::{EngramError, GateArgs, GatherArgs};
use crate::gpu::{OVERLAP, a_simd_group_each, count, mark_bytes, marks, program};
use crate::hyper::STREAMS;
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("engram", Some(include_str!("kernel.metal")), true);

/// Rows of the table are gathered by the host, which alone sees the whole of it, and dequantised by the device.
pub(super) fn run_gather(queue: &mut GpuQueue, args: GatherArgs<'_>) -> Result<(), EngramError> {
    let GatherArgs { codes, scales, ids, head_dim, quantise, out, .. } = args;
    let (items, row_scales) = (ids.len(), head_dim / 32);
    let (mut row_codes, mut scale_codes) =
        (Vec::with_capacity(items * head_dim), Vec::with_capacity(items * row_scales));
    for &row in ids {
        check_row(row, codes, scales, head_dim)?;
        row_codes.extend_from_slice(&codes[row as usize * head_dim..][..head_dim]);
        scale_codes.extend_from_slice(&scales[row as usize * row_scales..][..row_scales]);
    }
    let in_order: Vec<u32> = (0..count(items)).collect();
    let shape = ShapeBytes::new().uint(items).uint(head_dim).uint(usize::from(quantise)).float(0.0).uint(0);
    let (groups, threads) = a_simd_group_each(items);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "engram_gather",
            bindings: &mut [
                Binding::Bytes(&row_codes),
                Binding::Bytes(&scale_codes),
                Binding::Bytes(bytes_of(&in_order)),
                Binding::Write(out),
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )?;
    Ok(())
}

pub(super) fn run_gate(queue: &mut GpuQueue, args: GateArgs<'_>) -> Result<(), LaunchError> {
    let GateArgs { streams, kv, q_weight, k_weight, eps, image, rows, hidden } = args;
    let image = mark_bytes(if image.contains(&true) { image } else { &[] });
    let has_images = usize::from(!image.is_empty());
    let items = rows * STREAMS;
    let shape = ShapeBytes::new().uint(items).uint(hidden).uint(0).float(eps).uint(has_images);
    let (groups, threads) = match queue.backend() {
        Backend::Metal => a_simd_group_each(items),
        Backend::Cuda => (count(items), 256),
    };
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "engram_gate",
            bindings: &mut [
                Binding::Write(streams),
                Binding::Read(kv),
                Binding::Read(q_weight),
                Binding::Read(k_weight),
                marks(&image),
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}
