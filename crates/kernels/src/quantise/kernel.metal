// quantise: QDQ8 of rows, blocks of 32 along the columns, the last of a row may be shorter; the formula is in mod.rs
// in   x [rows, columns] f32, bf16 values
// out  out as x; may be x
// grid one SIMD group a block; threadgroup a multiple of 32; no threadgroup memory. No sums
#include "prelude.metal"

struct Shape {
    uint rows, columns;
};

kernel void quantise(device float *values [[buffer(0)]], constant Shape &shape [[buffer(1)]],
                     uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint blocks = (shape.columns + 31u) / 32u, item = group * simdgroups + simdgroup, row = item / blocks;
    const uint c = 32u * (item % blocks) + lane;
    if (row >= shape.rows) return;
    const float value = c < shape.columns ? values[row * shape.columns + c] : 0.0f;
    const float rounded = fp8_round(value);
    if (c < shape.columns) values[row * shape.columns + c] = rounded;
}
