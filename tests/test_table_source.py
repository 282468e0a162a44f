"""The table as a draft source: refusals, learning, and how a config or "auto" finds one."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import FakeTarget
from table_cases import texts, toy_table, write_table

from outrider.drafting.build import build_sources
from outrider.drafting.source import Draft, DraftContext, Outcome
from outrider.drafting.table import TableSource
from outrider.engine.drafts import subset
from outrider.errors import ConfigError, TableError, TokenizerMismatch
from outrider.sampling_params import SamplingParams

CORPUS = [[1, 2, 3, 4, 5, 6]] * 6 + [[1, 2, 7, 8, 9, 6]] * 3


def context(tokens: list[int], request_id: str = "r") -> DraftContext:
    return DraftContext(request_id, np.array(tokens, np.int32), 1, SamplingParams())


def propose(source: TableSource, tokens: list[int], budget: int = 8) -> Draft:
    (draft,) = source.propose([context(tokens)], [budget])
    draft.check()
    return draft


def test_a_batch_of_chains_with_confidence() -> None:
    source = TableSource(toy_table(CORPUS), num_speculative_tokens=4, branches=1)
    drafts = source.propose(
        [context([1, 2], "a"), context([29], "b"), context([3], "c")], [9, 9, 1]
    )
    assert [draft.token_ids for draft in drafts] == [[3, 4, 5, 6], [], [4]]
    assert drafts[0].source == "table" and not drafts[0].is_tree
    assert all(0 < value < 1 for value in drafts[0].confidence)
    assert sum(source.answered) == 4 + 1 + 1
    assert source.answered[2] == 1


def test_trees_and_what_is_learnt_from_parts_of_them() -> None:
    source = TableSource(toy_table(CORPUS), branches=2, min_survival=0.0)
    draft = propose(source, [1, 2])
    assert draft.is_tree and set(draft.token_ids) == {3, 4, 5, 6, 7, 8, 9}
    third, seventh = draft.token_ids.index(3), draft.token_ids.index(7)
    before = {token: draft.confidence[draft.token_ids.index(token)] for token in (3, 7)}
    submitted = subset(draft, sorted([third, seventh]))
    for _ in range(100):
        propose(source, [1, 2])
        source.observe([Outcome("r", submitted, 1, [7, 8])])
    after = propose(source, [1, 2])
    found = {token: after.confidence[after.token_ids.index(token)] for token in (3, 7)}
    assert found[3] < before[3] / 2
    assert found[7] > before[7]


def test_a_request_that_fails_is_believed_less_and_others_are_not() -> None:
    source = TableSource(toy_table(CORPUS), branches=1)
    first = propose(source, [1, 2])
    for _ in range(6):
        draft = propose(source, [1, 2])
        source.observe([Outcome("r", draft, 0, [25])])
    (other,) = source.propose([context([1, 2], "other")], [8])
    mine = propose(source, [1, 2])
    assert mine.confidence[0] < other.confidence[0] < first.confidence[0]
    source.release("r")
    source.release("r")
    assert propose(source, [1, 2]).confidence[0] == other.confidence[0]


def test_an_outcome_of_no_draft_of_ours_teaches_nothing() -> None:
    source = TableSource(toy_table(CORPUS), branches=1)
    before = propose(source, [1, 2]).confidence
    source.observe([Outcome("gone", Draft([3]), 0, [9])])
    source.observe([Outcome("r", Draft([28, 3]), 0, [9])])
    assert propose(source, [1, 2]).confidence == before


def test_a_draft_cut_by_the_end_of_the_text_counts_no_failure() -> None:
    source = TableSource(toy_table(CORPUS), branches=1)
    draft = propose(source, [1, 2], budget=2)
    source.observe([Outcome("r", draft, 1, [3])])  # no bonus token: the request ended here
    request = source._requests["r"]
    assert request.failures <= request.expected


def test_another_vocabulary_is_refused_with_both_fingerprints() -> None:
    source = TableSource(toy_table(CORPUS))
    source.bind(FakeTarget(30), SimpleNamespace(fingerprint="toy"), 4)
    source.bind(FakeTarget(30), None, 4)
    with pytest.raises(TokenizerMismatch, match="the tokenizer toy, the target's is other"):
        source.bind(FakeTarget(30), SimpleNamespace(fingerprint="other"), 4)
    with pytest.raises(TokenizerMismatch, match="30 token ids, the target has 20"):
        source.bind(FakeTarget(20), None, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"branches": 0}, "branches"),
        ({"branches": 9}, "at most 64 tokens with 4 branches"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens=65"),
        *(({"min_survival": value}, "min_survival") for value in (2.0, "0.1", None, True)),
        ({"hot_bytes": -1}, "hot_bytes"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TableSource(toy_table(CORPUS), **options)


# ---- config


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where tables are looked for: nowhere else."""
    found = tmp_path / "tables"
    found.mkdir()
    monkeypatch.setattr("outrider.tables.find.directories", lambda: iter([found]))
    monkeypatch.setattr("outrider.drafting.methods.directories", lambda: iter([found]))
    return found


