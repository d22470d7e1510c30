// Linears of many rows on Hopper's wgmma. A block goes from tile to tile: MT * 128 weight rows by N input rows. Two warpgroups
// compute as in tile.cuh, chunk by chunk; a tile's outputs lie in shared memory until other warps have stored them, while the
// next tile is computed. Each output is the chain and the fold of slab.cuh, so bits are equal.
#pragma once
#include "tile.cuh"

// Shared memory of a block: that of TileRoom, where the parked sums' room is there in any case and takes the outputs too.
template <class Format_, int MT_, int N_, bool PARK_, int SLOTS_, int DEPTH_>
struct FlowRoom : TileRoom<Format_, MT_, N_, PARK_, SLOTS_, DEPTH_> {
    static constexpr int GROUP_ROWS = MT_ * 64;  // weight rows of a warpgroup
    // Of a thread that computes and of the others; the widest tile leaves the storing warps fewer.
    static constexpr bool WIDE = MT_ == 1 && N_ > 176;
    static constexpr int REGISTERS = WIDE ? 232 : 224, OTHERS_REGISTERS = WIDE ? 40 : 56;
    static constexpr int BARRIERS_AT = TileRoom<Format_, MT_, N_, PARK_, SLOTS_, DEPTH_>::SUMS_AT + 2 * GROUP_ROWS * N_ * 4;
};

constexpr int STORERS = 96;
// Named barriers, for each of the two warpgroups: its outputs are there; they have left; its warps are together.
constexpr int OUTPUTS_READY = 1, OUTPUTS_GONE = 3, TOGETHER_HERE = 5;

// Counts for a barrier's other threads without waiting for them.
__device__ __forceinline__ void arrive_at_barrier(u32 index, u32 threads) {
    asm volatile("bar.arrive %0, %1;" : : "r"(index), "r"(threads) : "memory");
}

// Which slab of which weight.
struct OwnSlab {
    int index;
    bool second;
};

template <class Room>
struct FlowTiles {
    static constexpr int TILE_SLABS = Room::MT * 8;
    const TileShape& shape;
    const int group_slabs, group_tiles, count;

    __device__ __forceinline__ explicit FlowTiles(const TileShape& shape)
        : shape(shape),
          group_slabs(shape.slabs / shape.groups),
          group_tiles((group_slabs + TILE_SLABS - 1) / TILE_SLABS),
          count(shape.row_tiles * shape.groups * group_tiles) {}
    __device__ __forceinline__ int row(int tile) const { return tile % shape.row_tiles * Room::N; }
    __device__ __forceinline__ int group(int tile) const { return tile / shape.row_tiles / group_tiles; }
    // Counted in the group.
    __device__ __forceinline__ int first_slab(int tile) const { return tile / shape.row_tiles % group_tiles * TILE_SLABS; }
    __device__ __forceinline__ OwnSlab own(int group, int slab) const {
        const int index = group * group_slabs + slab;
        const bool second = index >= shape.first_slabs;
        return {second ? index - shape.first_slabs : index, second};
    }
};

// The warp that fetches inputs.
template <class Room>
__device__ __forceinline__ void flow_inputs(char* room, const char* x, const FlowTiles<Room>& tiles) {
    const TileShape& shape = tiles.shape;
    const int stages = (shape.blocks + 1) / 2;
    const size_t stride = (size_t)shape.atoms * 1024;
    Ring<Room::SLOTS> ring;
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        const int row = tiles.row(tile);
        const u32 bytes = min(Room::N / 8, shape.atoms - row / 8) * 1024;
        const char* from = x + (size_t)tiles.group(tile) * stages * stride + (size_t)row * 128;
        for (int stage = 0; stage < stages; stage++) fetch_stage<Room>(room, ring, from + stage * stride, bytes);
    }
}

