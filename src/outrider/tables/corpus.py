"""Texts to build a table from: files, JSONL records, directories, generated outputs.

    text files                   pieces of about PIECE characters, cut at a line break
    {"text": …}                  a text
    {"turns": […]}               each turn a text
    {"messages": […]}            what the assistant says, after the chat template; without one,
                                 every message a text
    {"prompt": …, "outputs": […]}   what `outrider generate --json` writes: the outputs' token ids

Only what a target would have to say is counted; what comes before it is context.
"""

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import PromptError, TableError
from outrider.tables.hashing import MAX_KEY
from outrider.tokenizer import Tokenizer

PIECE = 1 << 18  # characters
BATCH = 1 << 20  # characters tokenised together: an encoding takes 100 times its ids
CONTEXT = 64  # characters of a prompt that are enough for MAX_KEY tokens, special ones apart
TEXT_SUFFIXES = (
    *(".txt", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".jsonl", ".yaml", ".yml", ".toml"),
    *(".py", ".pyi", ".js", ".ts", ".jsx", ".tsx", ".java", ".kt", ".c", ".h", ".cc", ".cpp"),
    *(".hpp", ".cs", ".go", ".rs", ".rb", ".php", ".swift", ".scala", ".sh", ".sql", ".css"),
)


@dataclass(slots=True)
class Passage:
    """Something to count, and what came before it."""

    text: str = ""
    before: str = ""
    token_ids: Sequence[int] | None = None  # instead of the text


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files of a build.

    Args:
        paths: files and directories.
        suffixes: of the files taken from directories.
        excluded: names of directories and files that are left out below a directory.
    """

    paths: Sequence[Path]
    suffixes: Sequence[str] = TEXT_SUFFIXES
    excluded: Sequence[str] = ()

    def files(self) -> list[Path]:
        """All files, in an order that does not depend on the file system.

        Raises:
            TableError: a path is missing, or there is no file.
        """
        found: list[Path] = []
        for path in self.paths:
            if path.is_dir():
                found += self._below(path)
            elif path.exists():
                found.append(path)
            else:
                raise TableError(f"the corpus {path} does not exist")
        if not found:
            raise TableError(
                f"no file in {', '.join(map(str, self.paths))} ends in one of "
                f"{', '.join(self.suffixes)}"
            )
        return found

    def _below(self, directory: Path) -> list[Path]:
        names = set(self.excluded)
        return sorted(
            path
            for path in directory.rglob("*")
            if path.suffix in self.suffixes
            and path.is_file()
            and not names.intersection(path.relative_to(directory).parts)
        )


def read_passages(path: Path, tokenizer: Tokenizer) -> Iterator[Passage]:
    """What is in a file.

    Raises:
        TableError: it cannot be read, is not UTF-8, or a line is no record; with the line.
    """
    if path.suffix != ".jsonl":
        yield from (Passage(piece) for piece in _pieces(path))
        return
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield from _record(line, f"{path}:{number}", tokenizer)


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


def _pieces(path: Path) -> Iterator[str]:
    piece: list[str] = []
    size = 0
    for line in _lines(path):
        piece.append(line)
        size += len(line)
        if size >= PIECE:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def _lines(path: Path) -> Iterator[str]:
    """Lines of a file; one longer than PIECE bytes comes in parts, but not in JSONL."""
    limit = -1 if path.suffix == ".jsonl" else PIECE
    decoder = codecs.getincrementaldecoder("utf-8")()
    number = 1
    try:
        with path.open("rb") as file:
            while line := file.readline(limit):
                yield decoder.decode(line)
                number += line.endswith(b"\n")
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise TableError(f"{path}:{number} is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror or error}") from error


def _record(line: str, where: str, tokenizer: Tokenizer) -> Iterator[Passage]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise TableError(f"{where}: not valid JSON at column {error.colno}: {error.msg}") from error
    if not isinstance(entry, dict):
        raise TableError(f"{where}: expected a JSON object, got {line[:40]!r}")
    if isinstance(entry.get("outputs"), list):
        yield from (_output(entry, output, where, tokenizer) for output in entry["outputs"])
    elif isinstance(entry.get("text"), str):
        yield Passage(entry["text"])
    elif _is_list_of(entry.get("messages"), dict):
        yield from _conversation(entry["messages"], where, tokenizer)
    elif _is_list_of(entry.get("turns"), str):
        yield from (Passage(turn) for turn in entry["turns"])
    else:
        raise TableError(
            f"{where}: expected 'text', 'turns' (list of texts), 'messages' (list of objects) or "
            f"'outputs' (list of objects), got the keys {sorted(entry)}"
        )


def _output(entry: dict[str, Any], output: Any, where: str, tokenizer: Tokenizer) -> Passage:
    ids = output.get("token_ids") if isinstance(output, dict) else None
    if not _is_list_of(ids, int):
        raise TableError(f"{where}: each of 'outputs' needs 'token_ids', a list of integers")
    assert ids is not None
    text, mine = output.get("text"), tokenizer.decode(ids)
    # A stop string cuts the text and not always the ids, so only what both have is compared.
    if isinstance(text, str) and text[: len(mine)] != mine[: len(text)]:
        raise TableError(
            f"{where}: the token ids are not this tokenizer's: they read {mine[:40]!r}, "
            f"the text is {text[:40]!r}"
        )
    prompt = entry.get("prompt")
    return Passage(before=prompt[-CONTEXT:] if isinstance(prompt, str) else "", token_ids=ids)


def _conversation(
    messages: list[dict[str, Any]], where: str, tokenizer: Tokenizer
) -> Iterator[Passage]:
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise TableError(f"{where}: each message needs 'role' and 'content' as text")
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if tokenizer.chat_template is None or not spoken:
        yield from (Passage(message["content"]) for message in messages)
        return
    try:
        for i in spoken:
            before = tokenizer.chat(messages[:i]) if i else ""
            whole = tokenizer.chat(messages[: i + 1], add_generation_prompt=False)
            if whole.startswith(before):
                yield Passage(whole[len(before) :].rstrip(), before[-CONTEXT:])
            else:  # a template that rewrites what was said before
                yield Passage(messages[i]["content"], before[-CONTEXT:])
    except PromptError as error:
        raise TableError(f"{where}: {error}") from error


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)
