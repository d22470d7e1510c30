// attention of many rows, one block a row: 64 heads over all keys, in one launch. Everything but the grid is as in kernel.cu, and so are
// the bits. A key's codes are decoded where the tensor cores take them: two warpgroups have half of the keys each and keep the
// scores in their registers, turn them into weights in shared memory, and have half of the columns each of the mix. The codes of
// the entries stay in shared memory from the scores to the mix.
// in   as attention_weights of kernel.cu
// out  out [rows, heads, head_dim] f32, bf16 values
// grid attention_whole: 256 threads for 64 heads of a row, with ROOM bytes of shared memory
// max  head_dim 512; 512 entries, 256 places of the window and the block, 640 places; rope_dim 128
#include "attend.cuh"

// Places of a thread, two at a time: PAIRS products of a warpgroup.
constexpr u32 OWN = 10, PAIRS = OWN / 2;

// Bytes of shared memory: queries, then weights, by 64 columns or places; from TAIL on what is not needed at the same time as
// the last weights; codes and scales of the entries; addresses of the window's keys.
constexpr u32 TAIL = HEADS * DIM * 2, CODES = HEADS * 640 * 2, SCALES = CODES + 512 * DIM / 2, WINDOW = SCALES + 512 * DIM / 16;
constexpr u32 MOST = WINDOW + 256 * 8, PHASES = MOST + HEADS * 4, INVERSES = PHASES + 64 * 8, ROOM = INVERSES + HEADS * 4;
// In the tail: addresses of the entries; maxima of warps.
constexpr u32 MAXIMA = TAIL + 512 * 8;
static_assert(MAXIMA + 8 * HEADS * 4 <= CODES && ROOM <= 227 << 10, "a block's shared memory");

// By how much an entry's pieces of 16 bytes, and its words of scales, are moved: what a warp reads at once meets every bank once,
// a quad's key of eight quads in the scores, four quads of a tile in the mix.
__device__ __forceinline__ u32 shift_of(u32 place) { return place / 16 % 8 ^ place / 4 % 4 * 2; }

// Codes and scales of the entries, on their way from where `addresses` says.
__device__ __forceinline__ void copy_entries(const u8* const* addresses, u32 entry_places, u8* shared) {
    // A tile's pieces at a time, then two tiles' scales.
    const u32 piece = threadIdx.x % 16, word = threadIdx.x % 8;
#pragma unroll 2
    for (u32 place = threadIdx.x / 16; place < entry_places; place += TILE) {
        copy_async_16((float4*)(shared + CODES + place * 256) + (piece ^ shift_of(place)), (const float4*)addresses[place] + piece);
    }
#pragma unroll 2
    for (u32 place = threadIdx.x / 8; place < entry_places; place += 2 * TILE) {
        copy_async_4(shared + SCALES + place * 32 + (word ^ shift_of(place)) * 4, addresses[place] + DIM / 2 + word * 4);
    }
    end_copy_group();
}

// Where a thread reads its two keys.
struct Pair {
    bool is_entry;
    const u8 *codes, *scales;  // of entries, in shared memory
    u32 shift;
    const u8* window[2];
};

template <Kind KIND>
__device__ __forceinline__ Codes load_codes(const Pair& pair, u32 columns, u32 t) {
    Codes codes;
    if (KIND == Kind::ENTRIES || (KIND == Kind::MIXED && pair.is_entry)) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u8* at = pair.codes + i * 256 + 4 * t;
            codes.words[i][0] = *(const u32*)(at + (2 * columns ^ pair.shift) * 16);
            codes.words[i][1] = *(const u32*)(at + (2 * columns + 1 ^ pair.shift) * 16);
            codes.scales[i] = *(const u32*)(pair.scales + i * 32 + (columns ^ pair.shift) * 4);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u8* at = pair.window[i] + 64 * columns + 4 * t;
#pragma unroll
            for (u32 j = 0; j < 4; j++) codes.words[i][j] = __ldg((const u32*)(at + 16 * j));
            codes.scales[i] = __ldg((const u16*)(pair.window[i] + DIM + 2 * columns));
        }
    }
    return codes;
}

// ---- mix

// Four entries of a tile, those of the lane's t, as load_values has them of records.
__device__ __forceinline__ void load_entries(const u8* shared, u32 tile, u32 block, u32 part, u32 t, Values& values) {
    const u32 place = tile * TILE + 4 * t, shift = shift_of(place);
    const u8* codes = shared + CODES + place * 256 + (block ^ shift) * 16 + 4 * part;
    const u8* scales = shared + SCALES + place * 32 + (block / 2 ^ shift) * 4 + block % 2 * 2;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        values.low[k] = *(const u32*)(codes + k * 256);
        values.scales[k] = *(const u16*)(scales + k * 32);
    }
}

