"""Which requests take part in the next forward, and with how many rows. No torch, no text.

Every decoding request gets its row first. Prompts fill in chunks what is left of the row budget,
in the order of `Queue`: by priority, fairly among owners, by due date, then first come, first
served. Prompts begin with the KV of earlier texts where it is known, and wait one step for what
another prompt is just computing. When the KV arena is full, pages that nobody owns are given up
first; then the request that is served last gives its pages back, waits, and later computes what
is no longer known of its text. A request of a higher priority that finds no room takes it so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outrider.drafting.source import Draft
from outrider.engine.queue import Ledger, Pace, Queue
from outrider.engine.request import Request, Status
from outrider.errors import KVFull
from outrider.target.base import PAGE_SIZE
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
    adopted: list[Request] = field(default_factory=list)  # they begin with KV that was known

    @property
    def num_rows(self) -> int:
        return sum(work.num_rows for work in self.works)


@dataclass(slots=True)
class _Step:
    """What is remembered of a schedule until the next one shows what came of it."""

    started: float
    num_rows: int
    lengths: list[tuple[Request, int]]  # of the decoding requests
    has_prompts: bool


class Scheduler:
    """Waiting and running requests over one KV arena.

    `max_rows` bounds the rows of a forward; `draft_rows` of them per decoding request, up to a
    quarter of all, are kept from prompts, so that long prompts do not stop speculation.

    Args:
        prompt_rows: given how many requests decode and the tokens of their contexts together, the
            most rows of prompts beside them; None: as many as fit.
        clock: seconds, the one that arrivals are measured on.
        reuse_prefixes: KV of earlier texts is kept and found.
    """

    def __init__(
        self,
        arena: KVArena,
        max_requests: int,
        max_rows: int,
        draft_rows: int,
        *,
        prompt_rows: Callable[[int, int], int] | None = None,
        clock: Callable[[], float] = perf_counter,
        reuse_prefixes: bool = True,
    ) -> None:
        assert 0 < max_requests <= max_rows, (max_requests, max_rows)
        self.arena = arena
        self.max_requests = max_requests
        self.max_rows = max_rows
        self.draft_rows = draft_rows
        self.reuse_prefixes = reuse_prefixes
        self.pace = Pace()
        self.running: list[Request] = []  # in the order in which they are served
        self._ledger = Ledger()
        self.waiting = Queue(self.pace, self._ledger)
        self._prompt_rows = prompt_rows
        self._clock = clock
        self._num_added = 0
        self._last: _Step | None = None

    @property
    def has_work(self) -> bool:
        return bool(len(self.waiting) or self.running)

    def add(self, request: Request) -> None:
        self._num_added += 1
        request.order = self._num_added
        self._ledger.enter(request.owner)
        self.waiting.push(request)

    def remove(self, request: Request) -> None:
        """Forget a request that finished or was aborted, and free its KV."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
            if request.output.finish_reason != "abort":
                self.pace.observe_end(request.num_output_tokens)
        else:
            self.waiting.discard(request)
        self._ledger.leave(request.owner)
        self.arena.release(request.request_id)
        request.status = Status.FINISHED
        if not self.has_work:  # the next step comes who knows when
            self._observe(self._clock())

    def schedule(self) -> Schedule:
        """The works of the next forward; their text rows have room in the arena."""
        now = self._clock()
        self._observe(now)
        schedule = Schedule()
        self.running.sort(key=lambda request: self.pace.rank(request, now))
        self._make_way(schedule, now)
        has_room = self._schedule_decoding(schedule)
        self._schedule_prompts(schedule, has_room, now)
        for work in schedule.works:
            self._ledger.charge(work.request.owner, work.num_rows)
        self._remember(schedule, now)
        return schedule

    def committed(self, schedule: Schedule) -> None:
        """The KV of these works' text rows is final: other requests may begin with it."""
        if self.reuse_prefixes:
            for work in schedule.works:
                request = work.request
                tokens = request.tokens.view()
                self.arena.publish(request.request_id, request.page_keys, tokens)

    def preempt_all(self) -> list[Request]:
        """Requeue every running request: the target lost their KV, and all that was known."""
        preempted = self.running[::-1]
        for request in preempted:
            self._preempt(request)
        self.arena.forget()
        return preempted

    def _observe(self, now: float) -> None:
        """Learn from what the last step brought how fast requests advance."""
        last, self._last = self._last, None
        if last is None:
            return
        seconds = now - last.started
        if last.has_prompts:
            self.pace.observe_rows(seconds / last.num_rows)
        if last.lengths:
            said = sum(len(request.tokens) - length for request, length in last.lengths)
            self.pace.observe_tokens(seconds * len(last.lengths) / max(1, said))

    def _remember(self, schedule: Schedule, now: float) -> None:
        works = schedule.works
        decoding = [(w.request, len(w.request.tokens)) for w in works if w.may_draft]
        if works:
            self._last = _Step(now, schedule.num_rows, decoding, len(decoding) < len(works))

    def _make_way(self, schedule: Schedule, now: float) -> None:
        """Running requests of a lower priority give way to a waiting one that has no room."""
        if not len(self.waiting) or not self.running:
            return
        priority = self.waiting.top_priority
        lower = [r for r in self.running if r.terms.priority > priority]
        if not lower:
            return
        request = self.waiting.best(now)
        pages = self.arena.num_free_pages
        pages += sum(len(self.arena.page_table(r.request_id)) for r in lower)
        if pages < pages_for(len(request.tokens)) + len(self.running) - len(lower):
            return  # it would not fit all the same
        while lower and not self._has_room(request):
            self._give_way(lower.pop(), schedule)

    def _has_room(self, request: Request) -> bool:
        """A seat, and pages for its text beside one for each running request."""
        pages = pages_for(len(request.tokens)) + len(self.running)
        return len(self.running) < self.max_requests and pages <= self.arena.num_free_pages

    def _schedule_decoding(self, schedule: Schedule) -> bool:
        """One row each; False when pages were short and somebody had to give way."""
        has_room = True
        index = 0
        while index < len(self.running):
            request = self.running[index]
            committed = self.arena.num_committed(request.request_id)
            if len(request.tokens) - committed == 1:
                given_way = len(schedule.preempted)
                if self._reserve_row(request, schedule):
                    schedule.works.append(Work(request, committed, 1, True))
                has_room = has_room and len(schedule.preempted) == given_way
            index += 1  # a preempted request was the last of the list: the loop ends
        return has_room

    def _reserve_row(self, request: Request, schedule: Schedule) -> bool:
        """Room for one more token, at the cost of those served last; False: it was its own."""
        while True:
            try:
                self.arena.reserve(request.request_id, 1)
                return True
            except KVFull:
                last = self.running[-1]
                self._give_way(last, schedule)
                if last is request:
                    return False

    def _give_way(self, request: Request, schedule: Schedule) -> None:
        self._preempt(request)
        schedule.preempted.append(request)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.arena.release(request.request_id)
        request.status = Status.WAITING
        request.group.metrics.num_preemptions += 1
        self.waiting.push(request)

    def _prompt_budget(self, works: Sequence[Work]) -> int:
        """Rows for prompts beside these decoding requests."""
        decoding = len(works)
        if decoding >= self.max_rows:
            return 0
        kept = min(self.max_rows // 4, self.draft_rows * decoding)
        budget = max(1, self.max_rows - decoding - kept)
        if decoding and self._prompt_rows is not None:
            context = sum(work.context_len for work in works)
            budget = min(budget, self._prompt_rows(decoding, context))
        return budget

    def _schedule_prompts(self, schedule: Schedule, has_room: bool, now: float) -> None:
        """Continue prompts that are under way and begin waiting ones, whoever is served first."""
        prompts = [request for request in self.running if self._left(request) > 1]
        if not prompts and not len(self.waiting):
            return
        budget = self._prompt_budget(schedule.works)
        postponed: list[Request] = []
        while budget > 0:
            full = len(self.running) + len(postponed) >= self.max_requests
            waiting = None
            if has_room and not full and len(self.waiting):
                waiting = self.waiting.best(now)
            if prompts and (
                waiting is None or self.pace.rank(prompts[0], now) < self.pace.rank(waiting, now)
            ):
                budget -= self._schedule_chunk(schedule, prompts.pop(0), budget)
            elif waiting is None:
                break
            elif waiting in schedule.preempted or self._is_being_computed(waiting, schedule):
                self.waiting.discard(waiting)
                postponed.append(waiting)
            elif has_room := self._admit(waiting, schedule):
                budget -= self._schedule_chunk(schedule, waiting, budget)
        for request in postponed:
            self.waiting.push(request)

    def _is_being_computed(self, request: Request, schedule: Schedule) -> bool:
        """True when this forward computes KV that the request could begin with."""
        if not self.reuse_prefixes:
            return False
        tokens, keys = request.tokens.view(), request.page_keys
        page = self.arena.num_known(keys, tokens)
        if page >= (len(tokens) - 1) // PAGE_SIZE:
            return False
        key = keys.first(page + 1, tokens)[page]
        for work in schedule.works:
            text = work.request.tokens.view()
            is_ahead = work.context_len // PAGE_SIZE <= page < len(text) // PAGE_SIZE
            if is_ahead and work.request.page_keys.first(page + 1, text)[page] == key:
                return True
        return False

    def _admit(self, request: Request, schedule: Schedule) -> bool:
        """Let a request run whose whole text fits, leaving a page to each running one."""
        name, tokens = request.request_id, request.tokens.view()
        known = self.arena.adopt(name, request.page_keys, tokens) if self.reuse_prefixes else 0
        spare = self.arena.num_free_pages - pages_for(len(tokens) - known)
        if spare < len(self.running):
            self.arena.release(name)
            return False
        self.arena.reserve(name, len(tokens) - known)
        self.waiting.discard(request)
        request.status = Status.RUNNING
        self.running.append(request)
        metrics = request.group.metrics
        if metrics.scheduled_time is None:
            metrics.scheduled_time = self._clock()
        if known:
            schedule.adopted.append(request)
            if request.index == 0 and not metrics.num_preemptions:
                metrics.num_cached_tokens = known
        return True

    def _left(self, request: Request) -> int:
        return len(request.tokens) - self.arena.num_committed(request.request_id)

    def _schedule_chunk(self, schedule: Schedule, request: Request, budget: int) -> int:
        left = self._left(request)
        rows = min(left, budget)
        committed = len(request.tokens) - left
        schedule.works.append(Work(request, committed, rows, rows == left))
        return rows
