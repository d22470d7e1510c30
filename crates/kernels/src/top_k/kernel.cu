// top_k: of the scores that a row sees the min(k, n) largest are kept, equal ones by the smaller index, written ascending;
//        and the candidate blocks that a row hands to later layers. Exact: scores are compared as integers and counted
// in   scores [tile_rows, stride] f32, compact for restricted rows, stride a multiple of 16   rows as tf_kernels::rows
// out  selected [rows, top_k] u32   counts [rows] u32
//      blocks [rows, blocks_max] u32, block_counts [rows] u32: written where mode is 1; lists, list_counts: the same of the
//      launch that published them, read where mode is 2
// A selection is one list's: of a row's entries, or, where mode is 1, of its blocks. Lists of up to 16384 are one block's. Longer
// ones: top_k_parts selects from each part, whatever is among the list's largest being among its part's, and top_k_merge from
// what they kept.
// work kept [tile_rows, 2, width] u32: keys, then indices, of the parts' entries and of their blocks, a multiple of 4 a part; of
//      blocks that top_k_merge selects from at once all keys
// grid 1024 threads a list (top_k, top_k_merge) or a part of one (top_k_parts); the lists of a row side by side
// ties the smaller index; -0 and +0 are equal; NaN and minus infinity are kept only by a row that keeps all it sees
#include "prelude.cuh"

struct Shape {
    u32 tile_first, tile_rows, stride, ratio, top_k, mode, blocks_max, block_size;
    u32 part, parts, block_part, block_parts;  // entries of a part, parts of a row; blocks likewise
    u32 blocks_whole;                          // whether a row's blocks are selected from at once
};

constexpr u32 ALL_BLOCKS = 0xffffffffu, THREADS = 1024, WARPS = THREADS / 32, BINS = 2048;
// A thread holds the keys of four indices that follow each other, a warp of 128: a chunk.
constexpr u32 CHUNK = 128, CHUNKS = 4, CHUNKS_MERGED = 8, FEW = 4 * THREADS;
constexpr u32 LEAST_KEPT = 0x00800000u;

struct Work {
    u32 bins[BINS];
    u32 of_warp[WARPS], equal_of_warp[WARPS];
    u32 bin, left, inside;
    // Keys that no bound has excluded, and whose they are.
    u32 keys[FEW], indices[FEW];
};

