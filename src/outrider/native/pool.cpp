#include "pool.h"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { std::this_thread::yield(); }
#endif

namespace outrider {
namespace {

// About 100 µs of pauses: longer than the Python between two calls of one step, shorter than
// anything a second program on the machine would notice.
constexpr int kSpins = 4000;

// The gate of the pool: a job's number, whether it may still be joined, and who is inside.
using Gate = uint64_t;
constexpr Gate kInside = 0x7fffffff, kOpen = 0x80000000, kJob = Gate(1) << 32;
Gate job_of(Gate gate) { return gate / kJob; }

struct Pool {
    std::vector<std::thread> workers;
    int size = 1;
    std::mutex one_caller;
    const std::function<void(int)> *body = nullptr;
    alignas(64) std::atomic<Gate> gate{0};
    alignas(64) std::atomic<int> done{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> phase{0};
    std::atomic<bool> stopping{false};

    void work(int thread) {
        for (Gate seen = 0;;) {
            Gate now = gate.load(std::memory_order_acquire);
            for (int i = 0; i < kSpins && job_of(now) == seen; i++) {
                relax();
                now = gate.load(std::memory_order_acquire);
            }
            for (; job_of(now) == seen; now = gate.load(std::memory_order_acquire)) gate.wait(now);
            if (stopping) return;
            while ((now & kOpen) && !gate.compare_exchange_weak(now, now + 1)) {}
            seen = job_of(now);
            if (!(now & kOpen)) continue;  // it was finished without this thread
            (*body)(thread);
            done.fetch_add(1, std::memory_order_release);
            gate.fetch_sub(1, std::memory_order_release);
        }
    }

    void run(const std::function<void(int)> &job, bool needs_all) {
        std::lock_guard<std::mutex> lock(one_caller);
        if (size == 1) return job(0);
        body = &job;
        done.store(0, std::memory_order_relaxed);
        gate.store((job_of(gate.load()) + 1) * kJob | kOpen, std::memory_order_release);
        gate.notify_all();
        job(0);
        while (needs_all && done.load(std::memory_order_acquire) < size - 1) relax();
        gate.fetch_and(~kOpen);
        while (gate.load(std::memory_order_acquire) & kInside) relax();
    }

    void stop() {
        stopping = true;
        gate.fetch_add(kJob);
        gate.notify_all();
        for (auto &worker : workers) worker.join();
        workers.clear();
        stopping = false;
        gate = 0;
        size = 1;
    }

    void start(int n) {
        std::lock_guard<std::mutex> lock(one_caller);
        stop();
        size = std::max(1, n);
        for (int t = 1; t < size; t++) workers.emplace_back([this, t] { work(t); });
    }
};

Pool &pool() {
    static Pool *p = new Pool;  // never destroyed: threads may outlive static destructors
    return *p;
}

}  // namespace

int num_threads() { return pool().size; }

void on_all_threads(const std::function<void(int)> &body) { pool().run(body, true); }

void barrier() {
    Pool &p = pool();
    if (p.size == 1) return;
    unsigned phase = p.phase.load(std::memory_order_acquire);
    if (p.arrived.fetch_add(1, std::memory_order_acq_rel) == p.size - 1) {
        p.arrived.store(0, std::memory_order_relaxed);
        p.phase.fetch_add(1, std::memory_order_release);
        return;
    }
    for (int i = 0; p.phase.load(std::memory_order_acquire) == phase; i++) {
        if (i < kSpins) relax();
        else std::this_thread::yield();  // the other thread has lost its core; give it ours
    }
}

void parallel_for(long n, long chunk, const std::function<void(long)> &body) {
    std::atomic<long> next{0};
    auto job = [&](int) {
        for (long start; (start = next.fetch_add(chunk)) < n;)
            for (long i = start; i < std::min(n, start + chunk); i++) body(i);
    };
    if (n <= chunk) job(0);
    else pool().run(job, false);
}

}  // namespace outrider

extern "C" void outrider_set_num_threads(int n) { outrider::pool().start(n); }
extern "C" int outrider_num_threads() { return outrider::num_threads(); }
