// hyper: the hyper-connections of four residual streams; formulas and roundings in mod.rs.
// A sublayer enters by three launches: hyper_expand, hyper_products, hyper_finish; hyper_collapse ends a stack.
//
// streams [rows, 4, hidden] f32 in place   y [rows, hidden] f32   mix, post [rows, 4] f32   comb [rows, 4, 4] f32 (source,
// target)   function [24, 4 hidden] f32   base [24]   scale [3]   norm [hidden]   scratch [rows, 32] f32
// grid hyper_expand: a thread a column of a row, any threadgroup. hyper_products: a SIMD group for two of a row's 24 outputs,
//      a 13th for the sum of squares. hyper_finish,
//      hyper_collapse, hyper_tap: a SIMD group a row. No threadgroup memory
// sum  order::dot for the products (16 lanes an output), order::sum_squares for the squares, as on the CPU; the sums of four
//      in index order
// max  hidden is a multiple of 32
#include "prelude.metal"

struct Shape {
    uint rows, hidden, iterations, outputs; // outputs: bit 0 normed, bit 1 quantised, bit 2 collapsed
    float hc_eps, norm_eps;
    uint out_columns, out_offset;
};

kernel void hyper_expand(device const float *y [[buffer(0)]], device float *streams [[buffer(1)]],
                         device const float *post [[buffer(2)]], device const float *comb [[buffer(3)]],
                         constant Shape &shape [[buffer(4)]], uint item [[thread_position_in_grid]]) {
    const uint hidden = shape.hidden, row = item / hidden, c = item % hidden;
    if (row >= shape.rows) return;
    device float *x = streams + row * 4u * hidden + c;
    const float x0 = x[0], x1 = x[hidden], x2 = x[2u * hidden], x3 = x[3u * hidden], out = y[row * hidden + c];
    for (uint j = 0u; j < 4u; j++) {
        device const float *weights = comb + row * 16u + j;
        float sum = weights[0] * x0;
        sum = sum + weights[4] * x1;
        sum = sum + weights[8] * x2;
        sum = sum + weights[12] * x3;
        x[j * hidden] = bf16_round(sum + post[row * 4u + j] * out);
    }
}

