// What stands before and behind the linears on CUDA.
#include "tensor.cuh"

struct InputShape {
    int rows, x_stride, groups, columns, padded;
};

// out[r][g][c] = bf16(x[chosen[r]][g * columns + c]) for c below `columns`, zero from there to `padded`.
// in   x [.., x_stride] float32; chosen [rows] or null: the rows as they are      out  [rows, groups, padded] bf16
extern "C" __global__ void __launch_bounds__(256) linear_inputs(const float* x, const u32* chosen, u32* out, InputShape shape) {
    let_next_start();
    wait_for_inputs();
    const u32 half = shape.padded / 2, total = (u32)shape.rows * shape.groups * half;
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < total; i += gridDim.x * 256) {
        const u32 part = i / half, row = part / shape.groups, column = i % half * 2;
        const float* from = x + (size_t)(chosen ? chosen[row] : row) * shape.x_stride + part % shape.groups * shape.columns + column;
        const float low = column < (u32)shape.columns ? from[0] : 0.0f;
        const float high = column + 1 < (u32)shape.columns ? from[1] : 0.0f;
        out[i] = bf16_pair(low, high);
    }
}

// The same for tile.cuh: [groups, stages of 64 columns, atoms of 8 rows, 8 rows, 8 pieces] of 16 bytes; rows beyond `rows` stay as
// they are. One thread 16 columns, which are two pieces.
struct TilesShape {
    int rows, x_stride, groups, columns, stages, atoms;
};

extern "C" __global__ void __launch_bounds__(256) linear_tiles(const float* x, const u32* chosen, uint4* out, TilesShape shape) {
    let_next_start();
    wait_for_inputs();
    const u32 parts = shape.groups * shape.stages * 4, total = (u32)shape.rows * parts;
    const bool aligned = (shape.x_stride | shape.columns) % 4 == 0;
    for (u32 i = blockIdx.x * 256 + threadIdx.x; i < total; i += gridDim.x * 256) {
        const u32 row = i / parts, group_stage = i % parts / 4, part = i % 4;
        const u32 group = group_stage / shape.stages, first = group_stage % shape.stages * 64 + part * 16;
        const float* from = x + (size_t)(chosen ? chosen[row] : row) * shape.x_stride + group * shape.columns + first;
        float4 v[4];
        if (aligned && first + 16 <= (u32)shape.columns) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) v[j] = *(const float4*)(from + 4 * j);
        } else {
            const auto value = [&](u32 column) { return first + column < (u32)shape.columns ? from[column] : 0.0f; };
#pragma unroll
            for (u32 j = 0; j < 4; j++) v[j] = make_float4(value(4 * j), value(4 * j + 1), value(4 * j + 2), value(4 * j + 3));
        }
        uint4* const to = out + ((size_t)group_stage * shape.atoms + row / 8) * 64 + row % 8 * 8;
        to[(2 * part) ^ (row % 8)] = make_uint4(bf16_pair(v[0].x, v[0].y), bf16_pair(v[1].x, v[1].y), bf16_pair(v[2].x, v[2].y),
                                                bf16_pair(v[3].x, v[3].y));
        to[(2 * part + 1) ^ (row % 8)] = make_uint4(bf16_pair(v[0].z, v[0].w), bf16_pair(v[1].z, v[1].w),
                                                    bf16_pair(v[2].z, v[2].w), bf16_pair(v[3].z, v[3].w));
    }
}

struct PlainShape {
    int rows, outputs, columns, round_to_bf16;
};

__device__ __forceinline__ float value_at(const float* row, int column, int columns) { return column < columns ? row[column] : 0.0f; }

// out[r][n] = x[r] . w[n] for float32 weights, in the order of tf_numerics::sum's plain dot product: lane 16 h + l holds lane l of
// the accumulators h and 2 + h. One warp an output.
// in   x [rows, columns], w [outputs, columns] float32                    out  [rows, outputs] float32
extern "C" __global__ void __launch_bounds__(256) linear_f32(const float* x, const float* w, float* out, PlainShape shape) {
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % 32, l = lane % 16, h = lane / 16, columns = shape.columns;
    const int count = shape.rows * shape.outputs;
    for (int at = blockIdx.x * 8 + threadIdx.x / 32; at < count; at += gridDim.x * 8) {
        const float* row = x + (size_t)(at / shape.outputs) * columns;
        const float* weight = w + (size_t)(at % shape.outputs) * columns;
        float even = 0.0f, odd = 0.0f;
        for (int g = h; g < (columns + 127) / 128 * 4; g += 2) {
            const int c0 = 32 * g + l, c1 = c0 + 16;
            float& acc = g & 2 ? odd : even;
            acc = __fmaf_rn(value_at(weight, c0, columns), value_at(row, c0, columns), acc);
            acc = __fmaf_rn(value_at(weight, c1, columns), value_at(row, c1, columns), acc);
        }
        float sum = even + __shfl_xor_sync(~0u, even, 16);
        sum = sum + (odd + __shfl_xor_sync(~0u, odd, 16));
        for (int step = 8; step > 0; step /= 2) sum = sum + __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) out[at] = shape.round_to_bf16 ? bf16_round(sum) : sum;
    }
}
