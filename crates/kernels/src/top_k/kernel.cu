// top_k: of the scores that a row sees the min(k, n) largest are kept, equal ones by the smaller index, written ascending;
//        and the candidate blocks that a row hands to later layers. Exact: scores are compared as integers and counted
// in   scores [tile_rows, stride] f32, compact for restricted rows   rows as tf_kernels::rows
// out  selected [rows, top_k] u32   counts [rows] u32
//      blocks [rows, blocks_max] u32, block_counts [rows] u32: written where mode is 1; lists, list_counts: the same of the
//      launch that published them, read where mode is 2
// Rows of up to `part` scores are one block's. Longer ones: top_k_parts selects from each part, whatever is among the row's
// largest being among its part's, and top_k_merge from what they kept.
// work kept [tile_rows, parts, top_k] {index, key}, kept_counts [tile_rows, parts], part_block_keys [tile_rows, all blocks], u32
// grid top_k, top_k_merge: 1024 threads a row; top_k_parts: 1024 threads a part of a row; dynamic shared memory: a word a key,
//      and where mode is 1 a word a block of entries
// ties the smaller index; -0 and +0 are equal; NaN and minus infinity are kept only by a row that keeps all it sees
#include "prelude.cuh"

struct Shape {
    u32 tile_first, tile_rows, stride, ratio, top_k, mode, blocks_max, block_size;
    u32 part, parts;  // scores of a part, a multiple of block_size; parts of a row
};

constexpr u32 ALL_BLOCKS = 0xffffffffu, THREADS = 1024, WARPS = THREADS / 32, HELD = 16;
// Digits of a key, from the top: 11, 11 and 10 bits.
constexpr u32 BINS = 2048;

// The sum over the lanes before this one, and over all.
__device__ __forceinline__ u32 sum_before(u32 value, u32 lane, u32& all) {
    u32 sum = value;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(WARP, sum, step);
        if (lane >= step) sum += other;
    }
    all = __shfl_sync(WARP, sum, 31);
    return sum - value;
}

// Copies of the counts, so that the lanes of a warp that meet in one bin wait less for each other.
constexpr u32 COPIES = 2;

struct Work {
    u32 bins[COPIES][BINS];
    u32 of_warp[WARPS];
    u32 above[WARPS], equal[WARPS];
    u32 digit, left;
};

// Of the counted keys the bin, from the top, in which the `wanted`-th lies, and how many it must still bring.
__device__ __forceinline__ void find_bin(Work& work, u32 wanted, u32 thread) {
    // A thread holds two bins, the first threads the highest ones.
    const u32 high_bin = BINS - 1 - 2 * thread, lane = thread % 32, warp = thread / 32;
    u32 high = 0, low = 0;
#pragma unroll
    for (u32 copy = 0; copy < COPIES; copy++) high += work.bins[copy][high_bin], low += work.bins[copy][high_bin - 1];
    u32 all;
    u32 before = sum_before(high + low, lane, all);
    if (lane == 31) work.of_warp[warp] = all;
    __syncthreads();
    if (warp == 0) {
        const u32 sum = sum_before(work.of_warp[lane], lane, all);
        __syncwarp();
        work.of_warp[lane] = sum;
    }
    __syncthreads();
    before += work.of_warp[warp];
    if (before < wanted && before + high >= wanted) work.digit = high_bin, work.left = wanted - before;
    before += high;
    if (before < wanted && before + low >= wanted) work.digit = high_bin - 1, work.left = wanted - before;
    __syncthreads();
}

