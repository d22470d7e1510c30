// kv_store: record[r] = QDQ8(RoPE(RMSNorm(x[r]; norm), position)), every column quantised
// in   x [rows, head_dim] f32   norm [head_dim] f32   rows as tf_kernels::rows   frequencies [rope_dim / 2] f32
// out  records [rows, head_dim + head_dim / 32] bytes: E4M3 codes, then E8M0 scales
// grid one warp a row; a block is a multiple of 32 threads
// sum  order::sum_squares, as on the CPU; bf16 after the norm and after RoPE
// max  head_dim is a multiple of 32
//
// kv_store_ring: after attention, records of a window's last ring_len rows go to slot position % ring_len; a warp a row.
#include "prelude.cuh"

struct Shape {
    u32 rows, head_dim, rope_dim, ring_len;
    float eps;
};

extern "C" __global__ void __launch_bounds__(256)
kv_store(const float* x, const float* norm, const RowInfo* rows, const float* frequencies, u8* records, const Shape shape) {
    wait_for_inputs();
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, head_dim = shape.head_dim;
    if (row >= shape.rows) return;
    const float* in = x + row * head_dim;
    u8* record = records + (u64)row * (head_dim + head_dim / 32);
    const float factor = inverse_rms(sum_products(in, in, head_dim, lane), head_dim, shape.eps);
    const u32 position = rows[row].position;
#pragma unroll 2
    for (u32 block = 0; block < head_dim / 32; block++) {
        const u32 c = 32 * block + lane;
        float value = bf16_round(norm[c] * (in[c] * factor));
        value = rope_turn(value, c, head_dim, position, frequencies, shape.rope_dim);
        const u32 scale = fp8_scale(warp_max(to_bits(value) & 0x7fffffffu));
        record[c] = (u8)e4m3_code(value * inverse_scale(scale));
        if (lane == 0) record[head_dim + block] = (u8)scale;
    }
}

extern "C" __global__ void __launch_bounds__(256)
kv_store_ring(const u8* records, u8* ring, const RowInfo* rows, const WindowInfo* windows, const Shape shape) {
    wait_for_inputs();
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const u32 bytes = shape.head_dim + shape.head_dim / 32;
    if (row >= shape.rows) return;
    const WindowInfo window = windows[rows[row].window];
    if (window.row_count - (row - window.first_row) > shape.ring_len) return;
    u8* to = ring + ((u64)rows[row].slot * shape.ring_len + rows[row].position % shape.ring_len) * bytes;
    const u8* from = records + (u64)row * bytes;
    for (u32 i = lane; i < bytes; i += 32) to[i] = from[i];
}
