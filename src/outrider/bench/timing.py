"""Medians with their spread, sides that take turns, and a process held on its cores."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any, TypeVar

import torch

from outrider.threads import set_num_threads

Found = TypeVar("Found")

QUARTILES_FROM = 5  # values; of fewer the whole range is shown


@dataclass(frozen=True, slots=True)
class Spread:
    """What repeated measurements of one thing gave."""

    median: float
    low: float  # first quartile, or the smallest of fewer than QUARTILES_FROM values
    high: float
    values: tuple[float, ...]  # by round

    @property
    def kind(self) -> str:
        """What `low` and `high` are."""
        return "quartiles" if len(self.values) >= QUARTILES_FROM else "range"


def spread(values: Sequence[float]) -> Spread:
    """Median and spread of at least one value."""
    assert values, "nothing was measured"
    if len(values) < QUARTILES_FROM:
        return Spread(median(values), min(values), max(values), tuple(values))
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, tuple(values))


def alternate(rounds: int, *sides: Callable[[], Found]) -> list[list[Found]]:
    """Results of each side over rounds that change who comes first.

    A slow minute of a shared machine then hits all sides alike, and ratios stay honest.
    """
    results: list[list[Found]] = [[] for _ in sides]
    for number in range(rounds):
        for index in turns(len(sides), number):
            results[index].append(sides[index]())
    return results


def turns(num_sides: int, round_number: int) -> Sequence[int]:
    """Who comes first, second, … in this round: the order is turned around every round."""
    order = range(num_sides)
    return order if round_number % 2 == 0 else order[::-1]


def medians(results: Sequence[Sequence[float]]) -> list[float]:
    """Median of each side."""
    return [median(result) for result in results]


def seconds(action: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = perf_counter()
    action()
    return perf_counter() - started


def pin(num_threads: int | None) -> None:
    """Give this process as many cores as threads, see `set_num_threads`, where the system can."""
    count = set_num_threads(num_threads)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:count])
        set_num_threads(count)  # the kernels' threads start anew, on these cores


def read_bandwidth(num_bytes: int = 512 << 20, repeats: int = 5) -> float:
    """Bytes per second of summing a buffer far beyond the caches (torch, all threads), best."""
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32)
    torch.sum(buffer)
    return num_bytes / min(seconds(lambda: torch.sum(buffer)) for _ in range(repeats))
