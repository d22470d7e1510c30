//! The command buffer that is being filled: compute and copies follow each other in the order given.

use super::driver::BufferObject;
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSRange;
use objc2_metal::{
    MTLBlitCommandEncoder, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder, MTLCommandQueue,
    MTLComputeCommandEncoder,
};

type Compute = Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>;
type Commands = Retained<ProtocolObject<dyn MTLCommandBuffer>>;

pub(super) struct Stream {
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    open: Option<Open>,
}

/// A command buffer that is not committed yet, and its compute encoder while one is open.
struct Open {
    commands: Commands,
    compute: Option<Compute>,
}

impl Stream {
    /// Nothing given yet.
    pub fn new(queue: Retained<ProtocolObject<dyn MTLCommandQueue>>) -> Stream {
        Stream { queue, open: None }
    }

    /// Whether nothing was given since the last [`Stream::finish`].
    pub fn is_idle(&self) -> bool {
        self.open.is_none()
    }

    fn open(&mut self) -> Result<&mut Open, String> {
        if self.open.is_none() {
            let commands = self.queue.commandBuffer().ok_or("the queue gives no command buffer")?;
            self.open = Some(Open { commands, compute: None });
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
        open.compute = Some(compute.clone());
        Ok(compute)
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
        open.commands.commit();
        open.commands.waitUntilCompleted();
        if open.commands.status() == MTLCommandBufferStatus::Completed {
            return Ok(());
        }
        let error = open.commands.error();
        Err(error.map_or_else(|| "a command buffer did not complete".to_string(), |error| error.to_string()))
    }
}
