// hyper: the hyper-connections of four residual streams; formulas and roundings in mod.rs.
// A sublayer enters by two launches: hyper_enter (expand, collapse, norm: a row's input), then hyper_mixes or hyper_mixes_one
// (the next mixes), which nothing reads before the sublayer's end; few rows by one, hyper_enter_apart.
//
// streams [rows, 4, hidden] f32 in place   y [rows, hidden] f32   mix, post [rows, 4] f32   comb [rows, 4, 4] f32 (source,
// target)   function [24, 4 hidden] f32   base [24]   scale [3]   norm [hidden]   scratch [rows, 32] f32
// grid hyper_enter, hyper_collapse: 640 threads a row, dynamic shared memory: the row. hyper_expand: a thread a column of a
//      row, any block. hyper_mixes: 256 threads for 8 rows, dynamic shared memory: 68608 bytes. hyper_mixes_one: 256 threads
//      for each of 25 items of a row, its outputs and its sum of squares, dynamic shared memory: a row of weights and the
//      streams; the last to arrive (scratch holds their count) makes the mixes. hyper_enter_apart: 640 threads for each of 26
//      items of a row, the 25 and its input, dynamic shared memory: the streams and a row of weights; arrivals [rows, 32] words,
//      whose last is zero before and after. hyper_tap: a thread four columns of a row
// sum  order::dot for the products (16 lanes an output), order::sum_squares for the squares, as on the CPU; the sums of four
//      in index order
// max  hidden is a multiple of 32, at most 10240 (checked by launch)
#include "prelude.cuh"

struct Shape {
    u32 rows, hidden, iterations, outputs;  // outputs: bit 0 normed, bit 1 quantised, bit 2 collapsed, bit 3 y is given
    float hc_eps, norm_eps;
    u32 out_columns, out_offset;
};

constexpr u32 THREADS = 256, ROW_THREADS = 640, ROW_QUADS = 4, OUTPUTS = 24;

// What a row's streams become: a column of each, times comb[i][j], plus post[j] times the sublayer's output.
struct Expansion {
    float comb[16], post[4];

    __device__ __forceinline__ Expansion(const float* of_comb, const float* of_post) {
#pragma unroll
        for (u32 i = 0; i < 16; i++) comb[i] = of_comb[i];
#pragma unroll
        for (u32 i = 0; i < 4; i++) post[i] = of_post[i];
    }

