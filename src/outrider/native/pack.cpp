// Weights from rows of a checkpoint into the tiles that multiply() reads.
#include <sys/mman.h>

#include <cstdlib>

#include "multiply.h"
#include "pool.h"

namespace outrider {
namespace {

template <class Out, class In>
void pack(Out *out, const In *in, int outputs, int inputs, int tile_stride) {
    int tiles = (outputs + kLanes - 1) / kLanes;
    parallel_for(tiles, 1, [&](long t) {
        Out *tile = out + t * tile_stride * kLanes * inputs;
        for (int lane = 0; lane < kLanes; lane++) {
            long row = t * kLanes + lane;
            for (int k = 0; k < inputs; k++)
                store(tile + tile_index(tile, k, lane), row < outputs ? to_float(in[row * inputs + k]) : 0.0f);
        }
    });
}

}  // namespace
}  // namespace outrider

extern "C" {

// Packs `outputs` x `inputs` weights; tile t goes to tile t * tile_stride of `out`, and lanes
// beyond `outputs` become zero.
void outrider_pack(void *out, int out_is_bf16, const void *in, int in_is_bf16, int outputs, int inputs,
                   int tile_stride) {
    using namespace outrider;
    if (out_is_bf16 && in_is_bf16)
        pack((bf16 *)out, (const bf16 *)in, outputs, inputs, tile_stride);
    else if (out_is_bf16)
        pack((bf16 *)out, (const float *)in, outputs, inputs, tile_stride);
    else if (in_is_bf16)
        pack((float *)out, (const bf16 *)in, outputs, inputs, tile_stride);
    else
        pack((float *)out, (const float *)in, outputs, inputs, tile_stride);
}

// Memory on huge pages: with 4 KB pages a pass over the weights spends its time in page tables.
void *outrider_allocate(long bytes) {
    const long huge = 2L << 20;
    void *memory = std::aligned_alloc(huge, (bytes + huge - 1) / huge * huge);
#if defined(MADV_HUGEPAGE)
    if (memory) madvise(memory, (bytes + huge - 1) / huge * huge, MADV_HUGEPAGE);
#endif
    return memory;
}
void outrider_free(void *memory) { std::free(memory); }

}  // extern "C"
