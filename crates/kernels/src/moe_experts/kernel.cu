// moe_experts: the routed experts of a few rows, each distinct expert's weights read once
//   up    h[p][i] = bf16(silu(min(limit, bf16(x w1^T))) * clamp(bf16(x w3^T)) * routing weight), x = row of pair p
//   down  y[p][n] = bf16(QDQ8(h[p]) w2^T)
// A pair is one row's pick of one expert; pairs are ordered by (expert, row), and a pass is so many of an expert's as share a
// read of its weights. Blocks cut the slabs of all passes evenly, so that an expert of many pairs is not one block's burden.
// in   weights, scales  packed by pack_cuda.rs: slabs of 16 rows; up holds 8 rows of w1, then the same 8 of w3
//      x [rows, columns] float32 that holds bf16 values (up, already QDQ8'd) or h [pairs, columns] bf16 (down)
// out  out [pairs, out_stride] bf16
// grid any number of blocks; chunks * teams warps of 32, teams at most 15; dynamic shared memory: inputs and partials
// sum  per chunk of columns a chain of k16 tensor-core steps, ascending; chunks left to right in float32; one rounding
// max  scale codes 2 to 128, so that code times scale is exact in bf16 (checked when packed); an expert with more pairs than
//      staged rows reads its weights again
#include "experts.cuh"
#include "tile.cuh"

struct ExpertShape {
    int columns, out_stride, slabs, blocks, chunk_blocks, chunks;
    float limit;
    int staged_rows;             // 1 to 8: pairs of an expert in one pass at most
};

// Pairs of one expert that share a read of its weights.
struct __align__(16) Pass {
    u32 expert, first_pair, count, unused;
};

struct ExpertArgs {
    const uint4* weights;        // [experts, slabs, blocks, 32 lanes] of 16 bytes; a block is 64 columns
    const u32* scales;           // [experts, slabs, blocks, 8] words of four codes
    const void* x;
    const Pass* passes;          // [pass_count], experts ascending
    const u32* pass_count;
    const u32* pair_row;         // [pairs]
    const float* pair_weight;    // [pairs]
    u16* out;
    ExpertShape shape;
};

constexpr int SPAN_MAX = 48;  // passes that one block meets

