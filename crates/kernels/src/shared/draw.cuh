// Mirrors of tf_numerics::draw (decision 0004) and what a block needs to look at a whole row of logits: maxima, whose
// order changes nothing.
#pragma once
#include "prelude.cuh"

// ---- values of a block

// Every thread of the block calls these; `part` holds one value a warp.
__device__ __forceinline__ u64 largest_of_all(u64 value, u64* part) {
    for (u32 mask = 16; mask != 0; mask >>= 1) {
        const u64 other = __shfl_xor_sync(WARP, value, mask);
        value = value > other ? value : other;
    }
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    for (u32 i = 0; i < blockDim.x / 32; i++) value = value > part[i] ? value : part[i];
    __syncthreads();
    return value;
}

// The larger value first, the smaller id among equals: a larger key. Keys of NaN and minus infinity are below the least.
__device__ __forceinline__ u64 token_key(float value, u32 id) { return (u64)order_key(value) << 32 | (u64)~id; }
constexpr u64 LEAST_KEY = 0x0080000000000000ull;

__device__ __forceinline__ float value_of_order(u32 ordered) {
    return from_bits((ordered & 0x80000000u) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

// ---- noise

__device__ __forceinline__ u32 rotated(u32 value, u32 count) { return value << count | value >> (32 - count); }

// Threefry2x32 with 20 rounds: the first word. The key is the seed, the counter (token, position).
__device__ __forceinline__ u32 draw_word(u32 seed_low, u32 seed_high, u32 position, u32 token) {
    const u32 keys[3] = {seed_low, seed_high, seed_low ^ seed_high ^ 0x1bd11bdau};
    u32 a = token + keys[0], b = position + keys[1];
#pragma unroll
    for (u32 group = 0; group < 5; group++) {
        const u32 packed = (group & 1) == 0 ? 0x0d0f1a06u : 0x111d1018u;
#pragma unroll
        for (u32 shift = 0; shift < 32; shift += 8) {
            a += b;
            b = rotated(b, packed >> (24 - shift) & 31) ^ a;
        }
        a += keys[(group + 1) % 3];
        b += keys[(group + 2) % 3] + group + 1;
    }
    return a;
}

// -ln(-ln(u)), u = 1 - (word + 1/2) * 2^-32.
__device__ __forceinline__ float gumbel(u32 word) {
    const bool upper = (word & 0x80000000u) != 0;
    const u32 t = upper ? ~word : word;
    const float low = (float)(t & 0xffffu) + 0.5f;
    const float m = fma_own((float)(t >> 16), 65536.0f, low) * from_bits(0x2f800000u);
    const float rest = 1.0f - m;
    const float lost = __fdiv_rn(-m - (rest - 1.0f), rest);
    return -ln_own(-(ln_own(upper ? m : rest) + (upper ? 0.0f : lost)));
}

// No noise is larger.
constexpr float GUMBEL_MAX = 22.9f;

// ---- weights

// floor(e * 2^40) for e in [0, 1].
__device__ __forceinline__ u64 weight_of(float e) {
    const float upper = e * 1048576.0f;
    const u32 whole = (u32)upper;
    return ((u64)whole << 20) + (u64)(u32)((upper - (float)whole) * 1048576.0f);
}

// To the nearest float32, ties to even.
__device__ __forceinline__ float float_of(u64 value) {
    if (value < 16777216ull) return (float)(u32)value;
    u32 shift = 1;
    while (value >> shift >= 16777216ull) shift++;
    const u64 half_step = 1ull << (shift - 1), rest = value & ((1ull << shift) - 1);
    u32 mantissa = (u32)(value >> shift);
    if (rest > half_step || (rest == half_step && (mantissa & 1) != 0)) mantissa++;
    return (float)mantissa * from_bits((127 + shift) << 23);
}
