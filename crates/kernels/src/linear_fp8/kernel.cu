// linear_fp8: out[r][n] = sum over k of x[r][group columns + k] * w[n][k], w = E4M3 * 2^(scale of its 32x32 block)
// in   weights, scales  packed by pack_cuda.rs (slabs of 16 rows)     x [rows, x_stride] bf16, 16-byte aligned rows
// out  out [rows, out_stride] float32 or bf16, no overlap with x      rows 1 to 32
// grid members * groups * chunks blocks of 32 to 512 threads; dynamic shared memory: inputs and factors (slab.cuh)
// sum  per chunk of columns a chain of k16 tensor-core steps, ascending; chunks left to right in float32; one rounding
// max  scale codes 3 to 134, so that code times scale is exact in bf16 (checked when packed)
#include "slab.cuh"

struct Fp8 {
    static constexpr int VECTORS = 1;
    static constexpr bool SCALED = true, ARGMAX = false;
    static __device__ __forceinline__ void decode(const uint4 (&v)[1], u32 factor, u32 (&a)[8]) {
        decode_fp8(v[0].x, factor, a[0], a[2]);
        decode_fp8(v[0].y, factor, a[1], a[3]);
        decode_fp8(v[0].z, factor, a[4], a[6]);
        decode_fp8(v[0].w, factor, a[5], a[7]);
    }
};

// The depth follows from the operator's chunk; `any` takes chunks of every length.
extern "C" __global__ void __launch_bounds__(512, 1) linear_fp8_8(LinearArgs args) { slab_linear<Fp8, 8, true>(args); }
extern "C" __global__ void __launch_bounds__(512, 1) linear_fp8_9(LinearArgs args) { slab_linear<Fp8, 9, true>(args); }
extern "C" __global__ void __launch_bounds__(512, 1) linear_fp8_10(LinearArgs args) { slab_linear<Fp8, 10, true>(args); }
extern "C" __global__ void __launch_bounds__(512, 1) linear_fp8_any(LinearArgs args) { slab_linear<Fp8, 4, false>(args); }
