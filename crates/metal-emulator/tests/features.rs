//! What the language has beyond the kernels of today: atomics, function constants, matrices of a SIMD group, and the
//! rounding of halves and bfloats, vectors, and what a SIMD group's lanes tell each other. Each with bugs that must be
//! found.

mod common;

use common::*;
use tf_metal_emulator::{Argument, Program};
use tf_numerics::bf16;

const HEAD: &str = "#include <metal_stdlib>\nusing namespace metal;\n";

fn source(body: &str) -> String {
    format!("{HEAD}{body}")
}

/// Runs `kernel` over two threadgroups of 64 threads; the last buffer is written.
fn run(program: &Program, kernel: &str, inputs: &[&[u8]], out: &mut [u8]) -> Result<(), String> {
    let mut arguments: Vec<Argument<'_>> = inputs.iter().map(|bytes| Argument::Read(bytes)).collect();
    arguments.push(Argument::Write(out));
    program.run(&mut launch(kernel, arguments, 2, 64)).map(|_| ()).map_err(|error| error.to_string())
}

const ATOMICS: &str = "
kernel void all(device atomic_uint *u [[buffer(0)]], device atomic_int *s [[buffer(1)]], device uint *out [[buffer(2)]],
                uint i [[thread_position_in_grid]], uint t [[thread_position_in_threadgroup]]) {
    threadgroup atomic_int here[2];
    if (t == 0u) {
        atomic_store_explicit(&here[0], 1000, memory_order_relaxed);
        atomic_store_explicit(&here[1], 0, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&u[0], i, memory_order_relaxed);
    atomic_fetch_sub_explicit(&u[1], 1u, memory_order_relaxed);
    atomic_fetch_max_explicit(&u[2], i * 7u % 101u, memory_order_relaxed);
    atomic_fetch_min_explicit(&u[3], i + 5u, memory_order_relaxed);
    atomic_fetch_and_explicit(&u[4], ~(1u << i % 32u), memory_order_relaxed);
    atomic_fetch_or_explicit(&u[5], 1u << i % 16u, memory_order_relaxed);
    atomic_fetch_xor_explicit(&u[6], i, memory_order_relaxed);
    atomic_fetch_add_explicit(&s[0], int(i) - 100, memory_order_relaxed);
    atomic_fetch_min_explicit(&s[1], 50 - int(i), memory_order_relaxed);
    atomic_fetch_max_explicit(&s[2], -3 - int(i), memory_order_relaxed);
    atomic_fetch_min_explicit(&here[0], int(t) - 7, memory_order_relaxed);
    int seen = atomic_load_explicit(&here[1], memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&here[1], &seen, seen + 2, memory_order_relaxed, memory_order_relaxed)) {}
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint ticket = atomic_exchange_explicit(&u[7], 9u, memory_order_relaxed);
    out[i] = uint(atomic_load_explicit(&here[0], memory_order_relaxed) + atomic_load_explicit(&here[1], memory_order_relaxed))
        + (ticket > 9u ? 1u : 0u);
}
";

/// The words of the three buffers.
fn atomics(text: &str) -> Result<[Vec<u32>; 3], String> {
    let program = try_build("atomics.metal", &source(text)).map_err(|error| error.to_string())?;
    let mut unsigned = bytes(&[0u32, 128, 3, 1000, u32::MAX, 0, 0, 7]).to_vec();
    let (mut signed, mut out) = (bytes(&[0u32, 1000, (-9i32) as u32]).to_vec(), vec![0u8; 4 * 128]);
    let arguments = vec![Argument::Write(&mut unsigned), Argument::Write(&mut signed), Argument::Write(&mut out)];
    program.run(&mut launch("all", arguments, 2, 64)).map_err(|error| error.to_string())?;
    Ok([words(&unsigned), words(&signed), words(&out)])
}

#[test]
fn atomics_have_the_result_of_any_order() {
    if !ready("atomics_have_the_result_of_any_order") {
        return;
    }
    let [unsigned, signed, out] = atomics(ATOMICS).unwrap();
    let sum: u32 = (0..128).sum();
    let most = (0..128u32).map(|i| i * 7 % 101).max().unwrap();
    let xor = (0..128u32).fold(0, |a, b| a ^ b);
    assert_eq!(unsigned, [sum, 0, most, 5, 0, 0xffff, xor, 9]);
    assert_eq!(signed, [sum.wrapping_sub(100 * 128), (50i32 - 127) as u32, (-3i32) as u32]);
    assert!(out.iter().all(|&value| value == (128 - 7) as u32), "{out:?}");
}

