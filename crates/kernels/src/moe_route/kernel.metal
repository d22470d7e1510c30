// moe_route: s = sqrt(softplus(logits)); the top_k largest s + bias are chosen, equal ones by the smaller id; the weight of a
//            chosen expert is (s / (sum + 1e-20)) * factor, sum the chosen s added in ascending id
// in   logits [rows, experts] f32   bias, bias_image [experts] f32   image [rows] u8: rows that use
//      bias_image, where `has_images` is set
// out  chosen [rows, top_k] u32, ascending   weights [rows, top_k] f32
// grid one SIMD group a row, lane l holding experts l, l + 32, ...; threadgroup a multiple of 32; no threadgroup memory
// max  experts 512, top_k 16 and at most experts (checked by launch). A NaN counts as minus infinity
#include "prelude.metal"

struct Shape {
    uint rows, experts, top_k;
    float factor;
    uint has_images;
};

constant uint SLOTS = 16; // of 32 experts

kernel void moe_route(device const float *logits [[buffer(0)]], device const float *bias [[buffer(1)]],
                      device const float *bias_image [[buffer(2)]], device const uchar *image [[buffer(3)]],
                      device uint *chosen [[buffer(4)]], device float *weights [[buffer(5)]],
                      constant Shape &shape [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
    const uint row = group * simdgroups + simdgroup;
    if (row >= shape.rows) return;
    const uint slots = (shape.experts + 31u) / 32u;
    float scores[SLOTS];
    uint keys[SLOTS]; // 0 once it is chosen, or no expert
    for (uint s = 0u; s < SLOTS; s++) {
        const uint id = 32u * s + lane;
        scores[s] = 0.0f;
        keys[s] = 0u;
        if (id < shape.experts) {
            scores[s] = sqrt(softplus_own(logits[row * shape.experts + id]));
            const bool has_images = shape.has_images != 0u;
            const float value = scores[s] + (has_images && image[row] != 0 ? bias_image[id] : bias[id]);
            keys[s] = max(order_key(value), 0x007fffffu);
        }
    }

    uint taken = 0u; // a bit a slot
    for (uint k = 0u; k < shape.top_k; k++) {
        uint best = 0u;
        for (uint s = 0u; s < slots; s++) best = max(best, keys[s]);
        best = simd_max(best);
        uint id = 0xffffffffu;
        for (uint s = slots; s > 0u; s--) {
            if (keys[s - 1u] == best) id = 32u * (s - 1u) + lane;
        }
        id = simd_min(id);
        if (id % 32u == lane) {
            taken |= 1u << id / 32u;
            keys[id / 32u] = 0u;
        }
    }

    float sum = 0.0f;
    for (uint s = 0u; s < slots; s++) {
        for (uint mask = simd_or((taken >> s & 1u) << lane); mask != 0u; mask &= mask - 1u) {
            sum += simd_shuffle(scores[s], ushort(ctz(mask)));
        }
    }
    uint before = 0u;
    for (uint s = 0u; s < slots; s++) {
        const uint mask = simd_or((taken >> s & 1u) << lane);
        if ((mask >> lane & 1u) != 0u) {
            const uint place = row * shape.top_k + before + popcount(mask & ((1u << lane) - 1u));
            chosen[place] = 32u * s + lane;
            weights[place] = scores[s] / (sum + 1e-20f) * shape.factor;
        }
        before += popcount(mask);
    }
}
