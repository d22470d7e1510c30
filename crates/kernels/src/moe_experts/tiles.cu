// moe_experts.tiles: the routed experts' products for more rows than passes are good for, on Hopper's wgmma. Sums, activations and
// roundings as in kernel.cu, so bits are equal.
//   up    x[pair_row[p]] -> QDQ8(h[p]), laid out as down wants it       down  -> y[p][n], as in kernel.cu
// Blocks take tiles in turn: a slab for every warp that computes, and up to N of one expert's pairs, pairs innermost. Columns go in
// stages of 64, four stages a piece. A warpgroup fetches inputs, a piece into a slot: of up it gathers rows, of down one warp copies
// atoms. Every other warp copies the weights of its slab itself, RING pieces ahead and into the next tile, and decodes a stage while
// the one before is multiplied, also from piece to piece and tile to tile. Sums of chunks wait in shared memory.
// in   weights, scales as in kernel.cu; x: up [rows, stages, 8] of 16 bytes, columns in the order of tile.cuh (experts_rows); down
//      [stages, atoms, 8, 8] of 16 bytes (tile.cuh); lists of experts_group
// out  up [stages of down, atoms, 8, 8] of 16 bytes; down [pairs, out_stride] bf16
// grid any number of blocks; WARPS warps that compute and a warpgroup beside them
// max  whole pieces of columns, up whole pieces of a chunk too, and whole blocks of 32 columns of h
#include "experts.cuh"
#include "tile.cuh"

constexpr int PIECE = 4, PIECE_WEIGHTS = PIECE * (512 + 32);  // stages, and bytes of a slab's weights

struct TilesShape {
    int blocks, chunk_stages, slabs, atoms, out_stride;
    float limit;
};

struct TilesArgs {
    const uint4* weights;
    const u32* scales;
    const char* x;
    const u32 *active, *active_count, *starts, *counts, *tile_starts, *pair_row;
    const float* pair_weight;
    u16* out;
    TilesShape shape;
};

#if HAS_WGMMA
constexpr int OUT_ROW = 80;  // bytes of a pair's 32 activations in shared memory

// A stage's four steps of 64x16 by 16xN: d = a * b, plus d where `keep` is not zero. b: the low half of a descriptor (tile_descriptor).
// On its way until `wgmma_wait`. `eights`: of N columns the first eights * 8 are wanted.
#define STEPS(n, d, a0, a1, a2, a3) \
    WGMMA_STEP(n, d, a0, "b0", "keep") WGMMA_STEP(n, d, a1, "b1", "1") WGMMA_STEP(n, d, a2, "b2", "1") WGMMA_STEP(n, d, a3, "b3", "1") \
        "wgmma.commit_group.sync.aligned;\n"
#define DESCRIPTORS(b, keep) \
    "{\n.reg .pred keep, other;\n.reg .b32 low, high;\n.reg .b64 b0, b1, b2, b3;\nsetp.ne.b32 keep, " keep ", 0;\n" \
    "mov.b32 high, 0x40000040;\nmov.b64 b0, {" b ", high};\nadd.u32 low, " b ", 2;\nmov.b64 b1, {low, high};\n" \
    "add.u32 low, " b ", 4;\nmov.b64 b2, {low, high};\nadd.u32 low, " b ", 6;\nmov.b64 b3, {low, high};\n" \
    "wgmma.fence.sync.aligned;\n"
#define WEIGHTS8(a, i) "r"(a[i]), "r"(a[i + 1]), "r"(a[i + 2]), "r"(a[i + 3]), "r"(a[i + 4]), "r"(a[i + 5]), "r"(a[i + 6]), "r"(a[i + 7])
#define D16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define D32 D16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define D40 D32 ",%16,%17,%18,%19"
#define D48 D40 ",%20,%21,%22,%23"
#define D64 D48 ",%24,%25,%26,%27,%28,%29,%30,%31"

template <int N>
struct Stage;

