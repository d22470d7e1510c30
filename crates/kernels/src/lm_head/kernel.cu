// lm_head: logits[r][n] = sum over k of x[r][k] * w[n][k]
// in   weights  as linear_bf16                                        x [rows, x_stride] bf16, 16-byte aligned rows
// out  out [rows, out_stride] float32                                 rows 1 to 32
// grid any number of blocks of 32 to 512 threads; dynamic shared memory: inputs (slab.cuh), in phases above 16 rows
// sum  one chain of k16 tensor-core steps over all columns
#include "slab.cuh"

struct Head {
    static constexpr int VECTORS = 2;
    static constexpr bool SCALED = false, IS_HEAD = true;
    static __device__ __forceinline__ void decode(const uint4 (&v)[2], u32, u32 (&a)[8]) {
        a[0] = v[0].x, a[1] = v[0].y, a[2] = v[0].z, a[3] = v[0].w;
        a[4] = v[1].x, a[5] = v[1].y, a[6] = v[1].z, a[7] = v[1].w;
    }
};

#define HEAD(name, depth, whole) \
    extern "C" __global__ void __launch_bounds__(512, 1) name(LINEAR_PARAMETERS) { \
        slab_linear<Head, depth, whole, TOGETHER>(LINEAR_ARGS); \
    }
HEAD(lm_head_4, 4, true)
HEAD(lm_head_any, 3, false)
