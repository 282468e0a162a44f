"""A Chrome trace of the engine's steps, to be opened in Perfetto or chrome://tracing.

One slice per phase of each step, in the order in which `Engine.step` makes its calls, and
counters of what runs, waits and fills the KV cache. Written line by line: a trace that was cut
off can still be opened.
"""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.serving.errors import to_json

logger = logging.getLogger(__name__)

PHASES = ("schedule", "plan", "propose", "pack", "forward", "sample", "commit")
MICRO = 1e6  # a trace counts in microseconds


def check_trace(path: Path) -> None:
    """Refuse, before a model is loaded, a file that a `Trace` could not make; none is left behind.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        is_new = not path.exists()
        if not path.is_fifo():  # which would wait for its reader
            path.open("ab").close()
        if is_new:
            path.resolve().unlink()
    except OSError as error:
        raise ConfigError(f"cannot write the trace {path}: {error.strerror or error}") from error


class Trace:
    """Writes what every step of one engine took.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, engine: Engine) -> None:
        self._engine = engine
        self._start = perf_counter()
        self._before = self._seconds()
        self._num_steps = engine.times.steps
        self._file = path.open("wb")
        self._write({"name": "process_name", "ph": "M", "args": {"name": "outrider"}}, b"[\n")

    def step(self) -> None:
        """Write the step that has just ended; called in the thread that drives the engine."""
        engine = self._engine
        if self._file.closed or engine.times.steps == self._num_steps:
            return
        seconds = self._seconds()
        took = {name: seconds[name] - self._before[name] for name in PHASES}
        at = perf_counter() - self._start - sum(took.values())
        self._before, self._num_steps = seconds, engine.times.steps
        try:
            self._slice("step", at, sum(took.values()), {"step": engine.times.steps})
            for name, spent in took.items():
                if spent > 0:
                    self._slice(name, at, spent, {})
                at += spent
            self._count(at)
        except OSError as error:  # a full disk ends the trace and nothing else
            logger.warning("the trace ends here: %s", error)
            self._close()

    def close(self) -> None:
        if not self._file.closed:
            self._close(b"\n]\n")

    def _close(self, last: bytes = b"") -> None:
        with suppress(OSError):  # what is left may have no room either
            self._file.write(last)
        with suppress(OSError):
            self._file.close()

    def _seconds(self) -> dict[str, float]:
        times = asdict(self._engine.times)
        return {name: times[name] for name in PHASES}

    def _slice(self, name: str, at: float, spent: float, told: Mapping[str, Any]) -> None:
        self._write({"name": name, "ph": "X", "ts": at * MICRO, "dur": spent * MICRO, "args": told})

    def _count(self, at: float) -> None:
        scheduler, arena = self._engine.scheduler, self._engine.arena
        counts = {
            "requests": {"running": len(scheduler.running), "waiting": len(scheduler.waiting)},
            "KV pages": {"used": arena.num_pages - arena.num_free_pages},
        }
        for name, values in counts.items():
            self._write({"name": name, "ph": "C", "ts": at * MICRO, "args": values})

    def _write(self, event: Mapping[str, Any], before: bytes = b",\n") -> None:
        self._file.write(before + to_json({**event, "pid": os.getpid(), "tid": 1}))
