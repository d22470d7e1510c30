// attention: every head of a row over its selected compressed entries and its window, one key being also the value; formulas,
// roundings and the order of keys are in mod.rs. Many rows take three launches a tile of rows: scores, softmax, and the mix of
// the keys. Few rows take two, of small blocks that keep all of their operands in shared memory.
// in   q [rows, heads, head_dim] f32, bf16 values, not yet rotated   rows, windows as tf_kernels::rows
//      records, ring: window entries of kv_store   cache: pages of kv_compress   table [slots, pages_per_slot] u32
//      selected [rows, selected_max] u32 ascending, counts [rows] u32   sinks [heads]   frequencies [rope_dim / 2]
// work scores f32: [tile_rows, stride, heads rounded up to 4], stride the keys of a row at most, and from sums_at on the
//      denominators [tile_rows, heads rounded up to 4]; of few rows [rows, heads, stride]
// out  out [rows, heads, head_dim] f32, bf16 values
// grid attention_scores_H_K: 128 threads for H heads of a row and K of its keys; attention_softmax: 288 threads for 32 heads of
//      a row; attention_mix_H_C: 128 threads for H heads of a row and C columns; attention_scores_few: 320 threads for 16 heads
//      and 20 keys; attention_mix_few: 256 threads for 8 heads and 32 columns. Dynamic shared memory as gpu.rs says
// sum  a dot is one chain of fused multiply-adds over the columns; the denominator adds the unrounded exponentials in key
//      order, the sink last; an output column is one chain in key order. No sum is split, so no size here changes a bit
// max  head_dim 1024, a multiple of 32; rope_dim 128
#include "prelude.cuh"

struct Shape {
    u32 rows, heads, head_dim, rope_dim, window, ring_len, selected_max, is_block, pages_per_slot, entries_per_page;
    float scale;
    u32 first_row, stride;
    u32 sums_at;  // where in the scratch the denominators start, in floats
};

constexpr u32 THREADS = 128;

// Heads of a key's line of scores.
__device__ __forceinline__ u32 line_of(const Shape& shape) { return (shape.heads + 3) / 4 * 4; }

// The keys of a row.
struct Keys {
    u32 slot, position, count, first, total;
    WindowInfo window;
};

__device__ __forceinline__ Keys keys_of(const RowInfo* rows, const WindowInfo* windows, const u32* counts, u32 row,
                                        const Shape& shape) {
    Keys keys;
    keys.slot = rows[row].slot;
    keys.position = rows[row].position;
    keys.window = windows[rows[row].window];
    keys.count = shape.selected_max == 0 ? 0 : min(counts[row], shape.selected_max);
    const u32 end = shape.is_block != 0 ? keys.window.start + keys.window.row_count : keys.position + 1;
    const u32 reach = shape.is_block != 0 ? keys.window.start : keys.position + 1;
    keys.first = reach > shape.window ? reach - shape.window : 0;
    keys.total = keys.count + end - keys.first;
    return keys;
}

// Where the bytes of key j are: a compressed entry, or a window entry: the launch's own from the window's start on, the
// ring's before it.
__device__ __forceinline__ const u8* record_of(const Keys& keys, u32 j, const u8* records, const u8* ring, const u8* cache,
                                               const u32* table, const u32* of_row, const Shape& shape) {
    if (j < keys.count) {
        const u32 entry = of_row[j];
        const u64 page = table[keys.slot * shape.pages_per_slot + entry / shape.entries_per_page];
        const u32 bytes = shape.head_dim / 2 + shape.head_dim / 16;
        return cache + (page * shape.entries_per_page + entry % shape.entries_per_page) * bytes;
    }
    const u32 position = keys.first + (j - keys.count), bytes = shape.head_dim + shape.head_dim / 32;
    if (position >= keys.window.start) return records + (u64)(keys.window.first_row + (position - keys.window.start)) * bytes;
    return ring + ((u64)keys.window.slot * shape.ring_len + position % shape.ring_len) * bytes;
}

// Thirty-two columns of a key as they lie in its record: 32 E4M3 codes and a scale, or 16 bytes of E2M1 codes and two scales.
struct Packed {
    uint4 low, high;
    u32 first_scale, second_scale;
};

__device__ __forceinline__ u32 word_at(const u8* at) {
    return __ldg(at) | (u32)__ldg(at + 1) << 8 | (u32)__ldg(at + 2) << 16 | (u32)__ldg(at + 3) << 24;
}

__device__ __forceinline__ uint4 words_at(const u8* at) {
    uint4 words;
    words.x = word_at(at);
    words.y = word_at(at + 4);
    words.z = word_at(at + 8);
    words.w = word_at(at + 12);
    return words;
}

// Loads only, so that many are on their way at once: what they mean is asked later.
__device__ __forceinline__ Packed packed_columns(const u8* record, bool is_entry, u32 group, u32 head_dim) {
    const u8* codes = record + (is_entry ? 16 : 32) * group;
    // An entry's second half is its first one again.
    const u8* more = codes + (is_entry ? 0 : 16);
    const u8* scales = record + (is_entry ? head_dim / 2 + 2 * group : head_dim + group);
    Packed packed;
    // Records of such rows are multiples of sixteen bytes.
    if (head_dim % 512 == 0) {
        packed.low = __ldg((const uint4*)codes);
        packed.high = __ldg((const uint4*)more);
    } else {
        packed.low = words_at(codes);
        packed.high = words_at(more);
    }
    packed.first_scale = __ldg(scales);
    packed.second_scale = __ldg(scales + (is_entry ? 1 : 0));
    return packed;
}

