// hyper: the hyper-connections of four residual streams; formulas and roundings in mod.rs.
// A sublayer enters by hyper_enter (expand, collapse, norm: a row's input, which the next launch waits for) and hyper_mixes
// (the next mixes, which nothing reads before the sublayer's end), of many rows with hyper_finish behind it.
//
// streams [rows, 4, hidden] f32 in place   y [rows, hidden] f32   mix, post [rows, 4] f32   comb [rows, 4, 4] f32 (source,
// target)   function [24, 4 hidden] f32   base [24]   scale [3]   norm [hidden]   scratch [rows, row_floats] f32: a row's
// sums of squares by segment, then from `sums_at` on 24 products of each chunk
// grid hyper_enter, hyper_collapse: 640 threads a row. hyper_enter_split: a cluster of `parts` blocks a row, a warp a segment.
//      hyper_mixes: 128 threads for two chunks of columns of `tile` rows; arrivals: a count of each tile, zero before and
//      after. hyper_finish: a warp a row. hyper_expand, hyper_tap: a thread four columns of a row
// sum  mirror.rs. Squares: a quad of columns is one chain (of the streams in turn), a segment of 32 quads folds by halves;
//      lane l adds segments l, l + 32, ..; lanes fold by halves. Products: of a chunk of 320 columns lane l of 8 chains quads
//      l, l + 8, ..; lanes fold by halves; lane l of 32 adds chunks l, l + 32, ..; lanes fold by halves. What is missing at
//      an end is zero, every sum starts at zero. The sums of four in index order
// max  hidden is a multiple of 32, at most 10240 (checked by launch)
#include "prelude.cuh"
#include "cluster.cuh"

struct Shape {
    u32 rows, hidden, iterations;
    u32 outputs;  // bit 0 normed, 1 quantised, 2 collapsed; 3: y is given; 4: the last block of a tile makes its rows' mixes
    float hc_eps, norm_eps;
    u32 out_columns, out_offset;
    u32 parts, tile, row_floats, sums_at;
};

constexpr u32 THREADS = 256, ROW_THREADS = 640, ROW_QUADS = 4, OUTPUTS = 24;
constexpr u32 SEGMENT = 32, SEGMENTS_MAX = 80;
constexpr u32 MIX_THREADS = 128, TEAM = 64, CHUNK = 80, LANES = 8, STEPS = CHUNK / LANES, OWN = 3, GROUP = 4, STAGES = 3;

// bf16_round of two values; of a NaN another one.
__device__ __forceinline__ void round_pair(float& a, float& b) {
#if __CUDA_ARCH__ >= 800
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    a = from_bits(pair << 16);
    b = from_bits(pair & 0xffff0000u);
#else
    a = bf16_round(a);
    b = bf16_round(b);
#endif
}

__device__ __forceinline__ float4 round_quad(float4 v) {
    float x = v.x, y = v.y, z = v.z, w = v.w;
    round_pair(x, y);
    round_pair(z, w);
    v.x = x;
    v.y = y;
    v.z = z;
    v.w = w;
    return v;
}

// What a row's streams become: a column of each, times comb[i][j], plus post[j] times the sublayer's output.
struct Expansion {
    float4 comb[4], post;

