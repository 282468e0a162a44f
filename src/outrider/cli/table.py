"""`outrider table`: build, look into, judge, merge and prune draft tables."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.errors import TableError

if TYPE_CHECKING:
    from outrider.tables.build import BuiltTable, TableBuilder
    from outrider.tables.corpus import Corpus
    from outrider.tables.coverage import Coverage
    from outrider.tables.format import Table
    from outrider.tables.replay import Stream
    from outrider.tokenizer import Tokenizer

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
TOKENIZER_HELP = "Model whose tokenizer the table is for. Default: the default target."
NUM_SAMPLES, SAMPLE_TOKENS = 8, 12

TablePath = Annotated[Path, typer.Argument(metavar="TABLE")]
Output = Annotated[Path, typer.Option("-o", "--output", help="The table to write.")]
Model = Annotated[str | None, typer.Option("--model", "-m", help=TOKENIZER_HELP)]
MaxBytes = Annotated[
    str | None,
    typer.Option(help="Size of the table, as 15M; what is worth least is left out."),
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
        typer.Option(help="Name of directories and files to leave out."),
    ] = None

    def corpus(self, paths: list[Path]) -> "Corpus":
        from outrider.tables.corpus import TEXT_SUFFIXES, Corpus

        return Corpus(paths, self.suffix or TEXT_SUFFIXES, self.exclude or ())


def table(context: typer.Context) -> None:
    """Draft tables: continuations of text of a kind, for use as a draft source.

    Build one from your own corpus, see what it covers, and draft from it with
    --speculative-config '{"method": "table", "path": "FILE"}'.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def build(
    files: CorpusOptions,
    corpus: Annotated[
        list[Path],
        typer.Argument(
            help="Text files, JSONL files, directories, or answers of `generate --json`."
        ),
    ],
    output: Output,
    model: Model = None,
    key_lengths: Annotated[
        str, typer.Option(help="Tokens of the contexts, at most 6.")
    ] = "1,2,3,4,5,6",
    min_count: Annotated[int, typer.Option(help="Leave out contexts seen less often.", min=1)] = 1,
    ranks: Annotated[int, typer.Option(help="Most continuations of a context.", min=1, max=4)] = 3,
    max_bytes: MaxBytes = None,
    memory: Annotated[
        str, typer.Option(help="Memory of the whole process; beyond it, temporary files.")
    ] = "1G",
    temporary: Annotated[Path | None, typer.Option(help="Directory of temporary files.")] = None,
) -> None:
    """Build a table from a corpus."""
    from outrider.cli.console import messages
    from outrider.tables.build import TableBuilder
    from outrider.tables.records import Settings

    settings = Settings(_key_lengths(key_lengths), min_count, num_ranks=ranks)
    most, most_memory = _bytes(max_bytes), _bytes(memory)
    assert most_memory is not None
    source = files.corpus(corpus)
    paths = source.files()
    tokenizer = _tokenizer(model)
    room = _room(most_memory)
    with TableBuilder(
        tokenizer.vocab_size, tokenizer.fingerprint, settings, room, temporary
    ) as builder:
        _take_in(builder, paths, tokenizer)
        built = _finish(builder, output, _provenance(source, paths), most)
    messages().print(
        f"{output}: {built.num_bytes / 1e6:.1f} MB, {built.num_contexts} contexts with "
        f"{built.num_slots} continuations, from {built.num_tokens} tokens of {len(paths)} files"
    )


def inspect(
    path: TablePath,
    model: Model = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check all of it.")] = False,
    after: Annotated[
        list[str] | None, typer.Option(help="Show what it would draft after this text.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="The header as JSON.")] = False,
) -> None:
    """Show what a table is, where it is from, and some of what is in it."""
    from outrider.tables.format import Table

    opened = Table(path)
    if verify:
        opened.verify()
    if json_output:
        sys.stdout.write(json.dumps(opened.header, indent=1) + "\n")
        return
    _print_header(opened, verify)
    tokenizer = _tokenizer(model)
    _check_tokenizer(opened, tokenizer)
    _print_samples(opened, tokenizer, after or [])


def coverage(
    files: CorpusOptions,
    tables: Annotated[list[Path], typer.Argument(metavar="TABLE…")],
    on: Annotated[list[Path], typer.Option(help="Held-out text, as for `build`.")],
    model: Model = None,
    tokens: Annotated[int, typer.Option(help="Draft tokens per step.", min=1, max=64)] = 8,
    branches: Annotated[
        int, typer.Option(help="Continuations of one context in a draft.", min=1, max=4)
    ] = 1,
    limit: Annotated[
        int, typer.Option(help="Most tokens of the text to look at.", min=1)
    ] = 200_000,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture (.png or .svg); needs matplotlib.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="The numbers as JSON.")] = False,
) -> None:
    """Judge tables on text that they were not built from, at this size and smaller ones."""
    from outrider.tables import coverage as study
    from outrider.tables.format import Table

    tokenizer = _tokenizer(model)
    opened = [Table(path) for path in tables]
    for each in opened:
        _check_tokenizer(each, tokenizer)
    stream = _stream(files.corpus(on).files(), tokenizer, limit)
    curves = {
        str(each.path): study.by_size(each, stream, tokens, branches)
        for each in _with_progress(opened, "covering")
    }
    if plot is not None:
        study.plot(curves, plot)
    if json_output:
        rows = {name: [size.as_json() for size in sizes] for name, sizes in curves.items()}
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    for name, sizes in curves.items():
        _print_coverage(name, sizes)


