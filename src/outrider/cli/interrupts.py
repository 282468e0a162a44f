"""Ctrl-C: the user is told once, on one line, and the process ends with the code of shells."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells expect


@contextmanager
def told_of() -> Iterator[None]:
    """Say on stderr that Ctrl-C ended the body, in the exception's own words where it has any."""
    try:
        yield
    except KeyboardInterrupt as stop:
        start = "\n" if sys.stderr.isatty() else ""  # behind the ^C, or half a line of an answer
        sys.stderr.write(f"{start}outrider: {str(stop) or 'interrupted'}\n")
        raise


@contextmanager
def going_on() -> Iterator[None]:
    """Have Ctrl-C in the body told with what becomes of the work that was begun."""
    try:
        yield
    except KeyboardInterrupt as stop:
        words = "interrupted; the same command goes on where it stopped"
        raise KeyboardInterrupt(words) from stop


def already_told(end: BaseException) -> BaseException:
    """The same end for a command that has said why itself: of Ctrl-C the exit code alone."""
    return SystemExit(EXIT_INTERRUPTED) if isinstance(end, KeyboardInterrupt) else end
