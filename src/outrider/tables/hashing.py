"""Contexts, counts and places as numbers: native/table.h in numpy, for machines without a compiler.

A context of k tokens is known by a 40-bit hash. Its bucket follows from the hash, and a slot keeps
the 24 bits (its tag) that tell it from the others there, so that a hash can be read back.
"""

import numpy as np

HASH_BITS, TAG_BITS = 40, 24
MAX_KEY = 6  # longest context, in tokens
MAX_RANKS = 4  # continuations of one context
BUCKET_BYTES = 128
BLOCK_WORDS = 8  # of the filter, 32 bits each

TOTAL_TOPS = (1, 2, 4, 8, 16, 64, 512)  # the last class has no top
NUM_TOTALS, NUM_SHARES = 8, 8
NUM_CELLS = MAX_KEY * NUM_TOTALS * NUM_SHARES

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)
_SALTS = np.array(
    [0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D,
     0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31],
    np.uint32,
)  # fmt: skip


def context_hashes(contexts: np.ndarray) -> np.ndarray:
    """Hashes of the last 1, 2, … tokens: uint64 [n, max_key] of int32 [n, max_key], newest first.

    Where a token is negative (before the text), its column and those after it mean nothing.
    """
    n, max_key = contexts.shape
    hashes = np.zeros((n, max_key), np.uint64)
    state = np.zeros(n, np.uint64)
    for i in range(max_key):
        state = (state ^ (contexts[:, i].astype(np.uint64) + np.uint64(1))) * _MULTIPLIER
        state = state ^ (state >> np.uint64(32))
        hashes[:, i] = (state ^ np.uint64(i + 1)) * _FINISH >> np.uint64(64 - HASH_BITS)
    return hashes


def places_of(hashes: np.ndarray, bits: int, num_buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Bucket and tag of hashes cut to their upper `bits`."""
    product = hashes * np.uint64(num_buckets)
    rest = product & np.uint64((1 << bits) - 1)
    return product >> np.uint64(bits), rest >> np.uint64(bits - TAG_BITS)


def hashes_at(buckets: np.ndarray, tags: np.ndarray, bits: int, num_buckets: int) -> np.ndarray:
    """The hashes that `places_of` put there."""
    product = (buckets.astype(np.uint64) << np.uint64(bits)) | (
        tags.astype(np.uint64) << np.uint64(bits - TAG_BITS)
    )
    n = np.uint64(num_buckets)
    return product // n + (product % n != 0)


def hash_bits_for(num_buckets: int) -> int:
    """The most bits of a hash that a tag can tell apart in that many buckets."""
    return min(HASH_BITS, num_buckets.bit_length() - 1 + TAG_BITS)


def filter_bits(hashes: np.ndarray) -> np.ndarray:
    """The bit of each word of a hash's block: uint32 [n, BLOCK_WORDS]."""
    low = (hashes & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return np.uint32(1) << (low[:, None] * _SALTS >> np.uint32(27))


def blocks_of(hashes: np.ndarray, bits: int, num_blocks: int) -> np.ndarray:
    """Block of the filter for each hash."""
    return hashes * np.uint64(num_blocks) >> np.uint64(bits)


def packed(counts: np.ndarray) -> np.ndarray:
    """Counts in a byte: exact below 32, then in steps of 1/16, up to 2**19."""
    counts = np.minimum(counts.astype(np.int64), (1 << 19) - 1)
    shift = np.maximum(0, np.frexp(counts.astype(np.float64))[1] - 5)
    return np.where(counts < 32, counts, 16 * shift + (counts >> shift)).astype(np.uint8)


def unpacked(codes: np.ndarray) -> np.ndarray:
    """The counts that `packed` wrote, rounded down: int64."""
    codes = codes.astype(np.int64)
    return np.where(codes < 32, codes, (16 + codes % 16) << np.maximum(0, codes // 16 - 1))


def cells_of(lengths: np.ndarray, counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Classes of continuations seen `counts` times of `totals` after keys of these lengths."""
    rows = np.searchsorted(TOTAL_TOPS, totals)
    conditions = [counts >= totals, 10 * counts >= 9 * totals, 4 * counts >= 3 * totals,
                  2 * counts >= totals, 3 * counts >= totals, 5 * counts >= totals,
                  10 * counts >= totals]  # fmt: skip
    shares = np.select(conditions, list(range(7)), 7)
    return ((lengths - 1) * NUM_TOTALS + rows) * NUM_SHARES + shares
