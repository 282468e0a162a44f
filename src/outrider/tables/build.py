"""From a stream of token ids to a table: windows, sorted runs, entries, buckets.

Memory stays within a budget: windows beyond it go to sorted runs on disk that are merged, entries
beyond it to a file that is read once per range of buckets. The same texts give the same table,
whatever the budget and the number of threads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.checks import integer, shown
from outrider.errors import TableError
from outrider.native import library
from outrider.tables.files import Scratch, check_output
from outrider.tables.format import check_provenance, write_table
from outrider.tables.hashing import MAX_KEY
from outrider.tables.header import header_fields
from outrider.tables.place import EntryStore, Placed, Sizing, place
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
MIN_MEMORY, MAX_MEMORY = 64 << 20, 1 << 50
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
    left_out: Mapping[str, int]  # contexts worth keeping that are not there, by reason


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
        self.vocab_size = integer("vocab_size", vocab_size, 1, MAX_VOCABULARY, TableError)
        self.memory = integer("memory", memory, 0, MAX_MEMORY, TableError)
        if memory < MIN_MEMORY:
            raise TableError(f"a build needs at least {MIN_MEMORY} bytes of memory, got {memory}")
        if not isinstance(fingerprint, str) or not fingerprint:
            raise TableError(f"fingerprint must be that of a tokenizer, got {shown(fingerprint)}")
        self.settings = settings or Settings()
        self.fingerprint = fingerprint
        self.num_tokens = self.num_texts = 0
        self._scratch = Scratch(directory)
        self._most_pending = memory // 2 // RUN_BYTES_PER_TOKEN
        self._pending: list[np.ndarray] = []
        self._pending_counted: list[np.ndarray] = []
        self._num_pending = 0
        self._held_out: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_held_out = 0
        self._runs: list[Run] = []
        self._is_finished = False

    def __enter__(self) -> "TableBuilder":
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.close()

    def add(self, token_ids: np.ndarray, counted: np.ndarray | None = None) -> None:
        """Take in one text.

        Args:
            token_ids: integers [n].
            counted: bool [n], False where a token is only context of others; default: all True.

        Raises:
            TableError: no such arrays, an id outside the vocabulary, or a full disk.
        """
        self._check_open()
        self._check_text(token_ids, counted)
        if not len(token_ids):
            return
        self.num_texts += 1
        self.num_tokens += len(token_ids)
        first = 0
        if self.num_texts % HELD_OUT == 0 and self._num_held_out < MAX_HELD_OUT:
            first = min(len(token_ids), MAX_HELD_OUT - self._num_held_out)
            self._held_out.append(_piece(token_ids, counted, 0, first))
            self._num_held_out += first
        while first < len(token_ids):  # a text may be longer than a run
            end = len(token_ids)
            if library() is not None:
                end = min(end, first + self._most_pending - self._num_pending)
            tokens, mask = _piece(token_ids, counted, first, end)
            self._pending.append(tokens)
            self._pending_counted.append(mask)
            self._num_pending += end - first
            first = end
            if library() is not None and self._num_pending >= self._most_pending:
                self._end_run(to_disk=True)

    def _check_open(self) -> None:
        if self._is_finished:
            raise TableError("the table of this builder is finished: make another builder")

    def _check_text(self, token_ids: Any, counted: Any) -> None:
        if (
            not isinstance(token_ids, np.ndarray)
            or token_ids.ndim != 1
            or token_ids.dtype.kind not in "iu"
        ):
            raise TableError(
                "token ids must be a one-dimensional array of integers, got "
                f"{_described(token_ids)}"
            )
        if len(token_ids) and (token_ids.min() < 0 or token_ids.max() >= self.vocab_size):
            raise TableError(
                f"token ids must be in [0, {self.vocab_size}), got "
                f"{token_ids.min()} to {token_ids.max()}"
            )
        if counted is None:
            return
        is_mask = isinstance(counted, np.ndarray) and counted.dtype == np.bool_
        if not is_mask or counted.shape != token_ids.shape:
            raise TableError(
                f"counted must be an array of {len(token_ids)} bools, one for each token id, "
                f"got {_described(counted)}"
            )

    def finish(
        self,
        path: str | Path,
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
            TableError: no text, nothing worth keeping in it, or the file cannot be written.
        """
        self._check_open()
        check_output(path)
        check_provenance(provenance)
        if not self.num_tokens:
            raise TableError("the corpus holds no tokens: nothing to build a table from")
        Sizing(max_bytes)
        self._is_finished = True
        store = self._entries(progress)
        progress("placing", 0.0)
        token_bytes = 2 if self.vocab_size <= 1 << 16 else 3
        sizing = Sizing(max_bytes, fields=self._fields(provenance))
        placed = place(store, self.settings.key_lengths, token_bytes, sizing)
        if not placed.num_contexts:
            raise TableError(self._why_empty(placed, max_bytes))
        progress("calibrating", 0.0)
        confidence = calibrated(placed.contents, _joined(self._held_out))
        progress("writing", 0.0)
        write_table(path, placed.contents, self._fields(provenance, placed, confidence))
        size = Path(path).stat().st_size
        return BuiltTable(
            Path(path),
            self.num_tokens,
            placed.num_contexts,
            placed.num_slots,
            size,
            placed.left_out,
        )

    def _why_empty(self, placed: Placed, max_bytes: int | None) -> str:
        if placed.num_beyond_size:
            return f"no context of the corpus fits into max_bytes={max_bytes}: nothing to write"
        chosen = self.settings
        return (
            f"none of the contexts of {self.num_tokens} tokens is seen min_count="
            f"{chosen.min_count} times and worth min_value={chosen.min_value}: nothing to write"
        )

    def _entries(self, progress: Progress) -> EntryStore:
        budget = self.memory // 4
        if library() is None:
            store = EntryStore(budget)
            stream = _joined(list(zip(self._pending, self._pending_counted, strict=True)))
            if stream is not None:
                store.add(entries_of(stream.tokens, stream.counted, self.settings))
            return store
        self._end_run(to_disk=bool(self._runs))
        store = EntryStore(budget, self._scratch if self._runs[0].file >= 0 else None)
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
        file = self._scratch.open()
        self._scratch.write(file, windows)
        self._runs.append(Run(None, len(windows), file.fileno()))

    def _fields(
        self,
        provenance: Mapping[str, Any],
        placed: Placed | None = None,
        confidence: np.ndarray | None = None,
    ) -> dict[str, Any]:
        counts = None
        if placed is not None:
            by_length = {str(n): placed.contexts_by_length[n] for n in self.settings.key_lengths}
            counts = {
                "num_contexts": placed.num_contexts,
                "num_slots": placed.num_slots,
                "contexts_by_length": by_length,
                "left_out": placed.left_out,
            }
        tokenizer = {"fingerprint": self.fingerprint, "vocab_size": self.vocab_size}
        corpus = {"texts": self.num_texts, "tokens": self.num_tokens}
        return header_fields(tokenizer, corpus, provenance, counts, confidence)


def _piece(
    token_ids: np.ndarray, counted: np.ndarray | None, first: int, end: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [first, end) of a text behind those that are their context, and which count.

    Cut anywhere, the pieces of a text give the windows of the whole.
    """
    start = max(0, first - MAX_KEY)
    tokens = np.append(token_ids[start:end].astype(np.int32), np.int32(-1))
    mask = np.zeros(len(tokens), np.uint8)
    mask[first - start : -1] = 1 if counted is None else counted[first:end]
    return tokens, mask


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    return f"{type(value).__name__} {shown(value, 40)}"


def _joined(texts: list[tuple[np.ndarray, np.ndarray]]) -> Stream | None:
    if not texts:
        return None
    tokens, counted = zip(*texts, strict=True)
    return Stream(np.concatenate(tokens), np.concatenate(counted))