def merge(
    first: TablePath,
    second: TablePath,
    output: Output,
    max_bytes: MaxBytes = None,
    prefer_first: Annotated[
        bool,
        typer.Option("--prefer-first", help="Contexts that both have are the first one's alone."),
    ] = False,
) -> None:
    """Write one table with the contexts of two; counts add."""
    from outrider.tables import edit
    from outrider.tables.format import Table

    opened = [Table(path) for path in (first, second)]
    provenance = _stamp() | {"merged": [each.provenance for each in opened]}
    edit.merge(opened[0], opened[1], output, provenance, _bytes(max_bytes), prefer_first)
    _print_header(Table(output), False)


def prune(
    path: TablePath,
    output: Output,
    max_bytes: MaxBytes = None,
    min_count: Annotated[int, typer.Option(help="Leave out contexts seen less often.", min=1)] = 1,
) -> None:
    """Write a smaller table without what is worth least."""
    from outrider.tables import edit
    from outrider.tables.format import Table

    if max_bytes is None and min_count == 1:
        raise TableError("nothing to prune by: give --max-bytes, --min-count or both")
    opened = Table(path)
    provenance = _stamp() | {"pruned": opened.provenance}
    edit.prune(opened, output, provenance, _bytes(max_bytes), min_count)
    _print_header(Table(output), False)


def _take_in(builder: "TableBuilder", paths: list[Path], tokenizer: "Tokenizer") -> None:
    from outrider.tables.corpus import read_passages, tokenised

    with _progress() as bar:
        task = bar.add_task("reading", total=sum(path.stat().st_size for path in paths))

        def passages() -> Iterator[Any]:
            for path in paths:
                yield from read_passages(path, tokenizer)
                bar.advance(task, path.stat().st_size)

        for token_ids, counted in tokenised(passages(), tokenizer):
            builder.add(token_ids, counted)


def _finish(
    builder: "TableBuilder", output: Path, provenance: dict[str, Any], max_bytes: int | None
) -> "BuiltTable":
    with _progress() as bar:
        task = bar.add_task("counting", total=1.0)
        return builder.finish(
            output,
            provenance,
            max_bytes,
            lambda what, share: bar.update(task, description=what, completed=share),
        )


def _stream(paths: list[Path], tokenizer: "Tokenizer", limit: int) -> "Stream":
    import numpy as np

    from outrider.tables.corpus import read_passages, tokenised
    from outrider.tables.replay import Stream

    tokens, counted, total = [], [], 0
    passages = (passage for path in paths for passage in read_passages(path, tokenizer))
    for token_ids, mask in tokenised(passages, tokenizer):
        tokens += [token_ids, np.array([-1], np.int32)]
        counted += [mask.astype(np.uint8), np.zeros(1, np.uint8)]
        total += int(mask.sum())
        if total >= limit:
            break
    if not total:
        raise TableError(f"the held-out text {', '.join(map(str, paths))} holds no tokens")
    return Stream(np.concatenate(tokens), np.concatenate(counted))


def _print_header(opened: "Table", verified: bool) -> None:
    from outrider.cli.console import output
    from outrider.tables.hashing import BUCKET_BYTES

    header, layout, console = opened.header, opened.contents.layout, output()
    console.print(
        f"{opened.path}: {opened.num_bytes / 1e6:.2f} MB, {header['num_contexts']} contexts, "
        f"{header['num_slots']} continuations" + (", checked from end to end" if verified else "")
    )
    hot, cold = (region.num_buckets * BUCKET_BYTES / 1e6 for region in layout.regions)
    lengths = ", ".join(map(str, layout.key_lengths))
    console.print(f"tokenizer {opened.fingerprint}, {opened.vocab_size} ids")
    console.print(
        f"keys of {lengths} tokens · filter {layout.filter_bytes / 1e6:.2f} MB · entries used most "
        f"{hot:.2f} MB, others {cold:.2f} MB"
    )
    by_length = header.get("contexts_by_length", {})
    if by_length:
        parts = (f"{length}: {count}" for length, count in by_length.items())
        console.print(f"contexts by length  {'  '.join(parts)}")
    console.print(json.dumps(opened.provenance, indent=1, ensure_ascii=False), style="dim")


