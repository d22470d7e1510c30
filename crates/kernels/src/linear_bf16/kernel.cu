// linear_bf16: out[r][n] = sum over k of x[r][k] * w[n][k]
// in   weights  packed by pack_cuda.rs (slabs of 16 rows)             x [rows, x_stride] bf16, 16-byte aligned rows
// out  out [rows, out_stride] float32 or bf16, no overlap with x      rows 1 to 32
// grid members * chunks blocks of 32 to 512 threads; dynamic shared memory: inputs (slab.cuh)
// sum  per chunk of columns a chain of k16 tensor-core steps, ascending; chunks left to right in float32; one rounding
#include "slab.cuh"
#include "flow.cuh"

struct Bf16 {
    static constexpr int VECTORS = 2;
    static constexpr bool SCALED = false, IS_HEAD = false;
    static __device__ __forceinline__ void decode(const uint4 (&v)[2], u32, u32 (&a)[8]) {
        a[0] = v[0].x, a[1] = v[0].y, a[2] = v[0].z, a[3] = v[0].w;
        a[4] = v[1].x, a[5] = v[1].y, a[6] = v[1].z, a[7] = v[1].w;
    }
};

#define LINEAR(name, threads, depth, whole, fold) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(LINEAR_PARAMETERS) { \
        slab_linear<Bf16, depth, whole, fold>(LINEAR_ARGS); \
    }
LINEAR(linear_bf16_10, 256, 10, true, TOGETHER)
LINEAR(linear_bf16_any, 512, 4, false, TOGETHER)
LINEAR(linear_bf16_cluster_10, 256, 10, true, CLUSTER)
LINEAR(linear_bf16_cluster_any, 512, 4, false, CLUSTER)
LINEAR(linear_bf16_apart_10, 256, 10, true, APART)
LINEAR(linear_bf16_apart_any, 512, 4, false, APART)

// Many rows, of this family and of the head: flow.cuh. The name ends with a tile's weight rows and input rows.
FLOW_LINEAR(linear_bf16_tile_128_128, TileBf16, 1024, 1, 128, false, 5, 4)
FLOW_LINEAR(linear_bf16_tile_128_64, TileBf16, 1024, 1, 64, false, 5, 6)
