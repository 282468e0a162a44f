// Second step of a table build: from sorted windows to the contexts worth keeping.
//
// A context is worth what it adds to the longest shorter one that is kept: a longer context with
// the same continuation and the same confidence adds nothing, as the longest match wins.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

#include "pool.h"
#include "table_build.h"

namespace outrider::table {
namespace {

constexpr int kMaxRanks = 4;
constexpr float kNoticed = 0.02f;  // no plan changes for less confidence, however often it is asked
constexpr int64_t kBuffer = 1 << 13;  // windows read from a file at once, 200 KB

struct Settings {
    int32_t key_lengths[kMaxKey];  // ascending, 0 after the last
    int32_t bits, vocab_size, num_ranks;
    int32_t min_count;  // contexts seen less often are left out
    float min_value, min_share;
    float doubt[kMaxKey];  // by key length - 1: confidence = count / (total + doubt)
};

std::atomic<bool> reading_failed;  // of a temporary file, since the scan began

// Sorted windows in memory or in a file.
struct Run {
    const Window *memory;
    int64_t count;
    int32_t file;  // -1: in memory

    Window at(int64_t i) const {
        Window window = {};
        read(i, &window, 1);
        return window;
    }
    // False, and `to` as it was, where the file ends early.
    bool read(int64_t first, Window *to, int64_t n) const {
        if (file < 0) {
            std::copy_n(memory + first, n, to);
            return true;
        }
        const int64_t bytes = n * int64_t(sizeof(Window));
        if (pread(file, to, bytes, first * int64_t(sizeof(Window))) == bytes) return true;
        reading_failed = true;
        return false;
    }
    // First window whose last token is at least `token`.
    int64_t first_of(uint64_t token, const WindowShape &shape) const {
        int64_t low = 0, high = count;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (shape.token(at(middle), 1) < token) low = middle + 1;
            else high = middle;
        }
        return low;
    }
};

// The windows of several runs in order, from some last token to some other.
class Merged {
public:
    Merged(const Run *runs, int num_runs, uint64_t first, uint64_t end, const WindowShape &shape) {
        for (int r = 0; r < num_runs; r++) {
            Reader reader{runs + r, runs[r].first_of(first, shape), runs[r].first_of(end, shape), nullptr, 0, 0};
            if (reader.place < reader.end && reader.fill()) readers.push_back(std::move(reader));
        }
        heapify();
    }

    bool next(Window &window) {
        if (readers.empty()) return false;
        window = readers[0].front();
        if (!readers[0].advance()) {
            std::swap(readers[0], readers.back());
            readers.pop_back();
        }
        sink(0);
        return true;
    }

private:
    struct Reader {
        const Run *run;
        int64_t place, end;
        std::unique_ptr<Window[]> buffer;
        int64_t used, filled;

        const Window &front() const { return run->file < 0 ? run->memory[place] : buffer[used]; }
        // False at the end of what can be read.
        bool fill() {
            if (run->file < 0) return true;
            if (!buffer) buffer = std::make_unique<Window[]>(kBuffer);
            used = 0;
            filled = std::min(kBuffer, end - place);
            return run->read(place, buffer.get(), filled);
        }
        bool advance() {
            if (++place >= end) return false;
            return run->file < 0 || ++used < filled || fill();
        }
    };
    std::vector<Reader> readers;  // a heap, the smallest window first

    void heapify() {
        for (int i = int(readers.size()) / 2 - 1; i >= 0; i--) sink(i);
    }
    void sink(size_t i) {
        for (;;) {
            size_t least = i;
            for (size_t child = 2 * i + 1; child < std::min(2 * i + 3, readers.size()); child++)
                if (readers[child].front() < readers[least].front()) least = child;
            if (least == i) return;
            std::swap(readers[i], readers[least]);
            i = least;
        }
    }
};

// A context and its most frequent continuations.
struct Context {
    uint64_t hash;
    int32_t length, num_ranks;
    uint32_t total, covered;  // covered: places that a longer context of the table answers
    uint32_t tokens[kMaxRanks], counts[kMaxRanks];
    float value;
};

// How often each token followed the contexts of one length that is being read.
class Counter {
public:
    explicit Counter(int vocab_size) : counts(vocab_size) {}

    void add(uint32_t token, uint32_t count) {
        if (!counts[token]) seen.push_back(token);
        counts[token] += count;
        total += count;
    }

