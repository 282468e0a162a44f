"""What ends a server, what does not, and what it says where it could not begin."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest
from fakes import FakeTarget
from serving_cases import COMPLETIONS, VOCAB, make_llm

from outrider.errors import ConfigError
from outrider.serving.server import SIGNALS, serve
from outrider.serving.service import Settings

LONG = {"prompt": "the cat", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
Ask = Callable[..., HTTPResponse]  # of a path and a body


@contextmanager
def beside(work: Callable[[Ask], None]) -> Iterator[int]:
    """Work in a thread, which has to go well, beside a server on the port that the body gets."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    done = []

    def ask(path: str, body: Any = None) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", port, timeout=20)
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {"Connection": "close"})
        return connection.getresponse()

    def is_ready() -> bool:
        try:
            with ask("/ready") as found:
                return found.status == 200
        except OSError:
            return False

    def run() -> None:
        try:
            until(is_ready)
            work(ask)
            done.append(True)
        finally:
            if not done:
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield port
    finally:
        thread.join()
        assert done


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def policy_version(ask: Ask) -> int:
    with ask("/policy") as found:
        return json.loads(found.read())["version"]


@pytest.fixture(autouse=True)
def signals():
    """As the command line has them, and the same again behind a server."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    found = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert set(found.values()) <= {signal.default_int_handler, signal.SIG_IGN}


@pytest.mark.parametrize("number", SIGNALS, ids=lambda one: signal.Signals(one).name)
def test_calls_end_before_the_server_does(number):
    def work(ask: Ask) -> None:
        with ask(COMPLETIONS, LONG | {"stream": True}) as answer:
            answer.readline()
            os.kill(os.getpid(), number)
            assert answer.read().endswith(b"data: [DONE]\n\n")

    with beside(work) as port:
        serve(make_llm(), Settings(), "127.0.0.1", port)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_second_signal_ends_the_server_in_order(is_asked, capsys):
    def work(ask: Ask) -> None:
        if not is_asked:
            end_twice()
            return
        with ask(COMPLETIONS, LONG | {"max_tokens": 4000, "stream": True}) as answer:
            answer.readline()
            end_twice()
            *_, last, end = answer.read().split(b"\n\n")[:-1]
        assert b"shut down before this answer was complete" in last and end == b"data: [DONE]"

    with beside(work) as port:
        target = FakeTarget(VOCAB, max_model_len=4096)
        target.forward = slowly(target.forward)
        serve(make_llm(target=target), Settings(), "127.0.0.1", port)
    logs = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {log["level"] for log in logs} == {"info"}, logs


def end_twice() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.03)  # signals that nobody has seen yet are one; uvicorn looks every 0.1 s
    os.kill(os.getpid(), signal.SIGTERM)


def slowly(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(batch: Any) -> Any:
        time.sleep(0.005)
        return forward(batch)

    return call


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="a signal of Unix")
@pytest.mark.parametrize("has_policy", [True, False])
def test_a_hangup_that_reads_the_policy_or_is_ignored_ends_nothing(tmp_path, has_policy):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"version": 1, "rules": []}))
    if not has_policy:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does

    def work(ask: Ask) -> None:
        before = policy_version(ask)
        os.kill(os.getpid(), signal.SIGHUP)
        if has_policy:
            until(lambda: policy_version(ask) == before + 1)
        with ask(COMPLETIONS, LONG) as answer:
            assert answer.status == 200
        os.kill(os.getpid(), signal.SIGTERM)

    with beside(work) as port:
        serve(make_llm(), Settings(policy=path if has_policy else None), "127.0.0.1", port)


def test_what_ends_a_process_that_serves_is_no_fault_of_the_address(monkeypatch):
    def run(self) -> None:
        self.started = True
        raise SystemExit(143)

    monkeypatch.setattr("outrider.serving.server._Server.run", run)
    with pytest.raises(SystemExit, match="143"):
        serve(make_llm(), Settings(), "127.0.0.1", 0)


def test_an_address_that_is_taken_is_named():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot serve on 127.0.0.1:{port}"):
            serve(make_llm(), Settings(), "127.0.0.1", port)
