//! Host bytes on their way to the device: pinned memory that is copied in the order of the stream.
//!
//! The device has one block for them, whose places repeat from round to round. The copy into it follows everything that was
//! launched before, so that no kernel can see the bytes of a later round. The pinned memory has two halves, which take
//! turns: one is written again only after the copies out of it are done.

use super::error::{CudaError, check};
use super::gpu::{Context, Gpu};
use super::graph::Event;
use crate::gpu::rounds::Arena;
use cudarc::driver::sys;
use std::ptr::NonNull;
use std::sync::Arc;

const CAPACITY_BYTES: usize = 4 << 20;

#[derive(Debug)]
pub(super) struct Staging {
    memory: Memory,
    arena: Arena,
    /// 0 or 1.
    half: usize,
    /// When each half was left, where copies out of it may still be under way.
    left: [Option<Event>; 2],
}

/// Two halves pinned on the host, and as many bytes as one of them on the device.
#[derive(Debug)]
struct Memory {
    host: NonNull<u8>,
    device: sys::CUdeviceptr,
    half_bytes: usize,
    inner: Arc<Context>,
}

// SAFETY: the host block is owned by this value and reached through `&mut` only; the rest are the driver's handles.
unsafe impl Send for Memory {}

impl Memory {
    fn new(gpu: &Gpu, half_bytes: usize) -> Result<Memory, CudaError> {
        gpu.inner.enter()?;
        let mut host = std::ptr::null_mut();
        // SAFETY: writes one address; freed in `drop`.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut host, 2 * half_bytes, 0) })?;
        let mut device = 0;
        // SAFETY: as above.
        let result = check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut device, half_bytes) });
        let block = NonNull::new(host.cast::<u8>()).filter(|_| result.is_ok());
        let Some(host) = block else {
            // SAFETY: allocated above and used by nobody.
            unsafe { sys::cuMemFreeHost(host) };
            result?;
            return Err(CudaError::Memory {
                name: gpu.name.clone(),
                needed: 2 * half_bytes as u64,
                free: gpu.free_bytes()?,
                total: gpu.memory_bytes,
            });
        };
        // A slice of it may be made at once.
        // SAFETY: the block has that many bytes.
        unsafe { host.as_ptr().write_bytes(0, 2 * half_bytes) };
        Ok(Memory { host, device, half_bytes, inner: gpu.inner.clone() })
    }

    fn half(&mut self, half: usize) -> &mut [u8] {
        debug_assert!(half < 2);
        // SAFETY: the half lies in the block, whose bytes are initialised, and `&mut self` is the only way to it. The device
        // only reads from it.
        unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr().add(half * self.half_bytes), self.half_bytes) }
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
        Staging::of(gpu, CAPACITY_BYTES)
    }

    fn of(gpu: &Gpu, capacity: usize) -> Result<Staging, CudaError> {
        let memory = Memory::new(gpu, capacity)?;
        Ok(Staging { memory, arena: Arena::new(capacity), half: 0, left: [None, None] })
    }

    /// Whether `needed` bytes (see [`Arena::needed`]) can be placed; else [`Staging::turn`] makes room.
    pub fn has_room(&self, needed: usize) -> bool {
        self.arena.has_room(needed)
    }

    /// Begins anew with room for `needed` bytes. Everything placed was given, and the launches that read it too.
    pub fn turn(&mut self, gpu: &Gpu, needed: usize) -> Result<(), CudaError> {
        if needed > self.arena.capacity() {
            gpu.finish()?;
            *self = Staging::of(gpu, needed.next_power_of_two())?;
        }
        if self.arena.is_empty() {
            return Ok(());
        }
        self.left[self.half] = Some(gpu.event()?);
        self.half = 1 - self.half;
        self.arena.clear();
        match self.left[self.half].take() {
            Some(left) => left.wait(),
            None => Ok(()),
        }
    }

    /// Begins anew, after the stream was waited for.
    pub fn rewind(&mut self) {
        self.left = [None, None];
        self.arena.clear();
    }

    /// Places a slice, for which there is room; returns its address on the device, where it is after [`Staging::give`].
    pub fn place(&mut self, slice: &[u8]) -> u64 {
        let at = self.arena.place(self.memory.half(self.half), slice);
        self.memory.device + at as u64
    }

    /// Copies what was placed since the last time, in the order of the stream.
    pub fn give(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        let new = self.arena.take_new();
        let to = self.memory.device + new.start as u64;
        self.copy(gpu, new, to)
    }

    /// Copies `bytes`, for which there is room, to an address in the order of the stream.
    pub fn write(&mut self, gpu: &Gpu, bytes: &[u8], to: u64) -> Result<(), CudaError> {
        self.give(gpu)?;
        let range = self.arena.append(self.memory.half(self.half), bytes);
        // They go elsewhere.
        self.arena.take_new();
        self.copy(gpu, range, to)
    }

    fn copy(&mut self, gpu: &Gpu, from: std::ops::Range<usize>, to: u64) -> Result<(), CudaError> {
        if from.is_empty() {
            return Ok(());
        }
        gpu.inner.enter()?;
        let from = &self.memory.half(self.half)[from];
        // SAFETY: the source lies in the pinned block and stays as it is until the stream has passed this point: see `turn`
        // and `rewind`. The target has as many bytes.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), gpu.inner.stream)
        })
    }
}
