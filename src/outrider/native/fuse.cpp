// How the input of a drafter's layers is made: rows of features, embeddings or states, each normed
// or not, side by side, times one matrix. One call, where torch needs five or six.
#include "heads.h"
#include "norm.h"
#include "pool.h"
#include "shares.h"

namespace outrider {
namespace {

template <class E>
void join(const FuseJob &job, int row, E *to) {
    for (int p = 0; p < job.parts; p++) {
        const int width = job.widths[p];
        const float *x = job.x[p] + long(row) * width;
        if (job.norms[p]) rms_norm(x, job.norms[p], width, job.epsilon, to);
        else
            for (int i = 0; i < width; i += kLanes) store(to + i, load(x + i));
        to += width;
    }
}

template <class E>
void fuse(const FuseJob &job) {
    const Matrix<E> matrix{static_cast<const E *>(job.weights), job.outputs, job.inputs()};
    std::vector<E> joined(long(job.rows) * matrix.inputs);
    Shares shares(3, num_threads());
    on_all_threads([&](int thread) {
        shares.run(0, thread, job.rows, [&](int row) { join(job, row, &joined[long(row) * matrix.inputs]); });
        barrier();
        shares.run(1, thread, matrix.chunks(), [&](int chunk) {
            multiply_chunk(joined.data(), job.rows, matrix, chunk, 0,
                           [&](int row, int column, const float *sums, int n) {
                               float *out = job.out + long(row) * job.outputs + column;
                               for (int i = 0; i < std::min(n, job.outputs - column); i++)
                                   out[i] = sums[i] + (job.bias ? job.bias[column + i] : 0.0f);
                           });
        });
        if (!job.last_norm) return;
        barrier();
        shares.run(2, thread, job.rows, [&](int row) {
            float *out = job.out + long(row) * job.outputs;
            rms_norm(out, job.last_norm, job.outputs, job.epsilon, out);
        });
    });
}

}  // namespace
}  // namespace outrider

extern "C" void outrider_fuse(const outrider::FuseJob *job) {
    if (job->is_bf16) outrider::fuse<outrider::bf16>(*job);
    else outrider::fuse<float>(*job);
}
