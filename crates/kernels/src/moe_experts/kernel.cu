// moe_experts: the routed experts of a few rows, each distinct expert's weights read once
//   up    h[p][i] = bf16(silu(min(limit, bf16(x w1^T))) * clamp(bf16(x w3^T)) * routing weight), x = row of pair p
//   down  y[p][n] = bf16(QDQ8(h[p]) w2^T)
// A pair is one row's pick of one expert; pairs are ordered by (expert, row), `starts` says where an expert's begin.
// in   weights, scales  packed by pack_cuda.rs: slabs of 16 rows; up holds 8 rows of w1, then the same 8 of w3
//      x [rows, x_stride] bf16 (up, already QDQ8'd) or h [pairs, x_stride] bf16 (down)
// out  out [pairs, out_stride] bf16
// grid any number of blocks; chunks * teams warps of 32, teams at most 15; dynamic shared memory: inputs and partials
// sum  per chunk of columns a chain of k16 tensor-core steps, ascending; chunks left to right in float32; one rounding
// max  scale codes 2 to 128, so that code times scale is exact in bf16 (checked when packed); an expert with more pairs than
//      staged rows reads its weights again
#include "math.cuh"
#include "tensor.cuh"

struct ExpertArgs {
    const uint4* weights;        // [experts, slabs, blocks, 32 lanes] of 16 bytes; a block is 64 columns
    const u32* scales;           // [experts, slabs, blocks, 8] words of four codes
    const u16* x;
    const u32* active;           // [active_count] expert ids
    const u32* active_count;
    const u32* starts;           // [active_count + 1]
    const u32* pair_row;         // [pairs]
    const float* pair_weight;    // [pairs]
    u16* out;
    int x_stride, out_stride, slabs, blocks, chunk_blocks, chunks;
    float limit;
    int staged_rows;             // 1 to 8: pairs of an expert in one pass at most
};

constexpr int SPAN_MAX = 16;  // experts that one block meets
constexpr int SLOT = 640;     // bytes of a block in the ring: codes and scale words of 32 lanes

