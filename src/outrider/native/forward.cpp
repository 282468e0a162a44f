// One ragged forward of a decoder-only transformer: Llama's shape, with the variations of Qwen
// (biases, norms on queries and keys) and Gemma (norms after each block, GELU, two ropes,
// sliding windows). All threads run the whole forward as one job and meet at barriers.
//
// Legend: T rows, H hidden width, Q = heads * head_dim, E float or bf16 (weights, KV, inputs of
// matrix products; sums, norms and the residual stream are float throughout).
#include <algorithm>
#include <memory>

#include "attention.h"
#include "pool.h"

namespace outrider {

struct LayerSpec {  // mirrored in outrider/target/native.py; null pointers: not there
    const void *qkv, *attention_out, *gate_up, *down;  // packed tiles
    const float *qkv_bias, *out_bias;
    const float *input_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm, *query_norm, *key_norm;
    const float *rope;  // [position][2][rope_dim / 2]: cosines, then sines
    int window;         // 0: the whole context
};

struct ModelSpec {  // mirrored in outrider/target/native.py
    int layers, hidden, intermediate, vocab, padded_vocab, heads, kv_heads, head_dim, rope_dim, is_bf16,
        use_gelu;
    float epsilon, query_scale, attention_softcap, logits_softcap, embedding_scale;
    const void *embedding;  // [vocab][H], not packed
    const void *lm_head;    // packed tiles, padded_vocab outputs
    const float *final_norm;
    const LayerSpec *layer;
};

namespace {

// Bytes of weights asked for ahead of the reading. Measured on two cores of a Zen 5 server: a
// pass over 270 MB takes 5.9 ms with 8 KB, 5.4 ms with 32 KB and more; eight rows 6.3 and 4.6 ms.
constexpr long kPrefetch = 64 << 10;

// Hands out [0, n) to the threads: each starts in a range of its own, so that weights are read
// in one stream, and helps the others when done, so that a slow core holds nobody up.
class Shares {
  public:
    Shares(int phases, int threads) : threads_(threads), next_(long(phases) * threads) {}
    void reset() {
        for (Slot &slot : next_) slot.value.store(0, std::memory_order_relaxed);
    }
    // The first index of a thread's own range; the next thread's is its end.
    int begin(int n, int thread) const { return int(long(n) * thread / threads_); }

    template <class Body>
    void run(int phase, int thread, int n, const Body &body) {
        for (int turn = 0; turn < threads_; turn++) {
            int owner = (thread + turn) % threads_, first = begin(n, owner), end = begin(n, owner + 1);
            std::atomic<int> &next = next_[long(phase) * threads_ + owner].value;
            for (int i; (i = first + next.fetch_add(1, std::memory_order_relaxed)) < end;) body(i);
        }
    }

  private:
    struct alignas(64) Slot {
        std::atomic<int> value{0};
    };
    int threads_;
    std::vector<Slot> next_;
};

// A packed matrix, read in chunks: two tiles that take turns, or the last one alone.
template <class E>
struct Matrix {
    const E *weights;
    int outputs, inputs;
    int tiles() const { return outputs / kLanes; }
    int chunks() const { return (tiles() + 1) / 2; }
    long chunk_size() const { return 2L * kLanes * inputs; }
    const E *chunk(int i) const { return weights + i * chunk_size(); }
};

struct AnyModel {
    virtual ~AnyModel() = default;
    virtual void allocate_kv(long pages) = 0;
    virtual void forward(const Batch &batch) = 0;
    virtual void move_kv(const int *from, const int *to, int n) = 0;
};


template <class E>
class Model final : public AnyModel {
  public:
    explicit Model(const ModelSpec &spec)
        : spec_(spec), layers_(spec.layer, spec.layer + spec.layers),
          shape_{spec.heads, spec.kv_heads, spec.head_dim}, kv_(spec.layers, shape_) {}

