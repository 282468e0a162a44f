// A whole draft in one call.
//
// Blocks (DFlash, DSpark): features of the new tokens become keys and values, a block of masks goes
// through the layers, and, where nothing but the most likely token is wanted, DSpark's sequential
// head chooses and its other head says how sure it is. Masks (P-EAGLE, PARD): the new rows of the
// text and masks behind them go through the layers together. Chains (EAGLE-3, MTP): one row per token,
// made from the state before it and the token just chosen.
#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "heads.h"
#include "kv.h"
#include "pool.h"
#include "sample.h"
#include "vec.h"

namespace outrider {
namespace {

struct DraftJob {  // mirrored in outrider/drafters/native_draft.py
    void *model;
    const FuseJob *fuse;        // of features, or of embeddings and states; its rows are set here;
                                // null: rows are embeddings alone
    const FuseJob *confidence;  // likewise; null: nothing says how sure it is
    const MarkovJob *markov;    // likewise; null: nothing to add to the logits before a choice
    int requests, hidden, columns, mask, first_slot, shift;
    const int *held, *lengths, *budgets;  // [requests]: rows of KV, tokens of text, tokens to say
    const int *last;   // [requests], the last token of each text
    const int *fresh;  // tokens of the new rows of all texts, `shift` behind their features; of blocks unused
    const int *ids;    // [columns], the token of each column; null: nothing is to be chosen
    const Row *rows;   // [all budgets], how to sample, logits not set; null: the most likely tokens
    const int *page_offsets, *pages;
    const float *features;       // [new rows of all][F]
    const float *mask_input;     // [H], what a mask has in place of fused features
    const float *token_chances;  // [tokens], what the token before adds to a confidence; or null
    float *context;              // scratch, [rows][H]: new rows; of masks twice these, and the masks;
                                 // of chains twice the new rows
    float *states, *logits;      // [all budgets][H] and [..][columns]; of chains [requests]
    int *tokens;                 // [all budgets], chosen
    float *probs, *chances;      // [all budgets], of the chosen ones, or else logits of acceptance

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

