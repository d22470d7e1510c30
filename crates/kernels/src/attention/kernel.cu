// attention: every head of a row over its selected compressed entries and its window, one key being also the value; formulas,
// roundings and the order of keys are in mod.rs, the order of sums in steps.rs. Two launches: scores and mix. Few rows are cut
// into small blocks, each of which decodes what it needs into its registers or its shared memory; of many rows a block has all
// keys of a row's heads, or all of their values, decoded where the tensor cores take them.
// in   q [rows, heads, head_dim] f32, bf16 values, not yet rotated   rows, windows as tf_kernels::rows
//      records, ring: window entries of kv_store   cache: pages of kv_compress   table [slots, pages_per_slot] u32
//      selected [rows, selected_max] u32 ascending, counts [rows] u32   sinks [heads]   frequencies [rope_dim / 2]
// work scores f32 [tile_rows, heads, stride] by place; where rows are many their weights lie in the first half of a head's line
//      as bf16, and from sums_at on what their sums are divided by, inverted [tile_rows, heads]
// out  out [rows, heads, head_dim] f32, bf16 values
// grid attention_scores_H: two warps a tile of 16 keys and H heads; attention_mix_H: 512 threads for H heads of a row and 128
//      columns; attention_weights_H: all keys of H heads of a row; attention_mix: a warp 64 columns and 64 heads of a row
// sum  a dot is one chain of k16 steps over the columns; a column of the output one over the places; thirty-two partial sums of
//      the exponentials, partial p those of the quads of places p, p + 32, ..., folded by halves, the sink last
// max  head_dim 1024, a multiple of 32; rope_dim 128
#include "attention.cuh"

// ---- queries

// Bytes of a head's staged query: an odd number of blocks, so that two heads' reads meet every bank once.
__device__ __forceinline__ u32 query_pitch(u32 head_dim) { return (head_dim / 32 | 1u) * 64; }

// Turned queries of HEADS heads, by some warps, as the steps take them: of each 32 columns the lane t of four has 16 bytes,
// columns 4 t to 4 t + 3 of either half. Heads that there are not are zero.
template <u32 HEADS>
__device__ __forceinline__ void stage_queries(const float* q, u32 first_head, u32 row, const float2* phases, u8* staged,
                                              u32 warp, u32 warps, const Shape& shape) {
    const u32 turned = shape.head_dim - shape.rope_dim, pitch = query_pitch(shape.head_dim), lane = threadIdx.x % 32;
    // A warp has a head, a lane the same parts of each; two heads are on their way at once.
    constexpr u32 AHEAD = 2;
    for (u32 at = lane; at < shape.head_dim / 8; at += 32) {
        const u32 c = at / 4 * 32 + at % 4 * 4;
        for (u32 from = warp; from < HEADS; from += AHEAD * warps) {
            float4 low[AHEAD], high[AHEAD];
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                const u32 head = from + i * warps;
                low[i] = high[i] = zero_quad();
                if (head < HEADS && first_head + head < shape.heads) {
                    const float* of = q + ((u64)row * shape.heads + first_head + head) * shape.head_dim + c;
                    low[i] = *(const float4*)of;
                    high[i] = *(const float4*)(of + 16);
                }
            }
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                const u32 head = from + i * warps;
                if (head >= HEADS) continue;
                const uint2 first = turned_quad(low[i], c, turned, phases), second = turned_quad(high[i], c + 16, turned, phases);
                uint4 words;
                words.x = first.x, words.y = first.y, words.z = second.x, words.w = second.y;
                *(uint4*)(staged + head * pitch + at * 16) = words;
            }
        }
    }
}

// ---- scores

// Thirty-two columns of a key as the lane t of four has them: columns 4 t to 4 t + 3 of either half, and the scales.
struct Columns {
    u32 low, high, scales;
};

template <bool WORDS>
__device__ __forceinline__ Columns load_columns(const u8* record, bool is_entry, u32 block, u32 t, u32 head_dim) {
    Columns columns;
    if (is_entry) {
        columns.low = columns.high = word_at<WORDS>(record + 16 * block + 4 * t);
        columns.scales = __ldg((const u16*)(record + head_dim / 2 + 2 * block));
    } else {
        columns.low = word_at<WORDS>(record + 32 * block + 4 * t);
        columns.high = word_at<WORDS>(record + 32 * block + 16 + 4 * t);
        columns.scales = __ldg(record + head_dim + block);
    }
    return columns;
}

