// sample: one token of each drawn row of logits, and log-probabilities; rules and order in mod.rs
// in   logits [rows, vocabulary] f32   draws [draws] as struct Draw below
//      words: the lists that draws point into: (id, float bits) of logit_bias in order; (id, count in the reply) of every token
//      that penalties meet, each id once; words of grammar masks; masked ids
// out  values [draws, vocabulary] f32: working memory   results [draws] as struct Result   top [sum of top_count]
//      tokens [..]: written where a draw says so
// grid one threadgroup a draw; threadgroup a multiple of 32; 256 bytes of threadgroup memory
// sum  integers, and maxima: no order
// ties the smaller id
#include "draw.metal"

// NONE marks what a draw doesn't have.
constant uint NONE = 0xffffffffu;

struct Draw {
    uint row, position, seed_low, seed_high;
    float temperature, min_p;
    // share: top_p * 2^32 rounded down; filters: bit 0 top-p, bit 1 log-probability, bit 2 next
    uint top_k, share, filters, next;
    float repetition, frequency, presence;
    uint bias, bias_count, seen, seen_count, allowed, allowed_count, masked, masked_count, top, top_count;
    // Where the token goes as well: 0 for a row without one.
    uint token;
};

struct Result {
    // status: 0 drawn, 1 not finite, 2 no candidate
    uint token, status;
    float logprob, next_logprob;
    uint top_count;
};

struct Listed {
    uint id;
    float logprob;
};

struct Shape {
    uint vocabulary;
};

// The place of a thread in its threadgroup, and the threadgroup's memory.
struct Crew {
    threadgroup ulong *part;
    uint thread_index, threads, simdgroup, simdgroups, lane;
};

inline ulong largest(ulong value, Crew crew) {
    return largest_of_all(value, crew.part, crew.simdgroup, crew.simdgroups, crew.lane);
}
inline ulong sum(ulong value, Crew crew) { return sum_of_all(value, crew.part, crew.simdgroup, crew.simdgroups, crew.lane); }

constant ulong BROKEN = 0xfffffffffffffffful;

// The key of the first of the largest values / divisor; BROKEN where one is NaN or plus infinity.
inline ulong survey(device const float *values, uint count, float divisor, Crew crew) {
    ulong best = 0ul;
    for (uint id = crew.thread_index; id < count; id += crew.threads) {
        const float value = values[id] / divisor;
        const ulong key = value != value || value == INFINITY ? BROKEN : token_key(value, id);
        best = best > key ? best : key;
    }
    return largest(best, crew);
}

inline float value_of_key(ulong key) {
    const uint ordered = uint(key >> 32);
    return from_bits((ordered & 0x80000000u) != 0u ? ordered & 0x7fffffffu : ~ordered);
}

// Bias, penalties, masks.
inline void change_values(device const Draw &draw, device const uint *words, device float *values, uint count, Crew crew) {
    if (crew.thread_index == 0u) {
        // An id may come twice, and the sums are in the order of the list.
        for (uint i = 0u; i < draw.bias_count; i++) {
            const uint id = words[draw.bias + 2u * i];
            if (id < count) values[id] = values[id] + from_bits(words[draw.bias + 2u * i + 1u]);
        }
    }
    threadgroup_barrier(mem_flags::mem_device);
    for (uint i = crew.thread_index; i < draw.seen_count; i += crew.threads) {
        const uint id = words[draw.seen + 2u * i], uses = words[draw.seen + 2u * i + 1u];
        if (id >= count) continue;
        float value = values[id];
        if (draw.repetition != 1.0f) value = value > 0.0f ? value / draw.repetition : value * draw.repetition;
        if (uses > 0u) {
            const float cost = draw.frequency * float(uses);
            value = value - cost - draw.presence;
        }
        values[id] = value;
    }
    threadgroup_barrier(mem_flags::mem_device);
    if (draw.allowed != NONE) {
        for (uint id = crew.thread_index; id < count; id += crew.threads) {
            const uint word = id / 32u < draw.allowed_count ? words[draw.allowed + id / 32u] : 0u;
            if ((word >> (id & 31u) & 1u) == 0u) values[id] = -INFINITY;
        }
        threadgroup_barrier(mem_flags::mem_device);
    }
    for (uint i = crew.thread_index; i < draw.masked_count; i += crew.threads) {
        const uint id = words[draw.masked + i];
        if (id < count) values[id] = -INFINITY;
    }
    threadgroup_barrier(mem_flags::mem_device);
}

// How many keys reach `least`, or their weight.
inline ulong count_from(device const float *values, uint count, ulong least, Crew crew) {
    ulong found = 0ul;
    for (uint id = crew.thread_index; id < count; id += crew.threads) found += token_key(values[id], id) >= least ? 1ul : 0ul;
    return sum(found, crew);
}

inline ulong weight_from(device const float *values, uint count, float best, ulong least, Crew crew) {
    ulong weight = 0ul;
    for (uint id = crew.thread_index; id < count; id += crew.threads) {
        if (token_key(values[id], id) >= least) weight += weight_of(exp_own(values[id] - best));
    }
    return sum(weight, crew);
}

// The key of the k-th candidate, or the least one where there are fewer.
inline ulong end_of_top_k(device const float *values, uint count, uint top_k, Crew crew) {
    ulong least = 0ul;
    for (ulong bit = 1ul << 63; bit != 0ul; bit >>= 1) {
        if (count_from(values, count, least | bit, crew) >= ulong(top_k)) least |= bit;
    }
    return least > LEAST_KEY ? least : LEAST_KEY;
}