def _print_samples(opened: "Table", tokenizer: "Tokenizer", after: list[str]) -> None:
    from rich.table import Table as Grid

    from outrider.cli.console import output
    from outrider.tables.samples import continuation, frequent_starts

    starts = [tokenizer.encode(text, add_special_tokens=False) for text in after]
    starts = starts or [[token] for token in frequent_starts(opened, NUM_SAMPLES)]
    grid = Grid("after", "drafts", "survival")
    for start in starts:
        ids, survival = continuation(opened, start, SAMPLE_TOKENS)
        grid.add_row(repr(tokenizer.decode(start, False)), repr(tokenizer.decode(ids, False)),
                     " ".join(f"{chance:.2f}" for chance in survival))  # fmt: skip
    output().print(grid)


def _print_coverage(name: str, sizes: "list[Coverage]") -> None:
    from rich.table import Table as Grid

    from outrider.cli.console import output
    from outrider.tables.coverage import recommended

    by_key = Grid("key", "answers", "first token right", "accepted", "expected", title=name)
    for key in sizes[0].keys:
        by_key.add_row(
            f"{key.key_length} tokens", f"{key.hit_rate:.1%}", f"{key.first_accepted:.1%}",
            f"{key.accepted_tokens:.2f}", f"{key.expected_tokens:.2f}",
        )  # fmt: skip
    best = recommended(sizes)
    by_size = Grid("size", "contexts", "places with a draft", "tokens per step", "")
    for size in sizes:
        by_size.add_row(
            f"{size.num_bytes / 1e6:.2f} MB", str(size.num_contexts), f"{size.hit_rate:.1%}",
            f"{size.acceptance_length:.3f}", "recommended" if size is best else "",
        )  # fmt: skip
    output().print(by_key)
    output().print(by_size)


def _tokenizer(model: str | None) -> "Tokenizer":
    from outrider.cli.progress import start_up

    with start_up():
        from outrider.target.load import load_model

        tokenizer = load_model(model).tokenizer
    if tokenizer is None:
        raise TableError(f"the model {model} has no tokenizer to build a table with")
    return tokenizer


def _check_tokenizer(opened: "Table", tokenizer: "Tokenizer") -> None:
    if opened.fingerprint != tokenizer.fingerprint:
        raise TableError(
            f"the table {opened.path} was made for the tokenizer {opened.fingerprint}, this is "
            f"{tokenizer.fingerprint}: name the model it is for with --model"
        )


def _provenance(source: "Corpus", paths: list[Path]) -> dict[str, Any]:
    return _stamp() | {
        "data": [str(path) for path in source.paths],
        "files": len(paths),
        "bytes": sum(path.stat().st_size for path in paths),
    }


def _stamp() -> dict[str, Any]:
    """Command, versions and date; nothing here is random, so there is no seed."""
    from datetime import UTC, datetime
    from importlib.metadata import version

    from outrider import __version__

    versions = {name: version(name) for name in ("numpy", "tokenizers")}
    return {
        "command": " ".join(["outrider", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"outrider": __version__} | versions,
    }


def _key_lengths(text: str) -> tuple[int, ...]:
    from outrider.tables.hashing import MAX_KEY

    parts = text.split(",")
    lengths = {int(part) for part in parts if part.strip().isdigit()}
    if len(lengths) < len(parts) or not all(1 <= length <= MAX_KEY for length in lengths):
        raise TableError(
            f"--key-lengths must be different numbers from 1 to {MAX_KEY}, as 1,2,4, got {text!r}"
        )
    return tuple(sorted(lengths))


def _bytes(text: str | None) -> int | None:
    """Bytes of a size such as 15M, 1G or 4096."""
    if text is None:
        return None
    number, unit = text.rstrip("KMGkmg"), text[len(text.rstrip("KMGkmg")) :].upper()
    if unit not in UNITS or not number.replace(".", "", 1).isdigit():
        raise TableError(f"a size must be a number with K, M or G behind it, got {text!r}")
    return int(float(number) * UNITS[unit])


def _room(most: int) -> int:
    """What a build may take of `most` bytes of memory, beside what the process has already."""
    from outrider.tables.build import MIN_MEMORY

    own = _resident_bytes()
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


def _with_progress(items: list[Any], what: str) -> Iterator[Any]:
    with _progress() as bar:
        yield from bar.track(items, description=what)


@contextmanager
def _progress() -> Iterator[Any]:
    from rich.progress import Progress, TimeElapsedColumn

    from outrider.cli.console import messages

    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=messages(), transient=True) as bar:
        yield bar
