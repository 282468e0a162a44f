"""What the live view shows of an engine: counts since its start, and what it holds now.

Taken between two steps. Nothing in it is text of a request, nor says whose a request is. Counts
are of all requests; a single one is told to its owner only.
"""

from contextlib import suppress
from itertools import chain, islice
from time import perf_counter
from typing import Any

from outrider.drafting.source import DraftSource
from outrider.engine.engine import TARGET, Engine
from outrider.engine.request import Request
from outrider.policy.decisions import Decision
from outrider.results import SourceMetrics
from outrider.serving.trace import PHASES
from outrider.serving.worker import is_of
from outrider.target.base import PAGE_SIZE

MOST_REQUESTS = 32
MOST_DECISIONS = 40  # a step of 16 requests waits 6 ms for so many


def snapshot(engine: Engine, since: int, owner: str = "") -> dict[str, Any]:
    """Counts, and the planner's decisions after a step. Times are seconds.

    `owner`: whose requests are listed; "": everybody's.
    """
    told = engine.metrics
    return {
        "time": perf_counter(),
        "steps": engine.times.steps,
        "phases": {name: getattr(engine.times, name) for name in PHASES},
        "speculation": {
            "num_target_steps": told.num_target_steps,
            "num_output_tokens": told.num_output_tokens,
            "num_draft_tokens": told.num_draft_tokens,
            "num_accepted_draft_tokens": told.num_accepted_draft_tokens,
        },
        "rejections": dict(told.rejection_causes),
        "sources": [_source(engine, source) for source in engine.speculation.sources],
        "kv": _kv(engine),
        "requests": _requests(engine, owner),
        "decisions": _decisions(engine, since, owner),
    }


def _source(engine: Engine, source: DraftSource) -> dict[str, Any]:
    guard = engine.speculation.guard
    split = engine.metrics.per_source.get(source.name) or SourceMetrics()
    return {
        "name": source.name,
        "needs_prediction": source.needs_prediction,
        "health": guard.health.get(source.name),
        "num_failures": sum(n for (name, _), n in guard.failures.items() if name == source.name),
        "call_seconds": engine.planner.call_seconds(source.name),
        "drafted": list(split.draft_tokens_per_position),
        "accepted": list(split.accepted_per_position),
    }


def _kv(engine: Engine) -> dict[str, Any]:
    """Pages of the target; by zone, the tokens of running texts that have KV there."""
    arena, running = engine.arena, engine.scheduler.running
    zones = {TARGET: sum(arena.num_committed(one.request_id) for one in running)}
    for source in engine.speculation.sources:
        with suppress(Exception):  # a source that fails here has no say in whether others are seen
            held = [source.held_tokens(one.request_id) for one in running]
            if any(count is not None for count in held):
                zones[source.name] = sum(filter(None, held))
    return {
        "page_size": PAGE_SIZE,
        "num_pages": arena.num_pages,
        "num_held": arena.num_pages - arena.num_free_pages,
        "num_known": arena.num_known_pages,
        "zones": zones,
    }


def shown_decision(decision: Decision, owner: str) -> dict[str, Any]:
    """A decision with what was chosen for this owner's requests."""
    told = decision.as_json()
    told["choices"] = [
        choice | {"request_id": _number(choice["request_id"])}
        for choice in told["choices"]
        if is_of(owner, choice["request_id"])
    ]
    return told


def _requests(engine: Engine, owner: str) -> dict[str, Any]:
    scheduler, now = engine.scheduler, perf_counter()
    everyone = chain(scheduler.running, scheduler.waiting)
    listed = islice((one for one in everyone if is_of(owner, one.request_id)), MOST_REQUESTS)
    return {
        "num_running": len(scheduler.running),
        "max_running": scheduler.max_requests,
        "num_waiting": len(scheduler.waiting),
        "listed": [_request(request, now) for request in listed],
    }


def _request(request: Request, now: float) -> dict[str, Any]:
    return {
        "id": _number(request.request_id),
        "status": request.status.value,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": request.num_output_tokens,
        "max_tokens": request.max_tokens,
        "priority": request.terms.priority,
        "age": now - request.arrival,
        "due": request.due - now if request.has_deadline else None,
    }


def _decisions(engine: Engine, since: int, owner: str) -> list[dict[str, Any]]:
    """None from a policy that keeps none."""
    after = getattr(engine.planner, "decisions_after", lambda *_: [])
    return [shown_decision(one, owner) for one in after(since, MOST_DECISIONS)]


def _number(request_id: str) -> str:
    """The name of a request without that of its owner."""
    return request_id.rpartition("/")[2]
