// One ragged forward of a decoder-only transformer: Llama's shape, with the variations of Qwen
// (biases, norms on queries and keys), Gemma (norms after each block, GELU, two ropes, sliding
// windows) and drafters (rows in place of tokens, a second input, keys and values of given rows).
// All threads run the whole forward as one job and meet at barriers.
//
// Legend: T rows, H hidden width, Q = heads * head_dim, E float or bf16 (KV, inputs of matrix
// products), W what matrices are kept in: E, or u7 beside bf16. Sums, norms and the residual stream
// are float throughout.
#include <algorithm>
#include <memory>
#include <type_traits>

#include "attention.h"
#include "norm.h"
#include "pool.h"
#include "shares.h"

namespace outrider {

struct LayerSpec {  // mirrored in outrider/target/native_model.py; null pointers: not there
    const void *qkv, *attention_out, *gate_up, *down;  // packed tiles; behind those of u7, scales
    const float *qkv_bias, *out_bias;
    const float *input_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm, *query_norm, *key_norm;
    const float *side_norm;  // where qkv reads 2 H: [norm(side), norm(x)]
    const float *rope;       // [position][2][rope_dim / 2]: cosines, then sines
    int window;              // 0: the whole context
    int residual_is_normed;  // the attention's output is added to norm(x), not to x
};

struct ModelSpec {  // mirrored in outrider/target/native_model.py
    int layers, hidden, intermediate, vocab, padded_vocab, heads, kv_heads, head_dim, rope_dim, kind,
        use_gelu;
    float epsilon, query_scale, attention_softcap, logits_softcap, embedding_scale;
    const void *embedding;  // [vocab][H], not packed; null: rows are given
    const void *lm_head;    // packed tiles, padded_vocab outputs
    const float *final_norm;
    const LayerSpec *layer;
};

namespace {

// Bytes of weights asked for ahead of the reading. Measured on two cores of a Zen 5 server: a
// pass over 270 MB takes 5.9 ms with 8 KB, 5.4 ms with 32 KB and more; eight rows 6.3 and 4.6 ms.
constexpr long kPrefetch = 64 << 10;

struct AnyModel {
    virtual ~AnyModel() = default;
    virtual void allocate_kv(long pages) = 0;
    virtual void forward(const Batch &batch) = 0;
    virtual void store_context(const Batch &batch) = 0;
    virtual void embed(const int *tokens, int count, float *out) const = 0;
    virtual void move_kv(const int *from, const int *to, int n) = 0;
};

template <class E, class W>
class Model final : public AnyModel {
  public:
    explicit Model(const ModelSpec &spec)
        : spec_(spec), layers_(spec.layer, spec.layer + spec.layers),
          shape_{spec.heads, spec.kv_heads, spec.head_dim}, kv_(spec.layers, shape_) {}

    void allocate_kv(long pages) override { kv_.allocate(pages); }
    void move_kv(const int *from, const int *to, int n) override { kv_.move(from, to, n); }

    void forward(const Batch &batch) override {
        begin(batch);
        attention_.prepare(batch, shape_, threads_);
        on_all_threads([this](int thread) { run(thread); });
    }

    void embed(const int *tokens, int count, float *out) const override {
        for (int t = 0; t < count; t++, out += spec_.hidden) {
            const E *from = static_cast<const E *>(spec_.embedding) + long(tokens[t]) * spec_.hidden;
            for (int i = 0; i < spec_.hidden; i++) out[i] = to_float(from[i]) * spec_.embedding_scale;
        }
    }

    // Keys and values that every layer makes of batch.x as it is, and nothing else.
    void store_context(const Batch &batch) override {
        begin(batch);
        on_all_threads([this](int thread) { run_context(thread); });
    }

  private:
    enum Phase { kNormIn, kQkv, kRope, kAttend, kOut, kNormMlp, kGateUp, kDown, kPhases };

    int query_width() const { return spec_.heads * spec_.head_dim; }
    int kv_width() const { return spec_.kv_heads * spec_.head_dim; }

