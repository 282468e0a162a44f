// The border of top-k and top-p: the largest value whose own and larger values weigh enough.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "vec.h"

namespace outrider {

constexpr float kNever = -INFINITY;
constexpr long kLanes = 16;
constexpr long kSpan = 64 * kLanes;  // floats summed in single precision before going to double

// ---- sixteen lanes with a mask --------------------------------------------------------------

// Writes the lanes in mask one after the other (and may write up to `to + 16`); returns how many.
template <class T, class V>
inline long compress(T *to, V v, uint32_t mask) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(__mmask16(mask), (__m512i)v));
    return __builtin_popcount(mask);
#else
    long n = 0;
    for (int i = 0; i < kLanes; i++) {
        to[n] = v[i];
        n += mask >> i & 1;
    }
    return n;
#endif
}

// A sum in a fixed order: single precision over a short span, double over the spans.
struct Sum {
    f32x16 lanes{};
    double total = 0;
    int n = 0;
    void add(f32x16 v) {
        lanes += v;
        if (++n == kSpan / kLanes) flush();
    }
    void flush() {
        total += double(reduce_add(lanes));
        lanes = f32x16{};
        n = 0;
    }
    double value() {
        flush();
        return total;
    }
};

// ---- the border -----------------------------------------------------------------------------

constexpr long kSmall = 32;    // so few values are sorted
constexpr long kSample = 128;  // so many are looked at to guess where the border of a long list is
constexpr long kMargin = 16;   // of them on either side: about 2.8 standard deviations

inline float smallest_border(const float *x, const float *w, long n, double missing) {
    int order[kSmall];
    for (int i = 0; i < n; i++) order[i] = i;
    std::sort(order, order + n, [&](int i, int j) { return x[i] > x[j]; });
    double mass = 0;
    for (long i = 0; i < n; i++) {
        mass += w[order[i]];
        bool last_of_equals = i + 1 == n || x[order[i + 1]] != x[order[i]];
        if (last_of_equals && mass >= missing) return x[order[i]];
    }
    return x[order[n - 1]];
}

struct Parts {
    double high_mass = 0;
    long high = 0, low = 0;  // sizes
};

struct Buffer {
    std::vector<float> x, w;
    void fit(long n) {
        if (long(x.size()) < n + kLanes) x.resize(n + kLanes), w.resize(n + kLanes);
    }
};

// Splits (x, w) into x >= pivot and the rest. `high` may be the input itself.
inline Parts split(const float *x, const float *w, long n, float pivot, Buffer &high, Buffer &low) {
    Parts parts;
    Sum mass;
    for (long i = 0; i < n; i += kLanes) {
        f32x16 vx = load_part(x + i, n - i, kNever), vw = load_part(w + i, n - i, 0);
        i32x16 above = vx >= pivot;
        mass.add(above ? vw : f32x16{});
        uint32_t mask = mask_of(above), valid = n - i >= kLanes ? 0xffff : (1u << (n - i)) - 1;
        compress(high.w.data() + parts.high, vw, mask);
        compress(low.w.data() + parts.low, vw, valid & ~mask);
        parts.high += compress(high.x.data() + parts.high, vx, mask);
        parts.low += compress(low.x.data() + parts.low, vx, valid & ~mask);
    }
    parts.high_mass = mass.value();
    return parts;
}

// Two values between which the border probably lies, from a sample.
inline std::pair<float, float> guess(const float *x, const float *w, long n, double share) {
    std::pair<float, float> sample[kSample];
    double total = 0, mass = 0;
    for (long i = 0; i < kSample; i++) {
        sample[i] = {x[i * n / kSample], w[i * n / kSample]};
        total += sample[i].second;
    }
    std::sort(sample, sample + kSample, [](auto a, auto b) { return a.first > b.first; });
    long at = 0;
    while (at < kSample - 1 && (mass += sample[at].second) < share * total) at++;
    return {at + kMargin < kSample ? sample[at + kMargin].first : kNever,
            at >= kMargin ? sample[at - kMargin].first : INFINITY};
}

// Keeps low <= x < high in `between`; returns the weight of x >= high and that of what it kept.
inline std::pair<double, double> narrow(const float *x, const float *w, long n, float low,
                                        float high, Buffer &between, long &count) {
    Sum above, inside;
    count = 0;
    for (long i = 0; i < n; i += kLanes) {
        f32x16 vx = load_part(x + i, n - i, kNever), vw = load_part(w + i, n - i, 0);
        above.add(vx >= high ? vw : f32x16{});
        i32x16 kept = (vx >= low) & (vx < high);
        inside.add(kept ? vw : f32x16{});
        uint32_t mask = mask_of(kept), valid = n - i >= kLanes ? 0xffff : (1u << (n - i)) - 1;
        compress(between.w.data() + count, vw, mask & valid);
        count += compress(between.x.data() + count, vx, mask & valid);
    }
    return {above.value(), inside.value()};
}

// The largest t among x for which the weights of {x >= t} reach `target`; the smallest x where
// none does. `mass` is about the sum of w. Buffers must hold n. A long list is narrowed around a
// guess; then the range of values is halved until few are left, so equal values end it too.
inline float find_border(const float *x, const float *w, long n, double target, double mass,
                         Buffer &a, Buffer &b) {
    double missing = target;  // less what is known to be above the range
    Buffer *high = &a, *low = &b;
    if (n > 16 * kSample) {
        auto [from, to] = guess(x, w, n, target / mass);
        long count;
        auto [above, inside] = narrow(x, w, n, from, to, b, count);
        if (above < missing && above + inside >= missing) {
            missing -= above;
            n = count, x = b.x.data(), w = b.w.data();
            std::swap(high, low);
        }
    }
    while (n > kSmall) {
        f32x16 vmin = splat(INFINITY), vmax = splat(kNever);
        for (long i = 0; i < n; i += kLanes) {
            vmin = -max(-load_part(x + i, n - i, INFINITY), -vmin);
            vmax = max(load_part(x + i, n - i, kNever), vmax);
        }
        float least = -reduce_max(-vmin), most = reduce_max(vmax);
        if (least == most) return least;
        float pivot = 0.5f * least + 0.5f * most;
        if (!(pivot > least)) pivot = most;
        Parts parts = split(x, w, n, pivot, *high, *low);
        if (parts.high_mass >= missing) {
            n = parts.high;
        } else {
            missing -= parts.high_mass;
            n = parts.low;
            std::swap(high, low);
        }
        x = high->x.data(), w = high->w.data();
    }
    return smallest_border(x, w, n, missing);
}

}  // namespace outrider
