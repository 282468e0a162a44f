#include "pool.h"

#include <algorithm>
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

struct Pool {
    std::vector<std::thread> workers;
    int size = 1;
    std::mutex one_caller;
    const std::function<void(int)> *body = nullptr;
    alignas(64) std::atomic<unsigned> epoch{0};
    alignas(64) std::atomic<int> running{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> phase{0};
    std::atomic<bool> stopping{false};

    void work(int thread) {
        unsigned seen = 0;
        for (;;) {
            for (int i = 0; i < kSpins && epoch.load(std::memory_order_acquire) == seen; i++) relax();
            while (epoch.load(std::memory_order_acquire) == seen) epoch.wait(seen);
            seen = epoch.load(std::memory_order_acquire);
            if (stopping) return;
            (*body)(thread);
            running.fetch_sub(1, std::memory_order_release);
        }
    }

    void stop() {
        stopping = true;
        epoch.fetch_add(1);
        epoch.notify_all();
        for (auto &worker : workers) worker.join();
        workers.clear();
        stopping = false;
        epoch = 0;
        size = 1;
    }

    void start(int n) {
        stop();
        size = std::max(1, n);
        for (int t = 1; t < size; t++) workers.emplace_back([this, t] { work(t); });
    }

    ~Pool() { stop(); }
};

Pool &pool() {
    static Pool *p = new Pool;  // never destroyed: threads may outlive static destructors
    return *p;
}

}  // namespace

int num_threads() { return pool().size; }

void on_all_threads(const std::function<void(int)> &body) {
    Pool &p = pool();
    std::lock_guard<std::mutex> lock(p.one_caller);
    if (p.size > 1) {
        p.body = &body;
        p.running.store(p.size - 1, std::memory_order_relaxed);
        p.epoch.fetch_add(1, std::memory_order_release);
        p.epoch.notify_all();
    }
    body(0);
    while (p.running.load(std::memory_order_acquire) > 0) relax();
}

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
    else on_all_threads(job);
}

}  // namespace outrider

extern "C" void outrider_set_num_threads(int n) { outrider::pool().start(n); }
extern "C" int outrider_num_threads() { return outrider::num_threads(); }
