"""Table files: what is refused, what a check finds, and that nothing is left half written."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from table_cases import PROVENANCE, texts, write_table

from outrider.errors import TableError
from outrider.tables import format as table_format
from outrider.tables.files import written_whole
from outrider.tables.format import PRELUDE, Table
from outrider.tables.records import Settings


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "good.table"
    write_table(path, texts())
    return path


def header_length(path: Path) -> int:
    return PRELUDE.size + PRELUDE.unpack(path.read_bytes()[: PRELUDE.size])[2]


def test_a_table_says_what_it_is_and_where_it_is_from(good: Path) -> None:
    table = Table(good)
    table.verify()
    assert (table.fingerprint, table.vocab_size) == ("toy", 30)
    assert table.provenance == PROVENANCE
    assert table.header["corpus"]["texts"] == 40
    assert table.header["corpus"]["tokens"] == 40 * 120
    assert sum(table.header["contexts_by_length"].values()) == table.header["num_contexts"]
    assert table.num_bytes == good.stat().st_size
    assert table.contents.layout.key_lengths == (1, 2, 3, 4, 5, 6)


def test_every_flipped_byte_of_the_header_is_noticed(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.table"
    whole = good.read_bytes()
    length = header_length(good)
    # The confidences are 4 kB of digits: of the JSON every seventh byte is enough.
    for place in [*range(PRELUDE.size), *range(PRELUDE.size, length, 7), length - 1]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        with pytest.raises(TableError, match=r"damaged\.table"):
            Table(path)


def test_a_table_cut_short_anywhere_is_refused(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.table"
    whole = good.read_bytes()
    header = json.loads(whole[PRELUDE.size : header_length(good)])
    ends = [header[name]["offset"] + d for name in ("filter", "buckets") for d in (-1, 0, 1)]
    for size in [0, 1, 8, PRELUDE.size - 1, PRELUDE.size, 500, *ends, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(TableError, match=r"truncated|not a draft table"):
            Table(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(TableError, match=f"has {len(whole) + 1} bytes, expected {len(whole)}"):
        Table(path)


def test_damage_to_the_filter_is_found_at_once_and_to_buckets_by_verify(
    good: Path, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.table"
    header = Table(good).header
    for name, what in (("filter", "filter"), ("buckets", "buckets")):
        for place in (0, header[name]["bytes"] // 2, header[name]["bytes"] - 1):
            whole = bytearray(good.read_bytes())
            whole[header[name]["offset"] + place] ^= 1
            path.write_bytes(whole)
            with pytest.raises(TableError, match=f"its {what} do"):
                Table(path).verify()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a draft table"),
        (b"GGUF" + bytes(100), "not a draft table"),
        (PRELUDE.pack(table_format.MAGIC, 2, 0, 32, 0, 0), "has version 2, this outrider reads"),
    ],
)
def test_foreign_and_newer_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "other.table"
    path.write_bytes(content)
    with pytest.raises(TableError, match=message):
        Table(path)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"missing\.table: No such file"):
        Table(tmp_path / "missing.table")
    with pytest.raises(TableError, match="expected a regular file, it is a directory"):
        Table(tmp_path)


def test_a_header_that_makes_no_sense_is_refused_though_its_checksum_fits(
    good: Path, tmp_path: Path
) -> None:
    length = header_length(good)
    whole = good.read_bytes()
    for change in ({"key_lengths": [3, 1]}, {"key_lengths": []}, {"token_bytes": 9}):
        header = json.loads(whole[PRELUDE.size : length]) | change
        packed = json.dumps(header).encode().ljust(length - PRELUDE.size)
        path = tmp_path / "strange.table"
        prelude = table_format._prelude(len(packed), len(whole), packed)
        path.write_bytes(prelude + packed + whole[length:])
        with pytest.raises(TableError, match="makes no sense"):
            Table(path)


def test_a_disk_that_fills_leaves_the_old_file_and_nothing_else(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept.table"
    old = Path(shutil.copy(good, path)).read_bytes()
    full = pytest.raises(TableError, match=r"cannot write .*kept\.table: No space left")
    with full, written_whole(path) as file:
        file.write(b"new")
        raise OSError(28, "No space left on device")
    with pytest.raises(KeyboardInterrupt), written_whole(path):
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["kept.table"]
    assert path.read_bytes() == old
    with pytest.raises(TableError, match="cannot write"):
        write_table(tmp_path / "no" / "directory.table", texts(1))


def test_a_written_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    write_table(tmp_path / "toy.table", texts(2))
    assert (tmp_path / "toy.table").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_an_open_table_outlives_its_file(good: Path, tmp_path: Path) -> None:
    path = shutil.copy(good, tmp_path / "copy.table")
    table = Table(path)
    expected = np.array(Table(good).contents.buckets)
    Path(path).unlink()
    assert (table.contents.buckets == expected).all()


def test_the_prelude_is_as_documented() -> None:
    assert (PRELUDE.size, struct.calcsize("<8sIIQII")) == (32, 32)
    assert Settings().key_lengths == (1, 2, 3, 4, 5, 6)
