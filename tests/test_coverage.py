"""What `coverage` says of tables: the engine's drafts, columns that add up, pictures."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from table_cases import byte_tokenizer, texts, write_table

from outrider.cli.table_inputs import read_stream
from outrider.drafting.table import TableSource
from outrider.errors import TableError
from outrider.tables import coverage as study
from outrider.tables import plot as picture
from outrider.tables.replay import Stream
from outrider.tables.samples import continuation

TOKENIZER = byte_tokenizer()


def stream(seed: int, count: int = 5) -> Stream:
    tokens = np.concatenate([np.append(text, -1) for text in texts(count, seed=seed)])
    return Stream(tokens.astype(np.int32), (tokens >= 0).astype(np.uint8))


def test_a_table_is_judged_as_the_engine_drafts() -> None:
    defaults = inspect.signature(TableSource).parameters
    assert defaults["num_speculative_tokens"].default == study.WIDTH
    assert defaults["branches"].default == study.BRANCHES
    assert defaults["min_survival"].default == study.MIN_SURVIVAL


def test_more_branches_lose_no_answers(tmp_path: Path) -> None:
    table = write_table(tmp_path / "a.table", texts(60))
    rates = []
    for branches in (1, 2, 4):
        found = study.coverage(table.contents, table.confidence, stream(2), 1, 8, branches)
        rates.append(found.hit_rate)
        assert sum(key.hit_rate for key in found.keys) == pytest.approx(found.hit_rate)
    assert rates[0] > 0.9 and rates == [rates[0]] * 3


def test_samples_end_where_the_engine_would(tmp_path: Path) -> None:
    table = write_table(tmp_path / "a.table", texts(60))
    for token in range(10):
        _, survival = continuation(table, [token], 30)
        assert all(chance >= study.MIN_SURVIVAL for chance in survival)


def test_the_limit_is_kept_to_the_token(tmp_path: Path) -> None:
    text = "the quick brown fox " * 500
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("short")
    paths = [tmp_path / "b.txt", tmp_path / "a.txt"]
    for limit in (3, 5, 10, 200):
        found = read_stream(paths, TOKENIZER, limit)
        assert found.counted.sum() == limit and len(found.tokens) <= limit + 5 + 64 + 2
    assert read_stream(paths, TOKENIZER, 10**6).counted.sum() == 5 + len(TOKENIZER.encode(text))


def curve(scale: float, points: int = 5) -> list[study.Coverage]:
    return [
        study.Coverage(
            int(scale * (1 << 20) / 2**i), None, 1000, 0.9, 1 + scale / (i + 1),
            [study.KeyCoverage(k, 0.3 / k / (i + 1), 0.5, 0.5, 0.5) for k in range(1, 7)],
        )
        for i in range(points)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_pictures_name_every_table_and_key(tmp_path: Path, count: int) -> None:
    pytest.importorskip("matplotlib")
    curves = {f"dir{i}/x.table": curve(1 + i, 1 if i == 1 else 5) for i in range(count)}
    picture.plot(curves, tmp_path / "p.png")
    picture.plot(curves, tmp_path / "p.SVG")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "p.SVG").read_text()
    shown = [f"dir{i}/x.table" for i in range(count)] if count > 1 else ["x.table"]
    assert all(f"<!-- {name} -->" in drawn for name in [*shown, "6 tokens", "recommended size"])


def test_a_full_disk_leaves_the_picture_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "p.svg").write_text("before")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(TableError, match=r"cannot write the plot .*p\.svg: No space left"):
        picture.plot({"a": curve(1)}, tmp_path / "p.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["p.svg"]
    assert (tmp_path / "p.svg").read_text() == "before"