    // The most frequent ones, ties to the lowest id; starts over.
    Context take(uint64_t hash, int length, int num_ranks) {
        Context context{hash, length, 0, total, 0, {}, {}, 0};
        for (uint32_t token : seen) {
            const uint32_t count = counts[token];
            counts[token] = 0;
            int rank = std::min(context.num_ranks, num_ranks);
            auto is_better = [&](int r) {
                return count > context.counts[r] || (count == context.counts[r] && token < context.tokens[r]);
            };
            if (rank == num_ranks && !is_better(rank - 1)) continue;
            if (rank < num_ranks) context.num_ranks++;
            else rank--;
            for (; rank > 0 && is_better(rank - 1); rank--) {
                context.tokens[rank] = context.tokens[rank - 1];
                context.counts[rank] = context.counts[rank - 1];
            }
            context.tokens[rank] = token;
            context.counts[rank] = count;
        }
        seen.clear();
        total = 0;
        return context;
    }

    uint32_t total = 0;

private:
    std::vector<uint32_t> counts, seen;
};

// Reads the windows of a range of last tokens and writes the entries of the contexts it keeps.
class Scan {
public:
    Scan(const Settings &settings, const Run *runs, int num_runs, uint64_t first, uint64_t end, std::vector<Entry> &out)
        : settings(settings), runs(runs), num_runs(num_runs), first(first), end(end), shape{settings.bits}, out(out) {
        while (num_levels < kMaxKey && settings.key_lengths[num_levels]) num_levels++;
        for (int level = 0; level < num_levels; level++) counters.emplace_back(settings.vocab_size);
    }

    void run() {
        num_shared = num_levels > 1 && settings.key_lengths[0] == 1;
        if (num_shared) read_single();
        read(num_shared, num_levels);
        for (Context &context : single) if (context.num_ranks) write(context);
    }

private:
    const Settings &settings;
    const Run *runs;
    const int num_runs;
    const uint64_t first, end;
    const WindowShape shape;
    std::vector<Entry> &out;
    int num_levels = 0;
    int num_shared = 0;             // 1: contexts of one token are known before the others are read
    std::vector<Counter> counters;  // by level
    std::vector<Context> single;    // contexts of one token, by token - first
    std::vector<Context> pending;   // longer ones of the group that is being read, children first

    // A pass of its own, or the longer contexts of a frequent token would all have to wait for it.
    void read_single() {
        single.resize(std::min<uint64_t>(end, settings.vocab_size) - std::min<uint64_t>(first, settings.vocab_size));
        Merged windows(runs, num_runs, first, end, shape);
        int64_t last = -1;
        auto close = [&] {
            if (last < 0 || last >= settings.vocab_size) return;
            ContextHash hash;
            hash.push(int32_t(last));
            Context context = counters[0].take(hash.value(), 1, settings.num_ranks);
            keep(context, nullptr);
            single[last - first] = context;
        };
        for (Window window; windows.next(window);) {
            const int64_t token = shape.token(window, 1);
            if (token != last) close();
            last = token;
            counters[0].add(window.next, window.count);
        }
        close();
    }

    void read(int from, int to) {
        if (from >= to) return;
        Merged windows(runs, num_runs, first, end, shape);
        Window last{};
        bool any = false;
        for (Window window; windows.next(window); last = window, any = true) {
            if (any) close(last, window, from, to);
            for (int level = from; level < to; level++) counters[level].add(window.next, window.count);
        }
        if (any) close_from(last, from, from, to);
    }

    // Ends the contexts that `window` does not share with the one before it.
    void close(const Window &last, const Window &window, int from, int to) {
        int same = 0;
        while (same < kMaxKey && shape.token(last, same + 1) == shape.token(window, same + 1)) same++;
        int level = from;
        while (level < to && settings.key_lengths[level] <= same) level++;
        if (level < to) close_from(last, level, from, to);
    }

    void close_from(const Window &last, int level, int from, int to) {
        uint64_t hashes[kMaxKey + 1];
        ContextHash hash;
        int known = 0;  // tokens of the text in the window
        for (; known < kMaxKey && shape.token(last, known + 1) != shape.none(); hashes[++known] = hash.value())
            hash.push(int32_t(shape.token(last, known + 1)));
        for (int l = to - 1; l >= level; l--) {
            const int length = settings.key_lengths[l];
            Context context = counters[l].take(length <= known ? hashes[length] : 0, length, settings.num_ranks);
            if (length <= known && context.total >= uint32_t(settings.min_count)) pending.push_back(context);
        }
        if (level == from) resolve(shape.token(last, 1));
    }

