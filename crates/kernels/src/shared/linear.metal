// Dot products of one weight row by all lanes of a SIMD group, in the order of tf_numerics::sum's scaled dot product: lane
// 16 h + l holds lane l of the accumulators h and 2 + h. Columns are padded with zeros and scale 1 to a multiple of 128; blocks
// of 128 that are whole (WHOLE) need no look at the end. ROWS rows of x, `step` floats apart, share each decoded weight and
// keep sums of their own, so that a row's bits don't depend on how many there are.
#include "prelude.metal"

template <bool WHOLE> inline float input(device const float *x, uint c, uint columns) {
    return WHOLE || c < columns ? x[c] : 0.0f;
}

// w0, w1: columns c and c + 16 of the row, zero beyond its end.
template <bool WHOLE>
inline float add_group(float acc, float w0, float w1, device const float *x, uint c, uint columns, float scale) {
    const float p = w0 * input<WHOLE>(x, c, columns);
    return fma(fma(w1, input<WHOLE>(x, c + 16u, columns), p), scale, acc);
}

// codes: layout B, 16 dwords for 128 columns: dword l, nibble n is column 16 n + l. scales: E8M0, one for 32 columns.
template <bool WHOLE>
inline void add_mxfp4(thread float &even, thread float &odd, device const uint *codes, device const uchar *scales,
                      device const float *x, uint block, uint columns, uint l, uint h) {
    const uint groups = (columns + 31u) / 32u, dword = codes[16u * block + l] >> 8u * h;
    const uint g0 = 4u * block + h, g1 = g0 + 2u;
    const float s0 = WHOLE || g0 < groups ? e8m0_value(scales[g0]) : 1.0f;
    const float s1 = WHOLE || g1 < groups ? e8m0_value(scales[g1]) : 1.0f;
    even = add_group<WHOLE>(even, e2m1_value(dword & 15u), e2m1_value(dword >> 4 & 15u), x, 32u * g0 + l, columns, s0);
    odd = add_group<WHOLE>(odd, e2m1_value(dword >> 16 & 15u), e2m1_value(dword >> 20 & 15u), x, 32u * g1 + l, columns, s1);
}

inline float dot_mxfp4(device const uint *codes, device const uchar *scales, device const float *x, uint columns, uint lane) {
    const uint l = lane % 16u, h = lane / 16u, whole = columns / 128u;
    float even = 0.0f, odd = 0.0f;
    for (uint block = 0u; block < whole; block++) add_mxfp4<true>(even, odd, codes, scales, x, block, columns, l, h);
    if (128u * whole < columns) add_mxfp4<false>(even, odd, codes, scales, x, whole, columns, l, h);
    return fold_four(even, odd);
}

// codes: E4M3, `columns` bytes. scales: E8M0 of the row's block row, one for 32 columns. acc: the even sums, then the odd ones.
template <uint ROWS, bool WHOLE>
inline void add_fp8(thread float *acc, device const uchar *codes, device const uchar *scales, device const float *x,
                    ulong step, uint block, uint columns, uint l, uint h) {
    const uint groups = (columns + 31u) / 32u;
#pragma unroll
    for (uint odd = 0u; odd < 2u; odd++) {
        const uint g = 4u * block + h + 2u * odd, c0 = 32u * g + l, c1 = c0 + 16u;
        const float w0 = WHOLE || c0 < columns ? e4m3_value(codes[c0]) : 0.0f;
        const float w1 = WHOLE || c1 < columns ? e4m3_value(codes[c1]) : 0.0f;
        const float scale = WHOLE || g < groups ? e8m0_value(scales[g]) : 1.0f;
#pragma unroll
        for (uint r = 0u; r < ROWS; r++) {
            thread float &sum = acc[odd * ROWS + r];
            sum = add_group<WHOLE>(sum, w0, w1, x + r * step, c0, columns, scale);
        }
    }
}

template <uint ROWS>
inline void dots_fp8(thread float *sums, device const uchar *codes, device const uchar *scales, device const float *x,
                     ulong step, uint columns, uint lane) {
    const uint l = lane % 16u, h = lane / 16u, whole = columns / 128u;
    float acc[2u * ROWS];
#pragma unroll
    for (uint i = 0u; i < 2u * ROWS; i++) acc[i] = 0.0f;
    for (uint block = 0u; block < whole; block++) add_fp8<ROWS, true>(acc, codes, scales, x, step, block, columns, l, h);
    if (128u * whole < columns) add_fp8<ROWS, false>(acc, codes, scales, x, step, whole, columns, l, h);
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) sums[r] = fold_four(acc[r], acc[ROWS + r]);
}

inline float dot_fp8(device const uchar *codes, device const uchar *scales, device const float *x, uint columns, uint lane) {
    float sum[1];
    dots_fp8<1u>(sum, codes, scales, x, 0ul, columns, lane);
    return sum[0];
}

inline float value_of(ushort bits) { return from_bits(uint(bits) << 16); }
inline float value_of(float value) { return value; }

// Unquantised weights, bf16 as bits or float32, in the order of tf_numerics::sum's plain dot product. rows: where each row of x
// starts.
template <uint ROWS, bool WHOLE, class T>
inline void add_plain(thread float *acc, device const T *w, device const float *x, const thread ulong *rows, uint block,
                      uint columns, uint l, uint h) {
#pragma unroll
    for (uint odd = 0u; odd < 2u; odd++) {
        const uint c0 = 128u * block + 32u * h + 64u * odd + l, c1 = c0 + 16u;
        const float w0 = WHOLE || c0 < columns ? value_of(w[c0]) : 0.0f;
        const float w1 = WHOLE || c1 < columns ? value_of(w[c1]) : 0.0f;
#pragma unroll
        for (uint r = 0u; r < ROWS; r++) {
            thread float &sum = acc[odd * ROWS + r];
            const float p = fma(w0, input<WHOLE>(x + rows[r], c0, columns), sum);
            sum = fma(w1, input<WHOLE>(x + rows[r], c1, columns), p);
        }
    }
}

template <uint ROWS, class T>
inline void dots_plain(thread float *sums, device const T *w, device const float *x, const thread ulong *rows, uint columns,
                       uint lane) {
    const uint l = lane % 16u, h = lane / 16u, whole = columns / 128u;
    float acc[2u * ROWS];
#pragma unroll
    for (uint i = 0u; i < 2u * ROWS; i++) acc[i] = 0.0f;
    for (uint block = 0u; block < whole; block++) add_plain<ROWS, true>(acc, w, x, rows, block, columns, l, h);
    if (128u * whole < columns) add_plain<ROWS, false>(acc, w, x, rows, whole, columns, l, h);
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) sums[r] = fold_four(acc[r], acc[ROWS + r]);
}
