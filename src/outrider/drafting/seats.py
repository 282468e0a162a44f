"""The lookups of a whole batch: one call into the compiled library, or a loop in Python.

Each request has a seat, an index into arrays that live as long as the source, so that a call
passes only what is new. `_Call` has the layout of `Call` in native/automaton.cpp.
"""

import ctypes
from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np

from outrider.drafting.automaton import (
    Automaton,
    NativeAutomaton,
    PythonAutomaton,
    new_automaton,
)
from outrider.drafting.confidence import Calibration, cell_of, with_rows
from outrider.drafting.source import Draft
from outrider.native import library

NUM_TEXTS = 2  # texts of others that one request may draft from
# A call this short keeps the interpreter's lock: giving it back and waiting for it costs more.
SHORT_MESSAGE = 256  # numbers
_PACKERS = [Struct(f"{n}i").pack for n in range(SHORT_MESSAGE)]

# One draft before it is put into its row: tokens, confidences, cells.
_Found = tuple[list[int], list[float], list[int]]


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("own", "texts", "matches", "factors", "table")),
        *((name, ctypes.c_void_p) for name in ("found", "cells")),
        *((name, ctypes.c_int32) for name in ("width", "min_match")),
        ("min_survival", ctypes.c_float),
    )


class Seats:
    """Automata, matches and drafts of the running requests, by seat."""

    def __init__(
        self, width: int, min_match: int, min_survival: float, calibration: Calibration
    ) -> None:
        self.width, self.min_match, self.min_survival = width, min_match, min_survival
        self.calibration = calibration
        self.own: list[Automaton | None] = []
        self.texts: list[list[Automaton | None]] = []
        self.matches = np.zeros((0, NUM_TEXTS, 2), np.int32)  # state and length in `texts`
        # Draft of each seat: its length n, n tokens, the bits of n confidences (float32). Taking
        # a row apart in one go costs half of what three slices cost.
        self.found = np.zeros((0, 1 + 2 * width), np.int32)
        self.cells = np.zeros((0, width), np.int32)
        self._unpackers = [Struct(f"{n}i{n}f").unpack_from for n in range(width + 1)]
        self._own_addresses = np.zeros(0, np.uint64)
        self._text_addresses = np.zeros((0, NUM_TEXTS), np.uint64)
        self._free: list[int] = []
        self._library = library()
        if self._library is not None:
            arguments = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p)
            symbol = ("outrider_lookup", self._library)
            self._look_up_all = ctypes.CFUNCTYPE(None, *arguments)(symbol)
            self._look_up_few = ctypes.PYFUNCTYPE(None, *arguments)(symbol)
        self._call = _Call(width=width, min_match=min_match, min_survival=min_survival)
        self._grow(8)

    def take(self) -> int:
        """A free seat with an empty text of its own."""
        if not self._free:
            self._grow(2 * len(self.own))
        seat = self._free.pop()
        own = self.own[seat] = new_automaton()
        if isinstance(own, NativeAutomaton):
            self._own_addresses[seat] = own.address
        self.found[seat, 0] = 0
        self.set_texts(seat, [], np.empty(0, np.int32))
        self.calibration.reset(seat)
        return seat

    def leave(self, seat: int) -> None:
        self.set_texts(seat, [], np.empty(0, np.int32))
        self.own[seat] = None
        self._own_addresses[seat] = 0
        self._free.append(seat)

    def set_texts(self, seat: int, texts: Sequence[Automaton], recent: np.ndarray) -> None:
        """Let a seat draft from these texts too; `recent` is the stream before what comes next."""
        assert len(texts) <= NUM_TEXTS, len(texts)
        self.texts[seat] = [*texts, *[None] * (NUM_TEXTS - len(texts))]
        self._text_addresses[seat] = self.matches[seat] = 0
        for i, text in enumerate(texts):
            self.matches[seat, i] = text.advance((0, 0), recent)
            if isinstance(text, NativeAutomaton):
                self._text_addresses[seat, i] = text.address

    def look_up(self, seats: Sequence[int], message: list[int], source: str) -> list[Draft]:
        """Take in new tokens and draft.

        Args:
            message: for every request its seat, its budget, the number of new tokens, and these.
                One flat list is the cheapest way into C: numpy arrays of so few numbers, or a
                list per request, would double the 2 µs of a call.
            source: what the drafts are said to be from.
        """
        if self._library is None:
            self._look_up_all_in_python(message)
        elif len(message) < SHORT_MESSAGE:
            self._look_up_few(self._address, len(seats), _PACKERS[len(message)](*message))
        else:
            self._look_up_all(self._address, len(seats), array("i", message).tobytes())
        found, numbers, row = self._found_bytes, self._found_numbers, 1 + 2 * self.width
        drafts = []
        for seat in seats:
            at = seat * row
            n = numbers[at]
            values = self._unpackers[n](found, 4 * at + 4)
            drafts.append(Draft(list(values[:n]), [], None, list(values[n:]), source))
        return drafts

    def follow(self, seat: int, chain: Sequence[int], budget: int, source: str) -> Draft:
        """What comes after a seat's own text and these tokens, which it does not take in."""
        own = self.own[seat]
        assert own is not None, seat
        match = own.advance(own.repeated(), np.array(chain, np.int32))
        (tokens, confidence, _), _ = self._draft(seat, own, match, budget, in_other_text=False)
        return Draft(tokens, [], None, confidence, source)

    def tokens_of(self, seat: int) -> list[int]:
        """Tokens of a seat's last draft."""
        return self.found[seat, 1 : 1 + self.found[seat, 0]].tolist()

    def cells_of(self, seat: int) -> list[int]:
        """What `Calibration.observe` wants to know of a seat's last draft."""
        return self.cells[seat, : self.found[seat, 0]].tolist()

    def _grow(self, num_seats: int) -> None:
        old = len(self.own)
        self._free.extend(range(num_seats - 1, old - 1, -1))
        self.own.extend([None] * (num_seats - old))
        self.texts.extend([None] * NUM_TEXTS for _ in range(num_seats - old))
        self.calibration.grow(num_seats)
        self.matches = with_rows(self.matches, num_seats)
        self.found = with_rows(self.found, num_seats)
        self.cells = with_rows(self.cells, num_seats)
        self._own_addresses = with_rows(self._own_addresses, num_seats)
        self._text_addresses = with_rows(self._text_addresses, num_seats)
        self._point()

    def _point(self) -> None:
        """Write the addresses of the arrays into the call, and see the drafts as a flat view."""
        call = self._call
        call.own, call.texts = self._own_addresses.ctypes.data, self._text_addresses.ctypes.data
        call.matches = self.matches.ctypes.data
        call.factors = self.calibration.factors.ctypes.data
        call.table = self.calibration.table.ctypes.data
        call.found, call.cells = self.found.ctypes.data, self.cells.ctypes.data
        self._address = ctypes.addressof(call)
        # Reading numbers through views costs half of what it costs through numpy.
        self._found_numbers: Any = self.found.reshape(-1).data
        self._found_bytes = self._found_numbers.cast("B")

    def _look_up_all_in_python(self, message: list[int]) -> None:
        at = 0
        while at < len(message):
            seat, budget, count = message[at : at + 3]
            self._look_up_one(seat, np.array(message[at + 3 : at + 3 + count], np.int32), budget)
            at += 3 + count

    def _look_up_one(self, seat: int, new: np.ndarray, budget: int) -> None:
        own = self.own[seat]
        assert isinstance(own, PythonAutomaton), own
        own.extend(new)
        best, expected = self._draft(seat, own, own.repeated(), budget, in_other_text=False)
        for i, text in enumerate(self.texts[seat]):
            if text is None:
                continue
            state, length = self.matches[seat, i].tolist()
            match = text.advance((state, length), new)
            self.matches[seat, i] = match
            found, value = self._draft(seat, text, match, budget, in_other_text=True)
            if value > expected:
                best, expected = found, value
        tokens, confidence, cells = best
        n = len(tokens)
        self.found[seat, 0], self.found[seat, 1 : 1 + n] = n, tokens
        self.found[seat, 1 + n : 1 + 2 * n] = np.array(confidence, np.float32).view(np.int32)
        self.cells[seat, :n] = cells

    def _draft(
        self, seat: int, text: Automaton, match: tuple[int, int], budget: int, in_other_text: bool
    ) -> tuple[_Found, float]:
        found: _Found = ([], [], [])
        survival, expected = 1.0, 0.0
        if match[1] < self.min_match:
            return found, expected
        for i, step in enumerate(text.walk(match, min(budget, self.width))):
            cell = cell_of(match[1] + i, step.seen, step.total, in_other_text)
            confidence = self.calibration.confidence(seat, cell)
            survival *= confidence
            if survival < self.min_survival:
                break
            expected += survival
            found[0].append(step.token)
            found[1].append(confidence)
            found[2].append(cell)
        return found, expected
