//! The probe of a device's float32: it passes where the arithmetic is as declared, and says which operation is not.

mod common;

use common::ready;
use tf_device::Device;
use tf_device::gpu::GpuQueue;
use tf_kernels::float_step::{Found, SOURCE, probe};
use tf_metal_emulator::{Order, Schedule, Settings, device_of};

fn probed(edit: Option<(&str, &str)>) -> Found {
    const ONCE: &[Schedule] = &[Schedule { order: Order::Forward, checked: true }];
    let edit = edit.map(|(from, to)| (SOURCE, common::edited(SOURCE, from, to)));
    let device =
        device_of(Settings { schedules: ONCE, simdgroups: None, edit, log: None }).expect("there is a compiler");
    let Device::Gpu(gpu) = &device else { panic!("the emulator is a GPU") };
    probe(&mut GpuQueue::new(gpu), 3000, 7).expect("it runs")
}

#[test]
fn the_probe_accepts_the_declared_arithmetic_and_names_what_differs() {
    if !ready("the_probe_accepts_the_declared_arithmetic") {
        return;
    }
    assert_eq!(probed(None), Found { compared: 30_000, ..Found::default() });
    for (from, to, operation) in [
        ("found[6] = x * y + z;", "found[6] = fma(x, y, z);", "a * b + c of"),
        ("found[3] = x / y;", "found[3] = x * (1.0f / y);", "a / b of"),
        ("found[7] = rint(x);", "found[7] = rint(x) + 1.0f;", "rint(a) of"),
        ("found[2] = x * y;", "found[2] = fabs(x * y) < 1.17549435e-38f ? 1.0f : x * y;", "a * b of"),
    ] {
        let found = probed(Some((from, to)));
        assert!(found.differ > 0 && found.first.as_ref().is_some_and(|text| text.starts_with(operation)), "{found:?}");
    }
}
