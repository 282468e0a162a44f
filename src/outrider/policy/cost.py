"""What a forward costs on this machine, as a function of its rows and of the context they read.

At first a line says how it grows with rows; `measure.py` puts what this machine does in its place.
Either is corrected by what the steps take.
"""

from dataclasses import dataclass

import numpy as np

PRIOR_SLOPE = 0.02  # of a one-row forward per further row: measured 1.15-1.3x for 8 rows on CPUs
SPEED_SMOOTHING = 0.1  # weight of a step in the speed of the machine; first ones weigh more
SHAPE_SMOOTHING = 0.05  # … and in what its row count takes beside others
KNOWN = 3  # steps of a class from which on it tells about the speed, where nothing was measured
MEASURED = 16.0  # steps that the surface of this machine is worth, in each class
FADE = 0.98  # of a class's steps, each time the curve is drawn anew: what is not tried is forgotten
REFRESH = 64  # measurements after which the curve is drawn anew: 60 µs that not every step needs
FINE = 8  # row counts up to it are classes of their own, beyond it there are four per octave
REACH = 0.25  # octaves over which classes lend each other what they saw
TRUSTED = 20  # measurements beyond which a class weighs no more
OUTLIER = 2.0  # a step this many times what was expected was disturbed by something else
FEW_TOKENS = 128  # contexts are rounded to them, or to a 16th of what they are


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
    a slow minute must not make the row counts look dear that happened to be in it: shapes are 1 on
    average. Whatever disturbs a step makes it longer, so that much longer ones count as little
    longer, and much shorter ones at once. Neighbouring classes lend each other what they saw;
    between those that were seen the shape is interpolated, beyond them it is kept, and the curve
    never falls with more rows.
    """

    def __init__(self, max_rows: int, surface: Surface | None = None) -> None:
        self.max_rows = max_rows
        every = np.arange(max_rows + 1)
        self._set_surface(1.0 + PRIOR_SLOPE * (every - 1.0), np.zeros(max_rows + 1))
        octaves = np.log2(np.maximum(1, every))
        classes = np.where(every <= FINE, every, FINE + np.floor(4 * (octaves - 3))).astype(int)
        self._class: list[int] = classes.tolist()
        sizes = np.bincount(classes)
        self._places = np.bincount(classes, weights=every) / sizes  # rows amid each class
        far = np.subtract.outer(*[np.log2(np.maximum(1.0, self._places))] * 2)
        self._nearness = np.exp(-0.5 * (far / REACH) ** 2)
        self._shape = [1.0] * len(sizes)
        self._count = [0.0] * len(sizes)
        self._speed = 0.0  # seconds over those expected; 0: no step was seen
        self._num_steps = 0  # that the speed is known from
        self._trust = 0.0  # steps that the surface is worth
        self._lines: tuple[np.ndarray, np.ndarray] | None = None  # what steps have made of it
        self._curve: tuple[int, list[float]] = (-1, [])  # context, seconds by rows
        self._news = 0  # measurements that the lines do not know yet
        if surface is not None:
            self.use(surface)

    def use(self, surface: Surface) -> None:
        """Take what was measured on this machine; corrections start again."""
        every = np.arange(self.max_rows + 1)
        rows, base = np.array(surface.rows), np.array(surface.base)
        whole = np.interp(every, rows, base)
        if len(rows) > 1:  # beyond what was measured it goes on as it was
            slope = max(0.0, (base[-1] - base[-2]) / (rows[-1] - rows[-2]))
            whole += slope * np.maximum(0, every - rows[-1])
        self._set_surface(whole, np.interp(every, rows, surface.per_token))
        self._count = [0.0] * len(self._count)
        self._shape = [1.0] * len(self._count)
        self._speed, self._num_steps, self._trust, self._lines = 0.0, 0, MEASURED, None

    def observe(self, num_rows: int, seconds: float, context: int = 0) -> None:
        """A decode step of this many rows took this long, sampling included."""
        place = self._class[num_rows]
        count, shape = self._count[place], self._shape[place]
        expected = self._base_list[num_rows] + self._per_token_list[num_rows] * context
        ratio = seconds / (expected * shape)
        speed = self._speed or ratio
        if self._trust or count >= KNOWN:
            ratio = min(ratio, OUTLIER * speed)
            self._num_steps += 1
            weight = max(SPEED_SMOOTHING, 1.0 / self._num_steps)
            speed = ratio if OUTLIER * ratio < speed else speed + weight * (ratio - speed)
        self._speed = speed
        weight = max(SHAPE_SMOOTHING, 1.0 / (count + 1.0 + self._trust))
        self._shape[place] = shape * (1.0 + weight * (ratio / speed - 1.0))
        self._count[place] = count + 1
        self._news += 1
        if self._news >= REFRESH or 4 * self._news >= sum(self._count):
            self._lines = None

    def curve(self, context: int = 0) -> list[float]:
        """Seconds of 0, 1, 2, … `max_rows` rows; not to be changed.

        In units of a one-row step before the first measurement.
        """
        if self._lines is None:
            self._lines = self._corrected()
            self._curve = (-1, [])
        size = max(FEW_TOKENS, 1 << max(0, context.bit_length() - 4))
        context = (context + size // 2) // size * size
        if self._curve[0] != context:
            base, per_token = self._lines
            self._curve = (context, (base + per_token * context).tolist())
        return self._curve[1]

    def seconds(self, first: int, last: int, context: int = 0) -> list[float]:
        """Of `first`, `first` + 1, … `last` rows; counts beyond `max_rows` are left out."""
        return self.curve(context)[first : last + 1]

    def _set_surface(self, base: np.ndarray, per_token: np.ndarray) -> None:
        """Lists beside the arrays, because single numbers of an array take 100 ns each."""
        self._base, self._per_token = base, per_token
        self._base_list: list[float] = base.tolist()
        self._per_token_list: list[float] = per_token.tolist()

    def _corrected(self) -> tuple[np.ndarray, np.ndarray]:
        self._news = 0
        count, shape = np.array(self._count), np.array(self._shape)
        known = np.flatnonzero(count > 0.5)
        ratio: np.ndarray | float = self._speed or 1.0
        if len(known):
            trusted = np.minimum(TRUSTED, count[known])
            usual = float(np.exp(np.average(np.log(shape[known]), weights=trusted)))
            self._speed *= usual
            shape[known] /= usual
            weights = self._nearness[np.ix_(known, known)] * trusted
            total = weights.sum(axis=1) + self._trust
            near = (weights @ shape[known] + self._trust) / total
            every = np.arange(self.max_rows + 1)
            ratio = self._speed * np.interp(every, self._places[known], near)
        self._count, self._shape = (count * FADE).tolist(), shape.tolist()
        base = np.maximum.accumulate(self._base * ratio)
        return base, np.maximum.accumulate(self._per_token * ratio)
