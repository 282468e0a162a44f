"""What asking a source brings, as a function of what is there without it, and what it costs.

A drafter that costs milliseconds pays where nobody else has much to say. So its gain is learnt by
how many tokens the drafts before it are expected to bring, and by request: the accepted tokens of
a step less those that the drafts before it would have brought alone, which the true text tells.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from math import sqrt

import numpy as np

from outrider.policy.view import Ask

TOPS = (0.25, 0.75, 1.5, 3.0, 6.0)  # expected tokens of the drafts before; the last has no top
# Taken for granted at first, so that every source is tried. In accepted tokens per request asked.
PRIOR = (1.0, 0.8, 0.6, 0.4, 0.3, 0.2)
PRIOR_WEIGHT = 4.0
MEMORY = 100.0  # answers beyond which older ones fade
REQUEST_WEIGHT = 6.0  # tokens that a request's own experience is weighed against
REQUEST_MEMORY = 16.0
SPREAD = 1.0  # how much more than usual a request may bring, of which nothing is known yet
DOUBT = 0.5  # accepted tokens that a mean of one answer may be wrong by
ROWS_MEMORY = 1000.0  # accepted tokens beyond which older ones fade, to know what rows cost
LEAST_KEPT = 0.2  # of what a source brings, whatever its rows cost: the estimate is rough
PAYING = 64.0  # tokens of a draft that pay, before any was seen
PAYING_MEMORY = 32.0  # drafts that their mean is made of, about
BEYOND = 1.5  # times that mean a draft may be long, and one token more: drafts differ
LONGEST_INTERVAL = 512  # steps between trials of a source that keeps bringing nothing
SETTLED = 8  # steps for which it holds that a source is of no use to some requests
FEW_TOKENS = 3  # of new text per request: what a step brings
TOKENS = 16.0  # of new text, the unit in which it is about as much as a request
TRUSTED, EVERY = 12, 16  # calls from which on one in so many has the line fitted anew
FADE = 0.98  # of what earlier calls count, with every call
LEAST = 1e-6  # seconds of a call; and of the squares, that of new text
RIDGE = 1e-3  # of the squares: what cannot be told apart is shared evenly
USED = 0.25  # of the tokens that a request may still write, steps in which a source is of use


def bucket(expected: float) -> int:
    """Class of the number of tokens expected without the source."""
    return bisect_right(TOPS, expected)


class CallCost:
    """Seconds of a call: base + requests + new text, least squares over the calls seen.

    A source that keeps KV takes in what it has not seen of a text: a whole prompt the first time,
    or after it was left out for a while. Errors are squared as shares of what a call took: then one
    that something else held up, a thousand times too long maybe, counts about as much as a call
    that took half as long as expected, and not a million times as much.
    """

    def __init__(self) -> None:
        self.base = 0.0
        self.per_request = 0.0
        self.per_token = 0.0  # of new text
        self.num_calls = 0
        self._squares = [0.0] * 6  # upper half of a 3 × 3 matrix, row by row
        self._products = [0.0] * 3

    @property
    def each(self) -> float:
        """Seconds of a request whose text it has seen up to the last few tokens."""
        return self.per_request + FEW_TOKENS * self.per_token

    def seconds(self, num_requests: int) -> float:
        """Of a call for so many of them."""
        return self.base + self.each * num_requests

    def observe(self, num_requests: int, seconds: float, new_tokens: int = 0) -> None:
        """The first call, which may warm up, does not count."""
        self.num_calls += 1
        if self.num_calls == 1:
            return
        x = 1.0 / max(seconds, LEAST)
        y, z = num_requests * x, new_tokens / TOKENS * x
        found = (x * x, x * y, x * z, y * y, y * z, z * z)
        for i, value in enumerate(found):
            self._squares[i] = FADE * self._squares[i] + value
        for i, value in enumerate((x, y, z)):
            self._products[i] = FADE * self._products[i] + value
        if self.num_calls < TRUSTED or self.num_calls % EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        """Solve for coefficients of at least 0; those that would be below leave the sum. 40 µs."""
        a, b, c, d, e, f = self._squares
        whole, products = np.array([[a, b, c], [b, d, e], [c, e, f]]), np.array(self._products)
        whole[2, 2] += LEAST * a  # where no call had new text
        kept = [0, 1, 2]
        found = np.zeros(3)
        while kept:
            squares = whole[np.ix_(kept, kept)]
            found[:] = 0
            ridge = RIDGE * np.diag(np.diag(squares))
            found[kept] = np.linalg.solve(squares + ridge, products[kept])
            if found.min() >= 0:
                break
            kept.remove(int(found.argmin()))
        self.base, self.per_request = float(found[0]), float(found[1])
        self.per_token = float(found[2]) / TOKENS


@dataclass(slots=True)
class SourceGain:
    """What one source brought, by kind and bucket, and what its calls cost."""

    cost: CallCost = field(default_factory=CallCost)
    brought: float = 0.0  # accepted tokens, older ones counted less, …
    paid: float = 0.0  # … and what the rows of its drafts were worth
    skipped: int = 0  # steps since it was last asked
    interval: int = 0  # steps after which it is tried all the same
    is_on: bool = True  # it was asked in the last step, by what it brings
    num_cheap: int = 0  # calls that were made without a second thought
    paying: float = PAYING  # tokens of its drafts that are worth their rows, of late
    _settled: list[str] = field(default_factory=list)  # requests that it was not worth asking for
    _num_settled: int = 0  # steps since that was worked out
    _sums: dict[str, list[list[float]]] = field(default_factory=dict)  # kind -> [weight, tokens]
    _lengths: dict[str, int] = field(default_factory=dict)  # of texts when it was last asked
    _requests: dict[str, list[float]] = field(default_factory=dict)  # [expected, found]

    def is_due(self, is_asked: bool, usual: int) -> bool:
        """Count a step; True when a source that is not asked is to be tried all the same.

        The longer it has brought nothing, the rarer: twice as many steps after every trial.
        """
        if is_asked:
            self.skipped, self.interval = 0, usual
            return False
        self.skipped += 1
        if self.skipped < max(self.interval, usual):
            return False
        self.skipped, self.interval = 0, min(LONGEST_INTERVAL, 2 * max(self.interval, usual))
        return True

    def is_settled(self, request_ids: list[str]) -> bool:
        """Count a step; whether it would not be asked for these requests a few steps ago either,
        when nobody had drafted for them, as now. What it may bring has hardly changed since."""
        self._num_settled += 1
        return self._num_settled < SETTLED and self._settled == request_ids

    def settle(self, request_ids: list[str]) -> None:
        """It is not worth asking for these requests where nobody else drafts; none: it is."""
        self._settled, self._num_settled = request_ids, 0

    def expect(self, kind: str, request_id: str, place: int) -> tuple[float, float]:
        """Accepted tokens that asking for this request adds, in a bucket: likely, and at best.

        At best is what there is hope for as long as little is known of request and bucket.
        """
        weight, tokens = self._row(kind)[place]
        mean = tokens / weight
        expected, found = self._requests.get(request_id, (0.0, 0.0))
        known = expected + REQUEST_WEIGHT
        unknown = REQUEST_WEIGHT / known
        likely = mean * (unknown + found / known)
        return likely, likely + SPREAD * unknown**2 * mean + DOUBT / sqrt(weight)

    @property
    def kept(self) -> float:
        """Share of what it brings that is left when its rows are paid."""
        return max(LEAST_KEPT, 1.0 - self.paid / (self.brought + PRIOR_WEIGHT))

    def observe(self, kind: str, request_id: str, place: int, tokens: float, paid: float) -> None:
        """Asking brought so many accepted tokens more, in rows that were worth so many."""
        cell = self._row(kind)[place]
        own = self._requests.setdefault(request_id, [0.0, 0.0])
        if own[0] > REQUEST_MEMORY:
            own[:] = [value / 2 for value in own]
        own[0] += cell[1] / cell[0]
        own[1] += tokens
        for each in (cell, self._row("")[place]) if kind else (cell,):
            if each[0] > MEMORY:
                each[:] = [value / 2 for value in each]
            each[0] += 1
            each[1] += tokens
        self.brought += tokens
        self.paid += paid
        if self.brought > ROWS_MEMORY:
            self.brought, self.paid = self.brought / 2, self.paid / 2

    def observe_length(self, num_paying: int) -> None:
        """So many tokens of a draft were worth a row each."""
        self.paying += (num_paying - self.paying) / PAYING_MEMORY

    @property
    def length(self) -> int:
        """Tokens that are worth drafting: what hardly ever pays only makes the call longer."""
        return 1 + round(BEYOND * self.paying)

    def take(self, ask: Ask) -> int:
        """The source is asked for a request; tokens of its text that are new to it."""
        new = ask.length - self._lengths.get(ask.request_id, 0)
        self._lengths[ask.request_id] = ask.length
        return new

    def intake_seconds(self, ask: Ask) -> float:
        """What it takes to bring the source up to a text, per step in which that is of use."""
        new = ask.length - self._lengths.get(ask.request_id, 0)
        if new <= FEW_TOKENS:
            return 0.0
        return self.cost.per_token * (new - FEW_TOKENS) / max(1.0, USED * ask.room)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._lengths.pop(request_id, None)

    def _row(self, kind: str) -> list[list[float]]:
        row = self._sums.get(kind)
        if row is None:
            start = self._sums.get("")
            means = PRIOR if start is None else [tokens / weight for weight, tokens in start]
            row = self._sums[kind] = [[PRIOR_WEIGHT, PRIOR_WEIGHT * mean] for mean in means]
        return row
