"""What a forward costs on this machine, as a function of its rows and of the context they read.

At first a line says how it grows with rows; `measure.py` puts what this machine does in its place.
Either is corrected by what the steps take.
"""

from dataclasses import dataclass

import numpy as np

PRIOR_SLOPE = 0.02  # of a one-row forward per further row: measured 1.15-1.3x for 8 rows on CPUs
SPEED_SMOOTHING = 0.1  # weight of a step in the speed of the machine
SHAPE_SMOOTHING = 0.05  # … and in what its row count takes beside others; first ones weigh more
KNOWN = 3  # steps of a class from which on it tells about the speed
MEASURED = 4.0  # steps that the surface of this machine is worth, in each class
FADE = 0.98  # of a class's steps, each time the curve is drawn anew: what is not tried is forgotten
REFRESH = 16  # measurements after which the curve is drawn anew: 60 µs that not every step needs
FINE = 8  # row counts up to it are classes of their own, beyond it there are four per octave
REACH = 0.25  # octaves over which classes lend each other what they saw
TRUSTED = 20  # measurements beyond which a class weighs no more
OUTLIER = 2.0  # a step this many times what was expected was disturbed by something else


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds of a forward: ``base[i] + per_token[i] * context`` for ``rows[i]`` rows.

    `context` is the sum of the tokens that the requests of a forward have in KV.
    """

    rows: tuple[int, ...]  # ascending
    base: tuple[float, ...]
    per_token: tuple[float, ...]


class CostModel:
    """Seconds of a decode step by its rows and their context.

    A step takes what the surface says, times the speed of the machine just now (others may work on
    it too), times what is learnt of its class of row counts. Speed and shape are told apart because
    a slow minute must not make the row counts look dear that happened to be in it. Neighbouring
    classes lend each other what they saw; between those that were seen the shape is interpolated,
    beyond them it is kept, and the curve never falls with more rows.
    """

    def __init__(self, max_rows: int, surface: Surface | None = None) -> None:
        self.max_rows = max_rows
        every = np.arange(max_rows + 1)
        self._base = 1.0 + PRIOR_SLOPE * (every - 1.0)
        self._per_token = np.zeros(max_rows + 1)
        octaves = np.log2(np.maximum(1, every))
        self._class = np.where(every <= FINE, every, FINE + np.floor(4 * (octaves - 3))).astype(int)
        num_classes = int(self._class[-1]) + 1
        sizes = np.bincount(self._class)
        self._places = np.bincount(self._class, weights=every) / sizes  # rows amid each class
        far = np.subtract.outer(*[np.log2(np.maximum(1.0, self._places))] * 2)
        self._nearness = np.exp(-0.5 * (far / REACH) ** 2)
        self._shape = np.ones(num_classes)
        self._count = np.zeros(num_classes)
        self._speed = 0.0  # seconds over those expected; 0: no step was seen
        self._trust = 0.0  # steps that the surface is worth
        # Corrected seconds by rows, and what a token of context adds; lists, because single numbers
        # of an array take 100 ns each.
        self._lines: tuple[list[float], list[float]] | None = None
        self._news = 0  # measurements that the curve does not know yet
        if surface is not None:
            self.use(surface)

    def use(self, surface: Surface) -> None:
        """Take what was measured on this machine; corrections start again."""
        every = np.arange(self.max_rows + 1)
        rows, base = np.array(surface.rows), np.array(surface.base)
        self._base = np.interp(every, rows, base)
        if len(rows) > 1:  # beyond what was measured it goes on as it was
            slope = max(0.0, (base[-1] - base[-2]) / (rows[-1] - rows[-2]))
            self._base += slope * np.maximum(0, every - rows[-1])
        self._per_token = np.interp(every, rows, surface.per_token)
        self._count[:], self._shape[:] = 0, 1
        self._speed, self._trust, self._lines = 0.0, MEASURED, None

    def observe(self, num_rows: int, seconds: float, context: int = 0) -> None:
        """A decode step of this many rows took this long, sampling included."""
        ratio = seconds / self._expected(num_rows, context)
        place = int(self._class[num_rows])
        count, shape = float(self._count[place]), float(self._shape[place])
        self._speed = self._speed or ratio
        if count >= KNOWN:
            ratio = min(ratio, OUTLIER * shape * self._speed)
            self._speed += SPEED_SMOOTHING * (ratio / shape - self._speed)
        weight = max(SHAPE_SMOOTHING, 1.0 / (count + 1.0 + self._trust))
        self._shape[place] = shape + weight * (ratio / self._speed - shape)
        self._count[place] = count + 1
        self._news += 1
        if self._news >= REFRESH or self._news >= self._count.sum() / 4:
            self._lines = None

    def seconds(self, first: int, last: int, context: int = 0) -> list[float]:
        """Of `first`, `first` + 1, … `last` rows; counts beyond `max_rows` are left out.

        In units of a one-row step before the first measurement.
        """
        if self._lines is None:
            self._lines = self._corrected()
        base, per_token = self._lines
        part = slice(first, last + 1)
        return [b + t * context for b, t in zip(base[part], per_token[part], strict=True)]

    def curve(self, context: int = 0) -> list[float]:
        """Seconds for 0, 1, 2, … rows."""
        return self.seconds(0, self.max_rows, context)

    def _expected(self, num_rows: int, context: int) -> float:
        return float(self._base[num_rows]) + float(self._per_token[num_rows]) * context

    def _corrected(self) -> tuple[list[float], list[float]]:
        self._news = 0
        known = np.flatnonzero(self._count > 0.5)
        ratio: np.ndarray | float = self._speed or 1.0
        if len(known):
            weights = self._nearness[np.ix_(known, known)] * np.minimum(TRUSTED, self._count[known])
            total = weights.sum(axis=1) + self._trust
            shape = (weights @ self._shape[known] + self._trust) / total
            ratio = self._speed * np.interp(
                np.arange(self.max_rows + 1), self._places[known], shape
            )
        self._count *= FADE
        base = np.maximum.accumulate(self._base * ratio).tolist()
        return base, np.maximum.accumulate(self._per_token * ratio).tolist()
