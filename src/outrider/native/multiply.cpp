#include "multiply.h"

#include <type_traits>
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

// A step of weights as pairs of bf16.
inline u32x16 pairs(const bf16 *tile) { return read<u32x16>(tile); }
inline u32x16 pairs(const u7 *tile) {
    typedef uint8_t u8x32 __attribute__((vector_size(32)));
    typedef uint16_t u16x32 __attribute__((vector_size(64)));
    return __builtin_bit_cast(u32x16, __builtin_convertvector(read<u8x32>(tile), u16x32) | kUnit);
}

template <int M, int N, class W>
inline void step(f32x16 (&sums)[M][N], const bf16 *x, long ldx, const W *const (&tiles)[N]) {
    u32x16 weights[N];
    for (int n = 0; n < N; n++) weights[n] = pairs(tiles[n]);
    for (int m = 0; m < M; m++) {
#if defined(__AVX512BF16__)
        __m512bh value = (__m512bh)_mm512_set1_epi32(read<int32_t>(x + m * ldx));
        for (int n = 0; n < N; n++)
            sums[m][n] = (f32x16)_mm512_dpbf16_ps((__m512)sums[m][n], (__m512bh)weights[n], value);
#else
        f32x16 even = splat(to_float(x[m * ldx])), odd = splat(to_float(x[m * ldx + 1]));
        for (int n = 0; n < N; n++) {
            f32x16 low = __builtin_bit_cast(f32x16, weights[n] << 16);
            f32x16 high = __builtin_bit_cast(f32x16, weights[n] & 0xffff0000u);
            sums[m][n] = fma(high, odd, fma(low, even, sums[m][n]));
        }
#endif
    }
}

// Paged: tiles lie in pages, else they take turns; known here, as addresses cost time.
template <class E, class W, int M, int N, bool Paged>
void kernel(const Product<E, W> &product) {
    constexpr int inputs_of_a_step = kStep<W> / kLanes;
    constexpr long bytes_of_a_step = N * kStep<W> * long(sizeof(W));
    const Product<E, W> p = product;
    f32x16 sums[M][N] = {};
    for (int b = 0; b < p.blocks; b++) {
        const E *x = p.x + b * p.x_step;
        const W *w = p.w[b];
        const char *asked = reinterpret_cast<const char *>(w) + p.ahead;
        const long asked_step = bytes_of_a_step / p.passes;
        for (int k = 0; k < p.inputs; k += inputs_of_a_step, w += (Paged ? 1 : N) * kStep<W>) {
            const W *tiles[N];
            for (int n = 0; n < N; n++) {
                tiles[n] = w + n * (Paged ? p.next_page : kStep<W>);
                if (Paged) prefetch(tiles[n], p.ahead);
                if (Paged) prefetch(tiles[n], p.also_ahead);
            }
            if (!Paged && p.ahead) {
                __builtin_prefetch(asked);
                if (p.passes == 1 && bytes_of_a_step > 64) __builtin_prefetch(asked + 64);
                asked += asked_step;
            }
            step(sums, x + k, p.ldx, tiles);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(p.out + m * p.ldo + n * kLanes, sums[m][n]);
}

template <int N, bool Paged, class E, class W, int... I>
void dispatch(int rows, std::integer_sequence<int, I...>, const Product<E, W> &product) {
    static constexpr void (*table[])(const Product<E, W> &) = {kernel<E, W, I + 1, N, Paged>...};
    table[rows - 1](product);
}

}  // namespace

template <class E, class W>
void multiply(int rows, int tiles, const Product<E, W> &product) {
    std::make_integer_sequence<int, kMaxRows> any;
    if (tiles == 1) dispatch<1, true>(rows, any, product);
    else if (!product.next_page) dispatch<2, false>(rows, any, product);
    else if constexpr (std::is_same_v<E, W>) dispatch<2, true>(rows, any, product);  // pages hold no u7
}

template void multiply(int, int, const Product<float> &);
template void multiply(int, int, const Product<bf16> &);
template void multiply(int, int, const Product<bf16, u7> &);

}  // namespace outrider