    __device__ __forceinline__ Expansion(const float* of_comb, const float* of_post) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) comb[i] = ((const float4*)of_comb)[i];
        post = *(const float4*)of_post;
    }

    __device__ __forceinline__ static float of(const float4& v, u32 j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

    __device__ __forceinline__ float stream(u32 j, float x0, float x1, float x2, float x3, float out) const {
        float sum = of(comb[0], j) * x0;
        sum = sum + of(comb[1], j) * x1;
        sum = sum + of(comb[2], j) * x2;
        sum = sum + of(comb[3], j) * x3;
        return sum + of(post, j) * out;
    }

    __device__ __forceinline__ void quads(float4 (&x)[4], const float4& out) const {
        float4 next[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            next[j].x = stream(j, x[0].x, x[1].x, x[2].x, x[3].x, out.x);
            next[j].y = stream(j, x[0].y, x[1].y, x[2].y, x[3].y, out.y);
            next[j].z = stream(j, x[0].z, x[1].z, x[2].z, x[3].z, out.z);
            next[j].w = stream(j, x[0].w, x[1].w, x[2].w, x[3].w, out.w);
            next[j] = round_quad(next[j]);
        }
#pragma unroll
        for (u32 j = 0; j < 4; j++) x[j] = next[j];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
hyper_expand(const float* y, float* streams, const float* post, const float* comb, const Shape shape) {
    wait_for_inputs();
    const u32 quads = shape.hidden / 4, item = blockIdx.x * THREADS + threadIdx.x, row = item / quads, quad = item % quads;
    if (row >= shape.rows) return;
    const Expansion expansion(comb + row * 16, post + row * 4);
    float4* const to = (float4*)streams + row * 4 * quads + quad;
    float4 x[4];
#pragma unroll
    for (u32 j = 0; j < 4; j++) x[j] = to[j * quads];
    expansion.quads(x, ((const float4*)y)[item]);
#pragma unroll
    for (u32 j = 0; j < 4; j++) to[j * quads] = x[j];
}

// ((v0 + v1) + v2) + v3 over lanes base, base + step, ...
__device__ __forceinline__ float sum4(float value, u32 base, u32 step) {
    const float v0 = __shfl_sync(WARP, value, base), v1 = __shfl_sync(WARP, value, base + step);
    const float v2 = __shfl_sync(WARP, value, base + 2 * step), v3 = __shfl_sync(WARP, value, base + 3 * step);
    return ((v0 + v1) + v2) + v3;
}

__device__ __forceinline__ float collapse_column(float x0, float x1, float x2, float x3, const float4& m) {
    float sum = m.x * x0;
    sum = sum + m.y * x1;
    sum = sum + m.z * x2;
    return sum + m.w * x3;
}

__device__ __forceinline__ float4 collapse_quad(const float4 (&x)[4], const float4& m) {
    float4 u;
    u.x = collapse_column(x[0].x, x[1].x, x[2].x, x[3].x, m);
    u.y = collapse_column(x[0].y, x[1].y, x[2].y, x[3].y, m);
    u.z = collapse_column(x[0].z, x[1].z, x[2].z, x[3].z, m);
    u.w = collapse_column(x[0].w, x[1].w, x[2].w, x[3].w, m);
    return round_quad(u);
}

__device__ __forceinline__ float add_squares(const float4& v, float sum) {
    sum = fma_own(v.x, v.x, sum);
    sum = fma_own(v.y, v.y, sum);
    sum = fma_own(v.z, v.z, sum);
    return fma_own(v.w, v.w, sum);
}

__device__ __forceinline__ float add_products(const float4& w, const float4& v, float sum) {
    sum = fma_own(w.x, v.x, sum);
    sum = fma_own(w.y, v.y, sum);
    sum = fma_own(w.z, v.z, sum);
    return fma_own(w.w, v.w, sum);
}

__device__ __forceinline__ float fold32(float value) {
    value = value + __shfl_xor_sync(WARP, value, 16);
    return fold16(value);
}

// The part of a row's columns that a block has, four in a quad: a warp has whole segments, WARPS apart.
template <u32 QUADS>
struct RowPart {
    float4 norm[QUADS], u[QUADS];
    u32 row, rank, quads, segments, warps, first;

    __device__ __forceinline__ RowPart(u32 parts, const Shape& shape) {
        row = blockIdx.x / parts;
        rank = blockIdx.x % parts;
        quads = shape.hidden / 4;
        segments = (quads + SEGMENT - 1) / SEGMENT;
        warps = blockDim.x / 32;
        first = rank * warps + threadIdx.x / 32;
    }

    // A thread's quad of its i-th segment; the segments of a row's blocks follow each other where a block has one a warp.
    __device__ __forceinline__ u32 segment(u32 i) const { return first + i * warps; }
    __device__ __forceinline__ u32 quad(u32 i) const { return segment(i) * SEGMENT + threadIdx.x % 32; }

    // Before the inputs are there.
    __device__ __forceinline__ void load_norm(const float* weight) {
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) norm[i] = quad(i) < quads ? ((const float4*)weight)[quad(i)] : zero_quad();
    }

    // The norm of the collapsed row. With parts the blocks of the cluster have met before.
    template <bool SPLIT>
    __device__ __forceinline__ void finish(float* sums, u64* meeting, float* normed, float* quantised, float* collapsed,
                                           const Shape& shape) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) {
            // The same for all lanes of a warp, here and below.
            if (segment(i) >= segments) break;
            const float sum = fold32(add_squares(u[i], 0.0f));
            if (SPLIT && lane < shape.parts) leave_in_cluster(sums + segment(i), meeting, lane, sum);
            if (!SPLIT && lane == 0) sums[segment(i)] = sum;
        }
        if (SPLIT) wait_for_words(meeting);
        else __syncthreads();
        float squares = 0.0f;
#pragma unroll
        for (u32 i = 0; i < SEGMENTS_MAX; i += 32) squares = squares + (i + lane < segments ? sums[i + lane] : 0.0f);
        const float factor = inverse_rms(fold32(squares), shape.hidden, shape.norm_eps);
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) {
            if (segment(i) >= segments) break;
            const u32 at = row * quads + quad(i);
            float4 value;
            value.x = norm[i].x * (u[i].x * factor);
            value.y = norm[i].y * (u[i].y * factor);
            value.z = norm[i].z * (u[i].z * factor);
            value.w = norm[i].w * (u[i].w * factor);
            value = round_quad(value);
            const float4 rounded = (shape.outputs & 2) != 0 ? fp8_round_quad(value) : value;
            if (quad(i) >= quads) continue;
            if ((shape.outputs & 4) != 0) ((float4*)collapsed)[at] = u[i];
            if ((shape.outputs & 1) != 0) ((float4*)normed)[at] = value;
            if ((shape.outputs & 2) != 0) ((float4*)quantised)[at] = rounded;
        }
    }
};

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
hyper_collapse(const float* streams, const float* mix, const float* norm, float* normed, float* quantised, float* collapsed,
               const Shape shape) {
    __shared__ float sums[SEGMENTS_MAX];
    RowPart<ROW_QUADS> part(1, shape);
    part.load_norm(norm);
    wait_for_inputs();
    const u32 row = part.row, quads = part.quads;
    const float4* from = (const float4*)streams + row * 4 * quads;
    const float4 m = ((const float4*)mix)[row];
#pragma unroll
    for (u32 i = 0; i < ROW_QUADS; i++) {
        float4 x[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) x[j] = part.quad(i) < quads ? from[j * quads + part.quad(i)] : zero_quad();
        part.u[i] = collapse_quad(x, m);
    }
    part.finish<false>(sums, nullptr, normed, quantised, collapsed, shape);
}

