// moe_experts: the routed MXFP4 experts of each row's picks and the shared FP8 expert; formulas and roundings in mod.rs.
//   moe_up    a[r][p] = QDQ8(bf16(silu(min(g, limit)) * clamp(u, -limit, limit) * weight)), g = bf16(x @ w1^T), u = bf16(x @ w3^T)
//   moe_down  out[r] = bf16(sum of bf16(a[r][p] @ w2^T) over the picks in ascending expert id, the shared expert last)
// in   x [rows, hidden] f32, QDQ8'd   picks [rows, picks] u32, no id twice in a row   weights [rows, picks] f32
//      experts: for each w1, w3 [intermediate, ceil(hidden / 128), 16] dwords of layout B, w2 likewise, then their E8M0 scales,
//      one for 32 columns
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

// Where an expert's matrices lie, in bytes.
struct Places {
    ulong w3, w2, scales1, scales3, scales2, stride;
};

inline Places places_of(constant Shape &shape) {
    const ulong up = ulong(shape.intermediate) * ((shape.hidden + 127u) / 128u * 64u);
    const ulong down = ulong(shape.hidden) * ((shape.intermediate + 127u) / 128u * 64u);
    const ulong scales = ulong(shape.intermediate) * (shape.hidden / 32u);
    Places places;
    places.w3 = up;
    places.w2 = 2ul * up;
    places.scales1 = 2ul * up + down;
    places.scales3 = places.scales1 + scales;
    places.scales2 = places.scales3 + scales;
    places.stride = places.scales2 + scales;
    return places;
}

// One output of a matrix of an expert.
inline float dot_expert(device const uchar *codes, device const uchar *scales, device const float *x, uint columns,
                        uint output, uint lane) {
    device const uint *row = (device const uint *)(codes + ulong(output) * ((columns + 127u) / 128u * 64u));
    return dot_mxfp4(row, scales + ulong(output) * (columns / 32u), x, columns, lane);
}

kernel void moe_up(device const float *x [[buffer(0)]], device const uint *picks [[buffer(1)]],
                   device const float *weights [[buffer(2)]], device const uchar *experts [[buffer(3)]],
                   device const uchar *shared1 [[buffer(4)]], device const uchar *shared1_scales [[buffer(5)]],
                   device const uchar *shared3 [[buffer(6)]], device const uchar *shared3_scales [[buffer(7)]],
                   device float *activations [[buffer(8)]], constant Shape &shape [[buffer(9)]],
                   uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                   uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup, blocks = shape.intermediate / 32u, hidden = shape.hidden;
    const uint block = item % blocks, pick = item / blocks % (shape.picks + 1u), row = item / blocks / (shape.picks + 1u);
    if (row >= shape.rows) return;
    device const float *in = x + ulong(row) * hidden;
    const bool is_shared = pick == shape.picks;
    const Places places = places_of(shape);
    device const uchar *expert = experts + ulong(is_shared ? 0u : picks[row * shape.picks + pick]) * places.stride;
    float value = 0.0f;
    for (uint i = 0u; i < 32u; i++) {
        const uint output = 32u * block + i;
        float gate, up;
        if (is_shared) {
            const uint scales = block * ((hidden + 31u) / 32u);
            gate = dot_fp8(shared1 + ulong(output) * hidden, shared1_scales + scales, in, hidden, lane);
            up = dot_fp8(shared3 + ulong(output) * hidden, shared3_scales + scales, in, hidden, lane);
        } else {
            gate = dot_expert(expert, expert + places.scales1, in, hidden, output, lane);
            up = dot_expert(expert + places.w3, expert + places.scales3, in, hidden, output, lane);
        }
        if (lane == i) value = gated(bf16_round(gate), bf16_round(up), shape.limit);
    }
    if (!is_shared) value = value * weights[row * shape.picks + pick];
    const ulong to = (ulong(row) * (shape.picks + 1u) + pick) * shape.intermediate + 32u * block + lane;
    activations[to] = fp8_round(bf16_round(value));
}

kernel void moe_down(device const float *activations [[buffer(0)]], device const uint *picks [[buffer(1)]],
                     device const uchar *experts [[buffer(2)]], device const uchar *shared2 [[buffer(3)]],
                     device const uchar *shared2_scales [[buffer(4)]], device float *out [[buffer(5)]],
                     constant Shape &shape [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup, row = item / shape.hidden, n = item % shape.hidden;
    if (row >= shape.rows) return;
    const uint columns = shape.intermediate;
    const Places places = places_of(shape);
    device const float *in = activations + ulong(row) * (shape.picks + 1u) * columns;
    device const uint *own = picks + row * shape.picks;
    float sum = 0.0f;
    uint least = 0u;
    for (uint added = 0u; added < shape.picks; added++) {
        // The next id upwards.
        uint pick = 0u, id = 0xffffffffu;
        for (uint p = 0u; p < shape.picks; p++) {
            const uint other = own[p];
            if (other >= least && other < id) {
                id = other;
                pick = p;
            }
        }
        least = id + 1u;
        device const uchar *expert = experts + ulong(id) * places.stride;
        const float product = dot_expert(expert + places.w2, expert + places.scales2, in + pick * columns, columns, n, lane);
        sum = sum + bf16_round(product);
    }
    device const float *last = in + shape.picks * columns;
    const uint scales = n / 32u * ((columns + 31u) / 32u);
    sum = sum + bf16_round(dot_fp8(shared2 + ulong(n) * columns, shared2_scales + scales, last, columns, lane));
    if (lane == 0u) out[item] = bf16_round(sum);
}
