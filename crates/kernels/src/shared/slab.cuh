// The skinny linear that the formats share: weights stream through registers, inputs lie in shared memory.
//
// A slab is 16 weight rows, a block 32 columns; a warp computes one slab times one chunk of columns for up to 32 input
// rows (four tiles of 8). Each output is a chain of tensor-core steps per chunk, ascending, and the chunks are added left
// to right in float32. The chunk length belongs to the operator. Rows, grid and warps only decide who computes what.
#pragma once
#include "tensor.cuh"

// How many chunks, who holds them and where results go. Mirrors the launcher's struct byte for byte.
struct LinearArgs {
    const uint4* weights;   // [slabs, blocks, Format::VECTORS, 32 lanes] of 16 bytes
    const u8* scales;       // [ceil(slabs / 2), blocks] E8M0, or null
    const u16* x;           // [rows, x_stride] bf16, 16-byte aligned rows
    void* out;              // [rows, out_stride] float32 or bf16; null where only `best` is wanted
    float4* partials;       // [slabs, chunks, tiles, 32] where there are several chunks
    u32* counters;          // [slabs + 1], zero before and after
    u64* best;              // [rows] zero before and after, or null
    u32* best_index;        // [rows]: argmax over the weight rows, ties to the lowest
    int rows, x_stride, out_stride, out_is_bf16;
    int slabs, blocks;      // of the whole weight
    int chunk_blocks, chunks;
    int groups;             // of slabs, each with its own columns of x
    int phases;             // 1, or how often the inputs are staged piece by piece (only with one chunk)
    int sums_at;            // byte of shared memory where a block's own sums begin
};

// An order of float32 as integers: NaN below all, zeros alike.
__device__ __forceinline__ u32 order_key(float value) {
    const u32 bits = __float_as_uint(value + 0.0f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u64 best_of(u64 a, u64 b) { return a > b ? a : b; }

// Columns [32 * from, 32 * (from + count)) of every row into shared memory as the tensor core wants them: block, row
// (tiles * 8), quarter t, 16 bytes = columns 4t..4t+3 of both k16 groups. Rows that no one asked for stay as they are: a
// column of the product depends on its own row only.
__device__ __forceinline__ void stage_inputs(const LinearArgs& args, char* staged, int from, int count, int tiles) {
    const u16* x = args.x + from * 32;
    for (int row = 0; row < args.rows; row++, x += args.x_stride) {
        for (int quad = threadIdx.x; quad < count * 4; quad += blockDim.x) {
            char* to = staged + (size_t)(quad / 4 * tiles * 8 + row) * 64 + (quad & 1) * 32 + (quad >> 1 & 1) * 8;
            copy_async(to, x + quad * 8);
            copy_async(to + 16, x + quad * 8 + 4);
        }
    }
    wait_for_copies();
}

// The winners of all blocks; the last block writes the indices and leaves everything zero again. Integer maxima: any order
// gives the same winner.
__device__ __forceinline__ void finish_argmax(const LinearArgs& args, const u64 (&best)[4][2], int tiles) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
        if (tile < tiles) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u64 key = best[tile][i];
                for (int step = 4; step < 32; step *= 2) key = best_of(key, __shfl_xor_sync(~0u, key, step));
                const int token = tile * 8 + 2 * (lane % 4) + i;
                if (lane < 4 && token < args.rows && key) atomicMax(args.best + token, key);
            }
        }
    }
    __syncthreads();
    __shared__ u32 arrived;
    if (threadIdx.x == 0) {
        __threadfence();
        arrived = arrive(args.counters + args.slabs);
    }
    __syncthreads();
    if (arrived + 1 != gridDim.x) return;
    for (int token = threadIdx.x; token < args.rows; token += blockDim.x) {
        const u64 key = atomicExch(args.best + token, 0);
        args.best_index[token] = ~(u32)key;
    }
    if (threadIdx.x == 0) args.counters[args.slabs] = 0;
}

