// What the parts of the table builder hand to each other; the layouts are those in tables/native.py.
#pragma once
#include <cstdint>
#include <vector>

#include "table.h"

namespace outrider::table {

// One place in the corpus: the tokens before it, the last one in the highest bits of `high`, and
// the token there. Sorted, all places with the same last k tokens lie side by side, for every k.
struct Window {
    uint64_t high, low;
    uint32_t next, count;  // count: how many equal windows this one stands for

    bool operator<(const Window &other) const {
        if (high != other.high) return high < other.high;
        return low != other.low ? low < other.low : next < other.next;
    }
    bool is_like(const Window &other) const { return high == other.high && low == other.low && next == other.next; }
};

// Tokens in the 128 bits of a window: six, of up to 21 bits; all ones: before the text.
struct WindowShape {
    int bits;

    uint32_t none() const { return (1u << bits) - 1; }
    int per_word() const { return 64 / bits; }
    int first_word() const { return per_word() < kMaxKey ? per_word() : kMaxKey; }
    // The token `distance` before the place; 1 is the last one.
    uint32_t token(const Window &window, int distance) const {
        const int i = distance - 1, first = first_word();
        const uint64_t word = i < first ? window.high : window.low;
        return uint32_t(word >> (64 - bits * ((i < first ? i : i - first) + 1))) & none();
    }
    void set(Window &window, int distance, uint32_t token) const {
        const int i = distance - 1, first = first_word();
        (i < first ? window.high : window.low) |= uint64_t(token) << (64 - bits * ((i < first ? i : i - first) + 1));
    }
};

// One continuation of one context. Sorted by key, the continuations of a context lie side by side.
struct Entry {
    uint64_t key;  // hash << 8 | key length << 4 | rank among the continuations
    uint32_t token, count, total;
    uint16_t value, heat;  // upper halves of floats: worth of the context, expected lookups

    uint64_t hash() const { return key >> 8; }
    int length() const { return key >> 4 & 15; }
    int rank() const { return key & 15; }
    bool operator<(const Entry &other) const {
        return key != other.key ? key < other.key : token < other.token;
    }
};

inline uint16_t upper_half(float value) { return uint16_t(__builtin_bit_cast(uint32_t, value) >> 16); }

}  // namespace outrider::table
