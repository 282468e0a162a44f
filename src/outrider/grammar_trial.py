"""Grammars are read in a process of their own first.

llguidance reads them by recursion: a chain of some thousand references, or a bound of an integer
that it cannot negate, ends the process that asks. Here that is a process with nothing to lose, and
it is ended too if it takes too long.

`python -m outrider.grammar_trial` is that process; it imports little, to start in no time.
"""

import atexit
import json
import os
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
STACK_BYTES = 4 << 20  # half of what threads have that read the grammar again
NICENESS = 5


class Dictionary(NamedTuple):
    """What a tokenizer of llguidance is made from."""

    key: str  # the same for the same content
    tokenizer: str  # as in tokenizer.json
    vocab_size: int
    eos_token_ids: list[int]


class Trial:
    """The process that reads grammars, started when it is needed; one grammar at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._asked: subprocess.Popen[str] | None = None  # the same, while it is asked
        self._known: set[str] = set()  # keys of the dictionaries that it has
        atexit.register(self._end)

    def seconds(self, dictionary: Dictionary, source: str) -> float:
        """How long llguidance takes to read a grammar, of a CPU's time.

        Raises:
            SamplingError: too long, or it fails.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._process = _started()
            is_new = dictionary.key not in self._known
            asked = {"source": source, "key": dictionary.key}
            asked |= {"dictionary": dictionary} if is_new else {}
            is_late = threading.Event()

            def end(process: "subprocess.Popen[str]") -> None:
                is_late.set()
                process.kill()

            limit = SECONDS + START_SECONDS * is_new
            timer = threading.Timer(limit, end, [self._process])
            timer.start()
            try:
                self._asked = self._process
                took = _ask(self._process, asked)
            except BaseException:  # Ctrl-C: what it says to this must answer nothing else
                self._end()
                raise
            finally:
                self._asked = None
                timer.cancel()
            if took is None or took > LONG_SECONDS:
                self._end()
            else:
                self._known.add(dictionary.key)
        if is_late.is_set() or (took is not None and took > SECONDS):
            raise SamplingError(f"llguidance takes more than {SECONDS:g} s to read it")
        if took is None:
            raise SamplingError("llguidance fails on it")
        return took

    def interrupt(self) -> None:
        """Whoever waits for an answer gets an error instead; called from any thread."""
        asked = self._asked
        if asked is not None:
            asked.kill()

    def _end(self) -> None:
        self._known.clear()
        if self._process is not None:
            self._process.kill()
            with suppress(OSError):  # what was not sent
                self._process.communicate()
            self._process = None


def _started() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="ascii",  # JSON without other characters
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # signals of the terminal are for whoever started it
    )


def _ask(process: "subprocess.Popen[str]", asked: dict[str, Any]) -> float | None:
    """Its answer, seconds; None when it ended over the question."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        said = process.stdout.readline()
    except OSError:
        return None
    return float(said) if said.endswith("\n") else None


def _read() -> None:
    """Answer every grammar of standard input by the seconds that reading it took."""
    import llguidance
    import numpy as np

    tokenizers: dict[str, tuple[Any, int]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "dictionary" in asked:
            key, tokenizer, vocab_size, eos = asked["dictionary"]
            made = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos)
            tokenizers[key] = made, vocab_size
        tokenizer, vocab_size = tokenizers[asked["key"]]
        begun = thread_time()
        matcher = llguidance.LLMatcher(tokenizer, asked["source"], log_level=0)
        mask = np.empty(-(-vocab_size // 32), np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        del matcher
        print(thread_time() - begun, flush=True)


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    threading.stack_size(STACK_BYTES)
    reader = threading.Thread(target=_read, daemon=True)
    reader.start()
    reader.join()