// The sum over the lanes up to this one.
__device__ __forceinline__ u32 sum_up_to(u32 value, u32 lane) {
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(WARP, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

__device__ __forceinline__ u32 warp_sum(u32 value) { return __reduce_add_sync(WARP, value); }

// Of the counted keys the bin, from the top, in which the `wanted`-th lies, how many of the wanted it brings and how many it
// holds. Leaves the bins empty.
__device__ __forceinline__ void find_bin(Work& work, u32 wanted) {
    // A thread holds two bins, the first threads the highest ones.
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, high_bin = BINS - 1 - 2 * thread;
    const u32 high = work.bins[high_bin], low = work.bins[high_bin - 1], all = warp_sum(high + low);
    work.bins[high_bin] = work.bins[high_bin - 1] = 0;
    if (lane == 0) work.of_warp[warp] = all;
    __syncthreads();
    const u32 before_warp = warp_sum(lane < warp ? work.of_warp[lane] : 0);
    // The same for all lanes.
    if (before_warp < wanted && wanted <= before_warp + all) {
        const u32 before = before_warp + sum_up_to(high + low, lane) - high - low, middle = before + high;
        const bool is_high = before < wanted && wanted <= middle, is_low = middle < wanted && wanted <= middle + low;
        if (is_high || is_low) {
            work.bin = is_high ? high_bin : high_bin - 1;
            work.left = wanted - (is_high ? before : middle);
            work.inside = is_high ? high : low;
        }
    }
    __syncthreads();
}

__device__ __forceinline__ u32 largest(const u32 (&keys)[4]) { return max(max(keys[0], keys[1]), max(keys[2], keys[3])); }

// Where marked indices of a warp come: a byte a chunk, four chunks a word.
template <u32 WORDS>
struct Ranks {
    u32 before[WORDS], total[WORDS];
};

// `marks` has a bit an index, chunk by chunk.
template <u32 WORDS>
__device__ __forceinline__ Ranks<WORDS> ranks_of(u32 marks, u32 lane) {
    Ranks<WORDS> ranks;
#pragma unroll
    for (u32 w = 0; w < WORDS; w++) {
        u32 own = 0;
#pragma unroll
        for (u32 c = 0; c < 4; c++) own |= __popc(marks >> (16 * w + 4 * c) & 15u) << 8 * c;
        const u32 sum = sum_up_to(own, lane);
        ranks.before[w] = sum - own;
        ranks.total[w] = __shfl_sync(WARP, sum, 31);
    }
    return ranks;
}

template <u32 WORDS>
__device__ __forceinline__ u32 byte_of(const u32 (&words)[WORDS], u32 chunk) {
    return words[chunk / 4] >> 8 * (chunk % 4) & 255u;
}

// Gives `emit` the place and the index of the `wanted` largest of the block's keys, of which none below `low` is wanted, by index
// ascending; returns how many there are. Keys below it are at most 0 or excluded by the first range; `shift`: of that range.
// `keys_of` gives those of a chunk, from registers where there are few.
template <u32 MOST, class Keys, class Emit>
__device__ __forceinline__ u32 select_among(Keys keys_of, u32 begin, u32 chunks, u32 low, u32 shift, u32 wanted, Emit emit,
                                            Work& work) {
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    constexpr u32 UNROLL = MOST <= CHUNKS ? MOST : 4;
    u32 high = 0xffffffffu, left = wanted, inside = 0;
    // The range in which the last of the wanted lies, finer and finer, until all of it is wanted or it is one value.
    for (;;) {
#pragma unroll UNROLL
        for (u32 c = 0; c < MOST; c++) {
            if (MOST <= CHUNKS && c >= chunks) continue;
            u32 keys[4];
            keys_of(c, keys);
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                if (keys[k] >= low && keys[k] <= high) atomicAdd(work.bins + min((keys[k] - low) >> shift, BINS - 1), 1u);
            }
        }
        __syncthreads();
        find_bin(work, left);
        const u32 bin = work.bin;
        left = work.left;
        inside = work.inside;
        low += bin << shift;
        if (bin < BINS - 1 || high - low < 1u << shift) high = min(high, low + ((1u << shift) - 1));
        if (left == inside || low == high) break;
        const u32 bits = 32 - __clz(high - low);
        shift = bits > 11 ? bits - 11 : 0;
    }
    // Keys of NaN and minus infinity are never kept, and then there are fewer than wanted.
    const bool cuts = left < inside && low >= LEAST_KEPT;
    const u32 least = max(low, LEAST_KEPT);

    u32 kept = 0, equal = 0;
#pragma unroll UNROLL
    for (u32 c = 0; c < MOST; c++) {
        if (MOST <= CHUNKS && c >= chunks) continue;
        u32 keys[4];
        keys_of(c, keys);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            kept |= (keys[k] >= least ? 1u : 0u) << (4 * c + k);
            equal |= (keys[k] == least ? 1u : 0u) << (4 * c + k);
        }
    }
    constexpr u32 WORDS = (MOST + 3) / 4;
    if (cuts) {
        // Of the equal ones the first.
        const Ranks<WORDS> ranks = ranks_of<WORDS>(equal, lane);
        const u32 all = warp_sum(__popc(equal));
        if (lane == 0) work.equal_of_warp[warp] = all;
        __syncthreads();
        u32 seen = warp_sum(lane < warp ? work.equal_of_warp[lane] : 0);
#pragma unroll
        for (u32 c = 0; c < MOST; c++) {
            u32 rank = seen + byte_of(ranks.before, c);
#pragma unroll
            for (u32 k = 4 * c; k < 4 * c + 4; k++) {
                if ((equal >> k & 1u) == 0) continue;
                if (rank >= left) kept &= ~(1u << k);
                rank++;
            }
            seen += byte_of(ranks.total, c);
        }
    }
    const Ranks<WORDS> ranks = ranks_of<WORDS>(kept, lane);
    const u32 all = warp_sum(__popc(kept));
    if (lane == 0) work.of_warp[warp] = all;
    __syncthreads();
    const u32 of_lane = work.of_warp[lane], kept_all = warp_sum(of_lane), before_warp = warp_sum(lane < warp ? of_lane : 0);
    // Side by side first, so that what `emit` reads is asked for at once. The bins have served.
    for (u32 first = 0; first < kept_all; first += BINS) {
        if (first > 0) __syncthreads();
        u32 written = before_warp - first;
#pragma unroll
        for (u32 c = 0; c < MOST; c++) {
            u32 place = written + byte_of(ranks.before, c);
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                if ((kept >> (4 * c + k) & 1u) == 0) continue;
                if (place < BINS) work.bins[place] = begin + c * CHUNK + k;
                place++;
            }
            written += byte_of(ranks.total, c);
        }
        __syncthreads();
        for (u32 i = thread; i < min(kept_all - first, BINS); i += THREADS) emit(first + i, work.bins[i]);
    }
    return kept_all;
}

