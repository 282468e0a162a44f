"""Grammars are read in a process of their own first.

llguidance reads them by recursion: a chain of some thousand references, or a bound of an integer
that it cannot negate, ends the process that asks. Here that is a process with nothing to lose, and
it is ended too if it takes too long.

`python -m outrider.grammar_trial` is that process; it imports little, to start in no time.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from time import thread_time
from typing import Any, NamedTuple

from outrider.errors import SamplingError

SECONDS = 10.0  # to read a grammar
LONG_SECONDS = 1.0  # after which its memory may be large, and another process takes its place
START_SECONDS = 60.0  # to start, and to read a tokenizer
STACK_BYTES = 4 << 20  # at most, and half of what threads have that read the grammar again
UNLIMITED_STACK_BYTES = 2 << 20  # that glibc gives threads where the stack has no limit
MEMORY_BYTES = 4 << 30
NICENESS = 5
MARK = "took "  # before an answer: packages may print what they like as they are imported


class Dictionary(NamedTuple):
    """What a tokenizer of llguidance is made from."""

    key: str  # the same for the same content
    tokenizer: str  # as in tokenizer.json
    vocab_size: int
    eos_token_ids: list[int]


class NotTried(SamplingError):
    """Nothing is known of the grammar: the process was ended from outside, or could not start."""


class Trial:
    """The process that reads grammars, started when it is needed; one grammar at a time."""

    def __init__(self) -> None:
        self._forget()
        self._num_interrupts = 0
        atexit.register(self._end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """The process, if there is one, is another one's."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._asked: subprocess.Popen[str] | None = None  # the same, while it is asked
        self._known: set[str] = set()  # keys of the dictionaries that it has

    def seconds(self, dictionary: Dictionary, source: str) -> float:
        """How long llguidance takes to read a grammar, of a CPU's time.

        Raises:
            SamplingError: too long, or it fails.
            NotTried: interrupted, or no process can be started.
        """
        if getattr(sys, "frozen", False) or not sys.executable:
            return 0.0  # there is no Python that could be started
        num_interrupts = self._num_interrupts
        took = None
        with self._lock:
            for _ in range(1 + (dictionary.key in self._known)):  # it may have ended long before
                if took is None and self._num_interrupts == num_interrupts:
                    took = self._took(dictionary, source)
            if self._num_interrupts != num_interrupts:
                raise NotTried("it was not read: the server ends")
        if took is None:
            raise SamplingError("llguidance fails on it")
        if took > SECONDS:
            raise SamplingError(f"llguidance takes more than {SECONDS:g} s to read it")
        return took

    def _took(self, dictionary: Dictionary, source: str) -> float | None:
        """Seconds, infinite where it was given up; None when the process ended over it."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            try:
                self._process = _started()
            except OSError as error:
                raise NotTried(f"the process that reads it cannot be started: {error}") from error
        process = self._process
        try:
            if dictionary.key not in self._known:
                if self._ask(process, {"dictionary": dictionary}, START_SECONDS) is None:
                    raise NotTried("the process that reads it did not start")
                self._known.add(dictionary.key)
            took = self._ask(process, {"source": source, "key": dictionary.key}, SECONDS)
        except BaseException:  # Ctrl-C: what it says to this must answer nothing else
            self._end()
            raise
        if took is None or took > LONG_SECONDS:
            self._end()
        return took

    def _ask(
        self, process: "subprocess.Popen[str]", message: dict[str, Any], limit: float
    ) -> float | None:
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(limit, end)
        timer.daemon = True
        try:
            timer.start()
            self._asked = process
            took = _answer(process, message)
        finally:
            self._asked = None
            timer.cancel()
        return float("inf") if took is None and is_late.is_set() else took

    def interrupt(self) -> None:
        """Whoever waits for an answer gets an error instead; called from any thread."""
        self._num_interrupts += 1
        asked = self._asked
        if asked is not None:
            asked.kill()

    def _end(self) -> None:
        self._known.clear()
        if self._process is not None:
            self._process.kill()
            with suppress(OSError, subprocess.TimeoutExpired):  # what was not sent
                self._process.communicate(timeout=5.0)
            self._process = None


def _started() -> "subprocess.Popen[str]":
    paths = [os.path.abspath(path or ".") for path in sys.path if isinstance(path, str)]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="ascii",  # JSON without other characters
        errors="replace",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # signals of the terminal are for whoever started it
    )


def _answer(process: "subprocess.Popen[str]", message: dict[str, Any]) -> float | None:
    """Seconds; None when the process ended over the message."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(OSError):
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith(MARK) and line.endswith("\n"):
                return float(line.removeprefix(MARK))
    return None


def _read() -> None:
    """Answer every message of standard input by the seconds that it took."""
    import llguidance

    from outrider.grammar import next_tokens

    tokenizers: dict[str, tuple[Any, int]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        begun = thread_time()
        _alarm(START_SECONDS if "dictionary" in asked else SECONDS)
        if "dictionary" in asked:
            key, tokenizer, vocab_size, eos = asked["dictionary"]
            made = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos)
            tokenizers[key] = made, vocab_size
        else:
            tokenizer, vocab_size = tokenizers[asked["key"]]
            matcher = llguidance.LLMatcher(tokenizer, asked["source"], log_level=0)
            if not matcher.is_error():
                next_tokens(matcher, vocab_size)
            del matcher
        _alarm(0)
        print(f"{MARK}{thread_time() - begun}", flush=True)


def _alarm(seconds: float) -> None:
    """End by then, even if nobody is there any more to do it; 0: go on."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds * 1.5)


def _limit() -> None:
    """Take what others leave, and no more room than who reads the grammar again."""
    stack = STACK_BYTES
    with suppress(ImportError, ValueError, OSError):  # not everywhere
        import resource

        limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
        if limit == resource.RLIM_INFINITY:
            limit = UNLIMITED_STACK_BYTES
        stack = min(stack, limit // 2)
        os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.RLIM_INFINITY))
    threading.stack_size(stack)


if __name__ == "__main__":
    _limit()
    reader = threading.Thread(target=_read, daemon=True)
    reader.start()
    reader.join()
