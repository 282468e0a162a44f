"""The arena never loses a page, never shares one that is written to, and keeps runs few."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.errors import KVFull
from outrider.target.base import PAGE_SIZE
from outrider.target.kv import EVICTED_SHARE, KVArena, pages_for
from outrider.target.prefixes import PageKeys

NUM_PAGES = 24
OWNERS = st.sampled_from(["a", "b", "c", ("draft", "a")])
TEXT_OWNERS = st.sampled_from("abcd")
TENANTS = st.sampled_from(["me", "you"])
PAGES = st.lists(st.integers(0, 1), max_size=4)


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


class SharingMachine(RuleBasedStateMachine):
    """Every slot remembers the text it was computed for: an owner must find its own in all."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = KVArena(NUM_PAGES)
        self.memory: dict[int, tuple] = {}  # slot -> tenant and text up to its token
        self.texts: dict[str, tuple[str, np.ndarray, PageKeys]] = {}

    def path(self, owner: str, place: int) -> tuple:
        tenant, text, _ = self.texts[owner]
        return tenant, text[: place + 1].tobytes()

    def slot(self, owner: str, place: int) -> int:
        return int(self.arena.page_table(owner)[place // PAGE_SIZE]) * PAGE_SIZE + place % PAGE_SIZE

    def make_room(self, owner: str) -> None:
        left = len(self.texts[owner][1]) - self.arena.num_committed(owner)
        try:
            self.arena.reserve(owner, left)
        except KVFull:
            self.release(owner)

    @rule(owner=TEXT_OWNERS, tenant=TENANTS, pages=PAGES, rest=st.integers(1, PAGE_SIZE))
    def start(self, owner, tenant, pages, rest):
        if owner in self.texts:
            return
        text = np.repeat(np.array([*pages, 0], np.int32), PAGE_SIZE)[
            : len(pages) * PAGE_SIZE + rest
        ]
        keys = PageKeys(tenant)
        self.texts[owner] = tenant, text, keys
        expected = self.arena.num_known(keys, text) * PAGE_SIZE
        adopted = self.arena.adopt(owner, keys, text)
        assert adopted == expected == self.arena.num_committed(owner) < len(text)
        self.make_room(owner)

    @rule(owner=TEXT_OWNERS, share=st.floats(0, 1))
    def compute(self, owner, share):
        if owner not in self.texts:
            return
        _, text, keys = self.texts[owner]
        first = self.arena.num_committed(owner)
        count = int((len(text) - first) * share)
        for place in range(first, first + count):
            self.memory[self.slot(owner, place)] = self.path(owner, place)
        self.arena.commit(owner, count)
        self.arena.publish(owner, keys, text)
        assert self.arena.num_known(keys, text) * PAGE_SIZE >= min(
            (first + count) // PAGE_SIZE * PAGE_SIZE, (len(text) - 1) // PAGE_SIZE * PAGE_SIZE
        )

    @rule(owner=TEXT_OWNERS, token=st.integers(0, 1), count=st.integers(1, 2 * PAGE_SIZE))
    def grow(self, owner, token, count):
        if owner in self.texts:
            tenant, text, keys = self.texts[owner]
            text = np.append(text, np.full(count, token, np.int32))
            self.texts[owner] = tenant, text, keys
            self.make_room(owner)

    @rule(owner=TEXT_OWNERS)
    def roll_back(self, owner):
        if owner in self.texts:
            self.arena.rollback(owner)
            self.make_room(owner)

    @rule(owner=TEXT_OWNERS)
    def release(self, owner):
        self.arena.release(owner)
        self.texts.pop(owner, None)

    @rule()
    def forget(self):
        if not self.texts:
            self.arena.forget()
            assert self.arena.num_known_pages == 0

    @invariant()
    def texts_are_their_own(self):
        self.arena.check_integrity()
        pages = set()
        for owner in self.texts:
            for place in range(self.arena.num_committed(owner)):
                assert self.memory[self.slot(owner, place)] == self.path(owner, place)
            pages |= set(self.arena.page_table(owner).tolist())
        assert self.arena.num_free_pages == NUM_PAGES - len(pages)


TestSharing = SharingMachine.TestCase
TestSharing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def fill(arena: KVArena, owner: str, text: np.ndarray, tenant: str = "") -> PageKeys:
    keys = PageKeys(tenant)
    arena.reserve(owner, len(text))
    arena.commit(owner, len(text))
    arena.publish(owner, keys, text)
    return keys


def test_pages_unused_for_longest_go_first_and_the_end_of_a_text_before_its_beginning():
    arena = KVArena(4 * EVICTED_SHARE)
    half = 2 * EVICTED_SHARE
    old, new = (np.arange(half * PAGE_SIZE, dtype=np.int32) + i for i in (0, 10**6))
    keys = {name: fill(arena, name, text) for name, text in (("old", old), ("new", new))}
    for name in ("old", "new"):
        arena.release(name)
    assert arena.num_known_pages == arena.num_free_pages == 2 * half
    assert arena.num_known(keys["old"], old) == half - 1  # never all of a text
    arena.reserve("x", 1)
    assert arena.num_known(keys["old"], old) == half - 4
    arena.adopt("again", keys["old"], old[: 2 * PAGE_SIZE + 1])  # two pages of "old" are in use
    arena.reserve("y", half * PAGE_SIZE)
    arena.check_integrity()
    assert arena.num_known(keys["old"], old) == 2
    assert arena.num_known(keys["new"], new) == half - 3
    assert runs(arena.page_table("again")) == 1
    assert runs(arena.page_table("y")) <= 3


def test_what_has_owners_is_never_given_up():
    arena = KVArena(4)
    text = np.arange(3 * PAGE_SIZE, dtype=np.int32)
    keys = fill(arena, "a", text)
    assert arena.adopt("b", keys, text) == 2 * PAGE_SIZE
    arena.reserve("b", PAGE_SIZE)
    arena.release("a")
    assert (arena.num_free_pages, arena.num_known_pages) == (1, 1)
    with pytest.raises(KVFull):
        arena.reserve("c", 2 * PAGE_SIZE)
    arena.reserve("c", PAGE_SIZE)  # takes the third page of "a", which nobody holds
    assert arena.num_known(keys, text) == 2
    arena.check_integrity()


def test_integrity_check_finds_a_page_that_is_shared_and_written_to():
    arena = KVArena(4)
    text = np.arange(PAGE_SIZE + 1, dtype=np.int32)
    keys = fill(arena, "a", text)
    arena.adopt("b", keys, text)
    arena.check_integrity()
    arena._holdings["b"].num_committed = 5
    with pytest.raises(AssertionError, match="of others"):
        arena.check_integrity()