// Gives `emit` the place and the index of the `wanted` largest of `count` keys, by index ascending; returns how many there are.
// `wanted` is above 0 and at most `count`, `count` at most 4096 * MOST. `quad` gives the keys of four indices from one below
// `count` on, 0 beyond the last. By all threads of the block, once.
template <u32 MOST, class Quad, class Emit>
__device__ __forceinline__ u32 select_largest(u32 count, u32 wanted, Quad quad, Emit emit, Work& work) {
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const u32 chunks = (count + 4 * THREADS - 1) / (4 * THREADS), begin = warp * chunks * CHUNK + 4 * lane;
    // Many keys are asked for again each time.
    constexpr bool HOLDS = MOST <= CHUNKS;
    constexpr u32 UNROLL = HOLDS ? MOST : 4;
    u32 held[HOLDS ? 4 * MOST : 4], few[4];
    work.bins[thread] = work.bins[thread + THREADS] = 0;
    // Several chunks are asked for at once, so what is none repeats the first keys.
    const auto ask = [&](u32 c, u32(&to)[4]) {
        const u32 i = begin + c * CHUNK;
        const bool is_there = c < chunks && i < count;
        quad(is_there ? i : 0, to);
#pragma unroll
        for (u32 k = 0; k < 4; k++) to[k] = is_there ? to[k] : 0;
    };
    const auto keys_of = [&](u32 c, u32(&to)[4]) {
        if (!HOLDS) ask(c, to);
#pragma unroll
        for (u32 k = 0; k < 4; k++) to[k] = HOLDS ? held[HOLDS ? 4 * c + k : 0] : to[k];
    };
    const auto few_of = [&](u32, u32(&to)[4]) {
#pragma unroll
        for (u32 k = 0; k < 4; k++) to[k] = few[k];
    };
#pragma unroll
    for (u32 c = 0; HOLDS && c < MOST; c++) {
        u32 four[4];
        ask(c, four);
#pragma unroll
        for (u32 k = 0; k < 4; k++) held[HOLDS ? 4 * c + k : 0] = four[k];
    }
    __syncthreads();
    if (chunks == 1) {
        keys_of(0, few);
        return select_among<1>(few_of, begin, 1, 0, 21, wanted, emit, work);
    }
    if (wanted > (count + 3) / 4) return select_among<MOST>(keys_of, begin, chunks, 0, 21, wanted, emit, work);

    // A bound from below: as many keys as are wanted are no less than the wanted-th of the largest of each four.
#pragma unroll UNROLL
    for (u32 c = 0; c < MOST; c++) {
        u32 four[4];
        keys_of(c, four);
        if (c < chunks && begin + c * CHUNK < count) atomicAdd(work.bins + (largest(four) >> 21), 1u);
    }
    __syncthreads();
    find_bin(work, wanted);
    // The keys sought lie close above it; what is beyond the bins is counted in the last.
    const u32 low = work.bin << 21, shift = low != 0 ? 13 : 21;
    u32 marks = 0;
#pragma unroll UNROLL
    for (u32 c = 0; c < MOST; c++) {
        u32 four[4];
        keys_of(c, four);
#pragma unroll
        for (u32 k = 0; k < 4; k++) marks |= (four[k] >= low ? 1u : 0u) << (4 * c + k);
    }
    constexpr u32 WORDS = (MOST + 3) / 4;
    const Ranks<WORDS> ranks = ranks_of<WORDS>(marks, lane);
    const u32 of_own_warp = warp_sum(__popc(marks));
    if (lane == 0) work.of_warp[warp] = of_own_warp;
    __syncthreads();
    const u32 of_lane = work.of_warp[lane], left = warp_sum(of_lane);
    if (left > FEW) return select_among<MOST>(keys_of, begin, chunks, low, shift, wanted, emit, work);
    // Few are left: they move together, still by index ascending.
    u32 written = warp_sum(lane < warp ? of_lane : 0);
#pragma unroll UNROLL
    for (u32 c = 0; c < MOST; c++) {
        u32 place = written + byte_of(ranks.before, c), four[4];
        keys_of(c, four);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            if ((marks >> (4 * c + k) & 1u) == 0) continue;
            work.keys[place] = four[k];
            work.indices[place++] = begin + c * CHUNK + k;
        }
        written += byte_of(ranks.total, c);
    }
    __syncthreads();
    const u32 first = 4 * thread;
