"""A server on a toy target, its streams taken apart, and clients that hang up."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fakes import ALPHABET, FakeTarget, SubmitAll
from starlette.testclient import TestClient

from outrider import LLM, DraftSource
from outrider.serving.app import create_app
from outrider.serving.service import Settings

VOCAB = len(ALPHABET.pieces)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
USER = [{"role": "user", "content": "the cat"}]


def make_llm(*sources: DraftSource, **options: Any) -> LLM:
    """An LLM on the fake target; with sources, all that they draft is submitted."""
    options.setdefault("target", FakeTarget(VOCAB))
    options.setdefault("tokenizer", ALPHABET)
    options.setdefault("kv_cache_tokens", 4096)
    if sources:
        options |= {"speculative_config": list(sources), "policy": SubmitAll()}
    return LLM(**options)


@contextmanager
def serving(llm: LLM | None = None, **settings: Any) -> Iterator[TestClient]:
    """A client of a server; at the end nothing may be left in the engine."""
    llm = llm or make_llm()
    with TestClient(create_app(llm, Settings(**settings)), raise_server_exceptions=True) as client:
        yield client
    llm.engine.check_integrity()
    assert llm.engine.arena.num_free_pages == llm.engine.arena.num_pages


@contextmanager
def listening(llm, **settings) -> Iterator[str]:
    """The address of a server in a thread."""
    config = uvicorn.Config(create_app(llm, Settings(**settings)), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join()


def events(text: str) -> list[dict]:
    """The bodies of a stream, which has to end with [DONE]."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), text
    assert lines[-1] == "data: [DONE]", lines[-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def streamed(client: TestClient, path: str, **body: Any) -> list[dict]:
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def asked(client: TestClient, path: str, **body: Any) -> dict:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(response: Any, status: int = 400) -> dict:
    """The error of a refused call, whose envelope has to be whole."""
    assert response.status_code == status, (response.status_code, response.text)
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


class Caller:
    """One call driven on ASGI itself, by a client that can go away, or read no more."""

    def __init__(
        self,
        app: Any,
        path: str,
        body: Any,
        method: str = "POST",
        key: str | None = None,
        num_read: float = math.inf,
    ) -> None:
        self._num_read = num_read
        self.sent: list[dict] = []
        self.gone = asyncio.Event()
        self.arrived = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1"}
        scope |= {"method": method, "path": path, "raw_path": path.encode()}
        scope["headers"] = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope |= {"query_string": b"", "root_path": "", "scheme": "http"}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        if len(self.sent) >= self._num_read:
            await self.gone.wait()
        self.sent.append(message)
        self.arrived.set()

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


@contextmanager
def loop_with(app: Any) -> Iterator[asyncio.Runner]:
    """A loop in which the app has started; it is stopped at the end."""
    with asyncio.Runner() as runner:
        inbox: asyncio.Queue = asyncio.Queue()
        outbox: asyncio.Queue = asyncio.Queue()

        async def start() -> asyncio.Task:
            scope = {"type": "lifespan", "asgi": {"version": "3.0"}}
            task = asyncio.create_task(app(scope, inbox.get, outbox.put))
            await inbox.put({"type": "lifespan.startup"})
            assert (await outbox.get())["type"] == "lifespan.startup.complete"
            return task

        async def stop(task: asyncio.Task) -> None:
            await inbox.put({"type": "lifespan.shutdown"})
            await task

        task = runner.run(start())
        try:
            yield runner
        finally:
            runner.run(stop(task))
