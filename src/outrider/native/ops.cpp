// Linear layers and paged attention one at a time, for models that run through transformers:
// slower than the whole forward of forward.cpp, with the same promise about bits.
#include <algorithm>
#include <memory>

#include "attention.h"
#include "pool.h"

namespace outrider {
namespace {

template <class E>
void linear(E *out, const E *x, const E *weights, const float *bias, long rows, int inputs, int outputs) {
    const Matrix<E> matrix{weights, outputs, inputs};
    parallel_for(matrix.chunks(), 1, [&](long chunk) {
        multiply_chunk(x, int(rows), matrix, int(chunk), 0, [&](int row, int column, const float *sums, int n) {
            for (int i = 0; i < n && column + i < outputs; i++)
                store(out + long(row) * outputs + column + i, sums[i] + (bias ? bias[column + i] : 0.0f));
        });
    });
}

struct AnyAttention {
    virtual ~AnyAttention() = default;
    virtual void allocate(long pages) = 0;
    virtual void begin(const Batch &batch) = 0;
    virtual void layer(int index, const void *queries, const void *keys, const void *values,
                       const Scoring &scoring, void *out) = 0;
    virtual void move(const int *from, const int *to, int n) = 0;
};

template <class E>
class PagedAttention final : public AnyAttention {
  public:
    PagedAttention(int layers, AttentionShape shape) : shape_(shape), kv_(layers, shape) {}
    void allocate(long pages) override { kv_.allocate(pages); }
    void move(const int *from, const int *to, int n) override { kv_.move(from, to, n); }

    void begin(const Batch &batch) override {
        batch_ = batch;
        blocks_ = find_blocks(batch);
        attention_.prepare(batch, shape_, num_threads());
    }

    // queries: [kv head][row][group][head_dim]; keys, values: [row][kv head][head_dim].
    void layer(int index, const void *queries, const void *keys, const void *values, const Scoring &scoring,
               void *out) override {
        const LayerKV<E> kv = kv_.layer(index);
        const E *key = static_cast<const E *>(keys), *value = static_cast<const E *>(values);
        parallel_for(long(blocks_.size()) * shape_.kv_heads, 1, [&](long item) {
            const RowBlock &block = blocks_[item / shape_.kv_heads];
            const int head = int(item % shape_.kv_heads);
            for (int r = 0; r < block.rows; r++)
                for (int d = 0; d < shape_.head_dim; d += kLanes) {
                    long at = (long(block.row + r) * shape_.kv_heads + head) * shape_.head_dim + d;
                    kv.place(head, block.page, block.lane + r, d, key + at, value + at);
                }
        });
        attention_.begin_layer();
        std::atomic<long> next{0};
        on_all_threads([&](int thread) {
            for (long item; (item = next.fetch_add(1)) < attention_.items();)
                attention_.run(item, thread, kv, static_cast<const E *>(queries), scoring, static_cast<E *>(out));
        });
    }

  private:
    AttentionShape shape_;
    KVStore<E> kv_;
    Attention<E> attention_;
    Batch batch_;
    std::vector<RowBlock> blocks_;
};

}  // namespace
}  // namespace outrider

using outrider::AnyAttention;

extern "C" {

// out [rows][outputs] = x [rows][inputs] times packed weights, plus bias (null: none).
void outrider_linear(int is_bf16, void *out, const void *x, const void *weights, const float *bias, long rows,
                     int inputs, int outputs) {
    using namespace outrider;
    if (is_bf16) linear((bf16 *)out, (const bf16 *)x, (const bf16 *)weights, bias, rows, inputs, outputs);
    else linear((float *)out, (const float *)x, (const float *)weights, bias, rows, inputs, outputs);
}

void *outrider_attention_new(int is_bf16, int layers, int heads, int kv_heads, int head_dim) {
    outrider::AttentionShape shape{heads, kv_heads, head_dim};
    if (is_bf16) return static_cast<AnyAttention *>(new outrider::PagedAttention<outrider::bf16>(layers, shape));
    return static_cast<AnyAttention *>(new outrider::PagedAttention<float>(layers, shape));
}
void outrider_attention_free(void *attention) { delete static_cast<AnyAttention *>(attention); }
void outrider_attention_allocate(void *attention, long pages) { static_cast<AnyAttention *>(attention)->allocate(pages); }
void outrider_attention_begin(void *attention, const outrider::Batch *batch) {
    static_cast<AnyAttention *>(attention)->begin(*batch);
}
void outrider_attention_layer(void *attention, int layer, const void *queries, const void *keys,
                              const void *values, float scale, float softcap, int window, void *out) {
    static_cast<AnyAttention *>(attention)->layer(layer, queries, keys, values, {scale, softcap, window}, out);
}
void outrider_attention_move(void *attention, const int *from, const int *to, int n) {
    static_cast<AnyAttention *>(attention)->move(from, to, n);
}

}  // extern "C"