// The fields of a code as those of a float32, whose exponent is then too low by 120 (E4M3), or by 126 (E2M1, a nibble that
// begins at bit `at`); exact, subnormals included.
__device__ __forceinline__ float e4m3_fields(u32 word, u32 i) {
    const u32 top = word << (24 - 8 * i);
    return from_bits((top >> 4 & 0x07f00000u) | (top & 0x80000000u)) * from_bits(247u << 23);
}
__device__ __forceinline__ float e2m1_fields(u32 word, u32 at) {
    const u32 top = word << (28 - at);
    return from_bits((top >> 6 & 0x01c00000u) | (top & 0x80000000u)) * from_bits(253u << 23);
}

__device__ __forceinline__ float4 entry_quad(u32 word, u32 half, float scale) {
    float4 quad;
    quad.x = e2m1_fields(word, 4 * half) * scale;
    quad.y = e2m1_fields(word, 8 + 4 * half) * scale;
    quad.z = e2m1_fields(word, 16 + 4 * half) * scale;
    quad.w = e2m1_fields(word, 24 + 4 * half) * scale;
    return quad;
}

__device__ __forceinline__ float4 window_quad(u32 word, float scale) {
    float4 quad;
    quad.x = e4m3_fields(word, 0) * scale;
    quad.y = e4m3_fields(word, 1) * scale;
    quad.z = e4m3_fields(word, 2) * scale;
    quad.w = e4m3_fields(word, 3) * scale;
    // A code that is no number: seven ones carry into the eighth bit.
    if (((word & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u) != 0) {
        if ((word & 0x7fu) == 0x7fu) quad.x = not_a_number();
        if ((word >> 8 & 0x7fu) == 0x7fu) quad.y = not_a_number();
        if ((word >> 16 & 0x7fu) == 0x7fu) quad.z = not_a_number();
        if ((word >> 24 & 0x7fu) == 0x7fu) quad.w = not_a_number();
    }
    return quad;
}

// Calls `put(i, values)` for the columns 4 i to 4 i + 3 of the thirty-two; exact in bf16.
template <class Put>
__device__ __forceinline__ void unpack(const Packed& packed, bool is_entry, Put put) {
    if (is_entry) {
        const float first = e4m3_value(packed.first_scale), second = e4m3_value(packed.second_scale);
        put(0, entry_quad(packed.low.x, 0, first));
        put(1, entry_quad(packed.low.y, 0, first));
        put(2, entry_quad(packed.low.z, 0, first));
        put(3, entry_quad(packed.low.w, 0, first));
        put(4, entry_quad(packed.low.x, 1, second));
        put(5, entry_quad(packed.low.y, 1, second));
        put(6, entry_quad(packed.low.z, 1, second));
        put(7, entry_quad(packed.low.w, 1, second));
    } else {
        const float scale = e8m0_value(packed.first_scale);
        put(0, window_quad(packed.low.x, scale));
        put(1, window_quad(packed.low.y, scale));
        put(2, window_quad(packed.low.z, scale));
        put(3, window_quad(packed.low.w, scale));
        put(4, window_quad(packed.high.x, scale));
        put(5, window_quad(packed.high.y, scale));
        put(6, window_quad(packed.high.z, scale));
        put(7, window_quad(packed.high.w, scale));
    }
}

// A pair of columns, turned by a phase whose sine is x; or back.
__device__ __forceinline__ float2 turn_pair(float even, float odd, float2 phase) {
    float2 turned;
    turned.x = bf16_round(even * phase.y + odd * -phase.x);
    turned.y = bf16_round(odd * phase.y + even * phase.x);
    return turned;
}
__device__ __forceinline__ float2 turn_pair_back(float even, float odd, float2 phase) {
    phase.x = -phase.x;
    return turn_pair(even, odd, phase);
}
__device__ __forceinline__ float4 with_first_pair(float4 quad, float2 pair) {
    quad.x = pair.x, quad.y = pair.y;
    return quad;
}
__device__ __forceinline__ float4 with_second_pair(float4 quad, float2 pair) {
    quad.z = pair.x, quad.w = pair.y;
    return quad;
}

// Four columns of a query from `c` on, turned where they lie in the last rope_dim.
__device__ __forceinline__ float4 turned_quad(float4 quad, u32 c, u32 turned, const float2* phases) {
    if (c >= turned) quad = with_first_pair(quad, turn_pair(quad.x, quad.y, phases[(c - turned) / 2]));
    if (c + 2 >= turned) quad = with_second_pair(quad, turn_pair(quad.z, quad.w, phases[(c + 2 - turned) / 2]));
    return quad;
}

// One step of sixteen chains: four items of each of two kinds.
__device__ __forceinline__ void multiply(float4 a, float4 b, float (&sums)[4][4]) {
    sums[0][0] = fma_own(a.x, b.x, sums[0][0]);
    sums[0][1] = fma_own(a.x, b.y, sums[0][1]);
    sums[0][2] = fma_own(a.x, b.z, sums[0][2]);
    sums[0][3] = fma_own(a.x, b.w, sums[0][3]);
    sums[1][0] = fma_own(a.y, b.x, sums[1][0]);
    sums[1][1] = fma_own(a.y, b.y, sums[1][1]);
    sums[1][2] = fma_own(a.y, b.z, sums[1][2]);
    sums[1][3] = fma_own(a.y, b.w, sums[1][3]);
    sums[2][0] = fma_own(a.z, b.x, sums[2][0]);
    sums[2][1] = fma_own(a.z, b.y, sums[2][1]);
    sums[2][2] = fma_own(a.z, b.z, sums[2][2]);
    sums[2][3] = fma_own(a.z, b.w, sums[2][3]);
    sums[3][0] = fma_own(a.w, b.x, sums[3][0]);
    sums[3][1] = fma_own(a.w, b.y, sums[3][1]);
    sums[3][2] = fma_own(a.w, b.z, sums[3][2]);
    sums[3][3] = fma_own(a.w, b.w, sums[3][3]);
}

// Where a thread stands in a tile: it has HQ quads of heads, 32 heads apart, and NQ quads of keys or columns, 64 apart. Two
// lanes of the four that read a quad are neighbours, or neighbours but one, so that a warp's reads take half as long.
struct Place {
    u32 heads, others;  // the first quad of either
};
__device__ __forceinline__ Place place_of(u32 thread) {
    const u32 lane = thread % 32;
    Place place;
    place.heads = lane / 2 % 8;
    place.others = thread / 32 * 4 + lane / 16 * 2 + lane % 2;
    return place;
}

template <u32 HQ, u32 NQ>
struct Sums {
    float quads[HQ][NQ][4][4];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 i = 0; i < HQ * NQ * 16; i++) (&quads[0][0][0][0])[i] = 0.0f;
    }
};