template <int DEPTH, bool WHOLE, bool UP>
__device__ __forceinline__ void experts(const ExpertArgs& args) {
    extern __shared__ __align__(128) char shared_bytes[];
    const ExpertShape& shape = args.shape;
    __shared__ Pass passes[SPAN_MAX];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int chunks = shape.chunks, teams = blockDim.x / 32 / chunks, team = warp / chunks, chunk = warp % chunks;
    const int slabs = shape.slabs, g = lane / 4, t = lane % 4;
    const int first_block = chunk * shape.chunk_blocks;
    const int chunk_blocks = min(shape.chunk_blocks, shape.blocks - first_block);
    // Sums [teams, 2, chunks, 32], a ring of weights [warps, DEPTH] that each lane fills and reads for itself, then inputs
    // [blocks, 2, rows, 64 bytes].
    float4* const sums = (float4*)shared_bytes;
    char* const ring = shared_bytes + (size_t)blockDim.x * 32 + (size_t)warp * DEPTH * SLOT;
    char* const staged = shared_bytes + (size_t)blockDim.x * 32 + (size_t)blockDim.x / 32 * DEPTH * SLOT;
    const int rows = shape.staged_rows;

    // The launch before lets this one start only when the passes are complete: weights are on their way while it ends.
    const u32 total = *args.pass_count * slabs;
    const u32 begin = (u64)total * blockIdx.x / gridDim.x, end = (u64)total * (blockIdx.x + 1) / gridDim.x;
    if (begin == end) {
        wait_for_inputs();
        return;
    }
    const int first = begin / slabs, last = (end - 1) / slabs - first;
    for (int i = threadIdx.x; i <= last; i += blockDim.x) passes[i] = args.passes[first + i];
    __syncthreads();

    // A warp's units in order: within a pass its slabs, then the next pass.
    const auto slab_begin = [&](int pass) { return pass == 0 ? (int)(begin % slabs) : 0; };
    const auto slab_end = [&](int pass) { return pass == last ? (int)((end - 1) % slabs) + 1 : slabs; };
    struct Unit { int pass, slab; };
    const auto settle = [&](Unit u) {
        while (u.pass <= last && u.slab >= slab_end(u.pass)) u.slab = slab_begin(++u.pass) + team;
        return u;
    };
    const auto weights_of = [&](Unit u) {
        return args.weights + (((size_t)passes[u.pass].expert * slabs + u.slab) * shape.blocks + first_block) * 32 + lane;
    };
    const auto scales_of = [&](Unit u) {
        return args.scales + (((size_t)passes[u.pass].expert * slabs + u.slab) * shape.blocks + first_block) * 8 + g;
    };

    const auto load = [&](int slot, const uint4* codes, const u32* scales) {
        copy_async_16(ring + slot * SLOT + lane * 16, codes);
        copy_async_4(ring + slot * SLOT + 512 + lane * 4, scales);
    };
    Unit unit = team < teams ? settle({0, slab_begin(0) + team}) : Unit{last + 1, 0};
    const uint4* here = args.weights;
    const u32* here_scales = args.scales;
    if (unit.pass <= last) {
        here = weights_of(unit), here_scales = scales_of(unit);
        const uint4* from = here;
        const u32* from_scales = here_scales;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (WHOLE || i < chunk_blocks) load(i, from + i * 32, from_scales + i * 8);
            end_copy_group();
        }
    }
    wait_for_inputs();
    let_next_start();

    int parity = 0, folder = 0;
    wait_for_copy_groups<DEPTH - 1>();
    uint4 next_codes = *(const uint4*)(ring + lane * 16);
    u32 next_word = *(const u32*)(ring + 512 + lane * 4);
    for (int pass = 0; pass <= last; pass++) {
        const int pair0 = passes[pass].first_pair, count = passes[pass].count;
        __syncthreads();
        // A column without a pair reads the last pair's row: it depends on nothing else and is not stored.
        for (int row = 0; row < count; row++) {
            const size_t first = (size_t)(UP ? args.pair_row[pair0 + row] : pair0 + row) * shape.columns;
            for (int quad = threadIdx.x; quad < shape.blocks * 8; quad += blockDim.x) {
                // The last block may be half a block: columns beyond are zero.
                const bool present = quad * 8 < shape.columns;
                char* to = staged + (size_t)(quad / 4 * rows + row) * 64 + (quad & 1) * 32 + (quad >> 1 & 1) * 8;
                if (UP) {
                    const float* x = (const float*)args.x + first + quad * 8;
                    float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f), high = low;
                    if (present) low = *(const float4*)x, high = *(const float4*)(x + 4);
                    *(uint2*)to = make_uint2(bf16_pair(low.x, low.y), bf16_pair(low.z, low.w));
                    *(uint2*)(to + 16) = make_uint2(bf16_pair(high.x, high.y), bf16_pair(high.z, high.w));
                    continue;
                }
                // Four neighbouring threads round a block of 32; rows have whole blocks, so the four are active together.
                uint4 v = make_uint4(0, 0, 0, 0);
                if (present) v = *(const uint4*)((const u16*)args.x + first + quad * 8);
                u32 words[4] = {v.x, v.y, v.z, v.w};
                round_eight(words);
                *(uint2*)to = make_uint2(words[0], words[1]);
                *(uint2*)(to + 16) = make_uint2(words[2], words[3]);
            }
        }
        __syncthreads();
        while (unit.pass == pass) {
            // The next slab of the same pass is a step away; anything else is looked up.
            Unit next_unit = {pass, unit.slab + teams};
            const uint4* next = here + (size_t)teams * shape.blocks * 32;
            const u32* next_scales = here_scales + (size_t)teams * shape.blocks * 8;
            bool more = true;
            if (next_unit.slab >= slab_end(pass)) {
                next_unit = settle(next_unit);
                more = next_unit.pass <= last;
                next = more ? weights_of(next_unit) : here;
                next_scales = more ? scales_of(next_unit) : here_scales;
            }
            const char* input = staged + (size_t)first_block * 2 * rows * 64 + min(g, count - 1) * 64 + t * 16;
            float acc[4] = {};
            for (int block = 0; block < chunk_blocks; block += DEPTH) {
                const bool inside = block + DEPTH < chunk_blocks;
                const uint4* from = inside ? here + (block + DEPTH) * 32 : next;
                const u32* from_scales = inside ? here_scales + (block + DEPTH) * 8 : next_scales;
                const int room = inside ? chunk_blocks - block - DEPTH : chunk_blocks;
                const bool refill = inside || more;
#pragma unroll
                for (int i = 0; i < DEPTH; i++) {
                    if (!WHOLE && block + i >= chunk_blocks) {
                        if (refill && i < room) load(i, from + i * 32, from_scales + i * 8);
                        end_copy_group();
                        continue;
                    }
                    // This block's codes are in registers; the next one's leave the ring while this one is computed.
                    uint4 codes = next_codes;
                    u32 word = next_word;
                    wait_for_copy_groups<WHOLE ? DEPTH - 2 : 0>();
                    if (WHOLE) {
                        const int slot = i + 1 == DEPTH ? 0 : i + 1;
                        next_codes = *(const uint4*)(ring + slot * SLOT + lane * 16);
                        next_word = *(const u32*)(ring + slot * SLOT + 512 + lane * 4);
                    } else {
                        // The next block may be of another unit and belong into this very slot, so nothing is read ahead.
                        codes = *(const uint4*)(ring + i * SLOT + lane * 16);
                        word = *(const u32*)(ring + i * SLOT + 512 + lane * 4);
                    }
                    const uint4 b0 = *(const uint4*)input, b1 = *(const uint4*)(input + rows * 64);
                    // Bytes: rows g and g + 8 of the first 32 columns, then of the second.
                    const u32 f0 = power_pair_of<0>(word, 126), f1 = power_pair_of<1>(word, 126);
                    const u32 f2 = power_pair_of<2>(word, 126), f3 = power_pair_of<3>(word, 126);
                    u32 a[4];
                    decode_fp4(codes.x, f0, f1, a);
                    mma_k16(acc, a[0], a[2], a[1], a[3], b0.x, b0.y);
                    decode_fp4(codes.y, f0, f1, a);
                    mma_k16(acc, a[0], a[2], a[1], a[3], b0.z, b0.w);
                    decode_fp4(codes.z, f2, f3, a);
                    mma_k16(acc, a[0], a[2], a[1], a[3], b1.x, b1.y);
                    decode_fp4(codes.w, f2, f3, a);
                    mma_k16(acc, a[0], a[2], a[1], a[3], b1.z, b1.w);
                    // The slot is free: what was read from it has been used.
                    if (refill && (WHOLE || i < room)) load(i, from + i * 32, from_scales + i * 8);
                    end_copy_group();
                    input += rows * 128;
                }
            }
            // Two sets of sums: who folds one may be late while the others fill the other.
            float4* const set = sums + (size_t)(team * 2 + parity) * chunks * 32 + lane;
            set[chunk * 32] = make_float4(acc[0], acc[1], acc[2], acc[3]);
            barrier(1 + team, chunks * 32);
            if (folder == chunk) {
                float4 sum = set[0];
#pragma unroll 1
                for (int c = 1; c < chunks; c++) {
                    const float4 v = set[c * 32];
                    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
                }
                const float value[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int column = 2 * t + i;
                    if (column >= count) continue;
                    u16* out = args.out + (size_t)(pair0 + column) * shape.out_stride;
                    if (UP) {
                        out[unit.slab * 8 + g] = activation(value[i], value[i + 2], args.pair_weight[pair0 + column], shape.limit);
                    } else {
                        out[unit.slab * 16 + g] = f32_to_bf16(value[i]);
                        out[unit.slab * 16 + g + 8] = f32_to_bf16(value[i + 2]);
                    }
                }
            }
            parity ^= 1;
            folder = folder + 1 == chunks ? 0 : folder + 1;
            unit = next_unit, here = next, here_scales = next_scales;
        }
    }
}