// Expands the streams where y is given, collapses them with the mix of the sublayer before, and leaves the sums of their
// squares by segment for the mixes.
template <u32 QUADS, bool SPLIT>
__device__ __forceinline__ void enter(const float* y, float* streams, const float* mix, const float* post, const float* comb,
                                      const float* norm, float* normed, float* quantised, float* scratch,
                                      const Shape& shape) {
    __shared__ float sums[SEGMENTS_MAX];
    __shared__ u64 meeting;
    RowPart<QUADS> part(SPLIT ? shape.parts : 1, shape);
    part.load_norm(norm);
    if (SPLIT) {
        if (threadIdx.x == 0) expect_words(&meeting, part.segments);
        __syncwarp();
        arrive_in_cluster();
    }
    wait_for_inputs();
    const u32 row = part.row, quads = part.quads;
    float4* const to = (float4*)streams + row * 4 * quads;
    const float4* out = (const float4*)y + row * quads;
    float all[QUADS];
    const bool expands = (shape.outputs & 8) != 0;
    const float4 m = ((const float4*)mix)[row];
    const Expansion expansion(comb + row * 16, post + row * 4);
#pragma unroll
    for (u32 i = 0; i < QUADS; i++) {
        if (part.segment(i) >= part.segments) break;
        const u32 quad = part.quad(i);
        const bool inside = quad < quads;
        float4 x[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) x[j] = inside ? to[j * quads + quad] : zero_quad();
        if (expands) {
            expansion.quads(x, inside ? out[quad] : zero_quad());
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                if (inside) to[j * quads + quad] = x[j];
            }
        }
        part.u[i] = collapse_quad(x, m);
        all[i] = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 4; j++) all[i] = add_squares(x[j], all[i]);
    }
    if (SPLIT) wait_for_cluster();
    part.template finish<SPLIT>(sums, &meeting, normed, quantised, nullptr, shape);
