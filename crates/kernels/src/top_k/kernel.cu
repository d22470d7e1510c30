// top_k: of the scores that a row sees the min(k, n) largest are kept, equal ones by the smaller index, written ascending;
//        and the candidate blocks that a row hands to later layers. Exact: scores are compared as integers and counted
// in   scores [tile_rows, stride] f32, compact for restricted rows   rows as tf_kernels::rows
// out  selected [rows, top_k] u32   counts [rows] u32
//      blocks [rows, blocks_max] u32, block_counts [rows] u32: written where mode is 1; lists, list_counts: the same of the
//      launch that published them, read where mode is 2
// grid 1024 threads a row; where mode is 1, dynamic shared memory for a word a block of entries
// ties the smaller index; -0 and +0 are equal; NaN and minus infinity are kept only by a row that keeps all it sees
#include "prelude.cuh"

struct Shape {
    u32 tile_first, tile_rows, stride, ratio, top_k, mode, blocks_max, block_size;
};

constexpr u32 ALL_BLOCKS = 0xffffffffu, THREADS = 1024, WARPS = THREADS / 32;
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

struct Work {
    u32 bins[BINS];
    u32 of_warp[WARPS];
    u32 above[WARPS], equal[WARPS];
    u32 digit, left;
};

// Of the counted keys the bin, from the top, in which the `wanted`-th lies, and how many it must still bring.
__device__ __forceinline__ void find_bin(Work& work, u32 wanted, u32 thread) {
    // A thread holds two bins, the first threads the highest ones.
    const u32 high = work.bins[BINS - 1 - 2 * thread], low = work.bins[BINS - 2 - 2 * thread];
    const u32 lane = thread % 32, warp = thread / 32;
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
    if (before < wanted && before + high >= wanted) work.digit = BINS - 1 - 2 * thread, work.left = wanted - before;
    before += high;
    if (before < wanted && before + low >= wanted) work.digit = BINS - 2 - 2 * thread, work.left = wanted - before;
    __syncthreads();
}

// Writes the indices of the `wanted` largest of `count` keys, ascending; returns how many there are. `wanted` is at most
// `count` and above 0. By all threads of the block.
template <class Key>
__device__ __forceinline__ u32 select_largest(Key key_of, u32 count, u32 wanted, u32* out, Work& work) {
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u32 least = 0, left = wanted;
#pragma unroll 1
    for (u32 digit = 0; digit < 3; digit++) {
        // The digit's place, and the bits above it, which a key must share with the threshold.
        const u32 shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, mask = digit == 2 ? 1023 : 2047;
        const u32 known = digit == 0 ? 0 : 0xffffffffu << (digit == 1 ? 21 : 10);
        for (u32 i = thread; i < BINS; i += THREADS) work.bins[i] = 0;
        __syncthreads();
        for (u32 i = thread; i < count; i += THREADS) {
            const u32 key = key_of(i);
            if ((key & known) == (least & known)) atomicAdd(&work.bins[key >> shift & mask], 1u);
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

    // A warp has a run of indices: first it counts, then, knowing the counts of those before it, it writes.
    const u32 run = (count + THREADS - 1) / THREADS * 32, begin = min(warp * run, count), end = min(begin + run, count);
    u32 above = 0, equal = 0;
    for (u32 first = begin; first < end; first += 32) {
        const u32 key = first + lane < end ? key_of(first + lane) : 0;
        above += __popc(__ballot_sync(WARP, key > least));
        equal += __popc(__ballot_sync(WARP, key == least));
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
    for (u32 first = begin; first < end; first += 32) {
        const u32 i = first + lane, key = i < end ? key_of(i) : 0;
        const u32 is_equal = __ballot_sync(WARP, key == least);
        const bool in_time = equal_seen + __popc(is_equal & before) < equal_left;
        const bool kept = key > least || (key == least && in_time);
        const u32 keeps = __ballot_sync(WARP, kept);
        if (kept) out[written + __popc(keeps & before)] = i;
        written += __popc(keeps);
        equal_seen += __popc(is_equal);
    }
    __syncthreads();
    return kept_all;
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_k(const float* scores, const RowInfo* rows, u32* selected, u32* counts, u32* blocks, u32* block_counts, const u32* lists,
      const u32* list_counts, const Shape shape) {
    extern __shared__ u32 block_keys[];
    __shared__ Work work;
    wait_for_inputs();
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u32 tile_row = blockIdx.x, row = shape.tile_first + tile_row;
    const u32 seen = (rows[row].position + 1) / shape.ratio;
    const float* of_row = scores + tile_row * shape.stride;
    u32* out = selected + row * shape.top_k;
    const auto score_key = [&](u32 i) { return order_key(of_row[i]); };
    if (shape.mode == 1) {
        u32 count = ALL_BLOCKS;
        const u32 block_size = shape.block_size, all = (seen + block_size - 1) / block_size;
        if (all > shape.blocks_max) {
            // The key of a block: its largest; the block of the newest entry is above all.
            for (u32 b = warp; b < all; b += WARPS) {
                u32 key = 0;
                for (u32 i = lane; i < block_size && b * block_size + i < seen; i += 32) key = max(key, score_key(b * block_size + i));
                key = warp_max(key);
                if (lane == 0) block_keys[b] = (b + 1) * block_size >= seen ? order_key(infinite()) : key;
            }
            __syncthreads();
            const auto block_key = [&](u32 b) { return block_keys[b]; };
            count = select_largest(block_key, all, shape.blocks_max, blocks + row * shape.blocks_max, work);
        }
        if (thread == 0) block_counts[row] = count;
    }
    u32 kept = seen;
    if (seen <= shape.top_k) {
        for (u32 i = thread; i < seen; i += THREADS) out[i] = i;
    } else if (shape.mode == 2 && list_counts[row] != ALL_BLOCKS) {
        const u32* list_blocks = lists + row * shape.blocks_max;
        const u32 list = min(list_counts[row], shape.blocks_max);
        u32 entries = list * shape.block_size;
        if (list > 0) {
            const u32 end = (list_blocks[list - 1] + 1) * shape.block_size;
            entries -= min(end > seen ? end - seen : 0, shape.block_size);
        }
        const u32 most = min(shape.top_k, entries);
        kept = most == 0 ? 0 : select_largest(score_key, entries, most, out, work);
        for (u32 i = thread; i < kept; i += THREADS) {
            const u32 index = out[i];
            out[i] = list_blocks[index / shape.block_size] * shape.block_size + index % shape.block_size;
        }
    } else {
        kept = select_largest(score_key, seen, shape.top_k, out, work);
    }
    if (thread == 0) counts[row] = kept;
}
