// linear_bf16, linear_f32: out[r][n] = x[r] . w[n] for unquantised weights
// in   x [rows, columns] f32   w [outputs, columns] bf16 (as bits) or f32
// out  out [rows, outputs] f32, rounded to bf16 where round is 1
// grid one SIMD group an output, all rows in turn; threadgroup a multiple of 32; no threadgroup memory
// sum  tf_numerics::sum, plain: a function of `columns` alone, which are padded with zeros to a multiple of 128
#include "prelude.metal"

struct Shape {
    uint rows, outputs, columns, round;
};

inline float value_of(ushort bits) { return from_bits(uint(bits) << 16); }
inline float value_of(float value) { return value; }

// Lane 16 h + l holds lane l of the accumulators h and 2 + h.
template <class T> inline float dot_plain(device const T *w, device const float *x, uint columns, uint lane) {
    const uint l = lane % 16u, h = lane / 16u;
    float even = 0.0f, odd = 0.0f;
    for (uint g = h; g < (columns + 127u) / 128u * 4u; g += 2u) {
        const uint c0 = 32u * g + l, c1 = c0 + 16u;
        const float w0 = c0 < columns ? value_of(w[c0]) : 0.0f, w1 = c1 < columns ? value_of(w[c1]) : 0.0f;
        const float x0 = c0 < columns ? x[c0] : 0.0f, x1 = c1 < columns ? x[c1] : 0.0f;
        if ((g & 2u) == 0u) even = fma(w1, x1, fma(w0, x0, even));
        else odd = fma(w1, x1, fma(w0, x0, odd));
    }
    return fold_four(even, odd);
}

kernel void linear_bf16(device const float *x [[buffer(0)]], device const ushort *w [[buffer(1)]],
                        device float *out [[buffer(2)]], constant Shape &shape [[buffer(3)]],
                        uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint n = group * simdgroups + simdgroup, columns = shape.columns;
    if (n >= shape.outputs) return;
    for (uint row = 0u; row < shape.rows; row++) {
        const float sum = dot_plain(w + ulong(n) * columns, x + row * columns, columns, lane);
        if (lane == 0u) out[row * shape.outputs + n] = shape.round != 0u ? bf16_round(sum) : sum;
    }
}

kernel void linear_f32(device const float *x [[buffer(0)]], device const float *w [[buffer(1)]],
                       device float *out [[buffer(2)]], constant Shape &shape [[buffer(3)]],
                       uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint n = group * simdgroups + simdgroup, columns = shape.columns;
    if (n >= shape.outputs) return;
    for (uint row = 0u; row < shape.rows; row++) {
        const float sum = dot_plain(w + ulong(n) * columns, x + row * columns, columns, lane);
        if (lane == 0u) out[row * shape.outputs + n] = shape.round != 0u ? bf16_round(sum) : sum;
    }
}
