//! Which device runs the kernels: what `--backend` names, opened. One that was named and isn't there is an error, never another
//! device; `auto` says why it takes the CPU where a GPU was there.

use serde_json::{Value as Json, json};
use tf_device::gpu::{Backend, GpuQueue};
use tf_device::{Device, LaunchError};
use tf_kernels::{float_step, tensor_step};
use tf_model::deepseek_v41::Options;

use crate::arguments::{Arguments, Mistakes};
use crate::failure::Failure;
use crate::machine::{self, Memory};
use crate::resolve::{self, Site, show_bytes};

/// Opens the device.
///
/// # Errors
/// A backend that this build or this machine doesn't have, options that would have no effect.
pub fn open(arguments: &Arguments) -> Result<Device, Failure> {
    let index = index(arguments)?;
    let device = match arguments.text("backend") {
        Some("cuda") => cuda(index)?,
        Some("metal") => metal(arguments)?,
        Some("cpu") => Device::cpu(),
        _ => automatic(arguments, index),
    };
    let mistakes = without_effect(arguments, device.backend());
    if mistakes.is_empty() { Ok(device) } else { Err(Mistakes(mistakes).into()) }
}

/// The GPU that `--devices` names, by its index.
///
/// # Errors
/// Several, or no number.
fn index(arguments: &Arguments) -> Result<usize, Failure> {
    if !resolve::is_given(arguments, "devices") {
        return Ok(0);
    }
    let mistake = |text: String| Failure::from(Mistakes(vec![text]));
    match arguments.list("devices").unwrap_or_default() {
        [one] => one.parse().map_err(|_| mistake(format!("--devices {one}: expected the index of a GPU, like 0"))),
        several => {
            Err(mistake(format!("--devices {}: one GPU runs the whole model so far, so name one", several.join(","))))
        }
    }
}

#[cfg(feature = "cuda")]
fn cuda(index: usize) -> Result<Device, Failure> {
    use tf_device::cuda::CudaError;
    tf_device::cuda::device(index, tf_kernels::cubins::find).map_err(|error| match error {
        CudaError::NoDevice { count: 1.., .. } => Mistakes(vec![format!("--devices {index}: {error}")]).into(),
        error => Failure::run_time(error.to_string()),
    })
}

#[cfg(not(feature = "cuda"))]
fn cuda(_index: usize) -> Result<Device, Failure> {
    Err(Failure::run_time("this build has no CUDA; build it with `--features cuda`"))
}

/// The CUDA device for `auto`, or why not. `None` where there is none to speak of.
#[cfg(feature = "cuda")]
fn automatic_cuda(index: usize) -> Option<Result<Device, String>> {
    use tf_device::cuda::CudaError;
    match tf_device::cuda::device(index, tf_kernels::cubins::find) {
        Ok(device) => Some(Ok(device)),
        Err(CudaError::NoDriver | CudaError::NoDevice { count: 0, .. }) => None,
        Err(error) => Some(Err(error.to_string())),
    }
}

#[cfg(not(feature = "cuda"))]
fn automatic_cuda(_index: usize) -> Option<Result<Device, String>> {
    None
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

/// The GPU of this build where its arithmetic is the declared one, else the CPU.
fn automatic(arguments: &Arguments, index: usize) -> Device {
    let opened = match cfg!(target_os = "macos") {
        true => metal(arguments).map_err(|failure| failure.text),
        false => match automatic_cuda(index) {
            Some(opened) => opened,
            None => return Device::cpu(),
        },
    };
    let asked = opened.and_then(|device| {
        let found = arithmetic(&device).map_err(|failure| failure.text)?;
        Ok((device, found.unwrap_or_default()))
    });
    trusted(asked).unwrap_or_else(|reason| {
        tracing::warn!("--backend auto takes the CPU: {reason}");
        Device::cpu()
    })
}

/// A GPU that was opened and asked, or why it is not used.
fn trusted<D>(opened: Result<(D, Arithmetic), String>) -> Result<D, String> {
    let (device, found) = opened?;
    let Arithmetic { compared, differ, first, .. } = found;
    match (compared, differ, first) {
        (1.., 0, _) => Ok(device),
        (compared, differ, first) => Err(format!(
            "the GPU's arithmetic is not the one that the kernels need: {differ} of {compared} results differ. {} \
             `tensorfold selftest` with this GPU's --backend says more",
            first.unwrap_or_default()
        )),
    }
}

/// What a GPU's own arithmetic was asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Arithmetic {
    pub title: &'static str,
    pub compared: usize,
    pub differ: usize,
    /// The first difference, or a note.
    pub first: Option<String>,
}

