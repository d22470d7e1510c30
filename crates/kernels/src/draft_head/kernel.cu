// draft_head: one step of every sequence's chain of proposals; formulas in mod.rs. Launches of a step, in this order:
//   draft_logits      logits[s] = base[s][step] + head @ embed[previous]
//   draft_confidence  (proj[..hidden] . hidden_rows[s][step]) + (proj[hidden..] . embed[previous])
//   draft_argmax      for greedy sequences; the others' tokens come from `sample`
// in   base [sequences, block, vocabulary] f32   hidden_rows [sequences, block, hidden] f32   anchors [sequences]
//      greedy [sequences] 0 or 1   embed [vocabulary, rank] bf16   head [ceil(vocabulary / 16), rank, 16] bf16
//      proj [hidden + rank] f32
// out  logits [sequences, vocabulary] f32   tokens [sequences, steps], written step by step and read by the next one
//      confidence [sequences, steps] f32
// grid draft_logits: a thread a token, for all sequences; draft_confidence: one warp a sequence; draft_argmax: one block
//      a sequence; blocks are a multiple of 32 threads
// sum  one chain over the rank ascending; tf_kernels::order's sum of products, twice
// ties the smaller id
#include "draw.cuh"

// Sequences whose sums a thread keeps at once: the head is read once for all of them.
constexpr u32 TOGETHER = 8;
constexpr u32 RANK_MAX = 512;

struct Shape {
    u32 sequences, vocabulary, rank, hidden, block, steps, step;
};

__device__ __forceinline__ float bf16_value(u16 bits) { return from_bits((u32)bits << 16); }

__device__ __forceinline__ u32 previous_token(const u32* anchors, const u32* tokens, const Shape& shape, u32 sequence) {
    return shape.step == 0 ? anchors[sequence] : tokens[sequence * shape.steps + shape.step - 1];
}

template <u32 COUNT>
__device__ __forceinline__ void chain(const u16* weights, const float* states, u32 rank, float (&sums)[TOGETHER]) {
#pragma unroll 16
    for (u32 k = 0; k < rank; k++) {
        const float weight = bf16_value(weights[k * 16]);
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) sums[i] = fma_own(weight, states[i * RANK_MAX + k], sums[i]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
draft_logits(const float* base, const u32* anchors, const u32* tokens, const u16* embed, const u16* head, float* logits,
             const Shape shape) {
    __shared__ float states[TOGETHER * RANK_MAX];
    const u32 token = blockIdx.x * blockDim.x + threadIdx.x, rank = shape.rank;
    wait_for_inputs();
    for (u32 first = 0; first < shape.sequences; first += TOGETHER) {
        const u32 count = min(TOGETHER, shape.sequences - first);
        __syncthreads();
        for (u32 i = threadIdx.x; i < count * rank; i += blockDim.x) {
            const u32 previous = previous_token(anchors, tokens, shape, first + i / rank);
            states[i / rank * RANK_MAX + i % rank] = bf16_value(embed[(u64)previous * rank + i % rank]);
        }
        __syncthreads();
        if (token >= shape.vocabulary) continue;
        const u16* weights = head + (u64)(token / 16) * rank * 16 + token % 16;
        float sums[TOGETHER] = {};
        // One sequence alone pays for one; the sums of absent ones are not used.
        if (count == 1) chain<1>(weights, states, rank, sums);
        else if (count <= 4) chain<4>(weights, states, rank, sums);
        else chain<TOGETHER>(weights, states, rank, sums);
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            if (i >= count) break;
            const u32 sequence = first + i;
            const float own = base[(u64)(sequence * shape.block + shape.step) * shape.vocabulary + token];
            logits[(u64)sequence * shape.vocabulary + token] = own + sums[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
draft_confidence(const float* hidden_rows, const u32* anchors, const u32* tokens, const u16* embed, const float* proj,
                 float* confidence, const Shape shape) {
    const u32 sequence = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_inputs();
    if (sequence >= shape.sequences) return;
    const u32 previous = previous_token(anchors, tokens, shape, sequence);
    const float* row = hidden_rows + (u64)(sequence * shape.block + shape.step) * shape.hidden;
    const u16* state = embed + (u64)previous * shape.rank;
    const float* of_rank = proj + shape.hidden;
    const float of_hidden =
        sum_products_of(shape.hidden, lane, [&](u32 c, float& a, float& b) { a = proj[c], b = row[c]; });
    const float of_state =
        sum_products_of(shape.rank, lane, [&](u32 c, float& a, float& b) { a = of_rank[c], b = bf16_value(state[c]); });
    if (lane == 0) confidence[sequence * shape.steps + shape.step] = of_hidden + of_state;
}

extern "C" __global__ void __launch_bounds__(1024)
draft_argmax(const float* logits, const u32* greedy, u32* tokens, const Shape shape) {
    __shared__ u64 part[32];
    const u32 sequence = blockIdx.x;
    wait_for_inputs();
    if (greedy[sequence] == 0) return;
    const float* row = logits + (u64)sequence * shape.vocabulary;
    u64 best = 0;
    for (u32 id = threadIdx.x; id < shape.vocabulary; id += blockDim.x) {
        const u64 key = token_key(row[id], id);
        best = best > key ? best : key;
    }
    best = largest_of_all(best, part);
    // Nothing above minus infinity: token 0.
    if (threadIdx.x == 0) tokens[sequence * shape.steps + shape.step] = best < LEAST_KEY ? 0 : ~(u32)best;
}
