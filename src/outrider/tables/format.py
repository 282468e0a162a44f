"""The table file: a header that says everything, a filter read into memory, buckets left mapped.

    bytes 0-31   magic, version, length of the header, size of the file, checksum of the header
    header       JSON, padded with spaces to FILTER_ALIGNMENT
    filter       of the contexts used most, then of the others; padded with zeros to a page
    buckets      of the contexts used most, then of the others

All numbers are little-endian. The contexts used most come first, so that the hot tier is the
start of the buckets, whatever its budget. Opening checks header, sizes and filter; `verify` also
reads the buckets.
"""

import contextlib
import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from outrider.errors import TableError
from outrider.tables.hashing import BLOCK_WORDS, BUCKET_BYTES, MAX_KEY, NUM_CELLS, TAG_BITS

MAGIC = b"ORTABLE\n"
VERSION = 1
PRELUDE = struct.Struct("<8sIIQII")  # magic, version, header length, file size, checksum, zero
FILTER_ALIGNMENT, PAGE = 64, 4096
BLOCK_BYTES = 4 * BLOCK_WORDS
NUM_REGIONS = 2
MAX_BUCKETS = 1 << 24  # of a region: beyond it a hash times a number of buckets leaves 64 bits
AT_ONCE = 16 << 20  # bytes read or written


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
    """An open table. Its buckets are mapped, its filter is in memory.

    Args:
        path: a file that `write_table` made.

    Raises:
        TableError: the file is missing, foreign, of another version, truncated or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.header, sections_at = _read_header(file, self.path)
                layout = _layout(self.header, self.path)
                self._check_sizes(layout, sections_at)
                file.seek(self.header["filter"]["offset"])
                packed = file.read(self.header["filter"]["bytes"])
        except OSError as error:
            raise TableError(f"cannot read the table {path}: {error.strerror or error}") from error
        if _hex(zlib.crc32(packed)) != self.header["filter"]["crc32"]:
            raise TableError(f"the table {path} is damaged: its filter does not match its checksum")
        words = np.frombuffer(packed, "<u4", layout.filter_bytes // 4)
        offset, shape = self.header["buckets"]["offset"], (layout.num_buckets, BUCKET_BYTES)
        with self.path.open("rb") as file:
            self.contents = Contents(layout, words, *mapped(file, offset, shape))

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
                f"the table {self.path} is damaged: its buckets do not match their checksum"
            )

    def _check_sizes(self, layout: Layout, sections_at: int) -> None:
        filter_section, bucket_section = self.header["filter"], self.header["buckets"]
        filter_end = filter_section["offset"] + filter_section["bytes"]
        fits = (
            filter_section["offset"] == sections_at
            and filter_section["bytes"] >= layout.filter_bytes
            and bucket_section["offset"] == filter_end
            and bucket_section["bytes"] == layout.bucket_bytes
        )
        if not fits:
            raise TableError(f"the table {self.path} is damaged: its parts do not fit together")


def mapped(file: BinaryIO, offset: int, shape: tuple[int, int]) -> tuple[np.ndarray, mmap.mmap]:
    """Bytes of a file as an array and the mapping behind it."""
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapping, np.uint8, shape[0] * shape[1], offset).reshape(shape), mapping


def write_table(
    path: Path,
    contents: Contents,
    fields: Mapping[str, Any],
) -> None:
    """Write a table beside `path` and move it there when it is complete.

    Args:
        fields: the rest of the header: tokenizer, confidence, counts, provenance.

    Raises:
        TableError: it cannot be written; nothing is left behind.
    """
    layout = contents.layout
    packed = contents.filter.astype("<u4").tobytes()
    empty = {"offset": 0, "bytes": 0, "crc32": _hex(0)}
    header: dict[str, Any] = {
        "key_lengths": list(layout.key_lengths),
        "hash_bits": layout.hash_bits,
        "token_bytes": layout.token_bytes,
        "regions": [[region.num_blocks, region.num_buckets] for region in layout.regions],
        **fields,
        "filter": empty,
        "buckets": empty,
    }
    room = PRELUDE.size + len(json.dumps(header)) + 64  # the sections' numbers get longer
    filter_at = -(-room // FILTER_ALIGNMENT) * FILTER_ALIGNMENT
    buckets_at = -(-(filter_at + len(packed)) // PAGE) * PAGE
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


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place when the block ends well, and else goes.

    Raises:
        TableError: the directory cannot be written, or the disk is full.
    """
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise TableError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    prelude = file.read(PRELUDE.size)
    if len(prelude) < PRELUDE.size or prelude[: len(MAGIC)] != MAGIC:
        raise TableError(f"{path} is not a draft table: it does not start with {MAGIC!r}")
    _, version, length, size, checksum, _ = PRELUDE.unpack(prelude)
    if version != VERSION:
        raise TableError(
            f"the table {path} has version {version}, this outrider reads version {VERSION}"
        )
    found = os.fstat(file.fileno()).st_size
    if found != size or length > size:
        raise TableError(
            f"the table {path} is truncated or damaged: it has {found} bytes, expected {size}"
        )
    packed = file.read(length)
    if zlib.crc32(prelude[:24] + prelude[28:] + packed) != checksum:
        raise TableError(f"the table {path} is damaged: its header does not match its checksum")
    return json.loads(packed), PRELUDE.size + length


def _layout(header: dict[str, Any], path: Path) -> Layout:
    layout = Layout(
        tuple(header["key_lengths"]),
        header["hash_bits"],
        header["token_bytes"],
        tuple(Region(*region) for region in header["regions"]),
    )
    lengths = layout.key_lengths
    fits = (
        lengths == tuple(sorted(set(lengths)))
        and 1 <= min(lengths, default=0) <= max(lengths, default=0) <= MAX_KEY
        and layout.hash_bits >= TAG_BITS
        and layout.token_bytes in (2, 3)
        and len(layout.regions) == NUM_REGIONS
        and all(0 < region.num_buckets <= MAX_BUCKETS for region in layout.regions)
        and all(region.num_blocks > 0 for region in layout.regions)
        and len(header["confidence"]) == NUM_CELLS
    )
    if not fits:
        raise TableError(f"the table {path} is damaged: its header makes no sense")
    return layout


def _prelude(length: int, size: int, header: bytes) -> bytes:
    checked = PRELUDE.pack(MAGIC, VERSION, length, size, 0, 0)
    checksum = zlib.crc32(checked[:24] + checked[28:] + header)
    return PRELUDE.pack(MAGIC, VERSION, length, size, checksum, 0)


def _section(offset: int, num_bytes: int, checksum: int) -> dict[str, Any]:
    return {"offset": offset, "bytes": num_bytes, "crc32": _hex(checksum)}


def _hex(checksum: int) -> str:
    return f"{checksum:08x}"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
