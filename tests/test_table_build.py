"""What a build keeps: counts, values, memory, files; with the compiled library and without."""

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_cases import texts, write_table

from outrider.errors import TableError
from outrider.native import library
from outrider.tables import hashing, plain
from outrider.tables.build import HELD_OUT, MIN_MEMORY, TableBuilder
from outrider.tables.edit import entries_of, merge, prune, pruned
from outrider.tables.format import Table
from outrider.tables.records import Run, Scan, Settings, bits_for, sort_entries, sorted_windows
from outrider.tables.samples import continuation, frequent_starts

needs_native = pytest.mark.skipif(library() is None, reason="no C++ compiler")
EVERYTHING = Settings(min_value=0.0, num_ranks=4, min_share=0.0)


@pytest.fixture(params=["python", pytest.param("native", marks=needs_native)])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the compiled library and without."""
    if request.param == "python":
        for module in ("build", "records", "place", "lookup"):
            monkeypatch.setattr(f"outrider.tables.{module}.library", lambda: None)


def stream_of(corpus: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.concatenate([np.append(text, -1) for text in corpus]).astype(np.int32)
    return tokens, (tokens >= 0).astype(np.uint8)


def compiled_entries(
    tokens: np.ndarray, counted: np.ndarray, vocab_size: int, chosen: Settings, num_runs: int = 1
) -> np.ndarray:
    pieces = np.array_split(np.arange(len(tokens)), num_runs)
    windows = [
        sorted_windows(tokens[p], counted[p], bits_for(vocab_size)) for p in pieces if len(p)
    ]
    scan = Scan(chosen, [Run(w, len(w)) for w in windows], vocab_size)
    return sort_entries(scan.entries(scan.pieces(5)))


small_texts = st.lists(st.lists(st.integers(0, 4), max_size=25), min_size=1, max_size=6)
chosen_settings = st.builds(
    Settings,
    key_lengths=st.sets(st.integers(1, 6), min_size=1).map(lambda s: tuple(sorted(s))),
    min_count=st.integers(1, 3),
    min_value=st.sampled_from([0.0, 0.1, 0.3, 2.0]),
    num_ranks=st.integers(1, 4),
    min_share=st.sampled_from([0.0, 0.1, 0.4]),
)


@needs_native
@given(corpus=small_texts, chosen=chosen_settings, vocab_size=st.sampled_from([5, 300, 2_000_000]))
@settings(max_examples=40, deadline=None)
def test_compiled_and_plain_entries_are_the_same(
    corpus: list[list[int]], chosen: Settings, vocab_size: int
) -> None:
    tokens, counted = stream_of([np.array(text, np.int32) for text in corpus])
    counted[::7] = 0
    found = compiled_entries(tokens, counted, vocab_size, chosen)
    expected = sort_entries(plain.entries_of(tokens, counted, chosen))
    assert found.tolist() == expected.tolist()


def test_entries_are_the_counts_of_the_text() -> None:
    tokens, counted = stream_of([np.array([1, 2, 3, 1, 2, 3, 1, 2, 4], np.int32)])
    entries = plain.entries_of(tokens, counted, EVERYTHING)
    found = {}
    for context in ([1], [2], [1, 2], [3, 1, 2], [4]):
        hashed = int(hashing.context_hashes(np.array([context[::-1]], np.int32))[0, -1])
        mine = entries[entries["key"] >> np.uint64(8) == hashed]
        found[tuple(context)] = [(e["token"], e["count"], e["total"]) for e in mine]
    assert found == {
        (1,): [(2, 3, 3)],
        (2,): [(3, 2, 3), (4, 1, 3)],
        (1, 2): [(3, 2, 3), (4, 1, 3)],
        (3, 1, 2): [(3, 1, 2), (4, 1, 2)],
        (4,): [],
    }


def test_a_longer_context_that_adds_nothing_is_left_out() -> None:
    always = [np.array([5, 1, 2, 6, 1, 2, 7, 1, 2] * 3, np.int32)]  # after 1 comes 2, whatever
    tokens, counted = stream_of(always)
    entries = plain.entries_of(tokens, counted, Settings(key_lengths=(1, 2), min_value=0.3))
    after_one = [
        int(hashing.context_hashes(np.array([context], np.int32))[0, -1])
        for context in ([1], [1, 5], [1, 6], [1, 7])  # the newest token first
    ]
    kept = set((entries["key"] >> np.uint64(8)).tolist())
    assert [hashed in kept for hashed in after_one] == [True, False, False, False]


def test_texts_do_not_run_into_each_other(either: None, tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.table", [[1, 2], [3, 4], [1, 2]], settings=EVERYTHING)
    assert continuation(table, [1], 3)[0] == [2]
    assert continuation(table, [2], 3)[0] == []


def test_tokens_that_are_only_context_are_not_counted(either: None, tmp_path: Path) -> None:
    with TableBuilder(30, "toy", EVERYTHING, MIN_MEMORY) as builder:
        builder.add(np.array([1, 2, 3, 4], np.int32), np.array([False, False, True, True]))
        builder.finish(tmp_path / "t.table", {})
    table = Table(tmp_path / "t.table")
    assert continuation(table, [1], 3)[0] == []
    assert continuation(table, [1, 2], 3)[0] == [3, 4]


def test_a_table_answers_as_its_text_went_on(either: None, tmp_path: Path) -> None:
    sentence = list(range(10, 25))
    table = write_table(tmp_path / "t.table", [sentence] * 5)
    ids, survival = continuation(table, sentence[:3], 8)
    assert ids == sentence[3:11]
    assert survival[0] > 0.6 and survival == sorted(survival, reverse=True)
    assert set(frequent_starts(table, 20)) <= set(sentence[:-1])


@needs_native
def test_the_file_is_the_same_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = texts(20, 60)
    write_table(tmp_path / "native.table", corpus)
    for module in ("build", "records", "place", "lookup"):
        monkeypatch.setattr(f"outrider.tables.{module}.library", lambda: None)
    write_table(tmp_path / "plain.table", corpus)
    assert (tmp_path / "native.table").read_bytes() == (tmp_path / "plain.table").read_bytes()


@needs_native
def test_a_build_from_disk_gives_the_same_file(tmp_path: Path) -> None:
    corpus = texts(60, 100)
    write_table(tmp_path / "memory.table", corpus)
    with TableBuilder(30, "toy", None, MIN_MEMORY, tmp_path) as builder:
        builder._most_pending, builder.memory = 700, 300_000
        for text in corpus:
            builder.add(text)
        assert len(builder._runs) > 6
        builder.finish(tmp_path / "disk.table", {"command": "a test", "seed": 1})
    assert (tmp_path / "memory.table").read_bytes() == (tmp_path / "disk.table").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk.table", "memory.table"]


@needs_native
def test_a_temporary_file_that_is_cut_is_noticed(tmp_path: Path) -> None:
    with TableBuilder(30, "toy", None, MIN_MEMORY, tmp_path) as builder:
        builder._most_pending = 700
        for text in texts(60, 100):
            builder.add(text)
        assert list(tmp_path.iterdir()) == []  # nothing to leave behind, however this ends
        run = builder._runs[1].file
        os.ftruncate(run, os.fstat(run).st_size - 5)
        with pytest.raises(TableError, match="cannot read temporary files"):
            builder.finish(tmp_path / "t.table", {})
    assert list(tmp_path.iterdir()) == []


@needs_native
@pytest.mark.parametrize("num_runs", [2, 5])
def test_runs_merge_to_the_same_entries(num_runs: int) -> None:
    # Cut between texts, so that no window is lost.
    corpus = texts(20, 50, vocab_size=8)
    whole = compiled_entries(*stream_of(corpus), 8, Settings())
    parts = [corpus[i::num_runs] for i in range(num_runs)]
    windows = [sorted_windows(*stream_of(part), bits_for(8)) for part in parts]
    scan = Scan(Settings(), [Run(w, len(w)) for w in windows], 8)
    assert sort_entries(scan.entries(scan.pieces(3))).tolist() == whole.tolist()


def test_a_maximum_size_is_kept_and_takes_what_is_worth_least(tmp_path: Path) -> None:
    corpus = texts(300, 100, vocab_size=300)
    whole = write_table(tmp_path / "whole.table", corpus, 300)
    small = write_table(tmp_path / "small.table", corpus, 300, max_bytes=60_000)
    assert whole.num_bytes > 100_000
    assert 45_000 < small.num_bytes <= 60_000
    assert small.header["num_contexts"] < whole.header["num_contexts"]
    most_frequent = Counter(token for text in corpus for token in text[:-1].tolist())
    start = most_frequent.most_common(1)[0][0]
    assert continuation(small, [start], 1)[0] == continuation(whole, [start], 1)[0]


def test_confidence_is_calibrated_on_texts_kept_out(tmp_path: Path) -> None:
    # Text that is learnt by heart, except that what is held out goes on differently.
    def text(index: int) -> list[int]:
        return [1, 2, 3, 4, 9] * 20 if index % HELD_OUT else [1, 2, 3, 5, 9] * 20

    table = write_table(tmp_path / "t.table", [text(i) for i in range(1, 4 * HELD_OUT + 1)])
    assert continuation(table, [1, 2, 3], 1)[0] == [4]
    after_two, after_three = (continuation(table, ids, 1)[1][0] for ids in ([1, 2], [1, 2, 3]))
    assert after_two == after_three  # one class: what it is worth is learnt for the class
    assert 0.7 < after_two < 0.85  # four of five


def taken(token_ids: Any, counted: Any = None) -> int:
    with TableBuilder(30, "toy") as builder:
        builder.add(token_ids, counted)
        return builder.num_tokens


@pytest.mark.parametrize(
    "token_ids",
    [np.array([-1, 2]), np.array([3, 30]), np.array([1 << 40]), np.array([2**63], np.uint64)],
)
def test_ids_outside_the_vocabulary_are_refused(token_ids: np.ndarray) -> None:
    with pytest.raises(TableError, match=r"in \[0, 30\), got"):
        taken(token_ids)


@pytest.mark.parametrize(
    "token_ids",
    [
        *([1, 2], (), "12", None, 5, {1: 2}),
        *(np.array([1.0, 2.0]), np.array([float("nan")]), np.array([]), np.array(["1"])),
        *(np.array([True, False]), np.array([[1, 2]]), np.array(5), np.array([1, None])),
    ],
)
def test_what_is_no_array_of_ids_is_refused(token_ids: Any) -> None:
    with pytest.raises(TableError, match="must be a one-dimensional array of integers, got"):
        taken(token_ids)


@pytest.mark.parametrize(
    "counted",
    [
        *([True] * 3, "abc", 1, np.ones(2, bool), np.ones(4, bool), np.ones((3, 1), bool)),
        *(np.ones(3), np.ones(3, np.int64), np.array(["a"] * 3), np.array([], bool)),
    ],
)
def test_a_mask_that_does_not_fit_its_ids_is_refused(counted: Any) -> None:
    with pytest.raises(TableError, match=r"counted must be an array of 3 bools, .* got"):
        taken(np.array([1, 2, 3]), counted)


def test_ids_of_any_integer_type_are_taken(tmp_path: Path) -> None:
    for kind in (np.int8, np.uint16, np.int64, np.uint64):
        assert taken(np.array([1, 2, 3], kind), np.array([True, False, True])) == 3
    assert taken(np.array([], np.int32)) == 0


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"key_lengths": lengths}
            for lengths in ((), (0,), (7,), (2, 1), (1, 1), ("1",), 3, None)
        ),
        *({"key_lengths": lengths} for lengths in ((1.5,), (True,), "12", {1, 2})),
        *({"min_count": count} for count in (0, -1, 1 << 31, 4294967297, 1.5, "2", None, True)),
        *({"num_ranks": ranks} for ranks in (0, 5, None, 2.0)),
        *({"min_value": value} for value in (-1, float("nan"), float("inf"), "0", None, 10**400)),
        *({"min_share": share} for share in (-0.1, 1.1, float("nan"), None, True)),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TableError, match=next(iter(options))):
        Settings(**options)


def test_a_builder_is_finished_once(tmp_path: Path) -> None:
    with TableBuilder(30, "toy") as builder:
        builder.add(np.arange(20))
        with pytest.raises(TableError, match="no directory"):
            builder.finish(tmp_path / "no" / "t.table", {})  # nothing is lost by that
        built = builder.finish(str(tmp_path / "t.table"), {})
        assert built.path == tmp_path / "t.table" and built.num_contexts > 0
        with pytest.raises(TableError, match="is finished"):
            builder.finish(tmp_path / "again.table", {})
        with pytest.raises(TableError, match="is finished"):
            builder.add(np.arange(20))


@needs_native
@pytest.mark.parametrize("most_pending", [7, 100, 999, 5000])
def test_a_long_text_is_cut_without_loss(tmp_path: Path, most_pending: int) -> None:
    corpus = [np.concatenate(texts(30, 100)), *texts(HELD_OUT + 2, 40, seed=3)]
    masks = [np.random.default_rng(i).random(len(t)) < 0.8 for i, t in enumerate(corpus)]
    files = []
    for cut in (10**9, most_pending):
        with TableBuilder(30, "toy", None, MIN_MEMORY, tmp_path) as builder:
            builder._most_pending = cut
            for text, mask in zip(corpus, masks, strict=True):
                builder.add(text, mask)
                assert all(len(piece) <= cut + 7 for piece in builder._pending)
            builder.finish(tmp_path / f"{cut}.table", {})
        files.append((tmp_path / f"{cut}.table").read_bytes())
    assert files[0] == files[1]


def test_no_more_of_a_text_is_held_out_than_calibration_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.tables.build.MAX_HELD_OUT", 50)
    with TableBuilder(30, "toy") as builder:
        for _ in range(HELD_OUT):
            builder.add(np.arange(20).repeat(5))
        assert [len(tokens) for tokens, _ in builder._held_out] == [51]  # and the end of the text
        assert builder._num_pending == 100 * HELD_OUT - 50


def test_impossible_builds_are_refused(tmp_path: Path) -> None:
    for wrong in (0, -5, None, "30", 30.0):
        with pytest.raises(TableError, match="vocab_size"):
            TableBuilder(wrong, "toy")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TableError, match="got 3000000"):
        TableBuilder(3_000_000, "toy")
    with pytest.raises(TableError, match=f"at least {MIN_MEMORY} bytes of memory, got 5"):
        TableBuilder(30, "toy", memory=5)
    with TableBuilder(30, "toy") as builder, pytest.raises(TableError, match="no tokens"):
        builder.finish(tmp_path / "t.table", {})
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(TableError, match=rf"temporary files in .*{name}: .*--temporary"):
            TableBuilder(30, "toy", directory=tmp_path / name)
    with pytest.raises(TableError, match=r"at least \d+ bytes, the maximum is 99"):
        write_table(tmp_path / "t.table", texts(1), max_bytes=99)
    assert not list(tmp_path.glob("*.table"))


# ---- merge and prune


def lookups(table: Table, contexts: Iterator[list[int]]) -> list[list[int]]:
    return [continuation(table, context, 1)[0] for context in contexts]


@pytest.mark.parametrize("same_size", [True, False])
def test_merged_counts_are_those_of_both(tmp_path: Path, same_size: bool) -> None:
    corpus = texts(60, 100, vocab_size=12)
    cut = 30 if same_size else 58  # tables of different sizes know different bits of a hash
    parts = [corpus[:cut], corpus[cut:]]
    tables = [
        write_table(tmp_path / f"{i}.table", part, 12, EVERYTHING) for i, part in enumerate(parts)
    ]
    merge(tables[0], tables[1], tmp_path / "merged.table", {"merged": 2})
    merged = Table(tmp_path / "merged.table")
    merged.verify()
    assert merged.provenance["merged"] == 2
    for token in range(12):
        follow = Counter(
            int(b) for part in parts for i, text in enumerate(part)
            if (i + 1) % HELD_OUT for a, b in itertools.pairwise(text) if a == token
        )  # fmt: skip
        if follow:
            best = max(follow.values())
            (found,) = continuation(merged, [token], 1)[0]
            assert follow[found] >= 0.85 * best  # counts are known to one part in sixteen


def test_a_table_merged_with_itself_counts_double(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.table", texts(20, 60, 8), 8, EVERYTHING)
    merge(table, table, tmp_path / "double.table", {})
    bits = table.contents.layout.hash_bits
    single = entries_of(table.contents, bits)
    double = entries_of(Table(tmp_path / "double.table").contents, bits)
    small = single["total"] < 16  # doubled they are still exact
    by_key = dict(zip(zip(double["key"] >> np.uint64(8), double["token"], strict=True),
                      zip(double["count"], double["total"], strict=True), strict=True))  # fmt: skip
    num_lost = 0
    for entry in single[small]:
        found = by_key.get((entry["key"] >> np.uint64(8), entry["token"]))
        num_lost += found is None  # its bucket overflows now
        assert found in (None, (2 * entry["count"], 2 * entry["total"]))
    assert num_lost < 0.1 * small.sum()


def test_the_first_table_can_be_preferred(tmp_path: Path) -> None:
    ours = write_table(tmp_path / "ours.table", [[1, 2, 3]] * 2, settings=EVERYTHING)
    theirs = write_table(tmp_path / "theirs.table", [[1, 4, 5]] * 9, settings=EVERYTHING)
    merge(ours, theirs, tmp_path / "added.table", {})
    merge(ours, theirs, tmp_path / "preferred.table", {}, prefer_first=True)
    assert continuation(Table(tmp_path / "added.table"), [1], 1)[0] == [4]
    assert continuation(Table(tmp_path / "preferred.table"), [1], 1)[0] == [2]
    assert continuation(Table(tmp_path / "preferred.table"), [4], 1)[0] == [5]


def test_tables_of_two_tokenizers_are_not_merged(tmp_path: Path) -> None:
    ours = write_table(tmp_path / "a.table", texts(2))
    theirs = write_table(tmp_path / "b.table", texts(2), fingerprint="other")
    with pytest.raises(TableError, match=r"toy, .*other: only tables of one tokenizer"):
        merge(ours, theirs, tmp_path / "c.table", {})


def test_prune_by_count_and_by_size(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.table", texts(100, 100, 300), 300)
    prune(table, tmp_path / "counted.table", {}, min_count=3)
    counted = Table(tmp_path / "counted.table")
    entries = entries_of(counted.contents, counted.contents.layout.hash_bits)
    assert entries["total"].min() == 3
    prune(table, tmp_path / "sized.table", {}, max_bytes=50_000)
    assert 35_000 < (tmp_path / "sized.table").stat().st_size <= 50_000
    assert pruned(table.contents).num_slots == table.header["num_slots"]


# ---- numbers


@given(st.lists(st.integers(0, 600_000), min_size=1))
def test_counts_in_a_byte_are_close_and_keep_their_order(counts: list[int]) -> None:
    values = np.array(sorted(counts))
    read = hashing.unpacked(hashing.packed(values))
    assert (np.diff(read) >= 0).all()
    small = values < 1 << 19
    assert (read[small] <= values[small]).all()
    assert (read[small] > values[small] * 15 / 16 - 1).all()
    assert (read[values < 32] == values[values < 32]).all()


@given(st.integers(16, 1 << 24), st.integers(0, 2**40 - 1))
def test_a_hash_is_read_back_from_its_place(num_buckets: int, value: int) -> None:
    bits = hashing.hash_bits_for(num_buckets)
    hashes = np.array([value >> (40 - bits)], np.uint64)
    buckets, tags = hashing.places_of(hashes, bits, num_buckets)
    assert buckets[0] < num_buckets and tags[0] < 1 << 24
    assert hashing.hashes_at(buckets, tags, bits, num_buckets).tolist() == hashes.tolist()