template <int DEPTH, bool WHOLE, bool UP>
__device__ __forceinline__ void experts(const ExpertArgs& args) {
    extern __shared__ __align__(128) char shared_bytes[];
    __shared__ u32 expert_ids[SPAN_MAX], starts[SPAN_MAX + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int chunks = args.chunks, teams = blockDim.x / 32 / chunks, team = warp / chunks, chunk = warp % chunks;
    const int slabs = args.slabs, g = lane / 4, t = lane % 4;
    const int first_block = chunk * args.chunk_blocks;
    const int chunk_blocks = min(args.chunk_blocks, args.blocks - first_block);
    // Sums [teams, 2, chunks, 32], a ring of weights [warps, DEPTH] that each lane fills and reads for itself, then inputs
    // [blocks, 2, rows, 64 bytes].
    float4* const sums = (float4*)shared_bytes;
    char* const ring = shared_bytes + (size_t)blockDim.x * 32 + (size_t)warp * DEPTH * SLOT;
    char* const staged = shared_bytes + (size_t)blockDim.x * 32 + (size_t)blockDim.x / 32 * DEPTH * SLOT;
    const int rows = args.staged_rows;

    if (UP) wait_for_inputs();
    const u32 total = *args.active_count * slabs;
    const u32 begin = (u64)total * blockIdx.x / gridDim.x, end = (u64)total * (blockIdx.x + 1) / gridDim.x;
    if (begin == end) return;
    const int first = begin / slabs, last = (end - 1) / slabs;
    if (threadIdx.x <= last - first + 1) {
        starts[threadIdx.x] = args.starts[first + threadIdx.x];
        if ((int)threadIdx.x <= last - first) expert_ids[threadIdx.x] = args.active[first + threadIdx.x];
    }
    __syncthreads();

    // A warp's units in order: within an expert its slabs, once a pass; then the next expert.
    const auto slab_begin = [&](int a) { return a == 0 ? (int)(begin % slabs) : 0; };
    const auto slab_end = [&](int a) { return a == last - first ? (int)((end - 1) % slabs) + 1 : slabs; };
    const auto passes = [&](int a) { return (int)(starts[a + 1] - starts[a] + rows - 1) / rows; };
    struct Unit { int a, pass, slab; };
    const auto settle = [&](Unit u) {
        while (u.a <= last - first && u.slab >= slab_end(u.a)) {
            if (++u.pass >= passes(u.a)) u.a++, u.pass = 0;
            u.slab = slab_begin(u.a) + team;
        }
        return u;
    };
    const auto weights_of = [&](Unit u) {
        return args.weights + (((size_t)expert_ids[u.a] * slabs + u.slab) * args.blocks + first_block) * 32 + lane;
    };
    const auto scales_of = [&](Unit u) {
        return args.scales + (((size_t)expert_ids[u.a] * slabs + u.slab) * args.blocks + first_block) * 8 + g;
    };

    const auto load = [&](int slot, const uint4* codes, const u32* scales) {
        copy_async_16(ring + slot * SLOT + lane * 16, codes);
        copy_async_4(ring + slot * SLOT + 512 + lane * 4, scales);
    };
    Unit unit = team < teams ? settle({0, 0, slab_begin(0) + team}) : Unit{last - first + 1, 0, 0};
    const uint4* here = args.weights;
    const u32* here_scales = args.scales;
    if (unit.a <= last - first) {
        here = weights_of(unit), here_scales = scales_of(unit);
        const uint4* from = here;
        const u32* from_scales = here_scales;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (WHOLE || i < chunk_blocks) load(i, from + i * 32, from_scales + i * 8);
            end_copy_group();
        }
    }
    if (!UP) wait_for_inputs();
    let_next_start();

    int parity = 0, folder = 0;
    wait_for_copy_groups<DEPTH - 1>();
    uint4 next_codes = *(const uint4*)(ring + lane * 16);
    u32 next_word = *(const u32*)(ring + 512 + lane * 4);
    for (int a = 0; a <= last - first; a++) {
        for (int pass = 0; pass < passes(a); pass++) {
            const int pair0 = starts[a] + pass * rows, count = min((int)starts[a + 1] - pair0, rows);
            __syncthreads();
            // A column without a pair reads the last pair's row: it depends on nothing else and is not stored.
            for (int row = 0; row < count; row++) {
                const u16* x = args.x + (size_t)(UP ? args.pair_row[pair0 + row] : pair0 + row) * args.x_stride;
                for (int quad = threadIdx.x; quad < args.blocks * 8; quad += blockDim.x) {
                    char* to = staged + (size_t)(quad / 4 * rows + row) * 64 + (quad & 1) * 32 + (quad >> 1 & 1) * 8;
                    if (UP) {
                        const uint4 v = *(const uint4*)(x + quad * 8);
                        *(uint2*)to = make_uint2(v.x, v.y);
                        *(uint2*)(to + 16) = make_uint2(v.z, v.w);
                        continue;
                    }
                    // Four neighbouring threads round a block of 32; rows have whole blocks, so the four are active together.
                    const uint4 v = *(const uint4*)(x + quad * 8);
                    u32 words[4] = {v.x, v.y, v.z, v.w};
                    u32 amax = 0;
#pragma unroll
                    for (int j = 0; j < 4; j++) amax = max(amax, max(words[j] << 16 & 0x7fff0000u, words[j] & 0x7fff0000u));
                    const u32 four = 15u << (lane & 28);
                    amax = max(amax, __shfl_xor_sync(four, amax, 1));
                    amax = max(amax, __shfl_xor_sync(four, amax, 2));
                    const u32 scale = fp8_scale(amax);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float low = fp8_round(__uint_as_float(words[j] << 16), scale);
                        const float high = fp8_round(__uint_as_float(words[j] & 0xffff0000u), scale);
                        words[j] = __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
                    }
                    *(uint2*)to = make_uint2(words[0], words[1]);
                    *(uint2*)(to + 16) = make_uint2(words[2], words[3]);
                }
            }
            __syncthreads();
            while (unit.a == a && unit.pass == pass) {
                // The next slab of the same expert is a step away; anything else is looked up.
                Unit next_unit = {a, pass, unit.slab + teams};
                const uint4* next = here + (size_t)teams * args.blocks * 32;
                const u32* next_scales = here_scales + (size_t)teams * args.blocks * 8;
                bool more = true;
                if (next_unit.slab >= slab_end(a)) {
                    next_unit = settle(next_unit);
                    more = next_unit.a <= last - first;
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
                        const uint4 codes = next_codes;
                        const u32 word = next_word;
                        wait_for_copy_groups<WHOLE ? DEPTH - 2 : 0>();
                        const int slot = i + 1 == DEPTH || (!WHOLE && block + i + 1 >= chunk_blocks) ? 0 : i + 1;
                        next_codes = *(const uint4*)(ring + slot * SLOT + lane * 16);
                        next_word = *(const u32*)(ring + slot * SLOT + 512 + lane * 4);
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
                        u16* out = args.out + (size_t)(pair0 + column) * args.out_stride;
                        if (UP) {
                            const float gate = min_second(args.limit, bf16_round(value[i]));
                            const float up = min_second(args.limit, max_second(-args.limit, bf16_round(value[i + 2])));
                            out[unit.slab * 8 + g] = f32_to_bf16(silu(gate) * up * args.pair_weight[pair0 + column]);
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
}

#define EXPERTS(name, threads, depth, whole, up) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(ExpertArgs args) { experts<depth, whole, up>(args); }
EXPERTS(experts_up_10, 640, 10, true, true)
EXPERTS(experts_up_5, 640, 5, true, true)
EXPERTS(experts_up_any, 640, 4, false, true)
EXPERTS(experts_down_9, 640, 9, true, false)
EXPERTS(experts_down_3, 640, 3, true, false)
EXPERTS(experts_down_any, 640, 4, false, false)