kernel void hyper_products(device const float *streams [[buffer(0)]], device const float *function [[buffer(1)]],
                           device float *scratch [[buffer(2)]], constant Shape &shape [[buffer(3)]],
                           uint group [[threadgroup_position_in_grid]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup, row = item / 13u, pair = item % 13u, width = 4u * shape.hidden;
    if (row >= shape.rows) return;
    device const float *x = streams + row * width;
    if (pair == 12u) {
        const float squares = sum_products(x, x, width, lane);
        if (lane == 0u) scratch[row * 32u + 24u] = squares;
        return;
    }
    const uint output = 2u * pair + lane / 16u;
    device const float *weight = function + output * width;
    float sum = 0.0f;
    for (uint c = lane % 16u; c < width; c += 16u) sum = fma(weight[c], x[c], sum);
    sum = fold16(sum);
    if (lane % 16u == 0u) scratch[row * 32u + output] = sum;
}

// ((v0 + v1) + v2) + v3 over lanes base, base + step, ...
inline float sum4(float value, uint base, uint step) {
    const float v0 = simd_shuffle(value, ushort(base)), v1 = simd_shuffle(value, ushort(base + step));
    const float v2 = simd_shuffle(value, ushort(base + 2u * step)), v3 = simd_shuffle(value, ushort(base + 3u * step));
    return ((v0 + v1) + v2) + v3;
}

inline float collapse_column(device const float *x, uint hidden, float m0, float m1, float m2, float m3) {
    float sum = m0 * x[0];
    sum = sum + m1 * x[hidden];
    sum = sum + m2 * x[2u * hidden];
    sum = sum + m3 * x[3u * hidden];
    return bf16_round(sum);
}

// The collapsed row and its norm, by a SIMD group.
inline void collapse_row(device const float *streams, device const float *mix, device const float *norm, device float *normed,
                         device float *quantised, device float *collapsed, uint row, uint lane, constant Shape &shape) {
    const uint hidden = shape.hidden;
    device const float *x = streams + row * 4u * hidden;
    const float m0 = mix[row * 4u], m1 = mix[row * 4u + 1u], m2 = mix[row * 4u + 2u], m3 = mix[row * 4u + 3u];

    float even = 0.0f, odd = 0.0f;
    for (uint c = lane; c < hidden; c += 64u) {
        const float u = collapse_column(x + c, hidden, m0, m1, m2, m3);
        even = fma(u, u, even);
        if (c + 32u < hidden) {
            const float v = collapse_column(x + c + 32u, hidden, m0, m1, m2, m3);
            odd = fma(v, v, odd);
        }
    }
    const float factor = inverse_rms(fold_four(even, odd), hidden, shape.norm_eps);
    for (uint c = lane; c < hidden; c += 32u) {
        const float u = collapse_column(x + c, hidden, m0, m1, m2, m3);
        const float value = bf16_round(norm[c] * (u * factor));
        if ((shape.outputs & 4u) != 0u) collapsed[row * hidden + c] = u;
        if ((shape.outputs & 1u) != 0u) normed[row * hidden + c] = value;
        if ((shape.outputs & 2u) != 0u) quantised[row * hidden + c] = fp8_round(value);
    }
}

kernel void hyper_collapse(device const float *streams [[buffer(0)]], device const float *mix [[buffer(1)]],
                           device const float *norm [[buffer(2)]], device float *normed [[buffer(3)]],
                           device float *quantised [[buffer(4)]], device float *collapsed [[buffer(5)]],
                           constant Shape &shape [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint row = group * simdgroups + simdgroup;
    if (row >= shape.rows) return;
    collapse_row(streams, mix, norm, normed, quantised, collapsed, row, lane, shape);
}

kernel void hyper_finish(device const float *streams [[buffer(0)]], device float *mix [[buffer(1)]],
                         device float *post [[buffer(2)]], device float *comb [[buffer(3)]],
                         device const float *base [[buffer(4)]], device const float *scale [[buffer(5)]],
                         device const float *norm [[buffer(6)]], device const float *scratch [[buffer(7)]],
                         device float *normed [[buffer(8)]], device float *quantised [[buffer(9)]],
                         device float *collapsed [[buffer(10)]], constant Shape &shape [[buffer(11)]],
                         uint group [[threadgroup_position_in_grid]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint row = group * simdgroups + simdgroup, hidden = shape.hidden;
    if (row >= shape.rows) return;
    collapse_row(streams, mix, norm, normed, quantised, collapsed, row, lane, shape);

    // The old mix has been read by every lane before one of them writes the new one.
    simdgroup_barrier(mem_flags::mem_device);
    const float z_factor = inverse_rms(scratch[row * 32u + 24u], 4u * hidden, shape.norm_eps);
    const float eps = shape.hc_eps;
    const uint at = lane % 16u, row_base = (lane & 16u) + (at & 12u), column_base = (lane & 16u) + (at & 3u);
    const uint out = lane % 8u;
    const float gate = (scratch[row * 32u + out] * z_factor) * scale[out / 4u] + base[out];
    const float opened = sigmoid_own(gate);
    if (lane < 4u) mix[row * 4u + lane] = opened + eps;
    if (lane >= 4u && lane < 8u) post[row * 4u + lane - 4u] = 2.0f * opened;

    // Lanes 16..31 repeat lanes 0..15.
    float value = (scratch[row * 32u + 8u + at] * z_factor) * scale[2] + base[8u + at];
    const float v0 = simd_shuffle(value, ushort(row_base)), v1 = simd_shuffle(value, ushort(row_base + 1u));
    const float v2 = simd_shuffle(value, ushort(row_base + 2u)), v3 = simd_shuffle(value, ushort(row_base + 3u));
    value = exp_own(value - max_second(max_second(max_second(v0, v1), v2), v3));
    value = value / sum4(value, row_base, 1u) + eps;
    value = value / (sum4(value, column_base, 4u) + eps);
    for (uint i = 1u; i < shape.iterations; i++) {
        value = value / (sum4(value, row_base, 1u) + eps);
        value = value / (sum4(value, column_base, 4u) + eps);
    }
    if (lane < 16u) comb[row * 16u + lane] = value;
}

// out[r][out_offset + c] = bf16((((X0 + X1) + X2) + X3) * 0.25), with QDQ8 where bit 1 of outputs is set
kernel void hyper_tap(device const float *streams [[buffer(0)]], device float *out [[buffer(1)]],
                      constant Shape &shape [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint row = group * simdgroups + simdgroup, hidden = shape.hidden;
    if (row >= shape.rows) return;
    for (uint c = lane; c < hidden; c += 32u) {
        device const float *x = streams + row * 4u * hidden + c;
        float value = bf16_round((((x[0] + x[hidden]) + x[2u * hidden]) + x[3u * hidden]) * 0.25f);
        if ((shape.outputs & 2u) != 0u) value = fp8_round(value);
        out[row * shape.out_columns + shape.out_offset + c] = value;
    }
}
