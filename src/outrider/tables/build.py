"""From a stream of token ids to a table: windows, sorted runs, entries, buckets.

Memory stays within a budget: windows beyond it go to sorted runs on disk that are merged, entries
beyond it to a file that is read once per range of buckets. The same texts give the same table,
whatever the budget and the number of threads.
"""

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import TableError
from outrider.native import library
from outrider.tables.format import write_table
from outrider.tables.place import EntryStore, Placed, place
from outrider.tables.plain import entries_of
from outrider.tables.records import (
    ENTRY,
    MAX_VOCABULARY,
    WINDOW,
    Run,
    Scan,
    Settings,
    bits_for,
    sorted_windows,
)
from outrider.tables.replay import Stream, calibrated

DEFAULT_MEMORY = 1 << 30
MIN_MEMORY = 64 << 20
HELD_OUT = 32  # one text in so many is kept out of the table, to calibrate confidence
MAX_HELD_OUT = 200_000  # tokens
PIECES_AT_ONCE = 8  # of the scan, between two looks at the memory
MIN_PIECES, MAX_PIECES = 64, 8192
# Entries found by a scan per window, at most about one, in the list of the scan and in a copy.
SCAN_BYTES_PER_WINDOW = 2 * ENTRY.itemsize
# Bytes per token of a run while it is made: its windows, what merging them takes, the tokens.
RUN_BYTES_PER_TOKEN = 2 * WINDOW.itemsize

Progress = Callable[[str, float], None]  # what is being done, how much of it


@dataclass(frozen=True, slots=True)
class BuiltTable:
    """What became of a build."""

    path: Path
    num_tokens: int
    num_contexts: int
    num_slots: int
    num_bytes: int


