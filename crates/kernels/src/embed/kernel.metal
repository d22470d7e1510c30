// embed: every stream of a row starts as its token's row of the table; mix starts as (1, 0, 0, ...)
// in   ids [rows] u32   table [vocabulary, columns] bf16, as bits
// out  out [rows, streams, columns] f32   mix [rows, streams] f32, where `has_mix` is set
// grid one thread a value of out; any threadgroup. No arithmetic
#include "prelude.metal"

struct Shape {
    uint rows, streams, columns, has_mix;
};

kernel void embed(device const uint *ids [[buffer(0)]], device const ushort *table [[buffer(1)]],
                  device float *out [[buffer(2)]], device float *mix [[buffer(3)]], constant Shape &shape [[buffer(4)]],
                  uint item [[thread_position_in_grid]]) {
    const uint c = item % shape.columns, copy = item / shape.columns, row = copy / shape.streams;
    if (row >= shape.rows) return;
    out[item] = from_bits(uint(table[ulong(ids[row]) * shape.columns + c]) << 16);
    if (c == 0u && shape.has_mix != 0u) mix[copy] = copy % shape.streams == 0u ? 1.0f : 0.0f;
}
