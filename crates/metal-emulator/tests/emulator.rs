//! The emulator finds what a GPU would not tell: each planted bug must be named, and the same source without it must pass.

mod common;

use common::*;
use tf_metal_emulator::chips::CHIPS;
use tf_metal_emulator::{Argument, BuildError, Order, Program, Schedule};

const HEAD: &str = "#include <metal_stdlib>\nusing namespace metal;\n";

/// Sums 64 numbers of each threadgroup through threadgroup memory, and turns a row around by shuffles.
const SUM: &str = "
kernel void sum(device const float *x [[buffer(0)]], device float *out [[buffer(1)]], constant uint &n [[buffer(2)]],
                uint group [[threadgroup_position_in_grid]], uint t [[thread_position_in_threadgroup]],
                uint lane [[thread_index_in_simdgroup]], uint threads [[threads_per_threadgroup]]) {
    threadgroup float part[64];
    threadgroup float total[1];
    part[t] = x[group * n + t] * 2.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float value = part[threads - 1 - t];
    if (t == 0) {
        float s = 0.0f;
        for (uint i = 0; i < threads; i++) s += part[i];
        total[0] = s;
    }
    value += simd_shuffle_xor(value, ushort(1));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[group * threads + t] = value + total[0] + float(lane);
}
";

fn run_sum(source: &str) -> Result<Vec<f32>, String> {
    let program = build("sum.metal", &format!("{HEAD}{source}"));
    let x: Vec<f32> = (0..3 * 64).map(|i| (i * i % 31) as f32).collect();
    let mut out = vec![0xffu8; 3 * 64 * 4];
    let n = [64u32];
    let arguments = vec![read(&x), Argument::Write(&mut out), read(&n)];
    match program.run(&mut launch("sum", arguments, 3, 64)) {
        Ok(_) => Ok(floats(&out)),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn programs_of_one_text_run_at_the_same_time() {
    if !ready("programs_of_one_text_run_at_the_same_time") {
        return;
    }
    // As a kernel that two launchers declare: the second load of a library has the state of the first.
    let source = format!("{HEAD}// declared by two launchers{SUM}");
    let programs = [build("sum.metal", &source), build("sum.metal", &source)];
    let run = |program: &Program, number: f32, schedule: Schedule| {
        let x = vec![number; 3 * 64];
        let mut out = vec![0xffu8; 3 * 64 * 4];
        let mut sum = launch("sum", vec![read(&x), Argument::Write(&mut out), read(&[64u32])], 3, 64);
        program.run_on(&mut sum, &CHIPS, &[schedule]).expect("the kernel is right");
        for (i, value) in floats(&out).into_iter().enumerate() {
            assert_eq!(value, 2.0 * number * 66.0 + (i % 32) as f32, "{number}");
        }
    };
    for checked in [false, true] {
        std::thread::scope(|scope| {
            for (program, number) in programs.iter().zip([1.0, 3.0]) {
                let schedule = Schedule { order: Order::Forward, checked };
                scope.spawn(move || (0..500).for_each(|_| run(program, number, schedule)));
            }
        });
    }
}

#[test]
fn a_correct_kernel_runs_and_its_bits_are_right() {
    if !ready("a_correct_kernel_runs_and_its_bits_are_right") {
        return;
    }
    let out = run_sum(SUM).unwrap();
    let x = |group: usize, t: usize| 2.0 * ((group * 64 + t) * (group * 64 + t) % 31) as f32;
    for group in 0..3 {
        let total: f32 = (0..64).map(|t| x(group, t)).sum();
        for t in 0..64 {
            let wanted = x(group, 63 - t) + x(group, 63 - (t ^ 1)) + total + (t % 32) as f32;
            assert_eq!(out[group * 64 + t], wanted, "group {group} thread {t}");
        }
    }
}

#[test]
fn each_planted_bug_is_named() {
    if !ready("each_planted_bug_is_named") {
        return;
    }
    let first_barrier = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    float value";
    let last = "    out[group * threads + t] = value";
    let cases = [
        ("a dropped barrier", first_barrier, "    float value", "uninitialised"),
        (
            "a barrier of the wrong memory",
            first_barrier,
            "    threadgroup_barrier(mem_flags::mem_device);\n    float value",
            "race",
        ),
        ("a read that a later write meets", "    value += simd", "    part[t] = value;\n    value += simd", "race: "),
        (
            "a write that a later read meets",
            last,
            "    part[t] = value;\n    value = part[t ^ 1];\n    out[group * threads + t] = value",
            "race: ",
        ),
        (
            "a SIMD-group barrier where two groups meet",
            first_barrier,
            "    simdgroup_barrier(mem_flags::mem_threadgroup);\n    float value",
            "uninitialised",
        ),
        ("an element that nobody writes", "    part[t] = x", "    if (t != 5) part[t] = x", "uninitialised"),
        ("a sum beyond the array", "i < threads; i++", "i <= threads; i++", "of part, which has 256 bytes"),
        ("an input beyond its end", "x[group * n + t]", "x[group * n + t + 1]", "of buffer 0"),
        ("an input before its start", "x[group * n + t]", "x[int(group * n + t) - 1]", "of buffer 0"),
        ("an output beyond its end", "out[group * threads + t]", "out[group * threads + t + 1]", "of buffer 1"),
        ("outputs that threadgroups share", "out[group * threads + t]", "out[t]", "another threadgroup"),
        (
            "a write to an input",
            last,
            "    const_cast<device float *>(x)[t] = 1.0f;\n    out[group * threads + t] = value",
            "read-only",
        ),
        (
            "threads that return before a barrier",
            first_barrier,
            "    if (t > 60) return;\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n    float value",
            "divergent",
        ),
        (
            "threads that skip a barrier",
            "+ float(lane);",
            "+ float(lane);\n    if (t < 32) threadgroup_barrier(mem_flags::mem_threadgroup);",
            "divergent",
        ),
        (
            "two barriers that meet",
            first_barrier,
            "    if (t < 32) threadgroup_barrier(mem_flags::mem_threadgroup);\n    \
             else threadgroup_barrier(mem_flags::mem_threadgroup);\n    float value",
            "divergent barrier",
        ),
        ("a shuffle in divergent flow", "    value += simd", "    if (lane != 3) value += simd", "divergent"),
        (
            "two shuffles that meet",
            "    value += simd_shuffle_xor(value, ushort(1));",
            "    if (lane < 7) value += simd_shuffle_xor(value, ushort(1));\n    \
             else value += simd_shuffle_xor(value, ushort(1));",
            "divergent SIMD-group operation",
        ),
        (
            "a misaligned vector",
            "= x[group * n + t] * 2.0f;",
            "= (*(device const float4 *)(x + t % 8)).x;",
            "misaligned",
        ),
        (
            "more threadgroup memory than a chip has",
            "threadgroup float total[1];",
            "threadgroup float total[8190];",
            "threadgroup memory: total makes 33",
        ),
    ];
    for (name, from, to, wanted) in cases {
        let error = run_sum(&edited(SUM, from, to)).expect_err(name);
        println!("{name}: {error}");
        assert!(error.contains(wanted), "{name}: {error}");
    }
}

#[test]
fn the_plain_build_finds_what_the_checks_find_in_part() {
    if !ready("the_plain_build_finds_what_the_checks_find_in_part") {
        return;
    }
    let plain: Vec<Schedule> = [Order::Forward, Order::Reverse, Order::Random(7), Order::Random(8)]
        .map(|order| Schedule { order, checked: false })
        .to_vec();
    let barrier = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    float value";
    let cases = [
        (barrier, "    float value", "depends on the order"),
        ("    part[t] = x", "    if (t != 5) part[t] = x", "depends on the order"),
        ("x[group * n + t]", "x[group * n + t + 512]", "outside its buffers"),
        ("out[group * threads + t]", "out[int(group * threads + t) - 1024]", "outside its buffers"),
    ];
    for (from, to, wanted) in cases {
        let program = build("sum.metal", &format!("{HEAD}{}", edited(SUM, from, to)));
        let x = vec![1.5f32; 3 * 64];
        let mut out = vec![0xffu8; 3 * 64 * 4];
        let n = [64u32];
        let mut launch = launch("sum", vec![read(&x), Argument::Write(&mut out), read(&n)], 3, 64);
        let error = defect(program.run_on(&mut launch, &CHIPS, &plain));
        assert!(error.contains(wanted), "{to}: {error}");
    }
}

#[test]
fn a_launch_beyond_a_chip_is_refused() {
    if !ready("a_launch_beyond_a_chip_is_refused") {
        return;
    }
    let source = "kernel void one(device float *x [[buffer(0)]], threadgroup float *p [[threadgroup(0)]], \
                  uint t [[thread_position_in_threadgroup]]) { p[t] = 1.0f; x[t] = p[t]; }\n";
    let program = build("one.metal", &format!("{HEAD}{source}"));
    for (threads, bytes, buffers, wanted) in [
        (1024, 4096, 1, None),
        (1025, 8192, 1, Some("1025 threads")),
        (32, 32 << 10, 1, None),
        (32, (32 << 10) + 16, 1, Some("32784 bytes of threadgroup memory")),
        (32, 128, 32, Some("32 buffers")),
        (33, 128, 1, Some("of threadgroup(0), which has 128 bytes")),
    ] {
        let mut out = vec![0u8; 1025 * 4];
        let mut arguments = vec![Argument::Write(&mut out)];
        arguments.extend((1..buffers).map(|_| Argument::Read(&[])));
        let mut launch = launch("one", arguments, 1, threads);
        launch.threadgroup = vec![bytes];
        let error = defect(program.run(&mut launch));
        match wanted {
            None => assert_eq!(error, "no error"),
            Some(wanted) => assert!(error.contains(wanted), "{error}"),
        }
    }
}

#[test]
fn what_apple_s_compiler_refuses_is_refused() {
    if !ready("what_apple_s_compiler_refuses_is_refused") {
        return;
    }
    let body = |line: &str| {
        format!(
            "{HEAD}float first(device const float *x) {{ return x[0]; }}\n\
             kernel void f(device const float *x [[buffer(0)]], device float *out [[buffer(1)]]) {{\n{line}\n}}\n"
        )
    };
    for (line, wanted) in [
        ("out[0] = first(x);", None),
        ("const float *lost = x; out[0] = lost[0];", Some("address-space")),
        ("threadgroup float a[4]; a[0] = 1.0f; out[0] = first(a);", Some("address-space")),
        ("out[0] = fast::exp(x[0]);", Some("address-space check")),
        ("out[0] = simd_sum(x[0]);", Some("ambiguous")),
        ("float y; if (x[0] > 0.0f) y = 1.0f; out[0] = y;", Some("uninitialized")),
    ] {
        match (try_build("f.metal", &body(line)), wanted) {
            (Ok(_), None) => {}
            (Err(BuildError::Compiler { text, stage, .. }), Some(wanted)) => {
                assert!(text.contains(wanted) || stage.contains(wanted), "{line}: {text}");
            }
            (Ok(_), Some(_)) => panic!("{line} was accepted"),
            (Err(error), _) => panic!("{line}: {error}"),
        }
    }
}

#[test]
fn atomics_and_integer_reductions_have_one_result() {
    if !ready("atomics_and_integer_reductions_have_one_result") {
        return;
    }
    let source = "kernel void count(device atomic_uint *all [[buffer(0)]], device uint *out [[buffer(1)]], \
                  uint i [[thread_position_in_grid]]) {\n    threadgroup atomic_uint here[1];\n    \
                  if (i % 64 == 0) atomic_store_explicit(&here[0], 0u, memory_order_relaxed);\n    \
                  threadgroup_barrier(mem_flags::mem_threadgroup);\n    \
                  atomic_fetch_add_explicit(&here[0], i, memory_order_relaxed);\n    \
                  atomic_fetch_add_explicit(&all[0], 1u, memory_order_relaxed);\n    \
                  threadgroup_barrier(mem_flags::mem_threadgroup);\n    \
                  out[i] = atomic_load_explicit(&here[0], memory_order_relaxed) + simd_max(i) + simd_prefix_exclusive_sum(1u);\n}\n";
    let program = build("count.metal", &format!("{HEAD}{source}"));
    let (mut all, mut out) = (vec![0u8; 4], vec![0u8; 4 * 128]);
    program
        .run(&mut launch("count", vec![Argument::Write(&mut all), Argument::Write(&mut out)], 2, 64))
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(words(&all), [128]);
    for (i, value) in words(&out).into_iter().enumerate() {
        let group = i / 64 * 64;
        let sum: usize = (group..group + 64).sum();
        assert_eq!(value as usize, sum + (i / 32 * 32 + 31) + i % 32, "thread {i}");
    }
}
