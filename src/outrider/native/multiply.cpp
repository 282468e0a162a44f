#include "multiply.h"

#include <utility>

namespace outrider {
namespace {

// One cache line, `ahead` bytes on: the hardware's own prefetch stops at each 4 KB page, which
// costs a third of the bandwidth when weights are read through once.
inline void prefetch(const void *at, long ahead) {
    if (ahead) __builtin_prefetch(static_cast<const char *>(at) + ahead, 0, 3);
}

template <int M, int N>
inline void accumulate(f32x16 (&sums)[M][N], const float *x, long ldx, const float *w, int K,
                       long ahead) {
    for (int k = 0; k < K; k++) {
        f32x16 tiles[N];
        for (int n = 0; n < N; n++) {
            const float *at = w + (long(n) * K + k) * kLanes;
            tiles[n] = load(at);
            prefetch(at, ahead);
        }
        for (int m = 0; m < M; m++) {
            f32x16 value = splat(x[m * ldx + k]);
            for (int n = 0; n < N; n++) sums[m][n] = fma(tiles[n], value, sums[m][n]);
        }
    }
}

template <int M, int N>
inline void accumulate(f32x16 (&sums)[M][N], const bf16 *x, long ldx, const bf16 *w, int K,
                       long ahead) {
    for (int k = 0; k < K; k += 2) {
#if defined(__AVX512BF16__)
        __m512bh tiles[N];
        for (int n = 0; n < N; n++) {
            const bf16 *at = w + (long(n) * K + k) * kLanes;
            tiles[n] = (__m512bh)_mm512_loadu_si512(at);
            prefetch(at, ahead);
        }
        for (int m = 0; m < M; m++) {
            int32_t pair;
            std::memcpy(&pair, x + m * ldx + k, 4);
            __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
            for (int n = 0; n < N; n++)
                sums[m][n] = (f32x16)_mm512_dpbf16_ps((__m512)sums[m][n], tiles[n], value);
        }
#else
        u32x16 tiles[N];
        for (int n = 0; n < N; n++) {
            const bf16 *at = w + (long(n) * K + k) * kLanes;
            std::memcpy(&tiles[n], at, 64);
            prefetch(at, ahead);
        }
        for (int m = 0; m < M; m++) {
            f32x16 even = splat(to_float(x[m * ldx + k]));
            f32x16 odd = splat(to_float(x[m * ldx + k + 1]));
            for (int n = 0; n < N; n++) {
                f32x16 low = __builtin_bit_cast(f32x16, tiles[n] << 16);
                f32x16 high = __builtin_bit_cast(f32x16, tiles[n] & 0xffff0000u);
                sums[m][n] = fma(high, odd, fma(low, even, sums[m][n]));
            }
        }
#endif
    }
}

template <class E, int M, int N>
void kernel(const E *x, long ldx, long x_step, const E *const *w, int blocks, int K, float *out,
            long ldo, long ahead) {
    f32x16 sums[M][N] = {};
    for (int b = 0; b < blocks; b++) accumulate(sums, x + b * x_step, ldx, w[b], K, ahead);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(out + m * ldo + n * kLanes, sums[m][n]);
}

template <class E>
using Kernel = void (*)(const E *, long, long, const E *const *, int, int, float *,
                       long, long);

template <class E, int N, int... I>
void dispatch(int rows, std::integer_sequence<int, I...>, const E *x, long ldx, long x_step,
              const E *const *w, int blocks, int K, float *out, long ldo, long ahead) {
    static constexpr decltype(&kernel<E, 1, N>) table[] = {kernel<E, I + 1, N>...};
    table[rows - 1](x, ldx, x_step, w, blocks, K, out, ldo, ahead);
}

}  // namespace

template <class E>
void multiply(int rows, int tiles, const E *x, long ldx, long x_step, const E *const *w, int blocks,
              int K, float *out, long ldo, long ahead) {
    std::make_integer_sequence<int, kMaxRows> any;
    if (tiles == 1) dispatch<E, 1>(rows, any, x, ldx, x_step, w, blocks, K, out, ldo, ahead);
    else dispatch<E, 2>(rows, any, x, ldx, x_step, w, blocks, K, out, ldo, ahead);
}

template void multiply(int, int, const float *, long, long, const float *const *, int, int, float *,
                       long, long);
template void multiply(int, int, const bf16 *, long, long, const bf16 *const *, int, int, float *,
                       long, long);

}  // namespace outrider