// HQ by KQ quads a thread; STEP columns at a time, of which two steps lie in dynamic shared memory.
template <u32 HQ, u32 KQ, u32 STEP>
__device__ __forceinline__ void score_keys(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records,
                                           const u8* ring, const u8* cache, const u32* table, const u32* selected,
                                           const u32* counts, const float* frequencies, float* scores, const Shape& shape) {
    constexpr u32 HEADS = 32 * HQ, KEYS = 64 * KQ, OWN = HEADS * STEP / THREADS / 4;
    static_assert(KEYS * STEP == 32 * THREADS, "a thread unpacks thirty-two columns of one key a step");
    extern __shared__ float4 room[];
    __shared__ float2 phases[64];
    float* query_lines = (float*)room;                      // [2][STEP][HEADS]
    float* key_lines = query_lines + 2 * STEP * HEADS;      // [2][STEP][KEYS]
    const u32 thread = threadIdx.x, head_dim = shape.head_dim, line = line_of(shape);
    const u32 key_tiles = (shape.stride + KEYS - 1) / KEYS, head_tiles = (shape.heads + HEADS - 1) / HEADS;
    const u32 first_key = blockIdx.x % key_tiles * KEYS, first_head = blockIdx.x / key_tiles % head_tiles * HEADS;
    const u32 tile_row = blockIdx.x / key_tiles / head_tiles, row = shape.first_row + tile_row;
    const Keys keys = keys_of(rows, windows, counts, row, shape);
    if (first_key >= keys.total) return;
    const u32 turned = head_dim - shape.rope_dim;
    for (u32 i = thread; i < shape.rope_dim / 2; i += THREADS) phases[i] = sin_cos_own((float)keys.position * frequencies[i]);

    // Past the last key the last one is read again and its score dropped.
    const u32 own_key = thread % KEYS, own_group = thread / KEYS, j = min(first_key + own_key, keys.total - 1);
    const bool is_entry = j < keys.count;
    const u8* record = record_of(keys, j, records, ring, cache, table, selected + (u64)row * shape.selected_max, shape);
    const u32 own_head = thread % HEADS, own_part = thread / HEADS * 4 * OWN;
    const bool has_head = first_head + own_head < shape.heads;
    const float* own_query = q + ((u64)row * shape.heads + first_head + (has_head ? own_head : 0)) * head_dim;
    Packed packed;
    float4 query[OWN];
    const auto load = [&](u32 first) {
        // Beyond the last column some column is read again.
        packed = packed_columns(record, is_entry, min(first / 32 + own_group, head_dim / 32 - 1), head_dim);
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 c = first + own_part + 4 * i;
            query[i] = has_head && c < head_dim ? *(const float4*)(own_query + c) : zero_quad();
        }
    };
    const auto store = [&](u32 first, u32 buffer) {
        float* to = query_lines + (buffer * STEP + own_part) * HEADS + own_head;
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 c = first + own_part + 4 * i;
            const float4 quad = c + 4 > turned && c < head_dim ? turned_quad(query[i], c, turned, phases) : query[i];
            to[(4 * i) * HEADS] = quad.x;
            to[(4 * i + 1) * HEADS] = quad.y;
            to[(4 * i + 2) * HEADS] = quad.z;
            to[(4 * i + 3) * HEADS] = quad.w;
        }
        float* key_to = key_lines + (buffer * STEP + 32 * own_group) * KEYS + own_key;
        unpack(packed, is_entry, [&](u32 i, float4 quad) {
            key_to[(4 * i) * KEYS] = quad.x;
            key_to[(4 * i + 1) * KEYS] = quad.y;
            key_to[(4 * i + 2) * KEYS] = quad.z;
            key_to[(4 * i + 3) * KEYS] = quad.w;
        });
    };

    const Place place = place_of(thread);
    Sums<HQ, KQ> dots;
    dots.clear();
    load(0);
    __syncthreads();
    store(0, 0);
    __syncthreads();
    for (u32 first = 0, buffer = 0; first < head_dim; first += STEP, buffer ^= 1) {
        const bool goes_on = first + STEP < head_dim;
        if (goes_on) load(first + STEP);
        const float4* query_line = (const float4*)(query_lines + buffer * STEP * HEADS) + place.heads;
        const float4* key_line = (const float4*)(key_lines + buffer * STEP * KEYS) + place.others;
        const u32 steps = min(STEP, head_dim - first);
#pragma unroll 8
        for (u32 c = 0; c < steps; c++) {
            float4 a[HQ], b[KQ];
#pragma unroll
            for (u32 h = 0; h < HQ; h++) a[h] = query_line[c * (HEADS / 4) + 8 * h];
#pragma unroll
            for (u32 k = 0; k < KQ; k++) b[k] = key_line[c * (KEYS / 4) + 16 * k];
#pragma unroll
            for (u32 h = 0; h < HQ; h++) {
#pragma unroll
                for (u32 k = 0; k < KQ; k++) multiply(a[h], b[k], dots.quads[h][k]);
            }
        }
        if (goes_on) store(first + STEP, buffer ^ 1);
        __syncthreads();
    }
    float* out = scores + ((u64)tile_row * shape.stride + first_key) * line + first_head;
