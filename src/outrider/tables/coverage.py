"""How much of a text a table covers: by key length, and by the size it is pruned to."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from outrider.tables.edit import pruned
from outrider.tables.format import Contents, Table
from outrider.tables.lookup import TableLookup
from outrider.tables.place import SMALLEST
from outrider.tables.replay import Replay, Stream, replay

FRACTIONS = (0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.06, 0.03)  # sizes a table is pruned to
WIDTH, BRANCHES, MIN_SURVIVAL = 8, 2, 0.02  # as the engine drafts, see `TableSource`
KIBI = 1 << 10
ENOUGH = 0.97  # the recommended size keeps this share of the accepted tokens


@dataclass(slots=True)
class KeyCoverage:
    """What the keys of one length did."""

    key_length: int
    hit_rate: float  # share of all places where it was the longest that the table had
    first_accepted: float  # of these, how often its first draft token was right
    accepted_tokens: float  # of these, draft tokens accepted on average
    expected_tokens: float  # the same as its confidence had it


@dataclass(slots=True)
class Coverage:
    """What a table, or a pruned one, did on a text."""

    num_bytes: int
    max_bytes: int | None  # that it is pruned to, None: as it is
    num_contexts: int
    hit_rate: float  # places with any draft
    acceptance_length: float  # tokens per step when decoding the text, bonus token included
    keys: list[KeyCoverage]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def coverage(
    contents: Contents,
    confidence: np.ndarray,
    stream: Stream,
    num_contexts: int,
    width: int = WIDTH,
    branches: int = BRANCHES,
    max_bytes: int | None = None,
) -> Coverage:
    """Drafts of `width` tokens at every place of a text, compared with what follows."""
    found = replay(TableLookup(contents, confidence, width, branches, MIN_SURVIVAL), stream)
    lengths = found.key_lengths
    keys = [_of_key(found, lengths == k, k) for k in contents.layout.key_lengths]
    layout = contents.layout
    return Coverage(
        num_bytes=layout.filter_bytes + layout.bucket_bytes,
        max_bytes=max_bytes,
        num_contexts=num_contexts,
        hit_rate=float((lengths > 0).mean()),
        acceptance_length=_acceptance_length(found),
        keys=keys,
    )


def by_size(
    table: Table, stream: Stream, width: int = WIDTH, branches: int = BRANCHES
) -> list[Coverage]:
    """A table as it is, and pruned to smaller and smaller sizes."""
    whole, confidence = table.contents, table.confidence
    results = [coverage(whole, confidence, stream, table.header["num_contexts"], width, branches)]
    for fraction in FRACTIONS:
        most = int(fraction * table.num_bytes) // KIBI * KIBI  # a size that one can type
        if most >= SMALLEST:
            small = pruned(whole, most)
            results.append(
                coverage(
                    *(small.contents, confidence, stream, small.num_contexts),
                    *(width, branches, most),
                )
            )
    return results


def recommended(sizes: Sequence[Coverage]) -> Coverage:
    """The smallest that keeps ENOUGH of the draft tokens accepted per step."""
    most = max(size.acceptance_length - 1 for size in sizes)
    kept = [size for size in sizes if size.acceptance_length - 1 >= ENOUGH * most]
    return min(kept, key=lambda size: size.num_bytes)


def _of_key(found: Replay, mine: np.ndarray, key_length: int) -> KeyCoverage:
    if not mine.any():
        return KeyCoverage(key_length, 0.0, 0.0, 0.0, 0.0)
    means = (found.first_is_right, found.accepted, found.survival)
    return KeyCoverage(key_length, float(mine.mean()), *(float(v[mine].mean()) for v in means))


def _acceptance_length(found: Replay) -> float:
    """Tokens per step over the counted places, each step going on where the last one ended."""
    accepted = found.accepted.tolist()
    place = steps = 0
    while place < len(accepted):
        place += accepted[place] + 1
        steps += 1
    return len(accepted) / max(1, steps)
