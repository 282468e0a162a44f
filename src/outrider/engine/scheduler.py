"""Which requests take part in the next forward, and with how many rows. No torch, no text.

First come, first served. Every decoding request gets its row first, prompts fill what is left
of the row budget in chunks. When the KV arena is full the newest request gives its pages back
and waits at the front of the queue; it computes its prompt and output again later.
"""

from collections import deque
from dataclasses import dataclass, field

from outrider.drafting.source import Draft
from outrider.engine.request import Request, Status
from outrider.errors import KVFull
from outrider.target.kv import KVArena, pages_for


@dataclass(slots=True)
class Work:
    """One request's share of a forward."""

    request: Request
    context_len: int  # tokens already committed
    num_rows: int  # tokens of the text computed now; 1 when decoding
    is_last: bool  # the last row is the end of the text: its logits give a new token
    draft: Draft = field(default_factory=Draft)  # rows behind the text, filled in after proposing

    @property
    def may_draft(self) -> bool:
        return self.is_last and self.num_rows == 1


@dataclass(slots=True)
class Schedule:
    works: list[Work] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(work.num_rows for work in self.works)


class Scheduler:
    """Queues of waiting and running requests over one KV arena.

    `max_rows` bounds the rows of a forward; `draft_rows` of them per decoding request, up to a
    quarter of all, are kept from prompts, so that long prompts do not stop speculation.
    """

    def __init__(self, arena: KVArena, max_requests: int, max_rows: int, draft_rows: int) -> None:
        assert 0 < max_requests <= max_rows, (max_requests, max_rows)
        self.arena = arena
        self.max_requests = max_requests
        self.max_rows = max_rows
        self.draft_rows = draft_rows
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that finished or was aborted, and free its KV."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        self.arena.release(request.request_id)
        request.status = Status.FINISHED

    def schedule(self) -> Schedule:
        """The works of the next forward; their text rows have room in the arena."""
        schedule = Schedule()
        self._schedule_decoding(schedule)
        decoding = len(schedule.works)
        kept = min(self.max_rows // 4, self.draft_rows * decoding)
        budget = max(1, self.max_rows - decoding - kept) if decoding < self.max_rows else 0
        budget = self._schedule_prompts(schedule, budget)
        if not schedule.preempted:
            self._admit(schedule, budget)
        return schedule

    def preempt_all(self) -> list[Request]:
        """Requeue every running request, the oldest at the front: the target lost their KV."""
        preempted = self.running[::-1]
        for request in preempted:
            self._preempt(request)
        return preempted

    def _schedule_decoding(self, schedule: Schedule) -> None:
        index = 0
        while index < len(self.running):
            request = self.running[index]
            committed = self.arena.num_committed(request.request_id)
            if len(request.tokens) - committed == 1 and self._reserve_row(request, schedule):
                schedule.works.append(Work(request, committed, 1, True))
            index += 1  # a preempted request was the last of the list: the loop ends

    def _reserve_row(self, request: Request, schedule: Schedule) -> bool:
        """Room for one more token, at the cost of the newest requests; False: it was its own."""
        while True:
            try:
                self.arena.reserve(request.request_id, 1)
                return True
            except KVFull:
                newest = self.running[-1]
                self._preempt(newest)
                schedule.preempted.append(newest)
                if newest is request:
                    return False

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.arena.release(request.request_id)
        request.status = Status.WAITING
        request.group.metrics.num_preemptions += 1
        self.waiting.appendleft(request)

    def _schedule_prompts(self, schedule: Schedule, budget: int) -> int:
        """Continue prompts that are under way; returns the rows left."""
        for request in self.running:
            if budget == 0:
                break
            committed = self.arena.num_committed(request.request_id)
            if len(request.tokens) - committed > 1:
                budget -= self._schedule_chunk(schedule, request, committed, budget)
        return budget

    def _admit(self, schedule: Schedule, budget: int) -> None:
        """Take waiting requests whose whole text fits, leaving a page to each running one."""
        while budget and self.waiting and len(self.running) < self.max_requests:
            request = self.waiting[0]
            spare = self.arena.num_free_pages - pages_for(len(request.tokens))
            if spare < len(self.running):
                break
            self.waiting.popleft()
            self.arena.reserve(request.request_id, len(request.tokens))
            request.status = Status.RUNNING
            self.running.append(request)
            budget -= self._schedule_chunk(schedule, request, 0, budget)

    @staticmethod
    def _schedule_chunk(schedule: Schedule, request: Request, committed: int, budget: int) -> int:
        left = len(request.tokens) - committed
        rows = min(left, budget)
        schedule.works.append(Work(request, committed, rows, rows == left))
        return rows
