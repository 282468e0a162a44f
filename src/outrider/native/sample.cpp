// Choosing tokens from logits without sorting the vocabulary.
//
// A row of 49,152 logits is read about twice: once for the maximum, once for exp and the
// candidates, tokens that can still be in the nucleus. The exact border of top-k and top-p is
// found among the candidates (border.h). Noise is a hash of (key, position, id); a token can only win if the hash alone, a lower
// bound of its exponential variate, is below its share, so logarithms are taken for a few dozen
// tokens per row and not for the vocabulary.
//
// Sums run in a fixed order within a row: a row's result has the same bits whatever is beside it.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "border.h"
#include "pool.h"
#include "sample.h"
#include "vec.h"

namespace outrider {
namespace {

typedef uint64_t u64x8 __attribute__((vector_size(64)));

struct Scratch {
    Buffer candidates, a, b;
    std::vector<int32_t> ids;
    std::vector<float> ones;
    long count = 0;  // candidates
    void fit(long n) {
        candidates.fit(n), a.fit(n), b.fit(n);
        if (long(ids.size()) < n + kLanes) ids.resize(n + kLanes);
    }
};

Scratch &scratch() {
    thread_local Scratch s;
    return s;
}

// ---- the largest logit ----------------------------------------------------------------------

struct Top {
    float value = kNever;
    int32_t id = 0;  // the lowest id with that value; 0 when there is no number among the logits
};

Top find_top(const float *x, long n) {
    Top top;
    long span = 0;
    for (long start = 0; start < n; start += kSpan) {
        f32x16 m[4] = {splat(kNever), splat(kNever), splat(kNever), splat(kNever)};
        long end = std::min(n, start + kSpan), i = start;
        for (; i + 4 * kLanes <= end; i += 4 * kLanes)
            for (int j = 0; j < 4; j++) m[j] = max(load(x + i + j * kLanes), m[j]);
        for (; i < end; i += kLanes) m[0] = max(load_part(x + i, end - i, kNever), m[0]);
        float best = reduce_max(max(max(m[0], m[1]), max(m[2], m[3])));
        if (best > top.value) top.value = best, span = start;
    }
    if (top.value == kNever) return top;
    top.id = int32_t(span);
    while (x[top.id] != top.value) top.id++;
    return top;
}

// ---- the warped distribution ----------------------------------------------------------------

// Token i has weight exp((x[i] - top) / temperature) if x[i] >= border, else none.
struct Warp {
    Top top;
    float border;
    float scale;   // 1 / temperature
    double mass;   // of the weights kept; set where there is a top_k or top_p
};

inline f32x16 weights(f32x16 x, const Warp &warp) { return exp((x - warp.top.value) * warp.scale); }

// The lowest float that is not below `value`.
float round_up(double value) {
    float f = float(value);
    return double(f) < value ? std::nextafterf(f, INFINITY) : f;
}

// A float surely below `value`.
float round_down(double value) { return std::nextafterf(std::nextafterf(float(value), kNever), kNever); }

// Candidates (x >= cut) into the scratch; returns the weight of all x >= floor.
double gather(const float *x, long n, const Warp &warp, float floor, float cut, Scratch &s) {
    i32x16 lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    Sum mass;
    long count = 0;
    for (long i = 0; i < n; i += kLanes) {
        f32x16 vx = load_part(x + i, n - i, kNever);
        f32x16 w = weights(vx, warp);
        mass.add(vx >= floor ? w : f32x16{});
        uint32_t mask = mask_of(vx >= cut);
        if (!mask) continue;
        compress(s.candidates.x.data() + count, vx, mask);
        compress(s.candidates.w.data() + count, w, mask);
        count += compress(s.ids.data() + count, lane + int32_t(i), mask);
    }
    s.count = count;
    std::fill_n(s.ids.begin() + count, kLanes, 0);  // race_candidates reads past the end
    return mass.value();
}

double kept_mass(float border, const Scratch &s) {
    Sum mass;
    for (long i = 0; i < s.count; i += kLanes) {
        long n = s.count - i;
        f32x16 x = load_part(s.candidates.x.data() + i, n, kNever);
        f32x16 w = load_part(s.candidates.w.data() + i, n, 0);
        mass.add(x >= border ? w : f32x16{});
    }
    return mass.value();
}

bool has_top_k(const Row &row, long n) { return row.top_k > 0 && row.top_k < n; }
bool has_border(const Row &row, long n) { return row.top_p < 1.0 || has_top_k(row, n); }

// A value that at least k logits reach: the k-th of the maxima of disjoint sets of logits.
float top_k_cut(const float *x, long n, long k) {
    std::vector<float> maxima((n + kSpan - 1) / kSpan * kLanes);
    if (k > long(maxima.size())) return -FLT_MAX;
    for (long start = 0; start < n; start += kSpan) {
        f32x16 m = splat(kNever);
        for (long i = start; i < std::min(n, start + kSpan); i += kLanes)
            m = max(load_part(x + i, n - i, kNever), m);
        store(maxima.data() + start / kSpan * kLanes, m);
    }
    std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<>());
    return std::max(maxima[k - 1], -FLT_MAX);
}

float find_kth(long k, Scratch &s) {
    if (long(s.ones.size()) < s.count + kLanes) s.ones.assign(s.count + kLanes, 1.0f);
    return find_border(s.candidates.x.data(), s.ones.data(), s.count, double(k), double(s.count),
                       s.a, s.b);
}

// Lowest logit that can be kept.
float candidate_cut(const Row &row, long n, const Warp &warp) {
    if (has_top_k(row, n)) return std::max(warp.border, top_k_cut(row.logits, n, row.top_k));
    // The top weighs 1, so n tokens below (1 - top_p) / n weigh less than what top_p drops.
    // (0.999: far more than rounding can do to either side.)
    double least = std::log(0.999 * (1.0 - row.top_p) / double(n));
    return std::max(warp.border, round_down(double(warp.top.value) + row.temperature * least));
}

// Applies min_p, then top_k, then top_p to what is left; equal logits at a border all stay.
Warp warp_row(const Row &row, long n, Top top, Scratch &s) {
    Warp warp{top, -FLT_MAX, float(1.0 / row.temperature), 0};
    if (row.min_p > 0)
        warp.border = round_up(double(top.value) + row.temperature * std::log(row.min_p));
    if (!has_border(row, n)) return warp;
    s.fit(n);
    warp.mass = gather(row.logits, n, warp, warp.border, candidate_cut(row, n, warp), s);
    float *x = s.candidates.x.data(), *w = s.candidates.w.data();
    long count = s.count;
    if (has_top_k(row, n) && count >= row.top_k) {
        warp.border = find_kth(row.top_k, s);
        Parts parts = split(x, w, count, warp.border, s.a, s.b);  // the rest takes no more part
        x = s.a.x.data(), w = s.a.w.data(), count = parts.high, warp.mass = parts.high_mass;
    }
    if (row.top_p < 1.0) {
        warp.border = find_border(x, w, count, row.top_p * warp.mass, warp.mass, s.a, s.b);
        warp.mass = kept_mass(warp.border, s);
    }
    return warp;
}

// ---- noise ----------------------------------------------------------------------------------

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

// One output of the generator splitmix64 (Steele, Lea, Flood 2014), for a scalar or eight lanes.
template <class T>
inline T splitmix(T z) {
    z += kGolden;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t row_key(const Row &row) {
    return splitmix(splitmix(row.noise_key) + uint64_t(row.position));
}

inline uint64_t hash(uint64_t key, uint64_t id) { return splitmix(key + id * kGolden); }

double gumbel(uint64_t h) {
    double uniform = (double(h >> 12) + 0.5) * 0x1p-52;  // exact, and inside (0, 1)
    return -std::log(-std::log1p(-uniform));
}

// The race of one row: which kept token has the largest x / temperature + noise.
struct Race {
    const Row &row;
    const Warp &warp;
    const int32_t *id_map;
    uint64_t key;
    int32_t id;        // the leader
    double score;
    float bound = 0;   // 2^32 exp(top / temperature - score), a little more

    Race(const Row &row, const Warp &warp, const int32_t *id_map)
        : row(row), warp(warp), id_map(id_map), key(row_key(row)), id(warp.top.id) {
        score = score_of(warp.top.value, id);
        set_bound();
    }

    uint64_t noise_id(int32_t i) const { return uint64_t(id_map ? id_map[i] : i); }

    double score_of(float x, int32_t i) const {
        return double(x) / row.temperature + gumbel(hash(key, noise_id(i)));
    }

    void set_bound() {
        // 0.1 % covers the rounding of the weights (3e-6) and of the products.
        bound = float(0x1p32 * 1.001 * std::exp(warp.top.value / row.temperature - score));
    }

    u32x16 high_halves(i32x16 ids) const {
#if defined(__AVX512DQ__)
        const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        __m512i low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256((__m512i)ids));
        __m512i high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64((__m512i)ids, 1));
        u64x8 first = splitmix(key + (u64x8)low * kGolden), second = splitmix(key + (u64x8)high * kGolden);
        return (u32x16)_mm512_permutex2var_epi32((__m512i)first, odd, (__m512i)second);
#else
        u32x16 halves;
        for (int i = 0; i < kLanes; i++) halves[i] = uint32_t(hash(key, uint64_t(ids[i])) >> 32);
        return halves;
#endif
    }

