//! CUDA kernels on the GPU of this machine.

use crate::apart::own_place;
use crate::compile;
use crate::edits::Ahead;
use crate::limits::{CudaLaunch, NVIDIA, cuda_problems};
use crate::target::{Bench, Changed, Target, tensor_cores_take};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use tf_device::Device;
use tf_device::cuda::{Asked, Trial, device_on_trial};
use tf_kernels::contract::{Case, Contract};
use tf_kernels::cubins;

/// Families whose products are chains of tensor-core steps. All others have the CPU's order, or a mirror of their own
/// (`World::stepped`), which goes before.
const OWN_ORDER: [&str; 4] = ["linear_fp8", "linear_bf16", "lm_head", "moe_experts"];

/// The ways to cut a launch: as the device is, on a few of its multiprocessors, and with the least shared memory of any
/// architecture.
const WAYS: [(&str, Option<u32>, Option<u32>); 3] = [
    ("the whole device", None, None),
    ("seven multiprocessors", Some(7), None),
    ("99 KiB of shared memory", None, Some(99 << 10)),
];

struct Cuda {
    /// Of edited programs.
    folder: PathBuf,
    /// Whether it goes with this value.
    is_own: bool,
    name: String,
    devices: Vec<(&'static str, Device)>,
    target: String,
    asked: Asked,
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.is_own {
            // What is left there is of no harm.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// The first GPU. Compiled edits are taken from a folder and kept there, or in one that goes with the target.
///
/// # Errors
/// Why there is none.
pub fn cuda(folder: Option<&Path>) -> Result<Target, String> {
    let asked = Asked::default();
    let mut devices = Vec::new();
    for (name, units, shared_bytes) in WAYS {
        let trial = Trial { units, shared_bytes, asked: Some(asked.clone()) };
        devices.push((name, device_on_trial(0, cubins::find, trial).map_err(|error| error.to_string())?));
    }
    let Device::Gpu(first) = &devices[0].1 else { return Err("the first device is no GPU".to_owned()) };
    let (name, target) = (first.name().to_owned(), first.limits().target.clone());
    let is_own = folder.is_none();
    let folder = folder.map_or_else(|| own_place("edits"), Path::to_path_buf);
    fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    Ok(Target::Gpu(Arc::new(Cuda { folder, is_own, name, devices, target, asked })))
}

impl Bench for Cuda {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn devices(&self) -> &[(&'static str, Device)] {
        &self.devices
    }

    fn edited(&self, source: &'static str, text: String) -> Result<Changed, String> {
        let programs = cubins::programs_of(source);
        if programs.is_empty() {
            return Err("no CUDA program has this source".to_owned());
        }
        // A header is part of many programs, of which a kernel's launches ask for one or two.
        let folder = self.folder.clone();
        let find = move |asked: &str, target: &str| {
            let Some(program) = programs.iter().find(|program| **program == asked) else {
                return cubins::find(asked, target);
            };
            match compile::obtain(&folder, target, program, source, &text) {
                Ok(cubin) => Some(&*cubin.leak()),
                Err(text) => {
                    // The launch that finds no code fails; this says why there is none.
                    eprintln!("edited CUDA code of `{program}` for sm_{target}: {text}");
                    None
                }
            }
        };
        let device = device_on_trial(0, find, Trial::default()).map_err(|error| error.to_string())?;
        Ok((device, Arc::new(Vec::new)))
    }

    fn ahead(&self, contracts: &[&Contract]) -> Ahead {
        let programs = contracts.iter().map(|contract| compile::programs(contract, &self.target)).collect();
        Ahead { architecture: Some(self.target.clone()), programs }
    }

    fn folder(&self) -> Option<&Path> {
        Some(&self.folder)
    }

    fn can_edit(&self) -> Result<(), String> {
        // A folder that was brought along has them compiled.
        match !self.is_own || tf_device::cuda::nvrtc::is_present() {
            true => Ok(()),
            false => Err("edited CUDA sources need NVRTC (libnvrtc.so), which this machine does not have".to_owned()),
        }
    }

    fn takes(&self, case: &Case) -> bool {
        tensor_cores_take(case)
    }

    fn is_defect(&self, _error: &str) -> bool {
        false
    }

    fn has_cpu_bits(&self, kernel: &str) -> bool {
        let family = kernel.split('/').next().unwrap_or(kernel);
        // Float32 weights have no tensor-core step.
        !OWN_ORDER.contains(&family) || kernel == "linear_bf16/f32"
    }

    fn rows_max(&self) -> usize {
        usize::MAX
    }

    fn size_max(&self) -> usize {
        usize::MAX
    }

    fn limit_problems(&self) -> Vec<String> {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let mut problems = Vec::new();
        for (program, target, figures) in cubins::figures() {
            let Some((threads, dynamic)) = asked.get(&(program, figures.kernel)) else { continue };
            let name = format!("sm_{}", target.trim_end_matches('a'));
            let Some(chip) = NVIDIA.iter().find(|chip| chip.name == name) else {
                problems.push(format!("there are no limits of {name}"));
                continue;
            };
            let launch = CudaLaunch {
                threads: *threads,
                thread_registers: figures.registers,
                static_shared_bytes: figures.shared_bytes,
                // Launchers ask each device for what it has.
                dynamic_shared_bytes: if target == self.target { *dynamic } else { 0 },
                // The cubins' build lets a few bytes outside the loops pass elsewhere.
                spill_bytes: if target == self.target { figures.spill_bytes } else { 0 },
            };
            let found = cuda_problems(chip, &launch).into_iter();
            problems.extend(found.map(|text| format!("{program}/{}: {text}", figures.kernel)));
        }
        problems
    }
}
