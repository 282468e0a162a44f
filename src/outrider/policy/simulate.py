"""Runs a plan on a trace, on any cost curve and at any batch size, without the hardware.

Texts are known, so what a plan submits is accepted as far as it is right; seconds are what a curve
says a forward takes, and what calls of the sources took when the trace was recorded.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from outrider.drafting.source import Draft, DraftSource
from outrider.engine.drafts import cut_depth, matched, prefix
from outrider.engine.merging import tree_rows
from outrider.policy.cost import CostModel, Surface
from outrider.policy.traces import CallSeconds, RequestTrace, Trace
from outrider.policy.view import Ask, Policy, StepView

T = TypeVar("T")
MakePolicy = Callable[[CostModel], Policy]


@dataclass(slots=True)
class Simulated:
    """What came of a plan."""

    num_tokens: int = 0
    num_steps: int = 0
    num_asks: int = 0  # requests, summed over steps
    seconds: float = 0.0  # of forwards and sources, simulated
    planner_seconds: float = 0.0  # of the plan itself, measured
    slowest_plan: float = 0.0  # of one step
    num_draft_rows: int = 0
    by_source: dict[str, int] = field(default_factory=dict)  # accepted tokens

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def planner_seconds_per_step(self) -> float:
        return self.planner_seconds / self.num_steps


@dataclass(slots=True)
class _Running:
    request_id: str
    trace: RequestTrace
    place: int = 0  # output tokens written
    seen: dict[str, int] = field(default_factory=dict)  # by source, length of the text it knows

    @property
    def length(self) -> int:
        return self.trace.num_prompt_tokens + self.place


def by_id(trace: Trace) -> dict[str, RequestTrace]:
    """The requests of a trace, by the ids under which `simulate` decodes them."""
    return {f"r{i}": request for i, request in enumerate(trace.requests)}


def gpu_like(max_rows: int = 4096) -> Surface:
    """A forward of a model of 8 billion weights on a large GPU.

    Up to about 240 rows the weights are read for (16 GB at 3.35 TB/s, 4.8 ms), then the arithmetic
    counts (20 µs a row); KV of 131 kB a token is read at the same speed.
    """
    rows = tuple(
        n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if n <= max_rows
    )
    base = tuple((4.8e-3**4 + (2e-5 * n) ** 4) ** 0.25 for n in rows)
    return Surface(rows, base, tuple(3.9e-8 for _ in rows))


def simulate(
    trace: Trace, make_policy: MakePolicy, batch: int, surface: Surface, max_rows: int = 512
) -> Simulated:
    """Decode texts of a trace with `batch` of them under way, as long as there are so many.

    How fast the last ones run out says more about their number than about a plan.

    Args:
        make_policy: is given a cost model that knows nothing yet but a line; it learns.
        surface: what forwards take.
        max_rows: of a forward.
    """
    truth, learnt = CostModel(max_rows, surface), CostModel(max_rows)
    policy = make_policy(learnt)
    names = dict.fromkeys(name for r in trace.requests for drafts in r.drafts for name in drafts)
    sources = [_Named(name) for name in names]
    waiting = [_Running(name, request) for name, request in by_id(trace).items()][::-1]
    running: list[_Running] = []
    result = Simulated()
    with _uncollected():
        while True:
            while waiting and len(running) < batch:
                running.append(waiting.pop())
            if len(running) < batch:
                return result
            _step(running, sources, trace, policy, truth, learnt, result)
            for request in [r for r in running if r.place >= len(r.trace.token_ids)]:
                running.remove(request)
                policy.forget(request.request_id)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collecting the trace anew, time and again, is no part of a plan."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Named(DraftSource):
    """Stands for a source of the trace."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.max_draft_tokens = 64


def _step(
    running: list[_Running],
    sources: list[_Named],
    trace: Trace,
    policy: Policy,
    truth: CostModel,
    learnt: CostModel,
    result: Simulated,
) -> None:
    asks = [
        Ask(r.request_id, len(r.trace.token_ids) - r.place - 1, r.length, r.trace.kind)
        for r in running
    ]
    context = sum(r.length for r in running)
    view = StepView(asks, len(asks), max(0, truth.max_rows - len(asks)), context)
    timed = _Timed()
    for source in timed(policy.order, sources):
        budgets = timed(policy.budgets, source, view)
        asked = new_tokens = 0
        for request, ask, budget in zip(running, asks, budgets, strict=True):
            if budget <= 0:
                continue
            asked += 1
            new_tokens += request.length - request.seen.get(source.name, 0)
            request.seen[source.name] = request.length
            draft = request.trace.drafts[request.place].get(source.name)
            if draft is not None:
                ask.drafts.append(cut_depth(prefix(draft, budget), ask.room))
        if asked:
            seconds = trace.calls.get(source.name, CallSeconds()).of(asked, new_tokens)
            view.spent += seconds
            timed(policy.observe_call, source.name, asked, seconds)
    chosen = timed(policy.choose, view)
    rows = len(asks) + sum(map(len, chosen))
    more = sum(tree_rows(len(draft)) for draft in chosen if draft.is_tree)
    seconds = truth.curve(context)[min(rows + round(more), truth.max_rows)]
    learnt.observe(rows, seconds, context)
    for request, ask, draft in zip(running, asks, chosen, strict=True):
        rest = request.trace.token_ids[request.place : request.place + 65]
        accepted = matched(draft, rest)
        timed(policy.observe, ask, draft, rest[: accepted + 1])
        _advance(request, draft, accepted, result)
    result.num_steps += 1
    result.num_asks += len(asks)
    result.seconds += seconds + view.spent
    result.planner_seconds += timed.seconds
    result.slowest_plan = max(result.slowest_plan, timed.seconds)
    result.num_draft_rows += rows - len(asks)


class _Timed:
    """Calls, and the seconds they took."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        start = perf_counter()
        answer = function(*arguments)
        self.seconds += perf_counter() - start
        return answer


def _advance(request: _Running, draft: Draft, accepted: int, result: Simulated) -> None:
    """Keep what is right of a draft, and the target's own token."""
    if accepted and not draft.is_tree:
        for i in range(accepted):
            name = draft.source_of(i)
            result.by_source[name] = result.by_source.get(name, 0) + 1
    advanced = min(accepted + 1, len(request.trace.token_ids) - request.place)
    request.place += advanced
    result.num_tokens += advanced
