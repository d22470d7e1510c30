// rms_norm: normed[r][c] = bf16(weight[c] * (x[r][c] * f)), f = 1 / sqrt(sum_c(x[r][c]^2) / columns + eps);
//           quantised[r] = QDQ8(normed[r])
// in   x         [rows, columns] f32      weight [columns] f32
// out  normed    [rows, columns] f32, bf16 values      quantised as normed; each where its bit of `outputs` is set
// grid one block a row, a multiple of 32 threads, up to 4 times 4 columns a thread; dynamic shared memory: the row
// sum  order::sum_squares by one warp: four accumulators of 16 lanes, as on the CPU, whatever the block
// max  columns is a multiple of 16, of 32 with `quantised`, at most 16384 (checked by launch)
#include "prelude.cuh"

struct Shape {
    u32 rows, columns;
    float eps;
    u32 outputs;  // bit 0 normed, bit 1 quantised
};

constexpr u32 QUADS = 4;

extern "C" __global__ void __launch_bounds__(1024)
rms_norm(const float* x, const float* weight, float* normed, float* quantised, const Shape shape) {
    extern __shared__ float4 row_quads[];
    __shared__ float factor_of_row;
    const u32 columns = shape.columns, quads = columns / 4, thread = threadIdx.x, lane = thread % 32;
    float4 weights[QUADS], values[QUADS];
#pragma unroll
    for (u32 i = 0; i < QUADS; i++) {
        const u32 quad = i * blockDim.x + thread;
        weights[i] = quad < quads ? ((const float4*)weight)[quad] : zero_quad();
    }
    wait_for_inputs();
    const float4* in = (const float4*)(x + blockIdx.x * columns);
#pragma unroll
    for (u32 i = 0; i < QUADS; i++) {
        const u32 quad = i * blockDim.x + thread;
        values[i] = quad < quads ? in[quad] : zero_quad();
        if (quad < quads) row_quads[quad] = values[i];
    }
    __syncthreads();
    if (thread < 32) {
        const float factor = inverse_rms(sum_squares((const float*)row_quads, columns, lane), columns, shape.eps);
        if (lane == 0) factor_of_row = factor;
    }
    __syncthreads();
    const float factor = factor_of_row;
    float4* to_normed = (float4*)(normed + blockIdx.x * columns);
    float4* to_quantised = (float4*)(quantised + blockIdx.x * columns);
#pragma unroll
    for (u32 i = 0; i < QUADS; i++) {
        // The same for all lanes of a warp.
        if (i * blockDim.x + thread - lane >= quads) break;
        const u32 quad = i * blockDim.x + thread;
        const float4 value = scale_quad(weights[i], values[i], factor);
        if ((shape.outputs & 1) != 0 && quad < quads) to_normed[quad] = value;
        if ((shape.outputs & 2) != 0) {
            const float4 rounded = fp8_round_quad(value);
            if (quad < quads) to_quantised[quad] = rounded;
        }
    }
}