#[test]
fn misused_atomics_are_named() {
    if !ready("misused_atomics_are_named") {
        return;
    }
    let plain = "((device uint *)u)";
    let cases = [
        (
            "a plain read beside atomic writes",
            "    const uint ticket",
            format!(
                "    if (i == 3u) atomic_fetch_add_explicit(&u[0], {plain}[0], memory_order_relaxed);\n    const uint ticket"
            ),
            "race: reads",
        ),
        (
            "a plain write beside atomic ones",
            "    const uint ticket",
            format!("    if (i == 3u) {plain}[1] = 1u;\n    const uint ticket"),
            "race: ",
        ),
        (
            "an atomic sum onto what nobody stored",
            "atomic_store_explicit(&here[0], 1000, memory_order_relaxed);",
            String::new(),
            "uninitialised",
        ),
        ("an atomic beyond its buffer", "&u[7], 9u", "&u[8], 9u".into(), "of buffer 0"),
        (
            "a result that depends on who comes first",
            "(ticket > 9u ? 1u : 0u)",
            "(ticket == 7u ? 1u : 0u)".into(),
            "depends on the order",
        ),
    ];
    for (name, from, to, wanted) in cases {
        let error = atomics(&edited(ATOMICS, from, &to)).expect_err(name);
        println!("{name}: {error}");
        assert!(error.contains(wanted), "{name}: {error}");
    }
    let read_only = try_build("atomics.metal", &source(ATOMICS)).unwrap();
    let mut out = vec![0u8; 4 * 128];
    let input = [0u8; 32];
    let arguments = vec![Argument::Read(&input), Argument::Read(&input), Argument::Write(&mut out)];
    let error = defect(read_only.run(&mut launch("all", arguments, 2, 64)));
    assert!(error.contains("gives it as read-only"), "{error}");
}

const CONSTANTS: &str = "
constant uint FACTOR [[function_constant(0)]];
constant bool HAS_OFFSET [[function_constant(1)]];
constant float OFFSET [[function_constant(2)]];
kernel void scale(device float *out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    float value = float(i * FACTOR);
    if (is_function_constant_defined(HAS_OFFSET) && HAS_OFFSET && is_function_constant_defined(OFFSET)) value += OFFSET;
    out[i] = value;
}
";

#[test]
fn function_constants_are_given_at_the_launch() {
    if !ready("function_constants_are_given_at_the_launch") {
        return;
    }
    let program = build("constants.metal", &source(CONSTANTS));
    let scaled = |constants: Vec<(u32, Vec<u8>)>| {
        let mut out = vec![0u8; 4 * 128];
        let mut launch = launch("scale", vec![Argument::Write(&mut out)], 2, 64);
        launch.constants = constants;
        let result = program.run(&mut launch).map_err(|error| error.to_string());
        drop(launch);
        result.map(|_| floats(&out)[5])
    };
    let factor = |value: u32| (0, value.to_ne_bytes().to_vec());
    let offset = (2, 0.5f32.to_ne_bytes().to_vec());
    assert_eq!(scaled(vec![factor(3)]), Ok(15.0));
    assert_eq!(scaled(vec![factor(4), (1, vec![1]), offset.clone()]), Ok(20.5));
    assert_eq!(scaled(vec![factor(4), (1, vec![0]), offset.clone()]), Ok(20.0));
    // The launch before leaves nothing behind.
    assert_eq!(scaled(vec![factor(3)]), Ok(15.0));
    for (constants, wanted) in [
        (vec![], "function constant 0 (FACTOR) has no value"),
        (vec![(0, vec![1, 2])], "(FACTOR) has 4 bytes, and 2 were given"),
        (vec![factor(1), (7, vec![1])], "function constant 7 is none of the source's"),
    ] {
        let error = scaled(constants).unwrap_err();
        assert!(error.contains(wanted), "{error}");
    }
}

