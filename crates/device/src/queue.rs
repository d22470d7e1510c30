//! The ordered stream of work, and what every backend does alike: copies.

use crate::cpu::CpuQueue;
use crate::gpu::{Backend, GpuDevice, GpuQueue};
use crate::{Buffer, Device, Element, LaunchError};
use std::collections::BTreeSet;
use tf_numerics::lanes::Level;

/// The ordered stream of work of one device. Launches of one queue run one after the other.
#[derive(Debug)]
pub enum Queue {
    Cpu(CpuQueue),
    Gpu(GpuQueue),
}

impl Queue {
    /// A queue of the CPU with `threads` threads (the caller counts as one) and one instruction set.
    pub fn cpu(threads: usize, level: Level) -> Queue {
        Queue::Cpu(CpuQueue::new(threads, level))
    }

    /// The queue of a GPU.
    pub fn gpu(device: &GpuDevice) -> Queue {
        Queue::Gpu(GpuQueue::new(device))
    }

    /// Whose code it runs; `None` for the CPU.
    pub fn backend(&self) -> Option<Backend> {
        match self {
            Queue::Cpu(_) => None,
            Queue::Gpu(queue) => Some(queue.backend()),
        }
    }

    /// The device whose buffers its launches take.
    pub fn device(&self) -> Device {
        match self {
            Queue::Cpu(_) => Device::cpu(),
            Queue::Gpu(queue) => Device::Gpu(GpuDevice::new(queue.driver().clone())),
        }
    }

    /// Threads of the host that a launch uses: 1 where a GPU does the work.
    pub fn threads(&self) -> usize {
        match self {
            Queue::Cpu(queue) => queue.pool.threads(),
            Queue::Gpu(_) => 1,
        }
    }

    /// Names the kernel that is about to run; every launcher says it. Returns the queue, to be matched on.
    #[inline]
    pub fn launching(&mut self, kernel: &'static str) -> &mut Queue {
        match self {
            Queue::Cpu(queue) => queue.launches.note(kernel),
            Queue::Gpu(queue) => queue.launches.note(kernel),
        }
        self
    }

    /// As [`GpuQueue::beside`]; on a CPU as any work.
    pub fn beside<T>(&mut self, work: impl FnOnce(&mut Queue) -> T) -> T {
        let set = |queue: &mut Queue, to_side: bool| match queue {
            Queue::Cpu(_) => false,
            Queue::Gpu(queue) => queue.set_beside(to_side),
        };
        let before = set(self, true);
        let done = work(self);
        set(self, before);
        done
    }

    /// Keeps the names of the kernels launched from here on.
    pub fn record_launches(&mut self) {
        match self {
            Queue::Cpu(queue) => queue.launches.start(),
            Queue::Gpu(queue) => queue.launches.start(),
        }
    }

    /// The names kept since [`Queue::record_launches`]; keeps none from here on.
    pub fn recorded_launches(&mut self) -> BTreeSet<&'static str> {
        match self {
            Queue::Cpu(queue) => queue.launches.take(),
            Queue::Gpu(queue) => queue.launches.take(),
        }
    }

    /// Copies bytes from one buffer to another of the same device.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    ///
    /// # Panics
    /// When a range is beyond its buffer, or the buffers are of different devices: a bug of the caller. So for all below.
    pub fn copy(
        &mut self,
        from: &Buffer,
        from_byte: usize,
        to: &mut Buffer,
        to_byte: usize,
        bytes: usize,
    ) -> Result<(), LaunchError> {
        match (from, to) {
            (Buffer::Cpu(from), Buffer::Cpu(to)) => {
                let from = &from.view::<u8>()[from_byte..from_byte + bytes];
                to.view_mut::<u8>()[to_byte..to_byte + bytes].copy_from_slice(from);
                Ok(())
            }
            (Buffer::Gpu(_), Buffer::Gpu(_)) if bytes == 0 => Ok(()),
            (Buffer::Gpu(from), Buffer::Gpu(to)) => {
                from.driver().copy(from.span(from_byte, bytes), to.span_mut(to_byte, bytes))
            }
            (Buffer::Cpu(_), Buffer::Gpu(_)) | (Buffer::Gpu(_), Buffer::Cpu(_)) => {
                panic!("a copy between devices: use Queue::read and Queue::write")
            }
        }
    }

    /// Copies bytes inside one buffer; the ranges may overlap.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    pub fn move_within(
        &mut self,
        buffer: &mut Buffer,
        from_byte: usize,
        to_byte: usize,
        bytes: usize,
    ) -> Result<(), LaunchError> {
        match (self, buffer) {
            (_, Buffer::Cpu(buffer)) => {
                buffer.view_mut::<u8>().copy_within(from_byte..from_byte + bytes, to_byte);
                Ok(())
            }
            (Queue::Gpu(queue), Buffer::Gpu(buffer)) => queue.move_within(buffer, from_byte, to_byte, bytes),
            (Queue::Cpu(_), Buffer::Gpu(_)) => panic!("a buffer of a GPU was given to the CPU's queue"),
        }
    }

    /// Overwrites bytes with zero.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    pub fn fill_zero(&mut self, buffer: &mut Buffer, first_byte: usize, bytes: usize) -> Result<(), LaunchError> {
        match buffer {
            Buffer::Cpu(buffer) => {
                buffer.view_mut::<u8>()[first_byte..first_byte + bytes].fill(0);
                Ok(())
            }
            Buffer::Gpu(_) if bytes == 0 => Ok(()),
            Buffer::Gpu(buffer) => buffer.driver().zero(buffer.span_mut(first_byte, bytes)),
        }
    }

    /// Copies elements to the host, from `first` on; waits for everything launched before.
    ///
    /// # Errors
    /// [`LaunchError::Device`], also for the failure of an earlier launch.
    pub fn read<T: Element>(&mut self, from: &Buffer, first: usize, to: &mut [T]) -> Result<(), LaunchError> {
        from.read(first, to)
    }

    /// Copies elements from the host, to `first` on; does not wait for the device.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    pub fn write<T: Element>(&mut self, to: &mut Buffer, first: usize, from: &[T]) -> Result<(), LaunchError> {
        to.write(first, from)
    }

    /// Says that a round ends or begins here, so that a GPU can start it as one and find the next one equal. Waits for nothing.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    pub fn submit(&mut self) -> Result<(), LaunchError> {
        match self {
            Queue::Cpu(_) => Ok(()),
            Queue::Gpu(queue) => queue.driver().submit(),
        }
    }

    /// Waits until everything launched is done.
    ///
    /// # Errors
    /// [`LaunchError::Device`], also for the failure of an earlier launch.
    pub fn finish(&mut self) -> Result<(), LaunchError> {
        match self {
            Queue::Cpu(_) => Ok(()),
            Queue::Gpu(queue) => queue.driver().finish(),
        }
    }
}
