// stream_read: folded[t] = XOR of the words that thread t reads; every vector of `from` is read once
// in   from [vectors] of 16 bytes
// out  folded [threads of the grid] u32
// grid any; no shared memory
#include "prelude.cuh"

struct Shape {
    u64 vectors;
};

extern "C" __global__ void __launch_bounds__(512)
stream_read(const uint4* from, u32* folded, const Shape shape) {
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    u32 sum = 0;
    wait_for_inputs();
    u64 at = thread;
    // Eight loads are under way before the first is needed.
    for (; at + 7 * step < shape.vectors; at += 8 * step) {
        uint4 values[8];
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = from[at + i * step];
#pragma unroll
        for (int i = 0; i < 8; i++) sum ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
    }
    for (; at < shape.vectors; at += step) {
        const uint4 value = from[at];
        sum ^= value.x ^ value.y ^ value.z ^ value.w;
    }
    folded[thread] = sum;
}
