// index_query: queries[r][h] = QDQ4(32, E8M0)(RoPE(queries[r][h], position)); weights[r][h] = bf16(weights[r][h] * factor)
// in   rows as tf_kernels::rows   frequencies [rope_dim / 2] f32   factor = f32(head_dim^-0.5 * heads^-0.5), from the host
// out  queries [rows, heads, head_dim] f32, weights [rows, heads] f32, both in place
// grid one SIMD group a head of a row; threadgroup a multiple of 32; no threadgroup memory. No sums
// max  head_dim is a multiple of 32
#include "prelude.metal"

struct Shape {
    uint rows, heads, head_dim, rope_dim;
    float factor;
};

kernel void index_query(device float *queries [[buffer(0)]], device float *weights [[buffer(1)]],
                        device const RowInfo *rows [[buffer(2)]], device const float *frequencies [[buffer(3)]],
                        constant Shape &shape [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup, row = item / shape.heads;
    if (row >= shape.rows) return;
    device float *query = queries + item * shape.head_dim;
    for (uint c = lane; c < shape.head_dim; c += 32u) {
        const float value = rope_turn(query[c], c, shape.head_dim, rows[row].position, frequencies, shape.rope_dim);
        const uint most = simd_max(to_bits(value) & 0x7fffffffu);
        const uint bits = to_bits(max_second(from_bits(most), from_bits(0x01c00000u)) * (1.0f / 6.0f));
        const uint scale = most >= 0x7f800000u ? 255u : (bits >> 23) + ((bits & 0x7fffffu) != 0u ? 1u : 0u);
        query[c] = e2m1_value(e2m1_code(value * fp8_inverse(scale))) * e8m0_value(scale);
    }
    if (lane == 0u) weights[item] = bf16_round(weights[item] * shape.factor);
}
