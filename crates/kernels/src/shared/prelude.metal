// Mirrors of tf_numerics::math, tf_numerics::qdq and tf_kernels::order: the same operations in the same order, so equal bits.
// Compiled in safe math mode, in which + - * / and sqrt are IEEE and nothing is contracted; a fused multiply-add is written
// out. A row (or an item of one) belongs to one SIMD group, so that no result depends on the threadgroup's size.
#include <metal_stdlib>
using namespace metal;

inline float from_bits(uint bits) { return as_type<float>(bits); }
inline uint to_bits(float value) { return as_type<uint>(value); }

// The CPU's minimum and maximum: the second operand where either is NaN.
inline float min_second(float a, float b) { return a < b ? a : b; }
inline float max_second(float a, float b) { return a > b ? a : b; }

inline float bf16_round(float value) {
    const uint bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return from_bits((bits & 0xffff0000u) | 0x00400000u);
    return from_bits((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

// ---- sums

// Sixteen lanes fold by halves, 8, 4, 2, 1; both halves of the SIMD group do so on their own.
inline float fold16(float value) {
    value += simd_shuffle_xor(value, ushort(8));
    value += simd_shuffle_xor(value, ushort(4));
    value += simd_shuffle_xor(value, ushort(2));
    return value + simd_shuffle_xor(value, ushort(1));
}

// Four accumulators of sixteen lanes: lanes 0..15 hold accumulators 0 and 2, lanes 16..31 hold 1 and 3.
// (acc0 + acc1) + (acc2 + acc3), then fold16. Every lane gets the sum.
inline float fold_four(float even, float odd) {
    even += simd_shuffle_xor(even, ushort(16));
    odd += simd_shuffle_xor(odd, ushort(16));
    return fold16(even + odd);
}

// order::sum_products, by all lanes of a SIMD group. `columns` is a multiple of 16.
inline float sum_products(device const float *a, device const float *b, uint columns, uint lane) {
    float even = 0.0f, odd = 0.0f;
    for (uint c = lane; c < columns; c += 64u) {
        even = fma(a[c], b[c], even);
        if (c + 32u < columns) odd = fma(a[c + 32u], b[c + 32u], odd);
    }
    return fold_four(even, odd);
}

inline float inverse_rms(float squares, uint columns, float eps) { return 1.0f / sqrt(squares / float(columns) + eps); }

// ---- functions

inline float exp_own(float x) {
    x = max_second(-104.0f, min_second(89.0f, x));
    const float n = rint(x * from_bits(0x3fb8aa3bu));
    float r = fma(n, -from_bits(0x3f317218u), x);
    r = fma(n, -from_bits(0xb102e308u), r);
    float q = from_bits(0x3ab5638cu);
    q = fma(q, r, from_bits(0x3c091eefu));
    q = fma(q, r, from_bits(0x3d2aac2cu));
    q = fma(q, r, from_bits(0x3e2aaa46u));
    q = fma(q, r, from_bits(0x3efffffeu));
    const float value = 1.0f + fma(r * r, q, r);
    // A NaN's power may be any number: the product is NaN all the same.
    const int power = int(n == n ? n : 0.0f), low = power >> 1;
    return value * from_bits(uint(low + 127) << 23) * from_bits(uint(power - low + 127) << 23);
}

inline float ln_own(float x) {
    const bool tiny = x < from_bits(0x00800000u);
    const int bits = int(to_bits(tiny ? x * 8388608.0f : x));
    int k = (bits - 0x3f3504f3) >> 23;
    const float f = from_bits(uint(bits) - (uint(k) << 23)) - 1.0f;
    const float power = float(tiny ? k - 23 : k);
    float q = from_bits(0x3d59cda4u);
    q = fma(q, f, from_bits(0xbddf6d40u));
    q = fma(q, f, from_bits(0x3df803c5u));
    q = fma(q, f, from_bits(0xbe008316u));
    q = fma(q, f, from_bits(0x3e11817fu));
    q = fma(q, f, from_bits(0xbe2a9783u));
    q = fma(q, f, from_bits(0x3e4cd2a1u));
    q = fma(q, f, from_bits(0xbe800038u));
    q = fma(q, f, from_bits(0x3eaaaaa4u));
    const float square = f * f;
    float rest = fma(square * f, q, power * from_bits(0x35bfbe8eu));
    rest = fma(square, -0.5f, rest);
    float value = fma(power, from_bits(0x3f317200u), f + rest);
    if (x == INFINITY) value = x;
    if (x < 0.0f) value = NAN;
    if (x == 0.0f) value = -INFINITY;
    return x != x ? x : value;
}

inline float log1p_own(float x) {
    const float u = 1.0f + x;
    const float lost = x > 1.0f ? 1.0f - (u - x) : x - (u - 1.0f);
    float value = ln_own(u) + lost / u;
    if (x == INFINITY) value = x;
    if (x == -1.0f) value = -INFINITY;
    return x == 0.0f ? x : value;
}

inline float sigmoid_own(float x) {
    const float e = exp_own(-fabs(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

inline float silu_own(float x) { return x * sigmoid_own(x); }

inline float softplus_own(float x) { return max_second(0.0f, x) + log1p_own(exp_own(-fabs(x))); }

// Sine and cosine for magnitudes up to 2^21.
inline float2 sin_cos_own(float x) {
    x = fabs(x) <= 2097152.0f ? x : NAN;
    const float n = rint(x * from_bits(0x3f22f983u));
    float r = fma(n, -from_bits(0x3fc90fdbu), x);
    const float rest = fma(n, -from_bits(0xb33bbd2eu), n * -from_bits(0xa6f72cedu));
    r = r + rest;
    const uint quadrant = uint(int(n == n ? n : 0.0f));
    const float z = r * r;
    float s = from_bits(0x36382232u);
    s = fma(s, z, from_bits(0xb95015f7u));
    s = fma(s, z, from_bits(0x3c0888a6u));
    s = fma(s, z, from_bits(0xbe2aaaabu));
    const float sine = fma(z * r, s, r);
    float c = from_bits(0xb4946c16u);
    c = fma(c, z, from_bits(0x37d01cadu));
    c = fma(c, z, from_bits(0xbab60b92u));
    c = fma(c, z, from_bits(0x3d2aaaabu));
    const float cosine = fma(z * z, c, fma(z, -0.5f, 1.0f));
    const bool is_odd = (quadrant & 1u) != 0u;
    float2 result;
    result.x = from_bits(to_bits(is_odd ? cosine : sine) ^ (quadrant << 30 & 0x80000000u));
    result.y = from_bits(to_bits(is_odd ? sine : cosine) ^ ((quadrant + 1u) << 30 & 0x80000000u));
    return result;
}

// ---- formats

inline float e8m0_value(uint code) { return code == 0u ? from_bits(0x00400000u) : code == 255u ? NAN : from_bits(code << 23); }

inline float e4m3_value(uint code) {
    const uint magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
    if (magnitude == 0x7fu) return from_bits(sign | 0x7fc00000u);
    const float value = magnitude < 8u ? float(magnitude) / 512.0f : from_bits((magnitude << 20) + (120u << 23));
    return from_bits(to_bits(value) | sign);
}

inline uint e4m3_code(float value) {
    const uint sign = to_bits(value) >> 24 & 0x80u;
    const float magnitude = min_second(448.0f, fabs(value));
    if (magnitude != magnitude) return 0x7fu | sign;
    const uint bits = to_bits(magnitude);
    const uint normal = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
    const uint subnormal = uint(rint((magnitude < 0.015625f ? magnitude : 0.0f) * 512.0f));
    return (magnitude < 0.015625f ? subnormal : normal) | sign;
}

inline float e2m1_value(uint code) {
    const uint magnitude = code & 7u;
    // 0 and 0.5 are the subnormals of a two-bit exponent.
    const float value = magnitude < 2u ? float(magnitude) * 0.5f : from_bits((magnitude << 22) + (126u << 23));
    return from_bits(to_bits(value) | (code & 8u) << 28);
}

inline uint e2m1_code(float value) {
    const uint sign = to_bits(value) >> 28 & 8u;
    const uint bits = min(to_bits(value) & 0x7fffffffu, 0x40c00000u);
    const float magnitude = from_bits(bits);
    const uint normal = ((bits + 0x1fffffu + (bits >> 22 & 1u)) >> 22) - (126u << 1);
    const uint subnormal = uint(rint((magnitude < 1.0f ? magnitude : 0.0f) * 2.0f));
    return (magnitude < 1.0f ? subnormal : normal) | sign;
}

// The E8M0 code of an FP8 block whose largest magnitude has these bits; 255 where that is no number.
inline uint fp8_scale(uint amax_bits) {
    if (amax_bits >= 0x7f800000u) return 255u;
    const uint bits = to_bits(max_second(from_bits(amax_bits), 1e-4f) * (1.0f / 448.0f));
    return (bits >> 23) + ((bits & 0x7fffffu) != 0u ? 1u : 0u);
}

inline float fp8_inverse(uint scale) { return scale == 255u ? NAN : from_bits((254u - scale) << 23); }

// QDQ8 of the 32 values that the lanes of a SIMD group hold.
inline float fp8_round(float value) {
    const uint scale = fp8_scale(simd_max(to_bits(value) & 0x7fffffffu));
    const float quotient = value * fp8_inverse(scale);
    const float magnitude = min_second(448.0f, fabs(quotient));
    const uint bits = to_bits(magnitude);
    const float normal = from_bits((bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u);
    const float subnormal = (magnitude + 16384.0f) - 16384.0f;
    float rounded = magnitude < 0.015625f ? subnormal : normal;
    if (magnitude != magnitude) rounded = magnitude;
    return from_bits(to_bits(rounded) | (to_bits(quotient) & 0x80000000u)) * e8m0_value(scale);
}

// An order of float32 as integers: NaN is 0, the zeros are alike, minus infinity is 0x007fffff.
inline uint order_key(float value) {
    const uint bits = to_bits(value + 0.0f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0u;
    return (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;
}

// ---- rows

// As tf_kernels::rows, word for word.
struct RowInfo {
    uint slot, position, window;
};
struct WindowInfo {
    uint slot, start, first_row, row_count;
};
struct EntryInfo {
    uint slot, entry, row;
};

// Turns column `c` of a row whose columns lie side by side in the lanes; every lane must call it. Pairs turn by
// position * frequency, product in float32, each product and the sum rounded, then bf16.
inline float rope_turn(float value, uint c, uint columns, uint position, device const float *frequencies, uint rope_dim) {
    const float partner = simd_shuffle_xor(value, ushort(1));
    if (c < columns - rope_dim || c >= columns) return value;
    const float2 phase = sin_cos_own(float(position) * frequencies[(c - (columns - rope_dim)) / 2u]);
    const float sine = (c & 1u) == 0u ? -phase.x : phase.x;
    return bf16_round(value * phase.y + partner * sine);
}
