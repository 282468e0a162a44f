// DSpark's sequential head: the bias on the logits of a slot is W2 times the row of W1 of the token
// chosen just before. A whole block of greedy choices is one job; W2 is read once per slot for all
// chains, and stays in the caches of the cores between slots.
#include <limits>
#include <vector>

#include "heads.h"
#include "multiply.h"
#include "pool.h"
#include "shares.h"

namespace outrider {
namespace {

const float kNever = -std::numeric_limits<float>::infinity();

// What each chunk of the columns adds to the softmax of a row, sixteen chunks side by side.
struct Parts {
    std::vector<float> tops, sums;  // sums of exp(logit - top)
    std::vector<int> columns;       // the first with the top
    explicit Parts(int chunks)
        : tops((chunks + kLanes - 1) / kLanes * kLanes, kNever), sums(tops.size()), columns(tops.size()) {}
};

// The logits, and the bias of a chunk on them; columns past the end are never chosen.
void add_bias(const float *logits, const float *bias, int n, int left, f32x16 (&sums)[2]) {
    for (int i = 0; i < 2; i++) {
        const bool is_there = i * kLanes < n;
        sums[i] = is_there ? load_part(logits + i * kLanes, left - i * kLanes, kNever) + load(bias + i * kLanes)
                           : splat(kNever);
    }
}

// A chunk as part of a row; without a number in it, its first column.
void note(Parts &parts, int chunk, const f32x16 (&x)[2], int column, bool with_sums) {
    const float top = reduce_max(max(x[0], x[1])), base = top == kNever ? 0.0f : top;
    const uint32_t is_top = mask_of(x[0] == top) | mask_of(x[1] == top) << kLanes;
    parts.tops[chunk] = top;
    if (with_sums) parts.sums[chunk] = reduce_add(exp(x[0] - base) + exp(x[1] - base));
    parts.columns[chunk] = column + (is_top ? __builtin_ctz(is_top) : 0);
}

struct Choice {
    int column;
    float prob;
};

Choice best_of(const Parts &parts) {
    const auto best = std::max_element(parts.tops.begin(), parts.tops.end());  // the first of equals
    f32x16 sums = {};
    for (size_t i = 0; i < parts.tops.size(); i += kLanes)
        sums = fma(exp(load(&parts.tops[i]) - *best), load(&parts.sums[i]), sums);
    return {parts.columns[best - parts.tops.begin()], 1.0f / reduce_add(sums)};
}

template <class E>
class Markov {
  public:
    explicit Markov(const MarkovJob &job)
        : job_(job), w2_{static_cast<const E *>(job.w2), job.columns, job.rank}, embedded_(long(job.chains) * job.rank) {
        for (int c = 0; c < job.chains; c++) embed(c, job.before[c]);
    }

    // Chooses the most likely token of slot after slot.
    void choose() {
        int steps = 0;
        for (int c = 0; c < job_.chains; c++) steps = std::max(steps, length(c));
        parts_.assign(job_.chains, Parts(w2_.chunks()));
        Shares shares(2 * steps, num_threads());
        on_all_threads([&](int thread) {
            for (int step = 0; step < steps; step++) {
                shares.run(2 * step, thread, w2_.chunks(), [&](int chunk) {
                    each_row(chunk, step, [&](int c, int column, float *, const f32x16(&sums)[2]) {
                        note(parts_[c], chunk, sums, column, job_.probs);
                    });
                });
                barrier();
                shares.run(2 * step + 1, thread, job_.chains, [&](int c) {
                    if (step < length(c)) take(c, step, best_of(parts_[c]));
                });
                barrier();
            }
        });
    }

    // Adds the bias of the first slots to their logits.
    void add() {
        parallel_for(w2_.chunks(), 1, [&](long chunk) {
            each_row(int(chunk), 0, [&](int, int column, float *logits, const f32x16(&sums)[2]) {
                std::memcpy(logits, sums, sizeof(float) * std::min(2 * kLanes, job_.columns - column));
            });
        });
    }

  private:
    int length(int chain) const { return job_.starts[chain + 1] - job_.starts[chain]; }

    void embed(int chain, int token) {
        std::copy_n(static_cast<const E *>(job_.w1) + long(token) * job_.rank, job_.rank,
                    &embedded_[long(chain) * job_.rank]);
    }

    // body(chain, column, logits, biased) for a chunk of the columns and every chain that has this slot.
    template <class Body>
    void each_row(int chunk, int step, const Body &body) {
        multiply_chunk(embedded_.data(), job_.chains, w2_, chunk, 0,
                       [&](int c, int column, const float *bias, int n) {
                           if (step >= length(c)) return;
                           float *logits = job_.logits + long(job_.starts[c] + step) * job_.columns + column;
                           f32x16 sums[2];
                           add_bias(logits, bias, n, job_.columns - column, sums);
                           body(c, column, logits, sums);
                       });
    }

    void take(int chain, int step, Choice choice) {
        const int row = job_.starts[chain] + step;
        job_.tokens[row] = job_.ids[choice.column];
        if (job_.probs) job_.probs[row] = choice.prob;
        embed(chain, job_.tokens[row]);
    }

    MarkovJob job_;
    Matrix<E> w2_;
    std::vector<E> embedded_;   // [chains][rank], of the token before
    std::vector<Parts> parts_;  // of each chain
};

}  // namespace
}  // namespace outrider

extern "C" {

void outrider_markov_choose(const outrider::MarkovJob *job) {
    if (job->is_bf16) outrider::Markov<outrider::bf16>(*job).choose();
    else outrider::Markov<float>(*job).choose();
}
void outrider_markov_add(const outrider::MarkovJob *job) {
    if (job->is_bf16) outrider::Markov<outrider::bf16>(*job).add();
    else outrider::Markov<float>(*job).add();
}

}  // extern "C"
