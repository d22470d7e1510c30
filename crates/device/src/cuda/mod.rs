//! NVIDIA GPUs through the driver's own interface, loaded at run time: one program runs with and without a GPU.
//!
//! [`Gpu::open`] refuses with figures where there is no driver, the driver or the GPU is too old, or the device does not
//! exist; nothing here panics for want of a driver. A [`Gpu`] has one stream: launches run in order. Kernels come from
//! cubins; a launch checks its arguments' sizes against the kernel's own, so that it is safe to call: a wrong
//! address can only harm device memory, which no Rust value lives in.
//!
//! [`device`] makes it a [`crate::Device`], which kernel families reach through [`crate::gpu`].

mod driver;
mod elf;
mod error;
mod gpu;
mod graph;
mod launch;
pub mod nvrtc;
mod rounds;
mod staging;

pub use driver::{Asked, Trial, device, device_on_trial};
pub use error::CudaError;
pub use gpu::Gpu;
pub use graph::{Event, Graph};
