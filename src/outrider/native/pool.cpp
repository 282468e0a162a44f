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

// Pauses before a thread without a job sleeps: longer than the Python between two calls of one
// step, shorter than anything a second program on the machine would notice.
constexpr int kIdleSpins = 4000;
// Pauses before a thread sleeps at a barrier, some µs. Whoever comes later than that has lost its
// core to another program, and gets this one sooner when it is left idle than when it is spun on:
// with one busy neighbour on two cores a step takes 11 ms, after 4,000 pauses 17 ms.
constexpr int kBarrierSpins = 300;

// The gate of the pool: a job's number, whether it may still be joined, and who is inside.
using Gate = uint64_t;
constexpr Gate kInside = 0x7fffffff, kOpen = 0x80000000, kJob = Gate(1) << 32;
Gate job_of(Gate gate) { return gate / kJob; }

template <class T, class Condition>
void wait_until(std::atomic<T> &value, const Condition &holds) {
    for (int i = 0;; i++) {
        T now = value.load(std::memory_order_acquire);
        if (holds(now)) return;
        if (i < kBarrierSpins) relax();
        else value.wait(now);
    }
}

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
            for (int i = 0; i < kIdleSpins && job_of(now) == seen; i++) {
                relax();
                now = gate.load(std::memory_order_acquire);
            }
            for (; job_of(now) == seen; now = gate.load(std::memory_order_acquire)) gate.wait(now);
            if (stopping) return;
            while ((now & kOpen) && !gate.compare_exchange_weak(now, now + 1)) {}
            seen = job_of(now);
            if (!(now & kOpen)) continue;  // it was finished without this thread
            (*body)(thread);
            leave();
        }
    }

    void run(const std::function<void(int)> &job, bool needs_all) {
        std::lock_guard<std::mutex> lock(one_caller);
        if (size == 1) return job(0);
        body = &job;
        done.store(0, std::memory_order_relaxed);  // nobody is inside: nobody counts it up
        gate.store((job_of(gate.load()) + 1) * kJob | kOpen, std::memory_order_release);
        gate.notify_all();
        job(0);
        const int others = size - 1;
        if (needs_all) wait_until(done, [others](int count) { return count == others; });
        gate.fetch_and(~kOpen);
        wait_until(gate, [](Gate now) { return !(now & kInside); });
    }

    void leave() {
        done.fetch_add(1, std::memory_order_release);
        done.notify_one();
        gate.fetch_sub(1, std::memory_order_release);
        gate.notify_all();
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
        p.phase.notify_all();
        return;
    }
    wait_until(p.phase, [phase](unsigned now) { return now != phase; });
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