const MATRICES: &str = "
kernel void product(device const float *a [[buffer(0)]], device const float *b [[buffer(1)]], device float *out [[buffer(2)]],
                    uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float tile[128];
    const uint item = 2u * group + simdgroup;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
    for (uint k = 0u; k < 16u; k += 8u) {
        simdgroup_float8x8 left, right;
        simdgroup_load(left, a + 128u * item, 16, ulong2(k, 0));
        simdgroup_load(right, b + 128u * item, 16, ulong2(k, 0), true);
        simdgroup_multiply_accumulate(sum, left, right, sum);
    }
    simdgroup_store(sum, tile + 64u * simdgroup, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = lane; i < 64u; i += 32u) out[64u * item + i] = tile[64u * simdgroup + i];
}
kernel void rounded(device const half *a [[buffer(0)]], device const bfloat *b [[buffer(1)]], device float *out [[buffer(2)]],
                    uint i [[thread_position_in_grid]]) {
    simdgroup_half8x8 x, y, z;
    simdgroup_bfloat8x8 u, v, w;
    simdgroup_load(x, a);
    simdgroup_load(y, a + 64);
    simdgroup_load(u, b);
    simdgroup_load(v, b + 64);
    simdgroup_multiply(z, x, y);
    simdgroup_multiply(w, u, v);
    threadgroup half halves[256];
    threadgroup bfloat bfloats[256];
    const uint group = i % 64u / 32u;
    simdgroup_store(z, halves + 64u * group);
    simdgroup_store(w, bfloats + 64u * group);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i < 64u) out[i] = float(halves[i]);
    if (i < 64u) out[64u + i] = float(bfloats[i]);
}
";

fn product(text: &str) -> Result<Vec<f32>, String> {
    let program = try_build("matrices.metal", &source(text)).map_err(|error| error.to_string())?;
    let mut values = Values::new(3);
    let (a, b) = (values.f32(4 * 128, 1.0), values.f32(4 * 128, 1.0));
    let mut out = vec![0u8; 4 * 4 * 64];
    run(&program, "product", &[bytes(&a), bytes(&b)], &mut out)?;
    for item in 0..4 {
        for (row, column) in (0..64).map(|i| (i / 8, i % 8)) {
            let term = |k: usize| (a[128 * item + 16 * row + k], b[128 * item + 16 * column + k]);
            let wanted = (0..16).fold(0.5f32, |sum, k| term(k).0.mul_add(term(k).1, sum));
            if floats(&out)[64 * item + 8 * row + column].to_bits() != wanted.to_bits() {
                return Err(format!("item {item}, row {row}, column {column}"));
            }
        }
    }
    Ok(floats(&out))
}

#[test]
fn matrices_multiply_in_the_stated_order() {
    if !ready("matrices_multiply_in_the_stated_order") {
        return;
    }
    product(MATRICES).unwrap();
    for (name, from, to, wanted) in [
        ("a transposed operand", "ulong2(k, 0), true);", "ulong2(k, 0));", "item 0"),
        ("a matrix beyond its buffer", "a + 128u * item, 16", "a + 128u * item + 64u, 16", "of buffer 0"),
        ("a load in divergent flow", "simdgroup_load(left,", "if (lane < 9u) simdgroup_load(left,", "divergent"),
        (
            "a dropped barrier behind a store",
            "    simdgroup_barrier(mem_flags::mem_threadgroup);\n",
            "",
            "uninitialised",
        ),
    ] {
        let error = product(&edited(MATRICES, from, to)).expect_err(name);
        println!("{name}: {error}");
        assert!(error.contains(wanted), "{name}: {error}");
    }
}

/// Bits of the nearest half, ties to even.
fn half_bits(value: f64) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = value.abs();
    if magnitude.is_infinite() {
        return sign | 0x7c00;
    }
    let step =
        if magnitude < 2f64.powi(-14) { 2f64.powi(-24) } else { 2f64.powi(magnitude.log2().floor() as i32 - 10) };
    let rounded = (magnitude / step).round_ties_even() * step;
    if rounded >= 65520.0 {
        return sign | 0x7c00;
    }
    if rounded < 2f64.powi(-14) {
        return sign | (rounded * 2f64.powi(24)) as u16;
    }
    let exponent = rounded.log2().floor() as i32;
    sign | ((exponent + 15) as u16) << 10 | ((rounded / 2f64.powi(exponent) - 1.0) * 1024.0) as u16
}

