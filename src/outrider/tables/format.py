"""The table file: a header that says everything, a filter, and buckets.

    bytes 0-31   magic, version, length of the header, size of the file, checksum of the header
    header       JSON, padded with spaces to FILTER_ALIGNMENT
    filter       of the contexts used most, then of the others; padded with zeros to a page
    buckets      of the contexts used most, then of the others

All numbers are little-endian. The contexts used most come first, so that the hot tier is the
start of the buckets, whatever its budget. Buckets are read into memory, or mapped where they are
many. Opening checks header, sizes and filter; `verify` also
reads the buckets.
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from outrider.checks import shown
from outrider.errors import TableError
from outrider.tables.files import MAGIC, named, open_regular, reason, written_whole
from outrider.tables.hashing import BLOCK_WORDS, BUCKET_BYTES
from outrider.tables.header import HeaderError, read_header

VERSION = 1
PRELUDE = struct.Struct("<8sIIQII")  # magic, version, header length, file size, checksum, zero
FILTER_ALIGNMENT, PAGE = 64, 4096
BLOCK_BYTES = 4 * BLOCK_WORDS
AT_ONCE = 16 << 20  # bytes read or written
# Buckets up to this size are read into memory. A mapped file that somebody cuts short kills the
# process at the next lookup; what is in memory stays.
MOST_IN_MEMORY = 64 << 20


@dataclass(frozen=True, slots=True)
class Region:
    """One part of a table: the contexts used most, or the others."""

    num_blocks: int
    num_buckets: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What has to be known to read filter and buckets."""

    key_lengths: tuple[int, ...]  # ascending
    hash_bits: int
    token_bytes: int  # 2 or 3
    regions: tuple[Region, ...]

    @property
    def slot_bytes(self) -> int:
        return self.token_bytes + 5

    @property
    def slots_per_bucket(self) -> int:
        return BUCKET_BYTES // self.slot_bytes

    @property
    def num_blocks(self) -> int:
        return sum(region.num_blocks for region in self.regions)

    @property
    def num_buckets(self) -> int:
        return sum(region.num_buckets for region in self.regions)

    @property
    def filter_bytes(self) -> int:
        return self.num_blocks * BLOCK_BYTES

    @property
    def bucket_bytes(self) -> int:
        return self.num_buckets * BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Contents:
    """What a table's lookups read."""

    layout: Layout
    filter: np.ndarray  # uint32 [num_blocks * BLOCK_WORDS]
    buckets: np.ndarray  # uint8 [num_buckets, BUCKET_BYTES]
    mapping: mmap.mmap | None = None  # behind the buckets, where they are in a file

    def forget(self) -> None:
        """Give back the memory of what was read of a file; it is read again when needed."""
        if self.mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)