// Writes the indices of the `wanted` largest of `count` keys, ascending; returns how many there are. `wanted` is at most
// `count` and above 0, `count` at most 1024 * MOST. By all threads of the block. A warp has a run of indices, of which each
// lane holds every 32nd key, or asks for it again where they are many.
template <u32 MOST, class Key>
__device__ __forceinline__ u32 select_largest(Key key_of, u32 count, u32 wanted, u32* out, Work& work) {
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u32 run = (count + THREADS - 1) / THREADS * 32, begin = warp * run;
    // Beyond the last index a key that is never kept.
    const auto ask = [&](u32 k) {
        const u32 i = begin + 32 * k + lane;
        return 32 * k < run && i < count ? key_of(i) : 0;
    };
    constexpr bool HOLDS = MOST <= HELD;
    constexpr u32 UNROLL = HOLDS ? MOST : 1;
    u32 held[HOLDS ? MOST : 1];
    if (HOLDS) {
#pragma unroll
        for (u32 k = 0; k < MOST; k++) held[HOLDS ? k : 0] = ask(k);
    }
    const auto key_at = [&](u32 k) { return HOLDS ? held[HOLDS ? k : 0] : ask(k); };
    const u32 steps = run / 32;
    u32 least = 0, left = wanted;
#pragma unroll 1
    for (u32 digit = 0; digit < 3; digit++) {
        // The digit's place, and the bits above it, which a key must share with the threshold.
        const u32 shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, mask = digit == 2 ? 1023 : 2047;
        const u32 known = digit == 0 ? 0 : 0xffffffffu << (digit == 1 ? 21 : 10);
        u32* const bins = work.bins[lane % COPIES];
        for (u32 i = thread; i < COPIES * BINS; i += THREADS) work.bins[i / BINS][i % BINS] = 0;
        __syncthreads();
#pragma unroll UNROLL
        for (u32 k = 0; k < MOST; k++) {
            if (k < steps) {
                const u32 key = key_at(k);
                const bool counts = begin + 32 * k + lane < count && (key & known) == (least & known);
                if (counts) atomicAdd(bins + (key >> shift & mask), 1u);
            }
        }
        __syncthreads();
        find_bin(work, left, thread);
        least |= work.digit << shift;
        left = work.left;
        __syncthreads();
    }
    // Keys of NaN and minus infinity are never kept, and then there are fewer than wanted.
    u32 equal_left = left;
    if (least <= 0x007fffffu) {
        least = 0x00800000u;
        equal_left = 0xffffffffu;
    }

    // First a warp counts, then, knowing the counts of those before it, it writes.
    u32 above = 0, equal = 0;
#pragma unroll UNROLL
    for (u32 k = 0; k < MOST; k++) {
        // The same for all lanes.
        if (k < steps) {
            const u32 key = key_at(k);
            above += __popc(__ballot_sync(WARP, key > least));
            equal += __popc(__ballot_sync(WARP, key == least));
        }
    }
    if (lane == 0) work.above[warp] = above, work.equal[warp] = equal;
    __syncthreads();
    if (warp == 0) {
        u32 all_above, all_equal;
        const u32 above_before = sum_before(work.above[lane], lane, all_above);
        const u32 equal_before = sum_before(work.equal[lane], lane, all_equal);
        __syncwarp();
        // Kept before this run: all above, and of the equal ones the first.
        work.above[lane] = above_before + min(equal_before, equal_left);
        work.equal[lane] = equal_before;
        if (lane == 0) work.left = all_above + min(all_equal, equal_left);
    }
    __syncthreads();
    u32 written = work.above[warp], equal_seen = work.equal[warp];
    const u32 before = (1u << lane) - 1, kept_all = work.left;
#pragma unroll UNROLL
    for (u32 k = 0; k < MOST; k++) {
        if (k < steps) {
            const u32 key = key_at(k);
            const u32 is_equal = __ballot_sync(WARP, key == least);
            const bool in_time = equal_seen + __popc(is_equal & before) < equal_left;
            const bool kept = key > least || (key == least && in_time);
            const u32 keeps = __ballot_sync(WARP, kept);
            if (kept) out[written + __popc(keeps & before)] = begin + 32 * k + lane;
            written += __popc(keeps);
            equal_seen += __popc(is_equal);
        }
    }
    __syncthreads();
    return kept_all;
}

// What a row has to select from.
struct Row {
    u32 index, seen;
    bool restricted, publishes;
    u32 entries, blocks;  // scores to look at; blocks of entries, where they are to be selected
    const u32* list;
};

