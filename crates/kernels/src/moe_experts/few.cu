// moe_experts.few: the whole mixture of up to 8 rows but the last sum: sorting, the shared expert and the routed ones, gate and up, then
// down, in one launch. Products, activations and roundings as in kernel.cu; a pair is one row's pick, pairs are ordered by (expert, row),
// and an expert's are one pass.
// A block has FEW_TEAMS teams of a warp a chunk. Each block takes an equal part of the bytes of either half. The weights of the shared
// expert are on their way before the routing is known, those of the second half while the grid meets between the halves.
// in   up, down, scales  packed by pack_cuda.rs     w1, w3, w2, scales  of the shared expert, packed by linear_fp8/pack_cuda.rs
//      x [rows, hidden] float32 that holds bf16 values     selected, routing [rows, picks]     arrived: zero before the first launch
// out  pairs [rows * picks, hidden] bf16     pair_of [rows, picks]: the row's pairs in ascending expert id, ~0 for none
//      shared_out [rows, hidden] float32     between: working memory
// grid any number of blocks that are on the device at once; 512 threads; dynamic shared memory: sums, rings, inputs
// sum  as kernel.cu
// max  8 rows, 32 pairs, 4 chunks
#include "experts.cuh"

struct FewShape {
    int rows, picks, experts, hidden, intermediate;
    int up_blocks, up_chunk_blocks, up_chunks;          // of 64 columns
    int down_blocks, down_chunk_blocks, down_chunks;
    int up_scale_stride, down_scale_stride;             // of the shared expert's scales
    float limit;
};

struct FewArgs {
    const uint4 *up, *down;                  // routed experts, as in kernel.cu
    const u32 *up_scales, *down_scales;
    const uint4 *w1, *w3, *w2;               // the shared expert, as in slab.cuh
    const u8 *w1_scales, *w3_scales, *w2_scales;
    const float* x;                          // [rows, hidden], holds bf16 values
    const u32* selected;                     // [rows, picks]
    const float* routing;                    // [rows, picks]
    u16* between;                            // [rows * picks + rows, intermediate]: activations of the pairs, then the shared expert's
    u16* pairs;                              // [rows * picks, hidden]
    u32* pair_of;                            // [rows, picks]: the row's pairs in ascending expert id, ~0 for none
    float* shared_out;                       // [rows, hidden]
    u32* arrived;                            // zero before the first launch of all, kept by the launches
    FewShape shape;
};

constexpr int FEW_TEAMS = 4, FEW_CHUNKS = 4, FEW_THREADS = FEW_TEAMS * FEW_CHUNKS * 32;
constexpr int FEW_PAIRS = 32;  // rows * picks at most
// Named barriers; 1 to 4 are the teams'.
constexpr int PAIR_BARRIER = 5;

// The pairs in order, and who has which pass: with at most 8 rows an expert's pairs are one pass.
struct FewLists {
    u32 pass_expert[FEW_PAIRS], pass_first[FEW_PAIRS], pass_pairs[FEW_PAIRS];
    u32 pair_row[FEW_PAIRS];
    float pair_weight[FEW_PAIRS];
    u32 passes;
};