// Products of one tile of keys with its weights, for four times sixteen columns of each warp.
__device__ __forceinline__ void mix_tile(float (&mixed)[4][32], const u32 (&pairs)[4][4], const u8* shared, u32 tile) {
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < 4; i++) multiply_64(mixed[i], pairs[i], shared, tile / 4, tile % 4, tile > 0);
    wgmma_commit();
}

extern "C" __global__ void __launch_bounds__(256, 1)
attention_whole(const float* q, const RowInfo* rows, const WindowInfo* windows, const u8* records, const u8* ring,
                const u8* cache, const u32* table, const u32* selected, const u32* counts, const float* sinks,
                const float* frequencies, float* out, const Shape shape) {
// Elsewhere a block has less shared memory, and nobody launches this.
#if defined(TF_EMULATED) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
    extern __shared__ uint4 room[];
    u8* const shared = (u8*)room;
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = warp_index(), group = warp / 4, u = warp % 4;
    const u32 head_tiles = (shape.heads + HEADS - 1) / HEADS, first_head = blockIdx.x % head_tiles * HEADS;
    const u32 row = shape.first_row + blockIdx.x / head_tiles, turned = DIM - shape.rope_dim;
    float2* const phases = (float2*)(shared + PHASES);
    const u8** const window_keys = (const u8**)(shared + WINDOW);

    // Addresses, codes and queries.
    Keys keys = window_of(rows, windows, row, shape);
    make_phases(frequencies, keys.position, phases, shape);
    __syncthreads();
    wait_for_inputs();
    Quads quads = load_quads(q, first_head, row, 0, warp, shape);
    Quads behind = load_quads(q, first_head, row, 1, warp, shape);
    add_selection(keys, counts, row, shape);
    const Caches from = {records, ring, cache, table, selected + (u64)row * shape.selected_max};
    const u32 tiles = (keys.places + TILE - 1) / TILE, entry_tiles = keys.entry_places / TILE;
    {
        const u8** const addresses = (const u8**)(shared + TAIL);
        for (u32 place = threadIdx.x; place < keys.entry_places; place += blockDim.x) {
            addresses[place] = record_of(keys, place, from, shape);
        }
        for (u32 place = keys.entry_places + threadIdx.x; place < tiles * TILE; place += blockDim.x) {
            window_keys[place - keys.entry_places] = window_record_of(keys, place, from, shape);
        }
        __syncthreads();
        copy_entries(addresses, keys.entry_places, shared);
#pragma unroll 1
        for (u32 part = 0; part < DIM / 128; part++) {
            const Quads some = quads;
            quads = behind;
            if (part + 2 < DIM / 128) behind = load_quads(q, first_head, row, part + 2, warp, shape);
            store_quads(some, part, warp, phases, shared, shape);
        }
        wait_for_copy_groups<0>();
        show_to_products();
        __syncthreads();
    }

    // A thread's key y of ten is place 128 (y / 4) + 4 p + y % 4 with y counted on from the first warpgroup's: both halves of
    // partial sum p. Loops over its five pairs have the pair at hand in the last place and move all one place on: code that runs
    // once waits for its instructions.
    const u32 partial = 8 * u + g, first = OWN * group;
    const auto place_of = [&](u32 y) { return y / 4 * 128 + 4 * partial + y % 4; };
    float scores[PAIRS][32], most[16];
#pragma unroll
    for (u32 n = 0; n < PAIRS * 32; n++) scores[n / 32][n % 32] = 0.0f;
    float(&pair_scores)[32] = scores[PAIRS - 1];
    const auto move_on = [&] {
#pragma unroll
        for (u32 n = 0; n < 32; n++) {
            const float first_pair = scores[0][n];
#pragma unroll
            for (u32 m = 0; m + 1 < PAIRS; m++) scores[m][n] = scores[m + 1][n];
            pair_scores[n] = first_pair;
        }
    };
#pragma unroll 1
    for (u32 m = 0; m < PAIRS; m++) {
        move_on();
        const u32 y = first + 2 * m, place = place_of(y), begin = y / 4 * 128;
        u32 bad = 0;
        if (begin < keys.places) {
            Pair pair;
            pair.is_entry = place < keys.entry_places;
            pair.codes = shared + CODES + place * 256;
            pair.scales = shared + SCALES + place * 32;
            pair.shift = shift_of(place);
            pair.window[0] = pair.window[1] = records;
            if (!pair.is_entry) {
                pair.window[0] = window_keys[min(place, tiles * TILE - 1) - keys.entry_places];
                pair.window[1] = window_keys[min(place + 1, tiles * TILE - 1) - keys.entry_places];
            }
            if (begin + 128 <= keys.entry_places) {
                const auto load = [&](u32 columns) { return load_codes<Kind::ENTRIES>(pair, columns, t); };
                bad = score_pair<Kind::ENTRIES>(true, shared, pair_scores, load);
            } else if (begin >= keys.entry_places) {
                const auto load = [&](u32 columns) { return load_codes<Kind::WINDOW>(pair, columns, t); };
                bad = score_pair<Kind::WINDOW>(false, shared, pair_scores, load);
            } else {
                const auto load = [&](u32 columns) { return load_codes<Kind::MIXED>(pair, columns, t); };
                bad = score_pair<Kind::MIXED>(pair.is_entry, shared, pair_scores, load);
            }
            bad |= __shfl_xor_sync(WARP, bad, 1);
            bad |= __shfl_xor_sync(WARP, bad, 2);
        }
        // A lane has the heads 8 n + 2 t and 8 n + 2 t + 1.
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const bool is_key = has_key(keys, place + i), is_plain = is_key && (bad >> i & 1) == 0;
            const float instead = is_key ? not_a_number() : -infinite();
#pragma unroll
            for (u32 h = 0; h < 16; h++) {
                float& score = pair_scores[h / 2 * 4 + 2 * i + h % 2];
                score = is_plain ? score * shape.scale : instead;
            }
        }
    }