    __device__ __forceinline__ float stream(u32 j, float x0, float x1, float x2, float x3, float out) const {
        float sum = comb[j] * x0;
        sum = sum + comb[4 + j] * x1;
        sum = sum + comb[8 + j] * x2;
        sum = sum + comb[12 + j] * x3;
        return bf16_round(sum + post[j] * out);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
hyper_expand(const float* y, float* streams, const float* post, const float* comb, const Shape shape) {
    wait_for_inputs();
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, hidden = shape.hidden, row = item / hidden, c = item % hidden;
    if (row >= shape.rows) return;
    const Expansion expansion(comb + row * 16, post + row * 4);
    float* x = streams + row * 4 * hidden + c;
    const float x0 = x[0], x1 = x[hidden], x2 = x[2 * hidden], x3 = x[3 * hidden], out = y[row * hidden + c];
#pragma unroll
    for (u32 j = 0; j < 4; j++) x[j * hidden] = expansion.stream(j, x0, x1, x2, x3, out);
}

// ((v0 + v1) + v2) + v3 over lanes base, base + step, ...
__device__ __forceinline__ float sum4(float value, u32 base, u32 step) {
    const float v0 = __shfl_sync(WARP, value, base), v1 = __shfl_sync(WARP, value, base + step);
    const float v2 = __shfl_sync(WARP, value, base + 2 * step), v3 = __shfl_sync(WARP, value, base + 3 * step);
    return ((v0 + v1) + v2) + v3;
}

__device__ __forceinline__ float collapse_column(float x0, float x1, float x2, float x3, const float (&m)[4]) {
    float sum = m[0] * x0;
    sum = sum + m[1] * x1;
    sum = sum + m[2] * x2;
    sum = sum + m[3] * x3;
    return bf16_round(sum);
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

// A row's columns, four in a quad, a thread having up to ROW_QUADS of them.
struct RowQuads {
    float4 norm[ROW_QUADS], u[ROW_QUADS];

    // Before the inputs are there.
    __device__ __forceinline__ void load_norm(const float* weight, u32 quads) {
#pragma unroll
        for (u32 i = 0; i < ROW_QUADS; i++) {
            const u32 quad = i * ROW_THREADS + threadIdx.x;
            norm[i] = quad < quads ? ((const float4*)weight)[quad] : zero_quad();
        }
    }

    // The norm of the collapsed row; `row_quads` holds it once all have written theirs.
    __device__ __forceinline__ void finish(float4* row_quads, float* normed, float* quantised, float* collapsed, u32 row,
                                           const Shape& shape) {
        __shared__ float factor_of_row;
        const u32 thread = threadIdx.x, lane = thread % 32, hidden = shape.hidden, quads = hidden / 4;
#pragma unroll
        for (u32 i = 0; i < ROW_QUADS; i++) {
            const u32 quad = i * ROW_THREADS + thread;
            if (quad < quads) row_quads[quad] = u[i];
        }
        __syncthreads();
        if (thread < 32) {
            const float squares = sum_squares((const float*)row_quads, hidden, lane);
            if (lane == 0) factor_of_row = inverse_rms(squares, hidden, shape.norm_eps);
        }
        __syncthreads();
        const float factor = factor_of_row;
#pragma unroll
        for (u32 i = 0; i < ROW_QUADS; i++) {
            // The same for all lanes of a warp.
            if (i * ROW_THREADS + thread - lane >= quads) break;
            const u32 quad = i * ROW_THREADS + thread, at = row * quads + quad;
            const float4 value = scale_quad(norm[i], u[i], factor);
            const float4 rounded = (shape.outputs & 2) != 0 ? fp8_round_quad(value) : value;
            if (quad >= quads) continue;
            if ((shape.outputs & 4) != 0) ((float4*)collapsed)[at] = u[i];
            if ((shape.outputs & 1) != 0) ((float4*)normed)[at] = value;
            if ((shape.outputs & 2) != 0) ((float4*)quantised)[at] = rounded;
        }
    }
};

__device__ __forceinline__ float4 collapse_quad(float4 x0, float4 x1, float4 x2, float4 x3, const float (&m)[4]) {
    float4 u;
    u.x = collapse_column(x0.x, x1.x, x2.x, x3.x, m);
    u.y = collapse_column(x0.y, x1.y, x2.y, x3.y, m);
    u.z = collapse_column(x0.z, x1.z, x2.z, x3.z, m);
    u.w = collapse_column(x0.w, x1.w, x2.w, x3.w, m);
    return u;
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
hyper_collapse(const float* streams, const float* mix, const float* norm, float* normed, float* quantised, float* collapsed,
               const Shape shape) {
    extern __shared__ float4 row_quads[];
    const u32 row = blockIdx.x, quads = shape.hidden / 4;
    RowQuads of_row;
    of_row.load_norm(norm, quads);
    wait_for_inputs();
    const float4* x = (const float4*)streams + row * 4 * quads;
    const float m[4] = {mix[row * 4], mix[row * 4 + 1], mix[row * 4 + 2], mix[row * 4 + 3]};
#pragma unroll
    for (u32 i = 0; i < ROW_QUADS; i++) {
        const u32 quad = i * ROW_THREADS + threadIdx.x;
        of_row.u[i] = quad < quads
            ? collapse_quad(x[quad], x[quads + quad], x[2 * quads + quad], x[3 * quads + quad], m)
            : zero_quad();
    }
    of_row.finish(row_quads, normed, quantised, collapsed, row, shape);
}

// Expands the streams where y is given, collapses them with the mix of the sublayer before, and sets the row's count of
// hyper_mixes_one back.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
hyper_enter(const float* y, float* streams, const float* mix, const float* post, const float* comb, const float* norm,
            float* normed, float* quantised, u32* scratch, const Shape shape) {
    extern __shared__ float4 row_quads[];
    const u32 row = blockIdx.x, quads = shape.hidden / 4;
    RowQuads of_row;
    of_row.load_norm(norm, quads);
    wait_for_inputs();
    float4* x = (float4*)streams + row * 4 * quads;
    const float4* out = (const float4*)y + row * quads;
    const float m[4] = {mix[row * 4], mix[row * 4 + 1], mix[row * 4 + 2], mix[row * 4 + 3]};
    const bool expands = (shape.outputs & 8) != 0;
    const Expansion expansion(comb + row * 16, post + row * 4);
    // Two quads' streams are fetched before the first is written.
#pragma unroll
    for (u32 first = 0; first < ROW_QUADS; first += 2) {
        if (first * ROW_THREADS >= quads) {
            of_row.u[first] = of_row.u[first + 1] = zero_quad();
            continue;
        }
        float4 in[2][4], o[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 quad = (first + i) * ROW_THREADS + threadIdx.x;
            const bool inside = quad < quads;
#pragma unroll
            for (u32 j = 0; j < 4; j++) in[i][j] = inside ? x[j * quads + quad] : zero_quad();
            o[i] = inside && expands ? out[quad] : zero_quad();
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 quad = (first + i) * ROW_THREADS + threadIdx.x;
            if (expands) {
                float4 next[4];
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    next[j].x = expansion.stream(j, in[i][0].x, in[i][1].x, in[i][2].x, in[i][3].x, o[i].x);
                    next[j].y = expansion.stream(j, in[i][0].y, in[i][1].y, in[i][2].y, in[i][3].y, o[i].y);
                    next[j].z = expansion.stream(j, in[i][0].z, in[i][1].z, in[i][2].z, in[i][3].z, o[i].z);
                    next[j].w = expansion.stream(j, in[i][0].w, in[i][1].w, in[i][2].w, in[i][3].w, o[i].w);
                    if (quad < quads) x[j * quads + quad] = next[j];
                }
#pragma unroll
                for (u32 j = 0; j < 4; j++) in[i][j] = next[j];
            }
            of_row.u[first + i] = collapse_quad(in[i][0], in[i][1], in[i][2], in[i][3], m);
        }
    }
    if (threadIdx.x == 0) scratch[row * 32 + OUTPUTS + 1] = 0;
    of_row.finish(row_quads, normed, quantised, nullptr, row, shape);
}

// One chain of 16 lanes from `begin` to `end`; lanes 16..31 repeat lanes 0..15. The factors of the next steps are fetched
// while those of the last ones are added up.
__device__ __forceinline__ float add_products(float sum, const float* weight, const float* x, u32 begin, u32 end) {
    constexpr u32 STEPS = 16;
    float w[STEPS], v[STEPS];
    u32 c = begin;
    if (c + 16 * STEPS <= end) {
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) w[i] = weight[c + 16 * i], v[i] = x[c + 16 * i];
        for (c += 16 * STEPS; c + 16 * STEPS <= end; c += 16 * STEPS) {
            float next_w[STEPS], next_v[STEPS];
#pragma unroll
            for (u32 i = 0; i < STEPS; i++) next_w[i] = weight[c + 16 * i], next_v[i] = x[c + 16 * i];
#pragma unroll
            for (u32 i = 0; i < STEPS; i++) sum = fma_own(w[i], v[i], sum);
#pragma unroll
            for (u32 i = 0; i < STEPS; i++) w[i] = next_w[i], v[i] = next_v[i];
        }
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) sum = fma_own(w[i], v[i], sum);
    }
    for (; c < end; c += 16) sum = fma_own(weight[c], x[c], sum);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
hyper_mixes_one(const float* streams, float* mix, float* post, float* comb, const float* function, const float* base,
                const float* scale, u32* scratch, const Shape shape) {
    extern __shared__ float4 staged[];
    const u32 thread = threadIdx.x, lane = thread % 32, width = 4 * shape.hidden, quads = width / 4;
    const u32 row = blockIdx.x / (OUTPUTS + 1), output = blockIdx.x % (OUTPUTS + 1);
    float4* const staged_x = staged + quads;
    // Weights do not depend on the launch before.
    if (output < OUTPUTS) {
        const float4* weight = (const float4*)(function + output * width);
        for (u32 quad = thread; quad < quads; quad += THREADS) copy_async_16(staged + quad, weight + quad);
    }
    end_copy_group();
    wait_for_inputs();
    const float4* x = (const float4*)(streams + row * width);
    // The streams come in four parts, so that the first may be added up while the others are on their way.
    const u32 part = (quads / 4 + 3) / 4 * 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        for (u32 quad = i * part + thread; quad < min((i + 1) * part, quads); quad += THREADS) copy_async_16(staged_x + quad, x + quad);
        end_copy_group();
    }
    const float* weights = (const float*)staged + lane % 16;
    const float* values = (const float*)staged_x + lane % 16;
    const bool adds = thread < 32 && output < OUTPUTS;
    float sum = 0.0f;
    wait_for_copy_groups<3>();
    __syncthreads();
    if (adds) sum = add_products(sum, weights, values, 0, min(4 * part, width));
    wait_for_copy_groups<2>();
    __syncthreads();
    if (adds) sum = add_products(sum, weights, values, 4 * part, min(8 * part, width));
    wait_for_copy_groups<1>();
    __syncthreads();
    if (adds) sum = add_products(sum, weights, values, 8 * part, min(12 * part, width));
    wait_for_copy_groups<0>();
    __syncthreads();
    if (thread >= 32) return;
    if (adds) sum = fold16(add_products(sum, weights, values, 12 * part, width));
    if (output == OUTPUTS) sum = sum_squares((const float*)staged_x, width, lane);

    u32* const z = scratch + row * 32;
    u32 arrived = 0;
    if (lane == 0) {
        leave_word(z + output, to_bits(sum));
        arrived = arrive_last(z + OUTPUTS + 1);
    }
    if (__shfl_sync(WARP, arrived, 0) != OUTPUTS) return;
    // The last one: what the others left before they arrived is seen.
    __syncwarp();
    const float value = lane <= OUTPUTS ? from_bits(left_word(z + lane)) : 0.0f;
    make_mixes(value, mix, post, comb, base, scale, row, lane, shape);
}

// hyper_enter and hyper_mixes_one at once, hidden at most 5120: every block expands the row's streams for itself, one after the
// other, so that a stream is added up while the next is made. The last block to arrive writes the streams and makes the mixes:
// nobody reads the old ones any more.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
hyper_enter_apart(const float* y, float* streams, float* mix, float* post, float* comb, const float* function,
                  const float* base, const float* scale, const float* norm, float* normed, float* quantised, u32* arrivals,
                  const Shape shape) {
    constexpr u32 ITEMS = OUTPUTS + 2, INPUT = OUTPUTS + 1, OWN = 2, COUNT = 31;
    extern __shared__ float4 staged[];
    __shared__ u32 arrived_before;
    const u32 thread = threadIdx.x, lane = thread % 32, hidden = shape.hidden, quads = hidden / 4;
    const u32 row = blockIdx.x / ITEMS, item = blockIdx.x % ITEMS;
    float4* const weights = staged + 4 * quads;
    // Weights do not depend on the launch before.
    if (item < OUTPUTS) {
        const float4* weight = (const float4*)(function + item * 4 * hidden);
        for (u32 quad = thread; quad < 4 * quads; quad += ROW_THREADS) copy_async_16(weights + quad, weight + quad);
    }
    end_copy_group();
    wait_for_inputs();
    const bool expands = (shape.outputs & 8) != 0;
    float4* x = (float4*)streams + row * 4 * quads;
    const float4* out = (const float4*)y + row * quads;
    float4 in[OWN][4], o[OWN];
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        const u32 quad = i * ROW_THREADS + thread;
        const bool inside = quad < quads;
#pragma unroll
        for (u32 j = 0; j < 4; j++) in[i][j] = inside ? x[j * quads + quad] : zero_quad();
        o[i] = inside && expands ? out[quad] : zero_quad();
    }
    const Expansion expansion(comb + row * 16, post + row * 4);
    const bool adds = thread < 32 && item < OUTPUTS;
    float sum = 0.0f;
    wait_for_copy_groups<0>();
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 quad = i * ROW_THREADS + thread;
            float4 next = in[i][j];
            if (expands) {
                next.x = expansion.stream(j, in[i][0].x, in[i][1].x, in[i][2].x, in[i][3].x, o[i].x);
                next.y = expansion.stream(j, in[i][0].y, in[i][1].y, in[i][2].y, in[i][3].y, o[i].y);
                next.z = expansion.stream(j, in[i][0].z, in[i][1].z, in[i][2].z, in[i][3].z, o[i].z);
                next.w = expansion.stream(j, in[i][0].w, in[i][1].w, in[i][2].w, in[i][3].w, o[i].w);
            }
            if (quad < quads) staged[j * quads + quad] = next;
        }
        __syncthreads();
        if (adds) {
            sum = add_products(sum, (const float*)weights + lane % 16, (const float*)staged + lane % 16, j * hidden, (j + 1) * hidden);
        }
    }
    if (adds) sum = fold16(sum);
    if (thread < 32 && item == OUTPUTS) sum = sum_squares((const float*)staged, 4 * hidden, lane);
    if (item == INPUT) {
        const float m[4] = {mix[row * 4], mix[row * 4 + 1], mix[row * 4 + 2], mix[row * 4 + 3]};
        RowQuads of_row;
        of_row.load_norm(norm, quads);
#pragma unroll
        for (u32 i = 0; i < ROW_QUADS; i++) {
            const u32 quad = i * ROW_THREADS + thread;
            of_row.u[i] = quad < quads ? collapse_quad(staged[quad], staged[quads + quad], staged[2 * quads + quad],
                                                       staged[3 * quads + quad], m)
                                       : zero_quad();
        }
        of_row.finish(weights, normed, quantised, nullptr, row, shape);
    }

    // Where the block's threads met, they had read what the last one is to write.
    u32* const z = arrivals + row * 32;
    if (thread == 0) {
        if (item <= OUTPUTS) leave_word(z + item, to_bits(sum));
        arrived_before = arrive_last(z + COUNT);
    }
    __syncthreads();
    if (arrived_before != ITEMS - 1) return;
    if (expands) {
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            const u32 quad = i * ROW_THREADS + thread;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                if (quad < quads) x[j * quads + quad] = staged[j * quads + quad];
            }
        }
    }
    if (thread >= 32) return;
    const float value = lane <= OUTPUTS ? from_bits(left_word(z + lane)) : 0.0f;
    make_mixes(value, mix, post, comb, base, scale, row, lane, shape);
    if (lane == 0) leave_word(z + COUNT, 0);
}

