// moe_experts: the routed MXFP4 experts of each row's picks and the shared FP8 expert; formulas and roundings in mod.rs.
//   moe_up    a[r][p] = QDQ8(bf16(silu(min(g, limit)) * clamp(u, -limit, limit) * weight)), g = bf16(x @ w1^T), u = bf16(x @ w3^T)
//   moe_down  y[r][p] = bf16(a[r][p] @ w2^T)
//   moe_sum   out[r] = bf16(sum of y[r][p] over the picks in ascending expert id, the shared expert last)
// in   x [rows, hidden] f32, QDQ8'd   picks [rows, picks] u32, no id twice in a row   weights [rows, picks] f32
//      experts: the bytes that hold their tensors as the release stores them, anywhere: places [experts, 6] u64 is where w1, w3
//      [intermediate, hidden / 2], w2 [hidden, intermediate / 2] and their E8M0 scales, one for 32 columns, start
//      shared1, shared3 [intermediate, hidden] E4M3, shared2 [hidden, intermediate]; scales E8M0 a 32x32 block
// out  activations [rows, picks + 1, intermediate] f32, the last of a row the shared expert's
//      products [rows, picks + 1, hidden] bf16   out [rows, hidden] f32
// grid moe_up: one SIMD group for 32 columns of an activation, which share their QDQ8 scale, of all rows that picked an expert,
//      or of tile_rows rows for the shared one. moe_down: one SIMD group for 8 outputs of such rows. Candidates for experts are
//      the picks of all rows, of which the first of an expert does its work, or all experts where there are more picks.
//      moe_sum: one thread an output. Threadgroup a multiple of 32; no threadgroup memory
// sum  tf_numerics::sum, scaled: a function of the columns alone, whichever rows share a decoded weight, 8, 4, 2 or 1 at a
//      time; the sum over experts is float32 in ascending id
// max  hidden and intermediate are multiples of 32; limit 0 means none; x and activations below 2^32 elements
#include "linear.metal"

struct Shape {
    uint rows, hidden, intermediate, picks, experts, tile_rows;
    float limit;
};

constant uint NONE = 0xffffffffu;

inline float gated(float gate, float up, float limit) {
    if (limit != 0.0f) {
        up = up < -limit ? -limit : up > limit ? limit : up;
        gate = gate > limit ? limit : gate;
    }
    return silu_own(gate) * up;
}

// The first pair (row * picks + pick) from `from` on that is the expert's. Pairs are looked at by all lanes together.
inline uint next_pair(device const uint *picks, uint pairs, uint from, uint expert, uint lane) {
    for (uint first = from; first < pairs; first += 32u) {
        const uint pair = first + lane;
        const uint found = simd_min(pair < pairs && picks[pair] == expert ? pair : NONE);
        if (found != NONE) return found;
    }
    return NONE;
}

// Up to eight pairs of the expert from `pair` on, which becomes the one behind them: lane i holds the i-th. How many.
inline uint take_pairs(thread uint &held, thread uint &pair, device const uint *picks, uint pairs, uint expert, uint lane) {
    uint count = 0u;
    while (count < 8u && pair != NONE) {
        if (lane == count) held = pair;
        count++;
        pair = next_pair(picks, pairs, pair + 1u, expert, lane);
    }
    return count;
}

// Candidates for experts: how many, and the expert of one, NONE where another candidate has it.
inline uint candidates_of(constant Shape &shape) { return min(shape.rows * shape.picks, shape.experts); }
inline uint expert_of(device const uint *picks, constant Shape &shape, uint candidate, uint lane) {
    const uint pairs = shape.rows * shape.picks;
    if (pairs > shape.experts) return candidate;
    const uint expert = picks[candidate];
    return next_pair(picks, pairs, 0u, expert, lane) == candidate ? expert : NONE;
}

// What a SIMD group has of moe_up: matrices from its first output on.
struct Up {
    device const float *x;
    device const float *weights;
    device float *activations;
    device const uchar *w1;
    device const uchar *w3;
    device const uchar *scales1;
    device const uchar *scales3;
};

// 32 activations of a row, one a lane.
inline void keep_activations(Up up, constant Shape &shape, float value, uint row, uint pick, uint block, uint lane) {
    const ulong to = (ulong(row) * (shape.picks + 1u) + pick) * shape.intermediate + 32u * block + lane;
    up.activations[to] = fp8_round(bf16_round(value));
}

// ROWS pairs of an expert: those that the lanes from `first` on hold. The lane behind them.
template <uint ROWS>
inline uint up_pairs(Up up, constant Shape &shape, uint held, uint first, uint block, uint lane) {
    const uint hidden = shape.hidden;
    uint pairs[ROWS], rows[ROWS];
    float gates[ROWS], ups[ROWS], gate[ROWS], other[ROWS];
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) {
        pairs[r] = simd_shuffle(held, ushort(first + r));
        rows[r] = pairs[r] / shape.picks * hidden;
        gates[r] = ups[r] = 0.0f;
    }
    for (uint i = 0u; i < 32u; i++) {
        const uint codes = i * (hidden / 2u), scales = i * (hidden / 32u);
        dots_mxfp4<ROWS>(gate, up.w1 + codes, up.scales1 + scales, up.x, rows, hidden, lane);
        dots_mxfp4<ROWS>(other, up.w3 + codes, up.scales3 + scales, up.x, rows, hidden, lane);
#pragma unroll
        for (uint r = 0u; r < ROWS; r++) {
            if (lane == i) gates[r] = gate[r], ups[r] = other[r];
        }
    }
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) {
        const float value = gated(bf16_round(gates[r]), bf16_round(ups[r]), shape.limit) * up.weights[pairs[r]];
        keep_activations(up, shape, value, pairs[r] / shape.picks, pairs[r] % shape.picks, block, lane);
    }
    return first + ROWS;
}

