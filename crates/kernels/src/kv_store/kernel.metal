// kv_store: record[r] = QDQ8(RoPE(RMSNorm(x[r]; norm), position)), every column quantised
// in   x [rows, head_dim] f32   norm [head_dim] f32   rows as tf_kernels::rows   frequencies [rope_dim / 2] f32
// out  records [rows, head_dim + head_dim / 32] bytes: E4M3 codes, then E8M0 scales
// grid one SIMD group a row; threadgroup a multiple of 32; no threadgroup memory
// sum  order::sum_squares, as on the CPU; bf16 after the norm and after RoPE
// max  head_dim is a multiple of 32
//
// kv_store_ring: after attention, records of a window's last ring_len rows go to slot position % ring_len; a SIMD group a row.
#include "prelude.metal"

struct Shape {
    uint rows, head_dim, rope_dim, ring_len;
    float eps;
};

kernel void kv_store(device const float *x [[buffer(0)]], device const float *norm [[buffer(1)]],
                     device const RowInfo *rows [[buffer(2)]], device const float *frequencies [[buffer(3)]],
                     device uchar *records [[buffer(4)]], constant Shape &shape [[buffer(5)]],
                     uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint row = group * simdgroups + simdgroup, head_dim = shape.head_dim;
    if (row >= shape.rows) return;
    device const float *in = x + row * head_dim;
    device uchar *record = records + row * (head_dim + head_dim / 32u);
    const float factor = inverse_rms(sum_products(in, in, head_dim, lane), head_dim, shape.eps);
    for (uint block = 0u; block < head_dim / 32u; block++) {
        const uint c = 32u * block + lane;
        float value = bf16_round(norm[c] * (in[c] * factor));
        value = rope_turn(value, c, head_dim, rows[row].position, frequencies, shape.rope_dim);
        const uint scale = fp8_scale(simd_max(to_bits(value) & 0x7fffffffu));
        record[c] = uchar(e4m3_code(value * fp8_inverse(scale)));
        if (lane == 0u) record[head_dim + block] = uchar(scale);
    }
}

kernel void kv_store_ring(device const uchar *records [[buffer(0)]], device uchar *ring [[buffer(1)]],
                          device const RowInfo *rows [[buffer(2)]], device const WindowInfo *windows [[buffer(3)]],
                          constant Shape &shape [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint row = group * simdgroups + simdgroup, bytes = shape.head_dim + shape.head_dim / 32u;
    if (row >= shape.rows) return;
    const uint window = rows[row].window;
    if (windows[window].row_count - (row - windows[window].first_row) > shape.ring_len) return;
    device uchar *to = ring + (rows[row].slot * shape.ring_len + rows[row].position % shape.ring_len) * bytes;
    for (uint i = lane; i < bytes; i += 32u) to[i] = records[row * bytes + i];
}
