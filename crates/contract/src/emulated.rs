//! Metal kernels on the emulator: where no Apple chip is at hand, every launch is watched instead.

use crate::limits::{MetalLaunch, apple_problems};
use crate::target::{Bench, Changed, Target};
use std::sync::Arc;
use tf_device::Device;
use tf_metal_emulator::{Launched, Log, Order, Schedule, Settings, device_of};

/// Rows of a case, at most: both sides of every small tile, in seconds.
const ROWS_MAX: usize = 18;

/// See [`Bench::size_max`].
const SIZE_MAX: usize = 1024;

const fn schedule(order: Order, checked: bool) -> Schedule {
    Schedule { order, checked }
}

/// The ways to run a launch, the one that checks every access first. The others cut the launch into threadgroups of another
/// size and take threads in another order.
const WAYS: [(&str, Option<u32>, &[Schedule]); 4] = [
    ("checked", None, &[schedule(Order::Forward, true)]),
    ("one SIMD group a threadgroup, backwards", Some(1), &[schedule(Order::Reverse, false)]),
    ("three SIMD groups a threadgroup, in any order", Some(3), &[schedule(Order::Random(0x5eed), false)]),
    ("in another order", None, &[schedule(Order::Random(0xfeed), false)]),
];

struct Emulated {
    devices: Vec<(&'static str, Device)>,
    log: Log,
}

/// The emulated Metal device.
///
/// # Errors
/// Where the compiler is missing.
pub fn metal() -> Result<Target, String> {
    let log = Log::default();
    let mut devices = Vec::new();
    for (name, simdgroups, schedules) in WAYS {
        let settings = Settings { schedules, simdgroups, edit: None, log: Some(log.clone()) };
        devices.push((name, device_of(settings).map_err(|error| error.to_string())?));
    }
    Ok(Target::Gpu(Arc::new(Emulated { devices, log })))
}

impl Bench for Emulated {
    fn name(&self) -> String {
        "emulated Metal device".to_owned()
    }

    fn devices(&self) -> &[(&'static str, Device)] {
        &self.devices
    }

    fn edited(&self, source: &'static str, text: String) -> Result<Changed, String> {
        // SIMD groups that have no item are there as well.
        changed(Some(3), Some((source, text)))
    }

    fn crowded(&self, simdgroups: u32) -> Option<Result<Changed, String>> {
        Some(changed(Some(simdgroups), None))
    }

    fn is_defect(&self, error: &str) -> bool {
        tf_metal_emulator::is_defect(error)
    }

    fn has_cpu_bits(&self, _kernel: &str) -> bool {
        true
    }

    fn rows_max(&self) -> usize {
        ROWS_MAX
    }

    fn size_max(&self) -> usize {
        SIZE_MAX
    }

    fn limit_problems(&self) -> Vec<String> {
        problems(&self.log)
    }
}

/// A device for a control, with a log of its own.
fn changed(simdgroups: Option<u32>, edit: Option<(&'static str, String)>) -> Result<Changed, String> {
    let log = Log::default();
    let settings = Settings { schedules: WAYS[0].2, simdgroups, edit, log: Some(log.clone()) };
    let device = device_of(settings).map_err(|error| error.to_string())?;
    Ok((device, Arc::new(move || problems(&log))))
}

fn problems(log: &Log) -> Vec<String> {
    log.launches().iter().flat_map(|launched| apple_problems(launched.entry, &asked(launched))).collect()
}

/// A launch as the table of limits sees it.
fn asked(launched: &Launched) -> MetalLaunch {
    MetalLaunch {
        threads: launched.threads,
        pipeline_threads_max: 0,
        threadgroup_bytes: launched.threadgroup_bytes,
        simd_width: 32,
        buffers: launched.buffers,
        argument_bytes: launched.argument_bytes,
        needs_tensor_units: false,
        // MSL 3.1.
        language: 31,
    }
}
