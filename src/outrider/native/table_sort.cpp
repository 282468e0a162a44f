// First step of a table build: a stream of tokens becomes sorted windows.
#include <algorithm>

#include "pool.h"
#include "table_build.h"

namespace outrider::table {
namespace {

template <class T>
void sort(T *items, int64_t n) {
    const int64_t parts = num_threads(), size = (n + parts - 1) / std::max<int64_t>(1, parts);
    auto at = [&](int64_t part) { return items + std::min(n, part * size); };
    parallel_for(parts, 1, [&](long part) { std::sort(at(part), at(part + 1)); });
    for (int64_t width = 1; width < parts; width *= 2)
        parallel_for((parts + 2 * width - 1) / (2 * width), 1, [&](long pair) {
            const int64_t first = 2 * width * pair;
            std::inplace_merge(at(first), at(first + width), at(first + 2 * width));
        });
}

}  // namespace
}  // namespace outrider::table

extern "C" {

using namespace outrider;
using namespace outrider::table;

// tokens: int32 [n], -1 between texts; counted: uint8 [n], 0 where a token is only context.
// Returns how many windows it wrote.
int64_t outrider_table_windows(const int32_t *tokens, const uint8_t *counted, int64_t n, int32_t bits, Window *windows) {
    const WindowShape shape{bits};
    int64_t written = 0, start = 0;
    for (int64_t i = 0; i < n; i++) {
        if (tokens[i] < 0) {
            start = i + 1;
            continue;
        }
        if (!counted[i] || i == start) continue;
        Window window{0, 0, uint32_t(tokens[i]), 1};
        for (int d = 1; d <= kMaxKey; d++) shape.set(window, d, i - d >= start ? uint32_t(tokens[i - d]) : shape.none());
        windows[written++] = window;
    }
    return written;
}

// Sorts windows and joins equal ones; returns how many are left.
int64_t outrider_table_sort(Window *windows, int64_t n) {
    sort(windows, n);
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        if (kept && windows[kept - 1].is_like(windows[i])) windows[kept - 1].count += windows[i].count;
        else windows[kept++] = windows[i];
    }
    return kept;
}

void outrider_table_sort_entries(Entry *entries, int64_t n) { sort(entries, n); }

}  // extern "C"
