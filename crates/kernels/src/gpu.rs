//! What the GPU launchers of the families share: how a program is named, and the metadata that kernels read as it is.

use crate::rows::{EntryInfo, RowInfo, WindowInfo};
use tf_device::Buffer;
use tf_device::gpu::{Binding, Plain, Program, Tuning};

/// The Metal text that every source includes.
pub const PRELUDE: &str = include_str!("shared/prelude.metal");
/// The Metal text of the dot products.
pub const LINEAR: &str = include_str!("shared/linear.metal");
/// The Metal text of the draw.
pub const DRAW: &str = include_str!("shared/draw.metal");

/// Texts that the Metal sources include.
pub const METAL_INCLUDES: &[(&str, &str)] =
    &[("prelude.metal", PRELUDE), ("linear.metal", LINEAR), ("draw.metal", DRAW)];

/// Threads of a group where a kernel gives every SIMD group an item of its own: any multiple of 32 gives the same bits.
pub const THREADS: u32 = 256;

/// Groups of [`THREADS`] threads that `items` SIMD groups need.
pub fn groups_of(items: usize) -> u32 {
    u32::try_from(items.div_ceil(THREADS as usize / 32)).unwrap_or(u32::MAX)
}

/// The program of a family: its folder's name, the text of its `kernel.metal`, and whether it has a `kernel.cu`.
pub const fn program(name: &'static str, metal: Option<&'static str>, cuda: bool) -> Program {
    Program { name, metal, metal_includes: METAL_INCLUDES, cuda }
}

/// How the families beside the linears are launched: an entry may start while the launch before it ends, and waits itself before
/// it touches what that one reads or writes.
pub(crate) const OVERLAP: Tuning = Tuning { cluster: 1, overlap: true };

/// A count as a launch takes it; what does not fit is refused there, as beyond every limit.
pub(crate) fn count(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// Groups and threads of a launch with one thread an item.
pub(crate) fn a_thread_each(items: usize) -> (u32, u32) {
    (count(items.div_ceil(256)), 256)
}

/// Groups and threads of a launch with one SIMD group (warp) an item: few items are spread over the device.
pub(crate) fn a_simd_group_each(items: usize) -> (u32, u32) {
    let in_group = if items <= 256 { 1 } else { 4 };
    (count(items.div_ceil(in_group)), 32 * count(in_group))
}

/// An output that may be left out. The kernel is told by a flag of its shape.
pub(crate) fn optional(buffer: Option<&mut Buffer>) -> Binding<'_> {
    buffer.map_or(Binding::Missing, Binding::Write)
}

/// Marks of rows as bytes.
pub(crate) fn mark_bytes(marks: &[bool]) -> Vec<u8> {
    marks.iter().map(|mark| u8::from(*mark)).collect()
}

/// Marks as a kernel reads them, left out where there are none.
pub(crate) fn marks(bytes: &[u8]) -> Binding<'_> {
    if bytes.is_empty() { Binding::Missing } else { Binding::Bytes(bytes) }
}

// SAFETY: three u32 in declared order.
unsafe impl Plain for RowInfo {}
// SAFETY: four u32 in declared order.
unsafe impl Plain for WindowInfo {}
// SAFETY: three u32 in declared order.
unsafe impl Plain for EntryInfo {}

#[cfg(test)]
mod tests {
    use crate::rows::{EntryInfo, RowInfo, WindowInfo};
    use tf_device::gpu::bytes_of;

    #[test]
    fn metadata_is_words_in_the_declared_order() {
        let row = RowInfo { slot: 1, position: 2, window: 3 };
        let window = WindowInfo { slot: 1, start: 2, first_row: 3, row_count: 4 };
        let entry = EntryInfo { slot: 1, entry: 2, row: 3 };
        let words = |count: u32| (1..=count).flat_map(u32::to_ne_bytes).collect::<Vec<u8>>();
        assert_eq!(bytes_of(&[row]), words(3));
        assert_eq!(bytes_of(&[window]), words(4));
        assert_eq!(bytes_of(&[entry]), words(3));
    }
}
