// sample: one token of each drawn row of logits, and log-probabilities; rules and order in mod.rs
// in   logits [rows, vocabulary] f32   draws [draws] as struct Draw below
//      words: the lists that draws point into: (id, float bits) of logit_bias in order; (id, count in the reply) of every
//      token that penalties meet, each id once; words of grammar masks; masked ids
// out  values [draws, vocabulary] f32: working memory   results [draws] as struct Result   top [sum of top_count]
//      tokens [..]: written where a draw says so
// grid one block a draw; a multiple of 32 threads, at most 512; no dynamic shared memory
// sum  integers, and maxima: no order
// ties the smaller id
#include "draw.cuh"

// NONE marks what a draw doesn't have.
constexpr u32 NONE = 0xffffffffu;
// Places at which one look at the row asks for the weight and the count so far.
constexpr u32 PROBES = 8;
// So few candidates are put aside, so that the row is not looked at again.
constexpr u32 LIST_MAX = 2048;
constexpr u32 WARPS_MAX = 16;
constexpr u64 BROKEN = 0xffffffffffffffffull;

struct Draw {
    u32 row, position, seed_low, seed_high;
    float temperature, min_p;
    // share: top_p * 2^32 rounded down; filters: bit 0 top-p, bit 1 log-probability, bit 2 next
    u32 top_k, share, filters, next;
    float repetition, frequency, presence;
    u32 bias, bias_count, seen, seen_count, allowed, allowed_count, masked, masked_count, top, top_count;
    // Where the token goes as well: NONE for nowhere, 0 in a row without one.
    u32 token;
};

struct Result {
    // status: 0 drawn, 1 not finite, 2 no candidate
    u32 token, status;
    float logprob, next_logprob;
    u32 top_count;
};

struct Listed {
    u32 id;
    float logprob;
};

struct Shape {
    u32 vocabulary;
};

struct Shared {
    u64 part[WARPS_MAX];
    // Of each warp and of all: three pieces of 20 bits of a weight, and a count, for each probe.
    u32 pieces[WARPS_MAX][PROBES * 4];
    u32 totals[PROBES * 4];
    u32 orders[LIST_MAX], ids[LIST_MAX];
    u32 listed;
    u32 probes[PROBES];
    Draw draw;
};

// The key of the first of the largest values / divisor; BROKEN where one is NaN or plus infinity.
__device__ u64 survey(const float* values, u32 count, float divisor, Shared& s) {
    u64 best = 0;
    for (u32 id = threadIdx.x; id < count; id += blockDim.x) {
        const float value = divisor == 1.0f ? values[id] : __fdiv_rn(values[id], divisor);
        const u64 key = value != value || value == infinite() ? BROKEN : token_key(value, id);
        best = best > key ? best : key;
    }
    return largest_of_all(best, s.part);
}

// Bias, penalties, masks.
__device__ void change_values(const Draw& draw, const u32* words, float* values, u32 count) {
    if (threadIdx.x == 0) {
        // An id may come twice, and the sums are in the order of the list.
        for (u32 i = 0; i < draw.bias_count; i++) {
            const u32 id = words[draw.bias + 2 * i];
            if (id < count) values[id] = values[id] + from_bits(words[draw.bias + 2 * i + 1]);
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < draw.seen_count; i += blockDim.x) {
        const u32 id = words[draw.seen + 2 * i], uses = words[draw.seen + 2 * i + 1];
        if (id >= count) continue;
        float value = values[id];
        if (draw.repetition != 1.0f) value = value > 0.0f ? __fdiv_rn(value, draw.repetition) : value * draw.repetition;
        if (uses > 0) {
            const float cost = draw.frequency * (float)uses;
            value = value - cost - draw.presence;
        }
        values[id] = value;
    }
    __syncthreads();
    if (draw.allowed != NONE) {
        for (u32 id = threadIdx.x; id < count; id += blockDim.x) {
            const u32 word = id / 32 < draw.allowed_count ? words[draw.allowed + id / 32] : 0;
            if ((word >> (id & 31) & 1) == 0) values[id] = -infinite();
        }
        __syncthreads();
    }
    for (u32 i = threadIdx.x; i < draw.masked_count; i += blockDim.x) {
        const u32 id = words[draw.masked + i];
        if (id < count) values[id] = -infinite();
    }
    __syncthreads();
}

// Weight and number of the candidates from a probe on.
struct Share {
    u64 weight;
    u32 count;
};

__device__ __forceinline__ Share share_at(const Shared& s, u32 probe) {
    const u32* pieces = s.totals + probe * 4;
    return {pieces[0] + ((u64)pieces[1] << 20) + ((u64)pieces[2] << 40), pieces[3]};
}

// The shares of the values whose orders lie in [s.probes[i], high]; probes descend. Of the row, or of what was put aside.
__device__ void look(const float* values, u32 count, float best, u32 high, Shared& s) {
    u64 weights[PROBES] = {};
    u32 counts[PROBES] = {};
    u32 probes[PROBES];
    __syncthreads();
#pragma unroll
    for (u32 p = 0; p < PROBES; p++) probes[p] = s.probes[p];
    const u32 end = s.listed != 0 ? s.listed : count;
    for (u32 i = threadIdx.x; i < end; i += blockDim.x) {
        const u32 order = s.listed != 0 ? s.orders[i] : order_key(values[i]);
        if (order < probes[PROBES - 1] || order > high) continue;
        const u64 weight = weight_of(exp_own(value_of_order(order) - best));
#pragma unroll
        for (u32 p = 0; p < PROBES; p++) {
            weights[p] += order >= probes[p] ? weight : 0;
            counts[p] += order >= probes[p] ? 1 : 0;
        }
    }
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (u32 p = 0; p < PROBES; p++) {
        const u64 weight = weights[p];
        u32 pieces[4] = {(u32)weight & 0xfffffu, (u32)(weight >> 20) & 0xfffffu, (u32)(weight >> 40), counts[p]};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            for (u32 mask = 16; mask != 0; mask >>= 1) pieces[i] += __shfl_xor_sync(WARP, pieces[i], mask);
            if (lane == 0) s.pieces[warp][p * 4 + i] = pieces[i];
        }
    }
    __syncthreads();
    if (threadIdx.x < PROBES * 4) {
        u32 total = 0;
        for (u32 w = 0; w < warps; w++) total += s.pieces[w][threadIdx.x];
        s.totals[threadIdx.x] = total;
    }
    __syncthreads();
}

