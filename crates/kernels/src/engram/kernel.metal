// engram_gather: out[r][c] = dequantise(table[ids[r][c]]), then QDQ8 where asked for; the host looks for NaN
// in   codes [table_rows, head_dim] E4M3   scales [table_rows, head_dim / 32] E8M0   ids [items] u32, items = rows * columns
// out  out [items, head_dim] f32
// grid one SIMD group an item; exact in bf16, no sum
//
// engram_gate, per row and stream i, with key_i and V from kv:
//   d  = sum((X_i * q_i) * (k_i * key_i)) * (1 / rms(X_i)) * (1 / rms(key_i)) / sqrt(hidden)
//   g  = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d));  X_i' = bf16(X_i + g * V); rows of an image stay
// in   kv [rows, 5, hidden] f32: four keys, then the value   q_weight, k_weight [4, hidden] f32   image [rows] u8,
//      where `has_images` is set
// out  streams [rows, 4, hidden] f32 in place, bf16 values
// grid one SIMD group a stream of a row; threadgroup a multiple of 32; no threadgroup memory
// sum  order::sum_products and order::sum_squares, as on the CPU
// max  hidden and head_dim are multiples of 32
#include "prelude.metal"

struct Shape {
    uint items, columns; // items: of ids, or rows * 4; columns: head_dim, or hidden
    uint quantise;
    float eps;
    uint has_images;
};

kernel void engram_gather(device const uchar *codes [[buffer(0)]], device const uchar *scales [[buffer(1)]],
                          device const uint *ids [[buffer(2)]], device float *out [[buffer(3)]],
                          constant Shape &shape [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup;
    if (item >= shape.items) return;
    const ulong row = ids[item];
    for (uint block = 0u; block < shape.columns / 32u; block++) {
        const uint c = 32u * block + lane;
        float value = e4m3_value(codes[row * shape.columns + c]) * e8m0_value(scales[row * (shape.columns / 32u) + block]);
        if (shape.quantise != 0u) value = fp8_round(value);
        out[item * shape.columns + c] = value;
    }
}

kernel void engram_gate(device float *streams [[buffer(0)]], device const float *kv [[buffer(1)]],
                        device const float *q_weight [[buffer(2)]], device const float *k_weight [[buffer(3)]],
                        device const uchar *image [[buffer(4)]], constant Shape &shape [[buffer(5)]],
                        uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup, row = item / 4u, i = item % 4u, hidden = shape.columns;
    if (item >= shape.items) return;
    if (shape.has_images != 0u && image[row] != 0) return;
    device float *x = streams + item * hidden;
    device const float *key = kv + (row * 5u + i) * hidden;
    device const float *value = kv + (row * 5u + 4u) * hidden;
    device const float *q = q_weight + i * hidden;
    device const float *k = k_weight + i * hidden;
    float even = 0.0f, odd = 0.0f;
    for (uint c = lane; c < hidden; c += 64u) {
        even = fma(x[c] * q[c], k[c] * key[c], even);
        const uint d = c + 32u;
        if (d < hidden) odd = fma(x[d] * q[d], k[d] * key[d], odd);
    }
    const float dot = fold_four(even, odd);
    const float x_factor = inverse_rms(sum_products(x, x, hidden, lane), hidden, shape.eps);
    const float key_factor = inverse_rms(sum_products(key, key, hidden, lane), hidden, shape.eps);
    const float d = dot * x_factor * key_factor / sqrt(float(hidden));
    // Not a number: the smaller magnitude, as the CPU's maximum has it, with the sign that d carries.
    const float magnitude = sqrt(fabs(d) > 1e-6f ? fabs(d) : 1e-6f);
    const float gate = sigmoid_own(from_bits(to_bits(magnitude) | (to_bits(d) & 0x80000000u)));
    for (uint c = lane; c < hidden; c += 32u) x[c] = bf16_round(x[c] + gate * value[c]);
}
