// attention: every head of a row over its selected compressed entries and its window, one key being also the value; formulas,
// roundings and the order of keys are in mod.rs. Three launches for a tile of rows: scores, softmax, and the mix of the keys.
// in   q [rows, heads, head_dim] f32, bf16 values, not yet rotated   rows, windows as tf_kernels::rows
//      records, ring: window entries of kv_store   cache: pages of kv_compress   table [slots, pages_per_slot] u32
//      selected [rows, selected_max] u32 ascending, counts [rows] u32   sinks [heads]   frequencies [rope_dim / 2]
// work scores [tile_rows, heads, stride] f32, stride the keys of a row at most; from sums_at on [tile_rows, heads] f32
// out  out [rows, heads, head_dim] f32, bf16 values
// grid attention_scores_H_K: 128 threads for H heads of a row and K of its keys; attention_softmax: a warp a head of a row,
//      dynamic shared memory: stride floats a warp; attention_mix_H_K: 128 threads for H heads of a row and K columns, dynamic
//      shared memory: 8 bytes a key
// sum  a dot is one chain of fused multiply-adds over the columns; the denominator adds the unrounded exponentials in key
//      order, the sink last; an output column is one chain in key order. No sum is split, so no size here changes a bit
// max  head_dim 1024, rope_dim 128
#include "prelude.cuh"

struct Shape {
    u32 rows, heads, head_dim, rope_dim, window, ring_len, selected_max, is_block, pages_per_slot, entries_per_page;
    float scale;
    u32 first_row, stride;
    u32 sums_at;  // where in the scratch the denominators start, in floats
};

constexpr u32 THREADS = 128, WARPS = THREADS / 32;

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

// The bytes of column c of a key, its code low and its scale high: of a compressed entry, or of a window entry. Apart from
// their meaning, so that many are on their way at once.
__device__ __forceinline__ u32 key_bytes(const u8* record, bool is_entry, u32 c, u32 head_dim) {
    const u32 code_at = is_entry ? 16 * (c / 32) + c % 16 : c;
    const u32 scale_at = is_entry ? head_dim / 2 + c / 16 : head_dim + c / 32;
    return __ldg(record + code_at) | (u32)__ldg(record + scale_at) << 8;
}

// What they mean; exact in bf16. Without a branch: lanes have both kinds.
__device__ __forceinline__ float key_value(u32 bytes, bool is_entry, u32 c) {
    const u32 code = bytes & 0xffu, scale = bytes >> 8, nibble = code >> (c % 32 < 16 ? 0 : 4);
    // Fields of codes as float32's, whose exponents are then too low by 126 (E2M1), or by 120 (E4M3).
    const u32 fine = (nibble & 7u) << 22 | (nibble & 8u) << 28, coarse = (code & 0x7fu) << 20 | (code & 0x80u) << 24;
    const u32 scale_fine = (scale & 0x7fu) << 20 | (scale & 0x80u) << 24, scale_power = max(scale << 23, 0x00400000u);
    const float value = from_bits(is_entry ? fine : coarse) * from_bits(is_entry ? 253u << 23 : 247u << 23);
    const float factor = from_bits(is_entry ? scale_fine : scale_power) * from_bits(is_entry ? 247u << 23 : 127u << 23);
    const u32 bad = is_entry ? (scale & 0x7fu) == 0x7fu : scale == 0xffu || (code & 0x7fu) == 0x7fu;
    return bad != 0 ? not_a_number() : value * factor;
}

// Lines of ITEMS floats (heads or keys) for STEP columns: what a step of the chains reads lies side by side. A thread has a
// column of four items at a time, so that both the load of a column's items and their store meet every bank once.
template <u32 ITEMS, u32 STEP>
struct Lines {
    static constexpr u32 QUADS = ITEMS / 4, LINE = QUADS + 1, PARTS = STEP / 32;
    static constexpr u32 OWN = (QUADS + WARPS - 1) / WARPS * PARTS;
    float4 lines[STEP][LINE];