// Until all blocks of the grid have come here. Every second time the highest bit turns, so the count needs no one to clear it.
__device__ __forceinline__ void meet_grid(u32* arrived) {
    const u32 own = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
    u32 before, now;
    asm volatile("atom.global.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(arrived), "r"(own) : "memory");
    do asm volatile("ld.global.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
    while (((now ^ before) & 0x80000000u) == 0);
}

// A block's part of one half: units [shared0, +shared) of the shared expert and [routed0, +routed) of the routed ones. Up: a shared
// unit is a slab of w1 and the same of w3, for two teams; down: a slab of w2, for one. A routed unit is a slab of a pass.
struct FewShare {
    int shared0, shared, routed0, routed;
};
template <bool UP>
__device__ __forceinline__ FewShare few_share(const FewShape& shape, u32 passes) {
    const u32 block = blockIdx.x, blocks = gridDim.x, units = (UP ? shape.intermediate : shape.hidden) / 16;
    const u32 routed = passes * (UP ? shape.intermediate / 8 : shape.hidden / 16);
    // Bytes: a routed unit's are 8.
    constexpr u32 COST = UP ? 30 : 15;
    const bool even = routed * 8 >= (COST + 16) * blocks;
    const auto shared_at = [&](u32 b) { return units * b / blocks; };
    const auto routed_at = [&](u32 b) {
        return even ? ((u32)((u64)(units * COST + routed * 8) * b / blocks) - COST * shared_at(b)) / 8 : (u32)((u64)routed * b / blocks);
    };
    FewShare share;
    share.shared0 = shared_at(block), share.shared = shared_at(block + 1) - share.shared0;
    share.routed0 = routed_at(block), share.routed = routed_at(block + 1) - share.routed0;
    return share;
}

// What team `team` does in turn: its shared units, then routed ones, so that all teams end together. A shared unit takes as long as
// two routed ones.
template <bool UP>
struct FewTurns {
    int team, own;
    __device__ __forceinline__ static int shared_of(int team, int shared) {
        return UP ? (shared + 1 - team / 2) / 2 : (shared + FEW_TEAMS - 1 - team) / FEW_TEAMS;
    }
    __device__ __forceinline__ FewTurns(int team, int shared) : team(team), own(shared_of(team, shared)) {}
    // The index among the block's shared units.
    __device__ __forceinline__ int shared_unit(int turn) const { return UP ? team / 2 + turn * 2 : team + turn * FEW_TEAMS; }
    // The index among the block's routed units.
    __device__ __forceinline__ int routed_unit(int turn, int shared) const {
        const int round = own + turn;  // own shared units count twice, one of those in `turn`
        int before = 0;
#pragma unroll
        for (int other = 0; other < FEW_TEAMS; other++)
            before += max(0, round - 2 * shared_of(other, shared) + (other < team));
        return before;
    }
};

// What a warp reads for one unit: this lane's first bytes. The shared expert's scales come another way: in their place something
// that is there is copied and not used.
struct FewUnit {
    const uint4* codes;  // null: there is none
    const u32* scales;
    int blocks;          // of 64 columns, the shared expert's of 32
};

// A warp's way through its units of one half. From one to the next is a step of a few slabs; only another pass is looked up.
template <bool UP>
struct FewWalk {
    int turn, own, unit, pass, slab;
    const uint4* codes;  // of the pass's expert, at the warp's chunk
    const u32* scales;

    __device__ __forceinline__ static int slabs(const FewArgs& args) { return UP ? args.shape.intermediate / 8 : args.shape.hidden / 16; }
    __device__ __forceinline__ static int blocks(const FewArgs& args) { return UP ? args.shape.up_blocks : args.shape.down_blocks; }
    __device__ __forceinline__ static int length(const FewArgs& args) {
        return UP ? args.shape.up_chunk_blocks : args.shape.down_chunk_blocks;
    }
    __device__ __forceinline__ void look_up(const FewArgs& args, const FewLists& lists, int chunk) {
        const int lane = threadIdx.x % 32;
        const size_t at = (size_t)lists.pass_expert[pass] * slabs(args) * blocks(args) + chunk * length(args);
        codes = (UP ? args.up : args.down) + at * 32 + lane, scales = (UP ? args.up_scales : args.down_scales) + at * 8 + lane / 4;
    }
    __device__ __forceinline__ void enter(const FewArgs& args, const FewLists& lists, const FewShare& share, int team, int chunk) {
        const FewTurns<UP> turns(team, share.shared);
        unit = turns.routed_unit(turn, share.shared);
        if (unit >= share.routed) return;
        pass = (u32)(share.routed0 + unit) / slabs(args), slab = (share.routed0 + unit) % slabs(args);
        look_up(args, lists, chunk);
    }
    __device__ __forceinline__ FewWalk(const FewArgs& args, const FewLists& lists, const FewShare& share, int team, int chunk)
        : turn(0), own(FewTurns<UP>(team, share.shared).own), unit(0), pass(0), slab(0), codes(nullptr), scales(nullptr) {
        if (own == 0) enter(args, lists, share, team, chunk);
        else slab = share.shared0 + FewTurns<UP>(team, share.shared).shared_unit(0);
    }
    __device__ __forceinline__ bool is_shared() const { return turn < own; }
    __device__ __forceinline__ FewUnit here(const FewArgs& args, const FewShare& share, int team, int chunk) const {
        if (is_shared()) {
            const uint4* const weights = !UP ? args.w2 : team % 2 ? args.w3 : args.w1;
            const int all = (UP ? args.shape.hidden : args.shape.intermediate) / 32, first = chunk * 2 * length(args);
            const uint4* const own = weights + ((size_t)slab * all + first) * 32 + threadIdx.x % 32;
            return {own, (const u32*)own, min(2 * length(args), all - first)};
        }
        if (unit >= share.routed) return {nullptr, nullptr, 0};
        const int at = slab * blocks(args);
        return {codes + at * 32, scales + at * 8, min(length(args), blocks(args) - chunk * length(args))};
    }
    __device__ __forceinline__ void step(const FewArgs& args, const FewLists& lists, const FewShare& share, int team, int chunk) {
        turn++;
        if (turn < own) {
            slab = share.shared0 + FewTurns<UP>(team, share.shared).shared_unit(turn);
            return;
        }
        if (turn == own) {
            enter(args, lists, share, team, chunk);
            return;
        }
        // Once every team is past its shared units, each takes every fourth unit.
        const int next = turn - own < 8 ? FewTurns<UP>(team, share.shared).routed_unit(turn, share.shared) : unit + FEW_TEAMS;
        slab += next - unit, unit = next;
        if (slab < slabs(args) || unit >= share.routed) return;
        do slab -= slabs(args), pass++;
        while (slab >= slabs(args));
        look_up(args, lists, chunk);
    }
};

// A warp's ring of weights, which each lane fills and reads for itself, and the block that comes next, read ahead.
struct FewRing {
    char* slots;
    uint4 codes;
    u32 word;
    __device__ __forceinline__ void load(int slot, const uint4* codes, const u32* scales) {
        copy_async_16(slots + slot * SLOT + threadIdx.x % 32 * 16, codes);
        copy_async_4(slots + slot * SLOT + 512 + threadIdx.x % 32 * 4, scales);
    }
    __device__ __forceinline__ void take(int slot) {
        codes = *(const uint4*)(slots + slot * SLOT + threadIdx.x % 32 * 16);
        word = *(const u32*)(slots + slot * SLOT + 512 + threadIdx.x % 32 * 4);
    }
    // The first blocks of the first unit.
    template <int DEPTH>
    __device__ __forceinline__ void start(const FewUnit& unit, int depth) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (i < min(unit.blocks, depth)) load(i, unit.codes + i * 32, unit.scales + i * 8);
            end_copy_group();
        }
    }
};

