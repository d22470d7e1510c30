//! Device memory of a fixed length.

use super::error::{CudaError, check};
use super::gpu::{Context, Gpu};
use cudarc::driver::sys;
use std::sync::Arc;

/// Bytes on a GPU, zero at first, aligned to 256.
#[derive(Debug)]
pub struct GpuBuffer {
    address: sys::CUdeviceptr,
    bytes: usize,
    inner: Arc<Context>,
}

impl GpuBuffer {
    /// `bytes` zero bytes.
    ///
    /// # Errors
    /// [`CudaError::Memory`] with the figures when they are not free.
    pub fn zeroed(gpu: &Gpu, bytes: usize) -> Result<GpuBuffer, CudaError> {
        gpu.inner.enter()?;
        let mut address = 0;
        let length = bytes.max(1);
        // SAFETY: writes one address; freed in `drop`.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, length) };
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (name, needed, total) = (gpu.name.clone(), bytes as u64, gpu.memory_bytes);
            return Err(CudaError::Memory { name, needed, free: gpu.free_bytes()?, total });
        }
        check("cuMemAlloc", result)?;
        let buffer = GpuBuffer { address, bytes, inner: gpu.inner.clone() };
        // SAFETY: the range was just allocated, with `length` bytes.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, 0, length, gpu.inner.stream) })?;
        gpu.finish()?;
        Ok(buffer)
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// As [`GpuBuffer::zeroed`].
    pub fn from_slice<T: crate::Element>(gpu: &Gpu, values: &[T]) -> Result<GpuBuffer, CudaError> {
        let mut buffer = GpuBuffer::zeroed(gpu, size_of_val(values))?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// For a kernel's argument.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Copies `values` to byte `offset`, after everything launched before.
    ///
    /// # Errors
    /// [`CudaError::Range`] when they do not fit.
    pub fn write<T: crate::Element>(&mut self, offset: usize, values: &[T]) -> Result<(), CudaError> {
        let found = self.check_range(offset, size_of_val(values))?;
        self.inner.enter()?;
        let to = self.address + offset as u64;
        // SAFETY: the range lies in the buffer, checked above, and the source is a slice of that many bytes.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, values.as_ptr().cast(), found, self.inner.stream)
        })?;
        self.finish()
    }

    /// Copies bytes from `offset` on into `values`, after everything launched before.
    ///
    /// # Errors
    /// [`CudaError::Range`] when the buffer is shorter.
    pub fn read<T: crate::Element>(&self, offset: usize, values: &mut [T]) -> Result<(), CudaError> {
        let found = self.check_range(offset, size_of_val(values))?;
        self.inner.enter()?;
        let from = self.address + offset as u64;
        // SAFETY: as in `write`, the other way; any bit pattern is a value of an `Element`.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), from, found, self.inner.stream)
        })?;
        self.finish()
    }

    /// Repeats the first `period` bytes over the whole buffer.
    ///
    /// # Errors
    /// [`CudaError::Range`] when the period is 0 or longer than the buffer.
    pub fn repeat(&mut self, period: usize) -> Result<(), CudaError> {
        self.check_range(0, period.max(1))?;
        self.inner.enter()?;
        let mut filled = period;
        while filled < self.bytes {
            let count = filled.min(self.bytes - filled);
            // SAFETY: source and target are disjoint ranges of the buffer.
            check("cuMemcpyDtoDAsync", unsafe {
                sys::cuMemcpyDtoDAsync_v2(self.address + filled as u64, self.address, count, self.inner.stream)
            })?;
            filled += count;
        }
        self.finish()
    }

    fn finish(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as `inner`.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.inner.stream) })
    }

    fn check_range(&self, offset: usize, found: usize) -> Result<usize, CudaError> {
        if offset.checked_add(found).is_some_and(|end| end <= self.bytes) {
            Ok(found)
        } else {
            Err(CudaError::Range { offset, found, length: self.bytes })
        }
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        if self.inner.enter().is_ok() {
            // SAFETY: allocated in `zeroed` and freed once; the driver waits for kernels that still use it.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}
