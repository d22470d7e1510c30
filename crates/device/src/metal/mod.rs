//! Apple GPUs. Compiled and linked on Linux too, where it can't run; **not run on Apple hardware**.
//!
//! One device, one queue. Launches are encoded into one command buffer, which is committed when the host wants a result:
//! once a round. Memory is shared between host and device, so that reads and writes are copies in memory. Sources are
//! compiled on first use, in safe math mode.

mod driver;
mod stream;

use crate::gpu::{GpuDevice, GpuLimits};
use crate::{Device, LaunchError};
use driver::MetalDriver;
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLCreateSystemDefaultDevice, MTLDevice};
use std::sync::Arc;

/// Buffers that one kernel may bind.
const BUFFERS_MAX: u32 = 31;
/// Cores, where nobody says: the least that a chip with these kernels has.
const UNITS: u32 = 8;

/// The default GPU of this Mac.
///
/// # Errors
/// [`LaunchError::Device`] where there is none, or it takes no queue.
pub fn device() -> Result<Device, LaunchError> {
    let device = MTLCreateSystemDefaultDevice().ok_or_else(|| LaunchError::Device {
        device: "Metal".into(),
        text: "this system has no Metal device; use the CPU".into(),
    })?;
    Ok(Device::Gpu(GpuDevice::new(Arc::new(MetalDriver::new(device)?))))
}

fn limits_of(device: &ProtocolObject<dyn MTLDevice>) -> GpuLimits {
    GpuLimits {
        threads_max: u32::try_from(device.maxThreadsPerThreadgroup().width).unwrap_or(u32::MAX),
        shared_bytes_max: u32::try_from(device.maxThreadgroupMemoryLength()).unwrap_or(u32::MAX),
        buffers_max: BUFFERS_MAX,
        units: UNITS,
        memory_bytes: device.recommendedMaxWorkingSetSize(),
        target: device.name().to_string(),
    }
}