fn half_value(bits: u16) -> f64 {
    let (sign, exponent, fraction) = (bits >> 15, bits >> 10 & 31, f64::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 => f64::INFINITY,
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(i32::from(exponent) - 15),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

const ARITHMETIC: &str = "
kernel void halves(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]], device const half *c [[buffer(2)]],
                   device half *out [[buffer(3)]], uint i [[thread_position_in_grid]]) {
    out[5u * i] = a[i] * b[i] + c[i];
    out[5u * i + 1u] = fma(a[i], b[i], c[i]);
    out[5u * i + 2u] = a[i] / b[i];
    out[5u * i + 3u] = half(float(a[i]) * 1.0009765625f);
    out[5u * i + 4u] = a[i] - c[i];
}
kernel void bfloats(device const bfloat *a [[buffer(0)]], device const bfloat *b [[buffer(1)]],
                    device const bfloat *c [[buffer(2)]], device bfloat *out [[buffer(3)]],
                    uint i [[thread_position_in_grid]]) {
    out[3u * i] = a[i] * b[i] + c[i];
    out[3u * i + 1u] = a[i] / b[i];
    out[3u * i + 2u] = bfloat(float(a[i]) * 1.00390625f);
}
";

#[test]
fn halves_and_bfloats_round_at_every_operation() {
    if !ready("halves_and_bfloats_round_at_every_operation") {
        return;
    }
    let program = build("arithmetic.metal", &source(ARITHMETIC));
    let mut values = Values::new(9);
    // Every magnitude, subnormals and overflow included.
    let mut halves = |_| -> Vec<u16> { (0..128).map(|_| values.word() as u16 & 0xfbff).collect() };
    let [a, b, c] = [0, 1, 2].map(&mut halves);
    let mut out = vec![0u8; 2 * 5 * 128];
    run(&program, "halves", &[bytes(&a), bytes(&b), bytes(&c)], &mut out).unwrap();
    let out: Vec<u16> = out.as_chunks::<2>().0.iter().map(|&pair| u16::from_ne_bytes(pair)).collect();
    let mut differ = 0;
    for i in 0..128 {
        let [x, y, z] = [&a, &b, &c].map(|list| half_value(list[i]));
        let product = half_value(half_bits(x * y));
        // Float64 has no rounding of its own here.
        let wanted = [
            half_bits(product + z),
            half_bits(x * y + z),
            half_bits(x / y),
            half_bits(f64::from((x as f32) * 1.000_976_6)),
            half_bits(x - z),
        ];
        assert_eq!(out[5 * i..][..5], wanted, "{x} {y} {z}");
        differ += u32::from(wanted[0] != wanted[1]);
    }
    assert!(differ > 5, "the fused form never differed");

    let mut bfloats = |_| -> Vec<u16> { values.bf16(128, 3.0).iter().map(|&value| bf16::from_f32(value)).collect() };
    let [a, b, c] = [0, 1, 2].map(&mut bfloats);
    let mut out = vec![0u8; 2 * 3 * 128];
    run(&program, "bfloats", &[bytes(&a), bytes(&b), bytes(&c)], &mut out).unwrap();
    let out: Vec<u16> = out.as_chunks::<2>().0.iter().map(|&pair| u16::from_ne_bytes(pair)).collect();
    for i in 0..128 {
        let [x, y, z] = [&a, &b, &c].map(|list| bf16::to_f32(list[i]));
        let wanted = [bf16::round(x * y) + z, x / y, x * 1.003_906_2].map(bf16::from_f32);
        assert_eq!(out[3 * i..][..3], wanted, "{x} {y} {z}");
    }
}

#[test]
fn matrices_of_halves_and_bfloats_round_once() {
    if !ready("matrices_of_halves_and_bfloats_round_once") {
        return;
    }
    let program = build("matrices.metal", &source(MATRICES));
    let mut values = Values::new(4);
    let halves: Vec<u16> = values.f32(128, 1.0).iter().map(|&value| half_bits(f64::from(value))).collect();
    let bfloats: Vec<u16> = values.bf16(128, 1.0).iter().map(|&value| bf16::from_f32(value)).collect();
    let mut out = vec![0u8; 4 * 128];
    run(&program, "rounded", &[bytes(&halves), bytes(&bfloats)], &mut out).unwrap();
    let out = floats(&out);
    for (row, column) in (0..64).map(|i| (i / 8, i % 8)) {
        let sum = |value: &dyn Fn(usize) -> f32| {
            (0..8).fold(0f32, |sum, k| value(8 * row + k).mul_add(value(64 + 8 * k + column), sum))
        };
        let of_halves = half_bits(f64::from(sum(&|i| half_value(halves[i]) as f32)));
        let of_bfloats = bf16::round(sum(&|i| bf16::to_f32(bfloats[i])));
        assert_eq!(f64::from(out[8 * row + column]), half_value(of_halves));
        assert_eq!(out[64 + 8 * row + column].to_bits(), of_bfloats.to_bits());
    }
}

