"""Who may ask, and how much at once."""

import hmac
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from time import perf_counter

from outrider.serving.errors import ApiError

LONGEST_WAIT = 60  # seconds that Retry-After says at most
FIRST_GUESS = 1.0  # seconds a call takes, before one has ended


class Keys:
    """The API keys of the server; without any, everybody may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = {key.encode(): _name(key) for key in keys}

    def __contains__(self, owner: str) -> bool:
        return owner in self._keys.values()

    def owner(self, authorization: str | None) -> str:
        """A name that stands for the key in logs and shares, "" where none is needed.

        Raises:
            ApiError: 401.
        """
        if not self._keys:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        found = ""
        for key, name in self._keys.items():  # all of them: time tells nothing
            if hmac.compare_digest(key, given.strip().encode("utf-8", "replace")):
                found = name
        if scheme.lower() != "bearer" or not found:
            what = "is wrong" if given else "is missing"
            raise ApiError(
                401,
                f"the API key {what}; expected the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found


@dataclass(slots=True)
class Limits:
    """Counts what is under way. For the event loop only.

    Args:
        max_running: choices that the engine decodes at the same time.
        max_waiting: choices that may wait for it.
        max_calls_per_key: calls under way with one API key; None: no limit.
    """

    max_running: int
    max_waiting: int
    max_calls_per_key: int | None = None
    num_choices: int = 0
    num_calls: Counter[str] = field(default_factory=Counter)
    _seconds: float = FIRST_GUESS  # that a call takes, a running mean

    @contextmanager
    def slot(self, owner: str, num_choices: int) -> Iterator[None]:
        """Room for one call as long as the block lasts.

        Raises:
            ApiError: 429 when there is no room now, 400 when there never is.
        """
        self._check(owner, num_choices)
        self.num_choices += num_choices
        self.num_calls[owner] += 1
        start = perf_counter()
        try:
            yield
            self._seconds += 0.1 * (perf_counter() - start - self._seconds)
        finally:
            self.num_choices -= num_choices
            self.num_calls[owner] -= 1
            if not self.num_calls[owner]:
                del self.num_calls[owner]

    def _check(self, owner: str, num_choices: int) -> None:
        most = self.max_running + self.max_waiting
        if num_choices > most:
            raise ApiError(
                400, f"n × prompts is {num_choices}, this server takes {most} at most", param="n"
            )
        calls = self.max_calls_per_key
        if calls is not None and self.num_calls[owner] >= calls:
            raise self._busy(f"{calls} calls with this API key are under way, the most there may")
        if self.num_choices + num_choices > most:
            raise self._busy(f"{self.num_choices} answers are under way or waiting, of {most}")

    def _busy(self, why: str) -> ApiError:
        ahead = max(1.0, self.num_choices / self.max_running)
        wait = min(LONGEST_WAIT, max(1, math.ceil(ahead * self._seconds / 2)))
        return ApiError(
            429,
            f"{why}; try again in {wait} s",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(wait)},
        )


def _name(key: str) -> str:
    return "key-" + sha256(key.encode()).hexdigest()[:12]