#pragma unroll
    for (u32 h = 0; h < HQ; h++) {
        const u32 head = 4 * (place.heads + 8 * h);
#pragma unroll
        for (u32 k = 0; k < 4 * KQ; k++) {
            const u32 key = 4 * (place.others + k / 4 * 16) + k % 4;
            if (first_head + head < line && first_key + key < keys.total) {
                float4 quad;
                quad.x = dots.quads[h][k / 4][0][k % 4] * shape.scale;
                quad.y = dots.quads[h][k / 4][1][k % 4] * shape.scale;
                quad.z = dots.quads[h][k / 4][2][k % 4] * shape.scale;
                quad.w = dots.quads[h][k / 4][3][k % 4] * shape.scale;
                *(float4*)(out + key * line + head) = quad;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
attention_scores_64_128(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                        const u8* cache, const u32* table, const u32* selected, const u32* counts, const float* frequencies,
                        float* scores, const Shape shape) {
    wait_for_inputs();
    score_keys<2, 2, 32>(q, rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, shape);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
attention_scores_32_64(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                       const u8* cache, const u32* table, const u32* selected, const u32* counts, const float* frequencies,
                       float* scores, const Shape shape) {
    wait_for_inputs();
    score_keys<1, 1, 64>(q, rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, shape);
}

// Scores become bf16(exp(score - most)), and the denominators are made. A lane has a head. Eight warps make the exponentials of
// a chunk of keys while the ninth adds those of the chunk before.
extern "C" __global__ void __launch_bounds__(288)
attention_softmax(const RowInfo* rows, const WindowInfo* windows, const u32* counts, const float* sinks, float* scores,
                  const Shape shape) {
    constexpr u32 MAKERS = 8, OWN = 8, CHUNK = MAKERS * OWN;
    __shared__ float maxima[MAKERS][32];
    __shared__ float exponentials[2][CHUNK][32];
    wait_for_inputs();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = line_of(shape);
    const u32 head_tiles = (shape.heads + 31) / 32, tile_row = blockIdx.x / head_tiles;
    const u32 head = blockIdx.x % head_tiles * 32 + lane;
    const u32 total = keys_of(rows, windows, counts, shape.first_row + tile_row, shape).total;
    const bool has_head = head < shape.heads;
    float* of_head = scores + (u64)tile_row * shape.stride * line + head;
    float most = -infinite();
    if (warp < MAKERS) {
        for (u32 first = warp; first < total; first += CHUNK) {
            float score[OWN];
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u32 j = first + i * MAKERS;
                score[i] = has_head && j < total ? of_head[(u64)j * line] : -infinite();
            }
#pragma unroll
            for (u32 i = 0; i < OWN; i++) most = max_second(score[i], most);
        }
        maxima[warp][lane] = most;
    }
    __syncthreads();
    // A maximum's order is free.
    for (u32 i = 0; i < MAKERS; i++) most = max_second(maxima[i][lane], most);
    float sum = 0.0f;
    for (u32 first = 0, buffer = 0; first < total + CHUNK; first += CHUNK, buffer ^= 1) {
        if (warp < MAKERS && first < total) {
            float score[OWN];
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u32 j = first + warp + i * MAKERS;
                score[i] = has_head && j < total ? of_head[(u64)j * line] : 0.0f;
            }
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                const u32 j = first + warp + i * MAKERS;
                const float e = exp_own(score[i] - most);
                exponentials[buffer][warp + i * MAKERS][lane] = e;
                if (has_head && j < total) of_head[(u64)j * line] = bf16_round(e);
            }
        }
        if (warp == MAKERS && first > 0) {
            const u32 here = min(CHUNK, total - (first - CHUNK));
#pragma unroll 16
            for (u32 j = 0; j < here; j++) sum = sum + exponentials[buffer ^ 1][j][lane];
        }
        __syncthreads();
    }
    if (warp == MAKERS && has_head) {
        scores[shape.sums_at + tile_row * line + head] = sum + exp_own(sinks[head] - most);
    }
}

// HQ by CQ quads a thread; STEP keys at a time, of which two steps lie in dynamic shared memory, the keys' addresses behind them.
template <u32 HQ, u32 CQ, u32 STEP>
__device__ __forceinline__ void mix_keys(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                                         const u8* cache, const u32* table, const u32* selected, const u32* counts,
                                         const float* frequencies, const float* scores, float* out, const Shape& shape) {
    constexpr u32 HEADS = 32 * HQ, COLUMNS = 64 * CQ, GROUPS = COLUMNS / 32, OWN = HEADS * STEP / THREADS / 4;
    static_assert(STEP * GROUPS == THREADS, "a thread unpacks thirty-two columns of one key a step");
    extern __shared__ float4 room[];
    float* weight_lines = (float*)room;                   // [2][STEP][HEADS]
    float* key_lines = weight_lines + 2 * STEP * HEADS;   // [2][STEP][COLUMNS]
    const u8** key_records = (const u8**)(key_lines + 2 * STEP * COLUMNS);
    const u32 thread = threadIdx.x, head_dim = shape.head_dim, line = line_of(shape);
    const u32 column_tiles = (head_dim + COLUMNS - 1) / COLUMNS, head_tiles = (shape.heads + HEADS - 1) / HEADS;
    const u32 first_column = blockIdx.x % column_tiles * COLUMNS;
    const u32 first_head = blockIdx.x / column_tiles % head_tiles * HEADS;
    const u32 tile_row = blockIdx.x / column_tiles / head_tiles, row = shape.first_row + tile_row;
    const Keys keys = keys_of(rows, windows, counts, row, shape);
    for (u32 j = thread; j < keys.total; j += THREADS) {
        key_records[j] = record_of(keys, j, records, ring, cache, table, selected + (u64)row * shape.selected_max, shape);
    }
    __syncthreads();

    const u32 own_key = thread / GROUPS, own_group = thread % GROUPS, turn = thread % 8;
    const u32 group = min(first_column / 32 + own_group, head_dim / 32 - 1);
    const float* of_heads = scores + (u64)tile_row * shape.stride * line + first_head;
    Packed packed;
    bool is_entry = false;
    const auto load = [&](u32 first) {
        // Beyond the last key it is read again.
        const u32 j = min(first + own_key, keys.total - 1);
        is_entry = j < keys.count;
        packed = packed_columns(key_records[j], is_entry, group, head_dim);
    };
    const auto copy = [&](u32 first, u32 buffer) {
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 at = i * THREADS + thread, key = at / (HEADS / 4), head = at % (HEADS / 4) * 4;
            float4* to = (float4*)(weight_lines + (buffer * STEP + key) * HEADS + head);
            if (first + key < keys.total && first_head + head < line) {
                copy_async_16(to, (const float4*)(of_heads + (u64)(first + key) * line + head));
            } else {
                *to = zero_quad();
            }
        }
        end_copy_group();
    };
    // A key's columns lie in the order that eight neighbouring threads' quads meet every bank once.
    const auto store = [&](u32 buffer) {
        float4* to = (float4*)(key_lines + (buffer * STEP + own_key) * COLUMNS + 32 * own_group);
        unpack(packed, is_entry, [&](u32 i, float4 quad) { to[i ^ turn] = quad; });
    };

    const Place place = place_of(thread);
    Sums<HQ, CQ> mixed;
    mixed.clear();
    load(0);
    copy(0, 0);
    store(0);
    wait_for_copy_groups<0>();
    __syncthreads();
    for (u32 first = 0, buffer = 0; first < keys.total; first += STEP, buffer ^= 1) {
        const bool goes_on = first + STEP < keys.total;
        if (goes_on) {
            load(first + STEP);
            copy(first + STEP, buffer ^ 1);
        }
        const float4* weight_line = (const float4*)(weight_lines + buffer * STEP * HEADS) + place.heads;
        const float4* key_line = (const float4*)(key_lines + buffer * STEP * COLUMNS);
        // A step beyond the last key would turn a zero's sign.
        const u32 steps = min(STEP, keys.total - first);
#pragma unroll 8
        for (u32 k = 0; k < steps; k++) {
            float4 a[HQ], b[CQ];
#pragma unroll
            for (u32 h = 0; h < HQ; h++) a[h] = weight_line[k * (HEADS / 4) + 8 * h];
#pragma unroll
            for (u32 n = 0; n < CQ; n++) {
                const u32 quad = place.others + 16 * n;
                b[n] = key_line[k * (COLUMNS / 4) + (quad ^ (k * GROUPS + quad / 8) % 8)];
            }
#pragma unroll
            for (u32 h = 0; h < HQ; h++) {
#pragma unroll
                for (u32 n = 0; n < CQ; n++) multiply(a[h], b[n], mixed.quads[h][n]);
            }
        }
        if (goes_on) store(buffer ^ 1);
        wait_for_copy_groups<0>();
        __syncthreads();
    }

    const u32 turned = head_dim - shape.rope_dim;
    const float* sums = scores + shape.sums_at + tile_row * line + first_head;
    float* to = out + ((u64)row * shape.heads + first_head) * head_dim;
#pragma unroll
    for (u32 n = 0; n < CQ; n++) {
        const u32 c = first_column + 4 * (place.others + 16 * n);
        const bool turns = c + 4 > turned && c < head_dim;
        float2 phases[2];
        phases[0].x = phases[1].x = 0.0f;
        phases[0].y = phases[1].y = 1.0f;
        if (turns && c >= turned) phases[0] = sin_cos_own((float)keys.position * frequencies[(c - turned) / 2]);
        if (turns) phases[1] = sin_cos_own((float)keys.position * frequencies[(c + 2 - turned) / 2]);
#pragma unroll
        for (u32 h = 0; h < 4 * HQ; h++) {
            const u32 head = 4 * (place.heads + h / 4 * 8) + h % 4;
            if (first_head + head >= shape.heads || c >= head_dim) continue;
            const float sum = sums[head];
            float4 quad;
            quad.x = bf16_round(__fdiv_rn(mixed.quads[h / 4][n][h % 4][0], sum));
            quad.y = bf16_round(__fdiv_rn(mixed.quads[h / 4][n][h % 4][1], sum));
            quad.z = bf16_round(__fdiv_rn(mixed.quads[h / 4][n][h % 4][2], sum));
            quad.w = bf16_round(__fdiv_rn(mixed.quads[h / 4][n][h % 4][3], sum));
            if (turns && c >= turned) quad = with_first_pair(quad, turn_pair_back(quad.x, quad.y, phases[0]));
            if (turns) quad = with_second_pair(quad, turn_pair_back(quad.z, quad.w, phases[1]));
            *(float4*)(to + (u64)head * head_dim + c) = quad;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
attention_mix_64_128(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring, const u8* cache,
                     const u32* table, const u32* selected, const u32* counts, const float* frequencies, const float* scores,
                     float* out, const Shape shape) {
    wait_for_inputs();
    mix_keys<2, 2, 32>(rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, out, shape);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
attention_mix_32_64(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring, const u8* cache,
                    const u32* table, const u32* selected, const u32* counts, const float* frequencies, const float* scores,
                    float* out, const Shape shape) {
    wait_for_inputs();
    mix_keys<1, 1, 64>(rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, out, shape);
}

// ---- few rows

constexpr u32 FEW_HEADS = 16, FEW_KEYS = 20, FEW_SCORERS = 320;

// Where the bytes of COUNT keys are, as record_of says: each step's loads of all of them are on their way at once.
template <u32 COUNT>
__device__ __forceinline__ void records_of(const Keys& keys, const u32 (&j)[COUNT], const u8* records, const u8* ring,
                                           const u8* cache, const u32* table, const u32* of_row, const Shape& shape,
                                           const u8* (&out)[COUNT]) {
    const u32 bytes = shape.head_dim + shape.head_dim / 32, entry_bytes = shape.head_dim / 2 + shape.head_dim / 16;
    u32 entry[COUNT], page[COUNT];
    if (keys.count > 0) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) entry[i] = __ldg(of_row + min(j[i], keys.count - 1));
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) page[i] = __ldg(table + keys.slot * shape.pages_per_slot + entry[i] / shape.entries_per_page);
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        const u32 position = keys.first + (max(j[i], keys.count) - keys.count);
        out[i] = position >= keys.window.start
            ? records + (u64)(keys.window.first_row + (position - keys.window.start)) * bytes
            : ring + ((u64)keys.window.slot * shape.ring_len + position % shape.ring_len) * bytes;
        if (j[i] < keys.count) {
            out[i] = cache + ((u64)page[i] * shape.entries_per_page + entry[i] % shape.entries_per_page) * entry_bytes;
        }
    }
}

// Four steps of four chains: two items of each of two kinds.
__device__ __forceinline__ void multiply_two(const float4 (&a)[2], const float4 (&b)[2], float (&sums)[2][2]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 x = i / 2, y = i % 2;
        sums[x][y] = fma_own(a[x].x, b[y].x, sums[x][y]);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 x = i / 2, y = i % 2;
        sums[x][y] = fma_own(a[x].y, b[y].y, sums[x][y]);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 x = i / 2, y = i % 2;
        sums[x][y] = fma_own(a[x].z, b[y].z, sums[x][y]);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 x = i / 2, y = i % 2;
        sums[x][y] = fma_own(a[x].w, b[y].w, sums[x][y]);
    }
}

