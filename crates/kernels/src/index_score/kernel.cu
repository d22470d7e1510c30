// index_score: score[r][j] = sum_h weights[r][h] * max(queries[r][h] . key[j], 0) for the entries j that row r sees
// in   queries [rows, heads, head_dim] f32   weights [rows, heads] f32   rows as tf_kernels::rows   keys: pages of index_key
//      groups: rows of one slot that follow each other, read the same keys and make up the tile
//      table [slots, pages_per_slot] u32   blocks [rows, blocks_max], block_counts [rows]: candidates, where restricted is 1
// out  scores [tile_rows, stride] f32; of a restricted row compact: the entries of its first block, of its second, and so on
// grid `chunks` blocks of 128 threads a group of rows; a warp takes 32 entries at a time and keeps their keys in registers
//      for all rows of the group. Rows that see at most skip_visible entries are left out
// work shared: the group's queries as the tensor core takes them, and its weights
// sum  a dot is one chain of tensor-core steps from +0; a step takes, of each eight of 32 columns, the columns 0, 1, 4 and 5, the
//      next one the columns 2, 3, 6 and 7. Heads are padded to a multiple of 16 with zeros; of each eight, partial t takes the
//      heads 2 t and 2 t + 1, in one chain of fused multiply-adds, ascending; (0 + 1) + (2 + 3)
//      Mirrored by index_score::steps. Queries are rounded to bf16, which those of index_query are
// max  head_dim 128, a multiple of 32
#include "step.cuh"

// `columns`: scores of its longest row, at most.
struct Group {
    u32 first, rows, columns, slot;
};

struct Shape {
    u32 tile_first, tile_rows, heads, head_dim, ratio, pages_per_slot, entries_per_page, skip_visible, stride;
    u32 restricted, blocks_max, block_size;
    u32 chunks, group_rows;  // blocks of a group; rows that the shared memory has room for
    Group only;              // where there is one, which then need not be fetched
};

constexpr u32 ALL_BLOCKS = 0xffffffffu, NONE = 0xffffffffu;
constexpr u32 THREADS = 128, TILE = 32, PARTS_MAX = 4, HALVES = TILE / 16;
// Blocks of a multiprocessor, for which the registers must do.
#if __CUDA_ARCH__ >= 1200
constexpr u32 BLOCKS = 2;
#else
constexpr u32 BLOCKS = 3;
#endif

// The codes and scales of a lane's two entries in each half of a tile: of the row `lane / 4` of a step's operand and of the one
// eight below it. `shown`: the entry whose score the lane writes, or none.
struct Codes {
    uint2 codes[HALVES][PARTS_MAX];
    u32 scales[HALVES][PARTS_MAX];
    u32 shown;
};

// What a tile's entries are, for a row or for several.
struct Source {
    const u8* keys;
    const u32* table;
    const u32* list;  // candidate blocks, or none
    u32 count, seen;  // blocks of the list; entries that any of the rows sees
};

// The entry of score j, or none.
__device__ __forceinline__ u32 entry_at(const Source& source, u32 j, const Shape& shape) {
    if (source.list == nullptr) return j < source.seen ? j : NONE;
    const u32 block = j / shape.block_size;
    const u32 entry = source.list[min(block, source.count - 1)] * shape.block_size + j % shape.block_size;
    return block < source.count && entry < source.seen ? entry : NONE;
}

// Where an entry's codes lie; an entry that is none has those of entry 0, which nobody looks at.
__device__ __forceinline__ const u8* place_of(const Source& source, u32 entry, const Shape& shape, u32& place) {
    const u32 at = entry == NONE ? 0 : entry, inside = at % shape.entries_per_page;
    const u64 page = source.table[at / shape.entries_per_page];
    place = inside % 16;
    return source.keys + (page * shape.entries_per_page + inside - place) * (shape.head_dim / 2 + shape.head_dim / 32);
}

