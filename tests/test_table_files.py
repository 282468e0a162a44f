"""What may be opened as a table and written as one, headers that lie, and files without a name."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from table_cases import texts, write_table

from outrider.errors import TableError
from outrider.tables import format as table_format
from outrider.tables.files import Scratch, check_output, named, written_whole
from outrider.tables.format import PRELUDE, Table
from outrider.tables.hashing import NUM_CELLS
from outrider.tables.lookup import TableLookup


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "good.table"
    write_table(path, texts())
    return path


def with_header(good: Path, path: Path, change: Callable[[Any], Any]) -> Path:
    """A table whose header is another one, with a checksum that fits."""
    whole = good.read_bytes()
    length = PRELUDE.size + PRELUDE.unpack(whole[: PRELUDE.size])[2]
    header = change(json.loads(whole[PRELUDE.size : length]))
    text = header if isinstance(header, str) else json.dumps(header)
    packed = text.encode().ljust(length - PRELUDE.size)
    size = len(whole) - length + PRELUDE.size + len(packed)
    path.write_bytes(table_format._prelude(len(packed), size, packed) + packed + whole[length:])
    return path


def changed(key: str, value: Any) -> Callable[[Any], Any]:
    """The header with another value (of a key such as tokenizer.vocab_size); ...: without it."""

    def change(header: Any) -> Any:
        *above, last = key.split(".")
        part = header
        for name in above:
            part = part[name]
        if value is ...:
            del part[last]
        else:
            part[last] = value
        return header

    return change


LONG = 10**400
CELLS = [0.5] * (NUM_CELLS - 1)
COUNTS = (None, "3", 2.5, True, -1, LONG, [], {})
WRONG = {
    "key_lengths": (None, 3, [], [1.5], [True], ["1"], [0, 1], [2, 1], [1, 1], [7], {"1": 2}),
    "hash_bits": (None, "32", 32.0, True, 23, 41, 64, LONG),
    "token_bytes": (None, 2.0, 1, 4, 9, [2]),
    "regions": (None, [], [[1, 16]], [[1, 16]] * 3, [[1, 16], [1]], [[0, 16], [1, 16]],
                [[1, 16], [1, 0]], [[1, 16], [1, 1 << 25]], [[1, 16], [1, 16.5]], [1, 2], "ab"),
    "tokenizer": (None, [], "toy", 3),
    "tokenizer.fingerprint": (None, 3, "", []),
    "tokenizer.vocab_size": (None, "30", 0, -5, 1 << 21, 70_000, 30.5, True),
    "num_contexts": COUNTS,
    "num_slots": COUNTS,
    "confidence": (None, [], CELLS, [*CELLS, float("nan")], [*CELLS, None], [*CELLS, 1.1],
                   [*CELLS, -0.1], [*CELLS, True], [*CELLS, "1"], [*CELLS, LONG], "x" * NUM_CELLS),
    "corpus": (None, [], 5),
    "corpus.texts": COUNTS,
    "corpus.tokens": COUNTS,
    "provenance": (None, [], "made", 3),
    "filter": (None, [], 3),
    "buckets": (None, [], 3),
    **{f"{part}.{name}": COUNTS for part in ("filter", "buckets") for name in ("offset", "bytes")},
    **{f"{part}.crc32": (None, 3, "", "abc", "zzzzzzzz") for part in ("filter", "buckets")},
}  # fmt: skip
OPTIONAL = {
    "contexts_by_length": (None, [], {"1": "2"}, {"1": -1}),
    "left_out": (None, 3, {"max_bytes": 1.5}),
}


@pytest.mark.parametrize("key", [*WRONG, *OPTIONAL])
def test_every_key_of_a_header_is_checked(good: Path, tmp_path: Path, key: str) -> None:
    required = (...,) if key in WRONG else ()
    for value in (*required, *{**WRONG, **OPTIONAL}[key]):
        path = with_header(good, tmp_path / "odd.table", changed(key, value))
        with pytest.raises(TableError, match=r"odd\.table is damaged: its header makes no sense"):
            Table(path)
    with_header(good, tmp_path / "fine.table", lambda header: header)
    Table(tmp_path / "fine.table").verify()


@pytest.mark.parametrize("header", ["[]", "null", "3", "", "{", "\x00", "[" * 3000, "9" * 4200])
def test_a_header_that_is_no_object_is_refused(good: Path, tmp_path: Path, header: str) -> None:
    path = with_header(good, tmp_path / "odd.table", lambda _: header)
    with pytest.raises(TableError, match=r"odd\.table is damaged: its header makes no sense"):
        Table(path)


def test_a_header_may_not_promise_more_than_the_file_has(good: Path, tmp_path: Path) -> None:
    for key in ("filter.offset", "filter.bytes", "buckets.offset", "buckets.bytes", "regions"):
        value = [[1, 1 << 24], [1, 1 << 24]] if key == "regions" else 1 << 50
        with pytest.raises(TableError, match="do not fit together"):
            Table(with_header(good, tmp_path / "odd.table", changed(key, value)))


def special_files(directory: Path) -> dict[str, str]:
    """Paths that are no regular file, and what they are."""
    os.mkfifo(directory / "fifo.table")
    (directory / "dir.table").mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        os.chdir(directory)  # the path of a socket is short
        bound.bind("socket.table")
    names = {"fifo": "a FIFO", "dir": "a directory", "socket": "a socket"}
    paths = {str(directory / f"{name}.table"): kind for name, kind in names.items()}
    return paths | {"/dev/null": "a device", "/dev/zero": "a device"}


def test_only_regular_files_are_opened(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, kind in special_files(tmp_path).items():
        with pytest.raises(TableError, match=f"expected a regular file, it is {kind}"):
            Table(path)
    (tmp_path / "link.table").symlink_to(good)
    Table(tmp_path / "link.table")
    for path in ("a\0b", "a\ud800b", "x" * 5000):
        with pytest.raises(TableError, match="cannot read the table"):
            Table(path)
    for path in ("", 3, None, b"a"):
        with pytest.raises(TableError, match="must be the path of a file"):
            Table(path)  # pyright: ignore[reportArgumentType]


def test_nothing_but_a_table_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("mine")
    refused = {path: f"it is {kind}" for path, kind in special_files(tmp_path).items()}
    refused |= {
        str(tmp_path / "text.txt"): "something else than a draft table",
        str(tmp_path / "no" / "where.table"): "no directory .*/no",
        str(tmp_path / "text.txt" / "x.table"): "Not a directory|text.txt is not a directory",
        str(tmp_path / ("n" * 300)): "File name too long",
        "a\0b": "not a file name",
        "a\ud800b": "not a file name",
        "": "the path of a file",
    }
    (tmp_path / "to_text.table").symlink_to(tmp_path / "text.txt")
    (tmp_path / "loop.table").symlink_to(tmp_path / "loop.table")
    refused[str(tmp_path / "to_text.table")] = "something else"
    refused[str(tmp_path / "loop.table")] = "Too many levels"
    before = sorted(os.listdir(tmp_path))
    for path, message in refused.items():
        with pytest.raises(TableError, match=message):
            check_output(path)
        with pytest.raises(TableError, match=message), written_whole(path):
            raise AssertionError("refused before any work")
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "text.txt").read_text() == "mine"


def test_tables_empty_files_and_what_links_name_are_replaced(good: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.table").touch()
    shutil.copy(good, tmp_path / "old.table")
    (tmp_path / "link.table").symlink_to("old.table")
    (tmp_path / "dangling.table").symlink_to("new.table")
    for name in ("empty", "link", "dangling", "n" * 240):
        write_table(tmp_path / f"{name}.table", texts(3))
    assert (tmp_path / "link.table").is_symlink() and (tmp_path / "dangling.table").is_symlink()
    assert Table(tmp_path / "old.table").header["corpus"]["texts"] == 3
    assert Table(tmp_path / "new.table").header["corpus"]["texts"] == 3
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_table_outlives_what_is_written_over_it(good: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(good, tmp_path / "used.table"))
    table = Table(path)
    lookup = TableLookup(table.contents, table.confidence, width=4, hot_bytes=1 << 10)
    path.write_bytes(b"")  # as `cp` does; a mapped file would end the process here
    lookup.contexts[:2, 0] = (1, 2)
    lookup.budgets[:2] = 4
    assert lookup.draft(2).lengths[:2].tolist() == [4, 4]
    table.verify()


def test_large_tables_are_mapped(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Table(good)
    monkeypatch.setattr(table_format, "MOST_IN_MEMORY", 0)
    table = Table(good)
    assert table.contents.mapping is not None and expected.contents.mapping is None
    assert (table.contents.buckets == expected.contents.buckets).all()
    table.verify()


def test_names_are_shown_whatever_is_in_them() -> None:
    assert named(os.fsdecode(b"caf\xc3\xa9-\xff.table")) == "café-\\xff.table"
    assert named("a\nb\x1b[31m") == "a\\nb\\x1b[31m"
    assert named("lone\ud800") == "lone\\ud800"


def test_scratch_files_have_no_name_and_say_where_they_failed(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    file = scratch.open()
    scratch.write(file, np.arange(5, dtype=np.int64))
    assert os.fstat(file.fileno()).st_size == 40
    assert list(tmp_path.iterdir()) == []
    scratch.close()
    assert file.closed
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        with pytest.raises(TableError, match=rf"temporary files in .*/{name}: .*--temporary"):
            Scratch(tmp_path / name)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_for_scratch_files_names_the_directory(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    refused = pytest.raises(TableError, match=rf"{tmp_path}: No space left .*--temporary")
    with Path("/dev/full").open("wb", buffering=0) as full, refused:
        scratch.write(full, np.zeros(100_000))
