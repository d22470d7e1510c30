// Scores on the tensor cores by warpgroups, for the kernels of attention that hold a row's queries: 64 heads times 64 keys, whose codes
// are decoded where the step takes them. After attention.cuh.
#pragma once
#include "attention.cuh"
#include "wgmma.cuh"

constexpr u32 HEADS = 64, DIM = 512, BLOCKS = DIM / 32;

// d = a * b, plus d where `keep`, for 64 rows of a and 64 columns of b over k = 16: mma_k16 of every part. A tile has b's columns, 128
// bytes each, in the swizzle of 128 bytes: eight columns a kilobyte, column n of them holds piece p of 16 bytes at p ^ n; `step`
// chooses two of the eight pieces. On its way until `wgmma_wait`.
__device__ __forceinline__ void multiply_64(float (&d)[32], const u32* a, const u8* shared, u32 tile, u32 step, bool keep) {
#if HAS_WGMMA
    // Only the address of a descriptor changes, and only in its first 14 bits.
    const u32 b = ((u32)__cvta_generic_to_shared(shared) / 16 | 1u << 16) + tile * (HEADS * 128 / 16) + 2 * step;
    Wgmma<64>::step(d, a, (u64)0x40000040 << 32 | b, keep);
#else
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 n = 0; n < 8; n++) {
        float own[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) own[i] = keep ? d[4 * n + i] : 0.0f;
        const u8* column = shared + tile * (HEADS * 128) + n * 1024 + g * 128 + 4 * t;
        const u32 first = *(const u32*)(column + ((2 * step) ^ g) * 16), second = *(const u32*)(column + ((2 * step + 1) ^ g) * 16);
        mma_k16(own, a[0], a[1], a[2], a[3], first, second);
#pragma unroll
        for (u32 i = 0; i < 4; i++) d[4 * n + i] = own[i];
    }
#endif
}

__device__ __forceinline__ void copy_async_4(u8* to, const u8* from) {
#ifdef TF_EMULATED
    *(u32*)to = *(const u32*)from;
#else
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(address), "l"(from) : "memory");
#endif
}

// Turned queries, a quad of columns of eight heads a lane at a time: of sixteen columns the even ones are a piece, then the odd.
struct Quads {
    float4 of[8];
};
__device__ __forceinline__ Quads load_quads(const float* q, u32 first_head, u32 row, u32 part, u32 warp, const Shape& shape) {
    Quads quads;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        const u32 head = warp * 8 + i;
        quads.of[i] = zero_quad();
        if (first_head + head < shape.heads) {
            const float* from = q + ((u64)row * shape.heads + first_head + head) * DIM;
            quads.of[i] = *((const float4*)from + part * 32 + threadIdx.x % 32);
        }
    }
    return quads;
}
__device__ __forceinline__ void store_quads(const Quads& quads, u32 part, u32 warp, const float2* phases, u8* shared, const Shape& shape) {
    const u32 c = part * 128 + threadIdx.x % 32 * 4;
    u8* const at = shared + c / 64 * (HEADS * 128) + warp * 1024 + c % 16;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        uint2 words;
        if (part * 128 + 128 <= DIM - 128) {
            words.x = bf16_pair(quads.of[i].x, quads.of[i].y), words.y = bf16_pair(quads.of[i].z, quads.of[i].w);
        } else {
            words = turned_quad(quads.of[i], c, DIM - shape.rope_dim, phases);
        }
        const u32 piece = c / 16 % 4 * 2;
        *(u32*)(at + i * 128 + (piece ^ i) * 16) = __byte_perm(words.x, words.y, 0x5410);
        *(u32*)(at + i * 128 + (piece + 1 ^ i) * 16) = __byte_perm(words.x, words.y, 0x7632);
    }
}

// ---- scores

// What the keys of a warpgroup are. Those of one kind take no branches.
enum class Kind { ENTRIES, WINDOW, MIXED };

