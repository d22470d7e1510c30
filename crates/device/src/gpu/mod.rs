//! GPUs behind one face: what a family's `gpu.rs` writes against, whatever the backend.
//!
//! A [`Driver`] is one device with one ordered stream of work. Three exist: CUDA (feature `cuda`), Metal (macOS) and the
//! Metal emulator of the tests. A launch names a [`Program`] and an entry of it, binds buffers in the order of the Metal
//! source's `[[buffer(i)]]` list, and passes its constants by value as the last argument. Memory lives in
//! [`GpuBuffer`]s, which the host reads and writes through [`crate::Queue`] only.

mod buffer;
mod driver;
mod launch;
mod queue;
pub mod rounds;

pub use buffer::GpuBuffer;
pub use driver::{Argument, Block, Call, Driver, GpuLimits, Span};
pub use launch::{Binding, Launch, Plain, Program, ShapeBytes, Tuning, bytes_of};
pub use queue::GpuQueue;

use std::fmt;
use std::sync::Arc;

/// Whose code a GPU runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Backend {
    Cuda,
    Metal,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Cuda => "CUDA",
            Backend::Metal => "Metal",
        })
    }
}

/// One GPU.
#[derive(Clone, Debug)]
pub struct GpuDevice {
    driver: Arc<dyn Driver>,
}

impl GpuDevice {
    /// The device that a driver drives.
    pub fn new(driver: Arc<dyn Driver>) -> GpuDevice {
        GpuDevice { driver }
    }

    /// Whose code it runs.
    pub fn backend(&self) -> Backend {
        self.driver.backend()
    }

    /// The name that the vendor gave it.
    pub fn name(&self) -> &str {
        self.driver.name()
    }

    /// What a launch may ask for.
    pub fn limits(&self) -> &GpuLimits {
        self.driver.limits()
    }

    /// What the launches of its queue go through.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }
}
