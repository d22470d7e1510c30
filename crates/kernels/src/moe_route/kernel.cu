// moe_route: s = sqrt(softplus(logits)); the top_k largest s + bias are chosen, equal ones by the smaller id; the weight of a
//            chosen expert is (s / (sum + 1e-20)) * factor, sum the chosen s added in ascending id
// in   logits [rows, experts] f32   bias, bias_image [experts] f32   image [rows] u8: rows that use
//      bias_image, where `has_images` is set
// out  chosen [rows, top_k] u32, ascending   weights [rows, top_k] f32
// grid one block of 512 threads a row; a score a thread, the choice by the first warp, lane l holding experts l, l + 32, ...
// max  experts 512, top_k 16 and at most experts (checked by launch). A NaN counts as minus infinity
#include "prelude.cuh"

struct Shape {
    u32 rows, experts, top_k;
    float factor;
    u32 has_images;
};

constexpr u32 SLOTS = 16, THREADS = 32 * SLOTS;  // slots of 32 experts; as many choices at most

extern "C" __global__ void __launch_bounds__(THREADS)
moe_route(const float* logits, const float* bias, const float* bias_image, const u8* image, u32* chosen, float* weights,
          const Shape shape) {
    __shared__ float score_of[THREADS];
    __shared__ u32 key_of[THREADS];
    __shared__ float in_order[SLOTS];
    const u32 row = blockIdx.x, thread = threadIdx.x, lane = thread % 32;
    wait_for_inputs();
    const float* offsets = shape.has_images != 0 && image[row] != 0 ? bias_image : bias;
    float score = 0.0f;
    u32 key = 0;  // once it is chosen, or no expert
    if (thread < shape.experts) {
        score = __fsqrt_rn(softplus_own(logits[row * shape.experts + thread]));
        key = max(order_key(score + offsets[thread]), 0x007fffffu);
    }
    score_of[thread] = score;
    key_of[thread] = key;
    __syncthreads();
    if (thread >= 32) return;
    u32 keys[SLOTS];
#pragma unroll
    for (u32 s = 0; s < SLOTS; s++) keys[s] = key_of[32 * s + lane];

    // Lane k comes to hold the k-th choice.
    u32 own = 0xffffffffu;
    for (u32 k = 0; k < shape.top_k; k++) {
        u32 best = 0, slot = 0;
#pragma unroll
        for (u32 s = SLOTS; s > 0; s--) {
            if (keys[s - 1] >= best) best = keys[s - 1], slot = s - 1;
        }
        const u32 most = warp_max(best);
        const u32 id = __reduce_min_sync(WARP, best == most ? 32 * slot + lane : 0xffffffffu);
        if (lane == k) own = id;
#pragma unroll
        for (u32 s = 0; s < SLOTS; s++) {
            if (id == 32 * s + lane) keys[s] = 0;
        }
    }
    const bool has = lane < shape.top_k;
    u32 place = 0;
#pragma unroll
    for (u32 k = 0; k < SLOTS; k++) place += __shfl_sync(WARP, own, k) < own ? 1 : 0;
    score = has ? score_of[own] : 0.0f;
    if (has) in_order[place] = score;
    __syncwarp();
    float sum = 0.0f;
    for (u32 k = 0; k < shape.top_k; k++) sum = sum + in_order[k];
    if (!has) return;
    chosen[row * shape.top_k + place] = own;
    weights[row * shape.top_k + place] = __fdiv_rn(score, sum + 1e-20f) * shape.factor;
}
