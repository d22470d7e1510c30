// linear_fp8: out[r][n] = x[r] . w[n], FP8 weights with one E8M0 scale a 32x32 block; with groups, output block g reads column
//             block g of x
// in   x [rows, groups * columns] f32, rounded as the release wants it   codes [outputs, columns] E4M3
//      scales [ceil(outputs / 32), ceil(columns / 32)] E8M0
// out  out [rows, outputs] f32, rounded to bf16 where round is 1
// grid one SIMD group an output, all rows in turn; threadgroup a multiple of 32; no threadgroup memory
// sum  tf_numerics::sum, scaled: a function of `columns` alone
#include "linear.metal"

struct Shape {
    uint rows, outputs, columns, groups, round;
};

kernel void linear_fp8(device const float *x [[buffer(0)]], device const uchar *codes [[buffer(1)]],
                       device const uchar *scales [[buffer(2)]], device float *out [[buffer(3)]],
                       constant Shape &shape [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint n = group * simdgroups + simdgroup, columns = shape.columns;
    if (n >= shape.outputs) return;
    const uint part = n / (shape.outputs / shape.groups);
    device const uchar *weights = codes + ulong(n) * columns;
    device const uchar *factors = scales + n / 32u * ((columns + 31u) / 32u);
    for (uint row = 0u; row < shape.rows; row++) {
        const float sum = dot_fp8(weights, factors, x + ulong(row * shape.groups + part) * columns, columns, lane);
        if (lane == 0u) out[ulong(row) * shape.outputs + n] = shape.round != 0u ? bf16_round(sum) : sum;
    }
}