// DEPTH: blocks that a warp has in flight. WHOLE: every chunk is a multiple of DEPTH blocks. APART: chunks of a slab lie in
// different thread blocks and meet in `partials`, where the inputs of all chunks are too much for one.
template <class Format, int DEPTH, bool WHOLE, bool APART>
__device__ __forceinline__ void slab_linear(const LinearArgs& args) {
    extern __shared__ __align__(128) char shared_bytes[];
    constexpr int VECTORS = Format::VECTORS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = (args.rows + 7) / 8;
    // A team computes all chunks of a slab, one a warp; or, apart, every warp is a team and holds one chunk of many slabs.
    const int team_warps = APART ? 1 : args.chunks, parts = args.groups * (APART ? args.chunks : 1);
    const int teams = blockDim.x / 32 / team_warps, team = warp / team_warps;
    const int part = blockIdx.x % parts, member = blockIdx.x / parts, members = gridDim.x / parts;
    const int group = APART ? part / args.chunks : part;
    const int chunk = APART ? part % args.chunks : warp % team_warps;
    const int group_slabs = args.slabs / args.groups;
    const int first_block = chunk * args.chunk_blocks;
    const int chunk_blocks = min(args.chunk_blocks, args.blocks - first_block);
    const int phase_blocks = chunk_blocks / args.phases;
    const int staged_first = APART ? first_block : 0, staged_blocks = APART ? chunk_blocks : args.blocks;
    const int mine = member < group_slabs ? (group_slabs - member + members - 1) / members : 0;
    const int rounds = (mine + teams - 1) / teams;
    // Inputs [staged blocks of a phase, tiles * 8 rows, 64 bytes], factors [mine, staged_blocks], sums [teams, 2, chunks, tiles, 32].
    char* const staged = shared_bytes;
    u32* const factors = (u32*)(shared_bytes + (size_t)(staged_blocks / args.phases) * tiles * 512);
    float4* const sums = (float4*)(shared_bytes + args.sums_at) + team * 2 * args.chunks * tiles * 32;

    const auto slab_of = [&](int index) { return group * group_slabs + member + index * members; };
    const auto weights_of = [&](int index) {
        return args.weights + ((size_t)slab_of(index) * args.blocks + first_block) * (VECTORS * 32) + lane;
    };

    // The first weights are on their way before anything is waited for.
    uint4 ring[DEPTH][VECTORS];
    if (team < mine) {
        const uint4* from = weights_of(team);
#pragma unroll
        for (int i = 0; i < DEPTH; i++)
            if (WHOLE || i < phase_blocks)
#pragma unroll
                for (int v = 0; v < VECTORS; v++) ring[i][v] = load_once(from + (i * VECTORS + v) * 32);
    }
    if (Format::SCALED) {
        for (int index = 0; index < mine; index++) {
            const u8* scales = args.scales + (size_t)(slab_of(index) / 2) * args.blocks + staged_first;
            for (int block = threadIdx.x; block < staged_blocks; block += blockDim.x)
                factors[index * staged_blocks + block] = power_pair((u32)scales[block] + 120);
        }
    }
    let_next_start();
    wait_for_inputs();

    float acc[4][4];
    u64 best[4][2] = {};
    for (int round = 0; round < rounds; round++) {
        const int index = round * teams + team;
        for (int phase = 0; phase < args.phases; phase++) {
            if (args.phases > 1 || round == 0) {
                __syncthreads();
                const int count = staged_blocks / args.phases;
                stage_inputs(args, staged, group * args.blocks + staged_first + phase * count, count, tiles);
                __syncthreads();
            }
            if (index >= mine) continue;
            if (phase == 0) {
#pragma unroll
                for (int tile = 0; tile < 4; tile++)
#pragma unroll
                    for (int i = 0; i < 4; i++) acc[tile][i] = 0.0f;
            }
            const uint4* here = weights_of(index) + (size_t)phase * phase_blocks * VECTORS * 32;
            const bool last_phase = phase + 1 == args.phases;
            const bool more = !last_phase || index + teams < mine;
            const uint4* next = last_phase ? (more ? weights_of(index + teams) : here)
                                           : here + (size_t)phase_blocks * VECTORS * 32;
            const u32* factor = factors + index * staged_blocks + first_block - staged_first;
            const char* input = staged + (size_t)(first_block - staged_first) * tiles * 512 + lane * 16;
            for (int block = 0; block < phase_blocks; block += DEPTH) {
                const bool inside = block + DEPTH < phase_blocks;
                const uint4* from = inside ? here + (size_t)(block + DEPTH) * VECTORS * 32 : next;
                const int room = inside ? phase_blocks - block - DEPTH : phase_blocks;
                const bool refill = inside || more;
#pragma unroll
                for (int i = 0; i < DEPTH; i++) {
                    if (WHOLE || block + i < phase_blocks) {
                        u32 a[8];
                        Format::decode(ring[i], Format::SCALED ? factor[block + i] : 0, a);
                        if (refill && (WHOLE || i < room))
#pragma unroll
                            for (int v = 0; v < VECTORS; v++) ring[i][v] = load_once(from + (i * VECTORS + v) * 32);
#pragma unroll
                        for (int tile = 0; tile < 4; tile++) {
                            if (tile < tiles) {
                                const uint4 b = *(const uint4*)(input + tile * 512);
                                mma_k16(acc[tile], a[0], a[1], a[2], a[3], b.x, b.y);
                                mma_k16(acc[tile], a[4], a[5], a[6], a[7], b.z, b.w);
                            }
                        }
                        input += tiles * 512;
                    } else if (refill && i < room) {
#pragma unroll
                        for (int v = 0; v < VECTORS; v++) ring[i][v] = load_once(from + (i * VECTORS + v) * 32);
                    }
                }
            }
        }
        if (index >= mine) continue;
        const int slab = slab_of(index), g = lane / 4, t = lane % 4;
        if (args.chunks > 1) {
            float4* partials;
            if (APART) {
                partials = args.partials + (size_t)slab * args.chunks * tiles * 32 + lane;
            } else {
                // Two sets in turn: who folds one may be late while the others fill the other.
                partials = sums + (round & 1) * args.chunks * tiles * 32 + lane;
            }
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                if (tile < tiles) {
                    const float4 v = make_float4(acc[tile][0], acc[tile][1], acc[tile][2], acc[tile][3]);
                    if (APART) store_shared_value(partials + (chunk * tiles + tile) * 32, v);
                    else partials[(chunk * tiles + tile) * 32] = v;
                }
            }
            if (APART) {
                __syncwarp();
                u32 arrived = 0;
                if (lane == 0) arrived = arrive(args.counters + slab);
                arrived = __shfl_sync(~0u, arrived, 0);
                if (arrived + 1 != (u32)args.chunks) continue;
                // The last to arrive adds all chunks in their order, whoever it is.
                if (lane == 0) args.counters[slab] = 0;
            } else {
                barrier(1 + team, team_warps * 32);
                if (round % team_warps != chunk) continue;
            }
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                if (tile < tiles) {
                    const auto read = [&](int c) {
                        const float4* from = partials + (c * tiles + tile) * 32;
                        return APART ? load_shared_value(from) : *from;
                    };
                    float4 sum = read(0);
#pragma unroll 2
                    for (int c = 1; c < args.chunks; c++) {
                        const float4 v = read(c);
                        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
                    }
                    acc[tile][0] = sum.x, acc[tile][1] = sum.y, acc[tile][2] = sum.z, acc[tile][3] = sum.w;
                }
            }
        }
        const int row0 = slab * 16 + g;
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            if (tile < tiles) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int token = tile * 8 + 2 * t + (i & 1), row = row0 + (i >> 1) * 8;
                    if (token >= args.rows) continue;
                    if (args.out) {
                        const size_t at = (size_t)token * args.out_stride + row;
                        if (args.out_is_bf16) ((u16*)args.out)[at] = f32_to_bf16(acc[tile][i]);
                        else ((float*)args.out)[at] = acc[tile][i];
                    }
                    if (Format::ARGMAX) {
                        const u64 key = (u64)order_key(acc[tile][i]) << 32 | (u32)~row;
                        best[tile][i & 1] = best_of(best[tile][i & 1], key);
                    }
                }
            }
        }
    }
    if constexpr (Format::ARGMAX) {
        if (args.best) finish_argmax(args, best, tiles);
    }
}
