// Lookup in draft tables: the drafts of a whole batch in one call.
//
// Requests take their steps together: first all ask memory for the filter blocks they need, then
// all for their bucket, then all read it, so that cache misses of different requests overlap.
#include "table.h"

#include <algorithm>
#include <vector>

namespace outrider::table {
namespace {

constexpr int kMaxWidth = 64, kMaxBranches = 4;
// Keys that are asked for one context. A second one brings 1.5 % more tokens per step with two
// branches and 3 % with three; a third brings nothing and takes 1.5 µs of a draft of 8 tokens.
constexpr int kMaxKeys = 2;

// What a batch of lookups reads and writes; the layout is that of `_Call` in tables/lookup.py.
struct Call {
    const uint8_t *hot, *cold;  // buckets [0, num_hot) are read from `hot`, the others from `cold`
    Region regions[2];          // the contexts used most, and the others
    uint64_t num_hot;
    uint64_t *answered;          // [3] added to: lookups answered by the hot tier, by the cold one, not at all
    const float *table;          // [kCells] usual confidence
    const int32_t *contexts;     // [n][max_key] last tokens, the very last first; -1: no more
    const int32_t *budgets;      // [n]
    const float *factors;        // [n] how much more often than usual drafts of the request fail
    int32_t *tokens, *parents;   // [n][width] out
    int32_t *cells;              // [n][width] out
    float *confidence;           // [n][width] out
    int32_t *lengths;            // [n] out: draft tokens
    int32_t key_lengths[kMaxKey];  // ascending, 0 after the last
    int32_t max_key, hash_bits, token_bytes, width, branches;
    float min_survival;  // of the tokens of a draft
};

struct Candidate {
    float survival, confidence;
    int32_t token, parent, cell;
};

// One request on its way: nodes that are in the draft, and continuations that may come into it.
struct Walk {
    Candidate candidates[kMaxBranches * (kMaxWidth + 1)];
    float survival[kMaxWidth];
    uint64_t hashes[kMaxKey];
    int num_candidates, num_nodes, budget;
    int level;      // of the key that is being looked up
    int node;       // whose continuations are looked for; -1: the context itself
    bool is_active;
};

class Batch {
public:
    Batch(const Call &call, int32_t n, std::vector<Walk> &walks) : call(call), walks(walks), n(n), shape{call.token_bytes} {
        while (num_levels < kMaxKey && call.key_lengths[num_levels]) num_levels++;
    }

    void run() {
        for (int i = 0; i < n; i++) start(i);
        for (bool any = true; any;) {
            any = false;
            for (int i = 0; i < n; i++) if (walks[i].is_active) hash(i);
            for (int i = 0; i < n; i++) if (walks[i].is_active) find(walks[i]);
            for (int i = 0; i < n; i++) if (walks[i].is_active) any |= expand(i);
        }
        for (int i = 0; i < n; i++) call.lengths[i] = walks[i].num_nodes;
    }

private:
    const Call &call;
    std::vector<Walk> &walks;
    const int n;
    const SlotShape shape;
    int num_levels = 0;

    void start(int i) {
        Walk &walk = walks[i];
        walk.num_candidates = walk.num_nodes = 0;
        walk.budget = std::min(call.budgets[i], call.width);
        walk.node = -1;
        walk.is_active = walk.budget > 0;
    }

    // Hashes of the context of the current node by key length; asks for their filter blocks.
    void hash(int i) {
        Walk &walk = walks[i];
        const int32_t *parents = call.parents + int64_t(i) * call.width, *tokens = call.tokens + int64_t(i) * call.width;
        const int32_t *context = call.contexts + int64_t(i) * call.max_key;
        ContextHash state;
        walk.level = -1;
        int node = walk.node;
        for (int level = 0; level < num_levels; level++) {
            while (state.length < call.key_lengths[level]) {
                const int32_t token = node >= 0 ? tokens[node] : *context++;
                if (token < 0) return;
                state.push(token);
                if (node >= 0) node = parents[node];
            }
            walk.level = level;
            walk.hashes[level] = state.value() >> (kHashBits - call.hash_bits);
            for (const Region &region : call.regions) __builtin_prefetch(block(region, walk.hashes[level]));
        }
    }

    const uint32_t *block(const Region &region, uint64_t hash) const {
        return region.filter + kBlockWords * block_of(hash, call.hash_bits, region.num_blocks);
    }
    bool is_in(const Region &region, uint64_t hash) const { return may_hold(block(region, hash), hash); }