    void begin(const Batch &batch);
    void reserve_scratch();
    void run(int thread);
    void run_context(int thread);
    void take_input(int row);
    void add(int row, const float *post_norm);
    void complete_layer(int row, int layer);
    void norm_input(int row, const LayerSpec &layer);
    template <class Out>
    void norm_row(const float *x, const float *weight, Out *out) const {
        rms_norm(x, weight, spec_.hidden, spec_.epsilon, out);
    }
    float *qkv_row(int row) { return &qkv_[long(row) * (query_width() + 2 * kv_width())]; }
    const float *rope_of(const LayerSpec &layer, int row) const {
        return layer.rope ? layer.rope + long(batch_.positions[row]) * spec_.rope_dim : nullptr;
    }
    void rotate_queries(int row, int head, const LayerSpec &layer);
    void store_keys_and_values(const RowBlock &block, int head, const LayerSpec &layer, const LayerKV<E> &kv);
    template <class Epilogue>
    void linear(int phase, int thread, const E *x, int rows, const Matrix<W> &matrix, const Matrix<W> &next,
                const Epilogue &epilogue);
    Matrix<W> matrix(const void *weights, int outputs, int inputs) const {
        Matrix<W> found{static_cast<const W *>(weights), outputs, inputs};
        if (std::is_same_v<W, u7>)
            found.scales = reinterpret_cast<const float *>(behind_tiles(found.weights, found.tiles(), inputs));
        return found;
    }
    Matrix<W> qkv_of(int l) const {  // after the last layer: what is read next
        if (l == spec_.layers) return matrix(spec_.lm_head, spec_.padded_vocab, spec_.hidden);
        return matrix(layers_[l].qkv, query_width() + 2 * kv_width(), input_width(layers_[l]));
    }
    int input_width(const LayerSpec &layer) const { return (layer.side_norm ? 2 : 1) * spec_.hidden; }
    long bytes_ahead(int thread, int chunk, const Matrix<W> &matrix, const Matrix<W> &next) const;
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
    std::vector<E> normed_, queries_, heads_, mlp_;  // [T][2 H], [kv head][T][group][dim], [T][Q], [T][I]
    std::vector<std::vector<float>> row_sums_;       // [T] of each thread, of what it multiplies
};

template <class E, class W>
void Model<E, W>::begin(const Batch &batch) {
    int threads = num_threads();
    if (!shares_ || threads != threads_) {
        threads_ = threads;
        row_sums_.resize(threads);
        shares_ = std::make_unique<Shares>(spec_.layers * kPhases + kPhases, threads);
    }
    shares_->reset();
    batch_ = batch;
    reserve_scratch();
    blocks_ = find_blocks(batch);
}

template <class E, class W>
void Model<E, W>::reserve_scratch() {
    size_t rows = batch_.rows;
    if (y_.size() >= rows * spec_.hidden) return;
    x_.resize(rows * spec_.hidden);
    y_.resize(rows * spec_.hidden);
    qkv_.resize(rows * (query_width() + 2 * kv_width()));
    normed_.resize(rows * 2 * spec_.hidden);
    queries_.resize(rows * query_width());
    heads_.resize(rows * query_width());
    mlp_.resize(rows * spec_.intermediate);
}

void store_biased(float *to, const float *sums, int n, const float *bias, int column) {
    for (int i = 0; i < n; i += kLanes)
        store(to + i, bias ? load(sums + i) + load(bias + column + i) : load(sums + i));
}

template <class E, class W>
void Model<E, W>::run(int thread) {
    const int rows = batch_.rows, H = spec_.hidden, width = query_width() + 2 * kv_width();
    for (int l = 0; l < spec_.layers; l++) {
        const LayerSpec &layer = layers_[l];
        const LayerKV<E> kv = kv_.layer(l);
        const Scoring scoring{spec_.query_scale, spec_.attention_softcap, layer.window};
        int phase = l * kPhases;
        each(phase + kNormIn, thread, rows, [&](int row) {
            complete_layer(row, l - 1);
            norm_input(row, layer);
        });
        const Matrix<W> out = matrix(layer.attention_out, H, query_width());
        const Matrix<W> gate_up = matrix(layer.gate_up, 2 * spec_.intermediate, H);
        const Matrix<W> down = matrix(layer.down, H, spec_.intermediate);
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
            if (item >= items) return store_keys_and_values(block, head, layer, kv);
            for (int row = block.row; row < block.row + block.rows; row++) rotate_queries(row, head, layer);
        });
        each(phase + kAttend, thread, int(attention_.items()), [&](int item) {
            attention_.run(item, thread, kv, queries_.data(), scoring, heads_.data());
        });
        linear(phase + kOut, thread, heads_.data(), rows, out, gate_up,
               [&](int row, int column, const float *sums, int n) {
                   store_biased(&y_[long(row) * H + column], sums, n, layer.out_bias, column);
               });
        each(phase + kNormMlp, thread, rows, [&](int row) {
            add(row, layer.post_attention_norm);
            norm_row(&x_[long(row) * H], layer.mlp_norm, &normed_[long(row) * H]);
        });
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
    each(phase, thread, rows, [&](int row) { complete_layer(row, spec_.layers - 1); });
    each(phase + 1, thread, batch_.logits_count, [&](int i) {
        const float *x = &x_[long(batch_.logits_rows[i]) * H];
        if (batch_.states) std::copy(x, x + H, batch_.states + long(i) * H);
        norm_row(x, spec_.final_norm, &normed_[long(i) * H]);
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

template <class E, class W>
void Model<E, W>::run_context(int thread) {
    const int rows = batch_.rows, H = spec_.hidden, width = query_width() + 2 * kv_width();
    each(kNormIn, thread, rows, [&](int row) {
        for (int i = 0; i < H; i += kLanes)
            store(&normed_[long(row) * H + i], load(batch_.x + long(row) * H + i));
    });
    // Whole chunks only: the last queries come along where they end amid one.
    const int skipped = query_width() / (2 * kLanes) * 2 * kLanes;
    for (int l = 0; l < spec_.layers; l++) {
        const Matrix<W> all = qkv_of(l);
        const Matrix<W> wanted = all.behind(skipped);
        const int phase = l * kPhases;
        linear(phase + kQkv, thread, normed_.data(), rows, wanted, qkv_of((l + 1) % spec_.layers),
               [&](int row, int column, const float *sums, int n) {
                   store_biased(qkv_row(row) + skipped + column, sums, n, layers_[l].qkv_bias, skipped + column);
               });
        each(phase + kRope, thread, int(blocks_.size()) * spec_.kv_heads, [&](int item) {
            store_keys_and_values(blocks_[item / spec_.kv_heads], item % spec_.kv_heads, layers_[l], kv_.layer(l));
        });
    }
}

template <class E, class W>
void Model<E, W>::take_input(int row) {
    float *x = &x_[long(row) * spec_.hidden];
    if (batch_.x) {
        std::copy_n(batch_.x + long(row) * spec_.hidden, spec_.hidden, x);
        return;
    }
    embed(batch_.tokens + row, 1, x);
}

// x += y, normalised first where the model says so.
template <class E, class W>
void Model<E, W>::add(int row, const float *post_norm) {
    const int H = spec_.hidden;
    float *x = &x_[long(row) * H];
    const float *y = &y_[long(row) * H];
    const float scale = post_norm ? rms_scale(y, H, spec_.epsilon) : 1.0f;
    for (int i = 0; i < H; i += kLanes) {
        f32x16 add = load(y + i);
        if (post_norm) add = add * scale * load(post_norm + i);
        store(x + i, load(x + i) + add);
    }
}

// x becomes the output of a layer, -1: the input of the first one. It is copied out where a
// source of drafts asked for it.
template <class E, class W>
void Model<E, W>::complete_layer(int row, int layer) {
    const int H = spec_.hidden;
    if (layer < 0) take_input(row);
    else add(row, layers_[layer].post_mlp_norm);
    for (int t = 0; t < batch_.tap_count; t++)
        if (batch_.tap_layers[t] == layer)
            std::copy_n(&x_[long(row) * H], H, batch_.taps + (long(row) * batch_.tap_count + t) * H);
}

// What the queries, keys and values of a layer are made from.
template <class E, class W>
void Model<E, W>::norm_input(int row, const LayerSpec &layer) {
    const int H = spec_.hidden;
    float *x = &x_[long(row) * H];
    E *normed = &normed_[long(row) * input_width(layer)];
    if (layer.side_norm) {
        std::vector<float> embedded(batch_.side ? 0 : H);
        if (!batch_.side) embed(batch_.tokens + row, 1, embedded.data());
        norm_row(batch_.side ? batch_.side + long(row) * H : embedded.data(), layer.side_norm, normed);
        normed += H;
    }
    norm_row(x, layer.input_norm, normed);
    if (layer.residual_is_normed) norm_row(x, layer.input_norm, x);
}

// Norm and rotation of one head of one row, in place.
void rotate_head(float *head, const ModelSpec &spec, const float *norm, const float *rope) {
    const int dim = spec.head_dim, half = spec.rope_dim / 2;
    if (norm) rms_norm(head, norm, dim, spec.epsilon, head);
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
template <class E, class W>
void Model<E, W>::rotate_queries(int row, int head, const LayerSpec &layer) {
    const int dim = spec_.head_dim, group = shape_.group();
    for (int g = 0; g < group; g++) {
        float *query = qkv_row(row) + (head * group + g) * dim;
        rotate_head(query, spec_, layer.query_norm, rope_of(layer, row));
        E *to = &queries_[((long(head) * batch_.rows + row) * group + g) * dim];
        for (int d = 0; d < dim; d += kLanes) store(to + d, load(query + d));
    }
}

template <class E, class W>
void Model<E, W>::store_keys_and_values(const RowBlock &block, int head, const LayerSpec &layer, const LayerKV<E> &kv) {
    const int dim = spec_.head_dim;
    for (int r = 0; r < block.rows; r++) {
        float *key = qkv_row(block.row + r) + query_width() + head * dim;
        const float *value = key + kv_width();
        rotate_head(key, spec_, layer.key_norm, rope_of(layer, block.row + r));
        for (int d = 0; d < dim; d += kLanes) {
            E k[kLanes], v[kLanes];
            store(k, load(key + d));
            store(v, load(value + d));
            kv.place(head, block.page, block.lane + r, d, k, v);
        }
    }
}

// From a chunk to what this thread reads kPrefetch bytes later: in its own range, and beyond the
// end of that, in its range of the next matrix.
template <class E, class W>
long Model<E, W>::bytes_ahead(int thread, int chunk, const Matrix<W> &matrix, const Matrix<W> &next) const {
    int first = shares_->begin(matrix.chunks(), thread), end = shares_->begin(matrix.chunks(), thread + 1);
    if (chunk < first || chunk >= end) return 0;  // helping another thread
    int later = chunk + std::max(1, int(kPrefetch / long(sizeof(W)) / matrix.chunk_size()));
    const W *target = matrix.chunk(later);
    if (later >= end)
        target = next.chunk(shares_->begin(next.chunks(), thread)) + (later - end) * matrix.chunk_size();
    return (target - matrix.chunk(chunk)) * long(sizeof(W));
}

// Asks at once for what other threads have just written, or it comes line by line.
template <class E>
void fetch(const E *from, long elements) {
    for (long i = 0; i < elements; i += kStep<E>) __builtin_prefetch(from + i);
}

template <class E, class W>
template <class Epilogue>
void Model<E, W>::linear(int phase, int thread, const E *x, int rows, const Matrix<W> &matrix,
                         const Matrix<W> &next, const Epilogue &epilogue) {
    fetch(x, long(std::min(rows, kMaxRows)) * matrix.inputs);
    std::vector<float> &row_sums = row_sums_[thread];
    if (matrix.scales) {
        row_sums.resize(rows);
        for (int row = 0; row < rows; row++) row_sums[row] = sum_of(x + long(row) * matrix.inputs, matrix.inputs);
    }
    each(phase, thread, matrix.chunks(), [&](int chunk) {
        multiply_chunk(x, rows, matrix, chunk, bytes_ahead(thread, chunk, matrix, next), epilogue, row_sums.data());
    });
}

}  // namespace
}  // namespace outrider

using outrider::AnyModel;

extern "C" {

void *outrider_model_new(const outrider::ModelSpec *spec) {
    using namespace outrider;
    if (spec->kind == kU7) return static_cast<AnyModel *>(new Model<bf16, u7>(*spec));
    if (spec->kind == kBf16) return static_cast<AnyModel *>(new Model<bf16, bf16>(*spec));
    return static_cast<AnyModel *>(new Model<float, float>(*spec));
}
void outrider_model_free(void *model) { delete static_cast<AnyModel *>(model); }
void outrider_model_allocate_kv(void *model, long pages) { static_cast<AnyModel *>(model)->allocate_kv(pages); }
void outrider_model_forward(void *model, const outrider::Batch *batch) { static_cast<AnyModel *>(model)->forward(*batch); }
void outrider_model_store_context(void *model, const outrider::Batch *batch) {
    static_cast<AnyModel *>(model)->store_context(*batch);
}
void outrider_model_embed(void *model, const int *tokens, int count, float *out) {
    static_cast<AnyModel *>(model)->embed(tokens, count, out);
}
void outrider_model_move_kv(void *model, const int *from, const int *to, int n) {
    static_cast<AnyModel *>(model)->move_kv(from, to, n);
}

}  // extern "C"