// Two pairs of the first half's columns, two of the second's. `bad` is nonzero where something is no number.
__device__ __forceinline__ void decode_columns(const Columns& columns, bool is_entry, u32 (&pairs)[4], u32& bad) {
    if (is_entry) {
        const u32 first = entry_factor(__byte_perm(columns.scales, 0, 0x4040));
        const u32 second = entry_factor(__byte_perm(columns.scales, 0, 0x4141));
        const u32 front = __byte_perm(columns.low, 0, 0x1100), back = __byte_perm(columns.low, 0, 0x3322);
        pairs[0] = low_nibbles(front, first);
        pairs[1] = low_nibbles(back, first);
        pairs[2] = high_nibbles(front, second);
        pairs[3] = high_nibbles(back, second);
        bad |= not_numbers(columns.scales);
    } else {
        const u32 factor = window_factor(columns.scales * 0x00010001u);
        u32 high, low;
        e4m3_bytes(columns.low, high, low);
        pairs[0] = mul_bf16x2(__byte_perm(low, high, 0x5140), factor);
        pairs[1] = mul_bf16x2(__byte_perm(low, high, 0x7362), factor);
        e4m3_bytes(columns.high, high, low);
        pairs[2] = mul_bf16x2(__byte_perm(low, high, 0x5140), factor);
        pairs[3] = mul_bf16x2(__byte_perm(low, high, 0x7362), factor);
        bad |= not_numbers(columns.low) | not_numbers(columns.high) | (columns.scales > 142 ? 1u : 0u);
    }
}

// Scores of MT tiles where they belong; a lane has of each m the keys g and g + 8, of each n the heads 2 t and 2 t + 1.
template <u32 NT, u32 MT>
__device__ __forceinline__ void store_scores(const Keys& keys, u32 tile, u32 first_head, const float (&dots)[MT][NT][4],
                                             const u32 (&bad)[MT][2], float* lines, const Shape& shape) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 m = 0; m < MT; m++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 is_bad = bad[m][i] | __shfl_xor_sync(WARP, bad[m][i], 1);
            is_bad |= __shfl_xor_sync(WARP, is_bad, 2);
            const u32 place = (tile + m) * TILE + 8 * i + g;
            if (place >= (keys.places + TILE - 1) / TILE * TILE) continue;
            float instead = is_bad != 0 ? not_a_number() : 0.0f;
            // A place without a key weighs nothing.
            if (!has_key(keys, place)) instead = -infinite();
            const bool is_plain = instead == 0.0f;
            float* to = lines + (u64)(first_head + 2 * t) * shape.stride + place;
#pragma unroll
            for (u32 n = 0; n < 2 * NT; n++) {
                const u32 down = n / 2 * 8 + n % 2;
                const float score = dots[m][n / 2][2 * i + n % 2] * shape.scale;
                if (first_head + 2 * t + down < shape.heads) to[down * shape.stride] = is_plain ? score : instead;
            }
        }
    }
}

// Scores of MT tiles from `tile` on by one warp, for 8 NT heads whose queries are staged; the keys' next columns are on their way
// meanwhile. Tiles behind the last one are computed and dropped.
template <u32 NT, u32 MT, bool WORDS>
__device__ __forceinline__ void score_tiles(const Keys& keys, const Caches& from, u32 tile, const u8* staged, u32 first_head,
                                            float* lines, const Shape& shape) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, head_dim = shape.head_dim;
    const u32 blocks = head_dim / 32, pitch = query_pitch(head_dim);
    const u8* records[MT][2];
    Columns next[MT][2];
    u32 bad[MT][2];
    float dots[MT][NT][4];
#pragma unroll
    for (u32 m = 0; m < MT; m++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            records[m][i] = record_of(keys, (tile + m) * TILE + 8 * i + g, from, shape);
            bad[m][i] = 0;
        }
#pragma unroll
        for (u32 n = 0; n < NT; n++) dots[m][n][0] = dots[m][n][1] = dots[m][n][2] = dots[m][n][3] = 0.0f;
    }
    const auto load = [&](u32 block) {
#pragma unroll
        for (u32 m = 0; m < MT; m++) {
            const bool is_entry = (tile + m) * TILE < keys.entry_places;
#pragma unroll
            for (u32 i = 0; i < 2; i++) next[m][i] = load_columns<WORDS>(records[m][i], is_entry, block, t, head_dim);
        }
    };
    load(0);
    const u8* query = staged + g * pitch + t * 16;
