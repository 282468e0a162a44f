#include "multiply.h"

#include <utility>

namespace outrider {
namespace {

// One cache line, `ahead` bytes on; 0: none. The hardware's own prefetch stops at each 4 KB page,
// which costs a third of the bandwidth when weights are read through once.
inline void prefetch(const void *at, long ahead) {
    if (ahead) __builtin_prefetch(static_cast<const char *>(at) + ahead);
}

template <int M, int N>
inline void step(f32x16 (&sums)[M][N], const float *x, long ldx, const float *const (&tiles)[N]) {
    f32x16 weights[N];
    for (int n = 0; n < N; n++) weights[n] = load(tiles[n]);
    for (int m = 0; m < M; m++) {
        f32x16 value = splat(x[m * ldx]);
        for (int n = 0; n < N; n++) sums[m][n] = fma(weights[n], value, sums[m][n]);
    }
}

template <int M, int N>
inline void step(f32x16 (&sums)[M][N], const bf16 *x, long ldx, const bf16 *const (&tiles)[N]) {
#if defined(__AVX512BF16__)
    __m512bh weights[N];
    for (int n = 0; n < N; n++) weights[n] = (__m512bh)_mm512_loadu_si512(tiles[n]);
    for (int m = 0; m < M; m++) {
        int32_t pair;
        std::memcpy(&pair, x + m * ldx, 4);
        __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
        for (int n = 0; n < N; n++)
            sums[m][n] = (f32x16)_mm512_dpbf16_ps((__m512)sums[m][n], weights[n], value);
    }
#else
    u32x16 weights[N];
    for (int n = 0; n < N; n++) std::memcpy(&weights[n], tiles[n], 64);
    for (int m = 0; m < M; m++) {
        f32x16 even = splat(to_float(x[m * ldx])), odd = splat(to_float(x[m * ldx + 1]));
        for (int n = 0; n < N; n++) {
            f32x16 low = __builtin_bit_cast(f32x16, weights[n] << 16);
            f32x16 high = __builtin_bit_cast(f32x16, weights[n] & 0xffff0000u);
            sums[m][n] = fma(high, odd, fma(low, even, sums[m][n]));
        }
    }
#endif
}

// Paged: tiles lie in pages, else they take turns; known here, as addresses cost time.
template <class E, int M, int N, bool Paged>
void kernel(const Product<E> &product) {
    constexpr int inputs_of_a_step = kStep<E> / kLanes;
    const Product<E> p = product;
    f32x16 sums[M][N] = {};
    for (int b = 0; b < p.blocks; b++) {
        const E *x = p.x + b * p.x_step, *w = p.w[b];
        const char *asked = reinterpret_cast<const char *>(w) + p.ahead;
        const long asked_step = 64 * N / p.passes;
        for (int k = 0; k < p.inputs; k += inputs_of_a_step, w += (Paged ? 1 : N) * kStep<E>) {
            const E *tiles[N];
            for (int n = 0; n < N; n++) {
                tiles[n] = w + n * (Paged ? p.next_page : kStep<E>);
                if (Paged) prefetch(tiles[n], p.ahead);
                if (Paged) prefetch(tiles[n], p.also_ahead);
            }
            if (!Paged && p.ahead) {
                __builtin_prefetch(asked);
                if (p.passes == 1) __builtin_prefetch(asked + 64);
                asked += asked_step;
            }
            step(sums, x + k, p.ldx, tiles);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(p.out + m * p.ldo + n * kLanes, sums[m][n]);
}

template <class E, int N, bool Paged, int... I>
void dispatch(int rows, std::integer_sequence<int, I...>, const Product<E> &product) {
    static constexpr void (*table[])(const Product<E> &) = {kernel<E, I + 1, N, Paged>...};
    table[rows - 1](product);
}

}  // namespace

template <class E>
void multiply(int rows, int tiles, const Product<E> &product) {
    std::make_integer_sequence<int, kMaxRows> any;
    if (tiles == 1) dispatch<E, 1, true>(rows, any, product);
    else if (product.next_page) dispatch<E, 2, true>(rows, any, product);
    else dispatch<E, 2, false>(rows, any, product);
}

template void multiply(int, int, const Product<float> &);
template void multiply(int, int, const Product<bf16> &);

}  // namespace outrider