// acc += a unit times the inputs; what follows is `next`, of which `room` blocks go into the ring. Input: this lane's, `step` bytes a
// block of 32 columns. Of E4M3 lane l holds the scales of blocks l and l + 32.
template <int DEPTH, int LEAST, bool WHOLE, bool FP8>
__device__ __forceinline__ void few_multiply(float (&acc)[4], FewRing& ring, const FewUnit& here, const FewUnit& next, int depth,
                                             const char* input, int step, const u32 (&scales)[2]) {
    for (int block = 0; block < here.blocks; block += DEPTH) {
        const bool inside = block + DEPTH < here.blocks;
        const uint4* const from = inside ? here.codes + (block + DEPTH) * 32 : next.codes;
        const u32* const from_scales = inside ? here.scales + (block + DEPTH) * 8 : next.scales;
        const int room = inside ? here.blocks - block - DEPTH : min(next.blocks, depth);
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const bool refill = (WHOLE && i < LEAST) ? room > 0 : i < room;
            if (!WHOLE && block + i >= here.blocks) {
                if (refill) ring.load(i, from + i * 32, from_scales + i * 8);
                end_copy_group();
                continue;
            }
            // This block's codes are in registers; the next one's leave the ring while this one is computed. Where the next block may
            // belong into this very slot, nothing is read ahead.
            if (!WHOLE) wait_for_copy_groups<0>(), ring.take(i);
            const uint4 v = ring.codes;
            const u32 word = ring.word;
            if (WHOLE) wait_for_copy_groups<DEPTH - 2>(), ring.take(i + 1 == DEPTH ? 0 : i + 1);
            u32 a[4];
            const uint4 b0 = *(const uint4*)input;
            if (FP8) {
                const u32 code = __shfl_sync(~0u, block + i < 32 ? scales[0] : scales[1], (block + i) % 32);
                const u32 factor = power_pair(code, 120);
                decode_fp8(v.x, factor, a[0], a[2]);
                decode_fp8(v.y, factor, a[1], a[3]);
                mma_k16(acc, a[0], a[1], a[2], a[3], b0.x, b0.y);
                decode_fp8(v.z, factor, a[0], a[2]);
                decode_fp8(v.w, factor, a[1], a[3]);
                mma_k16(acc, a[0], a[1], a[2], a[3], b0.z, b0.w);
            } else {
                const uint4 b1 = *(const uint4*)(input + step);
                const u32 f0 = power_pair_of<0>(word, 126), f1 = power_pair_of<1>(word, 126);
                const u32 f2 = power_pair_of<2>(word, 126), f3 = power_pair_of<3>(word, 126);
                decode_fp4(v.x, f0, f1, a);
                mma_k16(acc, a[0], a[2], a[1], a[3], b0.x, b0.y);
                decode_fp4(v.y, f0, f1, a);
                mma_k16(acc, a[0], a[2], a[1], a[3], b0.z, b0.w);
                decode_fp4(v.z, f2, f3, a);
                mma_k16(acc, a[0], a[2], a[1], a[3], b1.x, b1.y);
                decode_fp4(v.w, f2, f3, a);
                mma_k16(acc, a[0], a[2], a[1], a[3], b1.z, b1.w);
            }
            // The slot is free: what was read from it has been used.
            if (refill) ring.load(i, from + i * 32, from_scales + i * 8);
            end_copy_group();
            input += FP8 ? step : 2 * step;
        }
    }
}

