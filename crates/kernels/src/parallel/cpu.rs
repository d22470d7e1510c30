//! Optional outputs of several threads.

use std::ops::Range;
use tf_device::cpu::Parts;

/// A range of an output that may be left out.
///
/// # Safety
/// As [`Parts::part`].
#[allow(clippy::mut_from_ref)]
#[inline(always)]
pub(crate) unsafe fn part<'a>(parts: &'a Option<Parts<'_, f32>>, range: Range<usize>) -> Option<&'a mut [f32]> {
    match parts {
        // SAFETY: the caller's promise.
        Some(parts) => Some(unsafe { parts.part(range) }),
        None => None,
    }
}
