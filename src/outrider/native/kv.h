// What a forward is given, and the paged KV it reads and writes.
#pragma once
#include <cstdlib>
#include <vector>

#include "multiply.h"

namespace outrider {

constexpr int kPage = kLanes;  // positions per KV page

struct Batch {  // mirrored in outrider/target/native_batch.py
    int rows, requests, logits_count, tap_count;
    int two_way;  // rows see all new rows of their request, not only those before
    const int *tokens, *positions, *row_starts, *context_lens, *page_offsets, *pages, *parents;
    const uint8_t *is_tree;
    const int *logits_rows, *tap_layers;
    float *logits, *taps;
    const float *x;         // null, or [T][H]: rows in place of the embeddings of the tokens
    const float *side;      // null, or [T][H]: the second input, where it is not these embeddings
    float *states;          // null, or [logits_count][H]: rows before the last norm

    // The newest position that a row sees.
    int newest(int request, int row) const { return positions[two_way ? row_starts[request + 1] - 1 : row]; }
};

// New rows that go into one KV page: given out whole, so that threads never write to the same
// cache lines.
struct RowBlock {
    int row, rows, lane;
    long page;
};
std::vector<RowBlock> find_blocks(const Batch &batch);

struct AttentionShape {
    int heads, kv_heads, head_dim;
    int group() const { return heads / kv_heads; }
    long page_elements() const { return long(kPage) * head_dim; }
};

// K and V of one layer: [kv head][page][16 positions x head_dim], tiled as in multiply.h.
template <class E>
struct LayerKV {
    E *keys, *values;
    long pages;
    AttentionShape shape;

    E *key_page(int head, long page) const { return keys + (head * pages + page) * shape.page_elements(); }
    E *value_page(int head, long page) const { return values + (head * pages + page) * shape.page_elements(); }

    // Puts 16 dimensions from `first_dim` on of a key and a value into their lane of a page.
    void place(int head, long page, int lane, int first_dim, const E *key, const E *value) const {
        E *to_keys = key_page(head, page), *to_values = value_page(head, page) + long(first_dim) * kPage;
        for (int d = 0; d < kLanes; d++) {
            to_keys[tile_index(keys, first_dim + d, lane)] = key[d];
            to_values[tile_index(values, lane, d)] = value[d];
        }
    }
    // The reverse.
    void take(int head, long page, int lane, int first_dim, E *key, E *value) const {
        const E *from_keys = key_page(head, page), *from_values = value_page(head, page) + long(first_dim) * kPage;
        for (int d = 0; d < kLanes; d++) {
            key[d] = from_keys[tile_index(keys, first_dim + d, lane)];
            value[d] = from_values[tile_index(values, lane, d)];
        }
    }
};

// KV of all layers, in one allocation.
template <class E>
class KVStore {
  public:
    KVStore(int layers, AttentionShape shape) : layers_(layers), shape_(shape) {}
    ~KVStore() { std::free(memory_); }
    KVStore(const KVStore &) = delete;

    void allocate(long pages) {
        std::free(memory_);
        pages_ = pages;
        memory_ = static_cast<E *>(std::calloc(2 * layers_ * zone(), sizeof(E)));
    }
    LayerKV<E> layer(int l) const {
        return {memory_ + 2 * l * zone(), memory_ + (2 * l + 1) * zone(), pages_, shape_};
    }
    // Copies slots as if all were read before any is written.
    void move(const int *from, const int *to, int n);

  private:
    long zone() const { return long(shape_.kv_heads) * pages_ * shape_.page_elements(); }
    long layers_;
    AttentionShape shape_;
    long pages_ = 0;
    E *memory_ = nullptr;
};

}  // namespace outrider