// The scale codes that this lane keeps of the team's next shared unit.
template <bool UP>
__device__ __forceinline__ void few_scales(const FewArgs& args, const FewShare& share, int team, int chunk, int turn, u32 (&scales)[2]) {
    const FewShape& shape = args.shape;
    const FewTurns<UP> turns(team, share.shared);
    const int length = 2 * (UP ? shape.up_chunk_blocks : shape.down_chunk_blocks), lane = threadIdx.x % 32;
    const int own = min(length, (UP ? shape.hidden : shape.intermediate) / 32 - chunk * length);
    const u8* const all = !UP ? args.w2_scales : team % 2 ? args.w3_scales : args.w1_scales;
    const int stride = UP ? shape.up_scale_stride : shape.down_scale_stride;
    const u8* const from = all + (size_t)((share.shared0 + turns.shared_unit(turn)) / 2) * stride + chunk * length;
#pragma unroll
    for (int i = 0; i < 2; i++) scales[i] = turn < turns.own && lane + 32 * i < own ? __ldg(from + lane + 32 * i) : 0;
}

// A warp's products of one half. `staged` holds the inputs [32 columns][rows][64 bytes]: of up all rows; of down those of the pairs
// from `first_pair` on, then the shared expert's from `shared_row` on. The first unit, of this half or the next, is in the ring.
template <int UP_DEPTH, int DOWN_DEPTH, bool WHOLE, bool UP>
__device__ __forceinline__ void few_products(const FewArgs& args, const FewLists& lists, const FewShare& share, const FewShare& later,
                                             int team, int chunk, const char* staged, int staged_rows, int first_pair, int shared_row,
                                             float4* sums, FewRing& ring, u32 (&scales)[2]) {
    const FewShape& shape = args.shape;
    constexpr int DEPTH = UP ? UP_DEPTH : DOWN_DEPTH;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, step = staged_rows * 64;
    const int length = UP ? shape.up_chunk_blocks : shape.down_chunk_blocks, chunks = shape.up_chunks;
    const int spare_row = shape.rows * shape.picks;  // of `between`
    const char* const inputs = staged + (size_t)chunk * length * 2 * step + t * 16;
    FewWalk<UP> walk(args, lists, share, team, chunk);
    FewUnit here = walk.here(args, share, team, chunk);
    int known = -1, known_pair = 0, known_count = 0;  // the pass that these and `row` are of
    const char* row = inputs;
    for (int turn = 0; here.codes; turn++) {
        const bool is_shared = walk.is_shared();
        const int pass = walk.pass, slab = walk.slab;
        walk.step(args, lists, share, team, chunk);
        const FewUnit next = walk.here(args, share, team, chunk);
        FewUnit coming = next;
        int depth = DEPTH;
        if (UP && !next.codes) coming = FewWalk<false>(args, lists, later, team, chunk).here(args, later, team, chunk), depth = DOWN_DEPTH;
        float acc[4] = {};
        int count = shape.rows, pair0 = 0;
        if (is_shared) {
            const char* const own = inputs + (shared_row + min(g, count - 1)) * 64;
            few_multiply<DEPTH, DOWN_DEPTH, WHOLE, true>(acc, ring, here, coming, depth, own, step, scales);
            few_scales<UP>(args, share, team, chunk, turn + 1, scales);
        } else {
            if (pass != known) {
                known = pass, known_pair = lists.pass_first[pass], known_count = lists.pass_pairs[pass];
                const int pair = known_pair + min(g, known_count - 1);
                row = inputs + (UP ? (int)lists.pair_row[pair] : pair - first_pair) * 64;
            }
            pair0 = known_pair, count = known_count;
            few_multiply<DEPTH, DOWN_DEPTH, WHOLE, false>(acc, ring, here, coming, depth, row, step, scales);
        }
        here = next;
        // Two sets of sums in turn: who folds one may be late while the others fill the other.
        const auto set_of = [&](int team) { return sums + (size_t)(team * 2 + turn % 2) * FEW_CHUNKS * 32 + lane; };
        set_of(team)[chunk * 32] = make_float4(acc[0], acc[1], acc[2], acc[3]);
        const bool both = UP && is_shared;
        if (both) barrier(PAIR_BARRIER + team / 2, 2 * chunks * 32);
        else barrier(1 + team, chunks * 32);
        const auto fold = [&](int team, float (&value)[4]) {
            const float4* const set = set_of(team);
            float4 sum = set[0];
#pragma unroll
            for (int c = 1; c < FEW_CHUNKS; c++) {
                if (c >= chunks) break;
                const float4 v = set[c * 32];
                sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
            }
            value[0] = sum.x, value[1] = sum.y, value[2] = sum.z, value[3] = sum.w;
        };
        if (turn % chunks == chunk && !(both && team % 2)) {
            float value[4], second[4];
            fold(team, value);
            if (both) fold(team + 1, second);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int column = 2 * t + i;
                if (column >= count) continue;
                if (both) {
                    u16* const out = args.between + (size_t)(spare_row + column) * shape.intermediate + slab * 16 + g;
                    out[0] = activation(value[i], second[i], 1.0f, shape.limit);
                    out[8] = activation(value[i + 2], second[i + 2], 1.0f, shape.limit);
                } else if (UP) {
                    args.between[(size_t)(pair0 + column) * shape.intermediate + slab * 8 + g] =
                        activation(value[i], value[i + 2], lists.pair_weight[pair0 + column], shape.limit);
                } else if (is_shared) {
                    float* const out = args.shared_out + (size_t)column * shape.hidden + slab * 16 + g;
                    out[0] = bf16_round(value[i]), out[8] = bf16_round(value[i + 2]);
                } else {
                    u16* const out = args.pairs + (size_t)(pair0 + column) * shape.hidden + slab * 16 + g;
                    out[0] = f32_to_bf16(value[i]), out[8] = f32_to_bf16(value[i + 2]);
                }
            }
        }
        // The sums of both teams are one warp's to read.
        if (both) barrier(PAIR_BARRIER + team / 2, 2 * chunks * 32);
    }
}

