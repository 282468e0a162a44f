"""The cores that every side runs on."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outrider.errors import ConfigError


def our_cores() -> list[int]:
    """Numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_for(num_threads: int) -> list[int]:
    """As many cores as threads.

    Raises:
        ConfigError: there are fewer.
    """
    cores = our_cores()
    if num_threads > len(cores):
        raise ConfigError(
            f"--num-threads must be at most {len(cores)}, the cores there are for this process, "
            f"got {num_threads}"
        )
    return cores[:num_threads]


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Hold this thread on some cores for a moment; what it starts meanwhile stays there."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
