"""Windows and entries: what a build sorts, and the compiled calls that do it.

A window is one place in the corpus, the tokens before it packed into 128 bits; an entry is one
continuation of one context. The layouts are those of native/table_build.h.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.checks import INT32_MAX, integer, number, shown
from outrider.errors import TableError
from outrider.native import library, pointer
from outrider.tables.hashing import MAX_KEY, MAX_RANKS

WINDOW = np.dtype([("high", "<u8"), ("low", "<u8"), ("next", "<u4"), ("count", "<u4")])
# key: hash << 8 | key length << 4 | rank; value and heat: upper halves of floats, which sort alike
ENTRY = np.dtype(
    [("key", "<u8"), ("token", "<u4"), ("count", "<u4"), ("total", "<u4"), ("value", "<u2"),
     ("heat", "<u2")]
)  # fmt: skip
MAX_VOCABULARY = (1 << 21) - 1  # six tokens in 128 bits, and one more to say "before the text"
MAX_VALUE = 1e30  # of a context; a float holds more
# A token seen `count` times of `total` after k tokens is taken for confidence
# count / (total + DOUBT[k - 1]), until held-out text says better.
DOUBT = (3.0, 2.0, 1.2, 0.8, 0.6, 0.5)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a build keeps.

    Args:
        key_lengths: tokens of the contexts, ascending.
        min_count: contexts seen less often are left out.
        min_value: contexts that add less to shorter ones are left out, in expected tokens over
            the corpus; above 0, or a context that adds nothing is kept.
        num_ranks: most continuations of a context.
        min_share: continuations after the first with less confidence are left out.
    """

    key_lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    min_count: int = 1
    min_value: float = 0.3
    num_ranks: int = 3
    min_share: float = 0.1

    def __post_init__(self) -> None:
        lengths = self.key_lengths
        if (
            not isinstance(lengths, tuple | list)
            or not lengths
            or not all(type(length) is int and 1 <= length <= MAX_KEY for length in lengths)
            or list(lengths) != sorted(set(lengths))
        ):
            raise TableError(
                f"key_lengths must be ascending integers from 1 to {MAX_KEY}, got {shown(lengths)}"
            )
        plain = {
            "key_lengths": tuple(lengths),
            "min_count": integer("min_count", self.min_count, 1, INT32_MAX, TableError),
            "num_ranks": integer("num_ranks", self.num_ranks, 1, MAX_RANKS, TableError),
            "min_value": number("min_value", self.min_value, 0, MAX_VALUE, TableError),
            "min_share": number("min_share", self.min_share, 0, 1, TableError),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Run:
    """Sorted windows: in memory, or `count` of them in an open file."""

    windows: np.ndarray | None
    count: int
    file: int = -1


class _Settings(ctypes.Structure):
    _fields_ = (
        ("key_lengths", ctypes.c_int32 * MAX_KEY),
        *((name, ctypes.c_int32) for name in ("bits", "vocab_size", "num_ranks", "min_count")),
        *((name, ctypes.c_float) for name in ("min_value", "min_share")),
        ("doubt", ctypes.c_float * MAX_KEY),
    )


class _Run(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("file", ctypes.c_int32),
    )


def bits_for(vocab_size: int) -> int:
    """Bits of a token in a window, all ones left free."""
    assert 0 < vocab_size <= MAX_VOCABULARY, vocab_size
    return max(8, int(vocab_size).bit_length())


def sorted_windows(tokens: np.ndarray, counted: np.ndarray, bits: int) -> np.ndarray:
    """Windows of a stream, sorted, equal ones joined; compiled library only.

    Args:
        tokens: int32 [n], -1 between texts.
        counted: uint8 [n], 0 where a token is only context.
    """
    lib = library()
    assert lib is not None
    windows = np.empty(len(tokens), WINDOW)
    lib.outrider_table_windows.restype = lib.outrider_table_sort.restype = ctypes.c_int64
    count = lib.outrider_table_windows(
        pointer(tokens), pointer(counted), ctypes.c_int64(len(tokens)), bits, pointer(windows)
    )
    count = lib.outrider_table_sort(pointer(windows), ctypes.c_int64(count))
    return windows[:count]


class Scan:
    """Entries of sorted runs, piece by piece; compiled library only."""

    def __init__(self, settings: Settings, runs: Sequence[Run], vocab_size: int) -> None:
        self._library = library()
        assert self._library is not None
        self._settings = _native_settings(settings, vocab_size)
        self._runs = (_Run * len(runs))(
            *(
                _Run(None if r.windows is None else r.windows.ctypes.data, r.count, r.file)
                for r in runs
            )
        )
        self._kept_alive = list(runs)

    def pieces(self, most: int) -> np.ndarray:
        """Bounds of at most `most` pieces of about the same number of windows: uint64."""
        assert self._library is not None
        bounds = np.zeros(most + 1, np.uint64)
        count = self._library.outrider_table_ranges(
            self._runs, len(self._runs), self._settings.bits, most, pointer(bounds)
        )
        return bounds[: count + 1]

    def entries(self, bounds: np.ndarray) -> np.ndarray:
        """Entries of the contexts kept of these pieces, all threads at work: ENTRY [n]."""
        lib = self._library
        assert lib is not None
        lib.outrider_table_scan.restype = ctypes.c_void_p
        lib.outrider_table_num_found.restype = ctypes.c_int64
        found = ctypes.c_void_p(
            lib.outrider_table_scan(
                ctypes.byref(self._settings),
                self._runs,
                len(self._runs),
                pointer(np.ascontiguousarray(bounds)),
                len(bounds) - 1,
            )
        )
        if not found:
            raise TableError("cannot read temporary files: they are not as they were written")
        entries = np.empty(lib.outrider_table_num_found(found), ENTRY)
        lib.outrider_table_take(found, pointer(entries))
        return entries


def sort_entries(entries: np.ndarray) -> np.ndarray:
    """By key, and so by hash; equal keys by token. In place where compiled."""
    lib = library()
    if lib is None:
        return entries[np.lexsort((entries["token"], entries["key"]))]
    lib.outrider_table_sort_entries(pointer(entries), ctypes.c_int64(len(entries)))
    return entries


def _native_settings(settings: Settings, vocab_size: int) -> _Settings:
    return _Settings(
        key_lengths=(ctypes.c_int32 * MAX_KEY)(*settings.key_lengths),
        bits=bits_for(vocab_size),
        vocab_size=vocab_size,
        num_ranks=settings.num_ranks,
        min_count=settings.min_count,
        min_value=settings.min_value,
        min_share=settings.min_share,
        doubt=(ctypes.c_float * MAX_KEY)(*DOUBT),
    )
