// Linears of many rows on Hopper's wgmma. A block goes from tile to tile: MT * 128 weight rows by N input rows. Two warpgroups
// compute as in tile.cuh, chunk by chunk; a tile's outputs lie in shared memory until other warps have stored them, while the
// next tile is computed. Each output is the chain and the fold of slab.cuh, so bits are equal.
#pragma once
#include "tile.cuh"

// Shared memory of a block: that of TileRoom, where the parked sums' room is there in any case and takes the outputs too.
template <class Format_, int MT_, int N_, bool PARK_, int SLOTS_, int DEPTH_>
struct FlowRoom : TileRoom<Format_, MT_, N_, PARK_, SLOTS_, DEPTH_> {
    static constexpr int GROUP_ROWS = MT_ * 64;  // weight rows of a warpgroup
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
#pragma unroll 4
                for (int i = storer * LINES + lane / QUADS; i < rows; i += STORERS / 32 * LINES) {
                    float4 v = *(const float4*)(sums + i * GROUP_ROWS + (quad * 4 ^ i / 2 % 4 * 8));
                    if (round) v = make_float4(bf16_round(v.x), bf16_round(v.y), bf16_round(v.z), bf16_round(v.w));
                    float* const to = out + (size_t)(row + i) * stride;
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