    // Decides about a finished group: from its shortest context on, each against the one it extends.
    void resolve(uint32_t token) {
        Context *above[kMaxKey + 1] = {};
        if (num_shared) above[1] = single[token - first].num_ranks ? &single[token - first] : nullptr;
        for (size_t i = pending.size(); i-- > 0;) {
            Context &context = pending[i];
            Context *parent = nullptr;
            for (int length = context.length - 1; length > 0 && !parent; length--) parent = above[length];
            std::fill(above + context.length, above + kMaxKey + 1, nullptr);
            if (!keep(context, parent)) continue;
            above[context.length] = &context;
            if (parent) parent->covered += context.total;
        }
        for (const Context &context : pending) if (context.num_ranks) write(context);
        pending.clear();
    }

    float confidence(const Context &context, int rank) const {
        return context.counts[rank] / (context.total + settings.doubt[context.length - 1]);
    }

    // Gives a context its value, and no continuations where it is not worth keeping.
    bool keep(Context &context, const Context *parent) const {
        float gain = confidence(context, 0);
        if (parent && parent->tokens[0] == context.tokens[0]) {
            gain = 0.5f * std::fabs(gain - confidence(*parent, 0));
            if (gain < kNoticed) gain = 0;
        } else if (parent) {
            for (int rank = 1; rank < context.num_ranks; rank++)
                if (context.tokens[rank] == parent->tokens[0]) gain -= confidence(context, rank);
        }
        context.value = context.total * gain;
        const bool is_kept = context.total >= uint32_t(settings.min_count) &&
                             context.value >= settings.min_value;
        if (!is_kept) context.num_ranks = 0;
        while (context.num_ranks > 1 && confidence(context, context.num_ranks - 1) < settings.min_share)
            context.num_ranks--;
        return is_kept;
    }

    void write(const Context &context) {
        // Of the places that longer contexts answer here, some text will have that they do not know.
        const float heat = float(context.total - std::min(context.total, context.covered)) + 0.1f * context.total;
        for (int rank = 0; rank < context.num_ranks; rank++)
            out.push_back({context.hash << 8 | uint64_t(context.length) << 4 | uint64_t(rank), context.tokens[rank],
                           context.counts[rank], context.total, upper_half(context.value), upper_half(heat)});
    }
};

// Ranges of last tokens with about as many windows each, from the largest run.
std::vector<uint64_t> ranges(const Run *runs, int num_runs, const WindowShape &shape, int parts) {
    const Run &largest = *std::max_element(runs, runs + num_runs, [](auto &a, auto &b) { return a.count < b.count; });
    std::vector<uint64_t> bounds{0};
    for (int part = 1; part < parts && largest.count; part++) {
        const uint64_t token = shape.token(largest.at(largest.count * part / parts), 1);
        if (token > bounds.back()) bounds.push_back(token);
    }
    bounds.push_back(uint64_t(shape.none()) + 1);
    return bounds;
}

}  // namespace
}  // namespace outrider::table

extern "C" {

using namespace outrider;
using namespace outrider::table;

// Splits the work on these runs into at most `parts` pieces; bounds: uint64 [parts + 1], out.
// Returns how many pieces there are.
int32_t outrider_table_ranges(const Run *runs, int32_t num_runs, int32_t bits, int32_t parts, uint64_t *bounds) {
    const auto found = ranges(runs, num_runs, WindowShape{bits}, parts);
    std::copy(found.begin(), found.end(), bounds);
    return int32_t(found.size()) - 1;
}

// Scans n pieces on all threads; the result is a list of entries in their order, or null where a
// run could not be read.
void *outrider_table_scan(const Settings *settings, const Run *runs, int32_t num_runs, const uint64_t *bounds, int32_t n) {
    std::vector<std::vector<Entry>> found(n);
    reading_failed = false;
    parallel_for(n, 1, [&](long part) {
        Scan(*settings, runs, num_runs, bounds[part], bounds[part + 1], found[part]).run();
    });
    if (reading_failed) return nullptr;
    auto *all = new std::vector<Entry>;
    size_t total = 0;
    for (auto &part : found) total += part.size();
    all->reserve(total);
    for (auto &part : found) {
        all->insert(all->end(), part.begin(), part.end());
        std::vector<Entry>().swap(part);
    }
    return all;
}

int64_t outrider_table_num_found(const void *entries) { return int64_t(static_cast<const std::vector<Entry> *>(entries)->size()); }

// Copies the entries out and frees the list.
void outrider_table_take(void *entries, Entry *to) {
    auto *all = static_cast<std::vector<Entry> *>(entries);
    std::copy(all->begin(), all->end(), to);
    delete all;
}

}  // extern "C"