template <>
struct Stage<16> {
    static __device__ __forceinline__ void multiply(float (&d)[8], const u32 (&a)[16], u32 b, int keep, u32) {
        asm volatile(DESCRIPTORS("%24", "%25")
            STEPS("16", D16, "%8,%9,%10,%11", "%12,%13,%14,%15", "%16,%17,%18,%19", "%20,%21,%22,%23") "}\n"
            : SUMS8(d, 0)
            : WEIGHTS8(a, 0), WEIGHTS8(a, 8), "r"(b), "r"(keep));
    }
};

template <>
struct Stage<64> {
    static __device__ __forceinline__ void multiply(float (&d)[32], const u32 (&a)[16], u32 b, int keep, u32 eights) {
#define STEPS64(n, d) STEPS(n, d, "%32,%33,%34,%35", "%36,%37,%38,%39", "%40,%41,%42,%43", "%44,%45,%46,%47")
        asm volatile(DESCRIPTORS("%48", "%49")
            "setp.ne.u32 other, %50, 5;\n@other bra.uni NO_40;\n" STEPS64("40", D40) "bra.uni END;\nNO_40:\n"
            "setp.gt.u32 other, %50, 4;\n@other bra.uni NO_32;\n" STEPS64("32", D32) "bra.uni END;\nNO_32:\n"
            "setp.gt.u32 other, %50, 6;\n@other bra.uni NO_48;\n" STEPS64("48", D48) "bra.uni END;\nNO_48:\n"
            STEPS64("64", D64) "END:\n}\n"
            : SUMS8(d, 0), SUMS8(d, 8), SUMS8(d, 16), SUMS8(d, 24)
            : WEIGHTS8(a, 0), WEIGHTS8(a, 8), "r"(b), "r"(keep), "r"(eights));
#undef STEPS64
    }
};

__device__ __forceinline__ void gather_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}
// This thread's copies so far arrive at the barrier when they are there.
__device__ __forceinline__ void arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
#endif

// From the first kilobyte boundary: slots of inputs, the warps' weights, sums of chunks, rows of activations.
template <int N_, int WARPS_COUNT, int RING_, int SLOTS_COUNT>
struct TilesRoom {
    static constexpr int N = N_, WARPS = WARPS_COUNT, RING = RING_, SLOTS = SLOTS_COUNT, INPUTS = PIECE * N * 128;
    static constexpr int WEIGHTS_AT = SLOTS * INPUTS, SUMS_AT = WEIGHTS_AT + WARPS * RING * PIECE_WEIGHTS;
    static constexpr int OUT_AT = SUMS_AT + WARPS * N / 8 * 512;
};

