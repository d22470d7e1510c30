// engram_gather: out[r][c] = dequantise(table[ids[r][c]]), then QDQ8 where asked for; the host looks for NaN
// in   codes [table_rows, head_dim] E4M3   scales [table_rows, head_dim / 32] E8M0   ids [items] u32, items = rows * columns
// out  out [items, head_dim] f32
// grid one warp an item; exact in bf16, no sum
//
// engram_gate, per row and stream i, with key_i and V from kv:
//   d  = sum((X_i * q_i) * (k_i * key_i)) * (1 / rms(X_i)) * (1 / rms(key_i)) / sqrt(hidden)
//   g  = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d));  X_i' = bf16(X_i + g * V); rows of an image stay
// in   kv [rows, 5, hidden] f32: four keys, then the value   q_weight, k_weight [4, hidden] f32   image [rows] u8,
//      where `has_images` is set
// out  streams [rows, 4, hidden] f32 in place, bf16 values
// grid one block a stream of a row, at least 3 warps, one a sum
// sum  order::sum_products and order::sum_squares, as on the CPU
// max  hidden and head_dim are multiples of 32
#include "prelude.cuh"

struct Shape {
    u32 items, columns;  // items: of ids, or rows * 4; columns: head_dim, or hidden
    u32 quantise;
    float eps;
    u32 has_images;
};

extern "C" __global__ void __launch_bounds__(256)
engram_gather(const u8* codes, const u8* scales, const u32* ids, float* out, const Shape shape) {
    wait_for_inputs();
    const u32 item = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (item >= shape.items) return;
    const u64 row = ids[item];
    for (u32 block = 0; block < shape.columns / 32; block++) {
        const u32 c = 32 * block + lane;
        float value = e4m3_value(codes[row * shape.columns + c]) * e8m0_value(scales[row * (shape.columns / 32) + block]);
        if (shape.quantise != 0) value = fp8_round(value);
        out[item * shape.columns + c] = value;
    }
}

extern "C" __global__ void __launch_bounds__(256)
engram_gate(float* streams, const float* kv, const float* q_weight, const float* k_weight, const u8* image, const Shape shape) {
    __shared__ float sums[3];
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, hidden = shape.columns;
    const u32 item = blockIdx.x, row = item / 4, i = item % 4;
    wait_for_inputs();
    if (shape.has_images != 0 && image[row] != 0) return;
    float* x = streams + item * hidden;
    const float* key = kv + (row * 5 + i) * hidden;
    const float* value = kv + (row * 5 + 4) * hidden;
    if (warp == 0) {
        const float* q = q_weight + i * hidden;
        const float* k = k_weight + i * hidden;
        const float dot = sum_products_of(hidden, lane, [&](u32 c, float& a, float& b) { a = x[c] * q[c], b = k[c] * key[c]; });
        if (lane == 0) sums[0] = dot;
    } else if (warp < 3) {
        const float* values = warp == 1 ? x : key;
        const float squares = sum_squares(values, hidden, lane);
        if (lane == 0) sums[warp] = squares;
    }
    __syncthreads();
    const float x_factor = inverse_rms(sums[1], hidden, shape.eps), key_factor = inverse_rms(sums[2], hidden, shape.eps);
    const float d = __fdiv_rn(sums[0] * x_factor * key_factor, __fsqrt_rn((float)hidden));
    // Not a number: the smaller magnitude, as the CPU's maximum has it, with the sign that d carries.
    const float magnitude = __fsqrt_rn(fabsf(d) > 1e-6f ? fabsf(d) : 1e-6f);
    const float gate = sigmoid_own(from_bits(to_bits(magnitude) | (to_bits(d) & 0x80000000u)));
#pragma unroll 4
    for (u32 c = thread; c < hidden; c += blockDim.x) x[c] = bf16_round(x[c] + gate * value[c]);
}
