// Mirrors of tf_numerics::math, tf_numerics::qdq and tf_kernels::order, and of prelude.metal: the same operations in the same
// order, so equal bits. Compiled without contraction; a fused multiply-add is written out, division and square root are the
// correctly rounded ones and subnormals are kept. A sum belongs to one warp, so that no result depends on the block's size.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 WARP = 0xffffffffu;

__device__ __forceinline__ float from_bits(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 to_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float fma_own(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float not_a_number() { return from_bits(0x7fc00000u); }
__device__ __forceinline__ float infinite() { return from_bits(0x7f800000u); }

// The CPU's minimum and maximum: the second operand where either is NaN.
__device__ __forceinline__ float min_second(float a, float b) { return a < b ? a : b; }
__device__ __forceinline__ float max_second(float a, float b) { return a > b ? a : b; }

// A source of tensor.cuh, included before, has its functions of these names, where the wait and the next start are apart.
#ifndef TF_TENSOR_CUH
__device__ __forceinline__ float bf16_round(float value) {
    const u32 bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return from_bits((bits & 0xffff0000u) | 0x00400000u);
    return from_bits((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

// Until the launch before this one is complete and its writes are seen; from then on the next one may take the room that this
// one leaves. Weights may be read before it, inputs may not.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A word that a block leaves for whoever of its grid arrives last; the count of those before; and the word, for the last.
__device__ __forceinline__ void leave_word(u32* to, u32 value) {
#ifdef TF_EMULATED
    atomicExch(to, value);
#else
    asm volatile("st.global.cg.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
#endif
}

__device__ __forceinline__ u32 arrive_last(u32* counter) {
#ifdef TF_EMULATED
    return atomicAdd(counter, 1u);
#else
    u32 before;
    asm volatile("atom.global.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
#endif
}

__device__ __forceinline__ u32 left_word(u32* from) {
#ifdef TF_EMULATED
    return atomicAdd(from, 0u);
#else
    u32 value;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
#endif
}

// Sixteen bytes from global to shared memory, on their own way; then an end of the copies so far, and a wait until at most
// PENDING groups are on their way.
__device__ __forceinline__ void copy_async_16(float4* to, const float4* from) {
#ifdef TF_EMULATED
    *to = *from;
#else
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(address), "l"(from) : "memory");
#endif
}

__device__ __forceinline__ void end_copy_group() {
#ifndef TF_EMULATED
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
__device__ __forceinline__ void wait_for_copy_groups() {
#ifndef TF_EMULATED
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
#endif
}
#endif

// ---- sums

// Sixteen lanes fold by halves, 8, 4, 2, 1; both halves of the warp do so on their own.
__device__ __forceinline__ float fold16(float value) {
    value = value + __shfl_xor_sync(WARP, value, 8);
    value = value + __shfl_xor_sync(WARP, value, 4);
    value = value + __shfl_xor_sync(WARP, value, 2);
    return value + __shfl_xor_sync(WARP, value, 1);
}

// Four accumulators of sixteen lanes: lanes 0..15 hold accumulators 0 and 2, lanes 16..31 hold 1 and 3.
// (acc0 + acc1) + (acc2 + acc3), then fold16. Every lane gets the sum.
__device__ __forceinline__ float fold_four(float even, float odd) {
    even = even + __shfl_xor_sync(WARP, even, 16);
    odd = odd + __shfl_xor_sync(WARP, odd, 16);
    return fold16(even + odd);
}

// order::sum_products of the factors that `of(column, a, b)` gives, by all lanes of a warp. `columns` is a multiple of 16.
// Eight steps' factors are fetched at once, so that the chains do not wait for memory.
template <class Of>
__device__ __forceinline__ float sum_products_of(u32 columns, u32 lane, Of of) {
    constexpr u32 STEPS = 8;
    float even = 0.0f, odd = 0.0f;
    u32 c = lane;
    for (; c - lane + 64 * STEPS <= columns; c += 64 * STEPS) {
        float a[2 * STEPS], b[2 * STEPS];
#pragma unroll
        for (u32 i = 0; i < 2 * STEPS; i++) of(c + 32 * i, a[i], b[i]);
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) {
            even = fma_own(a[2 * i], b[2 * i], even);
            odd = fma_own(a[2 * i + 1], b[2 * i + 1], odd);
        }
    }
    for (; c < columns; c += 64) {
        float a, b;
        of(c, a, b);
        even = fma_own(a, b, even);
        if (c + 32 < columns) {
            of(c + 32, a, b);
            odd = fma_own(a, b, odd);
        }
    }
    return fold_four(even, odd);
}

__device__ __forceinline__ float sum_squares(const float* x, u32 columns, u32 lane) {
    return sum_products_of(columns, lane, [&](u32 c, float& a, float& b) { a = b = x[c]; });
}

__device__ __forceinline__ float inverse_rms(float squares, u32 columns, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(squares, (float)columns) + eps));
}

// The largest word of a warp.
__device__ __forceinline__ u32 warp_max(u32 value) { return __reduce_max_sync(WARP, value); }

// ---- functions

__device__ __forceinline__ float exp_own(float x) {
    x = max_second(-104.0f, min_second(89.0f, x));
    const float n = rintf(x * from_bits(0x3fb8aa3bu));
    float r = fma_own(n, -from_bits(0x3f317218u), x);
    r = fma_own(n, -from_bits(0xb102e308u), r);
    float q = from_bits(0x3ab5638cu);
    q = fma_own(q, r, from_bits(0x3c091eefu));
    q = fma_own(q, r, from_bits(0x3d2aac2cu));
    q = fma_own(q, r, from_bits(0x3e2aaa46u));
    q = fma_own(q, r, from_bits(0x3efffffeu));
    const float value = 1.0f + fma_own(r * r, q, r);
    // A NaN's power may be any number: the product is NaN all the same.
    const int power = (int)(n == n ? n : 0.0f), low = power >> 1;
    return value * from_bits((u32)(low + 127) << 23) * from_bits((u32)(power - low + 127) << 23);
}

__device__ __forceinline__ float ln_own(float x) {
    const bool tiny = x < from_bits(0x00800000u);
    const int bits = (int)to_bits(tiny ? x * 8388608.0f : x);
    const int k = (bits - 0x3f3504f3) >> 23;
    const float f = from_bits((u32)bits - ((u32)k << 23)) - 1.0f;
    const float power = (float)(tiny ? k - 23 : k);
    float q = from_bits(0x3d59cda4u);
    q = fma_own(q, f, from_bits(0xbddf6d40u));
    q = fma_own(q, f, from_bits(0x3df803c5u));
    q = fma_own(q, f, from_bits(0xbe008316u));
    q = fma_own(q, f, from_bits(0x3e11817fu));
    q = fma_own(q, f, from_bits(0xbe2a9783u));
    q = fma_own(q, f, from_bits(0x3e4cd2a1u));
    q = fma_own(q, f, from_bits(0xbe800038u));
    q = fma_own(q, f, from_bits(0x3eaaaaa4u));
    const float square = f * f;
    float rest = fma_own(square * f, q, power * from_bits(0x35bfbe8eu));
    rest = fma_own(square, -0.5f, rest);
    float value = fma_own(power, from_bits(0x3f317200u), f + rest);
    if (x == infinite()) value = x;
    if (x < 0.0f) value = not_a_number();
    if (x == 0.0f) value = -infinite();
    return x != x ? x : value;
}

__device__ __forceinline__ float log1p_own(float x) {
    const float u = 1.0f + x;
    const float lost = x > 1.0f ? 1.0f - (u - x) : x - (u - 1.0f);
    float value = ln_own(u) + __fdiv_rn(lost, u);
    if (x == infinite()) value = x;
    if (x == -1.0f) value = -infinite();
    return x == 0.0f ? x : value;
}

__device__ __forceinline__ float sigmoid_own(float x) {
    const float e = exp_own(-fabsf(x));
    return __fdiv_rn(x >= 0.0f ? 1.0f : e, 1.0f + e);
}

__device__ __forceinline__ float softplus_own(float x) { return max_second(0.0f, x) + log1p_own(exp_own(-fabsf(x))); }

// Sine (x) and cosine (y) for magnitudes up to 2^21.
__device__ __forceinline__ float2 sin_cos_own(float x) {
    x = fabsf(x) <= 2097152.0f ? x : not_a_number();
    const float n = rintf(x * from_bits(0x3f22f983u));
    float r = fma_own(n, -from_bits(0x3fc90fdbu), x);
    const float rest = fma_own(n, -from_bits(0xb33bbd2eu), n * -from_bits(0xa6f72cedu));
    r = r + rest;
    const u32 quadrant = (u32)(int)(n == n ? n : 0.0f);
    const float z = r * r;
    float s = from_bits(0x36382232u);
    s = fma_own(s, z, from_bits(0xb95015f7u));
    s = fma_own(s, z, from_bits(0x3c0888a6u));
    s = fma_own(s, z, from_bits(0xbe2aaaabu));
    const float sine = fma_own(z * r, s, r);
    float c = from_bits(0xb4946c16u);
    c = fma_own(c, z, from_bits(0x37d01cadu));
    c = fma_own(c, z, from_bits(0xbab60b92u));
    c = fma_own(c, z, from_bits(0x3d2aaaabu));
    const float cosine = fma_own(z * z, c, fma_own(z, -0.5f, 1.0f));
    const bool is_odd = (quadrant & 1u) != 0;
    float2 result;
    result.x = from_bits(to_bits(is_odd ? cosine : sine) ^ (quadrant << 30 & 0x80000000u));
    result.y = from_bits(to_bits(is_odd ? sine : cosine) ^ ((quadrant + 1u) << 30 & 0x80000000u));
    return result;
}

// ---- formats

__device__ __forceinline__ float e8m0_value(u32 code) {
    return code == 0 ? from_bits(0x00400000u) : code == 255 ? not_a_number() : from_bits(code << 23);
}

__device__ __forceinline__ float e4m3_value(u32 code) {
    const u32 magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
    if (magnitude == 0x7fu) return from_bits(sign | 0x7fc00000u);
    // The fields of bf16's wider exponent, 120 too low: the product is exact, subnormals included.
    return from_bits(magnitude << 20 | sign) * from_bits(247u << 23);
}

__device__ __forceinline__ u32 e4m3_code(float value) {
    const u32 sign = to_bits(value) >> 24 & 0x80u;
    const float magnitude = min_second(448.0f, fabsf(value));
    if (magnitude != magnitude) return 0x7fu | sign;
    const u32 bits = to_bits(magnitude);
    const u32 normal = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
    const u32 subnormal = (u32)rintf((magnitude < 0.015625f ? magnitude : 0.0f) * 512.0f);
    return (magnitude < 0.015625f ? subnormal : normal) | sign;
}

__device__ __forceinline__ float e2m1_value(u32 code) {
    // 0 and 0.5 are the subnormals of a two-bit exponent; the product is exact.
    return from_bits((code & 7u) << 22 | (code & 8u) << 28) * from_bits(253u << 23);
}

__device__ __forceinline__ u32 e2m1_code(float value) {
    const u32 sign = to_bits(value) >> 28 & 8u;
    const u32 bits = min(to_bits(value) & 0x7fffffffu, 0x40c00000u);
    const float magnitude = from_bits(bits);
    const u32 normal = ((bits + 0x1fffffu + (bits >> 22 & 1u)) >> 22) - (126u << 1);
    const u32 subnormal = (u32)rintf((magnitude < 1.0f ? magnitude : 0.0f) * 2.0f);
    return (magnitude < 1.0f ? subnormal : normal) | sign;
}

// The E8M0 code of an FP8 block whose largest magnitude has these bits; 255 where that is no number.
__device__ __forceinline__ u32 fp8_scale(u32 amax_bits) {
    if (amax_bits >= 0x7f800000u) return 255;
    const u32 bits = to_bits(max_second(from_bits(amax_bits), 1e-4f) * (1.0f / 448.0f));
    return (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u);
}

// The E8M0 code of an FP4 block: the smallest power of two that brings the largest magnitude to at most 6.
__device__ __forceinline__ u32 fp4_scale(u32 amax_bits) {
    if (amax_bits >= 0x7f800000u) return 255;
    const u32 bits = to_bits(max_second(from_bits(amax_bits), from_bits(0x01c00000u)) * (1.0f / 6.0f));
    return (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u);
}

__device__ __forceinline__ float inverse_scale(u32 scale) {
    return scale == 255 ? not_a_number() : from_bits((254u - scale) << 23);
}

// The nearest E4M3 value of a quotient by a scale, times the scale.
__device__ __forceinline__ float fp8_nearest(float quotient, float scale) {
    const float magnitude = min_second(448.0f, fabsf(quotient));
    const u32 bits = to_bits(magnitude);
    const float normal = from_bits((bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u);
    const float subnormal = (magnitude + 16384.0f) - 16384.0f;
    float rounded = magnitude < 0.015625f ? subnormal : normal;
    if (magnitude != magnitude) rounded = magnitude;
    return from_bits(to_bits(rounded) | (to_bits(quotient) & 0x80000000u)) * scale;
}

// QDQ8 of the 32 values that the lanes of a warp hold.
__device__ __forceinline__ float fp8_round(float value) {
    const u32 scale = fp8_scale(warp_max(to_bits(value) & 0x7fffffffu));
    return fp8_nearest(value * inverse_scale(scale), e8m0_value(scale));
}

// The largest magnitude, as bits, of the 32 columns that eight neighbouring lanes hold, four each.
__device__ __forceinline__ u32 block_max(float4 v) {
    const u32 low = max(to_bits(v.x) & 0x7fffffffu, to_bits(v.y) & 0x7fffffffu);
    u32 most = max(low, max(to_bits(v.z) & 0x7fffffffu, to_bits(v.w) & 0x7fffffffu));
    most = max(most, __shfl_xor_sync(WARP, most, 1));
    most = max(most, __shfl_xor_sync(WARP, most, 2));
    return max(most, __shfl_xor_sync(WARP, most, 4));
}

// QDQ8 of columns that lie so; all lanes of the warp must call it.
__device__ __forceinline__ float4 fp8_round_quad(float4 v) {
    const u32 code = fp8_scale(block_max(v));
    const float inverse = inverse_scale(code), scale = e8m0_value(code);
    float4 rounded;
    rounded.x = fp8_nearest(v.x * inverse, scale);
    rounded.y = fp8_nearest(v.y * inverse, scale);
    rounded.z = fp8_nearest(v.z * inverse, scale);
    rounded.w = fp8_nearest(v.w * inverse, scale);
    return rounded;
}

// bf16(weight * (x * factor)), a column each.
__device__ __forceinline__ float4 scale_quad(float4 weight, float4 x, float factor) {
    float4 value;
    value.x = bf16_round(weight.x * (x.x * factor));
    value.y = bf16_round(weight.y * (x.y * factor));
    value.z = bf16_round(weight.z * (x.z * factor));
    value.w = bf16_round(weight.w * (x.w * factor));
    return value;
}

__device__ __forceinline__ float4 zero_quad() {
    float4 value;
    value.x = value.y = value.z = value.w = 0.0f;
    return value;
}

// An order of float32 as integers: NaN is 0, the zeros are alike, minus infinity is 0x007fffff.
__device__ __forceinline__ u32 order_key(float value) {
    const u32 bits = to_bits(value + 0.0f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
    return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// ---- rows

// As tf_kernels::rows, word for word.
struct RowInfo {
    u32 slot, position, window;
};
struct WindowInfo {
    u32 slot, start, first_row, row_count;
};
struct EntryInfo {
    u32 slot, entry, row;
};

// Four columns of a row from `c` on, turned likewise.
__device__ __forceinline__ float4 rope_turn_quad(float4 v, u32 c, u32 columns, u32 position, const float* frequencies,
                                                 u32 rope_dim) {
    if (c < columns - rope_dim) return v;
    const u32 pair = (c - (columns - rope_dim)) / 2;
    const float2 first = sin_cos_own((float)position * frequencies[pair]);
    const float2 second = sin_cos_own((float)position * frequencies[pair + 1]);
    float4 turned;
    turned.x = bf16_round(v.x * first.y + v.y * -first.x);
    turned.y = bf16_round(v.y * first.y + v.x * first.x);
    turned.z = bf16_round(v.z * second.y + v.w * -second.x);
    turned.w = bf16_round(v.w * second.y + v.z * second.x);
    return turned;
}

// Turns column `c` of a row whose columns lie side by side in the lanes; every lane must call it. Pairs turn by
// position * frequency, product in float32, each product and the sum rounded, then bf16.
__device__ __forceinline__ float rope_turn(float value, u32 c, u32 columns, u32 position, const float* frequencies,
                                           u32 rope_dim) {
    const float partner = __shfl_xor_sync(WARP, value, 1);
    if (c < columns - rope_dim || c >= columns) return value;
    const float2 phase = sin_cos_own((float)position * frequencies[(c - (columns - rope_dim)) / 2]);
    const float sine = (c & 1u) == 0 ? -phase.x : phase.x;
    return bf16_round(value * phase.y + partner * sine);
}
