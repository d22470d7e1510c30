// index_query: queries[r][h] = QDQ4(32, E8M0)(RoPE(queries[r][h], position)); weights[r][h] = bf16(weights[r][h] * factor)
// in   rows as tf_kernels::rows   frequencies [rope_dim / 2] f32   factor = f32(head_dim^-0.5 * heads^-0.5), from the host
// out  queries [rows, heads, head_dim] f32, weights [rows, heads] f32, both in place
// grid one warp a head of a row; a block is a multiple of 32 threads. No sums
// max  head_dim is a multiple of 32
#include "prelude.cuh"

struct Shape {
    u32 rows, heads, head_dim, rope_dim;
    float factor;
};

extern "C" __global__ void __launch_bounds__(256)
index_query(float* queries, float* weights, const RowInfo* rows, const float* frequencies, const Shape shape) {
    wait_for_inputs();
    const u32 item = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, row = item / shape.heads;
    if (row >= shape.rows) return;
    float* query = queries + item * shape.head_dim;
    for (u32 c = lane; c < shape.head_dim; c += 32) {
        const float value = rope_turn(query[c], c, shape.head_dim, rows[row].position, frequencies, shape.rope_dim);
        const u32 scale = fp4_scale(warp_max(to_bits(value) & 0x7fffffffu));
        query[c] = e2m1_value(e2m1_code(value * inverse_scale(scale))) * e8m0_value(scale);
    }
    if (lane == 0) weights[item] = bf16_round(weights[item] * shape.factor);
}
