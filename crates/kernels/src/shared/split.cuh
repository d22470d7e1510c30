// Products of nine and more rows, chunks side by side: a block has 64 to 192 weight rows, N input rows and one chunk of columns;
// the blocks of a cluster hold the chunks of one tile. Chains, folds and layouts are those of
// tile.cuh, so bits are equal: only who computes what differs. A stage of weights is decoded whole while the one before is
// multiplied.
#pragma once
#include "tile.cuh"

struct SplitShape {
    TileShape tile;
    int parts;                          // blocks of a cluster: 1, or one for every chunk
    int x_stride, columns, x_is_bf16;   // of inputs that come as rows of whole blocks: float32, or bf16
};

template <class Format>
constexpr bool IS_SCALED = Format::PIECES == 2;

// What a warp reads of its slabs: the ring that its own copies fill, and scale codes, a lane a stage of 32 and the next 32.
template <class Room, int BLOCK_BYTES>
struct Weights {
    using Format = typename Room::Format;
    static constexpr int MT = Room::MT;
    const uint4* codes[MT];
    const u8* scales[MT];
    u32 here[MT], coming[MT];
    int copied, taken, end, blocks, slot;

    __device__ __forceinline__ void load_scales(int stage) {
        if constexpr (IS_SCALED<Format>) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int m = 0; m < MT; m++) coming[m] = stage + lane < end ? __ldg((const u16*)(scales[m] + (stage + lane) * 2)) : 0;
        }
    }

    __device__ __forceinline__ void copy(char* room) {
        if (copied < end) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int m = 0; m < MT; m++) {
                char* const place = weights_place<Room>(room, slot, m) + lane * 16;
                const uint4* const from = codes[m] + copied * (BLOCK_BYTES / 8);
                const uint4* const second = codes[m] + min(copied * 2 + 1, blocks - 1) * (BLOCK_BYTES / 16);
#pragma unroll
                for (int i = 0; i < Format::PIECES / 2; i++) copy_async_16(place + i * 512, from + i * 32);
#pragma unroll
                for (int i = 0; i < Format::PIECES / 2; i++) copy_async_16(place + (Format::PIECES / 2 + i) * 512, second + i * 32);
            }
        }
        copied++;
        end_copy_group();
        if (++slot == Room::DEPTH) slot = 0;
    }

    __device__ __forceinline__ void start(char* room, int begin, int end_, int blocks_) {
        copied = taken = begin, end = end_, blocks = blocks_, slot = 0;
        for (int i = 0; i < Room::DEPTH; i++) copy(room);
        load_scales(begin);
    }

    // The next stage, decoded; its place in the ring is filled anew.
    __device__ __forceinline__ void take(char* room, int begin, u32 (&a)[MT][16]) {
        const int lane = threadIdx.x % 32, index = (taken - begin) % 32;
        if constexpr (IS_SCALED<Format>) {
            if (index == 0) {
#pragma unroll
                for (int m = 0; m < MT; m++) here[m] = coming[m];
                load_scales(taken + 32);
            }
        }
        wait_for_copy_groups<Room::DEPTH - 1>();
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const char* const place = weights_place<Room>(room, slot, m) + lane * 16;
            typename Format::Raw raw;
#pragma unroll
            for (int i = 0; i < Format::PIECES; i++) raw.v[i] = *(const uint4*)(place + i * 512);
            if constexpr (IS_SCALED<Format>) raw.scales = __shfl_sync(~0u, here[m], index);
            u32(&low)[8] = *(u32(*)[8])a[m];
            u32(&high)[8] = *(u32(*)[8])(a[m] + 8);
            Format::template decode<0>(raw, low);
            Format::template decode<1>(raw, high);
        }
        taken++;
        copy(room);
    }
};