// The orders in [low, high] hold the value that is searched; `before` is the share above them, `inside` their number.
struct Range {
    u32 low, high, inside;
    Share before;
};

// A prefix of the candidates: values above `order`, and of the equal ones ids up to `last`.
struct Cut {
    u32 order, last;
    u64 weight;
};

__device__ __forceinline__ bool is_inside(const Cut& cut, u32 order, u32 id) {
    return order > cut.order || (order == cut.order && id <= cut.last);
}

// Goes on in the part of the range where the wanted weight or count is reached. The last probe is the range's low end.
__device__ void narrow(Range& range, bool by_weight, u64 wanted, const Shared& s) {
    u32 found = 0;
    while (found + 1 < PROBES) {
        const Share share = share_at(s, found);
        if (range.before.count + share.count >= wanted && !by_weight) break;
        if (range.before.weight + share.weight >= wanted && by_weight) break;
        found++;
    }
    range.inside = share_at(s, found).count;
    range.low = s.probes[found];
    if (found == 0) return;
    const Share above = share_at(s, found - 1);
    range.inside -= above.count;
    range.high = s.probes[found - 1] - 1;
    range.before.weight += above.weight;
    range.before.count += above.count;
}

// The id of the `wanted`-th of the values of one order.
__device__ u32 nth_equal(const float* values, u32 count, u32 order, u32 wanted, Shared& s) {
    u32 low = 0, high = count - 1;
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        u64 found = 0;
        const u32 end = s.listed != 0 ? s.listed : count;
        for (u32 i = threadIdx.x; i < end; i += blockDim.x) {
            const u32 id = s.listed != 0 ? s.ids[i] : i;
            const u32 own = s.listed != 0 ? s.orders[i] : order_key(values[i]);
            found += own == order && id <= middle ? 1 : 0;
        }
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u32 sum = (u32)found;
        for (u32 mask = 16; mask != 0; mask >>= 1) sum += __shfl_xor_sync(WARP, sum, mask);
        if (lane == 0) s.pieces[warp][0] = sum;
        __syncthreads();
        sum = 0;
        for (u32 w = 0; w < blockDim.x / 32; w++) sum += s.pieces[w][0];
        __syncthreads();
        if (sum >= wanted) high = middle;
        else low = middle + 1;
    }
    return low;
}

// Puts the candidates of the range aside.
__device__ void put_aside(const float* values, u32 count, const Range& range, Shared& s) {
    __syncthreads();
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    for (u32 id = threadIdx.x; id < count; id += blockDim.x) {
        const u32 order = order_key(values[id]);
        if (order < range.low || order > range.high) continue;
        // In any order: what follows counts and compares.
        const u32 place = atomicAdd(&s.listed, 1u);
        s.orders[place] = order;
        s.ids[place] = id;
    }
    __syncthreads();
}

