// hyper: the hyper-connections of four residual streams; formulas and roundings in mod.rs.
// A sublayer enters by three launches: hyper_expand, hyper_products, hyper_finish; hyper_collapse ends a stack.
//
// streams [rows, 4, hidden] f32 in place   y [rows, hidden] f32   mix, post [rows, 4] f32   comb [rows, 4, 4] f32 (source,
// target)   function [24, 4 hidden] f32   base [24]   scale [3]   norm [hidden]   scratch [rows, 32] f32
// grid hyper_expand: a thread a column of a row, any block. hyper_products, hyper_products_one: 256 threads for 13 items of
//      8 rows, or of one: two outputs of the rows, or their sums of squares. hyper_finish, hyper_collapse: 256 threads a
//      row, dynamic shared memory: the row. hyper_tap: a warp a row, any block
// sum  order::dot for the products (16 lanes an output), order::sum_squares for the squares, as on the CPU; the sums of four
//      in index order
// max  hidden is a multiple of 32
#include "prelude.cuh"

struct Shape {
    u32 rows, hidden, iterations, outputs;  // outputs: bit 0 normed, bit 1 quantised, bit 2 collapsed
    float hc_eps, norm_eps;
    u32 out_columns, out_offset;
};

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(1024)
hyper_expand(const float* y, float* streams, const float* post, const float* comb, const Shape shape) {
    wait_for_inputs();
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, hidden = shape.hidden, row = item / hidden, c = item % hidden;
    if (row >= shape.rows) return;
    float* x = streams + row * 4 * hidden + c;
    const float x0 = x[0], x1 = x[hidden], x2 = x[2 * hidden], x3 = x[3 * hidden], out = y[row * hidden + c];
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        const float* weights = comb + row * 16 + j;
        float sum = weights[0] * x0;
        sum = sum + weights[4] * x1;
        sum = sum + weights[8] * x2;
        sum = sum + weights[12] * x3;
        x[j * hidden] = bf16_round(sum + post[row * 4 + j] * out);
    }
}

// Two outputs of ROWS rows: CHUNK columns of the weights and the rows are staged while the chunk before is added up.
template <u32 ROWS, u32 CHUNK>
__device__ __forceinline__ void products(const float* streams, const float* function, float* scratch, const Shape& shape) {
    // The second output's weights start in the other half of the banks.
    constexpr u32 STRIDE = CHUNK + 16, LINES = 2 + ROWS, QUADS = LINES * CHUNK / 4, EACH = (QUADS + THREADS - 1) / THREADS;
    __shared__ float4 staged[2][LINES * STRIDE / 4];
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, width = 4 * shape.hidden;
    const u32 first_row = blockIdx.x / 13 * ROWS, pair = blockIdx.x % 13;
    if (pair == 12) {
        const u32 row = first_row + warp;
        if (warp >= ROWS || row >= shape.rows) return;
        const float* x = streams + row * width;
        const float squares = sum_products(x, x, width, lane);
        if (lane == 0) scratch[row * 32 + 24] = squares;
        return;
    }
    float4 next[EACH];
    const auto load = [&](u32 first) {
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            const u32 quad = i * THREADS + thread, line = quad / (CHUNK / 4), c = first + quad % (CHUNK / 4) * 4;
            const u32 row = first_row + line - 2;
            next[i].x = next[i].y = next[i].z = next[i].w = 0.0f;
            if (quad >= QUADS || c >= width || (line >= 2 && row >= shape.rows)) continue;
            const float* from = line < 2 ? function + (2 * pair + line) * width : streams + row * width;
            next[i] = *(const float4*)(from + c);
        }
    };
    const auto store = [&](u32 side) {
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            const u32 quad = i * THREADS + thread, line = quad / (CHUNK / 4);
            if (quad < QUADS) staged[side][line * (STRIDE / 4) + quad % (CHUNK / 4)] = next[i];
        }
    };
    float sum = 0.0f;
    load(0);
    store(0);
    for (u32 first = 0, side = 0; first < width; first += CHUNK, side ^= 1) {
        __syncthreads();
        if (first + CHUNK < width) load(first + CHUNK);
        if (warp < ROWS) {
            const float* weight = (const float*)staged[side] + lane / 16 * STRIDE + lane % 16;
            const float* x = (const float*)staged[side] + (2 + warp) * STRIDE + lane % 16;
            const u32 end = min(CHUNK, width - first);
#pragma unroll 16
            for (u32 c = 0; c < end; c += 16) sum = fma_own(weight[c], x[c], sum);
        }
        if (first + CHUNK < width) store(side ^ 1);
    }
    sum = fold16(sum);
    const u32 row = first_row + warp;
    if (warp < ROWS && row < shape.rows && lane % 16 == 0) scratch[row * 32 + 2 * pair + lane / 16] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
