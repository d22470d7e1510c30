// kv_compress: pools the positions of a group into one latent and publishes it as a compressed entry; mod.rs has the formulas.
// in   raw     [rows, raw_columns] f32: ratio 2 [values | scores], ratio 1 values
//      raw_ring [slots, raw_len, 2 head_dim] f32: the partner of a position before its window
//      rows, windows, entries: as tf_kernels::rows   table [slots, pages_per_slot] u32   norm [head_dim]
//      frequencies [rope_dim / 2]
// out  cache   [pages, entries_per_page, record] bytes; record: head_dim / 2 bytes of E2M1 codes (byte 16 g + l: element
//              32 g + l low, 32 g + 16 + l high), head_dim / 16 E4M3 scales
//      latents [entries, head_dim] f32, bf16 values
// grid one warp an entry; a block of at most 4 warps; 16384 shared bytes, of which a lane reads what it wrote
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

extern "C" __global__ void __launch_bounds__(128)
kv_compress(const float* raw, const float* raw_ring, const RowInfo* rows, const WindowInfo* windows, const EntryInfo* entries,
            const u32* table, const float* norm, const float* frequencies, u8* cache, float* latents, const Shape shape) {
    __shared__ float pooled[4][1024];
    wait_for_inputs();
    const u32 item = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const u32 head_dim = shape.head_dim, blocks = head_dim / 32;
    if (item >= shape.items) return;
    float* key = pooled[threadIdx.x / 32] + lane;
    const u32 slot = entries[item].slot, entry = entries[item].entry, row = entries[item].row;
    if (shape.ratio == 1) {
        for (u32 b = 0; b < blocks; b++) key[32 * b] = raw[row * head_dim + 32 * b + lane];
    } else {
        const u32 columns = 2 * head_dim, position = rows[row].position;
        const float* second = raw + (u64)row * columns;
        const float* first = position <= windows[rows[row].window].start
            ? raw_ring + ((u64)slot * shape.raw_len + (position - 1) % shape.raw_len) * columns
            : second - columns;
#pragma unroll 2
        for (u32 b = 0; b < blocks; b++) {
            const u32 c = 32 * b + lane;
            const float s0 = first[head_dim + c], s1 = second[head_dim + c];
            const float most = max_second(s0, s1);
            const float e0 = exp_own(s0 - most), e1 = exp_own(s1 - most), sum = e0 + e1;
            key[32 * b] = bf16_round(first[c] * __fdiv_rn(e0, sum) + second[c] * __fdiv_rn(e1, sum));
        }
    }

    float even = 0.0f, odd = 0.0f;
    for (u32 b = 0; b < blocks; b += 2) {
        even = fma_own(key[32 * b], key[32 * b], even);
        if (b + 1 < blocks) odd = fma_own(key[32 * b + 32], key[32 * b + 32], odd);
    }
    const float factor = inverse_rms(fold_four(even, odd), head_dim, shape.eps);
    const u32 page = table[slot * shape.pages_per_slot + entry / shape.entries_per_page];
    const u64 place = (u64)page * shape.entries_per_page + entry % shape.entries_per_page;
    u8* record = cache + place * (head_dim / 2 + head_dim / 16);
#pragma unroll 2
    for (u32 b = 0; b < blocks; b++) {
        const u32 c = 32 * b + lane;
        float value = bf16_round(norm[c] * (key[32 * b] * factor));
        latents[item * head_dim + c] = value;
        value = rope_turn(value, c, head_dim, entry * shape.ratio, frequencies, shape.rope_dim);
        // The largest magnitude of sixteen columns, as bits: a NaN is above all and can't be lost.
        u32 most = to_bits(value) & 0x7fffffffu;
        for (u32 step = 8; step > 0; step /= 2) most = max(most, __shfl_xor_sync(WARP, most, step));
        const u32 scale = most >= 0x7f800000u ? 0x7fu : e4m3_code(__fdiv_rn(max_second(from_bits(most), 6.0f / 512.0f), 6.0f));
        const u32 code = e2m1_code(__fdiv_rn(value, e4m3_value(scale)));
        const u32 high = __shfl_xor_sync(WARP, code, 16);
        if (lane < 16) record[16 * b + lane] = (u8)(code | high << 4);
        if (lane % 16 == 0) record[head_dim / 2 + 2 * b + lane / 16] = (u8)scale;
    }
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
