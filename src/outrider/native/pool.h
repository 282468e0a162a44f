// A pool of threads that lives as long as the process: the caller is thread 0, the others spin
// for a moment after each job and then sleep. Work inside a job is handed out in chunks, so
// that a thread slowed by another process does not hold up the rest.
#pragma once
#include <atomic>
#include <cstddef>
#include <functional>

namespace outrider {

int num_threads();

// Runs body(thread) on every thread; returns when all have. Not reentrant; one caller at a time.
void on_all_threads(const std::function<void(int)> &body);

// Waits inside a job until every thread of the pool has come here.
void barrier();

// Runs body(i) for i in [0, n), chunk at a time, over the threads that are free to help; one
// that has lost its core is not waited for.
void parallel_for(long n, long chunk, const std::function<void(long)> &body);

}  // namespace outrider