hyper_products(const float* streams, const float* function, float* scratch, const Shape shape) {
    wait_for_inputs();
    products<8, 512>(streams, function, scratch, shape);
}

extern "C" __global__ void __launch_bounds__(THREADS)
hyper_products_one(const float* streams, const float* function, float* scratch, const Shape shape) {
    wait_for_inputs();
    products<1, 1536>(streams, function, scratch, shape);
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

// The next mixes of a row, by one warp.
__device__ __forceinline__ void mixes(float* mix, float* post, float* comb, const float* base, const float* scale,
                                      const float* z, u32 row, u32 lane, const Shape& shape) {
    const float z_factor = inverse_rms(z[24], 4 * shape.hidden, shape.norm_eps), eps = shape.hc_eps;
    const u32 at = lane % 16, row_base = (lane & 16) + (at & 12), column_base = (lane & 16) + (at & 3), out = lane % 8;
    const float gate = (z[out] * z_factor) * scale[out / 4] + base[out];
    const float opened = sigmoid_own(gate);
    if (lane < 4) mix[row * 4 + lane] = opened + eps;
    if (lane >= 4 && lane < 8) post[row * 4 + lane - 4] = 2.0f * opened;

    // Lanes 16..31 repeat lanes 0..15.
    float value = (z[8 + at] * z_factor) * scale[2] + base[8 + at];
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

// The collapsed row and its norm, by the first `writers` warps of a block; the others do `between`.
template <class Between>
__device__ __forceinline__ void collapse_row(const float* streams, const float* mix, const float* norm, float* normed,
                                             float* quantised, float* collapsed, const Shape& shape, u32 writers,
                                             Between between) {
    extern __shared__ float collapsed_row[];
    __shared__ float factor_of_row;
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, row = blockIdx.x, hidden = shape.hidden;
    const float* x = streams + row * 4 * hidden;
    const float m[4] = {mix[row * 4], mix[row * 4 + 1], mix[row * 4 + 2], mix[row * 4 + 3]};
#pragma unroll 4
    for (u32 c = thread; c < hidden; c += blockDim.x) {
        collapsed_row[c] = collapse_column(x[c], x[hidden + c], x[2 * hidden + c], x[3 * hidden + c], m);
    }
    __syncthreads();
    if (warp == 0) {
        const float factor = inverse_rms(sum_products(collapsed_row, collapsed_row, hidden, lane), hidden, shape.norm_eps);
        if (lane == 0) factor_of_row = factor;
    }
    __syncthreads();
    // Every thread has read the old mix.
    if (warp >= writers) return between();
    const float factor = factor_of_row;
    for (u32 c = thread; c < hidden; c += 32 * writers) {
        const float u = collapsed_row[c], value = bf16_round(norm[c] * (u * factor));
        if ((shape.outputs & 4) != 0) collapsed[row * hidden + c] = u;
        if ((shape.outputs & 1) != 0) normed[row * hidden + c] = value;
        if ((shape.outputs & 2) != 0) quantised[row * hidden + c] = fp8_round(value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
hyper_collapse(const float* streams, const float* mix, const float* norm, float* normed, float* quantised, float* collapsed,
               const Shape shape) {
    wait_for_inputs();
    collapse_row(streams, mix, norm, normed, quantised, collapsed, shape, blockDim.x / 32, [] {});
}

// The last warp makes the next mixes while the others write the row.
extern "C" __global__ void __launch_bounds__(THREADS)
hyper_finish(const float* streams, float* mix, float* post, float* comb, const float* base, const float* scale,
             const float* norm, const float* scratch, float* normed, float* quantised, float* collapsed, const Shape shape) {
    wait_for_inputs();
    collapse_row(streams, mix, norm, normed, quantised, collapsed, shape, blockDim.x / 32 - 1, [&] {
        mixes(mix, post, comb, base, scale, scratch + blockIdx.x * 32, blockIdx.x, threadIdx.x % 32, shape);
    });
}

// out[r][out_offset + c] = bf16((((X0 + X1) + X2) + X3) * 0.25), with QDQ8 where bit 1 of outputs is set
extern "C" __global__ void __launch_bounds__(1024) hyper_tap(const float* streams, float* out, const Shape shape) {
    wait_for_inputs();
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, hidden = shape.hidden;
    if (row >= shape.rows) return;
    for (u32 c = lane; c < hidden; c += 32) {
        const float* x = streams + row * 4 * hidden + c;
        float value = bf16_round((((x[0] + x[hidden]) + x[2 * hidden]) + x[3 * hidden]) * 0.25f);
        if ((shape.outputs & 2) != 0) value = fp8_round(value);
        out[row * shape.out_columns + shape.out_offset + c] = value;
    }
}