// `quads` times four steps of four chains: rows of `a` that are `far_a` quads apart, by rows of `b`. Four quads are fetched while
// the four before them are multiplied.
__device__ __forceinline__ void multiply_rows(const float4* a, u32 far_a, const float4* b, u32 far_b, u32 quads,
                                              float (&sums)[2][2]) {
    constexpr u32 AHEAD = 4;
    float4 left[AHEAD][2], right[AHEAD][2];
    const auto fetch = [&](u32 first, float4 (&x)[AHEAD][2], float4 (&y)[AHEAD][2]) {
        const float4* const from[4] = {a + first, a + far_a + first, b + first, b + far_b + first};
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            x[i][0] = from[0][i];
            x[i][1] = from[1][i];
            y[i][0] = from[2][i];
            y[i][1] = from[3][i];
        }
    };
    const u32 whole = quads / AHEAD * AHEAD;
    if (whole > 0) fetch(0, left, right);
#pragma unroll 2
    for (u32 first = 0; first < whole; first += AHEAD) {
        float4 next_left[AHEAD][2], next_right[AHEAD][2];
        // The last time, what was fetched last is fetched again.
        fetch(min(first + AHEAD, whole - AHEAD), next_left, next_right);
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) multiply_two(left[i], right[i], sums);
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
#pragma unroll
            for (u32 side = 0; side < 2; side++) {
                left[i][side] = next_left[i][side];
                right[i][side] = next_right[i][side];
            }
        }
    }
    for (u32 i = whole; i < quads; i++) {
        float4 x[2], y[2];
        x[0] = a[i];
        x[1] = a[i + far_a];
        y[0] = b[i];
        y[1] = b[i + far_b];
        multiply_two(x, y, sums);
    }
}

