"""Lookups: longest match, batches, trees, tiers; compiled and plain give the same drafts."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_cases import texts, toy_table, write_table

from outrider.native import library
from outrider.tables import lookup as lookup_module
from outrider.tables.coverage import by_size, coverage, recommended
from outrider.tables.format import Table
from outrider.tables.lookup import COLD, HOT, NOWHERE, TableLookup
from outrider.tables.records import Settings
from outrider.tables.replay import Stream, replay

needs_native = pytest.mark.skipif(library() is None, reason="no C++ compiler")
EVERYTHING = Settings(min_value=0.0, num_ranks=4, min_share=0.0)
Drafts = list[tuple[list[int], list[int], list[int], list[float]]]


@pytest.fixture(params=["python", pytest.param("native", marks=needs_native)])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the compiled library and without."""
    if request.param == "python":
        monkeypatch.setattr("outrider.tables.lookup.library", lambda: None)


@pytest.fixture(scope="module")
def table() -> Table:
    return toy_table(texts(100, 200))


def drafts_of(lookup: TableLookup, contexts: list[list[int]], budgets: list[int]) -> Drafts:
    """Tokens, parents, cells and confidences after these contexts (the newest token last)."""
    n = len(contexts)
    lookup.make_room(n)
    lookup.contexts[:] = -1
    for row, context in enumerate(contexts):
        newest = context[: -lookup.max_key - 1 : -1]
        lookup.contexts[row, : len(newest)] = newest
    lookup.budgets[:n] = budgets
    found = lookup.draft(n)
    arrays = (found.tokens, found.parents, found.cells, found.confidence)
    return [tuple(a[i, : found.lengths[i]].tolist() for a in arrays) for i in range(n)]


def make(table: Table, width: int = 8, branches: int = 1, **options) -> TableLookup:
    return TableLookup(table.contents, table.confidence, width, branches, **options)


contexts = st.lists(st.lists(st.integers(0, 29), max_size=9), min_size=1, max_size=20)