// ROWS rows of the shared expert, from `row` on. The row behind them.
template <uint ROWS> inline uint up_shared(Up up, constant Shape &shape, uint row, uint block, uint lane) {
    const uint hidden = shape.hidden;
    device const float *in = up.x + ulong(row) * hidden;
    float gates[ROWS], ups[ROWS], gate[ROWS], other[ROWS];
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) gates[r] = ups[r] = 0.0f;
    for (uint i = 0u; i < 32u; i++) {
        dots_fp8<ROWS>(gate, up.w1 + i * hidden, up.scales1, in, hidden, hidden, lane);
        dots_fp8<ROWS>(other, up.w3 + i * hidden, up.scales3, in, hidden, hidden, lane);
#pragma unroll
        for (uint r = 0u; r < ROWS; r++) {
            if (lane == i) gates[r] = gate[r], ups[r] = other[r];
        }
    }
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) {
        const float value = gated(bf16_round(gates[r]), bf16_round(ups[r]), shape.limit);
        keep_activations(up, shape, value, row + r, shape.picks, block, lane);
    }
    return row + ROWS;
}

kernel void moe_up(device const float *x [[buffer(0)]], device const uint *picks [[buffer(1)]],
                   device const float *weights [[buffer(2)]], device const uchar *experts [[buffer(3)]],
                   device const ulong *places [[buffer(4)]], device const uchar *shared1 [[buffer(5)]],
                   device const uchar *shared1_scales [[buffer(6)]], device const uchar *shared3 [[buffer(7)]],
                   device const uchar *shared3_scales [[buffer(8)]], device float *activations [[buffer(9)]],
                   constant Shape &shape [[buffer(10)]], uint group [[threadgroup_position_in_grid]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                   uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup, blocks = shape.intermediate / 32u, hidden = shape.hidden;
    const uint block = item % blocks, candidate = item / blocks, candidates = candidates_of(shape);
    Up up;
    up.x = x;
    up.weights = weights;
    up.activations = activations;
    if (candidate >= candidates) {
        const uint row0 = (candidate - candidates) * shape.tile_rows, end = min(row0 + shape.tile_rows, shape.rows);
        const uint scales = block * (hidden / 32u);
        up.w1 = shared1 + ulong(32u * block) * hidden;
        up.w3 = shared3 + ulong(32u * block) * hidden;
        up.scales1 = shared1_scales + scales;
        up.scales3 = shared3_scales + scales;
        uint row = row0;
        while (row + 8u <= end) row = up_shared<8u>(up, shape, row, block, lane);
        if (row + 4u <= end) row = up_shared<4u>(up, shape, row, block, lane);
        if (row + 2u <= end) row = up_shared<2u>(up, shape, row, block, lane);
        if (row < end) up_shared<1u>(up, shape, row, block, lane);
        return;
    }
    const uint expert = expert_of(picks, shape, candidate, lane), pairs = shape.rows * shape.picks;
    if (expert == NONE) return;
    device const ulong *place = places + 6u * expert;
    const ulong codes = ulong(32u * block) * (hidden / 2u), scales = ulong(32u * block) * (hidden / 32u);
    up.w1 = experts + place[0] + codes;
    up.w3 = experts + place[1] + codes;
    up.scales1 = experts + place[3] + scales;
    up.scales3 = experts + place[4] + scales;
    uint held = 0u, pair = next_pair(picks, pairs, 0u, expert, lane);
    while (pair != NONE) {
        const uint count = take_pairs(held, pair, picks, pairs, expert, lane);
        uint first = 0u;
        if (count == 8u) first = up_pairs<8u>(up, shape, held, first, block, lane);
        if (first + 4u <= count) first = up_pairs<4u>(up, shape, held, first, block, lane);
        if (first + 2u <= count) first = up_pairs<2u>(up, shape, held, first, block, lane);
        if (first < count) up_pairs<1u>(up, shape, held, first, block, lane);
    }
}

// Outputs of a SIMD group of moe_down.
constant uint OUTPUTS = 8u;

// What a SIMD group has of moe_down: the rows of w2 from its first output on, and where that lies in a pair's products.
struct Down {
    device const float *activations;
    device ushort *products;
    device const uchar *w2;
    device const uchar *scales2;
    uint output;
};

inline void keep_product(Down down, constant Shape &shape, float product, uint at, uint i, uint lane) {
    if (lane == 0u) down.products[ulong(at) * shape.hidden + down.output + i] = ushort(to_bits(bf16_round(product)) >> 16);
}

// As up_pairs.
template <uint ROWS> inline uint down_pairs(Down down, constant Shape &shape, uint held, uint first, uint lane) {
    const uint columns = shape.intermediate;
    uint places[ROWS], rows[ROWS];
    float product[ROWS];
#pragma unroll
    for (uint r = 0u; r < ROWS; r++) {
        const uint pair = simd_shuffle(held, ushort(first + r));
        places[r] = pair / shape.picks * (shape.picks + 1u) + pair % shape.picks;
        rows[r] = places[r] * columns;
    }
    for (uint i = 0u; i < OUTPUTS; i++) {
        device const uchar *scales = down.scales2 + i * (columns / 32u);
        dots_mxfp4<ROWS>(product, down.w2 + i * (columns / 2u), scales, down.activations, rows, columns, lane);
#pragma unroll
        for (uint r = 0u; r < ROWS; r++) keep_product(down, shape, product[r], places[r], i, lane);
    }
    return first + ROWS;
}

// As up_shared.
template <uint ROWS> inline uint down_shared(Down down, constant Shape &shape, uint row, uint lane) {
    const uint columns = shape.intermediate, each = shape.picks + 1u;
    float product[ROWS];
    device const float *in = down.activations + (ulong(row) * each + shape.picks) * columns;
    for (uint i = 0u; i < OUTPUTS; i++) {
        dots_fp8<ROWS>(product, down.w2 + i * columns, down.scales2, in, ulong(each) * columns, columns, lane);
#pragma unroll
        for (uint r = 0u; r < ROWS; r++) keep_product(down, shape, product[r], (row + r) * each + shape.picks, i, lane);
    }
    return row + ROWS;
}

kernel void moe_down(device const float *activations [[buffer(0)]], device const uint *picks [[buffer(1)]],
                     device const uchar *experts [[buffer(2)]], device const ulong *places [[buffer(3)]],
                     device const uchar *shared2 [[buffer(4)]], device const uchar *shared2_scales [[buffer(5)]],
                     device ushort *products [[buffer(6)]], constant Shape &shape [[buffer(7)]],
                     uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint item = group * simdgroups + simdgroup, columns = shape.intermediate;
    const uint blocks = shape.hidden / OUTPUTS, n = item % blocks * OUTPUTS;
    const uint candidate = item / blocks, candidates = candidates_of(shape);
    Down down;
    down.activations = activations;
    down.products = products;
    down.output = n;
    if (candidate >= candidates) {
        const uint row0 = (candidate - candidates) * shape.tile_rows, end = min(row0 + shape.tile_rows, shape.rows);
        down.w2 = shared2 + ulong(n) * columns;
        down.scales2 = shared2_scales + n / 32u * (columns / 32u);
        uint row = row0;
        while (row + 8u <= end) row = down_shared<8u>(down, shape, row, lane);
        if (row + 4u <= end) row = down_shared<4u>(down, shape, row, lane);
        if (row + 2u <= end) row = down_shared<2u>(down, shape, row, lane);
        if (row < end) down_shared<1u>(down, shape, row, lane);
        return;
    }
    const uint expert = expert_of(picks, shape, candidate, lane), pairs = shape.rows * shape.picks;
    if (expert == NONE) return;
    device const ulong *place = places + 6u * expert;
    down.w2 = experts + place[2] + ulong(n) * (columns / 2u);
    down.scales2 = experts + place[5] + ulong(n) * (columns / 32u);
    uint held = 0u, pair = next_pair(picks, pairs, 0u, expert, lane);
    while (pair != NONE) {
        const uint count = take_pairs(held, pair, picks, pairs, expert, lane);
        uint first = 0u;
        if (count == 8u) first = down_pairs<8u>(down, shape, held, first, lane);
        if (first + 4u <= count) first = down_pairs<4u>(down, shape, held, first, lane);
        if (first + 2u <= count) first = down_pairs<2u>(down, shape, held, first, lane);
        if (first < count) down_pairs<1u>(down, shape, held, first, lane);
    }
}

kernel void moe_sum(device const ushort *products [[buffer(0)]], device const uint *picks [[buffer(1)]],
                    device float *out [[buffer(2)]], constant Shape &shape [[buffer(3)]],
                    uint item [[thread_position_in_grid]]) {
    const uint row = item / shape.hidden, n = item % shape.hidden;
    if (row >= shape.rows) return;
    device const ushort *own = products + ulong(row) * (shape.picks + 1u) * shape.hidden + n;
    device const uint *ids = picks + row * shape.picks;
    float sum = 0.0f;
    uint least = 0u;
    for (uint added = 0u; added < shape.picks; added++) {
        // The next id upwards.
        uint pick = 0u, id = NONE;
        for (uint p = 0u; p < shape.picks; p++) {
            const uint other = ids[p];
            if (other >= least && other < id) {
                id = other;
                pick = p;
            }
        }
        least = id + 1u;
        sum = sum + value_of(own[ulong(pick) * shape.hidden]);
    }
    out[item] = bf16_round(sum + value_of(own[ulong(shape.picks) * shape.hidden]));
}
