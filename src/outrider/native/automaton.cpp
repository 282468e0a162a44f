// Suffix automaton over token ids, built online, and the lookup of a whole batch in one call.
//
// A state stands for all substrings of the text that end at the same set of places; its link is
// the state of its longest suffix that also occurs elsewhere. Appending a token costs amortised
// O(1). Beside the textbook fields a state carries what drafting needs, kept exact on the way:
// how often it occurs, where it occurred last, and the state of its most frequent next token.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace outrider {
namespace {

constexpr int32_t kNone = -1;
// Counts are updated along the suffix links of the new end. On source code and chat that chain
// has about 6 states; only one token repeated over and over makes it as long as the text.
constexpr int kChain = 64;

// 32 bytes, two to a cache line. Most states have one transition, so the first is inline.
struct State {
    int32_t length = 0;          // of its longest string
    int32_t link = kNone;        // state of the longest suffix that occurs elsewhere too
    int32_t end = kNone;         // position of the last token of its latest occurrence
    int32_t count = 0;           // occurrences
    int32_t best = kNone;        // state after its most frequent next token, latest on a tie
    int32_t token = kNone;       // first transition
    int32_t target = kNone;
    int32_t more = kNone;        // its further transitions: a list in Automaton::edges
};

struct Edge {
    int32_t state, token, target, next;
};

// Negative tokens separate texts: they are never proposed and match nothing.
class Automaton {
public:
    Automaton() : states(1), slots(16, kNone) {}

    void extend(const int32_t *tokens, int64_t n) {
        for (int64_t i = 0; i < n; i++) append(tokens[i]);
    }

    // The state reached by a token, or kNone.
    int32_t step(int32_t state, int32_t token) const {
        const State &s = states[state];
        if (s.target >= 0 && s.token == token) return s.target;
        if (s.more == kNone) return kNone;
        for (size_t i = slot_of(state, token); slots[i] != kNone; i = (i + 1) & (slots.size() - 1)) {
            const Edge &e = edges[slots[i]];
            if (e.state == state && e.token == token) return e.target;
        }
        return kNone;
    }

    // Longest suffix of (what was matched + token) that occurs in the text. A state may have
    // been split since the match was made: the match then belongs to a suffix link.
    void advance(int32_t &state, int32_t &length, int32_t token) const {
        settle(state, length);
        int32_t next = token < 0 ? kNone : step(state, token);
        while (next == kNone && state != 0 && token >= 0) {
            state = states[state].link;
            length = states[state].length;
            next = step(state, token);
        }
        if (next == kNone) state = length = 0;
        else state = next, length++;
    }

    void settle(int32_t &state, int32_t length) const {
        while (state != 0 && states[states[state].link].length >= length) state = states[state].link;
    }

    // Longest suffix of the text that also ends earlier in it.
    void repeated(int32_t &state, int32_t &length) const {
        state = std::max(0, states[last].link);
        length = states[state].length;
    }

    // Where a draft has come to: a state, or a place in the text once its context is unique.
    struct Walk {
        int32_t state, place = kNone;
    };

    // Steps to the most frequent next token and says how often it and its context occurred. A
    // context that ends with the text (a repetition that runs up to it) goes on as its longest
    // suffix that occurred elsewhere. False where nothing follows.
    bool follow(Walk &walk, int32_t &token, int32_t &count, int32_t &total) const {
        const int32_t last_place = static_cast<int32_t>(text.size()) - 1;
        if (walk.place != kNone && walk.place < last_place) {
            token = text[++walk.place];
            count = total = 1;
            return token >= 0;
        }
        if (walk.place != kNone) walk.state = last;
        while (walk.state > 0 && states[walk.state].best == kNone && states[walk.state].end == last_place)
            walk.state = states[walk.state].link;
        const State &here = states[walk.state];
        if (walk.state <= 0 || here.best == kNone) return false;
        const State &next = states[here.best];
        token = text[next.end];
        count = next.count;
        total = std::max(count, here.count - (here.end == last_place));
        walk.state = here.best;
        walk.place = count == 1 ? next.end : kNone;
        return true;
    }

    int64_t size() const { return static_cast<int64_t>(text.size()); }
    int64_t num_states() const { return static_cast<int64_t>(states.size()); }
    int64_t bytes() const {
        return static_cast<int64_t>(states.capacity() * sizeof(State) + edges.capacity() * sizeof(Edge) +
                                    (slots.capacity() + text.capacity()) * sizeof(int32_t));
    }

private:
    std::vector<State> states;
    std::vector<Edge> edges;
    std::vector<int32_t> slots;  // open-addressed index of edges by (state, token)
    std::vector<int32_t> text;
    int32_t last = 0;

    size_t slot_of(int32_t state, int32_t token) const {
        uint64_t key = (static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32) | static_cast<uint32_t>(token);
        key *= 0x9E3779B97F4A7C15ull;
        return (key ^ (key >> 32)) & (slots.size() - 1);
    }

