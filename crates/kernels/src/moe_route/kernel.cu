// moe_route: s = sqrt(softplus(logits)); the top_k largest s + bias are chosen, equal ones by the smaller id; the weight of a
//            chosen expert is (s / (sum + 1e-20)) * factor, sum the chosen s added in ascending id
// in   logits [rows, experts] f32   bias, bias_image [experts] f32   image [rows] u8: rows that use
//      bias_image, where `has_images` is set
// out  chosen [rows, top_k] u32, ascending   weights [rows, top_k] f32
// grid one block a row; the scores by all threads, the choice by the first warp, lane l holding experts l, l + 32, ...
// max  experts 512, top_k 16 and at most experts (checked by launch). A NaN counts as minus infinity
#include "prelude.cuh"

struct Shape {
    u32 rows, experts, top_k;
    float factor;
    u32 has_images;
};

constexpr u32 SLOTS = 16;  // of 32 experts

extern "C" __global__ void __launch_bounds__(256)
moe_route(const float* logits, const float* bias, const float* bias_image, const u8* image, u32* chosen, float* weights,
          const Shape shape) {
    __shared__ float score_of[32 * SLOTS];
    __shared__ u32 key_of[32 * SLOTS];
    const u32 row = blockIdx.x, thread = threadIdx.x, lane = thread % 32;
    wait_for_inputs();
    const float* offsets = shape.has_images != 0 && image[row] != 0 ? bias_image : bias;
    for (u32 id = thread; id < 32 * SLOTS; id += blockDim.x) {
        float score = 0.0f;
        u32 key = 0;
        if (id < shape.experts) {
            score = __fsqrt_rn(softplus_own(logits[row * shape.experts + id]));
            key = max(order_key(score + offsets[id]), 0x007fffffu);
        }
        score_of[id] = score;
        key_of[id] = key;
    }
    __syncthreads();
    if (thread >= 32) return;
    float scores[SLOTS];
    u32 keys[SLOTS];  // 0 once it is chosen, or no expert
#pragma unroll
    for (u32 s = 0; s < SLOTS; s++) scores[s] = score_of[32 * s + lane], keys[s] = key_of[32 * s + lane];

    u32 taken = 0;  // a bit a slot
    for (u32 k = 0; k < shape.top_k; k++) {
        u32 best = 0;
#pragma unroll
        for (u32 s = 0; s < SLOTS; s++) best = max(best, keys[s]);
        best = warp_max(best);
        u32 id = 0xffffffffu;
#pragma unroll
        for (u32 s = SLOTS; s > 0; s--) {
            if (keys[s - 1] == best) id = 32 * (s - 1) + lane;
        }
        id = __reduce_min_sync(WARP, id);
#pragma unroll
        for (u32 s = 0; s < SLOTS; s++) {
            if (id == 32 * s + lane) {
                taken |= 1u << s;
                keys[s] = 0;
            }
        }
    }

    float sum = 0.0f;
#pragma unroll
    for (u32 s = 0; s < SLOTS; s++) {
        for (u32 mask = __ballot_sync(WARP, taken >> s & 1); mask != 0; mask &= mask - 1) {
            sum = sum + __shfl_sync(WARP, scores[s], __ffs(mask) - 1);
        }
    }
    u32 before = 0;
#pragma unroll
    for (u32 s = 0; s < SLOTS; s++) {
        const u32 mask = __ballot_sync(WARP, taken >> s & 1);
        if ((mask >> lane & 1) != 0) {
            const u32 place = row * shape.top_k + before + __popc(mask & ((1u << lane) - 1));
            chosen[place] = 32 * s + lane;
            weights[place] = __fdiv_rn(scores[s], sum + 1e-20f) * shape.factor;
        }
        before += __popc(mask);
    }
}