template <class Room, int GIVEN, int TAKEN, bool UP>
__device__ __forceinline__ void tiles(const TilesArgs& args) {
#if HAS_WGMMA
    constexpr int N = Room::N, WARPS = Room::WARPS, RING = Room::RING, SLOTS = Room::SLOTS;
    extern __shared__ __align__(128) char shared_bytes[];
    __shared__ u32 first_tiles[EXPERTS_MAX + 1], ids[EXPERTS_MAX], first_pairs[EXPERTS_MAX], pair_counts[EXPERTS_MAX];
    __shared__ u64 barriers[2 * SLOTS];
    const TilesShape& shape = args.shape;
    char* const room = tile_room(shared_bytes);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stages = shape.blocks;
    const u32 base = (u32)__cvta_generic_to_shared(room), full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * SLOTS;
    const u32 slab_tiles = (shape.slabs + WARPS - 1) / WARPS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) start_barrier(full + 8 * i, UP ? 128 : 1), start_barrier(empty + 8 * i, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    let_next_start();
    wait_for_inputs();
    const u32 experts = *args.active_count;
    for (u32 i = threadIdx.x; i <= experts; i += blockDim.x) {
        first_tiles[i] = args.tile_starts[i];
        if (i < experts) ids[i] = args.active[i], first_pairs[i] = args.starts[i], pair_counts[i] = args.counts[i];
    }
    __syncthreads();
    const u32 total = first_tiles[experts] * slab_tiles;
    struct Tile { u32 expert, slab, pair, count; };
    const auto tile_at = [&](u32 index) -> Tile {
        // The last expert whose tiles begin at or before this one.
        u32 low = 0, high = experts;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (first_tiles[middle] * slab_tiles <= index) low = middle;
            else high = middle;
        }
        const u32 own = first_tiles[low + 1] - first_tiles[low], local = index - first_tiles[low] * slab_tiles, first = local % own * N;
        return {ids[low], local / own * WARPS, first_pairs[low] + first, min(pair_counts[low] - first, (u32)N)};
    };
    Ring<SLOTS> inputs;
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GIVEN));
        if (UP) {
            // Eight threads a row, of every sixteenth row.
            constexpr int OWN = N / 16;
            const int thread = threadIdx.x % 128, piece = thread % 8, row0 = thread / 8;
            const u32 to = base + row0 / 8 * 1024 + row0 % 8 * 128 + (piece ^ (row0 % 8)) * 16;
            for (u32 index = blockIdx.x; index < total; index += gridDim.x) {
                const Tile tile = tile_at(index);
                const char* from[OWN];
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    const u32 row = row0 + 16 * i;
                    from[i] = args.x + ((size_t)(row < tile.count ? args.pair_row[tile.pair + row] : 0) * stages * 8 + piece) * 16;
                }
                for (int stage = 0; stage < stages; stage += PIECE) {
                    wait_at(empty + 8 * inputs.slot, inputs.parity ^ 1);
#pragma unroll
                    for (int i = 0; i < OWN; i++) {
                        if (row0 + 16 * i < (int)tile.count) {
#pragma unroll
                            for (int k = 0; k < PIECE; k++)
                                gather_async(to + inputs.slot * Room::INPUTS + k * N * 128 + i * 2048, from[i] + k * 128);
                        }
                        from[i] += PIECE * 128;
                    }
                    arrive_with_copies(full + 8 * inputs.slot);
                    inputs.next();
                }
            }
            return;
        }
        if (warp > WARPS) return;
        for (u32 index = blockIdx.x; index < total; index += gridDim.x) {
            const Tile tile = tile_at(index);
            const char* from = args.x + (size_t)tile.pair * 128 + (size_t)lane * shape.atoms * 1024;
            const u32 bytes = (tile.count + 7) / 8 * 1024;
            for (int stage = 0; stage < stages; stage += PIECE) {
                const u32 arrived = full + 8 * inputs.slot;
                wait_at(empty + 8 * inputs.slot, inputs.parity ^ 1);
                if (lane == 0) expect_bytes(arrived, PIECE * bytes);
                __syncwarp();
                if (lane < PIECE) copy_bulk(base + inputs.slot * Room::INPUTS + lane * N * 128, from, bytes, arrived);
                from += (size_t)PIECE * shape.atoms * 1024;
                __syncwarp();
                inputs.next();
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(TAKEN));
    char* const ring = room + Room::WEIGHTS_AT + warp * (RING * PIECE_WEIGHTS);
    char* const codes_of_ring = ring + lane * 16;
    const char* const words_of_ring = ring + PIECE * 512 + lane / 4 * 4;
    // The next piece of weights to copy, this lane's part, and where it goes.
    u32 coming = blockIdx.x;
    int pieces = 0, to = 0;
    const uint4 *codes = nullptr, *words = nullptr;
    const auto copy_piece = [&]() {
        if (pieces == 0 && coming < total) {
            const Tile tile = tile_at(coming);
            // Slabs beyond the last are computed and dropped.
            const size_t block = (size_t)(tile.expert * shape.slabs + min(tile.slab + warp, (u32)shape.slabs - 1)) * stages;
            codes = args.weights + block * 32 + lane, words = (const uint4*)(args.scales + block * 8) + lane;
            coming += gridDim.x, pieces = stages / PIECE;
        }
        if (pieces > 0) {
            pieces--;
#pragma unroll
            for (int k = 0; k < PIECE; k++) copy_async_16(codes_of_ring + to + k * 512, codes + k * 32);
            if (lane < PIECE * 2) copy_async_16(codes_of_ring + PIECE * 512 + to, words);
            codes += PIECE * 32, words += PIECE * 2;
        }
        end_copy_group();
        to = to == (RING - 1) * PIECE_WEIGHTS ? 0 : to + PIECE_WEIGHTS;
    };
    for (int i = 0; i < RING; i++) copy_piece();

    u32 a[2][16];
    int at = 0;  // the place in the ring that is read
    const auto take = [&](int k, u32 (&into)[16], auto wait) {
        const uint4 v = *(const uint4*)(codes_of_ring + at + k * 512);
        const u32 word = *(const u32*)(words_of_ring + at + k * 32);
        wait();
        const u32 f[4] = {power_pair_of<0>(word, 126), power_pair_of<1>(word, 126), power_pair_of<2>(word, 126),
                          power_pair_of<3>(word, 126)};
        const u32 four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 pair[4];
            decode_fp4(four[i], f[i / 2 * 2], f[i / 2 * 2 + 1], pair);
            into[4 * i] = pair[0], into[4 * i + 1] = pair[2], into[4 * i + 2] = pair[1], into[4 * i + 3] = pair[3];
        }
    };
    // A piece's scales are copied by eight lanes for all.
    wait_for_copy_groups<RING - 1>();
    __syncwarp();
    take(0, a[0], [] {});
    const u32 descriptor = (u32)tile_descriptor(base);
    float4* const sums = (float4*)(room + Room::SUMS_AT) + warp * (N / 8 * 32) + lane;
    const auto piece_done = [&]() {
        if (lane == 0) arrive_at(empty + 8 * (inputs.slot == 0 ? SLOTS - 1 : inputs.slot - 1));
        __syncwarp();
    };
    for (u32 index = blockIdx.x; index < total; index += gridDim.x) {
        const Tile tile = tile_at(index);
        const u32 eights = (tile.count + 7) / 8;
        float acc[N / 2];
        int chunk_end = min(shape.chunk_stages, stages);
        bool first = true;
        int keep = 0;
        for (int stage = 0; stage < stages; stage += PIECE) {
            wait_at(full + 8 * inputs.slot, inputs.parity);
            // Rows come by ordinary copies, which the tensor core sees behind this only.
            if (UP) show_to_products();
            const u32 b = descriptor + inputs.slot * (Room::INPUTS / 16);
#pragma unroll
            for (int k = 0; k < PIECE; k++) {
                Stage<N>::multiply(acc, a[k % 2], b + k * N * 8, keep, eights);
                keep = 1;
                if (k == PIECE - 1) {
                    // What was in the ring's place is in registers.
                    __syncwarp();
                    at = at == (RING - 1) * PIECE_WEIGHTS ? 0 : at + PIECE_WEIGHTS;
                    copy_piece();
                    wait_for_copy_groups<RING - 1>();
                    __syncwarp();
                }
                take((k + 1) % PIECE, a[(k + 1) % 2], [] { wgmma_wait<1>(); });
                // The piece before is done: its last products have been waited for.
                if (k == 0 && stage > 0) piece_done();
                if ((!UP || k == PIECE - 1) && stage + k + 1 == chunk_end) {
#pragma unroll
                    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[(k + 1) % 2][i]));
                    wgmma_wait<0>();
                    // Chunks are added left to right.
#pragma unroll
                    for (int i = 0; i < N / 8; i++) {
                        float4 v = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
                        if (!first) {
                            const float4 sum = sums[i * 32];
                            v = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
                        }
                        sums[i * 32] = v;
                    }
                    first = false, keep = 0, chunk_end = min(chunk_end + shape.chunk_stages, stages);
                }
            }
            inputs.next();
        }
        piece_done();
        // A lane's sums: weight rows lane / 4 and that + 8, pairs 2 (lane % 4) and the next of every eight.
        const u32 slab = tile.slab + warp, own = 2 * (lane % 4);
        if (!UP) {
            if (slab >= (u32)shape.slabs) continue;
#pragma unroll 1
            for (u32 i = 0; i < eights; i++) {
                const float4 v = sums[i * 32];
                const u32 pair = i * 8 + own;
                u16* const out = args.out + (size_t)(tile.pair + pair) * shape.out_stride + slab * 16 + lane / 4;
                if (pair < tile.count) out[0] = f32_to_bf16(v.x), out[8] = f32_to_bf16(v.z);
                if (pair + 1 < tile.count) out[shape.out_stride] = f32_to_bf16(v.y), out[shape.out_stride + 8] = f32_to_bf16(v.w);
            }
            continue;
        }
        // A warpgroup's activations are a block of 32 columns.
        char* const rows = room + Room::OUT_AT + warp / 4 * (N * OUT_ROW);
