// Products of many rows on Hopper's wgmma: weights decoded into the A registers, inputs in shared memory. Each output is the same
// chain of k16 steps per chunk, and the same fold of the chunks, as in slab.cuh, so bits are equal.
//
// A block has a warp that fetches inputs and two or four warpgroups that compute MT * 64 weight rows each for N input rows; a warp
// owns MT slabs of 16. Columns go in stages of 64. Inputs lie as shared memory wants them: [groups, stages, row atoms, 8 rows, 8 pieces] of 16
// bytes, bf16, zero beyond the columns; row r of an atom holds piece p at r ^ p, and a group of 16 columns is in the order that
// a lane's four columns take in the tensor core: 0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15.
#pragma once
#include "tensor.cuh"
#include "wgmma.cuh"

constexpr int TILE_THREADS = 384;  // two warpgroups, and one whose first warp fetches

#if HAS_WGMMA
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
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
// `bytes` from global to shared memory; the barrier turns when they are there.
__device__ __forceinline__ void fetch(u32 to, const void* from, u32 bytes, u32 barrier) {
    expect_bytes(barrier, bytes);
    copy_bulk(to, from, bytes, barrier);
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

// Chunks are added left to right: a chunk's sums to those before, where there are any. They lie in shared memory where PARK, THREADS
// apart, and else in `total`; behind the last chunk they are in `acc` where PARK.
template <bool PARK, int SUMS, int THREADS, int KEPT>
__device__ __forceinline__ void add_chunk(float4* parked, float (&acc)[SUMS], float (&total)[KEPT], bool has_sum, bool is_last) {
    if constexpr (PARK) {
#pragma unroll
        for (int i = 0; i < SUMS / 4; i++) {
            float4* const at = parked + i * THREADS;
            if (has_sum) {
                const float4 v = *at;
                acc[4 * i] = v.x + acc[4 * i], acc[4 * i + 1] = v.y + acc[4 * i + 1];
                acc[4 * i + 2] = v.z + acc[4 * i + 2], acc[4 * i + 3] = v.w + acc[4 * i + 3];
            }
            if (!is_last) *at = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] = has_sum ? total[i] + acc[i] : acc[i];
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
#pragma unroll
        for (int m = 0; m < MT; m++)
            add_chunk<PARK, SUMS, Room::WARPS * 32>(parked + m * (SUMS / 4) * Room::WARPS * 32, acc[m], total[PARK ? 0 : m], first > 0, end == stages);
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
