// linear_bf16, linear_f32: out[r][n] = x[r] . w[n] for unquantised weights
// in   x [rows, columns] f32   w [outputs, columns] bf16 (as bits) or f32
// out  out [rows, outputs] f32, rounded to bf16 where round is 1
// grid one SIMD group an output, its rows in turn by 8, 4, 2 and 1; threadgroup a multiple of 32; no threadgroup memory
// sum  tf_numerics::sum, plain: a function of `columns` alone, which are padded with zeros to a multiple of 128
#include "linear.metal"

struct Shape {
    uint rows, outputs, columns, round;
};

// ROWS rows of one output, from `row` on. The row behind them.
template <uint ROWS, class T>
inline uint rows_of(device const float *x, device const T *w, device float *out, constant Shape &shape, uint row, uint n,
                    uint lane) {
    const uint columns = shape.columns;
    ulong starts[ROWS];
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) starts[r] = ulong(row + r) * columns;
    float sums[ROWS];
    dots_plain<ROWS>(sums, w + ulong(n) * columns, x, starts, columns, lane);
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) {
        const float sum = sums[r];
        if (lane == 0u) out[ulong(row + r) * shape.outputs + n] = shape.round != 0u ? bf16_round(sum) : sum;
    }
    return row + ROWS;
}

template <class T>
inline void all_rows(device const float *x, device const T *w, device float *out, constant Shape &shape, uint n, uint lane) {
    const uint rows = shape.rows;
    uint row = 0u;
    while (row + 8u <= rows) row = rows_of<8u>(x, w, out, shape, row, n, lane);
    if (row + 4u <= rows) row = rows_of<4u>(x, w, out, shape, row, n, lane);
    if (row + 2u <= rows) row = rows_of<2u>(x, w, out, shape, row, n, lane);
    if (row < rows) rows_of<1u>(x, w, out, shape, row, n, lane);
}

kernel void linear_bf16(device const float *x [[buffer(0)]], device const ushort *w [[buffer(1)]],
                        device float *out [[buffer(2)]], constant Shape &shape [[buffer(3)]],
                        uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint n = group * simdgroups + simdgroup;
    if (n < shape.outputs) all_rows(x, w, out, shape, n, lane);
}

kernel void linear_f32(device const float *x [[buffer(0)]], device const float *w [[buffer(1)]],
                       device float *out [[buffer(2)]], constant Shape &shape [[buffer(3)]],
                       uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint n = group * simdgroups + simdgroup;
    if (n < shape.outputs) all_rows(x, w, out, shape, n, lane);
}