#pragma unroll 1
        for (u32 i = 0; i < eights; i++) {
            const float4 v = sums[i * 32];
            const u32 pair = i * 8 + own;
            const float* const weight = args.pair_weight + tile.pair + pair;
            char* const row = rows + pair * OUT_ROW + (warp % 4 * 8 + lane / 4) * 2;
            if (pair < tile.count) *(u16*)row = activation(v.x, v.z, weight[0], shape.limit);
            if (pair + 1 < tile.count) *(u16*)(row + OUT_ROW) = activation(v.y, v.w, weight[1], shape.limit);
        }
        barrier(1 + warp / 4, 128);
        const u32 column = (slab & ~3u) * 8;
        if (column < (u32)shape.out_stride) {
#pragma unroll 1
            for (u32 item = threadIdx.x % 128; item < eights * 32; item += 128) {
                const u32 pair = item / 4, eight = item % 4;
                if (pair >= tile.count) continue;
                const uint4 v = *(const uint4*)(rows + pair * OUT_ROW + eight * 16);
                u32 w[4] = {v.x, v.y, v.z, v.w};
                round_eight(w);
                // Columns 0 1 4 5 of each eight go into a piece of sixteen, 2 3 6 7 into the next; a neighbour has the other eight.
                const u32 four = 15u << (lane & 28), odd = eight & 1;
                const u32 other0 = __shfl_xor_sync(four, odd ? w[0] : w[1], 1), other1 = __shfl_xor_sync(four, odd ? w[2] : w[3], 1);
                const uint4 put = odd ? make_uint4(other0, other1, w[1], w[3]) : make_uint4(w[0], w[2], other0, other1);
                const u32 row = tile.pair + pair, piece = column % 64 / 8 + (eight & 2) + odd;
                ((uint4*)args.out)[((size_t)(column / 64) * shape.atoms + row / 8) * 64 + row % 8 * 8 + (piece ^ (row % 8))] = put;
            }
        }
        barrier(1 + warp / 4, 128);
    }
