// moe_experts: the routed MXFP4 experts of each row's picks and the shared FP8 expert; formulas and roundings in mod.rs.
//   moe_up    a[r][p] = QDQ8(bf16(silu(min(g, limit)) * clamp(u, -limit, limit) * weight)), g = bf16(x @ w1^T), u = bf16(x @ w3^T)
//   moe_down  out[r] = bf16(sum of bf16(a[r][p] @ w2^T) over the picks in ascending expert id, the shared expert last)
// in   x [rows, hidden] f32, QDQ8'd   picks [rows, picks] u32 ascending   weights [rows, picks] f32
//      w1, w3 [experts, intermediate, ceil(hidden / 128), 16] dwords of layout B, w2 likewise; scales E8M0, one for 32 columns
//      shared1, shared3 [intermediate, hidden] E4M3, shared2 [hidden, intermediate]; scales E8M0 a 32x32 block
// out  activations [rows, picks + 1, intermediate] f32, the last of a row the shared expert's   out [rows, hidden] f32
// grid moe_up: one SIMD group for 32 columns of an activation, which share their QDQ8 scale. moe_down: one SIMD group an
//      output. Threadgroup a multiple of 32; no threadgroup memory
// sum  tf_numerics::sum, scaled: a function of the columns alone; the sum over experts is float32 in ascending id
// max  intermediate is a multiple of 32; limit 0 means none
#include "linear.metal"

struct Shape {
    uint rows, hidden, intermediate, picks;
    float limit;
};

inline float gated(float gate, float up, float limit) {
    if (limit != 0.0f) {
        up = up < -limit ? -limit : up > limit ? limit : up;
        gate = gate > limit ? limit : gate;
    }
    return silu_own(gate) * up;
}

kernel void moe_up(device const float *x [[buffer(0)]], device const uint *picks [[buffer(1)]],
                   device const float *weights [[buffer(2)]], device const uint *w1 [[buffer(3)]],
                   device const uchar *w1_scales [[buffer(4)]], device const uint *w3 [[buffer(5)]],
                   device const uchar *w3_scales [[buffer(6)]], device const uchar *shared1 [[buffer(7)]],
                   device const uchar *shared1_scales [[buffer(8)]], device const uchar *shared3 [[buffer(9)]],
                   device const uchar *shared3_scales [[buffer(10)]], device float *activations [[buffer(11)]],
                   constant Shape &shape [[buffer(12)]], uint group [[threadgroup_position_in_grid]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup, blocks = shape.intermediate / 32u, hidden = shape.hidden;
    const uint block = item % blocks, pick = item / blocks % (shape.picks + 1u), row = item / blocks / (shape.picks + 1u);
    if (row >= shape.rows) return;
    device const float *in = x + row * hidden;
    const uint dwords = (hidden + 127u) / 128u * 16u, groups = (hidden + 31u) / 32u;
    const bool is_shared = pick == shape.picks;
    const uint expert = is_shared ? 0u : picks[row * shape.picks + pick];
    float value = 0.0f;
    for (uint i = 0u; i < 32u; i++) {
        const uint output = 32u * block + i;
        const ulong at = ulong(expert) * shape.intermediate + output;
        float gate, up;
        if (is_shared) {
            gate = dot_fp8(shared1 + output * hidden, shared1_scales + block * groups, in, hidden, lane);
            up = dot_fp8(shared3 + output * hidden, shared3_scales + block * groups, in, hidden, lane);
        } else {
            gate = dot_mxfp4(w1 + at * dwords, w1_scales + at * groups, in, hidden, lane);
            up = dot_mxfp4(w3 + at * dwords, w3_scales + at * groups, in, hidden, lane);
        }
        if (lane == i) value = gated(bf16_round(gate), bf16_round(up), shape.limit);
    }
    if (!is_shared) value = value * weights[row * shape.picks + pick];
    const uint to = (row * (shape.picks + 1u) + pick) * shape.intermediate + 32u * block + lane;
    activations[to] = fp8_round(bf16_round(value));
}

kernel void moe_down(device const float *activations [[buffer(0)]], device const uint *picks [[buffer(1)]],
                     device const uint *w2 [[buffer(2)]], device const uchar *w2_scales [[buffer(3)]],
                     device const uchar *shared2 [[buffer(4)]], device const uchar *shared2_scales [[buffer(5)]],
                     device float *out [[buffer(6)]], constant Shape &shape [[buffer(7)]],
                     uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup, row = item / shape.hidden, n = item % shape.hidden;
    if (row >= shape.rows) return;
    const uint columns = shape.intermediate, dwords = (columns + 127u) / 128u * 16u, groups = (columns + 31u) / 32u;
    device const float *in = activations + row * (shape.picks + 1u) * columns;
    float sum = 0.0f;
    for (uint pick = 0u; pick < shape.picks; pick++) {
        const ulong at = ulong(picks[row * shape.picks + pick]) * shape.hidden + n;
        sum = sum + bf16_round(dot_mxfp4(w2 + at * dwords, w2_scales + at * groups, in + pick * columns, columns, lane));
    }
    device const float *last = in + shape.picks * columns;
    sum = sum + bf16_round(dot_fp8(shared2 + n * columns, shared2_scales + n / 32u * groups, last, columns, lane));
    if (lane == 0u) out[item] = bf16_round(sum);
}
