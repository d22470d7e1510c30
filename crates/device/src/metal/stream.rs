//! The command buffer that is being filled: compute and copies follow each other in the order given, and one commit sends them
//! all. Nothing waits before the host wants a result.

use super::memory::BufferObject;
use super::system::DeviceObject;
use crate::apple::table::{ArgumentTable, Change, Held};
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSRange;
use objc2_metal::{
    MTLBlitCommandEncoder, MTLBuffer, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder, MTLCommandQueue,
    MTLComputeCommandEncoder, MTLDevice, MTLResourceOptions, MTLSharedEvent,
};
use std::ptr::NonNull;

type Compute = Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>;
type Commands = Retained<ProtocolObject<dyn MTLCommandBuffer>>;
type Queue = Retained<ProtocolObject<dyn MTLCommandQueue>>;

/// Host bytes of a round that go through memory of their own; one buffer holds those of many launches.
const STAGING_BYTES: usize = 1 << 20;
/// Of every piece in it.
const STAGING_ALIGNMENT: usize = 256;
/// How long one wait for the device lasts before its state is looked at.
const WAIT_MS: u64 = 1000;
/// Numbers of staging buffers in the argument table start here, beyond those of blocks.
const STAGING_NUMBERS: u64 = 1 << 63;

pub(super) struct Stream {
    device: DeviceObject,
    queue: Queue,
    open: Option<Open>,
    /// Set to the number of a commit when all before it is done.
    event: Retained<ProtocolObject<dyn MTLSharedEvent>>,
    commits: u64,
    staging: Vec<BufferObject>,
    /// Of the last one.
    staged_bytes: usize,
}

/// A command buffer that is not committed yet, and its compute encoder while one is open.
struct Open {
    commands: Commands,
    compute: Option<Compute>,
    table: ArgumentTable,
}

/// Host bytes in a buffer.
pub(super) struct Staged {
    pub buffer: BufferObject,
    pub number: u64,
    pub first: usize,
}

impl Stream {
    /// Nothing given yet; `None` where the device gives no event.
    pub fn new(device: DeviceObject, queue: Queue) -> Option<Stream> {
        let event = device.newSharedEvent()?;
        Some(Stream { device, queue, open: None, event, commits: 0, staging: Vec::new(), staged_bytes: 0 })
    }

    /// Whether nothing was given since the last [`Stream::finish`].
    pub fn is_idle(&self) -> bool {
        self.open.is_none()
    }

    /// Says that a block's number may name another buffer from here on.
    pub fn forget(&mut self, number: u64) {
        if let Some(open) = &mut self.open {
            open.table.forget(number);
        }
    }

    fn open(&mut self) -> Result<&mut Open, String> {
        if self.open.is_none() {
            let commands = self.queue.commandBuffer().ok_or("the queue gives no command buffer")?;
            self.open = Some(Open { commands, compute: None, table: ArgumentTable::default() });
        }
        self.open.as_mut().ok_or_else(|| "the queue gives no command buffer".to_string())
    }

    /// The encoder of launches. It runs them one after the other.
    pub fn compute(&mut self) -> Result<Compute, String> {
        let open = self.open()?;
        if let Some(compute) = &open.compute {
            return Ok(compute.clone());
        }
        let compute = open.commands.computeCommandEncoder().ok_or("the command buffer gives no encoder")?;
        open.table.clear();
        open.compute = Some(compute.clone());
        Ok(compute)
    }

    /// Binds a buffer of the compute encoder, as far as it is not bound already.
    pub fn bind(&mut self, compute: &Compute, index: usize, buffer: &BufferObject, number: u64, first: usize) {
        let Some(open) = &mut self.open else { return };
        // SAFETY: the offset lies inside the buffer (callers check spans), which the command buffer keeps alive.
        match open.table.hold(index, Held { buffer: number, first }) {
            Change::None => {}
            Change::First => unsafe { compute.setBufferOffset_atIndex(first, index) },
            Change::Buffer => unsafe { compute.setBuffer_offset_atIndex(Some(buffer), first, index) },
        }
    }

