"""Keeps the faults of draft sources away from the text: drafts are a help, never a condition.

A source that raises, breaks its contract or takes far too long is switched off for the requests
it was asked for, counted, and tried again later, each of these requests by itself, so that one
request that a source cannot bear does not take the source from the others.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.drafting.source import DraftSource
from outrider.errors import OutriderError, SourceError

log = logging.getLogger("outrider")

FIRST_PAUSE = 16  # steps without a source after its first failure for a request, then twice as many
LONGEST_PAUSE = 4096
STALL_SECONDS = 3.0  # a call that takes longer stalls every request of the step …
STALL_PER_TOKEN = 0.005  # … unless it has so many tokens of new text to take in, seconds each
SMOOTHING = 0.1  # weight of a call in the health of its source


@dataclass(slots=True)
class _Pause:
    """A source and a request that do not get on."""

    until: float  # step; infinity: for the rest of the request
    steps: int


class Guard:
    """Calls sources, and remembers which of them failed for whom.

    Args:
        is_strict: failures are raised as well, for tests.
    """

    def __init__(self, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self.failures: Counter[tuple[str, str]] = Counter()  # (source, what) -> times
        self.health: dict[str, float] = {}  # share of calls that went well lately
        self._pauses: dict[tuple[str, str], _Pause] = {}
        self._step = 0

    def call(self, source: DraftSource, method: str, *arguments: Any) -> Any:
        """What a method of a source answers.

        Raises:
            SourceError: it raised. A refusal to `bind` passes as it is.
        """
        function: Callable[..., Any] = getattr(source, method)
        try:
            return function(*arguments)
        except Exception as error:
            if method == "bind" and isinstance(error, OutriderError):
                raise
            raise SourceError(
                f"draft source {source.name!r} raised in {method}: {type(error).__name__}: {error}"
            ) from error

    def tell(self, source: DraftSource, method: str, *arguments: Any) -> bool:
        """Call a method that answers nothing; False when it failed.

        Raises:
            SourceError: it raised, and the guard is strict.
        """
        try:
            self.call(source, method, *arguments)
        except SourceError as error:
            self.failed(source, method, error)
            return False
        return True

    def begin_step(self) -> None:
        self._step += 1

    def is_off(self, source_name: str, request_id: str) -> bool:
        pause = self._pauses.get((source_name, request_id)) if self._pauses else None
        return pause is not None and pause.until > self._step

    def groups(self, source_name: str, request_ids: Sequence[str]) -> list[list[int]]:
        """Which requests are asked for together: those that failed before each by itself."""
        if not self._pauses:
            return [list(range(len(request_ids)))]
        suspects = [i for i, name in enumerate(request_ids) if (source_name, name) in self._pauses]
        well = [i for i in range(len(request_ids)) if i not in suspects]
        return [group for group in (well, *([i] for i in suspects)) if group]

    def went_well(self, source_name: str, request_ids: Sequence[str]) -> None:
        self._judge(source_name, 1.0)
        if self._pauses:
            for request_id in request_ids:
                self._pauses.pop((source_name, request_id), None)

    def failed(self, source: DraftSource, what: str, error: Exception | None = None) -> None:
        """Count a failure; in a strict guard raise it.

        Raises:
            SourceError: `error`, if the guard is strict.
        """
        if self.is_strict and error is not None:
            raise error
        self._judge(source.name, 0.0)
        self.failures[source.name, what] += 1
        times = self.failures[source.name, what]
        if times & (times - 1) == 0:  # 1, 2, 4, 8 …: a log is no place for a step's worth of lines
            said = "it took too long" if error is None else str(error)
            often = f", {times} times by now" if times > 1 else ""
            log.warning("draft source %r failed (%s%s): %s", source.name, what, often, said)

    def pause(self, source: DraftSource, request_id: str) -> None:
        """Leave a source out for a request for a while, longer every time.

        One that reads features of the target has lost those that it had: it stays out.
        """
        key = source.name, request_id
        before = self._pauses.get(key)
        steps = FIRST_PAUSE if before is None else min(LONGEST_PAUSE, 2 * before.steps)
        until = math.inf if source.target_layer_ids else self._step + steps
        self._pauses[key] = _Pause(until, steps)

    def is_out(self, source_name: str, request_id: str) -> bool:
        """Whether a source will not be asked for a request any more."""
        pause = self._pauses.get((source_name, request_id)) if self._pauses else None
        return pause is not None and pause.until == math.inf

    def forget(self, request_id: str) -> None:
        for key in [key for key in self._pauses if key[1] == request_id]:
            del self._pauses[key]

    def _judge(self, source_name: str, value: float) -> None:
        health = self.health.get(source_name, 1.0)
        self.health[source_name] = health + SMOOTHING * (value - health)