// The shortest prefix of the candidates, by value and id, that has the wanted number or weight. A look at the
// first probes has just been taken.
__device__ Cut shortest(const float* values, u32 count, float best, bool by_weight, u64 wanted, Shared& s) {
    Range range = {s.probes[PROBES - 1], order_key(best), 0, {0, 0}};
    narrow(range, by_weight, wanted, s);
    while (range.low < range.high) {
        if (s.listed == 0 && range.inside <= LIST_MAX) put_aside(values, count, range, s);
        __syncthreads();
        if (threadIdx.x < PROBES) {
            const u64 part = (u64)(range.high - range.low) * (PROBES - 1 - threadIdx.x);
            s.probes[threadIdx.x] = range.low + (u32)((part + PROBES - 1) / PROBES);
        }
        look(values, count, best, range.high, s);
        narrow(range, by_weight, wanted, s);
    }
    const u64 weight = weight_of(exp_own(value_of_order(range.low) - best));
    u32 equal = range.inside;
    if (by_weight) {
        u64 sum = range.before.weight;
        for (equal = 0; equal < range.inside && sum < wanted; equal++) sum += weight;
    } else {
        equal = (u32)(wanted - range.before.count);
    }
    const u32 last = equal < range.inside ? nth_equal(values, count, range.low, equal, s) : NONE;
    __syncthreads();
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    return {range.low, last, range.before.weight + weight * equal};
}

// A look from these distances behind the likeliest on, the last one before all candidates.
__device__ void look_first(const float* values, u32 count, float best, Shared& s) {
    __syncthreads();
    if (threadIdx.x < PROBES) {
        const u32 p = threadIdx.x, least = (u32)(LEAST_KEY >> 32);
        // 1, 2, 4, .. 32, 64: beyond 28 a token weighs nothing.
        const float distance = (float)(1u << p);
        const u32 order = order_key(best - distance);
        s.probes[p] = p + 1 == PROBES ? least : order > least ? order : least + 1;
    }
    look(values, count, best, order_key(best), s);
}

// What top-k and top-p leave.
__device__ Cut filtered(const Draw& draw, const float* values, u32 count, float best, Shared& s) {
    Cut cut = {(u32)(LEAST_KEY >> 32), NONE, 0};
    const bool by_count = draw.top_k > 0 && draw.top_k < count, by_weight = (draw.filters & 1) != 0;
    if (!by_count && !by_weight) return cut;
    look_first(values, count, best, s);
    const Share all = share_at(s, PROBES - 1);
    cut.weight = all.weight;
    if (by_count && draw.top_k < all.count) {
        cut = shortest(values, count, best, false, draw.top_k, s);
        if (by_weight) look_first(values, count, best, s);
    }
    if (!by_weight) return cut;
    // The least weight w with w * 2^32 >= total * share; the first candidate stays in any case.
    const u64 high = (cut.weight >> 32) * draw.share, low = (cut.weight & 0xffffffffull) * draw.share;
    const u64 wanted = high + ((low + 0xffffffffull) >> 32);
    return shortest(values, count, best, true, wanted > 1 ? wanted : 1, s);
}

// The largest value plus noise of the candidates inside the cut; the earlier one among equals.
__device__ u32 contest(const Draw& draw, const float* values, u32 count, u64 first, const Cut& cut, Shared& s) {
    const float best = value_of_order((u32)(first >> 32));
    // The likeliest candidate's score: who can't reach it needs no noise.
    const float floor = best + gumbel(draw_word(draw.seed_low, draw.seed_high, draw.position, ~(u32)first));
    const bool likeliest_stays = 1.0f >= draw.min_p;
    u32 score = 0;
    u64 key = 0;
    for (u32 id = threadIdx.x; id < count; id += blockDim.x) {
        const float value = values[id];
        const u64 own = token_key(value, id);
        if (own < LEAST_KEY || !is_inside(cut, (u32)(own >> 32), id)) continue;
        if (likeliest_stays && value + GUMBEL_MAX < floor) continue;
        if (!(exp_own(value - best) >= draw.min_p)) continue;
        const u32 own_score = order_key(value + gumbel(draw_word(draw.seed_low, draw.seed_high, draw.position, id)));
        if (key == 0 || own_score > score || (own_score == score && own > key)) {
            score = own_score;
            key = own;
        }
    }
    // Scores are compared first, then keys among the equal ones.
    const u64 highest = largest_of_all(key == 0 ? 0 : score, s.part);
    const u64 winner = largest_of_all(key != 0 && score == highest ? key : 0, s.part);
    return winner == 0 ? NONE : ~(u32)winner;
}

