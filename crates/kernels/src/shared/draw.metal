// Mirrors of tf_numerics::draw (decision 0004) and what a threadgroup needs to look at a whole row of logits: maxima and
// integer sums, whose order changes nothing.
#include "prelude.metal"

// ---- 64-bit values of a SIMD group and of a threadgroup

inline ulong shuffle_xor_long(ulong value, ushort mask) {
    const uint low = simd_shuffle_xor(uint(value), mask), high = simd_shuffle_xor(uint(value >> 32), mask);
    return ulong(high) << 32 | low;
}

// Every thread of the threadgroup calls these; `part` holds one value a SIMD group.
inline ulong largest_of_all(ulong value, threadgroup ulong *part, uint simdgroup, uint simdgroups, uint lane) {
    for (uint mask = 16u; mask != 0u; mask >>= 1) {
        const ulong other = shuffle_xor_long(value, ushort(mask));
        value = value > other ? value : other;
    }
    if (lane == 0u) part[simdgroup] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0u; i < simdgroups; i++) value = value > part[i] ? value : part[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return value;
}

inline ulong sum_of_all(ulong value, threadgroup ulong *part, uint simdgroup, uint simdgroups, uint lane) {
    for (uint mask = 16u; mask != 0u; mask >>= 1) value += shuffle_xor_long(value, ushort(mask));
    if (lane == 0u) part[simdgroup] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ulong sum = 0ul;
    for (uint i = 0u; i < simdgroups; i++) sum += part[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return sum;
}

// The larger value first, the smaller id among equals: a larger key. The key of NaN and minus infinity is below the least.
inline ulong token_key(float value, uint id) { return ulong(order_key(value)) << 32 | ulong(~id); }
constant ulong LEAST_KEY = 0x0080000000000000ul;

// ---- noise

inline uint rotated(uint value, uint count) { return value << count | value >> (32u - count); }

// Threefry2x32 with 20 rounds: the first word. The key is the seed, the counter (token, position).
inline uint draw_word(uint seed_low, uint seed_high, uint position, uint token) {
    uint keys[3];
    keys[0] = seed_low;
    keys[1] = seed_high;
    keys[2] = seed_low ^ seed_high ^ 0x1bd11bdau;
    uint a = token + keys[0], b = position + keys[1];
    for (uint group = 0u; group < 5u; group++) {
        const uint packed = (group & 1u) == 0u ? 0x0d0f1a06u : 0x111d1018u;
        for (uint shift = 0u; shift < 32u; shift += 8u) {
            a += b;
            b = rotated(b, packed >> (24u - shift) & 31u) ^ a;
        }
        a += keys[(group + 1u) % 3u];
        b += keys[(group + 2u) % 3u] + group + 1u;
    }
    return a;
}

// -ln(-ln(u)), u = 1 - (word + 1/2) * 2^-32.
inline float gumbel(uint word) {
    const bool upper = (word & 0x80000000u) != 0u;
    const uint t = upper ? ~word : word;
    const float low = float(t & 0xffffu) + 0.5f;
    const float m = fma(float(t >> 16), 65536.0f, low) * from_bits(0x2f800000u);
    const float rest = 1.0f - m;
    const float lost = (-m - (rest - 1.0f)) / rest;
    return -ln_own(-(ln_own(upper ? m : rest) + (upper ? 0.0f : lost)));
}

// ---- weights

// floor(e * 2^40) for e in [0, 1].
inline ulong weight_of(float e) {
    const float upper = e * 1048576.0f;
    const uint whole = uint(upper);
    return (ulong(whole) << 20) + ulong(uint((upper - float(whole)) * 1048576.0f));
}

// To the nearest float32, ties to even.
inline float float_of(ulong value) {
    if (value < 16777216ul) return float(uint(value));
    const uint high = uint(value >> 32);
    const uint shift = 40u - (high != 0u ? clz(high) : 32u + clz(uint(value)));
    const ulong half_step = 1ul << (shift - 1u), rest = value & ((1ul << shift) - 1ul);
    uint mantissa = uint(value >> shift);
    if (rest > half_step || (rest == half_step && (mantissa & 1u) != 0u)) mantissa++;
    return float(mantissa) * from_bits((127u + shift) << 23);
}
