// index_score: score[r][j] = sum_h weights[r][h] * max(queries[r][h] . key[j], 0) for the entries j that row r sees
// in   queries [rows, heads, head_dim] f32   weights [rows, heads] f32   rows as tf_kernels::rows   keys: pages of index_key
//      table [slots, pages_per_slot] u32   blocks [rows, blocks_max], block_counts [rows]: candidates, where restricted is 1
// out  scores [tile_rows, stride] f32; of a restricted row compact: the entries of its first block, of its second, and so on
// grid 256 scores of one row a block, one a thread. Rows that see at most skip_visible entries are left out
// sum  a dot is one chain of fused multiply-adds over the columns ascending, the heads add up in one such chain, ascending
// max  head_dim 128, a multiple of 32; 8192 shared bytes hold the queries of 16 heads at a time
#include "prelude.cuh"

struct Shape {
    u32 tile_first, tile_rows, heads, head_dim, ratio, pages_per_slot, entries_per_page, skip_visible, stride;
    u32 restricted, blocks_max, block_size;
    u32 columns;  // scores of a row that are looked at, at most the stride
};

constexpr u32 TILE = 16, THREADS = 256, HEAD_DIM_MAX = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
index_score(const float* queries, const float* weights, const RowInfo* rows, const u8* keys, const u32* table, const u32* blocks,
            const u32* block_counts, float* scores, const Shape shape) {
    __shared__ float4 query[TILE * HEAD_DIM_MAX / 4];
    wait_for_inputs();
    const u32 row_blocks = (shape.columns + THREADS - 1) / THREADS, tile_row = blockIdx.x / row_blocks;
    const u32 first_score = blockIdx.x % row_blocks * THREADS, j = first_score + threadIdx.x;
    const u32 row = shape.tile_first + tile_row, head_dim = shape.head_dim;
    const u32 slot = rows[row].slot, seen = (rows[row].position + 1) / shape.ratio;
    const bool restricted = shape.restricted != 0 && block_counts[row] != 0xffffffffu;
    // The same for every thread of the block.
    if (seen <= shape.skip_visible || (!restricted && first_score >= seen)) return;
    if (restricted && first_score / shape.block_size >= block_counts[row]) return;
    u32 entry = j;
    bool wanted = j < shape.columns;
    if (restricted) {
        const u32 block = j / shape.block_size;
        wanted = wanted && block < block_counts[row];
        if (wanted) entry = blocks[row * shape.blocks_max + block] * shape.block_size + j % shape.block_size;
    }
    wanted = wanted && entry < seen;
    // A thread without a score of its own reads entry 0 and writes nothing.
    if (!wanted) entry = 0;

    const u32 bytes = head_dim / 2 + head_dim / 32;
    const u64 page = table[slot * shape.pages_per_slot + entry / shape.entries_per_page];
    const u32 inside = entry % shape.entries_per_page, place = inside % 16;
    const u8* block = keys + (page * shape.entries_per_page + inside / 16 * 16) * bytes;
    const u32* codes = (const u32*)block + place;
    const u8* scales = block + head_dim / 2 * 16 + place;
    float total = 0.0f;
    for (u32 first = 0; first < shape.heads; first += TILE) {
        const u32 here = min(shape.heads - first, TILE);
        const float4* from = (const float4*)(queries + (row * shape.heads + first) * head_dim);
        __syncthreads();
        for (u32 i = threadIdx.x; i < TILE * head_dim / 4; i += THREADS) {
            float4 value;
            value.x = value.y = value.z = value.w = 0.0f;
            if (i < here * head_dim / 4) value = from[i];
            query[i] = value;
        }
        __syncthreads();
        float dots[TILE];
#pragma unroll
        for (u32 h = 0; h < TILE; h++) dots[h] = 0.0f;
        // The codes of the next 32 columns are on their way while these are multiplied.
        u32 next_code[4], next_scale;
        const auto load = [&](u32 c) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) next_code[i] = codes[2 * c + 16 * i];
            next_scale = scales[c / 2];
        };
        load(0);
        for (u32 c = 0; c < head_dim; c += 32) {
            u32 code[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) code[i] = next_code[i];
            const float factor = next_scale == 255 ? not_a_number() : from_bits(next_scale << 23);
            if (c + 32 < head_dim) load(c + 32);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float key[8];
#pragma unroll
                for (u32 k = 0; k < 8; k++) key[k] = e2m1_value(code[i] >> 4 * k) * factor;
#pragma unroll
                for (u32 h = 0; h < TILE; h++) {
                    const u32 at = (h * head_dim + c) / 4 + 2 * i;
                    const float4 low = query[at], high = query[at + 1];
                    float dot = dots[h];
                    dot = fma_own(low.x, key[0], dot);
                    dot = fma_own(low.y, key[1], dot);
                    dot = fma_own(low.z, key[2], dot);
                    dot = fma_own(low.w, key[3], dot);
                    dot = fma_own(high.x, key[4], dot);
                    dot = fma_own(high.y, key[5], dot);
                    dot = fma_own(high.z, key[6], dot);
                    dots[h] = fma_own(high.w, key[7], dot);
                }
            }
        }
#pragma unroll
        for (u32 h = 0; h < TILE; h++) {
            if (h < here) total = fma_own(weights[row * shape.heads + first + h], max_second(dots[h], 0.0f), total);
        }
    }
    if (wanted) scores[tile_row * shape.stride + j] = total;
}
