// kv_compress: pools the positions of a group into one latent and publishes it as a compressed entry; mod.rs has the formulas.
// in   raw     [rows, raw_columns] f32: ratio 2 [values | scores], ratio 1 values
//      raw_ring [slots, raw_len, 2 head_dim] f32: the partner of a position before its window
//      rows, windows, entries: as tf_kernels::rows   table [slots, pages_per_slot] u32   norm [head_dim]
//      frequencies [rope_dim / 2]
// out  cache   [pages, entries_per_page, record] bytes; record: head_dim / 2 bytes of E2M1 codes (byte 16 g + l: element
//              32 g + l low, 32 g + 16 + l high), head_dim / 16 E4M3 scales
//      latents [entries, head_dim] f32, bf16 values
// grid one block an entry, a thread four columns
// sum  order::sum_squares for the norm, as on the CPU; e0 + e1 for the softmax; nothing else is fused
// max  head_dim is a multiple of 32, at most 1024
//
// kv_keep_raw: afterwards, rows of even positions enter the ring at position % raw_len; one warp a row.
#include "prelude.cuh"

struct Shape {
    u32 items;  // entries, or rows
    u32 ratio, head_dim, rope_dim, raw_len, pages_per_slot, entries_per_page;
    float eps;
};

// The column's value pooled from two positions: their softmax over the scores, each operation rounded.
__device__ __forceinline__ float pool(float v0, float s0, float v1, float s1) {
    const float most = max_second(s0, s1);
    const float e0 = exp_own(s0 - most), e1 = exp_own(s1 - most), sum = e0 + e1;
    return bf16_round(v0 * __fdiv_rn(e0, sum) + v1 * __fdiv_rn(e1, sum));
}

extern "C" __global__ void __launch_bounds__(256)
kv_compress(const float* raw, const float* raw_ring, const RowInfo* rows, const WindowInfo* windows, const EntryInfo* entries,
            const u32* table, const float* norm, const float* frequencies, u8* cache, float* latents, const Shape shape) {
    __shared__ float4 pooled[256];
    __shared__ float factor_of_entry;
    const u32 item = blockIdx.x, thread = threadIdx.x, lane = thread % 32, head_dim = shape.head_dim, quads = head_dim / 4;
    const bool inside = thread < quads;
    const float4 weight = inside ? ((const float4*)norm)[thread] : zero_quad();
    wait_for_inputs();
    const u32 slot = entries[item].slot, entry = entries[item].entry, row = entries[item].row;
    float4 key = zero_quad();
    if (inside && shape.ratio == 1) {
        key = ((const float4*)(raw + row * head_dim))[thread];
    } else if (inside) {
        const u32 columns = 2 * head_dim, position = rows[row].position;
        const float4* second = (const float4*)(raw + (u64)row * columns);
        const float4* first = position <= windows[rows[row].window].start
            ? (const float4*)(raw_ring + ((u64)slot * shape.raw_len + (position - 1) % shape.raw_len) * columns)
            : second - columns / 4;
        const float4 v0 = first[thread], s0 = first[quads + thread], v1 = second[thread], s1 = second[quads + thread];
        key.x = pool(v0.x, s0.x, v1.x, s1.x);
        key.y = pool(v0.y, s0.y, v1.y, s1.y);
        key.z = pool(v0.z, s0.z, v1.z, s1.z);
        key.w = pool(v0.w, s0.w, v1.w, s1.w);
    }
    pooled[thread] = key;
    __syncthreads();
    if (thread < 32) {
        const float squares = sum_squares((const float*)pooled, head_dim, lane);
        if (lane == 0) factor_of_entry = inverse_rms(squares, head_dim, shape.eps);
    }
    __syncthreads();
    float4 value = scale_quad(weight, key, factor_of_entry);
    if (inside) {
        ((float4*)(latents + item * head_dim))[thread] = value;
        value = rope_turn_quad(value, 4 * thread, head_dim, entry * shape.ratio, frequencies, shape.rope_dim);
    }
    // The largest magnitude of sixteen columns, as bits: a NaN is above all and can't be lost.
    u32 most = max(max(to_bits(value.x) & 0x7fffffffu, to_bits(value.y) & 0x7fffffffu),
                   max(to_bits(value.z) & 0x7fffffffu, to_bits(value.w) & 0x7fffffffu));
    most = max(most, __shfl_xor_sync(WARP, most, 1));
    most = max(most, __shfl_xor_sync(WARP, most, 2));
    const u32 scale = most >= 0x7f800000u ? 0x7fu : e4m3_code(__fdiv_rn(max_second(from_bits(most), 6.0f / 512.0f), 6.0f));
    const float divisor = e4m3_value(scale);
    const u32 codes = e2m1_code(__fdiv_rn(value.x, divisor)) | e2m1_code(__fdiv_rn(value.y, divisor)) << 8
        | e2m1_code(__fdiv_rn(value.z, divisor)) << 16 | e2m1_code(__fdiv_rn(value.w, divisor)) << 24;
    // Sixteen columns further are the high halves of the same bytes.
    const u32 bytes = codes | __shfl_xor_sync(WARP, codes, 4) << 4;
    if (!inside) return;
    const u32 page = table[slot * shape.pages_per_slot + entry / shape.entries_per_page];
    const u64 place = (u64)page * shape.entries_per_page + entry % shape.entries_per_page;
    u8* record = cache + place * (head_dim / 2 + head_dim / 16);
    if (thread % 8 < 4) {
        // A record is a multiple of two bytes.
        u16* to = (u16*)(record + 16 * (thread / 8) + 4 * (thread % 8));
        to[0] = (u16)bytes;
        to[1] = (u16)(bytes >> 16);
    }
    if (thread % 4 == 0) record[head_dim / 2 + thread / 4] = (u8)scale;
}

extern "C" __global__ void __launch_bounds__(256)
kv_keep_raw(const float* raw, float* raw_ring, const RowInfo* rows, const WindowInfo* windows, const Shape shape) {
    wait_for_inputs();
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, columns = 2 * shape.head_dim;
    if (row >= shape.items) return;
    const u32 position = rows[row].position;
    const WindowInfo window = windows[rows[row].window];
    // Of a window longer than the ring only its last rows, so that no two rows meet in one place.
    const u32 left = window.row_count - (row - window.first_row);
    if (position % 2 != 0 || left > shape.raw_len) return;
    float* to = raw_ring + ((u64)rows[row].slot * shape.raw_len + position % shape.raw_len) * columns;
    const float* from = raw + (u64)row * columns;
    for (u32 c = lane; c < columns; c += 32) to[c] = from[c];
}