__device__ __forceinline__ Row row_of(const RowInfo* rows, const u32* lists, const u32* list_counts, u32 tile_row,
                                      const Shape& shape) {
    Row row;
    row.index = shape.tile_first + tile_row;
    row.seen = (rows[row.index].position + 1) / shape.ratio;
    row.restricted = shape.mode == 2 && row.seen > shape.top_k && list_counts[row.index] != ALL_BLOCKS;
    row.list = lists + row.index * shape.blocks_max;
    row.entries = row.seen;
    row.blocks = (row.seen + shape.block_size - 1) / shape.block_size;
    row.publishes = shape.mode == 1 && row.blocks > shape.blocks_max;
    if (row.restricted) {
        const u32 count = min(list_counts[row.index], shape.blocks_max);
        row.entries = count * shape.block_size;
        if (count > 0) {
            const u32 end = (row.list[count - 1] + 1) * shape.block_size;
            row.entries -= min(end > row.seen ? end - row.seen : 0, shape.block_size);
        }
    }
    return row;
}

// The keys of scores [first, end) into shared memory.
__device__ __forceinline__ void load_keys(u32* keys, const float* scores, u32 first, u32 end) {
    for (u32 i = first + threadIdx.x; i < end; i += 4 * THREADS) {
        float score[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) score[k] = i + k * THREADS < end ? scores[i + k * THREADS] : 0.0f;
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            if (i + k * THREADS < end) keys[i + k * THREADS - first] = order_key(score[k]);
        }
    }
    __syncthreads();
}

// The keys of the blocks of entries [first, end), whose keys are in shared memory: the largest of each; the block of the
// newest entry is above all.
__device__ __forceinline__ void load_block_keys(u32* block_keys, const u32* keys, u32 first, u32 end, u32 seen, u32 block_size) {
    const u32 lane = threadIdx.x % 32;
    for (u32 b = first / block_size + threadIdx.x / 32; b * block_size < end; b += WARPS) {
        u32 key = 0;
        for (u32 i = b * block_size + lane; i < min((b + 1) * block_size, end); i += 32) key = max(key, keys[i - first]);
        key = warp_max(key);
        if (lane == 0) block_keys[b - first / block_size] = (b + 1) * block_size >= seen ? order_key(infinite()) : key;
    }
}