#pragma unroll
    for (u32 h = 0; h < 16; h++) most[h] = -infinite();
#pragma unroll
    for (u32 i = 0; i < PAIRS * 32; i++) {
        const u32 h = i % 32 / 4 * 2 + i % 2;
        most[h] = fmaxf(most[h], scores[i / 32][i % 32]);
    }
#pragma unroll
    for (u32 mask = 16; mask >= 4; mask /= 2) {
#pragma unroll
        for (u32 h = 0; h < 16; h++) most[h] = fmaxf(most[h], __shfl_xor_sync(WARP, most[h], mask));
    }
    if (g == 0) {
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            float2 both;
            both.x = most[2 * n], both.y = most[2 * n + 1];
            *(float2*)(shared + MAXIMA + (warp * HEADS + n * 8 + 2 * t) * 4) = both;
        }
    }
    __syncthreads();
    if (threadIdx.x < HEADS) {
        float all = -infinite();
#pragma unroll
        for (u32 w = 0; w < 8; w++) all = fmaxf(all, ((const float*)(shared + MAXIMA))[w * HEADS + threadIdx.x]);
        ((float*)(shared + MOST))[threadIdx.x] = all;
    }
    __syncthreads();

    // Weights, two neighbouring places a word of head h's piece; and the first warpgroup's partial sums.
    float sums[16];
#pragma unroll
    for (u32 n = 0; n < 8; n++) {
        const float2 both = *(const float2*)(shared + MOST + (n * 8 + 2 * t) * 4);
        most[2 * n] = both.x, most[2 * n + 1] = both.y;
        sums[2 * n] = sums[2 * n + 1] = 0.0f;
    }