#pragma unroll 1
    for (u32 block = 0; block < blocks; block++) {
        u32 pairs[MT][2][4];
#pragma unroll
        for (u32 m = 0; m < MT; m++) {
            const bool is_entry = (tile + m) * TILE < keys.entry_places;
#pragma unroll
            for (u32 i = 0; i < 2; i++) decode_columns(next[m][i], is_entry, pairs[m][i], bad[m][i]);
        }
        load(min(block + 1, blocks - 1));
#pragma unroll
        for (u32 n = 0; n < NT; n++) {
            const uint4 b = *(const uint4*)(query + n * 8 * pitch + block * 64);
#pragma unroll
            for (u32 m = 0; m < MT; m++) {
                mma_k16(dots[m][n], pairs[m][0][0], pairs[m][1][0], pairs[m][0][1], pairs[m][1][1], b.x, b.y);
            }
#pragma unroll
            for (u32 m = 0; m < MT; m++) {
                mma_k16(dots[m][n], pairs[m][0][2], pairs[m][1][2], pairs[m][0][3], pairs[m][1][3], b.z, b.w);
            }
        }
    }
    store_scores<NT, MT>(keys, tile, first_head, dots, bad, lines, shape);
}

// Bytes of a key's staged record.
__device__ __forceinline__ u32 record_pitch(u32 head_dim) { return (head_dim + head_dim / 32 + 15) / 16 * 16; }

// A warp's tile of records into shared memory, on their own way where they are multiples of sixteen bytes.
__device__ __forceinline__ void stage_records(const Keys& keys, const Caches& from, u32 tile, u8* staged, const Shape& shape) {
    const u32 lane = threadIdx.x % 32, pitch = record_pitch(shape.head_dim);
    const bool is_entry = tile * TILE < keys.entry_places;
    const u32 bytes = is_entry ? shape.head_dim / 2 + shape.head_dim / 16 : shape.head_dim + shape.head_dim / 32;
    const u64 own = (u64)record_of(keys, tile * TILE + lane % TILE, from, shape);
    for (u32 key = 0; key < TILE; key++) {
        const u8* record = (const u8*)__shfl_sync(WARP, own, key);
        if (shape.head_dim % 512 == 0) {
            float4* const to = (float4*)(staged + key * pitch);
            for (u32 at = lane; at < bytes / 16; at += 32) copy_async_16(to + at, (const float4*)record + at);
        } else {
            for (u32 at = lane; at < bytes; at += 32) staged[key * pitch + at] = __ldg(record + at);
        }
    }
    end_copy_group();
}

// Scores of one tile of staged records by one warp, for 8 NT heads whose queries are staged.
template <u32 NT>
__device__ __forceinline__ void score_staged(const Keys& keys, u32 tile, const u8* records, const u8* staged, u32 first_head,
                                             float* lines, const Shape& shape) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, head_dim = shape.head_dim;
    const u32 blocks = head_dim / 32, pitch = query_pitch(head_dim);
    const bool is_entry = tile * TILE < keys.entry_places;
    const u8* record = records + g * record_pitch(head_dim);
    const u8* query = staged + g * pitch + t * 16;
    u32 bad[1][2];
    float dots[1][NT][4];
    bad[0][0] = bad[0][1] = 0;
#pragma unroll
    for (u32 n = 0; n < NT; n++) dots[0][n][0] = dots[0][n][1] = dots[0][n][2] = dots[0][n][3] = 0.0f;
    const auto run = [&](bool is_entry) {
#pragma unroll 2
        for (u32 block = 0; block < blocks; block++) {
            u32 pairs[2][4];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u8* of = record + i * 8 * record_pitch(head_dim);
                Columns columns;
                if (is_entry) {
                    columns.low = columns.high = *(const u32*)(of + 16 * block + 4 * t);
                    columns.scales = *(const u16*)(of + head_dim / 2 + 2 * block);
                } else {
                    columns.low = *(const u32*)(of + 32 * block + 4 * t);
                    columns.high = *(const u32*)(of + 32 * block + 16 + 4 * t);
                    columns.scales = of[head_dim + block];
                }
                decode_columns(columns, is_entry, pairs[i], bad[0][i]);
            }
#pragma unroll
            for (u32 n = 0; n < NT; n++) {
                const uint4 b = *(const uint4*)(query + n * 8 * pitch + block * 64);
                mma_k16(dots[0][n], pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], b.x, b.y);
                mma_k16(dots[0][n], pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3], b.z, b.w);
            }
        }
    };
    if (is_entry) run(true);
    else run(false);
    store_scores<NT, 1>(keys, tile, first_head, dots, bad, lines, shape);
}

