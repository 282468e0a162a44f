"""What may draft for a request, by rules from outside: who and how much, never which token.

The planner asks the rules once per request and step, before any source is asked. They see facts,
not requests, so that a policy can be tried without an engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What rules may look at of one request."""

    context_len: int = 0  # tokens of prompt and output so far
    num_output_tokens: int = 0
    tag: str = ""
    kind: str = ""
    priority: int = 0
    owner: str = ""
    has_prediction: bool = False


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """What rules may look at of the engine, the same for all requests of a step."""

    batch_size: int = 0  # requests that take part in the step
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of the target's KV pages in use
    # By source the share of calls that went well lately; one that is not listed is well.
    health: Mapping[str, float] = field(default_factory=dict)
    memory_usage: float = 0.0  # share of the machine's memory in use


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the rules leave to the planner."""

    sources: tuple[str, ...] | None = None  # None: all, (): plain decoding
    num_draft_tokens: int | None = None  # most per step; None: as many as pay
    forbidden: frozenset[str] = frozenset()  # none of these, whatever `sources` says

    def allows(self, source_name: str) -> bool:
        if self.sources is not None and source_name not in self.sources:
            return False
        return source_name not in self.forbidden


EVERYTHING = Allowed()


class Rules(Protocol):
    """A policy that narrows what the planner may choose."""

    def restrict(self, request: RequestFacts, load: LoadFacts) -> Allowed: ...


class AllowAll:
    """No rules."""

    def restrict(self, request: RequestFacts, load: LoadFacts) -> Allowed:
        return EVERYTHING