    // Calls `body(i, first_item, column)` for each of this thread's quads, i counting them.
    template <class Body>
    static __device__ __forceinline__ void each(Body body) {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 quad = i / PARTS * WARPS + warp;
            if (QUADS % WARPS == 0 || quad < QUADS) body(i, 4 * quad, i % PARTS * 32 + lane);
        }
    }

    // As `value(item, column)` says.
    template <class Quad, class Value>
    static __device__ __forceinline__ void load(Quad (&next)[OWN], Value value) {
        each([&](u32 i, u32 item, u32 column) {
            next[i].x = value(item, column);
            next[i].y = value(item + 1, column);
            next[i].z = value(item + 2, column);
            next[i].w = value(item + 3, column);
        });
    }

    __device__ __forceinline__ void store(const float4 (&next)[OWN]) {
        each([&](u32 i, u32 item, u32 column) { lines[column][item / 4] = next[i]; });
    }
};

// What a block computes: HEADS by KEYS (or columns), a thread four heads by N.
template <u32 HEADS_OF, u32 KEYS_OF, u32 N_OF, u32 STEP_OF>
struct Tile {
    static constexpr u32 HEADS = HEADS_OF, KEYS = KEYS_OF, N = N_OF, STEP = STEP_OF;
    static_assert(HEADS / 4 * (KEYS / N) == THREADS, "a thread each");
};
typedef Tile<32, 16, 1, 128> Fine;
typedef Tile<64, 16, 2, 64> Middle;
typedef Tile<64, 32, 4, 32> Coarse;

