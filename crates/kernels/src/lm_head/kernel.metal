// lm_head: out[i][n] = x[row_indices[i]] . w[n], unrounded
// in   x [rows, columns] f32   w [outputs, columns] bf16 (as bits)   row_indices [chosen] u32
// out  out [chosen, outputs] f32
// grid one SIMD group an output, all chosen rows in turn; threadgroup a multiple of 32; no threadgroup memory
// sum  tf_numerics::sum, plain: a function of `columns` alone
#include "linear.metal"

struct Shape {
    uint chosen, outputs, columns;
};

kernel void lm_head(device const float *x [[buffer(0)]], device const ushort *w [[buffer(1)]],
                    device const uint *row_indices [[buffer(2)]], device float *out [[buffer(3)]],
                    constant Shape &shape [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]],
                    uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint n = group * simdgroups + simdgroup, columns = shape.columns;
    if (n >= shape.outputs) return;
    for (uint i = 0u; i < shape.chosen; i++) {
        const float sum = dot_plain(w + ulong(n) * columns, x + ulong(row_indices[i]) * columns, columns, lane);
        if (lane == 0u) out[ulong(i) * shape.outputs + n] = sum;
    }
}