#define EXPERTS(name, threads, depth, whole, up) \
    extern "C" __global__ void __launch_bounds__(threads, 1) \
        name(const uint4* weights, const u32* scales, const void* x, const Pass* passes, const u32* pass_count, \
             const u32* pair_row, const float* pair_weight, u16* out, ExpertShape shape) { \
        experts<depth, whole, up>({weights, scales, x, passes, pass_count, pair_row, pair_weight, out, shape}); \
    }
EXPERTS(experts_up_10, 640, 10, true, true)
EXPERTS(experts_up_5, 640, 5, true, true)
EXPERTS(experts_up_any, 640, 4, false, true)
EXPERTS(experts_down_9, 640, 9, true, false)
EXPERTS(experts_down_3, 640, 3, true, false)
EXPERTS(experts_down_any, 640, 4, false, false)

constexpr int TILE = 12288;       // picks that lie in shared memory at a time, in whole rows
constexpr int FOUND = 256;        // picks that a warp has found and not yet placed, at most

struct GroupShape {
    int rows, picks, experts;
    int align;      // of an expert's first pair: 1, or 8 where pairs go in tiles
    int tile;       // pairs of a tile, or of a pass
};

// Sorts the picks by (expert, row). One block a 16 experts; each counts all picks, since that is quicker than to meet.
// A pick of an expert that does not exist has no pair.
// in   selected, routing [rows, picks]
// out  active, active_count, starts, pair_row, pair_weight as above (starts has one entry more than there are active experts);
//      counts [active]: pairs; tile_starts [active + 1]: tiles of pairs before the expert's; passes, pass_count: all of those
//      tiles; pair_row is ~0 where alignment leaves a gap; pair_of [rows, picks]: the pairs of each row in ascending expert id,
//      ~0 for none
extern "C" __global__ void __launch_bounds__(512, 1)
    experts_group(const u32* selected, const float* routing, u32* active, u32* active_count, u32* starts, u32* pair_row,
                  float* pair_weight, u32* pair_of, u32* counts, u32* tile_starts, Pass* passes, u32* pass_count, GroupShape shape) {
    __shared__ u32 begins[EXPERTS_MAX], sums[16], actives[16], tile_sums[16];
    __shared__ __align__(8) u16 ids[TILE];
    __shared__ u16 found[16][FOUND];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int count = shape.rows * shape.picks;
    const int whole = TILE / shape.picks * shape.picks;
    begins[thread] = 0;
    __syncthreads();
    let_next_start();
    wait_for_inputs();
#pragma unroll 8
    for (int i = thread; i < count; i += 512) {
        const u32 id = selected[i];
        if (i < whole) ids[i] = (u16)min(id, 0xffffu);
        if (id < (u32)shape.experts) atomicAdd(begins + id, 1);
        else if (blockIdx.x == 0) pair_of[i] = ~0u;
    }
    __syncthreads();
    // Counts to starts, and each expert's place among those with pairs.
    const u32 own = begins[thread], room = (own + shape.align - 1) / shape.align * shape.align;
    const u32 own_tiles = (own + shape.tile - 1) / shape.tile;
    u32 before = room, tiles_before = own_tiles, active_before = __popc(__ballot_sync(~0u, own != 0) & ((1u << lane) - 1));
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, before, step), other_tiles = __shfl_up_sync(~0u, tiles_before, step);
        if (lane >= step) before += other, tiles_before += other_tiles;
    }
    if (lane == 31) sums[warp] = before, tile_sums[warp] = tiles_before, actives[warp] = active_before + (own != 0);
    __syncthreads();
    for (int i = 0; i < warp; i++) before += sums[i], tiles_before += tile_sums[i], active_before += actives[i];
    before -= room, tiles_before -= own_tiles;
    begins[thread] = before;
    if (blockIdx.x == 0) {
        if (own) {
            active[active_before] = thread, starts[active_before] = before;
            counts[active_before] = own, tile_starts[active_before] = tiles_before;
            for (u32 i = 0; i < own_tiles; i++) {
                const u32 first = i * shape.tile;
                passes[tiles_before + i] = {(u32)thread, before + first, min(own - first, (u32)shape.tile), 0};
            }
        }
        if (thread == 511) {
            active_before += own != 0;
            *active_count = active_before, starts[active_before] = before + room, tile_starts[active_before] = tiles_before + own_tiles;
            *pass_count = tiles_before + own_tiles;
        }
        for (u32 i = own; i < room; i++) pair_row[before + i] = ~0u;
    }
    __syncthreads();
    // A warp finds the picks of its expert, row by row, and places many at a time.
    const int expert = blockIdx.x * 16 + warp;
    u32 next = expert < EXPERTS_MAX ? begins[expert] : 0;
    for (int first = 0; first < count; first += whole) {
        const int here = min(whole, count - first);
        if (first > 0) {
            __syncthreads();
            for (int i = thread; i < here; i += 512) ids[i] = (u16)min(selected[first + i], 0xffffu);
            __syncthreads();
        }
        if (expert >= shape.experts) continue;
        u32 some = 0;
        const auto place = [&]() {
            __syncwarp();
            for (u32 i = lane; i < some; i += 32) {
                const int local = found[warp][i], row = local / shape.picks, pick = first + local;
                u32 smaller = 0;
                for (int j = row * shape.picks; j < (row + 1) * shape.picks; j++) smaller += ids[j] < expert;
                const u32 pair = next + i, own_row = pick / shape.picks;
                pair_row[pair] = own_row, pair_weight[pair] = routing[pick];
                pair_of[own_row * shape.picks + smaller] = pair;
            }
            next += some, some = 0;
            __syncwarp();
        };
        for (int i = 0; i < here; i += 128) {
            const int from = i + lane * 4;
            u32 mine = 0;
            if (from < here) {
                const uint2 four = *(const uint2*)(ids + from);
                mine = ((four.x & 0xffffu) == (u32)expert) | (u32)(four.x >> 16 == (u32)expert) << 1 | (u32)((four.y & 0xffffu) == (u32)expert) << 2 |
                       (u32)(four.y >> 16 == (u32)expert) << 3;
                mine &= (1u << min(here - from, 4)) - 1;
            }
            if (__ballot_sync(~0u, mine != 0) == 0) continue;
            u32 ahead = 0, all = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const u32 who = __ballot_sync(~0u, mine >> j & 1);
                ahead += __popc(who & ((1u << lane) - 1)), all += __popc(who);
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (mine >> j & 1) found[warp][some + ahead++] = (u16)(from + j);
            some += all;
            if (some > FOUND - 128) place();
        }
        place();
    }
}