    void allocate_kv(long pages) override { kv_.allocate(pages); }
    void move_kv(const int *from, const int *to, int n) override { kv_.move(from, to, n); }

    void forward(const Batch &batch) override {
        int threads = num_threads();
        if (!shares_ || threads != threads_) {
            threads_ = threads;
            shares_ = std::make_unique<Shares>(spec_.layers * kPhases + kPhases, threads);
        }
        shares_->reset();
        batch_ = batch;
        reserve_scratch();
        blocks_ = find_blocks(batch);
        attention_.prepare(batch, shape_, threads);
        on_all_threads([this](int thread) { run(thread); });
    }

  private:
    enum Phase { kNormIn, kQkv, kRope, kAttend, kOut, kNormMlp, kGateUp, kDown, kPhases };

    int query_width() const { return spec_.heads * spec_.head_dim; }
    int kv_width() const { return spec_.kv_heads * spec_.head_dim; }

    void reserve_scratch();
    void run(int thread);
    void embed(int row);
    void add_and_norm(int row, const float *post_norm, const float *norm, int tapped_layer);
    void norm_row(const float *x, const float *weight, E *out) const;
    float *qkv_row(int row) { return &qkv_[long(row) * (query_width() + 2 * kv_width())]; }
    const float *rope_of(const LayerSpec &layer, int row) const {
        return layer.rope ? layer.rope + long(batch_.positions[row]) * spec_.rope_dim : nullptr;
    }
    void rotate_queries(int row, int head, const LayerSpec &layer);
    void store_key_and_value(int row, const RowBlock &block, int head, const LayerSpec &layer,
                             const LayerKV<E> &kv);
    template <class Epilogue>
    void linear(int phase, int thread, const E *x, int rows, const Matrix<E> &matrix, const Matrix<E> &next,
                const Epilogue &epilogue);
    Matrix<E> matrix(const void *weights, int outputs, int inputs) const {
        return {static_cast<const E *>(weights), outputs, inputs};
    }
    Matrix<E> qkv_of(int l) const {  // after the last layer: what is read next
        if (l == spec_.layers) return matrix(spec_.lm_head, spec_.padded_vocab, spec_.hidden);
        return matrix(layers_[l].qkv, query_width() + 2 * kv_width(), spec_.hidden);
    }
    long bytes_ahead(int thread, int chunk, const Matrix<E> &matrix, const Matrix<E> &next) const;
    template <class Body>
    void each(int phase, int thread, int n, const Body &body) {
        shares_->run(phase, thread, n, body);
        barrier();
    }