    const uint8_t *bucket_of(const Region &region, const Place &place) const {
        const uint64_t bucket = region.first_bucket + place.bucket;
        return (bucket < call.num_hot ? call.hot : call.cold) + bucket * kBucketBytes;
    }

    // The longest key that the filter lets pass; asks for its bucket, and with several branches
    // for that of the next one too, which may have to fill them up.
    void find(Walk &walk) const {
        int wanted = std::min(kMaxKeys, call.branches);
        int longest = -1;
        for (int level = walk.level; level >= 0 && wanted > 0; level--) {
            const uint64_t hash = walk.hashes[level];
            for (const Region &region : call.regions) {
                if (!is_in(region, hash)) continue;
                const uint8_t *bucket = bucket_of(region, place_of(hash, call.hash_bits, region.num_buckets));
                __builtin_prefetch(bucket);
                __builtin_prefetch(bucket + 64);
                longest = std::max(longest, level);
                wanted--;
                break;
            }
        }
        walk.level = longest;
    }

    // Reads the continuations of the current node and takes the best candidate into the draft.
    // Where the longest key has too few, the next one adds its own, for the case that it fails.
    bool expand(int i) {
        Walk &walk = walks[i];
        const int first = walk.num_candidates;
        int tier = 2;
        for (int keys = 0; walk.level >= 0 && keys < kMaxKeys && walk.num_candidates - first < call.branches; walk.level--) {
            const uint64_t hash = walk.hashes[walk.level];
            for (const Region &region : call.regions) {
                if (!is_in(region, hash)) continue;
                const Place place = place_of(hash, call.hash_bits, region.num_buckets);
                if (!collect(walk, first, bucket_of(region, place), place.tag, call.factors[i])) continue;
                if (!keys++) tier = region.first_bucket + place.bucket >= call.num_hot;
                break;
            }
        }
        call.answered[tier]++;
        return walk.is_active = take(i);
    }

    bool collect(Walk &walk, int first, const uint8_t *bucket, uint32_t tag, float factor) const {
        const float survival = walk.node < 0 ? 1.0f : walk.survival[walk.node];
        const int before = walk.num_candidates;
        float left = 1;  // chance that none of the longer keys' continuations is right
        for (int c = first; c < before; c++) left -= walk.candidates[c].confidence;
        left = std::max(0.0f, left);
        bool is_there = false;
        for (int s = 0; s < shape.per_bucket() && walk.num_candidates - first < call.branches; s++) {
            const Slot slot = shape.read(bucket, s);
            if (!slot.count) break;
            if (slot.tag != tag) continue;
            is_there = true;
            if (std::any_of(walk.candidates + first, walk.candidates + before, [&](auto &c) { return c.token == int32_t(slot.token); }))
                continue;
            const int cell = cell_of(call.key_lengths[walk.level], unpacked(slot.count), unpacked(slot.total));
            const float failure = (1 - call.table[cell]) * factor;
            const float confidence = left * (1 - std::min(0.98f, std::max(0.005f, failure)));
            walk.candidates[walk.num_candidates++] = {survival * confidence, confidence, int32_t(slot.token), walk.node,
                                                      before > first ? -1 : cell};
        }
        return is_there;
    }

    bool take(int i) {
        Walk &walk = walks[i];
        int best = -1;
        for (int c = 0; c < walk.num_candidates; c++)
            if (best < 0 || walk.candidates[c].survival > walk.candidates[best].survival) best = c;
        if (best < 0 || walk.candidates[best].survival < call.min_survival) return false;
        const Candidate chosen = walk.candidates[best];
        walk.candidates[best].survival = -1;  // its place stays, so that ties keep their order
        const int64_t at = int64_t(i) * call.width + walk.num_nodes;
        call.tokens[at] = chosen.token;
        call.parents[at] = chosen.parent;
        call.cells[at] = chosen.cell;
        call.confidence[at] = chosen.confidence;
        walk.survival[walk.num_nodes] = chosen.survival;
        walk.node = walk.num_nodes++;
        return walk.num_nodes < walk.budget;
    }
};

}  // namespace
}  // namespace outrider::table

extern "C" void outrider_table_draft(const void *call, int32_t n) {
    thread_local std::vector<outrider::table::Walk> walks;
    if (walks.size() < size_t(n)) walks.resize(n);
    outrider::table::Batch(*static_cast<const outrider::table::Call *>(call), n, walks).run();
}