// Sorts the pairs by (expert, row). One warp, a lane a pair; keys differ but for those of picks of no expert.
__device__ __forceinline__ void few_sort(const FewArgs& args, FewLists& lists) {
    const int picks = args.shape.picks, count = args.shape.rows * picks, lane = threadIdx.x % 32;
    const u32 id = lane < count ? args.selected[lane] : ~0u;
    const float weight = lane < count ? args.routing[lane] : 0.0f;
    const bool valid = id < (u32)args.shape.experts;
    const u32 key = valid ? id * FEW_PAIRS + lane : ~0u;
    const u32 alike = __match_any_sync(~0u, valid ? id : ~0u);
    const bool leads = valid && (alike & ((1u << lane) - 1)) == 0;
    const u32 leaders = __ballot_sync(~0u, leads);
    const int row = lane / picks;
    u32 rank = 0, passes_before = 0, before_in_row = 0;
#pragma unroll 2
    for (int i = 0; i < count; i++) {
        const u32 other = __shfl_sync(~0u, key, i);
        const bool less = other < key;
        rank += less, passes_before += less && (leaders >> i & 1);
        before_in_row += (u32)(i - row * picks) < (u32)picks && (less || (other == key && i < lane));
    }
    if (lane == 0) lists.passes = __popc(leaders);
    if (valid) {
        lists.pair_row[rank] = row, lists.pair_weight[rank] = weight;
        if (leads) {
            lists.pass_expert[passes_before] = id;
            lists.pass_first[passes_before] = rank, lists.pass_pairs[passes_before] = __popc(alike);
        }
    }
    if (blockIdx.x == 0 && lane < count) args.pair_of[row * picks + before_in_row] = valid ? rank : ~0u;
}

