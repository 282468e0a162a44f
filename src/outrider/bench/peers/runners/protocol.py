"""How a runner talks: JSON lines on stdin and stdout. Runs inside a peer's own environment.

The first line is the job, {"model", "threads", "options", "max_model_len", "max_batch"}; the
answer says "ready". Every further line, {"prompts": [[id, ...], ...], "max_tokens", "ignore_eos"},
is decoded greedily in one call and answered with new token ids and the seconds of the call.
Whatever else a library prints goes to stderr.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

PR_SET_PDEATHSIG = 1  # of prctl(2)

TokenIds = list[int]
# Given prompts, most new tokens, and whether to go on after the end of text: the new tokens.
Decode = Callable[[Sequence[TokenIds], int, bool], list[TokenIds]]


def serve(load: Callable[[dict[str, Any]], Decode], packages: Sequence[str]) -> None:
    """Load what the job says, then answer requests until stdin ends."""
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(values: dict[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    job = json.loads(sys.stdin.readline())
    started = perf_counter()
    try:
        decode = load(job)
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    found = {name: number for name in packages if (number := _version(name)) is not None}
    answer({"ready": True, "load_seconds": perf_counter() - started, "versions": found})
    for line in sys.stdin:
        answer(_decoded(decode, json.loads(line)))


def until_end(token_ids: TokenIds, end_ids: Sequence[int]) -> TokenIds:
    """The tokens up to the end of text, which is left out."""
    ends = [token_ids.index(end) for end in end_ids if end in token_ids]
    return token_ids[: min(ends)] if ends else token_ids


def _decoded(decode: Decode, request: dict[str, Any]) -> dict[str, Any]:
    try:
        started = perf_counter()
        token_ids = decode(request["prompts"], request["max_tokens"], request["ignore_eos"])
        return {"seconds": perf_counter() - started, "token_ids": token_ids}
    except Exception as error:  # one prompt that fails leaves the others their turn
        return {"error": f"{type(error).__name__}: {error}"}


def _end_with_parent() -> None:
    """A runner is mostly stopped; nobody would wake and end it after its parent was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
