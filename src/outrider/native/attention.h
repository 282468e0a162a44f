// Attention of new rows over paged KV, reduced in fixed blocks of the text.
//
// The text of a request is cut at multiples of kSegment positions. Each segment gives a partial
// result (maximum, sum, weighted values) that depends on the row and the segment's keys alone;
// partials are folded in order of position. So a row's result has the same bits in a prefill
// chunk, a plain step, a chain or a tree, whichever slots hold its keys.
#pragma once
#include <atomic>
#include <vector>

#include "multiply.h"

namespace outrider {

constexpr int kPage = kLanes;  // positions per KV page
constexpr int kSegment = 256;
constexpr int kPagesPerSegment = kSegment / kPage;

struct Batch {  // mirrored in outrider/target/native.py
    int rows, requests, logits_count, tap_count;
    const int *tokens, *positions, *row_starts, *context_lens, *page_offsets, *pages, *parents;
    const uint8_t *is_tree;
    const int *logits_rows, *tap_layers;
    float *logits, *taps;
};

struct AttentionShape {
    int heads, kv_heads, head_dim;
    float softcap;  // 0: none
    int group() const { return heads / kv_heads; }
    long page_elements() const { return long(kPage) * head_dim; }
};

// K and V of one layer: [kv head][page][16 positions x head_dim], tiled as in multiply.h.
template <class E>
struct LayerKV {
    E *keys, *values;
    long pages;
    E *key_page(int head, long page, const AttentionShape &s) const {
        return keys + (head * pages + page) * s.page_elements();
    }
    E *value_page(int head, long page, const AttentionShape &s) const {
        return values + (head * pages + page) * s.page_elements();
    }
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
    // queries: [kv head][row][group][head_dim], scaled; out: [row][heads * head_dim].
    void prepare(const Batch &batch, const AttentionShape &shape, int threads);
    long items() const { return long(plan_.items.size()); }
    void begin_layer();
    void run(long item, int thread, const LayerKV<E> &kv, const E *queries, int window, E *out);

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
        int head, count, window;
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
