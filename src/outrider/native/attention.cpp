#include "attention.h"

#include <algorithm>
#include <limits>

namespace outrider {
namespace {

constexpr int kPagesPerSegment = kSegment / kPage;
const float kNever = -std::numeric_limits<float>::infinity();

// A partial or folded result of one query: [maximum, sum, values...].
void fold(float *into, const float *partial, int head_dim) {
    float before = into[0], now = partial[0];
    if (now == kNever) return;  // the segment lies outside the row's window
    float top = std::max(before, now);
    f32x16 scales = exp(f32x16{before == kNever ? kNever : before - top, now - top});
    into[0] = top;
    into[1] = into[1] * scales[0] + partial[1] * scales[1];
    f32x16 old_scale = splat(scales[0]), new_scale = splat(scales[1]);
    for (int d = 2; d < head_dim + 2; d += kLanes)
        store(into + d, fma(load(partial + d), new_scale, load(into + d) * old_scale));
}

void clear(float *folded, int head_dim) {
    folded[0] = kNever;
    std::fill(folded + 1, folded + head_dim + 2, 0.0f);
}

}  // namespace

void AttentionPlan::build(const Batch &batch, const AttentionShape &shape, int threads) {
    tiles.clear();
    items.clear();
    partials = 0;
    int most = std::max(1, kMaxRows / shape.group());
    for (int b = 0; b < batch.requests; b++) {
        int step = batch.is_tree[b] ? 1 : most;  // every tree row has a tail of its own
        for (int row = batch.row_starts[b]; row < batch.row_starts[b + 1]; row += step) {
            int rows = std::min(step, batch.row_starts[b + 1] - row);
            int last = batch.positions[row + rows - 1];
            tiles.push_back({b, row, rows, last / kSegment + 1, 0, false});
        }
    }
    // Few tiles: the segments of one are spread over the threads. Same bits either way.
    bool split = long(tiles.size()) * shape.kv_heads < 8L * threads;
    for (int t = 0; t < int(tiles.size()); t++) {
        Tile &tile = tiles[t];
        tile.split = split && tile.segments > 1;
        tile.slot = partials;
        if (tile.split)
            partials += long(tile.segments) * shape.kv_heads * tile.rows * shape.group();
        for (int head = 0; head < shape.kv_heads; head++)
            for (int segment = 0; segment < (tile.split ? tile.segments : 1); segment++)
                items.push_back({t, head, tile.split ? segment : -1});
    }
}

template <class E>
void Attention<E>::prepare(const Batch &batch, const AttentionShape &shape, int threads) {
    batch_ = batch;
    shape_ = shape;
    plan_.build(batch, shape, threads);
    scratch_.resize(threads);
    int queries = std::max(kMaxRows, shape.group());
    for (Scratch &s : scratch_) {
        s.scores.resize(queries * kSegment);
        s.weights.resize(queries * kSegment);
        s.partial.resize(queries * stride());
        s.folded.resize(queries * stride());
    }
    partials_.resize(plan_.partials * stride());
    if (done_.size() < plan_.tiles.size() * shape.kv_heads)
        done_ = std::vector<std::atomic<int>>(plan_.tiles.size() * shape.kv_heads);
}

template <class E>
void Attention<E>::begin_layer() {
    for (auto &count : done_) count.store(0, std::memory_order_relaxed);
}

template <class E>
void Attention<E>::run(long index, int thread, const LayerKV<E> &kv, const E *queries, int window,
                       E *out) {
    const AttentionPlan::Item &item = plan_.items[index];
    const AttentionPlan::Tile &tile = plan_.tiles[item.tile];
    Scratch &s = scratch_[thread];
    int group = shape_.group(), count = tile.rows * group;
    const E *q = queries + (long(item.head) * batch_.rows + tile.row) * group * shape_.head_dim;
    find_pages(s, tile, item.head, kv);

    if (tile.split) {
        float *mine = partials_.data() + (tile.slot + long(item.head) * tile.segments * count) * stride();
        segment_partial(s, tile, item.segment, window, q, mine + long(item.segment) * count * stride());
        std::atomic<int> &done = done_[item.tile * shape_.kv_heads + item.head];
        if (done.fetch_add(1, std::memory_order_acq_rel) != tile.segments - 1) return;
        for (int m = 0; m < count; m++) clear(&s.folded[m * stride()], shape_.head_dim);
        for (int segment = 0; segment < tile.segments; segment++)
            for (int m = 0; m < count; m++)
                fold(&s.folded[m * stride()], mine + (long(segment) * count + m) * stride(), shape_.head_dim);
    } else {
        for (int m = 0; m < count; m++) clear(&s.folded[m * stride()], shape_.head_dim);
        for (int segment = 0; segment < tile.segments; segment++) {
            segment_partial(s, tile, segment, window, q, s.partial.data());
            for (int m = 0; m < count; m++)
                fold(&s.folded[m * stride()], &s.partial[m * stride()], shape_.head_dim);
        }
    }
    finish(tile, item.head, s.folded.data(), out);
}

// Where each page of the tile's text lies: in the arena, or for a tree in a tail built here.
template <class E>
void Attention<E>::find_pages(Scratch &s, const AttentionPlan::Tile &tile, int head,
                              const LayerKV<E> &kv) {
    int last = batch_.positions[tile.row + tile.rows - 1] / kPage;
    const int *pages = batch_.pages + batch_.page_offsets[tile.request];
    s.key_pages.resize(last + 1);
    s.value_pages.resize(last + 1);
    int tail = batch_.is_tree[tile.request] ? batch_.context_lens[tile.request] / kPage : last + 1;
    for (int j = 0; j < std::min(tail, last + 1); j++) {
        s.key_pages[j] = kv.key_page(head, pages[j], shape_);
        s.value_pages[j] = kv.value_page(head, pages[j], shape_);
    }
    if (batch_.is_tree[tile.request]) build_tail(s, tile.request, tile.row, head, kv);
}

// Pages in which a tree row finds its ancestors at the positions they have in its text.
template <class E>
void Attention<E>::build_tail(Scratch &s, int request, int row, int head, const LayerKV<E> &kv) {
    int context = batch_.context_lens[request], first_row = batch_.row_starts[request];
    int position = batch_.positions[row], first = context / kPage, count = position / kPage - first + 1;
    const int *pages = batch_.pages + batch_.page_offsets[request];
    std::vector<int> slot(position - first * kPage + 1);  // logical slot of each tail position
    for (int p = first * kPage; p < context; p++) slot[p - first * kPage] = p;
    for (int r = row - first_row, p = position; p >= context; p--) {
        slot[p - first * kPage] = context + r;
        r = batch_.parents[first_row + r];
    }
    long elements = shape_.page_elements();
    s.tail_keys.assign(count * elements, E{});
    s.tail_values.assign(count * elements, E{});
    for (int i = 0; i < int(slot.size()); i++) {
        long page = pages[slot[i] / kPage];
        const E *keys = kv.key_page(head, page, shape_), *values = kv.value_page(head, page, shape_);
        E *to_keys = &s.tail_keys[i / kPage * elements], *to_values = &s.tail_values[i / kPage * elements];
        int from = slot[i] % kPage, to = i % kPage;
        for (int d = 0; d < shape_.head_dim; d++) {
            to_keys[tile_index(keys, d, to)] = keys[tile_index(keys, d, from)];
            long tile = long(d / kLanes) * kLanes * kPage;
            to_values[tile + tile_index(values, to, d % kLanes)] =
                values[tile + tile_index(values, from, d % kLanes)];
        }
    }
    for (int j = 0; j < count; j++) {
        s.key_pages[first + j] = &s.tail_keys[j * elements];
        s.value_pages[first + j] = &s.tail_values[j * elements];
    }
}

template <class E>
void Attention<E>::segment_partial(Scratch &s, const AttentionPlan::Tile &tile, int segment, int window,
                                   const E *queries, float *partial) {
    int group = shape_.group(), count = tile.rows * group, dim = shape_.head_dim;
    int last_position = batch_.positions[tile.row + tile.rows - 1];
    int first_visible = window ? std::max(0, batch_.positions[tile.row] - window + 1) : 0;
    int first = std::max(segment * kPagesPerSegment, first_visible / kPage);
    int end = std::min((segment + 1) * kPagesPerSegment, last_position / kPage + 1);
    for (int m = 0; m < count; m++) clear(partial + m * stride(), dim);
    if (first >= end) return;

    for (int m = 0; m < count; m += kMaxRows)
        for (int j = first; j < end; j++)
            multiply(std::min(kMaxRows, count - m), 1, queries + long(m) * dim, dim, 0, &s.key_pages[j], 1,
                     dim, &s.scores[m * kSegment + (j - first) * kPage], kSegment);

    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int m = 0; m < count; m++) {
        float *scores = &s.scores[m * kSegment];
        int position = batch_.positions[tile.row + m / group];
        int oldest = window ? position - window : -1;  // the newest position out of sight
        f32x16 top = splat(kNever);
        for (int j = first; j < end; j++) {
            f32x16 score = load(scores + (j - first) * kPage);
            if (shape_.softcap) score = tanh(score / shape_.softcap) * shape_.softcap;
            i32x16 at = lanes + j * kPage;
            score = (at <= position) & (at > oldest) ? score : splat(kNever);
            store(scores + (j - first) * kPage, score);
            top = max(top, score);
        }
        float maximum = reduce_max(top);
        partial[m * stride()] = maximum;
        if (maximum == kNever) maximum = 0.0f;  // nothing in sight: every weight becomes 0
        f32x16 sum = {};
        // Weights are summed at their place in the segment, so skipped pages change no bit.
        for (int j = first; j < end; j++) {
            f32x16 weight = exp(load(scores + (j - first) * kPage) - maximum);
            sum += weight;
            store(&s.weights[m * kSegment + (j - first) * kPage], weight);
        }
        partial[m * stride() + 1] = reduce_add(sum);
    }

    s.blocks.resize(end - first);
    for (int d = 0; d < dim; d += 2 * kLanes) {
        for (int j = first; j < end; j++) s.blocks[j - first] = s.value_pages[j] + long(d) * kPage;
        for (int m = 0; m < count; m += kMaxRows)
            multiply(std::min(kMaxRows, count - m), std::min(2, (dim - d) / kLanes), &s.weights[m * kSegment],
                     kSegment, kPage, s.blocks.data(), end - first, kPage,
                     partial + long(m) * stride() + 2 + d, stride());
    }
}

template <class E>
void Attention<E>::finish(const AttentionPlan::Tile &tile, int head, const float *folded, E *out) {
    int group = shape_.group(), dim = shape_.head_dim;
    for (int m = 0; m < tile.rows * group; m++) {
        const float *result = folded + m * stride();
        f32x16 scale = splat(1.0f / result[1]);
        E *to = out + (long(tile.row + m / group) * shape_.heads + head * group + m % group) * dim;
        for (int d = 0; d < dim; d += kLanes) store(to + d, load(result + 2 + d) * scale);
    }
}

template class Attention<float>;
template class Attention<bf16>;

}  // namespace outrider
