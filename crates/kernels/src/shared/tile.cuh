// Products of many rows on Hopper's wgmma: weights decoded into the A registers, inputs in shared memory. Each output is the same
// chain of k16 steps per chunk, and the same fold of the chunks, as in slab.cuh, so bits are equal.
//
// A block has a warp that fetches inputs and two or four warpgroups that compute MT * 64 weight rows each for N input rows; a warp
// owns MT slabs of 16. Columns go in stages of 64. Inputs lie as shared memory wants them: [groups, stages, row atoms, 8 rows, 8 pieces] of 16
// bytes, bf16, zero beyond the columns; row r of an atom holds piece p at r ^ p, and a group of 16 columns is in the order that
// a lane's four columns take in the tensor core: 0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15.
#pragma once
#include "tensor.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

constexpr int TILE_THREADS = 384;  // two warpgroups, and one whose first warp fetches

#if HAS_WGMMA
// d = a * b, plus d where `keep` is not zero: a 64x16 in registers, b 16xN in shared memory. On its way until `wgmma_wait`.
template <int N>
struct Wgmma;

template <>
struct Wgmma<32> {
    static __device__ __forceinline__ void step(float (&d)[16], const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred keep;\nsetp.ne.b32 keep, %21, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
            "}, {%16,%17,%18,%19}, %20, keep, 1, 1, 0;\n}\n"
            :
              "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};

template <>
struct Wgmma<48> {
    static __device__ __forceinline__ void step(float (&d)[24], const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred keep;\nsetp.ne.b32 keep, %29, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
            "}, {%24,%25,%26,%27}, %28, keep, 1, 1, 0;\n}\n"
            :
              "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};

template <>
struct Wgmma<64> {
    static __device__ __forceinline__ void step(float (&d)[32], const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred keep;\nsetp.ne.b32 keep, %37, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
            "%26,%27,%28,%29,%30,%31"
            "}, {%32,%33,%34,%35}, %36, keep, 1, 1, 0;\n}\n"
            :
              "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};

template <>
struct Wgmma<128> {
    static __device__ __forceinline__ void step(float (&d)[64], const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred keep;\nsetp.ne.b32 keep, %69, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
            "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"
            "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
            "}, {%64,%65,%66,%67}, %68, keep, 1, 1, 0;\n}\n"
            :
              "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};

template <>
struct Wgmma<160> {
    static __device__ __forceinline__ void step(float (&d)[80], const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred keep;\nsetp.ne.b32 keep, %85, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
            "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"
            "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,"
            "%78,%79"
            "}, {%80,%81,%82,%83}, %84, keep, 1, 1, 0;\n}\n"
            :
              "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
              "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
              "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};

template <>
struct Wgmma<176> {
    static __device__ __forceinline__ void step(float (&d)[88], const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred keep;\nsetp.ne.b32 keep, %93, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
            "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"
            "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,"
            "%78,%79,%80,%81,%82,%83,%84,%85,%86,%87"
            "}, {%88,%89,%90,%91}, %92, keep, 1, 1, 0;\n}\n"
            :
              "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
              "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
              "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
              "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};

template <>
struct Wgmma<192> {
    static __device__ __forceinline__ void step(float (&d)[96], const u32* a, u64 b, int keep) {
        asm volatile(
            "{\n.reg .pred keep;\nsetp.ne.b32 keep, %101, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
            "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"
            "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,"
            "%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
            "}, {%96,%97,%98,%99}, %100, keep, 1, 1, 0;\n}\n"
            :
              "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
              "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
              "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
              "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
              "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
    }
};

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

__device__ __forceinline__ void start_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive_at(u32 barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_at(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra AGAIN;\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// `bytes` from global to shared memory; the barrier turns when they are there.
__device__ __forceinline__ void fetch(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}\n" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

// K-major rows of 128 bytes in the 128-byte swizzle, eight rows a kilobyte.
__device__ __forceinline__ u64 tile_descriptor(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
#endif

// The formats: what a lane copies of one slab for one stage into its own place of the weights' ring (PIECES of 16 bytes, and
// WORDS of 4), and the four A fragments it makes of that, two and two. Where a last block is missing, the one before stands in: its inputs
// are zero.
struct TileFp8 {
    static constexpr int PIECES = 2, WORDS = 0;
    struct Source { const uint4* codes; const u8* scales; };
    struct Raw { uint4 v[2]; u32 scales; };
    static __device__ __forceinline__ void copy(char* pieces, char*, const Source& from, int stage, int blocks) {
        copy_async_16(pieces, from.codes + stage * 64);
        copy_async_16(pieces + 512, from.codes + min(stage * 2 + 1, blocks - 1) * 32);
    }
    static __device__ __forceinline__ Raw load(const char* pieces, const char*, const Source& from, int stage) {
        return {{*(const uint4*)pieces, *(const uint4*)(pieces + 512)}, __ldg((const u16*)(from.scales + stage * 2))};
    }
    template <int HALF>
    static __device__ __forceinline__ void decode(const Raw& raw, u32 (&a)[8]) {
        const u32 factor = power_pair(raw.scales >> (8 * HALF) & 255, 120);
        decode_fp8(raw.v[HALF].x, factor, a[0], a[2]);
        decode_fp8(raw.v[HALF].y, factor, a[1], a[3]);
        decode_fp8(raw.v[HALF].z, factor, a[4], a[6]);
        decode_fp8(raw.v[HALF].w, factor, a[5], a[7]);
    }
};

struct TileBf16 {
    static constexpr int PIECES = 4, WORDS = 0;
    struct Source { const uint4* codes; const u8* scales; };
    struct Raw { uint4 v[4]; };
    static __device__ __forceinline__ void copy(char* pieces, char*, const Source& from, int stage, int blocks) {
        const uint4* second = from.codes + min(stage * 2 + 1, blocks - 1) * 64;
        copy_async_16(pieces, from.codes + stage * 128);
        copy_async_16(pieces + 512, from.codes + stage * 128 + 32);
        copy_async_16(pieces + 1024, second);
        copy_async_16(pieces + 1536, second + 32);
    }
    static __device__ __forceinline__ Raw load(const char* pieces, const char*, const Source&, int) {
        Raw raw;
#pragma unroll
        for (int i = 0; i < 4; i++) raw.v[i] = *(const uint4*)(pieces + i * 512);
        return raw;
    }
    template <int HALF>
    static __device__ __forceinline__ void decode(const Raw& raw, u32 (&a)[8]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 v = raw.v[HALF * 2 + i];
            // A zero that the compiler can't see: operands that are computed, not loaded, let products run on.
            const u32 zero = gridDim.z - 1;
            a[4 * i] = v.x ^ zero, a[4 * i + 1] = v.y ^ zero, a[4 * i + 2] = v.z ^ zero, a[4 * i + 3] = v.w ^ zero;
        }
    }
};

// A block of MXFP4 is a stage.
struct TileFp4 {
    static constexpr int PIECES = 1, WORDS = 1;
    struct Source { const uint4* codes; const u32* scales; };
    struct Raw { uint4 v; u32 scales; };
    static __device__ __forceinline__ void copy(char* pieces, char* words, const Source& from, int stage, int) {
        copy_async_16(pieces, from.codes + stage * 32);
        copy_async_4(words, from.scales + stage * 8);
    }
    static __device__ __forceinline__ Raw load(const char* pieces, const char* words, const Source&, int) {
        return {*(const uint4*)pieces, *(const u32*)words};
    }
    template <int HALF>
    static __device__ __forceinline__ void decode(const Raw& raw, u32 (&a)[8]) {
        const u32 f0 = power_pair_of<HALF * 2>(raw.scales, 126), f1 = power_pair_of<HALF * 2 + 1>(raw.scales, 126);
        const u32 words[2] = {HALF ? raw.v.z : raw.v.x, HALF ? raw.v.w : raw.v.y};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 pair[4];
            decode_fp4(words[i], f0, f1, pair);
            a[4 * i] = pair[0], a[4 * i + 1] = pair[2], a[4 * i + 2] = pair[1], a[4 * i + 3] = pair[3];
        }
    }
};

// Shared memory of a tile, from the first kilobyte boundary on: SLOTS stages of inputs, DEPTH stages of the warps' weights,
// parked sums, barriers. WARPS compute.
template <class Format_, int MT_, int N_, bool PARK_, int SLOTS_, int DEPTH_, int WARPS_ = 8>
struct TileRoom {
    using Format = Format_;
    static constexpr int MT = MT_, N = N_, SLOTS = SLOTS_, DEPTH = DEPTH_, WARPS = WARPS_;
    static constexpr bool PARK = PARK_;
    static constexpr int STAGE = N * 128;
    static constexpr int SLAB = Format::PIECES * 512 + Format::WORDS * 128;
    static constexpr int WEIGHTS_AT = SLOTS * STAGE;
    static constexpr int SUMS_AT = WEIGHTS_AT + DEPTH * MT * WARPS * SLAB;
    static constexpr int BARRIERS_AT = SUMS_AT + (PARK ? MT * N / 2 * WARPS * 32 * 4 : 0);
};

// The warpgroup that fetches gives its registers to those that compute, two or four.
template <class Room>
__device__ __forceinline__ void give_registers() {
#if HAS_WGMMA
    if constexpr (Room::WARPS == 8) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
}
template <class Room>
__device__ __forceinline__ void take_registers() {
#if HAS_WGMMA
    if constexpr (Room::WARPS == 8) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
#endif
}

// A ring's place, which goes on from tile to tile of a block.
template <int COUNT>
struct Ring {
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++slot == COUNT) slot = 0, parity ^= 1;
    }
};

template <class Room>
__device__ __forceinline__ void start_tiles(char* room) {
    const u32 barriers = (u32)__cvta_generic_to_shared(room) + Room::BARRIERS_AT;
#if HAS_WGMMA
    if (threadIdx.x == 0)
        for (int i = 0; i < Room::SLOTS; i++) start_barrier(barriers + 8 * i, 1), start_barrier(barriers + 8 * (Room::SLOTS + i), Room::WARPS / 4);
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
    __syncthreads();
}

// The warp that fetches: the next stage of inputs into the ring's slot, when it is free.
template <class Room>
__device__ __forceinline__ void fetch_stage(char* room, Ring<Room::SLOTS>& ring, const char* x, u32 bytes) {
#if HAS_WGMMA
    const u32 base = (u32)__cvta_generic_to_shared(room), barriers = base + Room::BARRIERS_AT;
    wait_at(barriers + 8 * (Room::SLOTS + ring.slot), ring.parity ^ 1);
    if (threadIdx.x % 32 == 0) fetch(base + ring.slot * Room::STAGE, x, bytes, barriers + 8 * ring.slot);
    __syncwarp();
    ring.next();
#endif
}

// This lane's place of slab m in a slot of the weights' ring: pieces, then words.
template <class Room>
__device__ __forceinline__ char* weights_place(char* room, int slot, int m) {
    const int warp = threadIdx.x / 32;
    return room + Room::WEIGHTS_AT + ((slot * Room::MT + m) * Room::WARPS + warp) * Room::SLAB;
}
template <class Room>
__device__ __forceinline__ void copy_weights(char* room, int slot, int m, const typename Room::Format::Source& from, int stage, int blocks) {
    char* const place = weights_place<Room>(room, slot, m);
    const int lane = threadIdx.x % 32;
    Room::Format::copy(place + lane * 16, place + Room::Format::PIECES * 512 + lane * 4, from, stage, blocks);
}

// The next stage's weights of a lane, the first half decoded.
template <class Room>
struct Decoded {
    typename Room::Format::Raw raw[Room::MT];
    u32 low[Room::MT][8];
};

// Takes the stage in the ring's place.
template <class Room>
__device__ __forceinline__ void take_weights(char* room, const Ring<Room::DEPTH>& weights, Decoded<Room>& next,
                                             const typename Room::Format::Source (&source)[Room::MT], int stage) {
    using Format = typename Room::Format;
    const int lane = threadIdx.x % 32;
    // A lane reads what it has copied itself.
    wait_for_copy_groups<Room::DEPTH - 2>();
#pragma unroll
    for (int m = 0; m < Room::MT; m++) {
        const char* const place = weights_place<Room>(room, weights.slot, m);
        next.raw[m] = Format::load(place + lane * 16, place + Format::PIECES * 512 + lane * 4, source[m], stage);
        Format::template decode<0>(next.raw[m], next.low[m]);
    }
}

// A warpgroup's part of a tile. `source`: of this warp's slabs, this lane's first bytes. `ahead(slot)` copies the stage that is
// DEPTH - 1 stages ahead, of this tile or of the next one; the first DEPTH - 1 stages of all are on their way, and `next` is the
// first of this tile, then of the next one. PARK keeps the sum
// of the chunks before in shared memory, not in registers. `finish(m, sums)` gets slab m of the warp: element 4 j + i is weight
// row lane / 4 + (i / 2) * 8 and input row 8 j + 2 (lane % 4) + i % 2.
template <class Room, class Ahead, class Finish>
__device__ __forceinline__ void tile_product(char* room, Ring<Room::SLOTS>& inputs, Ring<Room::DEPTH>& weights, Decoded<Room>& next,
                                             const typename Room::Format::Source (&source)[Room::MT], int blocks, int chunk_stages,
                                             const Ahead& ahead, const Finish& finish) {
#if HAS_WGMMA
    using Format = typename Room::Format;
    constexpr int MT = Room::MT, SUMS = Room::N / 2;
    constexpr bool PARK = Room::PARK;
    const int stages = (blocks + 1) / 2;
    float4* const parked = (float4*)(room + Room::SUMS_AT) + threadIdx.x;
    const u32 base = (u32)__cvta_generic_to_shared(room), barriers = base + Room::BARRIERS_AT;
    float acc[MT][SUMS], total[PARK ? 1 : MT][PARK ? 1 : SUMS];
    for (int first = 0; first < stages; first += chunk_stages) {
        const int end = min(first + chunk_stages, stages);
        for (int stage = first; stage < end; stage++) {
            u32 high[MT][8];
            wait_at(barriers + 8 * inputs.slot, inputs.parity);
            const u64 descriptor = tile_descriptor(base + inputs.slot * Room::STAGE);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int m = 0; m < MT; m++)
                    Wgmma<Room::N>::step(acc[m], next.low[m] + 4 * k, descriptor + 2 * k, k > 0 || stage > first);
            wgmma_commit();
            // The second half is decoded while the first is multiplied.
#pragma unroll
            for (int m = 0; m < MT; m++) Format::template decode<1>(next.raw[m], high[m]);
            // Into the slot of the stage before, which is taken.
            ahead(weights.slot == 0 ? Room::DEPTH - 1 : weights.slot - 1);
            end_copy_group();
            weights.next();
            wgmma_fence();
#pragma unroll
            for (int k = 2; k < 4; k++)
#pragma unroll
                for (int m = 0; m < MT; m++) Wgmma<Room::N>::step(acc[m], high[m] + 4 * (k - 2), descriptor + 2 * k, 1);
            wgmma_commit();
            // The next stage's first half is decoded while the second is multiplied.
            wgmma_wait<1>();
            take_weights<Room>(room, weights, next, source, min(stage + 1, stages - 1));
            wgmma_wait<0>();
            if (threadIdx.x % 128 == 0) arrive_at(barriers + 8 * (Room::SLOTS + inputs.slot));
            inputs.next();
        }
        // Chunks are added left to right.
        const bool last = end == stages;
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if constexpr (PARK) {
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++) {
                    float4* const at = parked + (m * (SUMS / 4) + i) * Room::WARPS * 32;
                    if (first > 0) {
                        const float4 v = *at;
                        acc[m][4 * i] = v.x + acc[m][4 * i], acc[m][4 * i + 1] = v.y + acc[m][4 * i + 1];
                        acc[m][4 * i + 2] = v.z + acc[m][4 * i + 2], acc[m][4 * i + 3] = v.w + acc[m][4 * i + 3];
                    }
                    if (!last) *at = make_float4(acc[m][4 * i], acc[m][4 * i + 1], acc[m][4 * i + 2], acc[m][4 * i + 3]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < SUMS; i++) total[m][i] = first > 0 ? total[m][i] + acc[m][i] : acc[m][i];
            }
        }
    }
#pragma unroll
    for (int m = 0; m < MT; m++) {
        if constexpr (PARK) finish(m, acc[m]);
        else finish(m, total[m]);
    }
#endif
}

// The first kilobyte boundary of the block's shared memory.
__device__ __forceinline__ char* tile_room(char* shared_bytes) {
    const u32 address = (u32)__cvta_generic_to_shared(shared_bytes);
    return shared_bytes + ((1024 - (address & 1023)) & 1023);
}

struct TileShape {
    int rows, atoms;            // of the inputs
    int blocks, chunk_stages;   // of a group
    int groups, slabs, first_slabs;
    int scale_stride;
    int row_tiles;
    int begin0, end0, out_stride0, round_to_bf16_0;
    int begin1, end1, out_stride1, round_to_bf16_1;
};
