// Draft tables: what lookup and builder agree on. tables/format.py says the same in Python.
//
// A table maps contexts (the last k tokens, for several k) to their most frequent continuations.
// A context is known by a 40-bit hash; it lies in the bucket its hash points to, and the bucket
// holds of the hash only what the place does not say (a tag of 24 bits).
#pragma once
#include <cstdint>
#include <cstring>

namespace outrider::table {

constexpr int kHashBits = 40, kTagBits = 24;
constexpr int kMaxKey = 6;         // longest context; also how many key lengths there can be
constexpr int kBucketBytes = 128;  // two cache lines: fewer buckets overflow than with one
constexpr int kBlockWords = 8;     // a block of the filter, 256 bits
constexpr int kTotals = 8, kShares = 8, kCells = kMaxKey * kTotals * kShares;

// Hash of a context, fed from its last token backwards.
struct ContextHash {
    uint64_t state = 0;
    int length = 0;

    void push(int32_t token) {
        state = (state ^ (static_cast<uint32_t>(token) + 1ull)) * 0x9E3779B97F4A7C15ull;
        state ^= state >> 32;
        length++;
    }
    uint64_t value() const { return ((state ^ length) * 0xD6E8FEB86659FD93ull) >> (64 - kHashBits); }
};

// Counts in a byte: exact below 32, then in steps of 1/16, up to 2^19.
inline uint8_t packed(uint32_t count) {
    if (count < 32) return static_cast<uint8_t>(count);
    if (count >= 1u << 19) return 255;
    int shift = 27 - __builtin_clz(count);
    return static_cast<uint8_t>(16 * shift + (count >> shift));
}
inline uint32_t unpacked(uint8_t code) {
    return code < 32 ? code : (16u + code % 16) << (code / 16 - 1);
}

// Class of a continuation seen `count` times of `total`: what its confidence depends on.
inline int cell_of(int length, uint32_t count, uint32_t total) {
    constexpr uint32_t tops[] = {1, 2, 4, 8, 16, 64, 512};
    int row = 0, share = 7;
    while (row < 7 && total > tops[row]) row++;
    const uint64_t c = count, t = total;
    if (c >= t) share = 0;
    else if (10 * c >= 9 * t) share = 1;
    else if (4 * c >= 3 * t) share = 2;
    else if (2 * c >= t) share = 3;
    else if (3 * c >= t) share = 4;
    else if (5 * c >= t) share = 5;
    else if (10 * c >= t) share = 6;
    return ((length - 1) * kTotals + row) * kShares + share;
}

struct Slot {
    uint32_t tag, token;
    uint8_t count, total;  // count 0: empty, and so are all slots after it
};

// Slots of 7 bytes where tokens fit into two, of 8 otherwise.
struct SlotShape {
    int token_bytes;

    int bytes() const { return token_bytes + 5; }
    int per_bucket() const { return kBucketBytes / bytes(); }
    Slot read(const uint8_t *bucket, int index) const {
        uint64_t word;
        std::memcpy(&word, bucket + index * bytes(), sizeof word);
        const uint64_t rest = word >> (kTagBits + 8 * token_bytes);
        const uint64_t token = (word >> kTagBits) & ((1ull << 8 * token_bytes) - 1);
        return {uint32_t(word & ((1u << kTagBits) - 1)), uint32_t(token), uint8_t(rest), uint8_t(rest >> 8)};
    }
    void write(uint8_t *bucket, int index, const Slot &slot) const {
        const uint64_t counts = slot.count | slot.total << 8;
        const uint64_t word = slot.tag | uint64_t(slot.token) << kTagBits | counts << (kTagBits + 8 * token_bytes);
        std::memcpy(bucket + index * bytes(), &word, bytes());
    }
};

// Buckets of one part of the table: the contexts used most, or the others.
struct Region {
    const uint32_t *filter;
    uint64_t num_blocks, first_bucket, num_buckets;
};

// Where a hash of `bits` bits lies among n buckets, and what is left of it there.
struct Place {
    uint64_t bucket;
    uint32_t tag;
};
inline Place place_of(uint64_t hash, int bits, uint64_t num_buckets) {
    const uint64_t product = hash * num_buckets;
    return {product >> bits, uint32_t((product & ((1ull << bits) - 1)) >> (bits - kTagBits))};
}

// A split block Bloom filter: one bit in each of the eight words of a block.
constexpr uint32_t kSalts[kBlockWords] = {0x47b6137bu, 0x44974d91u, 0x8824ad5bu, 0xa2b7289du,
                                          0x705495c7u, 0x2df1424bu, 0x9efc4947u, 0x5c6bfb31u};
inline uint64_t block_of(uint64_t hash, int bits, uint64_t num_blocks) { return hash * num_blocks >> bits; }
inline bool may_hold(const uint32_t *block, uint64_t hash) {
    uint32_t missing = 0;
    for (int i = 0; i < kBlockWords; i++) missing |= ~block[i] & (1u << (uint32_t(hash) * kSalts[i] >> 27));
    return missing == 0;
}
inline void add_to(uint32_t *block, uint64_t hash) {
    for (int i = 0; i < kBlockWords; i++) block[i] |= 1u << (uint32_t(hash) * kSalts[i] >> 27);
}

}  // namespace outrider::table