// Loads that depend on each other are asked for side by side.
__device__ __forceinline__ void load_codes(Codes& to, const Source& source, u32 tile, u32 lane, const Shape& shape) {
    const u32 t = lane % 4, parts = shape.head_dim / 32;
    // Neighbours in a list of candidates are neighbours in the cache, unless blocks have an odd number of entries.
    const bool pairs = source.list == nullptr || shape.block_size % 2 == 0;
    u32 entry[HALVES][2], place[HALVES][2];
    const u8* block[HALVES][2];
#pragma unroll
    for (u32 half = 0; half < HALVES; half++) {
        const u32 j = tile * TILE + 16 * half + lane / 4 * 2;
        entry[half][0] = entry_at(source, j, shape);
        entry[half][1] = pairs ? (entry[half][0] + 1 < source.seen ? entry[half][0] + 1 : NONE) : entry_at(source, j + 1, shape);
        if (entry[half][0] == NONE && pairs) entry[half][1] = NONE;
    }
#pragma unroll
    for (u32 half = 0; half < HALVES; half++) {
        block[half][0] = place_of(source, entry[half][0], shape, place[half][0]);
        if (!pairs) block[half][1] = place_of(source, entry[half][1], shape, place[half][1]);
    }
    const u32 mine = t / 2;
    to.shown = t % 2 == 0 ? (mine == 0 ? entry[0][0] : entry[0][1]) : (mine == 0 ? entry[1][0] : entry[1][1]);
#pragma unroll
    for (u32 half = 0; half < HALVES; half++) {
#pragma unroll
        for (u32 p = 0; p < PARTS_MAX; p++) {
            if (p >= parts) break;
            const u32 word = (4 * p + t) * 64;
            const u32 scales = shape.head_dim * 8 + 16 * p;
            const u8* first = block[half][0] + place[half][0];
            if (pairs) {
                to.codes[half][p] = *(const uint2*)(first + 3 * place[half][0] + word);
                to.scales[half][p] = *(const u16*)(first + scales);
            } else {
                const u8* second = block[half][1] + place[half][1];
                to.codes[half][p].x = *(const u32*)(first + 3 * place[half][0] + word);
                to.codes[half][p].y = *(const u32*)(second + 3 * place[half][1] + word);
                to.scales[half][p] = first[scales] | (u32)second[scales] << 8;
            }
        }
    }
}

// 2^(scale - 127), in two factors that bf16 holds beside the codes' 2^-126: the second is 1 for all but the largest scales.
__device__ __forceinline__ u32 first_factor(u32 scale) {
    const u32 power = scale == 0 ? 0 : scale == 255 ? 0x7fc0u : (min(scale, 128u) + 126) << 7;
    return power << 16 | power;
}

__device__ __forceinline__ u32 second_factor(u32 scale) {
    const u32 power = scale > 128 && scale < 255 ? (scale - 1) << 7 : 0x3f80u;
    return power << 16 | power;
}

// Codes `i` and `i + 4` of a word, in the halves of the result, times 2^-126.
template <u32 I>
__device__ __forceinline__ u32 two_codes(u32 word) {
    const u32 code = word >> 4 * I;
    return (code << 12 & 0x80008000u) | (code << 6 & 0x01c001c0u);
}

// A tile's keys as the tensor core's first operand.
struct Keys {
    u32 of[HALVES][2 * PARTS_MAX][4];
};

__device__ __forceinline__ void decode(Keys& keys, const Codes& codes, u32 parts) {
    u32 all = 0;
#pragma unroll
    for (u32 half = 0; half < HALVES; half++) {
#pragma unroll
        for (u32 p = 0; p < PARTS_MAX; p++) {
            if (p >= parts) break;
            const u32 scales = codes.scales[half][p], x = codes.codes[half][p].x, y = codes.codes[half][p].y;
            const u32 first = first_factor(scales & 255u), second = first_factor(scales >> 8);
            u32(&low)[4] = keys.of[half][2 * p];
            u32(&high)[4] = keys.of[half][2 * p + 1];
            low[0] = mul_bf16x2(two_codes<0>(x), first);
            low[1] = mul_bf16x2(two_codes<0>(y), second);
            low[2] = mul_bf16x2(two_codes<1>(x), first);
            low[3] = mul_bf16x2(two_codes<1>(y), second);
            high[0] = mul_bf16x2(two_codes<2>(x), first);
            high[1] = mul_bf16x2(two_codes<2>(y), second);
            high[2] = mul_bf16x2(two_codes<3>(x), first);
            high[3] = mul_bf16x2(two_codes<3>(y), second);
            all |= scales;
        }
    }
    if (!__any_sync(WARP, (all & 0x8080u) != 0)) return;
#pragma unroll
    for (u32 half = 0; half < HALVES; half++) {
#pragma unroll
        for (u32 p = 0; p < PARTS_MAX; p++) {
            if (p >= parts) break;
            const u32 first = second_factor(codes.scales[half][p] & 255u), second = second_factor(codes.scales[half][p] >> 8);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                u32& pair = keys.of[half][2 * p + i / 4][i % 4];
                pair = mul_bf16x2(pair, i % 2 == 0 ? first : second);
            }
        }
    }
}

