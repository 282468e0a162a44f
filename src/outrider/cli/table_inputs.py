"""What `outrider table` is given: corpora, sizes, tokenizers; and taking texts in."""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.checks import INT32_MAX, shown
from outrider.errors import TableError

if TYPE_CHECKING:
    from outrider.tables.build import TableBuilder
    from outrider.tables.corpus import Corpus
    from outrider.tables.format import Table
    from outrider.tables.replay import Stream
    from outrider.tokenizer import Tokenizer

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMGT]?)", re.IGNORECASE)
LARGEST = 1 << 50  # bytes, of any option
NUMBER = re.compile(r" *[0-9]{1,3} *")
TOKENIZER_HELP = "Model whose tokenizer the table is for. Default: the default target."
AHEAD = 64  # tokens kept behind the last place that is judged: no draft is longer
STEP = 1 << 20  # bytes between two moves of a bar

Model = Annotated[str | None, typer.Option("--model", "-m", help=TOKENIZER_HELP)]
MinCount = Annotated[
    int | None,
    typer.Option(help="Leave out contexts seen less often.", min=1, max=INT32_MAX),
]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        help="Size of the table, as 15M; what is worth least is left out. K, M, G and T are "
        "powers of 1024."
    ),
]


@dataclass(slots=True)
class CorpusOptions:
    """What to read of directories."""

    suffix: Annotated[
        list[str] | None,
        typer.Option(help="Suffix of files to take from directories; default: common text files."),
    ] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of directories and files to leave out of directories, or a pattern such "
            "as 'test_*'."
        ),
    ] = None

    def corpus(self, paths: Sequence[str]) -> "Corpus":
        from outrider.tables.corpus import TEXT_SUFFIXES, Corpus

        return Corpus(paths, self.suffix or TEXT_SUFFIXES, self.exclude or ())


def note(text: str) -> None:
    """A sentence on stderr about what the user may not expect."""
    sys.stderr.write(f"note: {text}\n")


def tokenizer_of(model: str | None) -> "Tokenizer":
    from outrider.cli.progress import start_up

    with start_up():
        from outrider.target.load import load_model

        tokenizer = load_model(model).tokenizer
    if tokenizer is None:
        raise TableError(f"the model {model} has no tokenizer to build a table with")
    return tokenizer


def check_tokenizer(opened: "Table", tokenizer: "Tokenizer") -> None:
    """Refuse a table of another tokenizer."""
    if opened.fingerprint != tokenizer.fingerprint:
        raise TableError(
            f"the table {opened.path} was made for the tokenizer {opened.fingerprint}, this is "
            f"{tokenizer.fingerprint}: name the model it is for with --model"
        )


def check_apart(output: Path, inputs: Iterable[Path], option: str) -> None:
    """Refuse to write over what is read.

    Raises:
        TableError: the output is one of the inputs, by whatever name.
    """
    from outrider.tables.files import named

    for path in inputs:
        with suppress(OSError):  # one of them is not there
            if output.samefile(path):
                raise TableError(
                    f"{option} {named(output)} is one of the inputs, {named(path)}: give another "
                    "name"
                )


