// The part of CUDA C++ that the project's kernels use outside inline PTX, for clang on the host: a warp is a SIMD group, a block
// a threadgroup. Warp operations need every lane of the warp, which is stricter than CUDA. What is missing here is a compile
// error: add it with its documented meaning and a test.
#pragma once
#include "runtime.h"

#define TF_EMULATED

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef unsigned uint2 __attribute__((ext_vector_type(2)));
typedef unsigned uint4 __attribute__((ext_vector_type(4)));

#define threadIdx (msl::tf_current->position_in_threadgroup)
#define blockIdx (msl::tf_current->threadgroup_position)
#define blockDim (msl::tf_current->threads_per_threadgroup)
#define gridDim (msl::tf_current->threadgroups)

// Where in the source a call stands; evaluated by the caller, being a default argument.
#define CUDA_SITE unsigned site = __builtin_LINE() * 1024u + __builtin_COLUMN()

// Not functions: the host's library has these names.
#define rintf __builtin_rintf
#define fabsf __builtin_fabsf
#define fmaxf cuda_fmaxf

template <class To, class From> __forceinline__ To cuda_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a reinterpretation needs types of one size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}
__forceinline__ float __uint_as_float(unsigned bits) { return cuda_bits<float>(bits); }
__forceinline__ unsigned __float_as_uint(float value) { return cuda_bits<unsigned>(value); }
__forceinline__ float __int_as_float(int bits) { return cuda_bits<float>(bits); }
__forceinline__ int __float_as_int(float value) { return cuda_bits<int>(value); }
__forceinline__ float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__forceinline__ float __fdiv_rn(float a, float b) { return a / b; }
__forceinline__ float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
// The number where one of two is none.
__forceinline__ float cuda_fmaxf(float a, float b) { return a > b || b != b ? a : b; }
__forceinline__ unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
__forceinline__ unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
__forceinline__ int min(int a, int b) { return a < b ? a : b; }
__forceinline__ int max(int a, int b) { return a > b ? a : b; }
template <class T> __forceinline__ T __ldg(const T *at) { return *at; }
__forceinline__ int __popc(unsigned x) { return __builtin_popcount(x); }
__forceinline__ int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
__forceinline__ int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }

__forceinline__ void __syncthreads(CUDA_SITE) { msl::tf_meet_threadgroup(site, 3); }
__forceinline__ void __syncwarp(unsigned = ~0u, CUDA_SITE) { msl::tf_meet_simdgroup(site, true); }

// One meeting of the warp: shows `value`; the lanes' values lie in what comes back.
template <class T> __forceinline__ const unsigned char (*cuda_show(T value, unsigned site))[16] {
    static_assert(sizeof(T) <= 16, "a lane shows at most 16 bytes");
    msl::Thread *me = msl::tf_current;
    unsigned char (*shown)[16] = me->exchange->side[me->parity];
    me->parity ^= 1;
    __builtin_memcpy(shown[me->lane], &value, sizeof(T));
    msl::tf_meet_simdgroup(site, false);
    return shown;
}
template <class T> __forceinline__ T cuda_read(const unsigned char (*shown)[16], unsigned from) {
    T value;
    __builtin_memcpy(&value, shown[from & 31], sizeof(T));
    return value;
}
template <class T> __forceinline__ T __shfl_sync(unsigned, T value, unsigned lane, CUDA_SITE) {
    return cuda_read<T>(cuda_show(value, site), lane);
}
template <class T> __forceinline__ T __shfl_xor_sync(unsigned, T value, unsigned mask, CUDA_SITE) {
    return cuda_read<T>(cuda_show(value, site), msl::tf_current->lane ^ mask);
}
template <class T> __forceinline__ T __shfl_up_sync(unsigned, T value, unsigned delta, CUDA_SITE) {
    const unsigned lane = msl::tf_current->lane;
    return cuda_read<T>(cuda_show(value, site), lane >= delta ? lane - delta : lane);
}
template <class T> __forceinline__ T __shfl_down_sync(unsigned, T value, unsigned delta, CUDA_SITE) {
    const unsigned lane = msl::tf_current->lane;
    return cuda_read<T>(cuda_show(value, site), lane + delta < 32 ? lane + delta : lane);
}
// Integers only, as on the device.
#define CUDA_REDUCTION(name, step)                                                      \
    __forceinline__ unsigned name(unsigned, unsigned value, CUDA_SITE) {                \
        const unsigned char (*shown)[16] = cuda_show(value, site);                      \
        unsigned a = cuda_read<unsigned>(shown, 0);                                     \
        for (unsigned i = 1; i < 32; i++) {                                             \
            const unsigned b = cuda_read<unsigned>(shown, i);                           \
            a = step;                                                                   \
        }                                                                               \
        return a;                                                                       \
    }
CUDA_REDUCTION(__reduce_add_sync, a + b)
CUDA_REDUCTION(__reduce_max_sync, a > b ? a : b)
CUDA_REDUCTION(__reduce_min_sync, a < b ? a : b)
__forceinline__ unsigned __ballot_sync(unsigned, int is_set, CUDA_SITE) {
    const unsigned char (*shown)[16] = cuda_show(is_set, site);
    unsigned mask = 0;
    for (unsigned i = 0; i < 32; i++) mask |= unsigned(cuda_read<int>(shown, i) != 0) << i;
    return mask;
}
__forceinline__ int __any_sync(unsigned mask, int is_set, CUDA_SITE) { return __ballot_sync(mask, is_set, site) != 0; }
__forceinline__ int __all_sync(unsigned mask, int is_set, CUDA_SITE) { return __ballot_sync(mask, is_set, site) == ~0u; }

#include "tensor_step.h"

// Four bytes of the eight of `y` and `x`, each chosen by a selector's three low bits; the fourth spreads the byte's sign.
__forceinline__ unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned which = selector >> (4 * i) & 15, byte = unsigned(both >> (8 * (which & 7)) & 0xff);
        result |= (which & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);
    }
    return result;
}

// Only where plain access is seen too: the plain build does not know who wrote what.
#if __has_feature(thread_sanitizer)
#define CUDA_CHECK_ATOMIC(at) msl::tf_check_atomic(at, 4, true)
#else
#define CUDA_CHECK_ATOMIC(at) (void)0
#endif
#define CUDA_ATOMIC(name, step)                                                                                  \
    __attribute__((no_sanitize("thread"), noinline)) inline unsigned name(unsigned *at, unsigned value) {        \
        CUDA_CHECK_ATOMIC(at);                                                                                   \
        const unsigned old = *at;                                                                                \
        *at = step;                                                                                              \
        return old;                                                                                              \
    }
CUDA_ATOMIC(atomicAdd, old + value)
CUDA_ATOMIC(atomicExch, value)

// Blocks run one after the other.
__forceinline__ void __threadfence() {}
