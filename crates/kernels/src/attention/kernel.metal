// attention: every head of a row over its selected compressed entries and its window, one key being also the value; formulas,
// roundings and the order of keys are in mod.rs
// in   q [rows, heads, head_dim] f32, bf16 values, not yet rotated   rows, windows as tf_kernels::rows
//      records, ring: window entries of kv_store   cache: pages of kv_compress   table [slots, pages_per_slot] u32
//      selected [rows, selected_max] u32 ascending, counts [rows] u32   sinks [heads]   frequencies [rope_dim / 2]
// out  out [rows, heads, head_dim] f32, bf16 values
// grid one threadgroup a head of a row, 32 to 1024 threads; threadgroup memory 12292 bytes
// sum  a dot is one chain of fused multiply-adds over the columns; the denominator adds the unrounded exponentials in key
//      order, the sink last; an output column is one chain in key order. No sum is split, so no threadgroup size enters
// max  head_dim 1024, keys 1024 (checked by launch)
#include "prelude.metal"

struct Shape {
    uint rows, heads, head_dim, rope_dim, window, ring_len, selected_max, is_block, pages_per_slot, entries_per_page;
    float scale;
};

// The rotation by `direction` (1 or -1) of column c of a row that lies in threadgroup memory.
inline float turned(threadgroup const float *row, uint c, uint head_dim, uint position, device const float *frequencies,
                    uint rope_dim, float direction) {
    if (c < head_dim - rope_dim) return row[c];
    const float2 phase = sin_cos_own(float(position) * frequencies[(c - (head_dim - rope_dim)) / 2u]);
    const float sine = ((c & 1u) == 0u ? -phase.x : phase.x) * direction;
    return bf16_round(row[c] * phase.y + row[c ^ 1u] * sine);
}

// Column c of a compressed entry, or of a window entry; exact in bf16.
inline float key_value(device const uchar *record, bool is_entry, uint c, uint head_dim) {
    if (!is_entry) return e4m3_value(record[c]) * e8m0_value(record[head_dim + c / 32u]);
    const uint byte = record[16u * (c / 32u) + c % 16u];
    return e2m1_value(c % 32u < 16u ? byte & 15u : byte >> 4) * e4m3_value(record[head_dim / 2u + c / 16u]);
}

inline device const uchar *entry_of(device const uchar *cache, device const uint *table, uint entry, uint slot,
                                    constant Shape &shape) {
    const ulong page = table[slot * shape.pages_per_slot + entry / shape.entries_per_page];
    const uint bytes = shape.head_dim / 2u + shape.head_dim / 16u;
    return cache + (page * shape.entries_per_page + entry % shape.entries_per_page) * bytes;
}

// The window entry of a position: the launch's own from the window's start on, the ring's before it.
inline device const uchar *key_of(device const uchar *records, device const uchar *ring,
                                  device const WindowInfo *window, uint position, constant Shape &shape) {
    const uint bytes = shape.head_dim + shape.head_dim / 32u;
    if (position >= window->start) return records + (window->first_row + (position - window->start)) * bytes;
    return ring + (window->slot * shape.ring_len + position % shape.ring_len) * bytes;
}

kernel void attention(device const float *q [[buffer(0)]], device const RowInfo *rows [[buffer(1)]],
                      device const WindowInfo *windows [[buffer(2)]], device const uchar *records [[buffer(3)]],
                      device const uchar *ring [[buffer(4)]], device const uchar *cache [[buffer(5)]],
                      device const uint *table [[buffer(6)]], device const uint *selected [[buffer(7)]],
                      device const uint *counts [[buffer(8)]], device const float *sinks [[buffer(9)]],
                      device const float *frequencies [[buffer(10)]], device float *out [[buffer(11)]],
                      constant Shape &shape [[buffer(12)]], uint item [[threadgroup_position_in_grid]],
                      uint t [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
    threadgroup float query[1024];
    threadgroup float scores[1024];
    threadgroup float mixed[1024];
    threadgroup float denominator[1];
    const uint row = item / shape.heads, head = item % shape.heads, head_dim = shape.head_dim;
    const uint slot = rows[row].slot, position = rows[row].position, window = rows[row].window;
    const uint start = windows[window].start;
    const uint count = shape.selected_max == 0u ? 0u : min(counts[row], shape.selected_max);
    const uint end = shape.is_block != 0u ? start + windows[window].row_count : position + 1u;
    const uint reach = shape.is_block != 0u ? start : position + 1u;
    const uint first = reach > shape.window ? reach - shape.window : 0u;
    const uint keys = count + end - first;
    device const uint *of_row = selected + row * shape.selected_max;

    for (uint c = t; c < head_dim; c += threads) mixed[c] = q[item * head_dim + c];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint c = t; c < head_dim; c += threads) {
        query[c] = turned(mixed, c, head_dim, position, frequencies, shape.rope_dim, 1.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint j = t; j < keys; j += threads) {
        device const uchar *record = j < count ? entry_of(cache, table, of_row[j], slot, shape)
                                               : key_of(records, ring, windows + window, first + (j - count), shape);
        float dot = 0.0f;
        for (uint c = 0u; c < head_dim; c++) dot = fma(key_value(record, j < count, c, head_dim), query[c], dot);
        scores[j] = dot * shape.scale;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Every thread finds the maximum itself; its order is free.
    float most = -INFINITY;
    for (uint j = 0u; j < keys; j++) most = max_second(scores[j], most);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = t; j < keys; j += threads) scores[j] = exp_own(scores[j] - most);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 0u) {
        float sum = 0.0f;
        for (uint j = 0u; j < keys; j++) sum = sum + scores[j];
        denominator[0] = sum + exp_own(sinks[head] - most);
    }

    for (uint c = t; c < head_dim; c += threads) {
        float sum = 0.0f;
        for (uint j = 0u; j < keys; j++) {
            device const uchar *record = j < count ? entry_of(cache, table, of_row[j], slot, shape)
                                                   : key_of(records, ring, windows + window, first + (j - count), shape);
            sum = fma(bf16_round(scores[j]), key_value(record, j < count, c, head_dim), sum);
        }
        mixed[c] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint c = t; c < head_dim; c += threads) query[c] = bf16_round(mixed[c] / denominator[0]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint c = t; c < head_dim; c += threads) {
        out[item * head_dim + c] = turned(query, c, head_dim, position, frequencies, shape.rope_dim, -1.0f);
    }
}
