// float_probe: what the kernels expect of the device's float32, an operation a column: each has one right answer
// in   a, b, c [items] f32
// out  out [items, 10] f32: a + b, a - b, a * b, a / b, sqrt(|a|), fma(a, b, c), a * b + c in two roundings, rint(a),
//      1 / sqrt(|a| + 1), a * 2^-70 * 2^-70 (a subnormal or zero for most)
// grid one thread an item; no threadgroup memory
// max  items 2^24
#include "prelude.metal"

struct Shape {
    uint items;
};

kernel void float_probe(device const float *a [[buffer(0)]], device const float *b [[buffer(1)]],
                        device const float *c [[buffer(2)]], device float *out [[buffer(3)]],
                        constant Shape &shape [[buffer(4)]], uint item [[thread_position_in_grid]]) {
    if (item >= shape.items) return;
    const float x = a[item], y = b[item], z = c[item];
    device float *found = out + 10u * item;
    found[0] = x + y;
    found[1] = x - y;
    found[2] = x * y;
    found[3] = x / y;
    found[4] = sqrt(fabs(x));
    found[5] = fma(x, y, z);
    found[6] = x * y + z;
    found[7] = rint(x);
    found[8] = 1.0f / sqrt(fabs(x) + 1.0f);
    found[9] = x * from_bits(0x1c800000u) * from_bits(0x1c800000u);
}
