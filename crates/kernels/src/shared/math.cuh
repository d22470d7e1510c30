// Mirrors of tf_numerics::math and tf_numerics::qdq: same operations in the same order, so equal bits. Compiled without
// contraction; a fused multiply-add is written out.
#pragma once
#include "tensor.cuh"

// As the CPU's min and max instructions: the second where either is NaN.
__device__ __forceinline__ float min_second(float a, float b) { return a < b ? a : b; }
__device__ __forceinline__ float max_second(float a, float b) { return a > b ? a : b; }

__device__ __forceinline__ float exp_own(float x) {
    x = max_second(-104.0f, min_second(89.0f, x));
    const float n = rintf(x * __uint_as_float(0x3fb8aa3bu));
    float r = __fmaf_rn(n, -__uint_as_float(0x3f317218u), x);
    r = __fmaf_rn(n, -__uint_as_float(0xb102e308u), r);
    float q = __uint_as_float(0x3ab5638cu);
    q = __fmaf_rn(q, r, __uint_as_float(0x3c091eefu));
    q = __fmaf_rn(q, r, __uint_as_float(0x3d2aac2cu));
    q = __fmaf_rn(q, r, __uint_as_float(0x3e2aaa46u));
    q = __fmaf_rn(q, r, __uint_as_float(0x3efffffeu));
    const float value = 1.0f + __fmaf_rn(r * r, q, r);
    // A NaN's power is any number: the product is NaN all the same.
    const int power = (int)n, half = power >> 1;
    return value * __int_as_float((half + 127) << 23) * __int_as_float((power - half + 127) << 23);
}

__device__ __forceinline__ float silu(float x) {
    const float e = exp_own(-fabsf(x));
    return x * __fdiv_rn(x >= 0.0f ? 1.0f : e, 1.0f + e);
}

// The scale code of an FP8 block whose largest magnitude has these bits.
__device__ __forceinline__ u32 fp8_scale(u32 amax_bits) {
    if (amax_bits >= 0x7f800000u) return 255;
    const float scaled = fmaxf(__uint_as_float(amax_bits), 1e-4f) * (1.0f / 448.0f);
    const u32 bits = __float_as_uint(scaled);
    return (bits >> 23) + ((bits & 0x7fffffu) != 0);
}

// The nearest E4M3 value of `value` over its block's scale, times the scale: a bf16 number.
__device__ __forceinline__ float fp8_round(float value, u32 scale) {
    if (scale == 255) return __uint_as_float(0x7fc00000u);
    const float quotient = value * __uint_as_float((254 - scale) << 23);
    const float magnitude = fminf(448.0f, fabsf(quotient));
    const u32 bits = __float_as_uint(magnitude);
    const float normal = __uint_as_float((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000u);
    const float subnormal = (magnitude + 16384.0f) - 16384.0f;
    const float rounded = magnitude < 0.015625f ? subnormal : normal;
    return __uint_as_float(__float_as_uint(rounded) | (__float_as_uint(quotient) & 0x80000000u)) * __uint_as_float(scale << 23);
}

// QDQ8 of one block, a value a lane.
__device__ __forceinline__ float fp8_round_block(float value) {
    u32 amax = __float_as_uint(value) & 0x7fffffffu;
    for (int step = 1; step < 32; step *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
    return fp8_round(value, fp8_scale(amax));
}