#pragma unroll
    for (u32 i = 0; i < QUADS; i++) {
        if (part.segment(i) >= part.segments) break;
        const float squares = fold32(all[i]);
        if (threadIdx.x % 32 == 0) scratch[row * shape.row_floats + part.segment(i)] = squares;
    }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
hyper_enter(const float* y, float* streams, const float* mix, const float* post, const float* comb, const float* norm,
            float* normed, float* quantised, float* scratch, const Shape shape) {
    enter<ROW_QUADS, false>(y, streams, mix, post, comb, norm, normed, quantised, scratch, shape);
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
hyper_enter_split(const float* y, float* streams, const float* mix, const float* post, const float* comb, const float* norm,
                  float* normed, float* quantised, float* scratch, const Shape shape) {
    enter<1, true>(y, streams, mix, post, comb, norm, normed, quantised, scratch, shape);
}

// The next mixes of a row, by one warp whose lane l holds z[l]: 24 products, then the sum of squares.
__device__ __forceinline__ void make_mixes(float z, float* mix, float* post, float* comb, const float* base,
                                           const float* scale, u32 row, u32 lane, const Shape& shape) {
    const float squares = __shfl_sync(WARP, z, OUTPUTS);
    const float z_factor = inverse_rms(squares, 4 * shape.hidden, shape.norm_eps), eps = shape.hc_eps;
    const u32 at = lane % 16, row_base = (lane & 16) + (at & 12), column_base = (lane & 16) + (at & 3), out = lane % 8;
    const float gate = (__shfl_sync(WARP, z, out) * z_factor) * scale[out / 4] + base[out];
    const float opened = sigmoid_own(gate);
    if (lane < 4) mix[row * 4 + lane] = opened + eps;
    if (lane >= 4 && lane < 8) post[row * 4 + lane - 4] = 2.0f * opened;

    // Lanes 16..31 repeat lanes 0..15.
    float value = (__shfl_sync(WARP, z, 8 + at) * z_factor) * scale[2] + base[8 + at];
    const float v0 = __shfl_sync(WARP, value, row_base), v1 = __shfl_sync(WARP, value, row_base + 1);
    const float v2 = __shfl_sync(WARP, value, row_base + 2), v3 = __shfl_sync(WARP, value, row_base + 3);
    value = exp_own(value - max_second(max_second(max_second(v0, v1), v2), v3));
    value = __fdiv_rn(value, sum4(value, row_base, 1)) + eps;
    value = __fdiv_rn(value, sum4(value, column_base, 4) + eps);
    for (u32 i = 1; i < shape.iterations; i++) {
        value = __fdiv_rn(value, sum4(value, row_base, 1) + eps);
        value = __fdiv_rn(value, sum4(value, column_base, 4) + eps);
    }
    if (lane < 16) comb[row * 16 + lane] = value;
}

// Adds up a row's sums of squares and products, by one warp, and makes its mixes.
__device__ __forceinline__ void finish_row(float* scratch, float* mix, float* post, float* comb, const float* base,
                                           const float* scale, u32 row, u32 chunks, u32 lane, const Shape& shape) {
    float* const own = scratch + row * shape.row_floats;
    const u32 segments = (shape.hidden / 4 + SEGMENT - 1) / SEGMENT;
    float squares = 0.0f, sums[OUTPUTS];
#pragma unroll
    for (u32 i = 0; i < SEGMENTS_MAX; i += 32) {
        squares = squares + (i + lane < segments ? from_bits(left_word((u32*)own + i + lane)) : 0.0f);
    }
#pragma unroll
    for (u32 o = 0; o < OUTPUTS; o++) sums[o] = 0.0f;
    // Two chunks' sums are on their way at once.
    for (u32 chunk = lane; chunk - lane < chunks; chunk += 64) {
        float4 left[2][OUTPUTS / 4];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float4* const from = (float4*)(own + shape.sums_at + (chunk + 32 * half) * OUTPUTS);
#pragma unroll
            for (u32 i = 0; i < OUTPUTS / 4; i++) left[half][i] = chunk + 32 * half < chunks ? left_quad(from + i) : zero_quad();
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
#pragma unroll
            for (u32 i = 0; i < OUTPUTS / 4; i++) {
                sums[4 * i] = sums[4 * i] + left[half][i].x;
                sums[4 * i + 1] = sums[4 * i + 1] + left[half][i].y;
                sums[4 * i + 2] = sums[4 * i + 2] + left[half][i].z;
                sums[4 * i + 3] = sums[4 * i + 3] + left[half][i].w;
            }
        }
    }
    float z = fold32(squares);
#pragma unroll
    for (u32 o = 0; o < OUTPUTS; o++) {
        const float sum = fold32(sums[o]);
        if (lane == o) z = sum;
    }
    make_mixes(z, mix, post, comb, base, scale, row, lane, shape);
}

