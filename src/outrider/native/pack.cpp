// Weights from rows of a checkpoint into the tiles that multiply() reads.
#include <sys/mman.h>

#include <cstdlib>

#include "multiply.h"
#include "pool.h"

namespace outrider {
namespace {

// Where the tiles of some weights go: to every `step`-th tile of a matrix of `tiles`.
struct Places {
    int first, step, tiles;
};

template <class Out, class In>
void pack(Out *matrix, const In *in, int outputs, int inputs, Places places) {
    parallel_for((outputs + kLanes - 1) / kLanes, 1, [&](long t) {
        const long place = places.first + t * places.step;
        const bool in_turn = place % 2 || place + 1 < places.tiles;  // with the other tile of its chunk
        Out *chunk = matrix + place / 2 * 2 * kLanes * inputs;
        Out *tile = in_turn ? chunk + place % 2 * kStep<Out> : chunk;
        for (int lane = 0; lane < kLanes; lane++) {
            long row = t * kLanes + lane;
            for (int k = 0; k < inputs; k++)
                store(tile + tile_index(tile, k, lane, in_turn ? 2 : 1),
                      row < outputs ? to_float(in[row * inputs + k]) : 0.0f);
        }
    });
}

}  // namespace
}  // namespace outrider

extern "C" {

// Packs `outputs` x `inputs` weights into a matrix of `tiles` tiles: their tile t becomes its tile
// first + t * step. Lanes beyond `outputs` become zero.
void outrider_pack(void *matrix, int matrix_is_bf16, const void *in, int in_is_bf16, int outputs, int inputs,
                   int first, int step, int tiles) {
    using namespace outrider;
    const Places places{first, step, tiles};
    if (matrix_is_bf16 && in_is_bf16) pack((bf16 *)matrix, (const bf16 *)in, outputs, inputs, places);
    else if (matrix_is_bf16) pack((bf16 *)matrix, (const float *)in, outputs, inputs, places);
    else if (in_is_bf16) pack((float *)matrix, (const bf16 *)in, outputs, inputs, places);
    else pack((float *)matrix, (const float *)in, outputs, inputs, places);
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
