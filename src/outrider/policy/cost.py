"""What a forward costs on this machine, as a function of its rows, learned while running."""

import numpy as np

PRIOR_SLOPE = 0.02  # of a one-row forward per further row: measured 1.15-1.3x for 8 rows on CPUs
SMOOTHING = 0.1  # weight of a new measurement; the first ones count as a plain mean
REFRESH = 16  # measurements after which the curve is drawn anew: 20 µs that not every step needs
FEW = 4  # measurements of a row count up to which each one counts at once
OUTLIER = 3.0  # a step this many times the mean was disturbed by something else


class CostModel:
    """Seconds of a decode step by its rows: running means where measured, between them the prior.

    Between two measured row counts the ratio to the prior line is interpolated, beyond them it
    is kept, and the curve never falls with more rows.
    """

    def __init__(self, max_rows: int) -> None:
        self._prior = 1.0 + PRIOR_SLOPE * (np.arange(max_rows + 1) - 1.0)
        self._mean = np.zeros(max_rows + 1)
        self._count = np.zeros(max_rows + 1, np.int64)
        self._curve: list[float] | None = self._prior.tolist()
        self._news = 0  # measurements that the curve does not know yet

    def observe(self, num_rows: int, seconds: float) -> None:
        """A decode step of this many rows took this long, sampling included."""
        count = int(self._count[num_rows])
        mean = float(self._mean[num_rows])
        if count >= 3:
            seconds = min(seconds, OUTLIER * mean)
        weight = max(SMOOTHING, 1.0 / (count + 1))
        self._mean[num_rows] = mean + weight * (seconds - mean)
        self._count[num_rows] = count + 1
        self._news += 1
        if count < FEW or self._news >= REFRESH:
            self._curve = None

    def curve(self) -> list[float]:
        """Seconds for 0, 1, 2, … rows (in units of a one-row step before the first measurement)."""
        if self._curve is None:
            known = np.flatnonzero(self._count)
            ratio = np.interp(
                np.arange(len(self._prior)), known, self._mean[known] / self._prior[known]
            )
            curve: list[float] = np.maximum.accumulate(self._prior * ratio).tolist()
            self._curve, self._news = curve, 0
        return self._curve