#pragma unroll 1
    for (u32 m = 0; m < PAIRS; m++) {
        move_on();
        const u32 place = place_of(first + 2 * m), piece = place / 16 % 4 * 2 + place / 2 % 2;
        u8* const to = shared + place / 64 * (HEADS * 128) + place / 4 % 4 * 4;
#pragma unroll
        for (u32 h = 0; h < 16; h++) {
            float& one = pair_scores[h / 2 * 4 + h % 2];
            float& two = pair_scores[h / 2 * 4 + 2 + h % 2];
            one = exp_down(one - most[h]);
            two = exp_down(two - most[h]);
            sums[h] = sums[h] + one;
            sums[h] = sums[h] + two;
            const u32 low = 2 * t + h % 2;
            *(u32*)(to + h / 2 * 1024 + low * 128 + (piece ^ low) * 16) = bf16_pair(one, two);
        }
    }
    // Partial sums by partial and head, where this row's outputs go later; the second warpgroup goes on from there.
    const u32 heads_here = min(HEADS, shape.heads - first_head);
    float* const row_out = out + ((u64)row * shape.heads + first_head) * DIM;
    float* const partials = row_out + partial * heads_here;
    if (group == 0) {
#pragma unroll
        for (u32 h = 0; h < 16; h++) {
            const u32 head = h / 2 * 8 + 2 * t + h % 2;
            if (head < heads_here) partials[head] = sums[h];
        }
    }
    show_to_products();
    __syncthreads();
    if (group != 0) {
#pragma unroll
        for (u32 h = 0; h < 16; h++) {
            const u32 head = h / 2 * 8 + 2 * t + h % 2;
            if (head < heads_here) sums[h] = partials[head];
        }
#pragma unroll
        for (u32 y = 0; y < OWN; y++) {
#pragma unroll
            for (u32 h = 0; h < 16; h++) sums[h] = sums[h] + scores[y / 2][h / 2 * 4 + y % 2 * 2 + h % 2];
        }
#pragma unroll
        for (u32 h = 0; h < 16; h++) {
            const u32 head = h / 2 * 8 + 2 * t + h % 2;
            if (head < heads_here) partials[head] = sums[h];
        }
    }

    // The mix.
    float mixed[4][32];
    const u32 block = group * (BLOCKS / 2) + u * 2 + g / 4, quad = g % 4;
    u32 pairs[2][4][4];
    // Two tiles at a time: the products of one run while the other's keys are decoded.
    const auto mix = [&](u32 count, u32 behind, bool is_entry, const auto& load) {
        Values next[2];
        if (count == 0) return;
        load(0, next[0]);
        load(min(1u, count - 1), next[1]);
        u32 tile = 0;
#pragma unroll 1
        for (; tile + 2 <= count; tile += 2) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                decode_values(next[i], is_entry, pairs[i]);
                load(min(tile + i + 2, count - 1), next[i]);
                mix_tile(mixed, pairs[i], shared, behind + tile + i);
                wgmma_wait<1>();
            }
        }
        if (tile < count) {
            decode_values(next[0], is_entry, pairs[0]);
            mix_tile(mixed, pairs[0], shared, behind + tile);
        }
        wgmma_wait<0>();
    };
    mix(entry_tiles, 0, true, [&](u32 tile, Values& to) { load_entries(shared, tile, block, quad, t, to); });
    mix(tiles - entry_tiles, entry_tiles, false, [&](u32 tile, Values& to) {
        load_values<true>(window_keys + tile * TILE + 4 * t, false, block, quad, DIM, to);
    });

    // Eight heads a warp: partial sums folded by halves, the sink last.
    __syncthreads();
    float own = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        const u32 head = warp * 8 + i;
        float sum = head < heads_here ? row_out[lane * heads_here + head] : 0.0f;
#pragma unroll
        for (u32 mask = 16; mask > 0; mask /= 2) sum = sum + __shfl_xor_sync(WARP, sum, mask);
        if (lane == i) own = sum;
    }
    if (lane < 8) {
        const u32 head = warp * 8 + lane;
        const float sink = head < heads_here ? sinks[first_head + head] : 0.0f;
        const float sum = own + exp_own(sink - ((const float*)(shared + MOST))[head]);
        ((float*)(shared + INVERSES))[head] = __fdiv_rn(256.0f, sum);
    }
    __syncthreads();

    // Four heads of a lane at a time.
    const float* inverses = (const float*)(shared + INVERSES);
    float2 turns[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 c = block * 32 + i / 2 * 16 + quad * 4 + i % 2 * 2;
        turns[i].x = 0.0f, turns[i].y = 1.0f;
        if (c >= turned) turns[i] = phases[(c - turned) / 2];
    }
#pragma unroll 1
    for (u32 n = 0; n < 8; n += 2) {
#pragma unroll
        for (u32 h = 0; h < 4; h++) {
            const u32 head = (n + h / 2) * 8 + 2 * t + h % 2;
            if (head < heads_here) {
                const float inverse = inverses[head];
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    const u32 c = block * 32 + half * 16 + quad * 4;
                    const float(&one)[32] = mixed[2 * half];
                    const float(&two)[32] = mixed[2 * half + 1];
                    const u32 at = h / 2 * 4 + h % 2;
                    const float2 low = finished_pair(one[at], one[at + 2], inverse, c, turned, turns[2 * half]);
                    const float2 high = finished_pair(two[at], two[at + 2], inverse, c + 2, turned, turns[2 * half + 1]);
                    float4 both;
                    both.x = low.x, both.y = low.y, both.z = high.x, both.w = high.y;
                    *(float4*)(row_out + head * DIM + c) = both;
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
#pragma unroll
            for (u32 at = 0; at + 8 < 32; at++) mixed[i][at] = mixed[i][at + 8];
        }
    }
#endif
}