#pragma unroll
    for (u32 k = 0; k < 4; k++) few[k] = first + k < left ? work.keys[first + k] : 0;
    const auto emit_own = [&](u32 place, u32 i) { emit(place, work.indices[i]); };
    return select_among<1>(few_of, first, 1, low, shift, wanted, emit_own, work);
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
    row.list = lists + row.index * shape.blocks_max;
    // Side by side: a full list is the rule.
    const u32 listed = shape.mode == 2 ? list_counts[row.index] : ALL_BLOCKS, count = min(listed, shape.blocks_max);
    const u32 last_of_full = shape.mode == 2 ? row.list[shape.blocks_max - 1] : 0;
    row.seen = (rows[row.index].position + 1) / shape.ratio;
    row.restricted = row.seen > shape.top_k && listed != ALL_BLOCKS;
    row.entries = row.seen;
    row.blocks = (row.seen + shape.block_size - 1) / shape.block_size;
    row.publishes = shape.mode == 1 && row.blocks > shape.blocks_max;
    if (row.restricted) {
        row.entries = count * shape.block_size;
        if (count > 0) {
            const u32 end = ((count == shape.blocks_max ? last_of_full : row.list[count - 1]) + 1) * shape.block_size;
            row.entries -= min(end > row.seen ? end - row.seen : 0, shape.block_size);
        }
    }
    return row;
}

// An index of a compact list becomes the entry's.
__device__ __forceinline__ u32 entry_of(const Row& row, u32 index, u32 block_size) {
    return row.restricted ? row.list[index / block_size] * block_size + index % block_size : index;
}

__device__ __forceinline__ void quad_keys(float4 score, u32 (&keys)[4]) {
    keys[0] = order_key(score.x);
    keys[1] = order_key(score.y);
    keys[2] = order_key(score.z);
    keys[3] = order_key(score.w);
}

// The keys of scores [i, i + 4), 0 from `end` on.
__device__ __forceinline__ void entry_keys(const float* scores, u32 i, u32 end, u32 (&keys)[4]) {
    quad_keys(*(const float4*)(scores + i), keys);
#pragma unroll
    for (u32 k = 1; k < 4; k++) keys[k] = i + k < end ? keys[k] : 0;
}

// The key of a block of entries: the largest of them; the block of the newest entry is above all.
__device__ __forceinline__ u32 block_key(const float* scores, u32 block, u32 seen, u32 block_size) {
    const u32 first = block * block_size, end = first + block_size;
    if (end >= seen) return order_key(infinite());
    u32 key = 0;
    if (block_size % 4 == 0) {
        for (u32 i = first; i < end; i += 4) {
            u32 four[4];
            entry_keys(scores, i, end, four);
            key = max(key, largest(four));
        }
    } else {
        for (u32 i = first; i < end; i++) key = max(key, order_key(scores[i]));
    }
    return key;
}

