// What the kernels of attention share: which keys a row has and where, how their codes become bf16, how queries are turned, how
// scores become weights. See attention/kernel.cu.
#pragma once
#include "step.cuh"

struct Shape {
    u32 rows, heads, head_dim, rope_dim, window, ring_len, selected_max, is_block, pages_per_slot, entries_per_page;
    float scale;  // of a dot with a key's 2^-8 fold
    u32 first_row, stride;
    u32 sums_at;  // where in the scratch the denominators start, in floats
};

// Places of a tile: one type of keys, which fill the k of a step in the mix and the m in the scores.
constexpr u32 TILE = 16;

// The keys of a row, by place: the selected entries, places without a key up to a multiple of TILE, the window.
struct Keys {
    u32 slot, position, count, entry_places, first, places;
    WindowInfo window;
};

// What the host says of a row's keys; may be read before the launch before this one has ended.
__device__ __forceinline__ Keys window_of(const RowInfo* rows, const WindowInfo* windows, u32 row, const Shape& shape) {
    Keys keys;
    keys.slot = rows[row].slot;
    keys.position = rows[row].position;
    keys.window = windows[rows[row].window];
    keys.count = keys.entry_places = 0;
    const u32 end = shape.is_block != 0 ? keys.window.start + keys.window.row_count : keys.position + 1;
    const u32 reach = shape.is_block != 0 ? keys.window.start : keys.position + 1;
    keys.first = reach > shape.window ? reach - shape.window : 0;
    keys.places = end - keys.first;
    return keys;
}

__device__ __forceinline__ void add_selection(Keys& keys, const u32* counts, u32 row, const Shape& shape) {
    keys.count = shape.selected_max == 0 ? 0 : min(counts[row], shape.selected_max);
    keys.entry_places = (keys.count + TILE - 1) / TILE * TILE;
    keys.places += keys.entry_places;
}

__device__ __forceinline__ Keys keys_of(const RowInfo* rows, const WindowInfo* windows, const u32* counts, u32 row,
                                        const Shape& shape) {
    Keys keys = window_of(rows, windows, row, shape);
    add_selection(keys, counts, row, shape);
    return keys;
}

__device__ __forceinline__ bool has_key(const Keys& keys, u32 place) {
    return place < keys.count || (place >= keys.entry_places && place < keys.places);
}

// What a row's keys are read from.
struct Caches {
    const u8 *records, *ring, *cache;
    const u32 *table, *of_row;
};

// Where the bytes of a window's place are: in the launch's own records from the window's start on, in the ring before it. A place
// behind the last one gets the last one's.
__device__ __forceinline__ const u8* window_record_of(const Keys& keys, u32 place, const Caches& from, const Shape& shape) {
    const u32 position = keys.first + (min(place, keys.places - 1) - keys.entry_places);
    const u32 bytes = shape.head_dim + shape.head_dim / 32;
    if (position >= keys.window.start) {
        return from.records + (u64)(keys.window.first_row + (position - keys.window.start)) * bytes;
    }
    return from.ring + ((u64)keys.window.slot * shape.ring_len + position % shape.ring_len) * bytes;
}

// The same of any place: of the entries too, whose places without a key get the last one's.
__device__ __forceinline__ const u8* record_of(const Keys& keys, u32 place, const Caches& from, const Shape& shape) {
    if (place >= keys.entry_places) return window_record_of(keys, place, from, shape);
    const u32 entry = from.of_row[min(place, keys.count - 1)];
    const u64 page = from.table[keys.slot * shape.pages_per_slot + entry / shape.entries_per_page];
    const u32 bytes = shape.head_dim / 2 + shape.head_dim / 16;
    return from.cache + (page * shape.entries_per_page + entry % shape.entries_per_page) * bytes;
}

// Four bytes of a record, whose words are aligned where head_dim is a multiple of 128.
template <bool WORDS>
__device__ __forceinline__ u32 word_at(const u8* at) {
    if (WORDS) return __ldg((const u32*)at);
    return __ldg(at) | (u32)__ldg(at + 1) << 8 | (u32)__ldg(at + 2) << 16 | (u32)__ldg(at + 3) << 24;
}