// Where eight columns of a row lie among staged inputs: a lane of the tensor core finds its columns of 32 in 16 bytes.
__device__ __forceinline__ char* few_place(char* staged, int rows, int row, int eight) {
    return staged + ((size_t)(eight / 4) * rows + row) * 64 + (eight & 1) * 32 + (eight >> 1 & 1) * 8;
}

// All warps but the first, which sorts meanwhile.
__device__ __forceinline__ void few_stage_up(const FewArgs& args, char* staged) {
    const int eights = args.shape.up_blocks * 8, columns = args.shape.hidden, rows = args.shape.rows;
#pragma unroll 2
    for (int i = threadIdx.x - 32; i < rows * eights; i += FEW_THREADS - 32) {
        const int row = i / eights, eight = i % eights;
        float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f), high = low;
        // The last block may be half a block: columns beyond are zero.
        if (eight * 8 < columns) {
            const float4* const from = (const float4*)(args.x + (size_t)row * columns + eight * 8);
            low = from[0], high = from[1];
        }
        char* const to = few_place(staged, rows, row, eight);
        *(uint2*)to = make_uint2(bf16_pair(low.x, low.y), bf16_pair(low.z, low.w));
        *(uint2*)(to + 16) = make_uint2(bf16_pair(high.x, high.y), bf16_pair(high.z, high.w));
    }
}

// QDQ8 of the activations of `pairs` pairs from `first_pair` on, then of the shared expert's.
__device__ __forceinline__ void few_stage_down(const FewArgs& args, char* staged, int first_pair, int pairs, int rows) {
    const int eights = args.shape.down_blocks * 8, columns = args.shape.intermediate;
    const int spare_row = args.shape.rows * args.shape.picks;
    // Four neighbouring threads round a block of 32; rows have whole blocks, so the four are active together.
#pragma unroll 2
    for (int i = threadIdx.x; i < rows * eights; i += FEW_THREADS) {
        const int row = i / eights, eight = i % eights, from = row < pairs ? first_pair + row : spare_row + row - pairs;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (eight * 8 < columns) v = __ldcg((const uint4*)(args.between + (size_t)from * columns + eight * 8));
        u32 words[4] = {v.x, v.y, v.z, v.w};
        round_eight(words);
        char* const to = few_place(staged, rows, row, eight);
        *(uint2*)to = make_uint2(words[0], words[1]);
        *(uint2*)(to + 16) = make_uint2(words[2], words[3]);
    }
}

