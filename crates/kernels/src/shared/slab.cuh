// The skinny linear that the formats share: weights stream through registers, inputs lie in shared memory.
//
// A slab is 16 weight rows, a block 32 columns; a warp computes one slab times one chunk of columns for up to 32 input
// rows (four tiles of 8). Each output is a chain of tensor-core steps per chunk, ascending, and the chunks are added left
// to right in float32. The chunk length belongs to the operator. Rows, grid and warps only decide who computes what.
#pragma once
#include "tensor.cuh"

// How many chunks, who holds them and where results go. Mirrors the launcher's struct field by field.
struct LinearShape {
    int rows, x_stride;     // of the input
    int x_is_bf16;          // then rows hold whole blocks, zero beyond their columns; else float32, rounded when staged
    int blocks;             // of a group
    int chunk_blocks, chunks;
    int groups;             // of slabs, each with its own columns of x
    int phases;             // 1, or how often the inputs are staged piece by piece (only with one chunk)
    int scale_stride;
    int sums_at;            // byte of shared memory where a block's own sums begin
    int slabs;              // of both weights
    int first_slabs;        // of the first: the rest belongs to the second, which goes without groups
    // Of each weight: rows [begin, end) are stored, at columns 0 and up of `out`.
    int begin0, end0, out_stride0, round_to_bf16_0;
    int begin1, end1, out_stride1, round_to_bf16_1;
};

struct LinearArgs {
    const void* x;          // [rows, x_stride] float32 or bf16, 16-byte aligned rows
    float4* partials;       // [slabs, chunks, tiles, 32] where there are several chunks
    u32* counters;          // [slabs], zero before and after
    const uint4* weights0;  // [slabs, blocks, Format::VECTORS, 32 lanes] of 16 bytes
    const uint4* weights1;
    const u8* scales0;      // [ceil(slabs / 2), scale_stride] E8M0, rows 8-byte aligned, or null
    const u8* scales1;
    float* out0;            // [rows, out_stride] float32
    float* out1;
    LinearShape shape;
};

#define LINEAR_PARAMETERS \
    const uint4 *weights0, const u8 *scales0, const void *x, float *out0, const uint4 *weights1, const u8 *scales1, \
        float *out1, float4 *partials, u32 *counters, LinearShape shape
#define LINEAR_ARGS \
    { x, partials, counters, weights0, weights1, scales0, scales1, out0, out1, shape }

// Bytes between staged rows: eight rows of four lanes' eight bytes meet every bank once.
__device__ __forceinline__ int staged_stride(int blocks) { return blocks * 64 + 32; }

// Columns [32 * from, 32 * (from + count)) of every row into shared memory. Rows that no one asked for stay as they are: a
// column of the product depends on its own row only.
template <int PIECES>
__device__ __forceinline__ void stage_inputs(const LinearArgs& args, char* staged, int from, int count) {
    const LinearShape& shape = args.shape;
    if (PIECES == 0 || shape.x_is_bf16) {
        const u16* x = (const u16*)args.x + from * 32;
        for (int row = 0; row < shape.rows; row++, x += shape.x_stride, staged += staged_stride(count))
            for (int part = threadIdx.x; part < count * 4; part += blockDim.x) copy_async_16(staged + part * 16, x + part * 8);
        wait_for_copies();
        return;
    }
    // PIECES of a thread at a time, so that their loads overlap; 0 where inputs are always bf16.
    constexpr int ROOM = PIECES > 0 ? PIECES : 1;
    const float* const x = (const float*)args.x + from * 32;
    const int parts = count * 4, stride = staged_stride(count);
    int row = 0, part = threadIdx.x;
    while (row < shape.rows) {
        float4 low[ROOM], high[ROOM];
        char* to[ROOM];
#pragma unroll
        for (int i = 0; i < ROOM; i++) {
            while (part >= parts) part -= parts, row++;
            to[i] = nullptr;
            if (row < shape.rows) {
                const float* at = x + (size_t)row * shape.x_stride + part * 8;
                low[i] = *(const float4*)at, high[i] = *(const float4*)(at + 4);
                to[i] = staged + row * stride + part * 16;
            }
            part += blockDim.x;
        }
#pragma unroll
        for (int i = 0; i < ROOM; i++)
            if (to[i])
                *(uint4*)to[i] = make_uint4(bf16_pair(low[i].x, low[i].y), bf16_pair(low[i].z, low[i].w),
                                            bf16_pair(high[i].x, high[i].y), bf16_pair(high[i].z, high[i].w));
    }
}

