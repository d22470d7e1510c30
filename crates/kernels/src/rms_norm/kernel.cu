// rms_norm: normed[r][c] = bf16(weight[c] * (x[r][c] * f)), f = 1 / sqrt(sum_c(x[r][c]^2) / columns + eps);
//           quantised[r] = QDQ8(normed[r])
// in   x         [rows, columns] f32      weight [columns] f32
// out  normed    [rows, columns] f32, bf16 values      quantised as normed; each where its bit of `outputs` is set
// grid one block a row, a multiple of 32 threads; dynamic shared memory: the row
// sum  order::sum_squares by one warp: four accumulators of 16 lanes, as on the CPU, whatever the block
// max  columns is a multiple of 16, of 32 with `quantised`
#include "prelude.cuh"

struct Shape {
    u32 rows, columns;
    float eps;
    u32 outputs;  // bit 0 normed, bit 1 quantised
};

extern "C" __global__ void __launch_bounds__(1024)
rms_norm(const float* x, const float* weight, float* normed, float* quantised, const Shape shape) {
    extern __shared__ float row_values[];
    __shared__ float factor_of_row;
    const u32 columns = shape.columns, thread = threadIdx.x, lane = thread % 32, at = blockIdx.x * columns;
    wait_for_inputs();
    for (u32 c = thread; c < columns; c += blockDim.x) row_values[c] = x[at + c];
    __syncthreads();
    if (thread < 32) {
        const float factor = inverse_rms(sum_products(row_values, row_values, columns, lane), columns, shape.eps);
        if (lane == 0) factor_of_row = factor;
    }
    __syncthreads();
    const float factor = factor_of_row;
    for (u32 first = thread - lane; first < columns; first += blockDim.x) {
        const u32 c = first + lane;
        const bool inside = c < columns;
        const float value = inside ? bf16_round(weight[c] * (row_values[c] * factor)) : 0.0f;
        if ((shape.outputs & 1) != 0 && inside) normed[at + c] = value;
        if ((shape.outputs & 2) != 0) quantised[at + c] = fp8_round(value);
    }
}