// The score, of the entry that the lane shows, under one row's queries.
__device__ __forceinline__ float score_of(const Keys& keys, const uint4* query, const float* weight, u32 parts, u32 head_tiles,
                                          u32 lane) {
    const u32 t = lane % 4;
    float total[HALVES][2];
#pragma unroll
    for (u32 half = 0; half < HALVES; half++) total[half][0] = total[half][1] = 0.0f;
    for (u32 n = 0; n < head_tiles; n += 2) {
        float dot[2][HALVES][4];
#pragma unroll
        for (u32 i = 0; i < 8 * HALVES; i++) dot[i / 4 / HALVES][i / 4 % HALVES][i % 4] = 0.0f;
#pragma unroll
        for (u32 p = 0; p < PARTS_MAX; p++) {
            if (p >= parts) break;
            uint4 columns[2];
#pragma unroll
            for (u32 k = 0; k < 2; k++) columns[k] = query[((n + k) * parts + p) * 32 + lane];
#pragma unroll
            for (u32 i = 0; i < 2 * HALVES; i++) {
                const u32(&key)[4] = keys.of[i % HALVES][2 * p];
                mma_k16(dot[i / HALVES][i % HALVES], key[0], key[1], key[2], key[3], columns[i / HALVES].x, columns[i / HALVES].y);
            }
#pragma unroll
            for (u32 i = 0; i < 2 * HALVES; i++) {
                const u32(&key)[4] = keys.of[i % HALVES][2 * p + 1];
                mma_k16(dot[i / HALVES][i % HALVES], key[0], key[1], key[2], key[3], columns[i / HALVES].z, columns[i / HALVES].w);
            }
        }
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            const float2 w = *(const float2*)(weight + 8 * (n + k) + 2 * t);
#pragma unroll
            for (u32 i = 0; i < 2 * HALVES; i++) {
                const float* own = dot[k][i / 2] + 2 * (i % 2);
                float& sum = total[i / 2][i % 2];
                sum = fma_own(w.x, max_second(own[0], 0.0f), sum);
                sum = fma_own(w.y, max_second(own[1], 0.0f), sum);
            }
        }
    }
    // Four sums, of which each lane of a quad folds a part and keeps one: its half and its entry of two.
    const bool odd = t % 2 != 0, upper = t / 2 != 0;
    float low = odd ? total[1][0] : total[0][0], high = odd ? total[1][1] : total[0][1];
    low = low + __shfl_xor_sync(WARP, odd ? total[0][0] : total[1][0], 1);
    high = high + __shfl_xor_sync(WARP, odd ? total[0][1] : total[1][1], 1);
    return (upper ? high : low) + __shfl_xor_sync(WARP, upper ? low : high, 2);
}

// Some of a group's queries: a thread holds eight columns of a head, several times.
constexpr u32 BATCH = 4;
struct Queries {
    float4 low[BATCH], high[BATCH];
};

__device__ __forceinline__ void load_queries(Queries& to, const float* queries, u32 first, u32 all, const Group& group,
                                             u32 head_tiles, const Shape& shape) {
    const u32 eights = shape.head_dim / 8, of_row = 8 * head_tiles * eights;
#pragma unroll
    for (u32 k = 0; k < BATCH; k++) {
        const u32 i = min(first + k * THREADS, all - 1), head = min(i % of_row / eights, shape.heads - 1);
        const u32 row_head = (group.first + i / of_row) * shape.heads + head;
        const float4* from = (const float4*)(queries + row_head * shape.head_dim + i % eights * 8);
        to.low[k] = from[0];
        to.high[k] = from[1];
    }
}