// All outputs of 8 rows. A chunk of columns lies in shared memory while the next is on its way: weights with their second half
// of outputs shifted by half of the banks, streams as four rows side by side. Six warps have four outputs each, two of them in
// each half of the lanes; the seventh has the sums of squares.
extern "C" __global__ void __launch_bounds__(THREADS)
hyper_mixes(const float* streams, float* mix, float* post, float* comb, const float* function, const float* base,
            const float* scale, const Shape shape) {
    constexpr u32 ROWS = 8, CHUNK = 256, STRIDE = CHUNK + 16;
    constexpr u32 WEIGHT_QUADS = OUTPUTS * CHUNK / 4 / THREADS, SIDE = OUTPUTS * STRIDE / 4 + 2 * CHUNK;
    extern __shared__ float4 staged[];
    __shared__ float sums[ROWS][32];
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, width = 4 * shape.hidden;
    const u32 first_row = blockIdx.x * ROWS, rows = min(shape.rows - first_row, ROWS);
    float4 next_weight[WEIGHT_QUADS], next_x[2];
    const auto load_weights = [&](u32 first) {
#pragma unroll
        for (u32 i = 0; i < WEIGHT_QUADS; i++) {
            const u32 quad = i * THREADS + thread, c = first + quad % (CHUNK / 4) * 4;
            next_weight[i].x = next_weight[i].y = next_weight[i].z = next_weight[i].w = 0.0f;
            if (c < width) next_weight[i] = *(const float4*)(function + quad / (CHUNK / 4) * width + c);
        }
    };
    const auto load_x = [&](u32 first) {
        const u32 c = first + thread;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const float* x = streams + (first_row + 4 * i) * width + c;
            const u32 here = c < width && rows > 4 * i ? rows - 4 * i : 0;
            next_x[i].x = here > 0 ? x[0] : 0.0f;
            next_x[i].y = here > 1 ? x[width] : 0.0f;
            next_x[i].z = here > 2 ? x[2 * width] : 0.0f;
            next_x[i].w = here > 3 ? x[3 * width] : 0.0f;
        }
    };
    const auto store = [&](u32 side) {
        float4* to = staged + side * SIDE;
#pragma unroll
        for (u32 i = 0; i < WEIGHT_QUADS; i++) {
            const u32 quad = i * THREADS + thread;
            to[quad / (CHUNK / 4) * (STRIDE / 4) + quad % (CHUNK / 4)] = next_weight[i];
        }
        to += OUTPUTS * STRIDE / 4 + thread;
        to[0] = next_x[0];
        to[CHUNK] = next_x[1];
    };

    // Of the outputs: two chains by eight rows. Of the squares: even and odd by eight rows.
    float acc[2][ROWS];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) acc[0][r] = acc[1][r] = 0.0f;
    load_weights(0);
    wait_for_inputs();
    load_x(0);
    store(0);
    for (u32 first = 0, side = 0; first < width; first += CHUNK, side ^= 1) {
        __syncthreads();
        if (first + CHUNK < width) load_weights(first + CHUNK), load_x(first + CHUNK);
        const float* weight = (const float*)(staged + side * SIDE);
        const float4* x = staged + side * SIDE + OUTPUTS * STRIDE / 4;
        const u32 end = min(CHUNK, width - first);
        const auto add = [&](float (&to)[ROWS], float factor, const float4& low, const float4& high) {
            to[0] = fma_own(factor, low.x, to[0]);
            to[1] = fma_own(factor, low.y, to[1]);
            to[2] = fma_own(factor, low.z, to[2]);
            to[3] = fma_own(factor, low.w, to[3]);
            to[4] = fma_own(factor, high.x, to[4]);
            to[5] = fma_own(factor, high.y, to[5]);
            to[6] = fma_own(factor, high.z, to[6]);
            to[7] = fma_own(factor, high.w, to[7]);
        };
        if (warp < 6) {
            const float* own = weight + (4 * warp + lane / 16) * STRIDE + lane % 16;
#pragma unroll 4
            for (u32 c = 0; c < end; c += 16) {
                const float4 low = x[c + lane % 16], high = x[CHUNK + c + lane % 16];
                add(acc[0], own[c], low, high);
                add(acc[1], own[2 * STRIDE + c], low, high);
            }
        } else if (warp == 6) {
            const auto square = [&](float (&to)[ROWS], u32 c) {
                const float4 low = x[c], high = x[CHUNK + c];
                to[0] = fma_own(low.x, low.x, to[0]);
                to[1] = fma_own(low.y, low.y, to[1]);
                to[2] = fma_own(low.z, low.z, to[2]);
                to[3] = fma_own(low.w, low.w, to[3]);
                to[4] = fma_own(high.x, high.x, to[4]);
                to[5] = fma_own(high.y, high.y, to[5]);
                to[6] = fma_own(high.z, high.z, to[6]);
                to[7] = fma_own(high.w, high.w, to[7]);
            };
            for (u32 c = lane; c < end; c += 64) {
                square(acc[0], c);
                if (c + 32 < end) square(acc[1], c + 32);
            }
        }
        if (first + CHUNK < width) store(side ^ 1);
    }
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        if (warp < 6) {
            const float first = fold16(acc[0][r]), second = fold16(acc[1][r]);
            if (lane % 16 == 0) sums[r][4 * warp + lane / 16] = first, sums[r][4 * warp + 2 + lane / 16] = second;
        } else if (warp == 6) {
            const float squares = fold_four(acc[0][r], acc[1][r]);
            if (lane == 0) sums[r][OUTPUTS] = squares;
        }
    }
    __syncthreads();
    if (warp >= rows) return;
    const float z = lane <= OUTPUTS ? sums[warp][lane] : 0.0f;
    make_mixes(z, mix, post, comb, base, scale, first_row + warp, lane, shape);
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
