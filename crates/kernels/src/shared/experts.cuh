// What the kernels of the experts share: how a pair's activation is made, and what of the weights lies in a warp's ring.
#pragma once
#include "tensor.cuh"
#include "prelude.cuh"

constexpr int SLOT = 640;  // bytes of a block of MXFP4 in a ring: codes and scale words of 32 lanes

// bf16(silu(min(limit, gate)) * clamp(up) * weight), gate and up rounded to bf16 before.
__device__ __forceinline__ u16 activation(float gate, float up, float weight, float limit) {
    const float g = min_second(limit, bf16_round(gate)), u = min_second(limit, max_second(-limit, bf16_round(up)));
    return f32_to_bf16((g * sigmoid_own(g)) * u * weight);
}