// The key of the last candidate of the shortest prefix that holds the share of the weight from `first` on.
inline ulong end_of_top_p(device const float *values, uint count, float best, ulong first, uint share, Crew crew) {
    const ulong total = weight_from(values, count, best, first, crew);
    // The least weight w with w * 2^32 >= total * share; the first candidate stays in any case.
    const ulong high = (total >> 32) * share, low = (total & 0xfffffffful) * share;
    ulong wanted = high + ((low + 0xfffffffful) >> 32);
    wanted = wanted > 1ul ? wanted : 1ul;
    ulong least = 0ul;
    for (ulong bit = 1ul << 63; bit != 0ul; bit >>= 1) {
        const ulong probe = least | bit;
        if (weight_from(values, count, best, probe > first ? probe : first, crew) >= wanted) least = probe;
    }
    return least > first ? least : first;
}

// The largest value plus noise of the candidates from `first` on; the earlier one among equals.
inline uint contest(device const Draw &draw, device const float *values, uint count, float best, ulong first, Crew crew) {
    float score = -INFINITY;
    ulong key = 0ul;
    for (uint id = crew.thread_index; id < count; id += crew.threads) {
        const float value = values[id];
        const ulong own = token_key(value, id);
        if (own < first || !(exp_own(value - best) >= draw.min_p)) continue;
        const float own_score = value + gumbel(draw_word(draw.seed_low, draw.seed_high, draw.position, id));
        if (key == 0ul || own_score > score || (own_score == score && own > key)) {
            score = own_score;
            key = own;
        }
    }
    // Scores are compared first, then keys among the equal ones.
    const ulong highest = largest(key == 0ul ? 0ul : ulong(order_key(score)), crew);
    const ulong winner = largest(key != 0ul && ulong(order_key(score)) == highest ? key : 0ul, crew);
    return winner == 0ul ? NONE : ~uint(winner);
}

// The drawn token, with 0 in `status` where there is one.
inline uint choose_token(device const Draw &draw, device float *values, uint count, thread uint &status, Crew crew) {
    if (draw.temperature > 0.0f || draw.temperature != draw.temperature) {
        const ulong first = survey(values, count, draw.temperature, crew);
        if (first != BROKEN) {
            status = first < LEAST_KEY ? 2u : 0u;
            if (status != 0u) return 0u;
            for (uint id = crew.thread_index; id < count; id += crew.threads) values[id] = values[id] / draw.temperature;
            const float best = value_of_key(first);
            ulong end = LEAST_KEY;
            if (draw.top_k > 0u && draw.top_k < count) end = end_of_top_k(values, count, draw.top_k, crew);
            if ((draw.filters & 1u) != 0u) end = end_of_top_p(values, count, best, end, draw.share, crew);
            const uint token = contest(draw, values, count, best, end, crew);
            status = token == NONE ? 2u : 0u;
            return token;
        }
        // The quotients overflow: the draw of a temperature near 0.
    }
    const ulong first = survey(values, count, 1.0f, crew);
    status = first == BROKEN ? 1u : first < LEAST_KEY ? 2u : 0u;
    return ~uint(first);
}

kernel void sample(device const float *logits [[buffer(0)]], device const Draw *draws [[buffer(1)]],
                   device const uint *words [[buffer(2)]], device float *values [[buffer(3)]],
                   device Result *results [[buffer(4)]], device Listed *top [[buffer(5)]],
                   device uint *tokens [[buffer(6)]],
                   constant Shape &shape [[buffer(7)]], uint group [[threadgroup_position_in_grid]],
                   uint index [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
    threadgroup ulong part[32];
    Crew crew;
    crew.part = part;
    crew.thread_index = index;
    crew.threads = threads;
    crew.simdgroup = simdgroup;
    crew.simdgroups = simdgroups;
    crew.lane = lane;
    device const Draw &draw = draws[group];
    const uint count = shape.vocabulary;
    device const float *row = logits + ulong(draw.row) * count;
    device float *own = values + ulong(group) * count;
    uint token = 0u, status, listed = 0u;
    float logprob = 0.0f, next_logprob = 0.0f;

    const ulong raw_first = survey(row, count, 1.0f, crew);
    status = raw_first == BROKEN ? 1u : 0u;
    if (status == 0u) {
        for (uint id = index; id < count; id += threads) own[id] = row[id];
        threadgroup_barrier(mem_flags::mem_device);
        change_values(draw, words, own, count, crew);
        token = choose_token(draw, own, count, status, crew);
    }
    if (status == 0u && (draw.filters & 6u) != 0u) {
        const float best = value_of_key(raw_first);
        const float log_total = ln_own(float_of(weight_from(row, count, best, LEAST_KEY, crew)) * from_bits(0x2b800000u));
        if ((draw.filters & 2u) != 0u) logprob = (row[token] - best) - log_total;
        if ((draw.filters & 4u) != 0u) next_logprob = (row[draw.next] - best) - log_total;
        ulong before = BROKEN;
        while (listed < draw.top_count) {
            ulong next = 0ul;
            for (uint id = index; id < count; id += threads) {
                const ulong key = token_key(row[id], id);
                if (key < before && key > next) next = key;
            }
            before = largest(next, crew);
            if (before < LEAST_KEY) break;
            const uint id = ~uint(before);
            if (index == 0u) {
                top[draw.top + listed].id = id;
                top[draw.top + listed].logprob = (row[id] - best) - log_total;
            }
            listed++;
        }
    }
    if (status != 0u) token = 0u;
    if (index == 0u) {
        device Result &result = results[group];
        result.token = token;
        result.status = status;
        result.logprob = logprob;
        result.next_logprob = next_logprob;
        result.top_count = listed;
        if (draw.token != NONE) tokens[draw.token] = token;
    }
}