extern "C" __global__ void __launch_bounds__(FEW_SCORERS)
attention_scores_few(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                     const u8* cache, const u32* table, const u32* selected, const u32* counts, const float* frequencies,
                     float* scores, const Shape shape) {
    extern __shared__ float4 few_room[];
    wait_for_inputs();
    const u32 thread = threadIdx.x, head_dim = shape.head_dim, pitch = head_dim + 4;
    float* queries = (float*)few_room;                     // [FEW_HEADS][pitch]
    float* key_rows = queries + FEW_HEADS * pitch;     // [FEW_KEYS][pitch]
    const u32 key_tiles = (shape.stride + FEW_KEYS - 1) / FEW_KEYS, head_tiles = (shape.heads + FEW_HEADS - 1) / FEW_HEADS;
    const u32 first_key = blockIdx.x % key_tiles * FEW_KEYS, first_head = blockIdx.x / key_tiles % head_tiles * FEW_HEADS;
    const u32 row = blockIdx.x / key_tiles / head_tiles, heads = min(shape.heads - first_head, FEW_HEADS);
    const float* of_heads = q + ((u64)row * shape.heads + first_head) * head_dim;
    const u32 turned = head_dim - shape.rope_dim, quads = head_dim / 4;
    // Columns that turn come by way of registers below.
    for (u32 i = thread; i < FEW_HEADS * quads; i += FEW_SCORERS) {
        const u32 head = i / quads, c = i % quads * 4;
        float4* to = (float4*)(queries + head * pitch + c);
        if (head >= heads) {
            *to = zero_quad();
        } else if (c + 4 <= turned) {
            copy_async_16(to, (const float4*)(of_heads + (u64)head * head_dim + c));
        }
    }
    end_copy_group();
    const Keys keys = keys_of(rows, windows, counts, row, shape);
    const u32* of_row = selected + (u64)row * shape.selected_max;
    if (first_key >= keys.total) {
        wait_for_copy_groups<0>();
        return;
    }
    for (u32 unit = thread; unit < FEW_KEYS * (head_dim / 32); unit += FEW_SCORERS) {
        // Past the last key the last one is read again.
        const u32 j[1] = {min(first_key + unit % FEW_KEYS, keys.total - 1)};
        const u8* record[1];
        records_of(keys, j, records, ring, cache, table, of_row, shape, record);
        const Packed packed = packed_columns(record[0], j[0] < keys.count, unit / FEW_KEYS, head_dim);
        float4* to = (float4*)(key_rows + unit % FEW_KEYS * pitch + unit / FEW_KEYS * 32);
        unpack(packed, j[0] < keys.count, [&](u32 quad, float4 values) { to[quad] = values; });
    }
    const u32 first_turned = turned / 4 * 4, turned_quads = (head_dim - first_turned) / 4;
    for (u32 i = thread; i < heads * turned_quads; i += FEW_SCORERS) {
        const u32 head = i / turned_quads, c = first_turned + i % turned_quads * 4;
        float4 quad = *(const float4*)(of_heads + (u64)head * head_dim + c);
        const auto phase = [&](u32 column) { return sin_cos_own((float)keys.position * frequencies[(column - turned) / 2]); };
        if (c >= turned) quad = with_first_pair(quad, turn_pair(quad.x, quad.y, phase(c)));
        quad = with_second_pair(quad, turn_pair(quad.z, quad.w, phase(c + 2)));
        *(float4*)(queries + head * pitch + c) = quad;
    }
    wait_for_copy_groups<0>();
    __syncthreads();

    // Two heads, eight apart, by two keys, ten apart: half of the threads.
    const u32 lane = thread % 32, own_head = lane / 2 % 8, own_key = thread / 32 * 4 + lane / 16 * 2 + lane % 2;
    if (own_key >= FEW_KEYS / 2) return;
    const float4* a = (const float4*)(queries + own_head * pitch);
    const float4* b = (const float4*)(key_rows + own_key * pitch);
    const u32 far_head = 8 * pitch / 4, far_key = FEW_KEYS / 2 * pitch / 4;
    float dots[2][2];
    dots[0][0] = dots[0][1] = dots[1][0] = dots[1][1] = 0.0f;
    multiply_rows(a, far_head, b, far_key, quads, dots);
    float* out = scores + ((u64)row * shape.heads + first_head) * shape.stride + first_key;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 head = own_head + i / 2 * 8, key = own_key + i % 2 * (FEW_KEYS / 2);
        if (head < heads && first_key + key < keys.total) {
            out[(u64)head * shape.stride + key] = dots[i / 2][i % 2] * shape.scale;
        }
    }
}

