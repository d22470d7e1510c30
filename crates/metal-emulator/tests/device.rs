//! The emulator as a device: memory, copies, launches and refusals as every GPU has them.

mod common;

use tf_device::gpu::{Argument, Backend, Binding, Call, Launch, Program, ShapeBytes, Span, Tuning, bytes_of};
use tf_device::{Buffer, Device, LaunchError, Queue};
use tf_metal_emulator::{Log, Rigour, SCHEDULES, Settings, device_of, device_with};

const SOURCE: &str = "
#include <metal_stdlib>
using namespace metal;
struct Shape { uint count; float factor; };
kernel void scale(device const float *x [[buffer(0)]], device const uint *which [[buffer(1)]],
                  device float *out [[buffer(2)]], device float *copy [[buffer(3)]],
                  constant Shape &shape [[buffer(4)]], uint i [[thread_position_in_grid]]) {
    if (i >= shape.count) return;
    out[i] = x[which[i]] * shape.factor;
    if (shape.factor == 3.0f) copy[i] = out[i];
}
kernel void beyond(device float *out [[buffer(0)]], constant Shape &shape [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
    if (i == 0) out[shape.count] = 1.0f;
}
";
static SCALE: Program = Program { name: "scale", metal: Some(SOURCE), metal_includes: &[], cuda: false };
static ABSENT: Program = Program { name: "absent", metal: None, metal_includes: &[], cuda: true };

fn emulated(test: &str, rigour: Rigour) -> Option<(Device, Queue)> {
    if !common::ready(test) {
        return None;
    }
    let device = device_with(rigour).expect("the compiler is installed");
    let Device::Gpu(gpu) = &device else { panic!("the emulator is a GPU") };
    let queue = Queue::gpu(gpu);
    Some((device, queue))
}

fn scale(
    queue: &mut Queue,
    bindings: &mut [Binding<'_>],
    entry: &'static str,
    count: usize,
) -> Result<(), LaunchError> {
    let Queue::Gpu(queue) = queue else { panic!("the emulator is a GPU") };
    let shape = ShapeBytes::new().uint(count).float(2.0);
    let groups = (count as u32).div_ceil(32);
    let program = &SCALE;
    queue.launch(Launch { program, entry, bindings, shape: shape.bytes(), groups, threads: 32, shared_bytes: 0 })
}

#[test]
fn a_launch_reads_buffers_offsets_and_host_bytes_and_writes_in_place() {
    for rigour in [Rigour::Once, Rigour::Proven] {
        let Some((device, mut queue)) = emulated("a launch on the device", rigour) else { return };
        // Large enough that a launch of one order reads it where it is.
        let x: Vec<f32> = (0..2000).map(|i| i as f32).collect();
        let which: Vec<u32> = (0..50).rev().collect();
        let x = Buffer::from_slice(&device, &x).unwrap();
        let mut out = Buffer::from_slice(&device, &[7.0f32; 60]).unwrap();
        let mut bindings = [
            Binding::ReadAt(&x, 40),
            Binding::Bytes(bytes_of(&which)),
            Binding::WriteAt(&mut out, 20),
            Binding::Missing,
        ];
        scale(&mut queue, &mut bindings, "scale", 50).unwrap();
        let mut found = [0.0f32; 54];
        queue.read(&out, 3, &mut found).unwrap();
        let expected: Vec<f32> =
            [7.0; 2].into_iter().chain((0..50).map(|i| (10 + 49 - i) as f32 * 2.0)).chain([7.0; 2]).collect();
        assert_eq!(found[..], expected);
    }
}

#[test]
fn a_refused_launch_leaves_every_buffer_where_it_was() {
    let Some((device, _)) = emulated("a refused launch on the device", Rigour::Once) else { return };
    let Device::Gpu(gpu) = &device else { panic!("the emulator is a GPU") };
    let driver = gpu.driver();
    let span = |number: u8| {
        let span = Span { block: driver.allocate(16).unwrap(), first: 0, bytes: 16 };
        driver.write(span, &[number; 16]).unwrap();
        span
    };
    let (x, y) = (span(1), span(2));
    let cases: [(&[Argument<'_>], &str); 2] = [
        (&[Argument::Write(x), Argument::Write(y), Argument::Write(x)], "one buffer to write twice"),
        (&[Argument::Write(y), Argument::Read(x), Argument::Read(y)], "one buffer to read and to write"),
    ];
    for (arguments, text) in cases {
        let (program, entry, tuning) = (&SCALE, "scale", Tuning::default());
        let call = Call {
            program,
            entry,
            arguments,
            shape: &[0; 8],
            groups: 1,
            threads: 32,
            shared_bytes: 0,
            tuning,
            to_side: false,
        };
        let error = driver.launch(&call).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
        for (span, number) in [(x, 1), (y, 2)] {
            let mut found = [0; 16];
            driver.read(span, &mut found).unwrap();
            assert_eq!(found, [number; 16], "{text}");
        }
    }
}

#[test]
fn copies_moves_and_writes_land_where_they_should() {
    let Some((device, mut queue)) = emulated("copies on the device", Rigour::Once) else { return };
    let bytes: Vec<u8> = (0..100).collect();
    let from = Buffer::from_slice(&device, &bytes).unwrap();
    let mut to = Buffer::zeroed(&device, 40).unwrap();
    queue.copy(&from, 10, &mut to, 5, 30).unwrap();
    queue.fill_zero(&mut to, 8, 3).unwrap();
    queue.write(&mut to, 0, &[9u8, 9]).unwrap();
    let expected = |i: u8| match i {
        0 | 1 => 9,
        8..11 => 0,
        5..35 => i + 5,
        _ => 0,
    };
    assert_eq!(to.to_vec::<u8>().unwrap(), (0..40).map(expected).collect::<Vec<u8>>());
    // Overlapping moves, both ways, with a distance that does not divide the length.
    for (source, target, length) in
        [(3, 10, 80), (10, 3, 80), (4, 4, 9), (90, 1, 10), (7, 0, 0), (25, 0, 70), (0, 25, 70)]
    {
        let mut moved = Buffer::from_slice(&device, &bytes).unwrap();
        queue.move_within(&mut moved, source, target, length).unwrap();
        let mut expected = bytes.clone();
        expected.copy_within(source..source + length, target);
        assert_eq!(moved.to_vec::<u8>().unwrap(), expected, "{length} bytes from {source} to {target}");
    }
    let guarded = Buffer::guarded(&device, 100, 0xa5).unwrap();
    assert_eq!(guarded.guard_damage(), None);
    assert!(guarded.to_vec::<u8>().unwrap().iter().all(|byte| *byte == 0));
    for (before, damage) in [(true, -1), (false, 100)] {
        let mut guarded = Buffer::guarded(&device, 100, 0xa5).unwrap();
        guarded.break_guard(before);
        assert_eq!(guarded.guard_damage(), Some(damage));
    }
}

#[test]
fn what_can_not_run_is_refused_and_says_why() {
    let Some((device, mut queue)) = emulated("refusals of the device", Rigour::Once) else { return };
    let mut out = Buffer::zeroed(&device, 64).unwrap();
    let text = scale(&mut queue, &mut [Binding::Write(&mut out)], "beyond", 16).unwrap_err().to_string();
    assert!(text.contains("the emulated device failed"), "{text}");
    assert_eq!(
        scale(&mut queue, &mut [Binding::Write(&mut out)], "another", 16),
        Err(LaunchError::NoKernel { program: "scale", entry: "another", backend: Backend::Metal })
    );
    let Queue::Gpu(gpu) = &mut queue else { panic!("the emulator is a GPU") };
    let mut launch = |program, threads, shared_bytes| {
        gpu.launch(Launch { program, entry: "scale", bindings: &mut [], shape: &[], groups: 1, threads, shared_bytes })
    };
    assert!(matches!(launch(&ABSENT, 32, 0), Err(LaunchError::NoKernel { program: "absent", .. })));
    assert!(matches!(launch(&SCALE, 33, 0), Err(LaunchError::Shape { found: 33, expected: 64, .. })));
    assert!(matches!(launch(&SCALE, 2048, 0), Err(LaunchError::Limit { found: 2048, max: 1024, .. })));
    assert!(matches!(launch(&SCALE, 32, 1 << 16), Err(LaunchError::Limit { max: 32768, .. })));
    let error = Buffer::zeroed(&device, 1 << 40).unwrap_err();
    assert!(matches!(error, LaunchError::DeviceMemory { bytes: 0x100_0000_0000, .. }), "{error}");
}

#[test]
fn a_launch_that_is_too_much_for_a_chip_fails_and_is_recorded() {
    if !common::ready("what is recorded of a launch") {
        return;
    }
    // Through declared arrays, a threadgroup of 33 SIMD groups, and what a launch says itself.
    let declared = SOURCE.replace(
        "    if (i == 0) out[",
        "    threadgroup float part[8193];\n    part[0] = 1.0f;\n    if (i == 0) out[",
    );
    let cases = [
        (None, None, 32, 0, [32, 0]),
        (None, Some(declared), 32, 0, [32, 32784]),
        (Some(33), None, 32, 0, [1056, 0]),
        (None, None, 1056, 0, [1056, 0]),
        (None, None, 32, 32784, [32, 32784]),
    ];
    for (simdgroups, edit, threads, shared_bytes, wanted) in cases {
        let log = Log::default();
        let edit = edit.map(|text| (SOURCE, text));
        let settings = Settings { schedules: &SCHEDULES[..1], simdgroups, edit, log: Some(log.clone()) };
        let device = device_of(settings).expect("the compiler is installed");
        let Device::Gpu(gpu) = &device else { panic!("the emulator is a GPU") };
        let mut out = Buffer::zeroed(&device, 64).unwrap();
        let (shape, bindings) = (ShapeBytes::new().uint(1).float(2.0), &mut [Binding::Write(&mut out)]);
        let launch = Launch {
            program: &SCALE,
            entry: "beyond",
            bindings,
            shape: shape.bytes(),
            groups: 1,
            threads,
            shared_bytes,
        };
        let launched = tf_device::gpu::GpuQueue::new(gpu).launch(launch);
        assert_eq!(launched.is_ok(), wanted == [32, 0], "{wanted:?}: {launched:?}");
        let found: Vec<_> = log.launches().iter().map(|asked| [asked.threads, asked.threadgroup_bytes]).collect();
        assert_eq!(found, [wanted]);
    }
}

#[test]
#[should_panic(expected = "a host view of a GPU's buffer")]
fn a_host_view_of_device_memory_is_a_bug() {
    let Some((device, _)) = emulated("host views", Rigour::Once) else { panic!("a host view of a GPU's buffer") };
    let _ = Buffer::zeroed(&device, 64).unwrap().f32();
}

#[test]
#[should_panic(expected = "are beyond a buffer of 64 bytes")]
fn a_copy_beyond_a_buffer_is_a_bug() {
    let Some((device, mut queue)) = emulated("ranges", Rigour::Once) else { panic!("are beyond a buffer of 64 bytes") };
    let mut buffer = Buffer::zeroed(&device, 64).unwrap();
    let _ = queue.write(&mut buffer, 9, &[0.0f32; 8]);
}
