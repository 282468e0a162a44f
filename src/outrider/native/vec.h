// Sixteen floats at a time, and the element types that weights and KV are kept in.
//
// Every sum in this library runs over its index in one fixed order with one accumulator per
// result, so a result has the same bits whatever else is computed beside it. That is what makes
// plain and speculative decoding agree bit for bit.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace outrider {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

struct bf16 {
    uint16_t bits;
};

// A weight of seven bits: (bits - kMiddle) times a scale of its output. 128 + bits is a bf16 whose
// bits are kUnit | bits, so that one instruction makes them ready to be multiplied.
struct u7 {
    uint8_t bits;
};
constexpr int kMiddle = 64, kUnit = 0x4300;

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }

// Round to nearest even; NaN stays NaN.
inline bf16 to_bf16(float x) {
    uint32_t u = __builtin_bit_cast(uint32_t, x);
    if ((u & 0x7fffffff) > 0x7f800000) return {uint16_t(u >> 16 | 0x40)};
    return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline void store(float *to, float x) { *to = x; }
inline void store(bf16 *to, float x) { *to = to_bf16(x); }

inline f32x16 splat(float x) { return f32x16{} + x; }
// What lies at an address, aligned or not.
template <class V>
inline V read(const void *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline f32x16 load(const float *p) { return read<f32x16>(p); }
inline f32x16 load(const bf16 *p) {
    typedef uint16_t u16x16 __attribute__((vector_size(32)));
    return __builtin_bit_cast(f32x16, __builtin_convertvector(read<u16x16>(p), u32x16) << 16);
}
inline void store(float *p, f32x16 v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16 *p, f32x16 v) {
#if defined(__AVX512BF16__)
    __m256bh packed = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &packed, sizeof packed);
#else
    for (int i = 0; i < 16; i++) p[i] = to_bf16(v[i]);
#endif
}

// Lanes past the end read as `filler`.
inline f32x16 load_part(const float *p, long n, float filler) {
    if (n >= 16) return load(p);
    f32x16 v = splat(filler);
    for (long i = 0; i < n; i++) v[i] = p[i];
    return v;
}

// One bit per lane of a comparison.
inline uint32_t mask_of(i32x16 lanes) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)lanes);
#else
    uint32_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= uint32_t(lanes[i] & 1) << i;
    return mask;
#endif
}

// a * b + c in one rounding where the CPU has it, in two where it has not.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) || defined(__aarch64__)
    f32x16 r;
    for (int i = 0; i < 16; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

#if defined(__AVX512F__)
inline f32x16 max(f32x16 a, f32x16 b) { return (f32x16)_mm512_max_ps((__m512)a, (__m512)b); }
inline f32x16 min(f32x16 a, f32x16 b) { return (f32x16)_mm512_min_ps((__m512)a, (__m512)b); }
inline float reduce_add(f32x16 v) { return _mm512_reduce_add_ps((__m512)v); }
inline float reduce_max(f32x16 v) { return _mm512_reduce_max_ps((__m512)v); }
inline f32x16 round(f32x16 v) { return (f32x16)_mm512_roundscale_ps((__m512)v, 0); }
// p * 2^n for whole n, down to zero.
inline f32x16 scale_by_power(f32x16 p, f32x16 n) {
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
}
#else
inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }
inline float reduce_add(f32x16 v) {
    float s[8];
    for (int i = 0; i < 8; i++) s[i] = v[i] + v[i + 8];
    for (int i = 0; i < 4; i++) s[i] += s[i + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}
inline float reduce_max(f32x16 v) {
    float m = v[0];
    for (int i = 1; i < 16; i++) m = v[i] > m ? v[i] : m;
    return m;
}
inline f32x16 round(f32x16 v) { return (v + 12582912.0f) - 12582912.0f; }  // |v| < 2^22
inline f32x16 scale_by_power(f32x16 p, f32x16 n) {
    f32x16 kept = n < -126.0f ? splat(-126.0f) : n;
    i32x16 exponent = __builtin_convertvector(kept, i32x16) << 23;
    f32x16 scaled = __builtin_bit_cast(f32x16, __builtin_bit_cast(i32x16, p) + exponent);
    return n < -126.0f ? f32x16{} : scaled;
}
#endif

// e^x with a relative error below 2e-7; exactly 0 below -104 (also for -infinity), and e^88
// above 88.
inline f32x16 exp(f32x16 x) {
    f32x16 y = max(min(x, splat(88.0f)), splat(-200.0f));
    f32x16 n = round(y * 1.44269504f);
    f32x16 r = fma(n, splat(-0.693359375f), y);  // ln 2 in two parts
    r = fma(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.9875691500e-4f);  // Cephes' polynomial for e^r, |r| <= ln(2) / 2
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
    return scale_by_power(p, n);
}

inline f32x16 silu(f32x16 x) { return x / (exp(-x) + 1.0f); }
inline f32x16 tanh(f32x16 x) {
    f32x16 e = exp(x * 2.0f);
    return 1.0f - 2.0f / (e + 1.0f);
}
inline f32x16 gelu_tanh(f32x16 x) {
    f32x16 inner = x * 0.7978845608f * (x * x * 0.044715f + 1.0f);
    return x * 0.5f * (tanh(inner) + 1.0f);
}

}  // namespace outrider