    int32_t new_state(const State &state) {
        states.push_back(state);
        return static_cast<int32_t>(states.size()) - 1;
    }

    void index(int32_t edge) {
        size_t i = slot_of(edges[edge].state, edges[edge].token);
        while (slots[i] != kNone) i = (i + 1) & (slots.size() - 1);
        slots[i] = edge;
    }

    void connect(int32_t state, int32_t token, int32_t target) {
        State &s = states[state];
        if (s.target == kNone) {
            s.token = token;
            s.target = target;
            return;
        }
        edges.push_back({state, token, target, s.more});
        s.more = static_cast<int32_t>(edges.size()) - 1;
        if (2 * edges.size() <= slots.size()) return index(s.more);
        slots.assign(2 * slots.size(), kNone);
        for (size_t e = 0; e < edges.size(); e++) index(static_cast<int32_t>(e));
    }

    void redirect(int32_t state, int32_t token, int32_t target) {
        State &s = states[state];
        if (s.token == token && s.target >= 0) {
            s.target = target;
            return;
        }
        size_t i = slot_of(state, token);
        while (edges[slots[i]].state != state || edges[slots[i]].token != token) i = (i + 1) & (slots.size() - 1);
        edges[slots[i]].target = target;
    }

    // A copy of a state for its strings up to `length`, which now occur at one more place.
    int32_t split(int32_t state, int32_t length) {
        State copy = states[state];
        copy.length = length;
        copy.more = kNone;
        int32_t clone = new_state(copy);
        for (int32_t e = states[state].more; e != kNone;) {
            Edge edge = edges[e];  // connect() may move the edges
            connect(clone, edge.token, edge.target);
            e = edge.next;
        }
        states[state].link = clone;
        return clone;
    }

    void append(int32_t token) {
        text.push_back(token);
        State fresh;
        fresh.length = states[last].length + 1;
        fresh.link = 0;
        int32_t previous = last, current = new_state(fresh), p = last, q = kNone;
        for (; p != kNone && (q = step(p, token)) == kNone; p = states[p].link) connect(p, token, current);
        if (p != kNone) {
            int32_t length = states[p].length + 1;
            if (states[q].length != length) {
                int32_t clone = split(q, length);
                for (; p != kNone && step(p, token) == q; p = states[p].link) {
                    redirect(p, token, clone);
                    if (states[p].best == q) states[p].best = clone;
                }
                q = clone;
            }
            states[current].link = q;
        }
        last = current;
        record(previous, token);
    }

    // The suffixes of the text have occurred once more, and so has the step that led here from
    // the suffixes of the text before.
    void record(int32_t previous, int32_t token) {
        int32_t position = static_cast<int32_t>(text.size()) - 1;
        int32_t state = last;
        for (int i = 0; i < kChain && state > 0; i++, state = states[state].link) {
            states[state].count++;
            states[state].end = position;
        }
        if (token < 0) return;
        state = last;
        for (int i = 0; i < kChain && previous != kNone; i++, previous = states[previous].link) {
            State &p = states[previous];
            while (states[states[state].link].length > p.length) state = states[state].link;
            if (p.best == kNone || states[state].count >= states[p.best].count) p.best = state;
        }
    }
};


// What a batch of lookups reads and writes. Arrays are indexed by seat (the place of a request);
// the layout is that of `_Call` in drafting/seats.py.
struct Call {
    Automaton *const *own;          // over the request's text
    const Automaton *const *texts;  // [kTexts] per seat: other texts it may draft from, or null
    int32_t *matches;               // [kTexts][2] per seat: state and length in them
    const float *factors;           // [2] per seat: how much more often than usual drafts fail
    const float *table;             // [2][kLengths][kEvidence]: usual confidence, own and other
    int32_t *found;                 // [1 + 2 width] per seat: out, n, n tokens, n confidences
    int32_t *cells;                 // [width] per seat: out, places in `table`
    int32_t width, min_match;
    float min_survival;             // a draft ends where it survives less often
};

constexpr int kTexts = 2;
constexpr int kLengths = 10;
constexpr int kEvidence = 8;

int length_class(int32_t length) {
    if (length <= 4) return std::max(0, length - 1);
    constexpr int32_t tops[] = {6, 8, 12, 16, 32};
    int i = 0;
    while (i < 5 && length > tops[i]) i++;
    return 4 + i;
}

// 0..3: one continuation, seen 1, 2, 3-4 or more times; 4..7: several, by the share of the best.
int evidence_class(int32_t count, int32_t total) {
    if (count >= total) return count <= 2 ? std::max(0, count - 1) : count <= 4 ? 2 : 3;
    if (4 * int64_t(count) >= 3 * int64_t(total)) return 4;
    if (2 * int64_t(count) >= total) return 5;
    return 4 * int64_t(count) >= total ? 6 : 7;
}

// A draft while it is made.
struct Row {
    int32_t length;
    float expected;  // accepted tokens
    std::vector<int32_t> tokens, cells;
    std::vector<float> confidence;

