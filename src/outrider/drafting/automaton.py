"""Suffix automaton over token ids: what has been said before, found in O(1) per token.

`new_automaton()` gives the compiled one, or the same thing in plain Python where nothing could
be compiled. A *match* is a pair (state, length): the longest suffix of some token stream that
occurs in the automaton's text. A negative token separates texts: it ends every match and is
never proposed.
"""

import ctypes
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from outrider.native import library, pointer

Match = tuple[int, int]  # state, length in tokens
NO_MATCH: Match = (0, 0)
MAX_CHAIN = 64  # states whose counts one token updates, as in automaton.cpp


class Step(NamedTuple):
    """A likely next token, and the evidence for it."""

    token: int
    seen: int  # times it followed the context
    total: int  # times the context was followed by anything


class Automaton(Protocol):
    """Text that grows, and matches of token streams in it."""

    def extend(self, tokens: np.ndarray) -> None:
        """Append int32 tokens; amortised O(1) each."""
        ...

    def advance(self, match: Match, tokens: np.ndarray) -> Match:
        """The match after the stream went on with these tokens; amortised O(1) each.

        A match made before the text grew stays valid; it may then be shorter than the longest.
        """
        ...

    def repeated(self) -> Match:
        """The longest suffix of the text that also ends earlier in it."""
        ...

    def walk(self, match: Match, num_tokens: int) -> list[Step]:
        """The most frequent continuation, token by token, the latest of equals; may be short."""
        ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


def new_automaton() -> "Automaton":
    return NativeAutomaton() if library() is not None else PythonAutomaton()


class NativeAutomaton:
    """`native/automaton.cpp` behind ctypes; `address` is that of the C++ object."""

    __slots__ = ("__weakref__", "_library", "_self", "address")

    def __init__(self) -> None:
        lib = library()
        assert lib is not None, "no compiled library"
        lib.outrider_automaton_new.restype = ctypes.c_void_p
        self._library = lib
        self.address: int = lib.outrider_automaton_new()
        self._self = ctypes.c_void_p(self.address)
        weakref.finalize(self, lib.outrider_automaton_delete, self._self)

    def extend(self, tokens: np.ndarray) -> None:
        tokens = np.ascontiguousarray(tokens, np.int32)
        count = ctypes.c_int64(len(tokens))
        self._library.outrider_automaton_extend(self._self, pointer(tokens), count)

    def advance(self, match: Match, tokens: np.ndarray) -> Match:
        tokens = np.ascontiguousarray(tokens, np.int32)
        pair = (ctypes.c_int32 * 2)(*match)
        count = ctypes.c_int64(len(tokens))
        self._library.outrider_automaton_advance(self._self, pair, pointer(tokens), count)
        return pair[0], pair[1]

    def repeated(self) -> Match:
        pair = (ctypes.c_int32 * 2)()
        self._library.outrider_automaton_repeated(self._self, pair)
        return pair[0], pair[1]

    def walk(self, match: Match, num_tokens: int) -> list[Step]:
        rows = np.empty((num_tokens, 3), np.int32)
        pair = (ctypes.c_int32 * 2)(*match)
        n = self._library.outrider_automaton_walk(self._self, pair, pointer(rows), num_tokens)
        return [Step(*row) for row in rows[:n].tolist()]

    @property
    def num_tokens(self) -> int:
        return self._sizes()[0]

    @property
    def num_bytes(self) -> int:
        return self._sizes()[2]

    def _sizes(self) -> list[int]:
        sizes = (ctypes.c_int64 * 3)()
        self._library.outrider_automaton_sizes(self._self, sizes)
        return list(sizes)


@dataclass(slots=True)
class _State:
    length: int = 0
    link: int = -1
    end: int = -1
    count: int = 0
    best: int = -1
    steps: dict[int, int] = field(default_factory=dict)


class PythonAutomaton:
    """The same automaton without a compiler: 11 µs per token instead of 0.15."""

    def __init__(self) -> None:
        self._states = [_State()]
        self._text: list[int] = []
        self._last = 0

    def extend(self, tokens: np.ndarray) -> None:
        for token in np.asarray(tokens).tolist():
            self._append(token)

    def advance(self, match: Match, tokens: np.ndarray) -> Match:
        state, length = match
        states = self._states
        for token in np.asarray(tokens).tolist():
            state = self._settle(state, length)
            while token >= 0 and state and token not in states[state].steps:
                state = states[state].link
                length = states[state].length
            found = states[state].steps.get(token, 0) if token >= 0 else 0
            state, length = (found, length + 1) if found else NO_MATCH
        return state, length

    def repeated(self) -> Match:
        state = max(0, self._states[self._last].link)
        return state, self._states[state].length

    def walk(self, match: Match, num_tokens: int) -> list[Step]:
        states, steps, last_place = self._states, [], len(self._text) - 1
        state, place = self._settle(*match), -1  # place: in the text, once the context is unique
        while len(steps) < num_tokens:
            if 0 <= place < last_place:
                place += 1
                if self._text[place] < 0:
                    break
                steps.append(Step(self._text[place], 1, 1))
                continue
            if place >= 0:
                state = self._last
            while state > 0 and states[state].best < 0 and states[state].end == last_place:
                state = states[state].link
            here = states[state]
            if state <= 0 or here.best < 0:
                break
            after = states[here.best]
            total = max(after.count, here.count - (here.end == last_place))
            steps.append(Step(self._text[after.end], after.count, total))
            state, place = here.best, after.end if after.count == 1 else -1
        return steps

    @property
    def num_tokens(self) -> int:
        return len(self._text)

    @property
    def num_bytes(self) -> int:
        return 400 * len(self._states)  # a state with its dict, measured on CPython 3.11

    def _settle(self, state: int, length: int) -> int:
        """The state of the strings of this length, after a split of the one they were in."""
        states = self._states
        while state and states[states[state].link].length >= length:
            state = states[state].link
        return state

    def _append(self, token: int) -> None:
        states = self._states
        self._text.append(token)
        previous, current = self._last, len(states)
        states.append(_State(length=states[previous].length + 1, link=0))
        p = previous
        while p >= 0 and token not in states[p].steps:
            states[p].steps[token] = current
            p = states[p].link
        if p >= 0:
            states[current].link = self._suffix(p, token)
        self._last = current
        self._record(previous, token)

    def _suffix(self, p: int, token: int) -> int:
        """The state of p's longest string followed by token, split off if it has no own one."""
        states = self._states
        q = states[p].steps[token]
        old, length = states[q], states[p].length + 1
        if old.length == length:
            return q
        clone = len(states)
        states.append(_State(length, old.link, old.end, old.count, old.best, dict(old.steps)))
        old.link = clone
        while p >= 0 and states[p].steps.get(token) == q:
            states[p].steps[token] = clone
            if states[p].best == q:
                states[p].best = clone
            p = states[p].link
        return clone

    def _record(self, previous: int, token: int) -> None:
        """Every suffix has occurred once more, and so has the step that led here."""
        states, position = self._states, len(self._text) - 1
        state = self._last
        for _ in range(MAX_CHAIN):
            if state <= 0:
                break
            states[state].count += 1
            states[state].end = position
            state = states[state].link
        if token < 0:
            return
        state = self._last
        for _ in range(MAX_CHAIN):
            if previous < 0:
                break
            here = states[previous]
            while states[states[state].link].length > here.length:
                state = states[state].link
            if here.best < 0 or states[state].count >= states[here.best].count:
                here.best = state
            previous = here.link
