// Last step of a table build: entries go to their buckets and into the filter.
#include <algorithm>
#include <vector>

#include "table_build.h"

namespace outrider::table {
namespace {

// The continuations of one context: entries [first, end).
struct Group {
    const Entry *first, *end;
};

void fill(std::vector<Group> &groups, int bits, uint64_t num_buckets, const SlotShape &shape, uint8_t *bucket,
          int64_t *written) {
    // What does not fit is what was seen least.
    std::stable_sort(groups.begin(), groups.end(), [](auto &a, auto &b) { return a.first->total > b.first->total; });
    int used = 0;
    for (const Group &group : groups) {
        written[1 + group.first->length()] += used < shape.per_bucket();
        for (const Entry *entry = group.first; entry < group.end && used < shape.per_bucket(); entry++) {
            const Place place = place_of(entry->hash() >> (kHashBits - bits), bits, num_buckets);
            shape.write(bucket, used++, {place.tag, entry->token, packed(entry->count), packed(entry->total)});
        }
    }
    written[0] += used;
    groups.clear();
}

}  // namespace
}  // namespace outrider::table

// Entries sorted by key, all of buckets [first_bucket, ...) of a region of num_buckets; buckets:
// the bytes from first_bucket on, zeroed; filter: that of the whole region; written: added to,
// slots, then contexts by key length.
extern "C" void outrider_table_place(const outrider::table::Entry *entries, int64_t n, int32_t bits, int32_t token_bytes,
                                     uint64_t first_bucket, uint64_t num_buckets, uint64_t num_blocks, uint8_t *buckets,
                                     uint32_t *filter, int64_t *written) {
    using namespace outrider::table;
    const SlotShape shape{token_bytes};
    std::vector<Group> groups;
    uint64_t current = 0, hash = 0;
    auto place = [&] {
        if (groups.empty()) return;
        fill(groups, bits, num_buckets, shape, buckets + (current - first_bucket) * kBucketBytes, written);
    };
    for (const Entry *entry = entries; entry < entries + n; entry++) {
        const uint64_t mine = entry->hash() >> (kHashBits - bits);
        if (!groups.empty() && mine == hash) {
            groups.back().end = entry + 1;
            continue;
        }
        const uint64_t bucket = place_of(mine, bits, num_buckets).bucket;
        if (bucket != current) place();
        current = bucket;
        hash = mine;
        groups.push_back({entry, entry + 1});
        add_to(filter + kBlockWords * block_of(mine, bits, num_blocks), mine);
    }
    place();
}