    /// Binds bytes, which are copied into the command buffer.
    pub fn bind_bytes(&mut self, compute: &Compute, index: usize, bytes: &[u8]) {
        if let Some(open) = &mut self.open {
            open.table.hold_bytes(index);
        }
        // SAFETY: the pointer is valid for the length, and the bytes are copied before the call returns.
        unsafe { compute.setBytes_length_atIndex(NonNull::from(bytes).cast(), bytes.len(), index) };
    }

    /// A copy of host bytes that lives until everything given is done; `None` where there is no memory.
    pub fn stage(&mut self, bytes: &[u8]) -> Option<Staged> {
        let fits = self.staging.last().is_some_and(|last| last.length() - self.staged_bytes >= bytes.len());
        if !fits {
            let length = bytes.len().max(STAGING_BYTES);
            let buffer = self.device.newBufferWithLength_options(length, MTLResourceOptions::StorageModeShared)?;
            self.staging.push(buffer);
            self.staged_bytes = 0;
        }
        let (number, buffer) = (STAGING_NUMBERS + self.staging.len() as u64, self.staging.last()?.clone());
        let first = self.staged_bytes;
        // SAFETY: the room was checked, and no work reads this part of the buffer yet.
        unsafe { contents(&buffer, first).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.staged_bytes = (first + bytes.len()).next_multiple_of(STAGING_ALIGNMENT).min(buffer.length());
        Some(Staged { buffer, number, first })
    }

    fn blit(&mut self) -> Result<Retained<ProtocolObject<dyn MTLBlitCommandEncoder>>, String> {
        let open = self.open()?;
        if let Some(compute) = open.compute.take() {
            compute.endEncoding();
        }
        open.commands.blitCommandEncoder().ok_or_else(|| "the command buffer gives no encoder".to_string())
    }

    /// Copies between buffers, or between ranges of one that do not overlap.
    pub fn copy(
        &mut self,
        from: &BufferObject,
        from_first: usize,
        to: &BufferObject,
        to_first: usize,
        bytes: usize,
    ) -> Result<(), String> {
        let blit = self.blit()?;
        // SAFETY: callers check both ranges against their buffers.
        unsafe {
            blit.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(from, from_first, to, to_first, bytes);
        }
        blit.endEncoding();
        Ok(())
    }

    /// Writes zero bytes.
    pub fn zero(&mut self, buffer: &BufferObject, first: usize, bytes: usize) -> Result<(), String> {
        let blit = self.blit()?;
        blit.fillBuffer_range_value(buffer, NSRange { location: first, length: bytes }, 0);
        blit.endEncoding();
        Ok(())
    }

    /// Commits what was given and waits for it.
    pub fn finish(&mut self) -> Result<(), String> {
        let Some(open) = self.open.take() else { return Ok(()) };
        if let Some(compute) = open.compute {
            compute.endEncoding();
        }
        self.commits += 1;
        open.commands.encodeSignalEvent_value(ProtocolObject::from_ref(&*self.event), self.commits);
        open.commands.commit();
        let failed = || open.commands.status() == MTLCommandBufferStatus::Error;
        while !self.event.waitUntilSignaledValue_timeoutMS(self.commits, WAIT_MS) && !failed() {}
        // The event may come before the state: only the state says that nothing failed.
        open.commands.waitUntilCompleted();
        // One buffer is kept for the next round.
        self.staging.truncate(1);
        self.staged_bytes = 0;
        if open.commands.status() == MTLCommandBufferStatus::Completed {
            return Ok(());
        }
        let error = open.commands.error();
        Err(error.map_or_else(|| "a command buffer did not complete".to_string(), |error| error.to_string()))
    }

    /// Sends the device next to nothing and does not wait; see [`crate::apple::ticks`].
    pub fn tick(&self, target: &BufferObject) {
        let Some(commands) = self.queue.commandBuffer() else { return };
        if let Some(blit) = commands.blitCommandEncoder() {
            blit.fillBuffer_range_value(target, NSRange { location: 0, length: target.length() }, 0);
            blit.endEncoding();
        }
        commands.commit();
    }
}

/// Bytes of a shared buffer, as the host sees them.
///
/// # Safety
/// `first` is not beyond the buffer's length.
pub(super) unsafe fn contents(buffer: &BufferObject, first: usize) -> *mut u8 {
    // SAFETY: as above.
    unsafe { buffer.contents().as_ptr().cast::<u8>().add(first) }
}
