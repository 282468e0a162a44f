// Drafts that cost one forward of a drafter, in one call.
//
// Blocks (DFlash, DSpark): features of the new tokens become keys and values, a block of masks goes
// through the layers, and, where nothing but the most likely token is wanted, DSpark's sequential
// head chooses and its other head says how sure it is. Masks (P-EAGLE, PARD): the new rows of the
// text and masks behind them go through the layers together.
#include <numeric>
#include <vector>

#include "heads.h"
#include "kv.h"

namespace outrider {
namespace {

struct DraftJob {  // mirrored in outrider/drafters/native_draft.py
    void *model;
    const FuseJob *fuse;        // of features, its rows set here; null: rows are embeddings alone
    const FuseJob *confidence;  // likewise; null: nothing says how sure it is
    const MarkovJob *markov;    // likewise; null: logits and states are all that is wanted
    int requests, hidden, mask, block, first_slot, shift;
    const int *held, *lengths, *budgets;  // [requests]: rows of KV, tokens of text, tokens to say
    const int *last;   // [requests], the last token of each text
    const int *fresh;  // of masks: tokens of the new rows of all texts, `shift` behind their features
    const int *page_offsets, *pages;
    const float *features;       // [new rows of all][F]
    const float *mask_input;     // [H], what a mask has in place of fused features
    const float *token_chances;  // [tokens], what the token before adds to a confidence; or null
    float *context;              // scratch: [new rows of all][H]; of masks [new rows and all rows][H]
    float *states, *logits;      // [all budgets][H] and [..][columns]
    int *tokens;                 // [all budgets], chosen
    float *probs, *chances;      // [all budgets], of the chosen ones; logits of acceptance

    int fresh_rows(int b) const { return lengths[b] - shift - held[b]; }
    int all_fresh_rows() const {
        int sum = 0;
        for (int b = 0; b < requests; b++) sum += fresh_rows(b);
        return sum;
    }
};

// Rows that follow each other, `counts[b]` from position `starts[b]` on of each request.
struct Rows {
    std::vector<int> positions, row_starts{0}, parents, wanted;
    std::vector<uint8_t> is_tree;
    Batch batch{};

    Rows(const DraftJob &job, const int *starts, const std::vector<int> &counts) : is_tree(job.requests) {
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
    // Rows whose logits go to `job`, and where.
    void say(const DraftJob &job) {
        batch.logits_count = int(wanted.size());
        batch.logits_rows = wanted.data();
        batch.states = job.states;
        batch.logits = job.logits;
    }
};

// Fused features of the new rows, at the start of the scratch.
void fuse(const DraftJob &job) {
    FuseJob fuse = *job.fuse;
    fuse.rows = job.all_fresh_rows();
    fuse.x[0] = job.features;
    fuse.out = job.context;
    outrider_fuse(&fuse);
}

// Keys and values of the tokens that the drafter has not seen yet.
void take_in(const DraftJob &job) {
    std::vector<int> counts(job.requests);
    for (int b = 0; b < job.requests; b++) counts[b] = job.fresh_rows(b);
    Rows rows(job, job.held, counts);
    if (!rows.batch.rows) return;
    fuse(job);
    rows.batch.x = job.context;
    outrider_model_store_context(job.model, &rows.batch);
}

// The block of each request: its last token and masks, which all see each other.
void fill(const DraftJob &job) {
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
    rows.say(job);
    outrider_model_forward(job.model, &rows.batch);
}

void choose(const DraftJob &job, const std::vector<int> &starts) {
    MarkovJob markov = *job.markov;
    markov.chains = job.requests;
    markov.starts = starts.data();
    markov.before = job.last;
    markov.logits = job.logits;
    markov.tokens = job.tokens;
    markov.probs = job.probs;
    outrider_markov_choose(&markov);
}

void judge(const DraftJob &job, const std::vector<int> &starts) {
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

// The new rows of each text, and masks behind the last one that say what follows it.
void append_masks(const DraftJob &job) {
    const long H = job.hidden;
    std::vector<int> counts(job.requests), tokens;
    for (int b = 0, at = 0; b < job.requests; at += job.fresh_rows(b), b++) {
        counts[b] = job.fresh_rows(b) + job.budgets[b] - 1;
        tokens.insert(tokens.end(), job.fresh + at, job.fresh + at + job.fresh_rows(b));
        tokens.insert(tokens.end(), job.budgets[b] - 1, job.mask);
    }
    Rows rows(job, job.held, counts);
    if (job.fuse) {
        fuse(job);
        const float *fused = job.context;
        float *x = job.context + job.all_fresh_rows() * H;
        rows.batch.x = x;
        for (int b = 0; b < job.requests; b++) {
            x = std::copy_n(fused, job.fresh_rows(b) * H, x);
            fused += job.fresh_rows(b) * H;
            for (int i = 1; i < job.budgets[b]; i++) x = std::copy_n(job.mask_input, H, x);
        }
    }
    for (int b = 0; b < job.requests; b++)
        for (int i = job.budgets[b]; i > 0; i--) rows.wanted.push_back(rows.row_starts[b + 1] - i);
    rows.batch.tokens = tokens.data();
    rows.say(job);
    outrider_model_forward(job.model, &rows.batch);
}

}  // namespace
}  // namespace outrider

extern "C" {

void outrider_draft_block(const outrider::DraftJob *job) {
    using namespace outrider;
    take_in(*job);
    fill(*job);
    if (!job->markov) return;
    std::vector<int> starts(job->requests + 1);
    std::partial_sum(job->budgets, job->budgets + job->requests, starts.begin() + 1);
    choose(*job, starts);
    if (job->confidence) judge(*job, starts);
}
void outrider_draft_masks(const outrider::DraftJob *job) { outrider::append_masks(*job); }

}  // extern "C"
