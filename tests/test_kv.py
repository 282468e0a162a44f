"""The arena never loses a page, never gives one twice, and keeps requests in few runs."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.errors import KVFull
from outrider.target.base import PAGE_SIZE
from outrider.target.kv import KVArena, pages_for

NUM_PAGES = 24
OWNERS = st.sampled_from(["a", "b", "c", ("draft", "a")])


def runs(pages: np.ndarray) -> int:
    return 1 + int((np.diff(pages) != 1).sum()) if len(pages) else 0


class ArenaMachine(RuleBasedStateMachine):
    """Against a model that only counts: owner -> (committed, pages)."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = KVArena(NUM_PAGES)
        self.committed: dict[object, int] = {}
        self.pages: dict[object, int] = {}

    @rule(owner=OWNERS, num_tokens=st.integers(1, 8 * PAGE_SIZE))
    def reserve(self, owner, num_tokens):
        committed, held = self.committed.get(owner, 0), self.pages.get(owner, 0)
        wanted = max(held, pages_for(committed + num_tokens))
        free = NUM_PAGES - sum(self.pages.values())
        before = self.arena.page_table(owner).tolist() if owner in self.pages else []
        assert self.arena.num_available(owner) == (free + held) * PAGE_SIZE - committed
        if wanted - held > free:
            with pytest.raises(KVFull):
                self.arena.reserve(owner, num_tokens)
        else:
            self.arena.reserve(owner, num_tokens)
            self.committed[owner], self.pages[owner] = committed, wanted
        if owner in self.pages:
            assert self.arena.page_table(owner)[: len(before)].tolist() == before

    @rule(owner=OWNERS, share=st.floats(0, 1))
    def commit(self, owner, share):
        if owner in self.pages:
            room = self.pages[owner] * PAGE_SIZE - self.committed[owner]
            self.arena.commit(owner, int(room * share))
            self.committed[owner] += int(room * share)

    @rule(owner=OWNERS)
    def rollback(self, owner):
        if owner in self.pages:
            self.arena.rollback(owner)
            self.pages[owner] = pages_for(self.committed[owner])

    @rule(owner=OWNERS)
    def release(self, owner):
        self.arena.release(owner)
        self.committed.pop(owner, None)
        self.pages.pop(owner, None)

    @invariant()
    def counts_agree(self):
        self.arena.check_integrity()
        assert self.arena.num_free_pages == NUM_PAGES - sum(self.pages.values())
        for owner, committed in self.committed.items():
            assert self.arena.num_committed(owner) == committed
            assert len(self.arena.page_table(owner)) == self.pages[owner]


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_sixteen_growing_requests_stay_in_one_run_each():
    arena = KVArena(16 * 64)
    for length in range(1, 30 * PAGE_SIZE):
        for owner in range(16):
            arena.reserve(owner, 1)
            arena.commit(owner, 1)
            assert arena.num_committed(owner) == length
    arena.check_integrity()
    assert [runs(arena.page_table(owner)) for owner in range(16)] == [1] * 16


def test_a_prompt_larger_than_every_gap_takes_several_runs():
    arena = KVArena(6)
    for owner in range(6):
        arena.reserve(owner, PAGE_SIZE)
    for owner in (0, 1, 3, 4):
        arena.release(owner)
    arena.reserve("long", 4 * PAGE_SIZE)
    assert runs(arena.page_table("long")) == 2
    assert arena.num_free_pages == 0
    arena.check_integrity()


def test_full_arena_raises_without_changing_anything():
    arena = KVArena(2)
    arena.reserve("a", PAGE_SIZE)
    with pytest.raises(KVFull, match="1 of 2 are free"):
        arena.reserve("b", 2 * PAGE_SIZE)
    assert arena.owners == ["a"]
    assert arena.num_free_pages == 1


def test_commit_beyond_the_reserved_room_is_an_error():
    arena = KVArena(2)
    arena.reserve("a", 3)
    with pytest.raises(AssertionError):
        arena.commit("a", PAGE_SIZE + 1)


def test_rollback_keeps_committed_tokens_and_release_is_idempotent():
    arena = KVArena(4)
    arena.reserve("a", 3 * PAGE_SIZE)
    arena.commit("a", PAGE_SIZE + 1)
    arena.rollback("a")
    assert len(arena.page_table("a")) == 2
    arena.release("a")
    arena.release("a")
    assert (arena.num_free_pages, arena.num_committed("a")) == (4, 0)


def test_integrity_check_finds_a_leaked_page():
    arena = KVArena(4)
    arena.reserve("a", 1)
    arena._is_free[3] = False
    with pytest.raises(AssertionError, match=r"pages \[3\]"):
        arena.check_integrity()
