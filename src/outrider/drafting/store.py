"""Outputs of finished requests, one automaton per owner, in bounded memory."""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from outrider.drafting.automaton import Automaton, new_automaton

SEPARATOR = np.array([-1], np.int32)


@dataclass(slots=True)
class _Shelf:
    """What one owner said: a generation that grows, and the one before it."""

    young: Automaton = field(default_factory=new_automaton)
    num_young: int = 0
    old: Automaton | None = None
    num_old: int = 0
    version: int = 0


class OutputStore:
    """Recent outputs by owner; at most `max_tokens` tokens over all owners.

    An automaton cannot forget its oldest tokens, so an owner has two: when the young one holds
    half of what is allowed it becomes the old one, and the old one goes. When several owners
    together hold too much, the one not heard of for longest gives up a generation.
    """

    def __init__(self, max_tokens: int) -> None:
        assert max_tokens >= 4, max_tokens
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.version = 0  # changes whenever any owner's texts do
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()  # least recently used first

    def add(self, owner: str, tokens: np.ndarray) -> None:
        """Keep an output (int32 ids); of one longer than half of the store, its end."""
        tokens = tokens[-(self.max_tokens // 2 - 1) :]
        if not len(tokens):
            return
        shelf = self._shelves.setdefault(owner, _Shelf())
        self._shelves.move_to_end(owner)
        size = len(tokens) + 1
        if shelf.num_young + size > self.max_tokens // 2:
            self._retire(shelf)
        shelf.young.extend(tokens)
        shelf.young.extend(SEPARATOR)
        shelf.num_young += size
        self.num_tokens += size
        self.version += 1
        shelf.version = self.version
        while self.num_tokens > self.max_tokens:
            self._evict()

    def version_of(self, owner: str) -> int:
        """Changes whenever the owner's texts do; 0 when there is none."""
        shelf = self._shelves.get(owner)
        return 0 if shelf is None else shelf.version

    def texts(self, owner: str) -> list[Automaton]:
        """The owner's texts, at most two, the most recent first."""
        shelf = self._shelves.get(owner)
        if shelf is None:
            return []
        self._shelves.move_to_end(owner)
        return [shelf.young] if shelf.old is None else [shelf.young, shelf.old]

    def _retire(self, shelf: _Shelf) -> None:
        self.num_tokens -= shelf.num_old
        shelf.old, shelf.num_old = shelf.young, shelf.num_young
        shelf.young, shelf.num_young = new_automaton(), 0

    def _evict(self) -> None:
        owner, shelf = next(iter(self._shelves.items()))
        self.version += 1
        shelf.version = self.version
        if shelf.old is not None:
            self.num_tokens -= shelf.num_old
            shelf.old, shelf.num_old = None, 0
        else:
            self.num_tokens -= shelf.num_young
            del self._shelves[owner]