// Where column `column` of row `row` lies in tiles of `atoms` atoms (tile.cuh), in values of 16 bits.
__device__ __forceinline__ size_t tile_place(u32 row, u32 column, u32 atoms) {
    const u32 inside = column % 16, half = inside / 2 % 2;
    const u32 piece = column % 64 / 16 * 2 + half, word = inside / 4;
    return (((size_t)(column / 64) * atoms + row / 8) * 64 + row % 8 * 8 + (piece ^ (row % 8))) * 8 + word * 2 + column % 2;
}

struct ActivateShape {
    int rows, columns, stride;
    float limit;
    int atoms;      // 0: rows as they are; else tiles
};

// The shared expert's activation: out[r][i] = QDQ8(bf16(silu(min(limit, gate)) * clamp(up))), i below `columns`; zero from
// there to `stride`. One warp a block of 32.
// in   gate, up [rows, columns] float32 that holds bf16 values          out  [rows, stride] bf16, or tiles of it
extern "C" __global__ void __launch_bounds__(256) experts_activate(const float* gate, const float* up, u16* out, ActivateShape shape) {
    // In this order: whoever starts next finds everything that was made before this launch, without waiting.
    wait_for_inputs();
    let_next_start();
    const int lane = threadIdx.x % 32, blocks = shape.stride / 32;
    for (int block = blockIdx.x * 8 + threadIdx.x / 32; block < shape.rows * blocks; block += gridDim.x * 8) {
        const int row = block / blocks, column = block % blocks * 32 + lane;
        float value = 0.0f;
        if (column < shape.columns) {
            const size_t at = (size_t)row * shape.columns + column;
            const float g = min_second(shape.limit, gate[at]);
            const float u = min_second(shape.limit, max_second(-shape.limit, up[at]));
            value = bf16_round((g * sigmoid_own(g)) * u);
        }
        const size_t at = shape.atoms ? tile_place(row, column, shape.atoms) : (size_t)row * shape.stride + column;
        out[at] = (u16)(__float_as_uint(fp8_round(value)) >> 16);
    }
}