// Two keys' codes and scales of 64 columns: of the four blocks' halves, where a key is an entry, two words.
struct Codes {
    u32 words[2][4], scales[2];
};

// Of a word's codes those of the bytes 0 and 2, then 1 and 3: of entries the low nibbles, then the high ones.
__device__ __forceinline__ void entry_codes(u32 word, u32 factors, u32 (&low)[2], u32 (&high)[2]) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 bytes = word >> 8 * i;
        low[i] = mul_by_low((bytes & 0x000f000fu) * 0x1040u & 0x81c081c0u, factors);
        high[i] = mul_by_high((bytes & 0x00f000f0u) * 0x104u & 0x81c081c0u, factors);
    }
}
__device__ __forceinline__ void window_codes(u32 word, u32 factor, u32& even, u32& odd) {
    even = mul_bf16x2((word * 256u & 0x80008000u) | (word * 16u & 0x07f007f0u), factor);
    odd = mul_bf16x2((word & 0x80008000u) | (word >> 4 & 0x07f007f0u), factor);
}

// A block of 32 columns of both keys as two steps take it.
template <Kind KIND, u32 BLOCK>
__device__ __forceinline__ void decode_block(const Codes& codes, bool is_entry, u32 (&a)[8], u32 (&bad)[2]) {
    if (KIND == Kind::ENTRIES || (KIND == Kind::MIXED && is_entry)) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 scales = codes.scales[i] & 0x7f7f7f7fu;
            if (BLOCK == 0) bad[i] |= scales + 0x01010101u & 0x80808080u;
            const u32 both = entry_factor_of(__byte_perm(scales, 0, BLOCK == 0 ? 0x4140 : 0x4342));
            u32 low[2], high[2];
            entry_codes(codes.words[i][BLOCK], both, low, high);
            a[i] = low[0], a[2 + i] = low[1], a[4 + i] = high[0], a[6 + i] = high[1];
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 scale = codes.scales[i] >> 8 * BLOCK & 0xff, factor = window_factor(scale * 0x00010001u);
            window_codes(codes.words[i][2 * BLOCK], factor, a[i], a[2 + i]);
            window_codes(codes.words[i][2 * BLOCK + 1], factor, a[4 + i], a[6 + i]);
            bad[i] |= not_numbers(codes.words[i][2 * BLOCK]) | not_numbers(codes.words[i][2 * BLOCK + 1]) | (scale > 142 ? 1u : 0u);
        }
    }
}

// Dots of a warpgroup's 64 keys, two a thread. Returns in bits 0 and 1 whether a key is no number, as far as this thread sees.
// `load(columns)` gives their codes.
template <Kind KIND, class Load>
__device__ __forceinline__ u32 score_pair(bool is_entry, const u8* queries, float (&dots)[32], const Load& load) {
    constexpr u32 LAST = DIM / 64 - 1, AHEAD = HAS_WGMMA && KIND == Kind::WINDOW ? 2 : 1;
    u32 a[2][8], bad[2];
    bad[0] = bad[1] = 0;
    Codes next[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) next[i] = load(i);
#pragma unroll (KIND == Kind::MIXED ? 1 : 2)
    for (u32 columns = 0; columns <= LAST; columns++) {
        const Codes codes = next[columns % AHEAD];
        next[columns % AHEAD] = load(min(columns + AHEAD, LAST));
        decode_block<KIND, 0>(codes, is_entry, a[0], bad);
        wgmma_fence();
        multiply_64(dots, a[0], queries, columns, 0, columns > 0);
        multiply_64(dots, a[0] + 4, queries, columns, 1, true);
        wgmma_commit();
        wgmma_wait<1>();
        decode_block<KIND, 1>(codes, is_entry, a[1], bad);
        wgmma_fence();
        multiply_64(dots, a[1], queries, columns, 2, true);
        multiply_64(dots, a[1] + 4, queries, columns, 3, true);
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    return (bad[0] != 0 ? 1u : 0u) | (bad[1] != 0 ? 2u : 0u);
}