template <class T>
__device__ __forceinline__ void score_keys(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records,
                                           const u8* ring, const u8* cache, const u32* table, const u32* selected,
                                           const u32* counts, const float* frequencies, float* scores, const Shape& shape) {
    constexpr u32 HEADS = T::HEADS, KEYS = T::KEYS, N = T::N, STEP = T::STEP;
    typedef Lines<HEADS, STEP> Queries;
    typedef Lines<KEYS, STEP> KeyLines;
    __shared__ Queries queries;
    __shared__ KeyLines keys_here;
    __shared__ float2 phases[64];
    __shared__ const u8* key_records[KEYS];
    const u32 thread = threadIdx.x, head_dim = shape.head_dim;
    const u32 key_tiles = (shape.stride + KEYS - 1) / KEYS, head_tiles = (shape.heads + HEADS - 1) / HEADS;
    const u32 first_key = blockIdx.x % key_tiles * KEYS, first_head = blockIdx.x / key_tiles % head_tiles * HEADS;
    const u32 tile_row = blockIdx.x / key_tiles / head_tiles, row = shape.first_row + tile_row;
    const Keys keys = keys_of(rows, windows, counts, row, shape);
    if (first_key >= keys.total) return;
    const u32 turned = head_dim - shape.rope_dim, heads = min(shape.heads - first_head, HEADS);
    for (u32 i = thread; i < shape.rope_dim / 2; i += THREADS) phases[i] = sin_cos_own((float)keys.position * frequencies[i]);
    if (thread < KEYS) {
        // Past the last key the last one is read again and its score dropped.
        const u32 j = min(first_key + thread, keys.total - 1);
        key_records[thread] = record_of(keys, j, records, ring, cache, table, selected + (u64)row * shape.selected_max, shape);
    }
    __syncthreads();

    const float* of_heads = q + ((u64)row * shape.heads + first_head) * head_dim;
    float4 next_query[Queries::OWN];
    uint4 next_key[KeyLines::OWN];
    const auto load = [&](u32 first) {
        Queries::load(next_query, [&](u32 head, u32 column) {
            return head < heads && first + column < head_dim ? of_heads[(u64)head * head_dim + first + column] : 0.0f;
        });
        KeyLines::load(next_key, [&](u32 key, u32 column) {
            // Beyond the last column some column is read again.
            const u32 c = min(first + column, head_dim - 1);
            return key_bytes(key_records[key], first_key + key < keys.count, c, head_dim);
        });
    };
    // The rotation happens on the way into shared memory: a lane's partner holds the other column of its pair.
    const auto store = [&](u32 first) {
        Queries::each([&](u32 i, u32, u32 column) {
            const u32 c = first + column;
            const bool turns = c >= turned && c < head_dim;
            float2 phase;
            phase.x = phase.y = 0.0f;
            if (turns) phase = phases[(c - turned) / 2];
            const float sine = (c & 1) == 0 ? -phase.x : phase.x;
            const auto turn = [&](float value) {
                const float partner = __shfl_xor_sync(WARP, value, 1);
                return turns ? bf16_round(value * phase.y + partner * sine) : value;
            };
            next_query[i].x = turn(next_query[i].x);
            next_query[i].y = turn(next_query[i].y);
            next_query[i].z = turn(next_query[i].z);
            next_query[i].w = turn(next_query[i].w);
        });
        queries.store(next_query);
        float4 values[KeyLines::OWN];
        KeyLines::each([&](u32 i, u32 key, u32 column) {
            const auto value = [&](u32 bytes, u32 k) { return key_value(bytes, first_key + k < keys.count, first + column); };
            values[i].x = value(next_key[i].x, key);
            values[i].y = value(next_key[i].y, key + 1);
            values[i].z = value(next_key[i].z, key + 2);
            values[i].w = value(next_key[i].w, key + 3);
        });
        keys_here.store(values);
    };

    // A thread's four heads and N keys.
    const u32 own_head = thread / (KEYS / N), own_key = thread % (KEYS / N) * N;
    float dots[4][N];
#pragma unroll
    for (u32 h = 0; h < 4; h++) {
#pragma unroll
        for (u32 k = 0; k < N; k++) dots[h][k] = 0.0f;
    }
    load(0);
    for (u32 first = 0; first < head_dim; first += STEP) {
        store(first);
        __syncthreads();
        if (first + STEP < head_dim) load(first + STEP);
        const u32 steps = min(STEP, head_dim - first);
#pragma unroll 8
        for (u32 c = 0; c < steps; c++) {
            const float4 query = queries.lines[c][own_head];
            const float* key = (const float*)keys_here.lines[c] + own_key;
#pragma unroll
            for (u32 k = 0; k < N; k++) {
                dots[0][k] = fma_own(key[k], query.x, dots[0][k]);
                dots[1][k] = fma_own(key[k], query.y, dots[1][k]);
                dots[2][k] = fma_own(key[k], query.z, dots[2][k]);
                dots[3][k] = fma_own(key[k], query.w, dots[3][k]);
            }
        }
        __syncthreads();
    }
    float* out = scores + ((u64)tile_row * shape.heads + first_head) * shape.stride + first_key;
#pragma unroll
    for (u32 h = 0; h < 4; h++) {
        const u32 head = 4 * own_head + h;
#pragma unroll
        for (u32 k = 0; k < N; k++) {
            if (head < heads && first_key + own_key + k < keys.total) {
                out[(u64)head * shape.stride + own_key + k] = dots[h][k] * shape.scale;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
attention_scores_32_16(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                       const u8* cache, const u32* table, const u32* selected, const u32* counts, const float* frequencies,
                       float* scores, const Shape shape) {
    wait_for_inputs();
    score_keys<Fine>(q, rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, shape);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
attention_scores_64_16(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                       const u8* cache, const u32* table, const u32* selected, const u32* counts, const float* frequencies,
                       float* scores, const Shape shape) {
    wait_for_inputs();
    score_keys<Middle>(q, rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, shape);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
attention_scores_64_32(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                       const u8* cache, const u32* table, const u32* selected, const u32* counts, const float* frequencies,
                       float* scores, const Shape shape) {
    wait_for_inputs();
    score_keys<Coarse>(q, rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, shape);
}

// Scores become bf16(exp(score - most)), and the denominators are made.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_softmax(const RowInfo* rows, const WindowInfo* windows, const u32* counts, const float* sinks, float* scores,
                  const Shape shape) {
    extern __shared__ float exponentials[];
    wait_for_inputs();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, item = blockIdx.x * (blockDim.x / 32) + warp;
    const u32 tile_row = item / shape.heads, head = item % shape.heads;
    if (tile_row >= shape.rows) return;
    const u32 total = keys_of(rows, windows, counts, shape.first_row + tile_row, shape).total;
    float* of_head = scores + (u64)item * shape.stride;
    float* values = exponentials + warp * shape.stride;
    // Several keys of a lane at a time, so that none waits for memory alone.
    constexpr u32 AT_ONCE = 8;
    float most = -infinite();
    for (u32 first = lane; first < total; first += 32 * AT_ONCE) {
        float score[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) score[i] = first + 32 * i < total ? of_head[first + 32 * i] : -infinite();
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            if (first + 32 * i < total) values[first + 32 * i] = score[i];
            most = max_second(score[i], most);
        }
    }
    // A maximum's order is free.
    for (u32 step = 16; step > 0; step /= 2) most = max_second(__shfl_xor_sync(WARP, most, step), most);
    for (u32 first = lane; first < total; first += 32 * AT_ONCE) {
        float score[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) score[i] = first + 32 * i < total ? values[first + 32 * i] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            score[i] = exp_own(score[i] - most);
            if (first + 32 * i < total) {
                values[first + 32 * i] = score[i];
                of_head[first + 32 * i] = bf16_round(score[i]);
            }
        }
    }
    __syncwarp();
    constexpr u32 STEPS = 16;
    float sum = 0.0f;
    u32 j = 0;
    for (; j + STEPS <= total; j += STEPS) {
        float value[STEPS];
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) value[i] = values[j + i];
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) sum = sum + value[i];
    }
    for (; j < total; j++) sum = sum + values[j];
    if (lane == 0) scores[shape.sums_at + item] = sum + exp_own(sinks[head] - most);
}

template <class T>
__device__ __forceinline__ void mix_keys(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                                         const u8* cache, const u32* table, const u32* selected, const u32* counts,
                                         const float* frequencies, const float* scores, float* out, const Shape& shape) {
    constexpr u32 HEADS = T::HEADS, COLUMNS = T::KEYS, N = T::N, STEP = T::STEP;
    constexpr u32 LINE = COLUMNS + 4, OWN_KEYS = COLUMNS * STEP / THREADS;
    typedef Lines<HEADS, STEP> Weights;
    extern __shared__ const u8* key_records[];
    __shared__ Weights weights;
    __shared__ float4 key_lines[STEP][LINE / 4];
    const u32 thread = threadIdx.x, head_dim = shape.head_dim;
    const u32 column_tiles = head_dim / COLUMNS, head_tiles = (shape.heads + HEADS - 1) / HEADS;
    const u32 first_column = blockIdx.x % column_tiles * COLUMNS;
    const u32 first_head = blockIdx.x / column_tiles % head_tiles * HEADS;
    const u32 tile_row = blockIdx.x / column_tiles / head_tiles, row = shape.first_row + tile_row;
    const Keys keys = keys_of(rows, windows, counts, row, shape);
    const u32 heads = min(shape.heads - first_head, HEADS);
    for (u32 j = thread; j < keys.total; j += THREADS) {
        key_records[j] = record_of(keys, j, records, ring, cache, table, selected + (u64)row * shape.selected_max, shape);
    }
    __syncthreads();

    const float* of_heads = scores + ((u64)tile_row * shape.heads + first_head) * shape.stride;
    float4 next_weight[Weights::OWN];
    u32 next_key[OWN_KEYS];
    const auto load = [&](u32 first) {
        Weights::load(next_weight, [&](u32 head, u32 key) {
            return head < heads && first + key < keys.total ? of_heads[(u64)head * shape.stride + first + key] : 0.0f;
        });
#pragma unroll
        for (u32 i = 0; i < OWN_KEYS; i++) {
            // Beyond the last key it is read again.
            const u32 at = i * THREADS + thread, j = min(first + at / COLUMNS, keys.total - 1);
            next_key[i] = key_bytes(key_records[j], j < keys.count, first_column + at % COLUMNS, head_dim);
        }
    };
    const auto store = [&](u32 first) {
        weights.store(next_weight);
#pragma unroll
        for (u32 i = 0; i < OWN_KEYS; i++) {
            const u32 at = i * THREADS + thread;
            const bool is_entry = min(first + at / COLUMNS, keys.total - 1) < keys.count;
            ((float*)key_lines[at / COLUMNS])[at % COLUMNS] = key_value(next_key[i], is_entry, first_column + at % COLUMNS);
        }
    };

    // A thread's four heads and N columns.
    const u32 own_head = thread / (COLUMNS / N), own_column = thread % (COLUMNS / N) * N;
    float mixed[4][N];
#pragma unroll
    for (u32 h = 0; h < 4; h++) {
#pragma unroll
        for (u32 n = 0; n < N; n++) mixed[h][n] = 0.0f;
    }
    const auto step = [&](u32 k) {
        const float4 weight = weights.lines[k][own_head];
        const float* key = (const float*)key_lines[k] + own_column;
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            mixed[0][n] = fma_own(weight.x, key[n], mixed[0][n]);
            mixed[1][n] = fma_own(weight.y, key[n], mixed[1][n]);
            mixed[2][n] = fma_own(weight.z, key[n], mixed[2][n]);
            mixed[3][n] = fma_own(weight.w, key[n], mixed[3][n]);
        }
    };
    load(0);
    for (u32 first = 0; first < keys.total; first += STEP) {
        store(first);
        __syncthreads();
        if (first + STEP < keys.total) load(first + STEP);
        // A step beyond the last key would turn a zero's sign.
        const u32 steps = min(STEP, keys.total - first);
#pragma unroll 8
        for (u32 k = 0; k < steps; k++) step(k);
        __syncthreads();
    }

    const u32 turned = head_dim - shape.rope_dim;
#pragma unroll
    for (u32 h = 0; h < 4; h++) {
        const u32 head = 4 * own_head + h;
        const float sum = head < heads ? scores[shape.sums_at + tile_row * shape.heads + first_head + head] : 1.0f;
#pragma unroll
        for (u32 n = 0; n < N; n++) mixed[h][n] = bf16_round(__fdiv_rn(mixed[h][n], sum));
    }
    float partners[4][N];
#pragma unroll
    for (u32 h = 0; h < 4; h++) {
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            partners[h][n] = N == 1 ? __shfl_xor_sync(WARP, mixed[h][n], 1) : mixed[h][n ^ (N > 1 ? 1 : 0)];
        }
    }
    float* to = out + ((u64)row * shape.heads + first_head) * head_dim;
