// What the kernels of the experts share: how a pair's activation is made, and what of the weights lies in a warp's ring.
#pragma once
#include "tensor.cuh"
#include "prelude.cuh"

constexpr int EXPERTS_MAX = 512;  // moe_route::EXPERTS_MAX
constexpr int SLOT = 640;  // bytes of a block of MXFP4 in a ring: codes and scale words of 32 lanes

// bf16(silu(min(limit, gate)) * clamp(up) * weight), gate and up rounded to bf16 before.
__device__ __forceinline__ u16 activation(float gate, float up, float weight, float limit) {
    const float g = min_second(limit, bf16_round(gate)), u = min_second(limit, max_second(-limit, bf16_round(up)));
    return f32_to_bf16((g * sigmoid_own(g)) * u * weight);
}

// QDQ8 of eight bf16 values in pairs. Four neighbouring threads hold a block of 32 and are active together.
__device__ __forceinline__ void round_eight(u32 (&words)[4]) {
    const u32 lane = threadIdx.x % 32, four = 15u << (lane & 28);
    u32 amax = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) amax = max(amax, max(words[j] << 16 & 0x7fff0000u, words[j] & 0x7fff0000u));
    amax = max(amax, __shfl_xor_sync(four, amax, 1));
    amax = max(amax, __shfl_xor_sync(four, amax, 2));
    const u32 code = fp8_scale(amax);
    const float inverse = inverse_scale(code), scale = e8m0_value(code);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float low = fp8_nearest(__uint_as_float(words[j] << 16) * inverse, scale);
        const float high = fp8_nearest(__uint_as_float(words[j] & 0xffff0000u) * inverse, scale);
        words[j] = __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
    }
}