// One chunk's products of up to ROWS rows side by side in shared memory; lane 0, 1 or 2 of each eight leaves one.
template <u32 ROWS>
__device__ __forceinline__ void add_rows(const float4 (&weights)[OWN][STEPS], const float4 (&staged)[GROUP][CHUNK], u32 slot,
                                         bool leaves, float* to, u32 row_floats, u32 rows) {
    float sums[ROWS][OWN];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
        for (u32 o = 0; o < OWN; o++) sums[r][o] = 0.0f;
    }
#pragma unroll
    for (u32 i = 0; i < STEPS; i++) {
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            const float4 x = staged[r][slot + LANES * i];
#pragma unroll
            for (u32 o = 0; o < OWN; o++) sums[r][o] = add_products(weights[o][i], x, sums[r][o]);
        }
    }
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
        for (u32 o = 0; o < OWN; o++) {
            float sum = sums[r][o];
            sum = sum + __shfl_xor_sync(WARP, sum, 4);
            sum = sum + __shfl_xor_sync(WARP, sum, 2);
            sums[r][o] = sum + __shfl_xor_sync(WARP, sum, 1);
        }
        const float own = slot == 0 ? sums[r][0] : slot == 1 ? sums[r][1] : sums[r][2];
        if (leaves && r < rows) leave_word((u32*)(to + r * row_floats), to_bits(own));
    }
}