// An index of a compact list becomes the entry's.
__device__ __forceinline__ u32 entry_of(const Row& row, u32 index, u32 block_size) {
    return row.restricted ? row.list[index / block_size] * block_size + index % block_size : index;
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_k(const float* scores, const RowInfo* rows, u32* selected, u32* counts, u32* blocks, u32* block_counts, const u32* lists,
      const u32* list_counts, const Shape shape) {
    extern __shared__ u32 keys[];
    __shared__ Work work;
    wait_for_inputs();
    const u32 thread = threadIdx.x;
    const Row row = row_of(rows, lists, list_counts, blockIdx.x, shape);
    u32* out = selected + row.index * shape.top_k;
    if (row.seen > shape.top_k || row.publishes) load_keys(keys, scores + blockIdx.x * shape.stride, 0, row.entries);
    if (row.publishes) {
        u32* block_keys = keys + row.entries;
        load_block_keys(block_keys, keys, 0, row.entries, row.seen, shape.block_size);
        __syncthreads();
        const auto block_key = [&](u32 b) { return block_keys[b]; };
        const u32 count =
            select_largest<HELD>(block_key, row.blocks, shape.blocks_max, blocks + row.index * shape.blocks_max, work);
        if (thread == 0) block_counts[row.index] = count;
    } else if (shape.mode == 1 && thread == 0) {
        block_counts[row.index] = ALL_BLOCKS;
    }
    u32 kept = row.seen;
    if (row.seen <= shape.top_k) {
        for (u32 i = thread; i < row.seen; i += THREADS) out[i] = i;
    } else {
        const u32 most = min(shape.top_k, row.entries);
        kept = most == 0 ? 0 : select_largest<HELD>([&](u32 i) { return keys[i]; }, row.entries, most, out, work);
        for (u32 i = thread; i < kept; i += THREADS) out[i] = entry_of(row, out[i], shape.block_size);
    }
    if (thread == 0) counts[row.index] = kept;
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_k_parts(const float* scores, const RowInfo* rows, const u32* lists, const u32* list_counts, uint2* kept, u32* kept_counts,
            u32* part_block_keys, const Shape shape) {
    extern __shared__ u32 keys[];
    __shared__ Work work;
    wait_for_inputs();
    const u32 tile_row = blockIdx.x / shape.parts, part = blockIdx.x % shape.parts;
    const Row row = row_of(rows, lists, list_counts, tile_row, shape);
    const u32 first = part * shape.part, end = min(first + shape.part, row.entries);
    if (threadIdx.x == 0) kept_counts[blockIdx.x] = 0;
    if (first >= row.entries || row.seen <= shape.top_k) return;
    load_keys(keys, scores + tile_row * shape.stride, first, end);
    if (row.publishes) {
        const u32 all = (shape.stride + shape.block_size - 1) / shape.block_size;
        u32* to = part_block_keys + tile_row * all + first / shape.block_size;
        load_block_keys(to, keys, first, end, row.seen, shape.block_size);
    }
    // Indices first, where there is room: each then becomes a pair.
    u32* indices = keys + shape.part;
    const u32 most = min(shape.top_k, end - first);
    const u32 count = select_largest<HELD>([&](u32 i) { return keys[i]; }, end - first, most, indices, work);
    uint2* to = kept + (u64)blockIdx.x * shape.top_k;
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        uint2 pair;
        pair.x = first + indices[i];
        pair.y = keys[indices[i]];
        to[i] = pair;
    }
    if (threadIdx.x == 0) kept_counts[blockIdx.x] = count;
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_k_merge(const RowInfo* rows, const uint2* kept, const u32* kept_counts, const u32* part_block_keys, const u32* lists,
            const u32* list_counts, u32* selected, u32* counts, u32* blocks, u32* block_counts, const Shape shape) {
    // The kept of each part follow each other: where a part's begin.
    extern __shared__ u32 keys[];
    __shared__ Work work;
    __shared__ u32 total;
    wait_for_inputs();
    const u32 thread = threadIdx.x, tile_row = blockIdx.x;
    const Row row = row_of(rows, lists, list_counts, tile_row, shape);
    u32* out = selected + row.index * shape.top_k;
    if (row.publishes) {
        const u32* block_keys = part_block_keys + tile_row * ((shape.stride + shape.block_size - 1) / shape.block_size);
        const auto block_key = [&](u32 b) { return block_keys[b]; };
        const u32 count =
            select_largest<HELD>(block_key, row.blocks, shape.blocks_max, blocks + row.index * shape.blocks_max, work);
        if (thread == 0) block_counts[row.index] = count;
    } else if (shape.mode == 1 && thread == 0) {
        block_counts[row.index] = ALL_BLOCKS;
    }
    u32 here = row.seen;
    if (row.seen <= shape.top_k) {
        for (u32 i = thread; i < row.seen; i += THREADS) out[i] = i;
    } else {
        u32* starts = keys + shape.parts * shape.top_k;
        if (thread == 0) {
            u32 sum = 0;
            for (u32 p = 0; p < shape.parts; p++) starts[p] = sum, sum += kept_counts[tile_row * shape.parts + p];
            total = sum;
        }
        __syncthreads();
        const uint2* pairs = kept + (u64)tile_row * shape.parts * shape.top_k;
        for (u32 i = thread; i < shape.parts * shape.top_k; i += THREADS) {
            const u32 p = i / shape.top_k, place = i % shape.top_k;
            if (place < kept_counts[tile_row * shape.parts + p]) keys[starts[p] + place] = pairs[i].y;
        }
        __syncthreads();
        const u32 most = min(shape.top_k, total);
        here = most == 0 ? 0 : select_largest<2 * HELD>([&](u32 i) { return keys[i]; }, total, most, out, work);
        // Back to where each came from: the last part that begins at or before it.
        for (u32 i = thread; i < here; i += THREADS) {
            const u32 at = out[i];
            u32 p = 0;
            for (u32 half = 1u << 15; half > 0; half /= 2) {
                if (p + half < shape.parts && starts[p + half] <= at) p += half;
            }
            out[i] = entry_of(row, pairs[p * shape.top_k + (at - starts[p])].x, shape.block_size);
        }
    }
    if (thread == 0) counts[row.index] = here;
}