struct CombineShape {
    int rows, picks, pairs, hidden;
};

// out[r] = bf16(0 + the row's pairs in ascending expert id + the shared expert), added in float32.
// in   pairs [pairs, hidden] bf16; pair_of [rows, picks]; shared [rows, hidden] float32       out  [rows, hidden] float32
extern "C" __global__ void __launch_bounds__(256)
    experts_combine(const u32* pairs, const u32* pair_of, const float* shared, float* out, CombineShape shape) {
    let_next_start();
    wait_for_inputs();
    const int half = shape.hidden / 2;
    const u32 total = (u32)shape.rows * half;
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < total; i += gridDim.x * 256) {
        const u32 row = i / half, column = i % half;
        float low = 0.0f, high = 0.0f;
        for (int pick = 0; pick < shape.picks; pick++) {
            const u32 pair = pair_of[row * shape.picks + pick];
            if (pair >= (u32)shape.pairs) continue;
            const u32 both = pairs[(size_t)pair * half + column];
            low += __uint_as_float(both << 16), high += __uint_as_float(both & 0xffff0000u);
        }
        const float2 last = ((const float2*)shared)[i];
        ((float2*)out)[i] = make_float2(bf16_round(low + last.x), bf16_round(high + last.y));
    }
}

struct PairTilesShape {
    int columns, stages, atoms;
};

