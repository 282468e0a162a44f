"""`outrider table`: build, look into, judge, merge and prune draft tables."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.checks import INT32_MAX
from outrider.cli import table_inputs as inputs
from outrider.cli.table_inputs import CorpusOptions, MaxBytes, MinCount, Model
from outrider.errors import TableError

if TYPE_CHECKING:
    from outrider.tables.build import BuiltTable, TableBuilder
    from outrider.tables.corpus import Corpus

TablePath = Annotated[Path, typer.Argument(metavar="TABLE", help="A draft table.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="The table to write.")]


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
        list[str],
        typer.Argument(
            metavar="CORPUS…",
            help="Text files, JSONL files, directories, answers of `generate --json`, or - for "
            "standard input.",
        ),
    ],
    output: Output,
    model: Model = None,
    key_lengths: Annotated[
        str,
        typer.Option(
            help="Tokens of the contexts, 1 to 6. Long ones are right more often, short ones "
            "answer more often; what adds nothing to a shorter one is left out anyway."
        ),
    ] = "1,2,3,4,5,6",
    min_count: Annotated[
        int, typer.Option(help="Leave out contexts seen less often.", min=1, max=INT32_MAX)
    ] = 1,
    ranks: Annotated[int, typer.Option(help="Most continuations of a context.", min=1, max=4)] = 3,
    max_bytes: MaxBytes = None,
    memory: Annotated[
        str, typer.Option(help="Memory of the whole process; beyond it, temporary files.")
    ] = "1G",
    temporary: Annotated[Path | None, typer.Option(help="Directory of temporary files.")] = None,
) -> None:
    """Build a table from a corpus."""
    from outrider.cli.console import messages
    from outrider.cli.table_show import left_out, many, size
    from outrider.tables.build import TableBuilder
    from outrider.tables.files import check_output, named
    from outrider.tables.records import Settings

    settings = Settings(inputs.key_lengths(key_lengths), min_count, num_ranks=ranks)
    most = _most(max_bytes)
    inputs.size_of("--memory", memory)
    source = files.corpus(corpus)
    paths = source.files(inputs.note)
    inputs.check_apart(output, paths, "--output")
    check_output(output)
    tokenizer = inputs.tokenizer_of(model)
    room = inputs.memory_room(memory)
    with TableBuilder(
        tokenizer.vocab_size, tokenizer.fingerprint, settings, room, temporary
    ) as builder:
        inputs.take_in(builder, paths, tokenizer)
        built = _finish(builder, output, _provenance(source, paths), most)
    messages().print(
        f"{named(output)}: {size(built.num_bytes)}, {many(built.num_contexts, 'context')} with "
        f"{many(built.num_slots, 'continuation')}, from {many(built.num_tokens, 'token')} of "
        f"{many(len(paths), 'file')}" + left_out(built.left_out),
        soft_wrap=True,
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
    from outrider.cli.table_show import print_header, print_samples
    from outrider.tables.format import Table

    if json_output and after:
        raise TableError("--json gives the header and --after shows drafts: give one of them")
    if not all(after or ()):
        raise TableError("--after must be a text of one token or more, got ''")
    opened = Table(path)
    if verify:
        opened.verify()
    if json_output:
        if model is not None:
            inputs.check_tokenizer(opened, inputs.tokenizer_of(model))
        header = opened.header | ({"verified": True} if verify else {})
        sys.stdout.write(json.dumps(header, indent=1) + "\n")
        return
    print_header(opened, verify)
    tokenizer = inputs.tokenizer_of(model)
    inputs.check_tokenizer(opened, tokenizer)
    print_samples(opened, tokenizer, after or [])


def coverage(
    files: CorpusOptions,
    tables: Annotated[
        list[Path], typer.Argument(metavar="TABLE…", help="Draft tables, at most a few.")
    ],
    on: Annotated[
        list[str],
        typer.Option(help="Held-out text, as for `build`; for several, once before each."),
    ],
    model: Model = None,
    tokens: Annotated[int, typer.Option(help="Draft tokens per step.", min=1, max=64)] = 8,
    branches: Annotated[
        int, typer.Option(help="Continuations of one context in a draft.", min=1, max=4)
    ] = 2,
    limit: Annotated[
        int, typer.Option(help="Most tokens of the text to look at.", min=1)
    ] = 200_000,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture (.png or .svg); needs matplotlib.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="The numbers as JSON.")] = False,
) -> None:
    """Judge tables on text that they were not built from, at this size and smaller ones."""
    from outrider.cli.table_show import print_coverage
    from outrider.tables import coverage as study
    from outrider.tables import plot as picture

    paths = files.corpus(on).files(inputs.note)
    if plot is not None:
        picture.check_plot(plot)
        inputs.check_apart(plot, [*paths, *tables], "--plot")
    tokenizer = inputs.tokenizer_of(model)
    opened = inputs.open_tables(tables, tokenizer)
    stream = inputs.read_stream(paths, tokenizer, limit)
    curves = {
        str(each.path): study.by_size(each, stream, tokens, branches)
        for each in inputs.with_progress(opened, "covering")
    }
    if json_output:
        rows = {name: [size.as_json() for size in sizes] for name, sizes in curves.items()}
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    else:
        for name, sizes in curves.items():
            print_coverage(name, sizes)
    if plot is not None:
        picture.plot(curves, plot)


def merge(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A draft table.")],
    second: Annotated[
        Path, typer.Argument(metavar="SECOND", help="Another one of the same tokenizer.")
    ],
    output: Output,
    max_bytes: MaxBytes = None,
    prefer_first: Annotated[
        bool,
        typer.Option("--prefer-first", help="Contexts that both have are the first one's alone."),
    ] = False,
) -> None:
    """Write one table with the contexts of two; counts add."""
    from outrider.cli.table_show import print_header
    from outrider.tables import edit
    from outrider.tables.files import check_output
    from outrider.tables.format import Table

    most = _most(max_bytes)
    check_output(output)
    opened = [Table(path) for path in (first, second)]
    edit.merge(opened[0], opened[1], output, _stamp(), most, prefer_first)
    print_header(Table(output), False)


def prune(
    path: TablePath, output: Output, max_bytes: MaxBytes = None, min_count: MinCount = None
) -> None:
    """Write a smaller table without what is worth least."""
    from outrider.cli.table_show import print_header
    from outrider.tables import edit
    from outrider.tables.files import check_output
    from outrider.tables.format import Table

    most = _most(max_bytes)
    if most is None and min_count is None:
        raise TableError("nothing to prune by: give --max-bytes, --min-count or both")
    if most is None and min_count == 1:
        raise TableError(
            "nothing to prune by: every context was seen once or more; give a --min-count of 2 or "
            "more, or --max-bytes"
        )
    check_output(output)
    edit.prune(Table(path), output, _stamp(), most, min_count or 1)
    print_header(Table(output), False)


def _finish(
    builder: "TableBuilder", output: Path, provenance: dict[str, Any], max_bytes: int | None
) -> "BuiltTable":
    with inputs.progress() as bar:
        task = bar.add_task("counting", total=1.0)
        return builder.finish(
            output,
            provenance,
            max_bytes,
            lambda what, share: bar.update(task, description=what, completed=share),
        )


def _most(max_bytes: str | None) -> int | None:
    return None if max_bytes is None else inputs.size_of("--max-bytes", max_bytes)


def _provenance(source: "Corpus", paths: list[Path]) -> dict[str, Any]:
    return _stamp() | {
        "data": [str(path) for path in source.paths],
        "files": len(paths),
        "bytes": inputs.num_bytes(paths),
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
