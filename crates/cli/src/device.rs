//! Which device runs the kernels: what `--backend` names, opened. One that isn't there is an error, never another device.

use tf_device::Device;
use tf_device::gpu::Backend;
use tf_model::deepseek_v41::Options;

use crate::arguments::Arguments;
use crate::failure::Failure;
use crate::machine::{self, Memory};

/// Opens the device.
///
/// # Errors
/// A backend that this build or this machine doesn't have.
pub fn open(arguments: &Arguments) -> Result<Device, Failure> {
    match arguments.text("backend") {
        Some("cuda") => cuda(),
        _ => Ok(Device::cpu()),
    }
}

#[cfg(feature = "cuda")]
fn cuda() -> Result<Device, Failure> {
    tf_device::cuda::device(0, tf_kernels::cubins::find).map_err(|error| Failure::run_time(error.to_string()))
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Device, Failure> {
    Err(Failure::run_time("this build has no CUDA; build it with `--features cuda`"))
}

/// The memory that weights and caches go into.
pub fn memory(device: &Device) -> Option<Memory> {
    match device {
        Device::Cpu(_) => machine::memory(),
        Device::Gpu(gpu) => {
            let available = gpu.driver().free_bytes().ok()?;
            Some(Memory { total: gpu.limits().memory_bytes, available })
        }
    }
}

/// The word of `--backend`.
pub fn backend(device: &Device) -> &'static str {
    match device.backend() {
        None => "cpu",
        Some(Backend::Cuda) => "cuda",
        Some(Backend::Metal) => "metal",
    }
}

/// What bits depend on: the backend, and for a GPU its generation.
pub fn identity(device: &Device) -> String {
    match device {
        Device::Cpu(_) => backend(device).to_owned(),
        Device::Gpu(gpu) => format!("{} {}", backend(device), gpu.driver().limits().target),
    }
}

/// What a record says about where it ran.
pub fn name(device: &Device, options: &Options) -> String {
    match device {
        Device::Cpu(_) => {
            format!("cpu {} {}, {} threads", std::env::consts::ARCH, options.level.name(), options.threads)
        }
        Device::Gpu(gpu) => format!("{} {}", backend(device), gpu.driver().name()),
    }
}