const VECTORS: &str = "
kernel void vectors(device const float4 *x [[buffer(0)]], device const uchar4 *codes [[buffer(1)]], device float *out [[buffer(2)]],
                    uint i [[thread_position_in_grid]]) {
    const float4 v = x[i];
    const float2 ends = v.xw * float2(2.0f, -1.0f);
    float3 turned = v.zyx;
    turned.y += 1.0f;
    const uint4 wide = uint4(codes[i].x, codes[i].y, codes[i].z, codes[i].w);
    const half2 halves = half2(half(v.x), half(v.y)) + half2(half(1.0f));
    const bfloat2 bfloats = bfloat2(bfloat(v.z), bfloat(v.w)) + bfloat2(bfloat(1.0f));
    const uint packed = as_type<uint>(halves);
    const char4 moved = as_type<char4>(as_type<uint>(codes[i]));
    device float *to = out + 16u * i;
    to[0] = ends.x;
    to[1] = ends.y;
    to[2] = turned.x;
    to[3] = turned.y;
    to[4] = turned.z;
    to[5] = float(wide.x + wide.w * 256u);
    to[6] = float(halves.x);
    to[7] = float(halves.y);
    to[8] = float(bfloats.x);
    to[9] = float(bfloats.y);
    to[10] = float(packed >> 16);
    to[11] = float(moved.y);
    to[12] = float4(1.0f).w + float(int3(4, 5, 6).z);
    to[13] = float(ulong2(1ul << 40, 3ul).x >> 38);
    to[14] = float(short2(-3, 7).x + ushort3(9).z);
    to[15] = as_type<float>(as_type<uint>(v.w) ^ 0x80000000u);
}
";

#[test]
fn vectors_are_their_elements() {
    if !ready("vectors_are_their_elements") {
        return;
    }
    let program = build("vectors.metal", &source(VECTORS));
    let mut values = Values::new(11);
    let x = values.f32(4 * 128, 8.0);
    let codes: Vec<u8> = (0..4 * 128).map(|_| values.word() as u8).collect();
    let mut out = vec![0u8; 4 * 16 * 128];
    run(&program, "vectors", &[bytes(&x), &codes], &mut out).unwrap();
    for (i, found) in floats(&out).chunks_exact(16).enumerate() {
        let [x, y, z, w] = [0, 1, 2, 3].map(|element| x[4 * i + element]);
        let code = |element: usize| codes[4 * i + element];
        let half = |value: f32| half_value(half_bits(f64::from(value)));
        let halves = [x, y].map(|value| half_bits(half(value) + 1.0));
        let bfloat = |value: f32| bf16::round(bf16::round(value) + 1.0);
        let wanted = [
            x * 2.0,
            -w,
            z,
            y + 1.0,
            x,
            (u32::from(code(0)) + 256 * u32::from(code(3))) as f32,
            half_value(halves[0]) as f32,
            half_value(halves[1]) as f32,
            bfloat(z),
            bfloat(w),
            f32::from(halves[1]),
            f32::from(code(1) as i8),
            7.0,
            4.0,
            6.0,
            -w,
        ];
        assert_eq!(
            found.iter().map(|value| value.to_bits()).collect::<Vec<_>>(),
            wanted.map(f32::to_bits),
            "thread {i}"
        );
    }
}

const LANES: &str = "
kernel void lanes(device const uint *x [[buffer(0)]], device uint *out [[buffer(1)]], uint i [[thread_position_in_grid]],
                  uint lane [[thread_index_in_simdgroup]]) {
    const uint value = x[i];
    device uint *to = out + 12u * i;
    to[0] = simd_shuffle(value, ushort(31u - lane));
    to[1] = simd_broadcast(value, ushort(7));
    to[2] = simd_shuffle_xor(value, ushort(5));
    to[3] = simd_shuffle_up(value, ushort(3));
    to[4] = simd_shuffle_down(value, ushort(4));
    to[5] = simd_sum(value);
    to[6] = simd_min(value);
    to[7] = simd_max(value);
    to[8] = simd_or(value);
    to[9] = simd_prefix_exclusive_sum(value);
    to[10] = simd_any(value == x[i / 32u * 32u + 9u]) ? 1u : 0u;
    to[11] = simd_all(value > 0u) ? 1u : 0u;
}
";

