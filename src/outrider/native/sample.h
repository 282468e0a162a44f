// What one row of logits is sampled with.
#pragma once
#include <cstdint>

namespace outrider {

// The layout of ROW in target/rows.py.
struct Row {
    const float *logits;
    uint64_t noise_key;
    int64_t position;
    double temperature;  // 0: greedy
    double top_p;
    double min_p;
    int64_t top_k;  // 0: all
};

// One token, and its probability where that is not null, on the thread that calls. `id_map`, or
// null: column -> id of the noise and of the answer.
void sample_one(const Row &row, long vocab, const int32_t *id_map, int32_t *token, float *prob);

}  // namespace outrider
