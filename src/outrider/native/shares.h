// Who does what inside a job of the pool.
#pragma once
#include <atomic>
#include <vector>

namespace outrider {

// Hands out [0, n) to the threads: each starts in a range of its own, so that weights are read
// in one stream, and helps the others when done, so that a slow core holds nobody up.
class Shares {
  public:
    Shares(int phases, int threads) : threads_(threads), next_(long(phases) * threads) {}
    void reset() {
        for (Slot &slot : next_) slot.value.store(0, std::memory_order_relaxed);
    }
    // The first index of a thread's own range; the next thread's is its end.
    int begin(int n, int thread) const { return int(long(n) * thread / threads_); }

    template <class Body>
    void run(int phase, int thread, int n, const Body &body) {
        for (int turn = 0; turn < threads_; turn++) {
            int owner = (thread + turn) % threads_, first = begin(n, owner), end = begin(n, owner + 1);
            std::atomic<int> &next = next_[long(phase) * threads_ + owner].value;
            for (int i; (i = first + next.fetch_add(1, std::memory_order_relaxed)) < end;) body(i);
        }
    }

  private:
    struct alignas(64) Slot {
        std::atomic<int> value{0};
    };
    int threads_;
    std::vector<Slot> next_;
};

}  // namespace outrider
