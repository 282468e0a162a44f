// The one matrix kernel of this library: rows times packed tiles of sixteen outputs.
//
// A tile holds sixteen outputs over K inputs. bf16: [K/2][16][2], pairs of inputs side by side as
// the dot-product instruction wants them; float: [K][16]. One cache line of it is a step. Linear
// weights, key pages (outputs = sixteen keys, inputs = head dimensions) and value pages (outputs =
// sixteen dimensions, inputs = sixteen positions) all have this layout, so one kernel serves them.
//
// Two tiles of a weight matrix take turns, step by step: a core that reads one stream gets 5 to 10 %
// more out of memory than one that reads two.
#pragma once
#include <algorithm>

#include "vec.h"

namespace outrider {

constexpr int kLanes = 16;
constexpr int kMaxRows = 12;  // 12 rows x 2 tiles keep 24 of 32 AVX-512 registers as sums

// Elements of a step.
template <class E>
constexpr long kStep = 64 / sizeof(E);

// Place of (input k, output lane) in a tile whose steps lie `stride` steps apart.
inline long tile_index(const float *, int k, int lane, int stride = 1) { return long(k) * stride * kLanes + lane; }
inline long tile_index(const bf16 *, int k, int lane, int stride = 1) {
    return (long(k / 2) * stride * kLanes + lane) * 2 + k % 2;
}

// out[m][16 n + lane] (stride ldo) = sum over b < blocks, k < inputs of
//     x[m * ldx + b * x_step + k] * tile n of w[b] at (k, lane).
// The sum runs over b, then k, in order.
template <class E>
struct Product {
    const E *x;
    long ldx, x_step;
    const E *const *w;
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
template <class E>
void multiply(int rows, int tiles, const Product<E> &product);

// Product with one chunk of a weight matrix: one tile, or two that take turns.
template <class E>
Product<E> with_chunk(const E *x, long ldx, const E *const *chunk, int inputs, float *out, long ldo,
                      long ahead = 0) {
    return {x, ldx, 0, chunk, 1, inputs, 0, out, ldo, ahead};
}

// A packed matrix, read in chunks: two tiles that take turns, or the last one alone.
template <class E>
struct Matrix {
    const E *weights;
    int outputs, inputs;
    int tiles() const { return (outputs + kLanes - 1) / kLanes; }
    int chunks() const { return (tiles() + 1) / 2; }
    long chunk_size() const { return 2L * kLanes * inputs; }
    const E *chunk(int i) const { return weights + i * chunk_size(); }
};

// Rows x [rows][inputs] times one chunk, in passes of about as many rows each. What lies `ahead` is
// asked for in all of them: asked for in the first alone, memory is late for it and idle in the
// others (16 rows of the default target took 7.3 ms so, and 6.5 ms now; one row 5.8).
// epilogue(row, column, sums, n): n = 16 or 32 results of one row, from `column` on, before they
// leave the cache.
template <class E, class Epilogue>
void multiply_chunk(const E *x, int rows, const Matrix<E> &matrix, int chunk, long ahead, const Epilogue &epilogue) {
    alignas(64) float sums[kMaxRows * 2 * kLanes];
    const int inputs = matrix.inputs, n = std::min(2, matrix.tiles() - 2 * chunk), column = chunk * 2 * kLanes;
    const E *w = matrix.chunk(chunk);
    const int passes = (rows + kMaxRows - 1) / kMaxRows;
    for (int pass = 0; pass < passes; pass++) {
        const int row = rows * pass / passes, count = rows * (pass + 1) / passes - row;
        auto product = with_chunk(x + long(row) * inputs, inputs, &w, inputs, sums, 2 * kLanes, ahead);
        if (ahead) product.ahead += matrix.chunk_size() * pass / passes * long(sizeof(E));
        product.passes = passes;
        multiply(count, n, product);
        for (int m = 0; m < count; m++) epilogue(row + m, column, sums + m * 2 * kLanes, n * kLanes);
    }
}

}  // namespace outrider
