#include "attention.h"

#include <algorithm>
#include <limits>

namespace outrider {
namespace {

const float kNever = -std::numeric_limits<float>::infinity();

// Keys of a run of pages follow each other in memory; the values of a page are asked for while its
// keys are multiplied. Without both, a step over 512 tokens waits for memory half of its attention time.
constexpr long kKeysAhead = 4 << 10;

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
    int most = std::max(1, kMaxQueries / shape.group());
    for (int b = 0; b < batch.requests; b++) {
        int step = batch.is_tree[b] ? 1 : most;  // every tree row has a tail of its own
        for (int row = batch.row_starts[b]; row < batch.row_starts[b + 1]; row += step) {
            int rows = std::min(step, batch.row_starts[b + 1] - row);
            int newest = batch.newest(b, row + rows - 1);
            tiles.push_back({b, row, rows, newest / kSegment + 1, 0, false});
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
    int queries = std::max(kMaxQueries, shape.group());
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
void Attention<E>::run(long index, int thread, const LayerKV<E> &kv, const E *queries,
                       const Scoring &scoring, E *out) {
    const AttentionPlan::Item &item = plan_.items[index];
    const AttentionPlan::Tile &tile = plan_.tiles[item.tile];
    Scratch &s = scratch_[thread];
    int group = shape_.group(), count = tile.rows * group;
    const E *mine = queries + (long(item.head) * batch_.rows + tile.row) * group * shape_.head_dim;
    Job job{tile, kv, mine, scoring, item.head, count};

    const long size = long(count) * stride();  // of one segment's partials
    float *partials = partials_.data() + tile.slot * stride() + item.head * tile.segments * size;
    if (tile.split) {
        segment_partial(s, job, item.segment, partials + item.segment * size);
        std::atomic<int> &done = done_[item.tile * shape_.kv_heads + item.head];
        if (done.fetch_add(1, std::memory_order_acq_rel) != tile.segments - 1) return;
    }
    for (int m = 0; m < count; m++) clear(&s.folded[m * stride()], shape_.head_dim);
    for (int segment = 0; segment < tile.segments; segment++) {
        float *partial = tile.split ? partials + segment * size : s.partial.data();
        if (!tile.split) segment_partial(s, job, segment, partial);
        for (int m = 0; m < count; m++)
            fold(&s.folded[m * stride()], partial + m * stride(), shape_.head_dim);
    }
    finish(tile, item.head, s.folded.data(), out);
}

template <class E>
typename Attention<E>::Span Attention<E>::visible_pages(const Job &job, int segment) const {
    int newest = batch_.newest(job.tile.request, job.tile.row + job.tile.rows - 1);
    int oldest = job.scoring.window ? std::max(0, batch_.positions[job.tile.row] - job.scoring.window + 1) : 0;
    return {std::max(segment * kPagesPerSegment, oldest / kPage),
            std::min((segment + 1) * kPagesPerSegment, newest / kPage + 1)};
}

// Where the pages of a span lie: in the arena, or for a tree's own part in a tail built here.
template <class E>
void Attention<E>::find_pages(Scratch &s, const Job &job, Span span) {
    const int request = job.tile.request, *pages = batch_.pages + batch_.page_offsets[request];
    int tail = batch_.is_tree[request] ? batch_.context_lens[request] / kPage : span.end;
    for (int j = span.first; j < std::min(tail, span.end); j++) {
        s.key_pages[j - span.first] = job.kv.key_page(job.head, pages[j]);
        s.value_pages[j - span.first] = job.kv.value_page(job.head, pages[j]);
    }
    if (tail < span.end) build_tail(s, job, span, std::max(tail, span.first));
}

// Pages in which a tree row finds its ancestors at the positions they have in its text.
template <class E>
void Attention<E>::build_tail(Scratch &s, const Job &job, Span span, int first_page) {
    const int request = job.tile.request, *pages = batch_.pages + batch_.page_offsets[request];
    const int context = batch_.context_lens[request], first_row = batch_.row_starts[request];
    const int start = first_page * kPage, position = batch_.positions[job.tile.row];
    const long elements = shape_.page_elements();
    s.tail_keys.assign((span.end - first_page) * elements, E{});
    s.tail_values.assign((span.end - first_page) * elements, E{});
    const LayerKV<E> tail{s.tail_keys.data(), s.tail_values.data(), span.end - first_page, shape_};
    for (int row = job.tile.row - first_row, at = position; at >= start; at--) {
        int slot = at >= context ? context + row : at;
        if (at >= context) row = batch_.parents[first_row + row];
        if (at >= span.end * kPage) continue;
        for (int d = 0; d < shape_.head_dim; d += kLanes) {
            E key[kLanes], value[kLanes];
            job.kv.take(job.head, pages[slot / kPage], slot % kPage, d, key, value);
            tail.place(0, (at - start) / kPage, at % kPage, d, key, value);
        }
    }
    for (int j = first_page; j < span.end; j++) {
        s.key_pages[j - span.first] = tail.key_page(0, j - first_page);
        s.value_pages[j - span.first] = tail.value_page(0, j - first_page);
    }
}

template <class E>
void Attention<E>::segment_partial(Scratch &s, const Job &job, int segment, float *partial) {
    const int count = job.count, dim = shape_.head_dim;
    const Span span = visible_pages(job, segment);
    for (int m = 0; m < count; m++) clear(partial + m * stride(), dim);
    if (span.first >= span.end) return;
    find_pages(s, job, span);

    for (int j = 0, tiles = 1; j < span.pages(); j += tiles) {
        tiles = std::min(2, span.pages() - j);
        const long next_page = tiles == 2 ? s.key_pages[j + 1] - s.key_pages[j] : 0;
        const long to_values = long(sizeof(E)) * (s.value_pages[j] - s.key_pages[j]);
        for (int m = 0; m < count; m += kMaxRows)
            multiply<E>(std::min(kMaxRows, count - m), tiles,
                        {job.queries + long(m) * dim, dim, 0, &s.key_pages[j], 1, dim, next_page,
                         &s.scores[m * kSegment + j * kPage], kSegment, m == 0 ? kKeysAhead : 0,
                         m == 0 ? to_values : 0});
    }
    for (int m = 0; m < count; m++) weigh(s, job, span, m, partial + m * stride());
    for (int d = 0; d < dim; d += 2 * kLanes) {
        for (int j = 0; j < span.pages(); j++) s.blocks[j] = s.value_pages[j] + long(d) * kPage;
        for (int m = 0; m < count; m += kMaxRows)
            multiply<E>(std::min(kMaxRows, count - m), std::min(2, (dim - d) / kLanes),
                        {&s.weights[m * kSegment], kSegment, kPage, s.blocks, span.pages(), kPage,
                         long(kPage) * kLanes, partial + long(m) * stride() + 2 + d, stride()});
    }
}

// Scores of one query to weights relative to their maximum; partial gets maximum and sum. Keys
// out of sight weigh exactly 0, so it changes no bit how many of them a span happens to hold.
template <class E>
void Attention<E>::weigh(Scratch &s, const Job &job, Span span, int query, float *partial) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float *scores = &s.scores[query * kSegment];
    const int row = job.tile.row + query / shape_.group(), newest = batch_.newest(job.tile.request, row);
    // The newest out of sight behind.
    const int hidden = job.scoring.window ? batch_.positions[row] - job.scoring.window : -1;
    const float scale = job.scoring.scale, softcap = job.scoring.softcap;
    f32x16 top = splat(kNever);
    for (int j = 0; j < span.pages(); j++) {
        f32x16 score = load(scores + j * kPage) * scale;
        if (softcap) score = tanh(score / softcap) * softcap;
        int start = (span.first + j) * kPage;
        if (start + kPage - 1 > newest || start <= hidden) {
            i32x16 at = lanes + start;
            score = ((at <= newest) & (at > hidden)) ? score : splat(kNever);
        }
        store(scores + j * kPage, score);
        top = max(top, score);
    }
    partial[0] = reduce_max(top);
    const f32x16 maximum = splat(partial[0] == kNever ? 0.0f : partial[0]);
    f32x16 sum = {};
    for (int j = 0; j < span.pages(); j++) {
        f32x16 weight = exp(load(scores + j * kPage) - maximum);
        sum += weight;
        store(&s.weights[query * kSegment + j * kPage], weight);
    }
    partial[1] = reduce_add(sum);
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
