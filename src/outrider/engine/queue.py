"""Who is served next: by priority, fairly among owners, by due date. No KV, no rows, no text.

Within a priority the owner that was served least goes first, so that a thousand requests of one
do not keep another's waiting. A due date that can be kept goes before that, for as long as its
owner is not too far ahead. Of one owner, the request that is due first is served first.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from outrider.engine.request import Request

QUANTUM = 2048.0  # rows that an owner may be ahead of another for the sake of its due dates
# Seconds after which a request goes before all that arrive and are due later, so that it is not
# overtaken for ever: of those without a deadline, and of those that missed theirs.
PATIENCE = 300.0
SMOOTHING = 0.1  # weight of a new measurement
OUTLIER = 3.0  # a step this many times the mean was disturbed by something else


@dataclass(slots=True)
class Pace:
    """How fast requests advance here, learnt step by step; 0 where nothing was seen yet."""

    token_seconds: float = 0.0  # of a decoding request, per new token
    row_seconds: float = 0.0  # of a prompt, per row
    output_tokens: float = 0.0  # of a request that ended, in the mean

    def observe_tokens(self, seconds: float) -> None:
        self.token_seconds = _blend(self.token_seconds, seconds)

    def observe_rows(self, seconds: float) -> None:
        self.row_seconds = _blend(self.row_seconds, seconds)

    def observe_end(self, num_tokens: int) -> None:
        self.output_tokens = _blend(self.output_tokens, num_tokens)

    def seconds_left(self, request: Request) -> float:
        """Until its last token if it is served from now on and becomes as long as others."""
        said = request.num_output_tokens
        tokens = min(request.max_tokens - said, max(1.0, self.output_tokens - said))
        seconds = tokens * self.token_seconds
        if said == 0:
            seconds += request.num_prompt_tokens * self.row_seconds
        return seconds

    def is_late(self, request: Request, now: float) -> bool:
        """True when the deadline cannot be kept any more."""
        return request.has_deadline and now + self.seconds_left(request) > request.due

    def rank(self, request: Request, now: float) -> tuple[int, float, int]:
        """Sorts running requests: the last one gives way first."""
        due = request.due
        if not request.has_deadline or self.is_late(request, now):
            due = request.arrival + PATIENCE
        return request.terms.priority, due, request.order


def _blend(mean: float, new: float) -> float:
    return mean + SMOOTHING * (min(new, OUTLIER * mean) - mean) if mean else float(new)


class Ledger:
    """Rows that were computed for each owner while others waited too."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._unfinished: Counter[str] = Counter()

    def __getitem__(self, owner: str) -> float:
        return self._served[owner]

    def enter(self, owner: str) -> None:
        """A request arrived. Who was away is not owed what was computed meanwhile."""
        if owner not in self._unfinished:
            present = {name: self._served[name] for name in self._unfinished}
            least = min(present.values(), default=0.0)
            ahead = {name: rows for name, rows in self._served.items() if rows > least}
            self._served = {**ahead, **present, owner: max(least, self._served.get(owner, 0.0))}
        self._unfinished[owner] += 1

    def leave(self, owner: str) -> None:
        self._unfinished[owner] -= 1
        if not self._unfinished[owner]:
            del self._unfinished[owner]
        if not self._unfinished:
            self._served.clear()

    def charge(self, owner: str, num_rows: int) -> None:
        self._served[owner] += num_rows


@dataclass(order=True, slots=True)
class _Entry:
    due: float  # as in `Pace.rank`
    order: int
    is_timed: bool = field(compare=False)  # due by a deadline that can be kept
    request: Request = field(compare=False)


class Queue:
    """Waiting requests. Their order depends on `now`: a deadline may have become impossible."""

    def __init__(self, pace: Pace, ledger: Ledger) -> None:
        self._pace = pace
        self._ledger = ledger
        self._lines: dict[int, dict[str, list[_Entry]]] = {}  # priority -> owner -> heap
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be served if there were one owner."""
        lines = (self._lines[priority] for priority in sorted(self._lines))
        for line in lines:
            entries = sorted(entry for heap in line.values() for entry in heap)
            yield from (entry.request for entry in entries)

    @property
    def top_priority(self) -> int:
        return min(self._lines)

    def push(self, request: Request) -> None:
        owners = self._lines.setdefault(request.terms.priority, {})
        due = request.due if request.has_deadline else request.arrival + PATIENCE
        entry = _Entry(due, request.order, request.has_deadline, request)
        heapq.heappush(owners.setdefault(request.owner, []), entry)
        self._length += 1

    def discard(self, request: Request) -> None:
        """Take a request out wherever it stands."""
        heap = self._lines[request.terms.priority][request.owner]
        place = next(i for i, entry in enumerate(heap) if entry.request is request)
        if place == 0:
            heapq.heappop(heap)
        else:
            heap[place] = heap[-1]
            heap.pop()
            heapq.heapify(heap)
        self._length -= 1
        if not heap:
            self._drop_line(request)

    def best(self, now: float) -> Request:
        """The one to be served next; it stays in the queue."""
        owners = self._lines[self.top_priority]
        least = min(self._ledger[owner] for owner in owners)
        best: tuple[tuple[float, ...], Request] | None = None
        for owner, heap in owners.items():
            entry = self._head(heap, now)
            served = self._ledger[owner]
            key = (1.0, served, entry.due, entry.order)
            if entry.is_timed and served <= least + QUANTUM:
                key = (0.0, entry.due, entry.order)
            if best is None or key < best[0]:
                best = key, entry.request
        assert best is not None
        return best[1]

    def _head(self, heap: list[_Entry], now: float) -> _Entry:
        while heap[0].is_timed and self._pace.is_late(heap[0].request, now):
            entry = heap[0]
            late = _Entry(entry.request.arrival + PATIENCE, entry.order, False, entry.request)
            heapq.heapreplace(heap, late)
        return heap[0]

    def _drop_line(self, request: Request) -> None:
        owners = self._lines[request.terms.priority]
        del owners[request.owner]
        if not owners:
            del self._lines[request.terms.priority]
