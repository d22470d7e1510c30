use super::{Args, RingArgs};
use crate::gpu::{OVERLAP, a_simd_group_each, count, program};
use crate::rows::RowInfo;
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("kv_store", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { x, norm, eps, rows, frequencies, head_dim, records } = args;
    let shape = ShapeBytes::new().uint(rows.len()).uint(head_dim).uint(2 * frequencies.len()).uint(0).float(eps);
    let (groups, threads) = a_row_each(queue, rows.len(), head_dim);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "kv_store",
            bindings: &mut [
                Binding::Read(x),
                Binding::Read(norm),
                Binding::Bytes(bytes_of(rows)),
                Binding::Bytes(bytes_of(frequencies)),
                Binding::Write(records),
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

pub(super) fn run_ring(queue: &mut GpuQueue, args: RingArgs<'_>) -> Result<(), LaunchError> {
    let RingArgs { records, windows, head_dim, ring, ring_len } = args;
    // The rows of the windows, which follow each other.
    let mut rows = Vec::new();
    for (window, info) in windows.iter().enumerate() {
        LaunchError::check_shape("a window's first row", info.first_row as usize, rows.len())?;
        rows.extend((0..info.row_count).map(|row| RowInfo {
            slot: info.slot,
            position: info.start + row,
            window: window as u32,
        }));
    }
    let shape = ShapeBytes::new().uint(rows.len()).uint(head_dim).uint(0).uint(ring_len).float(0.0);
    let (groups, threads) = a_row_each(queue, rows.len(), head_dim);
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "kv_store_ring",
            bindings: &mut [
                Binding::Read(records),
                Binding::Write(ring),
                Binding::Bytes(bytes_of(&rows)),
                Binding::Bytes(bytes_of(windows)),
            ],
            shape: shape.bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}

/// A SIMD group a row on Metal, a thread four columns of it on CUDA.
fn a_row_each(queue: &GpuQueue, rows: usize, head_dim: usize) -> (u32, u32) {
    match queue.backend() {
        Backend::Metal => a_simd_group_each(rows),
        Backend::Cuda => (count(rows), count((head_dim / 4).next_multiple_of(32))),
    }
}