template <int UP_DEPTH, int DOWN_DEPTH, bool WHOLE>
__device__ __forceinline__ void few(const FewArgs& args) {
    extern __shared__ __align__(128) char shared_bytes[];
    __shared__ FewLists lists;
    const FewShape& shape = args.shape;
    // Sums [teams, 2, chunks, 32], the warps' rings, inputs.
    float4* const sums = (float4*)shared_bytes;
    const int warp = threadIdx.x / 32, team = warp / FEW_CHUNKS, chunk = warp % FEW_CHUNKS;
    char* const staged = shared_bytes + FEW_THREADS * 32 + FEW_THREADS / 32 * UP_DEPTH * SLOT;
    FewRing ring = {shared_bytes + FEW_THREADS * 32 + warp * UP_DEPTH * SLOT};
    const bool computes = chunk < shape.up_chunks;

    // The shared expert's weights are on their way before the routing is known.
    FewShare share = few_share<true>(shape, 0);
    const bool early = FewTurns<true>(team, share.shared).own > 0;
    u32 scales[2];
    if (computes && early) ring.start<UP_DEPTH>(FewWalk<true>(args, lists, share, team, chunk).here(args, share, team, chunk), UP_DEPTH);
    few_scales<true>(args, share, team, chunk, 0, scales);
    wait_for_inputs();
    let_next_start();
    if (warp == 0) few_sort(args, lists);
    else few_stage_up(args, staged);
    __syncthreads();
    share = few_share<true>(shape, lists.passes);
    const FewShare later = few_share<false>(shape, lists.passes);
    if (computes && !early) {
        FewUnit unit = FewWalk<true>(args, lists, share, team, chunk).here(args, share, team, chunk);
        const int depth = unit.codes ? UP_DEPTH : DOWN_DEPTH;
        if (!unit.codes) unit = FewWalk<false>(args, lists, later, team, chunk).here(args, later, team, chunk);
        ring.start<UP_DEPTH>(unit, depth);
    }
    wait_for_copy_groups<UP_DEPTH - 1>();
    ring.take(0);
    if (computes)
        few_products<UP_DEPTH, DOWN_DEPTH, WHOLE, true>(args, lists, share, later, team, chunk, staged, shape.rows, 0, 0, sums, ring,
                                                        scales);

    few_scales<false>(args, later, team, chunk, 0, scales);
    // The pairs whose activations this block needs: those of the passes that it meets.
    int first_pair = 0, pair_count = 0;
    if (later.routed > 0) {
        const int slabs = shape.hidden / 16, first = later.routed0 / slabs, last = (later.routed0 + later.routed - 1) / slabs;
        first_pair = lists.pass_first[first];
        pair_count = lists.pass_first[last] + lists.pass_pairs[last] - first_pair;
    }
    const int rows = pair_count + (later.shared > 0 ? shape.rows : 0);
    __syncthreads();
    if (threadIdx.x == 0) meet_grid(args.arrived);
    __syncthreads();
    few_stage_down(args, staged, first_pair, pair_count, rows);
    __syncthreads();
    if (computes)
        few_products<UP_DEPTH, DOWN_DEPTH, WHOLE, false>(args, lists, later, later, team, chunk, staged, rows, first_pair, pair_count,
                                                         sums, ring, scales);
}

#define EXPERTS_FEW(name, up_depth, down_depth, whole) \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1) \
        name(const uint4* up, const u32* up_scales, const uint4* down, const u32* down_scales, const uint4* w1, const u8* w1_scales, \
             const uint4* w3, const u8* w3_scales, const uint4* w2, const u8* w2_scales, const float* x, const u32* selected, \
             const float* routing, u16* between, u16* pairs, u32* pair_of, float* shared_out, u32* arrived, FewShape shape) { \
        few<up_depth, down_depth, whole>({up, down, up_scales, down_scales, w1, w3, w2, w1_scales, w3_scales, w2_scales, x, selected, \
                                          routing, between, pairs, pair_of, shared_out, arrived, shape}); \
    }
EXPERTS_FEW(experts_few_10, 10, 9, true)
EXPERTS_FEW(experts_few_any, 4, 4, false)
