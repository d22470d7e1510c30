// index_score: score[r][j] = sum_h weights[r][h] * max(queries[r][h] . key[j], 0) for the entries j that row r sees
// in   queries [rows, heads, head_dim] f32   weights [rows, heads] f32   rows as tf_kernels::rows   keys: pages of index_key
//      table [slots, pages_per_slot] u32   blocks [rows, blocks_max], block_counts [rows]: candidates, where restricted is 1
// out  scores [tile_rows, stride] f32; of a restricted row compact: the entries of its first block, of its second, and so on
// grid one thread a score; any threadgroup; no threadgroup memory. Rows that see at most skip_visible entries are left out
// sum  a dot is one chain of fused multiply-adds over the columns ascending, the heads add up in one such chain, ascending
// max  head_dim 128, a multiple of 32
#include "prelude.metal"

struct Shape {
    uint tile_first, tile_rows, heads, head_dim, ratio, pages_per_slot, entries_per_page, skip_visible, stride;
    uint restricted, blocks_max, block_size;
    uint columns; // scores of a row that are looked at, at most the stride
};

constant uint TILE = 8; // heads that share a decoded column

kernel void index_score(device const float *queries [[buffer(0)]], device const float *weights [[buffer(1)]],
                        device const RowInfo *rows [[buffer(2)]], device const uchar *keys [[buffer(3)]],
                        device const uint *table [[buffer(4)]], device const uint *blocks [[buffer(5)]],
                        device const uint *block_counts [[buffer(6)]], device float *scores [[buffer(7)]],
                        constant Shape &shape [[buffer(8)]], uint item [[thread_position_in_grid]]) {
    const uint tile_row = item / shape.columns, j = item % shape.columns, row = shape.tile_first + tile_row;
    if (tile_row >= shape.tile_rows) return;
    const uint slot = rows[row].slot, seen = (rows[row].position + 1u) / shape.ratio;
    if (seen <= shape.skip_visible) return;
    uint entry = j;
    if (shape.restricted != 0u && block_counts[row] != 0xffffffffu) {
        const uint block = j / shape.block_size;
        if (block >= block_counts[row]) return;
        entry = blocks[row * shape.blocks_max + block] * shape.block_size + j % shape.block_size;
    }
    if (entry >= seen) return;

    const uint head_dim = shape.head_dim, bytes = head_dim / 2u + head_dim / 32u;
    const ulong page = table[slot * shape.pages_per_slot + entry / shape.entries_per_page];
    const uint inside = entry % shape.entries_per_page, place = inside % 16u;
    device const uchar *block = keys + (page * shape.entries_per_page + inside / 16u * 16u) * bytes;
    device const uint *codes = (device const uint *)block + place;
    device const uchar *scales = block + head_dim / 2u * 16u + place;
    float total = 0.0f;
    for (uint first = 0u; first < shape.heads; first += TILE) {
        const uint here = min(shape.heads - first, TILE);
        device const float *query = queries + (row * shape.heads + first) * head_dim;
        float dots[TILE];
        for (uint h = 0u; h < TILE; h++) dots[h] = 0.0f;
        for (uint c = 0u; c < head_dim; c++) {
            const uint scale = scales[16u * (c / 32u)];
            const float factor = scale == 255u ? NAN : from_bits(scale << 23);
            const float key = e2m1_value(codes[16u * (c / 8u)] >> 4u * (c % 8u) & 15u) * factor;
            for (uint h = 0u; h < TILE; h++) {
                if (h < here) dots[h] = fma(query[h * head_dim + c], key, dots[h]);
            }
        }
        for (uint h = 0u; h < here; h++) {
            total = fma(weights[row * shape.heads + first + h], max_second(dots[h], 0.0f), total);
        }
    }
    scores[tile_row * shape.stride + j] = total;
}