// The keys of blocks [b, b + 4), 0 from `end` on. Of the release's blocks all scores are asked for at once.
__device__ __forceinline__ void block_keys(const float* scores, u32 b, u32 end, u32 seen, u32 block_size, u32 (&keys)[4]) {
    if (block_size != 8) {
#pragma unroll
        for (u32 k = 0; k < 4; k++) keys[k] = b + k < end ? block_key(scores, b + k, seen, block_size) : 0;
        return;
    }
    float4 score[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) score[i] = *(const float4*)(scores + 8 * (b + i / 2 < end ? b + i / 2 : b) + i % 2 * 4);
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        u32 low[4], high[4];
        quad_keys(score[2 * k], low);
        quad_keys(score[2 * k + 1], high);
        const u32 key = 8 * (b + k) + 8 >= seen ? order_key(infinite()) : max(largest(low), largest(high));
        keys[k] = b + k < end ? key : 0;
    }
}

// Words that a part's entries and a part's blocks leave to the merge, and those of a row.
__device__ __forceinline__ u32 segment_of(const Shape& shape) { return (shape.top_k + 3) / 4 * 4; }
__device__ __forceinline__ u32 block_segment_of(const Shape& shape) {
    return shape.blocks_whole != 0 ? shape.block_part : (shape.blocks_max + 3) / 4 * 4;
}
__device__ __forceinline__ u32 width_of(const Shape& shape) {
    return shape.parts * segment_of(shape) + shape.block_parts * block_segment_of(shape);
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_k(const float* scores, const RowInfo* rows, u32* selected, u32* counts, u32* blocks, u32* block_counts, const u32* lists,
      const u32* list_counts, const Shape shape) {
    __shared__ Work work;
    wait_for_inputs();
    const u32 thread = threadIdx.x, row_lists = shape.mode == 1 ? 2 : 1, tile_row = blockIdx.x / row_lists;
    const Row row = row_of(rows, lists, list_counts, tile_row, shape);
    const float* from = scores + tile_row * shape.stride;
    if (blockIdx.x % row_lists == 1) {
        u32 kept = ALL_BLOCKS;
        if (row.publishes) {
            u32* out = blocks + row.index * shape.blocks_max;
            const auto quad = [&](u32 b, u32(&keys)[4]) {
                block_keys(from, b, row.blocks, row.seen, shape.block_size, keys);
            };
            const auto emit = [&](u32 place, u32 b) { out[place] = b; };
            kept = select_largest<CHUNKS>(row.blocks, shape.blocks_max, quad, emit, work);
        }
        if (thread == 0) block_counts[row.index] = kept;
        return;
    }
    u32* out = selected + row.index * shape.top_k;
    u32 kept = row.seen;
    if (row.seen <= shape.top_k) {
        for (u32 i = thread; i < row.seen; i += THREADS) out[i] = i;
    } else {
        const u32 most = min(shape.top_k, row.entries);
        const auto quad = [&](u32 i, u32(&keys)[4]) { entry_keys(from, i, row.entries, keys); };
        const auto emit = [&](u32 place, u32 i) { out[place] = entry_of(row, i, shape.block_size); };
        kept = most == 0 ? 0 : select_largest<CHUNKS>(row.entries, most, quad, emit, work);
    }
    if (thread == 0) counts[row.index] = kept;
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_k_parts(const float* scores, const RowInfo* rows, const u32* lists, const u32* list_counts, u32* kept, const Shape shape) {
    __shared__ Work work;
    wait_for_inputs();
    const u32 all_parts = shape.parts + shape.block_parts, tile_row = blockIdx.x / all_parts, part = blockIdx.x % all_parts;
    const u32 segment = segment_of(shape), block_segment = block_segment_of(shape), width = width_of(shape);
    const Row row = row_of(rows, lists, list_counts, tile_row, shape);
    const float* from = scores + tile_row * shape.stride;
    u32* to = kept + (u64)tile_row * 2 * width;
    if (part < shape.parts) {
        const u32 first = part * shape.part, end = min(first + shape.part, row.entries);
        if (first >= row.entries || row.seen <= shape.top_k) return;
        to += part * segment;
        const auto quad = [&](u32 i, u32(&keys)[4]) { entry_keys(from, first + i, end, keys); };
        const auto emit = [&](u32 place, u32 i) {
            to[place] = order_key(from[first + i]);
            to[width + place] = first + i;
        };
        const u32 count = select_largest<CHUNKS>(end - first, min(shape.top_k, end - first), quad, emit, work);
        for (u32 i = count + threadIdx.x; i < segment; i += THREADS) to[i] = 0;
    } else {
        const u32 block_part = part - shape.parts, first = block_part * shape.block_part;
        const u32 end = min(first + shape.block_part, row.blocks);
        if (first >= row.blocks || !row.publishes) return;
        to += shape.parts * segment + block_part * block_segment;
        if (shape.blocks_whole != 0) {
            for (u32 b = 4 * threadIdx.x; b < end - first; b += 4 * THREADS) {
                u32 four[4];
                block_keys(from, first + b, end, row.seen, shape.block_size, four);
#pragma unroll
                for (u32 k = 0; k < 4; k++) to[b + k] = four[k];
            }
            return;
        }
        const auto quad = [&](u32 b, u32(&keys)[4]) {
            block_keys(from, first + b, end, row.seen, shape.block_size, keys);
        };
        const auto emit = [&](u32 place, u32 b) {
            to[place] = block_key(from, first + b, row.seen, shape.block_size);
            to[width + place] = first + b;
        };
        const u32 count = select_largest<CHUNKS>(end - first, min(shape.blocks_max, end - first), quad, emit, work);
        for (u32 i = count + threadIdx.x; i < block_segment; i += THREADS) to[i] = 0;
    }
}

// What the parts of a list have kept, four at a time.
__device__ __forceinline__ void kept_keys(const u32* kept, u32 i, u32 (&keys)[4]) {
    const uint4 four = *(const uint4*)(kept + i);
    keys[0] = four.x, keys[1] = four.y, keys[2] = four.z, keys[3] = four.w;
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_k_merge(const RowInfo* rows, const u32* kept, const u32* lists, const u32* list_counts, u32* selected, u32* counts,
            u32* blocks, u32* block_counts, const Shape shape) {
    __shared__ Work work;
    wait_for_inputs();
    const u32 thread = threadIdx.x, row_lists = shape.mode == 1 ? 2 : 1, tile_row = blockIdx.x / row_lists;
    const u32 segment = segment_of(shape), block_segment = block_segment_of(shape), width = width_of(shape);
    const Row row = row_of(rows, lists, list_counts, tile_row, shape);
    const u32* from = kept + (u64)tile_row * 2 * width;
    const auto quad = [&](u32 i, u32(&keys)[4]) { kept_keys(from, i, keys); };
    if (blockIdx.x % row_lists == 1) {
        u32 count = ALL_BLOCKS;
        if (row.publishes) {
            from += shape.parts * segment;
            u32* out = blocks + row.index * shape.blocks_max;
            const bool whole = shape.blocks_whole != 0;
            const auto emit = [&](u32 place, u32 i) { out[place] = whole ? i : from[width + i]; };
            // Parts leave whole segments, and zeros behind their last key.
            const u32 used = (row.blocks + shape.block_part - 1) / shape.block_part;
            const u32 all = whole ? (row.blocks + 3) / 4 * 4 : used * block_segment;
            count = select_largest<CHUNKS_MERGED>(all, shape.blocks_max, quad, emit, work);
        }
        if (thread == 0) block_counts[row.index] = count;
        return;
    }
    u32* out = selected + row.index * shape.top_k;
    u32 count = row.seen;
    if (row.seen <= shape.top_k) {
        for (u32 i = thread; i < row.seen; i += THREADS) out[i] = i;
    } else {
        const u32 all = (row.entries + shape.part - 1) / shape.part * segment, most = min(shape.top_k, row.entries);
        const auto emit = [&](u32 place, u32 i) { out[place] = entry_of(row, from[width + i], shape.block_size); };
        count = most == 0 ? 0 : select_largest<CHUNKS_MERGED>(all, most, quad, emit, work);
    }
    if (thread == 0) counts[row.index] = count;
}
