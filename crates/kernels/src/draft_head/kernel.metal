// draft_head: one step of every sequence's chain of proposals; formulas in mod.rs. The launches of a step, in this order:
//   draft_logits      logits[s] = base[s][step] + head @ embed[previous]
//   draft_confidence  (proj[..hidden] . hidden_rows[s][step]) + (proj[hidden..] . embed[previous])
//   draft_argmax      for greedy sequences; the others' tokens come from `sample`
// in   base [sequences, block, vocabulary] f32   hidden_rows [sequences, block, hidden] f32   anchors [sequences]
//      greedy [sequences] 0 or 1   embed [vocabulary, rank] bf16   head [ceil(vocabulary / 16), rank, 16] bf16
//      proj [hidden + rank] f32
// out  logits [sequences, vocabulary] f32   tokens [sequences, steps], written step by step and read by the next one
//      confidence [sequences, steps] f32
// grid draft_logits: one SIMD group for 32 tokens of all sequences, which share its read of the head; the others: one SIMD
//      group a sequence; threadgroup a multiple of 32; no threadgroup memory
// sum  one chain over the rank ascending; tf_kernels::order's sum of products, twice
// ties the smaller id
#include "prelude.metal"

struct Shape {
    uint sequences, vocabulary, rank, hidden, block, steps, step;
};

inline float bf16_value(ushort bits) { return from_bits(uint(bits) << 16); }

inline uint previous_token(device const uint *anchors, device const uint *tokens, constant Shape &shape, uint sequence) {
    return shape.step == 0u ? anchors[sequence] : tokens[sequence * shape.steps + shape.step - 1u];
}

kernel void draft_logits(device const float *base [[buffer(0)]], device const uint *anchors [[buffer(1)]],
                         device const uint *tokens [[buffer(2)]], device const ushort *embed [[buffer(3)]],
                         device const ushort *head [[buffer(4)]], device float *logits [[buffer(5)]],
                         constant Shape &shape [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint token = (group * simdgroups + simdgroup) * 32u + lane;
    if (token >= shape.vocabulary) return;
    device const ushort *weights = head + ulong(token / 16u) * shape.rank * 16u + token % 16u;
    for (uint sequence = 0u; sequence < shape.sequences; sequence++) {
        const uint previous = previous_token(anchors, tokens, shape, sequence);
        device const ushort *state = embed + ulong(previous) * shape.rank;
        float sum = 0.0f;
        for (uint k = 0u; k < shape.rank; k++) sum = fma(bf16_value(weights[k * 16u]), bf16_value(state[k]), sum);
        const float first = base[ulong(sequence * shape.block + shape.step) * shape.vocabulary + token];
        logits[ulong(sequence) * shape.vocabulary + token] = first + sum;
    }
}

// sum_products of float32 and bf16.
inline float sum_products_bf16(device const float *a, device const ushort *b, uint columns, uint lane) {
    float even = 0.0f, odd = 0.0f;
    for (uint c = lane; c < columns; c += 64u) {
        even = fma(a[c], bf16_value(b[c]), even);
        if (c + 32u < columns) odd = fma(a[c + 32u], bf16_value(b[c + 32u]), odd);
    }
    return fold_four(even, odd);
}

kernel void draft_confidence(device const float *hidden_rows [[buffer(0)]], device const uint *anchors [[buffer(1)]],
                             device const uint *tokens [[buffer(2)]], device const ushort *embed [[buffer(3)]],
                             device const float *proj [[buffer(4)]], device float *confidence [[buffer(5)]],
                             constant Shape &shape [[buffer(6)]], uint group [[threadgroup_position_in_grid]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint sequence = group * simdgroups + simdgroup;
    if (sequence >= shape.sequences) return;
    const uint previous = previous_token(anchors, tokens, shape, sequence);
    device const float *row = hidden_rows + ulong(sequence * shape.block + shape.step) * shape.hidden;
    const float of_hidden = sum_products(proj, row, shape.hidden, lane);
    const float of_state = sum_products_bf16(proj + shape.hidden, embed + ulong(previous) * shape.rank, shape.rank, lane);
    if (lane == 0u) confidence[sequence * shape.steps + shape.step] = of_hidden + of_state;
}

kernel void draft_argmax(device const float *logits [[buffer(0)]], device const uint *greedy [[buffer(1)]],
                         device uint *tokens [[buffer(2)]], constant Shape &shape [[buffer(3)]],
                         uint group [[threadgroup_position_in_grid]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint simdgroups [[simdgroups_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint sequence = group * simdgroups + simdgroup;
    if (sequence >= shape.sequences || greedy[sequence] == 0u) return;
    device const float *row = logits + ulong(sequence) * shape.vocabulary;
    uint best = 0u, token = 0u;
    for (uint id = lane; id < shape.vocabulary; id += 32u) {
        const uint key = order_key(row[id]);
        if (key > best) {
            best = key;
            token = id;
        }
    }
    // Nothing above minus infinity: token 0.
    const uint largest = simd_max(best);
    const uint first = simd_min(best == largest && largest > 0x007fffffu ? token : 0xffffffffu);
    if (lane == 0u) tokens[sequence * shape.steps + shape.step] = first == 0xffffffffu ? 0u : first;
}
