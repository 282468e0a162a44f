// Weights from rows of a checkpoint into the tiles that multiply() reads.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "multiply.h"
#include "pool.h"

namespace outrider {
namespace {

// Where the tiles of some weights go: to every `step`-th tile of a matrix of `tiles`.
struct Places {
    int first, step, tiles;
};

// To the type of the tiles. One scale per row of weights, where they need one: the largest of them
// is as far from the middle as it goes.
template <class Out>
struct Rounded {
    template <class In>
    Rounded(const In *, int, float *) {}
    void store_at(Out *to, float x) const { store(to, x); }
};
template <>
struct Rounded<u7> {
    float per_scale = 0;
    template <class In>
    Rounded(const In *row, int inputs, float *scale) {
        float most = 0;
        for (int k = 0; row && k < inputs; k++) most = std::max(most, std::fabs(to_float(row[k])));
        *scale = most / (kMiddle - 1);
        if (std::isnormal(*scale)) per_scale = 1.0f / *scale;
    }
    void store_at(u7 *to, float x) const { to->bits = uint8_t(kMiddle + int(std::lrint(x * per_scale))); }
};

template <class Out, class In>
void pack(Out *matrix, const In *in, int outputs, int inputs, Places places) {
    float *scales = reinterpret_cast<float *>(behind_tiles(matrix, places.tiles, inputs));
    parallel_for((outputs + kLanes - 1) / kLanes, 1, [&](long t) {
        const long place = places.first + t * places.step;
        const bool in_turn = place % 2 || place + 1 < places.tiles;  // with the other tile of its chunk
        Out *chunk = matrix + place / 2 * 2 * kLanes * inputs;
        Out *tile = in_turn ? chunk + place % 2 * kStep<Out> : chunk;
        for (int lane = 0; lane < kLanes; lane++) {
            const In *row = t * kLanes + lane < outputs ? in + (t * kLanes + lane) * inputs : nullptr;
            const Rounded<Out> rounded(row, inputs, scales + place * kLanes + lane);
            for (int k = 0; k < inputs; k++)
                rounded.store_at(tile + tile_index(tile, k, lane, in_turn ? 2 : 1), row ? to_float(row[k]) : 0.0f);
        }
    });
}

}  // namespace
}  // namespace outrider

extern "C" {

// Packs `outputs` x `inputs` weights into a matrix of `tiles` tiles of a Kind: their tile t becomes
// its tile first + t * step. Lanes beyond `outputs` become zero. Scales go behind the tiles.
void outrider_pack(void *matrix, int kind, const void *in, int in_is_bf16, int outputs, int inputs, int first,
                   int step, int tiles) {
    using namespace outrider;
    const Places places{first, step, tiles};
    const auto from = [&](const auto *rows) {
        if (kind == kU7) pack((u7 *)matrix, rows, outputs, inputs, places);
        else if (kind == kBf16) pack((bf16 *)matrix, rows, outputs, inputs, places);
        else pack((float *)matrix, rows, outputs, inputs, places);
    };
    if (in_is_bf16) from((const bf16 *)in);
    else from((const float *)in);
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