#[test]
fn operations_of_a_simd_group_have_their_documented_results() {
    if !ready("operations_of_a_simd_group_have_their_documented_results") {
        return;
    }
    let program = build("lanes.metal", &source(LANES));
    let mut values = Values::new(12);
    let x: Vec<u32> = (0..128).map(|i| if i == 40 { 0 } else { values.word() >> 8 | 1 }).collect();
    let mut out = vec![0u8; 4 * 12 * 128];
    run(&program, "lanes", &[bytes(&x)], &mut out).unwrap();
    for (i, found) in words(&out).chunks_exact(12).enumerate() {
        let (group, lane) = (&x[i / 32 * 32..][..32], i % 32);
        let wanted = [
            group[31 - lane],
            group[7],
            group[lane ^ 5],
            // A lane without a source keeps its own value.
            group[if lane < 3 { lane } else { lane - 3 }],
            group[if lane + 4 < 32 { lane + 4 } else { lane }],
            group.iter().sum(),
            *group.iter().min().unwrap(),
            *group.iter().max().unwrap(),
            group.iter().fold(0, |all, value| all | value),
            group[..lane].iter().sum(),
            1,
            u32::from(i / 32 != 1),
        ];
        assert_eq!(found, wanted, "thread {i}");
    }
}

/// Exchanges values through the output, which both SIMD groups of a threadgroup write and read.
const DEVICE: &str = "
kernel void turn(device const uint *x [[buffer(0)]], device uint *out [[buffer(1)]], uint i [[thread_position_in_grid]],
                 uint t [[thread_position_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
    out[i] = x[i];
    threadgroup_barrier(mem_flags::mem_device);
    const uint other = out[64u * group + 63u - t];
    threadgroup_barrier(mem_flags::mem_device);
    out[i] = other;
}
";

#[test]
fn races_on_device_memory_and_misused_memory_are_named() {
    if !ready("races_on_device_memory_and_misused_memory_are_named") {
        return;
    }
    let turned = |text: &str| {
        let program = try_build("turn.metal", &source(text)).map_err(|error| error.to_string())?;
        let x: Vec<u32> = (0..128).collect();
        let mut out = vec![0u8; 4 * 128];
        run(&program, "turn", &[bytes(&x)], &mut out)?;
        Ok::<_, String>(words(&out))
    };
    assert_eq!(turned(DEVICE).unwrap(), (0..128).map(|i| i / 64 * 64 + 63 - i % 64).collect::<Vec<u32>>());
    let first = "    threadgroup_barrier(mem_flags::mem_device);\n    const uint other";
    let last = "    threadgroup_barrier(mem_flags::mem_device);\n    out[i] = other;";
    for (name, from, to, wanted) in [
        ("a dropped barrier of device memory", first, "    const uint other", "race: "),
        (
            "a barrier of threadgroup memory in its place",
            first,
            "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    const uint other",
            "race: ",
        ),
        (
            "a barrier of one SIMD group in its place",
            first,
            "    simdgroup_barrier(mem_flags::mem_device);\n    const uint other",
            "race: ",
        ),
        ("a write that a read meets", last, "    out[i] = other;", "race: "),
        ("an output that another threadgroup reads", "64u * group + 63u - t", "127u - i", "another threadgroup"),
        (
            "a misaligned write",
            "out[i] = other;",
            "*(device uint2 *)(out + 2u * (i / 2u) + 1u) = uint2(other);",
            "misaligned",
        ),
        (
            "a misaligned short",
            "out[i] = other;",
            "*(device ushort *)((device uchar *)(out + i) + 1) = 1;",
            "misaligned",
        ),
        (
            "a vector that ends beyond the buffer",
            "out[i] = other;",
            "if (i == 127u) *(device uint4 *)(out + 128u - 2u) = uint4(other); else out[i] = other;",
            "buffer 1",
        ),
    ] {
        let error = turned(&edited(DEVICE, from, to)).expect_err(name);
        println!("{name}: {error}");
        assert!(error.contains(wanted), "{name}: {error}");
    }
}
