"""What the terminal shows of a bench: the verdicts, and the two tables that matter most."""

from textwrap import wrap
from typing import TYPE_CHECKING

from outrider.bench.sections import (
    Table,
    acceptance,
    busy,
    case_name,
    headline,
    kinds_of,
    number,
    ratio,
    row_name,
    times,
)
from outrider.bench.study import Study
from outrider.bench.timing import Spread

if TYPE_CHECKING:
    from rich.console import Console

HEADER_WIDTH = 8  # of "speed-up"; so that the tables fit in 80 columns

MOST_COLUMNS = 1000  # a table without borders is asked how wide it would like to be


def show(console: "Console", study: Study) -> None:
    """Print the most important numbers; the report has them all."""
    if study.label:
        console.print(study.label, style="bold yellow")
    console.print(headline(study), style="bold" if study.verdict.is_lossless else "bold red")
    show_table(console, _speeds(study))
    if not study.label:
        case = case_name(study.measurements[0])
        show_table(console, _kinds(study), f"one request, {case}, by kind of prompt")
    if study.contexts:
        show_table(console, _contexts(study), "one request, by length of the context")
    if study.has_several:
        tallies = study.verdict.sides.items()
        each = ", ".join(f"{name} {one.num_same} of {one.num_answers}" for name, one in tallies)
        console.print(f"answers that are the plain text: {each}")
    for one in study.measurements:
        loops = one.loops
        if loops.num_looping:
            console.print(
                f"{row_name(study, one)}: {loops.num_looping} of {loops.num_answers} answers end "
                f"in a loop ({loops.token_share:.0%} of the tokens, left out of decoding)"
            )
    for one in study.verdict.differences:
        console.print(
            f"prompt {one['prompt']}, {one['side']}, batch {one['batch']}: differs at token "
            f"{one['position']}, after …{one['context']!r}: plain {one['plain_token']!r}, "
            f"here {one['other_token']!r}"
        )

    for note in [*study.workload["notes"], *busy(study.provenance)]:
        console.print(f"· {note}")


def show_table(console: "Console", table: Table, title: str = "") -> None:
    """One table; headers break at spaces so that it stays narrow.

    Where even that is wider than the terminal, every row becomes a list: cut figures are wrong.
    """
    from rich.measure import Measurement as Width
    from rich.table import Table as RichTable

    shown = RichTable(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
    )
    for index, name in enumerate(table.header):
        justify = "left" if index == 0 else "right"
        lines = wrap(name, HEADER_WIDTH, break_on_hyphens=False) if index else [name]
        header = "\n".join(lines)
        shown.add_column(header, justify=justify, vertical="bottom", no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    console.print()
    if (
        Width.get(console, console.options.update(max_width=MOST_COLUMNS), shown).maximum
        > console.width
    ):
        _show_list(console, table, title)
    else:
        console.print(shown)


def _show_list(console: "Console", table: Table, title: str) -> None:
    if title:
        console.print(title, style="bold")
    first, *names = table.header
    for row in table.rows:
        console.print(" ".join(filter(None, (row[0], first))), style="bold")
        for name, cell in zip(names, row[1:], strict=True):
            if cell:
                console.print(f"  {name.replace('/ ', '/')}: {cell}")


def _speeds(study: Study) -> Table:
    """Names of configs take the room of the last column."""
    header = ["", "plain tok/s", "spec. tok/s", "speed-up", "decode", "tokens/ forward", "first ms"]
    rows = [
        [
            row_name(study, one),
            f"{one.plain.tokens_per_second.median:.0f}",
            f"{one.speculative.tokens_per_second.median:.0f}",
            ratio(one.speedup),
            times(one.decode_speedup),
            number(one.acceptance_length),
            f"{1e3 * one.speculative.first_token_seconds.median:.0f}",
        ]
        for one in study.measurements
    ]
    end = -1 if study.has_several else None
    return Table(header[:end], [row[:end] for row in rows])


def _contexts(study: Study) -> Table:
    header = ["tokens", "plain tok/s", "spec. tok/s", "decode", "tokens/ forward", "first ms"]
    rows = [
        [
            row_name(study, one, str(one.context_tokens)),
            _median(one.plain.decode_tokens_per_second),
            _median(one.speculative.decode_tokens_per_second),
            ratio(one.decode_speedup),
            number(one.acceptance_length),
            f"{1e3 * one.speculative.first_token_seconds.median:.0f}",
        ]
        for one in study.contexts
    ]
    return Table(header, rows)


def _kinds(study: Study) -> Table:
    """Of several configs the length of their acceptance tells most; its interval needs the room."""
    header = ["", "prompts", "plain tok/s", "spec. tok/s", "decode", "tokens/ forward", "kept"]
    rows = [
        [
            row_name(study, one, kind.category),
            str(kind.num_prompts),
            _median(kind.plain),
            _median(kind.speculative),
            times(kind.speedup) if study.has_several else ratio(kind.speedup),
            acceptance(kind) if study.has_several else number(kind.acceptance_length),
            number(kind.draft_acceptance_rate, "{:.0%}"),
        ]
        for one, kind in kinds_of(study.cases(study.measurements)[0])
    ]
    return Table(header, rows)


def _median(value: Spread | None) -> str:
    return number(value and value.median, "{:.0f}")