    // A token with uniform u has the variate -log(1 - u) >= u, and u >= (high half) / 2^32.
    void run(f32x16 x, f32x16 w, i32x16 ids) {
        i32x16 kept = x >= warp.border;
        if (!mask_of(kept)) return;
        i32x16 hashed = ids;
        if (id_map)
            for (int i = 0; i < kLanes; i++) hashed[i] = id_map[ids[i]];
        f32x16 high = __builtin_convertvector(high_halves(hashed), f32x16);
        for (uint32_t mask = mask_of(kept & (high < w * bound)); mask; mask &= mask - 1) {
            int i = __builtin_ctz(mask);
            double other = score_of(x[i], ids[i]);
            if (other < score || (other == score && ids[i] >= id)) continue;
            score = other, id = ids[i];
            set_bound();
        }
    }
};

// Over the whole row; returns the weight of what is kept.
double race_row(Race &race, const float *x, long n) {
    i32x16 ids;
    for (int i = 0; i < kLanes; i++) ids[i] = i;
    Sum mass;
    for (long i = 0; i < n; i += kLanes, ids += int(kLanes)) {
        f32x16 vx = load_part(x + i, n - i, kNever);
        f32x16 w = weights(vx, race.warp);
        mass.add(vx >= race.warp.border ? w : f32x16{});
        race.run(vx, w, ids < int(n) ? ids : i32x16{});  // an id_map has no place past the end
    }
    return mass.value();
}

