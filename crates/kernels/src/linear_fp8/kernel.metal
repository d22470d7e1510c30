// linear_fp8: out[r][n] = x[r] . w[n], FP8 weights with one E8M0 scale a 32x32 block; with groups, output block g reads column
//             block g of x
// in   x [rows, groups * columns] f32, rounded as the release wants it   codes [outputs, columns] E4M3
//      scales [ceil(outputs / 32), ceil(columns / 32)] E8M0
// out  out [rows, outputs] f32, rounded to bf16 where round is 1
// grid one SIMD group an output, its rows in turn by 8, 4, 2 and 1; threadgroup a multiple of 32; no threadgroup memory
// sum  tf_numerics::sum, scaled: a function of `columns` alone
#include "linear.metal"

struct Shape {
    uint rows, outputs, columns, groups, round;
};

// ROWS rows of one output, from `row` on. The row behind them.
template <uint ROWS>
inline uint rows_of(device const float *x, device const uchar *codes, device const uchar *scales, device float *out,
                    constant Shape &shape, uint row, uint n, uint lane) {
    const uint columns = shape.columns, part = n / (shape.outputs / shape.groups);
    device const uchar *weights = codes + ulong(n) * columns;
    device const uchar *factors = scales + n / 32u * ((columns + 31u) / 32u);
    float sums[ROWS];
    dots_fp8<ROWS>(sums, weights, factors, x + ulong(row * shape.groups + part) * columns, ulong(shape.groups) * columns,
                   columns, lane);
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) {
        const float sum = sums[r];
        if (lane == 0u) out[ulong(row + r) * shape.outputs + n] = shape.round != 0u ? bf16_round(sum) : sum;
    }
    return row + ROWS;
}

kernel void linear_fp8(device const float *x [[buffer(0)]], device const uchar *codes [[buffer(1)]],
                       device const uchar *scales [[buffer(2)]], device float *out [[buffer(3)]],
                       constant Shape &shape [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint n = group * simdgroups + simdgroup, rows = shape.rows;
    if (n >= shape.outputs) return;
    uint row = 0u;
    while (row + 8u <= rows) row = rows_of<8u>(x, codes, scales, out, shape, row, n, lane);
    if (row + 4u <= rows) row = rows_of<4u>(x, codes, scales, out, shape, row, n, lane);
    if (row + 2u <= rows) row = rows_of<2u>(x, codes, scales, out, shape, row, n, lane);
    if (row < rows) rows_of<1u>(x, codes, scales, out, shape, row, n, lane);
}
