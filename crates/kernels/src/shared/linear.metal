// Dot products of one weight row by all lanes of a SIMD group, in the order of tf_numerics::sum's scaled dot product: lane
// 16 h + l holds lane l of the accumulators h and 2 + h. Columns are padded with zeros and scale 1 to a multiple of 128.
#include "prelude.metal"

// w0, w1: columns 32 g + l and 32 g + 16 + l of the row, zero beyond its end.
inline float add_group(float acc, float w0, float w1, device const float *x, uint g, uint l, uint columns, float scale) {
    const uint c0 = 32u * g + l, c1 = c0 + 16u;
    const float p = w0 * (c0 < columns ? x[c0] : 0.0f);
    return fma(fma(w1, c1 < columns ? x[c1] : 0.0f, p), scale, acc);
}

// codes: layout B, 16 dwords for 128 columns: dword l, nibble n is column 16 n + l. scales: E8M0, one for 32 columns.
inline float dot_mxfp4(device const uint *codes, device const uchar *scales, device const float *x, uint columns, uint lane) {
    const uint l = lane % 16u, h = lane / 16u, groups = (columns + 31u) / 32u;
    float even = 0.0f, odd = 0.0f;
    for (uint block = 0u; block < (columns + 127u) / 128u; block++) {
        const uint dword = codes[16u * block + l] >> 8u * h;
        const uint g0 = 4u * block + h, g1 = g0 + 2u;
        const float s0 = g0 < groups ? e8m0_value(scales[g0]) : 1.0f, s1 = g1 < groups ? e8m0_value(scales[g1]) : 1.0f;
        even = add_group(even, e2m1_value(dword & 15u), e2m1_value(dword >> 4 & 15u), x, g0, l, columns, s0);
        odd = add_group(odd, e2m1_value(dword >> 16 & 15u), e2m1_value(dword >> 20 & 15u), x, g1, l, columns, s1);
    }
    return fold_four(even, odd);
}

// codes: E4M3, `columns` bytes. scales: E8M0 of the row's block row, one for 32 columns.
inline float dot_fp8(device const uchar *codes, device const uchar *scales, device const float *x, uint columns, uint lane) {
    const uint l = lane % 16u, h = lane / 16u, groups = (columns + 31u) / 32u;
    float even = 0.0f, odd = 0.0f;
    for (uint g = h; g < (columns + 127u) / 128u * 4u; g += 2u) {
        const uint c0 = 32u * g + l, c1 = c0 + 16u;
        const float w0 = c0 < columns ? e4m3_value(codes[c0]) : 0.0f, w1 = c1 < columns ? e4m3_value(codes[c1]) : 0.0f;
        const float scale = g < groups ? e8m0_value(scales[g]) : 1.0f;
        if ((g & 2u) == 0u) even = add_group(even, w0, w1, x, g, l, columns, scale);
        else odd = add_group(odd, w0, w1, x, g, l, columns, scale);
    }
    return fold_four(even, odd);
}

inline float value_of(ushort bits) { return from_bits(uint(bits) << 16); }
inline float value_of(float value) { return value; }

// Unquantised weights, bf16 as bits or float32, in the order of tf_numerics::sum's plain dot product.
template <class T> inline float dot_plain(device const T *w, device const float *x, uint columns, uint lane) {
    const uint l = lane % 16u, h = lane / 16u;
    float even = 0.0f, odd = 0.0f;
    for (uint g = h; g < (columns + 127u) / 128u * 4u; g += 2u) {
        const uint c0 = 32u * g + l, c1 = c0 + 16u;
        const float w0 = c0 < columns ? value_of(w[c0]) : 0.0f, w1 = c1 < columns ? value_of(w[c1]) : 0.0f;
        const float x0 = c0 < columns ? x[c0] : 0.0f, x1 = c1 < columns ? x[c1] : 0.0f;
        if ((g & 2u) == 0u) even = fma(w1, x1, fma(w0, x0, even));
        else odd = fma(w1, x1, fma(w0, x0, odd));
    }
    return fold_four(even, odd);
}