    Rows(const DraftJob &job, const int *starts, const std::vector<int> &counts) : is_tree(counts.size()) {
        for (int b = 0; b < int(counts.size()); b++) {
            for (int i = 0; i < counts[b]; i++) {
                positions.push_back(starts[b] + i);
                parents.push_back(i - 1);
            }
            row_starts.push_back(int(positions.size()));
        }
        batch.rows = row_starts.back();
        batch.requests = int(counts.size());
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

// The most likely column, the first of equals, and its probability.
struct Choice {
    int column;
    float prob;
};
Choice most_likely(const float *logits, int columns) {
    const float never = -std::numeric_limits<float>::infinity();
    f32x16 tops = splat(never), sums = {};
    for (int i = 0; i < columns; i += kLanes) tops = max(tops, load_part(logits + i, columns - i, never));
    const float top = reduce_max(tops);
    for (int i = 0; i < columns; i += kLanes) sums += exp(load_part(logits + i, columns - i, never) - top);
    const float *found = std::find(logits, logits + columns, top);
    return {found == logits + columns ? 0 : int(found - logits), 1.0f / reduce_add(sums)};
}

// The token of a row of logits, sampled or the most likely one, at its place.
void pick(const DraftJob &job, int row, int place) {
    const float *logits = job.logits + long(row) * job.columns;
    if (job.rows) {
        Row sampled = job.rows[place];
        sampled.logits = logits;
        sample_one(sampled, job.columns, job.ids, job.tokens + place, job.probs + place);
        return;
    }
    const Choice choice = most_likely(logits, job.columns);
    job.tokens[place] = job.ids[choice.column];
    job.probs[place] = choice.prob;
}

void pick_all(const DraftJob &job) {
    const int rows = std::accumulate(job.budgets, job.budgets + job.requests, 0);
    parallel_for(rows, 1, [&](long row) { pick(job, int(row), int(row)); });
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

// The block of each request: its last token and masks, up to the last one wanted, which all see
// each other.
void fill(const DraftJob &job) {
    std::vector<int> starts(job.requests), counts(job.requests), tokens;
    for (int b = 0; b < job.requests; b++) {
        starts[b] = job.lengths[b] - 1;
        counts[b] = job.first_slot + job.budgets[b];
        tokens.push_back(job.last[b]);
        tokens.insert(tokens.end(), counts[b] - 1, job.mask);
    }
    Rows rows(job, starts.data(), counts);
    for (int b = 0; b < job.requests; b++)
        for (int i = job.budgets[b]; i > 0; i--) rows.wanted.push_back(rows.row_starts[b + 1] - i);
    rows.batch.tokens = tokens.data();
    rows.batch.two_way = 1;
    rows.say(job);
    outrider_model_forward(job.model, &rows.batch);
}

// Slot after slot, each with the bias of the token sampled before it.
void sample_in_turn(const DraftJob &job, const std::vector<int> &starts) {
    for (int slot = 0; slot < *std::max_element(job.budgets, job.budgets + job.requests); slot++) {
        std::vector<int> rows, told;
        for (int b = 0; b < job.requests; b++)
            if (slot < job.budgets[b]) {
                rows.push_back(starts[b] + slot);
                told.push_back(slot ? job.tokens[rows.back() - 1] : job.last[b]);
            }
        const int count = int(rows.size());
        std::vector<int> ends(rows);
        ends.push_back(rows.back() + 1);
        MarkovJob markov = *job.markov;
        markov.chains = count;
        markov.starts = ends.data();
        markov.before = told.data();
        markov.logits = job.logits;
        outrider_markov_add(&markov);
        parallel_for(count, 1, [&](long i) { pick(job, rows[i], rows[i]); });
    }
}

void choose(const DraftJob &job, const std::vector<int> &starts) {
    if (job.rows) return sample_in_turn(job, starts);
    MarkovJob markov = *job.markov;
    markov.chains = job.requests;
    markov.starts = starts.data();
    markov.before = job.last;
    markov.logits = job.logits;
    markov.tokens = job.tokens;
    markov.probs = job.confidence ? nullptr : job.probs;
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

// One row per request and depth. `going` are the requests that want another token.
class Chain {
  public:
    explicit Chain(const DraftJob &job) : job_(job), going_(job.requests), at_(job.requests + 1) {
        std::iota(going_.begin(), going_.end(), 0);
        std::partial_sum(job.budgets, job.budgets + job.requests, at_.begin() + 1);
    }

    void draft() {
        first_rows();
        for (int depth = 1; depth < *std::max_element(job_.budgets, job_.budgets + job_.requests); depth++)
            next_row(depth);
    }

  private:
    bool joins_tokens() const { return job_.fuse->parts == 2; }

    // Input of the layers: fused features, or tokens joined with features or states.
    const float *input(const std::vector<int> &tokens, const float *from) {
        if (!joins_tokens() && from != job_.features) return from;  // a state stands for fused features
        const int rows = int(tokens.size());
        FuseJob fuse = *job_.fuse;
        fuse.rows = rows;
        fuse.x[0] = from;
        fuse.out = job_.context;
        if (joins_tokens()) {
            float *embedded = job_.context + long(rows) * job_.hidden;
            outrider_model_embed(job_.model, tokens.data(), rows, embedded);
            fuse.x[0] = embedded;
            fuse.x[1] = from;
        }
        outrider_fuse(&fuse);
        return job_.context;
    }

    void run(Rows &rows, const std::vector<int> &tokens, const float *x, int depth) {
        rows.batch.tokens = tokens.data();
        rows.batch.x = x;
        rows.say(job_);
        outrider_model_forward(job_.model, &rows.batch);
        for (size_t i = 0; i < going_.size(); i++) pick(job_, int(i), at_[going_[i]] + depth);
    }

    void first_rows() {
        std::vector<int> counts(job_.requests);
        for (int b = 0; b < job_.requests; b++) counts[b] = job_.fresh_rows(b);
        Rows rows(job_, job_.held, counts);
        for (int b = 0; b < job_.requests; b++) rows.wanted.push_back(rows.row_starts[b + 1] - 1);
        const std::vector<int> tokens(job_.fresh, job_.fresh + rows.batch.rows);
        run(rows, tokens, input(tokens, job_.features), 0);
    }

    void next_row(int depth) {
        std::vector<float> states;
        std::vector<int> still, starts, tokens, offsets;
        for (size_t i = 0; i < going_.size(); i++) {
            const int b = going_[i];
            if (job_.budgets[b] <= depth) continue;
            still.push_back(b);
            starts.push_back(job_.lengths[b] - 1 - job_.shift + depth);
            tokens.push_back(job_.tokens[at_[b] + depth - 1]);
            offsets.push_back(job_.page_offsets[b]);
            states.insert(states.end(), job_.states + i * job_.hidden, job_.states + (i + 1) * job_.hidden);
        }
        going_ = still;
        Rows rows(job_, starts.data(), std::vector<int>(still.size(), 1));
        rows.batch.page_offsets = offsets.data();
        rows.wanted.resize(still.size());
        std::iota(rows.wanted.begin(), rows.wanted.end(), 0);
        run(rows, tokens, input(tokens, states.data()), depth);
    }

    const DraftJob &job_;
    std::vector<int> going_, at_;  // and where the tokens of each request begin
};

}  // namespace
}  // namespace outrider

extern "C" {

void outrider_draft_block(const outrider::DraftJob *job) {
    using namespace outrider;
    take_in(*job);
    fill(*job);
    if (!job->ids) return;
    std::vector<int> starts(job->requests + 1);
    std::partial_sum(job->budgets, job->budgets + job->requests, starts.begin() + 1);
    if (job->markov) choose(*job, starts);
    else pick_all(*job);
    if (job->confidence) judge(*job, starts);
}
void outrider_draft_masks(const outrider::DraftJob *job) {
    outrider::append_masks(*job);
    if (job->ids) outrider::pick_all(*job);
}
void outrider_draft_chain(const outrider::DraftJob *job) { outrider::Chain(*job).draft(); }

}  // extern "C"
