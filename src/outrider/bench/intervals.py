"""Intervals of a ratio over prompts. Tokens of one answer depend on each other, prompts do not."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


def per_step_interval(
    tokens: Sequence[float] | np.ndarray, steps: Sequence[float] | np.ndarray, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval, of LEVEL, of all tokens over all steps (Efron, percentiles).

    Args:
        tokens, steps: of each prompt, [P]. A prompt without steps says nothing and is left out.
        seed: which prompts are drawn.

    Returns:
        Both ends; zeros where no prompt had a step.
    """
    numbers = np.asarray([tokens, steps], np.float64)
    numbers = numbers[:, numbers[1] > 0]
    size = numbers.shape[1]
    if not size:
        return 0.0, 0.0
    drawn = np.random.default_rng(seed).integers(0, size, (RESAMPLES, size))
    sums = numbers[:, drawn].sum(-1)  # [2, RESAMPLES]
    low, high = np.quantile(sums[0] / sums[1], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
