// embed: every stream of a row starts as its token's row of the table; mix starts as (1, 0, 0, ...)
// in   ids [rows] u32   table [vocabulary, columns] bf16, as bits
// out  out [rows, streams, columns] f32   mix [rows, streams] f32, where `has_mix` is set
// grid one thread a value of out; any block. No arithmetic
#include "prelude.cuh"

struct Shape {
    u32 rows, streams, columns, has_mix;
};

extern "C" __global__ void __launch_bounds__(1024)
embed(const u32* ids, const u16* table, float* out, float* mix, const Shape shape) {
    wait_for_inputs();
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 c = item % shape.columns, copy = item / shape.columns, row = copy / shape.streams;
    if (row >= shape.rows) return;
    out[item] = from_bits((u32)table[(u64)ids[row] * shape.columns + c] << 16);
    if (c == 0 && shape.has_mix != 0) mix[copy] = copy % shape.streams == 0 ? 1.0f : 0.0f;
}