// As the lanes take them; zeros for heads that are none.
__device__ __forceinline__ void store_queries(uint4* query, const Queries& queries, u32 first, u32 all, u32 head_tiles,
                                              const Shape& shape) {
    const u32 eights = shape.head_dim / 8, parts = shape.head_dim / 32, of_row = 8 * head_tiles * eights;
#pragma unroll
    for (u32 k = 0; k < BATCH; k++) {
        const u32 i = first + k * THREADS, row = i / of_row, head = i % of_row / eights, eight = i % eights;
        if (i >= all) break;
        const float4 low = queries.low[k], high = queries.high[k];
        uint4 pairs;
        pairs.x = head < shape.heads ? bf16_pair(low.x, high.x) : 0;
        pairs.y = head < shape.heads ? bf16_pair(low.y, high.y) : 0;
        pairs.z = head < shape.heads ? bf16_pair(low.z, high.z) : 0;
        pairs.w = head < shape.heads ? bf16_pair(low.w, high.w) : 0;
        query[((row * head_tiles + head / 8) * parts + eight / 4) * 32 + head % 8 * 4 + eight % 4] = pairs;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
index_score(const float* queries, const float* weights, const RowInfo* rows, const Group* groups, const u8* keys,
            const u32* table, const u32* blocks, const u32* block_counts, float* scores, const Shape shape) {
    extern __shared__ uint4 query[];
    wait_for_inputs();
    const Group group = gridDim.x == shape.chunks ? shape.only : groups[blockIdx.x / shape.chunks];
    const u32 lane = threadIdx.x % 32, first_tile = blockIdx.x % shape.chunks * (THREADS / 32);
    const u32 step = THREADS / 32 * shape.chunks;
    // The same for every thread of the block.
    if (first_tile * TILE >= group.columns) return;
    const u32 parts = shape.head_dim / 32, head_tiles = (shape.heads + 15) / 16 * 2, of_row = head_tiles * parts * 32;
    const u32 all = group.rows * of_row;
    Queries some;
    load_queries(some, queries, threadIdx.x, all, group, head_tiles, shape);

    // A lane knows of one row what it sees and to how many blocks it keeps.
    const u32 lane_row = group.first + min(lane, group.rows - 1);
    const u32 lane_count = shape.restricted != 0 ? block_counts[lane_row] : ALL_BLOCKS;
    const u32 lane_seen = (rows[lane_row].position + 1) / shape.ratio, wanted_seen = lane_seen > shape.skip_visible ? lane_seen : 0;
    // Rows with candidates of their own go one by one, others share the keys.
    const bool alone = __any_sync(WARP, wanted_seen > 0 && lane_count != ALL_BLOCKS);
    const u32 count = alone ? 1 : group.rows;
    Source source;
    source.keys = keys;
    source.table = table + group.slot * shape.pages_per_slot;
    u32 from = 0, columns, tile;
    Codes codes;
    const auto start = [&]() {
        const u32 kept_to = __shfl_sync(WARP, lane_count, from);
        source.seen = __reduce_max_sync(WARP, !alone || lane == from ? wanted_seen : 0);
        source.list = kept_to != ALL_BLOCKS ? blocks + (group.first + from) * shape.blocks_max : nullptr;
        source.count = min(kept_to, shape.blocks_max);
        columns = source.list != nullptr && source.seen > 0 ? source.count * shape.block_size : source.seen;
        tile = first_tile + threadIdx.x / 32;
        if (tile * TILE < columns) load_codes(codes, source, tile, lane, shape);
    };
    start();

    float* weight = (float*)(query + shape.group_rows * of_row);
    store_queries(query, some, threadIdx.x, all, head_tiles, shape);
    for (u32 i = threadIdx.x + BATCH * THREADS; i < all; i += BATCH * THREADS) {
        load_queries(some, queries, i, all, group, head_tiles, shape);
        store_queries(query, some, i, all, head_tiles, shape);
    }
    for (u32 i = threadIdx.x; i < group.rows * 8 * head_tiles; i += THREADS) {
        const u32 row = i / (8 * head_tiles), head = i % (8 * head_tiles);
        weight[i] = head < shape.heads ? weights[(group.first + row) * shape.heads + head] : 0.0f;
    }
    __syncthreads();

    for (;;) {
        while (tile * TILE < columns) {
            Keys tile_keys;
            decode(tile_keys, codes, parts);
            const u32 shown = codes.shown, j = tile * TILE + 16 * (lane % 2) + lane / 4 * 2 + lane % 4 / 2;
            tile += step;
            // The next tile's codes are on their way meanwhile.
            if (tile * TILE < columns) load_codes(codes, source, tile, lane, shape);
            for (u32 r = from; r < from + count; r++) {
                const u32 seen = __shfl_sync(WARP, wanted_seen, r);
                if (seen == 0) continue;
                const float* row_weight = weight + r * 8 * head_tiles;
                const float score = score_of(tile_keys, query + r * of_row, row_weight, parts, head_tiles, lane);
                if (shown < seen) scores[(group.first + r - shape.tile_first) * shape.stride + j] = score;
            }
        }
        from += count;
        if (from >= group.rows) break;
        start();
    }
}
