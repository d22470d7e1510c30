// kv_compress: pools the positions of a group into one latent and publishes it as a compressed entry; mod.rs has the formulas.
// in   raw     [rows, raw_columns] f32: ratio 2 [values | scores], ratio 1 values
//      raw_ring [slots, raw_len, 2 head_dim] f32: the partner of a position before its window
//      rows, windows, entries: as tf_kernels::rows   table [slots, pages_per_slot] u32   norm [head_dim]
//      frequencies [rope_dim / 2]
// out  cache   [pages, entries_per_page, record] bytes; record: head_dim / 2 bytes of E2M1 codes (byte 16 g + l: element
//              32 g + l low, 32 g + 16 + l high), head_dim / 16 E4M3 scales
//      latents [entries, head_dim] f32, bf16 values
// grid one SIMD group an entry; threadgroup a multiple of 32; no threadgroup memory
// sum  order::sum_squares for the norm, as on the CPU; e0 + e1 for the softmax; nothing else is fused
// max  head_dim is a multiple of 32, at most 1024
//
// kv_keep_raw: afterwards, rows of even positions enter the ring at position % raw_len; one SIMD group a row.
#include "prelude.metal"

struct Shape {
    uint items; // entries, or rows
    uint ratio, head_dim, rope_dim, raw_len, pages_per_slot, entries_per_page;
    float eps;
};

constant uint BLOCKS = 32; // of 32 columns

kernel void kv_compress(device const float *raw [[buffer(0)]], device const float *raw_ring [[buffer(1)]],
                        device const RowInfo *rows [[buffer(2)]], device const WindowInfo *windows [[buffer(3)]],
                        device const EntryInfo *entries [[buffer(4)]], device const uint *table [[buffer(5)]],
                        device const float *norm [[buffer(6)]], device const float *frequencies [[buffer(7)]],
                        device uchar *cache [[buffer(8)]], device float *latents [[buffer(9)]],
                        constant Shape &shape [[buffer(10)]], uint group [[threadgroup_position_in_grid]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup, head_dim = shape.head_dim, blocks = head_dim / 32u;
    if (item >= shape.items) return;
    const uint slot = entries[item].slot, entry = entries[item].entry, row = entries[item].row;
    float key[BLOCKS];
    if (shape.ratio == 1u) {
        for (uint b = 0u; b < blocks; b++) key[b] = raw[row * head_dim + 32u * b + lane];
    } else {
        const uint columns = 2u * head_dim, position = rows[row].position;
        device const float *second = raw + row * columns;
        device const float *first = second - columns;
        if (position <= windows[rows[row].window].start) {
            first = raw_ring + (slot * shape.raw_len + (position - 1u) % shape.raw_len) * columns;
        }
        for (uint b = 0u; b < blocks; b++) {
            const uint c = 32u * b + lane;
            const float s0 = first[head_dim + c], s1 = second[head_dim + c];
            const float most = max_second(s0, s1);
            const float e0 = exp_own(s0 - most), e1 = exp_own(s1 - most), sum = e0 + e1;
            key[b] = bf16_round(first[c] * (e0 / sum) + second[c] * (e1 / sum));
        }
    }

    float even = 0.0f, odd = 0.0f;
    for (uint b = 0u; b < blocks; b += 2u) {
        even = fma(key[b], key[b], even);
        if (b + 1u < blocks) odd = fma(key[b + 1u], key[b + 1u], odd);
    }
    const float factor = inverse_rms(fold_four(even, odd), head_dim, shape.eps);
    const uint page = table[slot * shape.pages_per_slot + entry / shape.entries_per_page];
    const ulong place = ulong(page) * shape.entries_per_page + entry % shape.entries_per_page;
    device uchar *record = cache + place * (head_dim / 2u + head_dim / 16u);
    for (uint b = 0u; b < blocks; b++) {
        const uint c = 32u * b + lane;
        float value = bf16_round(norm[c] * (key[b] * factor));
        latents[item * head_dim + c] = value;
        value = rope_turn(value, c, head_dim, entry * shape.ratio, frequencies, shape.rope_dim);
        // The largest magnitude of sixteen columns, as bits: a NaN is above all and can't be lost.
        uint most = to_bits(value) & 0x7fffffffu;
        for (ushort step = 8; step > 0; step /= 2) most = max(most, simd_shuffle_xor(most, step));
        const uint scale = most >= 0x7f800000u ? 0x7fu : e4m3_code(max_second(from_bits(most), 6.0f / 512.0f) / 6.0f);
        const uint code = e2m1_code(value / e4m3_value(scale));
        const uint high = simd_shuffle_xor(code, ushort(16));
        if (lane < 16u) record[16u * b + lane] = uchar(code | high << 4);
        if (lane % 16u == 0u) record[head_dim / 2u + 2u * b + lane / 16u] = uchar(scale);
    }
}

kernel void kv_keep_raw(device const float *raw [[buffer(0)]], device float *raw_ring [[buffer(1)]],
                        device const RowInfo *rows [[buffer(2)]], device const WindowInfo *windows [[buffer(3)]],
                        constant Shape &shape [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint row = group * simdgroups + simdgroup, columns = 2u * shape.head_dim;
    if (row >= shape.items) return;
    const uint window = rows[row].window, position = rows[row].position;
    // Of a window longer than the ring only its last rows, so that no two rows meet in one place.
    const uint left = windows[window].row_count - (row - windows[window].first_row);
    if (position % 2u != 0u || left > shape.raw_len) return;
    device float *to = raw_ring + (rows[row].slot * shape.raw_len + position % shape.raw_len) * columns;
    for (uint c = lane; c < columns; c += 32u) to[c] = raw[row * columns + c];
}