def open_tables(paths: Sequence[Path], tokenizer: "Tokenizer") -> "list[Table]":
    """Tables of this tokenizer, each once."""
    from outrider.tables.files import MAGIC, named, open_regular
    from outrider.tables.format import Table

    opened: dict[Path, Table] = {}
    for path in paths:
        with open_regular(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise TableError(
                    f"{named(path)} is not a draft table; to judge tables on several texts, "
                    "give each its own --on"
                )
        if path.resolve() in opened:
            note(f"{named(path)} is given twice and judged once")
            continue
        opened[path.resolve()] = Table(path)
        check_tokenizer(opened[path.resolve()], tokenizer)
    return list(opened.values())


def take_in(builder: "TableBuilder", paths: Sequence[Path], tokenizer: "Tokenizer") -> None:
    """Give a builder everything in these files."""
    from outrider.tables.corpus import read_passages, tokenised

    with progress() as bar:
        task = bar.add_task("reading", total=num_bytes(paths) or None)
        unseen = 0

        def seen(count: int) -> None:
            nonlocal unseen
            unseen += count
            if unseen >= STEP:
                bar.advance(task, unseen)
                unseen = 0

        passages = (found for path in paths for found in read_passages(path, tokenizer, seen))
        for token_ids, counted in tokenised(passages, tokenizer):
            builder.add(token_ids, counted)


def num_bytes(paths: Sequence[Path]) -> int:
    """Bytes of these files, without standard input."""
    return sum(path.stat().st_size for path in paths if path != Path("-"))


def read_stream(paths: Sequence[Path], tokenizer: "Tokenizer", limit: int) -> "Stream":
    """Texts to judge tables on, the first `limit` tokens counted."""
    import numpy as np

    from outrider.tables.corpus import read_passages, tokenised
    from outrider.tables.replay import Stream

    tokens, counted, total = [], [], 0
    passages = (passage for path in paths for passage in read_passages(path, tokenizer))
    for token_ids, mask in tokenised(passages, tokenizer):
        places = np.flatnonzero(mask)[: limit - total]
        total += len(places)
        end = len(mask)
        if total == limit:  # what follows is only there to judge the last drafts by
            end = min(end, int(places[-1]) + 1 + AHEAD)
            mask = mask & (np.arange(len(mask)) <= places[-1])
        tokens += [token_ids[:end], np.array([-1], np.int32)]
        counted += [mask[:end].astype(np.uint8), np.zeros(1, np.uint8)]
        if total == limit:
            break
    if not total:
        raise TableError(f"the held-out text {', '.join(map(str, paths))} holds no tokens")
    return Stream(np.concatenate(tokens), np.concatenate(counted))


def key_lengths(text: str) -> tuple[int, ...]:
    """Lengths such as 1,2,4, ascending."""
    from outrider.tables.hashing import MAX_KEY

    parts = text.split(",")
    lengths = {int(part) for part in parts if NUMBER.fullmatch(part)}
    if len(lengths) < len(parts) or not all(1 <= length <= MAX_KEY for length in lengths):
        raise TableError(
            f"--key-lengths must be different numbers from 1 to {MAX_KEY}, as 1,2,4, got "
            f"{shown(text)}"
        )
    return tuple(sorted(lengths))


def size_of(option: str, text: str) -> int:
    """Bytes of a size such as 15M, 1.5G or 4096."""
    found = SIZE.fullmatch(text)
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if not 0 < size <= LARGEST:
        raise TableError(
            f"{option} must be a number of bytes, or one with K, M, G or T behind it (powers of "
            f"1024) of at most {LARGEST // UNITS['T']}T, got {shown(text)}"
        )
    return size


def memory_room(option: str) -> int:
    """What a build may take of --memory beside what the process has already."""
    from outrider.tables.build import MIN_MEMORY

    most, own = size_of("--memory", option), _resident_bytes()
    if most - own < MIN_MEMORY:
        least, given = (math.ceil(size / UNITS["M"]) for size in (own + MIN_MEMORY, most))
        raise TableError(
            f"--memory must be at least {least}M (the program takes {own // UNITS['M']}M, a build "
            f"{MIN_MEMORY // UNITS['M']}M), got {given}M"
        )
    return most - own


def _resident_bytes() -> int:
    """Memory that this process has now, 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * 4096


def with_progress(items: Sequence[Any], what: str) -> Iterator[Any]:
    with progress() as bar:
        yield from bar.track(items, description=what)


@contextmanager
def progress() -> Iterator[Any]:
    """Bars on a terminal, nothing elsewhere."""
    from rich.progress import Progress, TimeElapsedColumn

    from outrider.cli.console import messages

    console = messages()
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield bar