#endif
}

#define TILES(name, room, threads, given, taken, up) \
    extern "C" __global__ void __launch_bounds__(threads, 1) \
        name(const uint4* weights, const u32* scales, const char* x, const u32* active, const u32* active_count, const u32* starts, \
             const u32* counts, const u32* tile_starts, const u32* pair_row, const float* pair_weight, u16* out, TilesShape shape) { \
        tiles<room, given, taken, up>( \
            {weights, scales, x, active, active_count, starts, counts, tile_starts, pair_row, pair_weight, out, shape}); \
    }
using Narrow = TilesRoom<16, 16, 3, 4>;
using Wide = TilesRoom<64, 16, 2, 2>;
TILES(experts_up_16, Narrow, 640, 32, 112, true)
TILES(experts_down_16, Narrow, 640, 32, 112, false)
TILES(experts_up_64, Wide, 640, 32, 112, true)
TILES(experts_down_64, Wide, 640, 32, 112, false)

struct RowsShape {
    int rows, columns;
};

// Rows as bf16, a group of 16 columns in the order of tile.cuh. One thread a piece of eight; columns are whole stages of 64.
// in   x [rows, columns] float32 that holds bf16 values        out  [rows, columns / 8] of 16 bytes
extern "C" __global__ void __launch_bounds__(256) experts_rows(const float* x, uint4* out, RowsShape shape) {
    let_next_start();
    wait_for_inputs();
    const u32 total = (u32)shape.rows * (shape.columns / 8);
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < total; i += gridDim.x * 256) {
        // Two neighbours share sixteen columns: this one's begin at 0 or 2, two of every four.
        const float* const from = x + (size_t)(i / 2) * 16 + i % 2 * 2;
        u32 words[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const float2 v = *(const float2*)(from + 4 * j);
            words[j] = bf16_pair(v.x, v.y);
        }
        out[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