class Table:
    """An open table. Its filter is in memory, and so are the buckets of all but large ones.

    Args:
        path: a file that `write_table` made.

    Raises:
        TableError: the file is missing, foreign, of another version, truncated or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | Path) or not str(path):
            raise TableError(f"a table must be the path of a file, got {shown(path)}")
        self.path = Path(path)
        with open_regular(self.path) as file:
            try:
                self._read(file)
            except OSError as error:
                raise TableError(f"cannot read the table {self}: {reason(error)}") from error

    def _read(self, file: BinaryIO) -> None:
        self.header, sections_at = _read_header(file, self.path)
        layout = _layout(self.header)
        self._check_sizes(layout, sections_at, os.fstat(file.fileno()).st_size)
        file.seek(self.header["filter"]["offset"])
        packed = file.read(self.header["filter"]["bytes"])
        if _hex(zlib.crc32(packed)) != self.header["filter"]["crc32"]:
            raise TableError(f"the table {self} is damaged: its filter does not match its checksum")
        words = np.frombuffer(packed, "<u4", layout.filter_bytes // 4)
        offset, shape = self.header["buckets"]["offset"], (layout.num_buckets, BUCKET_BYTES)
        try:
            buckets, mapping = (_loaded if layout.bucket_bytes <= MOST_IN_MEMORY else mapped)(
                file, offset, shape
            )
        except ValueError as error:
            raise TableError(f"the table {self} changed while it was opened") from error
        self.contents = Contents(layout, words, buckets, mapping)

    def __str__(self) -> str:
        return named(self.path)

    @property
    def fingerprint(self) -> str:
        """Of the tokenizer whose ids the table holds."""
        return self.header["tokenizer"]["fingerprint"]

    @property
    def vocab_size(self) -> int:
        return self.header["tokenizer"]["vocab_size"]

    @property
    def num_bytes(self) -> int:
        return self.header["buckets"]["offset"] + self.header["buckets"]["bytes"]

    @property
    def confidence(self) -> np.ndarray:
        """Share of accepted tokens by cell, as measured when the table was built."""
        return np.array(self.header["confidence"], np.float32)

    @property
    def provenance(self) -> dict[str, Any]:
        return self.header["provenance"]

    def verify(self) -> None:
        """Read all of it.

        Raises:
            TableError: the buckets do not match their checksum.
        """
        checksum = 0
        flat = self.contents.buckets.reshape(-1)
        for start in range(0, len(flat), AT_ONCE):
            checksum = zlib.crc32(flat[start : start + AT_ONCE].data, checksum)
            self.contents.forget()
        if _hex(checksum) != self.header["buckets"]["crc32"]:
            raise TableError(
                f"the table {self} is damaged: its buckets do not match their checksum"
            )

    def _check_sizes(self, layout: Layout, sections_at: int, size: int) -> None:
        filter_section, bucket_section = self.header["filter"], self.header["buckets"]
        filter_end = filter_section["offset"] + filter_section["bytes"]
        fits = (
            filter_section["offset"] == sections_at
            and filter_section["bytes"] >= layout.filter_bytes
            and bucket_section["offset"] == filter_end
            and bucket_section["bytes"] == layout.bucket_bytes
            and filter_end + layout.bucket_bytes == size
        )
        if not fits:
            raise TableError(f"the table {self} is damaged: its parts do not fit together")


def mapped(file: BinaryIO, offset: int, shape: tuple[int, int]) -> tuple[np.ndarray, mmap.mmap]:
    """Bytes of a file as an array and the mapping behind it; ValueError: it is too short."""
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapping, np.uint8, shape[0] * shape[1], offset).reshape(shape), mapping


def _loaded(file: BinaryIO, offset: int, shape: tuple[int, int]) -> tuple[np.ndarray, None]:
    file.seek(offset)
    return np.fromfile(file, np.uint8, shape[0] * shape[1]).reshape(shape), None


def file_bytes(layout: Layout, fields: Mapping[str, Any]) -> int:
    """Size of the file that `write_table` will make."""
    return section_places(layout, fields)[1] + layout.bucket_bytes


def check_provenance(provenance: Mapping[str, Any]) -> None:
    """Refuse what no header can hold.

    Raises:
        TableError: it is no JSON object.
    """
    try:
        if isinstance(provenance, Mapping):
            json.dumps(dict(provenance), allow_nan=False)
            return
    except (TypeError, ValueError, RecursionError):
        pass
    raise TableError(f"provenance must be an object that JSON can hold, got {shown(provenance)}")


def write_table(
    path: str | Path,
    contents: Contents,
    fields: Mapping[str, Any],
) -> None:
    """Write a table beside `path` and move it there when it is complete.

    Args:
        fields: the rest of the header: tokenizer, confidence, counts, provenance.

    Raises:
        TableError: it cannot be written; nothing is left behind.
    """
    check_provenance(fields["provenance"])
    layout = contents.layout
    packed = contents.filter.astype("<u4").tobytes()
    header = _header(layout, fields)
    filter_at, buckets_at = section_places(layout, fields)
    packed += bytes(buckets_at - filter_at - len(packed))
    size = buckets_at + layout.bucket_bytes
    with written_whole(path) as file:
        file.seek(filter_at)
        file.write(packed)
        checksum = 0
        flat = contents.buckets.reshape(-1)
        for start in range(0, len(flat), AT_ONCE):
            chunk = flat[start : start + AT_ONCE].tobytes()
            contents.forget()
            checksum = zlib.crc32(chunk, checksum)
            file.write(chunk)
        assert file.tell() == size, (file.tell(), size)
        header["filter"] = _section(filter_at, len(packed), zlib.crc32(packed))
        header["buckets"] = _section(buckets_at, layout.bucket_bytes, checksum)
        written = json.dumps(header).encode().ljust(filter_at - PRELUDE.size)
        file.seek(0)
        file.write(_prelude(len(written), size, written) + written)


def _header(layout: Layout, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The whole header, but for where the sections are."""
    empty = {"offset": 0, "bytes": 0, "crc32": _hex(0)}
    return {
        "key_lengths": list(layout.key_lengths),
        "hash_bits": layout.hash_bits,
        "token_bytes": layout.token_bytes,
        "regions": [[region.num_blocks, region.num_buckets] for region in layout.regions],
        **fields,
        "filter": empty,
        "buckets": empty,
    }


def section_places(layout: Layout, fields: Mapping[str, Any]) -> tuple[int, int]:
    """Where the filter and the buckets begin."""
    length = len(json.dumps(_header(layout, fields)))
    room = PRELUDE.size + length + 64  # the sections' numbers get longer
    filter_at = -(-room // FILTER_ALIGNMENT) * FILTER_ALIGNMENT
    return filter_at, -(-(filter_at + layout.filter_bytes) // PAGE) * PAGE


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    prelude = file.read(PRELUDE.size)
    if len(prelude) < PRELUDE.size or prelude[: len(MAGIC)] != MAGIC:
        raise TableError(f"{named(path)} is not a draft table: it does not start with {MAGIC!r}")
    _, version, length, size, checksum, _ = PRELUDE.unpack(prelude)
    name = f"the table {named(path)}"
    if version != VERSION:
        raise TableError(f"{name} has version {version}, this outrider reads version {VERSION}")
    found = os.fstat(file.fileno()).st_size
    if found != size or length > size:
        raise TableError(f"{name} is truncated or damaged: it has {found} bytes, expected {size}")
    packed = file.read(length)
    if zlib.crc32(prelude[:24] + prelude[28:] + packed) != checksum:
        raise TableError(f"{name} is damaged: its header does not match its checksum")
    try:
        return read_header(packed), PRELUDE.size + length
    except HeaderError as error:
        raise TableError(f"{name} is damaged: its header makes no sense: {error}") from error


def _layout(header: dict[str, Any]) -> Layout:
    return Layout(
        tuple(header["key_lengths"]),
        header["hash_bits"],
        header["token_bytes"],
        tuple(Region(*region) for region in header["regions"]),
    )


def _prelude(length: int, size: int, header: bytes) -> bytes:
    checked = PRELUDE.pack(MAGIC, VERSION, length, size, 0, 0)
    checksum = zlib.crc32(checked[:24] + checked[28:] + header)
    return PRELUDE.pack(MAGIC, VERSION, length, size, checksum, 0)


def _section(offset: int, num_bytes: int, checksum: int) -> dict[str, Any]:
    return {"offset": offset, "bytes": num_bytes, "crc32": _hex(checksum)}


def _hex(checksum: int) -> str:
    return f"{checksum:08x}"
