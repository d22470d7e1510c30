// quantise: QDQ8 of rows, blocks of 32 along the columns, the last of a row may be shorter; the formula is in mod.rs
// in   x [rows, columns] f32, bf16 values
// out  out as x. quantise_in_place: over x itself
// grid one warp a block of 32; a block of threads is a multiple of 32. No sums
#include "prelude.cuh"

struct Shape {
    u32 rows, columns;
};

__device__ __forceinline__ void round_block(const float* x, float* out, const Shape& shape) {
    wait_for_inputs();
    const u32 blocks = (shape.columns + 31) / 32, item = (blockIdx.x * blockDim.x + threadIdx.x) / 32, row = item / blocks;
    const u32 c = 32 * (item % blocks) + threadIdx.x % 32;
    if (row >= shape.rows) return;
    const float value = c < shape.columns ? x[row * shape.columns + c] : 0.0f;
    const float rounded = fp8_round(value);
    if (c < shape.columns) out[row * shape.columns + c] = rounded;
}

extern "C" __global__ void __launch_bounds__(1024) quantise(const float* x, float* out, const Shape shape) {
    round_block(x, out, shape);
}

extern "C" __global__ void __launch_bounds__(1024) quantise_in_place(float* values, const Shape shape) {
    round_block(values, values, shape);
}
