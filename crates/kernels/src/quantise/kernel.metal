// quantise: QDQ8 of rows, blocks of 32 along the columns, the last of a row may be shorter; the formula is in mod.rs
// in   x [rows, columns] f32, bf16 values
// out  out as x. quantise_in_place: over x itself
// grid one SIMD group a block; threadgroup a multiple of 32; no threadgroup memory. No sums
#include "prelude.metal"

struct Shape {
    uint rows, columns;
};

inline void round_block(device const float *x, device float *out, uint item, uint lane, constant Shape &shape) {
    const uint blocks = (shape.columns + 31u) / 32u, row = item / blocks, c = 32u * (item % blocks) + lane;
    if (row >= shape.rows) return;
    const float value = c < shape.columns ? x[row * shape.columns + c] : 0.0f;
    const float rounded = fp8_round(value);
    if (c < shape.columns) out[row * shape.columns + c] = rounded;
}

kernel void quantise(device const float *x [[buffer(0)]], device float *out [[buffer(1)]],
                     constant Shape &shape [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
    round_block(x, out, group * simdgroups + simdgroup, lane, shape);
}

kernel void quantise_in_place(device float *values [[buffer(0)]], constant Shape &shape [[buffer(1)]],
                              uint group [[threadgroup_position_in_grid]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    round_block(values, values, group * simdgroups + simdgroup, lane, shape);
}
