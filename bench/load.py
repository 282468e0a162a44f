"""Load on a server: `outrider serve` as a process, and calls that note when every event came.

The client is plain sockets, so that it takes next to nothing from the CPUs it shares with the
server; what came is taken apart when all is over. Times are seconds of `time.perf_counter`.
"""

import asyncio
import json
import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Any

HOST = "127.0.0.1"
START_SECONDS = 120.0
LOOK_SECONDS = 0.004
CHAT = "/v1/chat/completions"


class ServerProcess:
    """`outrider serve` on a free port; its log is read and kept."""

    def __init__(self, *options: str, command: tuple[str, ...] = ()) -> None:
        start = command or (sys.executable, "-m", "outrider.cli.main", "serve")
        self.process = subprocess.Popen(
            [*start, "--port", "0", *options], stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        self.port = 0
        self._listening = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self) -> None:
        """Until it listens.

        Raises:
            RuntimeError: it did not come that far; the message is its log.
        """
        if not self._listening.wait(START_SECONDS) or not self.port:
            raise RuntimeError("the server did not start:\n" + "".join(self.log))

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as log:
            for line in log:
                self.log.append(line)
                if not self.port and (found := re.search(r"running on http://[\d.]+:(\d+)", line)):
                    self.port = int(found[1])
                    self._listening.set()
        self._listening.set()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def resident_bytes(self) -> int:
        """Memory of the process."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * 4096

    def __enter__(self) -> "ServerProcess":
        try:
            self.wait()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self._kill()

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class Reply:
    """What came back of one call."""

    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # as they came

    @property
    def is_whole(self) -> bool:
        """Whether all came that the server wanted to send."""
        head, body = self.parts()
        length = self.headers.get("content-length")
        return bool(head) and (
            body.endswith(b"0\r\n\r\n") if length is None else len(body) >= int(length)
        )

    def parts(self) -> tuple[bytes, bytes]:
        """The head and what came behind it."""
        head, _, body = b"".join(piece for _, piece in self.pieces).partition(b"\r\n\r\n")
        return head, body

    @property
    def status(self) -> int:
        """0: the connection ended before."""
        head = self.pieces[0][1] if self.pieces else b""
        return int(head[9:12]) if head[:5] == b"HTTP/" else 0

    @property
    def headers(self) -> dict[str, str]:
        lines = self.parts()[0].decode("latin-1").split("\r\n")
        pairs = [line.partition(": ") for line in lines[1:]]
        return {name.lower(): value for name, _, value in pairs}

    def body(self) -> Any:
        """The JSON of an answer that is not streamed; else None."""
        try:
            return json.loads(self.parts()[1])
        except ValueError:
            return None

    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """Every event of a stream with the time it came, but for the last, [DONE]."""
        found = []
        rest, is_head = b"", True
        for time, piece in self.pieces:
            rest += piece
            if is_head:
                _, split, behind = rest.partition(b"\r\n\r\n")
                if not split:
                    continue
                rest, is_head = behind, False
            whole, split, rest = rest.rpartition(b"\n\n")
            for line in (whole + split).split(b"\n"):
                if line.startswith(b"data: {"):
                    found.append((time, json.loads(line[6:])))
        return found


async def call(
    port: int, path: str, body: Any, method: str = "POST", stop_after: float | None = None
) -> Reply:
    """One call on a connection of its own; `body` is JSON, or bytes that are sent as they are.

    `stop_after`: the client hangs up so many seconds after it has sent the call.
    """
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except ConnectionError:  # nobody listens any more
        return Reply(perf_counter())
    writer.write(_request(path, body, method))
    reply = Reply(perf_counter())
    try:
        async with asyncio.timeout(stop_after):
            while piece := await reader.read(1 << 16):
                reply.pieces.append((perf_counter(), piece))
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return reply


def call_together(port: int, path: str, bodies: Sequence[Any]) -> list[Reply]:
    """Several calls at once, by a client that looks for news every few milliseconds.

    One that wakes up for every event takes more from the CPUs than it costs to send it.
    """
    sockets = [socket.create_connection((HOST, port)) for _ in bodies]
    replies: list[Reply] = []
    for connection, body in zip(sockets, bodies, strict=True):
        connection.sendall(_request(path, body, "POST"))
        replies.append(Reply(perf_counter()))
    news = select.poll()
    waiting = {}
    for connection, reply in zip(sockets, replies, strict=True):
        news.register(connection, select.POLLIN)
        waiting[connection.fileno()] = connection, reply
    while waiting:
        sleep(LOOK_SECONDS)
        for number, _ in news.poll(0):
            connection, reply = waiting[number]
            if piece := connection.recv(1 << 16):
                reply.pieces.append((perf_counter(), piece))
            else:
                news.unregister(connection)
                connection.close()
                del waiting[number]
    return replies


def _request(path: str, body: Any, method: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def scrape(port: int) -> dict[str, float]:
    """The server's `/metrics`: series with their labels, but those of the model, to values."""
    reply = await call(port, "/metrics", b"", "GET")
    found = {}
    for line in reply.parts()[1].decode().splitlines():
        if not line.startswith("#") and " " in line:
            name, _, value = line.rpartition(" ")
            name = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace(",}", "}")
            found[name.removesuffix("{}")] = float(value)
    return found


def chat_body(messages: list[dict[str, str]], max_tokens: int, **more: Any) -> Mapping[str, Any]:
    """A chat that is streamed and goes on to its last token."""
    return {
        "messages": messages,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    } | more
