"""How much of a text a table covers: by key length, and by the size it is pruned to."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import MissingDependency
from outrider.tables.edit import pruned
from outrider.tables.format import Contents, Table
from outrider.tables.lookup import TableLookup
from outrider.tables.place import SMALLEST
from outrider.tables.replay import Replay, Stream, replay

FRACTIONS = (0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.06, 0.03)  # sizes a table is pruned to
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
    width: int = 8,
    branches: int = 1,
) -> Coverage:
    """Drafts of `width` tokens at every place of a text, compared with what follows."""
    found = replay(TableLookup(contents, confidence, width, branches), stream)
    lengths = found.key_lengths
    keys = [_of_key(found, lengths == k, k) for k in contents.layout.key_lengths]
    layout = contents.layout
    return Coverage(
        num_bytes=layout.filter_bytes + layout.bucket_bytes,
        num_contexts=num_contexts,
        hit_rate=float((lengths > 0).mean()),
        acceptance_length=_acceptance_length(found),
        keys=keys,
    )


def by_size(table: Table, stream: Stream, width: int = 8, branches: int = 1) -> list[Coverage]:
    """A table as it is, and pruned to smaller and smaller sizes."""
    settings = width, branches
    num_contexts = table.header["num_contexts"]
    results = [coverage(table.contents, table.confidence, stream, num_contexts, *settings)]
    for fraction in FRACTIONS:
        if fraction * table.num_bytes >= SMALLEST:
            small = pruned(table.contents, int(fraction * table.num_bytes))
            results.append(
                coverage(small.contents, table.confidence, stream, small.num_contexts, *settings)
            )
    return results


def recommended(sizes: Sequence[Coverage]) -> Coverage:
    """The smallest that keeps ENOUGH of the draft tokens accepted per step."""
    most = max(size.acceptance_length - 1 for size in sizes)
    kept = [size for size in sizes if size.acceptance_length - 1 >= ENOUGH * most]
    return min(kept, key=lambda size: size.num_bytes)


def plot(curves: Mapping[str, Sequence[Coverage]], path: Path) -> None:
    """Acceptance length and hit rates against size, as PNG or SVG.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency(
            "the plot needs matplotlib: pip install 'outrider[bench]'"
        ) from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    accepted, hits = figure.subplots(1, 2)
    for name, sizes in curves.items():
        megabytes = [size.num_bytes / 1e6 for size in sizes]
        accepted.plot(megabytes, [size.acceptance_length for size in sizes], "o-", label=name)
        best = recommended(sizes)
        accepted.plot(best.num_bytes / 1e6, best.acceptance_length, "k*", markersize=12)
        for place, key in enumerate(sizes[0].keys):
            rates = [size.keys[place].hit_rate for size in sizes]
            hits.plot(megabytes, rates, ".-", label=f"{name}, {key.key_length} tokens")
    accepted.set_ylabel("tokens per step (star: recommended size)")
    hits.set_ylabel("share of places, by length of the key that hit")
    for axes in (accepted, hits):
        axes.set_xlabel("table size, MB")
        axes.set_xscale("log")
        axes.legend(fontsize="small")
    figure.savefig(path)


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