// A warp that stores outputs: [input rows, weight rows of a warpgroup], in which eights of weight rows are swapped by the input
// row, so that banks meet once on either side.
template <class Room>
__device__ __forceinline__ void flow_outputs(const char* room, int storer, float* out0, float* out1, const FlowTiles<Room>& tiles) {
    constexpr int GROUP_ROWS = Room::GROUP_ROWS, QUADS = GROUP_ROWS / 4, LINES = 32 / QUADS, THREADS = STORERS + 128;
    const TileShape& shape = tiles.shape;
    const int lane = threadIdx.x % 32, quad = lane % QUADS;
    for (int warpgroup = 0; warpgroup < 2; warpgroup++) arrive_at_barrier(OUTPUTS_GONE + warpgroup, THREADS);
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        const int row = tiles.row(tile), rows = min(Room::N, shape.rows - row);
#pragma unroll 1
        for (int warpgroup = 0; warpgroup < 2; warpgroup++) {
            const int slab = tiles.first_slab(tile) + warpgroup * (Room::MT * 4) + quad / 4;
            const OwnSlab own = tiles.own(tiles.group(tile), slab);
            const int begin = own.second ? shape.begin1 : shape.begin0, end = own.second ? shape.end1 : shape.end0;
            const int stride = own.second ? shape.out_stride1 : shape.out_stride0;
            const bool round = own.second ? shape.round_to_bf16_1 : shape.round_to_bf16_0;
            const int first = own.index * 16 + quad % 4 * 4;
            float* const out = (own.second ? out1 : out0) + first - begin;
            const bool whole = first >= begin && first + 4 <= end && ((size_t)out | (size_t)stride * 4) % 16 == 0;
            const float* const sums = (const float*)(room + Room::SUMS_AT) + warpgroup * GROUP_ROWS * Room::N;
            barrier(OUTPUTS_READY + warpgroup, THREADS);
            if (slab < tiles.group_slabs) {
                constexpr int STEP = STORERS / 32 * LINES, BATCH = Room::WIDE ? 2 : 4;
                const auto staged = [&](int i) {
                    const float4 v = *(const float4*)(sums + i * GROUP_ROWS + (quad * 4 ^ i / 2 % 4 * 8));
                    return round ? make_float4(bf16_round(v.x), bf16_round(v.y), bf16_round(v.z), bf16_round(v.w)) : v;
                };
                int i = storer * LINES + lane / QUADS;
                float* to = out + (size_t)(row + i) * stride;
                if (whole) {
                    // Several rows at a time, so that their reads overlap.
#pragma unroll 1
                    for (; i + (BATCH - 1) * STEP < rows; i += BATCH * STEP) {
                        float4 v[BATCH];
#pragma unroll
                        for (int j = 0; j < BATCH; j++) v[j] = staged(i + j * STEP);
#pragma unroll
                        for (int j = 0; j < BATCH; j++, to += (size_t)STEP * stride) *(float4*)to = v[j];
                    }
                }
#pragma unroll 1
                for (; i < rows; i += STEP, to += (size_t)STEP * stride) {
                    const float4 v = staged(i);
                    if (whole) {
                        *(float4*)to = v;
                        continue;
                    }
                    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        if (first + j >= begin && first + j < end) to[j] = values[j];
                }
            }
            arrive_at_barrier(OUTPUTS_GONE + warpgroup, THREADS);
        }
    }
}

// The weights of a warp's slabs, stage by stage and on from tile to tile: the ring that its own copies fill, and scale codes, which
// come a stage before they are needed.
template <class Room, int BLOCK_BYTES>
struct FlowWeights {
    using Format = typename Room::Format;
    static constexpr int MT = Room::MT;
    static constexpr bool SCALED = Format::PIECES == 2;
    const FlowTiles<Room>& tiles;
    const uint4* const weights0;
    const uint4* const weights1;
    const u8* const scales0;
    const u8* const scales1;
    const uint4* codes[MT];
    const u8* scales[MT];
    u32 next_scales[MT];
    typename Format::Raw raw[MT];
    u32 low[MT][8];
    int stages, copy_tile, copy_stage, take_tile, take_stage;
    Ring<Room::DEPTH> ring;

