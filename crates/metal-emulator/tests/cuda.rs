//! The emulator under CUDA sources: what the shim computes, and planted bugs that it must find.

mod common;

use common::*;
use std::path::Path;
use tf_metal_emulator::{Argument, Program, SCHEDULES, cuda};

const SOURCE: &str = "
struct Shape { unsigned count; float factor; };

extern \"C\" __global__ void __launch_bounds__(64, 2)
reversed(const float* x, float* out, const Shape shape) {
    extern __shared__ float values[];
    __shared__ unsigned arrived;
    if (threadIdx.x == 0) arrived = 0;
    __syncthreads();
    values[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    atomicAdd(&arrived, 1u);
    __syncthreads();
    const float other = values[blockDim.x - 1 - threadIdx.x];
    out[blockIdx.x * blockDim.x + threadIdx.x] = __fmaf_rn(other, shape.factor, float(arrived));
}

extern \"C\" __global__ void lanes(const unsigned* x, unsigned* out, const Shape shape) {
    const unsigned lane = threadIdx.x % 32, value = x[threadIdx.x], full = 0xffffffffu;
    unsigned* to = out + 8 * threadIdx.x;
    to[0] = __shfl_xor_sync(full, value, 5);
    to[1] = __shfl_up_sync(full, value, 3);
    to[2] = __shfl_sync(full, value, lane / 2);
    to[3] = __reduce_max_sync(full, value);
    to[4] = __ballot_sync(full, value % 3 == 0);
    to[5] = __popc(to[4] & ((1u << lane) - 1));
    to[6] = __any_sync(full, value == 7);
    to[7] = __reduce_add_sync(full, value) + shape.count;
}
";

fn program(source: &str) -> Program {
    Program::build_cuda("test.cu", source, &[], Path::new(env!("CARGO_TARGET_TMPDIR")))
        .unwrap_or_else(|error| panic!("{error}"))
}

/// The error of the launch, or what it wrote.
fn run_on(source: &str, kernel: &str, x: &[u8], out_bytes: usize, threads: u32) -> Result<Vec<u8>, String> {
    let mut out = vec![0; out_bytes];
    let shape = [2, 3f32.to_bits()];
    let arguments = vec![Argument::Read(x), Argument::Write(&mut out), read(&shape)];
    let groups = if kernel == "lanes" { 1 } else { 2 };
    let mut launch = launch(kernel, arguments, groups, threads);
    launch.threadgroup = vec![u64::from(4 * threads)];
    let report = program(source).run_on(&mut launch, &cuda::CHIPS, &SCHEDULES);
    report.map_err(|error| error.to_string())?;
    drop(launch);
    Ok(out)
}

#[test]
fn blocks_threads_shared_memory_and_constants_are_those_of_cuda() {
    if !ready("blocks_threads_shared_memory_and_constants_are_those_of_cuda") {
        return;
    }
    let x: Vec<f32> = (0..128).map(|i| i as f32).collect();
    let out = floats(&run_on(SOURCE, "reversed", bytes(&x), 512, 64).unwrap());
    for (i, out) in out.iter().enumerate() {
        let from = i / 64 * 64 + 63 - i % 64;
        assert_eq!(*out, 3.0 * from as f32 + 64.0, "{i}");
    }
}

#[test]
fn warp_operations_are_those_of_cuda() {
    if !ready("warp_operations_are_those_of_cuda") {
        return;
    }
    let x: Vec<u32> = (0..64).map(|i| i * 37 % 101).collect();
    let mut twice = words(&run_on(SOURCE, "lanes", bytes(&x), 64 * 32, 64).unwrap());
    for (warp, values) in x.chunks(32).enumerate() {
        let mask = values.iter().enumerate().fold(0u32, |mask, (i, v)| mask | u32::from(v % 3 == 0) << i);
        for lane in 0..32 {
            let found: Vec<u32> = twice.drain(..8).collect();
            let before = mask & ((1u64 << lane) - 1) as u32;
            let wanted = [
                values[lane ^ 5],
                values[if lane >= 3 { lane - 3 } else { lane }],
                values[lane / 2],
                values.iter().copied().max().unwrap(),
                mask,
                before.count_ones(),
                u32::from(values.contains(&7)),
                values.iter().sum::<u32>() + 2,
            ];
            assert_eq!(found, wanted, "warp {warp}, lane {lane}");
        }
    }
}

#[test]
fn planted_bugs_of_cuda_sources_are_found() {
    if !ready("planted_bugs_of_cuda_sources_are_found") {
        return;
    }
    let x: Vec<f32> = (0..128).map(|i| i as f32).collect();
    let cases = [
        (
            "a missing barrier",
            "    atomicAdd(&arrived, 1u);\n    __syncthreads();",
            "    atomicAdd(&arrived, 1u);",
            "uninitialised",
        ),
        (
            "two writers",
            "    values[threadIdx.x] =",
            "    values[(threadIdx.x + 1) % 64] = 0.0f;\n    values[threadIdx.x] =",
            "race",
        ),
        ("nobody's value", "if (threadIdx.x == 0) arrived = 0;", "", "uninitialised"),
        (
            "one past the end",
            "values[blockDim.x - 1 - threadIdx.x]",
            "values[blockDim.x - threadIdx.x]",
            "at byte 256 of",
        ),
        (
            "a divergent barrier",
            "    values[threadIdx.x] =",
            "    if (threadIdx.x > 5) __syncthreads();\n    values[threadIdx.x] =",
            "divergent",
        ),
        (
            "a lane that left",
            "const unsigned lane",
            "if (threadIdx.x == 3) return;\n    const unsigned lane",
            "divergent",
        ),
    ];
    for (what, from, to, part) in cases {
        let source = edited(SOURCE, from, to);
        let kernel = if what == "a lane that left" { "lanes" } else { "reversed" };
        let error = run_on(&source, kernel, bytes(&x), 64 * 32, 64).expect_err(what);
        assert!(error.contains(part), "{what}: {error}");
    }
    let error = run_on(SOURCE, "lanes", bytes(&x), 64, 64).expect_err("a short buffer");
    assert!(error.contains("buffer 1"), "{error}");
}