#pragma unroll
    for (u32 n = 0; n < N; n++) {
        const u32 c = first_column + own_column + n;
        float2 phase;
        phase.x = phase.y = 0.0f;
        if (c >= turned) phase = sin_cos_own((float)keys.position * frequencies[(c - turned) / 2]);
        const float sine = ((c & 1) == 0 ? -phase.x : phase.x) * -1.0f;
#pragma unroll
        for (u32 h = 0; h < 4; h++) {
            const float value = mixed[h][n];
            const float result = c < turned ? value : bf16_round(value * phase.y + partners[h][n] * sine);
            if (4 * own_head + h < heads) to[(u64)(4 * own_head + h) * head_dim + c] = result;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
attention_mix_32_16(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring, const u8* cache,
                    const u32* table, const u32* selected, const u32* counts, const float* frequencies,
                    const float* scores, float* out, const Shape shape) {
    wait_for_inputs();
    mix_keys<Fine>(rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, out, shape);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
attention_mix_64_16(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring, const u8* cache,
                    const u32* table, const u32* selected, const u32* counts, const float* frequencies,
                    const float* scores, float* out, const Shape shape) {
    wait_for_inputs();
    mix_keys<Middle>(rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, out, shape);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
attention_mix_64_32(const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring, const u8* cache,
                    const u32* table, const u32* selected, const u32* counts, const float* frequencies,
                    const float* scores, float* out, const Shape shape) {
    wait_for_inputs();
    mix_keys<Coarse>(rows, windows, records, ring, cache, table, selected, counts, frequencies, scores, out, shape);
}
