#include "kv.h"

#include <algorithm>

namespace outrider {

std::vector<RowBlock> find_blocks(const Batch &batch) {
    std::vector<RowBlock> blocks;
    for (int b = 0; b < batch.requests; b++)
        for (int row = batch.row_starts[b], slot = batch.context_lens[b]; row < batch.row_starts[b + 1];) {
            int rows = std::min(kPage - slot % kPage, batch.row_starts[b + 1] - row);
            blocks.push_back({row, rows, slot % kPage, batch.pages[batch.page_offsets[b] + slot / kPage]});
            row += rows;
            slot += rows;
        }
    return blocks;
}

template <class E>
void KVStore<E>::move(const int *from, const int *to, int n) {
    const int dim = shape_.head_dim;
    std::vector<E> keys(long(n) * dim), values(long(n) * dim);
    for (int l = 0; l < layers_; l++)
        for (int head = 0; head < shape_.kv_heads; head++) {
            const LayerKV<E> kv = layer(l);
            for (int i = 0; i < n; i++)
                for (int d = 0; d < dim; d += kLanes)
                    kv.take(head, from[i] / kPage, from[i] % kPage, d, &keys[i * dim + d], &values[i * dim + d]);
            for (int i = 0; i < n; i++)
                for (int d = 0; d < dim; d += kLanes)
                    kv.place(head, to[i] / kPage, to[i] % kPage, d, &keys[i * dim + d], &values[i * dim + d]);
        }
}

template class KVStore<float>;
template class KVStore<bf16>;

}  // namespace outrider