    ModelSpec spec_;
    std::vector<LayerSpec> layers_;
    AttentionShape shape_;
    KVStore<E> kv_;
    int threads_ = 0;
    std::unique_ptr<Shares> shares_;
    Attention<E> attention_;
    Batch batch_;
    std::vector<RowBlock> blocks_;
    std::vector<float> x_, y_, qkv_;           // [T][H], [T][H], [T][Q + 2 KV]
    std::vector<E> normed_, queries_, heads_, mlp_;  // [T][H], [kv head][T][group][dim], [T][Q], [T][I]
};

template <class E>
void Model<E>::reserve_scratch() {
    size_t rows = batch_.rows;
    if (y_.size() >= rows * spec_.hidden) return;
    x_.resize(rows * spec_.hidden);
    y_.resize(rows * spec_.hidden);
    qkv_.resize(rows * (query_width() + 2 * kv_width()));
    normed_.resize(rows * spec_.hidden);
    queries_.resize(rows * query_width());
    heads_.resize(rows * query_width());
    mlp_.resize(rows * spec_.intermediate);
}

void store_biased(float *to, const float *sums, int n, const float *bias, int column) {
    for (int i = 0; i < n; i += kLanes)
        store(to + i, bias ? load(sums + i) + load(bias + column + i) : load(sums + i));
}

template <class E>
void Model<E>::run(int thread) {
    const int rows = batch_.rows, H = spec_.hidden, width = query_width() + 2 * kv_width();
    for (int l = 0; l < spec_.layers; l++) {
        const LayerSpec &layer = layers_[l];
        const LayerKV<E> kv = kv_.layer(l);
        const Scoring scoring{spec_.query_scale, spec_.attention_softcap, layer.window};
        int phase = l * kPhases;
        each(phase + kNormIn, thread, rows, [&](int row) {
            if (l == 0) embed(row);
            add_and_norm(row, l ? layers_[l - 1].post_mlp_norm : nullptr, layer.input_norm, l - 1);
        });
        const Matrix<E> out = matrix(layer.attention_out, H, query_width());
        const Matrix<E> gate_up = matrix(layer.gate_up, 2 * spec_.intermediate, H);
        const Matrix<E> down = matrix(layer.down, H, spec_.intermediate);
        linear(phase + kQkv, thread, normed_.data(), rows, qkv_of(l), out,
               [&](int row, int column, const float *sums, int n) {
                   store_biased(&qkv_[long(row) * width + column], sums, n, layer.qkv_bias, column);
               });
        if (thread == 0) attention_.begin_layer();
        // Queries first, as in the columns of qkv_: most of what a thread needs here it has written.
        const int items = int(blocks_.size()) * spec_.kv_heads;
        each(phase + kRope, thread, 2 * items, [&](int item) {
            const RowBlock &block = blocks_[item % items / spec_.kv_heads];
            const int head = item % spec_.kv_heads;
            for (int row = block.row; row < block.row + block.rows; row++) {
                if (item < items) rotate_queries(row, head, layer);
                else store_key_and_value(row, block, head, layer, kv);
            }
        });
        each(phase + kAttend, thread, int(attention_.items()), [&](int item) {
            attention_.run(item, thread, kv, queries_.data(), scoring, heads_.data());
        });
        linear(phase + kOut, thread, heads_.data(), rows, out, gate_up,
               [&](int row, int column, const float *sums, int n) {
                   store_biased(&y_[long(row) * H + column], sums, n, layer.out_bias, column);
               });
        each(phase + kNormMlp, thread, rows,
             [&](int row) { add_and_norm(row, layer.post_attention_norm, layer.mlp_norm, -2); });
        linear(phase + kGateUp, thread, normed_.data(), rows, gate_up, down,
               [&](int row, int column, const float *sums, int) {
                   f32x16 gate = load(sums), up = load(sums + kLanes);  // tiles alternate
                   f32x16 active = spec_.use_gelu ? gelu_tanh(gate) : silu(gate);
                   store(&mlp_[long(row) * spec_.intermediate + column / 2], active * up);
               });
        linear(phase + kDown, thread, mlp_.data(), rows, down, qkv_of(l + 1),
               [&](int row, int column, const float *sums, int n) {
                   store_biased(&y_[long(row) * H + column], sums, n, nullptr, column);
               });
    }
    int phase = spec_.layers * kPhases;
    each(phase, thread, rows, [&](int row) {
        add_and_norm(row, layers_.back().post_mlp_norm, nullptr, spec_.layers - 1);
    });
    each(phase + 1, thread, batch_.logits_count, [&](int i) {
        norm_row(&x_[long(batch_.logits_rows[i]) * H], spec_.final_norm, &normed_[long(i) * H]);
    });
    linear(phase + 2, thread, normed_.data(), batch_.logits_count, qkv_of(spec_.layers), qkv_of(0),
           [&](int row, int column, const float *sums, int n) {
               f32x16 capped[2];
               const float cap = spec_.logits_softcap;
               for (int i = 0; i < n; i += kLanes) {
                   f32x16 value = load(sums + i);
                   capped[i / kLanes] = cap ? tanh(value / cap) * cap : value;
               }
               std::memcpy(batch_.logits + long(row) * spec_.vocab + column, capped,
                           sizeof(float) * std::min(n, spec_.vocab - column));
           });
}

template <class E>
void Model<E>::embed(int row) {
    const E *from = static_cast<const E *>(spec_.embedding) + long(batch_.tokens[row]) * spec_.hidden;
    float *x = &x_[long(row) * spec_.hidden], *y = &y_[long(row) * spec_.hidden];
    for (int i = 0; i < spec_.hidden; i++) x[i] = to_float(from[i]) * spec_.embedding_scale;
    std::fill(y, y + spec_.hidden, 0.0f);
}

// x += y (normalised first where the model says so), then normed = norm(x). The output of
// `tapped_layer` (-1: the embedding, -2: none) is complete once y is added; it is copied out
// where a source of drafts asked for it.
template <class E>
void Model<E>::add_and_norm(int row, const float *post_norm, const float *norm, int tapped_layer) {
    const int H = spec_.hidden;
    float *x = &x_[long(row) * H];
    const float *y = &y_[long(row) * H];
    float scale = 1.0f;
    if (post_norm) {
        f32x16 squares = {};
        for (int i = 0; i < H; i += kLanes) squares = fma(load(y + i), load(y + i), squares);
        scale = 1.0f / std::sqrt(reduce_add(squares) / H + spec_.epsilon);
    }
    for (int i = 0; i < H; i += kLanes) {
        f32x16 add = load(y + i);
        if (post_norm) add = add * scale * load(post_norm + i);
        store(x + i, load(x + i) + add);
    }
    for (int t = 0; t < batch_.tap_count; t++)
        if (batch_.tap_layers[t] == tapped_layer)
            std::copy(x, x + H, batch_.taps + (long(row) * batch_.tap_count + t) * H);
    if (norm) norm_row(x, norm, &normed_[long(row) * H]);
}

template <class E>
void Model<E>::norm_row(const float *x, const float *weight, E *out) const {
    const int H = spec_.hidden;
    f32x16 squares = {};
    for (int i = 0; i < H; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    float scale = 1.0f / std::sqrt(reduce_add(squares) / H + spec_.epsilon);
    for (int i = 0; i < H; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
}

// Norm and rotation of one head of one row, in place.
void rotate_head(float *head, const ModelSpec &spec, const float *norm, const float *rope) {
    const int dim = spec.head_dim, half = spec.rope_dim / 2;
    if (norm) {
        f32x16 squares = {};
        for (int i = 0; i < dim; i += kLanes) squares = fma(load(head + i), load(head + i), squares);
        float scale = 1.0f / std::sqrt(reduce_add(squares) / dim + spec.epsilon);
        for (int i = 0; i < dim; i += kLanes) store(head + i, load(head + i) * scale * load(norm + i));
    }
    if (!rope) return;
    for (int i = 0; i + kLanes <= half; i += kLanes) {
        f32x16 a = load(head + i), b = load(head + i + half);
        f32x16 cosine = load(rope + i), sine = load(rope + half + i);
        store(head + i, a * cosine - b * sine);
        store(head + i + half, b * cosine + a * sine);
    }
    for (int i = half / kLanes * kLanes; i < half; i++) {
        float a = head[i], b = head[i + half], cosine = rope[i], sine = rope[half + i];
        head[i] = a * cosine - b * sine;
        head[i + half] = b * cosine + a * sine;
    }
}

// Queries of one row that share a KV head: norm, rotation, and their place for attention.
template <class E>
void Model<E>::rotate_queries(int row, int head, const LayerSpec &layer) {
    const int dim = spec_.head_dim, group = shape_.group();
    for (int g = 0; g < group; g++) {
        float *query = qkv_row(row) + (head * group + g) * dim;
        rotate_head(query, spec_, layer.query_norm, rope_of(layer, row));
        E *to = &queries_[((long(head) * batch_.rows + row) * group + g) * dim];
        for (int d = 0; d < dim; d += kLanes) store(to + d, load(query + d));
    }
}

template <class E>
void Model<E>::store_key_and_value(int row, const RowBlock &block, int head, const LayerSpec &layer,
                                   const LayerKV<E> &kv) {
    const int dim = spec_.head_dim;
    float *key = qkv_row(row) + query_width() + head * dim;
    const float *value = key + kv_width();
    rotate_head(key, spec_, layer.key_norm, rope_of(layer, row));
    for (int d = 0; d < dim; d += kLanes) {
        E k[kLanes], v[kLanes];
        store(k, load(key + d));
        store(v, load(value + d));
        kv.place(head, block.page, block.lane + row - block.row, d, k, v);
    }
}

// From a chunk to what this thread reads kPrefetch bytes later: in its own range, and beyond the
// end of that, in its range of the next matrix.
template <class E>
long Model<E>::bytes_ahead(int thread, int chunk, const Matrix<E> &matrix, const Matrix<E> &next) const {
    int first = shares_->begin(matrix.chunks(), thread), end = shares_->begin(matrix.chunks(), thread + 1);
    if (chunk < first || chunk >= end) return 0;  // helping another thread
    int later = chunk + std::max(1, int(kPrefetch / long(sizeof(E)) / matrix.chunk_size()));
    const E *target = matrix.chunk(later);
    if (later >= end)
        target = next.chunk(shares_->begin(next.chunks(), thread)) + (later - end) * matrix.chunk_size();
    return (target - matrix.chunk(chunk)) * long(sizeof(E));
}

// Asks at once for what other threads have just written, or it comes line by line.
template <class E>
void fetch(const E *from, long elements) {
    for (long i = 0; i < elements; i += kStep<E>) __builtin_prefetch(from + i);
}

// epilogue(row, column, sums, n): n <= 32 results of one row, before they leave the cache.
template <class E>
template <class Epilogue>
void Model<E>::linear(int phase, int thread, const E *x, int rows, const Matrix<E> &matrix,
                      const Matrix<E> &next, const Epilogue &epilogue) {
    const int inputs = matrix.inputs;
    fetch(x, long(std::min(rows, kMaxRows)) * inputs);
    each(phase, thread, matrix.chunks(), [&](int chunk) {
        alignas(64) float sums[kMaxRows * 2 * kLanes];
        const int n = std::min(2, matrix.tiles() - 2 * chunk), column = chunk * 2 * kLanes;
        const E *w = matrix.chunk(chunk);
        for (int row = 0; row < rows; row += kMaxRows) {
            int count = std::min(kMaxRows, rows - row);
            long ahead = row == 0 ? bytes_ahead(thread, chunk, matrix, next) : 0;
            multiply(count, n, with_chunk(x + long(row) * inputs, inputs, &w, inputs, sums, 2 * kLanes, ahead));
            for (int m = 0; m < count; m++)
                epilogue(row + m, column, sums + m * 2 * kLanes, n * kLanes);
        }
    });
}

}  // namespace
}  // namespace outrider

using outrider::AnyModel;

extern "C" {

void *outrider_model_new(const outrider::ModelSpec *spec) {
    if (spec->is_bf16) return static_cast<AnyModel *>(new outrider::Model<outrider::bf16>(*spec));
    return static_cast<AnyModel *>(new outrider::Model<float>(*spec));
}
void outrider_model_free(void *model) { delete static_cast<AnyModel *>(model); }
void outrider_model_allocate_kv(void *model, long pages) { static_cast<AnyModel *>(model)->allocate_kv(pages); }
void outrider_model_forward(void *model, const outrider::Batch *batch) { static_cast<AnyModel *>(model)->forward(*batch); }
void outrider_model_move_kv(void *model, const int *from, const int *to, int n) {
    static_cast<AnyModel *>(model)->move_kv(from, to, n);
}

}  // extern "C"