void race_candidates(Race &race, const Scratch &s) {
    for (long i = 0; i < s.count; i += kLanes) {
        long n = s.count - i;
        i32x16 ids;
        std::memcpy(&ids, s.ids.data() + i, sizeof ids);
        f32x16 x = load_part(s.candidates.x.data() + i, n, kNever);
        race.run(x, load_part(s.candidates.w.data() + i, n, 0), ids);
    }
}

// ---- one row --------------------------------------------------------------------------------

double total_weight(const float *x, long n, const Warp &warp) {
    Sum mass;
    for (long i = 0; i < n; i += kLanes) {
        f32x16 vx = load_part(x + i, n - i, kNever);
        mass.add(vx >= warp.border ? weights(vx, warp) : f32x16{});
    }
    return mass.value();
}

void sample_row(const Row &row, long n, const int32_t *id_map, int32_t *token, float *prob) {
    Top top = find_top(row.logits, n);
    int32_t id = top.id;
    double share = 1;
    if (!std::isfinite(top.value)) {
        // nothing to choose from: the lowest id, without arithmetic on infinities
    } else if (row.temperature == 0) {
        if (prob) share = 1 / total_weight(row.logits, n, Warp{top, -FLT_MAX, 1.0f, 0});
    } else {
        Scratch &s = scratch();
        Warp warp = warp_row(row, n, top, s);
        Race race(row, warp, id_map);
        if (has_border(row, n)) race_candidates(race, s);
        else warp.mass = race_row(race, row.logits, n);
        id = race.id;
        if (prob) share = std::exp((double(row.logits[id]) - top.value) / row.temperature) / warp.mass;
    }
    *token = id_map ? id_map[id] : id;
    if (prob) *prob = float(share);
}

