// index_key: key[e] = QDQ4(32, E8M0)(RoPE(RMSNorm(x[e]; norm), entry * ratio)), by which later positions find an entry
// in   x [entries, head_dim] f32, bf16 values   norm [head_dim]   entries as tf_kernels::rows   frequencies [rope_dim / 2]
//      table [slots, pages_per_slot] u32
// out  cache: pages of blocks of 16 entries; a block is [head_dim / 8][16][4] bytes of E2M1 codes (byte b of group g: element
//      8 g + 2 b low, 8 g + 2 b + 1 high), then [head_dim / 32][16] E8M0 bytes
// grid one warp an entry; a block is a multiple of 32 threads
// sum  order::sum_squares, as on the CPU; bf16 after the norm and after RoPE
// max  head_dim is a multiple of 32, entries_per_page of 16
#include "prelude.cuh"

struct Shape {
    u32 items, ratio, head_dim, rope_dim, pages_per_slot, entries_per_page;
    float eps;
};

extern "C" __global__ void __launch_bounds__(256)
index_key(const float* x, const float* norm, const EntryInfo* entries, const u32* table, const float* frequencies, u8* cache,
          const Shape shape) {
    wait_for_inputs();
    const u32 item = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, head_dim = shape.head_dim;
    if (item >= shape.items) return;
    const u32 slot = entries[item].slot, entry = entries[item].entry, bytes = head_dim / 2 + head_dim / 32;
    const float* in = x + item * head_dim;
    const u64 page = table[slot * shape.pages_per_slot + entry / shape.entries_per_page];
    const u32 inside = entry % shape.entries_per_page, place = inside % 16;
    u8* block = cache + (page * shape.entries_per_page + inside / 16 * 16) * bytes;
    const float factor = inverse_rms(sum_squares(in, head_dim, lane), head_dim, shape.eps);
    for (u32 g = 0; g < head_dim / 32; g++) {
        const u32 c = 32 * g + lane;
        float value = bf16_round(norm[c] * (in[c] * factor));
        value = rope_turn(value, c, head_dim, entry * shape.ratio, frequencies, shape.rope_dim);
        const u32 scale = fp4_scale(warp_max(to_bits(value) & 0x7fffffffu));
        const u32 code = e2m1_code(value * inverse_scale(scale));
        const u32 high = __shfl_xor_sync(WARP, code, 1);
        if (lane % 2 == 0) block[(4 * g + lane / 8) * 64 + 4 * place + lane % 8 / 2] = (u8)(code | high << 4);
        if (lane == 0) block[head_dim / 2 * 16 + 16 * g + place] = (u8)scale;
    }
}
