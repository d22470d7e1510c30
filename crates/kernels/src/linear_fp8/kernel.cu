// linear_fp8: out[r][n] = sum over k of x[r][group columns + k] * w[n][k], w = E4M3 * 2^(scale of its 32x32 block)
// in   weights, scales  packed by pack_cuda.rs (slabs of 16 rows)     x [rows, x_stride] bf16, 16-byte aligned rows
// out  out [rows, out_stride] float32 or bf16, no overlap with x      rows 1 to 32
// grid members * groups * chunks blocks of 32 to 512 threads; dynamic shared memory: inputs and factors (slab.cuh)
// sum  per chunk of columns a chain of k16 tensor-core steps, ascending; chunks left to right in float32; one rounding
// max  scale codes 3 to 134, so that code times scale is exact in bf16 (checked when packed)
#include "slab.cuh"
#include "flow.cuh"

struct Fp8 {
    static constexpr int VECTORS = 1;
    static constexpr bool SCALED = true, IS_HEAD = false;
    static __device__ __forceinline__ void decode(const uint4 (&v)[1], u32 factor, u32 (&a)[8]) {
        decode_fp8(v[0].x, factor, a[0], a[2]);
        decode_fp8(v[0].y, factor, a[1], a[3]);
        decode_fp8(v[0].z, factor, a[4], a[6]);
        decode_fp8(v[0].w, factor, a[5], a[7]);
    }
};

// The depth follows from the operator's chunk, the bound on threads from the depth; `any` takes chunks of every length.
#define LINEAR(name, threads, depth, whole, fold) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(LINEAR_PARAMETERS) { \
        slab_linear<Fp8, depth, whole, fold>(LINEAR_ARGS); \
    }
LINEAR(linear_fp8_20, 256, 20, true, TOGETHER)
LINEAR(linear_fp8_16, 384, 16, true, TOGETHER)
LINEAR(linear_fp8_10, 512, 10, true, TOGETHER)
LINEAR(linear_fp8_9, 384, 9, true, TOGETHER)
LINEAR(linear_fp8_8, 512, 8, true, TOGETHER)
LINEAR(linear_fp8_any, 512, 4, false, TOGETHER)
LINEAR(linear_fp8_apart_10, 384, 10, true, APART)
LINEAR(linear_fp8_apart_8, 512, 8, true, APART)
LINEAR(linear_fp8_apart_any, 512, 4, false, APART)

// Many rows: flow.cuh. The name ends with a tile's weight rows and input rows.
FLOW_LINEAR(linear_fp8_tile_256_128, TileFp8, 512, 2, 128, true, 3, 3)
FLOW_LINEAR(linear_fp8_tile_128_192, TileFp8, 512, 1, 192, false, 4, 4)
FLOW_LINEAR(linear_fp8_tile_128_176, TileFp8, 512, 1, 176, false, 4, 4)
FLOW_LINEAR(linear_fp8_tile_128_160, TileFp8, 512, 1, 160, false, 4, 5)
FLOW_LINEAR(linear_fp8_tile_128_128, TileFp8, 512, 1, 128, false, 5, 8)
FLOW_LINEAR(linear_fp8_tile_128_64, TileFp8, 512, 1, 64, false, 8, 12)
FLOW_LINEAR(linear_fp8_tile_256_64, TileFp8, 512, 2, 64, false, 6, 7)
FLOW_LINEAR(linear_fp8_tile_256_32, TileFp8, 512, 2, 32, false, 8, 8)
