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

from outrider.bench.peers.install import python_of, runtime_environment
from outrider.bench.peers.spec import RUNNERS, Side
from outrider.errors import OutriderError

LOAD_SECONDS = 600  # vLLM compiles for up to two minutes on two cores
ANSWER_SECONDS = 900  # one call with a full batch
KEPT_LOG = 4000  # characters of what a runner printed, for its last words
CLOSING_SECONDS = 10


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
        self._process = subprocess.Popen(
            [str(python), str(RUNNERS / side.peer.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | runtime_environment(side.peer, num_threads),
            start_new_session=True,  # one group to stop, to wake and to end
        )
        try:
            self.about = self._ask(job, LOAD_SECONDS)
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
        return answer["seconds"], answer["token_ids"]

    def close(self) -> None:
        """End the process and all it started."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._signal(signal.SIGKILL)  # children that outlived it
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
            answer = json.loads(self._line(limit))
        except OSError as error:
            raise PeerFailed(f"{self.side.name} ended: {self._last_words()}") from error
        if "error" in answer:
            raise PeerFailed(f"{self.side.name}: {answer['error']}")
        return answer

    def _line(self, limit: float) -> bytes:
        assert self._process.stdout is not None
        pipe, end = self._process.stdout.fileno(), time.monotonic() + limit
        while b"\n" not in self._pending:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise PeerFailed(f"{self.side.name} gave no answer within {limit:.0f} s")
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                raise PeerFailed(f"{self.side.name} ended: {self._last_words()}")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """The last line of what it printed that looks like a reason."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - KEPT_LOG))
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else "it printed nothing"

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
