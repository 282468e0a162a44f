"""How many CPU threads are used, who says so, and when torch must not use them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import ConfigError

VARIABLE = "OUTRIDER_NUM_THREADS"
MOST_PER_CPU = 4  # more only wait for each other, and thousands cannot be started at all


def check_num_threads(value: object, name: str = "num_threads") -> int:
    """The number of threads as it was given.

    Raises:
        ConfigError: no positive integer, or far more than there are CPUs.
    """
    most = MOST_PER_CPU * (os.cpu_count() or 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")
    if value > most:
        raise ConfigError(
            f"{name} must be at most {most}, {MOST_PER_CPU} for each CPU, got {value}"
        )
    return value


def num_threads_of_environment() -> int | None:
    """What `OUTRIDER_NUM_THREADS` asks for; None where it is not set or empty."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    return check_num_threads(int(text) if text.isdecimal() and len(text) < 10 else text, VARIABLE)


def set_num_threads(asked: int | None = None, name: str = "num_threads") -> int:
    """Have torch and the kernels use as many threads as are asked for; None leaves them as they
    are, which is at first what `OUTRIDER_NUM_THREADS` says, else what torch has. Returns how many
    the kernels use.

    Raises:
        ConfigError: as `check_num_threads`.
    """
    import torch

    from outrider.native import library

    if asked is not None:
        check_num_threads(asked, name)
    lib = library()
    if asked is not None:
        torch.set_num_threads(asked)
        if lib is not None:
            lib.outrider_set_num_threads(asked)
    return torch.get_num_threads() if lib is None else lib.outrider_num_threads()


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch from sharing out small copies.

    From 32,768 numbers on it wakes its threads for them, and these then spin for milliseconds on
    the cores that the kernels of the next forward want: on two cores a forward after such a copy
    took 1.4 times as long.
    """
    import torch  # takes a second, which the help of the command line does not have

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
