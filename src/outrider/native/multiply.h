// The one matrix kernel of this library: rows times packed tiles of sixteen outputs.
//
// A tile holds sixteen outputs over K inputs. bf16: [K/2][16][2], pairs of inputs side by side as
// the dot-product instruction wants them; float: [K][16]. Linear weights, key pages (outputs =
// sixteen keys, inputs = head dimensions) and value pages (outputs = sixteen dimensions, inputs =
// sixteen positions) all have this layout, so one kernel serves them.
#pragma once
#include "vec.h"

namespace outrider {

constexpr int kLanes = 16;
constexpr int kMaxRows = 12;  // 12 rows x 2 tiles keep 24 of 32 AVX-512 registers as sums

// Place of (input k, output lane) in a tile.
inline long tile_index(const float *, int k, int lane) { return long(k) * kLanes + lane; }
inline long tile_index(const bf16 *, int k, int lane) {
    return (long(k / 2) * kLanes + lane) * 2 + k % 2;
}

// out[m][16 n + lane] (stride ldo) = sum over b < blocks, k < K of
//     x[m * ldx + b * x_step + k] * tile n of w[b] at (k, lane),
// for m < rows <= kMaxRows and n < tiles <= 2; tile n of a block lies 16 * K elements after the
// one before. The sum runs over b, then k, in order. `ahead`: bytes of w to prefetch ahead of
// the reading, for weights that come from memory.
template <class E>
void multiply(int rows, int tiles, const E *x, long ldx, long x_step, const E *const *w, int blocks,
              int K, float *out, long ldo, long ahead = 0);

}  // namespace outrider
