//! Host bytes on their way to the device: pinned memory that is copied in the order of the stream.
//!
//! Two halves take turns. A half is written again only after everything that was launched while it was in use is done, so
//! neither a copy nor a kernel can see the bytes of a later launch. Equal slices of a half are copied once.

use super::error::{CudaError, check};
use super::gpu::{Context, Gpu};
use super::graph::Event;
use cudarc::driver::sys;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ptr::NonNull;
use std::sync::Arc;

const HALF_BYTES: usize = 4 << 20;
/// Of every staged slice, so that kernels may read it in vectors.
const ALIGNMENT: usize = 256;

#[derive(Debug)]
pub(super) struct Staging {
    memory: Memory,
    half_bytes: usize,
    /// 0 or 1.
    half: usize,
    /// Bytes used of the current half.
    used: usize,
    /// When the other half was left, if it has been used.
    left: Option<Event>,
    /// Slices of the current half: where they begin, by the hash of their bytes.
    known: HashMap<u64, (usize, usize)>,
}

/// As many bytes pinned on the host as on the device.
#[derive(Debug)]
struct Memory {
    host: NonNull<u8>,
    device: sys::CUdeviceptr,
    inner: Arc<Context>,
}

// SAFETY: the host block is owned by this value and reached through `&mut` only; the rest are the driver's handles.
unsafe impl Send for Memory {}

impl Memory {
    fn new(gpu: &Gpu, bytes: usize) -> Result<Memory, CudaError> {
        gpu.inner.enter()?;
        let mut host = std::ptr::null_mut();
        // SAFETY: writes one address; freed in `drop`.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut host, bytes, 0) })?;
        let mut device = 0;
        // SAFETY: as above.
        let result = check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut device, bytes) });
        let block = NonNull::new(host.cast()).filter(|_| result.is_ok());
        let Some(host) = block else {
            // SAFETY: allocated above and used by nobody.
            unsafe { sys::cuMemFreeHost(host) };
            result?;
            return Err(CudaError::Memory {
                name: gpu.name.clone(),
                needed: bytes as u64,
                free: gpu.free_bytes()?,
                total: gpu.memory_bytes,
            });
        };
        Ok(Memory { host, device, inner: gpu.inner.clone() })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.inner.enter().is_ok() {
            // SAFETY: allocated in `new` and freed once, after everything that reads them.
            unsafe {
                sys::cuStreamSynchronize(self.inner.stream);
                sys::cuMemFreeHost(self.host.as_ptr().cast());
                sys::cuMemFree_v2(self.device);
            }
        }
    }
}

impl Staging {
    pub fn new(gpu: &Gpu) -> Result<Staging, CudaError> {
        Staging::of(gpu, HALF_BYTES)
    }

    fn of(gpu: &Gpu, half_bytes: usize) -> Result<Staging, CudaError> {
        let memory = Memory::new(gpu, 2 * half_bytes)?;
        Ok(Staging { memory, half_bytes, half: 0, used: 0, left: None, known: HashMap::new() })
    }

    /// Copies the slices of one launch, which follows at once; returns their addresses on the device.
    pub fn stage<'s>(
        &mut self,
        gpu: &Gpu,
        slices: impl Iterator<Item = &'s [u8]> + Clone,
    ) -> Result<Vec<u64>, CudaError> {
        let needed = slices.clone().map(|slice| slice.len().next_multiple_of(ALIGNMENT)).sum();
        self.make_room(gpu, needed)?;
        let (first, mut addresses) = (self.used, Vec::new());
        for slice in slices {
            let at = match self.find(slice) {
                Some(at) => at,
                None => self.place(slice),
            };
            addresses.push(self.memory.device + (self.half * self.half_bytes + at) as u64);
        }
        self.copy(gpu, first, self.used - first, None)?;
        Ok(addresses)
    }

    /// Copies `bytes` to an address, in the order of the stream.
    pub fn write(&mut self, gpu: &Gpu, bytes: &[u8], to: u64) -> Result<(), CudaError> {
        self.make_room(gpu, bytes.len().next_multiple_of(ALIGNMENT))?;
        let at = self.append(bytes);
        self.copy(gpu, at, bytes.len(), Some(to))
    }

    fn make_room(&mut self, gpu: &Gpu, needed: usize) -> Result<(), CudaError> {
        if needed > self.half_bytes {
            gpu.finish()?;
            *self = Staging::of(gpu, needed.next_power_of_two())?;
        }
        if self.used + needed <= self.half_bytes {
            return Ok(());
        }
        let left = gpu.event()?;
        if let Some(before) = self.left.replace(left) {
            before.wait()?;
        }
        self.half = 1 - self.half;
        self.used = 0;
        self.known.clear();
        Ok(())
    }

    fn find(&self, slice: &[u8]) -> Option<usize> {
        let (at, length) = *self.known.get(&hash(slice))?;
        let start = self.half * self.half_bytes + at;
        // SAFETY: the range was written in `append`, in the same half; nobody else writes there.
        let known = unsafe { std::slice::from_raw_parts(self.memory.host.as_ptr().add(start), length) };
        (known == slice).then_some(at)
    }

    fn place(&mut self, slice: &[u8]) -> usize {
        let at = self.append(slice);
        self.known.insert(hash(slice), (at, slice.len()));
        at
    }

    fn append(&mut self, slice: &[u8]) -> usize {
        let at = self.used;
        let start = self.half * self.half_bytes + at;
        // SAFETY: `make_room` has left that many bytes in this half, which nothing reads any more.
        unsafe { self.memory.host.as_ptr().add(start).copy_from_nonoverlapping(slice.as_ptr(), slice.len()) };
        self.used += slice.len().next_multiple_of(ALIGNMENT);
        at
    }

    /// From the current half to the same place on the device, or to `to`.
    fn copy(&self, gpu: &Gpu, at: usize, bytes: usize, to: Option<u64>) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        gpu.inner.enter()?;
        let start = self.half * self.half_bytes + at;
        let to = to.unwrap_or(self.memory.device + start as u64);
        // SAFETY: the source lies in the pinned block and stays as it is until the stream has passed this point.
        check("cuMemcpyHtoDAsync", unsafe {
            let from = self.memory.host.as_ptr().add(start).cast();
            sys::cuMemcpyHtoDAsync_v2(to, from, bytes, gpu.inner.stream)
        })
    }
}

fn hash(slice: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    slice.hash(&mut hasher);
    hasher.finish()
}
