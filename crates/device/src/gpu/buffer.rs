//! Memory of a GPU.

use super::{Block, Driver, GpuDevice, Span};
use crate::{HostBytes, LaunchError, gpu::bytes_of};
use std::sync::Arc;

/// Bytes before and after a guarded block whose pattern is watched; keeps the block's alignment.
const GUARD_BYTES: usize = 256;

/// Bytes on a GPU, zero at first, aligned to 256; given back when it goes.
#[derive(Debug)]
pub struct GpuBuffer {
    block: Block,
    /// Where the buffer starts in the block: behind the guard, if there is one.
    first: usize,
    len_bytes: usize,
    guard: Option<u8>,
    /// Whether the block lies over host memory.
    is_mapped: bool,
    driver: Arc<dyn Driver>,
}

impl GpuBuffer {
    /// `len_bytes` zero bytes.
    ///
    /// # Errors
    /// [`LaunchError::DeviceMemory`] with the figures.
    pub fn zeroed(device: &GpuDevice, len_bytes: usize) -> Result<GpuBuffer, LaunchError> {
        let driver = device.driver().clone();
        let block = driver.allocate(len_bytes.max(1))?;
        Ok(GpuBuffer { block, first: 0, len_bytes, guard: None, is_mapped: false, driver })
    }

    /// A buffer over host bytes that stay where they are, which nothing may write; `None` where the device needs a copy or
    /// nobody keeps them in place. `element_bytes`: of what kernels read there.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    pub fn mapped(
        device: &GpuDevice,
        host: &HostBytes<'_>,
        element_bytes: usize,
    ) -> Result<Option<GpuBuffer>, LaunchError> {
        let driver = device.driver().clone();
        let len_bytes = host.bytes().len();
        let mapped = driver.map(host, element_bytes)?;
        Ok(mapped.map(|(block, first)| GpuBuffer { block, first, len_bytes, guard: None, is_mapped: true, driver }))
    }

    /// Whether it lies over host memory that nothing may write.
    pub fn is_mapped(&self) -> bool {
        self.is_mapped
    }

    /// As [`crate::Buffer::guarded`].
    ///
    /// # Errors
    /// As [`GpuBuffer::zeroed`].
    pub fn guarded(device: &GpuDevice, len_bytes: usize, pattern: u8) -> Result<GpuBuffer, LaunchError> {
        let driver = device.driver().clone();
        let whole = len_bytes.checked_add(2 * GUARD_BYTES).ok_or(LaunchError::Memory { bytes: len_bytes })?;
        let block = driver.allocate(whole)?;
        let buffer = GpuBuffer { block, first: GUARD_BYTES, len_bytes, guard: Some(pattern), is_mapped: false, driver };
        for first in [0, GUARD_BYTES + len_bytes] {
            buffer.driver.write(Span { block, first, bytes: GUARD_BYTES }, &[pattern; GUARD_BYTES])?;
        }
        Ok(buffer)
    }

    /// Bytes of the buffer, without guards.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// As [`GpuBuffer::span`], to be written.
    ///
    /// # Panics
    /// As [`GpuBuffer::span`], and when the buffer is mapped.
    pub fn span_mut(&self, first: usize, bytes: usize) -> Span {
        assert!(!self.is_mapped(), "a mapped buffer is to be written");
        self.span(first, bytes)
    }

    /// Bytes of the buffer in the driver's terms.
    ///
    /// # Panics
    /// When they are not all in the buffer: a bug of the caller.
    pub fn span(&self, first: usize, bytes: usize) -> Span {
        let end = first.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.len_bytes),
            "{bytes} bytes at {first} are beyond a buffer of {} bytes",
            self.len_bytes
        );
        Span { block: self.block, first: self.first + first, bytes }
    }

    /// Whose memory it is.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// As [`crate::Buffer::guard_damage`].
    pub fn guard_damage(&self) -> Option<isize> {
        let pattern = self.guard?;
        let damaged = |first| {
            let mut guard = [0; GUARD_BYTES];
            let read = self.driver.read(Span { block: self.block, first, bytes: GUARD_BYTES }, &mut guard);
            // A device that can't be read any more is as damaged as a guard.
            if read.is_err() { Some(0) } else { guard.iter().position(|byte| *byte != pattern) }
        };
        let before = damaged(0).map(|at| at as isize - GUARD_BYTES as isize);
        before.or_else(|| damaged(GUARD_BYTES + self.len_bytes).map(|at| (self.len_bytes + at) as isize))
    }

    /// As [`crate::cpu::CpuBuffer::break_guard`].
    pub fn break_guard(&mut self, before: bool) {
        if let Some(pattern) = self.guard {
            let first = if before { GUARD_BYTES - 1 } else { GUARD_BYTES + self.len_bytes };
            // A failure leaves the guard whole, which the check of the check reports.
            let _ = self.driver.write(Span { block: self.block, first, bytes: 1 }, bytes_of(&[!pattern]));
        }
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        self.driver.free(self.block);
    }
}
