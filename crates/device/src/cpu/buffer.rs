//! Aligned memory that is zero at first; large buffers become resident only where they are touched.

use crate::{Element, LaunchError};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Alignment of every buffer: one cache line, one 512-bit vector.
const ALIGNMENT: usize = 64;
/// Bytes before and after a guarded block whose pattern is watched.
const GUARD_BYTES: usize = 256;
const _: () = assert!(GUARD_BYTES.is_multiple_of(ALIGNMENT));
/// From this size on memory comes straight from the system, whose pages are zero and appear on first touch.
const MAPPED_FROM_BYTES: usize = 1 << 20;

static HELD_BYTES: AtomicU64 = AtomicU64::new(0);

/// An owned, 64-byte aligned block of `len_bytes` bytes.
pub struct CpuBuffer {
    start: NonNull<u8>,
    len_bytes: usize,
    owner: Owner,
}

/// How the memory was taken, and so how it goes back.
#[derive(Clone, Copy, Debug)]
enum Owner {
    /// Nothing was taken: the buffer is empty.
    Nobody,
    Allocator(Layout),
    /// As `Allocator`, the block lying `GUARD_BYTES` inside it, with a known pattern on both sides.
    Guarded {
        layout: Layout,
        pattern: u8,
    },
    #[cfg(unix)]
    System {
        mapped_bytes: usize,
    },
}

// SAFETY: the block is owned like a `Box<[u8]>`; shared references only read it.
unsafe impl Send for CpuBuffer {}
// SAFETY: as above.
unsafe impl Sync for CpuBuffer {}

impl CpuBuffer {
    /// Bytes of all buffers of this process, touched or not.
    pub fn held_bytes() -> u64 {
        HELD_BYTES.load(Ordering::Relaxed)
    }

    /// The only place where a buffer begins, so that none is counted twice.
    fn own(start: NonNull<u8>, len_bytes: usize, owner: Owner) -> CpuBuffer {
        HELD_BYTES.fetch_add(len_bytes as u64, Ordering::Relaxed);
        CpuBuffer { start, len_bytes, owner }
    }

    /// `len_bytes` zero bytes.
    ///
    /// # Errors
    /// [`LaunchError::Memory`] when the system refuses.
    pub fn zeroed(len_bytes: usize) -> Result<CpuBuffer, LaunchError> {
        let refused = LaunchError::Memory { bytes: len_bytes };
        if len_bytes == 0 {
            let start = NonNull::new(std::ptr::without_provenance_mut(ALIGNMENT)).expect("the alignment is not zero");
            return Ok(CpuBuffer::own(start, len_bytes, Owner::Nobody));
        }
        #[cfg(unix)]
        if len_bytes >= MAPPED_FROM_BYTES {
            return map(len_bytes).ok_or(refused);
        }
        let Some(padded) = len_bytes.checked_next_multiple_of(ALIGNMENT) else { return Err(refused) };
        let Ok(layout) = Layout::from_size_align(padded, ALIGNMENT) else { return Err(refused) };
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(refused)?;
        Ok(CpuBuffer::own(start, len_bytes, Owner::Allocator(layout)))
    }

    /// `len_bytes` zero bytes between two guards of `pattern` bytes, which directly precede and follow them.
    ///
    /// # Errors
    /// As [`CpuBuffer::zeroed`].
    pub fn guarded(len_bytes: usize, pattern: u8) -> Result<CpuBuffer, LaunchError> {
        let refused = LaunchError::Memory { bytes: len_bytes };
        let Some(whole) = len_bytes.checked_add(2 * GUARD_BYTES) else { return Err(refused) };
        let Ok(layout) = Layout::from_size_align(whole, ALIGNMENT) else { return Err(refused) };
        // SAFETY: the layout's size is not zero.
        let block = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(refused)?;
        // SAFETY: the block holds a guard, `len_bytes` bytes and another guard.
        let start = unsafe {
            block.write_bytes(pattern, GUARD_BYTES);
            block.add(GUARD_BYTES + len_bytes).write_bytes(pattern, GUARD_BYTES);
            block.add(GUARD_BYTES)
        };
        Ok(CpuBuffer::own(start, len_bytes, Owner::Guarded { layout, pattern }))
    }

    /// Where the first overwritten guard byte lies, counted from the buffer's first byte. `None` without guards too.
    pub fn guard_damage(&self) -> Option<isize> {
        let Owner::Guarded { pattern, .. } = self.owner else { return None };
        // SAFETY: `guarded` allocated and wrote a guard on both sides; nobody holds a reference into them.
        let (before, after) = unsafe {
            let before = std::slice::from_raw_parts(self.start.as_ptr().sub(GUARD_BYTES), GUARD_BYTES);
            (before, std::slice::from_raw_parts(self.start.as_ptr().add(self.len_bytes), GUARD_BYTES))
        };
        let damaged = |guard: &[u8]| guard.iter().position(|byte| *byte != pattern);
        let before = damaged(before).map(|at| at as isize - GUARD_BYTES as isize);
        before.or_else(|| damaged(after).map(|at| (self.len_bytes + at) as isize))
    }

    /// Overwrites the guard byte next to the block, so that a check of guards can be checked. Nothing without guards.
    pub fn break_guard(&mut self, before: bool) {
        if let Owner::Guarded { pattern, .. } = self.owner {
            // SAFETY: both bytes lie in the guards that `guarded` allocated.
            unsafe {
                let at = if before { self.start.as_ptr().sub(1) } else { self.start.as_ptr().add(self.len_bytes) };
                at.write(!pattern);
            }
        }
    }

    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The whole buffer as elements of `T`; see [`crate::Buffer::view`].
    pub fn view<T: Element>(&self) -> &[T] {
        // SAFETY: the block holds `count` elements (`count_of`), is aligned to 64, initialised, and valid as any `T`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.count_of::<T>()) }
    }

