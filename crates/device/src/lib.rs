//! The device layer: where memory lives and who runs a launch. Closed sets, matched exhaustively.
//!
//! A [`Device`] is one physical thing, a [`Queue`] its ordered stream of work, a [`Buffer`] a piece of its memory. All
//! GPUs are one member of each: what differs between them lies behind [`gpu::Driver`]. Knows no kernel, no shape and no
//! model; a kernel family matches on the queue and finds its backend's own types.

pub mod apple;
mod buffer;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod gpu;
mod host;
mod log;
#[cfg(target_os = "macos")]
pub mod metal;
mod queue;

pub use buffer::Buffer;
pub use error::LaunchError;
pub use host::{HostBytes, Keeper};
pub use queue::Queue;

use cpu::CpuDevice;
use gpu::{Backend, GpuDevice};

/// One physical thing that holds memory and runs launches.
#[derive(Clone, Debug)]
pub enum Device {
    Cpu(CpuDevice),
    Gpu(GpuDevice),
}

impl Device {
    /// The host.
    pub const fn cpu() -> Device {
        Device::Cpu(CpuDevice)
    }

    /// Whose code it runs; `None` for the CPU.
    pub fn backend(&self) -> Option<Backend> {
        match self {
            Device::Cpu(_) => None,
            Device::Gpu(device) => Some(device.backend()),
        }
    }
}

/// What a buffer may be viewed as: plain numbers, valid for every bit pattern.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {}

mod sealed {
    pub trait Sealed {}
}
macro_rules! elements {
    ($($element:ty),*) => { $( impl sealed::Sealed for $element {} impl Element for $element {} )* };
}
elements!(u8, u16, u32, u64, i8, i16, i32, i64, f32, f64);
