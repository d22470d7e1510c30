//! One output that several threads write, each its own ranges.

use std::marker::PhantomData;
use std::ops::Range;

/// A borrowed `&mut [T]` that threads of one launch may share, each writing ranges no other touches.
pub struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: a shared `Parts` hands out ranges only through `part`, whose caller promises that they are disjoint.
unsafe impl<T: Send> Sync for Parts<'_, T> {}
// SAFETY: as a `&mut [T]`, which is `Send` where `T` is.
unsafe impl<T: Send> Send for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub fn new(values: &'a mut [T]) -> Parts<'a, T> {
        Parts { start: values.as_mut_ptr(), len: values.len(), owner: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first element, for kernels whose ranges have gaps. What [`Parts::part`] asks holds for each element written.
    pub fn as_ptr(&self) -> *mut T {
        self.start
    }

    /// Elements `range`, for writing.
    ///
    /// # Safety
    /// No two ranges that are alive at the same time may overlap, in this thread or in any other.
    ///
    /// # Panics
    /// When `range` ends beyond the output.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end);
        assert!(range.end <= self.len);
        // SAFETY: the range lies inside the borrowed slice (asserted above) and is this caller's alone (its promise).
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }

    /// Writes one element.
    ///
    /// # Safety
    /// As [`Parts::part`], for the range of this one element.
    #[inline(always)]
    pub unsafe fn write(&self, index: usize, value: T) {
        assert!(index < self.len);
        // SAFETY: the index lies inside the borrowed slice (asserted above) and is this caller's alone (its promise).
        unsafe { self.start.add(index).write(value) }
    }
}
