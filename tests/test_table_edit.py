"""Tables made of tables: what a rewrite keeps, what it counts as lost, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from table_cases import texts, write_table

from outrider.errors import TableError
from outrider.tables import place as placing
from outrider.tables.build import TableBuilder
from outrider.tables.edit import entries_of, merge, num_contexts, prune, pruned
from outrider.tables.format import Table
from outrider.tables.place import SMALLEST, EntryStore, Placed, Sizing
from outrider.tables.records import Settings

LARGE = 10**9


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """A table with full buckets: some contexts found no room already."""
    path = tmp_path_factory.mktemp("tables") / "full.table"
    table = write_table(path, texts(150, 200, 3000), 3000)
    assert table.header["left_out"]["full_buckets"] > 100
    return table


def contexts_of(table: Table) -> list[Any]:
    entries = entries_of(table.contents, table.contents.layout.hash_bits)
    return entries[["key", "token", "count", "total"]].tolist()


def test_a_prune_that_drops_nothing_changes_nothing(full: Table, tmp_path: Path) -> None:
    size = full.path.stat().st_size
    table = full
    for step, options in enumerate([{"max_bytes": LARGE}, {"min_count": 1}, {"max_bytes": size}]):
        path = tmp_path / f"{step}.table"
        prune(table, path, {"command": "prune"}, **options)
        table = Table(path)
        assert contexts_of(table) == contexts_of(full)
        for key in ("num_contexts", "num_slots", "contexts_by_length", "confidence", "regions"):
            assert table.header[key] == full.header[key]
        assert not any(table.header["left_out"].values())
    assert pruned(full.contents).num_contexts == full.header["num_contexts"]


def test_a_prune_done_twice_is_one_done_once(full: Table, tmp_path: Path) -> None:
    for name, options in (("a", {"min_count": 3}), ("b", {"max_bytes": 60_000})):
        once, twice = tmp_path / f"{name}1.table", tmp_path / f"{name}2.table"
        prune(full, once, {}, **options)
        prune(Table(once), twice, {}, **options)
        assert contexts_of(Table(once)) == contexts_of(Table(twice))


def test_where_little_is_dropped_buckets_stay_and_nothing_else_is_lost(full: Table) -> None:
    entries = entries_of(full.contents, full.contents.layout.hash_bits)
    store = EntryStore()
    store.add(entries[entries["key"] >> np.uint64(8) != entries["key"][0] >> np.uint64(8)])
    layout = full.contents.layout
    sizing = Sizing(None, placing.ROOMY_LOAD, layout.regions)
    placed = placing.place(store, layout.key_lengths, layout.token_bytes, sizing, layout.hash_bits)
    assert placed.contents.layout.regions == layout.regions
    assert (placed.num_contexts, placed.num_overflowed) == (full.header["num_contexts"] - 1, 0)


def test_contexts_lost_are_counted_by_reason(full: Table, tmp_path: Path) -> None:
    for options in ({"min_count": 3}, {"max_bytes": 60_000}, {"min_count": 2, "max_bytes": 40_000}):
        placed = prune(full, tmp_path / "t.table", {}, **options)
        left_out = Table(tmp_path / "t.table").header["left_out"]
        assert placed.left_out.items() <= left_out.items()
        assert placed.num_contexts + sum(left_out.values()) == full.header["num_contexts"]
        assert (left_out["min_count"] > 0) == ("min_count" in options)
        assert left_out["max_bytes"] > 0 or "max_bytes" not in options
        assert left_out["full_buckets"] < 0.1 * placed.num_contexts


def test_a_small_table_costs_a_large_one_next_to_nothing(full: Table, tmp_path: Path) -> None:
    small = write_table(tmp_path / "small.table", texts(1, 30, 3000, seed=5), 3000)
    for order in ((full, small), (small, full)):
        merge(*order, tmp_path / "both.table", {})
        header = Table(tmp_path / "both.table").header
        assert header["num_contexts"] >= 0.998 * full.header["num_contexts"]
        assert header["left_out"]["full_buckets"] <= small.header["num_contexts"]
        assert header["regions"] == full.header["regions"]


def test_a_maximum_takes_from_all_buckets_alike(full: Table) -> None:
    # All of one value: what is left is a share of the contexts, by hash, and not its lower end.
    entries = entries_of(full.contents, full.contents.layout.hash_bits)
    entries["value"] = 16_000
    kept = placing._Cut(16_000, 0.5).kept(entries)
    assert num_contexts(kept) == pytest.approx(num_contexts(entries) / 2, rel=0.05)
    halves = np.bincount((kept["key"] >> np.uint64(47)).astype(np.int64), minlength=2)
    assert halves[0] == pytest.approx(halves[1], rel=0.1)


def test_a_maximum_above_the_whole_keeps_the_whole(tmp_path: Path) -> None:
    corpus = texts(2, 40)
    whole = write_table(tmp_path / "whole.table", corpus)
    size = whole.path.stat().st_size
    assert size < SMALLEST
    for most in (size + 4096, SMALLEST, LARGE):
        table = write_table(tmp_path / "t.table", corpus, max_bytes=most)
        assert table.header["num_contexts"] == whole.header["num_contexts"] > 0
        assert table.path.stat().st_size <= most


@pytest.mark.parametrize("most", [14_000, 16_384, 20_480, 25_000, 33_333, 70_001])
def test_a_maximum_is_kept_and_used(full: Table, tmp_path: Path, most: int) -> None:
    built = write_table(tmp_path / "b.table", texts(150, 200, 3000), 3000, max_bytes=most)
    prune(full, tmp_path / "p.table", {}, max_bytes=most)
    for table in (built, Table(tmp_path / "p.table")):
        assert 0.6 * most < table.path.stat().st_size <= most
        assert table.header["num_contexts"] > 50


# ---- what is refused


def test_nothing_left_is_refused_with_the_reason(full: Table, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no context is left with min_count=2000000"):
        prune(full, tmp_path / "t.table", {}, min_count=2_000_000)
    with TableBuilder(30, "toy", Settings(min_count=99)) as builder:
        builder.add(np.arange(20, dtype=np.int32))
        with pytest.raises(TableError, match=r"20 tokens .* min_count=99 times"):
            builder.finish(tmp_path / "t.table", {})
    assert list(tmp_path.iterdir()) == []


def test_damaged_inputs_are_not_laundered(full: Table, tmp_path: Path) -> None:
    whole = bytearray(full.path.read_bytes())
    whole[-200] ^= 1
    (tmp_path / "damaged.table").write_bytes(whole)
    damaged = Table(tmp_path / "damaged.table")
    for edit in (
        lambda path: prune(damaged, path, {}, max_bytes=LARGE),
        lambda path: merge(full, damaged, path, {}),
        lambda path: merge(damaged, full, path, {}),
    ):
        with pytest.raises(TableError, match=r"damaged\.table is damaged: its buckets"):
            edit(tmp_path / "new.table")
    assert not (tmp_path / "new.table").exists()


def test_tables_of_two_vocabularies_are_not_merged(tmp_path: Path) -> None:
    ours = write_table(tmp_path / "a.table", texts(2), 30)
    theirs = write_table(tmp_path / "b.table", texts(2), 31)
    with pytest.raises(TableError, match=r"30 token ids, .* 31: only tables of one vocabulary"):
        merge(ours, theirs, tmp_path / "c.table", {})


def test_a_place_that_cannot_be_written_is_told_before_the_work(
    full: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any) -> Placed:
        raise AssertionError("worked before it looked")

    monkeypatch.setattr("outrider.tables.edit.entries_of", unreachable)
    monkeypatch.setattr("outrider.tables.build.place", unreachable)
    (tmp_path / "text.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "no" / "t.table", tmp_path / "text.txt"):
        with pytest.raises(TableError, match="cannot write"):
            prune(full, path, {}, max_bytes=LARGE)
        with pytest.raises(TableError, match="cannot write"):
            merge(full, full, path, {})
        with TableBuilder(30, "toy") as builder:
            builder.add(np.arange(20, dtype=np.int32))
            with pytest.raises(TableError, match="cannot write"):
                builder.finish(path, {})


@pytest.mark.parametrize("provenance", [{"a": {1}}, {"a": float("nan")}, [], "made", None])
def test_provenance_must_be_json(full: Table, tmp_path: Path, provenance: Any) -> None:
    with pytest.raises(TableError, match="provenance must be an object that JSON can hold"):
        prune(full, tmp_path / "t.table", provenance, max_bytes=LARGE)
    with TableBuilder(30, "toy") as builder:
        builder.add(np.arange(20, dtype=np.int32))
        with pytest.raises(TableError, match="provenance must be an object that JSON can hold"):
            builder.finish(tmp_path / "t.table", provenance)


@pytest.mark.parametrize("most", ["15M", 1.5, True, 0, -1])
def test_a_maximum_must_be_a_number_of_bytes(full: Table, tmp_path: Path, most: Any) -> None:
    with pytest.raises(TableError, match="max_bytes must be an integer"):
        prune(full, tmp_path / "t.table", {}, max_bytes=most)
    with pytest.raises(TableError, match="max_bytes must be an integer"):
        write_table(tmp_path / "t.table", texts(2), max_bytes=most)


# ---- where a table is from


def test_inputs_are_named_one_level_deep(full: Table, tmp_path: Path) -> None:
    table, sizes = full, []
    for step in range(4):
        path = tmp_path / f"{step}.table"
        stamp = {"command": f"step {step}", "pruned": table.provenance}
        prune(table, path, stamp, min_count=step + 2)
        table = Table(path)
        sizes.append(len(json.dumps(table.provenance)))
    assert max(sizes) < 1000
    (origin,) = table.provenance["inputs"]
    before = Table(tmp_path / "2.table")
    assert origin["command"] == "step 2" and origin["path"].endswith("2.table")
    assert origin["num_contexts"] == before.header["num_contexts"]
    assert origin["crc32"] == before.header["buckets"]["crc32"]
    first = Table(tmp_path / "0.table").provenance["inputs"][0]
    assert first["contexts_by_length"] == full.header["contexts_by_length"]