// The inputs of every pair as tile.cuh wants them. One thread a piece, all pairs that there is room for.
// in   x [rows, columns] float32; pair_row [atoms * 8], ~0 for none; starts, active_count: pairs end at starts[active_count]
// out  [stages, atoms, 8, 8] of 16 bytes
extern "C" __global__ void __launch_bounds__(256)
    experts_tiles_up(const float* x, const u32* pair_row, const u32* starts, const u32* active_count, uint4* out, PairTilesShape shape) {
    let_next_start();
    wait_for_inputs();
    const u32 pieces = shape.stages * 8, total = starts[*active_count] * pieces;
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < total; i += gridDim.x * 256) {
        const u32 pair = i / pieces, part = i % pieces, piece = part % 8, first = part / 8 * 64 + piece / 2 * 16 + piece % 2 * 2;
        const u32 row = pair_row[pair];
        if (row == ~0u) continue;
        const float* from = x + (size_t)row * shape.columns;
        u32 words[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            // Columns are whole blocks of 32.
            const float2 v = first + 4 * j < (u32)shape.columns ? *(const float2*)(from + first + 4 * j) : make_float2(0.0f, 0.0f);
            words[j] = bf16_pair(v.x, v.y);
        }
        out[((size_t)(part / 8) * shape.atoms + pair / 8) * 64 + pair % 8 * 8 + (piece ^ (pair % 8))] =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// QDQ8 of every pair's activation, as tile.cuh wants it. One warp a block of 32.
// in   h [pairs, columns] bf16; pair_row, starts, active_count as above           out  [stages, atoms, 8, 8] of 16 bytes
extern "C" __global__ void __launch_bounds__(256)
    experts_tiles_down(const u16* h, const u32* pair_row, const u32* starts, const u32* active_count, u16* out, PairTilesShape shape) {
    let_next_start();
    wait_for_inputs();
    const u32 lane = threadIdx.x % 32, blocks = shape.stages * 2, total = starts[*active_count] * blocks;
    for (u32 i = blockIdx.x * 8 + threadIdx.x / 32; i < total; i += gridDim.x * 8) {
        const u32 pair = i / blocks, column = i % blocks * 32 + lane;
        if (pair_row[pair] == ~0u) continue;
        const float value = column < (u32)shape.columns ? bf16_to_f32(h[(size_t)pair * shape.columns + column]) : 0.0f;
        out[tile_place(pair, column, shape.atoms)] = (u16)(__float_as_uint(fp8_round(value)) >> 16);
    }
}

struct ExpertTileShape {
    int blocks, chunk_stages, slabs, atoms, out_stride;
    float limit;
};

// The experts' products for many rows, blocks that take tiles in turn: (expert, a slab for each of WARPS, N of its pairs), pairs
// innermost.
template <int N, int WARPS, bool UP>
__device__ __forceinline__ void expert_tiles(const uint4* weights, const u32* scales, const char* x, const u32* active,
                                             const u32* active_count, const u32* starts, const u32* counts,
                                             const u32* tile_starts, const float* pair_weight, u16* out, const ExpertTileShape& shape) {
#if HAS_WGMMA
    extern __shared__ __align__(128) char shared_bytes[];
    using Room = TileRoom<TileFp4, 1, N, false, 5, 10, WARPS>;
    char* const room = tile_room(shared_bytes);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 slab_tiles = (shape.slabs + WARPS - 1) / WARPS;
    Ring<Room::SLOTS> inputs;
    Ring<Room::DEPTH> ring;
    start_tiles<Room>(room);
    let_next_start();
    wait_for_inputs();
    const u32 experts = *active_count, total = tile_starts[experts] * slab_tiles;
    struct Tile { u32 expert, slab, pair, count; };
    const auto tile_at = [&](u32 tile) -> Tile {
        // The last expert whose tiles begin at or before this one.
        u32 low = 0, high = experts;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (tile_starts[middle] * slab_tiles <= tile) low = middle;
            else high = middle;
        }
        const u32 own = tile_starts[low + 1] - tile_starts[low], local = tile - tile_starts[low] * slab_tiles;
        const u32 first = local % own * N;
        return {active[low], local / own * WARPS, starts[low] + first, min(counts[low] - first, (u32)N)};
    };
    if (warp >= WARPS) {
        give_registers<Room>();
        if (warp > WARPS) return;
        const size_t stride = (size_t)shape.atoms * 1024;
        for (u32 index = blockIdx.x; index < total; index += gridDim.x) {
            const Tile tile = tile_at(index);
            const char* from = x + (size_t)tile.pair * 128;
            for (int stage = 0; stage < shape.blocks; stage++, from += stride)
                fetch_stage<Room>(room, inputs, from, (tile.count + 7) / 8 * 1024);
        }
        return;
    }
    take_registers<Room>();
    // Weights run ahead of the products, into the next tile.
    u32 coming = blockIdx.x;
    int stage = shape.blocks;
    TileFp4::Source from;
    const auto ahead = [&](int slot) {
        if (stage == shape.blocks) {
            if (coming >= total) return;
            const Tile tile = tile_at(coming);
            // Slabs beyond the last are computed and dropped.
            const size_t at = ((size_t)tile.expert * shape.slabs + min(tile.slab + warp, (u32)shape.slabs - 1)) * shape.blocks;
            from = {weights + at * 32 + lane, scales + at * 8 + lane / 4};
            coming += gridDim.x, stage = 0;
        }
        copy_weights<Room>(room, slot, 0, from, stage++, 0);
    };
    for (int slot = 0; slot < Room::DEPTH - 1; slot++) {
        ahead(slot);
        end_copy_group();
    }
    const TileFp4::Source none[1] = {};
    Decoded<Room> next;
    take_weights<Room>(room, ring, next, none, 0);
    for (u32 index = blockIdx.x; index < total; index += gridDim.x) {
        const Tile tile = tile_at(index);
        tile_product<Room>(room, inputs, ring, next, none, shape.blocks * 2, shape.chunk_stages, ahead, [&](int, const float (&sum)[N / 2]) {
            const u32 slab = tile.slab + warp;
            if (slab >= (u32)shape.slabs) return;
#pragma unroll
            for (int i = 0; i < N / 2; i += 4) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const u32 token = i / 4 * 8 + 2 * (lane % 4) + j;
                    if (token >= tile.count) continue;
                    u16* const to = out + (size_t)(tile.pair + token) * shape.out_stride;
                    if (UP) {
                        to[slab * 8 + lane / 4] = activation(sum[i + j], sum[i + j + 2], pair_weight[tile.pair + token], shape.limit);
                    } else {
                        to[slab * 16 + lane / 4] = f32_to_bf16(sum[i + j]);
                        to[slab * 16 + lane / 4 + 8] = f32_to_bf16(sum[i + j + 2]);
                    }
                }
            }
        });
    }
#endif
}

#define EXPERT_TILES(name, n, warps, up) \
    extern "C" __global__ void __launch_bounds__(warps * 32 + 128, 1) \
        name(const uint4* weights, const u32* scales, const char* x, const u32* active, const u32* active_count, const u32* starts, \
             const u32* counts, const u32* tile_starts, const float* pair_weight, u16* out, ExpertTileShape shape) { \
        expert_tiles<n, warps, up>(weights, scales, x, active, active_count, starts, counts, tile_starts, pair_weight, out, shape); \
    }
EXPERT_TILES(experts_up_tile_64, 64, 8, true)
EXPERT_TILES(experts_up_tile_128, 128, 8, true)
EXPERT_TILES(experts_down_tile_64, 64, 8, false)
EXPERT_TILES(experts_down_tile_128, 128, 8, false)