// ---- codes to bf16, with a fold of 2^-8, which keeps every scale in bf16's range and is exact

// Two E2M1 codes, one in the low nibble of each half's low byte, or in the high nibble of each half's bytes, which are the same;
// times 2^(126 + ...).
__device__ __forceinline__ u32 low_nibbles(u32 halves, u32 factor) {
    return mul_bf16x2((halves & 0x000f000fu) * 0x1040u & 0x81c081c0u, factor);
}
__device__ __forceinline__ u32 high_nibbles(u32 halves, u32 factor) {
    return mul_bf16x2((halves & 0x80008000u) | (halves * 4u & 0x01c001c0u), factor);
}

// The factor of two entries, or twice the same one, whose positive E4M3 scales stand in the halves.
__device__ __forceinline__ u32 entry_factor_of(u32 scales) {
    return mul_bf16x2(mul_bf16x2(scales * 16u, 0x7b807b80u), 0x7a807a80u);
}
__device__ __forceinline__ u32 entry_factor(u32 scales) { return entry_factor_of(scales & 0x007f007fu); }

// The same of window entries, whose E8M0 scales are powers.
__device__ __forceinline__ u32 window_factor(u32 scales) { return scales * 128u + 112u * 0x00800080u; }

// Four E4M3 codes as the high and the low bytes of their fields in bf16.
__device__ __forceinline__ void e4m3_bytes(u32 word, u32& high, u32& low) {
    high = (word & 0x80808080u) | (word >> 4 & 0x07070707u);
    low = word * 16u & 0xf0f0f0f0u;
}

// Nonzero where one of four E4M3 codes is no number.
__device__ __forceinline__ u32 not_numbers(u32 word) { return (word & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u; }

// The same in all lanes, which the compiler cannot see otherwise.
__device__ __forceinline__ u32 warp_index() { return __shfl_sync(WARP, threadIdx.x / 32, 0); }

// ---- queries

// A pair of columns, turned by a phase whose sine is x; or back.
__device__ __forceinline__ float2 turn_pair(float even, float odd, float2 phase) {
    const u32 both = bf16_pair(even * phase.y + odd * -phase.x, odd * phase.y + even * phase.x);
    float2 turned;
    turned.x = from_bits(both << 16);
    turned.y = from_bits(both & 0xffff0000u);
    return turned;
}
__device__ __forceinline__ float2 turn_pair_back(float even, float odd, float2 phase) {
    phase.x = -phase.x;
    return turn_pair(even, odd, phase);
}

// Four columns of a query from `c` on, turned where they lie in the last rope_dim, as two words of bf16.
__device__ __forceinline__ uint2 turned_quad(float4 quad, u32 c, u32 turned, const float2* phases) {
    float2 first, second;
    first.x = quad.x, first.y = quad.y;
    second.x = quad.z, second.y = quad.w;
    if (c >= turned) first = turn_pair(quad.x, quad.y, phases[(c - turned) / 2]);
    if (c + 2 >= turned) second = turn_pair(quad.z, quad.w, phases[(c + 2 - turned) / 2]);
    uint2 words;
    words.x = bf16_pair(first.x, first.y);
    words.y = bf16_pair(second.x, second.y);
    return words;
}

__device__ __forceinline__ void make_phases(const float* frequencies, u32 position, float2* phases, const Shape& shape) {
    for (u32 i = threadIdx.x; i < shape.rope_dim / 2; i += blockDim.x) {
        phases[i] = sin_cos_own((float)position * frequencies[i]);
    }
}

// ---- weights

// exp_own of what is at most zero, or NaN: the same bits, without conversions.
__device__ __forceinline__ float exp_down(float x) {
#ifdef TF_EMULATED
    x = max_second(-104.0f, x);
#else
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(-104.0f));
#endif
    const float turns = x * from_bits(0x3fb8aa3bu) + 12582912.0f, n = turns - 12582912.0f;
    float r = fma_own(n, -from_bits(0x3f317218u), x);
    r = fma_own(n, -from_bits(0xb102e308u), r);
    float q = from_bits(0x3ab5638cu);
    q = fma_own(q, r, from_bits(0x3c091eefu));
    q = fma_own(q, r, from_bits(0x3d2aac2cu));
    q = fma_own(q, r, from_bits(0x3e2aaa46u));
    q = fma_own(q, r, from_bits(0x3efffffeu));
    const float value = 1.0f + fma_own(r * r, q, r);
    // 2^(n + 64) is exact and so is its product; the last one rounds once, to a subnormal or not at all.
    return value * from_bits(to_bits(turns) * 0x00800000u + (191u << 23)) * from_bits(63u << 23);
}

