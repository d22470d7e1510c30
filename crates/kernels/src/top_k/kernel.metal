// top_k: of the scores that a row sees the min(k, n) largest are kept, equal ones by the smaller index, written ascending;
//        and the candidate blocks that a row hands to later layers. Exact: scores are compared as integers and counted
// in   scores [tile_rows, stride] f32, compact for restricted rows   rows as tf_kernels::rows
// out  selected [rows, top_k] u32   counts [rows] u32
//      blocks [rows, blocks_max] u32, block_counts [rows] u32: written where mode is 1; lists, list_counts: the same of the
//      launch that published them, read where mode is 2
// grid one SIMD group a row; threadgroup a multiple of 32; no threadgroup memory
// ties the smaller index; -0 and +0 are equal; NaN and minus infinity are kept only by a row that keeps all it sees
#include "prelude.metal"

struct Shape {
    uint tile_first, tile_rows, stride, ratio, top_k, mode, blocks_max, block_size;
};

constant uint ALL_BLOCKS = 0xffffffffu;

// The key of score i, or of block i where block_size is not 0: its largest; the block of the newest entry is above all.
inline uint key_of(device const float *scores, uint i, uint n, uint block_size) {
    if (block_size == 0u) return order_key(scores[i]);
    if ((i + 1u) * block_size >= n) return order_key(INFINITY);
    uint key = 0u;
    for (uint j = i * block_size; j < (i + 1u) * block_size; j++) key = max(key, order_key(scores[j]));
    return key;
}

// Writes the indices of the `wanted` largest keys, ascending; returns how many there are. By a whole SIMD group.
inline uint select_largest(device const float *scores, uint n, uint block_size, uint wanted, device uint *out, uint lane) {
    const uint count = block_size == 0u ? n : (n + block_size - 1u) / block_size;
    // The largest threshold that at least `wanted` keys reach, bit by bit.
    uint least = 0u;
    for (uint bit = 0x80000000u; bit != 0u; bit >>= 1) {
        uint reached = 0u;
        for (uint i = lane; i < count; i += 32u) reached += key_of(scores, i, n, block_size) >= (least | bit) ? 1u : 0u;
        if (simd_sum(reached) >= wanted) least |= bit;
    }
    // Keys of NaN and minus infinity are never kept, and then there are fewer than wanted.
    uint equal_left = 0xffffffffu;
    if (least <= 0x007fffffu) {
        least = 0x00800000u;
    } else {
        uint above = 0u;
        for (uint i = lane; i < count; i += 32u) above += key_of(scores, i, n, block_size) > least ? 1u : 0u;
        equal_left = wanted - simd_sum(above);
    }
    uint written = 0u, equal_seen = 0u;
    for (uint first = 0u; first < count; first += 32u) {
        const uint i = first + lane;
        const uint key = i < count ? key_of(scores, i, n, block_size) : 0u;
        const uint is_equal = key == least ? 1u : 0u;
        const bool in_time = equal_seen + simd_prefix_exclusive_sum(is_equal) < equal_left;
        const uint kept = key > least || (is_equal != 0u && in_time) ? 1u : 0u;
        const uint before = simd_prefix_exclusive_sum(kept);
        if (kept != 0u) out[written + before] = i;
        written += simd_sum(kept);
        equal_seen += simd_sum(is_equal);
    }
    return written;
}

kernel void top_k(device const float *scores [[buffer(0)]], device const RowInfo *rows [[buffer(1)]],
                  device uint *selected [[buffer(2)]], device uint *counts [[buffer(3)]],
                  device uint *blocks [[buffer(4)]], device uint *block_counts [[buffer(5)]],
                  device const uint *lists [[buffer(6)]], device const uint *list_counts [[buffer(7)]],
                  constant Shape &shape [[buffer(8)]], uint group [[threadgroup_position_in_grid]],
                  uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]]) {
    const uint tile_row = group * simdgroups + simdgroup, row = shape.tile_first + tile_row;
    if (tile_row >= shape.tile_rows) return;
    const uint seen = (rows[row].position + 1u) / shape.ratio;
    device const float *of_row = scores + tile_row * shape.stride;
    device uint *out = selected + row * shape.top_k;
    if (shape.mode == 1u) {
        device uint *row_blocks = blocks + row * shape.blocks_max;
        uint count = ALL_BLOCKS;
        if ((seen + shape.block_size - 1u) / shape.block_size > shape.blocks_max) {
            count = select_largest(of_row, seen, shape.block_size, shape.blocks_max, row_blocks, lane);
        }
        if (lane == 0u) block_counts[row] = count;
    }
    uint kept = seen;
    if (seen <= shape.top_k) {
        for (uint i = lane; i < seen; i += 32u) out[i] = i;
    } else if (shape.mode == 2u && list_counts[row] != ALL_BLOCKS) {
        device const uint *list_blocks = lists + row * shape.blocks_max;
        const uint list = min(list_counts[row], shape.blocks_max);
        uint entries = list * shape.block_size;
        if (list > 0u) {
            const uint end = (list_blocks[list - 1u] + 1u) * shape.block_size;
            entries -= min(end > seen ? end - seen : 0u, shape.block_size);
        }
        kept = select_largest(of_row, entries, 0u, shape.top_k, out, lane);
        // The indices were written by other lanes.
        simdgroup_barrier(mem_flags::mem_device);
        for (uint i = lane; i < kept; i += 32u) {
            const uint index = out[i];
            out[i] = list_blocks[index / shape.block_size] * shape.block_size + index % shape.block_size;
        }
    } else {
        kept = select_largest(of_row, seen, 0u, shape.top_k, out, lane);
    }
    if (lane == 0u) counts[row] = kept;
}
