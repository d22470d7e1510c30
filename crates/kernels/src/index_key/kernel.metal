// index_key: key[e] = QDQ4(32, E8M0)(RoPE(RMSNorm(x[e]; norm), entry * ratio)), by which later positions find an entry
// in   x [entries, head_dim] f32, bf16 values   norm [head_dim]   entries as tf_kernels::rows   frequencies [rope_dim / 2]
//      table [slots, pages_per_slot] u32
// out  cache: pages of blocks of 16 entries; a block is [head_dim / 8][16][4] bytes of E2M1 codes (byte b of group g: element
//      8 g + 2 b low, 8 g + 2 b + 1 high), then [head_dim / 32][16] E8M0 bytes
// grid one SIMD group an entry; threadgroup a multiple of 32; no threadgroup memory
// sum  order::sum_squares, as on the CPU; bf16 after the norm and after RoPE
// max  head_dim is a multiple of 32, entries_per_page of 16
#include "prelude.metal"

struct Shape {
    uint items, ratio, head_dim, rope_dim, pages_per_slot, entries_per_page;
    float eps;
};

kernel void index_key(device const float *x [[buffer(0)]], device const float *norm [[buffer(1)]],
                      device const EntryInfo *entries [[buffer(2)]], device const uint *table [[buffer(3)]],
                      device const float *frequencies [[buffer(4)]], device uchar *cache [[buffer(5)]],
                      constant Shape &shape [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup, head_dim = shape.head_dim;
    if (item >= shape.items) return;
    const uint slot = entries[item].slot, entry = entries[item].entry, bytes = head_dim / 2u + head_dim / 32u;
    device const float *in = x + item * head_dim;
    const ulong page = table[slot * shape.pages_per_slot + entry / shape.entries_per_page];
    const uint inside = entry % shape.entries_per_page, place = inside % 16u;
    device uchar *block = cache + (page * shape.entries_per_page + inside / 16u * 16u) * bytes;
    const float factor = inverse_rms(sum_products(in, in, head_dim, lane), head_dim, shape.eps);
    for (uint g = 0u; g < head_dim / 32u; g++) {
        const uint c = 32u * g + lane;
        float value = bf16_round(norm[c] * (in[c] * factor));
        value = rope_turn(value, c, head_dim, entry * shape.ratio, frequencies, shape.rope_dim);
        const uint most = simd_max(to_bits(value) & 0x7fffffffu);
        // The smallest power of two that brings the largest magnitude to at most 6.
        const uint bits = to_bits(max_second(from_bits(most), from_bits(0x01c00000u)) * (1.0f / 6.0f));
        const uint scale = most >= 0x7f800000u ? 255u : (bits >> 23) + ((bits & 0x7fffffu) != 0u ? 1u : 0u);
        const uint code = e2m1_code(value * fp8_inverse(scale));
        const uint high = simd_shuffle_xor(code, ushort(1));
        if (lane % 2u == 0u) block[(4u * g + lane / 8u) * 64u + 4u * place + lane % 8u / 2u] = uchar(code | high << 4);
        if (lane == 0u) block[head_dim / 2u * 16u + 16u * g + place] = uchar(scale);
    }
}
