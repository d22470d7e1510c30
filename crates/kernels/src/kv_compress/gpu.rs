use super::Args;
use crate::gpu::{OVERLAP, a_simd_group_each, count, program};
use tf_device::LaunchError;
use tf_device::gpu::{Backend, Binding, GpuQueue, Launch, Program, ShapeBytes, bytes_of};

static PROGRAM: Program = program("kv_compress", Some(include_str!("kernel.metal")), true);

pub(super) fn run(queue: &mut GpuQueue, args: Args<'_>) -> Result<(), LaunchError> {
    let Args { raw, rows, windows, entries, ratio, norm, eps, frequencies, head_dim, mut raw_ring, raw_len, .. } = args;
    let Args { cache, pages, latents, .. } = args;
    let shape_of = |items: usize| {
        let sizes = ShapeBytes::new().uint(items).uint(ratio as usize).uint(head_dim).uint(2 * frequencies.len());
        sizes.uint(raw_len).uint(pages.pages_per_slot).uint(pages.entries_per_page).float(eps)
    };
    let (groups, threads) = match queue.backend() {
        Backend::Metal => a_simd_group_each(entries.len()),
        Backend::Cuda => (count(entries.len()), count((head_dim / 4).next_multiple_of(32))),
    };
    let (row_bytes, window_bytes) = (Binding::Bytes(bytes_of(rows)), Binding::Bytes(bytes_of(windows)));
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "kv_compress",
            bindings: &mut [
                Binding::Read(raw),
                raw_ring.as_deref().map_or(Binding::Missing, Binding::Read),
                row_bytes,
                window_bytes,
                Binding::Bytes(bytes_of(entries)),
                Binding::Bytes(bytes_of(pages.table)),
                Binding::Read(norm),
                Binding::Bytes(bytes_of(frequencies)),
                Binding::Write(cache),
                Binding::Write(latents),
            ],
            shape: shape_of(entries.len()).bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )?;
    let Some(raw_ring) = raw_ring.take().filter(|_| ratio == 2) else {
        return Ok(());
    };
    let (groups, threads) = a_simd_group_each(rows.len());
    queue.launch_tuned(
        Launch {
            program: &PROGRAM,
            entry: "kv_keep_raw",
            bindings: &mut [
                Binding::Read(raw),
                Binding::Write(raw_ring),
                Binding::Bytes(bytes_of(rows)),
                Binding::Bytes(bytes_of(windows)),
            ],
            shape: shape_of(rows.len()).bytes(),
            groups,
            threads,
            shared_bytes: 0,
        },
        OVERLAP,
    )
}
