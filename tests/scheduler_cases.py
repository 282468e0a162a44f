"""Requests, and a scheduler that is stepped without any forward."""

from collections.abc import Iterable, Sequence
from zlib import crc32

from outrider.drafting.source import DraftContext
from outrider.engine.output import OutputBuilder
from outrider.engine.request import Request, RequestGroup, TokenBuffer
from outrider.engine.scheduler import Schedule, Scheduler
from outrider.sampling_params import SamplingParams
from outrider.target.base import PAGE_SIZE
from outrider.target.kv import KVArena
from outrider.terms import Terms


class Service:
    """A clock that is told what time it is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_request(
    name: str,
    num_tokens: int,
    *,
    beginning: Sequence[int] = (),
    owner: str = "",
    max_tokens: int = 100,
    arrival: float = 0.0,
    **terms,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, owner=owner)
    first = crc32(name.encode()) % 2**20 << 10  # another text for every name
    ids = [*beginning, *range(first, first + num_tokens)]
    tokens = TokenBuffer(ids)
    group = RequestGroup(name, None, ids, params, Terms(**terms))
    group.metrics.arrival_time = arrival
    context = DraftContext(name, tokens.view(), len(ids), params)
    output = OutputBuilder(params, max_tokens)
    request = Request(name, 0, group, tokens, len(ids), max_tokens, 0, output, context)
    group.choices.append(request)
    return request


def make_scheduler(
    pages: int = 64, max_requests: int = 4, max_rows: int = 32, draft_rows: int = 0, **options
) -> Scheduler:
    options.setdefault("clock", Service())
    return Scheduler(KVArena(pages), max_requests, max_rows, draft_rows, **options)


def step(scheduler: Scheduler, is_checked: bool = True) -> Schedule:
    """Schedule, then act as if the forward had been run."""
    schedule = scheduler.schedule()
    assert schedule.num_rows <= scheduler.max_rows
    for work in schedule.works:
        assert len(scheduler.arena.page_table(work.request.request_id)) * PAGE_SIZE >= (
            work.context_len + work.num_rows
        )
        scheduler.arena.commit(work.request.request_id, work.num_rows)
    scheduler.committed(schedule)
    for work in schedule.works:
        if work.is_last:
            work.request.tokens.extend([7])
    if is_checked:
        scheduler.arena.check_integrity()
    return schedule


def names(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]
