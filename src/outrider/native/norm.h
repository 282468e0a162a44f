// RMS norms of one row.
#pragma once
#include "multiply.h"

namespace outrider {

// What a row is multiplied with: 1 / sqrt(mean square + epsilon).
inline float rms_scale(const float *x, int size, float epsilon) {
    f32x16 squares = {};
    for (int i = 0; i < size; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    return 1.0f / std::sqrt(reduce_add(squares) / size + epsilon);
}

// out may be x.
template <class Out>
void rms_norm(const float *x, const float *weight, int size, float epsilon, Out *out) {
    const float scale = rms_scale(x, size, epsilon);
    for (int i = 0; i < size; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
}

}  // namespace outrider