constexpr u32 MIXED_HEADS = 8, MIXED_COLUMNS = 32, MIXERS = 256;

// The softmax of a warp's head: exponentials, unrounded and as bf16, and the largest score.
__device__ __forceinline__ float exponentials_of(const float* of_head, u32 total, u32 lane, float* exponentials, float* weights) {
    // Several keys of a lane at a time, so that none waits for memory alone.
    constexpr u32 AT_ONCE = 20;
    float most = -infinite();
    for (u32 first = lane; first < total; first += 32 * AT_ONCE) {
        float score[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) score[i] = first + 32 * i < total ? of_head[first + 32 * i] : -infinite();
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            if (first + 32 * i < total) exponentials[first + 32 * i] = score[i];
            most = max_second(score[i], most);
        }
    }
    // A maximum's order is free.
    for (u32 step = 16; step > 0; step /= 2) most = max_second(__shfl_xor_sync(WARP, most, step), most);
#pragma unroll 4
    for (u32 j = lane; j < total; j += 32) {
        const float e = exp_own(exponentials[j] - most);
        exponentials[j] = e;
        weights[j] = bf16_round(e);
    }
    return most;
}

extern "C" __global__ void __launch_bounds__(MIXERS)
attention_mix_few(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring, const u8* cache,
                  const u32* table, const u32* selected, const u32* counts, const float* sinks, const float* frequencies,
                  const float* scores, float* out, const Shape shape) {
    extern __shared__ float4 few_room[];
    __shared__ float maxima[MIXED_HEADS];
    __shared__ float sums[MIXED_HEADS];
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, head_dim = shape.head_dim;
    const u32 pitch = (shape.stride + 3) / 4 * 4 + 4;
    float* values = (float*)few_room;                              // [MIXED_COLUMNS][pitch]
    float* weights = values + MIXED_COLUMNS * pitch;           // [MIXED_HEADS][pitch]
    float* exponentials = weights + MIXED_HEADS * pitch;       // [MIXED_HEADS][pitch]
    const u32 column_tiles = head_dim / MIXED_COLUMNS, head_tiles = (shape.heads + MIXED_HEADS - 1) / MIXED_HEADS;
    const u32 first_column = blockIdx.x % column_tiles * MIXED_COLUMNS;
    const u32 first_head = blockIdx.x / column_tiles % head_tiles * MIXED_HEADS;
    const u32 row = blockIdx.x / column_tiles / head_tiles, heads = min(shape.heads - first_head, MIXED_HEADS);
    // This part of the work touches nothing of the launch before, the scores'. What it reads is older: the scores have begun,
    // so all that they waited for is complete.
    const Keys keys = keys_of(rows, windows, counts, row, shape);
    const u32* of_row = selected + (u64)row * shape.selected_max;
    constexpr u32 OWN = 3;
    for (u32 first = thread; first < keys.total; first += OWN * MIXERS) {
        Packed packed[OWN];
        u32 js[OWN];
        const u8* places[OWN];
#pragma unroll
        for (u32 i = 0; i < OWN; i++) js[i] = min(first + i * MIXERS, keys.total - 1);
        records_of(keys, js, records, ring, cache, table, of_row, shape, places);
#pragma unroll
        for (u32 i = 0; i < OWN; i++) packed[i] = packed_columns(places[i], js[i] < keys.count, first_column / 32, head_dim);
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 j = first + i * MIXERS;
            if (j >= keys.total) continue;
            unpack(packed[i], j < keys.count, [&](u32 quad, float4 value) {
                values[(4 * quad) * pitch + j] = value.x;
                values[(4 * quad + 1) * pitch + j] = value.y;
                values[(4 * quad + 2) * pitch + j] = value.z;
                values[(4 * quad + 3) * pitch + j] = value.w;
            });
        }
    }
    wait_for_inputs();
    if (warp < heads) {
        const float* of_head = scores + ((u64)row * shape.heads + first_head + warp) * shape.stride;
        const float most = exponentials_of(of_head, keys.total, lane, exponentials + warp * pitch, weights + warp * pitch);
        if (lane == 0) maxima[warp] = most;
    }
    __syncthreads();

    // Two heads, four apart, by two columns, sixteen apart, in the first two warps; the third one adds the denominators.
    const u32 own_head = lane / 16 * 2 + lane % 2, own_column = warp * 8 + lane / 2 % 8, total = keys.total;
    float mixed[2][2];
    mixed[0][0] = mixed[0][1] = mixed[1][0] = mixed[1][1] = 0.0f;
    if (warp < 2) {
        const float* a = weights + own_head * pitch;
        const float* b = values + own_column * pitch;
        const u32 far_head = 4 * pitch, far_column = 16 * pitch;
        multiply_rows((const float4*)a, far_head / 4, (const float4*)b, far_column / 4, total / 4, mixed);
        for (u32 j = total / 4 * 4; j < total; j++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                mixed[i / 2][i % 2] =
                    fma_own(a[i / 2 * far_head + j], b[i % 2 * far_column + j], mixed[i / 2][i % 2]);
            }
        }
    } else if (warp == 2 && lane < heads) {
        const float* e = exponentials + lane * pitch;
        float sum = 0.0f;
#pragma unroll 8
        for (u32 quad = 0; quad < total / 4; quad++) {
            const float4 four = ((const float4*)e)[quad];
            sum = sum + four.x;
            sum = sum + four.y;
            sum = sum + four.z;
            sum = sum + four.w;
        }
        for (u32 j = total / 4 * 4; j < total; j++) sum = sum + e[j];
        sums[lane] = sum + exp_own(sinks[first_head + lane] - maxima[lane]);
    }
    __syncthreads();
    if (warp >= 2) return;
    const u32 turned = head_dim - shape.rope_dim;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 head = own_head + i / 2 * 4, c = first_column + own_column + i % 2 * 16;
        const float value = bf16_round(__fdiv_rn(mixed[i / 2][i % 2], head < heads ? sums[head] : 1.0f));
        // The other column of the pair is two lanes away.
        const float partner = __shfl_xor_sync(WARP, value, 2);
        float2 pair;
        pair.x = (c & 1u) == 0 ? value : partner;
        pair.y = (c & 1u) == 0 ? partner : value;
        if (c >= turned) {
            pair = turn_pair_back(pair.x, pair.y, sin_cos_own((float)keys.position * frequencies[(c - turned) / 2]));
        }
        if (head < heads) {
            out[((u64)row * shape.heads + first_head + head) * head_dim + c] = (c & 1u) == 0 ? pair.x : pair.y;
        }
    }
}
