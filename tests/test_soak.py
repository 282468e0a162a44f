"""The soak: that it sees what it looks for, and its short form on a real server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "bench"))

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
