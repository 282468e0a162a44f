// The one matrix kernel of this library: rows times packed tiles of sixteen outputs.
//
// A tile holds sixteen outputs over K inputs. bf16: [K/2][16][2], pairs of inputs side by side as
// the dot-product instruction wants them; u7 likewise; float: [K][16]. One cache line of it is a
// step, of u7 half a line. Linear weights, key pages (outputs = sixteen keys, inputs = head
// dimensions) and value pages (outputs = sixteen dimensions, inputs = sixteen positions) all have
// this layout, so one kernel serves them.
//
// Two tiles of a weight matrix take turns, step by step: a core that reads one stream gets 5 to 10 %
// more out of memory than one that reads two.
#pragma once
#include <algorithm>

#include "vec.h"

namespace outrider {

constexpr int kLanes = 16;
constexpr int kMaxRows = 12;  // 12 rows x 2 tiles keep 24 of 32 AVX-512 registers as sums

enum Kind { kFloat, kBf16, kU7 };  // what matrices are kept in, as Python says it

// Elements of a step.
template <class W>
constexpr long kStep = 64 / sizeof(W);
template <>
inline constexpr long kStep<u7> = kStep<bf16>;

// Place of (input k, output lane) in a tile whose steps lie `stride` steps apart.
inline long tile_index(const float *, int k, int lane, int stride = 1) { return long(k) * stride * kLanes + lane; }
inline long tile_index(const bf16 *, int k, int lane, int stride = 1) {
    return (long(k / 2) * stride * kLanes + lane) * 2 + k % 2;
}
inline long tile_index(const u7 *, int k, int lane, int stride = 1) {
    return tile_index(static_cast<const bf16 *>(nullptr), k, lane, stride);
}

// out[m][16 n + lane] (stride ldo) = sum over b < blocks, k < inputs of
//     x[m * ldx + b * x_step + k] * tile n of w[b] at (k, lane).
// The sum runs over b, then k, in order. A weight of u7 counts as 128 + bits.
template <class E, class W = E>
struct Product {
    const E *x;
    long ldx, x_step;
    const W *const *w;
    int blocks, inputs;
    long next_page;  // elements from a tile to the next; 0: their steps take turns
    float *out;
    long ldo;
    // Bytes from what is read to what is asked of memory meanwhile, 0: nothing. Where so many
    // passes over a matrix follow each other, each asks for that part of the lines.
    long ahead = 0, also_ahead = 0;
    int passes = 1;
};

// For rows <= kMaxRows and tiles <= 2.
template <class E, class W = E>
void multiply(int rows, int tiles, const Product<E, W> &product);

// Product with one chunk of a weight matrix: one tile, or two that take turns.
template <class E, class W>
Product<E, W> with_chunk(const E *x, long ldx, const W *const *chunk, int inputs, float *out, long ldo,
                         long ahead = 0) {
    return {x, ldx, 0, chunk, 1, inputs, 0, out, ldo, ahead};
}

// A packed matrix, read in chunks: two tiles that take turns, or the last one alone.
template <class W>
struct Matrix {
    const W *weights;
    int outputs, inputs;
    const float *scales = nullptr;  // of u7: [tiles * 16]
    int tiles() const { return (outputs + kLanes - 1) / kLanes; }
    int chunks() const { return (tiles() + 1) / 2; }
    long chunk_size() const { return 2L * kLanes * inputs; }
    const W *chunk(int i) const { return weights + i * chunk_size(); }
    // Without the first outputs, whole chunks of them.
    Matrix behind(int skipped) const {
        return {weights + long(skipped) * inputs, outputs - skipped, inputs, scales ? scales + skipped : nullptr};
    }
};

// Where the scales of packed u7 are, one for each output.
template <class W>
W *behind_tiles(W *weights, int tiles, int inputs) {
    return weights + long(tiles) * kLanes * inputs;
}

// Sum of a row of x, as `unscale` wants it; n: a multiple of 16.
template <class E>
float sum_of(const E *x, int n) {
    f32x16 sum = {};
    for (int i = 0; i < n; i += kLanes) sum += load(x + i);
    return reduce_add(sum);
}

// From products with 128 + bits to those with weights.
inline void unscale(float *sums, int n, float row_sum, const float *scales) {
    const f32x16 beyond = splat(row_sum * (128 + kMiddle));
    for (int i = 0; i < n; i += kLanes) store(sums + i, (load(sums + i) - beyond) * load(scales + i));
}

// Rows x [rows][inputs] times one chunk, in passes of about as many rows each. What lies `ahead` is
// asked for in all of them: asked for in the first alone, memory is late for it and idle in the
// others (16 rows of the default target took 7.3 ms so, and 6.5 ms now; one row 5.8).
// epilogue(row, column, sums, n): n = 16 or 32 results of one row, from `column` on, before they
// leave the cache. row_sums: of x, where the matrix has scales.
template <class E, class W, class Epilogue>
void multiply_chunk(const E *x, int rows, const Matrix<W> &matrix, int chunk, long ahead, const Epilogue &epilogue,
                    const float *row_sums = nullptr) {
    alignas(64) float sums[kMaxRows * 2 * kLanes];
    const int inputs = matrix.inputs, n = std::min(2, matrix.tiles() - 2 * chunk), column = chunk * 2 * kLanes;
    const W *w = matrix.chunk(chunk);
    const int passes = (rows + kMaxRows - 1) / kMaxRows;
    for (int pass = 0; pass < passes; pass++) {
        const int row = rows * pass / passes, count = rows * (pass + 1) / passes - row;
        auto product = with_chunk(x + long(row) * inputs, inputs, &w, inputs, sums, 2 * kLanes, ahead);
        if (ahead) product.ahead += matrix.chunk_size() * pass / passes * long(sizeof(W));
        product.passes = passes;
        multiply(count, n, product);
        for (int m = 0; m < count; m++) {
            float *found = sums + m * 2 * kLanes;
            if (matrix.scales) unscale(found, n * kLanes, row_sums[row + m], matrix.scales + column);
            epilogue(row + m, column, found, n * kLanes);
        }
    }
}

}  // namespace outrider