void probs_row(const Row &row, long n, float *out) {
    Top top = find_top(row.logits, n);
    if (!std::isfinite(top.value) || row.temperature == 0) {
        std::fill(out, out + n, 0.0f);
        out[top.id] = 1.0f;
        return;
    }
    Warp warp = warp_row(row, n, top, scratch());
    if (!has_border(row, n)) warp.mass = total_weight(row.logits, n, warp);
    float inverse = float(1 / warp.mass);
    for (long i = 0; i < n; i += kLanes) {
        f32x16 x = load_part(row.logits + i, n - i, kNever);
        f32x16 p = x >= warp.border ? weights(x, warp) * inverse : f32x16{};
        std::memcpy(out + i, &p, std::min(n - i, kLanes) * sizeof(float));
    }
}

// ---- log probabilities of the raw model -----------------------------------------------------

// Place of a token when the highest logit comes first and equals go by id; 1 is the first.
int32_t rank_of(const float *x, long n, int32_t id) {
    long above = 0;
    for (long i = 0; i < n; i++) above += x[i] > x[id];
    for (long i = 0; i < id; i++) above += x[i] == x[id];
    return int32_t(above + 1);
}

// The chosen token, then the `count` most likely; ids of places that do not exist are -1.
void logprobs_row(const float *x, long n, int32_t chosen, long count, int32_t *ids, float *values,
                  int32_t *rank) {
    Top top = find_top(x, n);
    Warp warp{top, -FLT_MAX, 1.0f, 0};
    Scratch &s = scratch();
    s.fit(n);
    double total = count ? gather(x, n, warp, -FLT_MAX, top_k_cut(x, n, count), s)
                         : total_weight(x, n, warp);
    double log_total = double(top.value) + std::log(total);
    ids[0] = chosen;
    values[0] = float(x[chosen] - log_total);
    *rank = rank_of(x, n, chosen);
    if (!count) return;
    float border = kNever;
    if (s.count > count) border = find_kth(count, s);
    std::vector<int32_t> best;
    for (long i = 0; i < s.count; i++)
        if (s.candidates.x[i] >= border) best.push_back(s.ids[i]);
    std::stable_sort(best.begin(), best.end(), [&](int32_t i, int32_t j) { return x[i] > x[j]; });
    for (long i = 0; i < count; i++) {
        bool exists = i < long(best.size());
        ids[1 + i] = exists ? best[i] : -1;
        values[1 + i] = exists ? float(x[best[i]] - log_total) : 0;
    }
}

}  // namespace

void sample_one(const Row &row, long vocab, const int32_t *id_map, int32_t *token, float *prob) {
    sample_row(row, vocab, id_map, token, prob);
}

}  // namespace outrider

// A thread that has lost its core holds up a job for milliseconds; four rows of 49,152 take 80 µs.
static void for_rows(long n, long vocab, const std::function<void(long)> &body) {
    outrider::parallel_for(n, n * vocab < 1 << 18 ? n : 1, body);
}

// token_probs may be null; id_map (column -> id of the noise and of the answer) too.
extern "C" void outrider_sample(const outrider::Row *rows, long n, long vocab,
                                const int32_t *id_map, int32_t *tokens, float *token_probs) {
    for_rows(n, vocab, [=](long r) {
        if (rows[r].position < 0) tokens[r] = -1;  // nobody's row
        else outrider::sample_one(rows[r], vocab, id_map, tokens + r, token_probs ? token_probs + r : nullptr);
    });
}

extern "C" void outrider_target_probs(const outrider::Row *rows, long n, long vocab, float *out) {
    for_rows(n, vocab, [=](long r) { outrider::probs_row(rows[r], vocab, out + r * vocab); });
}

// ids and values are [n, 1 + count]: the chosen token first.
extern "C" void outrider_logprobs(const float *logits, long stride, long n, long vocab,
                                  const int32_t *chosen, long count, int32_t *ids, float *values,
                                  int32_t *ranks) {
    for_rows(n, vocab, [=](long r) {
        outrider::logprobs_row(logits + r * stride, vocab, chosen[r], count,
                               ids + r * (1 + count), values + r * (1 + count), ranks + r);
    });
}