    __device__ __forceinline__ OwnSlab own(int tile, int m) const {
        const int slab = tiles.first_slab(tile) + threadIdx.x / 32 * MT + m;
        return tiles.own(tiles.group(tile), min(slab, tiles.group_slabs - 1));
    }
    __device__ __forceinline__ void place_codes() {
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const OwnSlab slab = own(copy_tile, m);
            codes[m] = (slab.second ? weights1 : weights0) + (size_t)slab.index * tiles.shape.blocks * (BLOCK_BYTES / 16) + threadIdx.x % 32;
        }
    }
    __device__ __forceinline__ void place_scales() {
        if constexpr (SCALED) {
#pragma unroll
            for (int m = 0; m < MT; m++) {
                const OwnSlab slab = own(take_tile, m);
                scales[m] = (slab.second ? scales1 : scales0) + (size_t)(slab.index / 2) * tiles.shape.scale_stride;
            }
        }
    }
    __device__ __forceinline__ void load_scales() {
        if constexpr (SCALED) {
#pragma unroll
            for (int m = 0; m < MT; m++) next_scales[m] = __ldg((const u16*)(scales[m] + take_stage * 2));
        }
    }
    __device__ __forceinline__ void copy(char* room, int slot) {
        if (copy_tile < tiles.count) {
#pragma unroll
            for (int m = 0; m < MT; m++) {
                typename Format::Source from;
                from.codes = codes[m];
                copy_weights<Room>(room, slot, m, from, copy_stage, tiles.shape.blocks);
            }
            if (++copy_stage == stages) {
                copy_stage = 0, copy_tile += gridDim.x;
                if (copy_tile < tiles.count) place_codes();
            }
        }
        end_copy_group();
    }
    // Into the slot of the stage before, which is taken.
    __device__ __forceinline__ void copy_ahead(char* room) {
        copy(room, ring.slot == 0 ? Room::DEPTH - 1 : ring.slot - 1);
        ring.next();
    }
    // The next stage; its first half is decoded at once.
    __device__ __forceinline__ void take(char* room) {
        wait_for_copy_groups<Room::DEPTH - 2>();
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const char* const at = weights_place<Room>(room, ring.slot, m) + lane * 16;
#pragma unroll
            for (int i = 0; i < Format::PIECES; i++) raw[m].v[i] = *(const uint4*)(at + i * 512);
            if constexpr (SCALED) raw[m].scales = next_scales[m];
        }
        if (++take_stage == stages) {
            take_stage = 0, take_tile += gridDim.x;
            if (take_tile < tiles.count) place_scales();
        }
        load_scales();
#pragma unroll
        for (int m = 0; m < MT; m++) Format::template decode<0>(raw[m], low[m]);
    }
    __device__ __forceinline__ void start(char* room) {
        stages = (tiles.shape.blocks + 1) / 2;
        copy_tile = take_tile = blockIdx.x, copy_stage = take_stage = 0;
        place_codes();
        place_scales();
        for (int slot = 0; slot < Room::DEPTH - 1; slot++) copy(room, slot);
        load_scales();
        take(room);
    }
};

