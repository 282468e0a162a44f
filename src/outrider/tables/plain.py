"""A table's entries without a compiler: what native/table_scan.cpp does, one context at a time."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from outrider.tables.hashing import context_hashes
from outrider.tables.records import DOUBT, ENTRY, Settings

NOTICED = 0.02  # no plan changes for less confidence, however often it is asked


@dataclass(slots=True)
class _Context:
    """A context and its most frequent continuations."""

    tokens: tuple[int, ...]  # newest first
    total: int
    ranks: list[tuple[int, int]]  # token, count
    value: np.float32 = field(default_factory=lambda: np.float32(0))
    covered: int = 0  # places that a longer context of the table answers

    def confidence(self, rank: int) -> np.float32:
        doubt = np.float32(DOUBT[len(self.tokens) - 1])
        return np.float32(self.ranks[rank][1]) / (np.float32(self.total) + doubt)


def entries_of(tokens: np.ndarray, counted: np.ndarray, settings: Settings) -> np.ndarray:
    """Entries of the contexts worth keeping: ENTRY [n].

    Args:
        tokens: int32 [n], -1 between texts.
        counted: uint8 [n], 0 where a token is only context.
    """
    kept: dict[tuple[int, ...], _Context] = {}
    for context in _contexts(tokens, counted, settings):
        parents = (context.tokens[:n] for n in range(len(context.tokens) - 1, 0, -1))
        parent = next((kept[tokens] for tokens in parents if tokens in kept), None)
        if _keep(context, parent, settings):
            kept[context.tokens] = context
            if parent is not None:
                parent.covered += context.total
    rows = [row for context in kept.values() for row in _rows(context)]
    return np.array(rows, ENTRY)


def _contexts(tokens: np.ndarray, counted: np.ndarray, settings: Settings) -> Iterator[_Context]:
    """All contexts with their continuations, the short ones first."""
    stream = tokens.tolist()
    for length in settings.key_lengths:
        seen: dict[tuple[int, ...], Counter[int]] = {}
        for place in range(length, len(stream)):
            window = stream[place - length : place + 1]
            if counted[place] and min(window) >= 0:
                seen.setdefault(tuple(window[-2::-1]), Counter())[window[-1]] += 1
        for context, counts in seen.items():
            ranks = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            yield _Context(context, counts.total(), ranks[: settings.num_ranks])


def _keep(context: _Context, parent: _Context | None, settings: Settings) -> bool:
    """Give a context its value, and say whether that is enough."""
    gain = context.confidence(0)
    if parent is not None and parent.ranks[0][0] == context.ranks[0][0]:
        gain = np.float32(0.5) * abs(gain - parent.confidence(0))
        gain = np.float32(0) if gain < np.float32(NOTICED) else gain
    elif parent is not None:
        for rank in range(1, len(context.ranks)):
            if context.ranks[rank][0] == parent.ranks[0][0]:
                gain -= context.confidence(rank)
    context.value = np.float32(context.total) * gain
    if context.total < settings.min_count or context.value < np.float32(settings.min_value):
        return False
    while len(context.ranks) > 1:
        if context.confidence(len(context.ranks) - 1) >= np.float32(settings.min_share):
            break
        context.ranks.pop()
    return True


def _rows(context: _Context) -> Iterator[tuple[int, int, int, int, int, int]]:
    hashed = int(context_hashes(np.array([context.tokens], np.int32))[0, -1])
    uncovered = np.float32(context.total - min(context.total, context.covered))
    heat = uncovered + np.float32(0.1) * np.float32(context.total)
    for rank, (token, count) in enumerate(context.ranks):
        key = hashed << 8 | len(context.tokens) << 4 | rank
        yield key, token, count, context.total, _upper_half(context.value), _upper_half(heat)


def _upper_half(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32)) >> 16