def built(config: Any, fingerprint: str | None = "toy", rule: str | None = None) -> list[Any]:
    tokenizer = None if fingerprint is None else SimpleNamespace(fingerprint=fingerprint)
    return build_sources(config, rule=rule, tokenizer=tokenizer)


def test_auto_takes_a_table_made_for_the_tokenizer(directory: Path) -> None:
    write_table(directory / "a.table", texts(2), fingerprint="another")
    names = [source.name for source in built("auto")]
    assert names == ["lookup", "predicted", "forced"]
    write_table(directory / "b.table", texts(2))
    assert [source.name for source in built("auto")] == [*names, "table"]
    assert [source.name for source in built("auto", "unknown")] == names
    assert [source.name for source in built("auto", None)] == names


def test_auto_passes_over_a_damaged_table_with_a_warning(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "a.table").write_bytes(b"ORTABLE\n, but no more")
    write_table(directory / "b.table", texts(2))
    with caplog.at_level(logging.WARNING, "outrider"):
        assert built("auto")[-1].table.path.name == "b.table"
    assert "a.table is not a draft table" in caplog.text


@pytest.mark.parametrize("key", ["path", "model"])
def test_a_table_is_named_or_found(directory: Path, tmp_path: Path, key: str) -> None:
    named = tmp_path / "named.table"
    write_table(named, texts(2))
    config = {"method": "table", key: str(named), "num_speculative_tokens": 5, "branches": 3}
    (source,) = built(config)
    assert (source.table.path, source.max_draft_tokens) == (named, 5)
    assert source._lookup.branches == 3
    with pytest.raises(ConfigError, match=r"no draft table for the tokenizer toy in .*tables"):
        built({"method": "table"})
    write_table(directory / "b.table", texts(2))
    (found,) = built({"method": "table"})
    assert found.table.path.name == "b.table"


def test_block_verification_gets_chains(directory: Path) -> None:
    write_table(directory / "b.table", texts(2))
    assert built("auto", rule="block")[-1]._lookup.branches == 1
    assert built({"method": "table"}, rule="block")[0]._lookup.branches == 1
    assert built("auto")[-1]._lookup.branches == 2


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"path": "missing.table"}, TableError, r"missing\.table: No such file"),
        ({"path": "a", "model": "b"}, ConfigError, "got both"),
        ({"pathh": "a"}, ConfigError, "did you mean 'path'"),
        ({"path": 3}, ConfigError, "path of a file, got 3"),
    ],
)
def test_a_wrong_table_config_is_refused(
    directory: Path, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        built({"method": "table", **config})


def test_the_environment_names_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TABLES", str(tmp_path))
    write_table(tmp_path / "mine.table", texts(2))
    assert built("auto")[-1].table.path == tmp_path / "mine.table"


@pytest.mark.parametrize("kind", ["missing", "file", "file/below", "\udcff\n"])
def test_an_environment_that_names_no_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_TABLES", str(tmp_path / kind))
    with pytest.raises(ConfigError, match=r"OUTRIDER_TABLES must name a directory .*: N"):
        built("auto")


def test_a_home_directory_may_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OUTRIDER_TABLES", "~/")
    write_table(tmp_path / "mine.table", texts(2))
    assert built("auto")[-1].table.path == tmp_path / "mine.table"
    (named,) = built({"method": "table", "path": "~/mine.table"})
    assert named.table.path == tmp_path / "mine.table"


def test_auto_passes_over_what_is_no_table(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(directory / "a.table")
    (directory / "b.table").mkdir()
    (directory / "c.table").symlink_to("/dev/zero")
    write_table(directory / "d.table", texts(2))
    with caplog.at_level(logging.WARNING, "outrider"):
        assert built("auto")[-1].table.path.name == "d.table"
    for kind in ("a FIFO", "a directory", "a device"):
        assert f"it is {kind}" in caplog.text


@pytest.mark.parametrize("path", ["a\0b.table", "a\ud800.table"])
def test_a_path_that_is_no_file_name_is_refused(path: str) -> None:
    with pytest.raises(TableError, match="it is not a file name"):
        built({"method": "table", "path": path})
