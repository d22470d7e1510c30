// Device functions that the CUDA linears share: the tensor-core step, exact decoding of stored formats to bf16, streaming
// loads and the edges between dependent launches. Each PTX instruction sits behind one wrapper.
#pragma once
#define TF_TENSOR_CUH  // for prelude.cuh, which leaves out what stands here

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// c += a * b over k = 16: a 16x16 row-major, b 16x8 column-major, bf16 in, float32 out. On sm_90 this is the step of
// tf_numerics::fma16, whatever the other rows and columns hold.
__device__ __forceinline__ void mma_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two float32 values rounded to bf16, to nearest even, the first in the low half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Two bf16 products, subnormals kept. Exact where the factor is a power of two and the result is in range.
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
    u32 product;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return product;
}

// Sixteen bytes that are read once: they pass the first-level cache by.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

__device__ __forceinline__ u32 load_once(const u32* from) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}

// Memory that another block of this grid wrote: read and written at the second-level cache.
__device__ __forceinline__ float4 load_shared_value(const float4* from) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_value(float4* to, float4 v) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1,%2,%3,%4};"
                 :
                 : "l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

// Adds one and returns the old count; everything that this thread (and, after __syncwarp, its warp) wrote is seen by
// whoever reads a later count.
__device__ __forceinline__ u32 arrive(u32* counter) {
    u32 old;
    asm volatile("atom.global.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(counter) : "memory");
    return old;
}

// Until the launch before this one is complete and its writes are seen. Weights may be read before it, inputs may not.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next launch may take the room that this one leaves.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Eight bytes from global to shared memory, on their own way until `wait_for_copies`.
__device__ __forceinline__ void copy_async(char* to, const void* from) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" : : "r"(address), "l"(from) : "memory");
}

// The same for sixteen bytes that pass the first-level cache by, and for four.
__device__ __forceinline__ void copy_async_16(char* to, const void* from) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(address), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_4(char* to, const void* from) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(address), "l"(from) : "memory");
}

// Copies since the last call become a group; then until at most PENDING groups are on their way.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_for_copy_groups() { asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory"); }

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Shared memory of another block of the same cluster, and the barrier of all blocks of a cluster.
__device__ __forceinline__ void store_in_cluster(float4* to, u32 rank, float4 v) {
#if __CUDA_ARCH__ >= 900
    const u32 own = (u32)__cvta_generic_to_shared(to);
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};"
                 :
                 : "r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
#endif
}

__device__ __forceinline__ float4 load_in_cluster(const float4* from, u32 rank) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if __CUDA_ARCH__ >= 900
    const u32 own = (u32)__cvta_generic_to_shared(from);
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
#endif
    return v;
}

__device__ __forceinline__ void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A barrier of `threads` threads; 0 is that of the whole block.
__device__ __forceinline__ void barrier(u32 index, u32 threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(index), "r"(threads) : "memory");
}

__device__ __forceinline__ float bf16_to_f32(u16 bits) { return __uint_as_float((u32)bits << 16); }

// To nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ u16 f32_to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ float bf16_round(float value) { return bf16_to_f32(f32_to_bf16(value)); }

// Four E4M3 codes of one word, in the bit order of linear_fp8/pack_cuda.rs, times a power of two given twice as bf16:
// the exponent field of `factor` is that of 2^(120 + scale), since the codes' own fields count from bf16's bias.
__device__ __forceinline__ void decode_fp8(u32 word, u32 factor, u32& first, u32& second) {
    first = mul_bf16x2(word & 0x87f087f0u, factor);
    second = mul_bf16x2(((word << 4) & 0x80f080f0u) | ((word >> 4) & 0x07000700u), factor);
}

// Eight E2M1 codes of one word, in the bit order of moe_experts/pack_cuda.rs, times 2^(126 + scale) given twice as bf16.
__device__ __forceinline__ void decode_fp4(u32 word, u32 factor0, u32 factor1, u32 (&pair)[4]) {
    pair[0] = mul_bf16x2(word & 0x81c081c0u, factor0);
    pair[1] = mul_bf16x2((word << 3) & 0x81c081c0u, factor0);
    pair[2] = mul_bf16x2((word << 6) & 0x81c081c0u, factor1);
    pair[3] = mul_bf16x2(((word << 1) & 0x80008000u) | ((word >> 3) & 0x01800180u) | ((word >> 7) & 0x00400040u), factor1);
}

// 2^(code - 127 + bias) as bf16 in both halves; the sum of code and bias is the exponent field.
__device__ __forceinline__ u32 power_pair(u32 code, u32 bias) { return code * 0x00800080u + bias * 0x00800080u; }

// The same for one byte of a word.
template <int BYTE>
__device__ __forceinline__ u32 power_pair_of(u32 word, u32 bias) {
    return __byte_perm(word, 0, 0x4040 + BYTE * 0x0101) * 128u + bias * 0x00800080u;
}