    /// As [`CpuBuffer::view`], for writing.
    pub fn view_mut<T: Element>(&mut self) -> &mut [T] {
        // SAFETY: as in `view`; `&mut self` makes it the only view.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.count_of::<T>()) }
    }

    fn count_of<T: Element>(&self) -> usize {
        const { assert!(align_of::<T>() <= ALIGNMENT) };
        assert!(
            self.len_bytes.is_multiple_of(size_of::<T>()),
            "a buffer of {} bytes is viewed as elements of {} bytes",
            self.len_bytes,
            size_of::<T>()
        );
        self.len_bytes / size_of::<T>()
    }
}

#[cfg(unix)]
fn map(len_bytes: usize) -> Option<CpuBuffer> {
    // SAFETY: a new private anonymous mapping touches no memory of ours.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANON,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return None;
    }
    #[cfg(target_os = "linux")]
    // SAFETY: the range was just mapped; the advice changes speed only, so its failure is no failure.
    unsafe {
        libc::madvise(address, len_bytes, libc::MADV_HUGEPAGE);
    }
    Some(CpuBuffer::own(NonNull::new(address.cast())?, len_bytes, Owner::System { mapped_bytes: len_bytes }))
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        HELD_BYTES.fetch_sub(self.len_bytes as u64, Ordering::Relaxed);
        match self.owner {
            Owner::Nobody => {}
            // SAFETY: `start` came from `alloc_zeroed` with this layout and is given back once.
            Owner::Allocator(layout) => unsafe { dealloc(self.start.as_ptr(), layout) },
            // SAFETY: the block begins one guard before `start`; it came from `alloc_zeroed` with this layout.
            Owner::Guarded { layout, .. } => unsafe { dealloc(self.start.as_ptr().sub(GUARD_BYTES), layout) },
            #[cfg(unix)]
            // SAFETY: `start` came from `mmap` with this length and is given back once.
            Owner::System { mapped_bytes } => unsafe {
                libc::munmap(self.start.as_ptr().cast(), mapped_bytes);
            },
        }
    }
}

impl std::fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CpuBuffer({} bytes)", self.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::CpuBuffer;
    use crate::{Buffer, Device, LaunchError};

    #[test]
    fn buffers_are_zero_aligned_and_as_long_as_asked() {
        for bytes in [0, 4, 60, 64, 4096, (1 << 20) - 4, 1 << 20, (1 << 20) + 4, 5 << 20] {
            let mut buffer = Buffer::zeroed(&Device::cpu(), bytes).unwrap();
            assert_eq!(buffer.len_bytes(), bytes);
            assert_eq!(buffer.u8().len(), bytes);
            assert_eq!(buffer.f32().len(), bytes / 4);
            assert_eq!(buffer.u8().as_ptr() as usize % 64, 0, "{bytes} bytes");
            assert!(buffer.u8().iter().all(|byte| *byte == 0), "{bytes} bytes");
            if let Some(last) = buffer.u32_mut().last_mut() {
                *last = 0x0102_0304;
                assert_eq!(buffer.u8()[bytes - 4..], [4, 3, 2, 1]);
            }
        }
    }

    #[test]
    fn a_buffer_beyond_any_memory_is_an_error() {
        for bytes in [usize::MAX, usize::MAX / 2, 1 << 60] {
            assert_eq!(Buffer::zeroed(&Device::cpu(), bytes).unwrap_err(), LaunchError::Memory { bytes });
        }
    }

    #[test]
    #[should_panic(expected = "viewed as elements of 4 bytes")]
    fn a_view_of_the_wrong_type_is_a_bug() {
        let _ = Buffer::zeroed(&Device::cpu(), 6).unwrap().f32();
    }

    #[test]
    fn a_guard_notices_one_byte_on_either_side() {
        for bytes in [0, 4, 64, 100] {
            for (at, damage) in [(-1, Some(-1)), (-64, Some(-64)), (bytes as isize, Some(bytes as isize)), (0, None)] {
                if at == 0 && bytes == 0 {
                    continue;
                }
                let mut buffer = CpuBuffer::guarded(bytes, 0xa5).unwrap();
                assert_eq!(buffer.guard_damage(), None);
                assert!(buffer.view::<u8>().iter().all(|byte| *byte == 0));
                assert_eq!(buffer.view::<u8>().as_ptr() as usize % 64, 0);
                let start = buffer.view_mut::<u8>().as_mut_ptr();
                // SAFETY: the byte lies in the block or in one of its guards.
                unsafe { start.offset(at).write(1) };
                assert_eq!(buffer.guard_damage(), damage, "{bytes} bytes, write at {at}");
            }
        }
    }

    #[test]
    fn a_copy_holds_the_values() {
        let buffer = Buffer::from_slice(&Device::cpu(), &[1.5f32, -0.0, 3.0]).unwrap();
        assert_eq!(
            buffer.f32().iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
            [0x3fc0_0000, 0x8000_0000, 0x4040_0000]
        );
        let small = Buffer::from_slice(&Device::cpu(), &[1u8, 2, 3]).unwrap();
        assert_eq!(small.u8(), [1, 2, 3]);
    }
}
