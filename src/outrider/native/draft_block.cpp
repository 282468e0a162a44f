// A draft of DFlash and DSpark in one call: features of the new tokens become keys and values, a
// block of masks goes through the layers, and, where nothing but the most likely token is wanted,
// DSpark's sequential head chooses and its other head says how sure it is.
#include <numeric>
#include <vector>

#include "heads.h"
#include "kv.h"

namespace outrider {
namespace {

struct BlockJob {  // mirrored in outrider/drafters/native_block.py
    void *model;
    const FuseJob *fuse, *confidence;  // their rows, inputs and outputs are set here
    const MarkovJob *markov;           // likewise; null: logits and states are all that is wanted
    int requests, block, first_slot, mask, hidden;
    const int *held, *lengths, *budgets;  // [requests]: rows of KV, tokens of text, tokens to say
    const int *last;                      // [requests], the last token of each text
    const int *page_offsets, *pages;
    const float *features;       // [new tokens of all][F]
    const float *token_chances;  // [tokens], what the token before adds to a confidence; or null
    float *context;              // [new tokens of all][H], scratch
    float *states, *logits;      // [all budgets][H] and [..][columns]
    int *tokens;                 // [all budgets], chosen
    float *probs, *chances;      // [all budgets], of the chosen ones; logits of acceptance
};

// Rows that follow each other, `counts[b]` from position `starts[b]` on of each request.
struct Rows {
    std::vector<int> positions, row_starts{0}, parents, wanted;
    std::vector<uint8_t> is_tree;
    Batch batch{};

    Rows(const BlockJob &job, const int *starts, const std::vector<int> &counts) : is_tree(job.requests) {
        for (int b = 0; b < job.requests; b++) {
            for (int i = 0; i < counts[b]; i++) {
                positions.push_back(starts[b] + i);
                parents.push_back(i - 1);
            }
            row_starts.push_back(int(positions.size()));
        }
        batch.rows = row_starts.back();
        batch.requests = job.requests;
        batch.positions = positions.data();
        batch.row_starts = row_starts.data();
        batch.context_lens = starts;
        batch.page_offsets = job.page_offsets;
        batch.pages = job.pages;
        batch.parents = parents.data();
        batch.is_tree = is_tree.data();
    }
};

// Keys and values of the tokens that the drafter has not seen yet.
void take_in(const BlockJob &job) {
    std::vector<int> counts(job.requests);
    for (int b = 0; b < job.requests; b++) counts[b] = job.lengths[b] - 1 - job.held[b];
    Rows rows(job, job.held, counts);
    if (!rows.batch.rows) return;
    FuseJob fuse = *job.fuse;
    fuse.rows = rows.batch.rows;
    fuse.x[0] = job.features;
    fuse.out = job.context;
    outrider_fuse(&fuse);
    rows.batch.x = job.context;
    outrider_model_store_context(job.model, &rows.batch);
}

// The block of each request: its last token and masks, which all see each other.
void fill(const BlockJob &job) {
    std::vector<int> starts(job.requests), tokens(long(job.requests) * job.block, job.mask);
    for (int b = 0; b < job.requests; b++) {
        starts[b] = job.lengths[b] - 1;
        tokens[long(b) * job.block] = job.last[b];
    }
    Rows rows(job, starts.data(), std::vector<int>(job.requests, job.block));
    for (int b = 0; b < job.requests; b++)
        for (int i = 0; i < job.budgets[b]; i++) rows.wanted.push_back(b * job.block + job.first_slot + i);
    rows.batch.tokens = tokens.data();
    rows.batch.two_way = 1;
    rows.batch.logits_count = int(rows.wanted.size());
    rows.batch.logits_rows = rows.wanted.data();
    rows.batch.states = job.states;
    rows.batch.logits = job.logits;
    outrider_model_forward(job.model, &rows.batch);
}

void choose(const BlockJob &job, const std::vector<int> &starts) {
    MarkovJob markov = *job.markov;
    markov.chains = job.requests;
    markov.starts = starts.data();
    markov.before = job.last;
    markov.logits = job.logits;
    markov.tokens = job.tokens;
    markov.probs = job.probs;
    outrider_markov_choose(&markov);
}

void judge(const BlockJob &job, const std::vector<int> &starts) {
    FuseJob confidence = *job.confidence;
    confidence.rows = starts.back();
    confidence.x[0] = job.states;
    confidence.out = job.chances;
    outrider_fuse(&confidence);
    if (!job.token_chances) return;
    for (int b = 0; b < job.requests; b++)
        for (int i = 0; i < job.budgets[b]; i++) {
            const int row = starts[b] + i;
            job.chances[row] += job.token_chances[i ? job.tokens[row - 1] : job.last[b]];
        }
}

}  // namespace
}  // namespace outrider

extern "C" void outrider_draft_block(const outrider::BlockJob *job) {
    using namespace outrider;
    take_in(*job);
    fill(*job);
    if (!job->markov) return;
    std::vector<int> starts(job->requests + 1);
    std::partial_sum(job->budgets, job->budgets + job->requests, starts.begin() + 1);
    choose(*job, starts);
    if (job->confidence) judge(*job, starts);
}