// The drawn token, with 0 in `status` where there is one. `values` are `own` or, where nothing changes them, the row.
__device__ u32 choose_token(const Draw& draw, const float* values, float* own, u32 count, u32& status, Shared& s) {
    if (draw.temperature > 0.0f || draw.temperature != draw.temperature) {
        const u64 first = survey(values, count, draw.temperature, s);
        if (first != BROKEN) {
            status = first < LEAST_KEY ? 2 : 0;
            if (status != 0) return 0;
            if (draw.temperature != 1.0f) {
                for (u32 id = threadIdx.x; id < count; id += blockDim.x) {
                    own[id] = __fdiv_rn(values[id], draw.temperature);
                }
                __syncthreads();
                values = own;
            }
            const Cut cut = filtered(draw, values, count, value_of_order((u32)(first >> 32)), s);
            const u32 token = contest(draw, values, count, first, cut, s);
            status = token == NONE ? 2 : 0;
            return token;
        }
        // The quotients overflow: the draw of a temperature near 0.
    }
    const u64 first = survey(values, count, 1.0f, s);
    status = first == BROKEN ? 1 : first < LEAST_KEY ? 2 : 0;
    return ~(u32)first;
}

// The likeliest tokens of the raw row, in order. Returns their number.
__device__ u32 list_likeliest(const Draw& draw, const float* row, u32 count, float best, u32 candidates,
                              float log_total, Listed* top, Shared& s) {
    const u32 wanted = draw.top_count < candidates ? draw.top_count : candidates;
    if (wanted == 0) return 0;
    Cut cut = {(u32)(LEAST_KEY >> 32), NONE, 0};
    if (wanted < candidates) cut = shortest(row, count, best, false, wanted, s);
    if (wanted <= LIST_MAX) {
        __syncthreads();
        if (threadIdx.x == 0) s.listed = 0;
        __syncthreads();
        for (u32 id = threadIdx.x; id < count; id += blockDim.x) {
            const u32 order = order_key(row[id]);
            if (order < (u32)(LEAST_KEY >> 32) || !is_inside(cut, order, id)) continue;
            const u32 place = atomicAdd(&s.listed, 1u);
            s.orders[place] = order;
            s.ids[place] = id;
        }
        __syncthreads();
    }
    const u32 end = wanted <= LIST_MAX ? wanted : count;
    for (u32 i = threadIdx.x; i < end; i += blockDim.x) {
        const u32 id = wanted <= LIST_MAX ? s.ids[i] : i;
        const u64 key = token_key(row[id], id);
        if (key < LEAST_KEY || !is_inside(cut, (u32)(key >> 32), id)) continue;
        u32 place = 0;
        for (u32 j = 0; j < end; j++) {
            const u32 other = wanted <= LIST_MAX ? s.ids[j] : j;
            place += token_key(row[other], other) > key ? 1 : 0;
        }
        top[draw.top + place] = {id, (row[id] - best) - log_total};
    }
    __syncthreads();
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    return wanted;
}

extern "C" __global__ void __launch_bounds__(512, 1)
sample(const float* logits, const Draw* draws, const u32* words, float* values, Result* results, Listed* top,
       u32* tokens, const Shape shape) {
    __shared__ Shared s;
    if (threadIdx.x == 0) s.listed = 0;
    wait_for_inputs();
    const u32* from = (const u32*)(draws + blockIdx.x);
    for (u32 i = threadIdx.x; i < sizeof(Draw) / 4; i += blockDim.x) ((u32*)&s.draw)[i] = from[i];
    __syncthreads();
    const Draw& draw = s.draw;
    const u32 count = shape.vocabulary;
    const float* row = logits + (u64)draw.row * count;
    float* own = values + (u64)blockIdx.x * count;
    Result result = {0, 0, 0.0f, 0.0f, 0};

    const u64 raw_first = survey(row, count, 1.0f, s);
    result.status = raw_first == BROKEN ? 1 : 0;
    if (result.status == 0) {
        const bool changed = draw.bias_count + draw.seen_count + draw.masked_count > 0 || draw.allowed != NONE;
        if (changed) {
            for (u32 id = threadIdx.x; id < count; id += blockDim.x) own[id] = row[id];
            __syncthreads();
            change_values(draw, words, own, count);
        }
        if (changed || draw.temperature > 0.0f || draw.temperature != draw.temperature) {
            result.token = choose_token(draw, changed ? own : row, own, count, result.status, s);
        } else {
            result.status = raw_first < LEAST_KEY ? 2 : 0;
            result.token = ~(u32)raw_first;
        }
    }
    if (result.status == 0 && (draw.filters & 6) != 0) {
        const float best = value_of_order((u32)(raw_first >> 32));
        look_first(row, count, best, s);
        const Share all = share_at(s, PROBES - 1);
        const float log_total = ln_own(float_of(all.weight) * from_bits(0x2b800000u));
        if ((draw.filters & 2) != 0) result.logprob = (row[result.token] - best) - log_total;
        if ((draw.filters & 4) != 0) result.next_logprob = (row[draw.next] - best) - log_total;
        result.top_count = list_likeliest(draw, row, count, best, all.count, log_total, top, s);
    }
    if (threadIdx.x == 0) {
        if (result.status != 0) result.token = 0;
        results[blockIdx.x] = result;
        if (draw.token != NONE) tokens[draw.token] = result.token;
    }
}
