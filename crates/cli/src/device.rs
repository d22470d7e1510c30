//! Which device runs the kernels: what `--backend` names, opened. One that was named and isn't there is an error, never another
//! device; `auto` says why it takes the CPU where a GPU was there.

use serde_json::{Value as Json, json};
use tf_device::Device;
use tf_device::gpu::Backend;
use tf_kernels::float_step::Found;
use tf_model::deepseek_v41::Options;

use crate::arguments::{Arguments, Mistakes};
use crate::failure::Failure;
use crate::machine::{self, Memory};
use crate::resolve::{self, show_bytes};

/// Opens the device.
///
/// # Errors
/// A backend that this build or this machine doesn't have, options that would have no effect.
pub fn open(arguments: &Arguments) -> Result<Device, Failure> {
    let device = match arguments.text("backend") {
        Some("cuda") => cuda()?,
        Some("metal") => metal(arguments)?,
        Some("cpu") => Device::cpu(),
        _ => automatic(arguments),
    };
    let mistakes = without_effect(arguments, device.backend());
    if mistakes.is_empty() { Ok(device) } else { Err(Mistakes(mistakes).into()) }
}

#[cfg(feature = "cuda")]
fn cuda() -> Result<Device, Failure> {
    tf_device::cuda::device(0, tf_kernels::cubins::find).map_err(|error| Failure::run_time(error.to_string()))
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Device, Failure> {
    Err(Failure::run_time("this build has no CUDA; build it with `--features cuda`"))
}

#[cfg(target_os = "macos")]
fn metal(arguments: &Arguments) -> Result<Device, Failure> {
    let choices = tf_device::metal::Choices {
        archive: match resolve::flag_text(arguments, "pipeline-dir") {
            Some("off") => None,
            Some(folder) => Some(folder.into()),
            None => tf_device::metal::archive_folder(),
        },
        keep_warm: resolve::flag_seconds(arguments, "keep-warm").unwrap_or_default(),
        notice: |text| tracing::warn!("{text}"),
        ..Default::default()
    };
    tf_device::metal::device(choices).map_err(|error| Failure::run_time(error.to_string()))
}

#[cfg(not(target_os = "macos"))]
fn metal(_arguments: &Arguments) -> Result<Device, Failure> {
    Err(Failure::run_time("Metal needs macOS on Apple silicon; use --backend cpu"))
}

/// Metal where a Mac has it and its arithmetic is the declared one, else the CPU.
fn automatic(arguments: &Arguments) -> Device {
    if !cfg!(target_os = "macos") {
        return Device::cpu();
    }
    let opened = metal(arguments).map_err(|failure| failure.text).and_then(|device| {
        let found = arithmetic(&device).map_err(|failure| failure.text)?;
        Ok((device, found.unwrap_or_default()))
    });
    trusted(opened).unwrap_or_else(|reason| {
        tracing::warn!("--backend auto takes the CPU: {reason}");
        Device::cpu()
    })
}

/// A GPU that was opened and asked, or why it is not used.
fn trusted<D>(opened: Result<(D, Found), String>) -> Result<D, String> {
    let (device, found) = opened?;
    let Found { compared, differ, first, .. } = found;
    match (compared, differ, first) {
        (1.., 0, _) => Ok(device),
        (compared, differ, first) => Err(format!(
            "the GPU's arithmetic is not the one that the kernels need: {differ} of {compared} results differ. {} \
             `tensorfold selftest --backend metal` says more",
            first.unwrap_or_default()
        )),
    }
}

/// Whether a Metal device adds, divides and rounds as the kernels with the CPU's bits need it. `None` for other devices.
///
/// # Errors
/// A device that fails.
pub fn arithmetic(device: &Device) -> Result<Option<Found>, Failure> {
    const ITEMS: usize = 1 << 16;
    match device {
        Device::Gpu(gpu) if gpu.backend() == Backend::Metal => {
            let found = tf_kernels::float_step::probe(&mut tf_device::gpu::GpuQueue::new(gpu), ITEMS, 1);
            found.map(Some).map_err(|error| Failure::run_time(error.to_string()))
        }
        Device::Cpu(_) | Device::Gpu(_) => Ok(None),
    }
}

/// Options of another device.
fn without_effect(arguments: &Arguments, backend: Option<Backend>) -> Vec<String> {
    if backend == Some(Backend::Metal) {
        return Vec::new();
    }
    let given = |flag: &&str| resolve::is_given(arguments, flag);
    let flags = ["keep-warm", "pipeline-dir"].into_iter().filter(given);
    flags.map(|flag| format!("--{flag} has no effect without the metal backend: leave it out")).collect()
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

/// The device for programs: its backend, and for a GPU its name, its generation and its memory.
pub fn json(device: &Device) -> Json {
    match device {
        Device::Cpu(_) => json!({"backend": backend(device)}),
        Device::Gpu(gpu) => json!({
            "backend": backend(device),
            "name": gpu.name(),
            "generation": gpu.limits().target,
            "memory_bytes": gpu.limits().memory_bytes,
        }),
    }
}

/// The GPU that this build can use on this machine, or why there is none. `None` where the build has no GPU backend.
pub fn gpu(arguments: &Arguments) -> Option<Result<Device, Failure>> {
    match (cfg!(target_os = "macos"), cfg!(feature = "cuda")) {
        (true, _) => Some(metal(arguments)),
        (false, true) => Some(cuda()),
        (false, false) => None,
    }
}

/// A device in one line.
pub fn line(device: &Device) -> String {
    match device {
        Device::Cpu(_) => backend(device).to_owned(),
        Device::Gpu(gpu) => {
            let limits = gpu.limits();
            format!("{} {} ({}), {}", backend(device), gpu.name(), limits.target, show_bytes(limits.memory_bytes))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::{Request, parse};
    use crate::options::Environment;

    #[test]
    fn a_gpu_is_used_only_when_it_was_asked_and_gave_the_declared_bits() {
        let same = Found { compared: 10, flushed: 3, ..Found::default() };
        assert_eq!(trusted(Ok((7, same))), Ok(7));
        let other = Found { compared: 10, differ: 2, flushed: 0, first: Some("a / b of 1 and 2".into()) };
        let reason = trusted(Ok((7, other))).unwrap_err();
        assert!(reason.contains("2 of 10 results differ. a / b of 1 and 2"), "{reason}");
        let reason = trusted(Ok((7, Found::default()))).unwrap_err();
        assert!(reason.contains("0 of 0 results differ"), "nothing was compared: {reason}");
        assert_eq!(trusted::<u32>(Err("no Metal device".into())), Err("no Metal device".into()));
    }

    #[cfg(not(target_os = "macos"))]
    #[test]
    fn options_of_metal_are_refused_elsewhere() {
        let words: Vec<String> = "serve --keep-warm 2 --pipeline-dir off".split(' ').map(str::to_owned).collect();
        let Ok(Request::Run(arguments)) = parse(&words, &Environment::of(&[])) else { panic!("{words:?}") };
        let text = open(&arguments).unwrap_err().text;
        assert!(text.contains("--keep-warm has no effect") && text.contains("--pipeline-dir has no effect"), "{text}");
        assert_eq!(without_effect(&arguments, Some(Backend::Metal)), Vec::<String>::new());
        assert!(metal(&arguments).unwrap_err().text.starts_with("Metal needs macOS"));
    }
}
