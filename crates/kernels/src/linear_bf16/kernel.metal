// linear_bf16, linear_f32: out[r][n] = x[r] . w[n] for unquantised weights
// in   x [rows, columns] f32   w [outputs, columns] bf16 (as bits) or f32
// out  out [rows, outputs] f32, rounded to bf16 where round is 1
// grid one SIMD group an output, all rows in turn; threadgroup a multiple of 32; no threadgroup memory
// sum  tf_numerics::sum, plain: a function of `columns` alone, which are padded with zeros to a multiple of 128
#include "linear.metal"

struct Shape {
    uint rows, outputs, columns, round;
};

kernel void linear_bf16(device const float *x [[buffer(0)]], device const ushort *w [[buffer(1)]],
                        device float *out [[buffer(2)]], constant Shape &shape [[buffer(3)]],
                        uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint n = group * simdgroups + simdgroup, columns = shape.columns;
    if (n >= shape.outputs) return;
    for (uint row = 0u; row < shape.rows; row++) {
        const float sum = dot_plain(w + ulong(n) * columns, x + ulong(row) * columns, columns, lane);
        if (lane == 0u) out[ulong(row) * shape.outputs + n] = shape.round != 0u ? bf16_round(sum) : sum;
    }
}

kernel void linear_f32(device const float *x [[buffer(0)]], device const float *w [[buffer(1)]],
                       device float *out [[buffer(2)]], constant Shape &shape [[buffer(3)]],
                       uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint n = group * simdgroups + simdgroup, columns = shape.columns;
    if (n >= shape.outputs) return;
    for (uint row = 0u; row < shape.rows; row++) {
        const float sum = dot_plain(w + ulong(n) * columns, x + ulong(row) * columns, columns, lane);
        if (lane == 0u) out[ulong(row) * shape.outputs + n] = shape.round != 0u ? bf16_round(sum) : sum;
    }
}
