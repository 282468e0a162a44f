"""How a request is served: when, and with whose drafts. None of it changes a token of its text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.checks import INT32_MAX, integer, number, shown
from outrider.errors import SamplingError

MAX_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of one request, checked on construction.

    Raises:
        SamplingError: a value is out of range; the message names value and range.
    """

    priority: int = 0  # lower is served earlier, as in vLLM
    deadline: float | None = None  # seconds after arrival by which the last token is wanted
    tag: str = ""  # for rules of the policy
    kind: str = ""  # what the user says it is ("code", "chat", …); "": nothing said
    sources: Sequence[str] | None = None  # names of those that may draft; None: all, (): none
    num_draft_tokens: int | None = None  # most per step; None: what the planner finds best

    def __post_init__(self) -> None:
        integer("priority", self.priority, -INT32_MAX, INT32_MAX, SamplingError)
        if self.deadline is not None:
            number("deadline", self.deadline, 0.0, MAX_SECONDS, SamplingError, open_low=True)
        for name in ("tag", "kind"):
            if not isinstance(getattr(self, name), str):
                raise SamplingError(f"{name} must be text, got {shown(getattr(self, name))}")
        if self.num_draft_tokens is not None:
            integer("num_draft_tokens", self.num_draft_tokens, 0, INT32_MAX, SamplingError)
        if self.sources is None:
            return
        listed = isinstance(self.sources, Sequence) and not isinstance(self.sources, str | bytes)
        if not listed or not all(isinstance(name, str) for name in self.sources):
            raise SamplingError(f"sources must be a list of names, got {shown(self.sources)}")
        object.__setattr__(self, "sources", tuple(self.sources))

    def due(self, arrival: float) -> float:
        """The moment of the deadline on the clock of `arrival`; infinity without one."""
        return math.inf if self.deadline is None else arrival + self.deadline