// The stages [begin, end) of a chunk, `weights` at `begin`. `finish(m, sums)` as in tile.cuh.
template <class Room, class Weights, class Finish>
__device__ __forceinline__ void split_stages(char* room, Ring<Room::SLOTS>& inputs, Weights& weights, int begin, int end,
                                             int chunk_stages, u32 (&even)[Room::MT][16], const Finish& finish) {
#if HAS_WGMMA
    constexpr int MT = Room::MT, SUMS = Room::N / 2;
    const u32 base = (u32)__cvta_generic_to_shared(room), barriers = base + Room::BARRIERS_AT;
    float acc[MT][SUMS];
    u32 odd[MT][16];
    // The bounds move on behind the chunk's last stage, though none follows: the compiler keeps to its registers then.
    int chunk_begin = begin, chunk_end = end, held = 0;
    const auto release = [&] {
        if (threadIdx.x % 128 == 0) arrive_at(barriers + 8 * (Room::SLOTS + held));
    };
    const auto step = [&](u32 (&now)[MT][16], u32 (&next)[MT][16], int stage) {
        wait_at(barriers + 8 * inputs.slot, inputs.parity);
        const u64 descriptor = tile_descriptor(base + inputs.slot * Room::STAGE);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int m = 0; m < MT; m++) Wgmma<Room::N>::step(acc[m], now[m] + 4 * k, descriptor + 2 * k, k > 0 || stage > chunk_begin);
        wgmma_commit();
        // Until the stage before is multiplied: its inputs' slot and its weights' registers are free then.
        wgmma_wait<1>();
        if (stage > chunk_begin) release();
        held = inputs.slot;
        inputs.next();
        weights.take(room, begin, next);
        if (stage + 1 < chunk_end) return;
        wgmma_wait<0>();
        release();
        chunk_begin = chunk_end, chunk_end = min(chunk_end + chunk_stages, end);
    };
#pragma unroll 1
    for (int stage = begin; stage < end; stage += 2) {
        step(even, odd, stage);
        if (stage + 1 < end) step(odd, even, stage + 1);
    }
#pragma unroll
    for (int m = 0; m < MT; m++) finish(m, acc[m]);
#endif
}

// Inputs as rows into the ring of stages, as tile.cuh wants them, by a warpgroup: a thread takes 16 columns of a row. Up to 16
// rows two stages are filled at a time. AHEAD pieces of a thread are on their way.
template <class Room, bool BF16, int AHEAD>
__device__ __forceinline__ void stage_rows(char* room, const void* x, const SplitShape& shape, int rows, int begin, int end) {
#if HAS_WGMMA
    constexpr int PIECES = BF16 ? 2 : 4, BYTES = BF16 ? 2 : 4;
    const int thread = threadIdx.x - Room::WARPS * 32, lane = thread % 32;
    const int step = rows > 16 ? 1 : 2, offset = rows > 16 ? 0 : thread / 64;
    const int row = thread / 4 % (rows > 16 ? 32 : 16), part = thread % 4;
    const u32 barriers = (u32)__cvta_generic_to_shared(room) + Room::BARRIERS_AT;
    const char* const from = (const char*)x + ((size_t)row * shape.x_stride + part * 16) * BYTES;
    char* const to = room + row / 8 * 1024 + row % 8 * 128;
    uint4 raw[AHEAD][PIECES];
    const auto load = [&](uint4 (&v)[PIECES], int stage) {
        const bool inside = row < rows && stage < end && stage * 64 + part * 16 < shape.columns;
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            v[i] = inside ? *(const uint4*)(from + (size_t)stage * 64 * BYTES + i * 16) : make_uint4(0, 0, 0, 0);
    };
    const auto rounded = [](u32 low, u32 high) { return bf16_pair(__uint_as_float(low), __uint_as_float(high)); };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load(raw[i], begin + offset + i * step);
    int slot = offset;
    u32 parity = 0;
    for (int base = begin + offset; base < end; base += AHEAD * step) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int stage = base + i * step;
            if (stage >= end) break;
            wait_at(barriers + 8 * (Room::SLOTS + slot), parity ^ 1);
            const uint4(&v)[PIECES] = raw[i];
            uint4 low, high;
            if constexpr (BF16) {
                low = make_uint4(v[0].x, v[0].z, v[1].x, v[1].z), high = make_uint4(v[0].y, v[0].w, v[1].y, v[1].w);
            } else {
                low = make_uint4(rounded(v[0].x, v[0].y), rounded(v[1].x, v[1].y), rounded(v[2].x, v[2].y), rounded(v[3].x, v[3].y));
                high = make_uint4(rounded(v[0].z, v[0].w), rounded(v[1].z, v[1].w), rounded(v[2].z, v[2].w), rounded(v[3].z, v[3].w));
            }
            if (row < rows) {
                *(uint4*)(to + slot * Room::STAGE + ((2 * part) ^ (row % 8)) * 16) = low;
                *(uint4*)(to + slot * Room::STAGE + ((2 * part + 1) ^ (row % 8)) * 16) = high;
            }
            load(raw[i], stage + AHEAD * step);
            show_to_products();
            __syncwarp();
            if (lane == 0) arrive_at(barriers + 8 * slot);
            slot += step;
            if (slot >= Room::SLOTS) slot -= Room::SLOTS, parity ^= 1;
        }
    }
