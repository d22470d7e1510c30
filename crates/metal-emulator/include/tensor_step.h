// mma.sync m16n8k16 of bf16 operands and float32 sums as compute capability 9.0 computes it: tf_numerics::fma16 in C++, with the
// fragments of the PTX manual. Lane 4 g + t holds the rows g and g + 8 of a, the column g of b, and of both the products
// 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
#pragma once

struct CudaTerm {
    long long significand;
    int exponent, fraction;
};

inline CudaTerm cuda_bf16_term(unsigned bits) {
    const int field = int(bits >> 7 & 0xff);
    const long long magnitude = (field > 0 ? 0x80 : 0) | (bits & 0x7f);
    return {bits >> 15 & 1 ? -magnitude : magnitude, (field > 0 ? field : 1) - 127, 7};
}

// Infinity and NaN by IEEE's rules; false where there is none.
inline bool cuda_special_step(float c, const unsigned (&a)[16], const unsigned (&b)[16], float &result) {
    const unsigned c_bits = __float_as_uint(c);
    bool nan = (c_bits & 0x7fffffff) > 0x7f800000, plus = c_bits == 0x7f800000, minus = c_bits == 0xff800000;
    bool found = nan || plus || minus;
    for (unsigned i = 0; i < 16; i++) {
        const bool a_special = (a[i] & 0x7f80) == 0x7f80, b_special = (b[i] & 0x7f80) == 0x7f80;
        if (!a_special && !b_special) continue;
        found = true;
        const bool no_number = (a_special && (a[i] & 0x7f)) || (b_special && (b[i] & 0x7f));
        if (no_number || !(a[i] & 0x7fff) || !(b[i] & 0x7fff)) nan = true;
        else if ((a[i] ^ b[i]) & 0x8000) minus = true;
        else plus = true;
    }
    result = __uint_as_float(nan || (plus && minus) ? 0x7fffffffu : plus ? 0x7f800000u : 0xff800000u);
    return found;
}

inline float cuda_step(float c, const unsigned (&a)[16], const unsigned (&b)[16]) {
    constexpr int FRACTION_BITS = 25;
    float special;
    if (cuda_special_step(c, a, b, special)) return special;
    CudaTerm terms[17];
    const unsigned c_bits = __float_as_uint(c);
    const int field = int(c_bits >> 23 & 0xff);
    const long long magnitude = (field > 0 ? 0x800000 : 0) | (c_bits & 0x7fffff);
    terms[16] = {c_bits >> 31 ? -magnitude : magnitude, (field > 0 ? field : 1) - 127, 23};
    for (unsigned i = 0; i < 16; i++) {
        const CudaTerm x = cuda_bf16_term(a[i]), y = cuda_bf16_term(b[i]);
        terms[i] = {x.significand * y.significand, x.exponent + y.exponent, 14};
    }
    int largest = -1000;
    for (const CudaTerm &term : terms) {
        if (term.significand && term.exponent > largest) largest = term.exponent;
    }
    long long sum = 0;
    for (const CudaTerm &term : terms) {
        if (!term.significand) continue;
        const int below = largest - term.exponent;
        const unsigned long long whole = (unsigned long long)(term.significand < 0 ? -term.significand : term.significand)
            << (FRACTION_BITS - term.fraction);
        const long long kept = below > 63 ? 0 : (long long)(whole >> below);
        sum += term.significand < 0 ? -kept : kept;
    }
    if (!sum) return 0.0f;
    const unsigned long long whole = (unsigned long long)(sum < 0 ? -sum : sum);
    const int unit = largest - FRACTION_BITS, top = 63 - __builtin_clzll(whole) + unit;
    const int last = top - 23 > -149 ? top - 23 : -149, shift = last - unit;
    const unsigned long long kept = shift <= 0 ? whole << -shift : shift < 64 ? whole >> shift : 0;
    // What is too small for a subnormal is a zero without a sign.
    if (!kept) return 0.0f;
    const long long bits = ((long long)(last + 149) << 23) + (long long)kept;
    return __uint_as_float((sum < 0 ? 0x80000000u : 0u) | (bits >= 0x7f800000 ? 0x7f800000u : unsigned(bits)));
}

struct CudaFragment {
    unsigned words[4];
};

// A row of a, or a column of b, from the lanes that hold it: words `low` and `high` of each.
inline void cuda_operand(const unsigned char (*shown)[16], unsigned row, unsigned low, unsigned high, unsigned (&to)[16]) {
    for (unsigned t = 0; t < 4; t++) {
        const CudaFragment part = cuda_read<CudaFragment>(shown, 4 * row + t);
        to[2 * t] = part.words[low] & 0xffff;
        to[2 * t + 1] = part.words[low] >> 16;
        to[2 * t + 8] = part.words[high] & 0xffff;
        to[2 * t + 9] = part.words[high] >> 16;
    }
}

inline void cuda_mma_k16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, CUDA_SITE) {
    const unsigned lane = msl::tf_current->lane, g = lane / 4, t = lane % 4;
    unsigned rows[2][16], columns[2][16];
    const unsigned char (*shown)[16] = cuda_show(CudaFragment{{a0, a1, a2, a3}}, site);
    cuda_operand(shown, g, 0, 2, rows[0]);
    cuda_operand(shown, g, 1, 3, rows[1]);
    shown = cuda_show(CudaFragment{{b0, b1, 0, 0}}, site);
    cuda_operand(shown, 2 * t, 0, 1, columns[0]);
    cuda_operand(shown, 2 * t + 1, 0, 1, columns[1]);
    for (unsigned i = 0; i < 4; i++) c[i] = cuda_step(c[i], rows[i / 2], columns[i % 2]);
}