/// The ground of every other claim about a GPU: whether tensor cores add as the emulator of the kernel contract says (CUDA), or
/// float32 is the declared one (Metal). `None` for the CPU.
///
/// # Errors
/// A device that fails.
pub fn arithmetic(device: &Device) -> Result<Option<Arithmetic>, Failure> {
    const ITEMS: usize = 1 << 16;
    const TILES: usize = 256;
    const STEPS: usize = 16;
    let Device::Gpu(gpu) = device else { return Ok(None) };
    let queue = &mut GpuQueue::new(gpu);
    let failed = |error: LaunchError| Failure::run_time(error.to_string());
    Ok(Some(match gpu.backend() {
        Backend::Cuda => {
            let tensor_step::Found { compared, differ, first } =
                tensor_step::probe(queue, TILES, STEPS, 1).map_err(failed)?;
            Arithmetic { title: "tensor cores add as the emulator", compared, differ, first }
        }
        Backend::Metal => {
            let float_step::Found { compared, differ, flushed, first } =
                float_step::probe(queue, ITEMS, 1).map_err(failed)?;
            let note = (flushed > 0).then(|| format!("({flushed} for want of subnormals, which is no fault)"));
            Arithmetic { title: "float32 is as declared", compared, differ, first: first.or(note) }
        }
    }))
}

/// Options of another device.
fn without_effect(arguments: &Arguments, backend: Option<Backend>) -> Vec<String> {
    let of_metal = ["keep-warm", "pipeline-dir"].map(|flag| (flag, Backend::Metal));
    let flags = of_metal.into_iter().chain([("devices", Backend::Cuda)]);
    // What holds anyway may be said.
    let is_asked = |flag: &str| resolve::is_given(arguments, flag) && !resolve::is_default(arguments, flag);
    let idle = flags.filter(|(flag, owner)| backend != Some(*owner) && is_asked(flag));
    idle.map(|(flag, owner)| format!("--{flag} has no effect without the {} backend: leave it out", word(owner)))
        .collect()
}

/// Where a model on this device runs, and with what memory.
pub fn site(device: &Device) -> Site {
    let host = machine::memory();
    match device {
        Device::Cpu(_) => Site { backend: None, memory: host, host },
        Device::Gpu(gpu) => {
            let total = gpu.limits().memory_bytes;
            let memory = gpu.driver().free_bytes().ok().map(|available| Memory { total, available });
            Site { backend: device.backend(), memory, host }
        }
    }
}

/// The word of `--backend`.
pub fn backend(device: &Device) -> &'static str {
    device.backend().map_or("cpu", word)
}

fn word(backend: Backend) -> &'static str {
    match backend {
        Backend::Cuda => "cuda",
        Backend::Metal => "metal",
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
        (false, true) => Some(index(arguments).and_then(cuda)),
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
        let same = Arithmetic { compared: 10, first: Some("a note".into()), ..Arithmetic::default() };
        assert_eq!(trusted(Ok((7, same))), Ok(7));
        let other =
            Arithmetic { compared: 10, differ: 2, first: Some("a / b of 1 and 2".into()), ..Arithmetic::default() };
        let reason = trusted(Ok((7, other))).unwrap_err();
        assert!(reason.contains("2 of 10 results differ. a / b of 1 and 2"), "{reason}");
        let reason = trusted(Ok((7, Arithmetic::default()))).unwrap_err();
        assert!(reason.contains("0 of 0 results differ"), "nothing was compared: {reason}");
        assert_eq!(trusted::<u32>(Err("no Metal device".into())), Err("no Metal device".into()));
    }

    fn arguments(line: &str) -> Arguments {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        match parse(&words, &Environment::of(&[])) {
            Ok(Request::Run(arguments)) => *arguments,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn one_gpu_is_named_by_its_index() {
        assert_eq!(index(&arguments("serve")).unwrap(), 0);
        assert_eq!(index(&arguments("serve --devices 3")).unwrap(), 3);
        for (line, part) in [
            ("serve --devices 0,1", "--devices 0,1: one GPU runs the whole model so far"),
            ("serve --devices first", "--devices first: expected the index of a GPU"),
            ("serve --devices -1", "--devices -1: expected the index of a GPU"),
        ] {
            let text = open(&arguments(line)).unwrap_err().text;
            assert!(text.contains(part), "{line}: {text}");
        }
        let text = open(&arguments("serve --backend cpu --devices 1")).unwrap_err().text;
        assert!(text.contains("--devices has no effect without the cuda backend"), "{text}");
        // Reported as: the default is refused when it is written out.
        assert!(open(&arguments("serve --backend cpu --devices 0")).is_ok());
        assert_eq!(without_effect(&arguments("serve --devices 1"), Some(Backend::Cuda)), Vec::<String>::new());
    }

    #[cfg(not(target_os = "macos"))]
    #[test]
    fn options_of_metal_are_refused_elsewhere() {
        let arguments = arguments("serve --backend cpu --keep-warm 2 --pipeline-dir off");
        let text = open(&arguments).unwrap_err().text;
        assert!(text.contains("--keep-warm has no effect") && text.contains("--pipeline-dir has no effect"), "{text}");
        assert_eq!(without_effect(&arguments, Some(Backend::Metal)), Vec::<String>::new());
        assert!(open(&self::arguments("serve --backend cpu --keep-warm 0")).is_ok(), "0 is what holds anyway");
        assert!(metal(&arguments).unwrap_err().text.starts_with("Metal needs macOS"));
    }
}
