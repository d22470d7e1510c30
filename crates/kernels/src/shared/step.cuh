// The tensor-core step for sources of prelude.cuh, which the emulator runs too. Each PTX instruction sits behind one wrapper;
// a source of tensor.cuh has that header's functions of these names.
#pragma once
#include "prelude.cuh"

#ifndef TF_TENSOR_CUH
// c += a * b over k = 16: a 16x16 row-major, b 16x8 column-major, bf16 in, float32 out. On sm_90 this is the step of
// tf_numerics::fma16, whatever the other rows and columns hold. The sixteen products may lie in any order, the same in a and b.
__device__ __forceinline__ void mma_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef TF_EMULATED
    cuda_mma_k16(c, a0, a1, a2, a3, b0, b1);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Two float32 values rounded to bf16, to nearest even, the first in the low half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
#ifdef TF_EMULATED
    return to_bits(bf16_round(low)) >> 16 | to_bits(bf16_round(high));
#else
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

// Two bf16 products, subnormals kept.
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
#ifdef TF_EMULATED
    return bf16_pair(from_bits(a << 16) * from_bits(b << 16), from_bits(a & 0xffff0000u) * from_bits(b & 0xffff0000u));
#else
    u32 product;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return product;
#endif
}

// The same by the factor in the low half, or in the high half.
__device__ __forceinline__ u32 mul_by_low(u32 a, u32 factors) {
#ifdef TF_EMULATED
    return mul_bf16x2(a, (factors & 0xffffu) * 0x00010001u);
#else
    u32 both;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}" : "=r"(both) : "r"(factors));
    return mul_bf16x2(a, both);
#endif
}
__device__ __forceinline__ u32 mul_by_high(u32 a, u32 factors) {
#ifdef TF_EMULATED
    return mul_bf16x2(a, (factors >> 16) * 0x00010001u);
#else
    u32 both;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}" : "=r"(both) : "r"(factors));
    return mul_bf16x2(a, both);
#endif
}
#endif