template <int N>
struct Tiles {
    static constexpr int COUNT = N;
};

// Tiles of 8 rows: 1, 2 or 4. What lies beyond the rows is computed and dropped.
__device__ __forceinline__ int tile_count(int rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : 4; }

// Who computes the chunks of a slab: the warps of one block; or warps of different blocks, because the inputs of all chunks
// are too much for one or because reading them everywhere costs too much. Those meet in the shared memory of a cluster, or
// in `partials`. Either way the chunks are added in their order.
enum Fold { TOGETHER, CLUSTER, APART };

// DEPTH: blocks that a warp has in flight. WHOLE: every chunk is a multiple of DEPTH blocks.
template <class Format, int DEPTH, bool WHOLE, Fold FOLD>
__device__ __forceinline__ void slab_linear(const LinearArgs& args) {
    extern __shared__ __align__(128) char shared_bytes[];
    const LinearShape& shape = args.shape;
    constexpr int VECTORS = Format::VECTORS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = tile_count(shape.rows);
    const int team_warps = FOLD == TOGETHER ? shape.chunks : 1, parts = shape.groups * (FOLD == TOGETHER ? 1 : shape.chunks);
    const int teams = blockDim.x / 32 / team_warps, team = warp / team_warps;
    const int part = blockIdx.x % parts, member = blockIdx.x / parts, members = gridDim.x / parts;
    const int group = FOLD == TOGETHER ? part : part / shape.chunks;
    const int chunk = FOLD == TOGETHER ? warp % team_warps : part % shape.chunks;
    const int group_slabs = shape.slabs / shape.groups;
    const int first_block = chunk * shape.chunk_blocks;
    const int chunk_blocks = min(shape.chunk_blocks, shape.blocks - first_block);
    const int phase_blocks = chunk_blocks / shape.phases;
    const int staged_first = FOLD == TOGETHER ? 0 : first_block;
    const int staged_blocks = FOLD == TOGETHER ? shape.blocks : chunk_blocks;
    const int mine = member < group_slabs ? (group_slabs - member + members - 1) / members : 0;
    const int rounds = (mine + teams - 1) / teams;
    // Inputs [tiles * 8 rows, staged columns of a phase and 32 bytes]; scale codes [mine, window]; sums: TOGETHER [teams, 2,
    // chunks, tiles, 32], CLUSTER [slabs of this rank, chunks, tiles, 32].
    char* const staged = shared_bytes;
    const int stride = staged_stride(staged_blocks / shape.phases);
    char* const codes = shared_bytes + tiles * 8 * stride;
    float4* const sums = (float4*)(shared_bytes + shape.sums_at);
    const int window = (staged_blocks + 15) & ~7, window_first = staged_first & ~7;

    const auto slab_of = [&](int index) { return group * group_slabs + member + index * members; };
    const auto weights_of = [&](int index) {
        const int slab = slab_of(index), second = slab >= shape.first_slabs;
        const u32 at = (u32)((second ? slab - shape.first_slabs : slab) * shape.blocks + first_block) * (VECTORS * 32) + lane;
        return (second ? args.weights1 : args.weights0) + at;
    };
    const auto finish = [&](int slab, const float (&sum)[4][4]) {
        const int second = slab >= shape.first_slabs;
        const int row0 = (second ? slab - shape.first_slabs : slab) * 16 + lane / 4;
        float* const out = second ? args.out1 : args.out0;
        const int begin = second ? shape.begin1 : shape.begin0, end = second ? shape.end1 : shape.end0;
        const int out_stride = second ? shape.out_stride1 : shape.out_stride0;
        const int round_to_bf16 = second ? shape.round_to_bf16_1 : shape.round_to_bf16_0;
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            if (tile >= tiles) break;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = tile * 8 + 2 * (lane % 4) + (i & 1), row = row0 + (i >> 1) * 8;
                if (token >= shape.rows || row < begin || row >= end) continue;
                const float value = round_to_bf16 ? bf16_round(sum[tile][i]) : sum[tile][i];
                out[(u32)(token * out_stride + row - begin)] = value;
                // One output at a time: the ring is full of the next slab.
                asm volatile("" ::: "memory");
            }
        }
    };
    // Left to right over the chunks of one slab, whose sums begin at `from`.
    const auto fold = [&](const float4* from, float (&sum)[4][4]) {
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            if (tile < tiles) {
                const auto read = [&](int c) {
                    const float4* at = from + (c * tiles + tile) * 32 + lane;
                    return FOLD == APART ? load_shared_value(at) : *at;
                };
                float4 total = read(0);
#pragma unroll 1
                for (int c = 1; c < shape.chunks; c++) {
                    const float4 v = read(c);
                    total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
                }
                sum[tile][0] = total.x, sum[tile][1] = total.y, sum[tile][2] = total.z, sum[tile][3] = total.w;
            }
        }
    };

    if (Format::SCALED) {
        const int count = min(window, shape.scale_stride - window_first) / 8;
        for (int i = threadIdx.x; i < mine * count; i += blockDim.x) {
            const int index = i / count, at = i % count * 8, slab = slab_of(index), second = slab >= shape.first_slabs;
            const u8* from = second ? args.scales1 + (size_t)((slab - shape.first_slabs) / 2) * shape.scale_stride
                                    : args.scales0 + (size_t)(slab / 2) * shape.scale_stride;
            copy_async(codes + index * window + at, from + window_first + at);
        }
    }
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
    if (FOLD == CLUSTER) arrive_in_cluster();
    let_next_start();
    wait_for_inputs();

    float acc[4][4];
    for (int round = 0; round < rounds; round++) {
        const int index = round * teams + team;
        for (int phase = 0; phase < shape.phases; phase++) {
            if (shape.phases > 1 || round == 0) {
                __syncthreads();
                const int count = staged_blocks / shape.phases;
                // Pieces: as many as the registers beside the ring take.
                constexpr int PIECES = Format::IS_HEAD ? 0 : DEPTH * VECTORS >= 16 || DEPTH == 9 ? 3 : VECTORS == 2 ? 1 : 2;
                stage_inputs<PIECES>(args, staged, group * shape.blocks + staged_first + phase * count, count);
                // The scale codes of this thread, too: whoever reads them is another.
                if (Format::SCALED) wait_for_copies();
                __syncthreads();
            }
            if (index >= mine) continue;
            if (phase == 0) {
#pragma unroll
                for (int tile = 0; tile < 4; tile++)
#pragma unroll
                    for (int i = 0; i < 4; i++) acc[tile][i] = 0.0f;
            }
            const uint4* here = weights_of(index) + phase * phase_blocks * (VECTORS * 32);
            const bool last_phase = phase + 1 == shape.phases;
            const bool more = !last_phase || index + teams < mine;
            const uint4* next = !last_phase ? here + phase_blocks * (VECTORS * 32) : more ? weights_of(index + teams) : here;
            const u8* code = (const u8*)codes + index * window + first_block - window_first;
            // Lane (g, t) takes columns 4t..4t+3 of each k16 group of row g.
            const char* input = staged + lane / 4 * stride + (first_block - staged_first) * 64 + lane % 4 * 8;
            // One loop, unrolled for each tile count: without a branch in it the next blocks' decoding overlaps this one's steps.
            const auto run = [&](auto tag) {
                constexpr int TILES = decltype(tag)::COUNT;
                for (int block = 0; block < phase_blocks; block += DEPTH) {
                    const bool inside = block + DEPTH < phase_blocks;
                    const uint4* from = inside ? here + (block + DEPTH) * (VECTORS * 32) : next;
                    const int room = inside ? phase_blocks - block - DEPTH : phase_blocks;
                    const bool refill = inside || more;
#pragma unroll
                    for (int i = 0; i < DEPTH; i++) {
                        u32 a[8];
                        const bool present = WHOLE || block + i < phase_blocks;
                        if (present) Format::decode(ring[i], Format::SCALED ? power_pair(code[block + i], 120) : 0, a);
                        if (refill && (WHOLE || i < room))
#pragma unroll
                            for (int v = 0; v < VECTORS; v++) ring[i][v] = load_once(from + (i * VECTORS + v) * 32);
                        if (!present) continue;
#pragma unroll
                        for (int tile = 0; tile < TILES; tile++) {
                            // With several tiles the branch keeps decoding from running so far ahead that registers spill.
                            if (TILES > 1 && tile >= tiles) continue;
                            const uint2 b0 = *(const uint2*)(input + tile * 8 * stride);
                            const uint2 b1 = *(const uint2*)(input + tile * 8 * stride + 32);
                            mma_k16(acc[tile], a[0], a[1], a[2], a[3], b0.x, b0.y);
                            mma_k16(acc[tile], a[4], a[5], a[6], a[7], b1.x, b1.y);
                        }
                        input += 64;
                        // Two blocks are enough to run ahead; more would spill registers.
                        if (i % 2 == 1) asm volatile("" ::: "memory");
                    }
                }
            };
            if (!Format::IS_HEAD && tiles == 1) run(Tiles<1>());
            else if (!Format::IS_HEAD && tiles == 2) run(Tiles<2>());
            else run(Tiles<4>());
        }
        if (FOLD == CLUSTER && round == 0) wait_for_cluster();
        if (index >= mine) continue;
        const int slab = slab_of(index);
        if (shape.chunks == 1) {
            finish(slab, acc);
            continue;
        }
        float4* to;
        if (FOLD == TOGETHER) to = sums + (size_t)(team * 2 + (round & 1)) * shape.chunks * tiles * 32;
        else if (FOLD == CLUSTER) to = sums + (size_t)(index / shape.chunks) * shape.chunks * tiles * 32;
        else to = args.partials + (size_t)slab * shape.chunks * tiles * 32;
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            if (tile < tiles) {
                const float4 v = make_float4(acc[tile][0], acc[tile][1], acc[tile][2], acc[tile][3]);
                float4* at = to + (chunk * tiles + tile) * 32 + lane;
                if (FOLD == TOGETHER) *at = v;
                else if (FOLD == CLUSTER) store_in_cluster(at, index % shape.chunks, v);
                else store_shared_value(at, v);
            }
        }
        if (FOLD == CLUSTER) continue;
        if (FOLD == TOGETHER) {
            // Two sets of sums in turn: who folds one may be late while the others fill the other.
            barrier(1 + team, team_warps * 32);
            if (round % team_warps != chunk) continue;
        } else {
            __syncwarp();
            u32 arrived = 0;
            if (lane == 0) arrived = arrive(args.counters + slab);
            arrived = __shfl_sync(~0u, arrived, 0);
            if (arrived + 1 != (u32)shape.chunks) continue;
            // The last to arrive adds all chunks in their order, whoever it is.
            if (lane == 0) args.counters[slab] = 0;
        }
        fold(to, acc);
        finish(slab, acc);
    }
    if (FOLD == CLUSTER) {
        // A block without slabs has not waited yet.
        if (rounds == 0) wait_for_cluster();
        arrive_in_cluster();
        wait_for_cluster();
        for (int index = chunk + warp * shape.chunks; index < mine; index += teams * shape.chunks) {
            fold(sums + (size_t)(index / shape.chunks) * shape.chunks * tiles * 32, acc);
            finish(slab_of(index), acc);
        }
    }
}
