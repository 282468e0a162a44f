"""One thread takes the engine from step to step; the event loop submits, listens and cancels.

The two meet in queues only: commands go in before each step, what a step said goes back in one
call of the loop. Nothing that a step or a command raises ends the thread. Should it end all the
same, whoever waits for it is told, and so is whoever comes later.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter, sleep
from typing import Any, NamedTuple, TypeAlias, TypeVar

from outrider.engine.engine import Engine
from outrider.errors import OutriderError, SourceError
from outrider.prompts import Submission
from outrider.results import StreamChunk
from outrider.terms import Terms

logger = logging.getLogger(__name__)

Found = TypeVar("Found")
Reply: TypeAlias = tuple[Any, Exception | None]  # to a question: what it found, or why not

GATHER_SECONDS = 0.02  # that an idle engine waits at most for calls that are being read …
GLANCE_SECONDS = 0.0005  # … looking whether there are any
PATIENCE = 3  # steps in a row that may fail for a source's sake before requests do


class EngineFailure(OutriderError):
    """A step failed and took requests with it; the message says why."""


class AnswerFailure(EngineFailure):
    """An answer cannot go on for what was asked of it; the message says why."""


class EngineGone(EngineFailure):
    """The engine takes nothing any more: no requests, no questions."""

    def __init__(self) -> None:
        super().__init__("the engine has failed and takes no requests")


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

    def __aiter__(self) -> "Ticket":
        return self

    async def __anext__(self) -> list[Item]:
        """Everything that came since the last time, until the last prompt has ended.

        Raises:
            EngineFailure: the engine lost one of the prompts.
        """
        if not self._items and self._error is None:
            if not self.num_open:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        if not self._items and self._error is not None:
            raise self._error
        items, self._items = self._items, []
        return items

    def deliver(self, items: Sequence[Item]) -> None:
        self._items += items
        self.num_open -= sum(item.chunk.result is not None for item in items)
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
        self._num_read = 0  # calls; changed by the event loop alone
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._door = Lock()  # held to put something into the inbox, and to close it for good
        self._is_closed = False
        self.is_broken = False  # the engine could not even let go of its requests

    def start(self) -> None:
        """Begin; to be called in the event loop that submits."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End after the step that is under way; what is unfinished is aborted."""
        self._post(None)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self.is_broken

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While a call is read that will most likely be submitted."""
        self._num_read += 1
        try:
            yield
        finally:
            self._num_read -= 1

    def submit(self, submissions: Sequence[Submission], terms: Terms) -> Ticket:
        """Queue prompts that `Engine.check` has passed."""
        ticket = Ticket(submissions, terms)
        if not self._post(partial(self._add, ticket)):
            ticket.fail(EngineGone())
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End what is left of a ticket before the next step; nothing happens if all has ended."""
        self._post(partial(self._cancel, ticket))

    async def ask(self, question: Callable[[], Found]) -> Found:
        """What the function gives, called in the thread between two steps.

        Raises:
            EngineGone: nobody is there to be asked.
            Exception: whatever the function raises.
        """
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if not self._post(partial(self._answer, answer, question)):
            raise EngineGone
        found, error = await answer
        if error is not None:
            raise error
        return found

    def _post(self, command: Callable[[], None] | None) -> bool:
        """Hand a command to the thread; False where it obeys no more."""
        with self._door:
            if not self._is_closed:
                self._inbox.put(command)
            return not self._is_closed

    def _run(self) -> None:
        try:
            if self._at_start is not None:
                _guarded(self._at_start)
            while self._obey():
                if self._engine.has_work and not self.is_broken:
                    self._step()
        except BaseException:
            logger.exception("the thread of the engine has ended")
        finally:
            self._close()

    def _close(self) -> None:
        """Tell everybody who waits, and let nobody wait any more."""
        names = list(self._owners)
        self._give_up()
        with suppress(Exception), self._engine.lock:  # the thread ends: what cannot be ended stays
            self._engine.abort(*names)
        with self._door:
            self._is_closed = True
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                _guarded(command)

    def _obey(self) -> bool:
        """Carry out what was asked since the last step, waiting when there is no other work.

        Calls that come together begin together: in a first step of many prompts they take less
        time than one behind the other.
        """
        first = [] if self._engine.has_work and not self.is_broken else [self._inbox.get()]
        end = perf_counter() + GATHER_SECONDS
        while first and self._num_read and perf_counter() < end:
            sleep(GLANCE_SECONDS)
        while first or not self._inbox.empty():
            command = first.pop() if first else self._inbox.get()
            if command is None:
                return False
            _guarded(command)
        return True

    def _answer(self, answer: "asyncio.Future[Reply]", question: Callable[[], Any]) -> None:
        reply: Reply = (None, EngineGone())
        try:
            if not self.is_broken:
                reply = (question(), None)
        except Exception as error:
            reply = (None, error)
        finally:
            self._tell(_settle, answer, reply)

    def _add(self, ticket: Ticket) -> None:
        if self.is_broken:
            self._tell(ticket.fail, EngineGone())
            return
        names = [_named(one.params.owner, next(self._ids)) for one in ticket.submissions]
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
            self._tell(ticket.fail, _failure(f"{type(error).__name__}: {error}"))

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
            _guarded(self._after_step)

    def _hand_out(self, chunks: Sequence[StreamChunk], now: float) -> None:
        parts: dict[Ticket, list[Item]] = {}
        for chunk in chunks:
            ticket, prompt = self._owners.get(chunk.request_id, (None, 0))
            if ticket is None:  # cancelled
                continue
            if chunk.finish_reason == "abort":
                self._lose([chunk.request_id], _failure("the step that it was in failed"))
                continue
            if chunk.finish_reason == "error":
                self._lose([chunk.request_id], AnswerFailure(str(chunk.stop_reason)))
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
        self._lose(list(affected), _failure(f"{type(error).__name__}: {error}"))
        self._abort(list(affected))

    def _lose(self, names: Iterable[str], error: EngineFailure) -> None:
        lost = {self._owners[name][0] for name in names if name in self._owners}
        for ticket in lost:
            self._cancel(ticket)
            self._tell(ticket.fail, error)

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


def is_of(owner: str, request_id: str) -> bool:
    """Whether a request of a worker's engine is this owner's; all are of "", which needs no key."""
    return not owner or request_id.startswith(_named(owner, ""))


def _named(owner: str, number: object) -> str:
    return f"{owner}/{number}" if owner else str(number)


def _failure(why: str) -> EngineFailure:
    return EngineFailure(f"the request failed: {why}")


def _guarded(call: Callable[[], None]) -> None:
    """Nothing that is done beside the steps may end them."""
    try:
        call()
    except Exception:
        logger.exception("a call between two steps failed")


def _settle(answer: "asyncio.Future[Reply]", reply: Reply) -> None:
    if not answer.done():  # else whoever asked has gone
        answer.set_result(reply)


def _deliver_all(parts: Sequence[tuple[Ticket, list[Item]]]) -> None:
    for ticket, items in parts:
        ticket.deliver(items)
