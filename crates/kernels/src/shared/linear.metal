// Dot products of one weight row by all lanes of a SIMD group, in the order of tf_numerics::sum's scaled dot product: lane
// 16 h + l holds lane l of the accumulators h and 2 + h, unless a function says otherwise. Columns are padded with zeros and
// scale 1 to a multiple of 128; blocks of 128 that are whole (WHOLE) need no look at the end. ROWS rows of x, `step` floats
// apart, share each decoded weight and keep sums of their own, so that a row's bits don't depend on how many there are.
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

// What fold_four does, for lanes that hold two neighbours: lane 8 q + j has lanes 2 j and 2 j + 1 of accumulator q.
inline float fold_pairs(float even, float odd, uint lane) {
    // An exchange adds two accumulators: of the even lane where bit 3 is clear, of the odd one elsewhere.
    const bool upper = (lane & 8u) != 0u;
    const float given = simd_shuffle_xor(upper ? even : odd, ushort(8));
    float sum = (upper ? odd : even) + given;
    sum += simd_shuffle_xor(sum, ushort(16));
    sum += simd_shuffle_xor(sum, ushort(4));
    sum += simd_shuffle_xor(sum, ushort(2));
    sum += simd_shuffle_xor(sum, ushort(1));
    return sum + simd_shuffle_xor(sum, ushort(8));
}

// codes: FP4 as the release stores it, byte k columns 2 k (low) and 2 k + 1. scales: E8M0, one for 32 columns, of which there
// are whole ones. rows: where each row of x starts, an even number. acc: the even lanes' sums, then the odd ones'.
template <uint ROWS, bool WHOLE>
inline void add_mxfp4(thread float *acc, device const uchar *codes, device const uchar *scales, device const float *x,
                      const thread uint *rows, uint block, uint columns, uint lane) {
    const uint g = 4u * block + lane / 8u, j = lane % 8u;
    if (!WHOLE && 32u * g >= columns) {
        // Zeros of scale 1.
#pragma unroll
        for (uint i = 0u; i < 2u * ROWS; i++) acc[i] = acc[i] + 0.0f;
        return;
    }
    const uint first = codes[16u * g + j], second = codes[16u * g + 8u + j];
    const float even0 = e2m1_value(first & 15u), odd0 = e2m1_value(first >> 4);
    const float even1 = e2m1_value(second & 15u), odd1 = e2m1_value(second >> 4);
    const float scale = e8m0_value(scales[g]);
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) {
        device const float2 *in = (device const float2 *)(x + rows[r]) + 16u * g + j;
        const float2 a = in[0], b = in[8];
        acc[r] = fma(fma(even1, b.x, even0 * a.x), scale, acc[r]);
        acc[ROWS + r] = fma(fma(odd1, b.y, odd0 * a.y), scale, acc[ROWS + r]);
    }
}

template <uint ROWS>
inline void dots_mxfp4(thread float *sums, device const uchar *codes, device const uchar *scales, device const float *x,
                       const thread uint *rows, uint columns, uint lane) {
    const uint whole = columns / 128u;
    float acc[2u * ROWS];
#pragma unroll
    for (uint i = 0u; i < 2u * ROWS; i++) acc[i] = 0.0f;
    for (uint block = 0u; block < whole; block++) add_mxfp4<ROWS, true>(acc, codes, scales, x, rows, block, columns, lane);
    if (128u * whole < columns) add_mxfp4<ROWS, false>(acc, codes, scales, x, rows, whole, columns, lane);
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) sums[r] = fold_pairs(acc[r], acc[ROWS + r], lane);
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
