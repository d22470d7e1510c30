//! What the GPU launchers of the families share: how a program is named, and the metadata that kernels read as it is.

use crate::rows::{EntryInfo, RowInfo, WindowInfo};
use tf_device::gpu::{Plain, Program};

/// Texts that the Metal sources include.
pub const METAL_INCLUDES: &[(&str, &str)] = &[
    ("prelude.metal", include_str!("shared/prelude.metal")),
    ("linear.metal", include_str!("shared/linear.metal")),
    ("draw.metal", include_str!("shared/draw.metal")),
];

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
