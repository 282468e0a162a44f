"""A runner under way: started, asked in turns, stopped in between so that it takes no core."""

import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.bench.peers.cores import cores_for, on_cores
from outrider.bench.peers.group import ask_group_to_end, end_group, signal_group
from outrider.bench.peers.install import python_of, runtime_environment
from outrider.bench.peers.spec import RUNNERS, Side
from outrider.errors import OutriderError

LOAD_SECONDS = 600  # vLLM compiles for up to two minutes on two cores
ANSWER_SECONDS = 900  # one call with a full batch
LOOK_SECONDS = 1.0  # between two looks whether a silent runner still lives
KEPT_LOG = 4000  # characters of what a runner printed, for its last words
SHOWN = 60  # characters of a line that is no answer


class PeerFailed(OutriderError):
    """A peer could not be started, answered an error, or ended; the message says which."""


class Runner:
    """One side's process. Between two requests its whole process group is stopped.

    Raises:
        PeerFailed: it does not get ready.
    """

    def __init__(self, side: Side, job: dict[str, Any], num_threads: int, log: Path) -> None:
        python = python_of(side.peer)
        assert python is not None, f"{side.peer.name} is not installed"
        self.side = side
        self._log = log.open("w+b")
        self._pending = b""
        try:
            with on_cores(cores_for(num_threads)):
                self._process = subprocess.Popen(
                    [str(python), str(RUNNERS / side.peer.script)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    env=os.environ | runtime_environment(side.peer, num_threads),
                    start_new_session=True,  # one group to stop, to wake and to end
                )
        except OSError as error:
            self._log.close()
            raise PeerFailed(
                f"{side.name} could not be started: {python}: {error.strerror}; "
                f"`outrider bench peers --install {side.peer.name}` makes its environment anew"
            ) from error
        try:
            self.about = self._ask(job, LOAD_SECONDS)
            if not _is_ready(self.about):
                raise self._no_answer(self.about)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def decode(
        self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool
    ) -> tuple[float, list[list[int]]]:
        """Seconds of one call, and the new tokens of every prompt."""
        request = {"prompts": prompts, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
        self._signal(signal.SIGCONT)
        try:
            answer = self._ask(request, ANSWER_SECONDS)
        finally:
            self._signal(signal.SIGSTOP)
        if not _is_decoded(answer, len(prompts)):
            raise self._no_answer(answer)
        return answer["seconds"], answer["token_ids"]

    def ask_to_end(self) -> None:
        """Let it begin to end, before `close` waits for that."""
        ask_group_to_end(self._process.pid)

    def close(self) -> None:
        """End the process and all it started."""
        try:
            end_group(self._process)
        finally:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what it never read
                        pipe.close()
            self._log.close()

    def _ask(self, values: dict[str, Any], limit: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(values).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(limit)
        except OSError as error:
            raise self._ended() from error
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise self._no_answer(line.decode("utf-8", "replace")) from error
        if not isinstance(answer, dict):
            raise self._no_answer(answer)
        if "error" in answer:
            raise PeerFailed(f"{self.side.name}: {answer['error']}")
        return answer

    def _line(self, limit: float) -> bytes:
        assert self._process.stdout is not None
        pipe, end = self._process.stdout.fileno(), time.monotonic() + limit
        while b"\n" not in self._pending:
            left = end - time.monotonic()
            ready, _, _ = select.select([pipe], [], [], max(0.0, min(left, LOOK_SECONDS)))
            if not ready:
                if self._process.poll() is not None:  # a child of its keeps the pipe open
                    raise self._ended()
                if left <= 0:
                    raise PeerFailed(f"{self.side.name} gave no answer within {limit:.0f} s")
                continue
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                raise self._ended()
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _ended(self) -> PeerFailed:
        """How it ended, and the last line of what it printed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LOOK_SECONDS)  # its pipes close a moment before it ends
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - KEPT_LOG))
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        words = lines[-1].strip() if lines else "it printed nothing"
        return PeerFailed(f"{self.side.name} {_how(self._process.returncode)}: {words}")

    def _no_answer(self, given: Any) -> PeerFailed:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        shown = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
        return PeerFailed(
            f"{self.side.name} answered {shown!r}, which is not what a runner answers"
        )

    def _signal(self, number: int) -> None:
        signal_group(self._process.pid, number)


def _how(code: int | None) -> str:
    """An exit code in words; negative ones are signals."""
    if code is None:
        return "closed its output"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    reason = " (perhaps the memory ran out)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{reason}"


def _is_ready(answer: dict[str, Any]) -> bool:
    return isinstance(answer.get("versions"), dict) and _is_number(answer.get("load_seconds"))


def _is_decoded(answer: dict[str, Any], num_prompts: int) -> bool:
    """Whether the answer has seconds and, for every prompt, token ids."""
    every = answer.get("token_ids")
    return (
        _is_number(answer.get("seconds"))
        and isinstance(every, list)
        and len(every) == num_prompts
        and all(isinstance(ids, list) and all(type(i) is int for i in ids) for ids in every)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