// Two warps a tile, half of the heads each. While the first ones fetch the records, the others turn the queries.
template <u32 NT>
__device__ __forceinline__ void score_few(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records,
                                          const u8* ring, const u8* cache, const u32* table, const u32* selected,
                                          const u32* counts, const float* frequencies, float* scores, const Shape& shape) {
    extern __shared__ uint4 room[];
    __shared__ float2 phases[64];
    u8* const staged = (u8*)room;
    const u32 warps = blockDim.x / 64, tiles = shape.stride / TILE, parts = (tiles + warps - 1) / warps;
    const u32 head_tiles = (shape.heads + 8 * NT - 1) / (8 * NT);
    const u32 warp = warp_index() % warps, half = warp_index() / warps;
    const u32 tile = blockIdx.x % parts * warps + warp, first_head = blockIdx.x / parts % head_tiles * 8 * NT;
    const u32 tile_row = blockIdx.x / parts / head_tiles, row = shape.first_row + tile_row;
    Keys keys = window_of(rows, windows, row, shape);
    make_phases(frequencies, keys.position, phases, shape);
    __syncthreads();
    wait_for_inputs();
    add_selection(keys, counts, row, shape);
    if (blockIdx.x % parts * warps * TILE >= keys.places) return;
    const Caches from = {records, ring, cache, table, selected + (u64)row * shape.selected_max};
    float* const lines = scores + (u64)tile_row * shape.heads * shape.stride;
    u8* const own_records = staged + 8 * NT * query_pitch(shape.head_dim) + warp * TILE * record_pitch(shape.head_dim);
    const bool has_tile = tile * TILE < keys.places;
    if (half != 0) stage_queries<8 * NT>(q, first_head, row, phases, staged, warp, warps, shape);
    else if (has_tile) stage_records(keys, from, tile, own_records, shape);
    wait_for_copy_groups<0>();
    __syncthreads();
    const u32 down = half * 4 * NT;
    if (has_tile) {
        const u8* const own_queries = staged + down * query_pitch(shape.head_dim);
        score_staged<NT / 2>(keys, tile, own_records, own_queries, first_head + down, lines, shape);
    }
}

extern "C" __global__ void __launch_bounds__(256, 1)
attention_scores_16(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                    const u8* cache, const u32* table, const u32* selected, const u32* counts, const float* frequencies,
                    float* scores, const Shape shape) {
    score_few<2>(q, rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, shape);
}

extern "C" __global__ void __launch_bounds__(512, 1)
attention_scores_32(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                    const u8* cache, const u32* table, const u32* selected, const u32* counts, const float* frequencies,
                    float* scores, const Shape shape) {
    score_few<4>(q, rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, shape);
}

// ---- weights

// By one warp, of the scores of COUNT heads, whose lines lie `apart` floats from each other: `put(head, quad, first, second)`
// gets the weights of four places as two words of bf16, and every lane the maxima (x) and the sums of the exponentials (y).
template <u32 COUNT, class Put>
__device__ __forceinline__ void weigh(const float* lines, u32 apart, u32 places, u32 lane, float2 (&both)[COUNT], Put put) {
    constexpr u32 OWN = 5;
    const u32 quads = (places + TILE - 1) / TILE * (TILE / 4);
    float4 scores[COUNT][OWN];
    float most[COUNT], sums[COUNT];
    const auto load = [&](u32 first) {
#pragma unroll
        for (u32 h = 0; h < COUNT; h++) {
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u32 quad = first + 32 * i + lane;
                scores[h][i].x = scores[h][i].y = scores[h][i].z = scores[h][i].w = -infinite();
                if (quad < quads) scores[h][i] = ((const float4*)(lines + h * apart))[quad];
            }
        }
    };
