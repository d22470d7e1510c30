// stream_read: folded[t] = XOR of the words that thread t reads; every vector of `from` is read once
// in   from [vectors] of 16 bytes
// out  folded [threads of the grid] u32
// grid any; no threadgroup memory
#include <metal_stdlib>
using namespace metal;

struct Shape {
    ulong vectors;
};

kernel void stream_read(device const uint4 *from [[buffer(0)]], device uint *folded [[buffer(1)]],
                        constant Shape &shape [[buffer(2)]], uint thread_index [[thread_position_in_grid]],
                        uint threads [[threads_per_grid]]) {
    uint sum = 0u;
    for (ulong at = thread_index; at < shape.vectors; at += threads) {
        const uint4 value = from[at];
        sum ^= value.x ^ value.y ^ value.z ^ value.w;
    }
    folded[thread_index] = sum;
}