// ---- mix

// Of four keys, those of the lane's t, the eight columns of 64 that the lane's g has: of block g / 4 columns 4 (g % 4) to
// 4 (g % 4) + 3 of either half.
struct Values {
    u32 low[4], high[4], scales[4];
};

template <bool WORDS>
__device__ __forceinline__ void load_values(const u8* const* records, bool is_entry, u32 block, u32 part, u32 head_dim,
                                            Values& values) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        const u8* record = records[k];
        if (is_entry) {
            values.low[k] = word_at<WORDS>(record + 16 * block + 4 * part);
            values.scales[k] = __ldg((const u16*)(record + head_dim / 2 + 2 * block));
        } else {
            values.low[k] = word_at<WORDS>(record + 32 * block + 4 * part);
            values.high[k] = word_at<WORDS>(record + 32 * block + 16 + 4 * part);
            values.scales[k] = __ldg(record + head_dim + block);
        }
    }
}

// Pairs of keys by column: words [i][0] and [i][2] of the columns 2 i, [i][1] and [i][3] of 2 i + 1, as a step takes them. What
// is no number is not looked for: such a key has spoilt every weight of its row already.
__device__ __forceinline__ void decode_values(const Values& values, bool is_entry, u32 (&pairs)[4][4]) {
#pragma unroll
    for (u32 p = 0; p < 2; p++) {
        const u32 a = 2 * p, b = 2 * p + 1;
        if (is_entry) {
            const u32 first = entry_factor(__byte_perm(values.scales[a], values.scales[b], 0x2420));
            const u32 second = entry_factor(__byte_perm(values.scales[a], values.scales[b], 0x2521));
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 halves = __byte_perm(values.low[a], values.low[b], 0x4400 + 0x1111 * j);
                pairs[j / 2][j % 2 + 2 * p] = low_nibbles(halves, first);
                pairs[2 + j / 2][j % 2 + 2 * p] = high_nibbles(halves, second);
            }
        } else {
            const u32 factor = window_factor(__byte_perm(values.scales[a], values.scales[b], 0x1410));
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 first = half == 0 ? values.low[a] : values.high[a];
                const u32 second = half == 0 ? values.low[b] : values.high[b];
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    u32 high, low;
                    e4m3_bytes(__byte_perm(first, second, i == 0 ? 0x5140 : 0x7362), high, low);
                    pairs[2 * half + i][2 * p] = mul_bf16x2(__byte_perm(low, high, 0x5140), factor);
                    pairs[2 * half + i][2 * p + 1] = mul_bf16x2(__byte_perm(low, high, 0x7362), factor);
                }
            }
        }
    }
}

// Two columns of an output of one head: divided, rounded, turned back.
__device__ __forceinline__ float2 finished_pair(float even, float odd, float inverse, u32 c, u32 turned, const float2& phase) {
    const u32 both = bf16_pair(even * inverse, odd * inverse);
    float2 pair;
    pair.x = from_bits(both << 16);
    pair.y = from_bits(both & 0xffff0000u);
    return c >= turned ? turn_pair_back(pair.x, pair.y, phase) : pair;
}