class TableBuilder:
    """Takes in texts as token ids and writes their table.

    Args:
        vocab_size: ids are below it.
        fingerprint: of the tokenizer that made them.
        settings: what to keep.
        memory: bytes that the build may take beyond what the process has now.
        directory: for temporary files; default: the system's.

    Raises:
        TableError: a vocabulary beyond 2 M tokens, or too little memory.
    """

    def __init__(
        self,
        vocab_size: int,
        fingerprint: str,
        settings: Settings | None = None,
        memory: int = DEFAULT_MEMORY,
        directory: Path | None = None,
    ) -> None:
        if not 0 < vocab_size <= MAX_VOCABULARY:
            raise TableError(f"a vocabulary must have 1 to {MAX_VOCABULARY} ids, got {vocab_size}")
        if memory < MIN_MEMORY:
            raise TableError(f"a build needs at least {MIN_MEMORY} bytes of memory, got {memory}")
        self.settings = settings or Settings()
        self.vocab_size, self.fingerprint = vocab_size, fingerprint
        self.memory = memory
        self.num_tokens = self.num_texts = 0
        self._directory = directory
        self._cleanup = contextlib.ExitStack()
        self._work: Path | None = None
        self._most_pending = memory // 2 // RUN_BYTES_PER_TOKEN
        self._pending: list[np.ndarray] = []
        self._pending_counted: list[np.ndarray] = []
        self._num_pending = 0
        self._held_out: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_held_out = 0
        self._runs: list[Run] = []

    def __enter__(self) -> "TableBuilder":
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def add(self, token_ids: np.ndarray, counted: np.ndarray | None = None) -> None:
        """Take in one text.

        Args:
            token_ids: int32 [n].
            counted: bool [n], False where a token is only context of others; default: all True.

        Raises:
            TableError: an id outside the vocabulary.
        """
        if not len(token_ids):
            return
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            raise TableError(
                f"token ids must be in [0, {self.vocab_size}), got "
                f"{token_ids.min()} to {token_ids.max()}"
            )
        self.num_texts += 1
        self.num_tokens += len(token_ids)
        mask = np.ones(len(token_ids), np.uint8) if counted is None else counted.astype(np.uint8)
        text = np.append(token_ids, -1).astype(np.int32), np.append(mask, 0).astype(np.uint8)
        if self.num_texts % HELD_OUT == 0 and self._num_held_out < MAX_HELD_OUT:
            self._held_out.append(text)
            self._num_held_out += len(token_ids)
            return
        for start in range(0, len(text[0]), self._most_pending):  # a text may be longer than a run
            self._pending.append(text[0][start : start + self._most_pending])
            self._pending_counted.append(text[1][start : start + self._most_pending])
            self._num_pending += len(self._pending[-1])
            if self._num_pending >= self._most_pending:
                self._end_run(to_disk=True)

    def finish(
        self,
        path: Path,
        provenance: Mapping[str, Any],
        max_bytes: int | None = None,
        progress: Progress = lambda what, share: None,
    ) -> BuiltTable:
        """Write the table of all texts taken in.

        Args:
            provenance: command, data, seed and what else tells where the table is from.
            max_bytes: of more, the contexts of least value are left out.
            progress: told what is being done.

        Raises:
            TableError: no text, or the file cannot be written.
        """
        if not self.num_tokens:
            raise TableError("the corpus holds no tokens: nothing to build a table from")
        store = self._entries(progress)
        progress("placing", 0.0)
        token_bytes = 2 if self.vocab_size <= 1 << 16 else 3
        placed = place(store, self.settings.key_lengths, token_bytes, max_bytes)
        progress("calibrating", 0.0)
        confidence = calibrated(placed.contents, _joined(self._held_out))
        fields = self._fields(placed, confidence, provenance)
        progress("writing", 0.0)
        write_table(path, placed.contents, fields)
        size = path.stat().st_size
        return BuiltTable(path, self.num_tokens, placed.num_contexts, placed.num_slots, size)

    def _entries(self, progress: Progress) -> EntryStore:
        budget = self.memory // 4
        if library() is None:
            store = EntryStore(budget)
            stream = _joined(list(zip(self._pending, self._pending_counted, strict=True)))
            if stream is not None:
                store.add(entries_of(stream.tokens, stream.counted, self.settings))
            return store
        self._end_run(to_disk=bool(self._runs))
        store = EntryStore(budget, self._workplace() if self._runs[0].file >= 0 else None)
        scan = Scan(self.settings, self._runs, self.vocab_size)
        num_bytes = sum(run.count for run in self._runs) * SCAN_BYTES_PER_WINDOW
        wanted = PIECES_AT_ONCE * num_bytes // (self.memory // 8)
        bounds = scan.pieces(min(MAX_PIECES, max(MIN_PIECES, wanted)))
        for start in range(0, len(bounds) - 1, PIECES_AT_ONCE):
            progress("counting", start / len(bounds))
            store.add(scan.entries(bounds[start : start + PIECES_AT_ONCE + 1]))
        self._runs.clear()
        return store

    def _end_run(self, to_disk: bool) -> None:
        if library() is None or (not self._pending and self._runs):
            return
        if self._pending:
            tokens = np.concatenate(self._pending)
            counted = np.concatenate(self._pending_counted)
        else:
            tokens, counted = np.empty(0, np.int32), np.empty(0, np.uint8)
        self._pending, self._pending_counted, self._num_pending = [], [], 0
        windows = sorted_windows(tokens, counted, bits_for(self.vocab_size))
        if not to_disk:
            self._runs.append(Run(windows, len(windows)))
            return
        try:
            file = (self._workplace() / f"run-{len(self._runs)}").open("w+b")
            self._cleanup.callback(file.close)
            windows.tofile(file)
            file.flush()
        except OSError as error:
            raise TableError(f"cannot write temporary files: {error.strerror or error}") from error
        self._runs.append(Run(None, len(windows), file.fileno()))

    def _workplace(self) -> Path:
        if self._work is None:
            made = tempfile.TemporaryDirectory(prefix="outrider-table-", dir=self._directory)
            self._work = Path(self._cleanup.enter_context(made))
        return self._work

    def _fields(
        self, placed: Placed, confidence: np.ndarray, provenance: Mapping[str, Any]
    ) -> dict[str, Any]:
        lengths = self.settings.key_lengths
        return {
            "tokenizer": {"fingerprint": self.fingerprint, "vocab_size": self.vocab_size},
            "num_contexts": placed.num_contexts,
            "num_slots": placed.num_slots,
            "contexts_by_length": {str(n): placed.contexts_by_length[n] for n in lengths},
            "confidence": [round(float(value), 4) for value in confidence],
            "corpus": {"texts": self.num_texts, "tokens": self.num_tokens},
            "provenance": dict(provenance),
        }


def _joined(texts: list[tuple[np.ndarray, np.ndarray]]) -> Stream | None:
    if not texts:
        return None
    tokens, counted = zip(*texts, strict=True)
    return Stream(np.concatenate(tokens), np.concatenate(counted))
