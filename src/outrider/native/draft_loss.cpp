// Loss of a drafter's guesses against the target's distribution, and its slope, in one pass over
// each row while it is in the cache. Plain torch reads and writes the rows some twenty times.
#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace outrider {
namespace {

struct LossJob {  // mirrored in outrider/training/losses.py
    const void *logits;         // [R][U], the drafter's
    const void *target_logits;  // [P][U], of places; several rows may share one
    const float *log_sums;      // [P], over the target's whole vocabulary
    const int64_t *places;      // [R], row of target_logits
    const int64_t *labels;      // [R], the text's token; -1: not in the drafter's vocabulary
    const float *shares;        // [R], weight of the row
    void *slopes;               // [R][U]
    float *terms;               // [R][4]: ce, kl, tv, and the best column as a number
    float ce, kl, tv;
    long rows, columns;
};

template <class E>
void one_row(const LossJob &job, long row, std::vector<float> &buffer) {
    const long U = job.columns;
    const E *logits = static_cast<const E *>(job.logits) + row * U;
    const E *target = static_cast<const E *>(job.target_logits) + job.places[row] * U;
    float *draft = buffer.data(), *wanted = draft + U;
    f32x16 tops = splat(-std::numeric_limits<float>::infinity());
    for (long i = 0; i < U; i += 16) tops = max(tops, load(logits + i));
    const float top = reduce_max(tops);
    long best = 0;
    while (to_float(logits[best]) < top && best < U - 1) best++;

    const float log_sum = job.log_sums[job.places[row]];
    f32x16 sums = {}, wanted_sums = {}, weighted = {};
    for (long i = 0; i < U; i += 16) {
        f32x16 z = load(logits + i) - top, e = exp(z), p = exp(load(target + i) - log_sum);
        sums += e;
        wanted_sums += p;
        weighted = fma(p, z, weighted);
        store(draft + i, e);
        store(wanted + i, p);
    }
    const float sum = reduce_add(sums), log_of_sum = std::log(sum), mass = reduce_add(wanted_sums);
    const f32x16 scale = splat(1.0f / sum);
    f32x16 distance = {}, signed_mass = {};
    for (long i = 0; i < U; i += 16) {
        f32x16 q = load(draft + i) * scale, gap = q - load(wanted + i);
        f32x16 sign = gap > 0.0f ? splat(0.5f) : splat(-0.5f);
        distance = fma(gap, sign, distance);  // half of |gap|
        signed_mass = fma(q, sign, signed_mass);
        store(draft + i, q);
    }
    const int64_t label = job.labels[row];
    float *terms = job.terms + row * 4;
    terms[0] = label < 0 ? 0.0f : log_of_sum + top - to_float(logits[label]);
    terms[1] = mass * log_of_sum - reduce_add(weighted);
    terms[2] = reduce_add(distance) + 0.5f * std::max(0.0f, 1.0f - mass);
    terms[3] = float(best);

    const float share = job.shares[row], ce = label < 0 ? 0.0f : job.ce;
    const float mean = reduce_add(signed_mass);
    E *slopes = static_cast<E *>(job.slopes) + row * U;
    for (long i = 0; i < U; i += 16) {
        f32x16 q = load(draft + i), p = load(wanted + i);
        f32x16 sign = q > p ? splat(0.5f) : splat(-0.5f);
        f32x16 slope = q * (ce + job.kl * mass + job.tv * (sign - mean)) - p * job.kl;
        store(slopes + i, slope * share);
    }
    if (ce > 0.0f) store(slopes + label, to_float(slopes[label]) - share * ce);
}

template <class E>
void all_rows(const LossJob &job) {
    parallel_for((job.rows + 15) / 16, 1, [&](long chunk) {
        thread_local std::vector<float> buffer;
        buffer.resize(2 * job.columns);
        const long end = std::min(job.rows, 16 * (chunk + 1));
        for (long row = 16 * chunk; row < end; row++) one_row<E>(job, row, buffer);
    });
}

}  // namespace
}  // namespace outrider

extern "C" {

// Columns must be a multiple of 16.
void outrider_draft_loss(int is_bf16, const outrider::LossJob *job) {
    if (is_bf16) outrider::all_rows<outrider::bf16>(*job);
    else outrider::all_rows<float>(*job);
}

}  // extern "C"
