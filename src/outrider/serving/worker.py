"""One thread takes the engine from step to step; the event loop submits, listens and cancels.

The two meet in queues only: commands go in before each step, what a step said goes back in one
call of the loop. Nothing that a step raises ends the thread.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import NamedTuple, TypeVar

from outrider.engine.engine import Engine
from outrider.errors import OutriderError, SourceError
from outrider.prompts import Submission
from outrider.results import StreamChunk
from outrider.terms import Terms

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

PATIENCE = 3  # steps in a row that may fail for a source's sake before requests do


class EngineFailure(OutriderError):
    """A step failed and took requests with it; the message says why."""


class Item(NamedTuple):
    """What one step said to one prompt of a ticket."""

    prompt: int  # index of the submission
    chunk: StreamChunk
    time: float  # of the end of the step, `time.perf_counter`


class Ticket:
    """Prompts that were submitted together, and what comes back. For the event loop only."""

    def __init__(self, submissions: Sequence[Submission], terms: Terms) -> None:
        self.submissions = submissions
        self.terms = terms
        self.num_open = len(submissions)
        self._items: list[Item] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[list[Item]]:
        """Everything that came since the last time, until the last prompt has ended.

        Raises:
            EngineFailure: the engine lost one of the prompts.
        """
        while self.num_open or self._items:
            await self._arrived.wait()
            self._arrived.clear()
            items, self._items = self._items, []
            if items:
                yield items
            if self._error is not None:
                raise self._error

    def deliver(self, items: Iterable[Item]) -> None:
        for item in items:
            self._items.append(item)
            self.num_open -= item.chunk.result is not None
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._arrived.set()


class Worker:
    """Drives one engine in a thread of its own.

    Args:
        engine: nobody else may drive it meanwhile, unless they hold its lock step by step.
        after_step: called in the thread after every step.
        at_start: called in the thread before the first one.
    """

    def __init__(
        self,
        engine: Engine,
        after_step: Callable[[], None] | None = None,
        at_start: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._at_start = at_start
        self._after_step = after_step
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._owners: dict[str, tuple[Ticket, int]] = {}  # engine's request id -> whose it is
        self._ids = itertools.count()
        self._failures = 0  # steps in a row
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_broken = False  # the engine could not even let go of its requests

    def start(self) -> None:
        """Begin; to be called in the event loop that submits."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End after the step that is under way; what is unfinished is aborted."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self.is_broken

    def submit(self, submissions: Sequence[Submission], terms: Terms) -> Ticket:
        """Queue prompts that `Engine.check` has passed."""
        ticket = Ticket(submissions, terms)
        self._inbox.put(partial(self._add, ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End what is left of a ticket before the next step; nothing happens if all has ended."""
        self._inbox.put(partial(self._cancel, ticket))

    async def ask(self, question: Callable[[], Found]) -> Found:
        """What the function gives, called in the thread between two steps; it must not raise."""
        answer: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._inbox.put(lambda: self._tell(answer.set_result, question()))
        return await answer

    def _run(self) -> None:
        if self._at_start is not None:
            self._at_start()
        while self._obey():
            if self._engine.has_work and not self.is_broken:
                self._step()
        with suppress(Exception):  # the process ends, and with it what could not be ended
            self._abort(list(self._owners))

    def _obey(self) -> bool:
        """Carry out what was asked since the last step, waiting when there is no other work."""
        wait = not self._engine.has_work or self.is_broken
        while True:
            try:
                command = self._inbox.get(block=wait)
            except Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _add(self, ticket: Ticket) -> None:
        if self.is_broken:
            self._tell(ticket.fail, EngineFailure("the engine has failed and takes no requests"))
            return
        names = [str(next(self._ids)) for _ in ticket.submissions]
        try:
            with self._engine.lock:
                for index, (name, asked) in enumerate(zip(names, ticket.submissions, strict=True)):
                    self._engine.add_request(
                        name,
                        asked.token_ids,
                        asked.params,
                        prompt=asked.text,
                        prediction=asked.prediction,
                        terms=ticket.terms,
                    )
                    self._owners[name] = (ticket, index)
        except Exception as error:
            logger.exception("a request could not be submitted")
            self._cancel(ticket)
            self._tell(ticket.fail, error)

    def _cancel(self, ticket: Ticket) -> None:
        names = [name for name, (owner, _) in self._owners.items() if owner is ticket]
        for name in names:
            del self._owners[name]
        self._abort(names)

    def _abort(self, names: Sequence[str]) -> None:
        try:
            with self._engine.lock:
                self._engine.abort(*names)
        except SourceError as error:  # the requests have ended all the same
            logger.warning("%s", error)
        except Exception:
            logger.exception("the engine could not end requests")
            self._give_up()

    def _step(self) -> None:
        try:
            with self._engine.lock:
                chunks = self._engine.step()
        except Exception as error:
            self._failures += 1
            logger.exception("a step failed")
            if not isinstance(error, SourceError) or self._failures >= PATIENCE:
                self._end_affected(error)
        else:
            self._failures = 0
            self._hand_out(chunks, perf_counter())
        if self._after_step is not None:
            self._after_step()

    def _hand_out(self, chunks: Sequence[StreamChunk], now: float) -> None:
        parts: dict[Ticket, list[Item]] = {}
        for chunk in chunks:
            ticket, prompt = self._owners.get(chunk.request_id, (None, 0))
            if ticket is None:  # cancelled
                continue
            if chunk.finish_reason == "abort":
                self._lose([chunk.request_id], "the step that it was in failed")
                continue
            if chunk.result is not None:
                del self._owners[chunk.request_id]
            parts.setdefault(ticket, []).append(Item(prompt, chunk, now))
        if parts:
            self._tell(_deliver_all, list(parts.items()))

    def _end_affected(self, error: Exception) -> None:
        """End the requests that were in the failed step, so that the others can go on."""
        affected = {request.group.request_id for request in self._engine.scheduler.running}
        if not affected and self._failures >= PATIENCE:
            affected = set(self._owners)
        self._lose(list(affected), f"{type(error).__name__}: {error}")
        self._abort(list(affected))

    def _lose(self, names: Iterable[str], why: str) -> None:
        lost = {self._owners[name][0] for name in names if name in self._owners}
        for ticket in lost:
            self._cancel(ticket)
            self._tell(ticket.fail, EngineFailure(f"the request failed: {why}"))

    def _give_up(self) -> None:
        self.is_broken = True
        owners = {ticket for ticket, _ in self._owners.values()}
        self._owners.clear()
        for ticket in owners:
            self._tell(ticket.fail, EngineFailure("the engine has failed"))

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has been closed: nobody listens any more
            self._loop.call_soon_threadsafe(call, *arguments)


def _deliver_all(parts: Sequence[tuple[Ticket, list[Item]]]) -> None:
    for ticket, items in parts:
        ticket.deliver(items)
