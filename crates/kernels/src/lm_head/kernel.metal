// lm_head: out[i][n] = x[row_indices[i]] . w[n], unrounded
// in   x [rows, columns] f32   w [outputs, columns] bf16 (as bits)   row_indices [chosen] u32
// out  out [chosen, outputs] f32
// grid one SIMD group an output, its chosen rows in turn by 8, 4, 2 and 1; threadgroup a multiple of 32; no threadgroup memory
// sum  tf_numerics::sum, plain: a function of `columns` alone
#include "linear.metal"

struct Shape {
    uint chosen, outputs, columns;
};

// ROWS chosen rows of one output, from `first` on. The one behind them.
template <uint ROWS>
inline uint rows_of(device const float *x, device const ushort *w, device const uint *row_indices, device float *out,
                    constant Shape &shape, uint first, uint n, uint lane) {
    const uint columns = shape.columns;
    ulong starts[ROWS];
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) {
        const uint i = first + r;
        starts[r] = ulong(row_indices[i]) * columns;
    }
    float sums[ROWS];
    dots_plain<ROWS>(sums, w + ulong(n) * columns, x, starts, columns, lane);
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) {
        const float sum = sums[r];
        if (lane == 0u) out[ulong(first + r) * shape.outputs + n] = sum;
    }
    return first + ROWS;
}

kernel void lm_head(device const float *x [[buffer(0)]], device const ushort *w [[buffer(1)]],
                    device const uint *row_indices [[buffer(2)]], device float *out [[buffer(3)]],
                    constant Shape &shape [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]],
                    uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint n = group * simdgroups + simdgroup, chosen = shape.chosen;
    if (n >= shape.outputs) return;
    uint i = 0u;
    while (i + 8u <= chosen) i = rows_of<8u>(x, w, row_indices, out, shape, i, n, lane);
    if (i + 4u <= chosen) i = rows_of<4u>(x, w, row_indices, out, shape, i, n, lane);
    if (i + 2u <= chosen) i = rows_of<2u>(x, w, row_indices, out, shape, i, n, lane);
    if (i < chosen) rows_of<1u>(x, w, row_indices, out, shape, i, n, lane);
}
