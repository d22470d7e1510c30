//! Apple GPUs. Compiled and linked on Linux too, where it can't run; **not run on Apple hardware**.
//!
//! One device, one queue. Launches are encoded into one command buffer, which is committed when the host wants a result: once a
//! round. The host waits on a shared event. Memory is shared between host and device: blocks lie in a few heaps, tensors that a
//! checkpoint stores as the kernels read them stay in its mapped files. What needs no device to decide is in [`crate::apple`].

mod driver;
mod memory;
mod programs;
mod stream;
mod system;
mod warm;

use crate::apple::archive::Shelf;
use crate::apple::chip::Chip;
use crate::apple::entry::Log;
use crate::gpu::GpuDevice;
use crate::{Device, LaunchError};
use driver::MetalDriver;
use programs::Kept;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What may be chosen of a device; no bit depends on it.
#[derive(Clone, Debug)]
pub struct Choices {
    /// The folder of compiled pipelines; `None` compiles at every start.
    pub archive: Option<PathBuf>,
    /// How long an idle device's clock is kept up after work; zero for not at all.
    pub keep_warm: Duration,
    /// Hears what went wrong without harm.
    pub notice: fn(&str),
    /// For the kernel contract: SIMD groups of a threadgroup instead of those that a launch asks for.
    pub simdgroups: Option<u32>,
    /// For the kernel contract: where launches are recorded.
    pub log: Option<Log>,
    /// For the kernel contract: a text, a kernel's own or one that it includes, and what stands in its place.
    pub edit: Option<(&'static str, String)>,
}

impl Default for Choices {
    fn default() -> Choices {
        Choices { archive: None, keep_warm: Duration::ZERO, notice: |_| {}, simdgroups: None, log: None, edit: None }
    }
}

/// The first GPU of this Mac that the kernels run on.
///
/// # Errors
/// [`LaunchError::Device`] where there is none, with what was found and what is needed.
pub fn device(choices: Choices) -> Result<Device, LaunchError> {
    let refused = |text: String| LaunchError::Device { device: "Metal".into(), text };
    let mut devices = system::devices();
    let found: Vec<_> = devices.iter().map(|(_, found)| found.clone()).collect();
    let (index, chip) = Chip::choose(&found).map_err(|refusal| refused(refusal.to_string()))?;
    let (object, _) = devices.swap_remove(index);
    let kept = choices.archive.clone().map(|folder| Kept { shelf: Shelf::new(folder), system: system::build() });
    Ok(Device::Gpu(GpuDevice::new(Arc::new(MetalDriver::new(object, chip, kept, choices)?))))
}

/// Where compiled pipelines are kept unless somebody says otherwise: below the user's folder of files that may be lost.
pub fn archive_folder() -> Option<PathBuf> {
    Some(system::cache_folder()?.join("tensorfold/pipelines"))
}
