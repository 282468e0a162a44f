// Attention of new rows over paged KV, reduced in fixed blocks of the text.
//
// The text of a request is cut at multiples of kSegment positions. Each segment gives a partial
// result (maximum, sum, weighted values) that depends on the row and the segment's keys alone;
// partials are folded in order of position. So a row's result has the same bits in a prefill
// chunk, a plain step, a chain or a tree, whichever slots hold its keys.
#pragma once
#include <atomic>
#include <vector>

#include "kv.h"

namespace outrider {

constexpr int kSegment = 256;
// Queries of one item: rows times the heads that share keys. All of them read a page while it is
// in the nearest cache.
constexpr int kMaxQueries = 2 * kMaxRows;
constexpr int kPagesPerSegment = kSegment / kPage;

// What one layer does with its scores.
struct Scoring {
    float scale;
    float softcap;  // 0: none
    int window;     // 0: the whole text
};

// The work of one forward's attention, the same for every layer.
class AttentionPlan {
  public:
    struct Tile {
        int request, row, rows, segments;
        long slot;   // of its first partial, when its segments are separate items
        bool split;
    };
    struct Item {
        int tile, head, segment;  // segment < 0: all of them
    };
    std::vector<Tile> tiles;
    std::vector<Item> items;
    long partials = 0;  // in rows of (head_dim + 2) floats

    void build(const Batch &batch, const AttentionShape &shape, int threads);
};

template <class E>
class Attention {
  public:
    void prepare(const Batch &batch, const AttentionShape &shape, int threads);
    long items() const { return long(plan_.items.size()); }
    void begin_layer();
    // queries: [kv head][row][group][head_dim]; out: [row][heads * head_dim].
    void run(long item, int thread, const LayerKV<E> &kv, const E *queries, const Scoring &scoring, E *out);

  private:
    struct Scratch {
        std::vector<float> scores, partial, folded;
        std::vector<E> weights, tail_keys, tail_values;
        const E *key_pages[kPagesPerSegment], *value_pages[kPagesPerSegment], *blocks[kPagesPerSegment];
    };
    // What one item works on: `count` queries (rows x group) of one head over one layer's KV.
    struct Job {
        const AttentionPlan::Tile &tile;
        const LayerKV<E> &kv;
        const E *queries;
        const Scoring &scoring;
        int head, count;
    };
    struct Span {
        int first, end;  // pages of the text
        int pages() const { return end - first; }
    };
    Span visible_pages(const Job &job, int segment) const;
    void find_pages(Scratch &s, const Job &job, Span span);
    void build_tail(Scratch &s, const Job &job, Span span, int first_page);
    void segment_partial(Scratch &s, const Job &job, int segment, float *partial);
    void weigh(Scratch &s, const Job &job, Span span, int query, float *partial);
    void finish(const AttentionPlan::Tile &tile, int head, const float *folded, E *out);
    int stride() const { return shape_.head_dim + 2; }

    Batch batch_;
    AttentionShape shape_;
    AttentionPlan plan_;
    std::vector<Scratch> scratch_;
    std::vector<float> partials_;
    std::vector<std::atomic<int>> done_;  // per tile and head: segments finished
};

}  // namespace outrider