// Products of the streams and the function. Two teams of two warps have a chunk of columns each: a thread keeps its weights,
// three outputs by every eighth quad, and takes rows as they arrive in shared memory.
extern "C" __global__ void __launch_bounds__(MIX_THREADS, 2)
hyper_mixes(const float* streams, float* mix, float* post, float* comb, const float* function, const float* base,
            const float* scale, float* scratch, u32* arrivals, const Shape shape) {
    __shared__ float4 staged[MIX_THREADS / TEAM][STAGES][GROUP][CHUNK];
    __shared__ u32 arrived_before;
    const u32 thread = threadIdx.x, lane = thread % 32, team = thread / TEAM, member = thread % TEAM, slot = lane % LANES;
    const u32 quads = shape.hidden, chunks = (quads + CHUNK - 1) / CHUNK, blocks = (chunks + 1) / 2;
    const u32 tile = blockIdx.x / blocks, chunk = blockIdx.x % blocks * 2 + team, first = chunk * CHUNK;
    const u32 own = member / LANES * OWN;
    float4 weights[OWN][STEPS];
#pragma unroll
    for (u32 o = 0; o < OWN; o++) {
        const float4* weight = (const float4*)function + (own + o) * quads;
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) {
            const u32 quad = first + slot + LANES * i;
            weights[o][i] = quad < quads ? weight[quad] : zero_quad();
        }
    }
    wait_for_inputs();
    const u32 first_row = tile * shape.tile, rows = min(shape.rows - first_row, shape.tile);
    const u32 groups = (rows + GROUP - 1) / GROUP;
    const float4* x = (const float4*)streams + first_row * quads;
    // A quarter of a team fetches a row, every sixteenth quad a thread; rows that a group lacks are zeros.
    const u32 fetched = member % 16, fetched_row = member / 16;
    const auto fetch = [&](u32 group) {
        if (group < groups) {
            const u32 row = group * GROUP + fetched_row, end = row < rows ? quads : 0;
            float4* const to = &staged[team][group % STAGES][fetched_row][fetched];
            const float4* from = x + row * quads + first + fetched;
#pragma unroll
            for (u32 i = 0; i < CHUNK; i += 16) {
                if (first + fetched + i < end) copy_async_16(to + i, from + i);
                else to[i] = zero_quad();
            }
        }
        end_copy_group();
    };
    fetch(0);
    fetch(1);
    const bool leaves = slot < OWN && chunk < chunks;
    float* to = scratch + first_row * shape.row_floats + shape.sums_at + chunk * OUTPUTS + own + slot;
    for (u32 group = 0; group < groups; group++) {
        wait_for_copy_groups<1>();
        __syncthreads();
        fetch(group + 2);
        const u32 here = min(rows - group * GROUP, GROUP);
        const auto& rows_of_group = staged[team][group % STAGES];
        if (here == 1) add_rows<1>(weights, rows_of_group, slot, leaves, to, shape.row_floats, here);
        else add_rows<GROUP>(weights, rows_of_group, slot, leaves, to, shape.row_floats, here);
        to += GROUP * shape.row_floats;
    }
    if ((shape.outputs & 16) == 0) return;

    __syncthreads();
    if (thread == 0) arrived_before = arrive_last(arrivals + tile);
    __syncthreads();
    if (arrived_before != blocks - 1) return;
    // The last one: what the others left before they arrived is seen.
    if (thread == 0) leave_word(arrivals + tile, 0);
    for (u32 r = thread / 32; r < rows; r += MIX_THREADS / 32) {
        finish_row(scratch, mix, post, comb, base, scale, first_row + r, chunks, lane, shape);
    }
}

extern "C" __global__ void __launch_bounds__(MIX_THREADS)
hyper_finish(float* scratch, float* mix, float* post, float* comb, const float* base, const float* scale, const Shape shape) {
    const u32 lane = threadIdx.x % 32, row = blockIdx.x * (MIX_THREADS / 32) + threadIdx.x / 32;
    wait_for_inputs();
    if (row >= shape.rows) return;
    finish_row(scratch, mix, post, comb, base, scale, row, (shape.hidden + CHUNK - 1) / CHUNK, lane, shape);
}

// out[r][out_offset + c] = bf16((((X0 + X1) + X2) + X3) * 0.25), with QDQ8 where bit 1 of outputs is set
extern "C" __global__ void __launch_bounds__(THREADS) hyper_tap(const float* streams, float* out, const Shape shape) {
    wait_for_inputs();
    const u32 quads = shape.hidden / 4, item = blockIdx.x * THREADS + threadIdx.x, row = item / quads, quad = item % quads;
    const bool inside = row < shape.rows;
    const float4* x = (const float4*)streams + (inside ? row : 0) * 4 * quads + quad;
    const float4 x0 = x[0], x1 = x[quads], x2 = x[2 * quads], x3 = x[3 * quads];
    float4 value;
    value.x = bf16_round((((x0.x + x1.x) + x2.x) + x3.x) * 0.25f);
    value.y = bf16_round((((x0.y + x1.y) + x2.y) + x3.y) * 0.25f);
    value.z = bf16_round((((x0.z + x1.z) + x2.z) + x3.z) * 0.25f);
    value.w = bf16_round((((x0.w + x1.w) + x2.w) + x3.w) * 0.25f);
    if ((shape.outputs & 2) != 0) value = fp8_round_quad(value);
    if (!inside) return;
    // The place of a tap may be of any alignment.
    float* to = out + row * shape.out_columns + shape.out_offset + 4 * quad;
    to[0] = value.x;
    to[1] = value.y;
    to[2] = value.z;
    to[3] = value.w;
}