#endif
}

// Cluster c: rows of tile c % row_tiles, and slabs of tile c / row_tiles, none of two groups; its block of rank r has chunk r.
// ROWS: inputs are rows, up to 32 of them, else tiles. PUSH: there is room for the sums beside the rings, so blocks give each other
// their parts and need not wait before they leave. Weights and outputs as in slab.cuh.
template <class Room, int BLOCK_BYTES, bool ROWS, bool PUSH, int PIECES_AHEAD>
__device__ __forceinline__ void split_linear(const uint4* weights0, const u8* scales0, const char* x, float* out0,
                                             const uint4* weights1, const u8* scales1, float* out1, const SplitShape& split) {
    extern __shared__ __align__(128) char shared_bytes[];
    constexpr int MT = Room::MT, N = Room::N, WARPS = Room::WARPS, QUADS = N / 8;
    const TileShape& shape = split.tile;
    char* const room = tile_room(shared_bytes);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rank = blockIdx.x % split.parts, unit = blockIdx.x / split.parts;
    const int group_slabs = shape.slabs / shape.groups, group_tiles = (group_slabs + MT * WARPS - 1) / (MT * WARPS);
    const int row0 = unit % shape.row_tiles * N, slab_tile = unit / shape.row_tiles;
    const int group = slab_tile / group_tiles, first = slab_tile % group_tiles * (MT * WARPS);
    const int stages = (shape.blocks + 1) / 2;
    const int begin = split.parts > 1 ? rank * shape.chunk_stages : 0;
    const int end = split.parts > 1 ? min(begin + shape.chunk_stages, stages) : stages;
    const int rows = min(N, shape.rows - row0);
    Ring<Room::SLOTS> inputs;
#if HAS_WGMMA
    if (threadIdx.x == 0) {
        const u32 barriers = (u32)__cvta_generic_to_shared(room) + Room::BARRIERS_AT;
        for (int i = 0; i < Room::SLOTS; i++) {
            start_barrier(barriers + 8 * i, ROWS ? (rows > 16 ? 4 : 2) : 1);
            start_barrier(barriers + 8 * (Room::SLOTS + i), WARPS / 4);
        }
    }
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
    __syncthreads();
    if (PUSH) arrive_in_cluster();
    let_next_start();
    if (warp >= WARPS) {
        wait_for_inputs();
        if constexpr (ROWS) {
            const size_t at = (size_t)row0 * split.x_stride + (size_t)group * split.columns;
            if (split.x_is_bf16) stage_rows<Room, true, 2 * PIECES_AHEAD>(room, x + at * 2, split, rows, begin, end);
            else stage_rows<Room, false, PIECES_AHEAD>(room, x + at * 4, split, rows, begin, end);
        } else if (warp == WARPS) {
            const size_t stride = (size_t)shape.atoms * 1024;
            const u32 bytes = min(N / 8, shape.atoms - row0 / 8) * 1024;
            x += (size_t)group * stages * stride + (size_t)row0 * 128;
            for (int stage = begin; stage < end; stage++) fetch_stage<Room>(room, inputs, x + stage * stride, bytes);
        }
        return;
    }
    Weights<Room, BLOCK_BYTES> weights;
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const int slab = group * group_slabs + min(first + m * WARPS + warp, group_slabs - 1), second = slab >= shape.first_slabs;
        const int own = second ? slab - shape.first_slabs : slab;
        weights.codes[m] = (second ? weights1 : weights0) + (size_t)own * shape.blocks * (BLOCK_BYTES / 16) + lane;
        weights.scales[m] = (second ? scales1 : scales0) + (size_t)(own / 2) * shape.scale_stride;
    }
    weights.start(room, begin, end, shape.blocks);
    u32 even[MT][16];
    weights.take(room, begin, even);
    // What is written may still be read by the launch before.
    wait_for_inputs();
    // Four sums of a lane: weight rows lane / 4 and 8 more of slab `index`, input rows 8 quad + 2 (lane % 4) and one more.
    const auto store = [&](int index, int quad, float4 v) {
        if (first + index >= group_slabs) return;
        const int slab = group * group_slabs + first + index, second = slab >= shape.first_slabs;
        const int row = (second ? slab - shape.first_slabs : slab) * 16 + lane / 4;
        const int begin_row = second ? shape.begin1 : shape.begin0, end_row = second ? shape.end1 : shape.end0;
        const int out_stride = second ? shape.out_stride1 : shape.out_stride0;
        const bool round = second ? shape.round_to_bf16_1 : shape.round_to_bf16_0;
        float* const out = (second ? out1 : out0) - begin_row;
        const float sums[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = row0 + quad * 8 + 2 * (lane % 4) + i % 2, at = row + i / 2 * 8;
            if (token < shape.rows && at >= begin_row && at < end_row)
                out[(size_t)token * out_stride + at] = round ? bf16_round(sums[i]) : sums[i];
        }
    };
    float4* const sums = (float4*)(room + (PUSH ? Room::BARRIERS_AT + Room::SLOTS * 16 : 0));
    split_stages<Room>(room, inputs, weights, begin, end, shape.chunk_stages, even, [&](int m, const float (&sum)[N / 2]) {
        if (m == 0) {
            // The others are there; else the rings are used up when every warp is here, and their room takes the chunk's sums.
            if constexpr (PUSH) wait_for_cluster();
            else barrier(1, WARPS * 32);
        }
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            const float4 v = make_float4(sum[4 * quad], sum[4 * quad + 1], sum[4 * quad + 2], sum[4 * quad + 3]);
            const int item = (m * QUADS + quad) * WARPS + warp, parts = split.parts;
            if constexpr (PUSH) store_in_cluster(sums + (item / parts * parts + rank) * 32 + lane, item % parts, v);
            else sums[item * 32 + lane] = v;
        }
    });
    arrive_in_cluster();
    wait_for_cluster();
    // Every block adds its part of the tile, left to right over the chunks, wherever they lie.
    for (int k = warp; k * split.parts + rank < MT * QUADS * WARPS; k += WARPS) {
        const int item = k * split.parts + rank;
        float4 v[8];
#pragma unroll
        for (int c = 0; c < 8; c++)
            if (c < split.parts) {
                if constexpr (PUSH) v[c] = sums[(k * split.parts + c) * 32 + lane];
                else v[c] = load_in_cluster(sums + item * 32 + lane, c);
            }
        float4 total = v[0];
#pragma unroll
        for (int c = 1; c < 8; c++)
            if (c < split.parts) total.x += v[c].x, total.y += v[c].y, total.z += v[c].z, total.w += v[c].w;
        store(item / (QUADS * WARPS) * WARPS + item % WARPS, item / WARPS % QUADS, total);
    }
    // None leaves while its sums are read.
    if constexpr (!PUSH) {
        __syncwarp();
        arrive_in_cluster();
        wait_for_cluster();
    }
}

// Warps that compute, and a warpgroup or a warp for the inputs.
constexpr int split_threads(int warps, bool rows) { return warps * 32 + (rows ? 128 : 32); }

// `most` blocks run on one multiprocessor.
#define SPLIT_LINEAR(name, format, block_bytes, warps, n, slots, depth, rows, push, most) \
    extern "C" __global__ void __launch_bounds__(split_threads(warps, rows), most) \
        name(const uint4* weights0, const u8* scales0, const char* x, float* out0, const uint4* weights1, const u8* scales1, \
             float* out1, SplitShape shape) { \
        split_linear<TileRoom<format, 1, n, false, slots, depth, warps>, block_bytes, rows, push, most == 1 ? 5 : 3>( \
            weights0, scales0, x, out0, weights1, scales1, out1, shape); \
    }
