"""Texts to build a table from: files, JSONL records, directories, standard input.

A file is JSONL if its name ends in .jsonl, or if its first line is an object with a key that
`jsonl.py` knows; everything else is text. Long texts of both come in pieces of at most PIECE
characters, each with the end of the one before as its context, so that reading takes little
memory whatever there is to read.
"""

import codecs
import errno
import fnmatch
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from outrider.errors import TableError
from outrider.tables.files import MAGIC, kind_of, named, reason
from outrider.tables.hashing import MAX_KEY
from outrider.tables.jsonl import CONTEXT, Passage, is_record, passages_of
from outrider.tokenizer import Tokenizer

PIECE = 1 << 18  # characters
BATCH = 1 << 20  # characters tokenised together: an encoding takes 100 times its ids
MAX_LINE = 64 << 20  # bytes of a line of JSONL
STDIN = Path("-")
JSONL_SUFFIX = ".jsonl"
BYTE_ORDER_MARK = codecs.BOM_UTF8
TEXT_SUFFIXES = (
    *(".txt", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".jsonl", ".yaml", ".yml", ".toml"),
    *(".py", ".pyi", ".js", ".ts", ".jsx", ".tsx", ".java", ".kt", ".c", ".h", ".cc", ".cpp"),
    *(".hpp", ".cs", ".go", ".rs", ".rb", ".php", ".swift", ".scala", ".sh", ".sql", ".css"),
)

