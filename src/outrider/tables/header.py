"""The header of a table: every key it must have, and what its value may be.

A checksum says that a header is as it was written, not that a table wrote it.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outrider.checks import shown
from outrider.tables.hashing import HASH_BITS, MAX_KEY, NUM_CELLS, TAG_BITS, hash_bits_for
from outrider.tables.records import MAX_VOCABULARY

NUM_REGIONS = 2
MAX_BUCKETS = MAX_BLOCKS = 1 << 24  # of a region: a hash times more of them leaves 64 bits
MAX_COUNT = 1 << 53  # tokens, bytes, contexts: JSON numbers are exact below it
CHECKSUM_DIGITS = 8


CELL_DIGITS = 4  # of a confidence


class HeaderError(ValueError):
    """What is wrong with a header; whoever knows the file says which."""


def read_header(packed: bytes) -> dict[str, Any]:
    """The header in these bytes, every value as it must be.

    Raises:
        HeaderError: a key is missing, or its value is none that a table has.
    """
    try:
        header = json.loads(packed)
    except (ValueError, RecursionError) as error:  # also what is no UTF-8
        raise HeaderError("it is no JSON") from error
    if not isinstance(header, dict):
        raise HeaderError(f"expected an object, got {shown(header)}")
    _check(header, HEADER, "")
    for key, rule in OPTIONAL.items():
        if key in header:
            _check(header, {key: rule}, "")
    _check_together(header)
    return header


Rule = tuple[Callable[[Any], bool], str]  # is it right, and what was expected
Schema = Mapping[str, "Rule | Schema"]


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _integer(low: int, high: int) -> Rule:
    return (lambda value: _is_int(value, low, high)), f"an integer from {low} to {high}"


def _are_lengths(value: Any) -> bool:
    is_right = isinstance(value, list) and all(_is_int(v, 1, MAX_KEY) for v in value)
    return is_right and bool(value) and value == sorted(set(value))


def _are_regions(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == NUM_REGIONS
        and all(isinstance(region, list) and len(region) == 2 for region in value)
        and all(_is_int(r[0], 1, MAX_BLOCKS) and _is_int(r[1], 1, MAX_BUCKETS) for r in value)
    )


def _is_share(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= 1  # which NaN is not


def _are_shares(value: Any) -> bool:
    return isinstance(value, list) and len(value) == NUM_CELLS and all(map(_is_share, value))


def _are_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_int(v, 0, MAX_COUNT) for v in value.values())


def _is_checksum(value: Any) -> bool:
    is_text = isinstance(value, str) and len(value) == CHECKSUM_DIGITS
    return is_text and all(digit in "0123456789abcdef" for digit in value)


COUNT = _integer(0, MAX_COUNT)
COUNTS: Rule = (_are_counts, "an object of numbers")
SECTION: Schema = {
    "offset": COUNT,
    "bytes": COUNT,
    "crc32": (_is_checksum, f"{CHECKSUM_DIGITS} hexadecimal digits"),
}
HEADER: Schema = {
    "key_lengths": (_are_lengths, f"ascending integers from 1 to {MAX_KEY}"),
    "hash_bits": _integer(TAG_BITS, HASH_BITS),
    "token_bytes": _integer(2, 3),
    "regions": (_are_regions, f"{NUM_REGIONS} pairs of blocks and buckets"),
    "tokenizer": {
        "fingerprint": (lambda value: isinstance(value, str) and bool(value), "a text"),
        "vocab_size": _integer(1, MAX_VOCABULARY),
    },
    "num_contexts": COUNT,
    "num_slots": COUNT,
    "confidence": (_are_shares, f"{NUM_CELLS} numbers from 0 to 1"),
    "corpus": {"texts": COUNT, "tokens": COUNT},
    "provenance": (lambda value: isinstance(value, dict), "an object"),
    "filter": SECTION,
    "buckets": SECTION,
}
OPTIONAL: Schema = {"contexts_by_length": COUNTS, "left_out": COUNTS}


def _check(header: Any, schema: Schema, where: str) -> None:
    for key, rule in schema.items():
        name = where + key
        if key not in header:
            raise HeaderError(f"{name} is missing")
        value = header[key]
        if isinstance(rule, tuple):
            is_right, expected = rule
            if not is_right(value):
                raise HeaderError(f"{name} must be {expected}, got {shown(value, 40)}")
        elif isinstance(value, dict):
            _check(value, rule, f"{name}.")
        else:
            raise HeaderError(f"{name} must be an object, got {shown(value, 40)}")


def _check_together(header: dict[str, Any]) -> None:
    bits, fewest = header["hash_bits"], min(region[1] for region in header["regions"])
    if bits > hash_bits_for(fewest):
        raise HeaderError(f"hash_bits is {bits}, more than {fewest} buckets can tell apart")
    vocab_size, token_bytes = header["tokenizer"]["vocab_size"], header["token_bytes"]
    if vocab_size > 1 << 8 * token_bytes:
        raise HeaderError(f"{vocab_size} ids do not fit into token_bytes {token_bytes}")


def header_fields(
    tokenizer: Mapping[str, Any],
    corpus: Mapping[str, int],
    provenance: Mapping[str, Any],
    counts: Mapping[str, Any] | None = None,
    confidence: Iterable[float] | None = None,
) -> dict[str, Any]:
    """What a header says beyond the layout; without counts and confidence: of the same length."""
    cells = [0.1234] * NUM_CELLS if confidence is None else confidence
    return {
        "tokenizer": dict(tokenizer),
        **(LONG_COUNTS if counts is None else counts),
        "confidence": [round(float(value), CELL_DIGITS) for value in cells],
        "corpus": dict(corpus),
        "provenance": dict(provenance),
    }


LONG = 10**10  # more than a table can hold
LONG_COUNTS = {
    "num_contexts": LONG,
    "num_slots": LONG,
    "contexts_by_length": {str(length): LONG for length in range(1, MAX_KEY + 1)},
    "left_out": dict.fromkeys(("full_buckets", "max_bytes", "min_count", "equal_hashes"), LONG),
}
