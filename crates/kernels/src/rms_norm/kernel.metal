// rms_norm: normed[r][c] = bf16(weight[c] * (x[r][c] * f)), f = 1 / sqrt(sum_c(x[r][c]^2) / columns + eps);
//           quantised[r] = QDQ8(normed[r])
// in   x         [rows, columns] f32      weight [columns] f32
// out  normed    [rows, columns] f32, bf16 values      quantised as normed; each where its bit of `outputs` is set
// grid one SIMD group a row; threadgroup 32 to 1024 threads, a multiple of 32; no threadgroup memory
// sum  order::sum_squares: four accumulators of 16 lanes, as on the CPU, whatever the threadgroup
// max  columns is a multiple of 16, of 32 with `quantised`
#include "prelude.metal"

struct Shape {
    uint rows, columns;
    float eps;
    uint outputs; // bit 0 normed, bit 1 quantised
};

kernel void rms_norm(device const float *x [[buffer(0)]], device const float *weight [[buffer(1)]],
                     device float *normed [[buffer(2)]], device float *quantised [[buffer(3)]],
                     constant Shape &shape [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
    const uint row = group * simdgroups + simdgroup, columns = shape.columns;
    if (row >= shape.rows) return;
    device const float *in = x + row * columns;
    const float factor = inverse_rms(sum_products(in, in, columns, lane), columns, shape.eps);
    for (uint first = 0u; first < columns; first += 32u) {
        const uint c = first + lane;
        const bool inside = c < columns;
        const float value = inside ? bf16_round(weight[c] * (in[c] * factor)) : 0.0f;
        if ((shape.outputs & 1u) != 0u && inside) normed[row * columns + c] = value;
        if ((shape.outputs & 2u) != 0u) quantised[row * columns + c] = fp8_round(value);
    }
}
