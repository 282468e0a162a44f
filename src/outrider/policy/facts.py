"""What rules may look at, and what they answer. Plain values: no tensor, no queue, no engine.

The planner asks `Restrict.restrict` once per drafting request and step, before any source is
asked. `Terms` of a request (its own list of sources, its own most) apply besides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class RequestFacts:
    """One request at the start of a step."""

    context_tokens: int = 0  # of its text so far, prompt and output
    output_tokens: int = 0
    priority: int = 0  # these three as in `Terms`
    tag: str = ""
    kind: str = ""


@dataclass(slots=True)
class LoadFacts:
    """The engine at the start of a step, the same for all its requests."""

    batch_size: int = 0  # requests that take part in the step
    waiting: int = 0  # requests in the queue
    kv_used: float = 0.0  # share of the KV pages that running requests hold, 0 to 1
    memory_used: float = 0.0  # share of the memory of the machine that is in use, 0 to 1
    # Source -> 1.0 when all is well, 0.0 when all its calls fail; one that is not listed is well.
    health: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Who may draft for a request in a step, and how many tokens at most."""

    sources: tuple[str, ...] | None = None  # only these; None: all, (): nobody
    forbidden: frozenset[str] = frozenset()
    num_draft_tokens: int | None = None  # most per source; None: no bound

    def allows(self, source_name: str) -> bool:
        if self.sources is not None and source_name not in self.sources:
            return False
        return source_name not in self.forbidden


ALL = Allowed()


class Restrict(Protocol):
    """Rules as the planner sees them."""

    def restrict(self, request: RequestFacts, load: LoadFacts) -> Allowed: ...


class AllowAll:
    """No rules."""

    def restrict(self, request: RequestFacts, load: LoadFacts) -> Allowed:
        return ALL