@needs_native
@given(
    batch=contexts,
    width=st.integers(1, 12),
    branches=st.integers(1, 4),
    min_survival=st.sampled_from([0.0, 0.02, 0.3]),
    hot_bytes=st.sampled_from([0, 5000, 10**9]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_compiled_and_plain_drafts_are_the_same(
    table: Table,
    batch: list[list[int]],
    width: int,
    branches: int,
    min_survival: float,
    hot_bytes: int,
    data: st.DataObject,
) -> None:
    size = {"min_size": len(batch), "max_size": len(batch)}
    budgets = data.draw(st.lists(st.integers(0, 14), **size))
    options = {"min_survival": min_survival, "hot_bytes": hot_bytes}
    native = make(table, width, branches, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup_module, "library", lambda: None)
        plain = make(table, width, branches, **options)
    for lookup in (native, plain):
        lookup.make_room(len(batch))
        lookup.factors[:] = 1.3
    assert drafts_of(native, batch, budgets) == drafts_of(plain, batch, budgets)
    assert native.answered.tolist() == plain.answered.tolist()


def test_the_longest_match_wins_and_the_draft_goes_on_from_it(either: None) -> None:
    table = toy_table([[1, 2, 3, 4, 5, 6]] * 2 + [[9, 3, 8, 7]] * 5)
    lookup = make(table)
    assert drafts_of(lookup, [[2, 3], [3], [9, 3], [20]], [8] * 4) == [
        ([4, 5, 6], [-1, 0, 1], *drafts_of(lookup, [[2, 3]], [8])[0][2:]),
        ([8, 7], [-1, 0], *drafts_of(lookup, [[3]], [8])[0][2:]),
        ([8, 7], [-1, 0], *drafts_of(lookup, [[9, 3]], [8])[0][2:]),
        ([], [], [], []),
    ]


def test_more_branches_give_a_tree_of_the_likeliest_tokens(either: None) -> None:
    corpus = [[1, 2, 3, 4, 5]] * 6 + [[1, 2, 6, 7, 8]] * 3
    table = toy_table(corpus)
    (tokens, parents, _, confidence), *_ = drafts_of(make(table, 6, 2), [[1, 2]], [6])
    assert set(tokens) == {3, 4, 5, 6, 7, 8}
    above = {
        token: (tokens[p] if p >= 0 else None) for token, p in zip(tokens, parents, strict=True)
    }
    assert above == {3: None, 4: 3, 5: 4, 6: None, 7: 6, 8: 7}
    assert confidence[tokens.index(3)] > confidence[tokens.index(6)]
    survival = []
    for value, parent in zip(confidence, parents, strict=True):
        survival.append(value * (survival[parent] if parent >= 0 else 1))
    assert survival == sorted(survival, reverse=True)
    assert drafts_of(make(table, 6, 1), [[1, 2]], [6])[0][0] == [3, 4, 5]


def test_a_shorter_key_fills_up_the_branches(either: None) -> None:
    table = toy_table([[1, 2, 3]] * 2 + [[9, 2, 4]] * 5)
    (tokens, parents, cells, confidence), *_ = drafts_of(make(table, 2, 2), [[1, 2]], [2])
    assert (tokens, parents) == ([3, 4], [-1, -1])
    assert cells[0] >= 0 and cells[1] == -1  # its confidence is that of its key less the first's
    assert confidence[0] + confidence[1] <= 1


def test_budgets_survival_and_factors_cut_a_draft(either: None) -> None:
    table = toy_table([list(range(20))] * 3)
    lookup = make(table, 10)
    batch = drafts_of(lookup, [[0, 1]] * 3, [0, 3, 99])
    assert [len(draft[0]) for draft in batch] == [0, 3, 10]
    confidence = batch[2][3]
    strict = make(table, 10, min_survival=confidence[0] * confidence[1] * confidence[2])
    assert len(drafts_of(strict, [[0, 1]], [10])[0][0]) == 3
    lookup.factors[:] = 1.5
    lower = drafts_of(lookup, [[0, 1]], [10])[0][3]
    assert lower[0] == pytest.approx(1 - 1.5 * (1 - confidence[0]), rel=1e-5)


def test_tiers_give_the_same_drafts_and_count_who_answered(either: None, table: Table) -> None:
    rng = np.random.default_rng(3)
    batch = [(rng.zipf(1.6, 6) % 30).tolist() for _ in range(60)]
    size = table.contents.layout.bucket_bytes
    cold, mixed, hot = (make(table, 8, 2, hot_bytes=b) for b in (0, size // 10, size))
    expected = drafts_of(cold, batch, [8] * 60)
    assert drafts_of(mixed, batch, [8] * 60) == expected
    assert drafts_of(hot, batch, [8] * 60) == expected
    total = int(cold.answered.sum())
    assert cold.answered[HOT] == 0 and hot.answered[COLD] == 0
    assert cold.answered[NOWHERE] == mixed.answered[NOWHERE] == hot.answered[NOWHERE]
    assert mixed.answered.sum() == hot.answered.sum() == total
    assert mixed.answered[HOT] > 0.4 * total  # of a tenth of the bytes


def test_an_empty_context_has_no_draft(either: None, table: Table) -> None:
    assert drafts_of(make(table), [[]], [5]) == [([], [], [], [])]


def test_a_vocabulary_of_more_than_two_bytes(either: None) -> None:
    table = toy_table([[100_000, 65_536, 7, 131_071]] * 3, vocab_size=131_072)
    assert table.contents.layout.token_bytes == 3
    assert drafts_of(make(table), [[100_000]], [8])[0][0] == [65_536, 7, 131_071]


def test_absent_contexts_seldom_pass_the_filter() -> None:
    table = toy_table(texts(200, 200, vocab_size=1000), vocab_size=1000)
    lookup = make(table, width=1)
    rng = np.random.default_rng(9)
    absent = rng.integers(1000, 2000, (2000, 6)).tolist()
    assert all(not draft[0] for draft in drafts_of(lookup, absent, [1] * 2000))
    assert lookup.answered.tolist() == [0, 0, 2000]


# ---- replay and coverage


def stream(*parts: list[int]) -> Stream:
    tokens = np.concatenate([np.array([*part, -1], np.int32) for part in parts])
    return Stream(tokens, (tokens >= 0).astype(np.uint8))


def test_replay_counts_what_the_text_goes_on_with(either: None) -> None:
    table = toy_table([[1, 2, 3, 4, 5, 6, 7]] * 3)
    found = replay(make(table, 3), stream([1, 2, 3, 9, 5], [2, 3]))
    assert found.places.tolist() == [0, 1, 2, 3, 4, 6, 7]
    #                            nothing before 1; 2 3 of 2 3 4; 3 of 3 4 5; not 4; after 9 nothing
    assert found.accepted.tolist() == [0, 2, 1, 0, 0, 0, 1]
    assert found.first_is_right.tolist() == [False, True, True, False, False, False, True]
    assert (found.key_lengths > 0).tolist() == [False, True, True, True, False, False, True]


def test_replay_of_trees_counts_the_depth_reached(either: None) -> None:
    table = toy_table([[1, 2, 3, 4]] * 6 + [[1, 5, 6, 7]] * 4)
    text = stream([1, 5, 6, 7])
    assert replay(make(table, 6, 1), text).accepted.tolist()[1] == 0
    assert replay(make(table, 6, 2), text).accepted.tolist()[1] == 3


def test_coverage_by_key_and_by_size(tmp_path: Path) -> None:
    corpus = texts(300, 100, vocab_size=200, seed=4)
    table = write_table(tmp_path / "t.table", corpus[:-20], 200)
    held_out = stream(*(text.tolist() for text in corpus[-20:]))
    sizes = by_size(table, held_out)
    whole = sizes[0]
    assert whole.hit_rate > 0.9
    assert sum(key.hit_rate for key in whole.keys) == pytest.approx(whole.hit_rate)
    assert 1 < whole.acceptance_length < 2
    assert sizes[-1].num_bytes < whole.num_bytes / 2
    assert recommended(sizes).num_bytes <= whole.num_bytes
    known = coverage(
        table.contents, table.confidence, stream(*(t.tolist() for t in corpus[:20])), 1
    )
    assert known.acceptance_length > whole.acceptance_length
