//! The device layer: where memory lives and who runs a launch. Closed sets, matched exhaustively.
//!
//! A [`Device`] is one physical thing, a [`Queue`] its ordered stream of work, a [`Buffer`] a piece of its memory.
//! Knows no kernel, no shape and no model; a kernel family matches on the queue and finds its backend's own types.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod log;

pub use error::LaunchError;

use cpu::{CpuBuffer, CpuDevice, CpuQueue};
use std::collections::BTreeSet;
use tf_numerics::lanes::Level;

/// One physical thing that holds memory and runs launches.
#[derive(Clone, Debug)]
pub enum Device {
    Cpu(CpuDevice),
}

impl Device {
    pub const fn cpu() -> Device {
        Device::Cpu(CpuDevice)
    }
}

/// The ordered stream of work of one device. Launches of one queue run one after the other.
#[derive(Debug)]
pub enum Queue {
    Cpu(CpuQueue),
}

impl Queue {
    /// A queue of the CPU with `threads` threads (the caller counts as one) and one instruction set.
    pub fn cpu(threads: usize, level: Level) -> Queue {
        Queue::Cpu(CpuQueue::new(threads, level))
    }

    /// Names the kernel that is about to run; every launcher says it. Returns the queue, to be matched on.
    #[inline]
    pub fn launching(&mut self, kernel: &'static str) -> &mut Queue {
        match self {
            Queue::Cpu(queue) => queue.launches.note(kernel),
        }
        self
    }

    /// Keeps the names of the kernels launched from here on.
    pub fn record_launches(&mut self) {
        match self {
            Queue::Cpu(queue) => queue.launches.start(),
        }
    }

    /// The names kept since [`Queue::record_launches`]; keeps none from here on.
    pub fn recorded_launches(&mut self) -> BTreeSet<&'static str> {
        match self {
            Queue::Cpu(queue) => queue.launches.take(),
        }
    }
}

/// Device memory of a fixed length in bytes, zero at first.
#[derive(Debug)]
pub enum Buffer {
    Cpu(CpuBuffer),
}

impl Buffer {
    /// `bytes` zero bytes, aligned to 64. Large buffers take physical memory only where they are written.
    ///
    /// # Errors
    /// [`LaunchError::Memory`] when the system refuses.
    pub fn zeroed(device: &Device, bytes: usize) -> Result<Buffer, LaunchError> {
        match device {
            Device::Cpu(_) => Ok(Buffer::Cpu(CpuBuffer::zeroed(bytes)?)),
        }
    }

    /// A buffer of `count` zero elements of `T`.
    ///
    /// # Errors
    /// As [`Buffer::zeroed`].
    pub fn zeroed_of<T: Element>(device: &Device, count: usize) -> Result<Buffer, LaunchError> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or(LaunchError::Memory { bytes: usize::MAX })?;
        Buffer::zeroed(device, bytes)
    }

    /// A copy of `values` on the device.
    ///
    /// # Errors
    /// As [`Buffer::zeroed`].
    pub fn from_slice<T: Element>(device: &Device, values: &[T]) -> Result<Buffer, LaunchError> {
        match device {
            Device::Cpu(_) => {
                let mut buffer = CpuBuffer::zeroed(size_of_val(values))?;
                buffer.view_mut().copy_from_slice(values);
                Ok(Buffer::Cpu(buffer))
            }
        }
    }

    /// `bytes` zero bytes between two watched guards: what the kernel contract hands to a launch.
    ///
    /// # Errors
    /// As [`Buffer::zeroed`].
    pub fn guarded(device: &Device, bytes: usize, pattern: u8) -> Result<Buffer, LaunchError> {
        match device {
            Device::Cpu(_) => Ok(Buffer::Cpu(CpuBuffer::guarded(bytes, pattern)?)),
        }
    }

    /// Where a guard was overwritten, counted in bytes from the buffer's first; see [`Buffer::guarded`].
    pub fn guard_damage(&self) -> Option<isize> {
        match self {
            Buffer::Cpu(buffer) => buffer.guard_damage(),
        }
    }

    /// As [`CpuBuffer::break_guard`].
    pub fn break_guard(&mut self, before: bool) {
        match self {
            Buffer::Cpu(buffer) => buffer.break_guard(before),
        }
    }

    pub fn len_bytes(&self) -> usize {
        match self {
            Buffer::Cpu(buffer) => buffer.len_bytes(),
        }
    }

    /// The whole buffer as elements of `T`.
    ///
    /// # Panics
    /// When the length in bytes is no multiple of `T`'s size: the buffer was made for another type.
    pub fn view<T: Element>(&self) -> &[T] {
        match self {
            Buffer::Cpu(buffer) => buffer.view(),
        }
    }

    /// As [`Buffer::view`], for writing.
    pub fn view_mut<T: Element>(&mut self) -> &mut [T] {
        match self {
            Buffer::Cpu(buffer) => buffer.view_mut(),
        }
    }
}

macro_rules! named_views {
    ($($name:ident $name_mut:ident $element:ty),* $(,)?) => {
        /// The views by name; each is [`Buffer::view`] or [`Buffer::view_mut`] of that type.
        impl Buffer {
            $(
                pub fn $name(&self) -> &[$element] {
                    self.view()
                }
                pub fn $name_mut(&mut self) -> &mut [$element] {
                    self.view_mut()
                }
            )*
        }
    };
}
named_views!(f32 f32_mut f32, u8 u8_mut u8, u16 u16_mut u16, u32 u32_mut u32, u64 u64_mut u64, i32 i32_mut i32, i64 i64_mut i64);

/// What a buffer may be viewed as: plain numbers, valid for every bit pattern.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {}

mod sealed {
    pub trait Sealed {}
}
macro_rules! elements {
    ($($element:ty),*) => { $( impl sealed::Sealed for $element {} impl Element for $element {} )* };
}
elements!(u8, u16, u32, u64, i8, i16, i32, i64, f32, f64);