#pragma unroll
    for (u32 h = 0; h < COUNT; h++) most[h] = -infinite(), sums[h] = 0.0f;
    for (u32 first = 0; first < quads; first += 32 * OWN) {
        load(first);
#pragma unroll
        for (u32 i = 0; i < COUNT * OWN; i++) {
            const float4 four = scores[i / OWN][i % OWN];
            most[i / OWN] = fmaxf(most[i / OWN], fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
        }
    }
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) {
#pragma unroll
        for (u32 h = 0; h < COUNT; h++) most[h] = fmaxf(most[h], __shfl_xor_sync(WARP, most[h], mask));
    }
    for (u32 first = 0; first < quads; first += 32 * OWN) {
        if (quads > 32 * OWN) load(first);
        __syncwarp();
#pragma unroll
        for (u32 h = 0; h < COUNT; h++) {
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u32 quad = first + 32 * i + lane;
                const float4 four = scores[h][i];
                const float a = exp_down(four.x - most[h]), b = exp_down(four.y - most[h]);
                const float c = exp_down(four.z - most[h]), d = exp_down(four.w - most[h]);
                if (quad < quads) {
                    sums[h] = sums[h] + a;
                    sums[h] = sums[h] + b;
                    sums[h] = sums[h] + c;
                    sums[h] = sums[h] + d;
                    put(h, quad, bf16_pair(a, b), bf16_pair(c, d));
                }
            }
        }
    }
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) {
#pragma unroll
        for (u32 h = 0; h < COUNT; h++) sums[h] = sums[h] + __shfl_xor_sync(WARP, sums[h], mask);
    }
#pragma unroll
    for (u32 h = 0; h < COUNT; h++) both[h].x = most[h], both[h].y = sums[h];
}

