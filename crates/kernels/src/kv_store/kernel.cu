// kv_store: record[r] = QDQ8(RoPE(RMSNorm(x[r]; norm), position)), every column quantised
// in   x [rows, head_dim] f32   norm [head_dim] f32   rows as tf_kernels::rows   frequencies [rope_dim / 2] f32
// out  records [rows, head_dim + head_dim / 32] bytes: E4M3 codes, then E8M0 scales
// grid one block a row, a thread four columns; a block is a multiple of 32 threads
// sum  order::sum_squares, as on the CPU; bf16 after the norm and after RoPE
// max  head_dim is a multiple of 32, at most 1024
//
// kv_store_ring: after attention, records of a window's last ring_len rows go to slot position % ring_len; a block a row.
#include "prelude.cuh"

struct Shape {
    u32 rows, head_dim, rope_dim, ring_len;
    float eps;
};

extern "C" __global__ void __launch_bounds__(256)
kv_store(const float* x, const float* norm, const RowInfo* rows, const float* frequencies, u8* records, const Shape shape) {
    __shared__ float4 row_quads[256];
    __shared__ float factor_of_row;
    const u32 thread = threadIdx.x, lane = thread % 32, row = blockIdx.x, head_dim = shape.head_dim, c = 4 * thread;
    const bool inside = c < head_dim;
    const float4 weight = inside ? ((const float4*)norm)[thread] : zero_quad();
    wait_for_inputs();
    const float4 in = inside ? ((const float4*)(x + row * head_dim))[thread] : zero_quad();
    const u32 position = rows[row].position;
    row_quads[thread] = in;
    __syncthreads();
    if (thread < 32) {
        const float squares = sum_squares((const float*)row_quads, head_dim, lane);
        if (lane == 0) factor_of_row = inverse_rms(squares, head_dim, shape.eps);
    }
    __syncthreads();
    float4 value = scale_quad(weight, in, factor_of_row);
    if (inside) value = rope_turn_quad(value, c, head_dim, position, frequencies, shape.rope_dim);
    const u32 scale = fp8_scale(block_max(value));
    if (!inside) return;
    const float inverse = inverse_scale(scale);
    // A record may be of an odd number of bytes.
    u8* record = records + (u64)row * (head_dim + head_dim / 32);
    record[c] = (u8)e4m3_code(value.x * inverse);
    record[c + 1] = (u8)e4m3_code(value.y * inverse);
    record[c + 2] = (u8)e4m3_code(value.z * inverse);
    record[c + 3] = (u8)e4m3_code(value.w * inverse);
    if (thread % 8 == 0) record[head_dim + thread / 8] = (u8)scale;
}

extern "C" __global__ void __launch_bounds__(256)
kv_store_ring(const u8* records, u8* ring, const RowInfo* rows, const WindowInfo* windows, const Shape shape) {
    wait_for_inputs();
    const u32 row = blockIdx.x, bytes = shape.head_dim + shape.head_dim / 32;
    const RowInfo info = rows[row];
    const WindowInfo window = windows[info.window];
    if (window.row_count - (row - window.first_row) > shape.ring_len) return;
    u8* to = ring + ((u64)info.slot * shape.ring_len + info.position % shape.ring_len) * bytes;
    const u8* from = records + (u64)row * bytes;
    for (u32 i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}
