"""The soak: that it sees what it looks for, and its short form on a real server."""

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "bench"))

import load  # noqa: E402
import soak  # noqa: E402
import traffic  # noqa: E402
from load import Reply  # noqa: E402

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CASE = traffic.Case({}, "a cat", 3)


def chunk(*events: dict) -> bytes:
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return b"%x\r\n%b\r\n" % (len(data), data)


def said(text: str) -> dict:
    return {"choices": [{"delta": {"content": text}}]}


def judged(*pieces: bytes, kind: str = "streamed") -> traffic.Outcome:
    reply = Reply(1.0, [(2.0 + 0.5 * i, piece) for i, piece in enumerate(pieces)])
    outcome = traffic.Outcome(kind, reply.sent, reply.status)
    traffic._judge(outcome, CASE, reply)
    return outcome


END = chunk() + b"0\r\n\r\n"


def test_a_stream_is_timed_by_what_came_together():
    whole = HEAD + chunk(said(""), said("a")) + chunk(said(" c"))[:9]
    found = judged(whole, chunk(said(" c"))[9:], chunk(said("at")) + END)
    assert not found.fault and found.is_whole and found.num_tokens == 3
    assert (found.first, found.seconds, found.gaps) == (1.0, 2.0, [0.5, 0.5])


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        ([HEAD + chunk(said("a dog")) + END], "wrong text: 'a dog' instead of 'a cat'"),
        ([HEAD + chunk(said("a cat"))], "status 200, cut off"),
        ([HEAD + chunk(said("a"), {"error": {"code": 5}}) + END], 'in a stream: {"code": 5}'),
        ([b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"], "status 500, whole"),
        ([], "status 0, cut off"),
    ],
)
def test_what_is_wrong_with_an_answer_is_seen(pieces, fault):
    found = judged(*pieces)
    assert fault in found.fault
    assert found.is_whole == ("wrong text" in fault)


def test_an_answer_that_is_not_streamed():
    body = json.dumps({"choices": [{"message": {"content": "a cat"}}]}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert not judged(head, body, kind="whole").fault
    assert "cut off" in judged(head, body[:-1], kind="whole").fault


# Answers so many calls at most, none rightly, and is gone when the rules are to be replaced, which
# is the first thing that happens when all is measured.
STUB = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0), backlog=99)
print(f"running on http://127.0.0.1:{server.getsockname()[1]}", file=sys.stderr, flush=True)
for _ in range(int(sys.argv[-3])):
    connection, _ = server.accept()
    if connection.recv(1 << 16).startswith(b"PUT"):
        break
    live = b'{"kv":{"zones":{},"num_held":0},"requests":{"num_running":0,"num_waiting":0}}'
    connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n%b" % (len(live), live))
    connection.close()
"""


@pytest.mark.parametrize("burst", [False, True])
@pytest.mark.parametrize("num_calls", [0, 3, 10**6])
def test_a_server_that_ends_misses_its_bar(monkeypatch, num_calls, burst):
    for name in ("WARM_UP_SECONDS", "SETTLE_SECONDS"):
        monkeypatch.setattr(soak, name, 0.02)
    command = (sys.executable, "-S", "-c", STUB, str(num_calls))
    given = argparse.Namespace(sustain_seconds=0.02, seconds=60.0, burst=burst, burst_seconds=60.0)
    with load.ServerProcess(command=command) as server:
        caller = traffic.Caller(server.port, [CASE], 1, has_ranks=True)
        ended, wrong, *others = asyncio.run(soak.soak(server, caller, given))
    assert (ended.name, ended.value, ended.holds) == ("server that ended", 1.0, False)
    assert wrong.name == "wrong answers" and not others
    assert not wrong.holds or not num_calls


def test_a_server_that_does_not_start_is_not_left_running(monkeypatch):
    monkeypatch.setattr(load, "START_SECONDS", 0.05)
    for code in ("import time; time.sleep(60)", "raise SystemExit('no')"):
        server = load.ServerProcess(command=(sys.executable, "-S", "-c", code))
        with pytest.raises(RuntimeError, match="did not start"), server:
            pass
        assert server.has_ended


@pytest.mark.model
@pytest.mark.slow
def test_the_short_form_finds_nothing_wrong():
    options = ["--seconds", "20", "--sustain-seconds", "5", "--cases", "10"]
    command = [sys.executable, "bench/soak.py", *options]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    told = json.loads(found.stdout.splitlines()[-1])
    # How fast it was, and how even, is not asked on a machine that does other things.
    assert told["wrong answers"] == told["slots and pages left behind"] == 0, found.stdout
    assert told["server that ended"] == 0 and told["growth of memory"] < 10, found.stdout
