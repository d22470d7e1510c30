// Hopper's products of a warpgroup. Elsewhere there are none: kernels that need them are empty, or go another way. After the types of
// prelude.cuh or tensor.cuh.
#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

// Operands of inline assembly: ten registers by number, eight sums.
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define SUMS8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
// One product of bf16 over k = 16; `b` is a descriptor, `keep` a predicate or 1.
#define WGMMA_STEP(n, d, a, b, keep) \
    "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" d "}, {" a "}, " b ", " keep ", 1, 1, 0;\n"

#if HAS_WGMMA
#define WGMMA(n, d, a, b, keep) "{\n.reg .pred keep;\nsetp.ne.b32 keep, " keep ", 0;\n" WGMMA_STEP(n, d, a, b, "keep") "}\n"
#define WGMMA_INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep)

// d = a * b, plus d where `keep` is not zero: a 64x16 in registers, b 16xN in shared memory. On its way until `wgmma_wait`.
template <int N>
struct Wgmma;

template <>
struct Wgmma<32> {
    static __device__ __forceinline__ void step(float (&d)[16], const u32* a, u64 b, int keep) {
        asm volatile(WGMMA("32", TEN() ",%10,%11,%12,%13,%14,%15", "%16,%17,%18,%19", "%20", "%21")
            : SUMS8(d, 0), SUMS8(d, 8) : WGMMA_INPUTS);
    }
};

template <>
struct Wgmma<64> {
    static __device__ __forceinline__ void step(float (&d)[32], const u32* a, u64 b, int keep) {
        asm volatile(WGMMA("64", TEN() "," TEN(1) "," TEN(2) ",%30,%31", "%32,%33,%34,%35", "%36", "%37")
            : SUMS8(d, 0), SUMS8(d, 8), SUMS8(d, 16), SUMS8(d, 24) : WGMMA_INPUTS);
    }
};

template <>
struct Wgmma<128> {
    static __device__ __forceinline__ void step(float (&d)[64], const u32* a, u64 b, int keep) {
        asm volatile(WGMMA("128", TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) ",%60,%61,%62,%63", "%64,%65,%66,%67", "%68", "%69")
            : SUMS8(d, 0), SUMS8(d, 8), SUMS8(d, 16), SUMS8(d, 24), SUMS8(d, 32), SUMS8(d, 40), SUMS8(d, 48), SUMS8(d, 56) : WGMMA_INPUTS);
    }
};

template <>
struct Wgmma<160> {
    static __device__ __forceinline__ void step(float (&d)[80], const u32* a, u64 b, int keep) {
        asm volatile(WGMMA("160", TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) "," TEN(6) "," TEN(7), "%80,%81,%82,%83", "%84", "%85")
            : SUMS8(d, 0), SUMS8(d, 8), SUMS8(d, 16), SUMS8(d, 24), SUMS8(d, 32), SUMS8(d, 40), SUMS8(d, 48), SUMS8(d, 56), SUMS8(d, 64), SUMS8(d, 72) : WGMMA_INPUTS);
    }
};

template <>
struct Wgmma<176> {
    static __device__ __forceinline__ void step(float (&d)[88], const u32* a, u64 b, int keep) {
        asm volatile(WGMMA("176", TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) "," TEN(6) "," TEN(7) ",%80,%81,%82,%83,%84,%85,%86,%87", "%88,%89,%90,%91", "%92", "%93")
            : SUMS8(d, 0), SUMS8(d, 8), SUMS8(d, 16), SUMS8(d, 24), SUMS8(d, 32), SUMS8(d, 40), SUMS8(d, 48), SUMS8(d, 56), SUMS8(d, 64), SUMS8(d, 72), SUMS8(d, 80) : WGMMA_INPUTS);
    }
};

template <>
struct Wgmma<192> {
    static __device__ __forceinline__ void step(float (&d)[96], const u32* a, u64 b, int keep) {
        asm volatile(WGMMA("192", TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) "," TEN(6) "," TEN(7) "," TEN(8) ",%90,%91,%92,%93,%94,%95", "%96,%97,%98,%99", "%100", "%101")
            : SUMS8(d, 0), SUMS8(d, 8), SUMS8(d, 16), SUMS8(d, 24), SUMS8(d, 32), SUMS8(d, 40), SUMS8(d, 48), SUMS8(d, 56), SUMS8(d, 64), SUMS8(d, 72), SUMS8(d, 80), SUMS8(d, 88) : WGMMA_INPUTS);
    }
};
#endif

// Before the first product, and after the registers of its operands were written.
__device__ __forceinline__ void wgmma_fence() {
#if HAS_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#if HAS_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until all but the last PENDING groups are done.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
#if HAS_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}
// What this thread has stored in shared memory is seen by products that begin behind the next barrier.
__device__ __forceinline__ void show_to_products() {
#if HAS_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