    void resize(int32_t width) {
        tokens.resize(width);
        cells.resize(width);
        confidence.resize(width);
    }
};

void draft(const Automaton &text, int32_t state, int32_t length, int kind, const float *factors, const Call &call,
           int32_t budget, Row &row) {
    float survival = 1;
    row.length = 0;
    row.expected = 0;
    Automaton::Walk walk{state};
    for (int32_t token, count, total; row.length < budget && text.follow(walk, token, count, total); length++) {
        int32_t evidence = evidence_class(count, total);
        int32_t cell = (kind * kLengths + length_class(length)) * kEvidence + evidence;
        float failure = (1 - call.table[cell]) * factors[evidence >= 4];
        float confidence = 1 - std::min(0.98f, std::max(0.005f, failure));
        survival *= confidence;
        if (survival < call.min_survival) break;
        row.expected += survival;
        row.tokens[row.length] = token;
        row.cells[row.length] = cell;
        row.confidence[row.length++] = confidence;
    }
}

// rows: room for two drafts.
void look_up(const Call &call, int32_t seat, int32_t budget, const int32_t *tokens, int32_t num_tokens, Row *rows) {
    Row *best = rows, *other = rows + 1;
    budget = std::min(budget, call.width);
    const float *factors = call.factors + 2 * seat;
    Automaton &own = *call.own[seat];
    own.extend(tokens, num_tokens);
    int32_t state, length;
    own.repeated(state, length);
    best->length = 0;
    best->expected = 0;
    if (length >= call.min_match) draft(own, state, length, 0, factors, call, budget, *best);
    for (int32_t k = 0; k < kTexts; k++) {
        const Automaton *text = call.texts[kTexts * seat + k];
        if (!text) continue;
        int32_t *match = call.matches + 2 * (kTexts * seat + k);
        for (int32_t t = 0; t < num_tokens; t++) text->advance(match[0], match[1], tokens[t]);
        text->settle(match[0], match[1]);
        if (match[1] < call.min_match) continue;
        draft(*text, match[0], match[1], 1, factors, call, budget, *other);
        if (other->expected > best->expected) std::swap(best, other);
    }
    const int32_t n = best->length;
    int32_t *found = call.found + int64_t(seat) * (1 + 2 * call.width);
    found[0] = n;
    std::copy_n(best->tokens.data(), n, found + 1);
    std::memcpy(found + 1 + n, best->confidence.data(), n * sizeof(float));
    std::copy_n(best->cells.data(), n, call.cells + int64_t(seat) * call.width);
}

}  // namespace
}  // namespace outrider

using outrider::Automaton;
using outrider::Call;

extern "C" {

void *outrider_automaton_new() { return new Automaton; }
void outrider_automaton_delete(void *a) { delete static_cast<Automaton *>(a); }
void outrider_automaton_extend(void *a, const int32_t *tokens, int64_t n) {
    static_cast<Automaton *>(a)->extend(tokens, n);
}

// out: tokens, states, bytes
void outrider_automaton_sizes(const void *a, int64_t *out) {
    const Automaton &automaton = *static_cast<const Automaton *>(a);
    out[0] = automaton.size();
    out[1] = automaton.num_states();
    out[2] = automaton.bytes();
}

// match: state, length; updated
void outrider_automaton_advance(const void *a, int32_t *match, const int32_t *tokens, int64_t n) {
    for (int64_t i = 0; i < n; i++) static_cast<const Automaton *>(a)->advance(match[0], match[1], tokens[i]);
}

void outrider_automaton_repeated(const void *a, int32_t *match) {
    static_cast<const Automaton *>(a)->repeated(match[0], match[1]);
}

// rows: token, count, total for each of at most n steps from the match; returns how many
int32_t outrider_automaton_walk(const void *a, const int32_t *match, int32_t *rows, int32_t n) {
    const Automaton &automaton = *static_cast<const Automaton *>(a);
    int32_t state = match[0], i = 0;
    automaton.settle(state, match[1]);
    Automaton::Walk walk{state};
    while (i < n && automaton.follow(walk, rows[3 * i], rows[3 * i + 1], rows[3 * i + 2])) i++;
    return i;
}

// Takes in the new tokens of n requests and drafts for each. The message holds for every request
// its seat, its budget, the number of new tokens and these tokens.
void outrider_lookup(const void *call, int32_t n, const int32_t *message) {
    const Call &seats = *static_cast<const Call *>(call);
    thread_local outrider::Row rows[2];
    for (outrider::Row &row : rows) row.resize(seats.width);
    for (int32_t i = 0; i < n; i++) {
        outrider::look_up(seats, message[0], message[1], message + 3, message[2], rows);
        message += 3 + message[2];
    }
}

}  // extern "C"
