// tensor_step: d[i] = chain of k16 steps over a[i], b[i], starting from c[i]: what tf_numerics::fma16 predicts
// in   a [tiles, 16, steps * 16] bf16    b [tiles, 8, steps * 16] bf16    c [tiles, 16, 8] float32
// out  d [tiles, 16, 8] float32
// grid one warp a tile, four warps a block
#include "step.cuh"

struct ProbeShape {
    int tiles, steps;
};

extern "C" __global__ void __launch_bounds__(128)
tensor_step_probe(const u16* a, const u16* b, const float* c, float* d, ProbeShape shape) {
    const int tiles = shape.tiles, steps = shape.steps;
    const int tile = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (tile >= tiles) return;
    const int columns = steps * 16;
    a += (size_t)tile * 16 * columns;
    b += (size_t)tile * 8 * columns;
    c += tile * 128;
    d += tile * 128;
    float acc[4] = {c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1]};
    for (int k = 0; k < columns; k += 16) {
        const u32* low = (const u32*)(a + g * columns + k);
        const u32* high = (const u32*)(a + (g + 8) * columns + k);
        const u32* column = (const u32*)(b + g * columns + k);
        mma_k16(acc, low[t], high[t], low[t + 4], high[t + 4], column[t], column[t + 4]);
    }
    d[g * 8 + 2 * t] = acc[0];
    d[g * 8 + 2 * t + 1] = acc[1];
    d[(g + 8) * 8 + 2 * t] = acc[2];
    d[(g + 8) * 8 + 2 * t + 1] = acc[3];
}