// Scores of all keys of 8 NT heads of a row, then their weights and denominators.
template <u32 NT>
__device__ __forceinline__ void weigh_keys(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records,
                                           const u8* ring, const u8* cache, const u32* table, const u32* selected,
                                           const u32* counts, const float* sinks, const float* frequencies, float* scores,
                                           const Shape& shape) {
    extern __shared__ uint4 room[];
    __shared__ float2 phases[64];
    u8* const staged = (u8*)room;
    const u32 warps = blockDim.x / 32, warp = warp_index(), lane = threadIdx.x % 32;
    const u32 head_tiles = (shape.heads + 8 * NT - 1) / (8 * NT), first_head = blockIdx.x % head_tiles * 8 * NT;
    const u32 tile_row = blockIdx.x / head_tiles, row = shape.first_row + tile_row;
    Keys keys = window_of(rows, windows, row, shape);
    make_phases(frequencies, keys.position, phases, shape);
    __syncthreads();
    wait_for_inputs();
    stage_queries<8 * NT>(q, first_head, row, phases, staged, warp, warps, shape);
    add_selection(keys, counts, row, shape);
    __syncthreads();
    const Caches from = {records, ring, cache, table, selected + (u64)row * shape.selected_max};
    float* const lines = scores + (u64)tile_row * shape.heads * shape.stride;
    const u32 tiles = (keys.places + TILE - 1) / TILE;
    for (u32 tile = 2 * warp; tile < tiles; tile += 2 * warps) {
        if (shape.head_dim % 128 == 0) score_tiles<NT, 2, true>(keys, from, tile, staged, first_head, lines, shape);
        else score_tiles<NT, 2, false>(keys, from, tile, staged, first_head, lines, shape);
    }
    __syncthreads();
    // Two heads at a time, so that one's latencies hide the other's; heads of a block are a multiple of sixteen, those that there
    // are may not be.
    for (u32 head = first_head + 2 * warp; head < min(first_head + 8 * NT, shape.heads); head += 2 * warps) {
        float* const line = lines + (u64)head * shape.stride;
        const auto put = [&](u32 h, u32 quad, u32 first, u32 second) {
            uint2 words;
            words.x = first, words.y = second;
            ((uint2*)(line + h * shape.stride))[quad] = words;
        };
        float2 two[2], one[1];
        const bool is_pair = head + 1 < shape.heads;
        if (is_pair) {
            weigh<2>(line, shape.stride, keys.places, lane, two, put);
        } else {
            weigh<1>(line, shape.stride, keys.places, lane, one, put);
            two[0] = two[1] = one[0];
        }
        if (lane < (is_pair ? 2 : 1)) {
            const float2 both = lane == 0 ? two[0] : two[1];
            const float sum = both.y + exp_own(sinks[head + lane] - both.x);
            scores[shape.sums_at + tile_row * shape.heads + head + lane] = __fdiv_rn(256.0f, sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 1)
attention_weights_64(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                     const u8* cache, const u32* table, const u32* selected, const u32* counts, const float* sinks,
                     const float* frequencies, float* scores, const Shape shape) {
    weigh_keys<8>(q, rows, windows, records, ring, cache, table, selected, counts, sinks, frequencies, scores, shape);
}

extern "C" __global__ void __launch_bounds__(256, 1)
attention_weights_32(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                     const u8* cache, const u32* table, const u32* selected, const u32* counts, const float* sinks,
                     const float* frequencies, float* scores, const Shape shape) {
    weigh_keys<4>(q, rows, windows, records, ring, cache, table, selected, counts, sinks, frequencies, scores, shape);
}

// ---- mix

// Bytes of a head's staged weights: eight rows of four lanes' eight bytes meet every bank once.
__device__ __forceinline__ u32 weight_pitch(u32 stride) { return (2 * stride + 127) / 128 * 128 + 32; }

// The addresses of a row's keys; all threads call it.
__device__ __forceinline__ void find_records(const Keys& keys, const Caches& from, const u8** records, const Shape& shape) {
    for (u32 place = threadIdx.x; place < (keys.places + TILE - 1) / TILE * TILE; place += blockDim.x) {
        records[place] = record_of(keys, place, from, shape);
    }
}

constexpr u32 MIX_COLUMNS = 128, MIX_TILES = MIX_COLUMNS / 16;

// 8 NT heads and 128 columns, a warp sixteen of them. Shared memory: the values as the steps take them [tiles, MIX_TILES, 32
// lanes] of 16 bytes, the weights, the addresses.
template <u32 NT, bool WORDS>
__device__ __forceinline__ void mix_few(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                                        const u8* cache, const u32* table, const u32* selected, const u32* counts,
                                        const float* sinks, const float* frequencies, const float* scores, float* out,
                                        const Shape& shape) {
    extern __shared__ uint4 room[];
    __shared__ float inverses[8 * NT];
    const u32 warps = blockDim.x / 32, warp = warp_index(), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 head_dim = shape.head_dim, pitch = weight_pitch(shape.stride), turned = head_dim - shape.rope_dim;
    uint4* const values = room;
    u8* const weights = (u8*)(values + shape.stride / TILE * MIX_TILES * 32);
    const u8** const key_records = (const u8**)(weights + 8 * NT * pitch);
    const u32 column_tiles = (head_dim + MIX_COLUMNS - 1) / MIX_COLUMNS, head_tiles = (shape.heads + 8 * NT - 1) / (8 * NT);
    const u32 first_column = blockIdx.x % column_tiles * MIX_COLUMNS;
    const u32 first_head = blockIdx.x / column_tiles % head_tiles * 8 * NT;
    const u32 tile_row = blockIdx.x / column_tiles / head_tiles, row = shape.first_row + tile_row;
    // This part of the work touches nothing of the launch before, the scores'. What it reads is older: the scores have begun,
    // so all that they waited for is complete.
    const Keys keys = keys_of(rows, windows, counts, row, shape);
    const u32 tiles = (keys.places + TILE - 1) / TILE;
    find_records(keys, {records, ring, cache, table, selected + (u64)row * shape.selected_max}, key_records, shape);
    __syncthreads();
    // A unit is a tile of keys by 64 columns; some are on their way at once.
    constexpr u32 AHEAD = 2;
    const auto block_of = [&](u32 unit) { return min(first_column / 32 + unit % 2 * 2 + g / 4, head_dim / 32 - 1); };
    const auto is_entry = [&](u32 unit) { return unit / 2 * TILE < keys.entry_places; };
    const auto load = [&](u32 unit, Values& to) {
        load_values<WORDS>(key_records + unit / 2 * TILE + 4 * t, is_entry(unit), block_of(unit), g % 4, head_dim, to);
    };
    const auto store = [&](u32 unit, const Values& from) {
        u32 pairs[4][4];
        decode_values(from, is_entry(unit), pairs);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            uint4 words;
            words.x = pairs[i][0], words.y = pairs[i][1], words.z = pairs[i][2], words.w = pairs[i][3];
            values[(unit / 2 * MIX_TILES + unit % 2 * 4 + i) * 32 + lane] = words;
        }
    };
    for (u32 unit = warp; unit < 2 * tiles; unit += AHEAD * warps) {
        Values some[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) load(min(unit + i * warps, 2 * tiles - 1), some[i]);
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            if (unit + i * warps < 2 * tiles) store(unit + i * warps, some[i]);
        }
    }
    wait_for_inputs();
    for (u32 head = warp; head < 8 * NT; head += warps) {
        uint2* const line = (uint2*)(weights + head * pitch);
        if (first_head + head >= shape.heads) {
            for (u32 quad = lane; quad < tiles * 4; quad += 32) line[quad].x = line[quad].y = 0;
            if (lane == 0) inverses[head] = 1.0f;
            continue;
        }
        const float* of_head = scores + ((u64)tile_row * shape.heads + first_head + head) * shape.stride;
        float2 both[1];
        weigh<1>(of_head, 0, keys.places, lane, both, [&](u32, u32 quad, u32 first, u32 second) {
            uint2 words;
            words.x = first, words.y = second;
            line[quad] = words;
        });
        if (lane == 0) {
            const float sum = both[0].y + exp_own(sinks[first_head + head] - both[0].x);
            inverses[head] = __fdiv_rn(256.0f, sum);
        }
    }
    __syncthreads();
    if (warp >= MIX_TILES) return;
    float mixed[NT][4];
#pragma unroll
    for (u32 n = 0; n < NT; n++) mixed[n][0] = mixed[n][1] = mixed[n][2] = mixed[n][3] = 0.0f;
    const u8* weight = weights + g * pitch + t * 8;
#pragma unroll 8
    for (u32 tile = 0; tile < tiles; tile++) {
        const uint4 a = values[(tile * MIX_TILES + warp) * 32 + lane];
#pragma unroll
        for (u32 n = 0; n < NT; n++) {
            const uint2 b = *(const uint2*)(weight + n * 8 * pitch + tile * 32);
            mma_k16(mixed[n], a.x, a.y, a.z, a.w, b.x, b.y);
        }
    }
    // Columns 2 i and 2 i + 1 of the eight of a lane, i being the warp's tile in its 64 columns.
    const u32 i = warp % 4, c = first_column + warp / 4 * 64 + g / 4 * 32 + i / 2 * 16 + g % 4 * 4 + i % 2 * 2;
    if (c >= head_dim) return;
    float2 phase;
    phase.x = 0.0f, phase.y = 1.0f;
    if (c >= turned) phase = sin_cos_own((float)keys.position * frequencies[(c - turned) / 2]);
#pragma unroll
    for (u32 n = 0; n < 2 * NT; n++) {
        const u32 head = n / 2 * 8 + 2 * t + n % 2;
        const float2 pair = finished_pair(mixed[n / 2][n % 2], mixed[n / 2][2 + n % 2], inverses[head], c, turned, phase);
        if (first_head + head < shape.heads) {
            *(float2*)(out + ((u64)row * shape.heads + first_head + head) * head_dim + c) = pair;
        }
    }
}

#define MIX_FEW_PARAMETERS rows, windows, records, ring, cache, table, selected, counts, sinks, frequencies, scores, out, shape

extern "C" __global__ void __launch_bounds__(512, 1)
attention_mix_8(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring, const u8* cache,
                const u32* table, const u32* selected, const u32* counts, const float* sinks, const float* frequencies,
                const float* scores, float* out, const Shape shape) {
    if (shape.head_dim % 128 == 0) mix_few<1, true>(MIX_FEW_PARAMETERS);
    else mix_few<1, false>(MIX_FEW_PARAMETERS);
}

extern "C" __global__ void __launch_bounds__(512, 1)
attention_mix_16(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring, const u8* cache,
                 const u32* table, const u32* selected, const u32* counts, const float* sinks, const float* frequencies,
                 const float* scores, float* out, const Shape shape) {
    if (shape.head_dim % 128 == 0) mix_few<2, true>(MIX_FEW_PARAMETERS);
    else mix_few<2, false>(MIX_FEW_PARAMETERS);
}

extern "C" __global__ void __launch_bounds__(512, 1)
attention_mix_32(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring, const u8* cache,
                 const u32* table, const u32* selected, const u32* counts, const float* sinks, const float* frequencies,
                 const float* scores, float* out, const Shape shape) {
    if (shape.head_dim % 128 == 0) mix_few<4, true>(MIX_FEW_PARAMETERS);
    else mix_few<4, false>(MIX_FEW_PARAMETERS);
}

// 64 heads, a warp 64 columns of them. Shared memory: the weights, the addresses.
template <bool WORDS>
__device__ __forceinline__ void mix_many(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                                         const u8* cache, const u32* table, const u32* selected, const u32* counts,
                                         const float* frequencies, const float* scores, float* out, const Shape& shape) {
    constexpr u32 HEADS = 64, NT = HEADS / 8;
    extern __shared__ uint4 room[];
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 head_dim = shape.head_dim, pitch = weight_pitch(shape.stride), turned = head_dim - shape.rope_dim;
    u8* const weights = (u8*)room;
    const u8** const key_records = (const u8**)(weights + HEADS * pitch);
    const u32 columns = blockDim.x * 2, column_tiles = (head_dim + columns - 1) / columns;
    const u32 head_tiles = (shape.heads + HEADS - 1) / HEADS;
    const u32 first_head = blockIdx.x / column_tiles % head_tiles * HEADS;
    const u32 first_block = blockIdx.x % column_tiles * (columns / 32) + warp_index() * 2;
    const u32 tile_row = blockIdx.x / column_tiles / head_tiles, row = shape.first_row + tile_row;
    const Keys keys = keys_of(rows, windows, counts, row, shape);
    const u32 tiles = (keys.places + TILE - 1) / TILE;
    find_records(keys, {records, ring, cache, table, selected + (u64)row * shape.selected_max}, key_records, shape);
    wait_for_inputs();
    // Eight weights a copy.
    for (u32 part = threadIdx.x; part < HEADS * tiles * 2; part += blockDim.x) {
        const u32 head = part / (tiles * 2), at = part % (tiles * 2);
        float4* const to = (float4*)(weights + head * pitch) + at;
        const float* of_head = scores + ((u64)tile_row * shape.heads + first_head + head) * shape.stride;
        if (first_head + head < shape.heads) copy_async_16(to, (const float4*)of_head + at);
        else *to = zero_quad();
    }
    end_copy_group();
    wait_for_copy_groups<0>();
    __syncthreads();
    if (first_block * 32 >= head_dim) return;

    const u32 block = min(first_block + g / 4, head_dim / 32 - 1);
    float mixed[4][NT][4];
#pragma unroll
    for (u32 i = 0; i < 16 * NT; i++) (&mixed[0][0][0])[i] = 0.0f;
    const u8* weight = weights + g * pitch + t * 8;
    // Tiles of one type are one loop, since the other decodes otherwise; those of the next two are on their way.
    const auto run = [&](u32 from, u32 to, bool is_entry) {
        if (from == to) return;
        Values next[2];
        const auto load = [&](u32 tile, Values& values) {
            load_values<WORDS>(key_records + min(tile, to - 1) * TILE + 4 * t, is_entry, block, g % 4, head_dim, values);
        };
        load(from, next[0]);
        load(from + 1, next[1]);
        for (u32 first = from; first < to; first += 2) {
#pragma unroll
            for (u32 d = 0; d < 2; d++) {
                const u32 tile = first + d;
                if (tile >= to) break;
                u32 pairs[4][4];
                decode_values(next[d], is_entry, pairs);
                load(tile + 2, next[d]);
#pragma unroll
                for (u32 n = 0; n < NT; n++) {
                    const uint2 b = *(const uint2*)(weight + n * 8 * pitch + tile * 32);
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        mma_k16(mixed[i][n], pairs[i][0], pairs[i][1], pairs[i][2], pairs[i][3], b.x, b.y);
                    }
                }
            }
        }
    };
    run(0, keys.entry_places / TILE, true);
    run(keys.entry_places / TILE, tiles, false);

    if (first_block + g / 4 >= head_dim / 32) return;
    const float* inverses = scores + shape.sums_at + tile_row * shape.heads + first_head;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 c = block * 32 + half * 16 + g % 4 * 4;
        float2 phases[2];
        phases[0].x = phases[1].x = 0.0f;
        phases[0].y = phases[1].y = 1.0f;
        if (c >= turned) phases[0] = sin_cos_own((float)keys.position * frequencies[(c - turned) / 2]);
        if (c + 2 >= turned) phases[1] = sin_cos_own((float)keys.position * frequencies[(c + 2 - turned) / 2]);
#pragma unroll
        for (u32 n = 0; n < 2 * NT; n++) {
            const u32 head = n / 2 * 8 + 2 * t + n % 2;
            if (first_head + head >= shape.heads) continue;
            const float inverse = inverses[head];
            const float(&one)[4] = mixed[2 * half][n / 2];
            const float(&two)[4] = mixed[2 * half + 1][n / 2];
            const float2 first = finished_pair(one[n % 2], one[2 + n % 2], inverse, c, turned, phases[0]);
            const float2 second = finished_pair(two[n % 2], two[2 + n % 2], inverse, c + 2, turned, phases[1]);
            float4 quad;
            quad.x = first.x, quad.y = first.y, quad.z = second.x, quad.w = second.y;
            *(float4*)(out + ((u64)row * shape.heads + first_head + head) * head_dim + c) = quad;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 1)
attention_mix(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring, const u8* cache,
              const u32* table, const u32* selected, const u32* counts, const float* frequencies, const float* scores,
              float* out, const Shape shape) {
    if (shape.head_dim % 128 == 0) {
        mix_many<true>(rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, out, shape);
    } else {
        mix_many<false>(rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, out, shape);
    }
}