Note = Callable[[str], None]
log = logging.getLogger("outrider")


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files of a build.

    Args:
        paths: files, directories, and `-` for standard input.
        suffixes: of the files taken from directories, in small or capital letters.
        excluded: names of directories and files that are left out below a directory, or patterns
            of them such as `test_*`; one with a slash is compared with the path below it.
    """

    paths: Sequence[str | Path]
    suffixes: Sequence[str] = TEXT_SUFFIXES
    excluded: Sequence[str] = ()

    def files(self, note: Note = log.warning) -> list[Path]:
        """All files, each once, in an order that does not depend on the file system.

        Args:
            note: told in a sentence what was left out that one may have wanted.

        Raises:
            TableError: a path is missing or cannot be read as text, or a directory has no file.
        """
        found: list[Path] = []
        used: set[str] = set()
        is_directory = [self._take(path, found, used, note) for path in self.paths]
        unused = [pattern for pattern in self.excluded if pattern not in used]
        if unused and any(is_directory):
            note(f"nothing is left out by --exclude {' '.join(unused)}: no name is like it")
        if (self.excluded or self.suffixes is not TEXT_SUFFIXES) and not any(is_directory):
            note("--suffix and --exclude choose from directories, and no directory was given")
        return _each_once(found, note)

    def _take(self, given: str | Path, found: list[Path], used: set[str], note: Note) -> bool:
        """Add what a path stands for; whether it is a directory."""
        if not str(given):
            raise TableError("a corpus must be a file, a directory or - for standard input, got ''")
        path = Path(given)
        if path == STDIN:
            found.append(path)
            return False
        kind = _kind(path)
        if kind == "a directory":
            below = self._below(path, used, note)
            if not below:
                raise TableError(
                    f"no file in {named(path)} is text with a name that ends in one of "
                    f"{', '.join(self.suffixes)}"
                )
            found += below
            return True
        if kind is not None:
            raise TableError(_refusal(path, kind))
        if is_table(path):
            raise TableError(
                f"the corpus {named(path)} is a draft table: expected the text for one"
            )
        found.append(path)
        return False

    def _below(self, directory: Path, used: set[str], note: Note) -> list[Path]:
        found: list[Path] = []
        endings = tuple(ending.lower() for ending in self.suffixes)

        def unreadable(error: OSError) -> None:
            if error.filename == str(directory):
                raise TableError(f"cannot read the corpus {named(directory)}: {reason(error)}")
            note(f"left out: cannot read {named(error.filename)}: {reason(error)}")

        for root, directories, names in os.walk(directory, onerror=unreadable):
            here = Path(root)
            inside = here.relative_to(directory)
            directories[:] = [n for n in directories if not self._excludes(inside / n, used)]
            for name in names:
                if not name.lower().endswith(endings) or self._excludes(inside / name, used):
                    continue
                why = _why_not(here / name)
                if why is None:
                    found.append(here / name)
                else:
                    note(f"left out: {why}")
        return sorted(found)

    def _excludes(self, inside: Path, used: set[str]) -> bool:
        fitting = {
            pattern
            for pattern in self.excluded
            if fnmatch.fnmatchcase(str(inside) if "/" in pattern else inside.name, pattern)
        }
        used |= fitting
        return bool(fitting)


def read_passages(
    path: Path, tokenizer: Tokenizer, progress: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[Passage]:
    """What is in a file, or in standard input where the path is `-`.

    Args:
        progress: told how many more bytes were read.

    Raises:
        TableError: it cannot be read, is not UTF-8, or a line is no record; with the line.
    """
    with opened(path) as file:
        if _is_jsonl(file, path):
            for number, line in enumerate(_lines(file, path, MAX_LINE, progress), 1):
                if len(line) >= MAX_LINE and not line.endswith("\n"):
                    raise TableError(
                        f"{named(path)}:{number}: expected a JSON object in each line, got "
                        f"a line of more than {MAX_LINE >> 20} MiB"
                    )
                if line.strip():
                    for passage in passages_of(line, f"{named(path)}:{number}", tokenizer):
                        yield from _split(passage)
        else:
            yield from _pieces(_lines(file, path, PIECE, progress), "")


def tokenised(
    passages: Iterable[Passage], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids (int32) of each passage with its context, and which of them count (bool)."""
    batch: list[Passage] = []
    size = 0
    for passage in passages:
        batch.append(passage)
        size += len(passage.text) + len(passage.before)
        if size >= BATCH:
            yield from _encode(batch, tokenizer)
            batch, size = [], 0
    yield from _encode(batch, tokenizer)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, or standard input for `-`, to read bytes from.

    Raises:
        TableError: it is something else, or reading it fails inside the block.
    """
    try:
        if path == STDIN:
            yield sys.stdin.buffer
            return
        # A pipe is opened without waiting for a writer, and refused by what was opened.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            kind = kind_of(os.fstat(file.fileno()))
            if kind is not None:
                raise TableError(_refusal(path, kind))
            yield file
    except OSError as error:
        raise TableError(f"cannot read the corpus {named(path)}: {reason(error)}") from error


def _refusal(path: Path, kind: str) -> str:
    return (
        f"the corpus {named(path)} is {kind}: expected a file, a directory or - for standard input"
    )


def is_table(path: Path) -> bool:
    """Whether a regular file starts as a table does."""
    with opened(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def _kind(path: Path) -> str | None:
    """What a path is, None for a regular file."""
    try:
        return kind_of(path.stat())
    except OSError as error:
        if error.errno == errno.ENOENT and path.is_symlink():
            goal = os.readlink(path)
            raise TableError(
                f"the corpus {named(path)} is a link to {named(goal)}, which does not exist"
            ) from error
        if error.errno == errno.ENOENT:
            raise TableError(f"the corpus {named(path)} does not exist") from error
        raise TableError(f"cannot read the corpus {named(path)}: {reason(error)}") from error


def _why_not(path: Path) -> str | None:
    """Why a file of a directory is no text to read, None if it may be."""
    try:
        kind = _kind(path) or ("a draft table" if is_table(path) else None)
    except TableError as error:
        return str(error)
    return kind and f"{named(path)} is {kind}"


def _each_once(found: Sequence[Path], note: Note) -> list[Path]:
    known: dict[object, Path] = {}  # by file, whatever it is called
    again: list[Path] = []
    for path in found:
        status = None if path == STDIN else path.stat()
        key = path if status is None else (status.st_dev, status.st_ino)
        if key in known:
            again.append(path)
        known.setdefault(key, path)
    if again:
        more = "" if len(again) == 1 else f", and {len(again) - 1} more"
        note(f"{named(again[0])} is there twice{more}: each file is read once")
    return list(known.values())


def _is_jsonl(file: BinaryIO, path: Path) -> bool:
    """Whether to read an open file as JSONL; leaves it at its start."""
    if path == STDIN:
        return _first_byte(file) == b"{"
    if path.suffix.lower() == JSONL_SUFFIX:
        return True
    line = b""
    while not line.strip() and (line := file.readline(MAX_LINE)):
        line = line.removeprefix(BYTE_ORDER_MARK)
    file.seek(0)
    return line.lstrip().startswith(b"{") and is_record(line)


def _first_byte(file: BinaryIO) -> bytes:
    """The first byte that is no white space of a stream that cannot be wound back.

    White space before it is read and gone if nothing else came with it.
    """
    peek = getattr(file, "peek", None)
    while peek is not None and (head := peek(1)):
        text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
        if text:
            return text[:1]
        file.read(len(head))
    return b""


def _lines(file: BinaryIO, path: Path, most: int, progress: Callable[[int], None]) -> Iterator[str]:
    """Lines of a file; one longer than `most` bytes comes in parts."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number = 1
    try:
        line = file.readline(most).removeprefix(BYTE_ORDER_MARK)
        while line:
            progress(len(line))
            yield decoder.decode(line)
            number += line.endswith(b"\n")
            line = file.readline(most)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise TableError(f"{named(path)}:{number} is not UTF-8 text: {error.reason}") from error


def _split(passage: Passage) -> Iterator[Passage]:
    """The passage in pieces, if its text is long."""
    text = passage.text
    if len(text) <= PIECE:
        yield passage
        return
    parts = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
    yield from _pieces(parts, passage.before)


def _pieces(parts: Iterable[str], before: str) -> Iterator[Passage]:
    """A text that comes in parts, cut into passages after a line, or else before a space."""
    held: list[str] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        while size >= PIECE:
            text = "".join(held)
            end = text.rfind("\n", PIECE // 2, PIECE) + 1
            end = end or max(0, text.rfind(" ", PIECE // 2, PIECE)) or PIECE
            yield Passage(text[:end], before)
            before = text[max(0, end - CONTEXT) : end]
            held, size = [text[end:]], len(text) - end
    if size:
        yield Passage("".join(held), before)


def _encode(
    passages: Sequence[Passage], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    texts = [text for passage in passages for text in (passage.before, passage.text)]
    encodings = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
    for index, passage in enumerate(passages):
        before = encodings[2 * index].ids[-MAX_KEY:]
        ids = encodings[2 * index + 1].ids if passage.token_ids is None else passage.token_ids
        tokens = np.array([*before, *ids], np.int32)
        yield tokens, np.arange(len(tokens)) >= len(before)
