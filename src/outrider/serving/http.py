"""The edge of the server: bodies in, answers out, and one log line for each call.

Written on ASGI itself: a stream of events sends hundreds of small pieces a second, and layers
around a response cost more than what they do.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from math import inf, isfinite
from time import perf_counter
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outrider.checks import shown
from outrider.serving.errors import ApiError, to_event, to_json
from outrider.serving.worker import EngineFailure, Item, Ticket

logger = logging.getLogger(__name__)

BODY_SECONDS = 60.0  # in which a body must have come
READ_SECONDS = 60.0  # in which a client must have taken a piece of a stream
LONGEST_ID = 128
DONE = b"data: [DONE]\n\n"
POLLED = ("/health", "/live", "/metrics", "/ready")  # every second or so: no news if they went well
GONE = 499  # status of a call whose client went away; it is in the log only

Found = TypeVar("Found")


class Disconnected(Exception):
    """The client went away, or takes nothing any more."""


class JSONBody(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_response(error: ApiError) -> Response:
    return JSONBody(error.envelope, error.status, error.headers)


class EventStream(Response):
    """Server-sent events; ends with [DONE], and early when the client goes.

    Args:
        ticket: what comes, step by step.
        events: the events that a step becomes.
        last: those behind all steps.
        held: what the stream holds as long as it lasts.
        why: what the client is told when the ticket fails.
    """

    def __init__(
        self,
        ticket: Ticket,
        events: Callable[[list[Item]], bytes],
        last: Callable[[], bytes],
        held: AbstractContextManager[object],
        why: Callable[[EngineFailure], ApiError],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        del self.headers["Content-Length"]
        self._ticket = ticket
        self._events = events
        self._last = last
        self._held = held
        self._why = why
        self._sending_since = inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            sending = self._send_all(send, scope["state"]["send"])
            await while_wanted(sending, gone(receive), self._stuck())

    async def _send_all(self, send: Send, send_piece: Send) -> None:
        """`send_piece` leaves out the layers around a response: they look at its start only."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for items in self._ticket:
                if data := self._events(items):
                    await self._put(send_piece, data)
            if data := self._last():
                await self._put(send_piece, data)
        except EngineFailure as error:  # the status has been sent: the client reads it here
            await self._put(send_piece, to_event(self._why(error).envelope))
        await self._put(send, DONE, is_last=True)

    async def _put(self, send: Send, data: bytes, is_last: bool = False) -> None:
        self._sending_since = perf_counter()
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._sending_since = inf

    async def _stuck(self) -> None:
        """Returns when the client reads no more, which must not keep a seat from others."""
        while perf_counter() - self._sending_since < READ_SECONDS:
            await asyncio.sleep(READ_SECONDS / 4)


async def while_wanted(work: Awaitable[Found], *ends: Awaitable[None]) -> Found:
    """What the work gives, unless something comes first that says nobody waits for it.

    Raises:
        Disconnected: it did; the work has been cancelled.
    """
    working = asyncio.ensure_future(work)
    tasks = [working, *map(asyncio.ensure_future, ends)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gone(receive: Receive) -> None:
    """Returns when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, most: int) -> bytes:
    """The body, at most so many bytes.

    Raises:
        ApiError: 413 too large, 408 too slow, 400 lost to an upgrade of the protocol.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await _read(request, most)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} s") from None
    if not data and (wanted := request.headers.get("upgrade")):  # as Java's clients ask for
        raise ApiError(
            400,
            f"no body came with the request to upgrade to {shown(wanted)}, which this server "
            "does not; expected HTTP/1.1 without Upgrade",
        )
    return data


def parse_json(data: bytes) -> Any:
    """The JSON in a body.

    Raises:
        ApiError: 400, not UTF-8, not JSON, or a field given twice.
    """
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error.reason}") from None
    except ValueError as error:  # JSON that is none, or an int of 5000 digits
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


async def _read(request: Request, most: int) -> bytes:
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told[:20]) > most:
        raise _too_large(most)
    data = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        data += message.get("body", b"")
        if len(data) > most:
            raise _too_large(most)
        if not message.get("more_body", False):
            return bytes(data)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is too large, this server takes {most} bytes at most")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # which of the two was meant?
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ApiError(400, f"the body holds {shown(twice)} twice in one object", param=twice)
    return found


def _finite(text: str) -> float:
    found = float(text)
    return found if isfinite(found) else _no_number(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number that JSON knows, or beyond 64 bits")


class Edge:
    """Around the whole app: an id and a log line for every call, and no exception passes."""

    def __init__(self, app: FastAPI, count: Callable[[str, int], None]) -> None:
        """`count` is told the path and the status of every call that has ended."""
        self.inner = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.inner(scope, receive, send)
            return
        headers = dict(scope["headers"])
        record = {"request_id": _request_id(headers), "method": scope["method"]}
        record["path"] = scope["path"]
        scope.setdefault("state", {}).update(record=record, send=send)
        status, start = 0, perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", record["request_id"].encode()),
                ]
            await send(message)

        try:
            await self.inner(scope, receive, send_with_id)
        except Disconnected:
            status = GONE
        except asyncio.CancelledError:  # the time that calls have to end is over
            await _cut_off(scope, receive, send_with_id, has_begun=status > 0)
        except Exception:
            logger.exception("a call failed", extra={"record": record})
        finally:
            seconds = round(perf_counter() - start, 6)
            self._count(scope["path"], status)
            level = logging.DEBUG if scope["path"] in POLLED and status == 200 else logging.INFO
            told = record | {"status": status, "seconds": seconds}
            logger.log(level, "call", extra={"record": told})


async def _cut_off(scope: Scope, receive: Receive, send: Send, has_begun: bool) -> None:
    """Tell a client that its answer will not come; one that has begun is a stream."""
    error = ApiError(503, "the server was shut down before this answer was complete")
    if not has_begun:
        await error_response(error)(scope, receive, send)
        return
    last = to_event(error.envelope) + DONE
    await send({"type": "http.response.body", "body": last, "more_body": False})


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's own id, if it can be one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    if 0 < len(given) <= LONGEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid4().hex


def not_found(path: str) -> ApiError:
    return ApiError(404, f"there is no {shown(path)} on this server", code="not_found")