// A warpgroup that computes.
template <class Room, int BLOCK_BYTES>
__device__ __forceinline__ void flow_products(char* room, const FlowTiles<Room>& tiles, FlowWeights<Room, BLOCK_BYTES>& weights) {
#if HAS_WGMMA
    using Format = typename Room::Format;
    constexpr int MT = Room::MT, N = Room::N, SUMS = N / 2, GROUP_ROWS = Room::GROUP_ROWS, THREADS = STORERS + 128;
    constexpr bool PARK = Room::PARK;
    // Whether the next products are on their way before the last ones are awaited.
    constexpr bool EAGER = N >= 128;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = warp / 4;
    const int stages = weights.stages, chunk_stages = tiles.shape.chunk_stages;
    const u32 base = (u32)__cvta_generic_to_shared(room), barriers = base + Room::BARRIERS_AT;
    float* const sums = (float*)(room + Room::SUMS_AT) + warpgroup * GROUP_ROWS * N;
    float4* const parked = (float4*)sums + threadIdx.x % 128;
    Ring<Room::SLOTS> inputs;
    int held = 0;
    u32 high[MT][8];
    float acc[MT][SUMS], total[PARK ? 1 : MT][PARK ? 1 : SUMS];
    const auto release = [&](int slot) {
        if (threadIdx.x % 128 == 0) arrive_at(barriers + 8 * (Room::SLOTS + slot));
    };
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
        for (int first = 0; first < stages; first += chunk_stages) {
            const int end = min(first + chunk_stages, stages);
#pragma unroll 1
            for (int stage = first; stage < end; stage++) {
                wait_at(barriers + 8 * inputs.slot, inputs.parity);
                const u64 descriptor = tile_descriptor(base + inputs.slot * Room::STAGE);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int m = 0; m < MT; m++)
                        Wgmma<N>::step(acc[m], weights.low[m] + 4 * k, descriptor + 2 * k, k > 0 || stage > first);
                wgmma_commit();
                if constexpr (EAGER) {
                    wgmma_wait<1>();
                    if (stage > first) release(held);
                    held = inputs.slot;
                }
                // The second half is decoded while the first is multiplied.
#pragma unroll
                for (int m = 0; m < MT; m++) Format::template decode<1>(weights.raw[m], high[m]);
                weights.copy_ahead(room);
                wgmma_fence();
#pragma unroll
                for (int k = 2; k < 4; k++)
#pragma unroll
                    for (int m = 0; m < MT; m++) Wgmma<N>::step(acc[m], high[m] + 4 * (k - 2), descriptor + 2 * k, 1);
                wgmma_commit();
                // The next stage's first half is decoded while the second is multiplied.
                wgmma_wait<1>();
                weights.take(room);
                if constexpr (!EAGER) {
                    wgmma_wait<0>();
                    release(inputs.slot);
                }
                inputs.next();
            }
            if constexpr (EAGER) {
                wgmma_wait<0>();
                release(held);
            }
            const bool last = end == stages;
            // The outputs of the tile before have left the room.
            if (PARK ? first == 0 : last) barrier(OUTPUTS_GONE + warpgroup, THREADS);
#pragma unroll
            for (int m = 0; m < MT; m++)
                add_chunk<PARK, SUMS, 128>(parked + m * (SUMS / 4) * 128, acc[m], total[PARK ? 0 : m], first > 0, last);
        }
        // All of the warpgroup have read what they parked.
        if constexpr (PARK) barrier(TOGETHER_HERE + warpgroup, 128);
        float* const to = sums + 2 * (lane % 4) * GROUP_ROWS;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                const int row = (warp % 4 * MT + m) * 16 + i / 2 % 2 * 8 + lane / 4;
                to[(i / 4 * 8 + i % 2) * GROUP_ROWS + (row ^ lane % 4 * 8)] = PARK ? acc[m][i] : total[m][i];
            }
        arrive_at_barrier(OUTPUTS_READY + warpgroup, THREADS);
    }
    // What the storers arrived at last.
    barrier(OUTPUTS_GONE + warpgroup, THREADS);
#endif
}

// Tiles in turn, rows first: tile t has rows of t % row_tiles, and slabs of t / row_tiles, none of two groups.
template <class Room, int BLOCK_BYTES>
__device__ __forceinline__ void flow_linear(const uint4* weights0, const u8* scales0, const char* x, float* out0,
                                            const uint4* weights1, const u8* scales1, float* out1, const TileShape& shape) {
    extern __shared__ __align__(128) char shared_bytes[];
#if HAS_WGMMA
    char* const room = tile_room(shared_bytes);
    const int warp = threadIdx.x / 32;
    const FlowTiles<Room> tiles(shape);
    start_tiles<Room>(room);
    let_next_start();
    if (warp >= Room::WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Room::OTHERS_REGISTERS));
        // All of them: who starts behind this launch relies on its end for what this launch waits for.
        wait_for_inputs();
        if (warp == Room::WARPS) flow_inputs<Room>(room, x, tiles);
        else flow_outputs<Room>(room, warp - Room::WARPS - 1, out0, out1, tiles);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Room::REGISTERS));
    FlowWeights<Room, BLOCK_BYTES> weights = {tiles, weights0, weights1, scales0, scales1};
    weights.start(room);
    wait_for_inputs();
    flow_products<Room, BLOCK_BYTES>(room, tiles, weights);
#endif
}

#define FLOW_LINEAR(name, format, block_bytes, mt, n, park, slots, depth) \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1) \
        name(const uint4* weights0, const u8* scales0, const char* x, float* out0, const uint4* weights1, const u8* scales1, \
             float* out1, TileShape shape) { \
        flow_linear<FlowRoom<format, mt, n, park, slots, depth>, block_bytes>(weights0, scales0, x, out0, weights1, scales1, out1, shape); \
    }
