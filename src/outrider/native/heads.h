// What a drafter computes around its layers, as jobs for one call each.
#pragma once

namespace outrider {

struct Batch;

constexpr int kParts = 2;

struct FuseJob {  // mirrored in outrider/drafters/native_heads.py; null pointers: not there
    int rows, parts, outputs, is_bf16;
    float epsilon;
    int widths[kParts];          // multiples of 16
    const float *x[kParts];      // [rows][width]
    const float *norms[kParts];  // [width]
    const void *weights;         // packed, inputs = all widths
    const float *bias;           // [outputs]
    const float *last_norm;      // [outputs], of the results
    float *out;                  // [rows][outputs]

    int inputs() const {
        int sum = 0;
        for (int p = 0; p < parts; p++) sum += widths[p];
        return sum;
    }
};

struct MarkovJob {  // mirrored in outrider/drafters/native_heads.py
    int chains, columns, rank, is_bf16;
    const int *starts;    // [chains + 1], rows of each chain's slots
    const int *before;    // [chains], the token before the first slot
    const int *ids;       // [columns], the token of each column
    const void *w1, *w2;  // [tokens][rank]; packed, `columns` outputs
    float *logits;        // [rows][columns]
    int *tokens;          // [rows], chosen
    float *probs;         // [rows], of the chosen ones; null: not wanted
};

}  // namespace outrider

extern "C" {
void outrider_fuse(const outrider::FuseJob *job);
void outrider_markov_choose(const outrider::MarkovJob *job);
void outrider_markov_add(const outrider::MarkovJob *job);
void outrider_model_forward(void *model, const outrider::Batch *batch);
void outrider_model_store_context(void *model, const outrider::Batch *batch);
void outrider_model_embed(void *model, const int *tokens, int count, float *out);
}
