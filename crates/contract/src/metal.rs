//! Metal kernels on the GPU of this Mac. Compiled and linked on Linux too; **not run on Apple hardware**.

use crate::limits::{MetalLaunch, apple_problems};
use crate::target::{Bench, Changed, Target};
use std::sync::{Arc, PoisonError};
use tf_device::Device;
use tf_device::apple::entry::{Launched, Log};
use tf_device::gpu::GpuQueue;
use tf_device::metal::{Choices, device};
use tf_kernels::float_step;

/// The ways to cut a launch: as asked, and into threadgroups of other sizes.
const WAYS: [(&str, Option<u32>); 3] =
    [("as asked", None), ("one SIMD group a threadgroup", Some(1)), ("three SIMD groups a threadgroup", Some(3))];

/// Operations that the device is asked for its float32.
const PROBES: usize = 1 << 14;

struct Metal {
    name: String,
    devices: Vec<(&'static str, Device)>,
    log: Log,
    has_subnormals: bool,
}

/// The GPU of this Mac.
///
/// # Errors
/// Why there is none.
pub fn metal() -> Result<Target, String> {
    let log = Log::default();
    let mut devices = Vec::new();
    for (name, simdgroups) in WAYS {
        let choices = Choices { simdgroups, log: Some(log.clone()), ..Choices::default() };
        devices.push((name, device(choices).map_err(|error| error.to_string())?));
    }
    let Device::Gpu(first) = &devices[0].1 else { return Err("the first device is no GPU".to_owned()) };
    let found = float_step::probe(&mut GpuQueue::new(first), PROBES, 1).map_err(|error| error.to_string())?;
    let has_subnormals = found.flushed == 0;
    let note = if has_subnormals { "" } else { ", subnormals are zero" };
    let name = format!("{} ({}{note})", first.name(), first.limits().target);
    Ok(Target::Gpu(Arc::new(Metal { name, devices, log, has_subnormals })))
}

impl Bench for Metal {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn devices(&self) -> &[(&'static str, Device)] {
        &self.devices
    }

    fn edited(&self, source: &'static str, text: String) -> Result<Changed, String> {
        let log = Log::default();
        // SIMD groups that have no item are there as well.
        let (simdgroups, edit) = (Some(3), Some((source, text)));
        let choices = Choices { simdgroups, edit, log: Some(log.clone()), ..Choices::default() };
        let device = device(choices).map_err(|error| error.to_string())?;
        Ok((device, Arc::new(move || problems(&log))))
    }

    fn is_defect(&self, error: &str) -> bool {
        // A launch that ran and failed; a text that the compiler refuses shows nothing.
        error.contains("failed: ") && !error.contains("program_source")
    }

    fn has_cpu_bits(&self, _kernel: &str) -> bool {
        self.has_subnormals
    }

    fn rows_max(&self) -> usize {
        usize::MAX
    }

    fn size_max(&self) -> usize {
        usize::MAX
    }

    fn limit_problems(&self) -> Vec<String> {
        problems(&self.log)
    }
}

fn problems(log: &Log) -> Vec<String> {
    let launched = log.lock().unwrap_or_else(PoisonError::into_inner);
    let each = launched.iter().flat_map(|launched| {
        let refused = launched.refusal.iter().map(|text| format!("{}: no pipeline here: {text}", launched.entry));
        refused.chain(apple_problems(launched.entry, &asked(launched)))
    });
    each.collect()
}

fn asked(launched: &Launched) -> MetalLaunch {
    MetalLaunch {
        threads: launched.threads,
        pipeline_threads_max: launched.pipeline_threads_max,
        threadgroup_bytes: launched.threadgroup_bytes,
        simd_width: launched.simd_width,
        buffers: launched.buffers,
        argument_bytes: launched.argument_bytes,
        needs_tensor_units: false,
        // MSL 3.1.
        language: 31,
    }
}
